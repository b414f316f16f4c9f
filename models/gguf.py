"""One GGUF file, version 2 or 3: its metadata, and where its tensors are.

The layout is that of ggml's `docs/gguf.md`: magic, version, counts, key-value pairs, tensor
infos, padding to the alignment, tensor data. The file is not trusted: every number in it is
compared with the file's size and the limits below before it is used, so that whatever the bytes,
reading ends quickly, takes memory in proportion to the file, and returns or raises `ModelError`.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmrt.models.fields import short
from llmrt.models.mapped_file import map_file
from llmrt.models.quants import BLOCK_OF_KIND, size_bytes
from llmrt.models.tensors import StoredTensor
from llmrt.wire.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# The format allows keys of 65535 bytes. The longest strings are chat templates, some 100 kB.
MAX_NAME_BYTES = 65535
MAX_TEXT_BYTES = 16 << 20
# Models have below 100 keys and 10,000 tensors.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
# Of all arrays together: vocabularies of 300,000 tokens come with 1.5 million elements.
MAX_ARRAY_ELEMENTS = 1 << 22
MAX_DIMENSIONS = 4
# Above the page size of any machine.
MAX_ALIGNMENT = 1 << 20

# fmt: off
TENSOR_TYPES = (
    "F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K",
    "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL",
    "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16", "Q4_0_4_4",
    "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4",
    "NVFP4", "Q1_0",
)
# fmt: on
"""ggml's `enum ggml_type` with what was in it once: what is not served is refused by name."""

_VALUE_DTYPES = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8")
_BOOL, _TEXT, _ARRAY = 7, 8, 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata values are int, float, bool, str, or lists of those."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    size_bytes: int


def is_gguf(path: Path) -> bool:
    """Whether the file begins like GGUF; raises `ModelError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None


def read_gguf(path: Path) -> GgufFile:
    """Map `path` and read its header; raises `ModelError` naming the key or tensor at fault."""
    mapping = map_file(path)
    cursor = _Cursor(mapping, str(path))
    num_tensors, num_keys = _read_preamble(cursor)
    metadata = _read_metadata(cursor, num_keys)
    alignment = _alignment(cursor, metadata)
    infos = _read_tensor_infos(cursor, num_tensors, alignment)
    data_start = -(-cursor.position // alignment) * alignment
    _check_extents(cursor, infos, data_start)
    data = np.frombuffer(mapping, np.uint8)
    tensors = {}
    for info in infos:
        first = data_start + info.offset
        view = data[first : first + info.size_bytes]
        tensors[info.name] = StoredTensor(info.name, info.shape, info.kind, view)
    return GgufFile(path, metadata, tensors)


class _Cursor:
    """Reads a header front to back; `place` says what is being read, for the messages."""

    def __init__(self, data: mmap.mmap, source: str) -> None:
        self.data = data
        self.source = source
        self.position = 0
        self.place = "header"
        self.elements_left = MAX_ARRAY_ELEMENTS

    def error(self, text: str) -> ModelError:
        return ModelError(f"{self.source}: {self.place}: {text}")

    @property
    def num_left(self) -> int:
        return len(self.data) - self.position

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.num_left:
            raise self.error(
                f"{num_bytes} bytes are announced, but the file ends after {self.num_left}: "
                "it is damaged or cut off, download it again"
            )
        taken = self.data[self.position : self.position + num_bytes]
        self.position += num_bytes
        return taken

    def u32(self) -> int:
        value: int = _U32.unpack(self.take(4))[0]
        return value

    def u64(self) -> int:
        value: int = _U64.unpack(self.take(8))[0]
        return value

    def count(self, what: str, limit: int) -> int:
        value = self.u64()
        if value > limit:
            raise self.error(f"{value} {what}; at most {limit} are allowed")
        return value

    def name(self) -> str:
        raw = self.take(self.count("bytes in a name", MAX_NAME_BYTES))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"name {short(raw[:40])} is not UTF-8") from None

    def text(self) -> str:
        """A value: bytes that are no UTF-8 (a few tokenizers have them) become U+FFFD."""
        raw = self.take(self.count("bytes in a string", MAX_TEXT_BYTES))
        return raw.decode("utf-8", "replace")

    def texts(self, count: int) -> list[str]:
        """An array of strings, in one tight loop: vocabularies have half a million of them."""
        data, position, last = self.data, self.position, len(self.data) - 8
        unpack_length = _U64.unpack_from
        texts: list[str] = []
        for _ in range(count):
            if position > last:
                raise self.error(f"the file ends after {len(texts)} of {count} strings")
            start = position + 8
            position = start + unpack_length(data, position)[0]
            if position > last + 8:
                raise self.error(
                    f"string {len(texts)} is said to have {position - start} bytes, "
                    f"but only {last + 8 - start} follow"
                )
            texts.append(data[start:position].decode("utf-8", "replace"))
        self.position = position
        return texts

    def numbers(self, value_type: int, count: int) -> list[Any]:
        dtype = np.dtype(_VALUE_DTYPES[value_type])
        raw = np.frombuffer(self.take(count * dtype.itemsize), np.uint8)
        if value_type == _BOOL and raw.size and raw.max() > 1:
            raise self.error(f"{raw.max()} is no truth value")
        numbers: list[Any] = raw.view(dtype).tolist()
        return numbers

    def value(self) -> Any:
        value_type = self.u32()
        if value_type == _TEXT:
            return self.text()
        if value_type != _ARRAY:
            self._check_type(value_type)
            return self.numbers(value_type, 1)[0]
        element_type = self.u32()
        count = self.count("elements left for arrays", self.elements_left)
        self.elements_left -= count
        if element_type == _TEXT:
            return self.texts(count)
        if element_type == _ARRAY:
            raise self.error("arrays of arrays are not supported")
        self._check_type(element_type)
        return self.numbers(element_type, count)

    def _check_type(self, value_type: int) -> None:
        if value_type >= len(_VALUE_DTYPES):
            raise self.error(f"unknown value type {value_type}")


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    if cursor.take(4) != MAGIC:
        raise ModelError(f"{cursor.source} is not a GGUF file")
    version = cursor.u32()
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in VERSIONS:
            raise cursor.error("the file is big-endian; only little-endian files are supported")
        raise cursor.error(f"GGUF version {version} is not supported; convert it to version 3")
    num_tensors = cursor.count("tensors", MAX_TENSORS)
    return num_tensors, cursor.count("keys", MAX_KEYS)


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        cursor.place = f"key {index} of {num_keys}"
        key = cursor.name()
        cursor.place = f"key {short(key)}"
        if key in metadata:
            raise cursor.error("it comes twice")
        metadata[key] = cursor.value()
    return metadata


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    cursor.place = "key 'general.alignment'"
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_integer = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not is_integer or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.error(
            f"it must be a power of two from 1 to {MAX_ALIGNMENT}, got {short(alignment)}"
        )
    return int(alignment)


def _read_tensor_infos(cursor: _Cursor, num_tensors: int, alignment: int) -> list[_TensorInfo]:
    infos: list[_TensorInfo] = []
    names: set[str] = set()
    for index in range(num_tensors):
        cursor.place = f"tensor {index} of {num_tensors}"
        name = cursor.name()
        cursor.place = f"tensor {short(name)}"
        if name in names:
            raise cursor.error("it comes twice")
        names.add(name)
        infos.append(_read_tensor_info(cursor, name, alignment))
    return infos


def _read_tensor_info(cursor: _Cursor, name: str, alignment: int) -> _TensorInfo:
    num_dims = cursor.u32()
    if not 1 <= num_dims <= MAX_DIMENSIONS:
        raise cursor.error(f"{num_dims} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
    dims = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims))
    type_id = cursor.u32()
    offset = cursor.u64()
    kind = TENSOR_TYPES[type_id] if type_id < len(TENSOR_TYPES) else "unknown"
    if kind not in BLOCK_OF_KIND:
        raise cursor.error(
            f"type {kind} (id {type_id}) is not supported; use a file with "
            f"{', '.join(BLOCK_OF_KIND)}"
        )
    if 0 in dims:
        raise cursor.error(f"a dimension of {list(dims)} is 0")
    if dims[0] % BLOCK_OF_KIND[kind].elements:
        raise cursor.error(
            f"rows of {dims[0]} are no multiple of {kind}'s {BLOCK_OF_KIND[kind].elements}"
        )
    if offset % alignment:
        raise cursor.error(f"offset {offset} is no multiple of the alignment {alignment}")
    # GGUF names the fastest dimension first.
    shape = tuple(reversed(dims))
    return _TensorInfo(name, shape, kind, offset, size_bytes(kind, math.prod(dims)))


def _check_extents(cursor: _Cursor, infos: list[_TensorInfo], data_start: int) -> None:
    """Every tensor lies inside the file, and no two share a byte."""
    end, previous = 0, ""
    for info in sorted(infos, key=lambda info: info.offset):
        cursor.place = f"tensor {short(info.name)}"
        if info.offset < end:
            raise cursor.error(f"it overlaps tensor {short(previous)}")
        end, previous = info.offset + info.size_bytes, info.name
        if data_start + end > len(cursor.data):
            raise cursor.error(
                f"{list(info.shape)} of {info.kind} at {info.offset} end at byte "
                f"{data_start + end}, but the file has {len(cursor.data)}: it is damaged or cut "
                "off, download it again"
            )
