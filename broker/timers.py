"""Many deadlines in one heap, each replaceable and droppable by its key."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# Entries that were replaced or dropped stay in the heap until half of it is such entries;
# below this size a rebuild isn't worth its cost.
_MIN_REBUILD = 256


class Timers(Generic[Key]):
    """At most one time per key. Setting and dropping cost O(log n), amortised."""

    def __init__(self) -> None:
        self._key_to_time: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._num_set = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._key_to_time

    def __len__(self) -> int:
        return len(self._key_to_time)

    def set(self, key: Key, at: float) -> None:
        """Ring for `key` at this time, and not at the one that was set before."""
        self._key_to_time[key] = at
        self._num_set += 1
        # The running number keeps keys from being compared, and equal times in order.
        heapq.heappush(self._heap, (at, self._num_set, key))
        if len(self._heap) > _MIN_REBUILD and len(self._heap) > 2 * len(self._key_to_time):
            times = self._key_to_time
            self._heap = [entry for entry in self._heap if times.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def set_no_later(self, key: Key, at: float) -> None:
        """Ring for `key` at this time unless an earlier one is set."""
        known = self._key_to_time.get(key)
        if known is None or at < known:
            self.set(key, at)

    def drop(self, key: Key) -> None:
        self._key_to_time.pop(key, None)

    def next(self) -> float | None:
        """The earliest time, or None."""
        heap, times = self._heap, self._key_to_time
        while heap:
            at, _, key = heap[0]
            if times.get(key) == at:
                return at
            heapq.heappop(heap)
        return None

    def pop_due(self, now: float) -> list[Key]:
        """The keys whose time has come, in the order of their times; they are set no more."""
        due = []
        while (at := self.next()) is not None and at <= now:
            key = heapq.heappop(self._heap)[2]
            del self._key_to_time[key]
            due.append(key)
        return due
