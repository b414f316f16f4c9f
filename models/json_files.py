"""JSON objects out of model folders, bounded, with errors that name the file."""

import json
from pathlib import Path
from typing import Any

from llmrt.wire.errors import ModelError

# The longest real file read here is the index of a model with some 100,000 tensors: 10 MB.
MAX_JSON_BYTES = 64 << 20


def read_json(path: Path, *, has_unique_keys: bool = False) -> dict[str, Any]:
    """The object in `path`; raises `ModelError` for anything else."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_JSON_BYTES:
            raise ModelError(f"{path} has {size_bytes} bytes; at most {MAX_JSON_BYTES} are allowed")
        raw = path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    return parse_json(raw, str(path), has_unique_keys=has_unique_keys)


def parse_json(raw: bytes, source: str, *, has_unique_keys: bool = False) -> dict[str, Any]:
    """The object in `raw`; with `has_unique_keys` a key that comes twice is an error too."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ModelError(f"{source}: {twice!r} comes twice")
        return found

    try:
        # UnicodeDecodeError and the limit on digits of an integer are ValueErrors as well.
        parsed = json.loads(
            raw.decode("utf-8"), object_pairs_hook=unique if has_unique_keys else None
        )
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{source} is not JSON: {str(error)[:200]}") from None
    if not isinstance(parsed, dict):
        raise ModelError(f"{source} must hold a JSON object, got {type(parsed).__name__}")
    return parsed
