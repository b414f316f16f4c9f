"""What a worker loads before it serves: weights, tokenizer, template, device and KV arena."""

import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from llmrt.engine.batch import LOCAL_ARENA, Device
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

# The order of bytes inside a block; see the arena's layout in docs/architecture.md.
KV_LAYOUT = "block-major/k-dim-token/v-token-dim"
# Contexts that the arena holds by default, and the share of memory that it takes at most.
DEFAULT_CONTEXTS = 4
MAX_MEMORY_SHARE = 0.25

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
        tokenizer_made = pool.submit(_tokenizer, opened)
        arena_made = pool.submit(_make_arena, settings, spec, max_context, generation)
        hashed = pool.submit(opened.weights_hash)
        device, block_bytes = _make_device(settings, opened, max_context, progress)
        arena, model_hash = arena_made.result(), hashed.result()
        tokenizer = tokenizer_made.result()
    template = _template(tokenizer)
    if arena.block_bytes != block_bytes:
        raise AssertionError(f"device has blocks of {block_bytes} bytes, arena {arena.block_bytes}")
    device.add_arena(LOCAL_ARENA, arena.buffer)
    opened.close()
    contract = _contract(settings, spec, tokenizer, model_hash, device.numerics_id)
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


def _tokenizer(opened: OpenedModel) -> Tokenizer:
    if opened.format == "gguf":
        return Tokenizer.from_gguf(opened.metadata)
    return Tokenizer.from_files(opened.path)


def _template(tokenizer: Tokenizer) -> ChatTemplate | None:
    source = tokenizer.chat_template
    if source is None:
        return None
    return ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)


def _make_device(
    settings: WorkerSettings, opened: OpenedModel, max_context: int, progress: Progress | None
) -> tuple[Device, int]:
    if settings.device != "torch":
        raise ConfigError(f"device is {settings.device!r}: torch is the only one yet")
    # Before torch starts its threads: spinning ones would take the cores of other workers.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        from llmrt.engine.torch_device import TorchDevice
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the torch device needs the package {error.name}: pip install 'llmrt[all]'"
        ) from None
    device = TorchDevice(
        opened,
        dtype=settings.dtype,
        kv_dtype=settings.kv_cache_dtype,
        max_context=max_context,
        threads=settings.threads,
        progress=progress,
    )
    device.warm_up()
    return device, device.kv_block_bytes


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
