"""Workers of one host divide the cores by who computes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmrt.engine import core_share
from llmrt.engine.core_share import CoreShare
from llmrt.wire.errors import ConfigError


def test_one_that_computes_alone_has_all_cores(tmp_path: Path) -> None:
    one, other = CoreShare(tmp_path, 8), CoreShare(tmp_path, 8)
    assert one.begin() == 8
    assert other.begin() == 4
    one.end()
    assert other.begin() == 4  # the next step of `one` may follow at once
    time.sleep(core_share._BETWEEN_STEPS_NS / 1e9 + 0.01)
    assert other.begin() == 8


def test_more_workers_than_cores_have_one_each(tmp_path: Path) -> None:
    shares = [CoreShare(tmp_path, 2) for _ in range(3)]
    assert [share.begin() for share in shares] == [2, 1, 1]


def test_a_slot_is_free_again_with_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_share, "MAX_WORKERS", 2)
    one, _other = CoreShare(tmp_path, 2), CoreShare(tmp_path, 2)
    with pytest.raises(ConfigError, match="2 workers share the cores"):
        CoreShare(tmp_path, 2)
    del one
    CoreShare(tmp_path, 2)


def test_a_process_that_was_killed_in_a_step_counts_for_seconds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import sys, time; from pathlib import Path; from llmrt.engine.core_share import CoreShare;"
        "share = CoreShare(Path(sys.argv[1]), 2); share.begin(); print('busy', flush=True);"
        "time.sleep(60)"
    )
    argv = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "busy\n"
        share = CoreShare(tmp_path, 2)
        assert share.begin() == 1
        os.kill(child.pid, signal.SIGKILL)
    later = time.monotonic_ns() + core_share._STEP_NS
    monkeypatch.setattr(time, "monotonic_ns", lambda: later)
    assert share.begin() == 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/none/cores.*runtime_dir"):
        CoreShare(tmp_path / "none", 2)
