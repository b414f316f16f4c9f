"""Lines of a log are JSON with the standard keys first."""

import json

import pytest
import structlog

from llmrt.actor.log import configure
from llmrt.wire.errors import ConfigError


@pytest.fixture(autouse=True)
def _restore() -> None:
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


def test_every_line_has_the_standard_keys_first(capsys: pytest.CaptureFixture[str]) -> None:
    configure("worker", "decode-0")
    structlog.get_logger("x").info("request.finished", num_tokens=3, request_id=b"\x01\xff")
    (line,) = lines(capsys)
    assert list(line) == [
        "ts",
        "level",
        "event",
        "component",
        "worker_id",
        "request_id",
        "num_tokens",
    ]
    assert str(line.pop("ts")).endswith("Z")
    assert line == {
        "level": "info",
        "event": "request.finished",
        "component": "worker",
        "worker_id": "decode-0",
        "request_id": "01ff",
        "num_tokens": 3,
    }


def test_lines_below_the_level_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    configure("broker", level="warning")
    log = structlog.get_logger("x")
    log.info("quiet")
    log.warning("loud")
    assert [line["event"] for line in lines(capsys)] == ["loud"]


def test_whatever_a_value_is_the_line_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    configure("broker")
    structlog.get_logger("x").info("odd", a=object, b={2, 1}, c="a\nb \ud800", d=float("nan"))
    (line,) = lines(capsys)
    assert line["b"] == [1, 2]
    assert line["c"] == "a\nb \ud800"


def test_an_exception_is_one_line_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    configure("broker")
    try:
        raise ValueError("fault")
    except ValueError as error:
        structlog.get_logger("x").error("process.crashed", exc_info=error)
    (line,) = lines(capsys)
    assert "test_log.py" in str(line["exception"])
    assert "ValueError: fault" in str(line["exception"])


def test_no_terminal_no_console_form(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMRT_LOG", "console")
    configure("broker")
    structlog.get_logger("x").info("kept")
    assert lines(capsys)[0]["event"] == "kept"


def test_an_unknown_level_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'loud': use one of debug, info, warning, error"):
        configure("broker", level="loud")
