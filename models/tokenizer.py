"""Text to token ids and back, for one model. Never touches the network."""

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from llmrt.models.gguf_tokenizer import parts_from_gguf
from llmrt.models.hf_tokenizer import parts_from_files
from llmrt.models.loading import OpenedModel
from llmrt.models.tokenizer_parts import SPACE_MARK, TokenizerParts
from llmrt.wire.errors import InvalidRequest


def _byte_classes() -> bytes:
    """A class per byte value: blanks, digits, small letters, capitals, other ASCII, non-ASCII."""
    kinds = (bytes.isspace, bytes.isdigit, bytes.islower, bytes.isupper, bytes.isascii)
    each = (bytes([value]) for value in range(256))
    return bytes(
        next((n for n, is_kind in enumerate(kinds) if is_kind(byte)), len(kinds)) for byte in each
    )


_CLASS_OF_BYTE = _byte_classes()
_NUM_CLASSES = max(_CLASS_OF_BYTE) + 1
_UNCOUNTED = _NUM_CLASSES


class Tokenizer:
    """Encodes prompts and tells what each token id adds to a text.

    `eos_token_ids` are the end tokens that the files declare (GGUF: eos, eot, eom; folders:
    eos_token and `generation_config.json`) and control tokens with an end token's usual name
    that the chat template writes. `adds_bos`: `encode` with `add_special` puts `bos_token_id` in
    front. `bos_token` and `eos_token` are the names of these tokens for a chat template, empty if
    there are none. `max_token_bytes` is the length of the longest token.

    The instance doesn't change and can be used by several threads. Encoding runs without the
    GIL: other threads go on while a long text is encoded (measured: stalls of some 10 ms where
    `tokenizers.Tokenizer.encode` stalls them for 1.6 s).
    """

    token_bytes: Sequence[bytes]
    eos_token_ids: frozenset[int]
    strips_leading_space: bool

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._backend = parts.backend
        self.token_bytes = parts.token_bytes
        self.eos_token_ids = parts.eos_token_ids
        self.strips_leading_space = parts.strips_leading_space
        self.vocab_size = len(parts.token_bytes)
        self.bos_token_id = parts.bos_token_id
        self.bos_token = self._name(parts.bos_token_id)
        self.eos_token = self._name(parts.eos_token_id)
        self.adds_bos = parts.bos_token_id is not None and parts.bos_token_id in parts.prefix
        self.max_token_bytes = max(map(len, parts.spelled), default=1)
        self.chat_template = parts.chat_template
        self.tokenizer_hash = hashlib.sha256(parts.identity).hexdigest()

    @classmethod
    def of_model(cls, model: OpenedModel) -> "Tokenizer":
        """Raises `ModelError` as the reader of the model's format does."""
        if model.format == "gguf":
            return cls.from_gguf(model.metadata)
        return cls.from_files(model.path)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Raises `ModelError` if the metadata is incomplete or of an unknown kind."""
        return cls(parts_from_gguf(metadata))

    @classmethod
    def from_files(cls, folder: Path) -> "Tokenizer":
        """Raises `ModelError` naming the file that is missing, damaged or of an unknown kind."""
        return cls(parts_from_files(folder))

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> "array[int]":
        """The token ids of `text`; raises `InvalidRequest` for half a surrogate pair.

        `add_special` adds what the model wants around a text, but never a second BOS where the
        text begins with one. Use False for a rendered chat: its template has written everything.
        Without `parse_special` the name of a control token in the text is ordinary text.
        """
        check_text(text)
        backend = self._backend if parse_special else self._literal_backend
        # Only the batch calls of the library release the GIL.
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)
        ids = array("I", encoding.ids)
        if not add_special:
            return ids
        has_bos = self.bos_token_id is not None and ids[:1] == array("I", [self.bos_token_id])
        prefix = (i for i in self._parts.prefix if not (has_bos and i == self.bos_token_id))
        return array("I", prefix) + ids + self._parts.suffix

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` without control tokens; bytes that are no UTF-8 become U+FFFD."""
        pieces, size = self.token_bytes, self.vocab_size
        raw = b"".join([pieces[i] for i in ids if i < size])
        if self.strips_leading_space and raw.startswith(b" "):
            raw = raw[1:]
        return raw.decode(errors="replace")

    def min_tokens(self, text: str) -> int:
        """A lower bound on `len(encode(text))`, in a small part of its time (some 5 ms per MB).

        A text with n letters takes at least n / m tokens if no token has more than m letters;
        the same holds for blanks, digits, and so on. So a word of 320,000 letters is found too
        long without encoding it.
        """
        check_text(text)
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text).replace(SPACE_MARK, " ")
        classes = np.frombuffer(text.encode().translate(self._class_table), np.uint8)
        counts = [int(np.count_nonzero(classes == n)) for n in range(_NUM_CLASSES)]
        return max(-(-n // most) for n, most in zip(counts, self._most_of_class, strict=True))

    def _name(self, token_id: int | None) -> str:
        name = None if token_id is None else self._backend.id_to_token(token_id)
        return name or ""

    @cached_property
    def _class_table(self) -> bytes:
        """Class per byte value; values that encoding may drop or swallow are not counted."""
        lossless = self._parts.lossless_bytes
        return bytes(_CLASS_OF_BYTE[b] if b in lossless else _UNCOUNTED for b in range(256))

    @cached_property
    def _most_of_class(self) -> list[int]:
        """Per class, the most bytes of it that one token takes; at least 1."""
        spelled = [piece for piece in self._parts.spelled if piece]
        starts = np.cumsum([0, *map(len, spelled[:-1])])
        classes = np.frombuffer(b"".join(spelled).translate(self._class_table), np.uint8)
        per_token = (
            np.add.reduceat(classes == n, starts, dtype=np.int64) for n in range(_NUM_CLASSES)
        )
        return [max(1, int(counts.max())) for counts in per_token]

    @cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """A copy that takes names of control tokens for text (made on first use, some 0.5 s)."""
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        return copy


def check_text(text: str, name: str = "the text") -> None:
    """Raise `InvalidRequest` if `text` has half a surrogate pair, which no UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} has half a surrogate pair (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}: send whole characters"
        ) from None
