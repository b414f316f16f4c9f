"""The compiled step against transformers in float32, and what its device promises."""

import gc
import itertools
import shutil
import subprocess
import sys
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as changed
from tests.conftest import make_contract
from tests.engine.cpu_programs import (
    KV_DTYPES,
    NUM_BLOCKS,
    USABLE,
    assert_same_bits,
    make_device,
    make_program,
    poisoned,
)
from tests.engine.tiny_models import (
    NUM_TOKENS,
    PEER_ARENA,
    TOLERANCE,
    VOCAB,
    Oracle,
    forward,
    make_row,
)

from llmrt.engine.batch import LOCAL_ARENA, ArenaId, Batch, Row
from llmrt.engine.cpu_device import CpuDevice
from llmrt.engine.cpu_program import CpuProgram, load_program
from llmrt.engine.cpu_weights import weight_requests
from llmrt.engine.device_parts import warm_up
from llmrt.engine.sampler import draw_row
from llmrt.engine.torch_device import TorchDevice
from llmrt.kernels.cpu.library import Format
from llmrt.models.loading import OpenedModel, open_model
from llmrt.models.packing import pack_weights
from llmrt.models.spec import ModelSpec
from llmrt.wire.errors import ConfigError, InternalError, LlmrtError
from llmrt.wire.kv import BLOCK_TOKENS
from llmrt.wire.sampling import SamplingParams

# -- against transformers ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def device(oracle: Oracle) -> CpuDevice:
    return make_device(make_program(open_model(oracle.folder)), threads=2)


@pytest.mark.parametrize(
    "ends",
    [[97], [1, 97], [31, 32, 33, 97], [32, 64, 96, 97], [33, 63, 66], list(range(1, 98))],
    ids=lambda ends: f"{len(ends)}_chunks_to_{ends[-1]}_from_{ends[0]}",
)
def test_any_chunking_gives_the_logits_of_transformers(
    oracle: Oracle, device: CpuDevice, ends: list[int]
) -> None:
    for start, end in itertools.pairwise([0, *ends]):
        logits = forward(device, make_row(oracle.texts[0], start, end, [11, 2, 14, 5]))
        np.testing.assert_allclose(logits[0], oracle.logits[0][end - 1], atol=TOLERANCE)


def test_a_mixed_batch_gives_the_logits_of_transformers(oracle: Oracle, device: CpuDevice) -> None:
    """Decodes of several lengths and prefill chunks, interleaved over two arenas."""
    first, second = oracle.texts
    placed: list[tuple[list[int], int, int, list[int], ArenaId]] = [
        (first, 70, 71, [3, 9, 1], LOCAL_ARENA),
        (second, 0, 40, [3, 9], PEER_ARENA),
        (second, 31, 32, [12], LOCAL_ARENA),
        (first, 32, 97, [0, 4, 2, 7], PEER_ARENA),
        (first, 32, 33, [15, 8], PEER_ARENA),
        (second, 95, 96, [6, 5, 10], LOCAL_ARENA),
        (first, 0, 1, [7], LOCAL_ARENA),
    ]
    for text, start, _, blocks, arena in placed:
        if start:
            forward(device, make_row(text, 0, start, blocks, arena))

    logits = forward(device, *(make_row(*row) for row in placed))

    for row, (text, _, end, _, _) in zip(logits, placed, strict=True):
        expected = oracle.logits[0 if text is first else 1][end - 1]
        np.testing.assert_allclose(row, expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "limit"),
    [("bf16", "f32", 0.03), ("int8", "f32", 0.1), ("f32", "int8", 0.03), ("f32", "fp8", 0.15)],
)
def test_smaller_formats_stay_near_float32(
    oracle: Oracle, dtype: str, kv_dtype: str, limit: float
) -> None:
    """In deviations of a logit, over 3 layers; twice what was seen.

    bf16 has 8 bits; int8 as many, relative to the largest of 32 or of a head, for both factors of
    a product; fp8 has 4.
    """
    device = make_device(make_program(open_model(oracle.folder), dtype, kv_dtype))
    text = oracle.texts[0]
    logits = [forward(device, make_row(text, end - 1, end))[0] for end in range(1, NUM_TOKENS + 1)]
    error = np.stack(logits) - oracle.logits[0]
    assert 0 < np.sqrt((error**2).mean()) < limit * oracle.logits[0].std()


@pytest.mark.parametrize("kv_dtype", ["bf16", "f32"])
def test_torch_goes_on_with_the_blocks_of_the_compiled_step(oracle: Oracle, kv_dtype: str) -> None:
    """Both have the same layout, so that workers of both kinds can be a pair."""
    cpu = CpuDevice(make_program(open_model(oracle.folder), kv_dtype=kv_dtype), threads=1)
    reference = TorchDevice(open_model(oracle.folder), dtype="f32", kv_dtype=kv_dtype)
    assert cpu.kv_block_bytes == reference.kv_block_bytes
    arena = memoryview(bytearray(4 * cpu.kv_block_bytes))
    cpu.add_arena(LOCAL_ARENA, arena)
    reference.add_arena(LOCAL_ARENA, arena)
    forward(cpu, make_row(oracle.texts[0], 0, 70))
    row = make_row(oracle.texts[0], 70, 71)
    expected = forward(cpu, row)
    tolerance = TOLERANCE if kv_dtype == "f32" else 0.03
    np.testing.assert_allclose(reference.forward(Batch(0, (row,))), expected, atol=tolerance)


@pytest.fixture(scope="module")
def tiny(folder_of: Callable[[str], Path]) -> OpenedModel:
    return open_model(folder_of("llama"))


# -- rows, arenas, draws ----------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_only_slots_of_new_tokens_are_written(tiny: OpenedModel, kv_dtype: str) -> None:
    """K is [dim][token], V [token][dim] per layer and head, then the scales of both."""
    device = CpuDevice(make_program(tiny, kv_dtype=kv_dtype), threads=1)
    memory = poisoned(device)
    device.add_arena(LOCAL_ARENA, memory)
    forward(device, make_row(range(35), 0, 35, [2, 0]))
    items = {"bf16": np.uint16, "f32": np.uint32, "int8": np.uint8, "fp8": np.uint8}
    item = np.dtype(items[kv_dtype])
    heads, dim = 3 * 2, 16
    per_head = np.frombuffer(memory, np.uint8).reshape(NUM_BLOCKS, heads, -1)
    half = dim * BLOCK_TOKENS * item.itemsize
    poison = 2 ** (8 * item.itemsize) - 1
    k = per_head[..., :half].view(item).reshape(NUM_BLOCKS, heads, dim, BLOCK_TOKENS)
    v = per_head[..., half : 2 * half].view(item).reshape(NUM_BLOCKS, heads, BLOCK_TOKENS, dim)
    scales = per_head[..., 2 * half :].view(np.uint32).reshape(NUM_BLOCKS, heads, -1, BLOCK_TOKENS)
    assert scales.shape[2] == (2 if kv_dtype in ("int8", "fp8") else 0)
    assert (per_head[[1, *range(3, NUM_BLOCKS)]] == 0xFF).all()
    for tokens in (k[0, ..., 3:], v[0, :, 3:], scales[0, ..., 3:]):
        assert (tokens == np.iinfo(tokens.dtype).max).all()
    # -1 in int8 is the poison: a few of the written bytes may be it.
    for tokens in (k[2], v[2], k[0, ..., :3], v[0, :, :3]):
        assert (tokens == poison).mean() < 0.05
    assert (scales[2] != np.iinfo(np.uint32).max).all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_blocks_have_the_size_of_the_contract(tiny: OpenedModel, kv_dtype: str) -> None:
    attention = tiny.spec.attention
    contract = make_contract(
        kv_dtype=kv_dtype,
        num_layers=tiny.spec.num_layers,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
    )
    device = CpuDevice(make_program(tiny, kv_dtype=kv_dtype), threads=1)
    assert device.kv_block_bytes == contract.block_bytes


def test_rows_without_sample_give_no_logits(tiny: OpenedModel) -> None:
    device = make_device(make_program(tiny))
    row = make_row(range(10), 0, 10)
    silent = Row(row.sequence_id, row.arena, row.token_ids, 0, row.blocks)
    assert forward(device, silent).shape == (0, VOCAB)
    assert forward(device).shape == (0, VOCAB)
    assert device.run(Batch(3, (silent,))).drawn == ()
    assert forward(device, silent, make_row(range(10), 0, 10, [7])).shape == (1, VOCAB)


def test_all_logits_are_those_of_every_token(tiny: OpenedModel) -> None:
    device = make_device(make_program(tiny))
    expected = [forward(device, make_row(range(40), 0, end, [9, 8]))[0] for end in (37, 38, 39, 40)]
    other = make_row(range(5), 0, 5, [3])
    silent = changed(make_row(range(40), 36, 40, [9, 8]), sample=None)
    logits = device.all_logits(Batch(0, (other, silent)))
    assert logits.shape == (9, VOCAB)
    assert_same_bits(logits[5:], np.stack(expected))
    assert_same_bits(logits[4], forward(device, other)[0])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (make_row(range(40), 0, 40, [1, 64]), "block 64 of arena 'local', which has 64"),
        (make_row(range(40), 0, 40, [2**32 - 1, 0]), "block 4294967295 of arena"),
        (make_row(range(40), 0, 40, [1]), "ends at token 40, past its 1 blocks"),
        (make_row(range(40), 0, 40, []), "ends at token 40, past its 0 blocks"),
        (make_row([128], 0, 1), "token 128: the vocabulary has 128"),
        (make_row([2**32 - 1], 0, 1), "token 4294967295: the vocabulary has 128"),
        (make_row(range(10), 10, 10), "positions 10 to 10: at least one token"),
        (make_row([1] * 257, 0, 257, range(9)), "below the context of 256"),
        (changed(make_row([1], 0, 1), start=256), "positions 256 to 257"),
        (changed(make_row([1], 0, 1), start=-1), "positions -1 to 0"),
        (changed(make_row([1], 0, 1), start=2**63 - 1), "positions 9223372036854775807 to"),
        (changed(make_row([1], 0, 1), start=2**70), "positions 1180591620717411303424 to"),
        (make_row([1], 0, 1, arena=ArenaId("gone")), "arena 'gone': only \\['local', 'peer-7'\\]"),
        (changed(make_row([1], 0, 1), blocks=array("B", [0])), "no array of 'I'"),
        (changed(make_row([1], 0, 1), token_ids=array("Q", [0])), "no array of 'I'"),
    ],
)
def test_a_row_out_of_bounds_is_refused_before_anything_is_written(
    tiny: OpenedModel, row: Row, message: str
) -> None:
    device = CpuDevice(make_program(tiny), threads=1)
    buffers = [bytearray(NUM_BLOCKS * device.kv_block_bytes) for _ in range(2)]
    device.add_arena(LOCAL_ARENA, memoryview(buffers[0]))
    device.add_arena(PEER_ARENA, memoryview(buffers[1]))
    good = make_row(range(10), 0, 10, [0])
    for rows in ((good, row), (row, good)):
        with pytest.raises(ValueError, match=message):
            forward(device, *rows)
    assert not any(buffers[0])
    assert not any(buffers[1])
    assert np.isfinite(forward(device, good)).all()


def test_a_row_with_poisoned_kv_fails_alone(tiny: OpenedModel) -> None:
    device = make_device(make_program(tiny))
    good, bad = make_row(range(9), 8, 9, [0]), make_row(range(9), 8, 9, [1])
    forward(device, make_row(range(9), 0, 8, [0]))
    alone = device.run(Batch(0, (good,))).drawn[0]
    assert alone.token_ids
    drawn = device.run(Batch(0, (bad, good))).drawn
    assert isinstance(drawn[0].error, InternalError)
    assert drawn[0].token_ids == ()
    assert drawn[1] == alone


def test_a_poisoned_row_names_the_packed_file_and_the_remedy(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model's own file is not to blame if what was mapped is another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "model"
    shutil.copytree(folder_of("llama"), folder)
    model = open_model(folder)
    program, packed = load_program(model, dtype="f32", kv_dtype="f32", max_context=64)
    assert packed.path is not None
    drawn = make_device(program).run(Batch(0, (make_row(range(9), 8, 9, [1]),))).drawn
    assert f"are those of {packed.path}: remove it" in str(drawn[0].error)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=1),
        SamplingParams(logprobs=3),
        SamplingParams(temperature=1.5),
        SamplingParams(repetition_penalty=1.8),
        SamplingParams(presence_penalty=2.0),
        SamplingParams(frequency_penalty=2.0),
        SamplingParams(logit_bias={5: 50.0}),
    ],
)
def test_tokens_are_those_of_the_sampler(tiny: OpenedModel, params: SamplingParams) -> None:
    """The best token comes from C where that is all there is to it."""
    device = make_device(make_program(tiny))
    rows = [make_row(range(20), 0, end, [end], params=params) for end in range(2, 12)]
    rows[3] = changed(rows[3], sample=None)
    logits = forward(device, *rows)
    samples = [row.sample for row in rows if row.sample is not None]
    expected = [draw_row(row, sample) for row, sample in zip(logits, samples, strict=True)]
    drawn = device.run(Batch(8, tuple(rows))).drawn
    assert [(entry.token_ids[0], next(iter(entry.logprobs), None)) for entry in drawn] == expected
    assert len({token_id for token_id, _ in expected}) > 1 or params.logit_bias


def test_banned_tokens_are_not_drawn(tiny: OpenedModel) -> None:
    device = make_device(make_program(tiny))
    row = make_row(range(20), 0, 5)
    (best,) = device.run(Batch(0, (row,))).drawn
    assert row.sample is not None
    banned = changed(row, sample=changed(row.sample, banned=best.token_ids))
    (second,) = device.run(Batch(0, (banned,))).drawn
    logits = forward(device, row)[0]
    assert second.token_ids[0] == np.argsort(logits)[-2]
    everything = changed(row, sample=changed(row.sample, banned=tuple(range(VOCAB))))
    (failed,) = device.run(Batch(0, (everything,))).drawn
    assert isinstance(failed.error, LlmrtError)


def test_a_removed_arena_lets_go_of_its_buffer(tiny: OpenedModel) -> None:
    """A buffer that is exported cannot be resized."""
    device = CpuDevice(make_program(tiny), threads=1)
    buffer = bytearray(device.kv_block_bytes)
    device.add_arena(PEER_ARENA, memoryview(buffer))
    forward(device, make_row([1, 2], 0, 2, [0], PEER_ARENA))
    with pytest.raises(BufferError):
        buffer.clear()
    with pytest.raises(ValueError, match="added before"):
        device.add_arena(PEER_ARENA, memoryview(buffer))
    device.remove_arena(PEER_ARENA)
    buffer.clear()
    with pytest.raises(ValueError, match="no arena 'peer-7'"):
        device.remove_arena(PEER_ARENA)


def test_a_buffer_that_is_no_arena_is_refused(tiny: OpenedModel) -> None:
    device = CpuDevice(make_program(tiny), threads=1)
    for buffer in (bytearray(device.kv_block_bytes + 1), bytearray(), bytes(device.kv_block_bytes)):
        with pytest.raises(ValueError, match="a writable multiple of"):
            device.add_arena(LOCAL_ARENA, memoryview(buffer))


def test_a_device_that_is_dropped_ends_its_threads(tiny: OpenedModel) -> None:
    program = make_program(tiny)
    gc.collect()  # devices of other tests
    before = num_threads()
    device = CpuDevice(program, threads=4)
    warm_up(device)
    assert num_threads() == before + 3
    del device
    assert num_threads() == before


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


# -- settings and models ----------------------------------------------------------------------


def test_settings_are_checked_and_named(tiny: OpenedModel) -> None:
    with pytest.raises(ConfigError, match="dtype is 'fp16': one of auto, bf16, f32, int8"):
        make_program(tiny, "fp16")
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp4': one of bf16, f32, int8, fp8"):
        make_program(tiny, kv_dtype="fp4")
    with pytest.raises(ConfigError, match="max_context is 257"):
        make_program(tiny, max_context=257)
    with pytest.raises(ConfigError, match=f"'mmx': this CPU and build can run {USABLE[0]}"):
        CpuDevice(make_program(tiny), family="mmx")


def narrow(spec: ModelSpec, **sizes: Any) -> ModelSpec:
    layers = tuple(
        replace(layer, attention=replace(layer.attention, **sizes)) for layer in spec.layers
    )
    return replace(spec, layers=layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: replace(spec, hidden_size=48), "hidden size is 48: .* multiple of 32"),
        (lambda spec: narrow(spec, head_dim=24), "head size is 24: .* multiple of 16"),
        (lambda spec: narrow(spec, num_heads=1), r"heads \* head size is 16: .* multiple of 32"),
    ],
)
def test_a_model_that_does_not_fit_is_named_with_a_remedy(
    tiny: OpenedModel, change: Callable[[ModelSpec], ModelSpec], message: str
) -> None:
    weights = pack_weights(tiny.tensors, weight_requests(tiny.spec, tiny.tensors, "f32"))
    with pytest.raises(ConfigError, match=message + ".*--device torch"):
        CpuProgram(change(tiny.spec), weights, kv_dtype="f32", max_context=8)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("Q4_0", "Q4_0"), Format.Q4),
        (("Q4_0", "Q4_1"), Format.Q4M),
        (("Q4_0", "Q8_0"), Format.Q8),
        (("Q4_1", "Q8_0"), Format.Q8M),
        (("Q4_K", "Q6_K"), Format.Q8M),
        (("Q8_0", "F16"), Format.BF16),
        (("F32", "F32"), Format.BF16),
    ],
)
def test_gate_and_up_get_a_format_that_holds_both(
    tiny: OpenedModel, kinds: tuple[str, str], expected: Format
) -> None:
    tensors = dict(tiny.tensors)
    for name, kind in zip(("layers.1.gate", "layers.1.up"), kinds, strict=True):
        tensors[name] = replace(tensors[name], kind=kind)
    requests = {request.name: request for request in weight_requests(tiny.spec, tensors, "auto")}
    assert requests["layers.1.gate_up"].format == expected
    assert requests["layers.1.gate_up"].is_interleaved


# -- a real model -----------------------------------------------------------------------------

PROMPT_TOKENS, NEW_TOKENS = 40, 24
# float32 sums in another order; and activations and KV of 8 bits over 30 layers.
MARGINS = {"f32": 0.05, "auto": 0.6}


@pytest.mark.parametrize("dtype", MARGINS)
def test_smollm2_continues_as_torch_does_in_float32(smollm2_path: Path, dtype: str) -> None:
    """Each text is continued greedily; torch sees what came out and chooses for itself."""
    model = open_model(smollm2_path)
    kv_dtype = "f32" if dtype == "f32" else "bf16"
    device = CpuDevice(make_program(model, dtype, kv_dtype), threads=2)
    reference = TorchDevice(model, dtype="f32", kv_dtype="f32")
    rng = np.random.default_rng(5)
    texts = [array("I", rng.integers(1000, 20000, PROMPT_TOKENS).tolist()) for _ in range(4)]
    device.add_arena(LOCAL_ARENA, memoryview(bytearray(16 * device.kv_block_bytes)))
    reference.add_arena(LOCAL_ARENA, memoryview(bytearray(16 * reference.kv_block_bytes)))
    num_clear = 0
    for n in range(NEW_TOKENS):
        rows = tuple(
            make_row(text, len(text) - 1 if n else 0, len(text), range(4 * i, 4 * i + 4))
            for i, text in enumerate(texts)
        )
        drawn = device.run(Batch(n, rows)).drawn
        logits = reference.forward(Batch(n, rows))
        for text, entry, expected in zip(texts, drawn, logits, strict=True):
            second, first = np.partition(expected, -2)[-2:]
            if first - second > MARGINS[dtype]:
                num_clear += 1
                assert entry.token_ids[0] == expected.argmax()
            text.append(entry.token_ids[0])
    assert num_clear > 0.5 * len(texts) * NEW_TOKENS


def test_a_cpu_worker_loads_no_torch(smollm2_path: Path, tmp_path: Path) -> None:
    """Nothing of it is there, so that it need not be installed."""
    (tmp_path / "model.gguf").symlink_to(smollm2_path)
    code = f"""
import sys
sys.modules["torch"] = None  # importing it raises ImportError
from pathlib import Path
from llmrt.workers.loading import load_model
from llmrt.workers.settings import WorkerSettings
import llmrt.workers.server, llmrt.cli.commands
model = load_model(
    WorkerSettings(model=Path({str(tmp_path / "model.gguf")!r}), device="cpu", kv_tokens=64),
    generation=1,
)
print(model.contract.numerics_id, [name for name in sys.modules if name.startswith("torch.")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "cpu-1/q4m.q8/kv-bf16 []\n"), done.stderr
