"""Torch operations against their plain references."""

import numpy as np
import pytest
import torch

from llmrt.kernels.torch_ops import gated, rms_norm, rope_angles, rotate


def test_rms_norm_is_its_formula() -> None:
    x, weight = torch.randn(3, 5, 48), torch.randn(48)
    values = x.double().numpy()
    expected = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-3) * weight.numpy()
    got = rms_norm(x, weight, torch.tensor([1e-3]))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [4, 16])
def test_rotate_turns_each_pair_by_its_angle(is_interleaved: bool, rotary_dim: int) -> None:
    inv_freq = torch.rand(rotary_dim // 2)
    positions = torch.tensor([0, 3, 200])
    x = torch.randn(3, 2, 16)
    before = x.clone().numpy()
    angles = rope_angles(positions, inv_freq, 1.5, is_interleaved=is_interleaved)
    got = rotate(x, angles).numpy()
    for i in range(rotary_dim // 2):
        a, b = (2 * i, 2 * i + 1) if is_interleaved else (i, i + rotary_dim // 2)
        angle = positions.numpy()[:, None] * inv_freq.numpy()[i]
        turned = 1.5 * (before[..., a] + 1j * before[..., b]) * np.exp(1j * angle)
        np.testing.assert_allclose(got[..., a], turned.real, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(got[..., b], turned.imag, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(got[..., rotary_dim:], before[..., rotary_dim:])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_is_its_formula(activation: str) -> None:
    gate_up = torch.randn(4, 20)
    gate, up = gate_up.double().numpy()[:, :10], gate_up.double().numpy()[:, 10:]
    if activation == "silu":
        expected = gate / (1 + np.exp(-gate)) * up
    else:
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        expected = 0.5 * gate * (1 + np.tanh(inner)) * up
    np.testing.assert_allclose(gated(gate_up, activation).numpy(), expected, rtol=1e-4, atol=1e-6)
