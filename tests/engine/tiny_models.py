"""Tiny models of every family with random weights, and rows for devices that run them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import transformers

from llmrt.engine.batch import LOCAL_ARENA, ArenaId, Batch, Row, SampleSpec, SequenceId
from llmrt.wire.sampling import SamplingParams

Logits = npt.NDArray[np.float32]

FAMILIES = ("llama", "llama3_rope", "mistral", "qwen2", "qwen3", "gemma3_text")
PEER_ARENA = ArenaId("peer-7")
VOCAB = 128
NUM_TOKENS = 97
WINDOW = 24
TOLERANCE = 1e-4


class Forward(Protocol):
    """The part of a device that gives logits."""

    def forward(self, batch: Batch) -> Logits: ...


@dataclass(frozen=True)
class Oracle:
    """A saved model and what transformers computes after each of two texts' tokens."""

    folder: Path
    texts: tuple[list[int], list[int]]
    logits: tuple[Logits, Logits]


def make_config(family: str) -> transformers.PretrainedConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    llama3_rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    match family:
        case "llama":
            return transformers.LlamaConfig(**sizes, tie_word_embeddings=True)
        case "llama3_rope":
            return transformers.LlamaConfig(**sizes, rope_parameters=llama3_rope)
        case "mistral":
            return transformers.MistralConfig(**sizes, sliding_window=WINDOW, head_dim=16)
        case "qwen2":
            return transformers.Qwen2Config(**sizes)
        case "qwen3":
            return transformers.Qwen3Config(**sizes, head_dim=32)
        case _:
            return transformers.Gemma3TextConfig(
                **sizes,
                head_dim=32,
                query_pre_attn_scalar=32,
                sliding_window=WINDOW,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            )


def save_tiny_model(family: str, folder: Path) -> transformers.PreTrainedModel:
    """Random weights, norms and biases included, whose logits have a deviation of about 1."""
    torch.manual_seed(len(family))
    config = make_config(family)
    config._attn_implementation = "eager"
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
            else:
                weight.copy_(torch.randn_like(weight) * (0.125 if "embed" in name else 0.15))
    model.save_pretrained(folder)
    return model


def make_row(
    text: Sequence[int],
    start: int,
    end: int,
    blocks: Sequence[int] = range(4),
    arena: ArenaId = LOCAL_ARENA,
    params: SamplingParams | None = None,
) -> Row:
    """Positions `start` to `end` of a text, with the token after them sampled, or greedily."""
    ids = array("I", text)
    sample = SampleSpec(params or SamplingParams(), 7, end, ids[:end], end)
    return Row(SequenceId(0), arena, ids[start:end], start, array("I", blocks), sample)


def forward(device: Forward, *rows: Row) -> Logits:
    return device.forward(Batch(0, rows))
