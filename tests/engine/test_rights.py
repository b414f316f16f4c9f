"""No row writes into another worker's arena beyond what was granted."""

from array import array
from typing import Any

import pytest

from llmrt.engine.batch import LOCAL_ARENA, ArenaId, Row, SequenceId
from llmrt.engine.rights import WriteRight, check_rights

THEIRS = ArenaId("decode-0@7")
RIGHT = WriteRight(THEIRS, array("I", [4, 9, 2]), 32)
RIGHTS = {SequenceId(1): RIGHT}


def make_row(**changes: Any) -> Row:
    facts: dict[str, Any] = {
        "sequence_id": SequenceId(1),
        "arena": THEIRS,
        "token_ids": array("I", [5, 6]),
        "start": 32,
        "blocks": array("I", [4, 9, 2]),
    }
    return Row(**facts | changes)


def test_a_row_within_its_grant_runs_and_so_does_any_local_one() -> None:
    check_rights([make_row(), make_row(start=64)], RIGHTS)
    check_rights([make_row(sequence_id=SequenceId(2), arena=LOCAL_ARENA)], RIGHTS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sequence_id": SequenceId(2)}, "sequence 2 has no grant in arena 'decode-0@7'"),
        ({"arena": ArenaId("decode-1@7")}, "no grant in arena 'decode-1@7', but in 'decode-0@7'"),
        ({"blocks": array("I", [4, 9, 3])}, "block 2 of the table is 3 and not 2"),
        ({"blocks": array("I", [9, 4, 2])}, "block 0 of the table is 9 and not 4"),
        ({"blocks": array("I", [4, 9])}, "2 blocks and not 3"),
        ({"blocks": array("I", [4, 9, 2, 0])}, "4 blocks and not 3"),
        ({"start": 31}, "from position 31 on: its grant in arena 'decode-0@7' begins at 32"),
    ],
)
def test_a_row_beyond_its_grant_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match="sequence") as refused:
        check_rights([make_row(), make_row(**changes)], RIGHTS)
    assert reason in str(refused.value)
