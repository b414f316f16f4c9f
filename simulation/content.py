"""Arenas with content, and a device whose next token is a function of what the blocks hold.

A slot holds a running hash of all tokens up to its position, and the one before it. A device walks
the whole chain of slots before its first new token, as attention reads all of them, and takes the
hash from there, not from the sequence; so a block that is partial, stale, foreign or missing breaks
the chain, which changes every token after it, and the text tells.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from llmrt.engine.batch import (
    ArenaId,
    Batch,
    Drawn,
    Logprobs,
    Row,
    SampleSpec,
    StepResult,
    draw_behind,
)
from llmrt.kvtransfer.ledger import Ledger
from llmrt.wire.ids import BlockId
from llmrt.wire.kv import BLOCK_TOKENS, KvContract
from llmrt.wire.sampling import SamplingParams

EMPTY = b""
VOCAB_SIZE = 512
EOS_TOKEN_ID = 1
NUM_CONTROL = 3

CONTRACT = KvContract(
    model_hash="simulated",
    tokenizer_hash="simulated",
    kv_dtype="bf16",
    block_tokens=BLOCK_TOKENS,
    layout="simulated",
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    rope="none",
    sharding="none",
    protocol="1",
    numerics_id="simulated",
)


class SimVocabulary:
    """Token n is the text of a two-letter word and a space; token 1 ends."""

    def __init__(self) -> None:
        words = [f"{chr(97 + n // 26 % 26)}{chr(97 + n % 26)} ".encode() for n in range(VOCAB_SIZE)]
        self.token_bytes: Sequence[bytes] = [b""] * NUM_CONTROL + words[NUM_CONTROL:]
        self.eos_token_ids = frozenset({EOS_TOKEN_ID})
        self.strips_leading_space = False


def fold(digest: bytes, token_id: int) -> bytes:
    """The hash of one more token."""
    return blake2b(digest + token_id.to_bytes(4, "little"), digest_size=8).digest()


def next_token(digest: bytes, sample: SampleSpec) -> int:
    """The token behind a prefix: some 1 in 64 ends the text.

    `top_k` above 0 bounds how many words occur: with few of them a text repeats itself. With
    penalties, how often each token occurred decides, too.
    """
    num_words = sample.params.top_k or VOCAB_SIZE - NUM_CONTROL
    salt = sample.seed.to_bytes(8, "little") + sample.position.to_bytes(4, "little")
    if sample.token_ids:
        salt += blake2b(repr(sorted(Counter(sample.token_ids).items())).encode()).digest()
    for attempt in range(256):
        draw = blake2b(digest + salt + bytes([attempt]), digest_size=4).digest()
        value = int.from_bytes(draw, "little")
        word = NUM_CONTROL + value // 64 % num_words
        token_id = word if value % 64 else EOS_TOKEN_ID
        if token_id not in sample.banned:
            return token_id
    raise AssertionError("256 draws are all banned")


def expected_tokens(prompt: "array[int]", params: SamplingParams, max_context: int) -> list[int]:
    """What any layout must answer, computed without blocks."""
    digest = EMPTY
    for token_id in prompt:
        digest = fold(digest, token_id)
    room = max_context - len(prompt)
    limit = min(room, params.max_tokens) if params.max_tokens is not None else room
    ends = (EOS_TOKEN_ID, *params.stop_token_ids)
    has_penalties = bool(params.frequency_penalty)
    tokens: list[int] = []
    while len(tokens) < limit:
        sample = SampleSpec(
            params,
            params.seed or 0,
            len(prompt) + len(tokens),
            prompt + array("I", tokens) if has_penalties else array("I"),
            len(prompt),
            tuple(sorted(ends)) if len(tokens) < params.min_tokens else (),
        )
        token_id = next_token(digest, sample)
        tokens.append(token_id)
        is_end = token_id == EOS_TOKEN_ID and not params.ignore_eos
        if is_end or token_id in params.stop_token_ids:
            break
        if any(stop in text_of(tokens) for stop in params.stop):
            break
        digest = fold(digest, token_id)
    return tokens


def text_of(tokens: list[int], stop: str | None = None) -> str:
    """What a reader of these tokens sees, up to `stop`."""
    words = SimVocabulary().token_bytes
    text = b"".join(words[token_id] for token_id in tokens).decode()
    return text if stop is None else text.partition(stop)[0]


Slot = tuple[bytes, bytes]
BROKEN = b"broken"


@dataclass(slots=True)
class SimArena:
    """`slots[block][offset]` is (hash before, hash at that position), None before the first write.

    `ledger` is its owner's: each write is held against the state of its block.
    """

    name: str
    generation: int
    ledger: Ledger
    slots: list[list[Slot | None]] = field(init=False)
    violations: list[str] = field(default_factory=list)
    num_broken: int = 0

    def __post_init__(self) -> None:
        self.slots = [[None] * BLOCK_TOKENS for _ in range(self.ledger.num_blocks)]

    def read(self, blocks: "array[int]", end: int) -> bytes:
        """The hash of all tokens before `end`; `BROKEN` if the slots do not form one chain."""
        digest = EMPTY
        for position in range(end):
            slot = self.slots[blocks[position // BLOCK_TOKENS]][position % BLOCK_TOKENS]
            if slot is None or slot[0] != digest:
                self.num_broken += 1
                return BROKEN
            digest = slot[1]
        return digest

    def write(self, writer: str, blocks: "array[int]", position: int, slot: Slot) -> None:
        block = blocks[position // BLOCK_TOKENS]
        state = self.ledger.state_of(BlockId(block))
        allowed = ("held",) if writer == self.name else ("granted", "quarantined")
        if state not in allowed:
            self.violations.append(f"{writer} wrote into {state} block {block} of {self.name}")
        self.slots[block][position % BLOCK_TOKENS] = slot

    def checksum(self, block: int) -> int:
        content = repr(self.slots[block]).encode()
        return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")

    def copy_in(self, block: int, content: list[Slot | None]) -> None:
        """What a read under a lease brings into a block that its owner granted to itself."""
        state = self.ledger.state_of(BlockId(block))
        if state != "granted":
            self.violations.append(f"a read wrote into {state} block {block} of {self.name}")
        self.slots[block] = list(content)


class SimDevice:
    """Runs batches over arenas with content."""

    numerics_id = "simulated"

    def __init__(self, name: str) -> None:
        self.name = name
        self.arenas: dict[ArenaId, SimArena] = {}

    def run(self, batch: Batch, *, num_slots: int | None = None) -> StepResult:
        """Execute a step; with `num_slots` the process dies after writing that many."""
        drawn: list[Drawn] = []
        for row in batch.rows:
            digests, num_slots = self._compute(row, num_slots)
            if row.sample is not None and len(digests) == len(row.token_ids):
                of_places = digests[-row.num_logits :]

                def draw(
                    place: int, spec: SampleSpec, digests: list[bytes] = of_places
                ) -> tuple[int, Logprobs | None]:
                    return next_token(digests[place], spec), None

                drawn.append(draw_behind(row, row.sample, draw))
        return StepResult(batch.step_id, tuple(drawn), 0.0, 0.0)

    def _compute(self, row: Row, num_slots: int | None) -> tuple[list[bytes], int | None]:
        """Write the slots of a row; the hashes behind its tokens."""
        digests: list[bytes] = []
        arena = self.arenas[row.arena]
        digest = arena.read(row.blocks, row.start)
        for i, token_id in enumerate(row.token_ids):
            if num_slots is not None:
                if num_slots == 0:
                    return digests, 0
                num_slots -= 1
            before, digest = digest, fold(digest, token_id)
            arena.write(self.name, row.blocks, row.start + i, (before, digest))
            digests.append(digest)
        return digests, num_slots
