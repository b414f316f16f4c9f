"""Clusters of real processes: `llmrt up` with a tiny model that has a real tokenizer."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
from local_cluster import RunningCluster, running_cluster

from llmrt.client import Client
from llmrt.models.gguf import read_gguf

TINY_LAYERS, TINY_HIDDEN, TINY_HEADS, TINY_KV_HEADS, TINY_CONTEXT = 2, 64, 4, 2, 4096
# Everything in float32: then company in a batch changes no token of a random model. Whoever has a
# prefill worker hands over every prompt.
EXACT = ("--dtype", "f32", "--kv-cache-dtype", "f32", "--threads", "1", "--kv-tokens", "32768")
HANDS_OVER = ("--placement", "remote")

StartCluster = Callable[..., AbstractContextManager[RunningCluster]]


@pytest.fixture(scope="session")
def tiny_model(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with the tokenizer and chat template of SmolLM2."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path, smollm2_path, seed=0)
    return path


def write_tiny_model(path: Path, tokenizer_from: Path, *, seed: int, add_bos: bool = False) -> None:
    real = read_gguf(tokenizer_from).metadata
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(TINY_CONTEXT)
    writer.add_embedding_length(TINY_HIDDEN)
    writer.add_block_count(TINY_LAYERS)
    writer.add_feed_forward_length(2 * TINY_HIDDEN)
    writer.add_head_count(TINY_HEADS)
    writer.add_head_count_kv(TINY_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model(real["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(real["tokenizer.ggml.pre"])
    writer.add_token_list(real["tokenizer.ggml.tokens"])
    writer.add_token_types([int(kind) for kind in real["tokenizer.ggml.token_type"]])
    writer.add_token_merges(real["tokenizer.ggml.merges"])
    writer.add_bos_token_id(real["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(real["tokenizer.ggml.eos_token_id"])
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(real["tokenizer.chat_template"])
    rng = np.random.default_rng(seed)
    kv_width = TINY_HIDDEN // TINY_HEADS * TINY_KV_HEADS
    shapes = {"token_embd.weight": (len(real["tokenizer.ggml.tokens"]), TINY_HIDDEN)}
    for i in range(TINY_LAYERS):
        shapes |= {
            f"blk.{i}.attn_q.weight": (TINY_HIDDEN, TINY_HIDDEN),
            f"blk.{i}.attn_k.weight": (kv_width, TINY_HIDDEN),
            f"blk.{i}.attn_v.weight": (kv_width, TINY_HIDDEN),
            f"blk.{i}.attn_output.weight": (TINY_HIDDEN, TINY_HIDDEN),
            f"blk.{i}.ffn_gate.weight": (2 * TINY_HIDDEN, TINY_HIDDEN),
            f"blk.{i}.ffn_up.weight": (2 * TINY_HIDDEN, TINY_HIDDEN),
            f"blk.{i}.ffn_down.weight": (TINY_HIDDEN, 2 * TINY_HIDDEN),
        }
    for name, shape in shapes.items():
        scale = 1.0 if name == "token_embd.weight" else 2.0 * shape[1] ** -0.5
        writer.add_tensor(name, rng.normal(0, scale, shape).astype(np.float32))
    norms = ["output_norm.weight"]
    for i in range(TINY_LAYERS):
        norms += [f"blk.{i}.attn_norm.weight", f"blk.{i}.ffn_norm.weight"]
    for name in norms:
        writer.add_tensor(name, np.ones(TINY_HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def start_cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> StartCluster:
    """`llmrt up` on the tiny model with more flags, in a runtime folder of its own."""

    @contextmanager
    def start(
        *flags: str, model: Path = tiny_model, env: Mapping[str, str] | None = None
    ) -> Iterator[RunningCluster]:
        runtime_dir = tmp_path_factory.mktemp("run")
        runtime_dir.chmod(0o700)
        own = ("--runtime-dir", str(runtime_dir), "--model", str(model), "--validate")
        log_level = ("--log-level", "warning")
        with running_cluster(*EXACT, *HANDS_OVER, *own, *log_level, *flags, env=env) as cluster:
            yield cluster

    return start


@pytest.fixture(scope="session")
def colocated(start_cluster: StartCluster) -> Iterator[RunningCluster]:
    with start_cluster("--both", "1") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def split(start_cluster: StartCluster) -> Iterator[RunningCluster]:
    """Two of each, so that no pair is taken for granted."""
    with start_cluster("--prefill", "2", "--decode", "2") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def split_tcp(start_cluster: StartCluster) -> Iterator[RunningCluster]:
    with start_cluster("--prefill", "2", "--decode", "2", "--transfer", "tcp") as cluster:
        yield cluster


@pytest.fixture(scope="session", params=["colocated", "split"])
def layout(request: pytest.FixtureRequest) -> RunningCluster:
    """Each layout in turn, for tests whose outcome must not depend on it."""
    cluster: RunningCluster = request.getfixturevalue(request.param)
    return cluster


@pytest.fixture
def client(layout: RunningCluster) -> Iterator[Client]:
    with Client(layout.bind) as connected:
        yield connected


@pytest.fixture(scope="session")
def make_tiny_model(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """Another tiny model: the same shapes, other weights."""

    def make(seed: int) -> Path:
        path = tmp_path_factory.mktemp("models") / f"tiny-{seed}.gguf"
        write_tiny_model(path, smollm2_path, seed=seed)
        return path

    return make
