"""The entry of every llmrt process: the command line, and what its errors look like."""

import os
import sys

import typer

from llmrt.cli.bench.command import app as bench
from llmrt.cli.broker import broker
from llmrt.cli.chat import chat
from llmrt.cli.config import unknown_variables
from llmrt.cli.doctor import doctor
from llmrt.cli.generate import generate
from llmrt.cli.ps import ps
from llmrt.cli.run import run
from llmrt.cli.up import up
from llmrt.cli.version import version
from llmrt.cli.worker import worker
from llmrt.wire.errors import LlmrtError

# Errors are one line of ours and help is plain text, so that neither needs rich.
app = typer.Typer(
    name="llmrt",
    help="Serve large language models: colocated, or split into prefill and decode.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, up, generate, chat, ps, broker, worker, doctor, version):
    app.command()(command)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run one command and exit: 0 done, 1 failed, 2 usage, 69 no worker, 75 broker not
    reachable, 77 refused, 78 bad configuration, 130 interrupted."""
    if "LLMRT_PARENT_PID" in os.environ:
        from llmrt.actor.process import die_with_parent

        die_with_parent()
    if "LLMRT_READY_FD" not in os.environ:  # else the supervisor of this process has said it
        for line in unknown_variables():
            print(f"warning: {line}", file=sys.stderr)
    try:
        app(prog_name="llmrt")
    except LlmrtError as error:
        from llmrt.actor.exits import report

        sys.exit(report(error))


if __name__ == "__main__":
    main()
