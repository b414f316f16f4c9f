"""From settings to a measurement: of a cluster of its own, or of one that runs."""

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmrt.actor.log import configure
from llmrt.actor.runtime import run
from llmrt.cli.bench.delivery import Delivery, progress_bar
from llmrt.cli.bench.plan import BenchSettings, Point, kv_tokens_for, make_points
from llmrt.cli.bench.private_cluster import roles_of, with_private_cluster
from llmrt.cli.bench.roofline import read_model_bytes
from llmrt.cli.bench.session import Task, measure
from llmrt.cli.bench.subject import Declared
from llmrt.cli.cluster import check_model
from llmrt.cli.config import flag_name, load
from llmrt.engine.cpu_cores import share_of_cores
from llmrt.wire.errors import ConfigError
from llmrt.workers.settings import WorkerSettings, check_link

# Settings of a running cluster that are only believed, and stamped on the results.
_BELIEVED = (
    *("device", "dtype", "kv_cache_dtype", "threads"),
    *("speculative", "speculative_tokens", "cpu_family", "placement", "max_running"),
    *("step_tokens", "kv_tokens", "stream_interval_ms", "has_prefix_cache"),
)


def measure_own(
    settings: BenchSettings,
    layout: str,
    flags: dict[str, object],
    config: Path | None,
    deliver: Delivery,
) -> int:
    """Start a cluster, measure it and end it; returns the exit code."""
    points = make_points(settings)
    worker = load(WorkerSettings, flags, config)
    check_model(worker.model)
    check_link(worker, len(roles_of(layout)))
    # Said and not left to the worker, so that the stamp is true.
    flags["threads"] = threads = worker.threads or share_of_cores(len(roles_of(layout)))
    flags["kv_tokens"] = kv_tokens = worker.kv_tokens or kv_tokens_for(points)
    declared = Declared(
        device=worker.device,
        dtype=worker.dtype,
        kv_cache_dtype=worker.kv_cache_dtype,
        threads=threads,
        speculative=worker.speculative,
        # Of no effect without: equal runs are not told apart by it.
        speculative_tokens=0 if worker.speculative == "off" else worker.speculative_tokens,
        cpu_family=worker.cpu_family or "auto",
        placement=worker.placement,
        max_running=worker.max_running,
        step_tokens=worker.step_tokens,
        kv_tokens=kv_tokens,
        stream_interval_ms=worker.stream_interval_ms,
        has_prefix_cache=worker.has_prefix_cache,
    )
    task = replace(
        make_task(settings, declared, layout, worker.model),
        notes=waiting_notes(points, worker.max_running),
    )

    async def work(endpoint: str) -> int:
        return await _measured(endpoint, task, deliver)

    return _run(with_private_cluster(layout, flags, config, work))


def measure_running(
    broker: str,
    settings: BenchSettings,
    layout: str | None,
    flags: Mapping[str, Any],
    deliver: Delivery,
) -> int:
    """Measure the cluster of a broker; returns the exit code."""
    for name, value in flags.items():
        if value is not None and name not in ("model", "log_level", *_BELIEVED):
            raise ConfigError(
                f"{flag_name(name)} is a setting of the workers: it cannot be given to those of a "
                "running cluster (--broker)"
            )
    declared = Declared(**{name: flags[name] for name in _BELIEVED})
    model = flags["model"]
    if model is not None:
        check_model(model)
    return _run(_measured(broker, make_task(settings, declared, layout, model), deliver))


def make_task(
    settings: BenchSettings, declared: Declared, layout: str | None, model: Path | None
) -> Task:
    """With the sizes of the model, if its file was named."""
    sizes = None
    if model is not None:
        try:
            sizes = read_model_bytes(model, declared.kv_cache_dtype or "bf16")
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"reading --model needs the package {error.name}: pip install 'llmrt[worker]'"
            ) from None
        declared = replace(
            declared, quantization=sizes.quantization, weight_bytes=sizes.weight_bytes
        )
    return Task(
        settings=settings,
        points=make_points(settings),
        declared=declared,
        layout=layout,
        model=sizes,
    )


def waiting_notes(points: Sequence[Point], max_running: int) -> tuple[str, ...]:
    """Said of loads of which a part can only wait."""
    return tuple(
        f"{point.label}: at most {max_running} run in a step (--max-running), the others wait"
        for point in points
        if (point.concurrency or 0) > max_running
    )


def _run(main: Coroutine[Any, Any, int]) -> int:
    configure("bench", level="error")
    return run(main)


async def _measured(endpoint: str, task: Task, deliver: Delivery) -> int:
    with progress_bar(task.num_requests) as on_progress:
        report = await measure(endpoint, task, on_progress)
    deliver(report)
    return 0
