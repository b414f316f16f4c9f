from pathlib import Path

from llmrt.kvtransfer.host_memory import available_bytes

GIB = 2**30


def make_host(root: Path, group: str, available_kib: int) -> tuple[Path, Path]:
    proc, groups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (groups / group).mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:  {available_kib} kB\n")
    (proc / "self" / "cgroup").write_text(f"9:cpu:/x\n0::/{group}\n")
    return proc, groups


def set_limit(group: Path, limit: str, used: int, inactive_file: int = 0) -> None:
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\n")


def test_this_host_has_some_but_not_more_than_all() -> None:
    total_kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert 0 < available_bytes() <= total_kib * 1024


def test_without_control_groups_the_host_decides(tmp_path: Path) -> None:
    proc, groups = make_host(tmp_path, "", available_kib=4096)
    assert available_bytes(proc, groups) == 4 * 2**20


def test_the_tightest_control_group_decides(tmp_path: Path) -> None:
    proc, groups = make_host(tmp_path, "a/b", available_kib=64 * 2**20)
    set_limit(groups / "a", str(8 * GIB), used=5 * GIB, inactive_file=GIB)
    set_limit(groups / "a" / "b", "max", used=GIB)
    assert available_bytes(proc, groups) == 4 * GIB
    set_limit(groups / "a" / "b", str(2 * GIB), used=GIB)
    assert available_bytes(proc, groups) == GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    proc, groups = make_host(tmp_path, "a", available_kib=64 * 2**20)
    set_limit(groups / "a", str(GIB), used=2 * GIB)
    assert available_bytes(proc, groups) == 0
