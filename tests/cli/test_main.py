"""The command line as a user meets it: its output, its errors and its exit codes."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import structlog

from llmrt.cli.answers import given
from llmrt.cli.cluster import failed_code
from llmrt.cli.main import main
from llmrt.cli.options import parse_bias
from llmrt.wire.errors import InternalError
from llmrt.workers.settings import WorkerSettings, check_link

COMMANDS = (
    "run",
    "up",
    "generate",
    "chat",
    "ps",
    "links",
    "broker",
    "worker",
    "bench",
    "doctor",
    "version",
)
NOBODY = "tcp://127.0.0.1:9"


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Llmrt:
    """Runs commands in this process: a new one takes a second on a busy machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *args: str) -> Done:
        self._monkeypatch.setattr(sys, "argv", ["llmrt", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        code = ended.value.code or 0
        assert isinstance(code, int)
        return Done(code, out, err)


@pytest.fixture
def llmrt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Llmrt]:
    monkeypatch.chdir(tmp_path)
    yield Llmrt(monkeypatch, capsys)
    structlog.reset_defaults()


def test_help_lists_the_commands(llmrt: Llmrt) -> None:
    done = llmrt("--help")
    assert done.code == 0
    assert [name for name in COMMANDS if f"\n  {name} " in done.out] == [*COMMANDS]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(llmrt: Llmrt, command: str) -> None:
    done = llmrt(command, "-h")
    assert done.code == 0
    assert done.out.startswith(f"Usage: llmrt {command} ")


def test_a_flag_is_shown_with_its_default_and_its_variable(llmrt: Llmrt) -> None:
    text = " ".join(llmrt("worker", "-h").out.split())
    assert "most tokens in one step [512, LLMRT_WORKER_STEP_TOKENS]" in text
    assert "[required, LLMRT_WORKER_MODEL]" in text


def test_up_shows_where_its_broker_gets_its_settings(llmrt: Llmrt) -> None:
    text = " ".join(llmrt("up", "-h").out.split())
    assert "endpoint for clients [tcp://127.0.0.1:7700, LLMRT_BROKER_BIND]" in text
    assert "endpoint for workers [tcp://127.0.0.1:7701, LLMRT_BROKER_WORKER_BIND]" in text
    assert (
        "Other settings of the broker (llmrt broker --help) are taken from LLMRT_BROKER_*" in text
    )


def test_help_loads_nothing_heavy() -> None:
    """Help in 0.3 s: none of these may be imported for it."""
    heavy = ("torch", "numpy", "rich", "uvloop", "structlog", "zmq", "asyncio", "tokenizers")
    code = f"import sys, llmrt.cli.commands; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_version_is_json_on_demand(llmrt: Llmrt) -> None:
    versions = json.loads(llmrt("version", "--json").out)
    assert versions["protocol"].count(".") == 1
    assert set(versions) >= {"llmrt", "python", "pyzmq"}
    assert f"llmrt       {versions['llmrt']}\n" in llmrt("version").out


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("worker", "--model", "/no/such.gguf"), 78, "no model at /no/such.gguf"),
        (("up", "--model", "/no/such.gguf"), 78, "no model at /no/such.gguf"),
        (("run", "hi", "--model", "/no/such.gguf"), 78, "no model at /no/such.gguf"),
        (("run", "hi", "--model", "/", "--temperature", "nan"), 2, "temperature is nan"),
        (("run", "hi", "--model", "/", "--logit-bias", "13=101"), 2, "logit_bias[13] is"),
        (("run", "hi", "--model", "/", "--stop", ""), 2, "stop holds an empty string"),
        (("run", "hi", "--model", "/", "--deadline-s", "nan"), 2, "deadline_s is nan"),
        (("run", "hi", "--model", "/", "--priority", "-9999999999"), 2, "priority is -9999999999"),
        (("run", "", "--raw", "--model", "/"), 2, "the prompt is empty"),
        (("up",), 78, "worker needs model: give --model, set LLMRT_WORKER_MODEL"),
        (("up", "--prefill", "1", "--model", "/"), 78, "none that decodes"),
        (("generate", "x", "--logit-bias", "13=101", "--broker", NOBODY), 2, "logit_bias[13] is"),
        (("worker", "--role", "draw", "--model", "/"), 78, "role is 'draw'"),
        (("broker", "--log-level", "loud"), 78, "log_level is 'loud'"),
        (("broker", "--bind", "7700"), 78, "'7700' is no endpoint"),
        (("broker", "--bind", "tcp://0.0.0.0:0"), 78, "CURVE keys"),
        (("broker", "--config", "/no/such.toml"), 78, "cannot read /no/such.toml"),
        (("ps", "--broker", "tcp://127.0.0.1:port"), 78, "tcp://127.0.0.1:port"),
        (("generate", "", "--broker", NOBODY), 2, "the prompt is empty"),
        (("generate", "x", "--top-p", "7", "--broker", NOBODY), 2, "top_p is 7.0"),
        (("ps", "--broker", NOBODY), 75, NOBODY),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(
    llmrt: Llmrt, args: tuple[str, ...], code: int, message: str
) -> None:
    done = llmrt(*args)
    last = done.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert "Traceback" not in done.err
    assert (done.code, done.out) == (code, "")


@pytest.mark.parametrize("args", [("broker", "--bnid", "x"), ("up", "--both", "-1"), ("sing",)])
def test_a_wrong_flag_is_a_usage_error(llmrt: Llmrt, args: tuple[str, ...]) -> None:
    done = llmrt(*args)
    assert done.code == 2
    assert args[-1] in done.err or args[-2] in done.err


@pytest.mark.parametrize("bias", ["13", "a=1", "13=", "=1", "1.5=1"])
def test_a_bias_that_is_none_is_a_usage_error(llmrt: Llmrt, bias: str) -> None:
    done = llmrt("generate", "x", "--logit-bias", bias, "--broker", NOBODY)
    assert done.code == 2
    assert f"{bias!r} is not ID=BIAS" in done.err


def test_biases_become_a_mapping() -> None:
    options = {"logit_bias": [parse_bias("13=-100"), parse_bias("7=0.5")], "stop": [], "seed": None}
    assert given(options) == {"logit_bias": {13: -100.0, 7: 0.5}}


def test_a_misspelt_variable_is_a_warning(llmrt: Llmrt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRT_BROKR_BIND", "tcp://127.0.0.1:1")
    done = llmrt("version")
    assert done.code == 0
    assert done.err == (
        "warning: unknown environment variable LLMRT_BROKR_BIND: did you mean LLMRT_BROKER_BIND?\n"
    )
    monkeypatch.setenv("LLMRT_READY_FD", "99")  # a child: its supervisor has said it
    assert llmrt("version").err == ""


@pytest.mark.integration
def test_run_says_once_why_its_worker_cannot_start(tmp_path: Path) -> None:
    """With the code and the exit code of the worker, which knows."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model")
    command = [sys.executable, "-m", "llmrt.cli.main", "run", "hi", "--model", str(broken)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.startswith(f"error: {broken} is not a model: expected ")
    assert done.stderr.endswith(" (model_invalid)\n")
    assert done.stderr.count("\n") == 1
    assert (done.returncode, done.stdout) == (78, "")


def test_the_exit_code_of_run_is_that_of_the_child_that_ended_first() -> None:
    """The others were stopped because of it."""
    assert failed_code({"both-0": 75, "broker": 0}) == 75
    with pytest.raises(InternalError, match="both-0 was ended by SIGKILL"):
        failed_code({"both-0": -9, "broker": 0})
    with pytest.raises(InternalError, match="broker ended before"):
        failed_code({"broker": 0})


@pytest.mark.integration
@pytest.mark.parametrize("flag", ["--bind", "--worker-bind"])
def test_up_names_a_taken_port_before_anything_is_started(llmrt: Llmrt, flag: str) -> None:
    Path("model.gguf").write_bytes(b"not read")
    free = "--worker-bind" if flag == "--bind" else "--bind"
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        done = llmrt("up", "--model", "model.gguf", flag, endpoint, free, "tcp://[::1]:*")
    assert done.err.startswith(f"error: {endpoint} is in use by another program")
    assert done.code == 78


@pytest.mark.parametrize(
    "command",
    [
        ("up", "--both", "2"),
        ("up", "--prefill", "1", "--decode", "1"),
        ("bench", "--layout", "split"),
    ],
)
def test_a_link_that_workers_would_share_is_refused(
    llmrt: Llmrt, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    Path("model.gguf").write_bytes(b"not read")
    monkeypatch.setenv("LLMRT_WORKER_LINK", "tcp://127.0.0.1:7777")
    done = llmrt(*command, "--model", "model.gguf")
    assert done.err.startswith("error: link is tcp://127.0.0.1:7777: 2 workers cannot share it")
    assert done.code == 78


@pytest.mark.parametrize("link", ["tcp://127.0.0.1:*", "tcp://[::1]:0", "ipc://*", None])
def test_a_link_that_each_worker_has_for_itself_is_taken(link: str | None) -> None:
    check_link(WorkerSettings(model=Path("m"), link=link), 2)
    check_link(WorkerSettings(model=Path("m"), link="ipc:///one"), 1)


@pytest.mark.integration
@pytest.mark.parametrize("command", [("worker",), ("run", "hi"), ("up",)])
def test_without_the_packages_of_a_worker_the_remedy_is_told(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['numpy'] = None")
    (tmp_path / "model.gguf").write_bytes(b"not read")
    ends = {"LLMRT_BROKER_BIND": "tcp://127.0.0.1:*", "LLMRT_BROKER_WORKER_BIND": "tcp://[::1]:*"}
    done = subprocess.run(
        [sys.executable, "-m", "llmrt.cli.main", *command, "--model", str(tmp_path / "model.gguf")],
        env=os.environ | ends | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    remedy = "a worker needs the package numpy: pip install 'llmrt[worker]' (config_invalid)"
    assert f"error: {remedy}\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 78


@pytest.mark.integration
def test_up_starts_nothing_on_one_endpoint_for_both(llmrt: Llmrt) -> None:
    Path("model.gguf").write_bytes(b"not read")
    ends = ("--bind", "ipc://x", "--worker-bind", "ipc://./x")
    done = llmrt("up", "--model", "model.gguf", *ends)
    message = "ipc://./x is the address of ipc://x too: choose another endpoint"
    assert (done.code, done.err) == (78, f"error: {message} (config_invalid)\n")


@pytest.mark.integration
def test_up_ends_and_names_the_worker_that_cannot_start(
    llmrt: Llmrt, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("broken.gguf").write_bytes(b"no model")
    monkeypatch.setenv("LLMRT_BROKER_BIND", "tcp://127.0.0.1:*")
    monkeypatch.setenv("LLMRT_BROKER_WORKER_BIND", "tcp://[::1]:*")
    done = llmrt("up", "--model", "broken.gguf", "--decode", "1")
    assert done.code == 78
    assert "decode-0 ended with exit code 78" in done.err.splitlines()[-1]


@pytest.mark.integration
def test_ps_of_a_broker_without_workers() -> None:
    command = [sys.executable, "-m", "llmrt.cli.main"]
    ends = {"LLMRT_BROKER_BIND": "tcp://127.0.0.1:*", "LLMRT_BROKER_WORKER_BIND": "tcp://[::1]:*"}
    with subprocess.Popen(
        [*command, "broker"], env=os.environ | ends, stderr=subprocess.PIPE, text=True
    ) as serving:
        assert serving.stderr is not None
        started = json.loads(serving.stderr.readline())
        assert started["event"] == "broker.started"
        env = os.environ | {"LLMRT_BROKER_BIND": started["bind"]}
        for_people = subprocess.check_output([*command, "ps"], env=env, text=True)
        for_programs = subprocess.check_output([*command, "ps", "--json"], env=env, text=True)
        serving.terminate()
        assert serving.wait(30) == 0
    assert for_people.startswith("WORKER ")
    assert json.loads(for_programs)["workers"] == []
