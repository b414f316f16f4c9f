"""Writers of tiny models with random weights, by the libraries that define the formats."""

import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXTRA: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 4,
        "query_pre_attn_scalar": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def make_hf_model(model_type: str = "llama", **overrides: Any) -> Any:
    """A transformers model in float32; norms are random as well, so that each one counts."""
    config = transformers.AutoConfig.for_model(
        model_type, **{**TINY, **EXTRA[model_type], **overrides}
    )
    torch.manual_seed(7)
    build: Any = transformers.AutoModelForCausalLM.from_config
    model = build(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter.data, mean=0.5, std=0.2)
        else:
            torch.nn.init.normal_(parameter.data, std=0.3)
    return model.float().eval()


def save_hf_model(folder: Path, model: Any, **options: Any) -> Path:
    """`options` are those of `save_pretrained`: max_shard_size makes shards."""
    model.save_pretrained(folder, **options)
    return folder


Metadata = dict[str, Any]


def gguf_metadata(model: Any, arch: str) -> Metadata:
    """What llama.cpp's converter writes for `model`, without a tokenizer."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"]
    metadata: Metadata = {
        "general.name": f"Tiny {arch}",
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": float(theta),
    }
    if arch == "gemma3":
        metadata[f"{arch}.attention.sliding_window"] = config.sliding_window
    return metadata


def gguf_tensors(model: Any, arch: str) -> dict[str, Any]:
    """Tensors of `model` under GGUF's names, with the changes that llama.cpp's converter makes."""
    config = model.config
    enum = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[arch]
    name_map = gguf.get_tensor_name_map(enum, config.num_hidden_layers)
    tensors: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.numpy().astype(np.float32)
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = array.reshape(heads, 2, -1, config.hidden_size)
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if arch == "gemma3" and "norm" in name:
            array = array + 1
        file_name = name_map.get_name(name, try_suffixes=(".weight", ".bias"))
        assert file_name is not None
        tensors[file_name] = array
    return tensors


def write_gguf(
    path: Path,
    arch: str,
    metadata: Metadata,
    tensors: dict[str, Any],
    *,
    kind: str = "F32",
    max_tensors: int = 0,
) -> Path:
    """Write with gguf-py; matrices as `kind`, in parts if `max_tensors` is above 0.

    Values of None are left out. With parts, `path` is that of the first one.
    """
    stem = path.with_name(path.name.removesuffix(".gguf") + ".gguf")
    writer = gguf.GGUFWriter(stem, arch, split_max_tensors=max_tensors)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, array in tensors.items():
        quant = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        if quant.name in ("F32", "F16"):
            writer.add_tensor(name, array.astype(np.float32 if quant.name == "F32" else np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(iter(sorted(path.parent.glob(stem.stem + "*.gguf"))))


def make_gguf(
    path: Path,
    arch: str = "llama",
    *,
    model: Any = None,
    changes: Metadata | None = None,
    without: Iterable[str] = (),
    extra: dict[str, Any] | None = None,
    kind: str = "F32",
    max_tensors: int = 0,
) -> Path:
    """A tiny model: `changes` to its metadata (None drops a key), tensors left out and added."""
    model = model or make_hf_model("gemma3_text" if arch == "gemma3" else arch)
    tensors = gguf_tensors(model, arch) | (extra or {})
    kept = {name: array for name, array in tensors.items() if name not in without}
    metadata = gguf_metadata(model, arch) | (changes or {})
    return write_gguf(path, arch, metadata, kept, kind=kind, max_tensors=max_tensors)


def text(value: str | bytes) -> bytes:
    """A GGUF string: 8 bytes of length, then the bytes."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def raw_gguf(
    keys: Iterable[bytes] = (),
    infos: Iterable[bytes] = (),
    *,
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A GGUF file byte by byte, for files that no library writes. `counts`: tensors, keys."""
    keys, infos = list(keys), list(infos)
    num_tensors, num_keys = counts or (len(infos), len(keys))
    header = struct.pack("<4sIQQ", b"GGUF", version, num_tensors, num_keys)
    header += b"".join(keys) + b"".join(infos)
    return header + bytes(-len(header) % 32) + data


def raw_info(name: str, dims: Iterable[int], type_id: int = 0, offset: int = 0) -> bytes:
    """The tensor info of `raw_gguf`."""
    dims = list(dims)
    return (
        text(name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", type_id, offset)
    )


@pytest.fixture(scope="session")
def raw_files() -> SimpleNamespace:
    """Writers of GGUF byte by byte: `file`, `info`, `text`."""
    return SimpleNamespace(file=raw_gguf, info=raw_info, text=text)


@pytest.fixture(scope="session")
def hf_model() -> Callable[..., Any]:
    return make_hf_model


@pytest.fixture(scope="session")
def save_model() -> Callable[..., Path]:
    return save_hf_model


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a folder with a tiny model: `hf_folder("llama", save={...}, **config)`."""

    def make(
        model_type: str = "llama", *, save: dict[str, Any] | None = None, **overrides: Any
    ) -> Path:
        folder = tmp_path_factory.mktemp("tiny") / f"tiny-{model_type}"
        return save_hf_model(folder, make_hf_model(model_type, **overrides), **(save or {}))

    return make


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny GGUF model in a folder of its own: `gguf_file("llama", kind="Q4_0")`."""

    def make(arch: str = "llama", **options: Any) -> Path:
        return make_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", arch, **options)

    return make
