"""What is measured, as far as it can be known: it is stamped on every result."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmrt.wire.errors import ConfigError, NoWorker

if TYPE_CHECKING:
    from llmrt.wire.messages import PsReply, WorkerRow

LAYOUTS = COLOCATED, SPLIT = ("colocated", "split")
TRANSFERS = ("shm", "tcp")
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What the broker does not tell: settings of the workers; None for what nobody said."""

    quantization: str | None = None
    weight_bytes: int | None = None
    device: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    threads: int | None = None
    speculative: str | None = None
    speculative_tokens: int | None = None
    cpu_family: str | None = None
    placement: str | None = None
    max_running: int | None = None
    step_tokens: int | None = None
    kv_tokens: int | None = None
    stream_interval_ms: int | None = None
    has_prefix_cache: bool | None = None

    def conditions(self) -> dict[str, Any]:
        return {
            name: UNKNOWN if (value := getattr(self, name)) is None else value
            for name in self.__slots__
        }


def conditions_of(
    workers: "Sequence[WorkerRow]", model: str | None, layout: str | None
) -> dict[str, Any]:
    """Model, layout, workers and transfer of a running cluster, and the numerics id of its
    workers if they tell it: the kernels and formats that are in use.

    Raises `NoWorker`, or `ConfigError` if it does not serve `model` in `layout`, where given.
    """
    alive = [row for row in workers if row.state == "alive"]
    if not alive:
        raise NoWorker("no worker is alive: llmrt ps shows what the broker knows")
    models = sorted({row.model for row in alive})
    if model is None and len(models) > 1:
        raise ConfigError(f"the broker serves {', '.join(models)}: say which one by --model PATH")
    if model is not None and model not in models:
        raise ConfigError(f"--model is {model}, but the broker serves {', '.join(models)}")
    serving = [row for row in alive if row.model == (model or models[0])]
    roles = [row.role for row in serving]
    found = SPLIT if "prefill" in roles else COLOCATED
    if layout not in (None, found):
        raise ConfigError(f"--layout is {layout}, but the cluster is {found}")
    ids = {numerics_id for row in serving if (numerics_id := getattr(row, "numerics_id", None))}
    # Only owners read or grant; what a prefill worker lists is not in use, or not yet.
    owners = [row for row in serving if row.role != "prefill"]
    links = {kind for row in owners for kind in row.links.values() if kind in TRANSFERS}
    return {
        "model": model or models[0],
        "layout": found,
        "workers": ", ".join(f"{roles.count(role)} {role}" for role in sorted(set(roles))),
        "transfer": "+".join(sorted(links)) or "none",
        "numerics_id": "+".join(sorted(ids)) or None,
    }


def step_seconds(reply: "PsReply") -> tuple[float, float] | None:
    """Of all workers since their start: (Python on the critical path of steps, steps in all).

    None while the rows of `ps` do not carry it.
    """
    sums = [0.0, 0.0]
    for row in reply.workers:
        python, steps = getattr(row, "python_s", None), getattr(row, "steps_s", None)
        if python is None or steps is None:
            return None
        sums = [sums[0] + python, sums[1] + steps]
    return sums[0], sums[1]


def python_share(
    before: tuple[float, float] | None, after: tuple[float, float] | None
) -> float | None:
    """Of the steps between two readings; None without a step in between."""
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])
