"""Packed weights on disk: packed by the first worker of a model, mapped by all others.

The file lies beside the model (in a folder: inside it), else in the user's cache folder:

    MODEL.gguf.llmrt-<hash of the weights, 16 hex>-<digest of the plan, 8 hex>-p<revision>

One page of header, then the buffer of `packing.Plan`. A file appears under its name only when it
is complete and on disk, and is never written again but for the header. It is used when header and
size are right, the buffer has the header's checksum, and nobody could change it but its user, the
model's owner or root. The checksum is against disks and copies that fail, not against those; it
costs 12 ms per 100 MB in the page cache, and brings in what the first step would read anyway.
Of several workers that pack at once, all map the file of the one that was first.

The header remembers which files the weights came from, by size, times and inode: while these are
the same, a start need not read the model to know its hash.
"""

import contextlib
import fcntl
import hashlib
import mmap
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import structlog
import xxhash

from llmrt.models.loading import OpenedModel
from llmrt.models.packing import (
    Bytes,
    PackedWeights,
    PackRequest,
    Plan,
    Progress,
    fill,
    make_plan,
    pack_weights,
    views,
)

log = structlog.get_logger(__name__)

REVISION = 2
"""Of the header, the plan and the formats: another one is packed again."""

_PAGE_BYTES = 4096
_CHECKSUM_DIGITS = 16
# A model that changed a moment ago may change again in the same tick of the file system's clock.
_SETTLED_AFTER_S = 10.0


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`origin` tells the files of the model apart; empty: they had changed just before.

    `content` is the checksum of the buffer: XXH3, 128 bits in hex.
    """

    revision: int
    weights_hash: str
    plan: str
    size_bytes: int
    origin: str
    content: str

    def encode(self) -> bytes:
        text = msgspec.json.encode(self)
        return (text + _checksum(text) + b"\n").ljust(_PAGE_BYTES, b"\0")

    @staticmethod
    def decode(page: bytes) -> "_Header | None":
        line, _, _ = page.partition(b"\n")
        text, checksum = line[:-_CHECKSUM_DIGITS], line[-_CHECKSUM_DIGITS:]
        if checksum != _checksum(text):
            return None
        try:
            return msgspec.json.decode(text, type=_Header)
        except (msgspec.MsgspecError, RecursionError):
            return None


def _checksum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:_CHECKSUM_DIGITS].encode()


class _Refused(Exception):
    """A file that is not used; the message says why."""


class _Damaged(_Refused):
    """The buffer has changed since it was written."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A folder where packed files of a model may lie, and what their names begin with."""

    folder: Path
    prefix: str

    def path(self, weights_hash: str, plan: str) -> Path:
        return self.folder / f"{self.prefix}.llmrt-{weights_hash[:16]}-{plan[:8]}-p{REVISION}"

    def temporary_path(self) -> Path:
        return self.folder / f"{self.prefix}.llmrt-{secrets.token_hex(8)}.tmp"

    def files(self, pattern: str) -> Iterator[tuple[Path, re.Match[str]]]:
        """Files whose name goes on with `pattern`."""
        whole = re.compile(re.escape(self.prefix + ".llmrt-") + pattern)
        with contextlib.suppress(OSError):
            for path in sorted(self.folder.iterdir()):
                match = whole.fullmatch(path.name)
                if match and path.is_file():
                    yield path, match


@dataclass(frozen=True, slots=True)
class _Opened:
    path: Path
    header: _Header
    packed: PackedWeights


@dataclass(frozen=True, slots=True)
class _Wanted:
    """`origin` is what a header says of the model's files; `is_settled`: it may remember that.

    `owners` are the users whose files are trusted.
    """

    plan: Plan
    digest: str
    origin: str
    is_settled: bool
    owners: frozenset[int]

    @property
    def size_bytes(self) -> int:
        return _PAGE_BYTES + self.plan.size_bytes

    def header(self, weights_hash: str, content: str) -> _Header:
        origin = self.origin if self.is_settled else ""
        return _Header(REVISION, weights_hash, self.digest, self.size_bytes, origin, content)

    def map(self, fd: int) -> Bytes:
        """The buffer, read-only, and shared with all who map the file."""
        mapping = mmap.mmap(fd, self.size_bytes, access=mmap.ACCESS_READ)
        mapping.madvise(mmap.MADV_WILLNEED)
        return np.frombuffer(mapping, np.uint8, offset=_PAGE_BYTES)


def load_packed(
    model: OpenedModel,
    requests: Iterable[PackRequest],
    progress: Progress | None = None,
    *,
    num_threads: int = 2,
    settled_after_s: float = _SETTLED_AFTER_S,
) -> PackedWeights:
    """Map the packed weights of `model`, which are packed first if no file of them is found.

    They are packed into memory if no folder can take the file. The model's files are remembered
    once they have not changed for `settled_after_s`. Raises `ModelError` as `make_plan` does.
    """
    requests = list(requests)
    plan = make_plan(model.tensors, requests)
    origin, changed_at = _origin(model.path)
    is_settled = changed_at + settled_after_s < time.time()
    owners = frozenset((os.geteuid(), 0, model.path.stat().st_uid))
    wanted = _Wanted(plan, plan.digest(), origin, is_settled, owners)
    places = _places(model.path)
    notes: list[str] = []
    found = [opened for place in places for opened in _find(place, wanted, notes)]
    for opened in found:
        if opened.header.origin == origin:
            return _loaded(opened, notes)
    with ThreadPoolExecutor(1, thread_name_prefix="hash") as pool:
        hashed = pool.submit(model.weights_hash)
        for opened in found:
            if opened.header.weights_hash == hashed.result():
                _remember(opened, wanted)
                return _loaded(opened, notes)
        for place in places:
            try:
                stored = _store(place, wanted, model, hashed, progress, num_threads)
            except OSError as error:
                reason = error.strerror or error
                notes.append(f"packed weights cannot be kept in {place.folder}: {reason}")
            else:
                return _loaded(stored, notes)
        packed = pack_weights(model.tensors, requests, progress, num_threads=num_threads)
        return replace(packed, weights_hash=hashed.result(), notes=tuple(notes))


def _loaded(opened: _Opened, notes: list[str]) -> PackedWeights:
    return replace(
        opened.packed,
        weights_hash=opened.header.weights_hash,
        path=opened.path,
        notes=tuple(notes),
    )


def _places(model: Path) -> list[_Place]:
    """Beside the model, then the user's own."""
    model = model.absolute()
    beside = _Place(model, "weights") if model.is_dir() else _Place(model.parent, model.name)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    # Names of models are not unique, and those of files are limited to 255 bytes.
    prefix = f"{model.name[:60]}.{hashlib.sha256(os.fsencode(model)).hexdigest()[:16]}"
    return [beside, _Place(caches / "llmrt" / "packed", prefix)]


def _origin(model: Path) -> tuple[str, float]:
    """A digest over size, times and inode of the model's files, and when the last one changed."""
    digest, changed_ns = hashlib.sha256(), 0
    for path in _files_of(model):
        stat = path.stat()
        facts = (path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        digest.update(repr(facts).encode(errors="surrogateescape"))
        changed_ns = max(changed_ns, stat.st_mtime_ns, stat.st_ctime_ns)
    return digest.hexdigest(), changed_ns / 1e9


def _files_of(model: Path) -> list[Path]:
    """The files that decide names and content of the weights, perhaps with others."""
    if model.is_dir():
        suffixes = {".gguf", ".safetensors", ".json"}
        return sorted(path for path in model.iterdir() if path.suffix in suffixes)
    stem = re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", model.name)
    if stem == model.name:
        return [model]
    part = re.compile(re.escape(stem) + r"-\d{5}-of-\d{5}\.gguf")
    return sorted(path for path in model.parent.iterdir() if part.fullmatch(path.name))


def _find(place: _Place, wanted: _Wanted, notes: list[str]) -> Iterator[_Opened]:
    """Complete files of the plan, of whatever content the model had."""
    for path, _ in place.files(rf"[0-9a-f]{{16}}-{wanted.digest[:8]}-p{REVISION}"):
        try:
            opened = _open(path, wanted)
        except OSError as error:
            notes.append(f"cannot read {path}: {error.strerror or error}")
        except _Refused as refused:
            if isinstance(refused, _Damaged):
                log.warning("packed_weights.damaged", path=str(path), remedy="packing them again")
            notes.append(str(refused))
        else:
            yield opened


def _open(path: Path, wanted: _Wanted) -> _Opened:
    """Raises `OSError`, and `_Refused` for what is not a whole file of the plan."""
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        header = _Header.decode(file.read(_PAGE_BYTES))
        if (
            stat.st_size != wanted.size_bytes
            or not _is_trusted(stat, wanted)
            or header is None
            or header != _header_like(header, wanted)
        ):
            raise _Refused(
                f"{path} is damaged, no file of packed weights, or writable by other users than "
                "the model's: not used"
            )
        data = wanted.map(file.fileno())
    if _content(data) != header.content:
        raise _Damaged(f"{path} is damaged: its weights do not have their checksum: not used")
    return _Opened(path, header, views(wanted.plan, data))


def _content(data: Bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data.data)


def _is_trusted(stat: os.stat_result, wanted: _Wanted) -> bool:
    return stat.st_uid in wanted.owners and not stat.st_mode & 0o002


def _header_like(header: _Header, wanted: _Wanted) -> _Header:
    """The only header with that hash and origin that fits."""
    return msgspec.structs.replace(
        header, revision=REVISION, plan=wanted.digest, size_bytes=wanted.size_bytes
    )


def _remember(opened: _Opened, wanted: _Wanted) -> None:
    """Write the model's files into the header, where we may, so that the next start finds them.

    A reader in between sees a wrong checksum and packs for itself.
    """
    if wanted.is_settled:
        page = wanted.header(opened.header.weights_hash, opened.header.content).encode()
        with contextlib.suppress(OSError), opened.path.open("r+b", buffering=0) as file:
            file.write(page)


def _store(
    place: _Place,
    wanted: _Wanted,
    model: OpenedModel,
    hashed: Future[str],
    progress: Progress | None,
    num_threads: int,
) -> _Opened:
    """Pack into a new file and give it its name. Raises `OSError` and leaves nothing behind."""
    place.folder.mkdir(parents=True, exist_ok=True)
    temporary = place.temporary_path()
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o664)
    try:
        # Held as long as someone writes: see `_is_abandoned`.
        fcntl.flock(fd, fcntl.LOCK_EX)
        # A write through the mapping to a full disk would be SIGBUS.
        os.posix_fallocate(fd, 0, wanted.size_bytes)
        data = np.frombuffer(mmap.mmap(fd, wanted.size_bytes), np.uint8, offset=_PAGE_BYTES)
        fill(wanted.plan, model.tensors, data, progress, num_threads=num_threads)
        os.fsync(fd)
        header = wanted.header(hashed.result(), _content(data))
        os.pwrite(fd, header.encode(), 0)
        os.fsync(fd)
        path = place.path(header.weights_hash, header.plan)
        other = _publish(temporary, path, wanted, header.weights_hash)
        _sync_folder(place.folder)
        stored = other or _Opened(path, header, views(wanted.plan, wanted.map(fd)))
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    _remove_old(place, header.weights_hash)
    return stored


def _publish(temporary: Path, path: Path, wanted: _Wanted, weights_hash: str) -> _Opened | None:
    """Give a file its name, unless another worker was first: then that one's, and ours is gone."""
    other = None
    try:
        path.hardlink_to(temporary)
    except OSError:  # there is one, perhaps a damaged one, or no links on this file system
        with contextlib.suppress(_Refused):
            other = _open(path, wanted) if path.is_file() else None
        if other is None or other.header.weights_hash != weights_hash:
            temporary.rename(path)
            return None
    temporary.unlink()
    return other


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_old(place: _Place, weights_hash: str) -> None:
    """Remove what no start of this version uses again: older revisions, weights that the model
    had before, and files that nobody finishes. Who has one mapped keeps it."""
    with contextlib.suppress(OSError):
        for path, match in place.files(r"([0-9a-f]{16})-[0-9a-f]{8}-p(\d{1,9})"):
            revision = int(match[2])
            is_other = revision == REVISION and match[1] != weights_hash[:16]
            if revision < REVISION or is_other:
                path.unlink(missing_ok=True)
        for path, _ in place.files(r"[0-9a-f]{16}\.tmp"):
            if _is_abandoned(path):
                path.unlink(missing_ok=True)


def _is_abandoned(temporary: Path) -> bool:
    with temporary.open("rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
