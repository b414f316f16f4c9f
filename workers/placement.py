"""Where a request's prompt is computed: by its owner, or by a prefill worker. A plain function.

Both ways are weighed by the delay that they cause, in seconds summed over requests:

    here    what is queued here, and the prompt: once for itself, once for every stream that
            decodes here and waits for it
    there   what is queued there, the prompt and the hand-over, and what the prompt costs the
            streams here: as much as a prefill beside them was seen to slow them, on a shared box
"""

from dataclasses import dataclass

from llmrt.wire.ids import WorkerName


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCosts:
    """What the choice looks at, in seconds. `num_uncached` tokens are to be computed.

    `here_s` and `there_s` are for the prompt alone; None if it was never measured here. `slowdown`
    is the time of a decode step beside a prefill worker at work over that of one alone.
    """

    num_uncached: int
    remote: WorkerName | None
    remote_mode: str | None
    here_s: float | None = None
    there_s: float = 0.0
    queue_here_s: float = 0.0
    queue_there_s: float = 0.0
    handover_s: float = 0.0
    num_decoding: int = 0
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class Placement:
    """`worker` is None for here. Delays are None where they were not weighed."""

    worker: WorkerName | None
    reason: str
    here_s: float | None = None
    there_s: float | None = None


def choose_prefill(placement: str, costs: PlacementCosts) -> Placement:
    """The worker that computes the prompt, and why.

    `local` never offers; `remote` offers whenever the worker that the broker named can take it;
    `auto` takes the smaller delay.
    """
    if placement == "local":
        return Placement(None, "placement is local")
    if costs.remote is None or costs.remote_mode is None:
        return Placement(None, "no prefill worker can take it")
    if costs.num_uncached == 0:
        return Placement(None, "all of it is cached here")
    if placement == "remote":
        return Placement(costs.remote, "placement is remote")
    if costs.here_s is None:
        return Placement(None, "not measured here yet")
    here_s = costs.queue_here_s + costs.here_s * (1 + costs.num_decoding)
    slowed = 1 - 1 / costs.slowdown
    there_s = (
        costs.queue_there_s + costs.there_s * (1 + costs.num_decoding * slowed) + costs.handover_s
    )
    if here_s <= there_s:
        return Placement(None, "faster here", here_s, there_s)
    return Placement(costs.remote, "faster there", here_s, there_s)
