"""`llmrt broker`: route requests between clients and workers."""

import typer

from llmrt.broker.settings import BrokerSettings
from llmrt.cli.config import load
from llmrt.cli.options import BROKER_HELP, ConfigOption, with_settings


@with_settings(BrokerSettings, BROKER_HELP)
def broker(config: ConfigOption = None, **flags: object) -> None:
    """Route requests between clients and workers.

    Example: llmrt broker --bind tcp://127.0.0.1:7700
    """
    settings = load(BrokerSettings, flags, config)
    from llmrt.actor.log import configure
    from llmrt.actor.runtime import run
    from llmrt.actor.supervisor import announce_ready
    from llmrt.broker.server import serve

    configure("broker", level=settings.log_level)
    raise typer.Exit(run(serve(settings, on_ready=lambda _clients, _workers: announce_ready())))
