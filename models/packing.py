"""Weights as the compiled step reads them: repacked once, still quantized.

What a kind becomes, and the error of a weight, relative to the largest one of its group of 32
(measured on 2 million Gaussian weights):

                          max      rms
    Q4_0           Q4     exact
    Q4_1           Q4M    exact
    Q5_0, Q8_0     Q8     exact
    Q5_1           Q8M    exact
    Q4_K           Q4M    1.4e-3   2.8e-4   scale and minimum of 32 rounded to float16
    Q5_K           Q8M    1.4e-3   2.8e-4   the same
    Q6_K           Q8     8.3e-3   1.6e-3   of two scales per 32 the larger stays; weights of the
                                            other become multiples of a quarter of it
    BF16           BF16   exact
    F16, F32, F64  BF16   3.9e-3   7.3e-4   rounded to 8 bits
    F*, BF16       Q8     3.9e-3   2.2e-3   if asked for: multiples of a 127th of the largest

So Q6_K, whose own error is 1.9 % of the weights (rms), has 2 % more of that. float16 scales below
2**-14 are multiples of 2**-24, those above 65504 become 65504. Where weights are quantized to 8
bits, a group with one that is not finite or above 8.3 million becomes NaN. No file that works
has either.
"""

import hashlib
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from llmrt.kernels.cpu.library import ALIGNMENT, GROUP, STRIP, Format, Source, pack, packed_bytes
from llmrt.models.quants import BLOCK_OF_KIND, dequantize, dequantize_rows
from llmrt.models.tensors import StoredTensor
from llmrt.wire.errors import ModelError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Called with bytes of source that are packed, and all of them."""

# Enough for a progress bar of a small model, and far above what handing out a piece costs.
_PIECE_BYTES = 1 << 20

_FORMAT_OF_KIND = {
    "F32": Format.BF16,
    "F16": Format.BF16,
    "BF16": Format.BF16,
    "F64": Format.BF16,
    "Q4_0": Format.Q4,
    "Q4_1": Format.Q4M,
    "Q5_0": Format.Q8,
    "Q5_1": Format.Q8M,
    "Q8_0": Format.Q8,
    "Q4_K": Format.Q4M,
    "Q5_K": Format.Q8M,
    "Q6_K": Format.Q8,
}


@dataclass(frozen=True, slots=True)
class PackRequest:
    """Matrices of a model, by canonical name, that become one packed weight.

    Their rows follow each other; if `is_interleaved`, strips of 16 rows take turns.
    """

    name: str
    parts: tuple[str, ...]
    format: Format
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A weight as in `abi.h`: `rows` are filled up with zeros, `data` is aligned to 64 bytes."""

    format: Format
    rows: int
    columns: int
    data: Bytes


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Views of one buffer: packed weights by the names of their requests, and all vectors of the
    model (norms, biases) by canonical name, as float32.

    `path` is the file that is mapped; None: memory of this process. With a file, or if it was
    tried, `weights_hash` is that of the model and `notes` are facts to log once.
    """

    tensors: Mapping[str, PackedTensor]
    vectors: Mapping[str, Floats]
    weights_hash: str = ""
    path: Path | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """Where a weight lies, or a vector (`format` is None), and what it is made of."""

    name: str
    parts: tuple[str, ...]
    kinds: tuple[str, ...]
    format: Format | None
    is_interleaved: bool
    rows: int
    columns: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The layout of a buffer: a function of the model's shapes and kinds and of the requests."""

    segments: tuple[Segment, ...]
    size_bytes: int

    def digest(self) -> str:
        """Hex SHA-256."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of a part, and where its strips begin; every `step`th place is theirs."""

    tensor: StoredTensor
    first: int
    last: int
    format: Format
    out: Bytes
    step: int


def format_of(kind: str) -> Format:
    """What weights of a storage kind are packed as if nothing else is wished."""
    return _FORMAT_OF_KIND[kind]


def pack_weights(
    tensors: Mapping[str, StoredTensor],
    requests: Iterable[PackRequest],
    progress: Progress | None = None,
    *,
    num_threads: int = 2,
) -> PackedWeights:
    """Pack into memory of this process. Raises `ModelError` as `make_plan` does."""
    plan = make_plan(tensors, requests)
    buffer = mmap.mmap(-1, plan.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(buffer, np.uint8)
    fill(plan, tensors, data, progress, num_threads=num_threads)
    data.flags.writeable = False
    return views(plan, data)


def make_plan(tensors: Mapping[str, StoredTensor], requests: Iterable[PackRequest]) -> Plan:
    """Segments for `requests`, and for every vector.

    Raises `ModelError` naming the weights if shapes do not go together: columns that are equal
    and a multiple of 32, rows that are a multiple of 16 in all parts but the last (if they take
    turns: equal rows), and a format that the kinds can become.
    """
    segments: list[Segment] = []
    offset = 0
    for request in requests:
        segments.append(_matrix(request, [tensors[name] for name in request.parts], offset))
        offset = _aligned(offset + segments[-1].size_bytes)
    for name, tensor in tensors.items():
        if len(tensor.shape) == 1:
            segments.append(_vector(name, tensor, offset))
            offset = _aligned(offset + segments[-1].size_bytes)
    return Plan(tuple(segments), offset)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _vector(name: str, tensor: StoredTensor, offset: int) -> Segment:
    (length,) = tensor.shape
    return Segment(name, (name,), (tensor.kind,), None, False, 1, length, offset, 4 * length)


def _matrix(request: PackRequest, parts: list[StoredTensor], offset: int) -> Segment:
    problem = _problem(request, parts)
    if problem:
        shapes = ", ".join(f"{part.name} {part.kind} {list(part.shape)}" for part in parts)
        raise ModelError(
            f"{shapes} cannot be packed as {request.format.name}: {problem}; "
            "use --device torch for this model"
        )
    rows, columns = sum(_padded(part) for part in parts), parts[0].shape[1]
    return Segment(
        name=request.name,
        parts=request.parts,
        kinds=tuple(part.kind for part in parts),
        format=request.format,
        is_interleaved=request.is_interleaved,
        rows=rows,
        columns=columns,
        offset=offset,
        size_bytes=packed_bytes(rows, columns, request.format),
    )


def _padded(part: StoredTensor) -> int:
    return -(-part.shape[0] // STRIP) * STRIP


def _problem(request: PackRequest, parts: list[StoredTensor]) -> str:
    """What does not go together, or nothing."""
    shapes = [part.shape for part in parts]
    if any(len(shape) != 2 for shape in shapes) or len({shape[1] for shape in shapes}) != 1:
        return "matrices with equal columns are needed"
    if shapes[0][1] % GROUP:
        return f"columns must be a multiple of {GROUP}"
    if request.is_interleaved and len({shape[0] for shape in shapes}) != 1:
        return "equal rows are needed"
    if not request.is_interleaved and any(shape[0] % STRIP for shape in shapes[:-1]):
        return f"rows must be a multiple of {STRIP}"
    kinds = {part.kind for part in parts if not can_become(part.kind, request.format)}
    return f"{', '.join(sorted(kinds))} does not become {request.format.name}" if kinds else ""


def can_become(kind: str, format: Format) -> bool:
    """Whether weights of a storage kind can be packed as `format`: 4 bits only from 4 bits."""
    if format == Format.Q4:
        return kind == "Q4_0"
    return format != Format.Q4M or kind in ("Q4_0", "Q4_1", "Q4_K")


def views(plan: Plan, data: Bytes) -> PackedWeights:
    """What a filled buffer holds; `data` is that of the plan, aligned to 64 bytes."""
    tensors, vectors = {}, {}
    for segment in plan.segments:
        part = data[segment.offset : segment.offset + segment.size_bytes]
        if segment.format is None:
            vectors[segment.name] = part.view("<f4")
        else:
            tensors[segment.name] = PackedTensor(
                segment.format, segment.rows, segment.columns, part
            )
    return PackedWeights(tensors, vectors)


def fill(
    plan: Plan,
    tensors: Mapping[str, StoredTensor],
    data: Bytes,
    progress: Progress | None = None,
    *,
    num_threads: int = 2,
) -> None:
    """Pack `tensors` into `data`, which has the plan's size and is all zeros."""
    pieces: list[_Piece] = []
    for segment in plan.segments:
        out = data[segment.offset : segment.offset + segment.size_bytes]
        if segment.format is None:
            out.view("<f4")[:] = dequantize(tensors[segment.name])
        else:
            pieces += _pieces(segment, segment.format, tensors, out)
    total = sum(_source_bytes(piece) for piece in pieces)
    done = 0
    with ThreadPoolExecutor(num_threads, thread_name_prefix="pack") as pool:
        for piece, _ in zip(pieces, pool.map(_pack_piece, pieces), strict=True):
            done += _source_bytes(piece)
            if progress is not None:
                progress(done, total)


def _pieces(
    segment: Segment, format: Format, tensors: Mapping[str, StoredTensor], out: Bytes
) -> Iterator[_Piece]:
    """All parts of a packed weight, in pieces of whole strips."""
    strip_bytes = packed_bytes(STRIP, segment.columns, format)
    step = len(segment.parts) if segment.is_interleaved else 1
    place = 0
    for name in segment.parts:
        tensor = tensors[name]
        num_rows = tensor.shape[0]
        rows = max(1, _PIECE_BYTES // _row_bytes(tensor) // STRIP) * STRIP
        for first in range(0, num_rows, rows):
            start = (place + first // STRIP * step) * strip_bytes
            last = min(num_rows, first + rows)
            yield _Piece(tensor, first, last, format, out[start:], step)
        place += 1 if segment.is_interleaved else _padded(tensor) // STRIP


def _row_bytes(tensor: StoredTensor) -> int:
    block = BLOCK_OF_KIND[tensor.kind]
    return tensor.shape[1] // block.elements * block.size_bytes


def _source_bytes(piece: _Piece) -> int:
    return (piece.last - piece.first) * _row_bytes(piece.tensor)


def _pack_piece(piece: _Piece) -> None:
    tensor, row_bytes = piece.tensor, _row_bytes(piece.tensor)
    if tensor.kind == "F64":
        values = dequantize_rows(tensor, piece.first, piece.last)
        source, data = Source.F32, values.reshape(-1).view(np.uint8)
    else:
        data = tensor.data.reshape(-1)[piece.first * row_bytes : piece.last * row_bytes]
        source = Source[tensor.kind]
    rows, columns = piece.last - piece.first, tensor.shape[1]
    pack(source, data, rows, columns, piece.format, piece.out, piece.step)
