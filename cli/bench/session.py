"""One run of `llmrt bench`: every point in turn, as often as asked, through one connection."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from llmrt import __version__
from llmrt.cli.bench.load import LoadGenerator
from llmrt.cli.bench.machine import (
    Machine,
    bandwidth_note,
    busy_note,
    memory_bandwidth,
    this_machine,
)
from llmrt.cli.bench.metrics import Record, Trial
from llmrt.cli.bench.plan import BenchSettings, Point
from llmrt.cli.bench.result import add_roofline, make_report, make_result
from llmrt.cli.bench.roofline import ModelBytes
from llmrt.cli.bench.subject import Declared, conditions_of, python_share, step_seconds
from llmrt.cli.bench.workload import arrival_times, make_prompt, probe_text
from llmrt.client import AsyncClient
from llmrt.wire.messages import PsReply

WARM_UP_TOKENS = 4
# Workers beat once in a second or so; one that does not is not waited for.
_MAX_WAIT_S = 5.0
# `on_progress` is called with what is measured now, after every request.
OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to measure and what is known of it. `model` is None if no file was named; `notes` are
    for the reader of the report."""

    settings: BenchSettings
    points: Sequence[Point]
    declared: Declared
    layout: str | None
    model: ModelBytes | None
    notes: tuple[str, ...] = ()

    @property
    def num_requests(self) -> int:
        """With the warm-up of every point."""
        repeats = self.settings.repeats
        return sum(1 + repeats * point.num_prompts for point in self.points)


async def measure(endpoint: str, task: Task, on_progress: OnProgress) -> dict[str, Any]:
    """The report. Raises `LlmrtError` if there is nothing to measure, or all of a point fails."""
    machine = this_machine()
    notes = [*task.notes, busy_note(os.getloadavg()[0], machine.cores)]
    async with AsyncClient(endpoint) as client:
        name = task.model.name if task.model else None
        cluster = conditions_of((await client.workers()).workers, name, task.layout)
        session = _Session(client, task, cluster["model"], on_progress)
        await session.prepare()
        before = await _bandwidth(task, machine)
        trials = await session.run()
        after = await _bandwidth(task, machine)
    subject = cluster | task.declared.conditions() | {"machine": machine.conditions()}
    results = [
        make_result(point, trials[i], settings=task.settings, subject=subject)
        for i, point in enumerate(task.points)
    ]
    about: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    about["llmrt_version"] = __version__
    if task.model is not None and before is not None and after is not None:
        notes.append(bandwidth_note(before, after))
        about["memory_bandwidth_gb_per_s"] = {
            "before": round(before / 1e9, 3),
            "after": round(after / 1e9, 3),
        }
        for point, result in zip(task.points, results, strict=True):
            # The faster one: a bound that was measured in a bad moment would accuse good figures.
            add_roofline(result, point, task.model, max(before, after), machine.l3_bytes)
    return make_report(results, about, [note for note in notes if note is not None])


class _Session:
    """The trials of one run; `prepare` comes first."""

    def __init__(
        self, client: AsyncClient, task: Task, model: str, on_progress: OnProgress
    ) -> None:
        self._client = client
        self._task = task
        self._model = model
        self._on_progress = on_progress
        self._token_ids: list[int] = []

    async def prepare(self) -> None:
        """Learn token ids that are valid in prompts, and let every shape run once."""
        text = probe_text(self._task.settings.seed)
        ids = await self._client.tokenize(text, add_special=False)
        self._token_ids = sorted(set(ids))
        for point in self._task.points:
            warm_up = Point(
                metric=point.metric,
                input_len=point.input_len,
                output_len=min(point.output_len, WARM_UP_TOKENS),
                num_prompts=1,
            )
            _check(await self._load(warm_up, "warm-up"))

    async def run(self) -> list[list[Trial]]:
        """Per point, its trials. They take turns, so that a mood of the machine hits them all."""
        trials: list[list[Trial]] = [[] for _ in self._task.points]
        for repeat in range(self._task.settings.repeats):
            for i, point in enumerate(self._task.points):
                trials[i].append(await self._trial(point, f"{repeat}"))
        return trials

    async def _trial(self, point: Point, name: str) -> Trial:
        before = step_seconds(await fresh_workers(self._client))
        records = await self._load(point, name)
        _check(records)
        share = python_share(before, step_seconds(await fresh_workers(self._client)))
        start_s = min(record.start_s for record in records)
        duration_s = max(record.end_s for record in records) - start_s
        return Trial(records, duration_s, share)

    async def _load(self, point: Point, name: str) -> tuple[Record, ...]:
        settings = self._task.settings
        seed = f"{settings.seed} {name} {point}"
        prompts = [
            make_prompt(self._token_ids, point.input_len, seed=f"{seed} {i}")
            for i in range(point.num_prompts)
        ]
        generator = LoadGenerator(
            self._client, point.output_len, self._model, lambda: self._on_progress(point.label)
        )
        if point.request_rate is None:
            return await generator.closed_loop(prompts, point.concurrency or 1)
        times = arrival_times(point.num_prompts, point.request_rate, settings.burstiness, seed=seed)
        return await generator.open_loop(prompts, times)


async def fresh_workers(client: AsyncClient) -> PsReply:
    """Workers as of heartbeats that they sent after this call, if they do so within 5 s."""
    called_at = time.monotonic()
    while True:
        reply = await client.workers()
        waited_s = time.monotonic() - called_at
        oldest_s = max((row.heartbeat_age_s for row in reply.workers), default=0.0)
        if oldest_s < waited_s or waited_s > _MAX_WAIT_S:
            return reply
        await asyncio.sleep(0.05)


def _check(records: Sequence[Record]) -> None:
    """Raise the first failure if nothing was completed: there is nothing to measure then."""
    errors = [record.error for record in records if record.error is not None]
    if len(errors) == len(records):
        raise errors[0]


async def _bandwidth(task: Task, machine: Machine) -> float | None:
    if task.model is None:
        return None
    threads = task.declared.threads or machine.cores
    return await asyncio.to_thread(memory_bandwidth, threads, machine.l3_bytes)
