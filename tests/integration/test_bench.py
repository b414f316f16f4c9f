"""`llmrt bench` against real clusters: its own, and one that runs."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_cluster import RunningCluster

from llmrt.cli.bench.load import LoadGenerator
from llmrt.cli.bench.metrics import max_concurrent
from llmrt.client import AsyncClient

pytestmark = pytest.mark.integration

SHORT = ("--prompt-tokens", "40", "--output-tokens", "8", "--repeats", "2", "--threads", "1")


def bench(*args: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "llmrt.cli.main", "bench", *args, "--json"]
    report: dict[str, Any] = json.loads(subprocess.check_output(command, text=True))
    return report


def test_a_script_gets_the_decode_rate_of_a_cluster_of_its_own(tiny_model: Path) -> None:
    report = bench("--model", str(tiny_model), "--metric", "decode", "--concurrency", "1", *SHORT)
    assert report["decode_tokens_per_s"] > 0
    assert 0 < report["python_share"] < 1
    assert len(report["repeats"]) == 2
    assert (report["completed"], report["failed"]) == (2, 0)
    assert report["total_output_tokens"] == 2 * 8
    assert report["total_input_tokens"] == 2 * 40
    stamp = ("layout", "workers", "threads", "max_concurrency", "context", "quantization")
    assert [report[name] for name in stamp] == ["colocated", "1 both", 1, 1, 48, "F32"]
    assert report["cached_tokens"] == 0
    assert report["memory_bandwidth_gb_per_s"]["before"] > 0
    assert "roofline" in report


def test_a_split_cluster_is_measured_in_all_metrics_and_written(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Through the hand-over, with goodput, and into every kind of output."""
    output, png = tmp_path / "a.json", tmp_path / "a.png"
    report = bench(
        *("--model", str(tiny_model), "--layout", "split", *SHORT, "--input-lengths", "16,64"),
        *("--concurrency", "2", "--goodput", "ttft:60000", "itl:60000"),
        *("--output", str(output), "--png", str(png)),
    )
    assert [result["metric"] for result in report["results"]] == [
        *("ttft", "ttft", "decode", "throughput")
    ]
    for result in report["results"]:
        assert result["workers"] == "1 decode, 1 prefill"
        assert result["transfer"] == "shm"
        assert result["failed"] == 0
        assert result["request_goodput"] == result["request_throughput"]
    assert report["results"][3]["max_concurrent_requests"] == 2
    assert json.loads(output.read_text()) == report
    assert png.read_bytes().startswith(b"\x89PNG")
    compare = ["-m", "llmrt.cli.main", "bench", "compare", str(output), str(output)]
    assert "1.000x" in subprocess.check_output([sys.executable, *compare], text=True)


def test_a_running_cluster_is_measured_in_an_open_loop(
    colocated: RunningCluster, tiny_model: Path
) -> None:
    """A second time the prefix cache helps, and that is said. The file tells the quantization."""
    args = ("--broker", colocated.bind, "--metric", "throughput", "--request-rate", "20")
    first = bench(*args, *SHORT, "--num-prompts", "6", "--seed", "11")
    assert first["completed"] == 12
    assert first["request_rate"] == 20
    assert first["max_concurrency"] is None
    # The broker does not tell, and bench does not guess.
    assert first["quantization"] == first["device"] == "unknown"
    assert first["cached_tokens"] == 0
    again = bench(
        *(*args, *SHORT, "--num-prompts", "6", "--seed", "11", "--model", str(tiny_model))
    )
    assert again["quantization"] == "F32"
    assert again["threads"] == 1
    assert again["cached_tokens"] > 0
    assert any("prefix cache" in warning for warning in again["warnings"])


def test_a_worker_that_cannot_start_ends_the_benchmark(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    command = [sys.executable, "-m", "llmrt.cli.main", "bench", "--model", str(broken)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 78
    assert "broken.gguf" in done.stderr


async def with_client(endpoint: str, work: Callable[[AsyncClient], Any]) -> Any:
    async with AsyncClient(endpoint) as client:
        return await work(client)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop_keeps_its_concurrency(colocated: RunningCluster, concurrency: int) -> None:
    """Each request starts when another has ended, so at any time as many run as asked."""
    ended = []
    prompts = [[1000 + i] * 5 for i in range(6)]

    async def work(client: AsyncClient) -> Any:
        generator = LoadGenerator(client, 4, on_end=lambda: ended.append(1))
        return await generator.closed_loop(prompts, concurrency)

    records = asyncio.run(with_client(colocated.bind, work))
    assert len(records) == len(ended) == 6
    assert max_concurrent(records) == concurrency
    assert {record.output_tokens for record in records} == {4}


def test_an_open_loop_counts_from_when_a_request_was_due(colocated: RunningCluster) -> None:
    """One that was due in the past is late by that much, and not forgiven."""

    async def work(client: AsyncClient) -> Any:
        return await LoadGenerator(client, 2).open_loop([[5] * 4, [6] * 4], [-1.0, 0.2])

    late, later = asyncio.run(with_client(colocated.bind, work))
    assert (late.start_s, later.start_s) == (-1.0, 0.2)
    assert late.ttft_s > 1.0
    assert later.arrivals[0].at_s > 0.2


def test_a_failed_request_is_a_record(colocated: RunningCluster) -> None:
    async def work(client: AsyncClient) -> Any:
        return await LoadGenerator(client, 2).closed_loop([[5] * 4, [2**31]], 1)

    good, bad = asyncio.run(with_client(colocated.bind, work))
    assert good.error is None
    assert bad.error.error_code == "invalid_request"
