"""What the machine gave while something ran: memory bandwidth, load, memory of a process tree."""

import ctypes
import mmap
import os
import platform
import resource
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_GIB = 1 << 30
_PASSES = 5


class Bandwidth:
    """Reads a buffer of 1 GiB, far larger than any cache, with the threads that engines get."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._sum = library(folder).sum
        self._sum.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._sum.restype = ctypes.c_uint64
        self._buffer = mmap.mmap(-1, _GIB)
        for page in range(0, _GIB, mmap.PAGESIZE):
            self._buffer[page] = 1
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._share = _GIB // threads
        self._starts = [start + i * self._share for i in range(threads)]
        self._pool = ThreadPoolExecutor(threads)

    def probe(self) -> float:
        """GB/s, the median of some passes; takes some 0.3 s."""
        rates = []
        for _ in range(_PASSES):
            started = time.perf_counter()
            list(self._pool.map(lambda start: self._sum(start, self._share // 8), self._starts))
            rates.append(_GIB / (time.perf_counter() - started) / 1e9)
        return statistics.median(rates)


class Load:
    """Processor time that others took since this was made, in cores; call it after `wait`."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._others = _busy_s() - _own_s()

    def others_cores(self) -> float:
        others_s = _busy_s() - _own_s() - self._others
        return max(0.0, others_s / (time.monotonic() - self._started))


def tree_pss_mib(pid: int) -> float:
    """Proportional set size of a process and all below it; what ends meanwhile counts nothing."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    total, left = 0.0, [pid]
    while left:
        current = left.pop()
        left += children.get(current, [])
        total += _pss_mib(current)
    return total


def describe() -> dict[str, object]:
    cpuinfo = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    fields = dict(line.split("\t", 1) for line in cpuinfo if "\t" in line)
    flags = fields.get("flags", "").split()
    return {
        "cpu": fields.get("model name", platform.processor()).strip("\t: "),
        "cores": os.cpu_count(),
        "isa": [flag for flag in flags if flag.startswith(("avx", "amx"))],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE / _GIB, 1),
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
    }


def library(folder: Path) -> ctypes.CDLL:
    """bandwidth.c, compiled into `folder` if it is not there. Raises `CalledProcessError`."""
    source, library = Path(__file__).with_name("bandwidth.c"), folder / "bandwidth.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        folder.mkdir(parents=True, exist_ok=True)
        flags = ("-O3", "-march=native", "-shared", "-fPIC")
        subprocess.run(["cc", *flags, "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


def _busy_s() -> float:
    """Of all processors since boot: everything but idle and waiting for a disk."""
    user, nice, system, _idle, _iowait, *rest = (
        int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _pss_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)
