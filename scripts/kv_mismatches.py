"""25 contracts that differ from another in one field: what must never be taken for equal."""

import msgspec

from llmrt.wire.kv import KvContract

CONTRACT = KvContract(
    model_hash="5d10c4a2",
    tokenizer_hash="9aa37b11",
    kv_dtype="bf16",
    block_tokens=32,
    layout="block-major/k-dim-token/v-token-dim",
    num_layers=2,
    num_kv_heads=1,
    head_dim=4,
    rope="5b2e10f7",
    sharding="none",
    protocol="1",
    numerics_id="cpu-1/q8/kv-bf16",
)
# Another value, none, another case, white space, a part of it, a number that says nothing.
MISMATCHES: tuple[tuple[str, object], ...] = (
    ("model_hash", "e0f1aa90"),
    ("model_hash", ""),
    ("model_hash", "5D10C4A2"),
    ("model_hash", "5d10c4a2 "),
    ("model_hash", "5d10"),
    ("tokenizer_hash", "00c6d3fe"),
    ("tokenizer_hash", ""),
    ("tokenizer_hash", " 9aa37b11"),
    ("kv_dtype", "int8"),
    ("kv_dtype", "BF16"),
    ("kv_dtype", "bf16\x00"),
    ("block_tokens", 16),
    ("block_tokens", 64),
    ("block_tokens", 0),
    ("layout", "block-major/k-token-dim/v-token-dim"),
    ("layout", "\t"),
    ("num_layers", 3),
    ("num_layers", -2),
    ("num_kv_heads", 2),
    ("head_dim", 8),
    ("rope", "5b2e10f8"),
    ("rope", "none"),
    ("sharding", "tensor-2"),
    ("protocol", "2"),
    ("protocol", "1.0"),
)


def other_contract(name: str, value: object) -> KvContract:
    return msgspec.structs.replace(CONTRACT, **{name: value})
