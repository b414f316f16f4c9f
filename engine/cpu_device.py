"""Executes steps with the compiled CPU step: one call into C per step, no torch.

Python only lays out the rows: tokens end to end, and of each row the addresses of its arena and
block table. C checks all of it before it writes anything.
"""

import ctypes
import struct
import weakref
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt

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
from llmrt.engine.core_share import CoreShare
from llmrt.engine.cpu_cores import num_cores
from llmrt.engine.cpu_program import CpuProgram
from llmrt.engine.device_parts import (
    check_new_arena,
    no_arena,
    out_of_range,
    short_table,
    unknown_arena,
    unknown_block,
    unknown_token,
    wrong_arrays,
)
from llmrt.engine.sampler import draw_row, takes_best
from llmrt.kernels.cpu import library as c
from llmrt.wire.errors import ConfigError

Logits = npt.NDArray[np.float32]
# Changes with anything that changes a bit of a result.
REVISION = 1
_UINT32_BYTES = 4
_MIN_ROWS = 16
# One row as in `c.ROW`: filling a numpy array takes several times as long.
_ROW = struct.Struct("=QqQqqqq")
assert _ROW.size == c.ROW.itemsize


@dataclass(frozen=True, slots=True)
class _Arena:
    """`memory` holds the buffer as long as the arena is known."""

    memory: npt.NDArray[np.uint8]
    address: int
    num_blocks: int


class CpuDevice:
    """A model on the CPU, with the arenas that its steps read and write.

    `numerics_id` names what decides the last bits of a logit: the revision of the kernels, the
    formats of weights and of the KV cache. Families of instructions and threads do not.
    """

    def __init__(
        self,
        program: CpuProgram,
        *,
        family: str | None = None,
        threads: int | None = None,
        share: CoreShare | None = None,
    ) -> None:
        """An engine for `program`, which may be that of other devices, too.

        `family` None is the fastest that this CPU has, `threads` None all physical cores. With a
        `share` a step runs on as many of them as others leave.

        Raises `ConfigError` for a family or number of threads that cannot be used, and
        `LibraryMissing`.
        """
        self.family = choose_family(family)
        self.threads = num_cores() if threads is None else threads
        self.max_context = program.max_context
        self.numerics_id = f"cpu-{REVISION}/{program.formats}/kv-{program.kv_dtype}"
        self._library = c.library()
        self.kv_block_bytes = int(self._library.llmrt_block_bytes(program.address))
        self._vocab_size = program.vocab_size
        self._remedy = program.remedy
        self._engine = self._library.llmrt_engine_new(
            program.address, self.family.number, self.threads
        )
        if not self._engine:
            raise ConfigError(
                f"{self.threads} threads for the CPU step cannot be started: lower threads, or "
                "free memory"
            )
        # The program must outlive the engine.
        weakref.finalize(self, _free, self._library, self._engine, program)
        self._arenas: dict[ArenaId, _Arena] = {}
        self._batch = c.Batch()
        self._bad = ctypes.c_int64()
        self._rows = ctypes.create_string_buffer(0)
        self._logits: Logits = np.empty((0, self._vocab_size), np.float32)
        self._best = np.empty(0, np.int32)
        self._computed_s = 0.0
        self._share = share

    def add_arena(self, arena: ArenaId, buffer: memoryview) -> None:
        """Use `buffer`, which must be writable, in place until `remove_arena`.

        Raises `ValueError` if the arena exists or the buffer is not a whole number of blocks.
        """
        check_new_arena(arena, buffer, self._arenas, self.kv_block_bytes)
        memory = np.frombuffer(buffer, np.uint8)
        num_blocks = memory.size // self.kv_block_bytes
        self._arenas[arena] = _Arena(memory, memory.ctypes.data, num_blocks)

    def remove_arena(self, arena: ArenaId) -> None:
        """Forget an arena and let go of its buffer. Raises `ValueError` if there is none."""
        if self._arenas.pop(arena, None) is None:
            raise no_arena(arena)

    def run(self, batch: Batch) -> StepResult:
        """Execute one step. Raises `ValueError`, with nothing written, if a row is out of bounds.

        A row whose logits are not finite has an `error` in its `Drawn`.
        """
        started = perf_counter()
        num_logits = self._step(batch)
        best = self._best[:num_logits].tolist()
        idx = 0  # of the row's first logits

        def draw(place: int, spec: SampleSpec) -> tuple[int, Logprobs | None]:
            best_id = best[idx + place]
            if best_id >= 0 and takes_best(spec):
                return best_id, None
            return draw_row(self._logits[idx + place], spec, self._remedy)

        drawn: list[Drawn] = []
        for row in batch.rows:
            if row.sample is not None:
                drawn.append(draw_behind(row, row.sample, draw))
                idx += row.num_logits
        return StepResult(batch.step_id, tuple(drawn), perf_counter() - started, self._computed_s)

    def forward(self, batch: Batch) -> Logits:
        """Logits [sum of `num_logits`, vocab] of a step, whose KV is written. Raises as `run`."""
        num_logits = self._step(batch)
        return self._logits[:num_logits].copy()

    def all_logits(self, batch: Batch) -> Logits:
        """Logits [num_tokens, vocab] after every token of a step, `sample` or not.

        They take 4 * vocab bytes per token: compute long texts in several steps. Raises as `run`.
        """
        # Before the buffer is looked up: a step may replace it.
        num_logits = self._step(batch, wants_all=True)
        return self._logits[:num_logits].copy()

    def _step(self, batch: Batch, *, wants_all: bool = False) -> int:
        """Compute a step; its logits and best tokens lie in the first so many of the buffers.

        They are of the last `num_logits` tokens of each row, or of all tokens.
        """
        rows = batch.rows
        if not rows:
            self._computed_s = 0.0
            return 0
        self._reserve_rows(len(rows))
        num_logits = 0
        for i, row in enumerate(rows):
            arena = self._arenas.get(row.arena)
            if arena is None:
                raise unknown_arena(row, self._arenas)
            if not 0 <= row.start < self.max_context:  # also: no more than C's integers hold
                raise out_of_range(row, self.max_context)
            if not row.token_ids.itemsize == row.blocks.itemsize == _UINT32_BYTES:
                raise wrong_arrays(row)
            table, num_table = row.blocks.buffer_info()
            num_tokens = len(row.token_ids)
            num_wanted = num_tokens if wants_all else row.num_logits
            num_logits += num_wanted
            _ROW.pack_into(
                self._rows,
                i * _ROW.size,
                arena.address,
                arena.num_blocks,
                table,
                num_table,
                row.start,
                num_tokens,
                num_wanted,
            )
        self._reserve_logits(num_logits)
        self._batch.num_rows = len(rows)
        self._batch.tokens = b"".join([row.token_ids for row in rows])
        if self._share is not None:
            self._batch.num_threads = self._share.begin()
        called = perf_counter()
        status = self._library.llmrt_step(self._engine, byref(self._batch), byref(self._bad))
        self._computed_s = perf_counter() - called
        if self._share is not None:
            self._share.end()
        if status:
            raise self._fault(rows, status)
        return num_logits

    def _reserve_rows(self, num_rows: int) -> None:
        """Make the buffer that is reused large enough, and tell C where it is."""
        if num_rows * _ROW.size > len(self._rows):
            self._rows = ctypes.create_string_buffer(max(_MIN_ROWS, num_rows) * _ROW.size)
            self._batch.rows = ctypes.addressof(self._rows)

    def _reserve_logits(self, num_logits: int) -> None:
        """As `_reserve_rows`."""
        if num_logits > len(self._best) or not len(self._best):
            count = max(_MIN_ROWS, num_logits)
            self._logits = np.empty((count, self._vocab_size), np.float32)
            self._best = np.empty(count, np.int32)
            self._batch.logits = self._logits.ctypes.data
            self._batch.best = self._best.ctypes.data

    def _fault(self, rows: Sequence[Row], status: int) -> Exception:
        """What C refused, in words; `_bad` has the row."""
        if status == c.StepError.NO_MEMORY:
            return MemoryError(f"a step of {sum(len(row.token_ids) for row in rows)} tokens")
        row = rows[self._bad.value]
        if status == c.StepError.BAD_RANGE:
            return out_of_range(row, self.max_context)
        if status == c.StepError.BAD_TABLE:
            return short_table(row)
        if status == c.StepError.BAD_BLOCK:
            return unknown_block(row, self._arenas[row.arena].num_blocks)
        if status == c.StepError.BAD_TOKEN:
            return unknown_token(row, self._vocab_size)
        return AssertionError(f"llmrt_step says {status} of sequence {row.sequence_id}")


def choose_family(name: str | None) -> c.Family:
    """The family of that name, or the fastest. Raises `ConfigError` if this CPU lacks it."""
    if name is None:
        return c.best_family()
    usable = [family for family in c.families() if family.is_supported]
    for family in usable:
        if family.name == name:
            return family
    names = ", ".join(family.name for family in usable)
    raise ConfigError(f"cpu_family is {name!r}: this CPU and build can run {names}")


def _free(library: ctypes.CDLL, engine: int, program: CpuProgram) -> None:
    """`program` is here so that it lives until now."""
    library.llmrt_engine_free(engine)
