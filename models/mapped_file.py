"""Model files as read-only memory: nothing is read before it is used, nothing is copied."""

import mmap
from pathlib import Path

from llmrt.wire.errors import ModelError


def map_file(path: Path) -> mmap.mmap:
    """The bytes of `path`, mapped; unmapped when the last array over them is gone.

    Raises `ModelError` if the file cannot be read or is empty.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:  # mmap of nothing
        raise ModelError(f"{path} is empty: download it again") from None
