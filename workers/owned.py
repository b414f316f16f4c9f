"""Requests that this worker owns, from dispatch to the end. Pure.

    tokenizing  the shell turns the prompt into token ids
    waiting     queued for room, also after a preemption
    prefill     the prompt is computed, here or by a prefill worker
    decode      tokens come

One owner, one sequencer: every token of a request leaves here, also the first one that a prefill
worker sampled, under the request's attempt and the next sequence number. Each request ends with
exactly one FINISHED or FAILED.
"""

from array import array
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from llmrt.engine.batch import Drawn, SequenceId
from llmrt.engine.detokenizer import Detokenizer
from llmrt.engine.sequence import Sequence
from llmrt.wire import messages as m
from llmrt.wire.arrays import unpack_u32
from llmrt.wire.envelope import Header, frame_at
from llmrt.wire.errors import (
    DeadlineExceeded,
    InternalError,
    LlmrtError,
    Overloaded,
    RequestCancelled,
)
from llmrt.wire.ids import Attempt, RequestId, WorkerId, WorkerName
from llmrt.wire.sampling import SamplingParams, check_sampling
from llmrt.workers.admission import check_token_ids, max_length
from llmrt.workers.answers import Answers, End, Tokens
from llmrt.workers.context import WorkerContext
from llmrt.workers.effects import Tokenize
from llmrt.workers.extras import encode_extras
from llmrt.workers.grants import OutgoingGrants
from llmrt.workers.handover import Arrival
from llmrt.workers.links import PeerLinks
from llmrt.workers.request import OwnedRequest
from llmrt.workers.tombstones import Tombstones
from llmrt.workers.weighing import Weighing


class OwnedRequests:
    """Table of requests by id."""

    def __init__(self, context: WorkerContext, links: PeerLinks) -> None:
        self._context = context
        self._links = links
        self.grants = OutgoingGrants(context, links, self)
        self._weighing = Weighing(context, links)
        self._requests: dict[RequestId, OwnedRequest] = {}
        self._by_sequence: dict[SequenceId, OwnedRequest] = {}
        self._deadlines: list[tuple[float, RequestId, Attempt]] = []
        self._ended: Tombstones[RequestId] = Tombstones()
        self._answers = Answers(context)
        self._undelivered: list[tuple[OwnedRequest, Tokens, Drawn, float]] = []

    # -- messages of the broker --------------------------------------------------------------

    def dispatched(
        self,
        header: Header,
        route: m.Route,
        body: m.Generate | m.Tokenize,
        raw: tuple[bytes, ...],
        *,
        deadline: float | None,
    ) -> None:
        """A request to own, or a later attempt at one that is owned already."""
        request_id, attempt = RequestId(header.request_id), header.attempt
        if self._ended.covers(request_id, attempt):
            self._context.counters["late_dispatches"] += 1
            return
        known = self._requests.get(request_id)
        if known is not None:
            if attempt <= known.attempt:
                return
            self._drop(known)
        request = self._make(header, route, body, raw, deadline=deadline)
        self._requests[request_id] = request
        self._remember_deadline(request)
        try:
            self._admit(request, raw[0] if raw else b"")
        except LlmrtError as error:
            self._fail(request, error)

    def refuse(self, header: Header, error: LlmrtError) -> None:
        """End an attempt that holds no request: its client is told why."""
        failure = m.Failure(code=error.error_code, message=error.message)
        self._answers.refuse(header.request_id, header.attempt, failure)
        self._ended.bury(RequestId(header.request_id), header.attempt)

    def tokenized(
        self,
        request_id: RequestId,
        attempt: Attempt,
        token_ids: "array[int] | None",
        failure: m.Failure | None,
    ) -> None:
        request = self._requests.get(request_id)
        if request is None or request.attempt != attempt or request.stage != "tokenizing":
            return
        if token_ids is None:
            assert failure is not None
            self._end_failed(request, failure)
            return
        request.tokenized_at = self._context.now
        if request.kind == m.TOKENIZE:
            raw = [token_ids.tobytes()]
            self._context.send_broker(m.TOKENIZED, request_id=request_id, attempt=attempt, raw=raw)
            self._drop(request)
            return
        try:
            self._queue(request, token_ids)
        except LlmrtError as error:
            self._fail(request, error)

    def cancelled(self, request_id: RequestId, attempt: Attempt) -> None:
        request = self._requests.get(request_id)
        if request is None or request.attempt > attempt:
            self._ended.bury(request_id, attempt)
            return
        self._fail(request, RequestCancelled("the request was cancelled"))

    # -- steps -------------------------------------------------------------------------------

    def place(self) -> None:
        """Offer the prompts at the head of the queue, as far as they go to other workers."""
        scheduler = self._context.scheduler
        for sequence in scheduler.unplaced():
            if not scheduler.has_slot():
                return
            if scheduler.awaits_prefix(sequence):
                continue
            request = self._by_sequence[sequence.sequence_id]
            request.placement = self._weighing.choose(request, sequence)
            peer = request.placement.worker
            if peer is None:
                sequence.is_placed = True
                continue
            if not self.grants.offer(
                sequence, peer, request.request_id, request.attempt, deadline=request.deadline
            ):
                return
            self._start(request)
            request.prefill_worker = peer.worker_id
            self._weighing.offered(peer, sequence)

    def step_started(self, sequence_ids: Iterable[SequenceId]) -> None:
        for sequence_id in sequence_ids:
            request = self._by_sequence.get(sequence_id)
            if request is not None and request.stage == "waiting":
                self._start(request)
                request.prefill_worker = self._context.settings.name.worker_id

    def drawn(self, sequence: Sequence, drawn: Drawn, returned_at: float) -> None:
        """A step gave tokens: behind the last one of a request nothing is computed further."""
        request = self._by_sequence[sequence.sequence_id]
        tokens = self._answers.judge(request, drawn.token_ids)
        self._undelivered.append((request, tokens, drawn, returned_at))
        if tokens.end is not None:
            self._context.scheduler.remove(sequence)

    def deliver(self) -> None:
        """Tell what the last step gave."""
        if not self._undelivered:
            return
        undelivered, self._undelivered = self._undelivered, []
        for request, tokens, drawn, returned_at in undelivered:
            if request.first_token_at is None:
                request.first_token_at = returned_at
                assert request.started_at is not None
                request.prefill_stages_ms = {"prefill": (returned_at - request.started_at) * 1000}
            extras = encode_extras(drawn.logprobs[: len(tokens.token_ids)])
            self._emit(request, tokens, extras)

    def step_failed(self, sequences: Iterable[Sequence], error: LlmrtError) -> None:
        for sequence in sequences:
            self._fail(self._by_sequence[sequence.sequence_id], error)

    def flush(self) -> None:
        """Send what this event gave."""
        self._answers.flush()

    # -- prompts that were offered to other workers -----------------------------------------

    def prompt_arrived(self, arrival: Arrival) -> None:
        request = self._by_sequence[arrival.sequence.sequence_id]
        # Its token leaves at once, as a first one: the extras are P's, and joined with nothing.
        self._answers.release(request)
        request.sent_at = None
        commit, now = arrival.commit, self._context.now
        self._weighing.arrived(request, arrival)
        if request.first_token_at is None:
            request.first_token_at = now
            # What P says of itself is bounded by what was measured here: the stages must sum.
            remote_ms = (now - arrival.offered_at) * 1000
            queue_ms = min(max(commit.queue_ms, 0.0), remote_ms)
            prefill_ms = min(max(commit.prefill_ms, 0.0), remote_ms - queue_ms)
            request.prefill_stages_ms = {
                "prefill_queue": queue_ms,
                "prefill": prefill_ms,
                "handover": remote_ms - queue_ms - prefill_ms,
            }
            arrival.sequence.num_cached = max(arrival.sequence.num_cached, commit.num_cached)
        request.stage = "decode"
        self._context.scheduler.join(
            arrival.sequence, arrival.blocks, commit.token_id, num_sealed=arrival.num_sealed
        )
        self._emit(request, self._answers.judge(request, (commit.token_id,)), commit.extras)

    def prompt_failed(self, sequence: Sequence, reason: str) -> None:
        """The prompt was not computed there: it waits again, and that worker is not asked again."""
        request = self._by_sequence[sequence.sequence_id]
        self._weighing.gone(sequence)
        if request.named_prefill is not None:
            request.excluded.add(request.named_prefill)
        self._context.counters["prefills_moved"] += 1
        self._context.log(
            "request.prefill_moved",
            "warning",
            request_id=request.request_id.hex(),
            peer=request.prefill_worker,
            error=reason,
        )
        request.stage = "waiting"
        self._context.scheduler.unpark(sequence)

    # -- time --------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        held_until = self._answers.next_deadline()
        if not self._deadlines:
            return held_until
        deadline = self._deadlines[0][0]
        return deadline if held_until is None else min(deadline, held_until)

    def stopping(self) -> None:
        """The worker leaves: whoever goes on need not compute again what is held here."""
        self._answers.release_all()

    def tick(self) -> None:
        self._answers.release_due()
        while self._deadlines and self._deadlines[0][0] <= self._context.now:
            _, request_id, attempt = heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.attempt == attempt:
                self._fail(
                    request,
                    DeadlineExceeded(
                        f"the deadline passed in stage {request.stage} after "
                        f"{self._context.now - request.received_at:.3f} s"
                    ),
                )

    def holding(self) -> list[m.Held]:
        return [
            m.Held(r.request_id, r.attempt.epoch, r.attempt.n, r.stage)
            for r in self._requests.values()
        ]

    def __len__(self) -> int:
        return len(self._requests)

    def check(self) -> None:
        for request in self._requests.values():
            assert (request.sequence is None) == (request.stage == "tokenizing")
            assert request.held_row is None or self._context.settings.stream_interval_s
        self._answers.check()
        scheduler = self._context.scheduler
        # Ended, and not yet told.
        ended = {r.sequence for r, tokens, *_ in self._undelivered if tokens.end is not None}
        for sequence_id, request in self._by_sequence.items():
            places = (scheduler.waiting, scheduler.running, scheduler.parked)
            num_places = sum(sequence_id in place for place in places)
            assert num_places == (request.sequence not in ended)
        assert all(self._requests[r.request_id] is r for r, *_ in self._undelivered)
        self.grants.check()

    def _remember_deadline(self, request: OwnedRequest) -> None:
        if request.deadline is None:
            return
        heappush(self._deadlines, (request.deadline, request.request_id, request.attempt))
        if len(self._deadlines) > 2 * len(self._requests) + 1024:
            live = self._requests
            self._deadlines = [entry for entry in self._deadlines if entry[1] in live]
            heapify(self._deadlines)

    # -- admission ---------------------------------------------------------------------------

    def _make(
        self,
        header: Header,
        route: m.Route,
        body: m.Generate | m.Tokenize,
        raw: tuple[bytes, ...],
        *,
        deadline: float | None,
    ) -> OwnedRequest:
        now = self._context.now
        add_special = True
        if isinstance(body, m.Tokenize):
            add_special = body.add_special
            body = m.Generate(
                prompt_kind="chat" if body.messages else "text",
                sampling=SamplingParams(),
                messages=body.messages,
            )
        forced = unpack_u32(frame_at(raw[-1:], 0)) if route.num_forced else array("I")
        named = None
        if route.prefill_worker is not None:
            named = WorkerName(WorkerId(route.prefill_worker), route.prefill_epoch)
        return OwnedRequest(
            request_id=RequestId(header.request_id),
            attempt=header.attempt,
            kind=route.kind,
            generate=body,
            deadline=deadline,
            received_at=now,
            named_prefill=named,
            forced=forced,
            add_special=add_special,
            admitted_unix_s=route.admitted_unix_s,
        )

    def _admit(self, request: OwnedRequest, prompt: bytes) -> None:
        settings = self._context.settings
        if not settings.does_decode:
            raise InternalError(f"{settings.name.worker_id} is a prefill worker and owns nothing")
        if request.kind == m.GENERATE:
            check_sampling(request.generate.sampling)
            check_token_ids(settings, request.generate.sampling)
            if len(self._requests) > settings.max_waiting:
                raise Overloaded(
                    f"{settings.name.worker_id} holds {settings.max_waiting} requests already: "
                    "try again later, or raise --max-waiting"
                )
        if request.generate.prompt_kind == "tokens":
            token_ids = unpack_u32(prompt)
            self.tokenized(request.request_id, request.attempt, token_ids, None)
        else:
            self._context.do(
                Tokenize(
                    request.request_id,
                    request.attempt,
                    request.generate,
                    prompt,
                    add_special=request.add_special,
                    admitted_unix_s=request.admitted_unix_s,
                )
            )

    def _queue(self, request: OwnedRequest, prompt: "array[int]") -> None:
        context, params = self._context, request.generate.sampling
        sequence = Sequence(
            sequence_id=SequenceId(context.new_sequence_id()),
            token_ids=prompt + request.forced,
            num_prompt=len(prompt),
            params=params,
            seed=params.seed or 0,
            max_length=max_length(context.settings, prompt, params.max_tokens),
            end_token_ids=context.vocabulary.eos_token_ids,
            priority=request.generate.priority,
            order=request.received_at,
        )
        request.sequence = sequence
        request.num_emitted = len(request.forced)
        request.detokenizer = Detokenizer(
            context.vocabulary,
            stop=params.stop,
            min_tokens=params.min_tokens,
            previous_token_ids=request.forced,
            continues=True,
        )
        request.stage = "waiting"
        self._by_sequence[sequence.sequence_id] = request
        # What was passed on may hold the last token already, and only the end was lost.
        forced, length = request.forced, len(sequence.token_ids)
        end = self._answers.end_after(request, forced[-1], length) if forced else None
        if end is not None:
            self._finish(request, end)
        else:
            context.scheduler.add(sequence)

    # -- tokens and ends ---------------------------------------------------------------------

    def _start(self, request: OwnedRequest) -> None:
        request.stage = "prefill"
        if request.started_at is None:
            request.started_at = self._context.now

    def _emit(self, request: OwnedRequest, tokens: Tokens, extras: bytes) -> None:
        request.stage = "decode"
        self._answers.tokens(request, tokens, extras)
        if tokens.end is not None:
            self._finish(request, tokens.end)

    def _finish(self, request: OwnedRequest, end: End) -> None:
        self._answers.finish(request, end)
        self._drop(request)

    def _fail(self, request: OwnedRequest, error: LlmrtError) -> None:
        self._end_failed(request, m.Failure(code=error.error_code, message=error.message))

    def _end_failed(self, request: OwnedRequest, failure: m.Failure) -> None:
        self._answers.fail(request, failure)
        self._drop(request)

    def _drop(self, request: OwnedRequest) -> None:
        self._answers.forget(request)
        self._ended.bury(request.request_id, request.attempt)
        del self._requests[request.request_id]
        sequence = request.sequence
        if sequence is not None:
            del self._by_sequence[sequence.sequence_id]
            self._weighing.gone(sequence)
            self.grants.withdraw(sequence)
            if not sequence.is_removed:
                self._context.scheduler.remove(sequence)
