"""Files of packed weights: made once, mapped afterwards, and never believed when they are wrong."""

import fcntl
import hashlib
import os
import re
import resource
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from llmrt.kernels.cpu.library import Format
from llmrt.models.loading import OpenedModel, open_model
from llmrt.models.packed_file import REVISION, load_packed
from llmrt.models.packing import PackedWeights, PackRequest, format_of, pack_weights

Maker = Callable[..., Path]
PAGE_BYTES = 4096


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "llmrt" / "packed"


class Counted(OpenedModel):
    """Counts how often all of the model is read for its hash."""

    num_hashed = 0

    def weights_hash(self) -> str:
        self.num_hashed += 1
        return super().weights_hash()


def opened(path: Path) -> Counted:
    model = open_model(path)
    return Counted(**{name: getattr(model, name) for name in OpenedModel.__slots__})


def requests_for(model: OpenedModel, format: Format | None = None) -> list[PackRequest]:
    return [
        PackRequest(name, (name,), format or format_of(tensor.kind))
        for name, tensor in model.tensors.items()
        if len(tensor.shape) == 2
    ]


class Load:
    """One start of a worker: what it got, whether it packed, how often it read the model."""

    def __init__(
        self, path: Path, *, format: Format | None = None, settled_after_s: float = -1.0
    ) -> None:
        self.model = opened(path)
        calls: list[int] = []
        self.packed: PackedWeights = load_packed(
            self.model,
            requests_for(self.model, format),
            lambda done, total: calls.append(done),
            settled_after_s=settled_after_s,
        )
        self.has_packed = bool(calls)

    @property
    def file(self) -> Path:
        assert self.packed.path is not None
        return self.packed.path


def assert_right(load: Load, format: Format | None = None) -> None:
    expected = pack_weights(load.model.tensors, requests_for(load.model, format))
    assert load.packed.tensors.keys() == expected.tensors.keys()
    for name, weight in expected.tensors.items():
        assert np.array_equal(load.packed.tensors[name].data, weight.data)
    for name, vector in expected.vectors.items():
        assert np.array_equal(load.packed.vectors[name], vector)
    assert load.packed.weights_hash == open_model(load.model.path).weights_hash()


def packed_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.llmrt-*"))


@pytest.fixture
def path(gguf_file: Maker) -> Path:
    return gguf_file(kind="Q8_0")


def test_the_second_start_maps_the_file_of_the_first(path: Path) -> None:
    """And does not read the model, not even for its hash."""
    first = Load(path)
    inode = first.file.stat().st_ino
    second = Load(path)
    assert (first.has_packed, first.model.num_hashed) == (True, 1)
    assert (second.has_packed, second.model.num_hashed) == (False, 0)
    assert second.file.stat().st_ino == inode
    assert_right(first)
    assert_right(second)
    assert first.packed.notes == second.packed.notes == ()
    mapped = Path("/proc/self/maps").read_text()
    assert f" {inode} " in mapped


def test_a_file_is_named_by_model_and_hash_and_aligned_to_pages(path: Path) -> None:
    load = Load(path)
    start = f"tiny.gguf.llmrt-{load.packed.weights_hash[:16]}-"
    assert load.file.parent == path.parent
    assert load.file.name.startswith(start)
    assert load.file.name.endswith(f"-p{REVISION}")
    first = next(iter(load.packed.tensors.values()))
    assert first.data.ctypes.data % PAGE_BYTES == 0
    assert all(weight.data.ctypes.data % 64 == 0 for weight in load.packed.tensors.values())


def test_nobody_can_write_to_packed_weights(path: Path) -> None:
    weight = next(iter(Load(path).packed.tensors.values()))
    with pytest.raises(ValueError, match="read-only"):
        weight.data[0] = 1


def test_a_folder_holds_its_file_and_still_opens(hf_folder: Maker) -> None:
    folder = hf_folder("qwen2")
    first, second = Load(folder), Load(folder)
    assert first.file.parent == folder
    assert first.file.name.startswith("weights.llmrt-")
    assert not second.has_packed
    assert_right(second)


def test_a_model_that_changed_just_now_is_hashed_again(path: Path) -> None:
    """It may change again within the resolution of its times; it is not packed again."""
    Load(path, settled_after_s=60)
    second = Load(path, settled_after_s=60)
    assert (second.has_packed, second.model.num_hashed) == (False, 1)
    third = Load(path)
    fourth = Load(path)
    assert (third.model.num_hashed, fourth.model.num_hashed) == (1, 0)


def change(path: Path) -> None:
    """Other weights in place: same size, inode and modification time."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        last = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_changed_model_is_packed_again(path: Path) -> None:
    """Nothing but its change time gives it away. The old file goes, but not under its users."""
    first = Load(path)
    before = [weight.data.copy() for weight in first.packed.tensors.values()]
    change(path)
    second = Load(path)
    assert second.has_packed
    assert second.packed.weights_hash != first.packed.weights_hash
    assert_right(second)
    assert packed_files(path.parent) == [second.file.name]
    for weight, data in zip(first.packed.tensors.values(), before, strict=True):
        assert np.array_equal(weight.data, data)


def test_a_changed_part_is_noticed(gguf_file: Maker) -> None:
    path = gguf_file(kind="Q8_0", max_tensors=12)
    Load(path)
    assert not Load(path).has_packed
    change(sorted(path.parent.glob("*.gguf"))[-1])
    second = Load(path)
    assert second.has_packed
    assert_right(second)


def test_a_copied_model_is_hashed_once(path: Path, tmp_path: Path) -> None:
    """Its packed file came along: only the header learns of the new inodes."""
    first = Load(path)
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in (path, first.file):
        shutil.copy(file, folder)
    second, third = Load(folder / path.name), Load(folder / path.name)
    assert (second.has_packed, second.model.num_hashed) == (False, 1)
    assert (third.has_packed, third.model.num_hashed) == (False, 0)
    assert_right(third)


def test_formats_have_files_of_their_own(path: Path) -> None:
    integers, floats = Load(path), Load(path, format=Format.BF16)
    assert floats.has_packed
    assert packed_files(path.parent) == sorted([integers.file.name, floats.file.name])
    assert not Load(path).has_packed
    assert_right(floats, Format.BF16)


@pytest.mark.parametrize("grown_bytes", [-(1 << 30), -PAGE_BYTES, -1, 1])
def test_a_file_of_another_size_is_packed_again(path: Path, grown_bytes: int) -> None:
    file = Load(path).file
    os.truncate(file, max(0, file.stat().st_size + grown_bytes))
    second = Load(path)
    assert second.has_packed
    assert_right(second)
    assert "damaged" in second.packed.notes[0]
    assert not Load(path).packed.notes


def test_a_file_that_others_may_write_is_packed_again(path: Path) -> None:
    Load(path).file.chmod(0o666)
    second = Load(path)
    assert second.has_packed
    assert "writable by other users" in second.packed.notes[0]
    assert not second.file.stat().st_mode & 0o002
    assert not Load(path).has_packed


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_packed_again(path: Path) -> None:
    os.chown(Load(path).file, 65534, -1)
    second = Load(path)
    assert second.has_packed
    assert second.file.stat().st_uid == 0


def signed(text: bytes) -> bytes:
    """A header page with the right checksum."""
    return text + hashlib.sha256(text).hexdigest()[:16].encode() + b"\n"


def header_of(file: Path) -> bytes:
    """The text of a header, without its checksum."""
    return file.read_bytes()[:PAGE_BYTES].partition(b"\n")[0][:-16]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"",
        lambda text: b"\n",
        lambda text: b"\xff" * PAGE_BYTES,
        lambda text: text + b"0" * 16 + b"\n",
        lambda text: signed(b"[" * 4000),
        lambda text: signed(b"{}"),
        lambda text: signed(text.replace(b'"revision":2', b'"revision":0')),
        lambda text: signed(text.replace(b'"revision":2', b'"revision":true')),
        lambda text: signed(text.replace(b'"revision":2', b'"more":1,"revision":2')),
        lambda text: signed(text.replace(b'"size_bytes":', b'"size_bytes":1')),
        lambda text: signed(text.replace(b'"plan":"', b'"plan":"0')),
        lambda text: signed(text.replace(b'"origin":"', b'"origin":{"":"')),
        lambda text: signed(text.replace(b'"weights_hash":"', b'"weights_hash":"\xff')),
        lambda text: signed(text.replace(b'"content":"', b'"content":"0')),
    ],
)
def test_a_hostile_header_is_refused(path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = Load(path).file
    page = damage(header_of(file)).ljust(PAGE_BYTES, b"\0")
    with file.open("r+b") as raw:
        raw.write(page)
    second = Load(path)
    assert second.has_packed
    assert "damaged" in second.packed.notes[0]
    assert_right(second)


@pytest.mark.parametrize("place", [PAGE_BYTES, 0.5, -1], ids=["first", "middle", "last"])
def test_weights_that_are_damaged_are_packed_again_and_replaced(path: Path, place: float) -> None:
    """One bit in one byte: header and size are right."""
    first = Load(path)
    size_bytes = first.file.stat().st_size
    flip(first.file, int(size_bytes * place) if 0 < place < 1 else int(place) % size_bytes)
    with capture_logs() as logs:
        second = Load(path)
    assert [(entry["event"], entry["log_level"], entry["path"]) for entry in logs] == [
        ("packed_weights.damaged", "warning", str(first.file))
    ]
    assert second.has_packed
    assert "do not have their checksum" in second.packed.notes[0]
    assert second.file == first.file
    assert_right(second)
    third = Load(path)
    assert (third.has_packed, third.packed.notes) == (False, ())


def test_a_damaged_file_that_was_first_is_replaced(path: Path) -> None:
    """It came by while this worker packed, so that only giving the name finds it."""
    file = Load(path).file
    flip(file, file.stat().st_size // 2)
    aside = file.rename(file.with_name("aside"))
    model = opened(path)

    def come_back(done: int, total: int) -> None:
        if aside.exists():
            aside.rename(file)

    packed = load_packed(model, requests_for(model), come_back, settled_after_s=-1.0)
    assert packed.path == file
    second = Load(path)
    assert not second.has_packed
    assert_right(second)


def flip(file: Path, place: int) -> None:
    with file.open("r+b") as raw:
        raw.seek(place)
        (value,) = raw.read(1)
        raw.seek(place)
        raw.write(bytes([value ^ 16]))


def test_a_file_of_the_revision_before_is_packed_again(path: Path) -> None:
    """It has no checksum, and goes."""
    file = Load(path).file
    text = re.sub(rb',"content":"[0-9a-f]{32}"', b"", header_of(file))
    page = signed(text.replace(b'"revision":2', b'"revision":1')).ljust(PAGE_BYTES, b"\0")
    with file.open("r+b") as raw:
        raw.write(page)
    old = file.rename(file.with_name(file.name.removesuffix(f"-p{REVISION}") + "-p1"))
    second = Load(path)
    assert second.has_packed
    assert not old.exists()
    assert_right(second)


def test_a_right_header_under_a_wrong_hash_is_not_ours(path: Path) -> None:
    """The name does not count: a file of other weights is not used for these."""
    file = Load(path).file
    text = header_of(file)
    digest = open_model(path).weights_hash().encode()
    page = signed(text.replace(digest, b"0" * 64).replace(b'"origin":"', b'"origin":"0'))
    with file.open("r+b") as raw:
        raw.write(page)
    second = Load(path)
    assert second.has_packed
    assert_right(second)


def test_what_is_no_file_is_passed_over(path: Path) -> None:
    """Opening a pipe would wait for its writer."""
    file = Load(path).file
    file.unlink()
    os.mkfifo(file)
    file.with_name(file.name + "x").mkdir()
    assert_right(Load(path))


def test_without_room_beside_the_model_the_cache_folder_is_used(path: Path, caches: Path) -> None:
    """The name of the model leaves no room for that of the file."""
    path = path.rename(path.with_name("x" * 230 + ".gguf"))
    first, second = Load(path), Load(path)
    assert first.file.parent == caches
    assert (second.has_packed, second.model.num_hashed) == (False, 0)
    assert "File name too long" in first.packed.notes[0]
    assert not second.packed.notes
    assert_right(second)


def test_models_of_one_name_do_not_meet_in_the_cache_folder(gguf_file: Maker) -> None:
    paths = []
    for kind in ("Q8_0", "Q4_0"):
        path = gguf_file(kind=kind)
        paths.append(path.rename(path.with_name("x" * 230 + ".gguf")))
    loads = [Load(path) for path in paths]
    assert loads[0].file != loads[1].file
    assert not any(Load(path).has_packed for path in paths)


def test_without_any_room_the_weights_are_in_memory(path: Path, caches: Path) -> None:
    """As on a full disk: the first page of a file is refused."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE_BYTES, limits[1]))
    try:
        load = Load(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load.packed.path is None
    for folder, note in zip((path.parent, caches), load.packed.notes, strict=True):
        assert str(folder) in note
    assert_right(load)
    assert packed_files(path.parent) == packed_files(caches) == []


def test_no_folder_can_be_made(path: Path, tmp_path: Path) -> None:
    """The user's cache folder is a file."""
    (tmp_path / "caches").write_text("")
    load = Load(path.rename(path.with_name("x" * 230 + ".gguf")))
    assert load.packed.path is None
    assert "Not a directory" in load.packed.notes[1] or "File exists" in load.packed.notes[1]
    assert_right(load)


def test_only_what_no_start_uses_is_removed(path: Path) -> None:
    """Kept: newer revisions, other formats, what someone is writing, and what is not ours."""
    digests = "0123456789abcdef-01234567"
    kept = [
        f"tiny.gguf.llmrt-{digests}-p{REVISION + 1}",
        f"tiny.gguf.llmrt-{digests}-p{REVISION}.bak",
        f"other.gguf.llmrt-{digests}-p0",
        "tiny.gguf.llmrt-0123456789abcdef.tmp",
    ]
    removed = [
        f"tiny.gguf.llmrt-{digests}-p0",
        f"tiny.gguf.llmrt-{digests}-p{REVISION}",
        "tiny.gguf.llmrt-fedcba9876543210.tmp",
    ]
    for name in (*kept, *removed):
        (path.parent / name).write_text("")
    with (path.parent / kept[-1]).open() as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        load = Load(path)
    assert packed_files(path.parent) == sorted([*kept, load.file.name])


def test_workers_that_start_together_all_get_the_weights(path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        loads = list(pool.map(lambda _: Load(path), range(8)))
    for load in loads:
        assert_right(load)
        assert load.file.exists()
    assert packed_files(path.parent) == [loads[0].file.name]
    # All map the file that is there; none kept one that was replaced.
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split()[4] for line in maps if f"{path.name}.llmrt-" in line}
    assert mapped == {str(loads[0].file.stat().st_ino)}


def test_an_interrupted_start_leaves_no_file(path: Path) -> None:
    model = opened(path)

    def interrupt(done: int, total: int) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_packed(model, requests_for(model), interrupt)
    assert packed_files(path.parent) == []


def test_a_real_model_is_packed_once(smollm2_path: Path, tmp_path: Path) -> None:
    path = tmp_path / smollm2_path.name
    path.symlink_to(smollm2_path.absolute())
    first, second = Load(path), Load(path)
    assert (first.has_packed, second.has_packed, second.model.num_hashed) == (True, False, 0)
    assert_right(second)
