"""Weights by canonical name, still in the format of their file.

Canonical names, for layer i:

    embed                     [vocab, hidden]
    layers.i.attn_norm        [hidden]
    layers.i.q .k .v          [heads * head_dim, hidden]
    layers.i.q_bias ...       [heads * head_dim]
    layers.i.q_norm .k_norm   [head_dim]
    layers.i.o                [hidden, heads * head_dim]
    layers.i.post_attn_norm   [hidden]
    layers.i.mlp_norm         [hidden]
    layers.i.gate .up         [intermediate, hidden]
    layers.i.down             [hidden, intermediate]
    layers.i.post_mlp_norm    [hidden]
    final_norm                [hidden]
    head                      [vocab, hidden]; absent when tied
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llmrt.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as its file stores it.

    `shape` is (rows, columns) or (length,), rows being outputs. `kind` is the storage type:
    F32, F16, BF16, F64 or a GGUF quantization (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K).
    `data` is a read-only view of the mapped file.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    data: npt.NDArray[np.uint8]


class WeightFile(Protocol):
    """An opened model: its spec, where its tensors are, and what else the file carries.

    `tensors` holds exactly the tensors that `spec` calls for; opening has checked names, shapes
    and bounds, and raised `ModelError` otherwise. `weights_hash` is a hex SHA-256 over what
    decides the output: sizes, types and content of every tensor.
    """

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    @property
    def ignored(self) -> Iterable[str]: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    def weights_hash(self) -> str: ...

    def close(self) -> None: ...
