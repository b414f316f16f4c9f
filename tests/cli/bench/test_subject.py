"""What the broker tells of a cluster, and what is made of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from llmrt.cli.bench.subject import Declared, conditions_of, python_share, step_seconds
from llmrt.wire.errors import ConfigError, NoWorker
from llmrt.wire.messages import PsReply, WorkerRow


def make_worker(worker_id: str, role: str, **fields: Any) -> WorkerRow:
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "epoch": 1,
        "role": role,
        "state": "alive",
        "model": "tiny",
        "num_running": 0,
        "num_waiting": 0,
        "num_blocks": 10,
        "num_free_blocks": 10,
        "num_cached_blocks": 0,
        "tokens_per_s": 0.0,
        "heartbeat_age_s": 0.1,
        "kv_bytes_read": 0,
        "links": {},
    }
    return WorkerRow(**(values | fields))


def test_a_prefill_worker_makes_the_layout_a_split_one() -> None:
    workers = [
        make_worker("prefill-0", "prefill", links={"decode-0": "pending"}),
        make_worker("decode-0", "decode", links={"prefill-0": "shm"}),
        make_worker("decode-1", "decode", links={"prefill-0": "shm"}),
    ]
    assert conditions_of(workers, None, None) == {
        "model": "tiny",
        "layout": "split",
        "workers": "2 decode, 1 prefill",
        "transfer": "shm",
        "numerics_id": None,
    }
    assert conditions_of([make_worker("a", "both")], "tiny", "colocated") == {
        "model": "tiny",
        "layout": "colocated",
        "workers": "1 both",
        "transfer": "none",
        "numerics_id": None,
    }


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ("huge", None, "--model is huge, but the broker serves other, tiny"),
        (None, None, "the broker serves other, tiny: say which one"),
        ("tiny", "split", "--layout is split, but the cluster is colocated"),
    ],
)
def test_a_cluster_that_is_not_as_said_is_refused(
    model: str | None, layout: str | None, message: str
) -> None:
    workers = [make_worker("a", "both"), make_worker("b", "both", model="other")]
    with pytest.raises(ConfigError, match=message):
        conditions_of(workers, model, layout)


def test_only_the_living_serve() -> None:
    with pytest.raises(NoWorker):
        conditions_of([make_worker("a", "both", state="lost")], None, None)


def test_what_was_not_declared_is_unknown() -> None:
    assert Declared(threads=4, device="torch").conditions() == {
        "quantization": "unknown",
        "weight_bytes": "unknown",
        "device": "torch",
        "dtype": "unknown",
        "kv_cache_dtype": "unknown",
        "threads": 4,
        "speculative": "unknown",
        "speculative_tokens": "unknown",
        "cpu_family": "unknown",
        "placement": "unknown",
        "max_running": "unknown",
        "step_tokens": "unknown",
        "kv_tokens": "unknown",
        "stream_interval_ms": "unknown",
        "has_prefix_cache": "unknown",
    }


def test_workers_that_do_not_tell_have_no_python_share() -> None:
    reply = PsReply(
        broker_epoch=1, uptime_s=1.0, workers=(make_worker("a", "both"),), requests=(), counters={}
    )
    assert step_seconds(reply) is None


def test_the_python_share_is_that_of_the_steps_in_between() -> None:
    rows = [SimpleNamespace(python_s=1.0, steps_s=10.0), SimpleNamespace(python_s=2.0, steps_s=5.0)]
    reply: Any = SimpleNamespace(workers=rows)
    assert step_seconds(reply) == (3.0, 15.0)
    assert python_share((3.0, 15.0), (3.5, 25.0)) == 0.05
    assert python_share((3.0, 15.0), (3.0, 15.0)) is None
    assert python_share(None, (3.5, 25.0)) is None
