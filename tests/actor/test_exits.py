"""What a process says when it ends."""

import errno

import pytest

from llmrt.actor.exits import exit_code, report
from llmrt.actor.streams import OutputError
from llmrt.wire.errors import (
    ERROR_BY_CODE,
    AddressInUse,
    BrokerUnreachable,
    ConfigError,
    InvalidRequest,
    LlmrtError,
    NoWorker,
    RegistrationRefused,
    WorkerLost,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("x"), 2),
        (NoWorker("x"), 69),
        (BrokerUnreachable("x"), 75),
        (RegistrationRefused("x"), 77),
        (ConfigError("x"), 78),
        (AddressInUse("x"), 78),
        (WorkerLost("x"), 1),
        (LlmrtError("x"), 1),
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 130),
        (OutputError(errno.EPIPE), 141),
        (OutputError(errno.ENOSPC), 74),
    ],
)
def test_exit_code_tells_whether_trying_again_is_useful(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


@pytest.mark.parametrize("code", sorted(ERROR_BY_CODE))
def test_a_known_error_is_one_line(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    report(ERROR_BY_CODE[code]("port 7700 is taken"))
    assert capsys.readouterr().err == f"error: port 7700 is taken ({code})\n"


def test_a_full_disk_is_named_and_a_closed_pipe_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    report(OutputError(errno.ENOSPC))
    report(OutputError(errno.EPIPE))
    assert capsys.readouterr().err == "error: cannot write to stdout: No space left on device\n"
