"""The KV contract: what two workers must agree on before a block may pass between them."""

import msgspec

BLOCK_TOKENS = 32


class KvContract(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what the bytes of a KV block mean.

    `layout` names the order inside a block, `kv_dtype` the numbers, `rope` the rotation that is
    already applied to K. `numerics_id` names kernel revision, instruction family and weight and
    KV format: it may differ, but then a resume is not bit for bit.
    """

    model_hash: str
    tokenizer_hash: str
    kv_dtype: str
    block_tokens: int
    layout: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rope: str
    sharding: str
    protocol: str
    numerics_id: str

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K and V of all layers and heads, each with its scales."""
        item, scale = {"bf16": (2, 0), "f32": (4, 0), "fp8": (1, 4), "int8": (1, 4)}[self.kv_dtype]
        token = self.head_dim * item + scale
        return 2 * self.num_layers * self.num_kv_heads * self.block_tokens * token


def contract_mismatch(ours: KvContract, theirs: KvContract) -> str | None:
    """The first difference that would give wrong text, with both values; None if there is none."""
    for name in KvContract.__struct_fields__:
        if name == "numerics_id":
            continue
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            return f"{name} is {a!r} here and {b!r} there"
    return None
