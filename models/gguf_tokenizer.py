"""A tokenizer rebuilt from GGUF metadata alone: byte-level BPE (gpt2), SentencePiece, Gemma 4.

Keys are those of ggml's `docs/gguf.md`. Merges of SentencePiece vocabularies are not stored; they
follow from the scores, as in `SentencePieceExtractor` of transformers.
"""

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
import tokenizers
from tokenizers import AddedToken, decoders, normalizers
from tokenizers.models import BPE

from llmrt.models.fields import Fields
from llmrt.models.pretokenizers import pre_tokenizer
from llmrt.models.tokenizer_parts import (
    SPACE_MARK,
    TokenizerParts,
    byte_level_bytes,
    named_end_tokens,
    sentencepiece_bytes,
    single_bytes,
)
from llmrt.wire.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""

_ENCODED = frozenset((NORMAL, BYTE))
_VISIBLE = frozenset((NORMAL, BYTE, USER_DEFINED))

_PREFIX = "tokenizer.ggml."
_KINDS = ("gpt2", "llama", "gemma4")


class _Vocabulary:
    """The vocabulary of a GGUF file, its arrays checked against one another."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.fields = Fields(metadata, "GGUF metadata", prefix=_PREFIX)
        self.kind = self.fields.text("model")
        if self.kind not in _KINDS:
            raise self.fields.error("model", f"one of {', '.join(_KINDS)}", self.kind)
        self.is_byte_level = self.kind == "gpt2"
        self.is_gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
        self.pieces: list[str] = self._list("tokens", str)
        if not self.pieces:
            raise ModelError("GGUF metadata: tokenizer.ggml.tokens is missing or empty")
        self.types: list[int] = self._list("token_type", int) or [NORMAL] * len(self.pieces)
        self.scores: list[float] = self._list("scores", float, int)
        self.merges: list[str] = self._list("merges", str)
        self._same_length("token_type", self.types)
        if self.scores:
            self._same_length("scores", self.scores)
        self.adds_space = self.fields.flag(
            "add_space_prefix", not (self.is_byte_level or self.is_gemma)
        )

    def token_id(self, key: str) -> int | None:
        if not self.fields.has(key):
            return None
        return self.fields.integer(key, minimum=0, maximum=len(self.pieces) - 1)

    def of_type(self, kind: int) -> list[str]:
        return [
            piece for piece, type_ in zip(self.pieces, self.types, strict=True) if type_ == kind
        ]

    def _list(self, key: str, *types: type) -> list[Any]:
        found = self.fields.get(key)
        if found is None:
            return []
        if not isinstance(found, Sequence) or not set(map(type, found)) <= set(types):
            raise self.fields.error(key, f"a list of {types[0].__name__}", found)
        return list(found)

    def _same_length(self, key: str, values: Sequence[object]) -> None:
        if len(values) != len(self.pieces):
            raise ModelError(
                f"GGUF metadata: {_PREFIX}{key} has {len(values)} entries for "
                f"{len(self.pieces)} tokens"
            )


def parts_from_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Raises `ModelError` for missing, contradicting or unknown metadata."""
    vocabulary = _Vocabulary(metadata)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError("GGUF metadata: tokenizer.chat_template must be a string")
    if vocabulary.is_byte_level:
        backend, adds_bos = _byte_level(vocabulary)
        to_bytes: Callable[[str], bytes] = byte_level_bytes
    else:
        backend, adds_bos = _sentencepiece(vocabulary), True
        to_bytes = sentencepiece_bytes
    _add_tokens(backend, vocabulary)
    token_bytes, spelled = _texts(vocabulary, to_bytes)
    bos = vocabulary.token_id("bos_token_id")
    ends = [vocabulary.token_id(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    control = {
        piece: i
        for i, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.types, strict=True))
        if kind == CONTROL
    }
    singles = single_bytes(token_bytes)
    return TokenizerParts(
        backend=backend,
        token_bytes=token_bytes,
        spelled=spelled,
        bos_token_id=bos,
        eos_token_id=ends[0],
        eos_token_ids=named_end_tokens(control, template).union(i for i in ends if i is not None),
        prefix=_surrounding(vocabulary, "add_bos_token", bos, adds_bos and bos is not None),
        suffix=_surrounding(vocabulary, "add_eos_token", ends[0], False),
        strips_leading_space=vocabulary.adds_space,
        # Without all byte tokens, SentencePiece makes one <unk> of any run of unknown characters.
        lossless_bytes=singles if vocabulary.is_byte_level or len(singles) == 256 else frozenset(),
        chat_template=template,
        identity=_identity(metadata),
    )


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    if not vocabulary.merges:
        raise ModelError("GGUF metadata: tokenizer.ggml.merges is missing or empty")
    pre = pre_tokenizer(vocabulary.fields.text("pre"))
    backend = tokenizers.Tokenizer(
        _bpe(
            _ids(vocabulary.pieces),
            _pairs(vocabulary.merges),
            ignore_merges=pre.ignores_merges,
        )
    )
    normalizer = pre.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.steps()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Text with `▁` for spaces is one word; characters without a piece fall back to bytes."""
    # Gemma 3 stores some runs of spaces as they are. A normal piece wins over a user-defined one.
    marked = [
        piece.replace(" ", SPACE_MARK) if kind in (NORMAL, USER_DEFINED) else piece
        for piece, kind in zip(vocabulary.pieces, vocabulary.types, strict=True)
    ]
    ids = _ids(marked)
    normal = {
        piece: i
        for i, (piece, kind) in enumerate(zip(marked, vocabulary.types, strict=True))
        if kind == NORMAL
    }
    ids |= normal
    if vocabulary.merges:
        merges = _pairs(vocabulary.merges)
    elif vocabulary.scores:
        mergeable = {p: i for p, i in ids.items() if vocabulary.types[i] in (NORMAL, USER_DEFINED)}
        merges = _merges_from_scores(mergeable, vocabulary.scores)
    else:
        raise ModelError("GGUF metadata: tokenizer.ggml.merges and .scores are both missing")
    unknown = vocabulary.pieces[vocabulary.token_id("unknown_token_id") or 0]
    backend = tokenizers.Tokenizer(
        _bpe(ids, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    )
    mark_spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    to_text: list[decoders.Decoder] = [
        decoders.Replace(SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if vocabulary.adds_space:
        mark_spaces.insert(0, normalizers.Prepend(SPACE_MARK))
        to_text.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(mark_spaces)
    backend.decoder = decoders.Sequence(to_text)
    return backend


def _merges_from_scores(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces is a merge; the better the piece, the earlier."""
    found: list[tuple[str, str]] = []
    id_of = ids.get
    for piece, _ in sorted(ids.items(), key=lambda item: -scores[item[1]]):
        splits = []
        for cut in range(1, len(piece)):
            left_id = id_of(piece[:cut])
            if left_id is not None:
                right_id = id_of(piece[cut:])
                if right_id is not None:
                    splits.append((left_id, right_id, cut))
        splits.sort()
        found += [(piece[:cut], piece[cut:]) for _, _, cut in splits]
    return found


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control and user-defined tokens are cut out of the text before anything else happens.

    Runs of spaces exist only in the normalised text (`▁`), and must be looked for there: matched
    in the raw text they would become new tokens behind the end of the vocabulary.
    """
    backend.add_special_tokens(
        [AddedToken(piece, special=True, normalized=False) for piece in vocabulary.of_type(CONTROL)]
    )
    user = []
    for piece in vocabulary.of_type(USER_DEFINED):
        is_spaces = not vocabulary.is_byte_level and not piece.strip(" ")
        content = piece.replace(" ", SPACE_MARK) if is_spaces else piece
        user.append(AddedToken(content, special=False, normalized=is_spaces))
    backend.add_tokens(user)
    if backend.get_vocab_size(with_added_tokens=True) > len(vocabulary.pieces):
        raise ModelError("GGUF metadata: an added token is not in tokenizer.ggml.tokens")


def _texts(
    vocabulary: _Vocabulary, to_bytes: Callable[[str], bytes]
) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    typed = list(zip(vocabulary.pieces, vocabulary.types, strict=True))
    spelled = [to_bytes(piece) if kind in _ENCODED else piece.encode() for piece, kind in typed]
    token_bytes = [
        text if kind in _VISIBLE else b""
        for text, kind in zip(spelled, vocabulary.types, strict=True)
    ]
    return tuple(token_bytes), tuple(spelled)


def _surrounding(
    vocabulary: _Vocabulary, key: str, token_id: int | None, default: bool
) -> "array[int]":
    if not vocabulary.fields.flag(key, default):
        return array("I")
    if token_id is None:
        raise ModelError(f"GGUF metadata: {_PREFIX}{key} is true, but the token has no id")
    return array("I", [token_id])


def _ids(pieces: Sequence[str]) -> dict[str, int]:
    """Ids by piece; of pieces spelled alike the first, which is what encoders emit."""
    ids = dict(zip(pieces, range(len(pieces)), strict=True))
    if len(ids) < len(pieces):
        ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    return ids


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    parted = [merge.partition(" ") for merge in merges]
    for left, _, right in parted:
        if not (left and right):
            raise ModelError(
                f"GGUF metadata: {(left + right)[:80]!r} in tokenizer.ggml.merges is no pair"
            )
    return [(left, right) for left, _, right in parted]


def _bpe(ids: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> BPE:
    try:
        return BPE(ids, merges, **options)
    except Exception as error:  # the library raises no narrower class
        raise ModelError(f"GGUF metadata: no BPE vocabulary: {str(error)[:200]}") from None


def _identity(metadata: Mapping[str, Any]) -> bytes:
    """Digest of all tokenizer metadata, the chat template with it."""
    wanted = sorted(item for item in metadata.items() if item[0].startswith("tokenizer."))
    architecture = metadata.get("general.architecture")
    return hashlib.sha256(msgpack.packb([architecture, wanted])).digest()
