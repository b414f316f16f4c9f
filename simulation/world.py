"""Virtual time, one seeded random source, and a network that delays, drops, doubles and reorders.

Everything that happens in a simulation is an action in one heap, so that a seed replays one
history exactly.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from heapq import heappop, heappush


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often what goes wrong, per message; and how long messages and steps take, in seconds.

    A late message is overtaken by those sent after it. Without faults each pair keeps its order.
    """

    drop: float = 0.0
    double: float = 0.0
    late: float = 0.0
    delay_s: tuple[float, float] = (0.00005, 0.0005)
    late_s: tuple[float, float] = (0.01, 3.0)
    step_s: tuple[float, float] = (0.002, 0.02)


@dataclass(slots=True)
class World:
    """The clock, the heap of what is to come, and a running hash of what was."""

    seed: int
    faults: Faults = field(default_factory=Faults)
    now: float = 0.0
    counters: Counter[str] = field(default_factory=Counter)
    rng: random.Random = field(init=False)
    _heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _num_actions: int = 0
    _pair_free_at: dict[tuple[str, str], float] = field(default_factory=dict)
    _history: bytes = b""

    def __post_init__(self) -> None:
        # Replayable on purpose: this is no source of secrets.
        self.rng = random.Random(self.seed)  # noqa: S311

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._num_actions += 1
        heappush(self._heap, (max(time, self.now), self._num_actions, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def run(self, until: float) -> None:
        """Let everything happen that is due up to `until`."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action = heappop(self._heap)
            action()
        self.now = until

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Carry one message over the faulty network."""
        faults, rng = self.faults, self.rng
        if rng.random() < faults.drop:
            self.counters["dropped"] += 1
            return
        copies = 2 if rng.random() < faults.double else 1
        self.counters["doubled"] += copies - 1
        for _ in range(copies):
            arrives_at = self.now + rng.uniform(*faults.delay_s)
            if rng.random() < faults.late:
                self.counters["late"] += 1
                arrives_at += rng.uniform(*faults.late_s)
            else:
                pair = (source, target)
                arrives_at = max(arrives_at, self._pair_free_at.get(pair, 0.0) + 1e-9)
                self._pair_free_at[pair] = arrives_at
            self.at(arrives_at, deliver)

    def record(self, *what: object) -> None:
        """Add to the history, whose hash names this run."""
        entry = repr((round(self.now, 9), *what)).encode()
        self._history = sha256(self._history + entry).digest()

    @property
    def history_hash(self) -> str:
        return self._history.hex()
