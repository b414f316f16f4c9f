"""`llmrt doctor`: what it says, and the exit code that scripts rely on."""

import json
import sys

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
