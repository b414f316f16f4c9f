"""The compiled step as it was built: the same bits from every instruction family of this CPU.

The programs are random, of all formats; `scripts/check_families` has more of them, emulates the
families that this CPU lacks, and uses sanitizers.
"""

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from llmrt.kernels.cpu import library as c
from llmrt.models.quants import dequantize
from llmrt.models.tensors import StoredTensor

FOLDER = Path(__file__).with_name("families")
HEADER_FOLDER = Path(c.__file__).parent
USABLE = [family.name for family in c.families() if family.is_supported]
# The first ones have every weight format, KV format and head size; plain C takes a second each.
NUM_CASES = 12
ROWS = 40


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drivers, built against the library that workers load."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "this test needs a C compiler: apt install gcc"
    folder = tmp_path_factory.mktemp("families")
    for name in ("driver", "hostile"):
        source = FOLDER / f"{name}.c"
        flags = ["-O2", "-std=c11", f"-I{HEADER_FOLDER}", f"-Wl,-rpath,{HEADER_FOLDER}"]
        files = [str(path) for path in (source, c.PATH, folder / name)]
        command = [compiler, *flags, *files[:2], "-o", files[2]]
        subprocess.run(command, check=True, capture_output=True)
    return folder


def lines(program: Path, *arguments: str) -> list[str]:
    command = [str(program), *arguments]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def test_families_and_threads_give_the_same_bits(programs: Path) -> None:
    expected = lines(programs / "driver", "portable", "1", "0", str(NUM_CASES))
    assert len(expected) == NUM_CASES
    for family in USABLE:
        threads = "2" if family == "portable" else "1,2,3"
        end = "2" if family == "portable" else str(NUM_CASES)
        found = lines(programs / "driver", family, threads, "0", end)
        assert found == expected[: len(found)]


@pytest.mark.parametrize("threads", ["1", "2"])
def test_hostile_batches_are_refused_and_a_fork_goes_on(programs: Path, threads: str) -> None:
    assert lines(programs / "hostile", USABLE[0], threads) == []


@pytest.mark.parametrize("family", range(len(USABLE)), ids=USABLE)
@pytest.mark.parametrize("columns", [32, 96, 128])
@pytest.mark.parametrize(
    ("kind", "format_"),
    [
        ("Q4_0", c.Format.Q4),
        ("Q4_1", c.Format.Q4M),
        ("Q8_0", c.Format.Q8),
        ("Q5_1", c.Format.Q8M),
        ("F32", c.Format.BF16),
        ("F32", c.Format.F32),
    ],
)
def test_strips_are_read_where_they_were_packed(
    family: int, columns: int, kind: str, format_: c.Format
) -> None:
    """Strips of an odd number of groups have a tail. One-hot rows pick columns of the weight."""
    number = [found for found in c.families() if found.is_supported][family].number
    values = np.random.default_rng(columns).standard_normal((ROWS, columns), np.float32)
    stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    tensor = StoredTensor("w", (ROWS, columns), kind, stored.reshape(-1).view(np.uint8))
    picks = np.eye(columns, dtype=np.float32)[np.arange(ROWS) * 7 % columns]
    weight = packed(c.Source[kind], tensor.data, columns, format_)
    one_hot = packed(c.Source.F32, picks.reshape(-1).view(np.uint8), columns, c.Format.F32)

    expected = dequantize(tensor) @ picks.T

    tolerance = 0.02 if format_ is c.Format.BF16 else 1e-5
    np.testing.assert_allclose(logits_of(number, one_hot, weight), expected.T, atol=tolerance)
    np.testing.assert_allclose(logits_of(number, weight, one_hot), expected, atol=tolerance)


@dataclass(frozen=True)
class Packed:
    weight: c.Weight
    data: c.Bytes


def packed(source: c.Source, data: c.Bytes, columns: int, format_: c.Format) -> Packed:
    out = np.full(c.packed_bytes(ROWS, columns, format_), 0xFF, np.uint8)
    c.pack(source, data, ROWS, columns, format_, out)
    return Packed(c.Weight(-(-ROWS // 16) * 16, columns, format_, out.ctypes.data), out)


def logits_of(family: int, embed: Packed, head: Packed) -> npt.NDArray[np.float32]:
    """[ROWS, ROWS]: row i of `embed` times the rows of `head`."""
    width = np.array([embed.weight.columns], np.int64)
    addresses = [ctypes.addressof(packed.weight) for packed in (embed, head)]
    ops = (c.Op * 2)(
        c.Op(kind=c.OpKind.EMBED, scale=1.0, weight=addresses[0]),
        c.Op(kind=c.OpKind.LINEAR, out=c.OUT_LOGITS, weight=addresses[1]),
    )
    program = c.Program(
        num_ops=2,
        ops=ctypes.addressof(ops),
        num_buffers=1,
        widths=width.ctypes.data,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        vocab_size=ROWS,
        max_context=ROWS,
    )
    table, rows = np.zeros(2, np.uint32), np.zeros(1, c.ROW)
    rows[0] = (0, 1, table.ctypes.data, 2, 0, ROWS, ROWS)
    logits, best = np.empty((ROWS, ROWS), np.float32), np.empty(ROWS, np.int32)
    batch = c.Batch(
        num_rows=1,
        rows=rows.ctypes.data,
        tokens=np.arange(ROWS, dtype=np.uint32).tobytes(),
        logits=logits.ctypes.data,
        best=best.ctypes.data,
    )
    engine = c.library().llmrt_engine_new(ctypes.byref(program), family, 1)
    status = c.library().llmrt_step(engine, ctypes.byref(batch), ctypes.byref(ctypes.c_int64()))
    c.library().llmrt_engine_free(engine)
    assert status == c.StepError.OK
    assert best.tolist() == logits.argmax(axis=1).tolist()
    return logits
