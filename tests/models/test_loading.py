"""Opening a path: which model it names, and clear words where it names none."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrt.models.loading import open_model
from llmrt.models.quants import dequantize
from llmrt.models.tensors import WeightFile
from llmrt.wire.errors import ModelError, ModelNotFound

Maker = Callable[..., Path]


def test_both_formats_are_weight_files(hf_folder: Maker, gguf_file: Maker) -> None:
    models: list[WeightFile] = [open_model(hf_folder()), open_model(gguf_file())]
    for model in models:
        assert list(model.tensors)[:2] == ["embed", "layers.0.attn_norm"]
        assert all(tensor.name == name for name, tensor in model.tensors.items())
        model.close()


def test_names_are_made_safe(gguf_file: Maker, hf_folder: Maker) -> None:
    """A GGUF file is known by its own name, not by that of the training run inside it."""
    file = gguf_file()
    assert open_model(file).name == "tiny"
    assert open_model(file.rename(file.with_name("a ü (1).gguf"))).name == "a-1"
    assert open_model(gguf_file().rename(file.with_name("ü.gguf"))).name == "model"
    assert open_model(hf_folder()).name == "tiny-llama"


def test_a_folder_of_the_hugging_face_cache_is_named_by_its_repository(hf_folder: Maker) -> None:
    folder = hf_folder()
    snapshot = folder.parent / "models--org--Some-Model" / "snapshots" / "0123abcd"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    assert open_model(snapshot).name == "Some-Model"


def test_a_symbolic_link_is_followed(gguf_file: Maker, tmp_path: Path) -> None:
    (tmp_path / "blob.gguf").symlink_to(gguf_file())
    assert open_model(tmp_path / "blob.gguf").spec.num_layers == 3


def test_a_gguf_file_is_known_by_its_content(gguf_file: Maker, tmp_path: Path) -> None:
    path = gguf_file().rename(tmp_path / "sha256-0123")
    assert open_model(path).format == "gguf"


def test_metadata_of_a_folder_is_its_config(hf_folder: Maker) -> None:
    assert open_model(hf_folder()).metadata["model_type"] == "llama"


def test_the_hash_is_of_names_shapes_kinds_and_content(gguf_file: Maker) -> None:
    def hash_of(**options: Any) -> str:
        return open_model(gguf_file(**options)).weights_hash()

    norm = {"output_norm.weight": np.full(32, 0.25, np.float32)}
    hashes = {hash_of(), hash_of(kind="F16"), hash_of(kind="Q8_0"), hash_of(extra=norm)}
    assert len(hashes) == 4
    assert hash_of() == hash_of(changes={"general.name": "other"})
    assert all(len(value) == 64 for value in hashes)


def test_the_hash_of_the_real_model_is_stable(smollm2_path: Path) -> None:
    """A changed rule would make every peer refuse every other release."""
    expected = "711af7e62b09af615610a509f5a5835e95ae901be76337a112619b5ebe5c9703"
    assert open_model(smollm2_path).weights_hash() == expected


def test_views_outlive_close(gguf_file: Maker) -> None:
    model = open_model(gguf_file())
    norm = model.tensors["final_norm"]
    before = dequantize(norm).tolist()
    model.close()
    assert not model.tensors
    assert dequantize(norm).tolist() == before


def test_a_path_without_a_file_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no model at .*/org/model: expected a .gguf file"):
        open_model(tmp_path / "org/model")


def test_an_empty_folder_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no .gguf and no .safetensors file is in it"):
        open_model(tmp_path)


def test_a_folder_with_both_formats_asks_for_one(hf_folder: Maker, gguf_file: Maker) -> None:
    folder = hf_folder()
    gguf_file().rename(folder / "model.gguf")
    with pytest.raises(ModelError, match="holds GGUF and safetensors files: pass the path"):
        open_model(folder)
    assert open_model(folder / "model.gguf").format == "gguf"


def test_weights_without_their_config_are_refused(hf_folder: Maker) -> None:
    folder = hf_folder()
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config.json"):
        open_model(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickle_is_refused_with_the_remedy(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"\x80\x04K\x01.")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ModelError, match=r"pickle.*save_pretrained"):
            open_model(path)


def test_a_part_of_a_folder_asks_for_the_folder(hf_folder: Maker) -> None:
    folder = hf_folder()
    for name in ("model.safetensors", "config.json"):
        with pytest.raises(ModelError, match=f"pass its folder, {folder}"):
            open_model(folder / name)


def test_some_other_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"notes.txt is not a model"):
        open_model(tmp_path / "notes.txt")


def test_a_broken_config_is_named(hf_folder: Maker) -> None:
    folder = hf_folder()
    for text in ("{", "[]", "\x00", '{"model_type": 3}'):
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config.json"):
            open_model(folder)


def test_nothing_touches_the_network(
    hf_folder: Maker, gguf_file: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a socket was opened")

    folder, file = hf_folder(), gguf_file()
    monkeypatch.setattr(socket, "socket", refuse)
    open_model(folder)
    open_model(file)
