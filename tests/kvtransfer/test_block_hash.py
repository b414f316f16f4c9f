import hashlib
import struct
from array import array

from llmrt.kvtransfer.block_hash import HASH_BYTES, hash_blocks, tail_key
from llmrt.wire.kv import BLOCK_TOKENS


def tokens(count: int, start: int = 0) -> "array[int]":
    return array("I", range(start, start + count))


def test_only_full_blocks_have_a_hash() -> None:
    for count, expected in [(0, 0), (1, 0), (31, 0), (32, 1), (33, 1), (63, 1), (64, 2)]:
        assert len(hash_blocks(tokens(count))) == expected


def test_the_hash_is_the_documented_one() -> None:
    """Two builds must find each other's blocks, so the bytes are fixed."""
    root = hashlib.sha256(b"key").digest()
    raw = struct.pack("<64I", *range(64))
    first = hashlib.sha256(root + bytes(HASH_BYTES) + raw[:128]).digest()
    second = hashlib.sha256(root + first + raw[128:]).digest()
    assert hash_blocks(tokens(64), salt=b"key") == [first, second]


def test_an_equal_block_behind_another_prefix_has_another_hash() -> None:
    a = hash_blocks(tokens(32) + tokens(32))
    b = hash_blocks(tokens(32, start=7) + tokens(32))
    assert a[0] != b[0]
    assert a[1] != b[1]


def test_salts_share_no_hash() -> None:
    assert not set(hash_blocks(tokens(96), salt=b"a")) & set(hash_blocks(tokens(96), salt=b"b"))
    assert not set(hash_blocks(tokens(96))) & set(hash_blocks(tokens(96), salt=b"b"))


def test_a_growing_sequence_is_hashed_from_its_parent() -> None:
    whole = hash_blocks(tokens(128), salt=b"k")
    head = hash_blocks(tokens(64), salt=b"k")
    tail = hash_blocks(tokens(64, start=64), salt=b"k", parent=head[-1])
    assert head + tail == whole


def test_tails_of_other_salts_and_parents_have_other_names() -> None:
    names = {tail_key(parent, salt=salt) for parent in (b"", b"p" * 32) for salt in (b"", b"k")}
    assert len(names) == 3  # the salt is in the parent already
    assert not names & set(hash_blocks(tokens(64)))


def test_array_types_do_not_matter() -> None:
    expected = hash_blocks(tokens(BLOCK_TOKENS))
    assert hash_blocks(array("q", range(BLOCK_TOKENS))) == expected
    assert hash_blocks(array("i", range(BLOCK_TOKENS))) == expected
