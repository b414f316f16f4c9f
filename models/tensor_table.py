"""All tensors of a model that may lie in several files, by the names of its format."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrt.models.tensors import StoredTensor


@dataclass(frozen=True, slots=True)
class TensorTable:
    """`source` is what the user named, `file_of` says where each tensor lies."""

    source: Path
    tensors: Mapping[str, StoredTensor]
    file_of: Mapping[str, Path]
