"""Puts the rows of one stream in order, so that its reader gets every token once."""

from enum import Enum

from llmrt.client.results import StreamEvent, TokenLogprob
from llmrt.wire.arrays import U32_BYTES, unpack_u32
from llmrt.wire.envelope import decode_body
from llmrt.wire.errors import InternalError, ProtocolError
from llmrt.wire.steps import StepRow, token_ids_of


class Skipped(Enum):
    """Why a row gave nothing new."""

    DUPLICATE = "duplicate"
    GAP = "gap"


class Sequencer:
    """Remembers how far a stream was passed on.

    `next_seq` is the number of the token wanted next. After a restart the broker may repeat a
    stream from its first token, in rows that are cut elsewhere: the same tokens and the same
    text, since both are functions of the request. So the text of a row that is partly old is cut
    by counting the bytes of the repetition. Where the tokens differ all the same, going on would
    join two answers.
    """

    def __init__(self) -> None:
        self.next_seq = 0
        self._passed_on = bytearray()  # all token ids, as on the wire
        self._num_bytes = 0
        # A row without tokens (text held back until the end) comes at most once per number.
        self._bare_seq = -1
        self._replay_seq = 0
        self._replay_bytes = 0

    def take(self, row: StepRow) -> StreamEvent | Skipped:
        """The new part of a row.

        Raises `ProtocolError` if its extras are damaged, `InternalError` if it repeats a token
        with another id.
        """
        end = row.seq + row.num_tokens
        num_old = self.next_seq - row.seq
        if num_old < 0:
            return Skipped.GAP
        self._check_repetition(row)
        num_old_bytes = self._num_old_bytes(row)
        if not self._has_news(row):
            return Skipped.DUPLICATE
        if num_old_bytes is None:
            return Skipped.GAP
        logprobs = _logprobs(row)
        text = row.text[num_old_bytes:]
        event = StreamEvent(
            self.next_seq,
            text.decode("utf-8", "replace"),
            tuple(token_ids_of(row)[num_old:]),
            None if logprobs is None else logprobs[num_old:],
        )
        if row.num_tokens == 0:
            self._bare_seq = row.seq
        self.next_seq = end
        self._passed_on += row.token_ids[num_old * U32_BYTES :]
        self._num_bytes += len(text)
        return event

    def _check_repetition(self, row: StepRow) -> None:
        start = row.seq * U32_BYTES
        passed_on = self._passed_on[start : start + len(row.token_ids)]
        if row.token_ids.startswith(passed_on):
            return
        pairs = zip(unpack_u32(bytes(passed_on)), token_ids_of(row), strict=False)
        i, (old, new) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        raise InternalError(
            f"token {row.seq + i} of request {row.request_id.hex()} was {old} and came again as "
            f"{new}: the stream was computed anew with another result; send it again"
        )

    def _has_news(self, row: StepRow) -> bool:
        if row.num_tokens == 0:
            return row.seq == self.next_seq and row.seq != self._bare_seq
        return row.seq + row.num_tokens > self.next_seq

    def _num_old_bytes(self, row: StepRow) -> int | None:
        """Bytes of the row's text that were passed on before; None if that cannot be told."""
        if row.seq == self.next_seq:
            return 0
        if row.seq == 0:
            start = 0
        elif row.seq == self._replay_seq:
            start = self._replay_bytes
        else:
            return None
        self._replay_seq = row.seq + row.num_tokens
        self._replay_bytes = start + len(row.text)
        return max(0, self._num_bytes - start)


def _logprobs(row: StepRow) -> tuple[TokenLogprob, ...] | None:
    """Extras are msgpack: per token `[log probability, [[id, log probability], ...]]`."""
    if not row.extras:
        return None
    entries = decode_body(row.extras, list[tuple[float, tuple[tuple[int, float], ...]]])
    if len(entries) != row.num_tokens:
        raise ProtocolError(f"{len(entries)} log probabilities for {row.num_tokens} tokens")
    return tuple(TokenLogprob(drawn, top) for drawn, top in entries)
