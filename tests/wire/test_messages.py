"""Kinds of messages: each constant is documented, each body decodes with what is missing named."""

from pathlib import Path

import msgspec
import pytest

from llmrt.wire import messages
from llmrt.wire.envelope import decode_body, encode_body
from llmrt.wire.errors import ProtocolError
from llmrt.wire.messages import ChatMessage, Held, Load

KINDS = {
    name: value
    for name, value in vars(messages).items()
    if isinstance(value, str) and name.isupper()
}


def test_kinds_are_distinct_words() -> None:
    assert len(set(KINDS.values())) == len(KINDS)
    assert all(value == name.lower() for name, value in KINDS.items())


@pytest.mark.parametrize("kind", KINDS.values())
def test_every_kind_is_documented(kind: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "wire.md"
    assert f"| `{kind}` |" in page.read_text()


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ProtocolError, match=r"ChatMessage: .*content"):
        decode_body(msgspec.msgpack.encode({"role": "user"}), ChatMessage)


def test_a_field_of_a_wrong_type_is_named() -> None:
    with pytest.raises(ProtocolError, match=r"Load: .*num_running"):
        decode_body(msgspec.msgpack.encode({"num_running": "3"}), Load)


def test_what_a_worker_holds_is_small() -> None:
    """It is in every heartbeat: no field names."""
    held = Held(b"r" * 16, 1, 2, "decode")
    assert len(encode_body(held)) == 28
    assert decode_body(encode_body(held), Held) == held
