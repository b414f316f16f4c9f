"""The address of an arena that is read through NIXL."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrt.kvtransfer.nixl_address import TOKEN_BYTES, Notice, parse_url, url_of
from llmrt.kvtransfer.nixl_frames import ArenaAddress
from llmrt.wire.errors import ProtocolError
from llmrt.wire.ids import LeaseId

TOKEN = bytes(range(TOKEN_BYTES))


def make_address(
    *, base: int = 1 << 40, num_blocks: int = 64, block_bytes: int = 4096, generation: int = 3
) -> ArenaAddress:
    return ArenaAddress(
        agent="arena-00",
        metadata=bytes(300),
        base=base,
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        generation=generation,
    )


@given(st.binary(max_size=2000), st.integers(1, 1 << 20), st.integers(1, 1 << 24))
def test_an_address_comes_back(metadata: bytes, num_blocks: int, block_bytes: int) -> None:
    address = ArenaAddress(
        agent="arena-00",
        metadata=metadata,
        base=1 << 30,
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        generation=3,
    )
    assert parse_url(url_of(address, TOKEN)) == (address, TOKEN)


SOUND = url_of(make_address(), TOKEN)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nixl://arena-00",
        SOUND.replace("nixl:", "tcp:"),
        SOUND.replace(TOKEN.hex(), "00"),
        SOUND.replace(TOKEN.hex(), "xy" * TOKEN_BYTES),
        SOUND[:-8],
        SOUND.replace("at=", "at=!"),
        SOUND + "A" * 100_000,
        "nixl://[::1/" + TOKEN.hex(),
        "nixl://a/" + TOKEN.hex() + "?at=\N{SNOWMAN}",
        url_of(make_address(num_blocks=0), TOKEN),
        url_of(make_address(block_bytes=-1), TOKEN),
        url_of(make_address(num_blocks=1 << 31), TOKEN),
        url_of(make_address(base=(1 << 63) - 4096), TOKEN),
        url_of(make_address(base=0), TOKEN),
        url_of(make_address(generation=-1), TOKEN),
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ProtocolError, match="no nixl://AGENT/TOKEN"):
        parse_url(url)


@given(st.text(max_size=200))
def test_any_text_is_an_address_or_a_protocol_error(text: str) -> None:
    for url in (text, f"nixl://a/{TOKEN.hex()}?at={text}"):
        with pytest.raises(ProtocolError):
            parse_url(url)


def test_a_notice_comes_back_and_other_bytes_are_none() -> None:
    notice = Notice(TOKEN, LeaseId(7), 3, 64)
    assert Notice.unpack(notice.pack()) == notice
    assert Notice.unpack(notice.pack()[:-1]) is None
    assert Notice.unpack(b"") is None
