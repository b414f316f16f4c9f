"""Who works on a request: placing it, and placing it again when its owner is lost."""

import math

from llmrt.broker.delivery import cancel_at_owner, fail, release_owner
from llmrt.broker.placement import choose
from llmrt.broker.prefixes import Prompt, prompt_of
from llmrt.broker.registry import Worker
from llmrt.broker.requests import Request
from llmrt.broker.state import State, Timer
from llmrt.wire.arrays import U32_BYTES
from llmrt.wire.envelope import encode_body, encode_header
from llmrt.wire.errors import LlmrtError, NoWorker, WorkerLost
from llmrt.wire.ids import NO_ATTEMPT, Attempt
from llmrt.wire.messages import DISPATCH, GENERATE, Route

# A request whose workers' processes died so often is taken for the cause.
MAX_KILLS = 2
# The news of a death comes so late at most: a request dispatched since then did not cause it.
DEATH_NEWS_S = 0.05
# Stamps are one per hop; more than this come from no honest client and would fill the header.
MAX_STAMPS = 16


def place(state: State, request: Request, now: float, *, avoid: Worker | None = None) -> None:
    """Give a request without owner to a worker, or let it wait for one."""
    owner = _choose_owner(state, request, now, avoid)
    if owner is not None:
        state.requests.homeless.pop(request.request_id, None)
        state.timers.drop((Timer.HOMELESS, request.request_id))
        _dispatch(state, request, owner, now)
        return
    state.requests.homeless[request.request_id] = request
    request.stage = "homeless"
    window_end = now + state.settings.resume_window_s
    state.timers.set_no_later((Timer.HOMELESS, request.request_id), window_end)


def place_homeless(state: State, now: float) -> None:
    """A worker has come: the requests that wait for one go on."""
    for request in list(state.requests.homeless.values()):
        place(state, request, now)


def lose_owner(state: State, request: Request, now: float, *, cause: str) -> None:
    """The attempt has ended without an end of the request: make another, if that may help.

    `cause` is one of `killed`, `silent`, `left`, `unsent`, `unnamed`, `gap`. A worker that left
    in good order and a message that was never sent are not held against the request.
    """
    lost, tries = request.owner, state.settings.max_attempts
    if cause in ("unnamed", "gap"):
        cancel_at_owner(state, request)
    release_owner(request)
    request.num_losses += cause not in ("left", "unsent")
    was_alive = now - request.dispatched_at > DEATH_NEWS_S
    request.num_kills += cause == "killed" and was_alive
    # From here on the request has no owner, and `check` wants it to be homeless.
    state.requests.homeless[request.request_id] = request
    if request.num_kills >= MAX_KILLS:
        error = f"{request.num_kills} workers died while they worked on this request: change it"
    elif request.num_losses >= tries:
        error = f"{tries} attempts were lost, the last one with {request.owner_name} ({cause})"
    elif request.stream.next_seq and not request.stream.is_resumable:
        error = (
            f"{request.owner_name} was lost ({cause}), and the tokens passed on were not kept: "
            "the output of all requests exceeds the broker's memory for it"
        )
    else:
        state.count("requests_resumed")
        state.log(
            "request.lost_owner",
            "warning",
            request_id=request.request_id.hex(),
            worker_id=request.owner_name,
            attempt=request.attempt.n,
            num_tokens=request.stream.next_seq,
            cause=cause,
        )
        place(state, request, now, avoid=lost)
        return
    fail(state, request, WorkerLost(error), now)


def give_up_homeless(state: State, request: Request, now: float) -> None:
    """No worker came in time."""
    window_s, model = state.settings.resume_window_s, request.model
    error: LlmrtError
    if request.attempt == NO_ATTEMPT:
        error = NoWorker(f"no worker of model {model!r} could be reached within {window_s:g} s")
    else:
        error = WorkerLost(
            f"{request.owner_name} was lost, and no worker of model {model!r} could take the "
            f"request over within {window_s:g} s: start another worker"
        )
    fail(state, request, error, now)


def budget_ms(request: Request, now: float) -> int:
    """What is left of the request's time as it leaves; 0 if nothing is."""
    return max(0, math.ceil((request.deadline - now) * 1000))


def _choose_owner(
    state: State, request: Request, now: float, avoid: Worker | None
) -> Worker | None:
    # Tokens that were passed on can only be continued where they mean the same.
    workers = state.workers.decoders(request.model, family=request.family, avoid=avoid)
    policy, cursor = state.settings.decode_policy, state.num_decode_choices
    state.num_decode_choices += 1
    if len(workers) <= 1:
        return workers[0] if workers else None
    prompt = _prompt_for(policy, request)
    registry = state.workers
    candidates = [registry.decode_candidate(worker, prompt, now) for worker in workers]
    return registry.named(choose(policy, candidates, cursor).worker_id)


def _choose_prefiller(state: State, request: Request, owner: Worker, now: float) -> Worker | None:
    if request.kind != GENERATE:
        return None
    workers = state.workers.prefillers(owner)
    # Each owner takes its own turns: two counters in step would always make the same pairs.
    policy, cursor = state.settings.prefill_policy, owner.num_prefill_choices
    owner.num_prefill_choices += 1
    if len(workers) <= 1:
        return workers[0] if workers else None
    prompt = _prompt_for(policy, request)
    candidates = [
        state.workers.prefill_candidate(
            worker, prompt if owner.is_copied_from(worker) else None, now
        )
        for worker in workers
    ]
    return state.workers.named(choose(policy, candidates, cursor).worker_id)


def _prompt_for(policy: str, request: Request) -> Prompt | None:
    """What a choice by this policy looks at; made once, and only where there is a choice."""
    if policy != "prefix-aware" or request.kind != GENERATE:
        return None
    if request.prompt is None:
        request.prompt = prompt_of(request.frames)
    return request.prompt


def _note_prompt(request: Request, owner: Worker, prefiller: Worker | None) -> None:
    """Remember who gets the prompt, and whose queue grows by what is new of it.

    An owner with a queue hands its prompts to its prefill worker, if there is one.
    """
    prompt = request.prompt
    if prompt is None:
        return
    num_new = prompt.num_tokens - owner.prefixes.num_known_tokens(prompt)
    owner.prefixes.note(prompt)
    if prefiller is not None and owner.is_copied_from(prefiller):
        num_new = prompt.num_tokens - prefiller.prefixes.num_known_tokens(prompt)
        prefiller.prefixes.note(prompt)
    request.await_prompt(prefiller or owner, num_new)


def _dispatch(state: State, request: Request, owner: Worker, now: float) -> None:
    request.owner, request.owner_name = owner, owner.name.worker_id
    owner.requests[request.request_id] = None
    request.attempt = Attempt(state.epoch, request.attempt.n + 1)
    request.stage, request.dispatched_at, request.num_unnamed = "waiting", now, 0
    _note_numerics(state, request, owner)
    prefiller = _choose_prefiller(state, request, owner, now)
    _note_prompt(request, owner, prefiller)
    request.prefill_worker = ""
    if prefiller is not None:
        prefiller.num_routed_prefills += 1
        request.prefill_worker = prefiller.name.worker_id
    forced = bytes(request.stream.token_ids)
    route = Route(
        kind=request.kind,
        prefill_worker=prefiller.name.worker_id if prefiller else None,
        prefill_epoch=prefiller.name.epoch if prefiller else 0,
        num_forced=len(forced) // U32_BYTES,
        admitted_unix_s=request.admitted_unix_s,
    )
    held_us = round((now - request.admitted_at) * 1e6)
    header = encode_header(
        DISPATCH,
        request.request_id,
        attempt=request.attempt,
        seq=request.stream.next_seq,
        budget_ms=budget_ms(request, now),
        stamps=(*request.stamps[: MAX_STAMPS - 1], held_us),
    )
    frames = [header, encode_body(route), *request.frames]
    state.to_worker(owner.routing_id, [*frames, forced] if forced else frames)
    state.count("dispatches")
    if state.logs_debug:
        state.log(
            "request.dispatched",
            "debug",
            request_id=request.request_id.hex(),
            worker_id=request.owner_name,
            prefill_worker=request.prefill_worker,
            attempt=request.attempt.n,
            num_tokens=request.stream.next_seq,
        )


def _note_numerics(state: State, request: Request, owner: Worker) -> None:
    """Another numerics id may draw other tokens than the lost worker would have."""
    numerics_id = owner.card.contract.numerics_id
    if request.stream.next_seq and request.numerics_id not in (None, numerics_id):
        state.count("resumes_on_other_numerics")
    request.numerics_id = numerics_id
