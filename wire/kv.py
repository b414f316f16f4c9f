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


# What decides the text: workers that serve one model name agree in these, or clients would get one
# text or another. The others decide what the bytes of a block mean.
TEXT_FIELDS = ("model_hash", "tokenizer_hash", "num_layers", "num_kv_heads", "head_dim", "rope")
BLOCK_FIELDS = ("kv_dtype", "block_tokens", "layout", "sharding", "protocol")


def contract_fault(contract: KvContract) -> str | None:
    """The first field that says nothing, which would equal another such; None if there is none."""
    for name in (*TEXT_FIELDS, *BLOCK_FIELDS):
        value = getattr(contract, name)
        if value < 1 if isinstance(value, int) else not value.strip():
            return f"{name} is {value!r}, which says nothing"
    return None


def contract_mismatch(ours: KvContract, theirs: KvContract) -> str | None:
    """The first difference that would give wrong text, with both values; None if there is none.

    Two such workers exchange no blocks, and neither continues a request of the other.
    """
    return _difference(ours, theirs, (*TEXT_FIELDS, *BLOCK_FIELDS))


def text_mismatch(ours: KvContract, theirs: KvContract) -> str | None:
    """As `contract_mismatch`, of what keeps two workers from serving one model name."""
    return _difference(ours, theirs, TEXT_FIELDS)


def _difference(ours: KvContract, theirs: KvContract, names: tuple[str, ...]) -> str | None:
    for name in names:
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            return f"{name} is {a!r} here and {b!r} there"
    return None
