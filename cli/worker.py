"""`llmrt worker`: load a model and serve one role of it."""

import typer

from llmrt.cli.config import load
from llmrt.cli.options import WORKER_HELP, ConfigOption, with_settings
from llmrt.cli.serving import serve_worker
from llmrt.workers.settings import WorkerSettings


@with_settings(WorkerSettings, WORKER_HELP)
def worker(config: ConfigOption = None, **flags: object) -> None:
    """Load a model and serve it to the broker, in one role.

    Example: llmrt worker --role decode --model model.gguf --broker tcp://127.0.0.1:7701
    """
    raise typer.Exit(serve_worker(load(WorkerSettings, flags, config)))
