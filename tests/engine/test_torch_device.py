"""The torch device in float32 against transformers, family by family, batch shape by batch shape.

Chunking, scattered blocks, batching and foreign arenas must not change a logit by more than
float32 sums in another order do.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
from tests.engine.tiny_models import (
    PEER_ARENA,
    TOLERANCE,
    Oracle,
    forward,
    make_row,
    save_tiny_model,
)

from llmrt.engine.batch import LOCAL_ARENA, ArenaId, Batch, Row, SampleSpec, SequenceId
from llmrt.engine.device_parts import warm_up
from llmrt.engine.torch_device import TorchDevice
from llmrt.models.loading import open_model
from llmrt.wire.errors import ConfigError, InternalError
from llmrt.wire.kv import BLOCK_TOKENS
from llmrt.wire.sampling import SamplingParams

NUM_BLOCKS = 16


@pytest.fixture(scope="module")
def device(oracle: Oracle) -> TorchDevice:
    return make_device(oracle.folder)


def make_device(folder: Path, dtype: str = "f32", kv_dtype: str = "f32") -> TorchDevice:
    """With two arenas whose bytes are all ones, that is, NaN wherever nothing was written."""
    device = TorchDevice(open_model(folder), dtype=dtype, kv_dtype=kv_dtype)
    for arena in (LOCAL_ARENA, PEER_ARENA):
        device.add_arena(
            arena, memoryview(bytearray(b"\xff") * (NUM_BLOCKS * device.kv_block_bytes))
        )
    return device


@pytest.mark.parametrize(
    "ends",
    [
        [97],
        [1, 97],
        [31, 32, 33, 97],
        [32, 64, 96, 97],
        [33, 63, 66],
        [5, 17, 18, 50, 51, 97],
        list(range(1, 98)),
    ],
    ids=lambda ends: f"{len(ends)}_chunks_to_{ends[-1]}_from_{ends[0]}",
)
def test_any_chunking_gives_the_logits_of_transformers(
    oracle: Oracle, device: TorchDevice, ends: list[int]
) -> None:
    blocks = [11, 2, 14, 5]
    for start, end in itertools.pairwise([0, *ends]):
        logits = forward(device, make_row(oracle.texts[0], start, end, blocks))
        np.testing.assert_allclose(logits[0], oracle.logits[0][end - 1], atol=TOLERANCE)


def test_rows_of_a_mixed_batch_do_not_disturb_each_other(
    oracle: Oracle, device: TorchDevice
) -> None:
    """Decodes of several lengths and prefill chunks, interleaved over two arenas."""
    first, second = oracle.texts
    placed = [
        (first, 70, 71, [3, 9, 1], LOCAL_ARENA),
        (second, 0, 40, [3, 9], PEER_ARENA),
        (second, 31, 32, [12], LOCAL_ARENA),
        (first, 32, 97, [0, 4, 2, 7], PEER_ARENA),
        (first, 32, 33, [15, 8], PEER_ARENA),
        (second, 95, 96, [6, 5, 10], LOCAL_ARENA),
        (second, 64, 65, [11, 13, 14], LOCAL_ARENA),
        (first, 0, 1, [7], LOCAL_ARENA),
    ]
    for text, start, _, blocks, arena in placed:
        if start:
            forward(device, make_row(text, 0, start, blocks, arena))

    logits = forward(device, *(make_row(*row) for row in placed))

    for row, (text, _, end, _, _) in zip(logits, placed, strict=True):
        expected = oracle.logits[0 if text is first else 1][end - 1]
        np.testing.assert_allclose(row, expected, atol=TOLERANCE)


def test_many_decodes_equal_one(oracle: Oracle, device: TorchDevice) -> None:
    lengths = [1, 30, 31, 32, 33, 47]
    rows = [
        (oracle.texts[i % 2], end, end + 1, [2 * i, 2 * i + 1]) for i, end in enumerate(lengths)
    ]
    for text, start, _, blocks in rows:
        forward(device, make_row(text, 0, start, blocks))

    logits = forward(device, *(make_row(*row) for row in rows))

    for i, end in enumerate(lengths):
        np.testing.assert_allclose(logits[i], oracle.logits[i % 2][end], atol=TOLERANCE)


def test_bf16_stays_near_float32(oracle: Oracle) -> None:
    """bfloat16 has 8 bits: some 2**-8 of logits of size 1, several times over 3 layers."""
    device = make_device(oracle.folder, "bf16", "bf16")
    for start, end in ((0, 60), (60, 61), (61, 97)):
        logits = forward(device, make_row(oracle.texts[0], start, end))
    scale = oracle.logits[0].std()
    assert np.abs(logits[0] - oracle.logits[0][-1]).max() < 0.1 * scale


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model("llama", folder)
    return folder


def test_rows_without_sample_give_no_logits(tiny_folder: Path) -> None:
    device = make_device(tiny_folder)
    row = make_row(range(10), 0, 10)
    silent = Row(row.sequence_id, row.arena, row.token_ids, 0, row.blocks)
    assert forward(device, silent).shape == (0, 128)
    assert forward(device).shape == (0, 128)
    assert device.run(Batch(3, (silent,))).drawn == ()


def test_only_slots_of_new_tokens_are_written(tiny_folder: Path) -> None:
    """K is [dim][token] and V [token][dim] per layer and head, block-major."""
    device = TorchDevice(open_model(tiny_folder), dtype="f32", kv_dtype="f32")
    buffer = bytearray(3 * device.kv_block_bytes)
    device.add_arena(LOCAL_ARENA, memoryview(buffer))
    forward(device, make_row(range(35), 0, 35, [2, 0]))
    arena = np.frombuffer(buffer, np.float32).reshape(3, 3, 2, 2, 16 * BLOCK_TOKENS)
    k = arena[..., 0, :].reshape(3, 3, 2, 16, BLOCK_TOKENS)
    v = arena[..., 1, :].reshape(3, 3, 2, BLOCK_TOKENS, 16)
    assert not arena[1].any()
    assert k[2].all()
    assert v[2].all()
    assert k[0, ..., :3].all()
    assert not k[0, ..., 3:].any()
    assert v[0, ..., :3, :].all()
    assert not v[0, ..., 3:, :].any()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (make_row(range(40), 0, 40, [1, NUM_BLOCKS]), "block 16 of arena 'local', which has 16"),
        (make_row(range(40), 0, 40, [1]), "ends at token 40, past its 1 blocks"),
        (make_row([128], 0, 1), "token 128: the vocabulary has 128"),
        (make_row(range(10), 10, 10), "at least one token"),
        (make_row([1] * 257, 0, 257, range(9)), "below the context of 256"),
        (make_row([1], 0, 1, arena=ArenaId("gone")), "arena 'gone': only \\['local', 'peer-7'\\]"),
    ],
)
def test_a_row_out_of_bounds_is_refused_before_anything_is_written(
    tiny_folder: Path, row: Row, message: str
) -> None:
    device = TorchDevice(open_model(tiny_folder), dtype="f32", kv_dtype="f32")
    buffers = [bytearray(NUM_BLOCKS * device.kv_block_bytes) for _ in range(2)]
    device.add_arena(LOCAL_ARENA, memoryview(buffers[0]))
    device.add_arena(PEER_ARENA, memoryview(buffers[1]))
    with pytest.raises(ValueError, match=message):
        forward(device, make_row(range(10), 0, 10, [0]), row)
    assert not any(buffers[0])
    assert not any(buffers[1])


def test_a_row_with_poisoned_kv_fails_alone(tiny_folder: Path) -> None:
    device = make_device(tiny_folder)
    good, bad = make_row(range(9), 8, 9, [0]), make_row(range(9), 8, 9, [1])
    forward(device, make_row(range(9), 0, 8, [0]))
    alone = device.run(Batch(0, (good,))).drawn[0]
    drawn = device.run(Batch(0, (bad, good))).drawn
    assert isinstance(drawn[0].error, InternalError)
    assert drawn[0].token_ids == ()
    assert drawn[1] == alone


def test_run_draws_the_best_token_with_its_logprob(oracle: Oracle, device: TorchDevice) -> None:
    row = make_row(oracle.texts[0], 0, 50)
    assert row.sample is not None
    params = SamplingParams(logprobs=2)
    sample = SampleSpec(params, 0, 50, row.sample.token_ids, 50)
    result = device.run(
        Batch(8, (Row(SequenceId(5), row.arena, row.token_ids, 0, row.blocks, sample),))
    )
    expected = oracle.logits[0][49].astype(np.float64)
    logprobs = expected - np.log(np.exp(expected).sum())
    drawn = result.drawn[0]
    assert (result.step_id, drawn.sequence_id, drawn.token_ids) == (8, 5, (int(expected.argmax()),))
    assert drawn.logprobs[0].drawn == pytest.approx(float(logprobs.max()), abs=TOLERANCE)
    assert result.duration_s > 0


def test_a_removed_arena_lets_go_of_its_buffer(tiny_folder: Path) -> None:
    """A buffer that is exported cannot be resized."""
    device = TorchDevice(open_model(tiny_folder))
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


def test_a_buffer_that_is_no_arena_is_refused(tiny_folder: Path) -> None:
    device = TorchDevice(open_model(tiny_folder))
    for buffer in (bytearray(device.kv_block_bytes + 1), bytearray(), bytes(device.kv_block_bytes)):
        with pytest.raises(ValueError, match="a writable multiple of"):
            device.add_arena(LOCAL_ARENA, memoryview(buffer))


def test_settings_are_checked_and_named(tiny_folder: Path) -> None:
    weights = open_model(tiny_folder)
    with pytest.raises(ConfigError, match="dtype is 'fp16'"):
        TorchDevice(weights, dtype="fp16")
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int8'"):
        TorchDevice(weights, kv_dtype="int8")
    with pytest.raises(ConfigError, match="max_context is 257"):
        TorchDevice(weights, max_context=257)


def test_progress_reaches_the_whole_file(tiny_folder: Path) -> None:
    weights = open_model(tiny_folder)
    seen: list[tuple[int, int]] = []
    device = TorchDevice(weights, progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.data.size for tensor in weights.tensors.values())
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    assert "-int4" not in device.numerics_id
    warm_up(device)
    device.add_arena(LOCAL_ARENA, memoryview(bytearray(device.kv_block_bytes)))
