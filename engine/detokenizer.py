"""From token ids to text while they come: never half a character, never half a stop string."""

import codecs
from collections.abc import Sequence

from llmrt.engine.batch import Vocabulary


class Detokenizer:
    """The text of one sequence, in pieces that are certain.

    A stop string ends the text before its first character. Of several, that one wins which is
    complete first, character by character, and of those the longest; so the text doesn't depend
    on how it was cut into tokens. A stop string that is complete before `min_tokens` tokens were
    fed is ordinary text. What may be the beginning of a stop string is held back.

    `previous_token_ids` were fed to another instance, which passed their text on: this one goes
    on where that one was. `continues` says that a text comes before the first token, so that its
    leading space is kept even if the vocabulary strips it.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        previous_token_ids: Sequence[int] = (),
        continues: bool = False,
    ) -> None:
        self.matched_stop: str | None = None
        self._pieces = vocabulary.token_bytes
        self._stop = tuple(text for text in stop if text)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._strips_space = vocabulary.strips_leading_space and not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        for token_id in previous_token_ids:
            self.feed(token_id)

    def feed(self, token_id: int) -> str:
        """The text that became certain with one more token; nothing after a stop string.

        Ids beyond the vocabulary, which padded embeddings have, add no text.
        """
        self._num_tokens += 1
        piece = self._pieces[token_id] if token_id < len(self._pieces) else b""
        if piece and self._strips_space:
            self._strips_space = False
            piece = piece.removeprefix(b" ")
        return self._advance(self._decoder.decode(piece))

    def flush(self) -> str:
        """What was held back, when no token follows. Half a character becomes U+FFFD."""
        text = self._advance(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _advance(self, new: str) -> str:
        if self.matched_stop is not None:
            return ""
        text = self._held + new
        if self._num_tokens >= self._min_tokens:
            match = self._first_match(text, len(self._held))
            if match is not None:
                start, self.matched_stop = match
                self._held = ""
                return text[:start]
        at = len(text) - self._num_held(text)
        self._held = text[at:]
        return text[:at]

    def _first_match(self, text: str, num_old: int) -> tuple[int, str] | None:
        """Start and stop string of the match that ends first, behind the first `num_old`."""
        matches = []
        for stop in self._stop:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        most = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), most, -1):
                if text.endswith(stop[:size]):
                    most = size
                    break
        return most
