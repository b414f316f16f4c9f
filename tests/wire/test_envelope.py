"""Headers and bodies: what goes in comes out, and no bytes do harm."""

import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmrt.wire import messages
from llmrt.wire.envelope import (
    MAGIC,
    MAJOR,
    MAX_BODY_BYTES,
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    MAX_RAW_BYTES,
    MINOR,
    Header,
    check_frames,
    decode_body,
    decode_header,
    encode_body,
    encode_header,
)
from llmrt.wire.errors import MessageTooLarge, ProtocolError, VersionMismatch
from llmrt.wire.ids import Attempt
from llmrt.wire.messages import ChatMessage, Generate, Held, Hello, Load, Register, Tokenize
from llmrt.wire.sampling import SamplingParams

BODIES = [
    struct
    for struct in vars(messages).values()
    if isinstance(struct, type) and issubclass(struct, msgspec.Struct)
]
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
MEBIBYTE = 1 << 20


def pack(*fields: object) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return packed


@given(
    kind=st.text(max_size=20),
    request_id=st.just(b"") | st.binary(min_size=16, max_size=16),
    epoch=U64,
    n=U32,
    seq=U32,
    budget_ms=st.integers(-1, 2**63 - 1),
    stamps=st.lists(U32, max_size=8),
)
def test_a_header_survives_the_way(
    kind: str, request_id: bytes, epoch: int, n: int, seq: int, budget_ms: int, stamps: list[int]
) -> None:
    frame = encode_header(
        kind, request_id, attempt=Attempt(epoch, n), seq=seq, budget_ms=budget_ms, stamps=stamps
    )
    header = decode_header(frame)
    assert header == Header(
        kind=kind,
        request_id=request_id,
        epoch=epoch,
        n=n,
        seq=seq,
        budget_ms=budget_ms,
        stamps=tuple(stamps),
    )
    assert header.attempt == Attempt(epoch, n)


def test_a_header_begins_with_protocol_and_version() -> None:
    assert msgpack.unpackb(encode_header("beat"))[:4] == [MAGIC, MAJOR, MINOR, "beat"]


def test_missing_fields_take_their_defaults() -> None:
    assert decode_header(pack(MAGIC, MAJOR, 0, "beat")) == Header(kind="beat")


def test_fields_of_a_later_minor_version_are_ignored() -> None:
    fields = msgpack.unpackb(encode_header("beat"))
    fields[2] = MINOR + 1
    assert decode_header(pack(*fields, "new", {"a": 1})) == Header(kind="beat", minor=MINOR + 1)
    body = msgpack.packb({"epoch": 1, "grant_id": 4, "new": [[{}]]})
    assert decode_body(body, messages.GrantRef).grant_id == 4


@pytest.mark.parametrize("rest", [(), ("beat",), (5, {"other": "layout"})])
def test_another_major_version_is_told(rest: tuple[object, ...]) -> None:
    """Whatever follows the version there."""
    with pytest.raises(VersionMismatch, match=r"peer speaks protocol 2.7, this side 1\.0"):
        decode_header(pack(MAGIC, 2, 7, *rest))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        pack(),
        pack(MAGIC),
        pack(MAGIC, MAJOR, MINOR),
        pack("other", MAJOR, MINOR, "beat"),
        pack(MAGIC, True, MINOR, "beat"),
        pack(MAGIC, MAJOR, MINOR, 5),
        pack(MAGIC, MAJOR, MINOR, "beat", "text"),
        pack(MAGIC, MAJOR, MINOR, "beat", b"short"),
        pack(MAGIC, MAJOR, MINOR, "beat", b"", -1),
        pack(MAGIC, MAJOR, MINOR, "beat", b"", 0, 2**32),
        pack(MAGIC, MAJOR, MINOR, "beat", b"", 0, 0, -1),
        pack(MAGIC, MAJOR, MINOR, "beat", b"", 0, 0, 2**32),
        pack(MAGIC, MAJOR, MINOR, "beat", b"", 0, 0, 0, -2),
        pack(MAGIC, MAJOR, MINOR, "beat", b"", 0, 0, 0, 0, [None]),
        encode_header("beat") + b"\x00",
        encode_header("beat")[:-1],
        msgpack.packb({"kind": "beat"}),
        encode_header("x" * MAX_HEADER_BYTES),
    ],
)
def test_a_damaged_header_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_header(frame)
    assert type(caught.value) is ProtocolError


def test_a_body_survives_the_way() -> None:
    generate = Generate(
        prompt_kind="chat",
        sampling=SamplingParams(
            max_tokens=3, temperature=0.5, seed=2**64 - 1, logit_bias={7: -1.5}, stop=("é",)
        ),
        messages=(ChatMessage(role="user", content="hi 🙂"),),
        priority=-3,
    )
    assert decode_body(encode_body(generate), Generate) == generate


def test_a_body_above_the_limit_is_refused_by_the_sender() -> None:
    turn = ChatMessage(role="user", content="x" * MAX_BODY_BYTES)
    with pytest.raises(MessageTooLarge, match="Tokenize"):
        encode_body(Tokenize(messages=(turn,)))


def test_a_body_above_the_limit_is_refused_by_the_receiver() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        decode_body(bytes(MAX_BODY_BYTES + 1), Hello)


def test_frames_are_counted_and_measured() -> None:
    check_frames([b""] * MAX_FRAMES)
    with pytest.raises(ProtocolError, match="frames"):
        check_frames([])
    with pytest.raises(ProtocolError, match="frames"):
        check_frames([b""] * (MAX_FRAMES + 1))
    with pytest.raises(ProtocolError, match="bytes"):
        check_frames([b"", bytes(MAX_RAW_BYTES + 1)])


# Any bytes

NESTED = b"\x91" * 900
MSGPACK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(-9, 9), inner),
    max_leaves=20,
).map(msgpack.packb)


def mutations(frame: bytes) -> st.SearchStrategy[bytes]:
    """A valid frame with some bytes overwritten, and cut or continued."""

    def mutate(edits: list[tuple[int, int]], end: int, tail: bytes) -> bytes:
        changed = bytearray(frame)
        for place, value in edits:
            changed[place % len(changed)] = value
        return bytes(changed[:end]) + tail

    edits = st.lists(st.tuples(st.integers(0, len(frame)), st.integers(0, 255)), max_size=4)
    return st.builds(mutate, edits, st.integers(0, len(frame)), st.binary(max_size=3))


VALID_HEADER = encode_header(
    "generate", b"r" * 16, attempt=Attempt(2**60, 3), seq=70000, stamps=[9]
)
VALID_BODY = encode_body(
    Generate(
        prompt_kind="text",
        sampling=SamplingParams(max_tokens=300, logit_bias={5: 1.0}, stop=("a", "b")),
        messages=(ChatMessage(role="user", content="é"),),
    )
)


def only_protocol_errors(decode: Callable[[], object]) -> None:
    with suppress(ProtocolError):
        decode()


@settings(max_examples=150)
@given(st.binary(max_size=100) | MSGPACK | mutations(VALID_HEADER))
@example(NESTED)
@example(b"\xdc\x40\x00" * 300)
def test_any_header_is_taken_or_refused(frame: bytes) -> None:
    only_protocol_errors(lambda: decode_header(frame))


@settings(max_examples=150)
@given(
    frame=st.binary(max_size=100) | MSGPACK | mutations(VALID_BODY),
    expected=st.sampled_from(BODIES),
)
@example(frame=NESTED, expected=Hello)
@example(frame=b"\x81\xa1x" + b"\x91" * 100_000, expected=Hello)
@example(frame=VALID_BODY, expected=Generate)
def test_any_body_is_taken_or_refused(frame: bytes, expected: type[msgspec.Struct]) -> None:
    only_protocol_errors(lambda: decode_body(frame, expected))


def repeat(head: bytes, unit: bytes, size: int) -> bytes:
    """A map with one field, an array of as many units as fit in `size` bytes."""
    count = (size - len(head) - 5) // len(unit)
    return head + b"\xdd" + count.to_bytes(4, "big") + unit * count


def field(name: str, *, before: bytes = b"") -> bytes:
    return b"\x81" + before + bytes(msgpack.packb(name))


TURN = bytes(msgpack.packb({"role": "", "content": ""}))
HOSTILE: dict[str, tuple[bytes, Any]] = {
    "empty maps": (repeat(b"", b"\x80", MEBIBYTE), Hello),
    "empty maps in a field to skip": (repeat(field("new"), b"\x80", MEBIBYTE), Hello),
    "empty maps for turns": (repeat(field("messages"), b"\x80", MEBIBYTE), Tokenize),
    "turns": (repeat(field("messages"), TURN, MEBIBYTE), Tokenize),
    "held": (repeat(field("holding"), pack(b"", 0, 0, ""), MEBIBYTE), Register),
    "log probabilities": (
        repeat(b"", b"\x92\x00\x90", MEBIBYTE),
        list[tuple[float, tuple[int, ...]]],
    ),
    "announced array": (b"\xdd\xff\xff\xff\xff" + bytes(MEBIBYTE - 5), list[int]),
    "announced map": (b"\x81\xa5links\xdf\xff\xff\xff\xff", Load),
    "announced text": (b"\xdb\xff\xff\xff\xff" + bytes(99), str),
    "announced arrays in each other": (b"\xdc\x40\x00" * 340, Hello),
    "deep in a field to skip": (field("new") + b"\x91" * 1_000_000, Hello),
    "deep maps": (b"\x81\x00" * 500_000, Hello),
    "many keys": (
        field("links")
        + b"\xdf\x00\x01\x00\x00"
        + b"".join(pack(f"{i:x}")[1:] * 2 for i in range(65536)),
        Load,
    ),
    "held by a worker": (repeat(b"", pack(b"", 0, 0, ""), MEBIBYTE), tuple[Held, ...]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_costs_little(name: str) -> None:
    """Memory stays below 40 times the frame, and time below a second where 10 ms are usual."""
    frame, expected = HOSTILE[name]
    start = time.process_time()
    only_protocol_errors(lambda: decode_body(frame, expected))
    assert time.process_time() - start < 1.0
    tracemalloc.start()
    only_protocol_errors(lambda: decode_body(frame, expected))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 * len(frame) + 100_000


def test_a_hostile_header_costs_little() -> None:
    frame = pack(MAGIC, MAJOR, MINOR)[:-1] + b"\xdc\x40\x00" * 330
    tracemalloc.start()
    for _ in range(10):
        only_protocol_errors(lambda: decode_header(frame))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
