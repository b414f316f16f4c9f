"""The load generator: requests of one client connection, in a closed or an open loop."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llmrt.cli.bench.metrics import Arrival, Record
from llmrt.client import AsyncClient
from llmrt.wire.errors import InternalError, LlmrtError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadGenerator:
    """Sends greedy requests of `output_len` tokens each. `on_end` is called once per request."""

    client: AsyncClient
    output_len: int
    model: str | None = None
    on_end: Callable[[], None] = lambda: None

    async def closed_loop(
        self, prompts: Iterable[Sequence[int]], concurrency: int
    ) -> tuple[Record, ...]:
        """So many at a time: the next one is sent when one has ended."""
        start = time.perf_counter()
        waiting = iter(prompts)
        records: list[Record] = []

        async def one_after_another() -> None:
            for prompt in waiting:
                sent_s = time.perf_counter() - start
                records.append(await self._ask(prompt, start, sent_s))

        await _all(one_after_another() for _ in range(concurrency))
        return tuple(records)

    async def open_loop(
        self, prompts: Iterable[Sequence[int]], times_s: Iterable[float]
    ) -> tuple[Record, ...]:
        """Each at its time, and measured from that time, however many are running."""
        start = time.perf_counter()

        async def at(due_s: float, prompt: Sequence[int]) -> Record:
            await asyncio.sleep(start + due_s - time.perf_counter())
            return await self._ask(prompt, start, due_s)

        due = zip(times_s, prompts, strict=True)
        return tuple(await _all(at(due_s, prompt) for due_s, prompt in due))

    async def _ask(self, prompt: Sequence[int], start: float, start_s: float) -> Record:
        """One request; a failed one is a record too. Other exceptions are raised."""
        arrivals: list[Arrival] = []
        stream = self.client.stream(
            prompt, max_tokens=self.output_len, ignore_eos=True, model=self.model
        )
        try:
            async with stream:
                async for event in stream:
                    if event.token_ids:
                        now_s = time.perf_counter() - start
                        arrivals.append(Arrival(now_s, len(event.token_ids)))
        except LlmrtError as error:
            return Record(start_s, tuple(arrivals), error=error)
        finally:
            self.on_end()
        result = stream.result
        return Record(
            start_s,
            tuple(arrivals),
            result.usage.prompt_tokens,
            result.usage.cached_tokens,
            self._fault(result.usage.completion_tokens),
            result.num_drafted,
            result.num_accepted,
        )

    def _fault(self, num_tokens: int) -> LlmrtError | None:
        if num_tokens == self.output_len:
            return None
        return InternalError(f"{num_tokens} tokens came, {self.output_len} were asked for")


async def _all(work: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Together; when one fails, the others are cancelled and waited for."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
