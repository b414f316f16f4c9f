"""The torch device on a real model, SmolLM2-135M-Instruct in Q4_1, against transformers.

The oracle is the same model in float32 with the same dequantized weights. It sees whole texts at
once; the device made them token by token in batches of many rows. Where every token is the
oracle's best one given those before it, the text is the oracle's greedy continuation.
"""

from array import array
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from llmrt.engine.batch import LOCAL_ARENA, Batch, Row, SampleSpec, SequenceId
from llmrt.engine.torch_device import TorchDevice
from llmrt.models.loading import open_model
from llmrt.wire.kv import BLOCK_TOKENS
from llmrt.wire.sampling import SamplingParams

Texts = list["array[int]"]
Oracle = Callable[[Texts], npt.NDArray[np.float32]]

NUM_PROMPTS = 20
PROMPT_TOKENS = 33
NEW_TOKENS = 32
BLOCKS_PER_TEXT = 3
TEXT = """
The old man went down to the river early in the morning , before the sun was over the trees .
He had a small boat there , and in the boat he kept a long line and a box of food . For many
years he had lived alone near the water , and he knew every turn of it . The people of the town
said that he could tell the weather from the sound of the birds . Some of them believed it , and
some did not . When the war came , the young men left and the fields were empty , but he stayed .
He said that a river does not stop because there is a war , and that someone must watch it . In
the second year of the war a group of children came to his house and asked him for help , because
"""

# Logits differ by some 1e-5 for the order of sums.
F32_MARGIN = 1e-3
# bfloat16 activations, 4-bit scales and KV, 2**-9 each, add up over 30 layers to a deviation of
# some 0.1 between two logits, which themselves deviate by 3.
BF16_MARGIN = 0.3


def step(device: TorchDevice, texts: Texts) -> None:
    """Append the greedy token to each text; computes its last token, or all of a new text."""
    rows = []
    for idx, text in enumerate(texts):
        start = 0 if len(text) == PROMPT_TOKENS else len(text) - 1
        first = idx * BLOCKS_PER_TEXT
        rows.append(
            Row(
                SequenceId(idx),
                LOCAL_ARENA,
                text[start:],
                start,
                array("I", range(first, first + BLOCKS_PER_TEXT)),
                SampleSpec(SamplingParams(), 0, len(text), text, PROMPT_TOKENS),
            )
        )
    for text, drawn in zip(texts, device.run(Batch(0, tuple(rows))).drawn, strict=True):
        assert drawn.error is None
        text.append(drawn.token_ids[0])


def make_device(path: Path, dtype: str, kv_dtype: str) -> TorchDevice:
    device = TorchDevice(open_model(path), dtype=dtype, kv_dtype=kv_dtype)
    num_blocks = NUM_PROMPTS * BLOCKS_PER_TEXT
    assert BLOCKS_PER_TEXT * BLOCK_TOKENS > PROMPT_TOKENS + NEW_TOKENS
    device.add_arena(LOCAL_ARENA, memoryview(bytearray(num_blocks * device.kv_block_bytes)))
    return device


@pytest.fixture(scope="module")
def prompts(smollm2_path: Path) -> Texts:
    """Windows of a plain text, each of whose words is one token after a space."""
    tokens = open_model(smollm2_path).metadata["tokenizer.ggml.tokens"]
    id_of_word = {token: token_id for token_id, token in enumerate(tokens)}
    ids = [id_of_word["\u0120" + word] for word in TEXT.split()]
    stride = (len(ids) - PROMPT_TOKENS) // (NUM_PROMPTS - 1)
    return [
        array("I", ids[first : first + PROMPT_TOKENS])
        for first in range(0, NUM_PROMPTS * stride, stride)
    ]


@pytest.fixture(scope="module")
def oracle(smollm2_path: Path) -> Oracle:
    """Logits [texts, new tokens, vocab] by transformers with gguf-py's dequantized weights."""
    reader = gguf.GGUFReader(smollm2_path)
    weights = {
        tensor.name: torch.tensor(
            gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        )
        for tensor in reader.tensors
    }
    config = transformers.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    layer_names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for idx in range(config.num_hidden_layers):
        for theirs, ours in layer_names.items():
            names[f"model.layers.{idx}.{theirs}.weight"] = f"blk.{idx}.{ours}.weight"
    state = {theirs: weights[ours] for theirs, ours in names.items()}
    for name in state:
        if "q_proj" in name or "k_proj" in name:  # GGUF has the pairs of a head side by side
            state[name] = state[name].view(-1, 32, 2, 576).transpose(1, 2).reshape(-1, 576)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.eval()  # type: ignore[no-untyped-call]

    def logits(texts: Texts) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            whole = model(torch.tensor(texts), logits_to_keep=NEW_TOKENS + 1).logits
        result: npt.NDArray[np.float32] = whole[:, :-1].numpy()
        return result

    return logits


def generate(device: TorchDevice, prompts: Texts) -> Texts:
    texts = [prompt[:] for prompt in prompts]
    for _ in range(NEW_TOKENS):
        step(device, texts)
    return texts


def test_f32_continues_as_transformers_does(
    smollm2_path: Path, prompts: Texts, oracle: Oracle
) -> None:
    texts = generate(make_device(smollm2_path, "f32", "f32"), prompts)

    logits = oracle(texts)
    drawn = np.array(texts)[:, PROMPT_TOKENS:]
    second, first = np.partition(logits, -2)[..., -2:].transpose(2, 0, 1)
    is_clear = first - second > F32_MARGIN
    assert is_clear.mean() > 0.99
    assert ((logits.argmax(-1) == drawn) | ~is_clear).all()


def test_4_bit_weights_and_bf16_agree_within_their_rounding(
    smollm2_path: Path, prompts: Texts, oracle: Oracle
) -> None:
    device = make_device(smollm2_path, "auto", "bf16")
    assert "-int4" in device.numerics_id
    # One row's products, then 4-bit ones of several, then dense ones.
    for few in (prompts[:1], prompts[:4], prompts[4:9]):
        texts = generate(device, few)

        logits = oracle(texts)
        drawn = np.array(texts)[:, PROMPT_TOKENS:]
        chosen = np.take_along_axis(logits, drawn[..., None], -1)[..., 0]
        assert (logits.max(-1) - chosen).max() < BF16_MARGIN
        assert (logits.argmax(-1) == drawn).mean() > 0.95
