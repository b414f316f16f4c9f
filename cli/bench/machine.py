"""The machine under test: what it is, and how fast it reads its memory right now."""

import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrt.engine.cpu_cores import num_cores

_CPUINFO, _MEMINFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")
_CPUS = Path("/sys/devices/system/cpu")
# Of the many flags, those that choose a kernel.
_FEATURES = re.compile(r"\b(avx2|avx512f|avx512_vnni|avx_vnni|avx512_bf16|amx_int8|sve|i8mm)\b")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

# Cached lines of a buffer of 4 times the last cache speed a pass up by at most a quarter.
CACHES_PER_BUFFER = 4
MIN_BUFFER_BYTES = 256 << 20
MAX_MEMORY_SHARE = 0.25
NUM_PASSES = 5


@dataclass(frozen=True, slots=True)
class Machine:
    """`cores` is how many threads of a step can run; `l3_bytes` is 0 where it is not known."""

    cpu: str
    cores: int
    features: tuple[str, ...]
    memory_gib: int
    l3_bytes: int

    def conditions(self) -> dict[str, Any]:
        return {
            "cpu": self.cpu,
            "cores": self.cores,
            "features": " ".join(self.features) or "none",
            "memory_gib": self.memory_gib,
        }


def this_machine() -> Machine:
    info = _read(_CPUINFO)
    name = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB", _read(_MEMINFO), re.MULTILINE)
    return Machine(
        cpu=name[1].strip() if name else platform.machine(),
        cores=num_cores(),
        features=tuple(sorted(set(_FEATURES.findall(info)))),
        memory_gib=round(int(memory[1]) / (1 << 20)) if memory else 0,
        l3_bytes=l3_bytes(_CPUS),
    )


def l3_bytes(cpus: Path) -> int:
    """The sum of all last-level caches below a folder laid out as /sys/devices/system/cpu."""
    sizes: dict[str, int] = {}
    for index in cpus.glob("cpu[0-9]*/cache/index*"):
        size = re.fullmatch(r"(\d+)([KMG])", _read(index / "size"))
        if size and _read(index / "level") == "3":
            sizes[_read(index / "shared_cpu_list")] = int(size[1]) * _UNITS[size[2]]
    return sum(sizes.values())


def memory_bandwidth(threads: int, cache_bytes: int) -> float:
    """Bytes per second that `threads` threads read together, the best of some passes.

    Takes about a second, and memory of several times `cache_bytes`.
    """
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    from llmrt.kvtransfer.host_memory import available_bytes

    wanted = max(MIN_BUFFER_BYTES, CACHES_PER_BUFFER * cache_bytes)
    size = min(wanted, int(available_bytes() * MAX_MEMORY_SHARE))
    # Written, or all of it would be the kernel's one page of zeros.
    parts = np.array_split(np.full(size // 4, 1, np.int32), threads)
    with ThreadPoolExecutor(threads) as pool:

        def seconds() -> float:
            started = time.perf_counter()
            # numpy lets go of the interpreter, and a maximum of int32 keeps up with the memory:
            # 39 GB/s per core from the cache of an EPYC; a sum of float64 makes 22.
            list(pool.map(np.max, parts))
            return time.perf_counter() - started

        return sum(part.nbytes for part in parts) / min(seconds() for _ in range(NUM_PASSES))


def busy_note(load_average: float, cores: int) -> str | None:
    """What to say if others used the machine just before."""
    if load_average <= cores / 2:
        return None
    return (
        f"others were busy on this machine: a load average of {load_average:.1f} on {cores} cores "
        "before the first request"
    )


def bandwidth_note(before: float, after: float) -> str | None:
    """What to say if the memory was not the same before and after."""
    slow, fast = sorted((before, after))
    if fast <= 1.25 * slow:
        return None
    return (
        f"memory bandwidth moved from {before / 1e9:.1f} to {after / 1e9:.1f} GB/s: this machine "
        "is not steady"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
