"""The text that quality is measured on, cut into windows and prompts.

`wonderland.txt` is chapters VI and VII of Lewis Carroll, Alice's Adventures in Wonderland (1865),
out of copyright: lines of `alice29.txt` of the Canterbury corpus, joined to paragraphs.
"""

import hashlib
from array import array
from dataclasses import dataclass
from pathlib import Path

from llmrt.models.tokenizer import Tokenizer
from llmrt.wire.errors import ConfigError

FIXED_TEXT = Path(__file__).with_name("wonderland.txt")


@dataclass(frozen=True, slots=True)
class Text:
    """`sha256` is in hex, of the file's bytes."""

    name: str
    content: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as token ids, with what the model wants in front of any text (BOS or nothing)."""

    prefix: "array[int]"
    token_ids: "array[int]"

    def windows(self, context: int) -> "list[array[int]]":
        """The text in pieces of at most `context` tokens, each behind the prefix.

        A piece of which nothing can be predicted is left out.
        """
        size = context - len(self.prefix)
        starts = range(0, len(self.token_ids), size)
        pieces = [self.prefix + self.token_ids[start : start + size] for start in starts]
        return [piece for piece in pieces if len(piece) > 1]

    def prompts(self, count: int, length: int) -> "list[array[int]]":
        """`count` pieces of `length` tokens, evenly over the text, each behind the prefix.

        A short text gives shorter ones, and some twice.
        """
        last = max(0, len(self.token_ids) - length)
        starts = [n * last // max(1, count - 1) for n in range(count)]
        return [self.prefix + self.token_ids[start : start + length] for start in starts]


def read_text(path: Path | None) -> Text:
    """The fixed text, or another one in UTF-8. Raises `ConfigError`."""
    path = path or FIXED_TEXT
    try:
        raw = path.read_bytes()
        content = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the text {path}: {error}") from None
    return Text(path.name, content, hashlib.sha256(raw).hexdigest())


def make_corpus(text: Text, tokenizer: Tokenizer, max_tokens: int | None) -> Corpus:
    """The first `max_tokens` of a text, or all. Raises `ConfigError` for less than 2."""
    token_ids = tokenizer.encode(text.content, add_special=False, parse_special=False)[:max_tokens]
    if len(token_ids) < 2:
        raise ConfigError(f"the text has {len(token_ids)} tokens: at least 2 are needed")
    prefix = [tokenizer.bos_token_id] if tokenizer.adds_bos else []
    return Corpus(array("I", [token_id for token_id in prefix if token_id is not None]), token_ids)
