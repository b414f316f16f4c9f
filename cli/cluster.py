"""The processes of a cluster on this host, and what is said about them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmrt.cli.config import flag_name
from llmrt.wire.errors import ModelNotFound

if TYPE_CHECKING:
    from llmrt.actor.supervisor import Child, ChildEvent, RestartBudget


def broker_child(flags: Mapping[str, object], config: Path | None) -> "Child":
    return _child("broker", ["broker"], flags, config)


def worker_child(
    worker_id: str, role: str, flags: Mapping[str, object], config: Path | None
) -> "Child":
    own = {"role": role, "worker_id": worker_id}
    return _child(worker_id, ["worker"], {**flags, **own}, config)


def check_model(model: Path) -> None:
    """Raise `ModelNotFound` before any process is started."""
    if not model.exists():
        raise ModelNotFound(f"no model at {model}: give the path of a GGUF file or folder")


class Cluster:
    """Children under one supervisor. `when_ready` is called once all of them serve."""

    def __init__(self, children: "Sequence[Child]", when_ready: Callable[[], None]) -> None:
        self._children = children
        self._when_ready = when_ready
        self._not_ready = {child.name for child in children}
        self.pids: dict[str, int] = {}

    async def run(self, make_budget: "Callable[[], RestartBudget] | None" = None) -> None:
        """Until cancelled; raises the error that names a child that cannot run."""
        from llmrt.actor.supervisor import RestartBudget, Supervisor

        supervisor = Supervisor(
            self._children, self._take, make_budget=make_budget or RestartBudget
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
                was_waiting = bool(self._not_ready)
                self._not_ready.discard(name)
                if was_waiting and not self._not_ready:
                    self._when_ready()
            case Exited(_, pid, exit_code, pause_s):
                log.warning(
                    "child.exited", child=name, pid=pid, exit_code=exit_code, pause_s=pause_s
                )


def _child(
    name: str, command: list[str], flags: Mapping[str, object], config: Path | None
) -> "Child":
    from llmrt.actor.supervisor import Child

    argv = [sys.executable, "-m", "llmrt.cli.main", *command]
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
