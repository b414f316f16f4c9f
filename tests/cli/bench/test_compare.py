"""Two reports: compared under equal conditions, refused under any others."""

from typing import Any

import pytest
from tests.cli.bench.results import SUBJECT, make_results

from llmrt.cli.bench.compare import Row, compare, table, unequal_conditions
from llmrt.cli.bench.plan import BenchSettings
from llmrt.cli.bench.result import CONDITIONS
from llmrt.wire.errors import InvalidRequest

DECODE = BenchSettings(metric="decode", prompt_tokens=32, output_tokens=11)


def test_figures_stand_beside_each_other() -> None:
    """Twice as fast is 2x better, for a rate as for a time."""
    rows = compare(make_results(DECODE, itls_s=(0.1,)), make_results(DECODE, itls_s=(0.05,)))
    what = "decode of one stream"
    assert rows == [
        Row(
            what=what,
            figure="decode_tokens_per_s",
            a=10.0,
            b=20.0,
            speedup=2.0,
            is_within_spread=None,
        ),
        *(
            Row(what=what, figure=figure, a=100.0, b=50.0, speedup=2.0, is_within_spread=None)
            for figure in ("median_itl_ms", "p99_itl_ms")
        ),
    ]
    assert table(rows).splitlines()[2].split() == [
        "decode_tokens_per_s",
        "10.00",
        "20.00",
        "2.000x",
    ]


@pytest.mark.parametrize(("itls_s", "expected"), [((0.04, 0.06), True), ((0.1, 0.2), False)])
def test_repeats_that_overlap_are_no_difference(itls_s: tuple[float, ...], expected: bool) -> None:
    rows = compare(make_results(DECODE, itls_s=(0.05, 0.05)), make_results(DECODE, itls_s=itls_s))
    assert rows[0].is_within_spread is expected


@pytest.mark.parametrize("name", sorted(SUBJECT.keys() - {"machine"}))
def test_each_condition_of_the_cluster_must_be_equal(name: str) -> None:
    a, b = make_results(DECODE), make_results(DECODE)
    b[0][name] = "another"
    with pytest.raises(InvalidRequest) as refused:
        compare(a, b)
    assert refused.value.message == (
        f"not comparable: {name} is {SUBJECT[name]} in A and another in B"
    )
    assert compare(a, b, [name])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"prompt_tokens": 40}, ["context is 43 in A and 51 in B", "input_len is 32 in A"]),
        ({"output_tokens": 12}, ["context is 43 in A and 44", "output_len is 11 in A and 12 in B"]),
        ({"num_prompts": 2}, ["num_prompts is 1 in A and 2 in B"]),
        ({"seed": 5}, ["seed is 0 in A and 5 in B"]),
        ({"goodput": {"ttft": 500.0}}, ["goodput_limits_ms.ttft is None in A and 500.0 in B"]),
    ],
)
def test_each_condition_of_the_load_must_be_equal(
    change: dict[str, Any], expected: list[str]
) -> None:
    values = {"metric": "decode", "prompt_tokens": 32, "output_tokens": 11, **change}
    with pytest.raises(InvalidRequest) as refused:
        compare(make_results(DECODE), make_results(BenchSettings(**values)))
    assert all(line in refused.value.message for line in expected)


def test_all_unequal_conditions_are_listed_at_once() -> None:
    machine = {**SUBJECT["machine"], "cpu": "Xeon", "cores": 64}
    (a,) = make_results(DECODE)
    (b,) = make_results(DECODE, layout="split", threads=8, machine=machine)
    assert unequal_conditions(a, b) == [
        "layout is colocated in A and split in B",
        "threads is 2 in A and 8 in B",
        "machine.cores is 2 in A and 64 in B",
        "machine.cpu is EPYC in A and Xeon in B",
    ]
    assert unequal_conditions(a, b, ("layout", "threads", "machine")) == []


def test_a_difference_of_some_points_names_them() -> None:
    """One of all points is said once."""
    settings = BenchSettings(metric="throughput", concurrency=(1, 4), num_prompts=8)
    a, b = make_results(settings, threads=8), make_results(settings)
    b[1]["seed"] = 7
    with pytest.raises(InvalidRequest) as refused:
        compare(a, b)
    assert refused.value.message == (
        "not comparable: threads is 8 in A and 2 in B; "
        "seed is 0 in A and 7 in B (throughput of 4 streams)"
    )


def test_what_nobody_knows_is_not_equal() -> None:
    unknown = make_results(DECODE, threads="unknown")
    with pytest.raises(InvalidRequest, match="threads is unknown in both"):
        compare(unknown, unknown)


def test_another_concurrency_is_another_condition() -> None:
    def loads(*streams: int) -> list[dict[str, Any]]:
        settings = BenchSettings(metric="throughput", concurrency=streams, num_prompts=8)
        return make_results(settings)

    with pytest.raises(InvalidRequest, match="max_concurrency is 4 in A and 8 in B"):
        compare(loads(1, 4), loads(1, 8))
    with pytest.raises(InvalidRequest, match="throughput of 4 streams is only in A"):
        compare(loads(1, 4), loads(1))
    with pytest.raises(InvalidRequest, match="throughput of 4 streams is only in B"):
        compare(loads(1), loads(1, 4))


def test_metrics_are_never_compared_with_each_other() -> None:
    throughput = BenchSettings(metric="throughput", concurrency=(1,))
    with pytest.raises(InvalidRequest, match=r"stream is only in A; throughput of 1 .* only in B"):
        compare(make_results(DECODE), make_results(throughput))


def test_a_prefix_cache_that_helped_one_is_a_condition() -> None:
    with pytest.raises(InvalidRequest, match="is_prefix_cached is False in A and True in B"):
        compare(make_results(DECODE), make_results(DECODE, cached_tokens=1))


def test_only_conditions_may_be_waived() -> None:
    results = make_results(DECODE)
    with pytest.raises(InvalidRequest, match="--across has 'colour': known are model, "):
        compare(results, results, ["colour"])
    assert len(CONDITIONS) == len(set(CONDITIONS))
