"""Torch operations of a decoder on CPU: norms, rotary embedding, gated activation.

Shape letters: M tokens of a step, D head size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32.

    `eps` is a tensor of one element, made once: building it costs more than the operation.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    return (x * scale).mul_(weight)


class Angles(NamedTuple):
    """What `rotate` multiplies pairs with; `sin` has the sign of each half.

    Pairs lie in the last dimension if interleaved, else in the last but one: `cos` is
    [M, 1, half, 1] or [M, 1, 1, half], `sin` [M, 1, half, 2] or [M, 1, 2, half].
    """

    cos: Tensor
    sin: Tensor
    pair_dim: int


def rope_angles(
    positions: Tensor, inv_freq: Tensor, attention_factor: float, *, is_interleaved: bool
) -> Angles:
    """The angles of positions [M]; len(inv_freq) is half the rotary dimensions."""
    pair_dim = -1 if is_interleaved else -2
    angles = torch.outer(positions.float(), inv_freq).unsqueeze_(1)
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    return Angles(cos.unsqueeze(pair_dim), torch.stack([-sin, sin], pair_dim), pair_dim)


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotary embedding of x: [M, heads, D] float32, in place; dims after the rotary ones stay.

    Pairs are (2i, 2i + 1) if interleaved, else (i, i + half) (Su et al., RoFormer, 2021, and
    GPT-NeoX).
    """
    shape = angles.sin.shape[2:]
    pairs = x[..., : shape.numel()].view(*x.shape[:-1], *shape)
    swapped = pairs.flip(angles.pair_dim)
    pairs.mul_(angles.cos).addcmul_(swapped, angles.sin)
    return x


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up for gate_up: [M, 2 * intermediate]."""
    gate, up = gate_up.chunk(2, -1)
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return act.mul_(up)
