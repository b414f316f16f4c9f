"""Stamped results, their report, and what is flagged in it."""

import json
from pathlib import Path

import pytest
from tests.cli.bench.results import make_results

from llmrt.cli.bench.plan import BenchSettings, make_points
from llmrt.cli.bench.result import (
    CONDITIONS,
    add_roofline,
    make_report,
    read_results,
    rounded,
    warnings_of,
)
from llmrt.cli.bench.roofline import ModelBytes
from llmrt.wire.errors import InvalidRequest

DECODE = BenchSettings(metric="decode", prompt_tokens=32, output_tokens=11)
MODEL = ModelBytes("tiny", "Q4_0", weight_bytes=64_000_000, layer_kv_bytes=0, windows=(None,))


def test_every_result_has_every_condition() -> None:
    for result in make_results(BenchSettings()):
        assert set(CONDITIONS) <= result.keys()
        assert result["context"] == result["input_len"] + result["output_len"]


def test_the_three_metrics_have_figures_of_their_own() -> None:
    """And only one of them: no result has another metric's headline by its own name."""
    results = make_results(BenchSettings(concurrency=(2,), input_lengths=(64,)))
    assert [(result["metric"], result["headline"]) for result in results] == [
        ("ttft", "median_ttft_ms"),
        ("decode", "decode_tokens_per_s"),
        ("throughput", "output_throughput"),
    ]
    assert ["decode_tokens_per_s" in result for result in results] == [False, True, False]


def test_the_decode_rate_is_the_median_of_the_repeats() -> None:
    (result,) = make_results(DECODE, itls_s=(0.05, 0.1, 0.2))
    assert result["repeats"] == [20.0, 10.0, 5.0]
    assert result["decode_tokens_per_s"] == 10.0


def test_an_open_loop_is_stamped_with_its_rate() -> None:
    settings = BenchSettings(metric="throughput", request_rates=(2.0,), burstiness=0.5)
    (result,) = make_results(settings)
    assert (result["request_rate"], result["burstiness"]) == (2.0, 0.5)
    assert result["max_concurrency"] is None
    (closed,) = make_results(BenchSettings(metric="throughput", concurrency=(3,)))
    assert (closed["request_rate"], closed["burstiness"]) == ("inf", None)
    assert closed["max_concurrency"] == 3


def test_the_fields_of_an_only_result_stand_at_the_top() -> None:
    report = make_report(make_results(DECODE), {"date": "today"}, ["a note"])
    assert report["decode_tokens_per_s"] == 20.0
    assert report["results"][0]["decode_tokens_per_s"] == 20.0
    assert report["warnings"] == ["a note"]
    assert "output_throughput" not in make_report(make_results(BenchSettings()), {}, [])


def test_more_than_the_memory_allows_is_flagged() -> None:
    """64 MB per token: 1.28 GB/s allow 20 tokens/s, and 20 are measured."""
    (result,) = make_results(DECODE)
    (point,) = make_points(DECODE)
    add_roofline(result, point, MODEL, 1.28e9, cache_bytes=0)
    assert result["roofline"]["fraction"] == 1.0
    assert warnings_of(result) == []
    add_roofline(result, point, MODEL, 0.64e9, cache_bytes=0)
    assert result["roofline"]["is_credible"] is False
    assert warnings_of(result) == [
        "decode of one stream: NOT CREDIBLE: 2.00 of what the memory allows (20.0 of 10.0 tokens/s)"
    ]


def test_drafts_have_no_bound() -> None:
    """A step then gives a stream as many tokens as were accepted."""
    (result,) = make_results(DECODE, speculative="ngram")
    (point,) = make_points(DECODE)
    add_roofline(result, point, MODEL, 0.64e9, cache_bytes=0)
    assert result["roofline"] is None
    assert "drafts" in result["roofline_note"]
    assert warnings_of(result) == []


def test_memory_is_no_bound_for_what_fits_the_cache() -> None:
    (result,) = make_results(DECODE)
    (point,) = make_points(DECODE)
    add_roofline(result, point, MODEL, 0.64e9, cache_bytes=64_000_000)
    assert result["roofline"] is None
    assert "cache" in result["roofline_note"]
    assert warnings_of(result) == []


def test_each_metric_has_the_bound_in_its_own_tokens() -> None:
    """6.4 GB/s read the weights 100 times a second, for a prompt of 64 or for 4 streams."""
    settings = BenchSettings(concurrency=(4,), input_lengths=(64,))
    results = make_results(settings)
    for result, point in zip(results, make_points(settings), strict=True):
        add_roofline(result, point, MODEL, 6.4e9, cache_bytes=0)
    bounds = [result["roofline"]["bound_tokens_per_s"] for result in results]
    assert bounds == [6400.0, 100.0, 400.0]
    # The first token of 64 came after 0.1 s.
    assert results[0]["roofline"]["tokens_per_s"] == pytest.approx(640)


def test_cached_prefixes_are_told() -> None:
    (result,) = make_results(DECODE, cached_tokens=32)
    assert result["is_prefix_cached"] is True
    (line,) = warnings_of(result)
    assert "32 of 32 prompt tokens came from the prefix cache" in line


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    report = make_report(make_results(BenchSettings()), {}, [])
    path = tmp_path / "a.json"
    path.write_text(json.dumps(report))
    assert read_results(path) == report["results"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read"),
        ("[]", "no report"),
        ('{"schema": "other/1", "results": []}', "no report"),
        ('{"schema": "llmrt-bench/1"}', "lack a condition"),
        ('{"schema": "llmrt-bench/1", "results": [{"metric": "decode"}]}', "lack a condition"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        read_results(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("repeats", ["fast"]), ("repeats", 20.0), ("decode_tokens_per_s", "20"), ("input_len", [32])],
)
def test_a_figure_of_another_kind_is_refused(tmp_path: Path, name: str, value: object) -> None:
    (result,) = make_results(DECODE)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(make_report([result | {name: value}], {}, [])))
    with pytest.raises(InvalidRequest, match="lack a condition or their headline"):
        read_results(path)


def test_six_digits_are_kept() -> None:
    assert rounded({"a": [1234567.89, (0.000123456789,)], "b": 7, "c": None}) == {
        "a": [1234570.0, [0.000123457]],
        "b": 7,
        "c": None,
    }
