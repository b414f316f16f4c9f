"""The machine protocol: whatever decides is a pure state machine, whatever acts is a shell."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

Event_contra = TypeVar("Event_contra", contravariant=True)
Effect_co = TypeVar("Effect_co", covariant=True)


class Machine(Protocol[Event_contra, Effect_co]):
    """Owns a state; events change it and give effects for the shell to carry out.

    Times are float seconds of one monotonic clock. A machine never sleeps, reads a clock, opens
    a socket, draws a random number or touches a tensor.
    """

    def handle(self, event: Event_contra, now: float) -> Sequence[Effect_co]:
        """Take one event. Late, repeated and unknown events are cases, not exceptions."""
        ...

    def next_deadline(self) -> float | None:
        """When a `Tick` is due at the latest; after that tick it is later, or None."""
        ...

    def check(self) -> None:
        """Assert the invariants."""
        ...
