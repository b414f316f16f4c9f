"""The one thread that touches the device: it runs steps, and what must not run beside one."""

import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

from llmrt.engine.batch import Batch, Device, SequenceId, StepResult, fill
from llmrt.engine.rights import WriteRight, check_rights
from llmrt.wire.errors import LlmrtError
from llmrt.wire.messages import Failure
from llmrt.workers.events import StepDone, StepTaken

P = ParamSpec("P")
T = TypeVar("T")
Rights = Mapping[SequenceId, WriteRight]
NO_RIGHTS: Rights = {}


class StepThread:
    """Takes work in order; `on_event` is called on `loop` with what becomes of each step.

    A thread that waits on a queue of its own: an executor's futures, with their locks and callbacks
    at both ends, cost a step about as much as all else that Python does for it.
    """

    def __init__(
        self,
        device: Device,
        loop: AbstractEventLoop,
        on_event: Callable[[StepTaken | StepDone], None],
    ) -> None:
        self._device = device
        self._loop = loop
        self._on_event = on_event
        self._before: StepResult | Failure | None = None
        self._work: SimpleQueue[tuple[Batch, Rights] | Callable[[], None] | None] = SimpleQueue()
        # A daemon: a process that ends by a fault does not wait for a step.
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)
        self._thread.start()

    def run(self, batch: Batch, rights: Rights = NO_RIGHTS) -> None:
        """Run a step: `StepTaken` and then `StepDone` come of it.

        One that follows another is handed over while that runs, and starts as soon as that returns.
        One with a row that would write into another worker's arena beyond `rights` fails.
        """
        self._work.put((batch, rights))

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Call `function` on the thread, behind the steps before it."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        self._work.put(work)
        return future

    def close(self) -> None:
        """Let what was handed over be done, and end. Blocks."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        done: StepDone | None = None
        while (work := self._work.get()) is not None:
            if isinstance(work, tuple):
                # The loop wakes up while the device computes: until then this thread has the
                # interpreter's lock. One wake-up for two events: each costs some 20 us.
                self._post(*([] if done is None else [done]), StepTaken())
                done = self._step(*work)
            else:
                work()
            if done is not None and self._work.empty():
                self._post(done)
                done = None
        if done is not None:
            self._post(done)

    def _step(self, batch: Batch, rights: Rights) -> StepDone:
        self._before = outcome = self._outcome(batch, rights)
        if isinstance(outcome, Failure):
            return StepDone(None, time.monotonic(), outcome)
        return StepDone(outcome, time.monotonic())

    def _outcome(self, batch: Batch, rights: Rights) -> StepResult | Failure:
        before = self._before
        if batch.follows:
            if isinstance(before, Failure):
                return before
            assert before is not None
            fill(batch, before)
        try:
            check_rights(batch.rows, rights)
            return self._device.run(batch)
        except Exception as error:
            code = error.error_code if isinstance(error, LlmrtError) else "internal_error"
            return Failure(code=code, message=f"{type(error).__name__}: {error}")

    def _post(self, *events: StepTaken | StepDone) -> None:
        with suppress(RuntimeError):  # the loop has ended, and the worker with it
            self._loop.call_soon_threadsafe(self._tell, events)

    def _tell(self, events: Iterable[StepTaken | StepDone]) -> None:
        for event in events:
            self._on_event(event)
