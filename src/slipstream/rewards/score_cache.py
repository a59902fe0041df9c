"""Scores that judges have given, in a file of the run, by what was asked."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import BinaryIO

from slipstream.core.disk import replace_file
from slipstream.core.errors import DiskError

HASH_BYTES = 16
_RECORD = struct.Struct(f"<{HASH_BYTES}sd")


class ScoreCache:
    """The newest `most` scores in 0..1, by hash. One process writes the file, which may be cut off anywhere.

    Where the disk takes no more, scores are kept in memory only: the run needs none of them.
    """

    def __init__(self, path: Path, most: int) -> None:
        self._path, self._most = path, most
        self._scores: dict[bytes, float] = {}
        self._file: BinaryIO | None = None
        with contextlib.suppress(FileNotFoundError):
            raw = path.read_bytes()
            whole = raw[: len(raw) - len(raw) % _RECORD.size]
            for key, score in _RECORD.iter_unpack(whole):
                if 0.0 <= score <= 1.0:
                    self._scores[key] = score
        self._num_written = 2 * most  # so that the first score that is put writes a sound file

    def get(self, key: bytes) -> float | None:
        return self._scores.get(key)

    def put(self, key: bytes, score: float) -> None:
        if key in self._scores or not self._most:
            return
        self._scores[key] = score
        while len(self._scores) > self._most:
            del self._scores[next(iter(self._scores))]
        with contextlib.suppress(OSError, DiskError):
            if self._num_written >= 2 * self._most:
                self._rewrite()
            elif self._file is not None:
                self._file.write(_RECORD.pack(key, score))
                self._num_written += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rewrite(self) -> None:
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._path, b"".join(_RECORD.pack(*item) for item in self._scores.items()))
        self._num_written = len(self._scores)
        self._file = self._path.open("ab", buffering=0)
