"""The flags of `llmrt bench`, and what it says about wrong ones, before anything is started."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import structlog
from tests.cli.bench.results import make_results

from llmrt.cli.bench.command import repeat_flag
from llmrt.cli.bench.plan import BenchSettings
from llmrt.cli.bench.result import make_report
from llmrt.cli.main import main

NOBODY = "tcp://127.0.0.1:9"


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Bench:
    """Runs `llmrt bench` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *args: str) -> Done:
        self._monkeypatch.setattr(sys, "argv", ["llmrt", "bench", *args])
        try:
            main()
            code: object = 0
        except SystemExit as ended:
            code = ended.code or 0
        finally:
            structlog.reset_defaults()
        out, err = self._capsys.readouterr()
        assert isinstance(code, int)
        return Done(code, out, err)


@pytest.fixture
def bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Bench:
    monkeypatch.chdir(tmp_path)
    return Bench(monkeypatch, capsys)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((), 78, "worker needs model: give --model"),
        (("--model", "/no/such.gguf"), 78, "no model at /no/such.gguf"),
        (("--model", "/", "--metric", "speed"), 78, "--metric is 'speed'"),
        (("--model", "/", "--layout", "diagonal"), 78, "--layout is 'diagonal'"),
        (("--model", "/", "--goodput", "ttft:0"), 78, "--goodput has ttft:0"),
        (("--model", "/", "--output", "/no/such/a.json"), 78, "/no/such is no folder"),
        (("--model", "/", "--png", "a.jpg"), 78, "ends in .png"),
        (
            ("--broker", NOBODY, "--max-context", "64"),
            78,
            "--max-context is a setting of the workers",
        ),
        (("--broker", NOBODY), 75, NOBODY),
        (("compare", "a.json", "b.json"), 2, "cannot read a.json"),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(
    bench: Bench, args: tuple[str, ...], code: int, message: str
) -> None:
    done = bench(*args)
    last = done.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert (done.code, done.out) == (code, "")


@pytest.mark.parametrize(
    "args", [("--concurrency", "1,many"), ("--request-rate", "fast"), ("--goodput", "ttft")]
)
def test_what_is_no_number_is_a_usage_error(bench: Bench, args: tuple[str, ...]) -> None:
    done = bench("--model", "/", *args)
    assert done.code == 2
    assert args[0] in done.err


def test_help_names_both_commands(bench: Bench) -> None:
    done = bench("-h")
    assert done.out.startswith("Usage: llmrt bench ")
    assert "compare" in done.out
    assert "--threads" in done.out
    assert bench("compare", "-h").out.startswith("Usage: llmrt bench compare ")


def test_limits_may_follow_one_flag() -> None:
    """As other benchmarks take them; a command behind them is still a command."""
    args = ["--goodput", "ttft:500", "tpot:50", "--json", "x:1", "compare"]
    expected = ["--goodput", "ttft:500", "--goodput", "tpot:50", "--json", "x:1", "compare"]
    assert repeat_flag(args, "--goodput", r"\w+:[\d.]+") == expected
    assert repeat_flag(expected, "--goodput", r"\w+:[\d.]+") == expected


def test_compare_prints_a_table_or_refuses(bench: Bench) -> None:
    settings = BenchSettings(metric="decode")
    slow = make_report(make_results(settings, itls_s=(0.1,)), {}, [])
    fast = make_report(make_results(settings, itls_s=(0.05,), layout="split"), {}, [])
    Path("a.json").write_text(json.dumps(slow))
    Path("b.json").write_text(json.dumps(fast))
    refused = bench("compare", "a.json", "b.json")
    assert (refused.code, refused.out) == (2, "")
    assert "layout is colocated in A and split in B" in refused.err
    done = bench("compare", "a.json", "b.json", "--across", "layout", "--json")
    assert done.code == 0
    assert json.loads(done.out)[0]["speedup"] == 2.0
    assert "2.000x" in bench("compare", "a.json", "b.json", "--across", "layout").out


def test_without_matplotlib_a_picture_is_refused_by_the_name_of_the_extra(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; sys.argv = "
        f"['llmrt', 'bench', '--model', '/', '--png', {str(tmp_path / 'a.png')!r}]; "
        "from llmrt.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert "pip install 'llmrt[bench]'" in done.stderr
