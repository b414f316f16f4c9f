"""Where a request's prompt is computed: by its owner, or by a prefill worker. A plain function.

Both ways are weighed by the delay that they cause, in seconds summed over requests:

    here    what is queued here, and the prompt: once for itself, once for every stream that
            decodes here and waits for it
    there   what is queued there, the prompt and the hand-over

and by what the one way slows the other, where both share a box: streams and prompts here while a
prefill worker computes, and its prompts while we do. How much that is, is measured; workers on
hosts of their own do not slow each other.
"""

from dataclasses import dataclass

from llmrt.wire.ids import WorkerName


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCosts:
    """What the choice looks at, in seconds. `num_uncached` tokens are to be computed.

    `here_s` and `there_s` are for the prompt alone; None if it was never measured here. Of this
    owner's requests, `num_decoding` stream, `num_here` wait for their prompts here and `num_there`
    elsewhere. The slowdowns are what a step takes here beside a prefill worker at work, over what
    it takes alone.
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
    num_here: int = 0
    num_there: int = 0
    decode_slowdown: float = 1.0
    prefill_slowdown: float = 1.0


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
    here_s, there_s = _delay_here(costs, costs.here_s), _delay_there(costs)
    if here_s <= there_s:
        return Placement(None, "faster here", here_s, there_s)
    return Placement(costs.remote, "faster there", here_s, there_s)


def _delay_here(costs: PlacementCosts, prompt_s: float) -> float:
    if not costs.num_there:
        return costs.queue_here_s + prompt_s * (1 + costs.num_decoding)
    slow = costs.prefill_slowdown
    held_up = costs.num_there * prompt_s * (slow - 1)
    return slow * (costs.queue_here_s + prompt_s * (1 + costs.num_decoding)) + held_up


def _delay_there(costs: PlacementCosts) -> float:
    prompt_s = costs.there_s
    if costs.num_here:
        prompt_s *= costs.prefill_slowdown
    slowed = costs.num_decoding * (1 - 1 / costs.decode_slowdown)
    held_up = costs.num_here * (1 - 1 / costs.prefill_slowdown)
    return costs.queue_there_s + prompt_s * (1 + slowed + held_up) + costs.handover_s
