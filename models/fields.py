"""Checked access to the values of a model's configuration, whatever file they come from."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from llmrt.wire.errors import ModelError

MAX_INTEGER = 2**31 - 1


class Fields:
    """Values by key. A wrong or missing value raises `ModelError` naming `source` and key.

    None counts as absent, as in `config.json`. `prefix` is put before every key, for GGUF.
    """

    def __init__(self, values: Mapping[str, Any], source: str, *, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def get(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INTEGER
    ) -> int:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.error(key, f"an integer from {minimum} to {maximum}", value)
        return value

    def number(
        self, key: str, default: float | None = None, *, minimum: float = 0.0, above: bool = False
    ) -> float:
        """A finite number of at least `minimum`, or more than it if `above`."""
        value = self._present(key, default)
        wanted = f"a number {'above' if above else 'of at least'} {minimum:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, wanted, value)
        if not math.isfinite(value) or value < minimum or (above and value == minimum):
            raise self.error(key, wanted, value)
        if value > 1e38:  # as float32 it would be infinite
            raise self.error(key, "a number that float32 can hold", value)
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string", value)
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def section(self, key: str) -> "Fields":
        """The object under `key`; an empty one if it is absent."""
        value = self._present(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "an object", value)
        return Fields(value, f"{self.source}: {self.prefix}{key}")

    def error(self, key: str, wanted: str, value: object) -> ModelError:
        return ModelError(f"{self.source}: {self.prefix}{key} must be {wanted}, got {short(value)}")

    def _present(self, key: str, default: object) -> object:
        value = self.get(key)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.source}: {self.prefix}{key} is missing")
        return default


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def short(value: object) -> str:
    """`value` for a message, cut where it would be long."""
    return _SHORT.repr(value)
