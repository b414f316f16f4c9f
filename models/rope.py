"""Inverse frequencies of rotary embeddings, with their scaling, from both file formats.

Sources: RoFormer (arXiv 2104.09864, section 3.4.2) for the frequencies; linear interpolation from
arXiv 2306.15595; YaRN from arXiv 2309.00071, section 3.2 and appendix; `llama3` from Meta's
`llama-models` (`apply_scaling`). They are computed in double precision.
"""

import math
from collections.abc import Sequence

from llmrt.models.fields import Fields
from llmrt.models.spec import RopeSpec
from llmrt.wire.errors import ModelError

# Keeps the logarithms of YaRN finite; real values are 1 and more.
MIN_TURNS = 1e-3


def inverse_frequencies(rotary_dim: int, theta: float) -> list[float]:
    """theta^(-2i/d) in radians per position."""
    return [theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]


def scale_llama3(
    frequencies: Sequence[float], *, factor: float, low: float, high: float, original: int
) -> list[float]:
    """Divide by `factor` what turns less than `low` times in `original` tokens, keep what turns
    more than `high` times, and blend between."""
    scaled = []
    for frequency in frequencies:
        turns = original * frequency / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        scaled.append(frequency * (kept + (1 - kept) / factor))
    return scaled


def scale_yarn(
    frequencies: Sequence[float],
    *,
    factor: float,
    theta: float,
    original: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> list[float]:
    """Blend `frequencies` with those divided by `factor`, over the dimensions that turn between
    `beta_fast` and `beta_slow` times in `original` tokens."""
    rotary_dim = 2 * len(frequencies)

    def dimension(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = max(high - low, 0.001)
    scaled = []
    for i, frequency in enumerate(frequencies):
        interpolated = min(max((i - low) / width, 0.0), 1.0)
        scaled.append(frequency * (1 - interpolated + interpolated / factor))
    return scaled


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Temperature of the logits for a context that is `factor` times longer."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_from_config(
    fields: Fields, *, theta: float, rotary_dim: int, max_context: int
) -> RopeSpec:
    """From `rope_scaling` or `rope_parameters` of a config.json; raises `ModelError`.

    `theta` is used where the object has none; `max_context` is the context without scaling.
    """
    rope_type = fields.text("rope_type", fields.text("type", "default"))
    theta = fields.number("rope_theta", theta, minimum=1, above=True)
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "1", fields.get("partial_rotary_factor"))
    frequencies = inverse_frequencies(rotary_dim, theta)
    attention_factor = 1.0
    original = fields.integer("original_max_position_embeddings", max_context)
    if rope_type == "default":
        pass
    elif rope_type == "linear":
        factor = fields.number("factor", minimum=1)
        frequencies = [frequency / factor for frequency in frequencies]
    elif rope_type == "llama3":
        low = fields.number("low_freq_factor", above=True)
        frequencies = scale_llama3(
            frequencies,
            factor=fields.number("factor", minimum=1),
            low=low,
            high=fields.number("high_freq_factor", minimum=low, above=True),
            original=original,
        )
    elif rope_type == "yarn":
        factor = fields.number("factor", max(1.0, max_context / original), minimum=1)
        frequencies = scale_yarn(
            frequencies,
            factor=factor,
            theta=theta,
            original=original,
            beta_fast=fields.number("beta_fast", 32.0, minimum=MIN_TURNS),
            beta_slow=fields.number("beta_slow", 1.0, minimum=MIN_TURNS),
            truncate=fields.flag("truncate", True),
        )
        attention_factor = _config_attention_factor(fields, factor)
    else:
        raise _unknown(fields, "rope_type", rope_type)
    return RopeSpec("half", rotary_dim, tuple(frequencies), attention_factor)


def rope_from_gguf(
    fields: Fields,
    *,
    style: str,
    theta: float,
    rotary_dim: int,
    max_context: int,
    divisors: Sequence[float] = (),
) -> RopeSpec:
    """From the `rope.scaling.*` keys of a GGUF file; raises `ModelError`.

    `divisors` is the tensor `rope_freqs.weight`, which holds what `llama3` scaling divides by.
    """
    frequencies = inverse_frequencies(rotary_dim, theta)
    if divisors:
        if len(divisors) != len(frequencies) or not all(0 < d < math.inf for d in divisors):
            raise ModelError(
                f"{fields.source}: tensor 'rope_freqs.weight' must hold {len(frequencies)} "
                f"positive numbers, one per rotated pair; it has {len(divisors)} values"
            )
        frequencies = [f / d for f, d in zip(frequencies, divisors, strict=True)]
    # Older files have the factor alone, under another name; 0 stands for none.
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0)) or 1.0
    if factor < 1:
        raise fields.error("rope.scaling.factor", "0 or at least 1", factor)
    has_factor = factor != 1.0
    rope_type = fields.text("rope.scaling.type", "linear" if has_factor else "none")
    attention_factor = 1.0
    if rope_type == "none":
        pass
    elif rope_type == "linear":
        frequencies = [frequency / factor for frequency in frequencies]
    elif rope_type == "yarn":
        frequencies = scale_yarn(
            frequencies,
            factor=factor,
            theta=theta,
            original=fields.integer("rope.scaling.original_context_length", max_context),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0, minimum=MIN_TURNS),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0, minimum=MIN_TURNS),
        )
        attention_factor = yarn_attention_factor(factor)
        attention_factor *= fields.number("rope.scaling.attn_factor", 1.0, above=True)
    else:
        raise _unknown(fields, "rope.scaling.type", rope_type)
    return RopeSpec(style, rotary_dim, tuple(frequencies), attention_factor)


def _config_attention_factor(fields: Fields, factor: float) -> float:
    if fields.has("attention_factor"):
        return fields.number("attention_factor", above=True)
    mscale, mscale_all_dim = fields.number("mscale", 0.0), fields.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all_dim)
    return yarn_attention_factor(factor)


def _unknown(fields: Fields, key: str, rope_type: str) -> ModelError:
    return fields.error(key, "default (none), linear, llama3 or yarn: no other is known", rope_type)
