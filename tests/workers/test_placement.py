"""Where a prompt is computed, from what it costs here and there."""

from collections.abc import Callable
from typing import Any

import pytest

from llmrt.wire import messages as m
from llmrt.wire.ids import WorkerId, WorkerName
from llmrt.workers.placement import Placement, PlacementCosts, choose_prefill

P = WorkerName(WorkerId("p"), 1)


def costs(**facts: Any) -> PlacementCosts:
    usual: dict[str, Any] = {
        "num_uncached": 100,
        "remote": P,
        "remote_mode": "grant",
        "here_s": 0.1,
        "there_s": 0.1,
        "handover_s": 0.002,
    }
    return PlacementCosts(**usual | facts)


@pytest.mark.parametrize(
    ("placement", "facts", "expected"),
    [
        ("local", {}, Placement(None, "placement is local")),
        ("remote", {}, Placement(P, "placement is remote")),
        ("auto", {"remote": None}, Placement(None, "no prefill worker can take it")),
        ("remote", {"remote_mode": None}, Placement(None, "no prefill worker can take it")),
        ("remote", {"num_uncached": 0}, Placement(None, "all of it is cached here")),
        ("auto", {"here_s": None}, Placement(None, "not measured here yet")),
    ],
)
def test_what_needs_no_weighing(placement: str, facts: dict[str, Any], expected: Placement) -> None:
    assert choose_prefill(placement, costs(**facts)) == expected


def test_an_idle_owner_computes_itself_and_saves_the_hand_over() -> None:
    chosen = choose_prefill("auto", costs())
    assert chosen.worker is None
    assert chosen.here_s == pytest.approx(0.1)
    assert chosen.there_s == pytest.approx(0.102)


def test_streams_that_decode_here_would_all_wait() -> None:
    chosen = choose_prefill("auto", costs(num_decoding=1))
    assert chosen.worker == P
    assert chosen.here_s == pytest.approx(0.2)


def test_a_prefill_beside_them_slows_streams_too() -> None:
    # Half speed for two streams costs as much again as the prompt itself.
    slowed = costs(num_decoding=2, there_s=0.15, decode_slowdown=2.0)
    assert choose_prefill("auto", slowed).there_s == pytest.approx(0.302)
    assert choose_prefill("auto", slowed).worker is None
    faster = costs(num_decoding=2, there_s=0.14, decode_slowdown=2.0)
    assert choose_prefill("auto", faster).worker == P


def test_two_prompts_at_once_gain_nothing_on_one_box() -> None:
    queued = {"num_here": 1, "queue_here_s": 0.1}
    apart = choose_prefill("auto", costs(**queued))
    assert apart.worker == P
    assert apart.here_s == pytest.approx(0.2)
    # Both take twice as long, and the one that is under way here is held up by the other.
    shared = choose_prefill("auto", costs(**queued, prefill_slowdown=2.0))
    assert shared.worker is None
    assert shared.there_s == pytest.approx(0.302)


def test_a_prompt_here_holds_up_those_of_the_prefill_worker_on_one_box() -> None:
    queued = {"num_there": 2, "queue_there_s": 0.2}
    apart = choose_prefill("auto", costs(**queued))
    assert apart.worker is None
    assert apart.here_s == pytest.approx(0.1)
    shared = choose_prefill("auto", costs(**queued, prefill_slowdown=2.0))
    assert shared.worker == P
    assert shared.here_s == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("queues", "expected"),
    [
        ({"queue_here_s": 0.1}, P),
        ({"queue_there_s": 0.1}, None),
        ({"queue_here_s": 0.1, "queue_there_s": 0.1}, None),
    ],
)
def test_queues_count(queues: dict[str, float], expected: WorkerName | None) -> None:
    assert choose_prefill("auto", costs(**queues)).worker == expected


def test_an_owner_measures_itself_first_and_offers_what_would_hold_up_its_streams(
    make_worker: Any, link: Any, tokens_of: Callable[[int], list[int]]
) -> None:
    owner, prefill = make_worker("decode", placement="auto"), make_worker("prefill")
    link(owner, prefill)
    owner.dispatch(tokens_of(60), number=1, prefill=prefill.name, max_tokens=100)
    assert owner.sent(m.OFFER) == []
    owner.step(50)
    owner.clear()
    owner.dispatch(tokens_of(60)[::-1], number=2, prefill=prefill.name, max_tokens=1)
    (offer,) = owner.sent(m.OFFER)
    assert offer.target == prefill.name
    prefill.relay(offer, owner.name)
    prefill.step(70)
    (commit,) = prefill.sent(m.COMMIT)
    owner.clear()
    owner.relay(commit, prefill.name)
    (finished,) = owner.sent(m.FINISHED)
    assert finished.body.placement == "faster there"
    # 60 tokens took 10 ms; one stream would have waited as long again.
    assert finished.body.placement_ms["here"] == pytest.approx(20)
    assert finished.body.placement_ms["there"] == pytest.approx(12)


def test_a_prefill_worker_tells_each_owner_what_others_have_in_its_queue(
    make_worker: Any, link: Any, tokens_of: Callable[[int], list[int]]
) -> None:
    one, other, prefill = make_worker("decode"), make_worker("both"), make_worker("prefill")
    for owner in (one, other):
        link(owner, prefill)
    for owner, num_tokens in ((one, 60), (other, 100)):
        owner.dispatch(tokens_of(num_tokens), prefill=prefill.name, max_tokens=1)
        prefill.relay(owner.sent(m.OFFER)[0], owner.name)
    prefill.clear()
    prefill.tick()
    foreign = {sent.target: sent.body.num_foreign_tokens for sent in prefill.sent(m.OFFER_HELD)}
    assert foreign == {one.name: 100, other.name: 60}
