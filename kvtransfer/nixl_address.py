"""Where an arena is read through NIXL: `nixl://AGENT/TOKEN?at=...`, and what a reader sends back.

The URL holds all that a reader needs, so whoever has it can read: it is told to one peer, over the
control link. The token says which peer sent a notice.
"""

import base64
import binascii
import struct
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from llmrt.kvtransfer.nixl_frames import ArenaAddress
from llmrt.wire.errors import ProtocolError
from llmrt.wire.ids import LeaseId

TOKEN_BYTES = 16
# NIXL's metadata has 300 to 500 bytes per network device.
MAX_URL_CHARS = 65_536

_NOTICE = struct.Struct(f"<{TOKEN_BYTES}sQQI")
_decoder = msgspec.msgpack.Decoder(ArenaAddress)


@dataclass(frozen=True, slots=True)
class Notice:
    """A read has ended: the reader's token, the lease, the reader's count of reads, its blocks."""

    token: bytes
    lease_id: LeaseId
    transfer_id: int
    num_blocks: int

    def pack(self) -> bytes:
        return _NOTICE.pack(self.token, self.lease_id, self.transfer_id, self.num_blocks)

    @classmethod
    def unpack(cls, raw: bytes) -> "Notice | None":
        """None if `raw` is no notice."""
        if len(raw) != _NOTICE.size:
            return None
        token, lease_id, transfer_id, num_blocks = _NOTICE.unpack(raw)
        return cls(token, LeaseId(lease_id), transfer_id, num_blocks)


def url_of(address: ArenaAddress, token: bytes) -> str:
    raw = msgspec.msgpack.encode(address)
    return f"nixl://{address.agent}/{token.hex()}?at={base64.urlsafe_b64encode(raw).decode()}"


def parse_url(url: str) -> tuple[ArenaAddress, bytes]:
    """The arena and the token; raises `ProtocolError` if it is no such URL."""
    try:
        parts = urlsplit(url[:MAX_URL_CHARS])
        token = bytes.fromhex(parts.path.removeprefix("/"))
        raw = base64.b64decode(parts.query.removeprefix("at="), b"-_", validate=True)
        address = _decoder.decode(raw)
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        pass
    else:
        if parts.scheme == "nixl" and len(token) == TOKEN_BYTES and _is_sound(address):
            return address, token
    raise ProtocolError(
        f"the peer's bulk address is no nixl://AGENT/TOKEN?at=... (it has {len(url)} characters)"
    )


def _is_sound(address: ArenaAddress) -> bool:
    """Its last byte has a 64-bit address, so that no product of its numbers overflows."""
    size_bytes = address.num_blocks * address.block_bytes
    return (
        min(address.num_blocks, address.block_bytes) > 0 <= address.generation
        and 0 < address.base < address.base + size_bytes <= 1 << 63
        and address.num_blocks < 1 << 31
    )
