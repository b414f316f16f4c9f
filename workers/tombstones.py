"""What has ended here, remembered so that a late message meets it. Pure."""

from collections.abc import Hashable
from typing import Generic, TypeVar

from llmrt.wire.ids import NO_ATTEMPT, Attempt

K = TypeVar("K", bound=Hashable)

# Far above what is under way at once: only messages of the last few seconds still come.
MAX_TOMBSTONES = 4096


class Tombstones(Generic[K]):
    """The latest `MAX_TOMBSTONES` ends by key, each up to an attempt."""

    def __init__(self) -> None:
        self._buried: dict[K, Attempt] = {}

    def bury(self, key: K, attempt: Attempt = NO_ATTEMPT) -> None:
        """`key` has ended, in this attempt and all before it."""
        known = self._buried.pop(key, attempt)
        self._buried[key] = max(known, attempt)
        if len(self._buried) > MAX_TOMBSTONES:
            del self._buried[next(iter(self._buried))]

    def covers(self, key: K, attempt: Attempt = NO_ATTEMPT) -> bool:
        """Whether that attempt at `key` has ended here."""
        known = self._buried.get(key)
        return known is not None and attempt <= known
