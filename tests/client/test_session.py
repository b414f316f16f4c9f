"""The shell of the client's machine, where the machine is at fault."""

import asyncio
import time
from typing import Any

import pytest

from llmrt.client.core import ClientCore
from llmrt.client.events import Event, Submit, Tick
from llmrt.client.session import Session
from llmrt.wire.ids import RequestId
from llmrt.wire.messages import PS


@pytest.mark.integration
def test_a_deadline_that_a_tick_does_not_consume_is_reported_and_does_not_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop is that of the user's program, which must go on."""
    faults: list[str] = []
    times: list[float] = []
    handle = ClientCore.handle

    def record(core: ClientCore, event: Event, now: float) -> list[Any]:
        if isinstance(event, Tick):
            times.append(now)
        return list(handle(core, event, now))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: faults.append(context["message"]))
        stuck_at = time.monotonic()
        monkeypatch.setattr(ClientCore, "handle", record)
        monkeypatch.setattr(ClientCore, "next_deadline", lambda core: stuck_at)
        session = Session("tcp://127.0.0.1:9", connect_timeout_s=60.0)
        await session.connect()
        session.submit(Submit(RequestId(bytes(16)), PS, 60.0, ()))
        async with asyncio.timeout(10):
            while len(times) < 20:  # noqa: ASYNC110 (a machine has no event)
                await asyncio.sleep(0)
        await session.close()

    asyncio.run(main())
    assert times[19] - times[0] >= 19 * 0.001 * 0.9
    assert "ClientCore kept its deadline after the tick" in faults
