"""Write a Llama of 1.1 B random weights in Q4_0: `synthetic.py OUT.gguf`. For timing only.

The shape is that of TinyLlama; the vocabulary is made up. A file of 620 MB.
"""

import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType

HIDDEN, LAYERS, HEADS, KV_HEADS, FEED_FORWARD, VOCAB = 2048, 22, 32, 4, 5632, 32_000
HEAD_DIM = HIDDEN // HEADS
CONTEXT = 8192

# A block of Q4_0: a float16 scale, then 32 numbers from -8 to 7 in 4 bits each.
BLOCK_WEIGHTS, BLOCK_BYTES = 32, 18
# Uniform nibbles spread by 4.6 scales: weights of a standard deviation of 0.02.
SCALE = np.float16(0.02 / 4.6)


def main() -> None:
    out = Path(sys.argv[1])
    rng = np.random.default_rng(0)
    partial = out.with_name(f"{out.name}.partial")
    writer = GGUFWriter(partial, "llama")
    add_fields(writer)
    add_vocabulary(writer)
    for name, shape in shapes().items():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            writer.add_tensor(name, blocks(rng, *shape), raw_dtype=GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(out)


def shapes() -> dict[str, tuple[int, ...]]:
    """By name, as [outputs, inputs]."""
    layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (FEED_FORWARD, HIDDEN),
        "ffn_up": (FEED_FORWARD, HIDDEN),
        "ffn_down": (HIDDEN, FEED_FORWARD),
    }
    return {
        "token_embd.weight": (VOCAB, HIDDEN),
        **{f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()},
        "output_norm.weight": (HIDDEN,),
        "output.weight": (VOCAB, HIDDEN),
    }


def blocks(rng: np.random.Generator, num_outputs: int, num_inputs: int) -> np.ndarray:
    num_blocks = num_inputs // BLOCK_WEIGHTS
    raw = rng.integers(0, 256, (num_outputs, num_blocks, BLOCK_BYTES), np.uint8)
    raw[:, :, :2] = np.frombuffer(SCALE.tobytes(), np.uint8)
    return raw.reshape(num_outputs, -1)


def add_fields(writer: GGUFWriter) -> None:
    writer.add_name("Llama 1.1B, random weights")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(2)


def add_vocabulary(writer: GGUFWriter) -> None:
    special = [
        ("<unk>", TokenType.UNKNOWN),
        ("<s>", TokenType.CONTROL),
        ("</s>", TokenType.CONTROL),
    ]
    single = [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
    num_words = VOCAB - len(special) - len(single)
    words = [(f"\u2581w{i}", TokenType.NORMAL) for i in range(num_words)]
    texts, types = zip(*special, *single, *words, strict=True)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


if __name__ == "__main__":
    main()
