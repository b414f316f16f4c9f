"""Which points are measured, and which wishes are refused."""

import math
from typing import Any

import pytest

from llmrt.cli.bench.plan import BenchSettings, Point, kv_tokens_for, make_points
from llmrt.wire.errors import ConfigError


def test_all_metrics_by_default_each_with_its_own_points() -> None:
    points = make_points(BenchSettings(prompt_tokens=10, output_tokens=20))
    loads = [(p.metric, p.input_len, p.output_len, p.concurrency, p.num_prompts) for p in points]
    assert loads == [
        ("ttft", 128, 1, 1, 4),
        ("ttft", 512, 1, 1, 4),
        ("ttft", 2048, 1, 1, 4),
        ("decode", 10, 20, 1, 1),
        ("throughput", 10, 20, 1, 4),
        ("throughput", 10, 20, 4, 8),
        ("throughput", 10, 20, 16, 32),
    ]
    assert {point.request_rate for point in points} == {None}


def test_a_rate_makes_the_loop_an_open_one() -> None:
    settings = BenchSettings(metric="throughput", request_rates=(0.5, 2.0), num_prompts=7)
    points = make_points(settings)
    assert [(p.concurrency, p.request_rate, p.num_prompts) for p in points] == [
        (None, 0.5, 7),
        (None, 2.0, 7),
    ]
    assert points[0].label == "throughput at 0.5 requests/s"


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"metric": "speed"}, "--metric is 'speed': one of ttft, decode, throughput, all"),
        ({"metric": "decode", "concurrency": (4,)}, "decode is about one stream"),
        ({"request_rates": (1.0,), "concurrency": (4,)}, "open loop, --concurrency a closed one"),
        ({"request_rates": (0.0,)}, "--request-rate is 0: a finite number above 0"),
        ({"request_rates": (1.0, math.nan)}, "--request-rate is nan: a finite number"),
        ({"request_rates": (math.inf,)}, "--request-rate is inf: a finite number"),
        ({"burstiness": -1.0}, "--burstiness is -1: a finite number above 0"),
        ({"burstiness": math.nan}, "--burstiness is nan: a finite number above 0"),
        ({"goodput": {"ttft": math.nan}}, "--goodput has ttft:nan: a limit in ms"),
        ({"concurrency": (1, 0)}, "--concurrency is 0"),
        ({"input_lengths": (128, -1)}, "--input-lengths is -1"),
        ({"prompt_tokens": 0}, "--prompt-tokens is 0"),
        ({"output_tokens": 1}, "--output-tokens is 1: at least 2"),
        ({"num_prompts": 0}, "--num-prompts is 0"),
        ({"repeats": 0}, "--repeats is 0"),
        ({"goodput": {"speed": 1.0}}, "--goodput has speed:1: .* ttft, itl, tpot, e2el"),
        ({"goodput": {"ttft": 0.0}}, "--goodput has ttft:0"),
    ],
)
def test_a_wrong_wish_is_explained(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_points(BenchSettings(**wish))


def test_one_stream_may_be_asked_for_by_name() -> None:
    points = make_points(BenchSettings(metric="decode", concurrency=(1,)))
    assert [point.metric for point in points] == ["decode"]


def test_an_arena_holds_the_largest_load() -> None:
    """4 streams of 33 + 31 tokens, 2 blocks each and 1 to grow; 1 of 130, 5 blocks and 1."""
    point = Point(metric="throughput", input_len=33, output_len=31, num_prompts=9, concurrency=4)
    single = Point(metric="decode", input_len=100, output_len=30, num_prompts=1)
    assert kv_tokens_for([point, single]) == 4 * 3 * 32
    assert kv_tokens_for([single]) == 6 * 32
    in_the_open = Point(
        metric="throughput",
        input_len=33,
        output_len=31,
        num_prompts=9,
        concurrency=None,
        request_rate=1.0,
    )
    assert kv_tokens_for([in_the_open]) == 9 * 3 * 32
