"""How a process ends: its exit code and its last line."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from llmrt.actor.runtime import run
from llmrt.wire.errors import ConfigError

PROGRAM = """
import asyncio, sys
from llmrt.actor.runtime import run

async def main():
    print("up", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("ending", flush=True)
        {ending}

sys.exit(run(main(), is_server={is_server}))
"""


@contextmanager
def program(ending: str = "pass", *, is_server: bool = False) -> "Iterator[subprocess.Popen[str]]":
    source = PROGRAM.format(ending=ending, is_server=is_server)
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        assert it.stdout.readline() == "up\n"
        yield it
        it.kill()


def test_the_result_of_main_is_the_exit_code() -> None:
    async def main(code: int | None) -> int | None:
        return code

    assert [run(main(code)) for code in (None, 0, 3)] == [0, 0, 3]


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_DFL, signal.SIG_IGN])
def test_signals_are_what_they_were_afterwards(handler: Any) -> None:
    """A program that goes on, a test run say, can still be interrupted."""

    async def main() -> None:
        return None

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        run(main())
        assert [signal.getsignal(number) for number in numbers] == [handler, handler]
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


def test_an_error_of_main_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        raise ConfigError("bind is wrong")

    assert run(main()) == 78
    assert capsys.readouterr().err == "error: bind is wrong (config_invalid)\n"


def test_a_fault_in_a_callback_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    """Else the callback that failed never comes back, and the process hangs half alive."""
    ended: list[bool] = []

    def fail() -> None:
        raise ValueError("fault")

    async def main() -> None:
        asyncio.get_running_loop().call_soon(fail)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    assert run(main()) == 1
    assert ended == [True]
    assert "ValueError: fault" in "".join(capsys.readouterr())


@pytest.mark.integration
@pytest.mark.parametrize(
    ("number", "is_server", "code"),
    [
        (signal.SIGTERM, False, 143),
        (signal.SIGTERM, True, 0),
        (signal.SIGINT, False, 130),
        (signal.SIGINT, True, 130),
    ],
)
def test_a_signal_ends_main_in_order(number: signal.Signals, is_server: bool, code: int) -> None:
    """An answer that was cut is not done; a server that was told to stop is."""
    with program(is_server=is_server) as it:
        it.send_signal(number)
        assert it.stdout is not None
        assert it.stdout.read() == "ending\n"
        assert it.wait(20) == code


@pytest.mark.integration
def test_a_second_signal_ends_at_once() -> None:
    with program("await asyncio.Event().wait()") as it:
        it.send_signal(signal.SIGTERM)
        assert it.stdout is not None
        assert it.stdout.readline() == "ending\n"
        it.send_signal(signal.SIGINT)
        assert it.wait(20) == 130


def test_runs_leave_no_descriptor_behind() -> None:
    async def main() -> None:
        await asyncio.sleep(0)

    run(main())
    num_fds = len(os.listdir("/proc/self/fd"))
    run(main())
    assert len(os.listdir("/proc/self/fd")) == num_fds
