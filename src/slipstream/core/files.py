"""Reading files that others wrote: only regular ones, and never more than a bound.

A checkpoint or a run's folder may come from anywhere. What lies there under a known name may be a device, a pipe, a
link to an endless file, or gigabytes of brackets.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from slipstream.core.errors import SlipstreamError, clip

T = TypeVar("T")

MAX_JSON_BYTES = 64 * 1024**2
"""Of a file that is parsed as a whole; the largest indexes and summaries have a few megabytes."""
MAX_LINE_BYTES = 64 * 1024**2
"""Of a line of a JSONL file of a run."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path) -> BinaryIO:
    """Open the regular file `path` for reading. OSError, without opening it, for anything else."""
    _check_regular(path, os.stat(path).st_mode)
    stream = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115 - for the caller
    try:
        _check_regular(path, os.fstat(stream.fileno()).st_mode)  # it may have been replaced since
    except BaseException:
        stream.close()
        raise
    return stream


def read_whole(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The content of the regular file `path`. OSError for anything else, and for more than `max_bytes`."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        content = b"" if size > max_bytes else stream.read(max_bytes + 1) or b""
    if max(size, len(content)) > max_bytes:
        raise OSError(errno.EFBIG, f"it has {max(size, len(content))} bytes, of at most {max_bytes}", str(path))
    return content


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The JSON in the regular file `path`. OSError where it cannot be read, ValueError where it is no JSON."""
    return parse_json(read_whole(path, max_bytes))


def parse_json(content: bytes) -> Any:
    """`json.loads` of UTF-8; ValueError also for what is nested too deep."""
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def decode_json(path: Path, type: type[T], max_bytes: int = MAX_JSON_BYTES) -> T:
    """The JSON in the regular file `path` as a `type`. OSError where it cannot be read, ValueError where it is none."""
    try:
        return msgspec.json.decode(read_whole(path, max_bytes), type=type)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def load_json(path: Path, type: type[T]) -> T:
    """`decode_json` of a file that a run wrote. SlipstreamError, which names it, where it is damaged."""
    try:
        return decode_json(path, type)
    except OSError as error:
        raise SlipstreamError(f"{path} cannot be read", got=error.strerror) from error
    except ValueError as error:  # msgspec's errors are ValueErrors, and so is bad UTF-8
        raise SlipstreamError(f"{path.name} is damaged", got=clip(error), hint=f"inspect {path}") from error


def read_lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of `stream` with their ends. ValueError for one longer than `MAX_LINE_BYTES`."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"a line is longer than {MAX_LINE_BYTES} bytes")
        yield line


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((word for is_kind, word in _KINDS if is_kind(mode)), "no file")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
