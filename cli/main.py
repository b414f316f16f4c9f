"""The entry of every llmrt process: what is to be right before anything else is loaded."""

import os
import sys


def main() -> None:
    """Run one command and exit, with a code of `llmrt.actor.exits`."""
    from llmrt.actor.signals import end_silently
    from llmrt.actor.streams import OutputError, set_up

    end_silently()
    set_up()
    if "LLMRT_PARENT_PID" in os.environ:
        from llmrt.actor.process import die_with_parent

        die_with_parent()
    from llmrt.actor.exits import OK, report
    from llmrt.cli.commands import app, warn_of_variables
    from llmrt.wire.errors import LlmrtError

    try:
        try:
            warn_of_variables()
            app(prog_name="llmrt")
        finally:
            sys.stdout.flush()
    except (LlmrtError, OutputError) as error:
        sys.exit(report(error))
    sys.exit(OK)


if __name__ == "__main__":
    main()
