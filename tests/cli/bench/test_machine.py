"""What is said about the machine, and how its memory is measured."""

from pathlib import Path

import pytest

from llmrt.cli.bench.machine import (
    bandwidth_note,
    busy_note,
    l3_bytes,
    memory_bandwidth,
    this_machine,
)


def write_cache(folder: Path, cpu: int, index: int, level: int, size: str, shared: str) -> None:
    path = folder / f"cpu{cpu}/cache/index{index}"
    path.mkdir(parents=True)
    (path / "level").write_text(f"{level}\n")
    (path / "size").write_text(f"{size}\n")
    (path / "shared_cpu_list").write_text(f"{shared}\n")


def test_last_level_caches_are_summed_once_each(tmp_path: Path) -> None:
    """Two chips of two cores, with 32 MB and 16 MB."""
    for cpu in range(4):
        write_cache(tmp_path, cpu, 0, 1, "32K", f"{cpu}")
        write_cache(tmp_path, cpu, 3, 3, *(("32768K", "0-1") if cpu < 2 else ("16M", "2-3")))
    assert l3_bytes(tmp_path) == 48 << 20


def test_a_machine_that_tells_no_cache_has_none(tmp_path: Path) -> None:
    assert l3_bytes(tmp_path) == 0


def test_this_machine_is_named() -> None:
    conditions = this_machine().conditions()
    assert conditions["cpu"]
    assert conditions["cores"] >= 1
    assert conditions["memory_gib"] >= 1


def test_bandwidth_is_that_of_a_memory() -> None:
    """Between a tenth of one DDR3 channel and what any socket has; more would be a cache's."""
    machine = this_machine()
    assert 1e8 < memory_bandwidth(machine.cores, machine.l3_bytes) < 2e12


@pytest.mark.parametrize(("load", "is_noted"), [(1.0, False), (1.1, True)])
def test_a_busy_machine_is_noted(load: float, is_noted: bool) -> None:
    assert (busy_note(load, 2) is not None) is is_noted


def test_unsteady_memory_is_noted() -> None:
    assert bandwidth_note(8e9, 10e9) is None
    assert "from 10.0 to 7.9 GB/s" in str(bandwidth_note(10e9, 7.9e9))
