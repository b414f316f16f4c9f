"""The GGUF reader: what it reads, and what it refuses."""

import contextlib
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmrt.models.gguf import (
    MAX_ARRAY_ELEMENTS,
    MAX_KEYS,
    MAX_TENSORS,
    TENSOR_TYPES,
    is_gguf,
    read_gguf,
)
from llmrt.models.loading import open_model
from llmrt.wire.errors import ModelError

UINT32, BOOL, STRING, ARRAY, UINT64 = 4, 7, 8, 9, 10


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], Any]:
    def read_bytes(raw: bytes) -> Any:
        path = tmp_path / "case.gguf"
        path.write_bytes(raw)
        return read_gguf(path)

    return read_bytes


def test_metadata_and_tensors_are_those_of_gguf_py(
    gguf_file: Callable[..., Path],
) -> None:
    changes = {
        "a.flag": True,
        "a.list": [1, -2, 3],
        "a.texts": ["", "ä", "中"],
        "a.floats": [0.5, 1.5],
    }
    path = gguf_file(kind="Q4_1", changes=changes)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.kind == tensor.tensor_type.name
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.data.tobytes() == tensor.data.tobytes()


def test_tensor_data_is_a_read_only_view(gguf_file: Callable[..., Path]) -> None:
    tensor = read_gguf(gguf_file()).tensors["output.weight"]
    assert not tensor.data.flags.owndata
    assert not tensor.data.flags.writeable


def test_the_real_header_is_read_quickly(smollm2_path: Path) -> None:
    """It takes 0.05 s. CPU time, and a margin for machines that are shared; a reader that makes
    an array per string takes more than 2 s.
    """
    times = []
    for _ in range(5):
        start = time.process_time()
        file = read_gguf(smollm2_path)
        times.append(time.process_time() - start)
    assert len(file.tensors) == 272
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert min(times) < 0.5


def test_types_are_named_as_in_gguf_py() -> None:
    names = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert {i: name for i, name in enumerate(TENSOR_TYPES) if i in names} == names


def test_version_2_is_read(read: Callable[[bytes], Any], raw_files: SimpleNamespace) -> None:
    key = raw_files.text("a") + struct.pack("<II", UINT32, 7)
    assert read(raw_files.file([key], version=2)).metadata == {"a": 7}


def test_bytes_that_are_no_utf8_are_replaced_in_values(
    read: Callable[[bytes], Any], raw_files: SimpleNamespace
) -> None:
    one = raw_files.text("a") + struct.pack("<I", STRING) + raw_files.text(b"x\xff")
    many = raw_files.text("b") + struct.pack("<IIQ", ARRAY, STRING, 1) + raw_files.text(b"\xc3")
    assert read(raw_files.file([one, many])).metadata == {"a": "x\ufffd", "b": ["\ufffd"]}


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"GGU")
    assert not is_gguf(path)
    path.write_bytes(b"GGUF....")
    assert is_gguf(path)


def hostile() -> dict[str, tuple[Callable[[SimpleNamespace], bytes], str]]:
    """Bad files, and what the error must name."""

    def key(raw: SimpleNamespace, value: bytes, name: str = "a.key") -> bytes:
        return bytes(raw.file([raw.text(name) + value]))

    def tensor(*infos: tuple[Any, ...], size: int = 4096) -> Callable[[SimpleNamespace], bytes]:
        return lambda raw: raw.file(infos=[raw.info(*info) for info in infos], data=bytes(size))

    def pack(form: str, *values: int) -> Callable[[SimpleNamespace], bytes]:
        return lambda raw: key(raw, struct.pack(form, *values))

    def align(value: bytes) -> Callable[[SimpleNamespace], bytes]:
        return lambda raw: key(raw, value, "general.alignment")

    big = 1 << 63
    return {
        "empty": (lambda raw: b"", "is empty"),
        "magic": (lambda raw: b"GGML" + bytes(60), "not a GGUF file"),
        "magic only": (lambda raw: b"GGUF", "header"),
        "version 1": (lambda raw: raw.file(version=1), "version 1"),
        "big endian": (lambda raw: raw.file(version=0x03000000), "big-endian"),
        "many keys": (lambda raw: raw.file(counts=(0, MAX_KEYS + 1)), "65537 keys"),
        "many tensors": (lambda raw: raw.file(counts=(MAX_TENSORS + 1, 0)), "65537 tensors"),
        "missing keys": (lambda raw: raw.file(counts=(0, 9)), "key ''.*file ends"),
        "missing tensors": (lambda raw: raw.file(counts=(9, 0)), "tensor ''.*file ends"),
        "string of 2**63": (pack("<IQ", STRING, big), "key 'a.key'.*9223372036854775808 bytes"),
        "string beyond the file": (pack("<IQ", STRING, 5000), "key 'a.key'.*file ends"),
        "array of 2**63": (pack("<IIQ", ARRAY, UINT32, big), "key 'a.key'.*9223372036854775808"),
        "array of texts of 2**63": (pack("<IIQ", ARRAY, STRING, big), "key 'a.key'"),
        "array beyond the file": (pack("<IIQ", ARRAY, UINT64, 99), "key 'a.key'.*792 bytes"),
        "texts beyond the file": (pack("<IIQQ", ARRAY, STRING, 2, 0), "key 'a.key'"),
        "text of an array of 2**63": (
            pack("<IIQQQ", ARRAY, STRING, 2, big, 0),
            "key 'a.key': string 0",
        ),
        "nested arrays": (pack("<IIQ", ARRAY, ARRAY, 1), "key 'a.key'.*arrays of arrays"),
        "type of a value": (pack("<IQ", 13, 0), "key 'a.key'.*value type 13"),
        "type of an element": (pack("<IIQ", ARRAY, 99, 1), "key 'a.key'.*value type 99"),
        "truth value": (pack("<IB", BOOL, 2), "key 'a.key'.*2 is no truth value"),
        "key twice": (
            lambda raw: raw.file([raw.text("k") + struct.pack("<II", UINT32, 1)] * 2),
            "key 'k': it comes twice",
        ),
        "name of 2**63": (lambda raw: raw.file([struct.pack("<QQ", big, 0)]), "key 0 of 1"),
        "name not UTF-8": (lambda raw: key(raw, b"", b"\xff"), "not UTF-8"),  # type: ignore[arg-type] # bytes on purpose
        "alignment 0": (align(struct.pack("<II", UINT32, 0)), "'general.alignment'.*got 0"),
        "alignment 48": (align(struct.pack("<II", UINT32, 48)), "'general.alignment'.*got 48"),
        "alignment 2**31": (align(struct.pack("<II", UINT32, 1 << 31)), "'general.alignment'"),
        "alignment true": (align(struct.pack("<IB", BOOL, 1)), "'general.alignment'.*True"),
        "0 dimensions": (tensor(("t", [])), "tensor 't': 0 dimensions"),
        "a million dimensions": (
            lambda raw: raw.file(infos=[raw.text("t") + struct.pack("<I", 1_000_000)]),
            "tensor 't': 1000000 dimensions",
        ),
        "dimension 0": (tensor(("t", [4, 0])), "tensor 't': a dimension of .* is 0"),
        "product wraps": (tensor(("t", [1 << 32, 1 << 32])), "tensor 't'.*73786976294838"),
        "product wraps to fit": (tensor(("t", [1 << 62, 4, 1 << 2])), "tensor 't'"),
        "type 99": (tensor(("t", [4], 99)), r"tensor 't': type unknown \(id 99\)"),
        "type known, not served": (tensor(("t", [256], 10)), r"tensor 't': type Q2_K \(id 10\)"),
        "half a block": (tensor(("t", [48], 2)), "tensor 't': rows of 48"),
        "offset beyond": (tensor(("t", [4], 0, 1 << 62)), "tensor 't'.* end at byte"),
        "offset odd": (tensor(("t", [4], 0, 4)), "tensor 't': offset 4"),
        "cut off": (tensor(("t", [1024]), size=4000), "tensor 't'.* at byte .* cut off"),
        "overlap": (tensor(("t", [16]), ("u", [16], 0, 32)), "tensor 'u': it overlaps tensor 't'"),
        "tensor twice": (tensor(("t", [4]), ("t", [4], 0, 32)), "tensor 't': it comes twice"),
    }


@pytest.mark.parametrize("case", hostile())
def test_a_bad_file_is_refused_naming_key_or_tensor(
    case: str, read: Callable[[bytes], Any], raw_files: SimpleNamespace
) -> None:
    make, named = hostile()[case]
    raw = make(raw_files)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=named):
            read(raw)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_arrays_have_a_limit_in_all(
    read: Callable[[bytes], Any], raw_files: SimpleNamespace
) -> None:
    """Or a file of 100 MB becomes 10 GB of Python objects."""
    count = MAX_ARRAY_ELEMENTS // 2 + 1
    array = struct.pack("<IIQ", ARRAY, 0, count) + bytes(count)
    with pytest.raises(ModelError, match="key 'b'"):
        read(raw_files.file([raw_files.text(name) + array for name in "ab"]))


def test_an_empty_array_and_no_tensors_are_fine(
    read: Callable[[bytes], Any], raw_files: SimpleNamespace
) -> None:
    key = raw_files.text("a") + struct.pack("<IIQ", ARRAY, BOOL, 0)
    assert read(raw_files.file([key])).metadata == {"a": []}


def test_a_file_cut_anywhere_is_refused(gguf_file: Callable[..., Path], tmp_path: Path) -> None:
    raw = gguf_file().read_bytes()
    path = tmp_path / "cut.gguf"
    for length in np.linspace(0, len(raw) - 1, 150, dtype=int):
        path.write_bytes(raw[:length])
        with pytest.raises(ModelError, match="cut"):  # the name of the file, at least
            read_gguf(path)


@pytest.fixture(scope="module")
def tiny(gguf_file: Callable[..., Path]) -> tuple[bytes, int]:
    """The bytes of a tiny model, and how many come before its first tensor."""
    path = gguf_file(kind="Q8_0")
    raw = path.read_bytes()
    return raw, raw.index(read_gguf(path).tensors["token_embd.weight"].data.tobytes())


@settings(
    max_examples=150,
    deadline=2000,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_flipped_bytes_give_a_model_or_a_model_error(
    data: st.DataObject, tiny: tuple[bytes, int], tmp_path: Path
) -> None:
    """Nothing but `ModelError` comes out, through all the layers that read the header."""
    raw, header_bytes = bytearray(tiny[0]), tiny[1]
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, header_bytes - 1))
        raw[position] = data.draw(st.integers(0, 255))
    path = tmp_path / "flipped.gguf"
    path.write_bytes(raw)
    with contextlib.suppress(ModelError):
        open_model(path)


@settings(max_examples=100, deadline=2000)
@given(raw=st.binary(max_size=300))
def test_random_bytes_behind_the_magic_are_refused(
    raw: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + raw)
    with pytest.raises(ModelError):
        open_model(path)
