"""The shell of a machine: order, time and stalls."""

import asyncio
import socket
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from llmrt.actor.driver import Driver, Pulse
from llmrt.actor.timer import MIN_WAIT_S

TICK = "tick"


@dataclass
class Recorder:
    """A machine whose effects are scripted; it keeps one deadline, which a tick consumes."""

    effects: dict[str, list[str]] = field(default_factory=dict)
    deadline: float | None = None
    keeps_deadline: bool = False
    is_sound: bool = True
    events: list[tuple[str, float]] = field(default_factory=list)

    def handle(self, event: str, now: float) -> list[str]:
        self.events.append((event, now))
        if event == TICK and not self.keeps_deadline:
            self.deadline = None
        return self.effects.get(event, [])

    def next_deadline(self) -> float | None:
        return self.deadline

    def check(self) -> None:
        assert self.is_sound

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]


def run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


async def until_ticked(machine: Recorder, num_ticks: int = 1) -> None:
    async with asyncio.timeout(10):
        while machine.names.count(TICK) < num_ticks:  # noqa: ASYNC110 (a machine has no event)
            await asyncio.sleep(0)


def test_effects_are_performed_in_order() -> None:
    async def main() -> None:
        performed: list[str] = []
        driver = Driver(Recorder({"a": ["1", "2"], "b": ["3"]}), performed.append, TICK)
        driver.handle("a")
        driver.handle("b")
        assert performed == ["1", "2", "3"]
        driver.close()

    run(main())


def test_a_machine_that_raised_gets_no_more_events() -> None:
    """Not even the one to say goodbye: to its peers it has crashed."""

    async def main() -> None:
        machine = Recorder(is_sound=False)
        driver = Driver(machine, lambda effect: None, TICK, validate=True)
        with pytest.raises(AssertionError):
            driver.handle("a")
        driver.handle("b")
        assert machine.names == ["a"]

    run(main())


def test_an_event_out_of_an_effect_waits_for_the_other_effects() -> None:
    """Else its effects would overtake those that the machine ordered before."""

    async def main() -> None:
        performed: list[str] = []
        machine = Recorder({"a": ["raise b", "2"], "b": ["3"]})

        def perform(effect: str) -> None:
            performed.append(effect)
            if effect == "raise b":
                driver.handle("b")

        driver = Driver(machine, perform, TICK)
        driver.handle("a")
        assert performed == ["raise b", "2", "3"]
        assert machine.names == ["a", "b"]
        driver.close()

    run(main())


def test_tick_comes_at_the_deadline() -> None:
    async def main() -> None:
        at = time.monotonic() + 0.03
        machine = Recorder(deadline=at)
        driver = Driver(machine, lambda _: None, TICK)
        await until_ticked(machine)
        assert machine.names == [TICK]
        assert at <= machine.events[0][1] < at + 2.0
        driver.close()

    run(main())


def test_a_deadline_that_moves_closer_is_kept() -> None:
    async def main() -> None:
        machine = Recorder(deadline=time.monotonic() + 3600)
        driver = Driver(machine, lambda _: None, TICK)
        machine.deadline = time.monotonic() + 0.01
        driver.handle("a")
        await until_ticked(machine)
        driver.close()

    run(main())


def test_a_deadline_that_moves_away_gives_no_early_tick() -> None:
    async def main() -> None:
        machine = Recorder(deadline=time.monotonic() + 0.005)
        driver = Driver(machine, lambda _: None, TICK)
        at = machine.deadline = time.monotonic() + 0.05
        driver.handle("a")
        await until_ticked(machine)
        assert machine.events[-1][1] >= at
        driver.close()

    run(main())


def test_a_deadline_that_a_tick_does_not_consume_is_reported_and_does_not_spin() -> None:
    async def main() -> None:
        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        machine = Recorder(deadline=time.monotonic(), keeps_deadline=True)
        driver = Driver(machine, lambda _: None, TICK)
        await until_ticked(machine, 20)
        times = [now for _, now in machine.events]
        assert times[-1] - times[0] >= 19 * MIN_WAIT_S * 0.9
        assert "Recorder kept its deadline" in faults[0]["message"]
        driver.close()

    run(main())


def test_validate_checks_after_every_event() -> None:
    async def main() -> None:
        machine = Recorder(is_sound=False)
        trusting = Driver(machine, lambda _: None, TICK)
        trusting.handle("a")
        trusting.close()
        checking = Driver(machine, lambda _: None, TICK, validate=True)
        with pytest.raises(AssertionError):
            checking.handle("a")
        checking.close()

    run(main())


def test_a_closed_driver_drops_events() -> None:
    async def main() -> None:
        machine = Recorder(deadline=time.monotonic())
        driver = Driver(machine, lambda _: None, TICK)
        driver.close()
        driver.handle("a")
        await asyncio.sleep(0)
        assert machine.events == []

    run(main())


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_stall_is_measured_whatever_the_loop_runs_first(loop_factory: Any) -> None:
    """asyncio runs what came in before its timers, uvloop after them."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        pulse = Pulse(loop)
        assert pulse.stalled_s() == 0.0
        seen: asyncio.Future[float] = loop.create_future()
        reader, writer = socket.socketpair()

        def on_readable() -> None:
            loop.remove_reader(reader)
            seen.set_result(pulse.stalled_s())

        loop.add_reader(reader, on_readable)
        writer.send(b"x")
        until = time.monotonic() + 0.4
        while time.monotonic() < until:  # the process does not run
            pass
        assert 0.2 < await seen < 2.0
        reader.close()
        writer.close()
        pulse.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
