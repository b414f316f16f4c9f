"""What both readers of a tokenizer find out, from GGUF metadata and from `tokenizer.json`."""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import tokenizers

SPACE_MARK = "\u2581"
"""Stands for a space in pieces of SentencePiece."""

END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|END_OF_TURN_TOKEN|>",
    "<eos>",
    "</s>",
)
"""Names of tokens that end a turn or a text."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A tokenizer that is ready to encode, and what the library does not tell about it.

    `token_bytes` has what each id adds to a text, nothing for control tokens; `spelled` what an
    id can take from a text, control tokens as well. `prefix` and `suffix` surround a text with
    `add_special`. `lossless_bytes` are the byte values that encoding always passes on, each in
    some token: others may be dropped, or any number of them swallowed by one token.
    `identity` is a digest of everything that decides how text becomes ids.
    """

    backend: tokenizers.Tokenizer
    token_bytes: tuple[bytes, ...]
    spelled: tuple[bytes, ...]
    bos_token_id: int | None
    eos_token_id: int | None
    eos_token_ids: frozenset[int]
    prefix: "array[int]"
    suffix: "array[int]"
    strips_leading_space: bool
    lossless_bytes: frozenset[int]
    chat_template: str | None
    identity: bytes


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet (`bytes_to_unicode`): printable bytes are themselves, others U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_of_char()


def byte_level_bytes(piece: str) -> bytes:
    """The bytes that a piece of byte-level BPE stands for; UTF-8 if it is not of that alphabet."""
    if piece.isascii():  # half of them; printable letters are themselves
        return piece.encode()
    try:
        return bytes(map(_BYTE_OF_CHAR.__getitem__, piece))
    except KeyError:
        return piece.encode()


def sentencepiece_bytes(piece: str) -> bytes:
    """The bytes that a piece of SentencePiece stands for: `<0x0A>` is one byte, `▁` a space."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes.fromhex(piece[3:5])
        except ValueError:
            pass
    return piece.replace(SPACE_MARK, " ").encode()


def single_bytes(pieces: Iterable[bytes]) -> frozenset[int]:
    return frozenset(piece[0] for piece in pieces if len(piece) == 1)


def named_end_tokens(control: Mapping[str, int], chat_template: str | None) -> frozenset[int]:
    """Control tokens that end a turn by name, if the chat template writes them.

    Files often declare one end token where a chat needs two (Llama 3: end of text, end of turn).
    A name alone is not enough: base models carry end-of-turn tokens that they never learned.
    """
    if chat_template is None:
        return frozenset()
    return frozenset(
        control[name] for name in END_TOKENS if name in control and name in chat_template
    )
