"""`llmrt run`: from a model file to an answer in one command, with nothing left running."""

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from llmrt.actor.signals import held
from llmrt.actor.spawning import spawned
from llmrt.cli.answers import Answer, given, has_chat_template, show, summary
from llmrt.cli.cluster import (
    Cluster,
    broker_child,
    check_model,
    private_flags,
    while_serving,
    worker_child,
)
from llmrt.cli.config import load
from llmrt.cli.options import (
    SAMPLING,
    WORKER_HELP,
    ConfigOption,
    JsonOption,
    with_sampling,
    with_settings,
)
from llmrt.workers.settings import WorkerSettings

# One answer needs no more, and making a large arena takes longer than the answer (0.8 s/GB).
KV_TOKENS = 8192
# What a chat template may add to a prompt; those of families take 10 to 200.
TEMPLATE_TOKENS = 1024
_DECIDED_HERE = ("role", "broker", "worker_id", "link", "runtime_dir")


@with_settings(WorkerSettings, WORKER_HELP, without=_DECIDED_HERE)
@with_sampling
def run(
    prompt: Annotated[str, typer.Argument(help="what to ask; - reads stdin")],
    raw: Annotated[bool, typer.Option("--raw", help="continue the text, without template")] = False,
    config: ConfigOption = None,
    json_output: JsonOption = False,
    **options: object,
) -> None:
    """Load a model, answer one prompt, and leave nothing running.

    Example: llmrt run "What is the capital of France?" --model model.gguf
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = given({name: options.pop(name) for name in SAMPLING})
    settings = load(WorkerSettings, options, config)
    check_model(settings.model)
    _check_request(text, sampling, is_raw=raw)
    options["kv_tokens"] = settings.kv_tokens or _kv_tokens(text, sampling, settings.max_context)
    from tempfile import TemporaryDirectory

    # A signal waits until there is a loop that ends all this in order: the children first, since
    # they write into the folder.
    with (
        held() as release,
        TemporaryDirectory(prefix="llmrt-", ignore_cleanup_errors=True) as folder,
    ):
        broker_flags, worker_flags = private_flags(options, folder)
        broker = broker_flags["bind"]
        children = [
            worker_child("both-0", "both", worker_flags, config),
            broker_child(broker_flags, config),
        ]
        # The worker takes longest. While it loads, this process imports what it needs itself.
        with spawned(children) as running:
            from llmrt.actor.log import configure
            from llmrt.actor.runtime import run as run_process

            configure("run", level="error")
            # The broker is stopped last.
            cluster = Cluster(children[::-1], running)

            async def main() -> int | None:
                release()
                answer = await _answer(
                    text, broker, cluster, sampling, is_raw=raw, as_json=json_output
                )
                if isinstance(answer, int):
                    return answer
                if not json_output:
                    print(summary(answer), file=sys.stderr)
                return None

            code = run_process(main())
    raise typer.Exit(code)


def _check_request(text: str, sampling: Mapping[str, Any], *, is_raw: bool) -> None:
    """Raise `InvalidRequest` before anything is started."""
    if not sampling and not is_raw:
        return
    from llmrt.wire.sampling import SamplingParams, check_sampling

    if not is_raw and sampling.keys() <= {*SamplingParams.__struct_fields__}:
        # As below, in 20 ms instead of 200, for which the children would wait.
        check_sampling(SamplingParams(**sampling))
        return
    from llmrt.client.client import DEADLINE_S
    from llmrt.client.requests import make_generate

    options: Any = dict(sampling)
    messages = None if is_raw else [{"role": "user", "content": text}]
    make_generate(text if is_raw else None, messages, options, DEADLINE_S)


def _kv_tokens(text: str, sampling: Mapping[str, object], max_context: int | None) -> int:
    """What the only request can use: a token has a byte of its text at least."""
    most = min(KV_TOKENS, max_context or KV_TOKENS)
    max_tokens = sampling.get("max_tokens")
    if isinstance(max_tokens, int):
        most = min(most, len(text.encode(errors="replace")) + max_tokens + TEMPLATE_TOKENS)
    return max(TEMPLATE_TOKENS, most)


async def _answer(
    text: str,
    broker: str,
    cluster: Cluster,
    sampling: dict[str, Any],
    *,
    is_raw: bool,
    as_json: bool,
) -> Answer | int:
    """The answer, or the exit code of a child that has said on stderr why it ended."""
    from llmrt.client import AsyncClient

    async def ask() -> Answer:
        await cluster.ready.wait()
        async with AsyncClient(broker) as client:
            if is_raw or not await has_chat_template(client):
                stream = client.stream(text, **sampling)
            else:
                stream = client.chat_stream([{"role": "user", "content": text}], **sampling)
            return await show(stream, as_json=as_json)

    return await while_serving(cluster, ask)
