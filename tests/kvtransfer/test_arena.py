import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmrt.kvtransfer.arena import Arena
from llmrt.kvtransfer.host_memory import available_bytes
from llmrt.wire.errors import ConfigError, TransferFailed

BLOCK_BYTES = 4096


def num_mappings(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(f"memfd:{name}")


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_pages(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512 // 4096


def test_two_mappings_are_the_same_memory() -> None:
    arena = Arena.create(4, BLOCK_BYTES, generation=7)
    peer = Arena.attach(os.dup(arena.fd), 4, BLOCK_BYTES, generation=7)
    peer.prefault()
    peer.buffer[3 * BLOCK_BYTES] = 42
    assert arena.buffer[3 * BLOCK_BYTES] == 42
    assert (len(arena.buffer), peer.size_bytes, peer.generation) == (16384, 16384, 7)
    arena.close()
    assert peer.buffer[3 * BLOCK_BYTES] == 42
    peer.close()


def test_all_memory_is_there_at_the_start() -> None:
    arena = Arena.create(100, BLOCK_BYTES)
    assert resident_pages(arena) == 100
    arena.close()


def test_the_size_is_sealed() -> None:
    arena = Arena.create(4, BLOCK_BYTES)
    for size_bytes in (0, 5 * BLOCK_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    arena.close()


def test_closing_leaves_no_mapping_and_no_file() -> None:
    fds = num_fds()
    for _ in range(5):
        arena = Arena.create(4, BLOCK_BYTES, name="llmrt-closing")
        peer = Arena.attach(os.dup(arena.fd), 4, BLOCK_BYTES, generation=0)
        assert num_mappings("llmrt-closing") == 2
        for each in (arena, peer, arena):
            each.close()
    assert num_mappings("llmrt-closing") == 0
    assert num_fds() == fds


def test_an_array_keeps_the_memory_that_it_shows() -> None:
    arena = Arena.create(4, BLOCK_BYTES, name="llmrt-array")
    array = np.frombuffer(arena.buffer, np.uint8)
    arena.close()
    array[5] = 1
    assert num_mappings("llmrt-array") == 1
    del array
    assert num_mappings("llmrt-array") == 0


def test_a_forked_child_does_not_keep_the_mapping() -> None:
    """The death of the process that attached must mean that nobody writes any more."""
    arena = Arena.create(4, BLOCK_BYTES, name="llmrt-fork")
    pid = os.fork()
    if not pid:
        os._exit(num_mappings("llmrt-fork"))
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert num_mappings("llmrt-fork") == 1
    arena.close()


def test_a_memfd_that_can_shrink_is_refused() -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, BLOCK_BYTES)
    with pytest.raises(TransferFailed, match="seals 0x0"):
        Arena.attach(fd, 1, BLOCK_BYTES, generation=0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_memfd_of_another_size_is_refused() -> None:
    arena = Arena.create(4, BLOCK_BYTES)
    for num_blocks in (3, 5):
        with pytest.raises(TransferFailed, match=f"16384 bytes; {num_blocks * 4096} were"):
            Arena.attach(os.dup(arena.fd), num_blocks, BLOCK_BYTES, generation=0)
    arena.close()


def test_what_is_no_memfd_is_refused() -> None:
    fds = num_fds()
    read_end, write_end = os.pipe()
    with pytest.raises(TransferFailed):
        Arena.attach(read_end, 1, BLOCK_BYTES, generation=0)
    os.close(write_end)
    assert num_fds() == fds


def test_more_than_the_memory_is_refused_before_it_is_taken() -> None:
    num_blocks = available_bytes() // BLOCK_BYTES * 2
    with pytest.raises(ConfigError, match=r"are available\. Set kv_tokens lower"):
        Arena.create(num_blocks, BLOCK_BYTES)


def test_an_empty_arena_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        Arena.create(0, BLOCK_BYTES)


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_limits_of_the_process_are_named(limit: str) -> None:
    """In a process of its own, which the limit may ruin."""
    code = f"""
import os, resource
from llmrt.kvtransfer.arena import Arena
from llmrt.wire.errors import ConfigError
resource.setrlimit(resource.{limit}, (256 << 20, -1))
fds = os.listdir("/proc/self/fd")
try:
    Arena.create(300, 1 << 20)
except ConfigError as error:
    print(error)
assert os.listdir("/proc/self/fd") == fds
"""
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert f"({limit} is 256 MiB). Set kv_tokens lower" in output
