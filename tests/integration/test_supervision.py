"""`llmrt up` takes everything along, whenever and however it is ended."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.integration.conftest import EXACT
from tests.integration.probes import wait_until

from llmrt.actor.sockets import check_free
from llmrt.client import Client
from llmrt.wire.errors import LlmrtError

pytestmark = pytest.mark.integration

GONE_S = 5.0


def processes_of(folder: Path) -> list[psutil.Process]:
    """All that were started with this runtime folder, whoever their parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def are_free(*endpoints: str) -> bool:
    try:
        return [check_free(endpoint) for endpoint in endpoints] == [*endpoints]
    except LlmrtError:
        return False


def test_a_stop_at_any_moment_of_the_start_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """Then a start on the same ports works at once."""
    tmp_path.chmod(0o700)
    ends = [check_free("tcp://127.0.0.1:*") for _ in range(2)]
    argv = [
        *(sys.executable, "-m", "llmrt.cli.main", "up", "--model", str(tiny_model), *EXACT),
        *("--prefill", "1", "--decode", "1", "--runtime-dir", str(tmp_path)),
        *("--bind", ends[0], "--worker-bind", ends[1], "--log-level", "error"),
    ]
    for moment_s, number in (
        (0.05, signal.SIGKILL),
        (0.7, signal.SIGTERM),
        (1.2, signal.SIGKILL),
        (2.0, signal.SIGINT),
        (3.5, signal.SIGKILL),
    ):
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True) as up:
            with pytest.raises(subprocess.TimeoutExpired):
                up.wait(moment_s)
            up.send_signal(number)
            up.wait(GONE_S + 10)
            wait_until(lambda: not processes_of(tmp_path), GONE_S, f"all gone after {moment_s} s")
            wait_until(lambda: are_free(*ends), GONE_S, "the ports are free")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as up:
        assert up.stdout is not None
        assert up.stdout.readline()
        with Client(ends[0]) as client:
            assert client.generate("hi", max_tokens=2).usage.completion_tokens == 2
        up.terminate()
        assert up.wait(30) == 0
    assert not processes_of(tmp_path)
    assert are_free(*ends)
