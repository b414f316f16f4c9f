"""SIGTERM and SIGINT where no event loop handles them."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


def end_silently() -> None:
    """From now on Ctrl-C ends the process without a traceback, as SIGTERM does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, say
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def raised() -> Iterator[None]:
    """In the block SIGINT raises `KeyboardInterrupt` and SIGTERM `SystemExit`: it can clean up."""
    with _handled(_raise):
        yield


@contextmanager
def held() -> Iterator[Callable[[], None]]:
    """In the block a signal waits until the function that this gives is called, which sends it
    again, or for the end of the block; a second one ends the process at once."""
    waiting: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        if waiting:
            os._exit(128 + number)
        waiting.append(number)

    def release() -> None:
        while waiting:
            signal.raise_signal(waiting.pop())

    try:
        with _handled(hold):
            yield release
    finally:
        release()


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    before = {number: old for number, old in before.items() if old is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _raise(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        signal.default_int_handler(number, frame)
    raise SystemExit(128 + number)
