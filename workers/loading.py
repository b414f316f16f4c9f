"""What a worker loads before it serves: weights, tokenizer, template, device and KV arena."""

import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import structlog

from llmrt.engine.batch import LOCAL_ARENA, Device
from llmrt.engine.core_share import CoreShare
from llmrt.engine.cpu_cores import num_cores, share_of_cores
from llmrt.engine.cpu_device import CpuDevice, choose_family
from llmrt.engine.cpu_program import check_kv_dtype, load_program
from llmrt.engine.cpu_weights import check_model
from llmrt.engine.device_parts import warm_up
from llmrt.kernels.cpu.library import LibraryMissing, best_family
from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.host_memory import available_bytes
from llmrt.kvtransfer.layout import blocks_for
from llmrt.models.chat_template import ChatTemplate
from llmrt.models.loading import OpenedModel, open_model
from llmrt.models.spec import ModelSpec
from llmrt.models.tokenizer import Tokenizer
from llmrt.wire.envelope import MAJOR
from llmrt.wire.errors import ConfigError
from llmrt.wire.kv import BLOCK_TOKENS, KvContract
from llmrt.workers.settings import WorkerSettings

if TYPE_CHECKING:
    from llmrt.engine.torch_device import TorchDevice

log = structlog.get_logger(__name__)

DEVICES = ("auto", "cpu", "torch")
# The order of bytes inside a block; see the arena's layout in docs/architecture.md.
KV_LAYOUT = "block-major/k-dim-token/v-token-dim"
# Contexts that the arena holds by default, and the share of memory that it takes at most.
DEFAULT_CONTEXTS = 4
MAX_MEMORY_SHARE = 0.25
_OMP_SPINS = "20000"
# What a worker goes without where torch stands in for the compiled step.
TORCH_LACKS = "speed, int8 and fp8 KV, and that company in a batch changes no bit of a logit"

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything of a model that a worker serves with. `notes` are facts to log once."""

    name: str
    spec: ModelSpec
    tokenizer: Tokenizer
    template: ChatTemplate | None
    device: Device
    arena: Arena
    contract: KvContract
    max_context: int
    notes: tuple[str, ...]
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Ready:
    """A device that has run a step, and the hash of the weights that it took."""

    device: "CpuDevice | TorchDevice"
    weights_hash: str
    notes: tuple[str, ...] = ()


def load_model(
    settings: WorkerSettings, *, generation: int, progress: Progress | None = None
) -> LoadedModel:
    """Load everything, in seconds. Raises `ModelError`, `ModelNotFound` or `ConfigError`."""
    started = time.perf_counter()
    opened = open_model(settings.model)
    spec = opened.spec
    max_context = _max_context(settings, spec)
    opened_s = time.perf_counter() - started
    with ThreadPoolExecutor(2, thread_name_prefix="load") as pool:
        tokenizer_made = pool.submit(Tokenizer.of_model, opened)
        arena_made = pool.submit(_make_arena, settings, spec, max_context, generation)
        ready = _make_device(settings, opened, max_context, progress)
        arena, tokenizer = arena_made.result(), tokenizer_made.result()
    device, block_bytes = ready.device, ready.device.kv_block_bytes
    template = _template(tokenizer)
    if arena.block_bytes != block_bytes:
        raise AssertionError(f"device has blocks of {block_bytes} bytes, arena {arena.block_bytes}")
    device.add_arena(LOCAL_ARENA, arena.buffer)
    opened.close()
    contract = _contract(settings, spec, tokenizer, ready.weights_hash, device.numerics_id)
    seconds = {"open": opened_s, "total": time.perf_counter() - started}
    return LoadedModel(
        name=opened.name,
        spec=spec,
        tokenizer=tokenizer,
        template=template,
        device=device,
        arena=arena,
        contract=contract,
        max_context=max_context,
        notes=(
            *opened.notes,
            *ready.notes,
            *(f"unused tensor {name}" for name in opened.ignored),
            *_remote_code_note(settings, spec),
        ),
        seconds=seconds,
    )


def _max_context(settings: WorkerSettings, spec: ModelSpec) -> int:
    wanted = settings.max_context
    if wanted is not None and not 1 <= wanted <= spec.max_context:
        raise ConfigError(
            f"max_context is {wanted}: from 1 to the model's {spec.max_context} is possible"
        )
    return wanted or spec.max_context


def _remote_code_note(settings: WorkerSettings, spec: ModelSpec) -> list[str]:
    if not settings.trust_remote_code:
        return []
    return [f"trust_remote_code runs nothing: the built-in {spec.architecture} is used"]


def _template(tokenizer: Tokenizer) -> ChatTemplate | None:
    source = tokenizer.chat_template
    if source is None:
        return None
    return ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)


def _make_device(
    settings: WorkerSettings, opened: OpenedModel, max_context: int, progress: Progress | None
) -> _Ready:
    if settings.device not in DEVICES:
        raise ConfigError(f"device is {settings.device!r}: one of {', '.join(DEVICES)} is needed")
    if settings.device != "torch":
        obstacle = _obstacle(opened.spec)
        if obstacle is None:
            return _cpu_device(settings, opened, max_context, progress)
        if settings.device == "cpu":
            raise ConfigError(obstacle)
        if find_spec("torch") is None:
            raise ConfigError(f"{obstacle}; or use torch: pip install 'llmrt[torch]'")
        log.warning(
            "device.replaced",
            device="torch",
            reason=obstacle,
            lost=TORCH_LACKS,
        )
    return _torch_device(settings, opened, max_context, progress)


def _obstacle(spec: ModelSpec) -> str | None:
    """Why the compiled step cannot run the model here, and the remedy; None if it can."""
    try:
        best_family()
        check_model(spec)
    except (LibraryMissing, ConfigError) as error:
        return str(error)
    return None


def _cpu_device(
    settings: WorkerSettings, opened: OpenedModel, max_context: int, progress: Progress | None
) -> _Ready:
    family = choose_family(settings.cpu_family)
    check_kv_dtype(settings.kv_cache_dtype)
    program, packed = load_program(
        opened,
        dtype=settings.dtype,
        kv_dtype=settings.kv_cache_dtype,
        max_context=max_context,
        progress=progress,
    )
    share = None
    if settings.threads is None and settings.runtime_dir is not None:
        share = CoreShare(settings.runtime_dir, num_cores())
    device = CpuDevice(program, family=family.name, threads=settings.threads, share=share)
    warm_up(device)
    return _Ready(device, packed.weights_hash, packed.notes)


def _torch_device(
    settings: WorkerSettings, opened: OpenedModel, max_context: int, progress: Progress | None
) -> _Ready:
    check_torch(settings)
    # Before torch starts its threads: ones that spin long would take the cores of other workers,
    # ones that never do cost a step of hundreds of operations a third of its time.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _OMP_SPINS)
    try:
        from llmrt.engine.torch_device import TorchDevice
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the torch device needs the package {error.name}: pip install 'llmrt[torch]'"
        ) from None
    with ThreadPoolExecutor(1, thread_name_prefix="hash") as pool:
        hashed = pool.submit(opened.weights_hash)
        device = TorchDevice(
            opened,
            dtype=settings.dtype,
            kv_dtype=settings.kv_cache_dtype,
            max_context=max_context,
            threads=settings.threads or share_of_cores(settings.local_workers),
            progress=progress,
        )
        warm_up(device)
        return _Ready(device, hashed.result())


def check_torch(settings: WorkerSettings) -> None:
    """Raise `ConfigError` for settings that only the cpu device has."""
    if settings.cpu_family is not None:
        raise ConfigError(
            f"cpu_family is {settings.cpu_family!r}: only the cpu device has families"
        )
    if settings.kv_cache_dtype in ("int8", "fp8"):
        raise ConfigError(
            f"kv_cache_dtype is {settings.kv_cache_dtype!r}: the torch device has bf16 and f32, "
            "int8 and fp8 need --device cpu"
        )


def _make_arena(
    settings: WorkerSettings, spec: ModelSpec, max_context: int, generation: int
) -> Arena:
    block_bytes = _contract(settings, spec, None, "", "").block_bytes
    if settings.kv_tokens is not None:
        num_tokens = settings.kv_tokens
    else:
        share = int(available_bytes() * MAX_MEMORY_SHARE) // block_bytes * BLOCK_TOKENS
        num_tokens = max(BLOCK_TOKENS, min(DEFAULT_CONTEXTS * max_context, share))
    return Arena.create(blocks_for(num_tokens), block_bytes, generation=generation)


def _contract(
    settings: WorkerSettings,
    spec: ModelSpec,
    tokenizer: Tokenizer | None,
    model_hash: str,
    numerics_id: str,
) -> KvContract:
    attention = spec.attention
    return KvContract(
        model_hash=_digest(model_hash, spec),
        tokenizer_hash="" if tokenizer is None else tokenizer.tokenizer_hash,
        kv_dtype=settings.kv_cache_dtype,
        block_tokens=BLOCK_TOKENS,
        layout=KV_LAYOUT,
        num_layers=spec.num_layers,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        rope=_digest(*(layer.attention.rope for layer in spec.layers))[:16],
        sharding="none",
        protocol=str(MAJOR),
        numerics_id=numerics_id,
    )


def _digest(*facts: object) -> str:
    """Hex SHA-256 of facts whose repr says all that matters, floats to their last bit."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()
