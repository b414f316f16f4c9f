"""`llmrt run`: from a model file to an answer in one command, with nothing left running."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from llmrt.cli.answers import Answer, given, has_chat_template, show, summary
from llmrt.cli.cluster import Cluster, broker_child, check_model, worker_child
from llmrt.cli.config import load
from llmrt.cli.options import (
    SAMPLING,
    WORKER_HELP,
    ConfigOption,
    JsonOption,
    with_sampling,
    with_settings,
)
from llmrt.workers.settings import WorkerSettings

# One answer needs no more, and making a large arena takes longer than the answer (0.8 s/GB).
KV_TOKENS = 8192
_DECIDED_HERE = ("role", "broker", "worker_id", "link", "runtime_dir")


@with_settings(WorkerSettings, WORKER_HELP, without=_DECIDED_HERE)
@with_sampling
def run(
    prompt: Annotated[str, typer.Argument(help="what to ask; - reads stdin")],
    raw: Annotated[bool, typer.Option("--raw", help="continue the text, without template")] = False,
    config: ConfigOption = None,
    json_output: JsonOption = False,
    **options: object,
) -> None:
    """Load a model, answer one prompt, and leave nothing running.

    Example: llmrt run "What is the capital of France?" --model model.gguf
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = given({name: options.pop(name) for name in SAMPLING})
    options["log_level"] = options["log_level"] or "error"
    settings = load(WorkerSettings, options, config)
    check_model(settings.model)
    options["kv_tokens"] = settings.kv_tokens or KV_TOKENS
    from tempfile import TemporaryDirectory

    from llmrt.actor.log import configure
    from llmrt.actor.runtime import run as run_process

    configure("run", level="error")

    async def main() -> None:
        with TemporaryDirectory(prefix="llmrt-") as folder:
            answer = await _answer(
                text, Path(folder), config, options, sampling, is_raw=raw, as_json=json_output
            )
        if not json_output:
            print(summary(answer), file=sys.stderr)

    raise typer.Exit(run_process(main()))


async def _answer(
    text: str,
    folder: Path,
    config: Path | None,
    flags: Mapping[str, object],
    sampling: dict[str, Any],
    *,
    is_raw: bool,
    as_json: bool,
) -> Answer:
    import asyncio

    from llmrt.actor.supervisor import RestartBudget

    broker, workers = f"ipc://{folder}/clients", f"ipc://{folder}/workers"
    broker_flags = {"bind": broker, "worker_bind": workers, "log_level": flags["log_level"]}
    worker_flags = {**flags, "broker": workers, "runtime_dir": folder}
    cluster = Cluster(
        [
            broker_child(broker_flags, config),
            worker_child("both-0", "both", worker_flags, config),
        ]
    )

    async def ask() -> Answer:
        from llmrt.client import AsyncClient

        await cluster.ready.wait()
        async with AsyncClient(broker) as client:
            if is_raw or not await has_chat_template(client):
                stream = client.stream(text, **sampling)
            else:
                stream = client.chat_stream([{"role": "user", "content": text}], **sampling)
            return await show(stream, as_json=as_json)

    serving = asyncio.create_task(cluster.run(lambda: RestartBudget(max_restarts=0)))
    asking = asyncio.create_task(ask())
    try:
        await asyncio.wait([serving, asking], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving  # raises why
        return await asking
    finally:
        asking.cancel()
        serving.cancel()
        await asyncio.gather(asking, serving, return_exceptions=True)
