"""Converted blocks against those that the compiled step fills itself."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import make_contract
from tests.engine.cpu_programs import make_program
from tests.engine.tiny_models import VOCAB, forward, make_row

from llmrt.engine.batch import LOCAL_ARENA
from llmrt.engine.cpu_device import CpuDevice
from llmrt.kvtransfer.conversion import conversion
from llmrt.models.loading import open_model
from llmrt.models.spec import ModelSpec
from llmrt.wire.kv import KvContract

BLOCKS = [3, 1]


def contract_of(spec: ModelSpec, kv_dtype: str) -> KvContract:
    return make_contract(
        kv_dtype=kv_dtype,
        num_layers=spec.num_layers,
        num_kv_heads=spec.attention.num_kv_heads,
        head_dim=spec.attention.head_dim,
    )


def filled_arena(folder: Path, kv_dtype: str) -> memoryview:
    device = CpuDevice(make_program(open_model(folder), kv_dtype=kv_dtype), threads=1)
    arena = memoryview(bytearray(4 * device.kv_block_bytes))
    device.add_arena(LOCAL_ARENA, arena)
    forward(device, make_row([i * 37 % VOCAB for i in range(64)], 0, 64, BLOCKS))
    return arena


def block_of(arena: memoryview, block: int) -> memoryview:
    size = len(arena) // 4
    return arena[block * size : (block + 1) * size]


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_float32_becomes_is_what_the_step_stores(
    folder_of: Callable[[str], Path], family: str, kv_dtype: str
) -> None:
    """Of the first layer, whose K and V do not depend on what the cache holds."""
    folder = folder_of(family)
    spec = open_model(folder).spec
    wide, expected = (filled_arena(folder, name) for name in ("f32", kv_dtype))
    found = conversion(contract_of(spec, kv_dtype), contract_of(spec, "f32"))
    assert found is not None
    source = b"".join(block_of(wide, block) for block in BLOCKS)
    converted = memoryview(bytearray(len(expected)))
    found.convert(memoryview(source), converted, BLOCKS, range(64))
    layer_bytes = found.ours.block_bytes // spec.num_layers
    for block in BLOCKS:
        first_layer = block_of(expected, block)[:layer_bytes]
        assert first_layer != bytes(layer_bytes)
        assert block_of(converted, block)[:layer_bytes] == first_layer
