"""The processes of a cluster on this host, and what is said about them."""

import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from llmrt.actor.spawning import Child, Spawned
from llmrt.cli.config import flag_name
from llmrt.wire.errors import InternalError, ModelNotFound

if TYPE_CHECKING:
    from llmrt.actor.supervisor import ChildEvent, RestartBudget
    from llmrt.wire.messages import WorkerRow

T = TypeVar("T")


def broker_child(flags: Mapping[str, object], config: Path | None) -> Child:
    return _child("broker", ["broker"], flags, config)


def worker_child(
    worker_id: str, role: str, flags: Mapping[str, object], config: Path | None
) -> Child:
    own = {"role": role, "worker_id": worker_id}
    return _child(worker_id, ["worker"], {**flags, **own}, config)


def check_model(model: Path) -> None:
    """Raise `ModelNotFound` before any process is started."""
    if not model.exists():
        raise ModelNotFound(f"no model at {model}: give the path of a GGUF file or folder")


async def wait_until_linked(bind: str, num_prefill: int, *, within_s: float = 10.0) -> bool:
    """Until every owner knows how to reach all prefill workers; False if that takes too long.

    Before that an owner computes prompts itself, which is right, but not what was asked for.
    """
    import asyncio
    from contextlib import suppress

    from llmrt.client import AsyncClient

    async with AsyncClient(bind) as client:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                # Other processes change this: only asking again tells.
                while True:
                    if are_linked((await client.workers()).workers, num_prefill):
                        return True
                    await asyncio.sleep(0.02)
    return False


def are_linked(workers: "Sequence[WorkerRow]", num_prefill: int) -> bool:
    owners = [row for row in workers if row.role != "prefill"]
    return len(workers) - len(owners) == num_prefill and all(
        sum(how in ("shm", "tcp") for how in row.links.values()) == num_prefill for row in owners
    )


class Cluster:
    """Children under one supervisor. `ready` is set once all of them have served.

    `pids` and `exit_codes` are the last ones, by child. `spawned` are children that run already.
    """

    def __init__(
        self,
        children: Sequence[Child],
        spawned: Mapping[str, Spawned] = MappingProxyType({}),
    ) -> None:
        import asyncio

        self.ready = asyncio.Event()
        self._children = children
        self._spawned = spawned
        self._not_ready = {child.name for child in children}
        self.pids: dict[str, int] = {}
        self.exit_codes: dict[str, int] = {}

    async def run(self, make_budget: "Callable[[], RestartBudget] | None" = None) -> None:
        """Until cancelled; raises the error that names a child that cannot run."""
        from llmrt.actor.supervisor import RestartBudget, Supervisor

        supervisor = Supervisor(
            self._children,
            self._take,
            make_budget=make_budget or RestartBudget,
            spawned=self._spawned,
        )
        await supervisor.run()

    def _take(self, event: "ChildEvent") -> None:
        import structlog

        from llmrt.actor.supervisor import Exited, Ready, Started

        log = structlog.get_logger(__name__)
        name = event.child.name
        match event:
            case Started(_, pid, num_restarts):
                self.pids[name] = pid
                log.info("child.started", child=name, pid=pid, num_restarts=num_restarts)
            case Ready():
                log.info("child.ready", child=name, pid=self.pids[name])
                self._not_ready.discard(name)
                if not self._not_ready:
                    self.ready.set()
            case Exited(_, pid, exit_code, pause_s):
                self.exit_codes[name] = exit_code
                log.warning(
                    "child.exited", child=name, pid=pid, exit_code=exit_code, pause_s=pause_s
                )


async def while_serving(cluster: Cluster, work: "Callable[[], Awaitable[T]]") -> "T | int":
    """What `work` returns, or the exit code of a child that has said on stderr why it ended.

    No child is started again. Raises `InternalError` as `failed_code` does.
    """
    import asyncio

    from llmrt.actor.supervisor import RestartBudget

    serving = asyncio.ensure_future(cluster.run(lambda: RestartBudget(max_restarts=0)))
    working = asyncio.ensure_future(work())
    try:
        await asyncio.wait([serving, working], return_when=asyncio.FIRST_COMPLETED)
        return failed_code(cluster.exit_codes) if serving.done() else await working
    finally:
        working.cancel()
        serving.cancel()
        await asyncio.gather(working, serving, return_exceptions=True)


def failed_code(exit_codes: Mapping[str, int]) -> int:
    """That of the child that ended first; raises `InternalError` for one that could not say why."""
    name, code = next(iter(exit_codes.items()))
    if code <= 0:
        how = f"was ended by {signal.Signals(-code).name}" if code else "ended before it answered"
        raise InternalError(f"{name} {how}: if nobody did that, look for a lack of memory (dmesg)")
    return code


def _child(
    name: str, command: list[str], flags: Mapping[str, object], config: Path | None
) -> Child:
    argv = [sys.executable, "-m", "llmrt.cli.child", *command]
    if config is not None:
        argv += ["--config", str(config)]
    for field, value in flags.items():
        if value is True:
            argv.append(flag_name(field))
        elif value is False:
            argv.append(f"--no-{flag_name(field)[2:]}")
        elif value is not None:
            argv += [flag_name(field), str(value)]
    return Child(name, argv)


def private_flags(
    flags: Mapping[str, object], folder: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flags of a broker and of workers that live in `folder` for one command.

    They are silent unless something fails; a worker also says what is lost where it does not
    compute in the best way.
    """
    level, workers = flags["log_level"], f"ipc://{folder}/workers"
    broker = {"bind": f"ipc://{folder}/clients", "worker_bind": workers}
    own = {"broker": workers, "runtime_dir": folder}
    return (
        {**broker, "log_level": level or "error"},
        {**flags, **own, "log_level": level or "warning"},
    )
