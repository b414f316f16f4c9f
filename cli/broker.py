"""`llmrt broker`: route requests between clients and workers."""

import typer

from llmrt.broker.settings import BrokerSettings
from llmrt.cli.config import load
from llmrt.cli.options import BROKER_HELP, ConfigOption, with_settings
from llmrt.cli.serving import serve_broker


@with_settings(BrokerSettings, BROKER_HELP)
def broker(config: ConfigOption = None, **flags: object) -> None:
    """Route requests between clients and workers.

    Example: llmrt broker --bind tcp://127.0.0.1:7700
    """
    raise typer.Exit(serve_broker(load(BrokerSettings, flags, config)))
