"""Broken hand-overs between real machines: every fault is refused before a token is decoded."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from kv_faults import (
    KINDS,
    NotRefused,
    Pairs,
    flip_at_d_behind_the_read,
    flip_in_flight,
    flip_in_the_cache,
    inject,
)
from kv_pair import Pair

pytestmark = pytest.mark.integration


def test_no_fault_goes_through() -> None:
    results = asyncio.run(inject(300, seed=7))
    assert {name: num for name, (num, _) in results.items()} == dict.fromkeys(KINDS, 30)
    assert [failure for _, failures in results.values() for failure in failures] == []


@pytest.mark.parametrize("fault", [flip_in_flight, flip_at_d_behind_the_read, flip_in_the_cache])
def test_without_checks_the_same_faults_go_through(
    fault: Callable[[Pairs, random.Random], Awaitable[None]],
) -> None:
    """So that the test above can fail."""

    async def run() -> None:
        pairs = Pairs(
            Pair(transfer="tcp", checksums="off"),
            Pair(transfer="auto", checksums="off"),
            Pair(transfer="auto", checksums="off"),
        )
        for pair in (pairs.leased, pairs.in_place, pairs.sealed):
            await pair.start()
        try:
            await fault(pairs, random.Random(3))
        finally:
            for pair in (pairs.leased, pairs.in_place, pairs.sealed):
                await pair.close()

    with pytest.raises(NotRefused, match=r"nobody noticed|wrong tokens|broken blocks"):
        asyncio.run(run())
