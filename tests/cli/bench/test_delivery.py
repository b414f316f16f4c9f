"""Where a report goes."""

from pathlib import Path

import pytest

from llmrt.cli.bench.delivery import Delivery
from llmrt.wire.errors import ConfigError


def test_a_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The report, which took an hour, is on stdout then."""
    deliver = Delivery(Path("/dev/full"), None, as_json=True)
    with pytest.raises(ConfigError, match="cannot write /dev/full: No space left on device"):
        deliver({"results": []})
    assert capsys.readouterr().out == '{"results": []}\n'
