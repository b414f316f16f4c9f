"""What a worker process checks and cleans before it loads anything."""

import asyncio
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmrt.wire.errors import ConfigError, LlmrtError, ModelNotFound
from llmrt.workers.server import default_worker_id, remove_stale_sockets, serve
from llmrt.workers.settings import WorkerSettings


def test_files_of_dead_workers_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    dead = [tmp_path / f"decode-0.{gone.pid}.{kind}" for kind in ("link", "arena")]
    kept = [tmp_path / f"decode-1.{os.getpid()}.link", tmp_path / "notes.txt", tmp_path / "x.link"]
    for path in (*dead, *kept):
        path.touch()
    remove_stale_sockets(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_default_names_differ_between_processes_and_name_the_role() -> None:
    assert default_worker_id("decode").startswith("decode-")
    assert default_worker_id("decode").endswith(str(os.getpid()))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"role": "judge"}, ConfigError, "role is 'judge': one of both, prefill, decode"),
        ({"transfer": "pigeon"}, ConfigError, "transfer is 'pigeon'"),
        ({"checksums": "md5"}, ConfigError, "checksums is 'md5'"),
        ({"placement": "nowhere"}, ConfigError, "placement is 'nowhere'"),
        ({"speculative": "luck"}, ConfigError, "speculative is 'luck': one of off, ngram"),
        ({"speculative_tokens": 17}, ConfigError, "speculative_tokens is 17: from 1 to 16"),
        ({"max_running": 0}, ConfigError, "max_running is 0: at least 1"),
        ({"threads": 0}, ConfigError, "threads is 0: at least 1"),
        ({"threads": 5000}, ConfigError, "threads is 5000: this machine has"),
        ({"stream_interval_ms": -1}, ConfigError, "stream_interval_ms is -1: from 0 to 60000"),
        ({"stream_interval_ms": 10**11}, ConfigError, "stream_interval_ms is 100000000000"),
        ({"worker_id": ""}, ConfigError, "worker_id is ''"),
        ({"worker_id": "a/b"}, ConfigError, "worker_id is 'a/b'"),
        ({"kv_tokens": 1}, ConfigError, "kv_tokens is 1: at least 32"),
        ({}, ModelNotFound, "no model at"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_loaded(
    tmp_path: Path, change: dict[str, Any], error: type[LlmrtError], text: str
) -> None:
    settings = replace(WorkerSettings(model=tmp_path / "none.gguf"), **change)
    with pytest.raises(error, match=text):
        asyncio.run(serve(settings))
