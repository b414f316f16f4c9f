"""Standard streams that are closed or break."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

SET_UP = "import os, sys; from llmrt.actor.streams import OutputError, set_up; set_up()\n"


def python(code: str, redirection: str = "") -> "subprocess.CompletedProcess[str]":
    """In a shell, for what it does with the streams; the exit code is that of the interpreter."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'"$0" -c "$1" {redirection}', sys.executable, code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams_are_there_for_a_process_and_its_children(closed: tuple[int, ...]) -> None:
    """libuv aborts where a descriptor of its own is below 3."""
    code = SET_UP + (
        "import subprocess, uvloop\n"
        "async def main(): return 1\n"
        "assert uvloop.run(main()) == 1\n"
        "assert sys.stdin.read() == ''; print('x', flush=True); print('y', file=sys.stderr)\n"
        "child = 'import os; [os.fstat(fd) for fd in range(3)]'\n"
        "subprocess.run([sys.executable, '-c', child], check=True)\n"
    )
    redirections = {0: "<&-", 1: ">&-", 2: "2>&-"}
    done = python(code, " ".join(["</dev/null", *(redirections[fd] for fd in closed)]))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if 1 in closed else "x\n")
    assert done.stderr == ("" if 2 in closed else "y\n")


@pytest.mark.parametrize(("redirection", "errno"), [(">/dev/full", "ENOSPC"), ("| true", "EPIPE")])
@pytest.mark.parametrize("size", [1, 100_000])
def test_stdout_that_cannot_be_written_is_an_error_once(
    redirection: str, errno: str, size: int
) -> None:
    """What comes later is dropped, also by the interpreter at its end."""
    code = SET_UP + (
        "import errno\n"
        "try:\n"
        f"    while True: print('x' * {size}, flush=True)\n"
        "except OutputError as error:\n"
        "    print('y', flush=True); print('z')\n"
        f"    sys.exit(7 if error.errno == errno.{errno} else 8)\n"
    )
    done = python(code, redirection)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&1 >/dev/null | true"])
def test_what_stderr_does_not_take_is_dropped(redirection: str) -> None:
    """And no log line ends a server."""
    code = SET_UP + "for _ in range(10_000): print('a line of a log', file=sys.stderr)"
    done = python(code, redirection)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_stream_is_otherwise_as_it_was() -> None:
    code = SET_UP + "print('é', sys.stdout.encoding, sys.stdout.errors)"
    assert python(code).stdout == python(code.replace("set_up()", "0")).stdout
