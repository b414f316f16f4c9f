"""What we use of NIXL, with types; host memory over its UCX backend.

The library is loaded only by the processes of `nixl_process.py`. It ends its process when a peer
dies at a bad moment (UCX 1.21: "Fatal: unexpected error: Endpoint timeout" in one that serves over
TCP, an assertion in one that closes a failed endpoint), and releasing a transfer does not end it:
bytes come afterwards (NIXL 1.5.1, pull request 2044 there). The end of the process ends it.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from llmrt.kvtransfer.nixl_frames import ArenaAddress

# The package `nixl` imports torch to choose between the two, a second for nothing: for host memory
# they are the same.
_PACKAGES = ("nixl_cu12", "nixl_cu13")
# Without RDMA it would take TCP, a hundred times slower and without a word. UCX_TLS overrules it.
_UCX_CONFIG = {"engine_config": "TLS=^tcp"}
_DEVICES = Path("/sys/class/infiniband")

Indices = np.ndarray[Any, np.dtype[np.int32]]


def why_not() -> str | None:
    """Why NIXL cannot be used here; None if it can be tried.

    Who names UCX's transports in the environment (UCX_TLS) needs no RDMA device.
    """
    if not is_installed():
        return "NIXL is not installed (the extra `rdma`)"
    if "UCX_TLS" not in os.environ and not (_DEVICES.is_dir() and any(_DEVICES.iterdir())):
        return f"there is no RDMA device in {_DEVICES}"
    return None


def is_installed() -> bool:
    return any(importlib.util.find_spec(name) for name in _PACKAGES)


class NixlAgent:
    """One agent, with one arena registered. Not thread-safe.

    Every method may raise what NIXL raises, which has no common class; the process is of no use
    after that.
    """

    def __init__(self, name: str, buffer: memoryview, block_bytes: int) -> None:
        """`buffer` must stay mapped. Takes 0.5 s, and more where registering pins the pages."""
        api = load_api()
        # Its progress thread would spin: one core per agent, idle or not.
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = api.nixl_agent(name, config)
        self._agent.create_backend("UCX", _UCX_CONFIG)
        self.base = np.frombuffer(buffer, np.uint8).ctypes.data
        self._blocks = (len(buffer) // block_bytes, block_bytes)
        self._agent.register_memory([(self.base, len(buffer), 0, "")], "DRAM")

    def metadata(self) -> bytes:
        """What a peer's `connect` wants: our addresses and the keys of our memory."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def connect(self, peer: ArenaAddress) -> None:
        """Prepare a descriptor per block of both arenas, so that a read is two lists of indices."""
        remote = self._agent.add_remote_agent(peer.metadata)
        self._local_blocks = self._prepare("NIXL_INIT_AGENT", self.base, *self._blocks)
        self._remote_blocks = self._prepare(remote, peer.base, peer.num_blocks, peer.block_bytes)

    def read(
        self, source: Indices, target: Indices, notice: bytes, pause: Callable[[], None]
    ) -> bool:
        """Copy blocks, then tell the peer. False if it failed. Calls `pause` between polls."""
        handle = self._agent.make_prepped_xfer(
            "READ", self._local_blocks, target, self._remote_blocks, source, notice
        )
        state = self._agent.transfer(handle)
        while state == "PROC":
            pause()
            state = self._agent.check_xfer_state(handle)
        if state == "DONE":
            self._agent.release_xfer_handle(handle)
        return bool(state == "DONE")

    def notices(self) -> list[bytes]:
        """What peers sent since the last call. Nothing else moves what they read over TCP."""
        received: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return [notice for notices in received.values() for notice in notices]

    def _prepare(self, agent: str, base: int, num_blocks: int, block_bytes: int) -> Any:
        descriptors = np.zeros((num_blocks, 3), np.uint64)  # address, length, device
        descriptors[:, 0] = base + np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
        descriptors[:, 1] = block_bytes
        return self._agent.prep_xfer_dlist(agent, descriptors, "DRAM")


def load_api() -> Any:
    for name in _PACKAGES:
        if importlib.util.find_spec(name):
            return importlib.import_module(f"{name}._api")
    raise ImportError("NIXL is not installed")
