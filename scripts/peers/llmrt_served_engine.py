"""llmrt as users run it: `llmrt up` with one worker, and one connection of the SDK."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from workload import MAX_KV_TOKENS, Clock, Options, Prompt, measure, parse_options

import llmrt
from llmrt.client import AsyncClient

sys.path.append(str(Path(__file__).parents[1]))
from local_cluster import running_cluster


class Served:
    """Blocking calls over one client, which lives as long as its event loop."""

    def __init__(self, client: AsyncClient, runner: asyncio.Runner) -> None:
        self._client = client
        self._runner = runner

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Clock:
        return self._runner.run(self._generate(prompts, new_tokens))

    async def _generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Clock:
        clock = Clock(len(prompts))
        async with asyncio.TaskGroup() as tasks:
            for stream, prompt in enumerate(prompts):
                tasks.create_task(self._stream(stream, prompt, new_tokens, clock))
        return clock

    async def _stream(self, stream: int, prompt: Prompt, new_tokens: int, clock: Clock) -> None:
        events = self._client.stream(prompt, max_tokens=new_tokens, ignore_eos=True)
        async for event in events:
            for _ in event.token_ids:
                clock.token(stream)


def main() -> None:
    options = parse_options()
    with running_cluster(*_flags(options)) as cluster, asyncio.Runner() as runner:
        client = AsyncClient(cluster.bind)
        try:
            served = Served(client, runner)
            measure(options, f"llmrt {llmrt.__version__}", served.generate)
        finally:
            runner.run(client.close())


def _flags(options: Options) -> tuple[str, ...]:
    return (
        *("--model", options.model, "--both", "1", "--threads", str(options.threads)),
        *("--kv-tokens", str(MAX_KV_TOKENS), "--no-prefix-cache", "--log-level", "warning"),
    )


if __name__ == "__main__":
    main()
