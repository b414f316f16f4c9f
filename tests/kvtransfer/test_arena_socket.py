"""Arenas passed between real processes, which are then killed."""

import asyncio
import contextlib
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path

import pytest
import uvloop

from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.arena_socket import ArenaServer, AttachedPeer, attach_arena
from llmrt.wire.errors import AddressInUse, ConfigError, RegistrationRefused, TransferFailed

pytestmark = pytest.mark.integration

BLOCK_BYTES = 4096
WAIT_S = 20.0

# Attaches to argv[1], writes a byte, then does what stdin says.
PEER = """
import asyncio, os, sys
from pathlib import Path
from llmrt.kvtransfer.arena_socket import attach_arena

async def main():
    lost = asyncio.Event()
    arena, lifeline = await attach_arena(
        Path(sys.argv[1]), b"i am a peer", timeout_s=20, on_lost=lost.set
    )
    arena.buffer[0] = 42
    print("attached", arena.num_blocks, arena.generation, flush=True)
    while command := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if command == "hang up":
            lifeline.close()
        elif command == "shrink":
            try:
                os.ftruncate(arena.fd, 0)
            except OSError as error:
                print(type(error).__name__, flush=True)
        elif command == "wait for owner":
            print("waiting", flush=True)
            await lost.wait()
            print("lost", arena.buffer[1], flush=True)

asyncio.run(main())
"""

# Serves an arena at argv[1] until killed.
OWNER = """
import asyncio, sys
from pathlib import Path
from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.arena_socket import ArenaServer

async def main():
    arena = Arena.create(4, 4096, name="llmrt-owner")
    arena.buffer[1] = 17
    quiet = dict(on_attached=lambda p: None, on_dead=lambda p: None)
    server = ArenaServer(Path(sys.argv[1]), arena, **quiet)
    await server.start()
    print("serving", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Owner:
    """A server in this process, with all that it was told."""

    def __init__(self, path: Path, refuse: str | None = None) -> None:
        self.arena = Arena.create(4, BLOCK_BYTES, generation=3)
        self.events: asyncio.Queue[tuple[str, AttachedPeer]] = asyncio.Queue()
        self.refuse = refuse
        self.server = ArenaServer(
            path,
            self.arena,
            on_attached=self._attached,
            on_dead=lambda peer: self.events.put_nowait(("dead", peer)),
        )

    def _attached(self, peer: AttachedPeer) -> str | None:
        self.events.put_nowait(("attached", peer))
        return self.refuse

    async def next_event(self) -> tuple[str, AttachedPeer]:
        return await asyncio.wait_for(self.events.get(), WAIT_S)

    async def until_hung_up(self, peer: AttachedPeer) -> None:
        async with asyncio.timeout(WAIT_S):
            while peer in self.server._lifelines:  # noqa: ASYNC110 (nobody is told)
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def serving(path: Path, refuse: str | None = None) -> AsyncIterator[Owner]:
    owner = Owner(path, refuse)
    try:
        await owner.server.start()
        yield owner
    finally:
        owner.server.close()
        owner.arena.close()


async def serve_once(path: Path) -> None:
    async with serving(path):
        pass


class Child:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), WAIT_S)).decode().strip()

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n".encode())

    async def kill(self) -> None:
        self.process.kill()
        assert await asyncio.wait_for(self.process.wait(), WAIT_S) == -signal.SIGKILL


@contextlib.asynccontextmanager
async def child(code: str, path: Path) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        str(path),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Child(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder / "kv.sock"


Run = Callable[[Coroutine[object, object, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        yield runner.run


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:llmrt-kv")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# Two processes


def test_a_peer_writes_into_the_owners_memory(path: Path, run: Run) -> None:
    async def main() -> None:
        async with serving(path) as owner, child(PEER, path) as peer:
            assert await peer.line() == "attached 4 3"
            assert owner.arena.buffer[0] == 42
            event, attached = await owner.next_event()
            assert (event, attached.pid, attached.hello) == (
                "attached",
                peer.process.pid,
                b"i am a peer",
            )

    run(main())


def test_a_killed_peer_is_reported_dead_once(path: Path, run: Run) -> None:
    async def main() -> None:
        async with serving(path) as owner:
            async with child(PEER, path) as peer:
                _, attached = await owner.next_event()
                await peer.line()
                await peer.kill()
                assert await owner.next_event() == ("dead", attached)
            assert owner.events.empty()

    run(main())


def test_a_peer_that_hangs_up_may_still_write_until_it_is_dead(path: Path) -> None:
    """Its blocks stay in quarantine, because only its death proves that it stopped."""

    async def main() -> None:
        async with serving(path) as owner, child(PEER, path) as peer:
            _, attached = await owner.next_event()
            await peer.line()
            peer.tell("hang up")
            await owner.until_hung_up(attached)
            peer.tell("shrink")
            assert await peer.line() == "PermissionError"
            assert owner.events.empty()
            await peer.kill()
            assert await owner.next_event() == ("dead", attached)

    asyncio.run(main())


def test_a_peer_cannot_shrink_the_arena(path: Path) -> None:
    async def main() -> None:
        async with serving(path) as owner, child(PEER, path) as peer:
            await peer.line()
            peer.tell("shrink")
            assert await peer.line() == "PermissionError"
            assert owner.arena.buffer[BLOCK_BYTES * 4 - 1] == 0

    asyncio.run(main())


def test_a_killed_owner_is_noticed_and_its_memory_stays_readable(path: Path) -> None:
    async def main() -> None:
        async with child(OWNER, path) as owner:
            assert await owner.line() == "serving"
            async with child(PEER, path) as peer:
                assert (await peer.line()).startswith("attached")
                peer.tell("wait for owner")
                assert await peer.line() == "waiting"
                await owner.kill()
                assert await peer.line() == "lost 17"

    asyncio.run(main())


def test_kill_leaves_a_socket_that_the_successor_replaces(path: Path) -> None:
    async def main() -> None:
        before = set(os.listdir("/dev/shm"))
        async with child(OWNER, path) as owner:
            assert await owner.line() == "serving"
            await owner.kill()
        assert stat.S_ISSOCK(os.stat(path).st_mode)
        assert set(os.listdir("/dev/shm")) == before
        async with serving(path), child(PEER, path) as peer:
            assert (await peer.line()).startswith("attached")
        assert path.name not in os.listdir(path.parent)

    asyncio.run(main())


# In one process


def test_attaching_again_and_again_leaks_nothing(path: Path) -> None:
    async def main() -> None:
        async with serving(path) as owner:
            fds = num_fds()
            for _ in range(10):
                arena, lifeline = await attach_arena(path, b"hello", timeout_s=WAIT_S)
                arena.close()
                lifeline.close()
                event, attached = await owner.next_event()
                assert event == "attached"
                await owner.until_hung_up(attached)
            # The pidfd of each stays: this process lives, and could still have the arena mapped.
            assert num_fds() == fds + 10
        assert num_mappings() == 0

    fds = num_fds()
    asyncio.run(main())
    assert num_fds() == fds


def test_a_refused_peer_learns_why_and_gets_nothing(path: Path) -> None:
    async def main() -> None:
        async with serving(path, refuse="model_hash is 'a' here and 'b' there") as owner:
            fds = num_fds()
            with pytest.raises(RegistrationRefused, match="'a' here and 'b' there"):
                await attach_arena(path, b"hello", timeout_s=WAIT_S)
            assert (await owner.next_event())[0] == "attached"
            assert owner.events.empty()
            assert num_fds() == fds

    asyncio.run(main())


def test_closing_the_owner_is_noticed_by_the_peer(path: Path) -> None:
    async def main() -> None:
        lost = asyncio.Event()
        async with serving(path):
            arena, lifeline = await attach_arena(path, b"hello", timeout_s=WAIT_S, on_lost=lost.set)
        await asyncio.wait_for(lost.wait(), WAIT_S)
        assert not lifeline.is_open
        lifeline.close()
        arena.close()

    asyncio.run(main())


def test_who_says_nothing_is_nobody(path: Path) -> None:
    async def main() -> None:
        async with serving(path) as owner:
            mute = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            mute.connect(str(path))
            mute.close()
            arena, lifeline = await attach_arena(path, b"hello", timeout_s=WAIT_S)
            arena.close()
            lifeline.close()
            assert (await owner.next_event())[1].hello == b"hello"

    asyncio.run(main())


def test_an_absent_owner_is_an_error_at_once(path: Path) -> None:
    with pytest.raises(TransferFailed, match=r"no arena is served at .*No such file"):
        asyncio.run(attach_arena(path, b"hello", timeout_s=WAIT_S))


def test_a_mute_owner_is_given_up_after_the_timeout(path: Path) -> None:
    fds = num_fds()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(TransferFailed, match=r"did not pass its arena within 0\.05 s"):
            asyncio.run(attach_arena(path, b"hello", timeout_s=0.05))
    assert num_fds() == fds


def test_the_socket_is_for_this_user_only(path: Path) -> None:
    async def main() -> None:
        async with serving(path):
            assert mode_of(path) == 0o600

    asyncio.run(main())


def test_a_folder_open_to_others_is_refused(path: Path) -> None:
    path.parent.chmod(0o755)
    with pytest.raises(ConfigError, match=r"mode 755.*chmod 700"):
        asyncio.run(serve_once(path))


def test_a_missing_folder_is_made_private(path: Path) -> None:
    async def main() -> None:
        async with serving(path.parent / "new" / "kv.sock"):
            assert mode_of(path.parent / "new") == 0o700

    asyncio.run(main())


def test_a_path_that_no_socket_can_have_names_the_setting(path: Path) -> None:
    long = path.with_name("x" * 100)
    with pytest.raises(ConfigError, match="at most 107 are possible: choose a shorter runtime_dir"):
        asyncio.run(serve_once(long))
    with pytest.raises(ConfigError, match="shorter runtime_dir"):
        asyncio.run(attach_arena(long, b"hello", timeout_s=WAIT_S))


def test_the_path_of_a_living_owner_is_not_taken(path: Path) -> None:
    async def main() -> None:
        async with serving(path):
            with pytest.raises(AddressInUse, match="another worker serves"):
                await serve_once(path)
            arena, lifeline = await attach_arena(path, b"hello", timeout_s=WAIT_S)
            arena.close()
            lifeline.close()

    asyncio.run(main())


def test_a_file_in_the_way_is_not_removed(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(AddressInUse, match="in the way"):
        asyncio.run(serve_once(path))
    assert path.read_text() == "precious"


def test_closing_does_not_remove_the_successors_socket(path: Path) -> None:
    async def main() -> None:
        first = Owner(path)
        await first.server.start()
        os.unlink(path)
        async with serving(path):
            first.server.close()
            assert stat.S_ISSOCK(os.stat(path).st_mode)
        first.arena.close()

    asyncio.run(main())
