"""Threads by default: cores, not hardware threads, and no more than a quota leaves."""

import os
from pathlib import Path

import pytest

from llmrt.engine.cpu_cores import num_cores, share_of_cores


def make_host(tmp_path: Path, cores: dict[int, tuple[int, int]], **quotas: str) -> tuple[Path, ...]:
    """Folders as in /sys and /proc; `cores` gives package and core of each CPU, `quotas` the
    `cpu.max` of the group `a` and of `b` inside it."""
    cpus, groups, proc = tmp_path / "cpu", tmp_path / "cgroup", tmp_path / "proc"
    for cpu, (package, core) in cores.items():
        topology = cpus / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    for name, folder in (("outer", groups / "a"), ("inner", groups / "a" / "b")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(quotas.get(name, "max 100000") + "\n")
    return cpus, groups, proc


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


TWO_THREADS_EACH = {cpu: (cpu // 4, cpu % 4 // 2) for cpu in range(8)}


@pytest.mark.usefixtures("eight_cpus")
def test_two_hardware_threads_are_one_core_and_packages_count_apart(tmp_path: Path) -> None:
    assert num_cores(*make_host(tmp_path, TWO_THREADS_EACH)) == 4


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({"outer": "300000 100000"}, 3),
        ({"inner": "250000 100000"}, 2),
        ({"inner": "50000 100000"}, 1),
        ({"outer": "200000 100000", "inner": "900000 100000"}, 2),
        ({"inner": "nonsense"}, 4),
    ],
)
def test_a_quota_limits(tmp_path: Path, quotas: dict[str, str], expected: int) -> None:
    assert num_cores(*make_host(tmp_path, TWO_THREADS_EACH, **quotas)) == expected


@pytest.mark.usefixtures("eight_cpus")
def test_cpus_of_unknown_topology_are_cores(tmp_path: Path) -> None:
    assert num_cores(tmp_path / "none", tmp_path / "none", tmp_path / "none") == 8


def test_only_cpus_that_may_be_used_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 6})
    assert num_cores(*make_host(tmp_path, TWO_THREADS_EACH)) == 2


def test_workers_of_a_host_share_its_cores() -> None:
    cores = num_cores()
    assert share_of_cores(1) == cores
    assert share_of_cores(cores) == 1
    assert share_of_cores(cores + 1) == 1
