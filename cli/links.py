"""`llmrt links`: how KV blocks pass between workers, how fast, and why not better."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from llmrt.cli.options import BrokerOption, JsonOption, endpoint
from llmrt.cli.tables import columns

if TYPE_CHECKING:
    from llmrt.wire.messages import LinkRow, WorkerRow


def links(broker: BrokerOption = None, json_output: JsonOption = False) -> None:
    """Show the links between workers, with the rate that each showed at its start.

    Example: llmrt links --json
    """
    from llmrt.actor.runtime import run

    raise typer.Exit(run(_links(endpoint(broker), as_json=json_output)))


async def _links(broker: str, *, as_json: bool) -> None:
    import msgspec

    from llmrt.client import AsyncClient

    async with AsyncClient(broker) as client:
        workers = (await client.workers()).workers
    if as_json:
        rows = [
            {
                "worker": worker.worker_id,
                "role": worker.role,
                "peer": peer,
                **msgspec.structs.asdict(row),
            }
            for worker, peer, row in _rows(workers)
        ]
        print(json.dumps(rows), flush=True)
    else:
        print(table(workers), flush=True)


def table(workers: "Sequence[WorkerRow]") -> str:
    """For people: a line per end of a link."""
    lines = [
        (
            worker.worker_id,
            peer,
            worker.role,
            row.transport,
            _gb_per_s(row.bytes_per_s),
            _gb_per_s(row.recent_bytes_per_s),
            f"{row.latency_s * 1e6:.0f}" if row.latency_s else "-",
            row.numa or "-",
            "; ".join(f"{better}: {why}" for better, why in row.why_not.items()) or "-",
        )
        for worker, peer, row in _rows(workers)
    ]
    if not lines:
        return "no links: a link joins a worker of role prefill with one of role decode or both"
    heads = (
        "WORKER",
        "PEER",
        "ROLE",
        "TRANSPORT",
        "GB/S",
        "NOW",
        "LATENCY US",
        "NUMA",
        "NOT USED, AND WHY",
    )
    return columns(heads, lines)


def _rows(workers: "Sequence[WorkerRow]") -> "list[tuple[WorkerRow, str, LinkRow]]":
    return [
        (worker, peer, row)
        for worker in sorted(workers, key=lambda worker: worker.worker_id)
        for peer, row in sorted(worker.link_rows.items())
    ]


def _gb_per_s(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f}" if bytes_per_s else "-"
