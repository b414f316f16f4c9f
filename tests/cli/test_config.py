"""Where a setting comes from, and what is said about one that is wrong."""

from dataclasses import fields
from pathlib import Path

import pytest

from llmrt.broker.settings import BrokerSettings
from llmrt.cli.config import env_name, flag_name, load
from llmrt.cli.options import BROKER_HELP, WORKER_HELP
from llmrt.wire.errors import ConfigError
from llmrt.workers.settings import WorkerSettings


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_file(text: str, name: str = "llmrt.toml") -> Path:
    path = Path(name).absolute()
    path.write_text(text)
    return path


def test_flag_beats_environment_beats_file_beats_default() -> None:
    make_file('[broker]\nbind = "file"\nworker_bind = "file"\nprefill_policy = "file"\n')
    environ = {"LLMRT_BROKER_BIND": "env", "LLMRT_BROKER_WORKER_BIND": "env"}
    settings = load(BrokerSettings, {"bind": "flag", "worker_bind": None}, None, environ)
    assert settings.bind == "flag"
    assert settings.worker_bind == "env"
    assert settings.prefill_policy == "file"
    assert settings.decode_policy == BrokerSettings().decode_policy


def test_without_a_word_all_is_default() -> None:
    assert load(BrokerSettings, {}, None, {}) == BrokerSettings()


def test_values_have_the_types_of_their_fields() -> None:
    environ = {
        "LLMRT_WORKER_MODEL": "/models/a.gguf",
        "LLMRT_WORKER_KV_TOKENS": "4096",
        "LLMRT_WORKER_HAS_PREFIX_CACHE": "no",
        "LLMRT_WORKER_MAX_CONTEXT": "none",
    }
    file = make_file('[worker]\nmax_context = 5\nthreads = "none"\nruntime_dir = "/run/x"\n', "a")
    settings = load(WorkerSettings, {}, file, environ)
    assert settings == WorkerSettings(
        model=Path("/models/a.gguf"),
        kv_tokens=4096,
        has_prefix_cache=False,
        max_context=None,
        threads=None,
        runtime_dir=Path("/run/x"),
    )
    whole = make_file("[broker]\nbeat_s = 2\n", "b")
    assert repr(load(BrokerSettings, {}, whole, {}).beat_s) == "2.0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[broker]\nbnd = 1\n", r"unknown key bnd in section \[broker\]: did you mean bind\?"),
        ("[brokr]\nbind = 1\n", r"unknown section \[brokr\]: did you mean broker\?"),
        ("[gpu]\n", r"unknown section \[gpu\]: use one of broker, worker"),
        ("broker = 1\n", r"write a section \[broker\]"),
        ("[worker]\nmodle = 1\n", "did you mean model"),
        ("[broker]\nmax_live = '9'\n", "max_live in section .broker. is '9': a whole number"),
        ("[broker]\nmax_live = true\n", "is True: a whole number"),
        ("[broker]\nvalidate = 1\n", "is 1: true or false"),
        ("[broker\n", "cannot read"),
        ("\x00", "cannot read"),
    ],
)
def test_a_wrong_file_is_explained(text: str, message: str) -> None:
    """Also where it is about another component: a typo must not wait for its reader."""
    with pytest.raises(ConfigError, match=message):
        load(BrokerSettings, {}, make_file(text), {})


def test_a_file_that_was_asked_for_must_exist() -> None:
    with pytest.raises(ConfigError, match=r"cannot read nowhere\.toml"):
        load(BrokerSettings, {}, Path("nowhere.toml"), {})


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("LLMRT_BROKER_BNID", "x", "unknown .* LLMRT_BROKER_BNID: did you mean LLMRT_BROKER_BIND"),
        ("LLMRT_BROKER_MAX_LIVE", "many", "LLMRT_BROKER_MAX_LIVE is 'many': a whole number"),
        ("LLMRT_BROKER_VALIDATE", "maybe", "LLMRT_BROKER_VALIDATE is 'maybe': true or false"),
        ("LLMRT_BROKER_BEAT_S", "", "LLMRT_BROKER_BEAT_S is '': a number"),
    ],
)
def test_a_wrong_variable_is_explained(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(BrokerSettings, {}, None, {variable: text})


def test_a_required_setting_names_all_ways_to_give_it() -> None:
    with pytest.raises(ConfigError, match=r"--model, set LLMRT_WORKER_MODEL, .*\[worker\]"):
        load(WorkerSettings, {}, None, {})


def test_every_setting_has_a_help_text() -> None:
    assert set(BROKER_HELP) == {field.name for field in fields(BrokerSettings)}
    assert set(WORKER_HELP) == {field.name for field in fields(WorkerSettings)}


def test_names_of_flags_and_variables() -> None:
    assert flag_name("has_prefix_cache") == "--prefix-cache"
    assert flag_name("kv_tokens") == "--kv-tokens"
    assert env_name("worker", "kv_tokens") == "LLMRT_WORKER_KV_TOKENS"
