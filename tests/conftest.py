"""What all tests share: the model file, and a check that integration tests leave nothing behind."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from llmrt.kernels.cpu import library
from llmrt.simulation.content import CONTRACT
from llmrt.wire.kv import KvContract

ROOT = Path(__file__).parents[1]
_GONE_S = 10.0


# A shell starts what runs in its background with Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def make_contract(**changes: Any) -> KvContract:
    """The contract of two workers that fit each other, but for `changes`."""
    return msgspec.structs.replace(CONTRACT, **changes)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as GGUF: `LLMRT_TEST_MODEL`, else fetched once."""
    given = os.environ.get("LLMRT_TEST_MODEL")
    if given:
        return Path(given)
    fetch = [sys.executable, str(ROOT / "scripts/fetch_model")]
    done = subprocess.run(fetch, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where no compiler was: the compiled step is not there."""
    monkeypatch.setattr(library, "PATH", Path("/none/libllmrt_cpu.so"))
    library.library.cache_clear()
    yield
    library.library.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def _own_runtime_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers of these tests meet where those of other runs on this machine do not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("xdg")))
        yield


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """An integration test leaves no process, shared memory, socket file or descriptor behind."""
    if request.node.get_closest_marker("integration") is None:
        yield
        return
    before = _Belongings()
    yield
    _gone, alive = psutil.wait_procs(before.new_children(), timeout=_GONE_S)
    assert not alive, f"left running: {alive}"
    gc.collect()
    now = _Belongings()
    assert not now.files - before.files
    # The first use of a loop, a context or a thread pool may keep a few for the whole process.
    assert now.num_fds - before.num_fds < 8


class _Belongings:
    """What this process and its children hold on to outside of its memory."""

    def __init__(self) -> None:
        self._children = set(psutil.Process().children(recursive=True))
        self.files = set(_abandoned_files())
        self.num_fds = len(os.listdir("/proc/self/fd"))

    def new_children(self) -> list[psutil.Process]:
        return [
            child
            for child in psutil.Process().children(recursive=True)
            if child not in self._children and not self._is_parent_of(child)
        ]

    def _is_parent_of(self, child: psutil.Process) -> bool:
        """A cluster of the whole session that starts a worker again answers for it itself."""
        try:
            return child.parent() in self._children
        except psutil.NoSuchProcess:
            return True


def _abandoned_files() -> Iterator[Path]:
    """Our shared memory, and what dead workers left in the folder where workers meet.

    A test that kills a worker gives it a folder of its own.
    """
    yield from Path("/dev/shm").glob("llmrt*")
    for path in (Path(os.environ["XDG_RUNTIME_DIR"]) / "llmrt").glob("*.*.*"):
        pid = path.name.split(".")[-2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            yield path
