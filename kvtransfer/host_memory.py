"""How much memory this process may still take, before the kernel kills for it."""

from pathlib import Path


def available_bytes(
    proc: Path = Path("/proc"), control_groups: Path = Path("/sys/fs/cgroup")
) -> int:
    """The least of what the host has available and what each control group (v2) leaves."""
    limits = [_number(proc / "meminfo", "MemAvailable:") * 1024]
    group = control_groups / _group_name(proc)
    while group.is_relative_to(control_groups):
        limit, used = _text(group / "memory.max"), _text(group / "memory.current")
        if limit.isdigit() and used.isdigit():
            # Inactive file pages count as used, and are the first that the kernel drops.
            limits.append(int(limit) - int(used) + _number(group / "memory.stat", "inactive_file"))
        group = group.parent
    return max(0, min(limits))


def _group_name(proc: Path) -> str:
    for line in _text(proc / "self" / "cgroup").splitlines():
        if line.startswith("0::/"):
            return line.removeprefix("0::/")
    return ""


def _number(path: Path, name: str) -> int:
    """The number behind `name` in a file of lines, 0 if there is none."""
    for line in _text(path).splitlines():
        words = line.split()
        if words[0] == name:
            return int(words[1])
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
