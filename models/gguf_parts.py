"""A GGUF model in one file, or split by llama.cpp's `gguf-split` into numbered ones.

The parts of X are named `X-00001-of-00003.gguf` and on. Each says in `split.no` (from 0) and
`split.count` which it is; the first has the metadata, and in `split.tensors.count` the number of
tensors in all.
"""

import re
from pathlib import Path
from typing import Any

from llmrt.models.fields import Fields, short
from llmrt.models.gguf import GgufFile, read_gguf
from llmrt.models.tensor_table import TensorTable
from llmrt.models.tensors import StoredTensor
from llmrt.wire.errors import ModelError

MAX_PARTS = 99999

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def open_gguf(path: Path) -> tuple[dict[str, Any], TensorTable]:
    """Metadata and tensors of the model at `path`: a file, any part, or a folder with one model.

    All parts are found and compared before any weight is read. Raises `ModelError` naming the
    part that is missing or is not what its name says, or the files to choose from.
    """
    if path.is_dir():
        path = _pick(path)
    opened = read_gguf(path)
    if _num_parts(opened) == 1:
        files = [opened]
    else:
        files = [opened if part == path else read_gguf(part) for part in _part_paths(opened)]
        for file in files:
            _check_name(file)
    tensors: dict[str, StoredTensor] = {}
    file_of: dict[str, Path] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise ModelError(f"tensor {short(name)} is in {file_of[name]} and in {file.path}")
            tensors[name] = tensor
            file_of[name] = file.path
    _check_total(files, len(tensors))
    return files[0].metadata, TensorTable(path, tensors, file_of)


def _pick(folder: Path) -> Path:
    """The only model of a folder, by its first file."""
    paths = sorted(folder.glob("*.gguf"))
    first_of: dict[str, Path] = {}
    for path in paths:
        match = _PART_NAME.fullmatch(path.name)
        first_of.setdefault(match["stem"] + "-" if match else path.name, path)
    if len(first_of) == 1:
        return paths[0]
    # A part under another name looks like a second model: say so rather than ask to choose.
    for path in first_of.values():
        if not _PART_NAME.fullmatch(path.name):
            file = read_gguf(path)
            if _num_parts(file) > 1:
                _part_paths(file)
    names = ", ".join(path.name for path in first_of.values())
    raise ModelError(f"{folder} holds several GGUF models ({names}): pass the path of one of them")


def _num_parts(file: GgufFile) -> int:
    count = Fields(file.metadata, str(file.path)).integer("split.count", 1, minimum=0)
    return max(1, count)


def _number(file: GgufFile) -> int:
    """Which part a file is, from 1."""
    return Fields(file.metadata, str(file.path)).integer("split.no", minimum=0) + 1


def _part_paths(opened: GgufFile) -> list[Path]:
    """Paths of all parts of the model of which `opened` is one; all exist."""
    number, count, path = _number(opened), _num_parts(opened), opened.path
    if count > MAX_PARTS or number > count:
        raise ModelError(f"{path} says that it is part {number} of {count}: download it again")
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        raise ModelError(
            f"{path} is part {number} of {count} of a split model, but has another name: "
            f"rename it to {_part_name('NAME', number, count)}, NAME as in the other parts"
        )
    _check_name(opened)
    paths = [path.with_name(_part_name(match["stem"], n, count)) for n in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise ModelError(
            f"{path.parent} lacks {', '.join(missing[:5])} of a model in {count} parts: "
            "download what is missing, or give a renamed part its name back"
        )
    return paths


def _part_name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def _check_name(file: GgufFile) -> None:
    """A part's name and its keys must agree, or parts were swapped."""
    match = _PART_NAME.fullmatch(file.path.name)
    assert match is not None
    count, number = _num_parts(file), _number(file) if "split.no" in file.metadata else 1
    if (number, count) != (int(match["number"]), int(match["count"])):
        raise ModelError(
            f"{file.path} holds part {number} of {count}: it was renamed or swapped; "
            f"its name should be {_part_name(match['stem'], number, count)}"
        )


def _check_total(files: list[GgufFile], num_tensors: int) -> None:
    fields = Fields(files[0].metadata, str(files[0].path))
    if not fields.has("split.tensors.count"):
        return
    expected = fields.integer("split.tensors.count", minimum=0)
    if num_tensors != expected:
        raise ModelError(
            f"{files[0].path}: the model has {expected} tensors, its {len(files)} parts hold "
            f"{num_tensors}: they are not of the same model, download them again"
        )
