"""llmrt in process: the device alone, without scheduler, broker or client."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workload import Clock, Prompt, measure, parse_options

import llmrt
from llmrt.engine.batch import LOCAL_ARENA, Batch, Row, SampleSpec, SequenceId
from llmrt.engine.cpu_device import CpuDevice
from llmrt.engine.cpu_program import load_program
from llmrt.kvtransfer.layout import blocks_for
from llmrt.models.loading import open_model
from llmrt.wire.sampling import SamplingParams

if TYPE_CHECKING:  # the compiled path imports no torch
    from llmrt.engine.torch_device import TorchDevice

# A worker's default.
_STEP_TOKENS = 512


def open_device(path: Path, threads: int) -> CpuDevice:
    """As a worker makes it with its default settings."""
    opened = open_model(path)
    program, _ = load_program(
        opened, dtype="auto", kv_dtype="bf16", max_context=opened.spec.max_context
    )
    return CpuDevice(program, threads=threads)


def measure_llmrt_in_process(
    device: "CpuDevice | TorchDevice", prompts: Sequence[Prompt], new_tokens: int
) -> Clock:
    """Prefill all prompts, then decode all of them in one batch per step."""
    blocks_each = blocks_for(len(prompts[0]) + new_tokens)
    texts = [array("I", prompt) for prompt in prompts]
    tables = [array("I", range(i, i + blocks_each)) for i in _starts(len(prompts), blocks_each)]
    buffer = bytearray(len(prompts) * blocks_each * device.kv_block_bytes)
    device.add_arena(LOCAL_ARENA, memoryview(buffer))
    clock = Clock(len(prompts))
    num_prompt, num_done = len(prompts[0]), 0
    step_tokens = max(1, _STEP_TOKENS // len(prompts))
    while len(texts[0]) < num_prompt + new_tokens:
        end = min(num_done + step_tokens, len(texts[0]))
        rows = tuple(
            _row(i, text, num_done, end, tables[i], num_prompt) for i, text in enumerate(texts)
        )
        for drawn in device.run(Batch(num_done, rows)).drawn:
            texts[drawn.sequence_id].append(drawn.token_ids[0])
            clock.token(drawn.sequence_id)
        num_done = end
    device.remove_arena(LOCAL_ARENA)
    return clock


def _starts(num_streams: int, blocks_each: int) -> range:
    return range(0, num_streams * blocks_each, blocks_each)


def _row(
    idx: int, text: "array[int]", start: int, end: int, table: "array[int]", num_prompt: int
) -> Row:
    """Positions `start` to `end` of a sequence; the last ones of all draw a token."""
    sample = SampleSpec(SamplingParams(), 0, end, text, num_prompt) if end == len(text) else None
    return Row(SequenceId(idx), LOCAL_ARENA, text[start:end], start, table, sample)


def main() -> None:
    options = parse_options()
    device = open_device(Path(options.model), options.threads)
    version = f"llmrt {llmrt.__version__} {device.numerics_id} {device.family.name}"
    measure(
        options,
        version,
        lambda prompts, new_tokens: measure_llmrt_in_process(device, prompts, new_tokens),
    )


if __name__ == "__main__":
    main()
