"""A broker process: two ROUTER sockets around the machine."""

import asyncio
import time
from collections.abc import Callable
from typing import assert_never

import structlog

from llmrt.actor import sockets
from llmrt.actor.channel import Channel
from llmrt.actor.driver import Driver
from llmrt.actor.process import Watch, watch_process
from llmrt.actor.runtime import settle
from llmrt.broker.core import BrokerCore
from llmrt.broker.effects import (
    Effect,
    Log,
    SendClient,
    SendWorker,
    UnwatchProcess,
    WatchProcess,
)
from llmrt.broker.events import (
    ClientGarbage,
    ClientMessage,
    ClientUnroutable,
    Event,
    ProcessDied,
    Tick,
    WorkerGarbage,
    WorkerMessage,
    WorkerUnroutable,
)
from llmrt.broker.settings import BrokerSettings
from llmrt.wire.envelope import check_frames, decode_header
from llmrt.wire.errors import ProtocolError
from llmrt.wire.ids import ClientId
from llmrt.wire.messages import ProcessName

log = structlog.get_logger(__name__)


async def serve(
    settings: BrokerSettings, *, on_ready: Callable[[str, str], None] = lambda *_: None
) -> None:
    """Serve until cancelled. `on_ready` gets the real endpoints for clients and for workers.

    Raises `ConfigError` for a wrong setting and `AddressInUse` for a taken endpoint.
    """
    server = _Server(BrokerCore(settings, epoch=time.time_ns()), settings)
    try:
        endpoints = server.open(settings)
        log.info("broker.started", bind=endpoints[0], worker_bind=endpoints[1])
        settle()
        on_ready(*endpoints)
        await asyncio.get_running_loop().create_future()
    finally:
        server.close()
        log.info("broker.stopped")


class _Server:
    def __init__(self, core: BrokerCore, settings: BrokerSettings) -> None:
        self._driver: Driver[Event, Effect] = Driver(
            core, self._perform, Tick(), validate=settings.validate
        )
        self._context = sockets.context()
        self._channels: list[Channel] = []
        self._endpoints: list[str] = []
        self._watches: dict[ProcessName, Watch] = {}
        self._log_at = {
            "debug": log.debug,
            "info": log.info,
            "warning": log.warning,
            "error": log.error,
        }

    def open(self, settings: BrokerSettings) -> tuple[str, str]:
        clients, workers = sockets.router(self._context), sockets.router(self._context)
        try:
            for socket, endpoint in ((clients, settings.bind), (workers, settings.worker_bind)):
                self._endpoints.append(sockets.bind(socket, endpoint))
        except BaseException:
            clients.close()
            workers.close()
            raise
        self._clients = Channel(clients, self._from_client, self._unsent_to_client)
        self._workers = Channel(workers, self._from_worker, self._unsent_to_worker)
        self._channels = [self._clients, self._workers]
        self._driver.handle(Tick())  # from here on the machine's time counts
        return self._endpoints[0], self._endpoints[1]

    def close(self) -> None:
        self._driver.close()
        for watch in self._watches.values():
            watch.close()
        for channel in self._channels:
            channel.close()
        self._context.term()
        for endpoint in self._endpoints:
            sockets.remove_ipc_file(endpoint)

    def _from_client(self, frames: list[bytes]) -> None:
        client_id = ClientId(frames[0])
        del frames[0]
        try:
            check_frames(frames)
            header = decode_header(frames[0])
        except ProtocolError as error:
            self._driver.handle(ClientGarbage(client_id, error.error_code, error.message))
        else:
            waited_s = self._driver.stalled_s()
            self._driver.handle(ClientMessage(client_id, header, frames, waited_s, time.time()))

    def _from_worker(self, frames: list[bytes]) -> None:
        routing_id = frames[0]
        del frames[0]
        try:
            check_frames(frames)
            header = decode_header(frames[0])
        except ProtocolError as error:
            self._driver.handle(WorkerGarbage(routing_id, error.error_code, error.message))
        else:
            self._driver.handle(WorkerMessage(routing_id, header, frames))

    def _unsent_to_client(self, frames: list[bytes], reason: str) -> None:
        log.debug("message.unsent", client_id=frames[0], reason=reason)
        self._driver.handle(ClientUnroutable(ClientId(frames[0]), frames[1:]))

    def _unsent_to_worker(self, frames: list[bytes], reason: str) -> None:
        log.debug("message.unsent", routing_id=frames[0], reason=reason)
        self._driver.handle(WorkerUnroutable(frames[0], frames[1:]))

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendClient():
                self._clients.send([effect.client_id, *effect.frames])
            case SendWorker():
                self._workers.send([effect.routing_id, *effect.frames])
            case Log(event, level, fields):
                self._log_at[level](event, **fields)
            case WatchProcess(process):
                watch = watch_process(process, lambda: self._found_dead(process))
                if watch is not None:
                    before = self._watches.pop(process, None)
                    if before is not None:
                        before.close()
                    self._watches[process] = watch
            case UnwatchProcess(process):
                ended = self._watches.pop(process, None)
                if ended is not None:
                    ended.close()
            case _:
                assert_never(effect)

    def _found_dead(self, process: ProcessName) -> None:
        self._driver.handle(ProcessDied(process))
