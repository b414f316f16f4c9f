"""Open a model from a path: a GGUF file, or a folder with GGUF or safetensors files.

Nothing here touches the network, and no file can make it execute anything.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrt.models.canonical import SpecReading, bind_tensors
from llmrt.models.gguf import is_gguf
from llmrt.models.gguf_parts import open_gguf
from llmrt.models.gguf_spec import read_gguf_spec
from llmrt.models.hf_spec import read_hf_spec
from llmrt.models.json_files import read_json
from llmrt.models.safetensors_files import open_safetensors
from llmrt.models.spec import ModelSpec
from llmrt.models.tensor_table import TensorTable
from llmrt.models.tensors import StoredTensor
from llmrt.wire.errors import ModelError, ModelNotFound

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
MAX_NAME_LENGTH = 96
WANTED = "a .gguf file, or a folder with either .gguf or config.json and .safetensors files"


@dataclass(slots=True)
class OpenedModel:
    """A `WeightFile`, with what a worker tells about it.

    `format` is gguf or safetensors. `name` is what users call the model, in letters, digits and
    `._-`. `notes` are facts to log once. `metadata` holds the key-value pairs of GGUF, or
    `config.json`.
    """

    path: Path
    format: str
    name: str
    spec: ModelSpec
    tensors: Mapping[str, StoredTensor]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]
    metadata: Mapping[str, Any]

    def weights_hash(self) -> str:
        """Hex SHA-256 over name, shape, kind and content of every tensor."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            shape = "x".join(map(str, tensor.shape))
            digest.update(f"{name} {shape} {tensor.kind} {tensor.data.size}\n".encode())
            digest.update(tensor.data.data)
        return digest.hexdigest()

    def close(self) -> None:
        """Let go of the files; they stay mapped while someone holds a view of a tensor."""
        self.tensors = {}


def open_model(path: Path) -> OpenedModel:
    """The model at `path`, with names, shapes and bounds of all tensors checked.

    Raises `ModelNotFound` if nothing is there, and `ModelError` naming the file, key or tensor
    at fault.
    """
    try:
        return _open(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None


def _open(path: Path) -> OpenedModel:
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ModelNotFound(
            f"no model at {path}: expected {WANTED}. Nothing is downloaded: fetch it first"
        )
    # Opening a pipe would wait for its writer.
    if path.is_file() and is_gguf(path):
        return _open_gguf(path)
    if path.name.endswith((".safetensors", ".json")):
        raise ModelError(f"{path} is a part of a model: pass its folder, {path.parent}")
    if path.suffix in PICKLE_SUFFIXES:
        raise ModelError(_pickle_message(path))
    raise ModelError(f"{path} is not a model: expected {WANTED}")


def _open_folder(folder: Path) -> OpenedModel:
    suffixes = {path.suffix for path in folder.iterdir()}
    has_config = (folder / "config.json").is_file()
    if ".gguf" in suffixes and ".safetensors" in suffixes:
        raise ModelError(
            f"{folder} holds GGUF and safetensors files: pass the path of the .gguf file, or a "
            "folder without it"
        )
    if ".gguf" in suffixes:
        return _open_gguf(folder)
    if ".safetensors" in suffixes and has_config:
        return _open_safetensors(folder)
    if ".safetensors" in suffixes:
        raise ModelError(f"{folder} has safetensors files but no config.json: download it as well")
    if PICKLE_SUFFIXES & suffixes:
        raise ModelError(_pickle_message(folder))
    looked_for = "no .gguf and no .safetensors file is in it"
    raise ModelNotFound(f"no model in {folder}: {looked_for}. Expected {WANTED}")


def _pickle_message(path: Path) -> str:
    return (
        f"{path} has its weights as pickle, which can execute code when read and is refused: "
        "convert them with transformers' save_pretrained, or download a safetensors version"
    )


def _open_gguf(path: Path) -> OpenedModel:
    metadata, table = open_gguf(path)
    # The file's name is what its user knows; `general.name` is often that of a training run.
    name = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", table.source.name)
    # The folder was resolved to a file of it: errors name that file, the model what was passed.
    return _opened(path, "gguf", name, metadata, table, read_gguf_spec(metadata, table))


def _open_safetensors(folder: Path) -> OpenedModel:
    config = read_json(folder / "config.json")
    table = open_safetensors(folder)
    reading = read_hf_spec(config, table)
    return _opened(folder, "safetensors", _folder_name(folder), config, table, reading)


def _opened(
    path: Path,
    format_: str,
    name: object,
    metadata: Mapping[str, Any],
    table: TensorTable,
    reading: SpecReading,
) -> OpenedModel:
    tensors, ignored = bind_tensors(reading, table)
    sane = re.sub(r"[^A-Za-z0-9._-]+", "-", str(name))[:MAX_NAME_LENGTH].strip("-.")
    return OpenedModel(
        path=path,
        format=format_,
        name=sane or "model",
        spec=reading.spec,
        tensors=tensors,
        ignored=ignored,
        notes=reading.notes,
        metadata=metadata,
    )


def _folder_name(folder: Path) -> str:
    """The folder's name; in the cache of Hugging Face, that of the repository."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.name
