"""The ctypes twin of abi.h against the header itself, as the C compiler lays it out."""

import ctypes
import re
import shutil
import subprocess
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest

from llmrt.kernels.cpu import library as c

HEADER = Path(c.__file__).with_name("abi.h")
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "llmrt_weight": c.Weight,
    "llmrt_op": c.Op,
    "llmrt_rope": c.Rope,
    "llmrt_program": c.Program,
    "llmrt_batch": c.Batch,
}
ENUMS: tuple[tuple[str, type[IntEnum]], ...] = (
    ("LLMRT_", c.Format),
    ("LLMRT_", c.Epilogue),
    ("LLMRT_", c.StepError),
    ("LLMRT_SOURCE_", c.Source),
    ("LLMRT_KV_", c.KvFormat),
    ("LLMRT_OP_", c.OpKind),
)


def expressions() -> dict[str, int]:
    """C expressions, and what they are in Python."""
    expected = {
        "LLMRT_ABI": c.ABI,
        "LLMRT_GROUP": c.GROUP,
        "LLMRT_STRIP": c.STRIP,
        "LLMRT_OUT_LOGITS": c.OUT_LOGITS,
        "LLMRT_NUM_FORMATS": len(c.Format),
    }
    for prefix, enum in ENUMS:
        expected |= {prefix + member.name: member.value for member in enum}
    for name, struct in STRUCTS.items():
        expected[f"sizeof({name})"] = ctypes.sizeof(struct)
        for entry in struct._fields_:
            in_c, place = entry[0].rstrip("_"), getattr(struct, entry[0])
            expected[f"offsetof({name}, {in_c})"] = place.offset
            expected[f"sizeof((({name} *)0)->{in_c})"] = place.size
    expected["sizeof(llmrt_row)"] = c.ROW.itemsize
    assert c.ROW.fields is not None
    for name in c.ROW.names or ():
        kind, offset, *_ = c.ROW.fields[name]
        expected[f"offsetof(llmrt_row, {name})"] = offset
        expected[f"sizeof(((llmrt_row *)0)->{name})"] = kind.itemsize
    return expected


def test_structs_and_enums_are_those_of_the_header(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "this test needs a C compiler: apt install gcc"
    expected = expressions()
    prints = "\n".join(f'printf("%lld\\n", (long long)({text}));' for text in expected)
    source = tmp_path / "facts.c"
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{HEADER}"\n'
        f"int main(void) {{ {prints} return 0; }}\n"
    )
    program = tmp_path / "facts"
    subprocess.run([compiler, "-std=c11", "-o", program, source], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert dict(zip(expected, map(int, printed.split()), strict=True)) == expected


def test_no_field_and_no_member_is_forgotten() -> None:
    """What the header has and Python has not would not be compared."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    for name, struct in STRUCTS.items():
        body = re.search(r"typedef struct \{([^}]*)\} " + name + ";", text)
        assert body is not None
        declared = re.findall(r"(\w+)\s*[;,]", body[1])
        assert declared == [entry[0].rstrip("_") for entry in struct._fields_]
    bodies = re.findall(r"enum[^{;]*\{([^}]*)\}", text)
    members = {name for body in bodies for name in re.findall(r"LLMRT_\w+", body)}
    assert members - expressions().keys() == {"LLMRT_BLOCK_TOKENS", "LLMRT_SEGMENT_BLOCKS"}


def test_every_exported_function_has_a_signature() -> None:
    text = HEADER.read_text()
    exported = set(re.findall(r"LLMRT_API [^;(]*?(llmrt_\w+)\(", text))
    assert exported == set(c._SIGNATURES)
    for name in exported:
        assert hasattr(c.library(), name)


def test_families_come_best_first_and_one_runs_everywhere() -> None:
    found = c.families()
    assert [family.number for family in found] == list(range(len(found)))
    assert found[-1].name == "portable"
    assert found[-1].is_supported
    assert c.best_family() == next(family for family in found if family.is_supported)


def test_a_library_that_is_not_there_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c, "PATH", tmp_path / "none.so")
    with pytest.raises(c.LibraryMissing, match=r"none.so is missing.*apt install gcc"):
        c.library.__wrapped__()
    (tmp_path / "none.so").write_bytes(b"no library")
    with pytest.raises(c.LibraryMissing, match=r"cannot be used: .*Install llmrt again"):
        c.library.__wrapped__()


@pytest.mark.parametrize(
    ("abi", "message"), [(c.ABI + 1, f"interface {c.ABI + 1}, {c.ABI} is needed"), (None, "llmrt_")]
)
def test_a_library_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abi: int | None, message: str
) -> None:
    functions = [] if abi is None else sorted(c._SIGNATURES)
    body = "\n".join(f"int {name}(void) {{ return {abi}; }}" for name in functions)
    (tmp_path / "other.c").write_text(body + "\n")
    path = tmp_path / "other.so"
    compile_it = ["cc", "-shared", "-fPIC", "-o", str(path), str(tmp_path / "other.c")]
    subprocess.run(compile_it, check=True)
    monkeypatch.setattr(c, "PATH", path)
    with pytest.raises(c.LibraryMissing, match=message):
        c.library.__wrapped__()


def test_sizes_are_those_of_the_header_comment() -> None:
    """Bytes of a group of a strip; strips begin at multiples of 64 bytes."""
    sizes = {format_: c.packed_bytes(16, 64, format_) for format_ in c.Format}
    assert list(sizes.values()) == [2 * 288, 2 * 320, 2 * 544, 2 * 576, 2 * 1024, 2 * 2048]
    assert c.packed_bytes(17, 64, c.Format.Q4) == 2 * sizes[c.Format.Q4]
    assert c.packed_bytes(32, 32, c.Format.Q4) == 2 * 320


@pytest.mark.parametrize(
    ("source", "shape", "short_by", "out_bytes", "step", "message"),
    [
        (c.Source.F32, (16, 48), 0, 1 << 16, 1, r"no F32 weight \[16, 48\]"),
        (c.Source.Q4_K, (16, 64), 0, 1 << 16, 1, "no Q4_K weight"),
        (c.Source.F32, (16, 64), 1, 1 << 16, 1, "4095 bytes are no F32 weight"),
        (c.Source.F32, (16, 64), 0, 2047, 1, r"2047 bytes: a packed weight \[16, 64\] needs 2048"),
        (c.Source.F32, (32, 64), 0, 4096, 2, "needs 6144"),
        (c.Source.F32, (0, 64), 0, 4096, 1, "4096 bytes"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(
    source: c.Source,
    shape: tuple[int, int],
    short_by: int,
    out_bytes: int,
    step: int,
    message: str,
) -> None:
    data = np.zeros(shape[0] * shape[1] * 4 - short_by, np.uint8)
    out = np.zeros(out_bytes, np.uint8)
    with pytest.raises(ValueError, match=message):
        c.pack(source, data, *shape, c.Format.BF16, out, step)


def test_a_source_that_cannot_become_a_format_is_refused() -> None:
    data, out = np.zeros(16 * 34, np.uint8), np.zeros(1 << 12, np.uint8)
    with pytest.raises(ValueError, match="Q8_0 weights cannot be packed as Q4"):
        c.pack(c.Source.Q8_0, data, 16, 32, c.Format.Q4, out)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        c.pack(c.Source.Q8_0, data, 16, 32, c.Format.Q8, out)
