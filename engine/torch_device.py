"""Executes steps with torch: the reference device, and the path where no compiled step runs.

A batch of any prefill chunks and decodes is one forward over its tokens laid end to end: the
products with weights see all of them at once, attention goes row by row or decodes together.
"""

from collections.abc import Callable
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch

from llmrt.engine.batch import (
    ArenaId,
    Batch,
    Drawn,
    Logprobs,
    Row,
    SampleSpec,
    StepResult,
    draw_behind,
)
from llmrt.engine.device_parts import (
    check_new_arena,
    no_arena,
    out_of_range,
    short_table,
    unknown_arena,
    unknown_block,
    unknown_token,
)
from llmrt.engine.sampler import draw_row
from llmrt.engine.torch_decoder import TorchDecoder
from llmrt.engine.torch_step import TorchStep
from llmrt.kernels.torch_attention import Pages, arena_pages
from llmrt.kernels.torch_linear import compute_dtype, multiplies_bf16, reads_half
from llmrt.models.tensors import WeightFile
from llmrt.wire.errors import ConfigError
from llmrt.wire.kv import BLOCK_TOKENS

_KV_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
_DTYPES = ("auto", "bf16", "f32")


class TorchDevice:
    """A model on the CPU's torch, with the arenas that its steps read and write.

    `numerics_id` names what decides the last bits of a logit: torch's version, how weights are
    multiplied, the KV format and the instruction set.
    """

    def __init__(
        self,
        weights: WeightFile,
        *,
        dtype: str = "auto",
        kv_dtype: str = "bf16",
        max_context: int | None = None,
        threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Converts the weights, which takes seconds; `weights` is not used afterwards.

        `dtype` auto multiplies 4-bit weights as they are and others in bf16; bf16 stands for
        float32 products on a CPU without bf16 instructions. `max_context` None is the model's.
        `threads` None leaves torch's number. `progress` gets bytes of the file, done and in all.
        Raises `ConfigError` for values that cannot be used.
        """
        spec = weights.spec
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype is {dtype!r}: one of {', '.join(_DTYPES)} is needed")
        if kv_dtype not in _KV_DTYPES:
            raise ConfigError(
                f"kv_cache_dtype is {kv_dtype!r}: one of {', '.join(_KV_DTYPES)} is needed"
            )
        self.max_context = spec.max_context if max_context is None else max_context
        if not 0 < self.max_context <= spec.max_context:
            raise ConfigError(
                f"max_context is {max_context}: from 1 to the model's {spec.max_context} is needed"
            )
        if threads is not None:
            torch.set_num_threads(threads)
        attention = spec.attention
        self._vocab_size = spec.vocab_size
        self._kv_dtype = _KV_DTYPES[kv_dtype]
        self._prefill_dtype = compute_dtype(dtype)
        self._page_shape = {
            "num_layers": spec.num_layers,
            "num_kv_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
            "block_tokens": BLOCK_TOKENS,
        }
        self.kv_block_bytes = (
            2
            * spec.num_layers
            * attention.num_kv_heads
            * attention.head_dim
            * BLOCK_TOKENS
            * self._kv_dtype.itemsize
        )
        self._layers = [layer.attention for layer in spec.layers]
        self._arenas: dict[ArenaId, Pages] = {}
        with torch.inference_mode():
            self._decoder = TorchDecoder(weights, dtype, progress)
        self.numerics_id = _numerics_id(dtype, kv_dtype, has_int4=self._decoder.has_int4)

    def add_arena(self, arena: ArenaId, buffer: memoryview) -> None:
        """Use `buffer`, which must be writable, in place until `remove_arena`.

        Raises `ValueError` if the arena exists or the buffer is not a whole number of blocks.
        """
        check_new_arena(arena, buffer, self._arenas, self.kv_block_bytes)
        flat = torch.frombuffer(buffer, dtype=self._kv_dtype)
        self._arenas[arena] = arena_pages(flat, **self._page_shape)

    def remove_arena(self, arena: ArenaId) -> None:
        """Forget an arena and let go of its buffer. Raises `ValueError` if there is none."""
        if self._arenas.pop(arena, None) is None:
            raise no_arena(arena)

    def run(self, batch: Batch) -> StepResult:
        """Execute one step. Raises `ValueError`, with nothing written, if a row is out of bounds.

        A row whose logits are not finite has an `error` in its `Drawn`.
        """
        started = perf_counter()
        logits = self.forward(batch)
        computed_s = perf_counter() - started
        idx = 0  # of the row's first logits

        def draw(place: int, spec: SampleSpec) -> tuple[int, Logprobs | None]:
            return draw_row(logits[idx + place], spec)

        drawn: list[Drawn] = []
        for row in batch.rows:
            if row.sample is not None:
                drawn.append(draw_behind(row, row.sample, draw))
                idx += row.num_logits
        return StepResult(batch.step_id, tuple(drawn), perf_counter() - started, computed_s)

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Logits [sum of `num_logits`, vocab] of a step, whose KV is written. Raises as `run`."""
        for row in batch.rows:
            self._check(row)
        if not batch.rows:
            return np.empty((0, self._vocab_size), np.float32)
        with torch.inference_mode():
            step = TorchStep(batch.rows, self._arenas, self._layers, self._prefill_dtype)
            hidden = self._decoder.hidden(step.token_ids, step.positions, step.attend)
            if not len(step.sampled):
                return np.empty((0, self._vocab_size), np.float32)
            return self._decoder.logits(hidden[step.sampled]).numpy()

    def _check(self, row: Row) -> None:
        pages = self._arenas.get(row.arena)
        if pages is None:
            raise unknown_arena(row, self._arenas)
        end = row.start + len(row.token_ids)
        if not 0 <= row.start < end <= self.max_context:
            raise out_of_range(row, self.max_context)
        if len(row.blocks) * BLOCK_TOKENS < end:
            raise short_table(row)
        num_blocks = pages.heads.shape[0]
        if not 0 <= min(row.blocks) <= max(row.blocks) < num_blocks:
            raise unknown_block(row, num_blocks)
        if not 0 <= min(row.token_ids) <= max(row.token_ids) < self._vocab_size:
            raise unknown_token(row, self._vocab_size)


def _numerics_id(dtype: str, kv_dtype: str, *, has_int4: bool) -> str:
    version = torch.__version__.partition("+")[0]
    products = "f32" if dtype == "f32" else "bf16"
    half = "-f16" * (dtype == "auto" and reads_half())
    isa = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")
    return (
        f"torch-{version}-{products}{'-int4' * has_int4}{half}"
        f"/kv-{kv_dtype}/cpu-{isa}{'-bf16' * multiplies_bf16()}"
    )
