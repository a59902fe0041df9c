"""A TCP proxy on loopback that can be told to stall or to break off: the bad network of the tests."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what is in flight is lost, as with a machine that dies


class TcpProxy:
    """Forwards connections to `target` ('tcp://host:port'); `address` is where it listens itself.

    One thread: consumes bytes of either side; waits in a selector; unblocked by bytes or a call; ends at `close`.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_accepted = 0
        self.num_bytes = 0
        """Forwarded in both directions."""
        self.tap: Callable[[bytes], object] = len
        """Gets all bytes that pass."""
        self._other: dict[socket.socket, socket.socket] = {}
        self._is_stalled = False
        self._is_refusing = False
        self._calls: list[tuple[Callable[[], None], threading.Event]] = []
        self._wake_fd, self._call_fd = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def cut(self) -> None:
        """Reset every connection; new ones are welcome."""
        self._call(self._cut)

    def go_down(self) -> None:
        """Reset every connection, and every new one at once."""

        def down() -> None:
            self._is_refusing = True
            self._cut()

        self._call(down)

    def stall(self) -> None:
        """Forward nothing; connections stay open."""

        def stall() -> None:
            self._is_stalled = True
            for side in self._other:
                self._selector.unregister(side)

        if not self._is_stalled:
            self._call(stall)

    def restore(self) -> None:
        """Undo `stall` and `go_down`."""

        def restore() -> None:
            if self._is_stalled:
                for side in self._other:
                    self._selector.register(side, selectors.EVENT_READ)
            self._is_stalled = self._is_refusing = False

        self._call(restore)

    def close(self) -> None:
        def close() -> None:
            self._cut()
            self._is_closed = True

        if not self._is_closed:
            self._call(close)
            self._thread.join()
            self._listener.close()
            self._selector.close()
            os.close(self._wake_fd)
            os.close(self._call_fd)

    def _call(self, function: Callable[[], None]) -> None:
        done = threading.Event()
        self._calls.append((function, done))
        os.write(self._call_fd, b"\0")
        assert done.wait(10)

    def _serve(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select():
                if key.fileobj == self._wake_fd:
                    os.read(self._wake_fd, 1)
                    function, done = self._calls.pop(0)
                    function()
                    done.set()
                    break  # the other descriptors may be closed now
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._other:
                    self._forward(key.fileobj)  # type: ignore[arg-type]

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        self.num_accepted += 1
        if self._is_refusing:
            _reset(near)
            return
        try:
            far = socket.create_connection(self._target, timeout=5)
        except OSError:
            _reset(near)
            return
        self._other |= {near: far, far: near}
        for side in (near, far):
            side.settimeout(5)
            if not self._is_stalled:
                self._selector.register(side, selectors.EVENT_READ)

    def _forward(self, side: socket.socket) -> None:
        other = self._other[side]
        try:
            data = side.recv(65536)
            if data:
                self.tap(data)
                other.sendall(data)
                self.num_bytes += len(data)
                return
        except OSError:
            pass
        for end in (side, other):
            del self._other[end]
            self._selector.unregister(end)
            end.close()

    def _cut(self) -> None:
        for side in list(self._other):
            if not self._is_stalled:
                self._selector.unregister(side)
            _reset(side)
        self._other.clear()


def _reset(side: socket.socket) -> None:
    with contextlib.suppress(OSError):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    side.close()
