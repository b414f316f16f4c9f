"""Runs a broker or a worker in this process, whoever read its settings."""

import dataclasses

from llmrt.broker.settings import BrokerSettings
from llmrt.wire.errors import ConfigError
from llmrt.workers.settings import WorkerSettings


def serve_broker(settings: BrokerSettings) -> int:
    """Serve until told to stop; the exit code. Raises `LlmrtError` for settings that cannot be."""
    from llmrt.actor.log import configure
    from llmrt.actor.runtime import run
    from llmrt.actor.supervisor import announce_ready
    from llmrt.broker.server import serve

    configure("broker", level=settings.log_level)
    serving = serve(settings, on_ready=lambda _clients, _workers: announce_ready())
    return run(serving, is_server=True)


def serve_worker(settings: WorkerSettings) -> int:
    """Serve until told to stop; the exit code. Raises `LlmrtError` for settings that cannot be."""
    from llmrt.actor.log import configure
    from llmrt.actor.runtime import run
    from llmrt.actor.supervisor import announce_ready

    try:
        from llmrt.workers.server import default_worker_id, serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("llmrt"):
            raise
        raise ConfigError(
            f"a worker needs the package {error.name}: pip install 'llmrt[worker]'"
        ) from None

    if settings.role == "colocated":
        settings = dataclasses.replace(settings, role="both")
    if settings.worker_id is None:
        settings = dataclasses.replace(settings, worker_id=default_worker_id(settings.role))
    configure("worker", settings.worker_id, level=settings.log_level)
    return run(serve(settings, on_ready=announce_ready), is_server=True)
