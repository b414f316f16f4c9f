"""The KV contract: what may differ between two workers, and what may not."""

import msgspec
import pytest
from kv_mismatches import CONTRACT, MISMATCHES, other_contract
from tests.conftest import make_contract

from llmrt.wire.envelope import decode_body, encode_body
from llmrt.wire.errors import ProtocolError
from llmrt.wire.kv import (
    BLOCK_FIELDS,
    TEXT_FIELDS,
    KvContract,
    contract_fault,
    contract_mismatch,
    text_mismatch,
)


def test_equal_contracts_match() -> None:
    assert contract_mismatch(make_contract(), make_contract()) is None


@pytest.mark.parametrize("name", [f for f in KvContract.__struct_fields__ if f != "numerics_id"])
def test_any_other_difference_is_told_with_both_values(name: str) -> None:
    ours = make_contract()
    value = getattr(ours, name)
    other = value + 1 if isinstance(value, int) else value + "x"
    mismatch = contract_mismatch(ours, make_contract(**{name: other}))
    assert mismatch == f"{name} is {value!r} here and {other!r} there"


@pytest.mark.parametrize(("name", "value"), MISMATCHES)
def test_whatever_differs_is_a_mismatch_also_after_the_way(name: str, value: object) -> None:
    other = decode_body(encode_body(other_contract(name, value)), KvContract)
    both = f"{name} is {getattr(CONTRACT, name)!r} here and {value!r} there"
    assert contract_mismatch(CONTRACT, other) == both
    assert text_mismatch(CONTRACT, other) == (both if name in TEXT_FIELDS else None)


def test_every_field_is_among_the_mismatches() -> None:
    fields = {*TEXT_FIELDS, *BLOCK_FIELDS}
    assert fields == {name for name, _ in MISMATCHES}
    assert fields | {"numerics_id"} == set(KvContract.__struct_fields__)


@pytest.mark.parametrize("value", ["2", 2.0, True, None, [2]])
def test_a_number_of_another_type_is_no_contract(value: object) -> None:
    raw = msgspec.to_builtins(CONTRACT) | {"num_layers": value}
    with pytest.raises(ProtocolError):
        decode_body(msgspec.msgpack.encode(raw), KvContract)


@pytest.mark.parametrize("value", [7, b"x", None])
def test_a_text_of_another_type_is_no_contract(value: object) -> None:
    raw = msgspec.to_builtins(CONTRACT) | {"rope": value}
    with pytest.raises(ProtocolError):
        decode_body(msgspec.msgpack.encode(raw), KvContract)


def test_a_contract_that_says_nothing_is_one_with_nobody() -> None:
    """Two that know nothing of their model would be equal."""
    assert contract_fault(CONTRACT) is None
    assert contract_fault(other_contract("model_hash", " ")) == (
        "model_hash is ' ', which says nothing"
    )
    assert contract_fault(other_contract("head_dim", 0)) == "head_dim is 0, which says nothing"


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
