"""Append-only JSON lines that survive `kill -9`: a line counts once its newline is on disk.

Only the last line of such a file can be torn. Readers stop before it; a writer that reopens the file cuts it off.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from slipstream.core.disk import check_in_place, disk_errors, replacing, sync
from slipstream.core.errors import SlipstreamError, clip
from slipstream.core.files import open_regular, read_lines

T = TypeVar("T")

_BLOCK_BYTES = 1 << 20
CHECK_EVERY_S = 0.5  # two calls of the system, which cost as much as the line itself


class JsonlWriter:
    """Append msgspec-encodable objects, one a line; `write` hands each batch to the system in a single call.

    `in_blocks`: `flush` does, with all that was written since, and so do `sync` and `close`.
    DiskError where the disk refuses; the file then ends with the last whole batch, so that it can be gone on with. And
    where the file was removed, moved or replaced, since its lines would be seen by nobody: `sync` says so at once,
    `write` within `CHECK_EVERY_S`.
    """

    def __init__(self, path: Path, *, in_blocks: bool = False) -> None:
        self._path = path = path.absolute()  # the working directory may change
        self._in_blocks, self._block = in_blocks, bytearray()
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            cut_torn_tail(path)
            self._file = path.open("ab", buffering=0)
        self._is_named = False
        self._checked_s = time.monotonic()
        self._encoder = msgspec.json.Encoder()

    def write(self, *records: Any) -> None:
        for record in records:
            self._block += self._encoder.encode(record) + b"\n"
        if not self._in_blocks:
            self.flush()

    def flush(self) -> None:
        """Hand the lines that were written to the system. Where it refuses them, they are forgotten."""
        if self._block:
            block, self._block = self._block, bytearray()
            if time.monotonic() - self._checked_s >= CHECK_EVERY_S:
                self._check()
            with disk_errors(self._path):
                self._append(block)

    def _append(self, data: bytearray) -> None:
        """Write all of `data` or nothing: a full disk takes a part first, which would stay in the file's middle."""
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(os.fstat(self._file.fileno()).st_size - (len(data) - len(left)))
            raise

    def sync(self) -> None:
        """Return once everything written is on the disk; the first time, that there is such a file, too."""
        self.flush()
        self._check()
        with disk_errors(self._path):
            os.fsync(self._file.fileno())
            if not self._is_named:
                sync(self._path.parent)
                self._is_named = True

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._file.close()

    def _check(self) -> None:
        check_in_place(self._path, self._file.fileno())
        self._checked_s = time.monotonic()


def cut_torn_tail(path: Path) -> None:
    """Truncate `path` after its last newline. A missing file is fine."""
    if not path.exists():
        return
    size = path.stat().st_size
    with path.open("r+b") as file:
        keep, chunk = size, 1 << 16
        while keep:
            start = max(0, keep - chunk)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < size:
            file.truncate(keep)


Decode = Callable[[bytes], T]


def read_jsonl(path: Path, type: type[T], decode: Decode[T] | None = None, *, offset: int = 0) -> Iterator[T]:
    """Yield the whole lines of `path` as `type`, in order; nothing for a missing file. `decode`: else as plain JSON.

    `offset`: only those that begin behind this byte; a negative one counts from the end. A torn last line (no newline)
    is left out. An undecodable line before it raises SlipstreamError: that is not a killed writer but a damaged file.
    """
    if not path.exists():
        return
    decode = msgspec.json.Decoder(type).decode if decode is None else decode
    with _opened(path) as file:
        if offset := max(0, offset + path.stat().st_size if offset < 0 else offset):
            file.seek(offset)
            file.readline()  # the rest of a line that began before
        number = 1
        try:
            for line in read_lines(file):
                if not line.endswith(b"\n"):
                    return
                yield decode(line)
                number += 1
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors, and so is bad UTF-8
            where = f"line {number}{f' behind byte {offset:,}' if offset else ''}"
            raise SlipstreamError(
                f"{path.name} is damaged", got=f"{where}: {clip(error)}", hint=f"inspect {path}"
            ) from error


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        raise SlipstreamError(f"{path} cannot be read", got=error.strerror) from error


def sample_jsonl(path: Path, type: type[T], *, most_bytes: int = 1 << 26, parts: int = 64) -> Iterator[T]:
    """The lines of `path`, or, where it is longer than `most_bytes`, those of `parts` stretches of it, evenly spaced.

    In order; a torn last line is left out, as is a missing file. SlipstreamError for an undecodable line.
    """
    size = path.stat().st_size if path.exists() else 0
    if size <= most_bytes:
        yield from read_jsonl(path, type)
        return
    decoder = msgspec.json.Decoder(type)
    length = most_bytes // parts
    with _opened(path) as file:
        for part in range(parts):
            start = part * (size - length) // (parts - 1)
            file.seek(start)
            if start:
                file.readline()  # the rest of a line that began before
            while file.tell() < start + length and (line := file.readline()).endswith(b"\n"):
                try:
                    yield decoder.decode(line)
                except (ValueError, RecursionError) as error:
                    raise SlipstreamError(f"{path.name} is damaged", got=error, hint=f"inspect {path}") from error


def cut_jsonl(path: Path, type: type[T], keep: Callable[[T], bool]) -> int:
    """Replace `path` by those of its lines whose record `keep` wants, byte for byte; returns how many there are.

    Nothing behind the first torn or undecodable line is kept. A missing file becomes an empty one. Whoever reads it
    meanwhile, or after a crash, finds the file as it was or as it is to be. DiskError where it cannot be replaced.
    """
    num_kept = 0
    with disk_errors(path), replacing(path) as temporary, temporary.open("wb") as out:
        for lines, records in _intact_blocks(path, type):
            kept = [line for line, record in zip(lines, records, strict=True) if keep(record)]
            out.write(b"".join(kept))
            num_kept += len(kept)
    return num_kept


def _intact_blocks(path: Path, type: type[T]) -> Iterator[tuple[list[bytes], list[T]]]:
    """Yield what `intact_lines` does, many lines at a time: of a long run there are millions."""
    decoder, offset = msgspec.json.Decoder(type), 0
    while path.exists():
        with _opened(path) as file:
            file.seek(offset)
            block = file.read(_BLOCK_BYTES)
        block = block[: block.rfind(b"\n") + 1]
        lines = block.splitlines(keepends=True)
        try:
            records = decoder.decode_lines(block)
        except (ValueError, RecursionError):
            records = []
        if not records or len(lines) != len(records):  # damaged, or with lines that are blank, or longer than a block
            for line, record in intact_lines(path, type, offset=offset):
                yield [line], [record]
            return
        yield lines, records
        offset += len(block)


def intact_lines(
    path: Path, type: type[T], decode: Decode[T] | None = None, *, offset: int = 0
) -> Iterator[tuple[bytes, T]]:
    """Yield the lines of `path` with their records, up to the first torn or undecodable one; none for a missing file.

    `offset` is where a line begins.

    After a power failure what was never synced may be anything, zeros for example.
    """
    if not path.exists():
        return
    decode = msgspec.json.Decoder(type).decode if decode is None else decode
    with _opened(path) as file:
        file.seek(offset)
        lines = read_lines(file)
        while True:
            try:
                line = next(lines, b"")
                record = decode(line)
            except (ValueError, RecursionError):
                return
            if not line.endswith(b"\n"):
                return
            yield line, record


def finite(value: Any) -> Any:
    """`value` with every nan and inf inside replaced by None, which is what JSON can say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
