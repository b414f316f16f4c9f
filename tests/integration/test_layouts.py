"""The same text in every layout: colocated, split in place, split over TCP."""

import subprocess
import sys
from pathlib import Path

import pytest
from local_cluster import RunningCluster
from tests.integration.conftest import StartCluster

from llmrt.client import Client
from llmrt.client.requests import Options

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]

PROMPTS = [
    "a",
    "The quick brown fox",
    "你好，世界！今天天气怎么样？",  # noqa: RUF001 - Chinese punctuation on purpose
    "🚀🌶️👩‍👩‍👧‍👦 emoji",
    "def f(x):\n    return x ** 2\n" * 6,
    "word " * 31,
    "word " * 32,
    "word " * 33,
    "A longer text with many words. " * 60,
    "Русский текст и ещё немного. " * 20,
    "x" * 700,
]
DRAWS: list[Options] = [
    {"max_tokens": 24},
    {"max_tokens": 24, "temperature": 0.9, "seed": 7, "top_p": 0.95},
]


def answers(cluster: RunningCluster) -> list[tuple[tuple[int, ...], str, str]]:
    with Client(cluster.bind) as client:
        results = [client.generate(prompt, **draw) for prompt in PROMPTS for draw in DRAWS]
    return [(r.token_ids, r.text, r.finish_reason) for r in results]


def test_split_gives_the_text_of_colocated(
    colocated: RunningCluster, split: RunningCluster, split_tcp: RunningCluster
) -> None:
    expected = answers(colocated)
    assert len({tokens for tokens, _, _ in expected}) > len(expected) // 2
    assert answers(split) == expected
    assert answers(split_tcp) == expected
    assert answers(split) == expected  # and with warm caches


@pytest.mark.parametrize("transfer", ["shm", "tcp"])
def test_blocks_that_are_compared_and_sealed_give_the_same_text(
    colocated: RunningCluster, start_cluster: StartCluster, transfer: str
) -> None:
    """And no real block differs from itself, on its way or in the cache."""
    expected = answers(colocated)
    checked = ("--checksums", "full", "--transfer", transfer)
    with start_cluster("--prefill", "1", "--decode", "1", *checked) as cluster:
        assert answers(cluster) == answers(cluster) == expected
        with Client(cluster.bind) as client:
            workers = client.workers().workers
    assert sum(worker.num_cached_blocks for worker in workers) > 20
    assert not any(w.num_checksum_mismatches or w.num_seal_mismatches for w in workers)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_200_prompts_of_the_real_model_have_one_text(smollm2_path: Path) -> None:
    """Colocated, split in place and split over TCP, each prompt alone and cold."""
    check = [sys.executable, str(ROOT / "scripts/check_layouts"), str(smollm2_path)]
    subprocess.run(check, check=True)


def test_split_names_who_computed_what(split: RunningCluster) -> None:
    with Client(split.bind) as client:
        results = [client.generate("hello there", max_tokens=2) for _ in range(4)]
    assert {r.prefill_worker for r in results} <= {"prefill-0", "prefill-1"}
    assert {r.decode_worker for r in results} <= {"decode-0", "decode-1"}
    for result in results:
        stages = dict(result.timings_ms)
        assert {"prefill_queue", "prefill", "handover", "decode"} <= set(stages)
        assert sum(stages.values()) == pytest.approx(2 * stages["total"])
