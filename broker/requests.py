"""The requests that a broker answers for, and what it keeps of their output.

A request is *live* from its admission to its end: owned by one worker, or homeless while no
worker can take it. Then it is *ended*: rows that the reader has not acknowledged and the terminal
message stay for a while, so that a reader who comes back finds them. A cancel for an unknown
request leaves an ended one without rows, which refuses the request if it comes late.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice

import msgspec

from llmrt.broker.prefixes import Prompt
from llmrt.broker.registry import Worker
from llmrt.wire.ids import NO_ATTEMPT, Attempt, ClientId, RequestId
from llmrt.wire.steps import StepRow

# Tokens that are sent before the reader has acknowledged the first of them. At the 256 tokens
# between two acknowledgements this is 16 of them in flight.
READER_WINDOW = 4096
# Output kept for readers and for a next owner, of all requests together.
MAX_KEPT_OUTPUT_BYTES = 64 << 20
# What a kept row costs beside its bytes: a tuple, three bytes objects, a place in the deque.
ROW_OVERHEAD_BYTES = 256


@dataclass(slots=True)
class Allowance:
    """A number of bytes that many share."""

    limit: int
    used: int = 0


class Stream(msgspec.Struct, eq=False, gc=False):
    """The output of one request, as far as it may be wanted again.

    `next_seq` is the sequence number of the next token to accept. `acked_seq` is above it while
    a stream is repeated for a reader that has the tokens of another broker. Rows are kept until
    the reader acknowledges them; token ids are kept for the next owner until the end. Once the
    allowance is used up `is_resumable` turns false for good, and only rows that wait to be sent
    are kept.
    """

    _allowance: Allowance
    acked_seq: int = 0
    next_seq: int = 0
    is_resumable: bool = True
    token_ids: bytearray = msgspec.field(default_factory=bytearray)
    kept_bytes: int = 0
    _rows: deque[StepRow] = msgspec.field(default_factory=deque)
    _num_sent: int = 0

    @property
    def is_behind(self) -> bool:
        """Rows wait for the reader's credit."""
        return self._num_sent < len(self._rows)

    @property
    def first_kept_seq(self) -> int:
        """The first token whose row can still be sent again."""
        return self._rows[0].seq if self._rows else self.next_seq

    def accept(self, row: StepRow) -> None:
        """Take the next row; the caller has checked its sequence number."""
        self.next_seq += row.num_tokens
        self._rows.append(row)
        if self.is_resumable:
            self.token_ids += row.token_ids
            self._charge(_row_bytes(row) + len(row.token_ids))
            if self._allowance.used > self._allowance.limit:
                self._stop_keeping()
        else:
            self._charge(_row_bytes(row))

    def take_unsent(self, *, is_last: bool = False) -> list[StepRow]:
        """Rows to send now: within the reader's window, or all at the end of the stream."""
        limit = self.next_seq + 1 if is_last else self.acked_seq + READER_WINDOW
        if self._num_sent == len(self._rows) - 1:
            newest = self._rows[-1]
            taken = [newest] if newest.seq < limit else []
        else:
            unsent = islice(self._rows, self._num_sent, None)
            taken = [row for row in unsent if row.seq < limit]
        self._num_sent += len(taken)
        if not self.is_resumable:
            self._drop_rows(self._num_sent)
        return taken

    def acknowledge(self, seq: int) -> None:
        """The reader has every token below `seq`; it can't have more than was sent."""
        self.acked_seq = max(self.acked_seq, min(seq, self._sent_seq))
        num_acked = 0
        for row in islice(self._rows, self._num_sent):
            # A row of text alone at the very edge may not have been read yet.
            if row.seq + row.num_tokens > seq or (row.seq == seq and not row.token_ids):
                break
            num_acked += 1
        self._drop_rows(num_acked)

    def rewind(self, seq: int) -> bool:
        """Send again from token `seq` on, or from the first that was not acknowledged.

        False if tokens are missing that the reader has not acknowledged.
        """
        first = self._rows[0].seq if self._rows else self.next_seq
        if max(seq, self.acked_seq) < first:
            return False
        self._num_sent = next(
            (
                i
                for i, row in enumerate(self._rows)
                if row.seq + row.num_tokens > seq or (not row.token_ids and row.seq >= seq)
            ),
            len(self._rows),
        )
        return True

    @property
    def _sent_seq(self) -> int:
        return self._rows[self._num_sent].seq if self.is_behind else self.next_seq

    def end(self) -> None:
        """No next owner will need the token ids."""
        self._charge(-len(self.token_ids))
        self.token_ids = bytearray()

    def discard(self) -> None:
        """Keep nothing any more."""
        self.end()
        self._drop_rows(len(self._rows))

    def check(self) -> None:
        assert 0 <= self._num_sent <= len(self._rows)
        assert self.kept_bytes == sum(map(_row_bytes, self._rows)) + len(self.token_ids)
        expected = self._rows[0].seq if self._rows else self.next_seq
        for row in self._rows:
            assert row.seq == expected, "kept rows are contiguous"
            expected += row.num_tokens
        assert expected == self.next_seq

    def _stop_keeping(self) -> None:
        self.is_resumable = False
        self.end()
        self._drop_rows(self._num_sent)

    def _drop_rows(self, count: int) -> None:
        for _ in range(count):
            self._charge(-_row_bytes(self._rows.popleft()))
        self._num_sent = max(0, self._num_sent - count)

    def _charge(self, size_bytes: int) -> None:
        self.kept_bytes += size_bytes
        self._allowance.used += size_bytes


class Request(msgspec.Struct, eq=False, gc=False):
    """A live request. `frames` are the client's behind its header, untouched.

    `family` and `numerics_id` are those of the worker whose tokens were passed on. `num_unnamed`
    counts heartbeats of the owner in a row that did not name the request. `admitted_unix_s` is the
    time that a chat template may show, the same for every owner. `prompt` is there once routing
    has looked at it. `num_pending` tokens of it are in the queue of `prompt_worker`.
    """

    request_id: RequestId
    client_id: ClientId
    kind: str
    frames: list[bytes]
    model: str
    admitted_at: float
    deadline: float
    stamps: tuple[int, ...]
    stream: Stream
    prompt_bytes: int
    admitted_unix_s: float = 0.0
    attempt: Attempt = NO_ATTEMPT
    owner: Worker | None = None
    owner_name: str = ""
    prefill_worker: str = ""
    family: int | None = None
    numerics_id: str | None = None
    stage: str = "waiting"
    dispatched_at: float = 0.0
    num_unnamed: int = 0
    num_losses: int = 0
    num_kills: int = 0
    first_token_at: float | None = None
    prompt: Prompt | None = None
    prompt_worker: Worker | None = None
    num_pending: int = 0

    def await_prompt(self, worker: Worker, num_tokens: int) -> None:
        """The worker has so many tokens more to compute."""
        self.settle_prompt()
        worker.num_pending_tokens += num_tokens
        self.prompt_worker, self.num_pending = worker, num_tokens

    def settle_prompt(self) -> None:
        """Nobody has to compute the prompt any more."""
        if self.prompt_worker is not None:
            self.prompt_worker.num_pending_tokens -= self.num_pending
            self.prompt_worker, self.num_pending = None, 0

    def asks(self, frames: list[bytes]) -> bool:
        """Whether a repeat with these frames behind its header wants the same."""
        return frames == self.frames


class Ended(msgspec.Struct, eq=False, gc=False):
    """What is kept of a request after its end. `terminal` are the frames that told it.

    `digest` is of the request's frames; empty if it never came.
    """

    request_id: RequestId
    client_id: ClientId
    stream: Stream
    terminal: list[bytes]
    digest: bytes = b""

    def asks(self, frames: list[bytes]) -> bool:
        """Whether a repeat with these frames behind its header wants the same."""
        return not self.digest or self.digest == _digest(frames)


@dataclass(slots=True)
class RequestTable:
    """`homeless` are live requests without an owner, oldest first."""

    output: Allowance = field(default_factory=lambda: Allowance(MAX_KEPT_OUTPUT_BYTES))
    live: dict[RequestId, Request] = field(default_factory=dict)
    homeless: dict[RequestId, Request] = field(default_factory=dict)
    ended: dict[RequestId, Ended] = field(default_factory=dict)
    prompt_bytes: int = 0

    def admit(self, request: Request) -> None:
        self.live[request.request_id] = request
        self.prompt_bytes += request.prompt_bytes

    def end(self, request: Request, terminal: list[bytes]) -> Ended:
        """Move a request without owner from live to ended."""
        del self.live[request.request_id]
        self.homeless.pop(request.request_id, None)
        self.prompt_bytes -= request.prompt_bytes
        request.stream.end()
        digest = _digest(request.frames)
        ended = Ended(request.request_id, request.client_id, request.stream, terminal, digest)
        self.ended[request.request_id] = ended
        return ended

    def forget(self, ended: Ended) -> None:
        ended.stream.discard()
        del self.ended[ended.request_id]

    def check(self) -> None:
        assert not self.live.keys() & self.ended.keys()
        assert self.prompt_bytes == sum(r.prompt_bytes for r in self.live.values())
        assert self.output.used == sum(stream.kept_bytes for stream in self._streams())
        for stream in self._streams():
            stream.check()
        for request_id, request in self.live.items():
            assert request.request_id == request_id
            assert (request.owner is None) == (request_id in self.homeless)
            assert request.owner is None or request_id in request.owner.requests

    def _streams(self) -> Iterator[Stream]:
        yield from (request.stream for request in self.live.values())
        yield from (ended.stream for ended in self.ended.values())


def _digest(frames: list[bytes]) -> bytes:
    digest = blake2b(digest_size=16)
    for frame in frames:
        digest.update(len(frame).to_bytes(8, "little"))
        digest.update(frame)
    return digest.digest()


def _row_bytes(row: StepRow) -> int:
    return len(row.token_ids) + len(row.text) + len(row.extras) + ROW_OVERHEAD_BYTES
