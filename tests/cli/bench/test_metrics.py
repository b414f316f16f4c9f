"""Statistics of requests, against values computed by hand."""

import math

import pytest

from llmrt.cli.bench.metrics import (
    Arrival,
    Record,
    Trial,
    decode_rate,
    is_good,
    max_concurrent,
    median_ttft_ms,
    output_rate,
    percentile,
    summarize,
)
from llmrt.wire.errors import Overloaded, WorkerLost


def make_record(start_s: float, *times_s: float, num_tokens: int = 1, **fields: object) -> Record:
    values = {"prompt_tokens": 10, "cached_tokens": 0, **fields}
    arrivals = tuple(Arrival(at_s, num_tokens) for at_s in times_s)
    return Record(start_s, arrivals, **values)  # type: ignore[arg-type]


def test_times_of_one_request() -> None:
    record = make_record(1.0, 1.5, 1.75, 2.5)
    assert record.ttft_s == 0.5
    assert record.itls_s == [0.25, 0.75]
    assert record.e2el_s == 1.5
    assert record.tpot_s == 0.5
    assert record.output_tokens == 3


def test_tokens_of_the_first_arrival_are_no_decode() -> None:
    """Three arrivals of two tokens: four tokens came in the two seconds behind the first."""
    record = make_record(0.0, 3.0, 4.0, 5.0, num_tokens=2)
    assert (record.decode_tokens, record.decode_s, record.tpot_s) == (4, 2.0, 0.5)


def test_one_token_has_no_time_per_token() -> None:
    assert make_record(0.0, 1.0).tpot_s is None


def test_decode_rate_leaves_out_the_prompt() -> None:
    """(2 + 4) tokens in (1 + 2) s, whatever the first tokens took."""
    records = (make_record(0, 100, 100.5, 101), make_record(0, 7, 7.5, 8, 8.5, 9))
    assert decode_rate(Trial(records, 101.0)) == 2.0


def test_without_a_second_token_there_is_no_decode_rate() -> None:
    assert decode_rate(Trial((make_record(0, 1),), 1.0)) is None


def test_output_rate_counts_every_token_of_what_was_completed() -> None:
    failed = make_record(0, 1, 2, error=WorkerLost("gone"))
    trial = Trial((make_record(0, 1, 2), make_record(0, 3, 4, 5), failed), 10.0)
    assert output_rate(trial) == 0.5
    assert median_ttft_ms(trial) == 2000.0


def test_summary_of_two_trials() -> None:
    first = Trial((make_record(0.0, 1.0, 1.5), make_record(0.0, 2.0, 3.0)), 4.0)
    second = Trial((make_record(0.5, 1.5, 3.0, cached_tokens=4),), 6.0, python_share=0.25)
    summary = summarize([first, second])
    expected = {
        "duration": 10.0,
        "completed": 3,
        "failed": 0,
        "errors": {},
        "total_input_tokens": 30,
        "total_output_tokens": 6,
        "cached_tokens": 4,
        "request_throughput": 0.3,
        "request_goodput": None,
        "output_throughput": 0.6,
        "total_token_throughput": 3.6,
        "max_concurrent_requests": 2,
        # 1, 2 and 1 s
        "mean_ttft_ms": pytest.approx(4000 / 3),
        "median_ttft_ms": 1000.0,
        "std_ttft_ms": pytest.approx(1000 * math.sqrt(2 / 9)),
        "p90_ttft_ms": pytest.approx(1800.0),
        "p99_ttft_ms": pytest.approx(1980.0),
        # 0.5, 1 and 1.5 s
        "mean_tpot_ms": 1000.0,
        "median_tpot_ms": 1000.0,
        "std_tpot_ms": pytest.approx(1000 * math.sqrt(1 / 6)),
        "p90_tpot_ms": pytest.approx(1400.0),
        "p99_tpot_ms": pytest.approx(1490.0),
        "mean_itl_ms": 1000.0,
        "median_itl_ms": 1000.0,
        "std_itl_ms": pytest.approx(1000 * math.sqrt(1 / 6)),
        "p90_itl_ms": pytest.approx(1400.0),
        "p99_itl_ms": pytest.approx(1490.0),
        # 1.5, 3 and 2.5 s
        "mean_e2el_ms": pytest.approx(7000 / 3),
        "median_e2el_ms": 2500.0,
        "std_e2el_ms": pytest.approx(1000 * math.sqrt(7 / 18)),
        "p90_e2el_ms": pytest.approx(2900.0),
        "p99_e2el_ms": pytest.approx(2990.0),
        "python_share": 0.25,
        "draft_acceptance_rate": None,
    }
    assert summary == expected


def test_the_acceptance_rate_is_of_all_drafts() -> None:
    first = Trial((make_record(0, 1, num_drafted=2, num_accepted=2), make_record(0, 1)), 1.0)
    second = Trial((make_record(0, 1, num_drafted=6, num_accepted=1),), 1.0)
    assert summarize([first, second])["draft_acceptance_rate"] == 3 / 8


def test_failed_requests_are_counted_and_give_no_latency() -> None:
    failed = make_record(0.0, 9.0, error=Overloaded("full"))
    summary = summarize([Trial((make_record(0.0, 1.0, 2.0), failed), 2.0)])
    assert (summary["completed"], summary["failed"]) == (1, 1)
    assert summary["errors"] == {"overloaded": 1}
    assert summary["mean_ttft_ms"] == 1000.0
    assert summary["total_output_tokens"] == 2


def test_what_no_request_gave_is_none_not_zero() -> None:
    summary = summarize([Trial((make_record(0.0, 1.0),), 1.0)])
    assert summary["mean_itl_ms"] is None
    assert summary["p99_tpot_ms"] is None


def test_goodput_counts_requests_that_kept_every_limit() -> None:
    """TTFT 0.4 s and gaps of 50 ms; TTFT 0.6 s; one gap of 200 ms."""
    good = make_record(0.0, 0.4, 0.45, 0.5)
    slow_start = make_record(0.0, 0.6, 0.65)
    stalled = make_record(0.0, 0.4, 0.45, 0.65)
    trial = Trial((good, slow_start, stalled), 2.0)
    assert summarize([trial], {"ttft": 500.0, "itl": 100.0})["request_goodput"] == 0.5
    assert summarize([trial], {"ttft": 500.0})["request_goodput"] == 1.0


@pytest.mark.parametrize(
    ("limits_ms", "expected"),
    [
        ({"ttft": 500}, True),
        ({"ttft": 499}, False),
        ({"itl": 750}, True),
        ({"itl": 749}, False),
        ({"tpot": 500}, True),
        ({"tpot": 499}, False),
        ({"e2el": 1500}, True),
        ({"e2el": 1499}, False),
        ({"ttft": 500, "tpot": 499}, False),
        ({}, True),
    ],
)
def test_each_limit_has_its_own_time(limits_ms: dict[str, float], expected: bool) -> None:
    assert is_good(make_record(1.0, 1.5, 1.75, 2.5), limits_ms) is expected


def test_requests_that_follow_each_other_do_not_overlap() -> None:
    assert max_concurrent([make_record(0, 1), make_record(1, 2), make_record(2, 3)]) == 1
    assert max_concurrent([make_record(0, 3), make_record(1, 2), make_record(1.5, 4)]) == 3


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1.0), (25, 1.75), (50, 2.5), (90, 3.7), (100, 4.0)]
)
def test_percentiles_are_linear_between_ranks(percent: float, expected: float) -> None:
    assert percentile([4, 1, 3, 2], percent) == pytest.approx(expected)
    assert percentile([7.0], percent) == 7.0
