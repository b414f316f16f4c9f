"""The barrier of the compiled step's threads, with threads that come late."""

import shutil
import subprocess
from pathlib import Path

import pytest

from llmrt.kernels.cpu import library as c

SOURCES = Path(c.__file__).parent
LATE_MS = 400


@pytest.fixture(scope="module")
def barrier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver over the pool's source: what it exports stays inside the library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "this test needs a C compiler: apt install gcc"
    program = tmp_path_factory.mktemp("pool") / "barrier"
    files = (Path(__file__).parent / "families" / "barrier.c", SOURCES / "pool.c")
    flags = ("-O2", "-std=c11", "-pthread", f"-I{SOURCES}")
    subprocess.run([compiler, *flags, *files, "-o", program], check=True)
    return program


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_nobody_passes_a_barrier_early_or_sleeps_forever(barrier: Path, threads: int) -> None:
    """8 barriers a round; a sixteenth of the comings are late, some for longer than others spin."""
    command = [str(barrier), str(threads), "50", "0"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def test_a_thread_that_waits_for_a_stopped_one_takes_no_core(barrier: Path) -> None:
    """It would burn as much time as the other is stopped for; allowed is a quarter."""
    command = [str(barrier), "2", "0", str(LATE_MS)]
    result = subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert int(result.stdout) < LATE_MS * 1000 / 4
