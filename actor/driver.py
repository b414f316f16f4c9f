"""Runs one machine on the asyncio loop: events in, effects out, one timer for its deadline.

Imports no logging library, since the SDK runs on it too: faults go to the exception handler of
the loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from llmrt.actor.machine import Machine
from llmrt.actor.timer import DeadlineTimer

E = TypeVar("E")
F = TypeVar("F")

PULSE_S = 0.1
# Below this a late pulse is the noise of a busy machine and of its scheduler.
_NOISE_S = 0.05


class Driver(Generic[E, F]):
    """Owns `machine`; `tick` is the event for its deadline, `perform` carries out one effect.

    With `validate` the machine's invariants are asserted after every event.
    """

    def __init__(
        self,
        machine: Machine[E, F],
        perform: Callable[[F], None],
        tick: E,
        *,
        validate: bool = False,
    ) -> None:
        self._machine = machine
        self._perform = perform
        self._validate = validate
        self._loop = asyncio.get_running_loop()
        self._pulse = Pulse(self._loop)
        self._queue: deque[E] = deque()
        self._is_handling = False
        self._is_closed = False
        self._timer = DeadlineTimer(
            machine.next_deadline, lambda: self.handle(tick), type(machine).__name__
        )
        self._timer.arm()

    def handle(self, event: E) -> None:
        """Give one event to the machine and perform its effects in order.

        An event that comes up while effects are performed waits until they all are.
        """
        self._queue.append(event)
        if self._is_handling or self._is_closed:
            return
        self._is_handling = True
        try:
            while self._queue:
                effects = self._machine.handle(self._queue.popleft(), time.monotonic())
                if self._validate:
                    self._machine.check()
                for effect in effects:
                    self._perform(effect)
        except BaseException:
            # Its state is not to be trusted: it gets no more events, not even to say goodbye.
            self.close()
            raise
        finally:
            self._is_handling = False
        self._timer.arm()

    def stalled_s(self) -> float:
        """Seconds that this process did not run just now: to be charged to what it drains."""
        return self._pulse.stalled_s()

    def close(self) -> None:
        """Stop all timers; events that come later are dropped."""
        self._is_closed = True
        self._pulse.close()
        self._timer.close()


class Pulse:
    """Measures how late the loop runs, by a timer of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._late_s = 0.0
        self._counts_until = 0.0
        self._set()

    def stalled_s(self) -> float:
        """Lateness of the loop now, or just before: uvloop runs timers ahead of what came in."""
        now = time.monotonic()
        late_s = now - self._due
        if late_s > _NOISE_S:
            return late_s
        return self._late_s if now < self._counts_until else 0.0

    def close(self) -> None:
        self._timer.cancel()

    def _set(self) -> None:
        self._due = time.monotonic() + PULSE_S
        self._timer = self._loop.call_later(PULSE_S, self._beat)

    def _beat(self) -> None:
        now = time.monotonic()
        late_s = now - self._due
        if late_s > _NOISE_S:
            self._late_s = late_s
            self._counts_until = now + PULSE_S
        self._set()
