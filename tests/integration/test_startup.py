"""What keeps a process from serving is said at once, by name, before anything heavy is loaded."""

import socket
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from local_cluster import RunningCluster
from safetensors.numpy import save_file
from tests.integration.conftest import EXACT
from tests.integration.probes import Ended, run_llmrt, running_llmrt, wait_until

from llmrt.actor.sockets import check_free
from llmrt.client import Client
from llmrt.wire.errors import BrokerUnreachable, ConfigError

pytestmark = pytest.mark.integration

# Importing torch alone takes more; an interpreter with all else some 0.7 s.
CPU_S = 2.0
NOBODY = "tcp://127.0.0.1:9"


def refused_worker(model: Path, *flags: object) -> Ended:
    ended = run_llmrt("worker", "--model", model, "--broker", NOBODY, *flags)
    assert ended.code == 78, ended
    assert ended.cpu_s < CPU_S
    assert "Traceback" not in ended.err
    return ended


def gguf_header(num_tensors: int, num_keys: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(
    name: bytes, dims: list[int], kind: int = 0, offset: int = 0, num_dims: int | None = None
) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", num_dims or len(dims), *dims)
    return gguf_header(1, 0) + text(name) + shape + struct.pack("<IQ", kind, offset)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return gguf_header(0, 1) + text(name) + struct.pack("<I", kind) + value


HOSTILE = {
    "many dimensions": (tensor(b"w.one", [8], num_dims=1_000_000), "w.one"),
    "no dimension": (tensor(b"w.one", [0, 8]), "w.one"),
    "a product that wraps": (tensor(b"w.one", [2**32, 2**32, 2]), "w.one"),
    "beyond the file": (tensor(b"w.one", [32, 32], 0, 2**40), "w.one"),
    "unknown type": (tensor(b"w.one", [32, 32], 99), "w.one"),
    "alignment of 0": (key(b"general.alignment", 4, struct.pack("<I", 0)), "general.alignment"),
    "endless string": (key(b"general.name", 8, struct.pack("<Q", 2**63)), "general.name"),
    "endless array": (key(b"some.array", 9, struct.pack("<IQ", 8, 2**60)), "some.array"),
    "many keys": (gguf_header(0, 2**60), "keys"),
    "nothing in it": (gguf_header(0, 0), "general.architecture"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_gguf_is_refused_naming_the_place(tmp_path: Path, name: str) -> None:
    content, place = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content + bytes(64))
    assert place in refused_worker(path).err


def test_a_truncated_gguf_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_model.read_bytes()[:-4096])
    assert "cut.gguf" in refused_worker(path).err


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    assert str(missing) in refused_worker(missing).err
    for command in (("up",), ("run", "hello")):
        ended = run_llmrt(*command, "--model", missing)
        assert (ended.code, ended.out) == (78, "")
        assert str(missing) in ended.err


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_file({"model.norm.weight": np.ones(8, np.float32)}, tmp_path / first)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors.index.json").write_text(
        f'{{"weight_map": {{"model.norm.weight": "{first}", "lm_head.weight": "{second}"}}}}'
    )
    assert second in refused_worker(tmp_path).err


def test_a_shard_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"model.norm.weight": np.ones(4096, np.float32)}, path)
    path.write_bytes(path.read_bytes()[:-4096])
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "model.safetensors" in refused_worker(tmp_path).err


def test_a_port_in_use_is_named_before_weights_are_read(
    colocated: RunningCluster, tiny_model: Path
) -> None:
    """By another cluster, and by any other program; the first one serves on."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        foreign = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        for flag, endpoint in (
            ("--bind", colocated.bind),
            ("--worker-bind", colocated.worker_bind),
            ("--bind", foreign),
        ):
            free = ["--bind", "tcp://127.0.0.1:*", "--worker-bind", "tcp://127.0.0.1:*"]
            ended = run_llmrt("up", "--model", tiny_model, *free, flag, endpoint)
            assert ended.code == 78
            assert endpoint in ended.err
            assert "in use" in ended.err
            assert ended.cpu_s < CPU_S
    with Client(colocated.bind) as client:
        assert client.generate("hi", max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("flag", "value", "text"),
    [
        ("--role", "boss", "role is 'boss'"),
        ("--transfer", "pigeon", "transfer is 'pigeon'"),
        ("--broker", "tcp://no-such-host.invalid:1", "no-such-host.invalid"),
        ("--broker", "http://127.0.0.1:1", "http://127.0.0.1:1"),
        ("--link", "tcp://0.0.0.0:*", "tcp://0.0.0.0:"),
        ("--max-context", "1000000", "max_context is 1000000"),
        ("--kv-tokens", "1", "kv_tokens is 1"),
    ],
)
def test_a_wrong_setting_is_named(tiny_model: Path, flag: str, value: str, text: str) -> None:
    ended = run_llmrt("worker", "--model", tiny_model, flag, value)
    assert ended.code == 78
    assert text in ended.err
    assert "Traceback" not in ended.err


def test_a_client_without_a_broker_gets_a_code_in_time() -> None:
    asks: list[Callable[[Client], object]] = [
        lambda client: client.generate("hi"),
        lambda client: client.workers(),
        lambda client: next(iter(client.stream("hi"))),
    ]
    for ask in asks:
        client = Client(NOBODY, connect_timeout_s=0.3)
        with pytest.raises(BrokerUnreachable, match=NOBODY):
            ask(client)
        client.close()
    unknown = Client("tcp://no-such-host.invalid:1")
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid"):
        unknown.open()
    unknown.close()
    ended = run_llmrt("generate", "hi", "--broker", NOBODY, timeout_s=30)
    assert ended.code == 75
    assert NOBODY in ended.err


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_worker_waits_for_its_broker(tiny_model: Path, tmp_path: Path, host: str) -> None:
    """And all find each other by `localhost`, whichever of its addresses is served."""
    bind, worker_bind = (check_free(f"tcp://{host}:*") for _ in range(2))
    where = ("--broker", worker_bind.replace(host, "localhost"), "--runtime-dir", tmp_path)
    tmp_path.chmod(0o700)
    with running_llmrt("worker", "--model", tiny_model, *EXACT, *where) as worker:
        wait_until(lambda: any(tmp_path.glob("*.arena")), 60, "the worker has loaded")
        assert worker.poll() is None
        with (
            running_llmrt("broker", "--bind", bind, "--worker-bind", worker_bind),
            Client(bind.replace(host, "localhost"), connect_timeout_s=30) as client,
        ):
            wait_until(lambda: len(client.workers().workers) == 1, 30, "the worker registers")
            assert client.generate("hi", max_tokens=2).usage.completion_tokens == 2
