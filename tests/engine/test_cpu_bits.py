"""The compiled step against itself, bit by bit.

Chunking, batching, threads, families, arenas and prefixes that are there already must not change
one bit of a logit or of the KV cache, whatever the formats of both.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from msgspec.structs import replace as changed
from tests.engine.cpu_programs import (
    KV_DTYPES,
    USABLE,
    assert_same_bits,
    make_device,
    make_program,
    poisoned,
)
from tests.engine.tiny_models import PEER_ARENA, VOCAB, Logits, forward, make_row

from llmrt.engine.batch import LOCAL_ARENA, ArenaId
from llmrt.engine.core_share import CoreShare
from llmrt.engine.cpu_device import CpuDevice
from llmrt.engine.cpu_program import CpuProgram
from llmrt.kernels.cpu.library import Format
from llmrt.models.loading import OpenedModel, open_model
from llmrt.models.quants import dequantize
from llmrt.models.tensors import StoredTensor
from llmrt.wire.kv import BLOCK_TOKENS

# Past two segments of 8 blocks, and into a block.
LONG = 2 * 8 * BLOCK_TOKENS + 45
LONG_CONTEXT = 1024


def quantized(model: OpenedModel, kind_of: Callable[[str], str]) -> OpenedModel:
    """The model with its matrices in the kind that `kind_of` gives each name."""
    tensors = dict(model.tensors)
    for name, tensor in model.tensors.items():
        kind = kind_of(name)
        if len(tensor.shape) == 2:
            data = gguf.quants.quantize(dequantize(tensor), gguf.GGMLQuantizationType[kind])
            tensors[name] = StoredTensor(name, tensor.shape, kind, data.reshape(-1).view(np.uint8))
    long = replace(model.spec, max_context=LONG_CONTEXT)
    return replace(model, spec=long, tensors=tensors)


def mixed(name: str) -> str:
    """As in files that give more bits to what matters: no two of q, k and v alike."""
    kinds = {"q": "Q4_0", "k": "F16", "v": "Q8_0", "gate": "Q4_1", "down": "Q5_1", "o": "BF16"}
    return kinds.get(name.rpartition(".")[2], "Q8_0")


WEIGHTS: Mapping[str, tuple[str, Callable[[str], str], str]] = {
    "q4": ("gemma3_text", lambda name: "Q4_0", "auto"),
    "q4m": ("gemma3_text", lambda name: "Q4_1", "auto"),
    "q8": ("mistral", lambda name: "Q8_0", "auto"),
    "q8m": ("qwen3", lambda name: "Q5_1", "auto"),
    "bf16": ("qwen2", lambda name: "F32", "bf16"),
    "f32": ("gemma3_text", lambda name: "F32", "f32"),
    "mixed": ("qwen2", mixed, "auto"),
}


@dataclass(frozen=True)
class Exact:
    """A program, a text, its logits after each token of `ends`, and its KV cache.

    Computed alone, at once up to each end, by one thread of the best family.
    """

    program: CpuProgram
    text: list[int]
    ends: tuple[int, ...]
    logits: Mapping[int, Logits]
    kv: bytes

    blocks = tuple(range(3, 3 + -(-LONG // BLOCK_TOKENS)))

    def check(self, device: CpuDevice, chunks: Sequence[int], arena: ArenaId) -> None:
        for start, end in itertools.pairwise([0, *chunks]):
            logits = forward(device, make_row(self.text, start, end, self.blocks, arena))
            if end in self.logits:
                assert_same_bits(logits[0], self.logits[end])


def kv_of(device: CpuDevice, memory: memoryview, blocks: Sequence[int]) -> bytes:
    """The bytes of a sequence's blocks; the tail of the last one is the same poison in all."""
    size = device.kv_block_bytes
    return b"".join(bytes(memory[block * size : (block + 1) * size]) for block in blocks)


@pytest.fixture(scope="module", params=list(itertools.product(WEIGHTS, KV_DTYPES)), ids="-".join)
def exact(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Exact:
    weights, kv_dtype = request.param
    family, kind_of, dtype = WEIGHTS[weights]
    model = quantized(open_model(folder_of(family)), kind_of)
    program = make_program(model, dtype, kv_dtype)
    text = np.random.default_rng(len(weights)).integers(0, VOCAB, LONG).tolist()
    ends = (1, 32, 33, 255, 256, 257, 300, LONG)
    logits = {}
    for end in ends:
        device = CpuDevice(program, threads=1)
        memory = poisoned(device)
        device.add_arena(LOCAL_ARENA, memory)
        logits[end] = forward(device, make_row(text, 0, end, Exact.blocks))[0]
        assert np.isfinite(logits[end]).all()
    return Exact(program, text, ends, logits, kv_of(device, memory, Exact.blocks))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_chunks_change_no_bit(exact: Exact, threads: int) -> None:
    device = CpuDevice(exact.program, threads=threads)
    memory = poisoned(device)
    device.add_arena(LOCAL_ARENA, memory)
    exact.check(device, exact.ends, LOCAL_ARENA)
    assert kv_of(device, memory, exact.blocks) == exact.kv
    exact.check(device, (64, 65, 66, 69, 250, 255, 256, 257, 300, 500, LONG), LOCAL_ARENA)
    exact.check(device, (LONG,), LOCAL_ARENA)
    assert kv_of(device, memory, exact.blocks) == exact.kv


def test_threads_that_come_and_go_between_steps_change_no_bit(
    exact: Exact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = CoreShare(tmp_path, 4)
    counts = itertools.cycle((4, 1, 2, 3, 1, 4, 2))
    monkeypatch.setattr(share, "begin", lambda: next(counts))
    device = CpuDevice(exact.program, threads=4, share=share)
    memory = poisoned(device)
    device.add_arena(LOCAL_ARENA, memory)
    for _ in range(3):
        exact.check(device, (*range(5, LONG, 5), LONG), LOCAL_ARENA)
    assert kv_of(device, memory, exact.blocks) == exact.kv


@pytest.mark.parametrize("family", USABLE[1:] or USABLE)
def test_families_change_no_bit(exact: Exact, family: str) -> None:
    device = CpuDevice(exact.program, family=family, threads=2)
    memory = poisoned(device)
    device.add_arena(LOCAL_ARENA, memory)
    exact.check(device, exact.ends, LOCAL_ARENA)
    assert kv_of(device, memory, exact.blocks) == exact.kv


def test_company_in_a_batch_changes_no_bit(exact: Exact) -> None:
    """16 rows: the text in both arenas, chunk by chunk, among others that decode and prefill."""
    device = make_device(exact.program, threads=2)
    rng = np.random.default_rng(1)
    others = [rng.integers(0, VOCAB, 48).tolist() for _ in range(15)]
    for i, text in enumerate(others):
        forward(device, make_row(text, 0, 16 + i, [34 + 2 * i, 35 + 2 * i]))
    start = 0
    for n, end in enumerate(exact.ends):
        company = [
            make_row(text, 16 + i + n, 17 + i + n + (7 if i == n else 0), [34 + 2 * i, 35 + 2 * i])
            for i, text in enumerate(others)
        ]
        row = make_row(exact.text, start, end, exact.blocks)
        logits = forward(device, *company[:n], row, *company[n:])
        assert_same_bits(logits[n], exact.logits[end])
        start = end


def test_a_prefix_that_is_there_already_changes_no_bit(exact: Exact) -> None:
    """The last token of a full prefix is computed again, over blocks that others share."""
    device = make_device(exact.program)
    forward(device, make_row(exact.text, 0, 512, exact.blocks, PEER_ARENA))
    for start in (256, 300, 511):
        own = [*exact.blocks[: start // BLOCK_TOKENS], *range(40, 60)]
        if start % BLOCK_TOKENS:
            first = start // BLOCK_TOKENS * BLOCK_TOKENS
            forward(device, make_row(exact.text, first, start, own, PEER_ARENA))
        logits = forward(device, make_row(exact.text, start, LONG, own, PEER_ARENA))
        assert_same_bits(logits[0], exact.logits[LONG])


@pytest.mark.parametrize("family", USABLE)
def test_drafts_change_no_bit(exact: Exact, family: str) -> None:
    """Logits behind each, and the KV of those accepted and of what is written over rejected ones.

    A row has one token and 16 drafts, of which the first so many are right.
    """
    device, plain = (CpuDevice(exact.program, family=family, threads=2) for _ in range(2))
    memory = poisoned(device)
    device.add_arena(LOCAL_ARENA, memory)
    plain.add_arena(LOCAL_ARENA, poisoned(plain))
    wrong = [(token + 1) % VOCAB for token in exact.text]
    start = 250
    for one in (device, plain):
        forward(one, make_row(exact.text, 0, start, exact.blocks))
    for num_right in (0, 3, 16, 0, 1, 16):
        end = start + 1 + num_right
        text = exact.text[:end] + wrong[end:]
        row = make_row(text, start, start + 17, exact.blocks)
        logits = forward(device, changed(row, num_drafts=16))
        one_by_one = [
            forward(plain, make_row(exact.text, i, i + 1, exact.blocks))[0]
            for i in range(start, end)
        ]
        assert_same_bits(logits[: num_right + 1], np.stack(one_by_one))
        start = end
    logits = forward(device, make_row(exact.text, start, LONG, exact.blocks))
    assert_same_bits(logits[0], exact.logits[LONG])
    assert kv_of(device, memory, exact.blocks) == exact.kv


def test_formats_are_what_the_numerics_are_named_for(exact: Exact) -> None:
    device = CpuDevice(exact.program, threads=1)
    assert device.numerics_id == f"cpu-1/{exact.program.formats}/kv-{exact.program.kv_dtype}"
    known = {format_.name.lower() for format_ in Format}
    assert set(exact.program.formats.split(".")) <= known
