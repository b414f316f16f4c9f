"""`llmrt worker`: load a model and serve one role of it."""

import dataclasses

import typer

from llmrt.cli.config import load
from llmrt.cli.options import WORKER_HELP, ConfigOption, with_settings
from llmrt.workers.settings import WorkerSettings


@with_settings(WorkerSettings, WORKER_HELP)
def worker(config: ConfigOption = None, **flags: object) -> None:
    """Load a model and serve it to the broker, in one role.

    Example: llmrt worker --role decode --model model.gguf --broker tcp://127.0.0.1:7701
    """
    settings = load(WorkerSettings, flags, config)
    if settings.role == "colocated":
        settings = dataclasses.replace(settings, role="both")
    from llmrt.actor.log import configure
    from llmrt.actor.runtime import run
    from llmrt.actor.supervisor import announce_ready
    from llmrt.workers.server import default_worker_id, serve

    if settings.worker_id is None:
        settings = dataclasses.replace(settings, worker_id=default_worker_id(settings.role))
    configure("worker", settings.worker_id, level=settings.log_level)
    raise typer.Exit(run(serve(settings, on_ready=announce_ready)))
