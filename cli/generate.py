"""`llmrt generate`: one answer of a running cluster."""

import sys
from typing import Annotated, Any

import typer

from llmrt.cli.answers import given, show, summary
from llmrt.cli.options import BrokerOption, JsonOption, ModelOption, endpoint, with_sampling


@with_sampling
def generate(
    prompt: Annotated[str, typer.Argument(help="the text to continue; - reads stdin")],
    broker: BrokerOption = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="ask it, through the model's chat template")
    ] = False,
    model: ModelOption = None,
    json_output: JsonOption = False,
    **options: object,
) -> None:
    """Continue a text, or answer it with --chat, on a running cluster.

    Example: llmrt generate "The capital of France is" --max-tokens 8
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    from llmrt.actor.runtime import run

    wanted = given({"model": model, **options})
    raise typer.Exit(run(_generate(endpoint(broker), text, chat, json_output, wanted)))


async def _generate(
    broker: str, text: str, is_chat: bool, as_json: bool, options: dict[str, Any]
) -> None:
    from llmrt.client import AsyncClient

    client = AsyncClient(broker)
    if is_chat:
        stream = client.chat_stream([{"role": "user", "content": text}], **options)
    else:
        stream = client.stream(text, **options)
    async with client:  # only now: what is wrong with a request is said without a broker
        answer = await show(stream, as_json=as_json)
    if not as_json:
        print(summary(answer), file=sys.stderr)
