"""CUDA IPC between two real processes, over a stand-in for the runtime."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.kvtransfer.cuda_stand_in import StandIn

from llmrt.actor.process import this_process
from llmrt.kvtransfer.cuda_arena import CudaArena, CudaArenaExport
from llmrt.kvtransfer.cuda_ipc import ImportedArenas, import_refusal, in_place_refusal
from llmrt.kvtransfer.cuda_reader import CudaReader
from llmrt.kvtransfer.cuda_runtime import CudaCallFailed
from llmrt.kvtransfer.transport import BlockReader
from llmrt.wire.errors import ConfigError, TransferFailed
from llmrt.wire.ids import BlockId, LeaseId
from llmrt.wire.messages import ProcessName

pytestmark = pytest.mark.integration

NUM_BLOCKS, BLOCK_BYTES, GENERATION = 8, 64, 3
WAIT_S = 20.0
HERE = Path(__file__).parents[2]

# Owns an arena; block i is filled with i + 1 by a kernel that runs when it is told "run".
OWNER = """
import ctypes, sys, threading
from pathlib import Path
import msgspec
from llmrt.actor.process import this_process
from llmrt.kvtransfer.cuda_arena import CudaArena
from llmrt.wire.errors import TransferFailed
from tests.kvtransfer.cuda_stand_in import StandIn

cuda = StandIn(Path(sys.argv[1]), uuid=sys.argv[2])
arena = CudaArena(cuda, 0, num_blocks=8, block_bytes=64, generation=3, process=this_process())
stream = cuda.create_stream()
may_run = threading.Event()

def kernel():
    may_run.wait()
    for block in range(8):
        ctypes.memset(arena.pointer + 64 * block, block + 1, 64)

print(msgspec.msgpack.encode(arena.export_to("reader")).hex(), flush=True)
for line in sys.stdin:
    command = line.strip()
    answer = "ok"
    if command == "launch":
        cuda.launch(kernel, stream)
        arena.mark(stream)
    elif command == "run":
        may_run.set()
    elif command == "peek":
        answer = cuda.read(arena.pointer, 512).hex()
    elif command == "returned":
        arena.returned("reader")
    elif command == "free":
        cuda.free(arena.pointer)
    elif command == "destroy event":
        cuda.destroy_event(arena._event)
    elif command == "close":
        try:
            arena.close()
        except TransferFailed as error:
            answer = error.message
    print(answer, flush=True)
"""


class Owner:
    """A process that owns an arena."""

    def __init__(self, folder: Path, uuid: str = "gpu0") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(folder), uuid],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE,
        )
        raw = bytes.fromhex(self._answer())
        self.export = msgspec.msgpack.decode(raw, type=CudaArenaExport)

    def tell(self, command: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def owner_at(folder: Path, uuid: str = "gpu0") -> Iterator[Owner]:
    owner = Owner(folder, uuid)
    try:
        yield owner
    finally:
        owner.kill()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    with owner_at(tmp_path) as owner:
        yield owner


class Here:
    """This process: its GPU, its arena, and what it maps."""

    def __init__(self, folder: Path, uuid: str = "gpu1") -> None:
        self.cuda = StandIn(folder, uuid=uuid)
        self.arena = make_arena(self.cuda)
        self.imports = ImportedArenas(self.cuda, 0, this_process())

    def reader(self, owner: Owner) -> CudaReader:
        return CudaReader(self.cuda, self.arena, "p@1", owner.export, self.imports)

    def block(self, block: int) -> bytes:
        return self.cuda.read(self.arena.pointer + block * BLOCK_BYTES, BLOCK_BYTES)

    def untouched(self) -> list[int]:
        return [block for block in range(NUM_BLOCKS) if self.block(block) == bytes(BLOCK_BYTES)]


def make_arena(cuda: StandIn, process: ProcessName | None = None) -> CudaArena:
    return CudaArena(
        cuda,
        0,
        num_blocks=NUM_BLOCKS,
        block_bytes=BLOCK_BYTES,
        generation=GENERATION,
        process=process or this_process(),
    )


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


async def read(
    reader: BlockReader,
    source: list[int],
    target: list[int],
    *,
    generation: int = GENERATION,
    timeout_s: float = WAIT_S,
) -> None:
    await reader.read(
        LeaseId(1),
        generation,
        [BlockId(block) for block in source],
        [BlockId(block) for block in target],
        timeout_s=timeout_s,
    )


# -- copies ----------------------------------------------------------------------------------


def test_blocks_are_copied_in_the_order_given(owner: Owner, here: Here) -> None:
    async def main() -> None:
        reader = here.reader(owner)
        owner.tell("launch")
        owner.tell("run")
        await read(reader, [1, 2, 3, 7, 0], [4, 5, 6, 0, 7])
        await reader.close()

    asyncio.run(main())
    assert [here.block(block)[0] for block in range(NUM_BLOCKS)] == [8, 0, 0, 0, 2, 3, 4, 1]
    assert here.untouched() == [1, 2, 3]


def test_a_read_waits_for_the_step_that_writes_the_blocks(owner: Owner, here: Here) -> None:
    async def main() -> None:
        reader = here.reader(owner)
        owner.tell("launch")
        reading = asyncio.create_task(read(reader, [5], [2]))
        done, _ = await asyncio.wait((reading,), timeout=0.1)
        assert not done
        assert here.untouched() == list(range(NUM_BLOCKS))
        owner.tell("run")
        await reading
        await reader.close()

    asyncio.run(main())
    assert here.block(2) == bytes([6]) * BLOCK_BYTES


def test_a_step_of_ours_waits_for_the_peer_by_the_event(owner: Owner, here: Here) -> None:
    """As a step does that reads in place; without the wait it would see what was there before."""
    cuda, seen = here.cuda, []
    imported = here.imports.open("p@1", owner.export)
    waiting, hasty = cuda.create_stream(), cuda.create_stream()
    owner.tell("launch")
    cuda.wait_event(waiting, imported.event)
    for stream in (hasty, waiting):
        cuda.launch(lambda: seen.append(cuda.read(imported.pointer, 1)), stream)
    cuda.synchronize(hasty)
    owner.tell("run")
    cuda.synchronize(waiting)
    assert seen == [b"\x00", b"\x01"]


def test_writes_in_place_are_seen_by_the_owner(owner: Owner, here: Here) -> None:
    imported = here.imports.open("p@1", owner.export)
    assert in_place_refusal(owner.export, "gpu0") is None
    here.cuda.fill(imported.pointer + 2 * BLOCK_BYTES, 9, BLOCK_BYTES)
    expected = bytes(2 * BLOCK_BYTES) + bytes([9]) * BLOCK_BYTES + bytes(5 * BLOCK_BYTES)
    assert bytes.fromhex(owner.tell("peek")) == expected


def test_a_peer_that_hangs_costs_a_timeout_and_nothing_is_written(owner: Owner, here: Here) -> None:
    async def main() -> None:
        reader = here.reader(owner)
        owner.tell("launch")
        with pytest.raises(TransferFailed, match="p@1 has not written the blocks in time"):
            await read(reader, [0], [0], timeout_s=0.05)
        owner.tell("run")
        await reader.close()

    asyncio.run(main())
    assert here.untouched() == list(range(NUM_BLOCKS))


def test_a_cancelled_read_has_stopped_writing_when_it_returns(owner: Owner, here: Here) -> None:
    """It is cancelled twice while a queued copy is held up, and returns behind that copy."""
    may_go = threading.Event()

    def hold_up() -> None:
        may_go.wait(WAIT_S)

    async def main() -> None:
        reader = here.reader(owner)
        here.cuda.launch(hold_up, reader._stream)
        reading = asyncio.create_task(read(reader, [0], [0]))
        for _ in range(2):
            await asyncio.wait((reading,), timeout=0.05)
            reading.cancel()
        done, _ = await asyncio.wait((reading,), timeout=0.05)
        assert not done
        may_go.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        here.cuda.fill(here.arena.pointer, 7, BLOCK_BYTES)
        await reader.close()

    asyncio.run(main())
    assert here.block(0) == bytes([7]) * BLOCK_BYTES


@pytest.mark.parametrize(
    ("source", "target", "generation", "message"),
    [
        ([0], [0], 2, "arena generation 2 is asked for, 3 is mapped"),
        ([NUM_BLOCKS], [0], GENERATION, "a block is not in an arena of 8"),
        ([0], [-1], GENERATION, "a block is not in an arena of 8"),
        ([0, 1], [0], GENERATION, "2 blocks go into 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    owner: Owner, here: Here, source: list[int], target: list[int], generation: int, message: str
) -> None:
    async def main() -> None:
        reader = here.reader(owner)
        with pytest.raises(TransferFailed, match=message):
            await read(reader, source, target, generation=generation)
        await reader.close()
        with pytest.raises(TransferFailed, match="the reader is closed"):
            await read(reader, [0], [0])

    asyncio.run(main())
    assert here.untouched() == list(range(NUM_BLOCKS))


# -- lives -----------------------------------------------------------------------------------


def test_a_dead_owner_is_an_error_of_the_read(owner: Owner, here: Here) -> None:
    async def main() -> None:
        reader = here.reader(owner)
        owner.kill()
        with pytest.raises(TransferFailed, match="the exporter is dead"):
            await read(reader, [0], [0])
        here.imports.drop("p@1")
        assert (len(here.imports), here.cuda.num_mapped) == (0, 1)  # until its last use
        await reader.close()

    asyncio.run(main())
    assert here.cuda.num_mapped == 0


@pytest.mark.parametrize(
    ("command", "message"),
    [("free", "the exporter freed the memory"), ("destroy event", "destroyed the event")],
)
def test_the_stand_in_notices_an_owner_that_lets_go_too_early(
    owner: Owner, here: Here, command: str, message: str
) -> None:
    async def main() -> None:
        reader = here.reader(owner)
        owner.tell(command)
        with pytest.raises(TransferFailed, match=message):
            await read(reader, [0], [0])
        await reader.close()

    asyncio.run(main())


def test_an_owner_frees_nothing_that_a_reader_may_have_mapped(owner: Owner) -> None:
    assert owner.tell("close") == "the arena is not freed: reader may have it mapped"
    assert owner.tell("peek") == bytes(NUM_BLOCKS * BLOCK_BYTES).hex()
    owner.tell("returned")
    assert owner.tell("close") == "ok"


def test_an_arena_is_mapped_once_and_closed_with_its_last_use(owner: Owner, here: Here) -> None:
    first, second = (here.imports.open("p@1", owner.export) for _ in range(2))
    assert first is second
    here.imports.release(first)
    assert (here.cuda.num_calls, here.cuda.num_mapped) == ({"open": 1, "close": 0}, 1)
    here.imports.release(second)
    assert (here.cuda.num_calls, here.cuda.num_mapped) == ({"open": 1, "close": 1}, 0)
    assert len(here.imports) == 0


def test_a_later_life_of_a_peer_does_not_get_the_mapping_of_an_earlier_one(
    tmp_path: Path, here: Here
) -> None:
    with owner_at(tmp_path) as earlier, owner_at(tmp_path) as later:
        old = here.imports.open("p@1", earlier.export)
        here.imports.drop("p@1")
        new = here.imports.open("p@2", later.export)
        assert new.pointer != old.pointer
        here.imports.release(old)
        assert here.cuda.num_mapped == 1
        here.imports.release(new)
    assert here.cuda.num_mapped == 0


def test_a_handle_of_a_dead_owner_does_not_open(owner: Owner, here: Here) -> None:
    owner.kill()
    with pytest.raises(CudaCallFailed, match="cudaErrorInvalidValue"):
        here.reader(owner)
    assert (len(here.imports), here.cuda.num_mapped) == (0, 0)


# -- what is refused at the start ------------------------------------------------------------


def test_a_slice_of_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"slice of a GPU \(MIG\).*use a whole GPU"):
        make_arena(StandIn(tmp_path, is_mig=True))


def test_expandable_segments_are_refused(tmp_path: Path) -> None:
    cuda = StandIn(tmp_path, is_vmm=True)
    with pytest.raises(ConfigError, match=r"cudaErrorInvalidValue.*expandable_segments:True"):
        make_arena(cuda)
    assert not cuda._memories


def test_a_piece_of_an_allocation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a pool in between would give: its handle maps the whole of it, from another place on."""
    cuda = StandIn(tmp_path)
    cuda.set_device(0)
    whole = cuda.malloc(1 << 16)
    monkeypatch.setattr(cuda, "malloc", lambda size_bytes: whole + 512)
    monkeypatch.setattr(cuda, "free", lambda pointer: None)
    with pytest.raises(ConfigError, match="a piece of 65536 bytes"):
        make_arena(cuda)


def test_the_own_arena_is_never_opened(here: Here) -> None:
    export = here.arena.export_to("me")
    refusal = import_refusal(export, this_process())
    assert refusal is not None
    assert f"pid {os.getpid()}" in refusal
    with pytest.raises(TransferFailed, match="use its pointer"):
        here.imports.open("me@1", export)
    with pytest.raises(CudaCallFailed, match="cudaErrorDeviceUninitialized"):
        here.cuda.open_memory(export.memory_handle)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("boot_id", "boot id is .* here and other there: another host"),
        ("pid_namespace", "pid namespace is .* here and other there.*--pid=host"),
    ],
)
def test_another_host_or_pid_namespace_is_refused_with_both_values(
    owner: Owner, here: Here, field: str, message: str
) -> None:
    process = msgspec.structs.replace(owner.export.process, **{field: "other"})
    export = msgspec.structs.replace(owner.export, process=process)
    with pytest.raises(TransferFailed, match=message):
        here.imports.open("p@1", export)
    assert here.cuda.num_calls["open"] == 0


def test_sizes_that_contradict_each_other_are_refused(owner: Owner, here: Here) -> None:
    export = msgspec.structs.replace(owner.export, num_blocks=NUM_BLOCKS + 1)
    with pytest.raises(TransferFailed, match="512 bytes, and 9 blocks of 64"):
        here.imports.open("p@1", export)


def test_blocks_of_another_size_are_refused(owner: Owner, here: Here) -> None:
    export = msgspec.structs.replace(owner.export, num_blocks=16, block_bytes=32)
    with pytest.raises(TransferFailed, match="blocks have 64 bytes here and 32 there"):
        CudaReader(here.cuda, here.arena, "p@1", export, here.imports)


def test_another_gpu_is_not_written_in_place(owner: Owner) -> None:
    assert in_place_refusal(owner.export, "gpu1") == (
        "GPU is gpu1 here and gpu0 there: blocks are copied"
    )


def test_the_stand_in_refuses_threads_that_set_no_device(here: Here) -> None:
    failures = []

    def call() -> None:
        try:
            here.cuda.malloc(1)
        except CudaCallFailed as failure:
            failures.append(failure.message)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert failures == ["cudaMalloc failed: no device was set on this thread"]
