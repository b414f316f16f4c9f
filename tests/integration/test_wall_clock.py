"""The wall clock jumps by an hour, as after a correction: only time stamps of logs may notice."""

import mmap
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
from local_cluster import RunningCluster
from tests.integration.conftest import StartCluster
from tests.integration.probes import wait_until, wait_until_idle

from llmrt.client import Client, Result
from llmrt.wire.errors import DeadlineExceeded

pytestmark = pytest.mark.integration

HOUR_S = 3600
LAYOUTS = {
    "colocated": ("--both", "1"),
    "split": ("--prefill", "1", "--decode", "1", "--transfer", "shm"),
    "split over tcp": ("--prefill", "1", "--decode", "1", "--transfer", "tcp"),
}
# Beats come every second, and 3.5 missed ones are a death.
STAY_S = 4.5
STORY, STORY_TOKENS = "A story that is longer than a jump of the clock", 400
SHORT = 20
# It takes many steps to prefill.
LONG_PROMPT = [2000 + (i * 13 + i * i) % 40000 for i in range(3600)]
NUM_PROMPTS = 4
DEADLINE_S = 1.0
NEVER = ("workers_lost", "dispatches_lost", "requests_resumed", "clients_orphaned", "rows_gap")


@dataclass(frozen=True)
class WallClock:
    """The clock of all processes that are started with `env`."""

    env: Mapping[str, str]
    words: "memoryview[int]"

    def move_to(self, offset_s: int) -> None:
        self.words[0] = offset_s

    @property
    def num_moved_readings(self) -> int:
        return self.words[1]

    @property
    def num_waits(self) -> int:
        """For a moment of the wall clock."""
        return self.words[2]


@pytest.fixture
def clock(tmp_path: Path) -> Iterator[WallClock]:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: install gcc to move the clock of a process")
    library, shared = tmp_path / "moved_clock.so", tmp_path / "clock"
    source = Path(__file__).with_name("moved_clock.c")
    flags = ("-shared", "-fPIC", "-O2", "-Wall", "-Werror")
    subprocess.run([compiler, *flags, "-o", str(library), str(source), "-ldl"], check=True)
    shared.write_bytes(bytes(24))
    env = {"LD_PRELOAD": str(library), "LLMRT_TEST_CLOCK": str(shared)}
    with (
        shared.open("r+b") as file,
        mmap.mmap(file.fileno(), 24) as mapped,
        memoryview(mapped) as raw,
        raw.cast("q") as words,
    ):
        yield WallClock(env, words)


def test_the_clock_of_a_process_is_moved(clock: WallClock) -> None:
    """Else the tests below would show nothing."""
    code = "import time; print(time.time(), time.monotonic())"
    for offset_s in (HOUR_S, -HOUR_S, 0):
        clock.move_to(offset_s)
        env = os.environ | dict(clock.env)
        out = subprocess.check_output([sys.executable, "-c", code], env=env, text=True)
        wall, monotonic = map(float, out.split())
        assert time.time() - wall == pytest.approx(-offset_s, abs=30)
        assert time.monotonic() - monotonic == pytest.approx(0, abs=30)
    assert clock.num_moved_readings > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_jump_of_the_wall_clock_disturbs_nothing(
    start_cluster: StartCluster, clock: WallClock, layout: str
) -> None:
    """Forth and back, in the middle of streams and of prompts, with a stay in between."""
    flags = (*LAYOUTS[layout], "--no-prefix-cache")
    with start_cluster(*flags, env=clock.env) as cluster, Client(cluster.bind) as client:
        before = {row.worker_id: row.epoch for row in client.workers().workers}
        story = client.generate(STORY, max_tokens=STORY_TOKENS)
        answer = client.generate(LONG_PROMPT, max_tokens=8)
        short = client.generate(STORY, max_tokens=SHORT)
        for hour_s in (HOUR_S, -HOUR_S):
            num_before = clock.num_moved_readings
            assert told(cluster, client, partial(clock.move_to, hour_s)) == f"{story.text}\n"
            stay(client, short)
            assert clock.num_moved_readings > num_before
            results = prefilled(client, partial(clock.move_to, 0))
            assert {result.token_ids for result in results} == {answer.token_ids}
        for offset_s in (HOUR_S, -HOUR_S):
            check_deadline(client, partial(clock.move_to, offset_s))
        wait_until_idle(client)
        reply = client.workers()
        assert {row.worker_id: row.epoch for row in reply.workers} == before
        assert {name: reply.counters.get(name, 0) for name in NEVER} == dict.fromkeys(NEVER, 0)
    assert clock.num_waits == 0


def told(cluster: RunningCluster, client: Client, jump: Callable[[], None]) -> str:
    """The text of a client that lives by the same clock, which jumps behind its first words."""
    flags = ("--max-tokens", str(STORY_TOKENS), "--broker", cluster.bind)
    argv = [sys.executable, "-m", "llmrt.cli.main", "generate", STORY, *flags]
    env = dict(psutil.Process(cluster.up.pid).environ()) | {"PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as telling:
        assert telling.stdout is not None
        assert telling.stderr is not None
        text = telling.stdout.read(1)
        jump()
        assert client.workers().requests, "it had ended before the jump"
        text += telling.stdout.read()
        err = telling.stderr.read().decode()
    numbers = re.search(r"first after (-?\d+) ms, then (-?[\d.]+) tokens/s", err)
    assert telling.returncode == 0, err
    assert numbers is not None, err
    assert 0 < float(numbers[1]) < HOUR_S * 500
    assert float(numbers[2]) > 1
    return text.decode()


def stay(client: Client, short: Result) -> None:
    """Long enough for every beat, lease and time-out that would count by this clock."""
    until = time.monotonic() + STAY_S
    while time.monotonic() < until:
        started = time.monotonic()
        result = client.generate(STORY, max_tokens=SHORT)
        assert result.token_ids == short.token_ids
        assert all(ms >= 0 for ms in result.timings_ms.values())
        assert result.timings_ms["total"] <= (time.monotonic() - started) * 1000
        assert all(0 <= row.heartbeat_age_s < STAY_S for row in client.workers().workers)


def prefilled(client: Client, jump: Callable[[], None]) -> list[Result]:
    """Answers, with a jump while their prompts are computed and handed over."""
    with ThreadPoolExecutor(NUM_PROMPTS) as pool:
        ask = partial(client.generate, LONG_PROMPT, max_tokens=8)
        asked = [pool.submit(ask) for _ in range(NUM_PROMPTS)]
        wait_until(lambda: bool(client.workers().requests), 10, "a request is live")
        jump()
        assert 0 in [row.num_tokens for row in client.workers().requests]
        return [one.result(60) for one in asked]


def check_deadline(client: Client, jump: Callable[[], None]) -> None:
    """It comes neither early nor late."""
    started = time.monotonic()
    events = iter(client.stream("hi", max_tokens=3000, ignore_eos=True, deadline_s=DEADLINE_S))
    next(events)
    jump()
    with pytest.raises(DeadlineExceeded):
        list(events)
    assert DEADLINE_S <= time.monotonic() - started < DEADLINE_S + 2
