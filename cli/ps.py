"""`llmrt ps`: workers and requests as the broker sees them now."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from llmrt.cli.options import BrokerOption, JsonOption, endpoint
from llmrt.cli.tables import columns

if TYPE_CHECKING:
    from llmrt.wire.messages import PsReply

_WATCH_S = 1.0
_CLEAR_SCREEN = "\x1b[H\x1b[J"


def ps(
    broker: BrokerOption = None,
    json_output: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="again every second")] = False,
) -> None:
    """Show workers and running requests.

    Example: llmrt ps --watch
    """
    from llmrt.actor.runtime import run

    raise typer.Exit(run(_ps(endpoint(broker), as_json=json_output, watch=watch)))


async def _ps(broker: str, *, as_json: bool, watch: bool) -> None:
    import asyncio

    import msgspec

    from llmrt.client import AsyncClient

    async with AsyncClient(broker) as client:
        while True:
            reply = await client.workers()
            if as_json:
                print(json.dumps(msgspec.to_builtins(reply)), flush=True)
            else:
                print(f"{_CLEAR_SCREEN if watch else ''}{table(reply)}", flush=True)
            if not watch:
                return
            await asyncio.sleep(_WATCH_S)


def table(reply: "PsReply") -> str:
    """For people: a line per worker, worker with a queue, refused link, worker whose KV had
    changed, and request, and all counters but those of 0.
    """
    workers = [
        (
            row.worker_id,
            row.role,
            row.state,
            row.model,
            f"{row.num_running}+{row.num_waiting}",
            f"{row.num_blocks - row.num_free_blocks - row.num_cached_blocks}"
            f"+{row.num_cached_blocks}/{row.num_blocks}",
            f"{row.tokens_per_s:.1f}",
            f"{row.heartbeat_age_s:.1f}",
            " ".join(f"{peer}:{kind}" for peer, kind in sorted(row.links.items())) or "-",
        )
        for row in reply.workers
    ]
    requests = [
        (
            row.request_id,
            row.stage,
            row.decode_worker or "-",
            row.prefill_worker or "-",
            str(row.num_tokens),
            f"{row.age_s:.1f}",
        )
        for row in reply.requests
    ]
    counters = " ".join(f"{name}={n}" for name, n in sorted(reply.counters.items()) if n)
    heads = (
        "WORKER",
        "ROLE",
        "STATE",
        "MODEL",
        "RUN+WAIT",
        "USED+CACHED",
        "TOK/S",
        "BEAT",
        "LINKS",
    )
    parts = [columns(heads, workers)]
    queues = [
        f"{row.worker_id}: {row.num_waiting} requests wait, the oldest came "
        f"{row.oldest_waiting_s:.1f} s ago"
        for row in reply.workers
        if row.num_waiting and row.oldest_waiting_s
    ]
    refusals = [
        f"link of {row.worker_id} to {peer} is refused: {reason}"
        for row in reply.workers
        for peer, reason in sorted(row.refusals.items())
    ]
    mismatches = [
        f"KV of {row.worker_id} had changed, and was not used: {row.num_checksum_mismatches} times "
        f"on its way, {row.num_seal_mismatches} times in the cache"
        for row in reply.workers
        if row.num_checksum_mismatches or row.num_seal_mismatches
    ]
    writers = [
        f"{row.worker_id} ended {row.num_fenced} silent prefill workers by force, and "
        f"{row.num_quarantined_blocks} of its blocks wait for the end of their writer"
        for row in reply.workers
        if row.num_fenced or row.num_quarantined_blocks
    ]
    notes = (queues, refusals, mismatches, writers)
    parts += ["\n".join(lines) for lines in notes if lines]
    if requests:
        heads_of_requests = ("REQUEST", "STAGE", "DECODE", "PREFILL", "TOKENS", "AGE")
        parts.append(columns(heads_of_requests, requests))
    parts.append(f"up {reply.uptime_s:.0f} s {counters}".rstrip())
    return "\n\n".join(parts)
