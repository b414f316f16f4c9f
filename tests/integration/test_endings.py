"""How a command ends when it is cut short, or when its streams are not what they should be."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from local_cluster import RunningCluster
from tests.integration.probes import wait_until, wait_until_idle

from llmrt.client import Client

pytestmark = pytest.mark.integration

LLMRT = (sys.executable, "-m", "llmrt.cli.main")
LONG = ("--max-tokens", "3000", "--ignore-eos")


def shell(line: str, *arguments: object, **env: str) -> "subprocess.CompletedProcess[str]":
    """`line` in a shell, where `llmrt` is `"$@"`; the code of a pipe is that of its first part."""
    return subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}", "-", *LLMRT, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | env,
    )


def start(
    *arguments: object, stdin: int | None = None, cwd: Path | None = None, **env: str
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*LLMRT, *map(str, arguments)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | env,
        cwd=cwd,
    )


@pytest.mark.parametrize("command", ["generate", "chat", "bench"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_what_was_cut_short_is_not_done(
    colocated: RunningCluster, command: str, number: signal.Signals, code: int
) -> None:
    """And its requests are cancelled."""
    arguments = {
        "generate": ("Count", "--json", *LONG),
        "chat": LONG,
        "bench": ("--metric", "decode", "--output-tokens", "2000"),
    }
    with (
        Client(colocated.bind) as client,
        start(
            command, *arguments[command], "--broker", colocated.bind, stdin=subprocess.PIPE
        ) as it,
    ):
        assert it.stdin is not None
        it.stdin.write("Count\n" * 2)
        it.stdin.flush()
        wait_until(lambda: bool(client.workers().requests), 30, "the request runs")
        it.send_signal(number)
        _, err = it.communicate(timeout=30)
        assert (it.returncode, err) == (code, "")
        wait_until_idle(client)


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_no_harm(colocated: RunningCluster, redirection: str) -> None:
    arguments = ("generate", "Hi", "--max-tokens", "4", "--broker", colocated.bind)
    done = shell(f'"$@" {redirection}', *arguments)
    assert done.returncode == 0, done
    assert bool(done.stdout) == (">&-" not in redirection.split())
    assert bool(done.stderr) == ("2>&-" not in redirection)


@pytest.mark.parametrize("arguments", [("generate", "Hi", *LONG), ("ps", "--watch"), ("version",)])
def test_a_pipe_that_nobody_reads_ends_quietly(
    colocated: RunningCluster, arguments: tuple[str, ...]
) -> None:
    """And the request is cancelled."""
    done = shell('"$@" | true', *arguments, LLMRT_BROKER_BIND=colocated.bind)
    assert (done.returncode, done.stderr) == (141, "")
    with Client(colocated.bind) as client:
        wait_until_idle(client)


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "Hi", *LONG),
        ("generate", "Hi", "--json", "--max-tokens", "4"),
        ("chat", *LONG),
        ("ps", "--watch"),
        ("version",),
        ("--help",),
    ],
)
def test_a_full_disk_is_named(colocated: RunningCluster, arguments: tuple[str, ...]) -> None:
    done = shell('"$@" >/dev/full <<< Hi', *arguments, LLMRT_BROKER_BIND=colocated.bind)
    assert done.returncode == 74
    assert done.stderr == "error: cannot write to stdout: No space left on device\n"


def test_up_that_cannot_say_where_it_serves_ends(tiny_model: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    ends = ("--bind", f"ipc://{tmp_path}/c", "--worker-bind", f"ipc://{tmp_path}/w")
    own = ("--runtime-dir", tmp_path, "--threads", "1", "--log-level", "error")
    done = shell('"$@" >/dev/full', "up", "--model", tiny_model, *ends, *own)
    assert done.returncode == 74
    assert done.stderr == "error: cannot write to stdout: No space left on device\n"


@pytest.mark.parametrize(
    ("lines", "option", "code"),
    [
        ("Hi\\nHo", "--max-tokens=4", 0),
        ("Hi\\nHo", "--top-p=7", 2),
        ("Hi", "--model=none", 78),
    ],
)
def test_a_piped_chat_ends_with_the_code_of_its_last_failure(
    colocated: RunningCluster, lines: str, option: str, code: int
) -> None:
    done = shell(f"\"$@\" <<< $'{lines}'", "chat", option, "--broker", colocated.bind)
    assert done.returncode == code, done


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_at_any_moment_of_run_leaves_nothing(
    tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Earlier it may be Python itself that starts, which has a traceback for Ctrl-C."""
    arguments = ("run", "Hi", "--model", tiny_model, "--threads", "1", *LONG)
    for moment_s in (0.3, 0.5, 0.6, 0.7, 0.8, 1.0, 1.5):
        with start(*arguments, TMPDIR=str(tmp_path)) as it:
            with pytest.raises(subprocess.TimeoutExpired):
                it.wait(moment_s)
            it.send_signal(number)
            _, err = it.communicate(timeout=30)
        assert it.returncode in (-number, 128 + number), moment_s
        assert err == "", moment_s
        assert not list(tmp_path.iterdir()), moment_s


def test_run_stops_what_it_has_started_only_just(tiny_model: Path, tmp_path: Path) -> None:
    """As soon as its folder is there, its loop is not."""
    with start("run", "Hi", "--model", tiny_model, TMPDIR=str(tmp_path)) as it:
        wait_until(lambda: any(tmp_path.iterdir()), 30, "the folder is there")
        it.terminate()
        _, err = it.communicate(timeout=30)
    assert (it.returncode, err) == (143, "")
    assert not list(tmp_path.iterdir())
    running = subprocess.check_output(["ps", "ax", "-o", "args"], text=True)
    assert str(tmp_path) not in running
