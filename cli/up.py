"""`llmrt up`: a broker and its workers on this host, watched by one process."""

import json
from contextlib import suppress
from typing import Annotated, Any

import typer

from llmrt.broker.settings import BrokerSettings
from llmrt.cli.cluster import Cluster, broker_child, check_model, wait_until_linked, worker_child
from llmrt.cli.config import env_name, load
from llmrt.cli.options import BROKER_HELP, WORKER_HELP, ConfigOption, JsonOption, with_settings
from llmrt.cli.settings import UpSettings
from llmrt.wire.errors import ConfigError, LlmrtError
from llmrt.workers.settings import WorkerSettings, check_link

_ROLES = ("both", "prefill", "decode")
MAX_WORKERS = 256  # of a role
LOADING_S = 600.0


def _count(role: str) -> Any:
    text = f"number of such workers [0, {env_name('up', role)}]"
    return typer.Option(min=0, max=MAX_WORKERS, help=text, show_default=False)


def _end(field: str) -> Any:
    default = getattr(BrokerSettings(), field)
    text = f"{BROKER_HELP[field]} [{default}, {env_name('broker', field)}]"
    return typer.Option(help=text, show_default=False)


@with_settings(WorkerSettings, WORKER_HELP, without=("role", "broker", "worker_id", "link"))
def up(
    both: Annotated[int | None, _count("both")] = None,
    prefill: Annotated[int | None, _count("prefill")] = None,
    decode: Annotated[int | None, _count("decode")] = None,
    bind: Annotated[str | None, _end("bind")] = None,
    worker_bind: Annotated[str | None, _end("worker_bind")] = None,
    config: ConfigOption = None,
    json_output: JsonOption = False,
    **flags: object,
) -> None:
    """Start a broker and its workers on this host, and start again what dies.

    Example, colocated: llmrt up --model model.gguf

    Example, split: llmrt up --prefill 1 --decode 2 --model model.gguf

    Other settings of the broker (llmrt broker --help) are taken from LLMRT_BROKER_* and --config.
    """
    wanted = {"both": both, "prefill": prefill, "decode": decode}
    counts = check_counts(load(UpSettings, wanted, config))
    asked = {"bind": bind, "worker_bind": worker_bind, "log_level": flags["log_level"]}
    settings = load(BrokerSettings, asked, config)
    worker = load(WorkerSettings, flags, config)
    check_model(worker.model)
    check_link(worker, sum(counts.values()))
    import asyncio

    import structlog

    from llmrt.actor.log import configure
    from llmrt.actor.runtime import run
    from llmrt.actor.sockets import check_all_free

    # Before anything is loaded: a taken port must not cost a minute.
    free = check_all_free(settings.bind, settings.worker_bind)
    ends = dict(zip(("bind", "worker_bind"), free, strict=True))
    configure("up", level=settings.log_level)
    workers = [(f"{role}-{n}", role) for role in _ROLES for n in range(counts[role])]
    flags["broker"] = ends["worker_bind"]
    flags["local_workers"] = len(workers)
    # Requests that come while the workers load wait for them; if none can start, all of this ends.
    window_s = settings.startup_window_s or LOADING_S
    children = [
        broker_child({**asked, **ends, "startup_window_s": window_s}, config),
        *(worker_child(name, role, flags, config) for name, role in workers),
    ]

    cluster = Cluster(children)

    async def main() -> None:
        serving = asyncio.create_task(cluster.run())
        announcing = asyncio.create_task(announce())
        try:
            await asyncio.wait((serving, announcing), return_when=asyncio.FIRST_EXCEPTION)
            if announcing.done():  # with an error, or both have ended
                await announcing
            await serving
        finally:
            announcing.cancel()
            serving.cancel()
            await asyncio.gather(serving, announcing, return_exceptions=True)

    async def announce() -> None:
        await cluster.ready.wait()
        has_met = not counts["prefill"]
        with suppress(LlmrtError):  # a broker that dies meanwhile is started again
            has_met = has_met or await wait_until_linked(ends["bind"], counts["prefill"])
        if not has_met:
            log = structlog.get_logger(__name__)
            log.warning("cluster.not_linked", remedy="llmrt ps shows which workers have not met")
        print(banner(ends, dict(workers), cluster.pids, as_json=json_output), flush=True)

    raise typer.Exit(run(main(), is_server=True))


def check_counts(wanted: UpSettings) -> dict[str, int]:
    """One worker for both roles unless asked otherwise; somebody must decode."""
    counts = {role: getattr(wanted, role) for role in _ROLES}
    for role, count in counts.items():
        if not 0 <= count <= MAX_WORKERS:
            raise ConfigError(f"{role} is {count}: a number of workers from 0 to {MAX_WORKERS}")
    if not any(counts.values()):
        counts["both"] = 1
    if counts["both"] + counts["decode"] == 0:
        raise ConfigError(
            f"{counts['prefill']} prefill workers and none that decodes: add --decode 1"
        )
    return counts


def banner(
    ends: dict[str, str], workers: dict[str, str], pids: dict[str, int], *, as_json: bool
) -> str:
    """What a user needs next."""
    if as_json:
        rows = [
            {"worker_id": name, "role": role, "pid": pids[name]} for name, role in workers.items()
        ]
        return json.dumps({"event": "ready", **ends, "broker_pid": pids["broker"], "workers": rows})
    at = "" if ends["bind"] == BrokerSettings().bind else f" --broker {ends['bind']}"
    return (
        f"llmrt serves at {ends['bind']} with {', '.join(workers)}\n"
        f'  llmrt generate "The capital of France is" --max-tokens 8{at}\n'
        f"  llmrt chat{at}\n"
        f"  llmrt ps{at}"
    )
