"""Programs and devices of the compiled step, for its tests."""

import numpy as np
from tests.engine.tiny_models import PEER_ARENA, Logits

from llmrt.engine.batch import LOCAL_ARENA
from llmrt.engine.cpu_device import CpuDevice
from llmrt.engine.cpu_program import CpuProgram
from llmrt.engine.cpu_weights import weight_requests
from llmrt.kernels.cpu.library import families
from llmrt.models.loading import OpenedModel
from llmrt.models.packing import pack_weights

NUM_BLOCKS = 64
KV_DTYPES = ("bf16", "f32", "int8", "fp8")
USABLE = [family.name for family in families() if family.is_supported]


def make_program(
    model: OpenedModel, dtype: str = "f32", kv_dtype: str = "f32", max_context: int | None = None
) -> CpuProgram:
    spec = model.spec
    weights = pack_weights(model.tensors, weight_requests(spec, model.tensors, dtype))
    return CpuProgram(spec, weights, kv_dtype=kv_dtype, max_context=max_context or spec.max_context)


def make_device(program: CpuProgram, family: str | None = None, threads: int = 1) -> CpuDevice:
    """With two arenas whose bytes are all ones, that is, NaN wherever nothing was written."""
    device = CpuDevice(program, family=family, threads=threads)
    for arena in (LOCAL_ARENA, PEER_ARENA):
        device.add_arena(arena, poisoned(device))
    return device


def poisoned(device: CpuDevice) -> memoryview:
    return memoryview(bytearray(b"\xff") * (NUM_BLOCKS * device.kv_block_bytes))


def assert_same_bits(actual: Logits, expected: Logits) -> None:
    assert actual.tobytes() == expected.tobytes(), np.abs(actual - expected).max()
