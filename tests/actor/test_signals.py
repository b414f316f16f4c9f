"""Signals where no loop handles them."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from llmrt.actor.signals import held, raised

NUMBERS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def got() -> Iterator[list[int]]:
    """The signals that reach the handler from before."""
    numbers: list[int] = []
    before = {n: signal.signal(n, lambda number, _frame: numbers.append(number)) for n in NUMBERS}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_block_is_left_by_an_exception(got: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), raised():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended, raised():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    assert got == []


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_waits_for_its_release(number: signal.Signals, got: list[int]) -> None:
    """It goes to whoever handles it by then, as a loop does."""
    released: list[int] = []
    with held() as release:
        signal.raise_signal(number)
        own = signal.signal(number, lambda number, _frame: released.append(number))
        release()
        signal.signal(number, own)
    assert (released, got) == ([number], [])


def test_a_signal_waits_for_the_end_of_the_block(got: list[int]) -> None:
    with held():
        signal.raise_signal(signal.SIGTERM)
        assert got == []
    assert got == [signal.SIGTERM]


@pytest.mark.parametrize("block", [held, raised])
def test_a_signal_that_was_ignored_is_ignored(
    block: Callable[[], AbstractContextManager[object]], got: list[int]
) -> None:
    """As SIGINT is in the background jobs of a script."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with block():
        signal.raise_signal(signal.SIGINT)
    assert got == []


def python(code: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", f"import signal; from llmrt.actor import signals\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.integration
def test_a_second_signal_ends_at_once() -> None:
    done = python("with signals.held():\n  while True: signal.raise_signal(signal.SIGINT)")
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.integration
def test_ctrl_c_ends_silently() -> None:
    done = python("signals.end_silently(); signal.raise_signal(signal.SIGINT)")
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
