"""The ways in which KV gets from the worker that prefills to the one that decodes."""

from collections.abc import Sequence
from typing import Protocol

from llmrt.kvtransfer.arena import Arena
from llmrt.wire.errors import ConfigError
from llmrt.wire.ids import BlockId, LeaseId
from llmrt.wire.messages import ProcessName

SHM = "shm"
"""Same memory: the prefill worker writes into the decode worker's arena, under a grant."""

TCP = "tcp"
"""Other memory: the decode worker reads the prefill worker's arena, under a lease."""

AUTO = "auto"


class BlockSource(Protocol):
    """A peer's arena that is not mapped here, to read blocks from."""

    async def read(
        self,
        lease: LeaseId,
        generation: int,
        src_blocks: Sequence[BlockId],
        dst_arena: Arena,
        dst_blocks: Sequence[BlockId],
        *,
        timeout_s: float,
    ) -> None:
        """Copy blocks from the peer's arena into ours.

        Returns when all bytes are there and the lease held throughout. Raises `TransferFailed`
        otherwise. Either way, and when cancelled, nothing writes to `dst_blocks` afterwards.
        """
        ...


def is_same_host(ours: ProcessName, theirs: ProcessName) -> bool:
    """Whether the two can share memory and see each other die.

    One boot of one kernel, and one pid namespace: the death of a writer is confirmed by its pid.
    """
    return (ours.boot_id, ours.pid_namespace) == (theirs.boot_id, theirs.pid_namespace)


def choose_transport(mode: str, same_host: bool) -> str:
    """`shm` or `tcp` for a pair of workers; `mode` is the setting `transfer` of one of them.

    Raises `ConfigError` if the mode is unknown, or cannot work for the pair.
    """
    if mode == AUTO:
        return SHM if same_host else TCP
    if mode == SHM and not same_host:
        raise ConfigError(
            "transfer is shm, but the peer runs on another host or in another pid namespace: "
            "set transfer to auto or tcp"
        )
    if mode not in (SHM, TCP):
        raise ConfigError(f"transfer is {mode!r}: auto, shm or tcp is allowed")
    return mode
