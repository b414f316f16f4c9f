"""One timer for the deadline of a machine, which moves with every event."""

import asyncio
import time
from collections.abc import Callable

# What a timer waits at least when a tick did not consume its deadline: a fault of the machine,
# which must not take the whole core.
MIN_WAIT_S = 0.001


class DeadlineTimer:
    """Calls `on_due` when the deadline that `next_deadline` tells has come.

    `arm` is due after every event, also after the one of `on_due`. `name` is for complaints.
    """

    def __init__(
        self, next_deadline: Callable[[], float | None], on_due: Callable[[], None], name: str
    ) -> None:
        self._next_deadline = next_deadline
        self._on_due = on_due
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._handle_at = 0.0
        self._not_before = 0.0
        self._is_closed = False

    def arm(self) -> None:
        """One handle at the deadline, or an earlier one that finds out and is set again.

        Deadlines mostly move away with every event; so most events touch no handle.
        """
        deadline = self._next_deadline()
        if deadline is None or self._is_closed:
            return
        at = max(deadline, self._not_before)
        if self._handle is not None:
            if self._handle_at <= at:
                return
            self._handle.cancel()
        wait_s = at - time.monotonic()
        self._handle_at = at
        # uvloop rounds to milliseconds: a shorter wait would be none, and the loop would spin.
        self._handle = self._loop.call_later(
            max(MIN_WAIT_S, wait_s) if wait_s > 0 else 0.0, self._ring
        )

    def close(self) -> None:
        """Stop for good."""
        self._is_closed = True
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self) -> None:
        self._handle = None
        now = time.monotonic()
        deadline = self._next_deadline()
        if deadline is None or deadline > now:
            self.arm()
            return
        self._not_before = now + MIN_WAIT_S
        self._on_due()
        after = self._next_deadline()
        if after is not None and after <= now:
            self._loop.call_exception_handler(
                {"message": f"{self._name} kept its deadline after the tick"}
            )
