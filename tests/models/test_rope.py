"""Inverse frequencies, compared with transformers' and with the rules of GGUF."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llmrt.models.fields import Fields
from llmrt.models.rope import inverse_frequencies, rope_from_config, rope_from_gguf
from llmrt.models.spec import RopeSpec
from llmrt.wire.errors import ModelError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def from_config(values: dict[str, Any], theta: float = 5e5, context: int = 131072) -> RopeSpec:
    fields = Fields(values, "config.json: rope_scaling")
    return rope_from_config(fields, theta=theta, rotary_dim=128, max_context=context)


def from_gguf(values: dict[str, Any], **options: Any) -> RopeSpec:
    fields = Fields({f"llama.{key}": v for key, v in values.items()}, "x.gguf", prefix="llama.")
    defaults = {"style": "half", "theta": 1e6, "rotary_dim": 128, "max_context": 32768}
    return rope_from_gguf(fields, **{**defaults, **options})


@pytest.mark.parametrize(
    "values",
    [
        {"rope_type": "linear", "factor": 8.0},
        LLAMA3,
        YARN,
        {**YARN, "attention_factor": 0.7},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        {**YARN, "beta_fast": 16, "beta_slow": 2},
        {**YARN, "truncate": False},
    ],
)
def test_scaled_frequencies_are_those_of_transformers(
    values: dict[str, Any], hf_model: Callable[..., Any]
) -> None:
    config = hf_model(
        head_dim=128, max_position_embeddings=131072, rope_parameters={**values, "rope_theta": 5e5}
    ).config
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[values["rope_type"]](
        config, torch.device("cpu")
    )
    got = from_config(values)
    np.testing.assert_allclose(got.inv_freq, inv_freq.numpy(), rtol=2e-6)
    assert got.attention_factor == pytest.approx(attention_factor)


def test_the_default_is_a_power_of_theta() -> None:
    assert from_config({}).inv_freq == tuple(5e5 ** (-2 * i / 128) for i in range(64))


def test_the_old_spelling_of_the_type_is_understood() -> None:
    assert from_config({"type": "linear", "factor": 2.0}) == from_config(
        {"rope_type": "linear", "factor": 2.0}
    )


def test_theta_of_the_object_wins() -> None:
    assert from_config({"rope_theta": 100}).inv_freq == tuple(inverse_frequencies(128, 100.0))


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "proportional", "new"])
def test_an_unknown_type_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ModelError, match=f"rope_type must be .*'{kind}'"):
        from_config({"rope_type": kind, "factor": 2.0})
    with pytest.raises(ModelError, match=f"llama.rope.scaling.type must be .*'{kind}'"):
        from_gguf({"rope.scaling.type": kind, "rope.scaling.factor": 2.0})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a number"),
        ({"rope_type": "linear", "factor": 0.0}, "factor must be a number"),
        ({"rope_type": "linear", "factor": math.inf}, "factor must be a number"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor must be a number above 1"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor is missing"),
        ({"rope_type": "default", "rope_theta": 1.0}, "rope_theta must be a number above 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
    ],
)
def test_wrong_numbers_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        from_config(values)


@pytest.mark.parametrize(
    ("keys", "config"),
    [
        ({}, {}),
        ({"rope.scaling.factor": 0.0}, {}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"type": "linear"}),
        ({"rope.scale_linear": 4.0}, {"type": "linear"}),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, {"type": "yarn"}),
    ],
)
def test_gguf_keys_say_the_same_as_a_config(keys: dict[str, Any], config: dict[str, Any]) -> None:
    expected = from_config({**config, "factor": 4.0}, theta=1e6, context=32768)
    assert from_gguf(keys) == expected


def test_divisors_of_gguf_are_llama3_scaling(hf_model: Callable[..., Any]) -> None:
    """The converter stores what the base frequencies are divided by."""
    scaled = np.array(from_config(LLAMA3).inv_freq)
    divisors = np.array(inverse_frequencies(128, 5e5)) / scaled
    got = from_gguf({}, theta=5e5, divisors=tuple(divisors.tolist()))
    np.testing.assert_allclose(got.inv_freq, scaled, rtol=1e-12)


@pytest.mark.parametrize("divisors", [(1.0,) * 63, (0.0,) * 64, (math.nan,) * 64])
def test_wrong_divisors_are_refused(divisors: tuple[float, ...]) -> None:
    with pytest.raises(ModelError, match=r"rope_freqs.weight"):
        from_gguf({}, divisors=divisors)


def test_a_shrinking_factor_of_gguf_is_refused() -> None:
    with pytest.raises(ModelError, match=r"llama.rope.scaling.factor must be 0 or at least 1"):
        from_gguf({"rope.scaling.factor": 1e-30})
