"""The blocking client: `AsyncClient` on a loop of its own, in a background thread."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, Unpack

from llmrt.client.client import CONNECT_TIMEOUT_S, DEADLINE_S, DEFAULT_ENDPOINT, AsyncClient
from llmrt.client.client import Stream as AsyncStream
from llmrt.client.requests import Messages, Options, Prompt
from llmrt.client.results import Result, StreamEvent
from llmrt.wire.errors import RequestCancelled
from llmrt.wire.messages import PsReply

T = TypeVar("T")

# Events that a stream holds for its reader, who then holds the stream back; and how many are
# reported as read together.
_MAX_UNREAD, _READ_TOGETHER = 64, 16


class Client:
    """`AsyncClient` for code without an event loop; safe for use from several threads.

    Use it as a context manager, or call `close`. Methods block; Ctrl-C, or any exception
    while one waits, cancels its request.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        default_deadline_s: float = DEADLINE_S,
    ) -> None:
        self._client = AsyncClient(
            endpoint, connect_timeout_s=connect_timeout_s, default_deadline_s=default_deadline_s
        )
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread: _LoopThread | None = None

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        return self._client.endpoint

    def open(self) -> None:
        """Wait until the broker answers; raises `BrokerUnreachable` or `ConfigError`."""
        self._run(self._client.open())

    def close(self) -> None:
        """Cancel every running request, close the connection and end the thread."""
        with self._lock:
            self._is_closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.submit(self._client.close()).result()
            thread.stop()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """Generate from a text or from token ids."""
        return self._run(self._client.generate(prompt, **options))

    def chat(self, messages: Messages, **options: Unpack[Options]) -> Result:
        """Generate the next turn of a chat, through the chat template of the model."""
        return self._run(self._client.chat(messages, **options))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> "Stream":
        """As `generate`, token by token. The request is sent when the stream is read."""
        return Stream(self._submit, self._client.stream(prompt, **options))

    def chat_stream(self, messages: Messages, **options: Unpack[Options]) -> "Stream":
        """As `chat`, token by token. The request is sent when the stream is read."""
        return Stream(self._submit, self._client.chat_stream(messages, **options))

    def tokenize(
        self, prompt: str | Messages, *, add_special: bool = True, model: str | None = None
    ) -> list[int]:
        """Token ids of a text, or of a chat behind its template."""
        work = self._client.tokenize(prompt, add_special=add_special, model=model)
        return self._run(work)

    def workers(self) -> PsReply:
        """Workers and requests as the broker sees them now."""
        return self._run(self._client.workers())

    def cancel(self, request_id: str | bytes) -> None:
        """Cancel a request of this client; its reader gets `RequestCancelled`."""
        self._run(self._client.cancel(request_id))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return _result_of(self._submit(work))

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        # Under the lock, so that nothing is submitted behind the close: it would never run.
        with self._lock:
            if self._is_closed:
                work.close()
                raise RequestCancelled("the client is closed: make a new one")
            if self._thread is None:
                self._thread = _LoopThread()
            return self._thread.submit(work)


class Submit(Protocol):
    """Starts work on the client's loop; raises `RequestCancelled` once the client is closed."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> "Future[T]": ...


class Stream:
    """The tokens of one request, as they come.

    Iterate over it once, inside `with` or not: leaving the loop early by `break` or by an
    exception cancels the request, and so do `close` and the end of the `with` block. `result` is
    there after the end.
    """

    def __init__(self, submit: "Submit", stream: AsyncStream) -> None:
        self._submit = submit
        self._stream = stream

    @property
    def request_id(self) -> str:
        """In hex, as in logs."""
        return self._stream.request_id

    @property
    def result(self) -> Result:
        """All of it; raises `InvalidRequest` before the end."""
        return self._stream.result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the request if it still runs."""
        with suppress(RequestCancelled):  # the client was closed, and the request with it
            self._submit(self._stream.aclose()).result()

    def __iter__(self) -> Iterator[StreamEvent]:
        events = self._stream.__aiter__()
        # The loop holds the only reference to the generator: leaving the loop ends it.
        return self._read(events)

    def wait(self) -> Result:
        """Read to the end."""
        for _ in self:
            pass
        return self.result

    def _read(self, events: AsyncIterator[StreamEvent]) -> Generator[StreamEvent, None, None]:
        inbox: SimpleQueue[StreamEvent | None] = SimpleQueue()
        room = asyncio.Semaphore(_MAX_UNREAD)

        async def pump() -> None:
            try:
                async for event in events:
                    inbox.put(event)
                    await room.acquire()
            finally:
                inbox.put(None)

        async def make_room(count: int) -> None:
            for _ in range(count):
                room.release()

        # One task per stream and per many tokens: a hand-over between threads takes some 50 us.
        future = self._submit(pump())
        num_read = 0
        try:
            while (event := inbox.get()) is not None:
                yield event
                num_read += 1
                if num_read % _READ_TOGETHER == 0:
                    self._submit(make_room(_READ_TOGETHER))
            _result_of(future)
        finally:
            future.cancel()


class _LoopThread:
    """A running event loop in a thread that does not keep the program alive."""

    def __init__(self) -> None:
        started: SimpleQueue[asyncio.AbstractEventLoop] = SimpleQueue()
        self._stop = asyncio.Event()

        async def serve() -> None:
            started.put(asyncio.get_running_loop())
            await self._stop.wait()

        self._thread = threading.Thread(
            target=asyncio.run, args=(serve(),), name="llmrt-client", daemon=True
        )
        self._thread.start()
        self._loop = started.get()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self) -> None:
        """End the loop; what still runs is cancelled."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


def _result_of(future: "Future[T]") -> T:
    try:
        return future.result()
    except CancelledError:
        raise RequestCancelled("the client was closed") from None
    except BaseException:  # Ctrl-C comes here while we wait
        future.cancel()
        raise
