"""Standard output and error of a run, which end no run and hold none up.

Inside `lasting_output`, `sys.stdout` and `sys.stderr` are outlets. A thread of each writes to the stream, so a reader
that stands still blocks nobody else. What the stream does not take, since its reader left, its terminal or disk is gone
or it never was open, goes to a log; so does what no longer fits the queue of one that stands still.
"""

from __future__ import annotations

import errno
import io
import os
import re
import select
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

CONSOLE_LOG = "console.log"  # in the folder logs/ of a run
MAX_PENDING_BYTES = 1 << 20
DRAIN_S = 5.0  # at the end: how long a stream may take nothing before the rest goes to the log
_MAX_WRITE_BYTES = 1 << 12
_MAX_UNLOGGED = 1000  # texts, while the log's place is not known
_MAY_PASS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # a stream with these errors is tried again
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\r")


class _Log:
    """The file for what the streams do not take. It is made with its first line; an error of its own is not told."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._lock = threading.Lock()
        self._file: io.FileIO | None = None
        self._unlogged: deque[str] = deque(maxlen=_MAX_UNLOGGED)

    def write(self, text: str) -> None:
        with self._lock, suppress(OSError):
            if text:
                self._unlogged.append(_ESCAPES.sub("", text))
            if self.path is None or not self._unlogged:
                return
            if self._file is None:
                self.path.parent.mkdir(exist_ok=True)  # not the run's folder: if that is gone, it stays so
                self._file = self.path.open("ab", buffering=0)
            while self._unlogged:
                self._file.write(self._unlogged[0].encode(errors="backslashreplace"))
                self._unlogged.popleft()

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()


class Outlet(io.TextIOBase):
    """A text stream that takes everything at once and never fails, in front of `stream`, which may do neither."""

    def __init__(self, stream: TextIO | None, name: str, log: _Log) -> None:
        self.log = log
        self.why_lost = ""
        """Why the stream will take nothing any more; empty while it may."""
        self._stream, self._name = stream, name
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._is_behind = False
        self._is_closing = False
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        try:
            if stream is None:
                raise OSError(errno.EBADF, "it is closed")
            stream.flush()  # what was written before comes before
            self._descriptor = stream.fileno()
        except OSError as error:
            with self._news:
                self._lose(error.strerror or str(error))

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8" if self._stream is None else self._stream.encoding

    @property
    def is_behind(self) -> bool:
        """Whether the stream has not taken yet what it was sent."""
        return self._pending_bytes > 0

    def isatty(self) -> bool:
        return self._stream is not None and not self.why_lost and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode(self.encoding, "backslashreplace")
        if self._is_closing:  # a logging handler may have kept this
            with suppress(OSError):
                if self._stream is not None and not self.why_lost:
                    self._stream.write(text)
                    self._stream.flush()
            return len(text)
        with self._news:
            is_full = self._pending_bytes + len(data) > MAX_PENDING_BYTES
            if not self.why_lost and not is_full:
                self._is_behind = False
                self._put(data)
                return len(text)
            has_news = is_full and not self._is_behind
            self._is_behind = is_full
        if has_news and not self.why_lost:
            self.log.write(f"{self._name} stands still: what it would be sent next is here\n")
        self.log.write(text)
        return len(text)

    def end(self) -> None:
        """Wait until the stream has taken everything, or has taken nothing for `DRAIN_S`; the rest goes to the log."""
        with self._news:
            while self._pending and not self.why_lost:
                before = self._pending_bytes
                moved = self._news.wait_for(lambda before=before: self._pending_bytes != before, DRAIN_S)  # type: ignore[misc]
                if not moved:
                    self._lose(f"it took nothing for {DRAIN_S:g} s")
            self._is_closing = True
            self._news.notify_all()
        if self._thread is not None and not self.why_lost:
            self._thread.join(DRAIN_S)

    def _put(self, data: bytes) -> None:
        for start in range(0, len(data), _MAX_WRITE_BYTES):
            self._pending.append(data[start : start + _MAX_WRITE_BYTES])
        self._pending_bytes += len(data)
        if self._thread is None:
            self._thread = threading.Thread(target=self._hand_on, name=f"outlet-{self._name}", daemon=True)
            self._thread.start()
        self._news.notify_all()

    def _hand_on(self) -> None:
        """Consumes: what is pending. Unblocked by: `write`, the stream. Ends when: closed and done, or lost."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._pending or self._is_closing or self.why_lost)
                if self.why_lost or not self._pending:
                    return
                data = self._pending[0]
            try:
                taken = os.write(self._descriptor, data)
            except BlockingIOError:  # somebody who shares it has made it so
                select.select([], [self._descriptor], [], 1.0)
                continue
            except OSError as error:
                self._refused(error, data)
                continue
            with self._news:
                self._took(data, taken)

    def _took(self, data: bytes, taken: int) -> None:
        if self.why_lost:  # it was given up meanwhile
            return
        self._pending[0] = data[taken:]
        if not self._pending[0]:
            self._pending.popleft()
        self._pending_bytes -= taken
        self._news.notify_all()

    def _refused(self, error: OSError, data: bytes) -> None:
        why = error.strerror or str(error)
        with self._news:
            if self.why_lost:
                return
            if error.errno not in _MAY_PASS:
                self._lose(why)
                return
            if not self._is_behind:
                self.log.write(f"{self._name} is refused ({why}): what it did not take is here\n")
            self._is_behind = True
            self.log.write(data.decode(self.encoding, "replace"))
            self._took(data, len(data))

    def _lose(self, why: str) -> None:
        self.why_lost = why
        self.log.write(f"{self._name} is gone ({why}): the run goes on, and what it would say there is here\n")
        self.log.write(b"".join(self._pending).decode(self.encoding, "replace"))
        self._pending.clear()
        self._pending_bytes = 0
        self._news.notify_all()


def is_terminal() -> bool:
    """Return whether standard output is a terminal. What a program puts in its place may only have `write`."""
    return bool(getattr(sys.stdout, "isatty", lambda: False)())


@contextmanager
def lasting_output(log_path: Path | None = None) -> Iterator[None]:
    """Standard output and error last within: they neither fail nor block. `log_path` gets what they do not take.

    Contexts nest; the outermost one ends the outlets, an inner one says where the log is. A stream that somebody has
    put in the place of the process's own, as a notebook does, is left alone.
    """
    outer = sys.stdout if isinstance(sys.stdout, Outlet) else sys.stderr if isinstance(sys.stderr, Outlet) else None
    if outer is not None:
        outer.log.path = outer.log.path or log_path
        outer.log.write("")
        yield
        return
    log = _Log()
    log.path = log_path
    stdout, stderr = sys.stdout, sys.stderr
    outlets: list[Outlet] = []
    if stdout is sys.__stdout__:
        outlets.append(outlet := Outlet(stdout, "standard output", log))
        sys.stdout = outlet
    if stderr is sys.__stderr__:
        outlets.append(outlet := Outlet(stderr, "standard error", log))
        sys.stderr = outlet
    try:
        yield
    finally:
        sys.stdout, sys.stderr = stdout, stderr
        for outlet in outlets:
            outlet.end()
        log.close()
