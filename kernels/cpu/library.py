"""The compiled step as Python sees it: `abi.h` in ctypes, and the library itself.

Whoever hands out an address keeps what lies there alive: ctypes does not.
"""

import ctypes
from ctypes import c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ABI = 2
GROUP = 32
STRIP = 16
ALIGNMENT = 64
OUT_LOGITS = -1
PATH = Path(__file__).with_name("libllmrt_cpu.so")

Bytes = npt.NDArray[np.uint8]


class LibraryMissing(ImportError):
    """The compiled step is not there or does not fit; the message has the remedy."""


class Format(IntEnum):
    """Packed weights."""

    Q4 = 0
    Q4M = 1
    Q8 = 2
    Q8M = 3
    BF16 = 4
    F32 = 5


class Source(IntEnum):
    """Storage kinds that can be packed, named as in `StoredTensor.kind`."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q4_0 = 3
    Q4_1 = 4
    Q5_0 = 5
    Q5_1 = 6
    Q8_0 = 7
    Q4_K = 8
    Q5_K = 9
    Q6_K = 10


class KvFormat(IntEnum):
    """Numbers of the KV cache; the last two have float32 scales."""

    BF16 = 0
    F32 = 1
    INT8 = 2
    FP8 = 3


class OpKind(IntEnum):
    EMBED = 0
    LINEAR = 1
    ROPE = 2
    ATTEND = 3
    ADD_NORM = 4


class Epilogue(IntEnum):
    """What a product does with its result; the last two take gate and up in turn."""

    STORE = 0
    ADD = 1
    SILU = 2
    GELU_TANH = 3


class StepError(IntEnum):
    OK = 0
    BAD_RANGE = 1
    BAD_TABLE = 2
    BAD_BLOCK = 3
    BAD_TOKEN = 4
    BAD_LOGITS = 5
    NO_MEMORY = 6


class Weight(ctypes.Structure):
    _fields_ = (("rows", c_int64), ("columns", c_int64), ("format", c_int64), ("data", c_void_p))


class Op(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32),
        ("in_", c_int32),
        ("out", c_int32),
        ("out_column", c_int32),
        ("epilogue", c_int32),
        ("is_prepared", c_int32),
        ("weight", c_void_p),
        ("norm", c_void_p),
        ("bias", c_void_p),
        ("eps", c_float),
        ("scale", c_float),
        ("layer", c_int32),
        ("rope", c_int32),
        ("window", c_int64),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
    )


class Rope(ctypes.Structure):
    _fields_ = (
        ("inv_freq", c_void_p),
        ("rotary_dim", c_int32),
        ("is_interleaved", c_int32),
        ("factor", c_float),
    )


class Program(ctypes.Structure):
    _fields_ = (
        ("num_ops", c_int64),
        ("ops", c_void_p),
        ("num_buffers", c_int64),
        ("widths", c_void_p),
        ("num_ropes", c_int64),
        ("ropes", c_void_p),
        ("num_layers", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("kv_format", c_int64),
        ("vocab_size", c_int64),
        ("max_context", c_int64),
    )


ROW = np.dtype(
    [
        ("arena", np.uintp),
        ("num_blocks", np.int64),
        ("blocks", np.uintp),
        ("num_table", np.int64),
        ("start", np.int64),
        ("num_tokens", np.int64),
        ("num_logits", np.int64),
    ]
)
"""`llmrt_row`: rows are filled as an array at once, which ctypes does one field at a time."""


class Batch(ctypes.Structure):
    _fields_ = (
        ("num_rows", c_int64),
        ("rows", c_void_p),
        ("tokens", c_char_p),
        ("logits", c_void_p),
        ("best", c_void_p),
        ("num_threads", c_int64),
    )


@dataclass(frozen=True, slots=True)
class Family:
    """A set of instructions that the step is compiled for; `is_supported` by this CPU."""

    number: int
    name: str
    is_supported: bool


# Weights per block of a source, and its bytes.
_SOURCE_BLOCKS = {
    Source.F32: (1, 4),
    Source.F16: (1, 2),
    Source.BF16: (1, 2),
    Source.Q4_0: (32, 18),
    Source.Q4_1: (32, 20),
    Source.Q5_0: (32, 22),
    Source.Q5_1: (32, 24),
    Source.Q8_0: (32, 34),
    Source.Q4_K: (256, 144),
    Source.Q5_K: (256, 176),
    Source.Q6_K: (256, 210),
}
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llmrt_abi": (c_int, ()),
    "llmrt_family_name": (c_char_p, (c_int,)),
    "llmrt_family_supported": (c_int, (c_int,)),
    "llmrt_engine_new": (c_void_p, (c_void_p, c_int, c_int)),
    "llmrt_engine_free": (None, (c_void_p,)),
    "llmrt_step": (c_int, (c_void_p, c_void_p, c_void_p)),
    "llmrt_block_bytes": (c_int64, (c_void_p,)),
    "llmrt_packed_bytes": (c_int64, (c_int64, c_int64, c_int64)),
    "llmrt_pack": (c_int, (c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64)),
}


@cache
def library() -> ctypes.CDLL:
    """The compiled step, loaded once. Raises `LibraryMissing`."""
    if not PATH.exists():
        raise LibraryMissing(
            f"the compiled CPU step is not built ({PATH.name} is missing): install a C compiler "
            "(apt install gcc) and llmrt again (scripts/setup, or pip install)"
        )
    try:
        loaded = ctypes.CDLL(str(PATH))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise LibraryMissing(f"the compiled CPU step cannot be used: {error}. {_AGAIN}") from None
    found = loaded.llmrt_abi()
    if found != ABI:
        raise LibraryMissing(f"{PATH} has interface {found}, {ABI} is needed. {_AGAIN}")
    return loaded


_AGAIN = "Install llmrt again (scripts/setup, or pip install)"


def families() -> list[Family]:
    """What the step was compiled for, the fastest first. Raises `LibraryMissing`."""
    loaded = library()
    found: list[Family] = []
    while (name := loaded.llmrt_family_name(len(found))) is not None:
        number = len(found)
        is_supported = bool(loaded.llmrt_family_supported(number))
        found.append(Family(number, name.decode(), is_supported))
    return found


def best_family() -> Family:
    """The fastest family of this CPU. Raises `LibraryMissing` if it has none of them."""
    found = families()
    for family in found:
        if family.is_supported:
            return family
    names = ", ".join(family.name for family in found)
    raise LibraryMissing(f"the compiled CPU step has {names}: this CPU can run none of them")


def packed_bytes(rows: int, columns: int, format: Format) -> int:
    """Size of a packed weight; rows are filled up to a multiple of 16."""
    return int(library().llmrt_packed_bytes(rows, columns, format))


def pack(
    source: Source,
    data: Bytes,
    rows: int,
    columns: int,
    format: Format,
    out: Bytes,
    step: int = 1,
) -> None:
    """Pack a stored weight [rows, columns] into `out`, strip i at place i * `step`.

    Lets other threads run. Raises `ValueError` if the source cannot become `format`, or a buffer
    is too small or not contiguous.
    """
    weights, size = _SOURCE_BLOCKS[source]
    if columns % max(weights, GROUP) or data.size != rows * (columns // weights) * size:
        raise ValueError(f"{data.size} bytes are no {source.name} weight [{rows}, {columns}]")
    strip_bytes = packed_bytes(STRIP, columns, format)
    num_strips = -(-rows // STRIP)
    needed = ((num_strips - 1) * step + 1) * strip_bytes
    if rows < 1 or step < 1 or out.size < needed:
        raise ValueError(f"{out.size} bytes: a packed weight [{rows}, {columns}] needs {needed}")
    if not (data.flags.c_contiguous and out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("a weight is packed from contiguous bytes to contiguous, writable ones")
    status = library().llmrt_pack(
        source, data.ctypes.data, rows, columns, format, out.ctypes.data, step
    )
    if status:
        raise ValueError(f"{source.name} weights cannot be packed as {format.name}")
