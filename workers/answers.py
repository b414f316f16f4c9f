"""What an owner tells of its requests: tokens under contiguous numbers, then one end. Pure.

Rows of one event go out as one message, and the ends behind them. With an interval set, the tokens
of a request that come within it after its last row are held, and leave as one row: when it is over,
with the end, or before the worker leaves. The first token never waits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from llmrt.wire import messages as m
from llmrt.wire.envelope import encode_body, encode_header
from llmrt.wire.ids import Attempt, RequestId
from llmrt.wire.steps import StepRow, encode_step, make_row
from llmrt.workers.context import WorkerContext
from llmrt.workers.effects import SendBroker
from llmrt.workers.extras import join_extras
from llmrt.workers.request import OwnedRequest


class End(NamedTuple):
    """Finish reason, and the token or string that stopped it."""

    reason: str
    stop: str | int | None = None


class Tokens(NamedTuple):
    """Tokens of a request, and the end behind the last; `text` is None until it is wanted."""

    token_ids: Sequence[int]
    text: str | None
    end: End | None


class Answers:
    """The rows and ends of the current event."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._interval_s = context.settings.stream_interval_s
        self._rows: list[StepRow] = []
        self._ends: list[SendBroker] = []
        self._holding: dict[RequestId, OwnedRequest] = {}

    def judge(self, request: OwnedRequest, token_ids: Sequence[int]) -> Tokens:
        """Of the tokens that were appended last, those that the request has; whether it ends.

        Text is made only where a stop string may be in it: the next step waits for this.
        """
        assert request.sequence is not None
        has_stops = bool(request.generate.sampling.stop)
        length = len(request.sequence.token_ids) - len(token_ids)
        text = ""
        for i, token_id in enumerate(token_ids, 1):
            if has_stops:
                text += self._text(request, token_id)
            end = self.end_after(request, token_id, length + i)
            if end is not None:
                return Tokens(token_ids[:i], text if has_stops else None, end)
        return Tokens(token_ids, text if has_stops else None, None)

    def tokens(self, request: OwnedRequest, tokens: Tokens, extras: bytes) -> None:
        """Emit what one step gave."""
        detokenizer = request.detokenizer
        assert detokenizer is not None
        token_ids, text, end = tokens
        if text is None:
            text = "".join([self._text(request, token_id) for token_id in token_ids])
        if end is not None and detokenizer.matched_stop is None:
            text += detokenizer.flush()
        seq = request.num_emitted
        row = make_row(request.request_id, request.attempt, seq, token_ids, text, extras)
        request.num_emitted += len(token_ids)
        self._send_or_hold(request, row, is_last=end is not None)

    def end_after(self, request: OwnedRequest, token_id: int, length: int) -> End | None:
        """How the request ends if `token_id` was the last of `length` tokens; else None."""
        sequence, detokenizer = request.sequence, request.detokenizer
        assert sequence is not None
        assert detokenizer is not None
        if self._is_end_token(request, token_id):
            is_stop = token_id in request.generate.sampling.stop_token_ids
            return End("stop", token_id if is_stop else None)
        if detokenizer.matched_stop is not None:
            return End("stop", detokenizer.matched_stop)
        return End("length") if length >= sequence.max_length else None

    def finish(self, request: OwnedRequest, end: End) -> None:
        sequence = request.sequence
        assert sequence is not None
        finished = m.Finished(
            finish_reason=end.reason,
            usage=m.Usage(
                prompt_tokens=sequence.num_prompt,
                completion_tokens=request.num_emitted,
                cached_tokens=min(sequence.num_cached, sequence.num_prompt),
            ),
            timings_ms=request.timings_ms(self._context.now),
            decode_worker=self._context.settings.name.worker_id,
            prefill_worker=request.prefill_worker,
            num_preemptions=sequence.num_preemptions,
            stop=end.stop,
            num_drafted=sequence.num_drafted,
            num_accepted=sequence.num_accepted,
            placement=request.placement.reason if request.placement else "",
            placement_ms=request.placement_ms(),
        )
        stages_ms = {f"{s}_ms": round(ms, 3) for s, ms in finished.timings_ms.items()}
        self._log(request, "finished", finish_reason=end.reason, **stages_ms)
        self._send(m.FINISHED, request.request_id, request.attempt, finished, request.num_emitted)

    def fail(self, request: OwnedRequest, failure: m.Failure) -> None:
        self.release(request)
        total_ms = round((self._context.now - request.received_at) * 1000, 3)
        self._log(request, failure.code, stage=request.stage, total_ms=total_ms)
        self._send(m.FAILED, request.request_id, request.attempt, failure, request.num_emitted)

    def refuse(self, request_id: bytes, attempt: Attempt, failure: m.Failure) -> None:
        """End an attempt that holds no request."""
        self._send(m.FAILED, request_id, attempt, failure)

    def release(self, request: OwnedRequest) -> None:
        """Send what is held of a request."""
        row = self.forget(request)
        if row is not None:
            self._rows.append(row)
            request.sent_at = self._context.now

    def release_due(self) -> None:
        """Send what was held for long enough."""
        now = self._context.now
        for request in [r for r in self._holding.values() if _sent_at(r) + self._interval_s <= now]:
            self.release(request)

    def release_all(self) -> None:
        for request in list(self._holding.values()):
            self.release(request)

    def forget(self, request: OwnedRequest) -> StepRow | None:
        """Take what is held of a request: nobody else sends it."""
        self._holding.pop(request.request_id, None)
        row, request.held_row = request.held_row, None
        return row

    def next_deadline(self) -> float | None:
        """When something that is held must be sent."""
        if not self._holding:
            return None
        return min(map(_sent_at, self._holding.values())) + self._interval_s

    def check(self) -> None:
        for request_id, request in self._holding.items():
            row = request.held_row
            assert row is not None
            assert row.request_id == request_id
            assert row.attempt == request.attempt
            assert row.seq + row.num_tokens == request.num_emitted

    def flush(self) -> None:
        """Send what the event gave."""
        if self._rows:
            self._context.do(SendBroker(encode_step(self._rows)))
            self._rows = []
        self._context.effects.extend(self._ends)
        self._ends = []

    def _send_or_hold(self, request: OwnedRequest, row: StepRow, *, is_last: bool) -> None:
        now, held = self._context.now, request.held_row
        if held is not None:
            row = msgspec.structs.replace(
                held,
                token_ids=held.token_ids + row.token_ids,
                text=held.text + row.text,
                extras=join_extras(held.extras, row.extras),
            )
        request.held_row = row
        if is_last or request.sent_at is None or now >= request.sent_at + self._interval_s:
            self.release(request)
        else:
            self._holding[request.request_id] = request

    def _text(self, request: OwnedRequest, token_id: int) -> str:
        assert request.detokenizer is not None
        if self._is_end_token(request, token_id):
            return ""
        return request.detokenizer.feed(token_id)

    def _is_end_token(self, request: OwnedRequest, token_id: int) -> bool:
        """True for a token that ends the text and is no part of it."""
        params = request.generate.sampling
        is_eos = token_id in self._context.vocabulary.eos_token_ids and not params.ignore_eos
        return is_eos or token_id in params.stop_token_ids

    def _log(self, request: OwnedRequest, outcome: str, **fields: object) -> None:
        """This worker's part; the broker writes the one line of the request at `info`."""
        sequence = request.sequence
        fields |= {
            "request_id": request.request_id.hex(),
            "attempt": request.attempt.n,
            "outcome": outcome,
            "prompt_tokens": sequence.num_prompt if sequence else 0,
            "cached_tokens": min(sequence.num_cached, sequence.num_prompt) if sequence else 0,
            "output_tokens": request.num_emitted,
            "prefill_worker": request.prefill_worker,
            "placement": request.placement.reason if request.placement else "",
            "placement_ms": request.placement_ms(),
            "num_preemptions": sequence.num_preemptions if sequence else 0,
            "num_drafted": sequence.num_drafted if sequence else 0,
            "num_accepted": sequence.num_accepted if sequence else 0,
        }
        self._context.log("request.served", "debug", **fields)

    def _send(
        self,
        kind: str,
        request_id: bytes,
        attempt: Attempt,
        body: m.Finished | m.Failure,
        num_tokens: int = 0,
    ) -> None:
        header = encode_header(kind, request_id, attempt=attempt, seq=num_tokens)
        self._ends.append(SendBroker([header, encode_body(body)]))


def _sent_at(request: OwnedRequest) -> float:
    assert request.sent_at is not None, "a first token is not held"
    return request.sent_at
