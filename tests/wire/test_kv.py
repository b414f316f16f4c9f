"""The KV contract: what may differ between two workers, and what may not."""

import pytest
from tests.conftest import make_contract

from llmrt.wire.envelope import decode_body, encode_body
from llmrt.wire.kv import KvContract, contract_mismatch


def test_equal_contracts_match() -> None:
    assert contract_mismatch(make_contract(), make_contract()) is None


@pytest.mark.parametrize("name", [f for f in KvContract.__struct_fields__ if f != "numerics_id"])
def test_any_other_difference_is_told_with_both_values(name: str) -> None:
    ours = make_contract()
    value = getattr(ours, name)
    other = value + 1 if isinstance(value, int) else value + "x"
    mismatch = contract_mismatch(ours, make_contract(**{name: other}))
    assert mismatch == f"{name} is {value!r} here and {other!r} there"


def test_numerics_may_differ() -> None:
    """Then a resume is not bit for bit, but its text is not wrong."""
    assert contract_mismatch(make_contract(), make_contract(numerics_id="other")) is None


@pytest.mark.parametrize(
    ("kv_dtype", "token_bytes"), [("bf16", 128), ("f32", 256), ("fp8", 68), ("int8", 68)]
)
def test_a_block_holds_keys_and_values_of_all_layers(kv_dtype: str, token_bytes: int) -> None:
    """And one float32 scale for 64 numbers of a byte."""
    contract = make_contract(kv_dtype=kv_dtype, num_layers=30, num_kv_heads=3, head_dim=64)
    assert contract.block_bytes == 2 * 30 * 3 * 32 * token_bytes


def test_a_contract_survives_the_way() -> None:
    assert decode_body(encode_body(make_contract()), KvContract) == make_contract()
