"""Guesses the next tokens of a sequence from what it has said before (prompt lookup decoding).

Of the last n tokens, longest n first, the latest earlier occurrence is looked up, and what followed
it there is the draft; where the text ends, the draft goes on with itself, as a text with a period
does. Pure, and exact: a draft only decides how much one step tries.
"""

from array import array

MAX_NGRAM = 3
MIN_NGRAM = 2
# After m drafts in a row of which nothing was accepted, 2**m - 1 steps pass without one.
MAX_MISSES = 5


class NgramDrafter:
    """The n-grams of one sequence, and how well its drafts do.

    Memory: some 100 bytes per token and size of n-gram.
    """

    def __init__(self) -> None:
        self._next_of: dict[bytes, int] = {}
        self._num_indexed = 0
        self._misses = 0
        self._steps_to_skip = 0
        self.num_drafted = 0
        self.num_accepted = 0

    def propose(self, token_ids: "array[int]", max_tokens: int) -> "array[int]":
        """`max_tokens` tokens that may follow `token_ids`; none if nothing is known.

        `token_ids` is the same sequence at every call, grown at its end.
        """
        self._index(token_ids)
        if self._steps_to_skip:
            self._steps_to_skip -= 1
            return token_ids[:0]
        for size in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
            found = self._next_of.get(token_ids[-size:].tobytes())
            if found is not None and size <= len(token_ids):
                period = token_ids[found : found + max_tokens]
                return (period * -(-max_tokens // len(period)))[:max_tokens]
        return token_ids[:0]

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Say what became of a draft of at least one token."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self._misses = 0 if num_accepted else min(self._misses + 1, MAX_MISSES)
        self._steps_to_skip = 2**self._misses - 1

    def _index(self, token_ids: "array[int]") -> None:
        # The n-grams that end with the last token have nothing behind them yet.
        for end in range(max(self._num_indexed, MIN_NGRAM), len(token_ids)):
            for size in range(MIN_NGRAM, min(MAX_NGRAM, end) + 1):
                self._next_of[token_ids[end - size : end].tobytes()] = end
        self._num_indexed = max(self._num_indexed, len(token_ids))
