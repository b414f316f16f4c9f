"""What is said before a measurement starts."""

from llmrt.cli.bench.plan import BenchSettings, make_points
from llmrt.cli.bench.start import waiting_notes


def test_streams_above_the_batch_are_told() -> None:
    points = make_points(BenchSettings(metric="throughput", concurrency=(16, 32, 64)))
    assert waiting_notes(points, 32) == (
        "throughput of 64 streams: at most 32 run in a step (--max-running), the others wait",
    )
