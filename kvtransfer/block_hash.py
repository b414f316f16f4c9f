"""Content hashes of full KV blocks: equal hashes mean equal tokens in front of equal prefixes."""

import hashlib
from array import array

from llmrt.wire.arrays import U32_BYTES, pack_u32
from llmrt.wire.kv import BLOCK_TOKENS

HASH_BYTES = 32
_NO_PARENT = bytes(HASH_BYTES)
_TAIL = b"tail"


def hash_blocks(
    token_ids: "array[int]", *, salt: bytes = b"", parent: bytes = b""
) -> "list[bytes]":
    """SHA-256 chain over the full blocks of `token_ids`; a partial last block has no hash.

    Block i is hashed as H(H(salt) | hash of block i - 1 | its tokens as u32 little-endian), so
    that two salts never share a block and a hash stands for everything before it. `parent` is
    the hash of the block before `token_ids`, made with the same salt; a sequence that grows is
    hashed block by block with it.
    """
    raw = memoryview(pack_u32(token_ids))
    root = hashlib.sha256(salt).digest()
    step = BLOCK_TOKENS * U32_BYTES
    hashes = []
    previous = parent or _NO_PARENT
    for start in range(0, len(raw) - step + 1, step):
        block = hashlib.sha256(root)
        block.update(previous)
        block.update(raw[start : start + step])
        previous = block.digest()
        hashes.append(previous)
    return hashes


def tail_key(parent: bytes, *, salt: bytes = b"") -> bytes:
    """The name of a block that is not full, behind the one of hash `parent`, or the first one.

    It says nothing about the tokens in it, and equals no hash of a full block.
    """
    return _TAIL + (parent or hashlib.sha256(salt).digest())
