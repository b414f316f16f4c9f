"""The machine as a whole: time, death, and cost."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.broker.conftest import Rig, make_process, row, to_clients, to_workers

from llmrt.broker.core import SETTLE_BEATS, BrokerCore
from llmrt.broker.events import ProcessDied, Tick
from llmrt.broker.settings import BrokerSettings
from llmrt.wire import messages as m
from llmrt.wire.errors import ConfigError


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"decode_policy is 'fair'.*round-robin"):
        BrokerCore(BrokerSettings(decode_policy="fair"), 1)


def test_without_peers_nothing_is_due(rig: Rig) -> None:
    assert rig.core.next_deadline() is None
    assert rig.handle(Tick()) == []


def test_a_tick_consumes_every_deadline(rig: Rig) -> None:
    """`advance` asserts it after each tick, up to the time when nothing is left to expire."""
    rig.hello(pid=3)
    rig.register("p0", "prefill")
    rig.register("d0", "decode")
    for number in range(5):
        rig.generate(number, budget_ms=1000 * number + 500)
    rig.client(m.CANCEL, 4)
    rig.client(m.CANCEL, 99)
    rig.advance(10_000.0)
    assert rig.core.next_deadline() is None
    assert rig.counters["workers_lost"] == 2
    assert rig.counters["requests_expired"] + rig.counters["requests_cancelled"] == 5


def test_a_broker_that_was_stopped_does_not_bury_its_peers(rig: Rig) -> None:
    """Their beats lie unread in its sockets, and the timers ring first."""
    rig.register("d0")
    rig.generate(1)
    rig.now += 20.0
    rig.handle(Tick())
    assert rig.counters["stalls"] == 1
    assert rig.counters["workers_lost"] == rig.counters["clients_orphaned"] == 0
    rig.heartbeat("d0")
    rig.client(m.BEAT)
    assert to_clients(rig.step("d0", row(1, 0)), m.EVENTS)


def test_a_stop_of_the_broker_still_spends_the_requests_time(rig: Rig) -> None:
    rig.register("d0")
    rig.generate(1, budget_ms=5000)
    rig.now += 20.0
    effects = rig.handle(Tick())
    assert [s.failure.code for s in to_clients(effects)] == ["deadline_exceeded"]


def test_one_process_may_be_worker_and_client(rig: Rig) -> None:
    rig.hello(pid=5)
    rig.register("d0", process=make_process(5))
    rig.register("d1")
    rig.generate(1)
    rig.generate(2)
    effects = rig.handle(ProcessDied(make_process(5)))
    assert rig.counters["requests_cancelled"] == 2
    assert not to_clients(effects)
    assert [s.kind for s in to_workers(effects)].count(m.CANCEL) >= 1


def test_each_request_is_counted_once(rig: Rig) -> None:
    rig.hello()
    rig.advance(SETTLE_BEATS)
    rig.generate(1)
    rig.register("d0")
    for number in range(2, 8):
        rig.generate(number)
    rig.generate(7)
    rig.finish("d0", 2)
    rig.finish("d0", 3)
    rig.client(m.CANCEL, 4)
    rig.client(m.CANCEL, 4)
    count = rig.counters
    outcomes = [count[f"requests_{o}"] for o in ("finished", "failed", "cancelled", "expired")]
    assert (count["requests_admitted"], count["requests_refused"]) == (6, 1)
    assert count["requests_attached"] == 1
    assert outcomes == [2, 0, 1, 0]


def test_live_requests_cost_nothing_while_nothing_happens(make_rig: Callable[..., Rig]) -> None:
    """A scan of all requests per event would take some ms here, not microseconds."""
    rig = make_rig(max_live=10_000)
    core = rig.core
    check, rig.core.check = core.check, lambda: None  # type: ignore[method-assign]
    rig.register("d0")
    for number in range(10_000):
        rig.generate(number)
    check()
    started = time.process_time()
    for _ in range(1000):
        rig.client(m.BEAT)
        core.next_deadline()
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beat_s", float("nan")),
        ("beat_s", -1.0),
        ("dead_after_beats", 0.0),
        ("max_live", -5),
        ("worker_bind", BrokerSettings().bind),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        BrokerCore(BrokerSettings(**{name: value}), epoch=1)
