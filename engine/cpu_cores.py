"""How many threads of a step this process can run side by side."""

import os
from pathlib import Path


def num_cores(
    cpus: Path = Path("/sys/devices/system/cpu"),
    control_groups: Path = Path("/sys/fs/cgroup"),
    proc: Path = Path("/proc"),
) -> int:
    """Physical cores that this process may run on, or what its control groups (v2) leave of them.

    Two hardware threads of a core share what a step needs all of: a second one gains nothing.
    """
    cores = {_core(cpus, cpu) for cpu in os.sched_getaffinity(0)}
    limits = [len(cores)]
    group = control_groups / _group_name(proc)
    while group.is_relative_to(control_groups):
        quota_us, _, period_us = _text(group / "cpu.max").partition(" ")
        if quota_us.isdigit() and period_us.isdigit() and int(period_us):
            limits.append(int(quota_us) // int(period_us))
        group = group.parent
    return max(1, min(limits))


def share_of_cores(num_workers: int) -> int:
    """Threads for each of `num_workers` workers on this host."""
    return max(1, num_cores() // num_workers)


def _core(cpus: Path, cpu: int) -> tuple[str, str]:
    """Package and core; a CPU whose topology nobody knows is a core of its own."""
    topology = cpus / f"cpu{cpu}" / "topology"
    core = _text(topology / "core_id")
    return (_text(topology / "physical_package_id"), core or f"cpu{cpu}")


def _group_name(proc: Path) -> str:
    for line in _text(proc / "self" / "cgroup").splitlines():
        if line.startswith("0::/"):
            return line.removeprefix("0::/")
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
