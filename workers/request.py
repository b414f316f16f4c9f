"""One request that a worker owns: what it asked for, where it is, and when it got there."""

from array import array
from dataclasses import dataclass, field

from llmrt.engine.detokenizer import Detokenizer
from llmrt.engine.sequence import Sequence
from llmrt.wire import messages as m
from llmrt.wire.ids import Attempt, RequestId, WorkerName
from llmrt.wire.steps import StepRow
from llmrt.workers.placement import Placement


@dataclass(slots=True, eq=False)
class OwnedRequest:
    """One request. Stamps are this worker's seconds, None until they are reached.

    `held_row` has what was emitted since `sent_at`, when the last row was sent.
    """

    request_id: RequestId
    attempt: Attempt
    kind: str
    generate: m.Generate
    deadline: float | None
    received_at: float
    named_prefill: WorkerName | None
    forced: "array[int]"
    sequence: Sequence | None = None
    detokenizer: Detokenizer | None = None
    stage: str = "tokenizing"
    num_emitted: int = 0
    tokenized_at: float | None = None
    started_at: float | None = None
    first_token_at: float | None = None
    prefill_stages_ms: dict[str, float] = field(default_factory=dict)
    prefill_worker: str = ""
    placement: Placement | None = None
    excluded: set[WorkerName] = field(default_factory=set)
    sent_at: float | None = None
    held_row: StepRow | None = None
    add_special: bool = True
    admitted_unix_s: float = 0.0

    def placement_ms(self) -> dict[str, float]:
        """The delays that were weighed for its prompt, in milliseconds; empty if none were."""
        if self.placement is None or self.placement.here_s is None:
            return {}
        assert self.placement.there_s is not None
        return {"here": self.placement.here_s * 1000, "there": self.placement.there_s * 1000}

    def timings_ms(self, now: float) -> dict[str, float]:
        """Stages of the request in milliseconds; they sum to `total`."""
        tokenized = self.tokenized_at if self.tokenized_at is not None else now
        started = self.started_at if self.started_at is not None else now
        first = self.first_token_at if self.first_token_at is not None else now
        return {
            "tokenize": (tokenized - self.received_at) * 1000,
            "queue": (started - tokenized) * 1000,
            **self.prefill_stages_ms,
            "decode": (now - first) * 1000,
            "total": (now - self.received_at) * 1000,
        }
