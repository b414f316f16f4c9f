"""A worker process: loads the model, makes the machine, and runs its shell."""

import asyncio
import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import structlog

from llmrt.actor import sockets
from llmrt.actor.process import this_process
from llmrt.engine.scheduler import Scheduler, SchedulerSettings
from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.arena_socket import check_path, make_private
from llmrt.kvtransfer.checksums import MODES, block_checksums
from llmrt.kvtransfer.ledger import Ledger
from llmrt.kvtransfer.transport import LinkOptions
from llmrt.kvtransfer.transports import TRANSPORTS
from llmrt.wire.errors import ConfigError, ModelNotFound
from llmrt.wire.ids import BlockId, WorkerId, WorkerName
from llmrt.wire.kv import BLOCK_TOKENS
from llmrt.workers.bulk_links import LinkSettings
from llmrt.workers.context import CoreSettings
from llmrt.workers.core import WorkerCore
from llmrt.workers.loading import LoadedModel, Progress, load_model
from llmrt.workers.prompts import PromptEncoder
from llmrt.workers.settings import WorkerSettings
from llmrt.workers.shell import WorkerShell

log = structlog.get_logger(__name__)


class _Sockets(NamedTuple):
    """The sockets of a worker; `link_at` is where peers reach `link`."""

    context: sockets.Context
    broker: sockets.Socket
    link: sockets.Socket
    link_at: str


# A part of file names, routing ids and log lines.
WORKER_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
ROLES = ("both", "prefill", "decode")
TRANSFERS = ("auto", "shm", *TRANSPORTS)
PLACEMENTS = ("auto", "local", "remote")
CHECKSUMS = ("auto", *MODES)
SPECULATIVE = ("off", "ngram")
MAX_DRAFTS = 16
MAX_STREAM_INTERVAL_MS = 60_000
MAX_TIMEOUT_S = 3600.0
LINK_BOUNDS = {
    "kv_port": (0, 65_535),
    "kv_connections": (1, 64),
    "kv_retries": (0, 10),
    "kv_max_readers": (1, 4096),
    "kv_connect_timeout_s": (0.01, MAX_TIMEOUT_S),
    "kv_stall_timeout_s": (0.01, MAX_TIMEOUT_S),
    "kv_map_timeout_s": (0.01, MAX_TIMEOUT_S),
    "kv_read_timeout_s": (0.01, MAX_TIMEOUT_S),
    "kv_probe_timeout_s": (0.01, MAX_TIMEOUT_S),
}


async def serve(settings: WorkerSettings, *, on_ready: Callable[[], None] = lambda: None) -> None:
    """Load the model, register with the broker and serve until cancelled.

    `on_ready` is called once, when the broker has accepted the worker. Raises a `LlmrtError` for
    wrong settings, a model that cannot be loaded, or a broker that refuses.
    """
    _check(settings)
    name = WorkerName(
        WorkerId(settings.worker_id or default_worker_id(settings.role)), time.time_ns()
    )
    runtime_dir = settings.runtime_dir or default_runtime_dir()
    settings = replace(settings, runtime_dir=runtime_dir)
    link_file = runtime_dir / f"{name.worker_id}.{os.getpid()}.link"
    arena_file = link_file.with_suffix(".arena")
    make_private(runtime_dir)
    if settings.role != "prefill":
        check_path(arena_file)
    remove_stale_sockets(runtime_dir)
    context = sockets.context()
    broker = sockets.dealer(context, name.routing_id)
    link = sockets.router(context)
    try:
        # Before weights are read: a wrong address must not cost a minute.
        targets = await asyncio.to_thread(sockets.resolve, settings.broker)
        link_at = sockets.bind(link, settings.link or f"ipc://{link_file}")
        model = await asyncio.to_thread(_load, settings, name)
        for target in targets:
            sockets.connect(broker, target)
        try:
            await _serve_model(
                settings,
                name,
                model,
                _Sockets(context, broker, link, link_at),
                arena_file,
                on_ready,
            )
        finally:
            model.arena.close()
    finally:
        broker.close()
        link.close()
        context.term()
        with contextlib.suppress(FileNotFoundError):
            link_file.unlink()


def remove_stale_sockets(folder: Path) -> None:
    """Remove what workers left behind that were killed: files named for a process that is gone."""
    for path in [*folder.glob("*.link"), *folder.glob("*.arena")]:
        pid = path.name.split(".")[-2]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)


def default_runtime_dir() -> Path:
    """Where sockets of workers on one host meet: of this user alone."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "llmrt" if base else Path(f"/tmp/llmrt-{os.getuid()}")  # noqa: S108


def default_worker_id(role: str) -> str:
    """A name that no other worker has; one that is stable over restarts is the user's to give."""
    return f"{role}-{socket.gethostname()}-{os.getpid()}"


async def _serve_model(
    settings: WorkerSettings,
    name: WorkerName,
    model: LoadedModel,
    net: _Sockets,
    arena_file: Path,
    on_ready: Callable[[], None],
) -> None:
    ledger = Ledger(
        model.arena.num_blocks,
        generation=model.arena.generation,
        checksum=partial(_checksum, model.arena) if settings.validate else None,
    )
    scheduler = Scheduler(
        ledger,
        SchedulerSettings(
            max_running=settings.max_running,
            step_tokens=settings.step_tokens,
            chunk_tokens=max(1, settings.step_tokens // 2),
            has_prefix_cache=settings.has_prefix_cache,
            num_drafts=settings.speculative_tokens if settings.speculative == "ngram" else 0,
        ),
    )
    why_no_transport = {
        scheme: reason
        for scheme, transport in TRANSPORTS.items()
        if (reason := transport.why_not()) is not None
    }
    core_settings = CoreSettings(
        name=name,
        role=settings.role,
        model=model.name,
        contract=model.contract,
        process=this_process(),
        vocab_size=model.spec.vocab_size,
        max_context=model.max_context,
        num_blocks=model.arena.num_blocks,
        arena_generation=model.arena.generation,
        link=net.link_at,
        arena_socket=str(arena_file),
        broker=settings.broker,
        max_waiting=settings.max_waiting,
        transfer=settings.transfer,
        placement=settings.placement,
        checksums=settings.checksums,
        stream_interval_s=settings.stream_interval_ms / 1000,
        has_fencing=settings.has_fencing,
        transports=tuple(TRANSPORTS),
        why_no_transport=why_no_transport,
    )
    core = WorkerCore(core_settings, scheduler, model.tokenizer)
    shell = WorkerShell(
        core,
        core_settings,
        device=model.device,
        arena=model.arena,
        encoder=PromptEncoder(model.tokenizer, model.template, model.max_context),
        broker=net.broker,
        link=net.link,
        arena_socket=arena_file if settings.role != "prefill" else None,
        context=net.context,
        leased_blocks=ledger.leased_blocks,
        on_ready=on_ready,
        links=_link_settings(settings, net.link_at, why_no_transport),
        validate=settings.validate,
    )
    try:
        await shell.start()
        await shell.run()
    finally:
        await shell.close()


def _link_settings(
    settings: WorkerSettings, link_at: str, why_no_transport: Mapping[str, str]
) -> LinkSettings:
    return LinkSettings(
        transports={
            scheme: transport
            for scheme, transport in TRANSPORTS.items()
            if scheme not in why_no_transport and settings.transfer in ("auto", "shm", scheme)
        },
        options=LinkOptions(
            host=settings.kv_host or _host_of(link_at),
            port=settings.kv_port,
            connections=settings.kv_connections,
            retries=settings.kv_retries,
            connect_timeout_s=settings.kv_connect_timeout_s,
            stall_timeout_s=settings.kv_stall_timeout_s,
            max_readers=settings.kv_max_readers,
        ),
        map_timeout_s=settings.kv_map_timeout_s,
        read_timeout_s=settings.kv_read_timeout_s,
        probe_timeout_s=settings.kv_probe_timeout_s,
    )


def _host_of(link_at: str) -> str:
    """The host of a link over TCP; peers of a link over a Unix socket are on this one."""
    return (urlsplit(link_at).hostname if link_at.startswith("tcp://") else None) or "127.0.0.1"


def _checksum(arena: Arena, block: BlockId) -> int:
    return block_checksums(arena.buffer, arena.block_bytes, (block,))[0]


def _load(settings: WorkerSettings, name: WorkerName) -> LoadedModel:
    with _progress_bar(settings) as progress:
        model = load_model(settings, generation=name.epoch % 2**32, progress=progress)
    for note in model.notes:
        log.info("model.note", note=note)
    log.info(
        "model.loaded",
        model=model.name,
        architecture=model.spec.architecture,
        num_layers=model.spec.num_layers,
        max_context=model.max_context,
        num_blocks=model.arena.num_blocks,
        arena_bytes=model.arena.size_bytes,
        numerics_id=model.contract.numerics_id,
        duration_ms=round(model.seconds["total"] * 1000, 1),
    )
    return model


@contextlib.contextmanager
def _progress_bar(settings: WorkerSettings) -> Iterator[Progress | None]:
    """A bar on a terminal; nothing elsewhere, where the log has the line at the end.

    It is made with the first progress: weights that are packed already make none.
    """
    if not sys.stderr.isatty():
        yield None
        return
    with contextlib.ExitStack() as stack:
        update: Progress | None = None

        def show(done: int, total: int) -> None:
            nonlocal update
            if update is None:
                update = stack.enter_context(_shown_bar(settings.model.name))
            update(done, total)

        yield show


@contextlib.contextmanager
def _shown_bar(name: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _check(settings: WorkerSettings) -> None:
    for name, allowed in (
        ("role", ROLES),
        ("transfer", TRANSFERS),
        ("placement", PLACEMENTS),
        ("checksums", CHECKSUMS),
        ("speculative", SPECULATIVE),
    ):
        value = getattr(settings, name)
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}: one of {', '.join(allowed)} is needed")
    for name in ("max_running", "max_waiting", "step_tokens", "threads", "local_workers"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}: at least 1 is needed")
    cpus = os.cpu_count() or 1
    if settings.threads is not None and settings.threads > cpus:
        raise ConfigError(
            f"threads is {settings.threads}: this machine has {cpus} CPUs, and more threads than "
            "those wait for each other"
        )
    _check_links(settings)
    if not 0 <= settings.stream_interval_ms <= MAX_STREAM_INTERVAL_MS:
        raise ConfigError(
            f"stream_interval_ms is {settings.stream_interval_ms}: from 0 to "
            f"{MAX_STREAM_INTERVAL_MS} is needed"
        )
    if not 1 <= settings.speculative_tokens <= MAX_DRAFTS:
        raise ConfigError(
            f"speculative_tokens is {settings.speculative_tokens}: from 1 to {MAX_DRAFTS} is needed"
        )
    if settings.worker_id is not None and not WORKER_ID.fullmatch(settings.worker_id):
        raise ConfigError(
            f"worker_id is {settings.worker_id[:80]!r}: 1 to 64 letters, digits, '.', '_' or '-' "
            "are needed"
        )
    if settings.kv_tokens is not None and settings.kv_tokens < BLOCK_TOKENS:
        raise ConfigError(
            f"kv_tokens is {settings.kv_tokens}: at least {BLOCK_TOKENS}, one block, are needed"
        )
    if not settings.model.exists():
        raise ModelNotFound(f"no model at {settings.model}: give the path of a GGUF file or folder")


def _check_links(settings: WorkerSettings) -> None:
    for name, (lowest, highest) in LINK_BOUNDS.items():
        value = getattr(settings, name)
        if not lowest <= value <= highest:
            raise ConfigError(f"{name} is {value}: from {lowest} to {highest} is needed")
