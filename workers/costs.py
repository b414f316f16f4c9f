"""What prompts and decodes cost, here and at the workers that prefill for us, as measured. Pure.

The seconds of a prompt are fitted to its tokens and to the positions that they attend to. What a
prefill worker takes is told by one factor to that: a machine twice as slow, or one that shares its
memory with us, has 2. A factor that nothing has confirmed for long drifts back to 1, so that one
bad minute does not exclude a worker for ever.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from llmrt.engine.batch import Row, SequenceId
from llmrt.wire.ids import WorkerName

# Weight of what was known before, per step or prompt that is measured.
_KEPT = 0.9
_FACTOR_HALF_LIFE_S = 60.0
# Reports come every beat.
_REPORT_VALID_S = 2.5
# Before the first hand-over.
_HANDOVER_S = 0.002
_MAX_PEERS = 256
_POSITION_UNIT = 1000.0


class PrefillSeconds:
    """Least squares over recent steps: seconds = a tokens + b tokens * mean position.

    `slowdown` is what a step takes beside a prefill worker at work, over one alone.
    """

    def __init__(self) -> None:
        self.slowdown = 1.0
        self._xx = self._xy = self._yy = self._xt = self._yt = 0.0

    @property
    def is_measured(self) -> bool:
        return self._xx > 0

    def took(
        self, chunks: Iterable[tuple[int, int]], seconds: float, *, is_beside_prefill: bool = False
    ) -> None:
        """A step computed tokens `start` to `end` of some prompts."""
        x = y = 0.0
        for start, end in chunks:
            dx, dy = _terms(start, end)
            x, y = x + dx, y + dy
        if is_beside_prefill and self.is_measured:
            a, b = self._coefficients()
            if (alone := a * x + b * y) > 0:
                self.slowdown = max(1.0, _blend(self.slowdown, seconds / alone))
            return
        self._xx = _KEPT * self._xx + x * x
        self._xy = _KEPT * self._xy + x * y
        self._yy = _KEPT * self._yy + y * y
        self._xt = _KEPT * self._xt + x * seconds
        self._yt = _KEPT * self._yt + y * seconds

    def of(self, start: int, end: int) -> float:
        """Seconds for tokens `start` to `end` of a prompt; 0 if nothing was measured."""
        x, y = _terms(start, end)
        a, b = self._coefficients()
        return a * x + b * y

    def _coefficients(self) -> tuple[float, float]:
        if not self.is_measured:
            return 0.0, 0.0
        det = self._xx * self._yy - self._xy * self._xy
        if det > 1e-3 * self._xx * self._yy:
            a = (self._xt * self._yy - self._yt * self._xy) / det
            b = (self._yt * self._xx - self._xt * self._xy) / det
            if a > 0 and b >= 0:
                return a, b
        return self._xt / self._xx, 0.0


class DecodeSeconds:
    """Steps of decodes alone, by their number of rows, and how others' prefill slows them."""

    def __init__(self) -> None:
        self._alone: dict[int, float] = {}
        self.slowdown = 1.0

    def took(self, num_rows: int, seconds: float, *, is_beside_prefill: bool) -> None:
        size = num_rows.bit_length()
        alone = self._alone.get(size)
        if not is_beside_prefill:
            self._alone[size] = seconds if alone is None else _blend(alone, seconds)
        elif alone:
            self.slowdown = max(1.0, _blend(self.slowdown, seconds / alone))

    def of(self, num_rows: int) -> float:
        """Seconds of a step; 0 if nothing was measured."""
        return self._alone.get(num_rows.bit_length(), 0.0) if num_rows else 0.0


@dataclass(slots=True)
class PrefillPeer:
    """One prefill worker. It has worked off what we offered it at `free_at`, if all goes well."""

    factor: float = 1.0
    measured_at: float = 0.0
    handover_s: float = _HANDOVER_S
    free_at: float = 0.0
    num_foreign_tokens: int = 0
    reported_at: float = 0.0


class Costs:
    """All that placement looks at."""

    def __init__(self) -> None:
        self.prefill = PrefillSeconds()
        self.decode = DecodeSeconds()
        self._peers: dict[WorkerName, PrefillPeer] = {}
        self._offered: dict[SequenceId, WorkerName] = {}

    # -- what is measured --------------------------------------------------------------------

    def step_took(self, rows: Iterable[Row], seconds: float) -> None:
        """A step of this worker returned after computing for so long."""
        is_beside = bool(self._offered)
        chunks, num_decodes = [], 0
        for row in rows:
            if len(row.token_ids) - row.num_drafts > 1:
                chunks.append((row.start, row.start + len(row.token_ids)))
            else:
                num_decodes += 1
        if chunks:
            decode_s = self.decode.of(num_decodes) * (self.decode.slowdown if is_beside else 1.0)
            self.prefill.took(chunks, max(0.0, seconds - decode_s), is_beside_prefill=is_beside)
        elif num_decodes:
            self.decode.took(num_decodes, seconds, is_beside_prefill=is_beside)

    def offered(
        self, peer: WorkerName, sequence_id: SequenceId, seconds: float, now: float
    ) -> None:
        """A prompt that takes so long is in that worker's queue."""
        known = self._peer(peer)
        known.free_at = max(now, known.free_at) + seconds
        self._offered[sequence_id] = peer

    def settled(self, sequence_id: SequenceId, now: float) -> None:
        """It is not any more, for whatever reason. Idempotent."""
        peer = self._offered.pop(sequence_id, None)
        if peer is not None and peer not in self._offered.values():
            self._peer(peer).free_at = now

    def prefilled(
        self, peer: WorkerName, expected_s: float, seconds: float, handover_s: float, now: float
    ) -> None:
        """A prompt that would take `expected_s` here took so long there."""
        known = self._peer(peer)
        known.handover_s = _blend(known.handover_s, handover_s)
        if expected_s > 0 and seconds > 0:
            known.factor = _blend(self.factor(peer, now), seconds / expected_s, kept=0.7)
            known.measured_at = now

    def reported(self, peer: WorkerName, num_foreign_tokens: int, now: float) -> None:
        """The worker says how many tokens of others are in its queue."""
        known = self._peer(peer)
        known.num_foreign_tokens, known.reported_at = num_foreign_tokens, now

    # -- what follows from it ----------------------------------------------------------------

    def factor(self, peer: WorkerName, now: float) -> float:
        known = self._peer(peer)
        age = (now - known.measured_at) / _FACTOR_HALF_LIFE_S
        return 1.0 + (known.factor - 1.0) * math.exp2(-age)

    def queue_s(self, peer: WorkerName, now: float) -> float:
        """Seconds until that worker could begin another prompt of ours."""
        known = self._peer(peer)
        foreign = known.num_foreign_tokens if now - known.reported_at <= _REPORT_VALID_S else 0
        return max(0.0, known.free_at - now) + self.prefill.of(0, foreign) * self.factor(peer, now)

    @property
    def num_offered(self) -> int:
        """Prompts of ours that prefill workers have."""
        return len(self._offered)

    def handover_s(self, peer: WorkerName) -> float:
        return self._peer(peer).handover_s

    def forget(self, peer: WorkerName) -> None:
        """That life of a worker is over."""
        self._peers.pop(peer, None)

    def _peer(self, peer: WorkerName) -> PrefillPeer:
        known = self._peers.get(peer)
        if known is None:
            if len(self._peers) >= _MAX_PEERS:
                self._peers.pop(next(iter(self._peers)))
            known = self._peers[peer] = PrefillPeer()
        return known


def _terms(start: int, end: int) -> tuple[float, float]:
    num_tokens = end - start
    return num_tokens, num_tokens * (start + end) / 2 / _POSITION_UNIT


def _blend(before: float, measured: float, kept: float = _KEPT) -> float:
    return kept * before + (1 - kept) * measured
