"""On which NUMA nodes an arena and the threads of this process are."""

import os
from collections import Counter
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def numa_note(arena_fd: int, *, nodes: Path = _NODES, process: Path = Path("/proc/self")) -> str:
    """One line for people. May read for 0.1 s per GB of arena."""
    cpus_of = _cpus_of_nodes(nodes)
    if len(cpus_of) < 2:
        return "one node"
    cpus = os.sched_getaffinity(0)
    threads_on = sorted(node for node, of_node in cpus_of.items() if cpus & of_node)
    pages = _pages_of(process, os.fstat(arena_fd).st_ino)
    if not pages:
        return f"unknown: the kernel does not tell; threads may run on {_named(threads_on)}"
    arena_on = sorted(pages)
    where = f"arena on {_named(arena_on)}, threads on {_named(threads_on)}"
    if arena_on == threads_on and len(arena_on) == 1:
        return where
    return f"NOT on one node: {where}"


def parse_cpu_list(text: str) -> set[int]:
    """`0-3,8` is {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _cpus_of_nodes(nodes: Path) -> dict[int, set[int]]:
    found = {}
    for folder in nodes.glob("node[0-9]*"):
        try:
            cpus = parse_cpu_list((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cpus:  # memory without CPUs is no node to run on
            found[int(folder.name.removeprefix("node"))] = cpus
    return found


def _pages_of(process: Path, inode: int) -> Counter[int]:
    """Pages by node of the mapping of a file, as far as they are entered here."""
    pages: Counter[int] = Counter()
    try:
        starts = {
            line.split("-", 1)[0].lstrip("0")
            for line in (process / "maps").read_text().splitlines()
            if line.split()[4] == str(inode)
        }
        lines = (process / "numa_maps").read_text().splitlines()
    except (OSError, IndexError):
        return pages
    for line in lines:
        words = line.split()
        if words[0].lstrip("0") in starts:
            for word in words[1:]:
                node, _, count = word.partition("=")
                if node[:1] == "N" and node[1:].isdecimal() and count.isdecimal():
                    pages[int(node[1:])] += int(count)
    return pages


def _named(nodes: list[int]) -> str:
    return f"node{'s' * (len(nodes) != 1)} {', '.join(map(str, nodes))}"
