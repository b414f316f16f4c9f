"""Settings of `llmrt up`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """Workers to start, by role; one that does both if none is asked for."""

    both: int = 0
    prefill: int = 0
    decode: int = 0
