"""All commands of llmrt."""

import os
import sys

import typer

from llmrt.cli.bench.command import app as bench
from llmrt.cli.broker import broker
from llmrt.cli.chat import chat
from llmrt.cli.config import unknown_variables
from llmrt.cli.doctor import doctor
from llmrt.cli.generate import generate
from llmrt.cli.links import links
from llmrt.cli.ps import ps
from llmrt.cli.run import run
from llmrt.cli.up import up
from llmrt.cli.version import version
from llmrt.cli.worker import worker

# Errors are one line of ours and help is plain text, so that neither needs rich.
app = typer.Typer(
    name="llmrt",
    help="Serve large language models: colocated, or split into prefill and decode.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, up, generate, chat, ps, links, broker, worker, doctor, version):
    app.command()(command)
app.add_typer(bench, name="bench")


def warn_of_variables() -> None:
    """On stderr, one line for each variable that names nothing."""
    if "LLMRT_READY_FD" not in os.environ:  # else the supervisor of this process has said it
        for line in unknown_variables():
            print(f"warning: {line}", file=sys.stderr)
