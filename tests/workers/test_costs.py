"""Costs of prompts and decodes, from what was measured."""

from array import array

import pytest

from llmrt.engine.batch import LOCAL_ARENA, Row, SequenceId
from llmrt.wire.ids import WorkerId, WorkerName
from llmrt.workers.costs import Costs, DecodeSeconds, PrefillSeconds

P = WorkerName(WorkerId("p"), 1)


def row(start: int, num_tokens: int, num_drafts: int = 0) -> Row:
    tokens = array("I", bytes(4 * num_tokens))
    return Row(SequenceId(1), LOCAL_ARENA, tokens, start, array("I", [0]), None, num_drafts)


def quadratic(start: int, end: int) -> float:
    return (end - start) * (1e-3 + 1e-6 * (start + end) / 2)


def measured() -> Costs:
    costs = Costs()
    for start in range(0, 2048, 256):
        costs.step_took([row(start, 256)], quadratic(start, start + 256))
    return costs


def test_prefill_is_fitted_to_tokens_and_positions() -> None:
    costs = measured()
    assert costs.prefill.of(0, 4096) == pytest.approx(quadratic(0, 4096))
    assert costs.prefill.of(1000, 1100) == pytest.approx(quadratic(1000, 1100))


def test_equal_steps_give_a_rate() -> None:
    seconds = PrefillSeconds()
    assert not seconds.is_measured
    assert seconds.of(0, 100) == 0
    for _ in range(3):
        seconds.took([(0, 100)], 0.2)
    assert seconds.of(0, 50) == pytest.approx(0.1)


def test_decodes_in_a_prefill_step_are_not_the_prompts_cost() -> None:
    costs = Costs()
    costs.step_took([row(40, 1), row(50, 1)], 0.01)
    costs.step_took([row(40, 1), row(50, 1), row(0, 100)], 0.11)
    assert costs.prefill.of(0, 100) == pytest.approx(0.1)


def test_a_prompt_beside_a_prefill_worker_tells_how_much_that_slows() -> None:
    costs = measured()
    costs.offered(P, SequenceId(1), 0.5, now=10.0)
    for _ in range(100):
        costs.step_took([row(0, 256)], 3 * quadratic(0, 256))
    assert costs.prefill.slowdown == pytest.approx(3, rel=1e-3)
    assert costs.prefill.of(0, 4096) == pytest.approx(quadratic(0, 4096))


def test_a_prompt_that_took_no_time_is_no_measure_of_anything() -> None:
    costs = Costs()
    costs.step_took([row(0, 100)], 0.0)
    costs.offered(P, SequenceId(1), 0.5, now=10.0)
    costs.step_took([row(0, 100)], 0.1)
    assert costs.prefill.slowdown == 1


def test_a_decode_with_drafts_is_a_decode() -> None:
    costs = Costs()
    costs.step_took([row(40, 4, num_drafts=3)], 0.01)
    assert not costs.prefill.is_measured
    assert costs.decode.of(1) == pytest.approx(0.01)


def test_slowdown_compares_steps_of_one_size() -> None:
    seconds = DecodeSeconds()
    seconds.took(1, 0.01, is_beside_prefill=False)
    for _ in range(100):
        seconds.took(8, 0.08, is_beside_prefill=True)  # never seen alone
    assert seconds.slowdown == 1
    for _ in range(100):
        seconds.took(1, 0.02, is_beside_prefill=True)
    assert seconds.slowdown == pytest.approx(2, rel=1e-3)


def test_a_peers_factor_is_learned_and_forgotten() -> None:
    costs = measured()
    for _ in range(50):
        costs.prefilled(P, 0.1, 0.3, 0.005, now=10.0)
    assert costs.factor(P, 10.0) == pytest.approx(3)
    assert costs.factor(P, 70.0) == pytest.approx(2)
    assert costs.handover_s(P) == pytest.approx(0.005, rel=0.05)
    costs.forget(P)
    assert costs.factor(P, 10.0) == 1


def test_a_queue_is_what_we_offered_and_others_have() -> None:
    costs = measured()
    costs.offered(P, SequenceId(1), 0.5, now=10.0)
    costs.offered(P, SequenceId(2), 0.5, now=10.1)
    assert costs.queue_s(P, 10.1) == pytest.approx(0.9)
    costs.settled(SequenceId(1), 10.2)
    assert costs.queue_s(P, 10.2) == pytest.approx(0.8)
    costs.settled(SequenceId(2), 10.3)
    costs.settled(SequenceId(2), 10.4)
    assert costs.queue_s(P, 10.4) == 0
    costs.reported(P, 100, now=11.0)
    assert costs.queue_s(P, 11.0) == pytest.approx(quadratic(0, 100))
    assert costs.queue_s(P, 14.0) == 0
