"""Split GGUF models: any way to name one gives the whole, or an error that says what is wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmrt.models.gguf_parts import open_gguf
from llmrt.models.loading import open_model
from llmrt.wire.errors import ModelError

NAMES = [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.fixture
def folder(gguf_file: Callable[..., Path]) -> Path:
    """A model of 30 tensors in 3 parts."""
    first = gguf_file(max_tensors=10)
    assert sorted(path.name for path in first.parent.iterdir()) == NAMES
    return first.parent


@pytest.mark.parametrize("name", [".", *NAMES])
def test_any_part_and_the_folder_give_the_whole(
    name: str, folder: Path, gguf_file: Callable[..., Path]
) -> None:
    parts, whole = open_model(folder / name), open_model(gguf_file())
    assert parts.spec == whole.spec
    assert parts.weights_hash() == whole.weights_hash()
    assert parts.metadata["general.name"] == "Tiny llama"


@pytest.mark.parametrize("opened", [".", NAMES[0], NAMES[1]])
def test_a_missing_part_is_named(opened: str, folder: Path) -> None:
    (folder / NAMES[2]).unlink()
    with pytest.raises(ModelError, match=NAMES[2]):
        open_gguf(folder / opened)


@pytest.mark.parametrize("opened", [".", *NAMES])
def test_swapped_parts_are_named(opened: str, folder: Path) -> None:
    (folder / NAMES[1]).rename(folder / "x")
    (folder / NAMES[2]).rename(folder / NAMES[1])
    (folder / "x").rename(folder / NAMES[2])
    with pytest.raises(ModelError, match=r"tiny-0000[23]-of-00003.gguf holds part [32] of 3"):
        open_gguf(folder / opened)


@pytest.mark.parametrize(("opened", "named"), [(".", NAMES[1]), (NAMES[0], NAMES[1])])
def test_a_renamed_part_is_named(opened: str, named: str, folder: Path) -> None:
    (folder / NAMES[1]).rename(folder / "other.gguf")
    with pytest.raises(ModelError, match=r"other.gguf is part 2 of 3|lacks tiny-00002-of-00003"):
        open_gguf(folder / opened)


def test_a_renamed_part_says_its_name_when_opened(folder: Path) -> None:
    (folder / NAMES[1]).rename(folder / "other.gguf")
    with pytest.raises(ModelError, match=r"NAME-00002-of-00003.gguf"):
        open_gguf(folder / "other.gguf")


def test_a_part_of_another_model_is_noticed(folder: Path, gguf_file: Callable[..., Path]) -> None:
    other = gguf_file("qwen2", max_tensors=13).with_name(NAMES[2])
    other.replace(folder / NAMES[2])
    with pytest.raises(ModelError, match=r"30 tensors|is in .* and in"):
        open_gguf(folder)


def test_a_folder_with_two_models_asks_for_one(
    folder: Path, gguf_file: Callable[..., Path]
) -> None:
    gguf_file().replace(folder / "whole.gguf")
    with pytest.raises(ModelError, match=r"tiny-00001-of-00003.gguf, whole.gguf.*pass the path"):
        open_gguf(folder)


def test_the_same_part_twice_is_named(folder: Path) -> None:
    (folder / NAMES[1]).write_bytes((folder / NAMES[0]).read_bytes())
    with pytest.raises(ModelError, match=f"{NAMES[1]} holds part 1 of 3"):
        open_gguf(folder)
