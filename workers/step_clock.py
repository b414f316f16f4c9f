"""How much of the steps' time is Python's. Pure."""


class StepClock:
    """Sums over steps that follow each other at once, in seconds.

    `steps_s` goes from the return of one step to that of the next, `python_s` is what of it was not
    spent in the model's computation: the whole way from one call into the device's code to the
    next, wake-ups of threads included.
    """

    def __init__(self) -> None:
        self.steps_s = 0.0
        self.python_s = 0.0
        self._last_returned_at: float | None = None

    def returned(self, returned_at: float, computed_s: float) -> None:
        """A step returned that computed for so long."""
        if self._last_returned_at is not None:
            elapsed_s = returned_at - self._last_returned_at
            self.steps_s += elapsed_s
            self.python_s += max(0.0, elapsed_s - computed_s)
        self._last_returned_at = returned_at

    def paused(self) -> None:
        """No step follows the last one: the time until the next one starts is nobody's."""
        self._last_returned_at = None
