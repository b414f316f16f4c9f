"""Workers that do not belong together under one broker: same name, other model."""

import json
from pathlib import Path

import pytest
from local_cluster import RunningCluster
from tests.integration.conftest import EXACT, write_tiny_model
from tests.integration.probes import run_llmrt, running_llmrt, wait_until

from llmrt.client import Client
from llmrt.wire.errors import InvalidRequest, ModelNotFound

pytestmark = pytest.mark.integration

BEGIN = 1


@pytest.fixture(scope="module")
def other_model(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights, and a tokenizer that puts its begin token in front of texts."""
    path = tmp_path_factory.mktemp("models") / "other.gguf"
    write_tiny_model(path, smollm2_path, seed=1, add_bos=True)
    return path


def test_a_second_worker_of_one_name_is_refused(
    split: RunningCluster, tiny_model: Path, tmp_path: Path
) -> None:
    with Client(split.bind) as client:
        before = client.generate("hello", max_tokens=8)
        rows = {row.worker_id: row.epoch for row in client.workers().workers}
        own = ("--worker-id", "decode-0", "--role", "decode", "--runtime-dir", tmp_path)
        ended = run_llmrt(
            *("worker", "--model", tiny_model, *EXACT, *own, "--broker", split.worker_bind),
            timeout_s=90,
        )
        assert ended.code == 77
        assert "'decode-0' is already registered" in ended.err
        assert "registration_refused" in ended.err
        assert {row.worker_id: row.epoch for row in client.workers().workers} == rows
        for _ in range(4):
            assert client.generate("hello", max_tokens=8).token_ids == before.token_ids


def test_workers_of_two_models_are_never_paired(
    split: RunningCluster, other_model: Path, tmp_path: Path
) -> None:
    own = ("--worker-id", "other-0", "--role", "decode", "--runtime-dir", tmp_path)
    broker = ("--broker", split.worker_bind)
    with Client(split.bind) as client:
        alone = client.generate("hello", max_tokens=8)
        with running_llmrt("worker", "--model", other_model, *EXACT, *own, *broker):
            wait_until(lambda: has_worker(client, "other-0"), 60, "the other worker serves")
            for _ in range(4):
                ours = client.generate("hello", max_tokens=8, model="tiny")
                theirs = client.generate("hello", max_tokens=8, model="other")
                assert ours.token_ids == alone.token_ids != theirs.token_ids
                assert ours.prefill_worker in ("prefill-0", "prefill-1")
                assert (theirs.decode_worker, theirs.prefill_worker) == ("other-0", "other-0")
            for ask in (
                lambda: client.generate("hello", max_tokens=1),
                lambda: client.tokenize("hello"),
            ):
                with pytest.raises(InvalidRequest, match=r"several are served: .* other, tiny"):
                    ask()
            with pytest.raises(ModelNotFound, match="other, tiny"):
                client.generate("hello", max_tokens=1, model="third")
            check_begin_tokens(client)
            check_commands(split, theirs.token_ids)
        wait_until(lambda: not has_worker(client, "other-0"), 10, "the other worker has left")
        assert client.generate("hello", max_tokens=8).token_ids == alone.token_ids


def has_worker(client: Client, name: str) -> bool:
    return any(row.worker_id == name for row in client.workers().workers)


def check_commands(cluster: RunningCluster, expected: tuple[int, ...]) -> None:
    """The command line names the model as the SDK does."""
    where = ("--broker", cluster.bind, "--max-tokens", "8")
    unnamed = run_llmrt("generate", "hello", *where)
    assert (unnamed.code, unnamed.out) == (2, "")
    assert "several are served" in unnamed.err
    named = run_llmrt("generate", "hello", *where, "--model", "other", "--json")
    assert tuple(json.loads(named.out)["token_ids"]) == expected


def check_begin_tokens(client: Client) -> None:
    """A template and a tokenizer that both add the begin token give one of them."""
    turns = [{"role": "user", "content": "hi"}]
    assert client.chat(turns, max_tokens=1, model="other").usage.prompt_tokens == 31
    ours = client.generate("hi", max_tokens=1, model="tiny").usage.prompt_tokens
    assert client.generate("hi", max_tokens=1, model="other").usage.prompt_tokens == ours + 1
    begin = client.tokenize("hi", model="other")
    assert begin == [BEGIN, *client.tokenize("hi", model="tiny")]
    with_begin = client.generate("<|im_start|>hi", max_tokens=1, model="other")
    assert with_begin.usage.prompt_tokens == ours + 1
