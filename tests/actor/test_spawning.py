"""Children that are started before their supervisor."""

import sys

import psutil
import pytest

from llmrt.actor.spawning import Child, spawned

pytestmark = pytest.mark.integration

SLEEPER = Child("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"])


def test_children_that_nobody_took_over_end_with_the_block() -> None:
    children = [SLEEPER, Child("short", [sys.executable, "-c", ""])]
    with spawned(children) as running:
        pids = [one.process.pid for one in running.values()]
        running["short"].process.wait(60)
    assert [psutil.pid_exists(pid) for pid in pids] == [False, False]


def test_a_child_that_cannot_be_started_takes_the_others_along() -> None:
    before = psutil.Process().children()
    with (
        pytest.raises(FileNotFoundError),
        spawned([SLEEPER, Child("none", ["/no/such/program"])]),
    ):
        pytest.fail("one of them cannot run")
    assert psutil.Process().children() == before
