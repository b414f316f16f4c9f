"""Reports for people: text with bars, and a picture."""

from pathlib import Path

import pytest
from tests.cli.bench.results import make_results

from llmrt.cli.bench.plan import BenchSettings, make_points
from llmrt.cli.bench.png import check_png, write_png
from llmrt.cli.bench.result import add_roofline, make_report
from llmrt.cli.bench.roofline import ModelBytes
from llmrt.cli.bench.text import bar, text_of
from llmrt.wire.errors import ConfigError

SETTINGS = BenchSettings(
    input_lengths=(64, 128), concurrency=(1, 4), output_tokens=11, goodput={"ttft": 500.0}
)
MODEL = ModelBytes("tiny", "Q4_0", weight_bytes=64_000_000, layer_kv_bytes=0, windows=(None,))


def make_text_report() -> dict[str, object]:
    results = make_results(SETTINGS, itls_s=(0.05, 0.1))
    for result, point in zip(results, make_points(SETTINGS), strict=True):
        add_roofline(result, point, MODEL, 6.4e9, cache_bytes=0)
    about = {"memory_bandwidth_gb_per_s": {"before": 6.4, "after": 6.2}}
    return make_report(results, about, ["others were busy"])


@pytest.mark.parametrize(
    ("value", "most", "expected"),
    [(8, 8, "████"), (4, 8, "██"), (1, 8, "▌"), (0, 8, ""), (0, 0, ""), (3.25, 8, "█▋")],
)
def test_bars_are_exact_to_an_eighth(value: float, most: float, expected: str) -> None:
    assert bar(value, most, cells=4) == expected


def test_every_metric_has_its_own_part() -> None:
    parts = text_of(make_text_report()).split("\n\n")
    assert parts[0].splitlines() == [
        "tiny, Q4_0 (KV bf16), colocated (1 both), threads 2",
        "EPYC, 2 cores, 24 GiB, avx2",
        "memory reads 6.4 GB/s before, 6.2 GB/s after",
    ]
    assert [part.split(",")[0] for part in parts[1:4]] == [
        "Time to first token",
        "Decode",
        "Throughput",
    ]
    assert parts[4] == "! others were busy"
    assert parts[2].splitlines()[1].split() == [
        *("128", "+", "11", "15.0", "tokens/s", "(10.0", "to", "20.0)"),
        *("roofline", "15.0", "%", "█" * 24),
    ]
    assert "4 streams" in parts[3]
    assert "keep ttft:500" in parts[3]


def test_the_share_of_accepted_drafts_is_shown_if_there_were_some() -> None:
    (result,) = make_results(BenchSettings(metric="decode"))
    assert "drafted" not in text_of(make_report([result], {}, []))
    with_drafts = result | {"draft_acceptance_rate": 0.625}
    assert "62.5 % of drafted tokens accepted" in text_of(make_report([with_drafts], {}, []))


def test_a_metric_that_was_not_measured_is_not_shown() -> None:
    report = make_report(make_results(BenchSettings(metric="decode")), {}, [])
    text = text_of(report)
    assert "Decode" in text
    assert "Throughput" not in text


def test_a_roofline_that_is_missing_is_explained() -> None:
    results = make_results(SETTINGS)
    assert "no roofline: name the file" in text_of(make_report(results, {}, []))
    for result, point in zip(results, make_points(SETTINGS), strict=True):
        add_roofline(result, point, MODEL, 6.4e9, cache_bytes=MODEL.weight_bytes)
    about = {"memory_bandwidth_gb_per_s": {"before": 6.4, "after": 6.2}}
    text = text_of(make_report(results, about, []))
    assert text.count("no roofline: the weights fit the last-level cache") == 1


def test_a_picture_is_made_of_all_metrics(tmp_path: Path) -> None:
    """Three panels of 4.5 x 4 inches at 150 dots: 2025 x 600."""
    path = tmp_path / "report.png"
    check_png(path)
    write_png(make_text_report(), path)
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(header[16:20]), int.from_bytes(header[20:24])) == (2025, 600)


def test_another_suffix_is_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.png"):
        check_png(tmp_path / "report.jpg")
