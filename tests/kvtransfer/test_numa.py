"""What is said of NUMA nodes, from files as the kernel writes them."""

import os
from pathlib import Path

import pytest

from llmrt.kvtransfer.numa import numa_note, parse_cpu_list


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("", set())]
)
def test_cpu_lists(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


def machine(folder: Path, cpus_of: dict[int, str], pages: str) -> tuple[Path, Path, int]:
    """Nodes, a process, and a file that it maps with those pages."""
    nodes, process = folder / "node", folder / "self"
    for node, cpus in cpus_of.items():
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}/cpulist").write_text(f"{cpus}\n")
    process.mkdir()
    arena = folder / "arena"
    arena.touch()
    fd = os.open(arena, os.O_RDONLY)
    inode = arena.stat().st_ino
    (process / "maps").write_text(f"7f0000000000-7f0000100000 rw-s 00000000 00:01 {inode} /memfd\n")
    (process / "numa_maps").write_text(
        "556cd970d000 default file=/bin/x mapped=2 N7=2\n"
        f"7f0000000000 default file=/memfd {pages}\n"
    )
    return nodes, process, fd


OURS = ",".join(map(str, sorted(os.sched_getaffinity(0))))


@pytest.mark.parametrize(
    ("cpus_of", "pages", "note"),
    [
        ({0: OURS}, "N0=5", "one node"),
        ({0: OURS, 1: ""}, "N1=5", "one node"),
        ({0: OURS, 1: "9000-9001"}, "dirty=5 N0=5", "arena on node 0, threads on node 0"),
        (
            {0: OURS, 1: "9000-9001"},
            "N1=5",
            "NOT on one node: arena on node 1, threads on node 0",
        ),
        (
            {0: OURS, 1: "9000-9001"},
            "N0=2 N1=5 kernelpagesize_kB=4",
            "NOT on one node: arena on nodes 0, 1, threads on node 0",
        ),
        (
            {0: OURS, 1: "9000"},
            "mapped=5",
            "unknown: the kernel does not tell; threads may run on node 0",
        ),
    ],
)
def test_the_note(tmp_path: Path, cpus_of: dict[int, str], pages: str, note: str) -> None:
    nodes, process, fd = machine(tmp_path, cpus_of, pages)
    try:
        assert numa_note(fd, nodes=nodes, process=process) == note
    finally:
        os.close(fd)
