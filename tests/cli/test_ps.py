"""The table of `ps`."""

from llmrt.cli.ps import table
from llmrt.wire.messages import PsReply, RequestRow, WorkerRow


def make_worker(worker_id: str, **fields: object) -> WorkerRow:
    values: dict[str, object] = {
        "worker_id": worker_id,
        "epoch": 1,
        "role": "both",
        "state": "alive",
        "model": "tiny",
        "num_running": 2,
        "num_waiting": 1,
        "num_blocks": 100,
        "num_free_blocks": 50,
        "num_cached_blocks": 20,
        "kv_bytes_read": 0,
        "tokens_per_s": 12.34,
        "heartbeat_age_s": 0.5,
        "links": {},
    }
    return WorkerRow(**(values | fields))  # type: ignore[arg-type]


def make_reply(**fields: object) -> PsReply:
    values: dict[str, object] = {
        "broker_epoch": 1,
        "uptime_s": 61.2,
        "workers": (),
        "requests": (),
        "counters": {},
    }
    return PsReply(**(values | fields))  # type: ignore[arg-type]


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    workers = (make_worker("a-long-name", links={"p-0": "shm"}), make_worker("b"))
    lines = table(make_reply(workers=workers)).splitlines()
    assert lines[0].split() == [
        *("WORKER", "ROLE", "STATE", "MODEL", "RUN+WAIT", "USED+CACHED", "TOK/S", "BEAT", "LINKS")
    ]
    assert lines[1].split() == [
        *("a-long-name", "both", "alive", "tiny", "2+1", "30+20/100", "12.3", "0.5", "p-0:shm")
    ]
    assert lines[2].index("both") == lines[1].index("both") == lines[0].index("ROLE")


def test_a_refused_link_is_shown_with_its_reason() -> None:
    refused = make_worker("d", links={"p": "refused"}, refusals={"p": "KV contract differs: why"})
    text = table(make_reply(workers=(refused, make_worker("e"))))
    assert "\n\nlink of d to p is refused: KV contract differs: why\n\nup " in text


def test_kv_that_had_changed_is_shown() -> None:
    changed = make_worker("d", num_checksum_mismatches=2)
    text = table(make_reply(workers=(changed, make_worker("e"))))
    line = "KV of d had changed, and was not used: 2 times on its way, 0 times in the cache"
    assert f"\n\n{line}\n\nup " in text


def test_requests_are_shown_only_if_there_are_some() -> None:
    assert "REQUEST" not in table(make_reply())
    row = RequestRow(
        request_id="ab",
        stage="prefill",
        decode_worker="d",
        prefill_worker="",
        num_tokens=7,
        age_s=1,
    )
    text = table(make_reply(requests=(row,)))
    assert "ab       prefill  d       -        7       1.0" in text


def test_counters_of_zero_are_left_out() -> None:
    text = table(make_reply(counters={"lost": 0, "finished": 3}))
    assert text.endswith("up 61 s finished=3")
