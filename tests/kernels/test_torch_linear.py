"""Packed products against float64, in every form and for few and many rows."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from llmrt.kernels.torch_linear import (
    DenseLinear,
    HalfLinear,
    Int4Linear,
    compute_dtype,
    multiplies_bf16,
)

ROW_COUNTS = (1, 2, 4, 5, 33)


def make_groups(
    rows: int, columns: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    rng = np.random.default_rng(rows)
    q = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    scale, zero = (rng.normal(0, 0.1, (rows, columns // 32)).astype(np.float32) for _ in range(2))
    return q, scale, zero


def relative_error(got: torch.Tensor, expected: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(got.double().numpy() - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("num_rows", ROW_COUNTS)
@pytest.mark.parametrize(("rows", "columns"), [(7, 33), (48, 64), (300, 576)])
def test_float32_is_exact_to_its_precision(num_rows: int, rows: int, columns: int) -> None:
    weight, x = torch.randn(rows, columns), torch.randn(num_rows, columns)
    y = DenseLinear(weight)(x)
    assert y.dtype == torch.float32
    assert relative_error(y, x.double().numpy() @ weight.double().numpy().T) < 1e-6


@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_half_keeps_eleven_bits(num_rows: int) -> None:
    """Weights, and for a single row inputs and outputs too, are rounded to float16."""
    weight, x = torch.randn(300, 576), torch.randn(num_rows, 576)
    y = HalfLinear(weight.half())(x)
    assert relative_error(y, x.double().numpy() @ weight.double().numpy().T) < 2**-11


@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_four_bits_are_multiplied_as_they_are(num_rows: int) -> None:
    """bfloat16 inputs, scales and outputs: 2**-9 each."""
    q, scale, zero = make_groups(48, 96)
    weight = (q.reshape(48, 3, 32) - 8.0) * scale[..., None] + zero[..., None]
    x = torch.randn(num_rows, 96)
    y = Int4Linear(q, scale, zero)(x)
    assert y.dtype == torch.bfloat16
    assert relative_error(y, x.double().numpy() @ weight.reshape(48, 96).T) < 0.006


@pytest.mark.skipif(multiplies_bf16(), reason="dense weights are rounded to bf16 on this CPU")
def test_few_and_many_rows_differ_by_the_order_of_sums_alone() -> None:
    """Rounded to bfloat16, nearly all results are the same; none is further than one step."""
    linear = Int4Linear(*make_groups(480, 576))
    x = torch.randn(8, 576)
    many = linear(x).float()
    few = torch.cat([linear(x[:4]), linear(x[4:])]).float()
    assert (many == few).float().mean() > 0.99
    torch.testing.assert_close(many, few, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(
    "linear", [DenseLinear(torch.randn(96, 576)), Int4Linear(*make_groups(96, 576))]
)
def test_a_result_is_the_same_bits_wherever_its_row_stands(
    linear: DenseLinear | Int4Linear,
) -> None:
    x = torch.randn(40, 576)
    whole = linear(x)
    assert torch.equal(linear(x[7:]), whole[7:])
    assert torch.equal(linear(x[:3]), linear(x[[2, 0, 1]])[[1, 2, 0]])


def test_which_row_counts_fit_the_4_bit_kernel() -> None:
    assert [rows for rows in (8, 16, 40, 48, 576) if Int4Linear.fits(rows)] == [16, 48, 576]
    Int4Linear(*make_groups(16, 32))


def test_bf16_weights_are_multiplied_in_what_the_cpu_has() -> None:
    assert compute_dtype("f32") == torch.float32
    fast = torch.bfloat16 if multiplies_bf16() else torch.float32
    assert compute_dtype("bf16") == compute_dtype("auto") == fast
