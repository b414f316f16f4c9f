"""Any order of dispatches, cancels, ticks and returning steps, with a loop that hears of them late.

Steps run as on the step thread: one at a time, the one that follows as soon as the first returns;
the machine hears of both in order, but of other things in between.
"""

from collections import deque
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.workers.conftest import Bench, MakeWorker

from llmrt.engine.batch import Batch, Drawn, StepResult, fill
from llmrt.simulation.content import EOS_TOKEN_ID
from llmrt.wire import messages as m
from llmrt.wire.envelope import decode_header
from llmrt.wire.ids import Attempt, BlockId
from llmrt.wire.steps import decode_step
from llmrt.workers import effects as do
from llmrt.workers import events as ev

NUM_REQUESTS = 5
ACTIONS = ("dispatch", "cancel", "tick", "return", "hear", "hear", "hear")
SAMPLING: tuple[dict[str, Any], ...] = (
    {"max_tokens": 4},
    {"max_tokens": 40, "min_tokens": 2},
    {"max_tokens": 40, "stop": ("al", "zz")},
    {"max_tokens": 9, "repetition_penalty": 1.5},
    {"ignore_eos": True, "max_tokens": 33},
)


class Shell(Bench):
    """A machine whose step thread and loop go on only when told."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.core, bench.scheduler, bench.settings)
        self.steps: deque[Batch] = deque()
        self.unheard: deque[ev.StepTaken | ev.StepDone] = deque()
        self.before: StepResult | None = None
        self.seen: dict[bytes, list[int]] = {}
        self.ends: dict[bytes, int] = {}
        self.num_drawn = 0

    def handle(self, event: ev.Event) -> None:
        effects = self.core.handle(event, self.now)
        self.core.check()
        for effect in effects:
            match effect:
                case do.RunStep(batch):
                    assert batch.follows or not self.steps
                    self.steps.append(batch)
                    if len(self.steps) == 1:
                        self.begin()
                case do.SendBroker(frames):
                    self.take(frames)
                case _:
                    pass

    def begin(self) -> None:
        batch = self.steps[0]
        if batch.follows:
            assert self.before is not None
            fill(batch, self.before)
        self.unheard.append(ev.StepTaken())

    def step_returns(self, gives_end: bool) -> None:
        if not self.steps:
            return
        batch = self.steps.popleft()
        drawn = []
        for row in batch.rows:
            # Whoever has ended keeps them until here.
            states = {self.ledger.state_of(BlockId(block)) for block in row.blocks}
            assert states <= {"held", "cached"}, states
            if row.sample is not None:
                self.num_drawn += 1
                ends = gives_end and EOS_TOKEN_ID not in row.sample.banned
                token = EOS_TOKEN_ID if ends else 10 + self.num_drawn % 7
                first = len(row.token_ids) - row.num_drafts
                accepted = row.token_ids[first : first + self.num_drawn % (row.num_drafts + 1)]
                drawn.append(Drawn(row.sequence_id, (*accepted, token)))
        self.before = StepResult(batch.step_id, tuple(drawn), 0.0, 0.0)
        self.unheard.append(ev.StepDone(self.before, self.now))
        if self.steps:
            self.begin()

    def hear(self) -> None:
        if self.unheard:
            self.handle(self.unheard.popleft())

    def take(self, frames: list[bytes]) -> None:
        """Tokens come under the next number, and none behind the one end."""
        header = decode_header(frames[0])
        if header.kind == m.STEP:
            for row in decode_step(frames):
                tokens = self.seen.setdefault(row.request_id, [])
                assert row.request_id not in self.ends
                assert row.seq == len(tokens)
                tokens += [0] * row.num_tokens
        elif header.kind in (m.FINISHED, m.FAILED):
            assert header.request_id not in self.ends
            assert header.seq == len(self.seen.get(header.request_id, []))
            self.ends[header.request_id] = header.seq


@given(
    st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(1, NUM_REQUESTS), st.booleans()),
        min_size=15,
        max_size=60,
    ),
    st.sampled_from((0.0, 0.03)),
    st.sampled_from((6, 64)),
    st.sampled_from((0, 4)),
)
@settings(
    max_examples=150,
    deadline=None,
    # The fixture only makes workers.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_every_order_gives_each_request_its_tokens_and_one_end(
    make_worker: MakeWorker,
    actions: list[tuple[str, int, bool]],
    interval_s: float,
    num_blocks: int,
    num_drafts: int,
) -> None:
    bench = make_worker(
        num_blocks=num_blocks,
        num_drafts=num_drafts,
        max_context=128,
        stream_interval_s=interval_s,
    )
    shell = Shell(bench)
    asked = set()
    for action, number, flag in [*actions, *([("return", 0, False), ("hear", 0, False)] * 400)]:
        shell.now += 0.005
        match action:
            case "dispatch":
                asked.add(number)
                prompt = [20 + number] * (7 * number)
                shell.dispatch(prompt, number=number, **SAMPLING[number - 1])
            case "cancel" if number in asked:
                request_id = number.to_bytes(16, "big")
                shell.from_broker(m.CANCEL, request_id=request_id, attempt=Attempt(1, 1))
            case "tick":
                shell.handle(ev.Tick())
            case "return":
                shell.step_returns(flag)
            case "hear":
                shell.hear()
            case _:
                pass
    shell.now += 1.0
    shell.handle(ev.Tick())
    assert set(shell.ends) == {number.to_bytes(16, "big") for number in asked}
    shell.assert_all_free()
