"""`llmrt doctor`: what it says, and the exit code that scripts rely on."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmrt.cli.main import main
from llmrt.kernels.cpu import library as c


def doctor(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["llmrt", "doctor", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def checks(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"is_ok", "checks"}
    return {check["name"]: check for check in report["checks"]}


def test_all_is_well_where_the_step_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(monkeypatch, "--json") == 0
    found = checks(capsys)
    assert found["compiled step"]["status"] == "ok"
    used = [name for name, check in found.items() if check["value"].startswith("used")]
    assert used == [f"family {c.best_family().name}"]
    for family in c.families():
        assert (found[f"family {family.name}"]["value"][:3] == "not") == (not family.is_supported)
    assert {"python", "cpu", "packages", "compiler", "torch", "threads", "memory"} <= set(found)
    assert found["shared memory"]["status"] == "ok"


@pytest.mark.usefixtures("no_library")
def test_without_step_torch_is_a_warning_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(monkeypatch, "--json") == 0
    step = checks(capsys)["compiled step"]
    assert step["status"] == "warning"
    assert "apt install gcc" in step["remedy"]


@pytest.mark.usefixtures("no_library")
def test_without_step_and_torch_no_worker_can_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", _all_but("torch"))
    assert doctor(monkeypatch) == 1
    lines = capsys.readouterr().out.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("FAIL  compiled step")]
    assert "-> the compiled CPU step is not built" in lines[at + 1]


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", _all_but("tokenizers"))
    assert doctor(monkeypatch, "--json") == 1
    packages = checks(capsys)["packages"]
    assert (packages["status"], packages["value"]) == ("error", "without tokenizers")
    assert "pip install" in packages["remedy"]


def _all_but(missing: str) -> object:
    return lambda name: None if name == missing else object()


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Write settings of workers to the llmrt.toml of the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(**values: str) -> None:
        lines = [f'{name} = "{value}"' for name, value in values.items()]
        (tmp_path / "llmrt.toml").write_text("\n".join(["[worker]", *lines]))

    return write


def test_a_family_that_is_set_is_the_one_used(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: Callable[..., None],
) -> None:
    settings(cpu_family="portable")
    assert doctor(monkeypatch, "--json") == 0
    found = checks(capsys)
    used = [name for name, check in found.items() if check["value"].startswith("used")]
    assert used == ["family portable"]
    assert found["device"]["value"] == "cpu: the compiled step, family portable"


def test_the_environment_is_stronger_than_the_file(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: Callable[..., None],
) -> None:
    settings(device="torch")
    monkeypatch.setenv("LLMRT_WORKER_DEVICE", "cpu")
    assert doctor(monkeypatch, "--json") == 0
    assert checks(capsys)["device"]["value"].startswith("cpu: ")


def test_torch_that_is_set_is_a_warning_of_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: Callable[..., None],
) -> None:
    settings(device="torch")
    assert doctor(monkeypatch, "--json") == 0
    found = checks(capsys)
    assert found["device"]["status"] == "warning"
    assert "without speed, int8 and fp8 KV" in found["device"]["value"]
    assert not any(check["value"].startswith("used") for check in found.values())


@pytest.mark.usefixtures("no_library")
def test_torch_that_stands_in_is_a_warning_of_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(monkeypatch, "--json") == 0
    device = checks(capsys)["device"]
    assert (device["status"], device["remedy"]) == ("warning", "build the compiled step")
    assert "without speed, int8 and fp8 KV" in device["value"]


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize(
    "values", [{"device": "cpu"}, {"cpu_family": "avx2"}, {"kv_cache_dtype": "int8"}]
)
def test_settings_that_need_a_step_that_is_missing_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: Callable[..., None],
    values: dict[str, str],
) -> None:
    settings(**values)
    assert doctor(monkeypatch, "--json") == 1
    assert checks(capsys)["device"]["status"] == "error"


@pytest.mark.parametrize(
    ("values", "name", "message"),
    [
        ({"cpu_family": "z80"}, "device", "cpu_family is 'z80'"),
        ({"device": "gpu"}, "device", "one of auto, cpu, torch"),
        ({"device": "torch", "cpu_family": "avx2"}, "device", "only the cpu device has families"),
        ({"kv_cache_dtype": "int4"}, "device", "kv_cache_dtype is 'int4'"),
        ({"familiy": "avx2"}, "settings", "unknown key familiy"),
    ],
)
def test_settings_that_no_worker_takes_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: Callable[..., None],
    values: dict[str, str],
    name: str,
    message: str,
) -> None:
    settings(**values)
    assert doctor(monkeypatch, "--json") == 1
    found = checks(capsys)[name]
    assert found["status"] == "error"
    assert message in found["remedy"]
