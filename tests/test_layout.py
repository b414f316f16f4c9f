"""The folders at the root, the links to them, and the wheel have the same files."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINKS = ROOT / "src/llmrt"
NOT_SHIPPED = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "*.so", "build", "dist", "tests", "docs", "shared"
)


def folders() -> set[str]:
    return {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}


def test_every_folder_is_linked_and_every_link_leads_to_its_folder() -> None:
    links = {path.name: path.resolve() for path in LINKS.iterdir() if path.is_symlink()}
    assert links == {name: ROOT / name for name in folders()}


def test_every_folder_says_what_it_is_for() -> None:
    for name in folders():
        assert (ROOT / name / "__init__.py").read_text().startswith('"""'), name


def test_the_wheel_has_every_file_of_the_tree(tmp_path: Path) -> None:
    """By way of the source archive, where links are easily lost, without a word."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=NOT_SHIPPED)
    (tree / "README.md").touch()
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(tree)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        f"llmrt/{path.relative_to(tree)}"
        for name in folders()
        for path in (tree / name).rglob("*")
        if path.is_file()
    }
    made = {"llmrt/__init__.py", "llmrt/py.typed", "llmrt/kernels/cpu/libllmrt_cpu.so"}
    assert packed == expected | made
