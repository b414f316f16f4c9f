"""Settings of a broker."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """`bind` is for clients, `worker_bind` for workers. Times in seconds.

    `max_live` bounds the requests that are admitted and not finished. A worker or client that is
    silent for `dead_after_beats` beats is lost; a lost client's requests are cancelled after
    `resume_window_s`. `max_deadline_s` caps what a client may ask for. Until `startup_window_s`
    after the start, and for two beats at least, requests wait for a first worker.
    """

    bind: str = "tcp://127.0.0.1:7700"
    worker_bind: str = "tcp://127.0.0.1:7701"
    prefill_policy: str = "prefix-aware"
    decode_policy: str = "prefix-aware"
    max_live: int = 4096
    default_deadline_s: float = 600.0
    max_deadline_s: float = 3600.0
    beat_s: float = 1.0
    dead_after_beats: float = 3.5
    resume_window_s: float = 10.0
    startup_window_s: float = 0.0
    max_attempts: int = 3
    validate: bool = False
    log_level: str = "info"
