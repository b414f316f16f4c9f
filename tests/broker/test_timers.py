"""Deadlines by key."""

import random

from llmrt.broker.timers import Timers


def test_keys_ring_in_the_order_of_their_times() -> None:
    timers: Timers[str] = Timers()
    for key, at in (("b", 2.0), ("a", 1.0), ("d", 4.0), ("c", 2.0)):
        timers.set(key, at)
    assert timers.next() == 1.0
    assert timers.pop_due(3.0) == ["a", "b", "c"]
    assert timers.pop_due(3.0) == []
    assert timers.next() == 4.0


def test_a_replaced_time_does_not_ring() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("a", 5.0)
    assert timers.pop_due(2.0) == []
    timers.set_no_later("a", 3.0)
    timers.set_no_later("a", 9.0)
    assert timers.next() == 3.0
    timers.drop("a")
    timers.drop("a")
    assert timers.next() is None
    assert "a" not in timers


def test_dropped_timers_do_not_pile_up() -> None:
    """Most requests end long before their deadline, which then must not stay in memory."""
    timers: Timers[int] = Timers()
    timers.set(-1, 5e9)
    for number in range(10_000):
        timers.set(number, 1e9 + number)
        timers.drop(number)
    assert len(timers._heap) < 1000
    assert len(timers) == 1
    assert timers.next() == 5e9


def test_many_changes_agree_with_a_plain_dict() -> None:
    rng = random.Random(3)
    timers: Timers[int] = Timers()
    plain: dict[int, float] = {}
    now = 0.0
    for _ in range(5000):
        key = rng.randrange(300)
        match rng.randrange(4):
            case 0 | 1:
                plain[key] = now + rng.randrange(1, 1000)
                timers.set(key, plain[key])
            case 2:
                plain.pop(key, None)
                timers.drop(key)
            case _:
                now += rng.randrange(5)
                due = timers.pop_due(now)
                assert sorted(due) == sorted(k for k, at in plain.items() if at <= now)
                for key in due:
                    del plain[key]
        assert timers.next() == min(plain.values(), default=None)
