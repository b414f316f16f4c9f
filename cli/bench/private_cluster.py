"""A cluster of its own for one measurement, with nothing left running."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from llmrt.cli.bench.subject import SPLIT
from llmrt.cli.cluster import (
    Cluster,
    broker_child,
    private_flags,
    wait_until_linked,
    while_serving,
    worker_child,
)
from llmrt.wire.errors import InternalError


def roles_of(layout: str) -> tuple[str, ...]:
    """One worker each."""
    return ("prefill", "decode") if layout == SPLIT else ("both",)


async def with_private_cluster(
    layout: str,
    flags: Mapping[str, object],
    config: Path | None,
    work: Callable[[str], Awaitable[int]],
) -> int:
    """Start the workers of a layout, and do `work` with the endpoint for clients.

    Returns what `work` returns, or the exit code of a child that has said on stderr why it ended:
    none is started again, since a figure across a restart would mean nothing.
    """
    with TemporaryDirectory(prefix="llmrt-") as folder:
        broker_flags, worker_flags = private_flags(flags, folder)
        broker = broker_flags["bind"]
        children = [
            worker_child(f"{role}-0", role, worker_flags, config) for role in roles_of(layout)
        ]
        cluster = Cluster([broker_child(broker_flags, config), *children])
        return await while_serving(cluster, lambda: _started(cluster, broker, layout, work))


async def _started(
    cluster: Cluster, broker: str, layout: str, work: Callable[[str], Awaitable[int]]
) -> int:
    await cluster.ready.wait()
    if layout == SPLIT and not await wait_until_linked(broker, 1):
        raise InternalError("the workers have not met: the layout would not be the one asked for")
    return await work(broker)
