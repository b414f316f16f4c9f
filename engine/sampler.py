"""Draws the next token of each row from its logits: pure numpy, counter-based, row by row.

What happens to a row, in this order:

1. `logit_bias` is added.
2. `repetition_penalty` divides positive and multiplies negative logits of every token of the
   sequence, prompt included (Keskar et al., CTRL, 2019, section 4.1).
3. `presence_penalty`, once, and `frequency_penalty`, per occurrence, are subtracted from tokens
   generated so far.
4. Banned tokens become impossible.
5. Temperature 0 takes the highest logit, the lowest id among equals. Otherwise logits are
   divided by the temperature, then `top_k`, `top_p` and `min_p` each keep a part of what the
   one before kept, and the inverse of the cumulative distribution, in order of token ids, is
   taken at one uniform number.

All of it is float64 after the maximum is subtracted, so that a temperature next to zero is the
greedy choice and not an overflow. The uniform number is a function of (seed, position) alone:
a row draws the same token in any batch, worker and attempt.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmrt.engine.batch import Logprobs, SampleSpec
from llmrt.wire.errors import InternalError, InvalidRequest
from llmrt.wire.sampling import SamplingParams

Floats = npt.NDArray[np.float64]
Scores = npt.NDArray[np.float32] | Floats
Ids = npt.NDArray[np.int64]
Draw = tuple[int, Logprobs | None]

_MASK_64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
# Most nuclei are smaller; one that is not is looked for among 8 times as many tokens, and so on.
_FIRST_NUCLEUS = 256


def draw_row(logits: npt.NDArray[np.float32], spec: SampleSpec, remedy: str = "") -> Draw:
    """Token id, and log probabilities if wanted, for one row of logits [vocab].

    `remedy` is said where the logits show that the model is damaged.
    Raises `InternalError` if a logit is not finite, `InvalidRequest` if a token that the request
    names is outside the vocabulary or nothing is left to draw.
    """
    if not np.isfinite(logits).all():
        token_id = int(np.flatnonzero(~np.isfinite(logits))[0])
        raise InternalError(
            f"the logit of token {token_id} at position {spec.position} is {logits[token_id]}: "
            f"the model's weights or its KV cache are damaged{remedy and '; '}{remedy}"
        )
    params = spec.params
    scores = _adjusted(logits, spec)
    best = int(scores.argmax())
    if scores[best] == -np.inf:
        raise InvalidRequest(f"all {len(scores)} tokens are banned at position {spec.position}")
    if _is_greedy(params):
        token_id = best
    else:
        token_id = _sample(scores, best, params, uniform(spec.seed, spec.position))
    if params.logprobs is None:
        return token_id, None
    return token_id, _logprobs(logits, token_id, params.logprobs)


def takes_best(spec: SampleSpec) -> bool:
    """Whether `draw_row` gives the highest logit's token and nothing else, if all are finite."""
    params = spec.params
    return _is_greedy(params) and params.logprobs is None and not _is_adjusted(spec)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a position, in steps of 2**-53.

    SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA
    2014), entered at index `position` of the stream whose start is the mixed seed. Mixing the
    seed first keeps streams of related seeds from being shifts of one another.
    """
    start = _mix(seed + _GOLDEN_GAMMA)
    return float((_mix(start + (position + 1) * _GOLDEN_GAMMA) >> 11) * 2.0**-53)


def _mix(value: int) -> int:
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0.0 or params.top_k == 1


def _repeats(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0


def _counts(params: SamplingParams) -> bool:
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _is_adjusted(spec: SampleSpec) -> bool:
    params = spec.params
    return bool(params.logit_bias or spec.banned or _repeats(params) or _counts(params))


def _adjusted(logits: npt.NDArray[np.float32], spec: SampleSpec) -> Scores:
    """Logits after bias, penalties and bans; the very same array if there are none."""
    if not _is_adjusted(spec):
        return logits
    params = spec.params
    scores = logits.astype(np.float64)
    if params.logit_bias:
        ids = _checked(list(params.logit_bias), "logit_bias", len(scores))
        scores[ids] += list(params.logit_bias.values())
    if _repeats(params):
        seen = np.unique(_checked(spec.token_ids, "the sequence", len(scores)))
        penalty = params.repetition_penalty
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    if _counts(params):
        generated = _checked(spec.token_ids[spec.num_prompt :], "the sequence", len(scores))
        ids, times = np.unique(generated, return_counts=True)
        scores[ids] -= params.presence_penalty + params.frequency_penalty * times
    if spec.banned:
        scores[_checked(spec.banned, "the banned tokens", len(scores))] = -np.inf
    return scores


def _checked(token_ids: Sequence[int], source: str, vocab_size: int) -> Ids:
    ids = np.asarray(token_ids, dtype=np.int64)
    if ids.size and int(ids.max()) >= vocab_size:
        raise InvalidRequest(
            f"{source} names token {int(ids.max())}: the vocabulary ends at {vocab_size - 1}"
        )
    return ids


def _sample(scores: Scores, best: int, params: SamplingParams, number: float) -> int:
    best_score = scores[best]
    ids: Ids | None = None
    if 0 < params.top_k < len(scores):
        ids = _top(scores, params.top_k)
        scores = scores[ids]
    # A gap divided by a tiny temperature may pass the largest float: that is probability 0.
    with np.errstate(over="ignore"):
        weights = np.subtract(scores, best_score, dtype=np.float64)
        weights /= params.temperature
        np.exp(weights, out=weights)
    kept = None
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
    if params.min_p > 0.0:
        # The best token weighs 1, so that min_p is the limit itself.
        likely = np.flatnonzero((weights if kept is None else weights[kept]) >= params.min_p)
        kept = likely if kept is None else kept[likely]
    if kept is not None:
        weights = weights[kept]
        ids = kept if ids is None else ids[kept]
    if ids is None:
        return _inverse_cdf(weights, number)
    order = ids.argsort()
    return int(ids[order[_inverse_cdf(weights[order], number)]])


def _inverse_cdf(weights: Floats, number: float) -> int:
    """The first index whose cumulative weight passes `number` of the total."""
    cumulative = weights.cumsum()
    idx = int(cumulative.searchsorted(number * cumulative[-1], side="right"))
    if idx == len(weights):  # the product was rounded up to the total
        idx = int(np.flatnonzero(weights)[-1])
    return idx


def _top(values: Scores, count: int) -> Ids:
    """Indices of the `count` largest values, largest first, lowest index first among equals."""
    if count < len(values):
        limit = np.partition(values, -count)[-count]
        above = np.flatnonzero(values > limit)
        ids = np.concatenate([above, np.flatnonzero(values == limit)[: count - len(above)]])
    else:
        ids = np.arange(len(values))
    # Both halves of `ids` ascend and differ in value, so that a stable sort keeps the tie rule.
    return ids[np.argsort(-values[ids], kind="stable")]


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """The fewest likeliest that hold `top_p` of the weight (Holtzman et al., 2020), at least one.

    Among equals the first are taken, which are the lowest ids, filtered by `top_k` or not.
    """
    wanted = top_p * float(weights.sum())
    num_looked_at = _FIRST_NUCLEUS
    while True:
        likeliest = _top(weights, num_looked_at)
        cumulative = weights[likeliest].cumsum()
        if cumulative[-1] >= wanted or len(likeliest) == len(weights):
            return likeliest[: int(cumulative.searchsorted(wanted, side="left")) + 1]
        num_looked_at *= 8


def _logprobs(logits: npt.NDArray[np.float32], token_id: int, num_top: int) -> Logprobs:
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    top = _top(values, num_top) if num_top else np.empty(0, dtype=np.int64)
    return Logprobs(
        drawn=float(values[token_id]), top=tuple((int(i), float(values[i])) for i in top)
    )
