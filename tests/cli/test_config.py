"""Where a setting comes from, and what is said about one that is wrong."""

from dataclasses import fields
from pathlib import Path

import pytest

from llmrt.broker.settings import BrokerSettings
from llmrt.cli.config import env_name, flag_name, load, unknown_variables
from llmrt.cli.options import BROKER_HELP, WORKER_HELP
from llmrt.cli.settings import UpSettings
from llmrt.cli.up import check_counts
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
        ("[gpu]\n", r"unknown section \[gpu\]: use one of broker, worker, up"),
        ("broker = 1\n", r"write a section \[broker\]"),
        ("[worker]\nmodle = 1\n", "did you mean model"),
        ("[broker]\nmax_live = '9'\n", "max_live in section .broker. is '9': a whole number"),
        ("[broker]\nmax_live = true\n", "is True: a whole number"),
        ("[broker]\nvalidate = 1\n", "is 1: true or false"),
        ("[up]\nprefil = 1\n", r"unknown key prefil in section \[up\]: did you mean prefill\?"),
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


def test_a_variable_that_nothing_reads_is_named_with_the_nearest_one() -> None:
    environ = {
        "LLMRT_BROKER_BIND": "known, if not to every command",
        "LLMRT_UP_DECODE": "1",
        "LLMRT_CACHE": "",
        "LLMRT_PARENT_PID": "1",
        "LLMRT_TEST_MODEL": "of the tests",
        "LLMRTOTHER": "of somebody else",
        "LLMRT_KV_TOKENS": "4096",
        "LLMRT_BROKR_BIND": "x",
        "LLMRT_Q": "x",
    }
    nearest = ["LLMRT_BROKER_BIND", "LLMRT_WORKER_KV_TOKENS"]
    lines = unknown_variables(environ)
    assert [line.split(": did you mean ")[0] for line in lines] == [
        f"unknown environment variable {name}"
        for name in ("LLMRT_BROKR_BIND", "LLMRT_KV_TOKENS", "LLMRT_Q")
    ]
    assert [line.split(": did you mean ")[1] for line in lines[:2]] == [f"{n}?" for n in nearest]


def test_up_takes_its_workers_from_everywhere() -> None:
    file = make_file("[up]\nprefill = 2\ndecode = 3\n")
    settings = load(UpSettings, {"prefill": 1, "both": None}, file, {"LLMRT_UP_BOTH": "4"})
    assert check_counts(settings) == {"both": 4, "prefill": 1, "decode": 3}


def test_up_starts_one_worker_for_both_roles_unless_asked() -> None:
    assert check_counts(UpSettings()) == {"both": 1, "prefill": 0, "decode": 0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (UpSettings(prefill=1), "1 prefill workers and none that decodes"),
        (UpSettings(both=-1), "both is -1"),
        (UpSettings(decode=257), "decode is 257: a number of workers from 0 to 256"),
    ],
)
def test_wrong_numbers_of_workers_are_refused(settings: UpSettings, message: str) -> None:
    """Flags are checked when they are read; a file and the environment are not."""
    with pytest.raises(ConfigError, match=message):
        check_counts(settings)


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
