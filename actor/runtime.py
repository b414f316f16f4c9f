"""The top of every serving process: its event loop and its signals."""

import asyncio
import gc
import os
import signal
from collections.abc import Coroutine, Mapping
from typing import Any

import structlog
import uvloop

from llmrt.actor.exits import FAILED, INTERRUPTED, OK, TERMINATED, report

log = structlog.get_logger(__name__)


def run(main: Coroutine[Any, Any, int | None], *, is_server: bool = False) -> int:
    """Run `main` on uvloop; returns the exit code of the process: that of `main`, or by its end.

    SIGTERM (code 143; 0 of a server, which so ends as it should) and SIGINT (code 130) cancel
    `main`, which then ends in order; a second one ends the process at once. A fault in any callback
    of the loop cancels it too (code 1): a process that is half alive is replaced, not repaired.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_top(main, OK if is_server else TERMINATED))


def settle() -> None:
    """Call once, when a process serves: what lives by then lives on, and is not looked at again.

    A full collection over some 100,000 objects takes a tenth of a second and more, in the middle
    of a stream. Afterwards collections are rarer, and look at what has come since.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def _top(main: Coroutine[Any, Any, int | None], sigterm_code: int) -> int:
    loop = asyncio.get_running_loop()
    task = loop.create_task(main)
    ending = _Ending(task, {signal.SIGTERM: sigterm_code, signal.SIGINT: INTERRUPTED})
    before = {number: signal.getsignal(number) for number in ending.codes}
    for number in before:
        loop.add_signal_handler(number, ending.on_signal, number)
    loop.set_exception_handler(ending.on_fault)
    try:
        code = await task or OK
    except asyncio.CancelledError:
        code = OK
    except Exception as error:
        code = report(error)
    finally:
        # uvloop would leave its own behind, and Ctrl-C would do nothing any more.
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
    return code or ending.code


# What a process that has found a fault in itself gets to clean up.
FAULT_EXIT_S = 10.0


class _Ending:
    """Why `task` is being cancelled. `codes` are those of signals."""

    def __init__(
        self, task: "asyncio.Task[int | None]", codes: Mapping[signal.Signals, int]
    ) -> None:
        self.code = OK
        self.codes = codes
        self._task = task
        self._is_signalled = False
        self._is_faulted = False

    def on_signal(self, number: signal.Signals) -> None:
        if self._is_signalled:
            os._exit(128 + number)
        self._is_signalled = True
        self.code = max(self.code, self.codes[number])
        self._task.cancel()

    def on_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End in order, but end: cleaning up may hang where something is broken."""
        error = context.get("exception")
        log.error("process.callback_failed", error=context["message"], exc_info=error)
        if error is not None and not self._is_faulted:
            self._is_faulted = True
            self.code = FAILED
            self._task.cancel()
            loop.call_later(FAULT_EXIT_S, os._exit, FAILED)
