"""Settings of a worker."""

from dataclasses import dataclass
from pathlib import Path

from llmrt.wire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """`role`: both, prefill or decode. Times in seconds.

    `link` is where other workers reach this one; None takes a socket in `runtime_dir`.
    `device` is cpu (the compiled step), torch, or auto for the first that can run the model.
    `kv_tokens` sizes the arena; None takes 4 times the context, at most a quarter of memory.
    `step_tokens` is the token budget of a step and so the prefill chunk. Without `threads`, workers
    of one `runtime_dir` share the cores step by step; torch divides them by `local_workers`.
    `transfer` is auto, shm (in place, same host) or one transport of bulk links, as tcp. Those
    listen on `kv_host` (None: where `link` does) and `kv_port` (0 takes a free one); a read is
    divided over up to `kv_connections`, and tried again up to `kv_retries` times where one breaks.
    `kv_max_readers` bounds the connections of all peers. `kv_read_timeout_s` is the deadline of one
    read, `kv_stall_timeout_s` how long an owner waits for a reader that takes nothing.
    `placement` is auto, or local to prefill never elsewhere, or remote to prefill elsewhere
    whenever a prefill worker is alive. `checksums` of blocks that are handed over are off, sampled
    (the first, the last and one in 16 between) or full; auto is full for those that are copied, off
    for those that are written in place. Tokens of a request that come within `stream_interval_ms`
    leave together, except the first; 0 sends each at once.
    With `has_fencing` a prefill worker that is silent with blocks of ours in its hands is killed.
    `speculative` ngram tries up to `speculative_tokens` guesses in a decode of a text that repeats
    itself.
    """

    model: Path
    role: str = "both"
    broker: str = "tcp://127.0.0.1:7701"
    worker_id: str | None = None
    link: str | None = None
    runtime_dir: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "bf16"
    cpu_family: str | None = None
    kv_tokens: int | None = None
    max_context: int | None = None
    max_running: int = 32
    max_waiting: int = 1024
    step_tokens: int = 512
    threads: int | None = None
    local_workers: int = 1
    transfer: str = "auto"
    kv_host: str | None = None
    kv_port: int = 0
    kv_connections: int = 4
    kv_retries: int = 1
    kv_max_readers: int = 256
    kv_connect_timeout_s: float = 5.0
    kv_stall_timeout_s: float = 10.0
    kv_map_timeout_s: float = 10.0
    kv_read_timeout_s: float = 30.0
    kv_probe_timeout_s: float = 10.0
    placement: str = "auto"
    checksums: str = "auto"
    stream_interval_ms: int = 0
    speculative: str = "off"
    speculative_tokens: int = 4
    has_prefix_cache: bool = True
    has_fencing: bool = True
    trust_remote_code: bool = False
    validate: bool = False
    log_level: str = "info"


def check_link(settings: WorkerSettings, num_workers: int) -> None:
    """Raise `ConfigError` for a link that so many workers with these settings cannot share."""
    link = settings.link
    if link is not None and num_workers > 1 and not link.endswith((":*", ":0", "://*")):
        raise ConfigError(
            f"link is {link}: {num_workers} workers cannot share it; unset LLMRT_WORKER_LINK and "
            "link in section [worker], or give a port of *, as in tcp://127.0.0.1:*"
        )
