"""Where a request's prompt is computed: by its owner, or by a prefill worker. A plain function."""

from dataclasses import dataclass

from llmrt.wire.ids import WorkerName


@dataclass(frozen=True, slots=True)
class PlacementCosts:
    """What the choice looks at. `num_uncached` tokens are to be computed."""

    num_uncached: int
    remote: WorkerName | None
    remote_mode: str | None


def choose_prefill(placement: str, costs: PlacementCosts) -> WorkerName | None:
    """The prefill worker to offer to, or None to compute the prompt here.

    `local` never offers. `auto` and `remote` offer whenever the worker that the broker named can
    take it; they will differ once the costs of both ways are measured.
    """
    if placement == "local" or costs.remote_mode is None or costs.num_uncached == 0:
        return None
    return costs.remote
