"""Faults of a KV hand-over, each put into a real one, and whether it was refused.

A fault counts as refused if the machines noticed it, no step read blocks that were not what they
should be, every token that was emitted is the right one, and no block is left behind.
"""

import random
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
from kv_mismatches import CONTRACT, MISMATCHES, other_contract
from kv_pair import NUM_BLOCKS, Frames, Pair, Side, expected_tokens

from llmrt.broker import effects as broker_do
from llmrt.broker.core import BrokerCore
from llmrt.broker.events import ClientMessage, Tick, WorkerMessage
from llmrt.broker.settings import BrokerSettings
from llmrt.engine.batch import ArenaId, Batch
from llmrt.kvtransfer.block_hash import hash_blocks
from llmrt.wire import messages as m
from llmrt.wire.arrays import pack_u32, unpack_u32
from llmrt.wire.envelope import decode_body, decode_header, encode_body, encode_header
from llmrt.wire.ids import ClientId, RequestId
from llmrt.wire.kv import TEXT_FIELDS, KvContract
from llmrt.wire.sampling import SamplingParams
from llmrt.workers import effects as do
from llmrt.workers import events as ev

NUM_TOKENS = 3
BLOCK_BITS = 8 * CONTRACT.block_bytes
GENERATE = m.Generate(prompt_kind="tokens", sampling=SamplingParams())


@dataclass
class Pairs:
    """The workers that the faults are put between: by lease, in place, and with `validate`."""

    leased: Pair
    in_place: Pair
    sealed: Pair
    num_requests: int = 0

    def new_request(self) -> RequestId:
        self.num_requests += 1
        return RequestId(self.num_requests.to_bytes(16, "little"))


@asynccontextmanager
async def started_pairs() -> AsyncIterator[Pairs]:
    pairs = Pairs(
        Pair(transfer="tcp", checksums="full"),
        Pair(transfer="auto", checksums="full"),
        Pair(transfer="auto", checksums="off", validate=True),
    )
    all_of_them = (pairs.leased, pairs.in_place, pairs.sealed)
    for pair in all_of_them:
        await pair.start()
    try:
        yield pairs
    finally:
        for pair in all_of_them:
            await pair.close()


class NotRefused(AssertionError):
    """A fault went through."""


def new_prompt(rng: random.Random) -> "array[int]":
    """Of one to nine blocks, the last full or not: P computes it in up to five chunks."""
    return array("I", (rng.randrange(3, 500) for _ in range(rng.randrange(8, 280))))


async def run(pair: Pair, request_id: RequestId, prompt: "array[int]") -> None:
    """A request to its end. Raises `NotRefused` unless the fault in it was noticed and harmless."""
    before, num_waits = noticed(pair), pair.num_waits
    await pair.generate(request_id, prompt, NUM_TOKENS)
    if noticed(pair) == before and pair.num_waits == num_waits:
        raise NotRefused("nobody noticed")
    check(pair, request_id, prompt)


def noticed(pair: Pair) -> Counter[str]:
    """Everything that the machines have counted; what they have logged of a step or a link."""
    counters = Counter(pair.owner.core.counters) + Counter(pair.prefill.core.counters)
    names = ("kv.seal_broken", "engine.step_failed")
    return counters + Counter({name: pair.logs[name] for name in names})


def check(pair: Pair, request_id: RequestId, prompt: "array[int]") -> None:
    tokens = pair.tokens.pop(request_id)
    if tokens != expected_tokens(prompt, NUM_TOKENS):
        raise NotRefused(f"wrong tokens: {tokens}")
    for side in (pair.owner, pair.prefill):
        counts = side.ledger.counts()
        left = (counts.num_held, counts.num_granted, counts.num_quarantined, counts.num_leases)
        if side.device.num_broken:
            raise NotRefused(f"{side.name.full_name} computed from broken blocks")
        if any(left):
            raise NotRefused(f"{side.name.full_name} has blocks or leases left: {counts}")


# Bytes


async def flip_at_p_before_the_read(pairs: Pairs, rng: random.Random) -> None:
    """P's memory changes behind its checksum, and stays so for the second read.

    What P computes after that is wrong, too, which harms nobody.
    """
    pair, flips = pairs.leased, list[tuple[int, int]]()
    num_before = pair.owner.core.counters.get("checksum_mismatches", 0)

    def flip(read: do.ReadBlocks) -> do.ReadBlocks:
        if not flips:
            flips.append((rng.choice(read.source), rng.randrange(BLOCK_BITS)))
            pair.prefill.flip(*flips[0])
        return read

    pair.on_read = flip
    request_id, prompt = pairs.new_request(), new_prompt(rng)
    await pair.generate(request_id, prompt, NUM_TOKENS)
    pair.prefill.device.num_broken = 0
    pair.prefill.flip(*flips[0])
    if pair.owner.core.counters.get("checksum_mismatches", 0) < num_before + 2:
        raise NotRefused("nobody noticed")
    check(pair, request_id, prompt)


async def flip_in_flight(pairs: Pairs, rng: random.Random) -> None:
    """One bit of what the server sends, the frames around the blocks included."""
    pair = pairs.leased

    def arm(read: do.ReadBlocks) -> do.ReadBlocks:
        pair.line.flip_at = rng.randrange(BLOCK_BITS * len(read.source))
        pair.on_read = lambda read: read
        return read

    pair.on_read = arm
    await run(pair, pairs.new_request(), new_prompt(rng))


async def flip_at_d_behind_the_read(pairs: Pairs, rng: random.Random) -> None:
    pair = pairs.leased

    def flip(read: do.ReadBlocks) -> None:
        pair.owner.flip(rng.choice(read.target), rng.randrange(BLOCK_BITS))
        pair.was_read = lambda read: None

    pair.was_read = flip
    await run(pair, pairs.new_request(), new_prompt(rng))


async def flip_in_place(pairs: Pairs, rng: random.Random) -> None:
    """Somebody else writes into the granted blocks behind P's checksum."""
    pair = pairs.in_place

    def flip(side: Side, hashing: do.HashBlocks) -> None:
        if side is pair.owner:
            pair.owner.flip(rng.choice(hashing.blocks), rng.randrange(BLOCK_BITS))

    pair.on_hash = flip
    await run(pair, pairs.new_request(), new_prompt(rng))


async def flip_in_the_cache(pairs: Pairs, rng: random.Random) -> None:
    """A cached block changes before it is used again, by the owner or through a grant."""
    pair, prompt = pairs.sealed, new_prompt(rng) + array("I", range(3, 36))
    first = pairs.new_request()
    await pair.generate(first, prompt, NUM_TOKENS)
    check(pair, first, prompt)
    cached = pair.owner.ledger.take_prefix(_hashes(prompt))
    pair.owner.flip(rng.choice(cached), rng.randrange(BLOCK_BITS))
    pair.owner.ledger.release(cached)
    await run(pair, pairs.new_request(), prompt)


def _hashes(prompt: "array[int]") -> list[bytes]:
    return hash_blocks(prompt[:-1])


# Names of another life


GENERATION_OF: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "chunk": (m.CHUNK, m.Chunk),
    "confirm": (m.LEASE_CONFIRM, m.LeaseRef),
    "offer": (m.OFFER, m.Offer),
}


async def stale_generation(pairs: Pairs, rng: random.Random) -> None:
    other = rng.choice((0, 1, 2, 4, 2**32, 2**63))
    kind = rng.choice((*GENERATION_OF, "read"))
    pair = pairs.in_place if kind == "offer" else pairs.leased
    if kind == "read":
        pair.on_read = lambda read: _replaced(read, generation=other)
    else:
        name, body = GENERATION_OF[kind]
        pair.tap = changes(name, lambda frames: replaced(frames, body, arena_generation=other))
    await run(pair, pairs.new_request(), new_prompt(rng))


async def foreign_arena(pairs: Pairs, rng: random.Random) -> None:
    kind = rng.choice(("lease", "token", "row", "local row", "writer"))
    pair = pairs.leased if kind in ("lease", "token") else pairs.in_place
    if kind == "lease":
        pair.on_read = lambda read: _replaced(read, lease_id=read.lease_id + rng.randrange(1, 99))
    elif kind == "token":
        await pair.hang_up()
        address, token = pair.address, rng.randbytes(16).hex()
        pair.address = f"{address.rpartition('/')[0]}/{token}"
    elif kind == "row":
        other = ArenaId(f"decode-{rng.randrange(1, 9)}@7")
        pair.on_step = at_p(pair, lambda batch: with_row(batch, arena=other))
    elif kind == "local row":
        pair.on_step = at_p(pair, lambda batch: with_row(batch, arena=ArenaId("decode-0@6")))
    else:
        pair.tap = lambda side, name, frames: _as_stranger(pair, side, name, frames)
    await run(pair, pairs.new_request(), new_prompt(rng))
    if kind == "token":
        await pair.hang_up()
        pair.address = address


def _as_stranger(pair: Pair, side: Side, name: str, frames: Frames) -> list[Frames]:
    """The commit comes from another life of P first, before P has computed anything."""
    if name == m.OFFER:
        offer = decode_body(frames[1], m.Offer)
        commit = m.Commit(
            grant_id=offer.grant_id, token_id=9, num_cached=0, queue_ms=0.0, prefill_ms=0.0
        )
        stranger = pair.prefill.name._replace(epoch=6)
        header = decode_header(encode_header(m.COMMIT))
        pair.deliver(side, ev.FromPeer(stranger, header, (encode_body(commit),)))
    return [frames]


# Hand-overs that are not whole


async def partial_commit(pairs: Pairs, rng: random.Random) -> None:
    kind = rng.choice(
        ("lost", "short", "cut off", "commit first", "no checksums", "broken line", "in place")
    )
    pair = pairs.in_place if kind == "in place" else pairs.leased
    if kind == "lost":
        pair.tap = changes(m.CHUNK, lambda frames: [], once=True)
    elif kind == "short":
        pair.tap = changes(m.CHUNK, _without_last_block)
    elif kind == "cut off":
        pair.tap = changes(m.CHUNK, lambda frames: [[*frames[:2], frames[2][:-4], frames[3]]])
    elif kind == "commit first":
        pair.tap = _chunks_behind_commit()
    elif kind == "no checksums":
        pair.tap = changes(m.CHUNK, lambda frames: [frames[:3]])
    elif kind == "broken line":
        pair.on_read = lambda read: _with_cut(pair, read, rng)
    else:
        pair.tap = changes(m.COMMIT, lambda frames: [[*frames[:2], frames[2][:-8]]])
    await run(pair, pairs.new_request(), new_prompt(rng))


def _with_cut(pair: Pair, read: do.ReadBlocks, rng: random.Random) -> do.ReadBlocks:
    pair.line.cut_at = rng.randrange(CONTRACT.block_bytes * len(read.source))
    pair.on_read = lambda read: read
    return read


def _without_last_block(frames: Frames) -> list[Frames]:
    """Consistent in itself, so that only the count of blocks tells."""
    return [[*frames[:2], frames[2][:-4], frames[3][:-8]]]


def _chunks_behind_commit() -> Callable[[Side, str, Frames], list[Frames]]:
    """The commit passes all chunks, of which the first are lost."""
    held: list[Frames] = []
    is_over = False

    def tap(side: Side, name: str, frames: Frames) -> list[Frames]:
        nonlocal is_over
        if name == m.CHUNK and not is_over:
            held.append(frames)
            return []
        if name == m.COMMIT and not is_over:
            is_over = True
            return [frames, held[-1]] if len(held) > 1 else [frames]
        return [frames]

    return tap


async def out_of_range(pairs: Pairs, rng: random.Random) -> None:
    kind = rng.choice(("chunk", "read", "offer", "row", "row of another", "start"))
    pair = pairs.leased if kind in ("chunk", "read") else pairs.in_place
    bad = rng.choice((NUM_BLOCKS, NUM_BLOCKS + 1, 2**16, 2**31, 2**32 - 1))
    if kind == "chunk":
        pair.tap = changes(m.CHUNK, lambda frames: [_with_block(frames, 2, bad, rng)])
    elif kind == "read":
        pair.on_read = lambda read: _replaced(read, source=_one_changed(read.source, bad, rng))
    elif kind == "offer":
        pair.tap = changes(m.OFFER, lambda frames: [_with_block(frames, 3, bad, rng)])
    elif kind == "row":
        pair.on_step = at_p(pair, lambda batch: with_changed_block(batch, bad, rng))
    elif kind == "row of another":
        pair.on_step = at_p(
            pair, lambda batch: with_changed_block(batch, rng.randrange(NUM_BLOCKS), rng)
        )
    else:
        pair.on_step = at_p(pair, _written_before_its_grant)
    await run(pair, pairs.new_request(), new_prompt(rng))


def _with_block(frames: Frames, idx: int, block: int, rng: random.Random) -> Frames:
    raw = pack_u32(_one_changed(unpack_u32(frames[idx]), block, rng))
    return [*frames[:idx], raw, *frames[idx + 1 :]]


def _one_changed(blocks: "array[int]", block: int, rng: random.Random) -> "array[int]":
    changed = blocks[:]
    changed[rng.randrange(len(blocks))] = block
    return changed


def with_changed_block(batch: Batch, block: int, rng: random.Random) -> Batch:
    blocks = batch.rows[0].blocks
    changed = blocks
    while changed == blocks:
        changed, block = _one_changed(blocks, block, rng), (block + 1) % NUM_BLOCKS
    return with_row(batch, blocks=changed)


def _written_before_its_grant(batch: Batch) -> Batch:
    """A table that is one block too short, as if the sequence began later."""
    return with_row(batch, blocks=batch.rows[0].blocks[1:])


# Contracts


async def contract(pairs: Pairs, rng: random.Random) -> None:
    """Told to the broker, to a decode worker, or to a prefill worker that gets an offer."""
    name, value = MISMATCHES[rng.randrange(len(MISMATCHES))]
    theirs = other_contract(name, value)
    if rng.randrange(2):
        _at_the_broker(theirs, name, pairs.new_request())
    else:
        await _at_the_peers(theirs, pairs.new_request(), new_prompt(rng))


def _at_the_broker(theirs: KvContract, name: str, request_id: RequestId) -> None:
    broker = BrokerCore(BrokerSettings(), 1)
    broker.handle(Tick(), 1.0)
    sent: list[tuple[bytes, str, Frames]] = []
    for role, served in (("decode", CONTRACT), ("prefill", theirs)):
        card = m.Register(
            worker_id=role,
            epoch=1,
            role=role,
            model="bytes",
            contract=served,
            max_context=1024,
            num_blocks=NUM_BLOCKS,
            max_running=8,
            link="ipc://link",
            broker_epoch_seen=0,
            process=m.ProcessName(boot_id="b", pid_namespace="n", pid=len(role), start_ticks=1),
        )
        frames = [encode_header(m.REGISTER), encode_body(card)]
        event = WorkerMessage(role.encode(), decode_header(frames[0]), frames)
        for effect in broker.handle(event, 1.0):
            if isinstance(effect, broker_do.SendWorker):
                kind = decode_header(effect.frames[0]).kind
                sent.append((effect.routing_id, kind, effect.frames))
    refused = [frames for to, kind, frames in sent if to == b"prefill" and kind == m.REFUSED]
    if name in TEXT_FIELDS and not refused:
        raise NotRefused(f"the broker took a worker of another {name}")
    if refused and name not in decode_body(refused[0][1], m.Failure).message:
        raise NotRefused(f"the refusal does not name {name}")
    generate = [encode_header(m.GENERATE, request_id), encode_body(GENERATE), pack_u32([5])]
    client_message = ClientMessage(ClientId(b"c" * 16), decode_header(generate[0]), generate)
    (dispatch,) = (
        effect.frames
        for effect in broker.handle(client_message, 1.0)
        if isinstance(effect, broker_do.SendWorker)
    )
    if decode_body(dispatch[1], m.Route).prefill_worker is not None:
        raise NotRefused(f"the broker pairs workers of different {name}")


async def _at_the_peers(theirs: KvContract, request_id: RequestId, prompt: "array[int]") -> None:
    """Each hears that the other has another contract; D is told to use P all the same."""
    pair = Pair(transfer="tcp", checksums="full")
    pair.tap = changes(m.PEER_HELLO, lambda frames: replaced(frames, m.PeerHello, contract=theirs))
    await pair.start()
    try:
        await pair.generate(request_id, prompt, NUM_TOKENS)
        if pair.logs["peer.refused"] != 2 or pair.prefill.scheduler.num_steps:
            raise NotRefused("P prefilled for a worker of another contract")
        check(pair, request_id, prompt)
    finally:
        await pair.close()


# Changing what passes


def changes(
    kind: str, change: Callable[[Frames], list[Frames]], *, once: bool = False
) -> Callable[[Side, str, Frames], list[Frames]]:
    """A tap that changes the messages of a kind, all or the first."""
    is_over = False

    def tap(side: Side, name: str, frames: Frames) -> list[Frames]:
        nonlocal is_over
        if name != kind or is_over:
            return [frames]
        is_over = once
        return change(frames)

    return tap


def replaced(frames: Frames, body: type[msgspec.Struct], **changed: object) -> list[Frames]:
    other = msgspec.structs.replace(decode_body(frames[1], body), **changed)
    return [[frames[0], encode_body(other), *frames[2:]]]


def at_p(pair: Pair, change: Callable[[Batch], Batch]) -> Callable[[Side, Batch], Batch]:
    """The first step of P is another one."""

    def on_step(side: Side, batch: Batch) -> Batch:
        if side is not pair.prefill:
            return batch
        pair.on_step = lambda side, batch: batch
        return change(batch)

    return on_step


def with_row(batch: Batch, **changed: object) -> Batch:
    first = msgspec.structs.replace(batch.rows[0], **changed)
    return msgspec.structs.replace(batch, rows=(first, *batch.rows[1:]))


def _replaced(read: do.ReadBlocks, **changed: object) -> do.ReadBlocks:
    facts = {name: getattr(read, name) for name in read.__slots__}
    return do.ReadBlocks(**facts | changed)


KINDS: dict[str, Callable[[Pairs, random.Random], Awaitable[None]]] = {
    "flip at P before the read": flip_at_p_before_the_read,
    "flip in flight": flip_in_flight,
    "flip at D behind the read": flip_at_d_behind_the_read,
    "flip in place": flip_in_place,
    "flip in the cache": flip_in_the_cache,
    "stale generation": stale_generation,
    "foreign arena": foreign_arena,
    "partial commit": partial_commit,
    "out of range": out_of_range,
    "contract": contract,
}


async def inject(count: int, seed: int) -> dict[str, tuple[int, list[str]]]:
    """`count` faults, all kinds in turn: how many of each, and why any was not refused."""
    results: dict[str, tuple[int, list[str]]] = {}
    names = list(KINDS)
    async with started_pairs() as pairs:
        for number in range(count):
            name = names[number % len(names)]
            num_injected, failures = results.get(name, (0, []))
            try:
                await KINDS[name](pairs, random.Random(f"{seed}/{number}"))
            except NotRefused as error:
                failures.append(f"fault {number}: {error}")
            results[name] = (num_injected + 1, failures)
    return results
