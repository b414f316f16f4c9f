"""The thread that runs steps: what comes of each, in order, and what follows what."""

import asyncio
import threading
from array import array
from collections.abc import Callable

import msgspec

from llmrt.engine.batch import (
    LOCAL_ARENA,
    ArenaId,
    Batch,
    Drawn,
    Row,
    SampleSpec,
    SequenceId,
    StepResult,
)
from llmrt.engine.rights import WriteRight
from llmrt.wire.errors import InternalError
from llmrt.wire.sampling import SamplingParams
from llmrt.workers.events import StepDone, StepTaken
from llmrt.workers.step_thread import StepThread


class CountingDevice:
    """Draws the number behind each row's token; fails where the token is 13."""

    numerics_id = "counting"

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def run(self, batch: Batch) -> StepResult:
        assert self.may_go_on.wait(10)
        tokens = [row.token_ids[-1] for row in batch.rows]
        if 13 in tokens:
            raise InternalError("unlucky")
        drawn = tuple(
            Drawn(row.sequence_id, (token + 1,))
            for row, token in zip(batch.rows, tokens, strict=True)
        )
        return StepResult(batch.step_id, drawn, 0.0, 0.0)

    def add_arena(self, arena: ArenaId, buffer: memoryview) -> None:
        raise ValueError(f"no room for {arena}")

    def remove_arena(self, arena: ArenaId) -> None:
        raise ValueError(f"there is no arena {arena}")


def make_batch(step_id: int, token: int, *, follows: bool = False) -> Batch:
    sample = SampleSpec(SamplingParams(), 0, 1, array("I"), 1)
    row = Row(SequenceId(1), LOCAL_ARENA, array("I", [token]), 0, array("I", [0]), sample)
    return Batch(step_id, (row,), follows)


def events_of(
    work: Callable[[StepThread, CountingDevice], None], num_events: int
) -> list[StepTaken | StepDone]:
    """What the loop hears."""

    async def listen() -> list[StepTaken | StepDone]:
        heard: asyncio.Queue[StepTaken | StepDone] = asyncio.Queue()
        device = CountingDevice()
        thread = StepThread(device, asyncio.get_running_loop(), heard.put_nowait)
        work(thread, device)
        events = [await asyncio.wait_for(heard.get(), 10) for _ in range(num_events)]
        await asyncio.to_thread(thread.close)
        assert heard.empty()
        return events

    return asyncio.run(listen())


def drawn_by(event: StepTaken | StepDone) -> int:
    assert isinstance(event, StepDone)
    assert event.result is not None
    return event.result.drawn[0].token_ids[0]


def test_a_step_is_taken_and_then_done() -> None:
    events = events_of(lambda thread, _: thread.run(make_batch(1, 5)), 2)
    assert isinstance(events[0], StepTaken)
    assert drawn_by(events[1]) == 6


def test_a_step_that_follows_goes_on_with_the_token_drawn_before() -> None:
    """Whether it comes while the one before runs, or after it."""

    def together(thread: StepThread, device: CountingDevice) -> None:
        device.may_go_on.clear()
        thread.run(make_batch(1, 5))
        thread.run(make_batch(2, 0, follows=True))
        device.may_go_on.set()

    def one_by_one(thread: StepThread, device: CountingDevice) -> None:
        thread.run(make_batch(1, 5))
        thread.call(lambda: None).result(10)
        thread.run(make_batch(2, 0, follows=True))

    for work in (together, one_by_one):
        events = events_of(work, 4)
        assert [type(event) for event in events] == [StepTaken, StepDone] * 2
        assert [drawn_by(event) for event in events[1::2]] == [6, 7]


def test_a_step_behind_one_that_failed_fails_unrun() -> None:
    def work(thread: StepThread, device: CountingDevice) -> None:
        device.may_go_on.clear()
        thread.run(make_batch(1, 13))
        thread.run(make_batch(2, 0, follows=True))
        device.may_go_on.set()

    first, second = events_of(work, 4)[1::2]
    assert isinstance(first, StepDone)
    assert isinstance(second, StepDone)
    assert first.failure is not None
    assert (first.failure.code, first.failure.message) == (
        "internal_error",
        "InternalError: unlucky",
    )
    assert second.failure == first.failure


def test_calls_wait_for_the_steps_before_them_and_hand_their_errors_over() -> None:
    def work(thread: StepThread, device: CountingDevice) -> None:
        order: list[str] = []
        thread.run(make_batch(1, 5))
        named = thread.call(order.append, threading.current_thread().name)
        failing = thread.call(device.add_arena, ArenaId("a"), memoryview(b""))
        named.result(10)
        assert isinstance(failing.exception(10), ValueError)
        assert order == [threading.main_thread().name]

    events_of(work, 2)


def test_a_row_beyond_its_grant_fails_its_step_and_reaches_no_device() -> None:
    theirs = ArenaId("decode-0@7")
    batch = make_batch(1, 5)
    row = msgspec.structs.replace(batch.rows[0], arena=theirs, blocks=array("I", [3]))
    granted = WriteRight(theirs, array("I", [3]), 0)

    def work(thread: StepThread, device: CountingDevice) -> None:
        for blocks in (array("I", [3]), array("I", [4])):
            one = msgspec.structs.replace(row, blocks=blocks)
            thread.run(Batch(1, (one,)), {row.sequence_id: granted})
        thread.run(Batch(1, (row,)))

    _, good, _, beyond, _, none = events_of(work, 6)
    assert isinstance(good, StepDone)
    assert good.result is not None
    for event, reason in ((beyond, "is 4 and not 3"), (none, "has no grant")):
        assert isinstance(event, StepDone)
        assert event.failure is not None
        assert reason in event.failure.message
