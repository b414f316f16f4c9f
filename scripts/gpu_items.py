"""What `gpu_check` checks: one function per item, which passes, raises, or is skipped.

C1 to C12 are what CUDA IPC asks of a program. An item returns what it saw; it raises `ItemFailed`
or an error of llmrt if it fails, and `ItemSkipped` where this machine cannot tell.
"""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from llmrt.actor.process import this_process
from llmrt.kvtransfer.cuda_arena import CudaArena, CudaArenaExport
from llmrt.kvtransfer.cuda_ipc import ImportedArenas, import_refusal, in_place_refusal
from llmrt.kvtransfer.cuda_reader import CudaReader
from llmrt.kvtransfer.cuda_runtime import CudaRuntime
from llmrt.wire.errors import LlmrtError, TransferFailed
from llmrt.wire.ids import BlockId, LeaseId

READER = "gpu_check"
READ_TIMEOUT_S = 30.0


class ItemFailed(Exception):
    """What was expected, and what came."""


class ItemSkipped(Exception):
    """Why this machine cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What items run on. `peer_command` starts a process that calls `serve_peer`."""

    runtime: CudaRuntime
    peer_command: list[str]
    num_blocks: int = 256
    block_bytes: int = 1 << 20
    floor_gb_per_s: float = 50.0


@dataclass(frozen=True, slots=True)
class Outcome:
    item: str
    outcome: str  # PASS, FAIL or SKIP
    text: str


def run_items(bench: Bench, items: dict[str, Callable[[Bench], str]]) -> list[Outcome]:
    outcomes = []
    for name, item in items.items():
        try:
            bench.runtime.set_device(0)
            outcome = Outcome(name, "PASS", item(bench))
        except ItemSkipped as skipped:
            outcome = Outcome(name, "SKIP", str(skipped))
        except (ItemFailed, LlmrtError) as failure:
            outcome = Outcome(name, "FAIL", str(failure))
        outcomes.append(outcome)
    return outcomes


def make_arena(bench: Bench) -> CudaArena:
    return CudaArena(
        bench.runtime,
        0,
        num_blocks=bench.num_blocks,
        block_bytes=bench.block_bytes,
        generation=1,
        process=this_process(),
    )


# -- the peer --------------------------------------------------------------------------------


def serve_peer(bench: Bench) -> None:
    """Own an arena, and do what stdin says; the answers go to stdout."""
    arena, runtime = make_arena(bench), bench.runtime
    stream = runtime.create_stream()
    half = arena.size_bytes // 2
    print(msgspec.msgpack.encode(arena.export_to(READER)).hex(), flush=True)
    for line in sys.stdin:
        answer = "ok"
        match line.split():
            case ["first_byte", block]:
                answer = str(runtime.read(arena.pointer + int(block) * arena.block_bytes, 1)[0])
            case ["fill", value]:
                runtime.fill(arena.pointer, int(value), arena.size_bytes)
            case ["queue"]:
                # The second half becomes what the first one is, long after this has returned.
                for _ in range(64):
                    runtime.copy(arena.pointer + half, arena.pointer, half, stream)
                arena.mark(stream)
            case ["halves", value]:
                runtime.fill(arena.pointer, int(value), half)
                runtime.fill(arena.pointer + half, 0, half)
            case ["returned"]:
                arena.returned(READER)
            case ["close"]:
                try:
                    arena.close()
                except TransferFailed as error:
                    answer = error.message
        print(answer, flush=True)


class Peer:
    """A process that runs `serve_peer`; it dies with the `with` block."""

    def __init__(self, bench: Bench) -> None:
        self._process = subprocess.Popen(
            bench.peer_command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.export = self._receive_export()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, command: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _receive_export(self) -> CudaArenaExport:
        line = self._answer()
        try:
            return msgspec.msgpack.decode(bytes.fromhex(line), type=CudaArenaExport)
        except (ValueError, msgspec.MsgspecError):
            self.kill()
            raise ItemFailed(f"the peer exported nothing: {line[:200]!r}") from None

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def imports_of(bench: Bench) -> ImportedArenas:
    return ImportedArenas(bench.runtime, 0, this_process())


def expect(what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise ItemFailed(f"{what} is {actual!r}; {expected!r} is expected")


# -- the items -------------------------------------------------------------------------------


def c1_one_handle_per_allocation(bench: Bench) -> str:
    arena = make_arena(bench)
    expect("base of the allocation", bench.runtime.base_of(arena.pointer)[0], arena.pointer)
    arena.close()
    return f"{arena.size_bytes >> 20} MiB, one handle"


def c2_memory_of_cudamalloc(bench: Bench) -> str:
    make_arena(bench).close()
    return "the arena is memory of which there are handles"


def c3_own_handle_is_not_opened(bench: Bench) -> str:
    arena = make_arena(bench)
    refusal = import_refusal(arena.export_to(READER), this_process())
    arena.returned(READER)
    arena.close()
    if refusal is None:
        raise ItemFailed("the handle of an arena of this process would be opened")
    return refusal


def c4_one_mapping_per_arena(bench: Bench) -> str:
    imports = imports_of(bench)
    with Peer(bench) as peer:
        first, second = (imports.open("peer", peer.export) for _ in range(2))
        again = bench.runtime.open_memory(peer.export.memory_handle)
        expect("pointer of a second open", again, first.pointer)
        bench.runtime.close_memory(again)
        imports.release(first)
        bench.runtime.read(second.pointer, 1)
        imports.release(second)
    return "a second open gave the same pointer; the first close kept it mapped"


def c5_free_after_close(bench: Bench) -> str:
    imports = imports_of(bench)
    with Peer(bench) as peer:
        arena = imports.open("peer", peer.export)
        refusal = peer.ask("close")
        expect("answer to an early free", refusal.startswith("the arena is not freed"), True)
        imports.release(arena)
        peer.ask("returned")
        expect("answer to a free in time", peer.ask("close"), "ok")
    return "nothing was freed before the mapping was closed"


def c6_devices_by_uuid(bench: Bench) -> str:
    uuid = bench.runtime.device_facts(0).uuid
    with Peer(bench) as peer:
        expect("GPU of the peer", peer.export.device_uuid, uuid)
        expect("refusal in place", in_place_refusal(peer.export, uuid), None)
    return uuid


def c7_threads_set_their_device(bench: Bench) -> str:
    arena, failures = make_arena(bench), list[str]()
    stream = bench.runtime.create_stream()

    def mark() -> None:
        try:
            arena.mark(stream)
        except TransferFailed as failure:
            failures.append(failure.message)

    thread = threading.Thread(target=mark)
    thread.start()
    thread.join()
    bench.runtime.synchronize(stream)
    bench.runtime.destroy_stream(stream)
    arena.close()
    expect("failures on a new thread", failures, [])
    return "an event was recorded from a new thread"


def c8_one_pid_namespace(bench: Bench) -> str:
    with Peer(bench) as peer:
        expect("refusal", import_refusal(peer.export, this_process()), None)
    return f"pid namespace {this_process().pid_namespace} on both sides"


def c9_no_mig(bench: Bench) -> str:
    facts = bench.runtime.device_facts(0)
    expect("MIG", facts.is_mig, False)
    return facts.name


def c10_peer_access(bench: Bench) -> str:
    count = bench.runtime.num_devices()
    if count < 2:
        raise ItemSkipped("there is one GPU")
    if not bench.runtime.can_access_peer(0, 1):
        raise ItemFailed("GPU 0 and 1 do not reach each other's memory: copies go over the host")
    return f"{count} GPUs; 0 and 1 reach each other's memory"


def c11_ordered_by_event(bench: Bench) -> str:
    """The peer queues copies that take a while, and we read what the last of them writes."""
    with Peer(bench) as peer:
        peer.ask("halves 77")
        peer.ask("queue")
        last = bench.num_blocks - 1
        expect("byte behind the event", read_blocks(bench, peer, [last])[0], 77)
    return "a read saw what was queued before the event"


def c12_copies_reach_the_floor(bench: Bench) -> str:
    with Peer(bench) as peer:
        peer.ask("fill 5")
        byte, seconds = read_blocks(bench, peer, list(range(bench.num_blocks)))
        expect("byte", byte, 5)
    rate = bench.num_blocks * bench.block_bytes / seconds / 1e9
    if rate < bench.floor_gb_per_s:
        raise ItemFailed(f"{rate:.1f} GB/s, below the floor of {bench.floor_gb_per_s:g}")
    return f"{rate:.1f} GB/s"


def read_blocks(bench: Bench, peer: Peer, blocks: list[int]) -> tuple[int, float]:
    """Read them twice by a reader; the first byte of the last one, and seconds of the second."""
    arena = make_arena(bench)
    ids = [BlockId(block) for block in blocks]

    async def read() -> float:
        reader = CudaReader(bench.runtime, arena, "peer", peer.export, imports_of(bench))
        try:
            for _ in range(2):
                started = time.perf_counter()
                await reader.read(LeaseId(1), 1, ids, ids, timeout_s=READ_TIMEOUT_S)
            return time.perf_counter() - started
        finally:
            await reader.close()

    seconds = asyncio.run(read())
    byte = bench.runtime.read(arena.pointer + blocks[-1] * arena.block_bytes, 1)[0]
    arena.close()
    return byte, seconds


def write_in_place_is_seen(bench: Bench) -> str:
    imports = imports_of(bench)
    with Peer(bench) as peer:
        arena = imports.open("peer", peer.export)
        bench.runtime.fill(arena.pointer + 3 * bench.block_bytes, 42, bench.block_bytes)
        seen = [peer.ask(f"first_byte {block}") for block in (2, 3, 4)]
        imports.release(arena)
    expect("what the peer sees", seen, ["0", "42", "0"])
    return "a write into block 3 of the peer's arena, and no other, is seen by the peer"


def death_of_the_exporter(bench: Bench) -> str:
    """The mapping can be closed, and the GPU used, after its owner was killed."""
    imports = imports_of(bench)
    with Peer(bench) as peer:
        arena = imports.open("peer", peer.export)
        peer.kill()
        imports.drop("peer")
        imports.release(arena)
    make_arena(bench).close()
    return "closed the mapping of a dead peer, and made an arena afterwards"


ITEMS: dict[str, Callable[[Bench], str]] = {
    "C1 one handle per allocation": c1_one_handle_per_allocation,
    "C2 memory of cudaMalloc": c2_memory_of_cudamalloc,
    "C3 own handle is not opened": c3_own_handle_is_not_opened,
    "C4 one mapping per arena": c4_one_mapping_per_arena,
    "C5 free after close": c5_free_after_close,
    "C6 devices by UUID": c6_devices_by_uuid,
    "C7 threads set their device": c7_threads_set_their_device,
    "C8 one pid namespace": c8_one_pid_namespace,
    "C9 no MIG": c9_no_mig,
    "C10 peer access": c10_peer_access,
    "C11 ordered by event": c11_ordered_by_event,
    "C12 copies reach the floor": c12_copies_reach_the_floor,
    "write in place is seen": write_in_place_is_seen,
    "death of the exporter": death_of_the_exporter,
}
