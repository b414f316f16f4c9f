"""A tokenizer from a model folder: `tokenizer.json` and the small files beside it."""

import hashlib
import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from llmrt.models.json_files import MAX_JSON_BYTES, parse_json, read_json
from llmrt.models.tokenizer_parts import (
    TokenizerParts,
    byte_level_bytes,
    named_end_tokens,
    sentencepiece_bytes,
    single_bytes,
)
from llmrt.wire.errors import ModelError

# Steps that drop or rewrite text, so that its length says nothing about the number of tokens.
_LOSSY_STEPS = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"}
_NOT_STRIPPED = frozenset(range(0x21, 0x7F))


def parts_from_files(folder: Path) -> TokenizerParts:
    """Reads `tokenizer.json`, and if they are there `tokenizer_config.json`,
    `generation_config.json` and `chat_template.jinja`. Raises `ModelError` naming the file.
    """
    raw = _read(folder / "tokenizer.json")
    config = _optional_json(folder / "tokenizer_config.json")
    backend = _load(folder / "tokenizer.json", raw)
    added = backend.get_added_tokens_decoder()
    pieces = {i: piece for piece, i in backend.get_vocab(with_added_tokens=True).items()}
    decoder = _state(backend.decoder)
    is_byte_level = _has(decoder, "ByteLevel")
    if not is_byte_level and not (_has(decoder, "ByteFallback") or _has(decoder, "Metaspace")):
        raise ModelError(
            f"{folder / 'tokenizer.json'}: the decoder is neither ByteLevel nor that of "
            "SentencePiece (ByteFallback or Metaspace)"
        )
    to_bytes = byte_level_bytes if is_byte_level else sentencepiece_bytes
    token_bytes = [b""] * (max(pieces, default=-1) + 1)
    spelled = list(token_bytes)
    for i, piece in pieces.items():
        spelled[i] = piece.encode() if i in added else to_bytes(piece)
        token_bytes[i] = b"" if i in added and added[i].special else spelled[i]
    template = _chat_template(folder, config)
    bos, eos = (_token_id(backend, config, name) for name in ("bos_token", "eos_token"))
    control = {token.content: i for i, token in added.items() if token.special}
    ends = _generation_ends(folder, len(token_bytes)) + ([] if eos is None else [eos])
    prefix, suffix = _surroundings(backend, config, bos)
    identity = json.dumps([bos, sorted(ends), template, prefix.tolist()]).encode()
    return TokenizerParts(
        backend=backend,
        token_bytes=tuple(token_bytes),
        spelled=tuple(spelled),
        bos_token_id=bos,
        eos_token_id=eos,
        eos_token_ids=named_end_tokens(control, template).union(ends),
        prefix=prefix,
        suffix=suffix,
        strips_leading_space=_strips_space(decoder),
        lossless_bytes=_lossless(backend, added, single_bytes(token_bytes), is_byte_level),
        chat_template=template,
        identity=hashlib.sha256(hashlib.sha256(raw).digest() + identity).digest(),
    )


def _load(path: Path, raw: bytes) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises no narrower class
        raise ModelError(f"{path} is no tokenizer: {str(error)[:200]}") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read(path: Path) -> bytes:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_JSON_BYTES:
            raise ModelError(f"{path} has {size_bytes} bytes; at most {MAX_JSON_BYTES} are allowed")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """`chat_template.jinja`, else that of `tokenizer_config.json`; of named ones `default`."""
    path = folder / "chat_template.jinja"
    source = f"{folder / 'tokenizer_config.json'}: chat_template"
    if path.exists():
        try:
            return _read(path).decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{path} is not UTF-8: {error.reason} at {error.start}") from None
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {
            entry["name"]: entry.get("template")
            for entry in found
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        if "default" not in named:
            raise ModelError(f"{source} has no entry named default, only {sorted(named)}")
        found = named["default"]
    if found is not None and not isinstance(found, str):
        raise ModelError(f"{source} must be a string, got {type(found).__name__}")
    return found


def _token_id(backend: tokenizers.Tokenizer, config: dict[str, Any], name: str) -> int | None:
    """The id of a token that the configuration gives as a string or as an object."""
    value = config.get(name)
    content = value.get("content") if isinstance(value, dict) else value
    if content is None:
        return None
    token_id = backend.token_to_id(content) if isinstance(content, str) else None
    if token_id is None:
        raise ModelError(f"tokenizer_config.json: {name} {content!r} is not in tokenizer.json")
    return token_id


def _generation_ends(folder: Path, vocab_size: int) -> list[int]:
    path = folder / "generation_config.json"
    value = _optional_json(path).get("eos_token_id")
    ends = value if isinstance(value, list) else [] if value is None else [value]
    for end in ends:
        if type(end) is not int or not 0 <= end < vocab_size:
            raise ModelError(f"{path}: eos_token_id {end!r} is no id below {vocab_size}")
    return ends


def _surroundings(
    backend: tokenizers.Tokenizer, config: dict[str, Any], bos: int | None
) -> tuple["array[int]", "array[int]"]:
    """What the post-processor puts around a text; `add_bos_token` in the configuration wins."""
    plain = backend.encode("0", add_special_tokens=False).ids
    full = backend.encode("0", add_special_tokens=True).ids
    starts = [i for i in range(len(full)) if full[i : i + len(plain)] == plain]
    at = starts[0] if plain and starts else 0
    prefix, suffix = full[:at], full[at + len(plain) :]
    adds_bos = config.get("add_bos_token")
    if isinstance(adds_bos, bool) and bos is not None:
        prefix = [bos] * adds_bos + [i for i in prefix if i != bos]
    return array("I", prefix), array("I", suffix)


def _lossless(
    backend: tokenizers.Tokenizer,
    added: dict[int, AddedToken],
    singles: frozenset[int],
    is_byte_level: bool,
) -> frozenset[int]:
    """Byte values that always reach a token of their own size or more.

    None if a step drops text or a run of unknown characters becomes one token. Added tokens that
    strip take any number of blanks with them.
    """
    steps = list(_steps(_state(backend.pre_tokenizer)))
    drops = any(s["type"] in _LOSSY_STEPS or s.get("behavior") == "Removed" for s in steps)
    is_complete = is_byte_level or len(singles) == 256
    if drops or not is_complete or not isinstance(backend.model, tokenizers.models.BPE):
        return frozenset()
    if any(token.lstrip or token.rstrip for token in added.values()):
        return singles & _NOT_STRIPPED
    return singles


def _strips_space(decoder: dict[str, Any]) -> bool:
    return any(
        (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
        or (step["type"] == "Metaspace" and step["prepend_scheme"] != "never")
        for step in _steps(decoder)
    )


def _state(component: Any) -> dict[str, Any]:
    """The JSON that describes a normalizer, pre-tokenizer or decoder; empty for None."""
    if component is None:
        return {}
    return parse_json(component.__getstate__(), "tokenizer.json")


def _steps(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if state.get("type") == "Sequence":
        for inner in (*state.get("decoders", ()), *state.get("pretokenizers", ())):
            yield from _steps(inner)
    elif state:
        yield state


def _has(state: dict[str, Any], kind: str) -> bool:
    return any(step["type"] == kind for step in _steps(state))
