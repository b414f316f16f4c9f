"""The standard streams of a process: there from the start, and no trouble when they break.

stdout that cannot be written ends the process by `OutputError`, once; what comes later is dropped.
What stderr does not take is dropped at once: a server does not die of a log that nobody keeps.
"""

import io
import os
import sys
from typing import Any, TextIO


class OutputError(Exception):
    """stdout cannot be written. No `OSError` and no `LlmrtError`, which others catch and go on."""

    def __init__(self, errno: int) -> None:
        super().__init__(f"cannot write to stdout: {os.strerror(errno)}")
        self.errno = errno


def set_up() -> None:
    """To be called first thing, before anything opens a descriptor of its own.

    libuv aborts where 0, 1 or 2 are closed; they become /dev/null, also for children.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free one: fd
    if sys.stdin is None:
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    if sys.stdout is sys.__stdout__:  # else a test captures it
        sys.stdout = sys.__stdout__ = _text(_Stdout(1, "w", closefd=False), sys.stdout)  # type: ignore[misc]
    if sys.stderr is sys.__stderr__:
        sys.stderr = sys.__stderr__ = _text(_Stderr(2, "w", closefd=False), sys.stderr)  # type: ignore[misc]


class _Stdout(io.FileIO):
    def write(self, data: "bytes | bytearray | memoryview", /) -> int:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            _discard(1)
            raise OutputError(error.errno or 0) from None


class _Stderr(io.FileIO):
    def write(self, data: "bytes | bytearray | memoryview", /) -> int:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _discard(fd: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


def _text(raw: io.FileIO, like: TextIO | None) -> "io.TextIOWrapper[Any]":
    """In the encoding of the stream that Python made; it made none for a closed descriptor."""
    if not isinstance(like, io.TextIOWrapper):
        return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="replace")
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=like.line_buffering or like.write_through,
    )
