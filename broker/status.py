"""What `ps` shows."""

from itertools import islice

from msgspec.structs import replace

from llmrt.broker.registry import Worker
from llmrt.broker.requests import Request
from llmrt.broker.state import State
from llmrt.wire.envelope import encode_body
from llmrt.wire.messages import PsReply, RequestRow, WorkerRow

# A row is some 200 bytes, and a body at most 1 MiB; the counters say how many there are.
MAX_WORKER_ROWS = 1000
MAX_REQUEST_ROWS = 1000
MAX_LINKS = 64
# A row of a link is some 400 bytes: of many workers, some are left out.
MAX_LINK_ROWS = 1024
MAX_REFUSALS, MAX_REASON_CHARS = 4, 200


def ps_reply(state: State, now: float) -> bytes:
    """The encoded `PsReply`, with the oldest requests if there are too many."""
    assert state.started_at is not None, "set by the first event"
    reply = PsReply(
        broker_epoch=state.epoch,
        uptime_s=now - state.started_at,
        workers=tuple(
            _worker_row(state, worker, now) for worker in islice(state.workers, MAX_WORKER_ROWS)
        ),
        requests=tuple(
            _request_row(request, now)
            for request in islice(state.requests.live.values(), MAX_REQUEST_ROWS)
        ),
        counters={
            **state.counters,
            "requests_live": len(state.requests.live),
            "requests_homeless": len(state.requests.homeless),
            "requests_ended_kept": len(state.requests.ended),
            "output_kept_bytes": state.requests.output.used,
            "prompt_kept_bytes": state.requests.prompt_bytes,
            "workers_alive": len(state.workers),
            "clients_known": len(state.clients),
        },
    )
    return encode_body(reply)


def _worker_row(state: State, worker: Worker, now: float) -> WorkerRow:
    load = worker.load
    return WorkerRow(
        worker_id=worker.name.worker_id,
        epoch=worker.name.epoch,
        role=worker.card.role,
        state=_state_of(state, worker, now),
        model=worker.card.model,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_blocks=load.num_blocks,
        num_free_blocks=load.num_free_blocks,
        num_cached_blocks=load.num_cached_blocks,
        kv_bytes_read=load.kv_bytes_read,
        tokens_per_s=round(worker.tokens_per_s, 1),
        heartbeat_age_s=round(now - worker.load_at, 3),
        links=dict(islice(load.links.items(), MAX_LINKS)),
        numerics_id=worker.card.contract.numerics_id,
        steps_s=round(load.steps_s, 6),
        python_s=round(load.python_s, 6),
        num_drafted=load.num_drafted,
        num_accepted=load.num_accepted,
        num_prefill_tokens=load.num_prefill_tokens,
        oldest_waiting_s=round(load.oldest_waiting_s, 3),
        num_checksum_mismatches=load.num_checksum_mismatches,
        num_fenced=load.num_fenced,
        num_handed_over=load.num_handed_over,
        handover_s=round(load.handover_s, 6),
        num_quarantined_blocks=load.num_quarantined_blocks,
        num_seal_mismatches=load.num_seal_mismatches,
        refusals={
            peer: reason[:MAX_REASON_CHARS]
            for peer, reason in islice(load.refusals.items(), MAX_REFUSALS)
        },
        link_rows={
            peer: replace(row, why_not=_short(row.why_not), numa=row.numa[:MAX_REASON_CHARS])
            for peer, row in islice(
                load.link_rows.items(), min(MAX_LINKS, MAX_LINK_ROWS // len(state.workers))
            )
        },
    )


def _short(reasons: dict[str, str]) -> dict[str, str]:
    first = islice(reasons.items(), MAX_REFUSALS)
    return {name[:16]: reason[:MAX_REASON_CHARS] for name, reason in first}


def _state_of(state: State, worker: Worker, now: float) -> str:
    if worker.suspect_at is not None:
        return "unreachable"
    return "stale" if state.workers.is_stale(worker, now) else "alive"


def _request_row(request: Request, now: float) -> RequestRow:
    return RequestRow(
        request_id=request.request_id.hex(),
        stage=request.stage,
        decode_worker=request.owner_name,
        prefill_worker=request.prefill_worker,
        num_tokens=request.stream.next_seq,
        age_s=round(now - request.admitted_at, 3),
    )
