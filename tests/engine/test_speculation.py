"""What is drawn behind drafts is, bit by bit, what would be drawn one token a step."""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from tests.engine import test_torch_device as on_torch
from tests.engine.cpu_programs import KV_DTYPES, NUM_BLOCKS, make_device, make_program
from tests.engine.tiny_models import TOLERANCE, VOCAB

from llmrt.engine.batch import (
    LOCAL_ARENA,
    Batch,
    Drawn,
    Logprobs,
    Row,
    SampleSpec,
    SequenceId,
    StepResult,
    draw_behind,
    fill,
)
from llmrt.engine.cpu_device import CpuDevice
from llmrt.engine.ngram_drafter import NgramDrafter
from llmrt.engine.sampler import draw_row
from llmrt.engine.scheduler import Scheduler, SchedulerSettings
from llmrt.engine.sequence import Sequence
from llmrt.engine.torch_device import TorchDevice
from llmrt.kvtransfer.ledger import Ledger
from llmrt.models.loading import OpenedModel, open_model
from llmrt.wire.errors import InternalError, InvalidRequest
from llmrt.wire.sampling import SamplingParams

EOS = frozenset({0})
PARAMS = {
    "greedy": SamplingParams(),
    "greedy with logprobs": SamplingParams(logprobs=3),
    "seeded": SamplingParams(temperature=0.9, logprobs=2),
    "nucleus": SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.01),
    "repetition": SamplingParams(temperature=0.7, repetition_penalty=1.3, logprobs=0),
    "counts": SamplingParams(presence_penalty=0.4, frequency_penalty=0.3, logprobs=1),
    "bias": SamplingParams(temperature=0.5, logit_bias={5: 2.0, 9: -3.0}),
    "banned": SamplingParams(temperature=2.0, min_tokens=9, stop_token_ids=(3, 4, 5, 6)),
}
Text = tuple[list[int], list[Logprobs]]


class Guesser(NgramDrafter):
    """Knows how the text goes on, and errs on purpose; says nothing at first and now and then."""

    def __init__(self, text: Seq[int], num_prompt: int, seed: int) -> None:
        super().__init__()
        self._num_silent = num_prompt + 8
        self._text = text
        self._rng = Random(seed)

    def propose(self, token_ids: "array[int]", max_tokens: int) -> "array[int]":
        rng = self._rng
        if len(token_ids) < self._num_silent or rng.random() < 0.2:
            return token_ids[:0]
        right = self._text[len(token_ids) :][: rng.randint(0, max_tokens)]
        wrong = [rng.randrange(VOCAB) for _ in range(rng.randint(0, max_tokens - len(right)))]
        return array("I", [*right, *wrong])


@dataclass(frozen=True)
class Run:
    """What came of three texts side by side, and how."""

    texts: list[Text]
    scheduler: Scheduler
    num_ahead: int


@pytest.fixture(scope="module")
def tiny(folder_of: Callable[[str], Path]) -> OpenedModel:
    return open_model(folder_of("llama"))


def generate(
    device: CpuDevice,
    params: SamplingParams,
    *,
    num_drafts: int = 0,
    num_blocks: int = NUM_BLOCKS,
    known: "Seq[Text] | None" = None,
) -> Run:
    """Three texts, of lengths that end at different steps; whatever can be is made ahead."""
    scheduler = Scheduler(
        Ledger(num_blocks),
        SchedulerSettings(step_tokens=64, chunk_tokens=32, num_drafts=num_drafts),
    )
    sequences = []
    for number, (num_prompt, num_new) in enumerate(((5, 60), (31, 45), (40, 21))):
        prompt = [7 + (i * (number + 3)) % 11 for i in range(num_prompt)]
        sequence = Sequence(
            sequence_id=SequenceId(number),
            token_ids=array("I", prompt),
            num_prompt=num_prompt,
            params=params,
            seed=number,
            max_length=num_prompt + num_new,
            end_token_ids=EOS,
            order=float(number),
        )
        if known is not None:
            sequence.drafter = Guesser(prompt + known[number][0], num_prompt, number)
        scheduler.add(sequence)
        sequences.append(sequence)
    logprobs: list[list[Logprobs]] = [[] for _ in sequences]
    result, num_ahead = StepResult(0, (), 0.0, 0.0), 0
    while True:
        for sequence in scheduler.unplaced():
            sequence.is_placed = True
        batch = scheduler.step or scheduler.schedule()
        if batch is None:
            break
        if batch.follows:
            fill(batch, result)
        assert batch.num_tokens <= 64
        num_ahead += scheduler.schedule_ahead() is not None
        result = device.run(batch)
        for sequence, drawn in scheduler.complete(result):
            assert drawn.error is None
            logprobs[sequence.sequence_id] += drawn.logprobs
            if len(sequence.token_ids) == sequence.max_length:
                scheduler.remove(sequence)
        scheduler.check()
        scheduler.ledger.check()
    assert scheduler.ledger.num_held == 0
    texts = [
        (sequence.token_ids[sequence.num_prompt :].tolist(), of)
        for sequence, of in zip(sequences, logprobs, strict=True)
    ]
    assert all(
        len(text) == s.max_length - s.num_prompt
        for (text, _), s in zip(texts, sequences, strict=True)
    )
    return Run(texts, scheduler, num_ahead)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize(("num_drafts", "num_blocks"), [(1, 64), (5, 64), (16, 64), (5, 5)])
def test_texts_with_drafts_are_those_without(
    tiny: OpenedModel, params: SamplingParams, num_drafts: int, num_blocks: int
) -> None:
    """Right and wrong drafts, the blocks of the latter overwritten; with 5 blocks, preempted."""
    device = make_device(make_program(tiny))
    plain = generate(device, params, num_blocks=num_blocks)
    drafted = generate(
        device, params, num_drafts=num_drafts, num_blocks=num_blocks, known=plain.texts
    )
    assert drafted.texts == plain.texts
    scheduler = drafted.scheduler
    assert 10 < scheduler.drafting.num_accepted < scheduler.drafting.num_drafted - 10
    assert scheduler.num_steps < plain.scheduler.num_steps
    assert bool(plain.num_ahead) == bool(drafted.num_ahead)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rejected_drafts_leave_no_trace_in_the_cache(tiny: OpenedModel, kv_dtype: str) -> None:
    device = make_device(make_program(tiny, kv_dtype=kv_dtype))
    params = SamplingParams(temperature=0.8, logprobs=1)
    plain = generate(device, params)
    assert generate(device, params, num_drafts=4, known=plain.texts).texts == plain.texts


def test_a_text_that_repeats_itself_takes_fewer_steps(tiny: OpenedModel) -> None:
    """The drafter that is used for real."""
    device = make_device(make_program(tiny))
    params = SamplingParams(logit_bias={11: 100.0})
    plain = generate(device, params)
    drafted = generate(device, params, num_drafts=4)
    assert drafted.texts == plain.texts
    assert drafted.scheduler.drafting.num_accepted > 80
    assert drafted.scheduler.num_steps < 0.35 * plain.scheduler.num_steps


def drafting_row(text: Seq[int], drafts: Seq[int], params: SamplingParams) -> Row:
    """All of a text and drafts behind it."""
    ids = array("I", text)
    sample = SampleSpec(params, 3, len(ids), ids, 2, banned=(1, 2))
    blocks = array("I", range(4))
    return Row(SequenceId(0), LOCAL_ARENA, ids + array("I", drafts), 0, blocks, sample, len(drafts))


@pytest.mark.parametrize("device_name", ["cpu", "torch"])
def test_each_place_is_drawn_as_its_own_spec_says(tiny: OpenedModel, device_name: str) -> None:
    """Position, history and bans grow from place to place; the first wrong draft is the last."""
    device: CpuDevice | TorchDevice = (
        make_device(make_program(tiny)) if device_name == "cpu" else on_torch.make_device(tiny.path)
    )
    params = SamplingParams(
        temperature=1.0, min_tokens=6, repetition_penalty=1.2, frequency_penalty=0.5, logprobs=1
    )
    text, drafts = [9, 8, 7, 6, 5], list[int]()
    expected: list[tuple[int, Logprobs | None]] = []
    for num_right in range(5):  # generated so far: 3 and more, so that bans end at the 4th place
        row = drafting_row(text, [*drafts, 100, 100], params)
        logits = device.forward(Batch(0, (row,)))
        assert logits.shape == (num_right + 3, VOCAB)
        ids = array("I", [*text, *drafts])
        banned = (1, 2) if len(ids) - 2 < params.min_tokens else ()
        spec = SampleSpec(params, 3, len(ids), ids, 2, banned)
        expected.append(draw_row(logits[num_right], spec))
        assert expected[-1][0] != 100
        (drawn,) = device.run(Batch(0, (row,))).drawn
        assert drawn.token_ids == tuple(token_id for token_id, _ in expected)
        for of, (_, wanted) in zip(drawn.logprobs, expected, strict=True):
            assert wanted is not None
            # The last bits of torch depend on how many tokens a row has.
            tolerance = 0.0 if device_name == "cpu" else TOLERANCE
            assert of.drawn == pytest.approx(wanted.drawn, abs=tolerance, rel=0.0)
        drafts.append(expected[-1][0])
    row = drafting_row(text, drafts, params)
    (drawn,) = device.run(Batch(0, (row,))).drawn
    assert drawn.token_ids[:-1] == tuple(drafts)
    assert len(drawn.token_ids) == len(drafts) + 1


def test_rows_with_and_without_drafts_share_a_step(tiny: OpenedModel) -> None:
    device = make_device(make_program(tiny))
    params = SamplingParams(temperature=1.0)
    first, second = drafting_row([9, 8], [100], params), drafting_row([4, 3, 2], [], params)
    silent = Row(SequenceId(2), LOCAL_ARENA, array("I", [5, 6]), 0, array("I", [9]))
    blocks = array("I", range(4, 8))
    other = Row(
        SequenceId(1), LOCAL_ARENA, second.token_ids, 0, blocks, second.sample, num_drafts=0
    )
    alone = [device.run(Batch(0, (row,))).drawn[0] for row in (first, other)]
    for rows in ((first, silent, other), (other, first, silent), (silent, other, first)):
        drawn = device.run(Batch(0, rows)).drawn
        assert {d.sequence_id: d for d in drawn} == {d.sequence_id: d for d in alone}


def test_an_error_behind_the_first_place_is_met_by_the_next_step(tiny: OpenedModel) -> None:
    """What was drawn before it counts; a first place that fails gives an error and no token."""
    device = make_device(make_program(tiny))
    outside = SamplingParams(logit_bias={VOCAB: 1.0})
    (failed,) = device.run(Batch(0, (drafting_row([9, 8], [7], outside),))).drawn
    assert failed.token_ids == ()
    assert isinstance(failed.error, InvalidRequest)
    row = drafting_row([9, 8], [7], SamplingParams(logit_bias={7: 100.0}))
    errors = iter([None, InternalError("a logit is nan")])

    def draw(place: int, spec: SampleSpec) -> tuple[int, None]:
        error = next(errors)
        if error is not None:
            raise error
        return 7, None

    assert row.sample is not None
    assert draw_behind(row, row.sample, draw) == Drawn(SequenceId(0), (7,))
