"""The asyncio client."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from types import TracebackType
from typing import Self, TypeVar, Unpack

from llmrt.client.events import Submit
from llmrt.client.requests import (
    Messages,
    Options,
    Prompt,
    check_deadline,
    make_generate,
    make_tokenize,
    new_request_id,
    parse_request_id,
)
from llmrt.client.results import Outcome, Result, StreamEvent, TokenLogprob
from llmrt.client.session import Session
from llmrt.wire.errors import InternalError, InvalidRequest, LlmrtError, RequestCancelled
from llmrt.wire.ids import RequestId
from llmrt.wire.messages import HELLO, PS, Finished, PsReply, Welcome

DEFAULT_ENDPOINT = "tcp://127.0.0.1:7700"
CONNECT_TIMEOUT_S = 5.0
DEADLINE_S = 600.0
# For a list of workers; it needs one round trip.
PS_DEADLINE_S = 10.0

T = TypeVar("T")


class AsyncClient:
    """Talks to one broker over one connection; any number of requests may run at once.

    Use it as a context manager, or call `close`. It opens at the first request and belongs to
    the event loop that runs then. `connect_timeout_s` bounds the wait for the broker,
    `default_deadline_s` is for requests that give no `deadline_s` of their own.

    Every request ends with a result or with an `LlmrtError`: at the latest a second after its
    deadline, and with `BrokerUnreachable` when the broker stays away. A restart of the broker
    in between is not noticed, but for a pause. A call that is left (cancelled, timed out) cancels
    its request.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        default_deadline_s: float = DEADLINE_S,
    ) -> None:
        self.endpoint = endpoint
        self._connect_timeout_s = check_deadline(connect_timeout_s)
        self._default_deadline_s = check_deadline(default_deadline_s)
        self._session: Session | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Wait until the broker answers; raises `BrokerUnreachable` or `ConfigError`."""
        submit = Submit(new_request_id(), HELLO, self._connect_timeout_s)
        await self._ask(submit, Welcome)

    async def close(self) -> None:
        """Cancel every running request and close the connection."""
        self._is_closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """Generate from a text or from token ids."""
        return await self.stream(prompt, **options).wait()

    async def chat(self, messages: Messages, **options: Unpack[Options]) -> Result:
        """Generate the next turn of a chat, through the chat template of the model."""
        return await self.chat_stream(messages, **options).wait()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> "Stream":
        """As `generate`, token by token. The request is sent when the stream is read."""
        return Stream(self, make_generate(prompt, None, options, self._default_deadline_s))

    def chat_stream(self, messages: Messages, **options: Unpack[Options]) -> "Stream":
        """As `chat`, token by token. The request is sent when the stream is read."""
        return Stream(self, make_generate(None, messages, options, self._default_deadline_s))

    async def tokenize(
        self, prompt: str | Messages, *, add_special: bool = True, model: str | None = None
    ) -> list[int]:
        """Token ids of a text, or of a chat behind its template."""
        submit = make_tokenize(prompt, add_special, self._default_deadline_s, model)
        return list(await self._ask(submit, tuple))

    async def workers(self) -> PsReply:
        """Workers and requests as the broker sees them now."""
        return await self._ask(Submit(new_request_id(), PS, PS_DEADLINE_S), PsReply)

    async def cancel(self, request_id: str | bytes) -> None:
        """Cancel a request of this client; its reader gets `RequestCancelled`."""
        session = await self._connected()
        session.cancel(parse_request_id(request_id))

    async def _connected(self) -> Session:
        if self._is_closed:
            raise RequestCancelled("the client is closed: make a new one")
        if self._session is None:
            self._session = Session(self.endpoint, connect_timeout_s=self._connect_timeout_s)
        session = self._session
        if not session.is_connected:
            await session.connect()
        return session

    async def _ask(self, submit: Submit, expected: type[T]) -> T:
        session = await self._connected()
        mailbox = session.submit(submit)
        try:
            answer = await mailbox.get()
        finally:
            session.leave(submit.request_id)
        if isinstance(answer, LlmrtError):
            raise answer
        if not isinstance(answer, expected):
            raise InternalError(f"{type(answer).__name__} is no answer to {submit.kind}")
        return answer


class Stream:
    """The tokens of one request, as they come.

    Iterate over it once, inside `async with` or not: leaving the loop early by `break`, by an
    exception or by cancellation cancels the request, and so do `aclose` and the end of the
    `async with` block. `result` is there after the end.
    """

    def __init__(self, client: AsyncClient, submit: Submit) -> None:
        self._client = client
        self._submit = submit
        self._session: Session | None = None
        self._is_taken = False
        self._result: Result | None = None

    @property
    def request_id(self) -> str:
        """In hex, as in logs."""
        return self._submit.request_id.hex()

    @property
    def result(self) -> Result:
        """All of it; raises `InvalidRequest` before the end."""
        if self._result is None:
            raise InvalidRequest(
                f"stream {self.request_id} has no result: it has not been read to its end"
            )
        return self._result

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel the request if it still runs."""
        self._is_taken = True
        if self._session is not None:
            self._session.leave(self._submit.request_id)

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        if self._is_taken:
            raise InvalidRequest(f"stream {self.request_id} was read or closed: start another one")
        self._is_taken = True
        # The loop holds the only reference to the generator: leaving the loop ends it.
        return self._events()

    async def wait(self) -> Result:
        """Read to the end."""
        async for _ in self:
            pass
        return self.result

    async def _events(self) -> AsyncGenerator[StreamEvent, None]:
        self._session = session = await self._client._connected()
        mailbox = session.submit(self._submit)
        events: list[StreamEvent] = []
        try:
            while isinstance(item := await mailbox.get(), StreamEvent):
                events.append(item)
                yield item
                session.read_to(self._submit.request_id, item.seq + len(item.token_ids))
        finally:
            session.leave(self._submit.request_id)
        self._result = _result(self._submit.request_id, events, item)


def _result(request_id: RequestId, events: Iterable[StreamEvent], outcome: Outcome) -> Result:
    if isinstance(outcome, LlmrtError):
        raise outcome
    if not isinstance(outcome, Finished):
        raise InternalError(f"{type(outcome).__name__} is no end of a stream")
    logprobs: list[TokenLogprob] = []
    for event in events:
        logprobs += event.logprobs or ()
    return Result(
        request_id=request_id.hex(),
        text="".join([event.text for event in events]),
        token_ids=tuple([token_id for event in events for token_id in event.token_ids]),
        finish_reason=outcome.finish_reason,
        usage=outcome.usage,
        timings_ms=outcome.timings_ms,
        decode_worker=outcome.decode_worker,
        prefill_worker=outcome.prefill_worker,
        stop=outcome.stop,
        logprobs=tuple(logprobs) or None,
        num_drafted=outcome.num_drafted,
        num_accepted=outcome.num_accepted,
        placement=outcome.placement,
        placement_ms=outcome.placement_ms,
    )
