"""Links between real workers, as `llmrt links` shows them."""

import json
import subprocess
import sys

import pytest
from local_cluster import RunningCluster
from tests.integration.conftest import StartCluster
from tests.integration.probes import wait_until

from llmrt.client import Client
from llmrt.kvtransfer.transports import TRANSPORTS

pytestmark = pytest.mark.integration


def links_of(cluster: RunningCluster) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "llmrt.cli.main", "links", "--json", "--broker", cluster.bind]
    rows: list[dict[str, object]] = json.loads(subprocess.check_output(command, text=True))
    return rows


@pytest.mark.parametrize("transfer", ["auto", "tcp"])
def test_both_ends_of_a_link_are_measured(start_cluster: StartCluster, transfer: str) -> None:
    arguments = ("--prefill", "1", "--decode", "1", "--transfer", transfer)
    with start_cluster(*arguments) as cluster:

        def are_measured() -> bool:
            rows = links_of(cluster)
            return len(rows) == 2 and all(row["latency_s"] for row in rows)

        wait_until(are_measured, 30.0, "both ends know the latency")
        rows = links_of(cluster)
    for row in rows:
        assert row["transport"] == ("shm" if transfer == "auto" else "tcp")
        assert row["bytes_per_s"] > 1e7  # type: ignore[operator]
        better = {"shm", *TRANSPORTS} - {"tcp"} if row["role"] != "prefill" else {"shm"}
        reasons = {} if transfer == "auto" else dict.fromkeys(better, "transfer is tcp")
        assert row["why_not"] == reasons


def test_a_prompt_of_4000_tokens_is_handed_over_without_a_copy(split: RunningCluster) -> None:
    with Client(split.bind) as client:
        result = client.generate("word " * 3900, max_tokens=4)
        assert result.usage.prompt_tokens >= 3900
        assert result.prefill_worker.startswith("prefill")

        def has_reported() -> bool:
            return sum(row.num_handed_over for row in client.workers().workers) > 0

        wait_until(has_reported, 10.0, "the hand-over is counted")
        assert [row.kv_bytes_read for row in client.workers().workers if row.kv_bytes_read] == []
