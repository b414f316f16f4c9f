"""What keeps a process from serving is said at once, by name, before anything heavy is loaded."""

import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgpack
import numpy as np
import pytest
from local_cluster import RunningCluster
from safetensors.numpy import save_file
from tests.integration.conftest import EXACT
from tests.integration.probes import Ended, run_llmrt, running_llmrt, wait_until

from llmrt.actor import sockets
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


@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
def test_a_runtime_folder_that_others_can_enter_is_refused(
    tiny_model: Path, tmp_path: Path, role: str
) -> None:
    tmp_path.chmod(0o755)
    ended = refused_worker(tiny_model, "--role", role, "--runtime-dir", tmp_path)
    assert f"runtime_dir {tmp_path} belongs to user" in ended.err
    assert "mode 755" in ended.err


def test_a_runtime_folder_that_cannot_hold_a_socket_is_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert f"{file}: it cannot be made" in refused_worker(tiny_model, "--runtime-dir", file).err
    long = ("--link", "tcp://127.0.0.1:*", "--runtime-dir", tmp_path / ("x" * 100))
    assert "choose a shorter runtime_dir" in refused_worker(tiny_model, *long).err


def test_an_arena_socket_that_cannot_be_is_told_after_the_model_is_loaded(
    tiny_model: Path, tmp_path: Path
) -> None:
    """By an error with a code: sockets and threads are closed in order."""
    code = (
        "import os, pathlib, sys; from llmrt.cli.main import main;"
        "pathlib.Path(sys.argv.pop(1), f'w.{os.getpid()}.arena').touch(); main()"
    )
    flags = ("--model", tiny_model, *EXACT, "--broker", NOBODY, "--worker-id", "w")
    command = [sys.executable, "-c", code, tmp_path, "worker", *flags, "--runtime-dir", tmp_path]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=60
    )
    assert "model.loaded" in done.stderr
    assert done.stderr.endswith(
        ".arena is in the way and is no socket: remove it (address_in_use)\n"
    )
    assert done.returncode == 78


def test_the_endpoints_of_a_broker_are_not_mistaken_for_each_other(
    colocated: RunningCluster, tiny_model: Path
) -> None:
    worker = run_llmrt("worker", "--model", tiny_model, *EXACT, "--broker", colocated.bind)
    assert worker.err.endswith(
        f"error: {colocated.bind}: this is the broker's endpoint for clients: "
        f"give --broker the one for workers, {colocated.worker_bind} (config_invalid)\n"
    )
    assert worker.code == 78
    for command in (("ps",), ("generate", "hi")):
        client = run_llmrt(*command, "--broker", colocated.worker_bind)
        assert client.err == (
            f"error: {colocated.worker_bind}: this is the broker's endpoint for workers: "
            f"give --broker the one for clients, {colocated.bind} (config_invalid)\n"
        )
        assert client.code == 78


def test_a_worker_ends_at_a_broker_of_another_version(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with sockets.context() as context, sockets.router(context) as broker:
        where = ("--broker", sockets.bind(broker, "tcp://127.0.0.1:*"))
        with running_llmrt("worker", "--model", tiny_model, *EXACT, *where, stderr=log) as worker:
            assert broker.poll(60_000)
            routing_id, *_ = broker.recv_multipart()
            broker.send_multipart([routing_id, msgpack.packb(("llmrt", 2, 0, "registered"))])
            assert worker.wait(30) == 78
    assert "2.0" in log.read_text()
    assert "(version_mismatch)" in log.read_text()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_worker_waits_for_its_broker(tiny_model: Path, tmp_path: Path, host: str) -> None:
    """And all find each other by `localhost`, whichever of its addresses is served."""
    bind, worker_bind = (check_free(f"tcp://{host}:*") for _ in range(2))
    where = ("--broker", worker_bind.replace(host, "localhost"), "--runtime-dir", tmp_path)
    tmp_path.chmod(0o700)
    log = tmp_path / "log"
    with running_llmrt("worker", "--model", tiny_model, *EXACT, *where, stderr=log) as worker:
        wait_until(lambda: "broker.not_heard" in log.read_text(), 60, "the worker says so")
        assert worker.poll() is None
        with (
            running_llmrt("broker", "--bind", bind, "--worker-bind", worker_bind),
            Client(bind.replace(host, "localhost"), connect_timeout_s=30) as client,
        ):
            wait_until(lambda: len(client.workers().workers) == 1, 30, "the worker registers")
            assert client.generate("hi", max_tokens=2).usage.completion_tokens == 2
    assert "worker.registered" in log.read_text()
