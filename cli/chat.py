"""`llmrt chat`: a conversation on the terminal."""

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrt.actor.signals import raised
from llmrt.cli.answers import given, write
from llmrt.cli.options import BrokerOption, ModelOption, endpoint, with_sampling

if TYPE_CHECKING:
    from llmrt.client import Client

_HELP = "/reset starts anew, /exit or Ctrl-D leaves, Ctrl-C cancels an answer"


@with_sampling
def chat(
    broker: BrokerOption = None,
    model: ModelOption = None,
    system: Annotated[str | None, typer.Option(help="instructions for the model")] = None,
    **options: object,
) -> None:
    """Talk to the model of a running cluster.

    Example: llmrt chat --temperature 0.7
    """
    from llmrt.client import Client

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() its line editing
    with raised(), Client(endpoint(broker)) as client:
        code = _Chat(client, system, given({"model": model, **options})).run()
    raise typer.Exit(code)


class _Chat:
    """The turns so far; every answer sees all of them."""

    def __init__(self, client: "Client", system: str | None, options: dict[str, Any]) -> None:
        self._client = client
        self._options = options
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._turns = list(self._start)
        self._is_terminal = sys.stdin.isatty()

    def run(self) -> int:
        """The exit code: without a terminal that of the last question that failed, else 0."""
        code = 0
        if self._is_terminal:
            print(_HELP, file=sys.stderr)
        while (line := self._read()) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                self._turns = list(self._start)
            elif line.startswith("/"):
                print(_HELP, file=sys.stderr)
            elif line:
                code = self._answer(line) or code
        return 0 if self._is_terminal else code

    def _read(self) -> str | None:
        """The next line, "" after Ctrl-C, None at the end."""
        try:
            return input("> " if self._is_terminal else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            print(f"\n{_HELP}", file=sys.stderr)
            return ""

    def _answer(self, question: str) -> int:
        """0, or the exit code of its error. A failed question is forgotten; of a cancelled answer,
        what came is kept."""
        from llmrt.actor.exits import OK, report
        from llmrt.wire.errors import LlmrtError

        code = OK

        turns = [*self._turns, {"role": "user", "content": question}]
        text = ""
        try:
            with self._client.chat_stream(turns, **self._options) as stream:
                for event in stream:
                    text += event.text
                    write(event.text)
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            write(" [cancelled]")
        except LlmrtError as error:
            code = report(error)
        print(flush=True)
        if text:
            self._turns = [*turns, {"role": "assistant", "content": text}]
        return code
