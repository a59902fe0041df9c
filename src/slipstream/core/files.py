"""Reading files that others wrote: only regular ones, and never more than a bound.

A checkpoint or a run's folder may come from anywhere. A known name there may stand for a device, a pipe, a link to an
endless file, or gigabytes of brackets.
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

from slipstream.core.errors import ConfigError, SlipstreamError, clip

T = TypeVar("T")

MAX_JSON_BYTES = 64 * 1024**2
"""Most bytes of a file that is parsed as a whole; the largest indexes and summaries have a few megabytes."""
MAX_STATE_BYTES = 512 * 1024**2
"""Most bytes of a file that a run wrote: a checkpoint's state lists each group that was dropped in up to 10 bytes."""
MAX_LINE_BYTES = MAX_STATE_BYTES
"""Most bytes of a line of a JSONL file of a run: after a resume the first one has that list."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def no_run(run_dir: Path, lacking: str) -> ConfigError:
    """Return the error for a folder that is not there, or is no run's: the file `lacking` is not in it."""
    what = f"'{run_dir}' is no run: it has no {lacking}" if run_dir.exists() else f"there is no folder '{run_dir}'"
    return ConfigError(what, allowed="the folder of a run")


def open_regular(path: Path) -> BinaryIO:
    """Open the regular file `path` for reading. OSError for anything else, which is not opened."""
    _check_regular(path, os.stat(path).st_mode)
    stream = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115 - for the caller
    try:
        _check_regular(path, os.fstat(stream.fileno()).st_mode)  # it may have been replaced since
    except BaseException:
        stream.close()
        raise
    return stream


def read_whole(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of the regular file `path`. OSError for anything else, and for more than `max_bytes`."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        content = b"" if size > max_bytes else stream.read(max_bytes + 1) or b""
    if max(size, len(content)) > max_bytes:
        raise OSError(errno.EFBIG, f"it has {max(size, len(content))} bytes, of at most {max_bytes}", str(path))
    return content


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Parse the JSON in the regular file `path`. OSError where it cannot be read, ValueError where it is no JSON."""
    content = read_whole(path, max_bytes).decode("utf-8")
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def decode_json(path: Path, type: type[T], max_bytes: int = MAX_STATE_BYTES) -> T:
    """Parse the JSON in the regular file `path` as a `type`. OSError where unreadable, ValueError where malformed."""
    try:
        return msgspec.json.decode(read_whole(path, max_bytes), type=type)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def load_json(path: Path, type: type[T]) -> T:
    """`decode_json` for a file that a run wrote. SlipstreamError, which names it, where it is damaged."""
    try:
        return decode_json(path, type)
    except OSError as error:
        raise SlipstreamError(f"{path} cannot be read", got=error.strerror) from error
    except ValueError as error:  # msgspec's errors are ValueErrors, and so is bad UTF-8
        raise SlipstreamError(f"{path.name} is damaged", got=clip(error), hint=f"inspect {path}") from error


def read_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of `stream` with their ends. ValueError for one longer than `MAX_LINE_BYTES`."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"a line is longer than {MAX_LINE_BYTES} bytes")
        yield line


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((word for is_kind, word in _KINDS if is_kind(mode)), "no file")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
