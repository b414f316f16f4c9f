"""A child takes the flags that `cluster` writes, and loads no command line for it."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from llmrt.broker.settings import BrokerSettings
from llmrt.cli.child import read_flags
from llmrt.cli.cluster import broker_child, worker_child
from llmrt.cli.run import KV_TOKENS, TEMPLATE_TOKENS, _kv_tokens
from llmrt.workers.settings import WorkerSettings

WORKER = WorkerSettings(
    model=Path("a model.gguf"),
    role="decode",
    broker="ipc:///run/workers",
    worker_id="decode-3",
    link="tcp://127.0.0.1:*",
    runtime_dir=Path("/run/llmrt"),
    cpu_family="avx2",
    kv_tokens=4096,
    max_context=2048,
    threads=3,
    has_prefix_cache=False,
    trust_remote_code=True,
    validate=True,
)


def test_every_setting_of_a_worker_arrives_as_it_was() -> None:
    flags = dataclasses.asdict(WORKER)
    child = worker_child("decode-3", "decode", flags, Path("some.toml"))
    assert child.argv[2:4] == ["llmrt.cli.child", "worker"]
    read, config = read_flags(WorkerSettings, child.argv[4:])
    assert WorkerSettings(**read) == WORKER  # type: ignore[arg-type]
    assert config == Path("some.toml")


def test_every_setting_of_a_broker_arrives_as_it_was() -> None:
    broker = BrokerSettings(bind="ipc:///a", beat_s=0.1 + 0.2, max_live=7, validate=True)
    child = broker_child(dataclasses.asdict(broker), None)
    read, config = read_flags(BrokerSettings, child.argv[4:])
    assert (BrokerSettings(**read), config) == (broker, None)  # type: ignore[arg-type]


def test_what_was_not_given_is_left_to_the_file_and_the_environment() -> None:
    child = worker_child("both-0", "both", {"model": Path("m.gguf"), "threads": None}, None)
    read, _ = read_flags(WorkerSettings, child.argv[4:])
    assert read == {"model": Path("m.gguf"), "role": "both", "worker_id": "both-0"}


@pytest.mark.integration
@pytest.mark.parametrize("module", ["llmrt.broker.server", "llmrt.workers.server"])
def test_a_child_loads_no_command_line(module: str) -> None:
    heavy = ("torch", "typer", "rich")
    code = (
        f"import sys; from llmrt.cli.child import _import_structlog; _import_structlog();"
        f"import llmrt.actor.runtime, {module};"
        f"print([m for m in {heavy} if m in sys.modules]); import rich"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.integration
def test_a_child_says_why_it_cannot_start_as_the_command_does(tmp_path: Path) -> None:
    child = worker_child("both-0", "both", {"model": tmp_path / "none.gguf"}, None)
    done = subprocess.run(child.argv, capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert done.stderr.startswith(f"error: no model at {tmp_path / 'none.gguf'}")


def test_the_cache_of_one_answer_is_no_larger_than_it_can_use() -> None:
    assert _kv_tokens("hello", {}, None) == KV_TOKENS
    assert _kv_tokens("hello", {}, 2048) == 2048
    assert _kv_tokens("hello", {"max_tokens": 8}, None) == 5 + 8 + TEMPLATE_TOKENS
    assert _kv_tokens("hello", {"max_tokens": -9000}, 16) == TEMPLATE_TOKENS
    assert _kv_tokens("é" * KV_TOKENS, {"max_tokens": 8}, None) == KV_TOKENS
