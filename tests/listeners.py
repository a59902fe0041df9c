"""Which TCP addresses a process listens at, as Linux tells it; and ports at which nobody does."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

LISTENING = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """(address, port) of each listening socket of process `pid`; empty when it has ended."""
    sockets = set()
    with contextlib.suppress(FileNotFoundError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                sockets.add(os.readlink(descriptor))
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and f"socket:[{fields[9]}]" in sockets:
                    address, port = fields[1].split(":")
                    found.add((_address(family, address), int(port, 16)))
    return found


def listeners(pid: int, port: int) -> set[str]:
    """The addresses of this machine at which process `pid` listens at `port`."""
    return {address for address, at in listening(pid) if at == port}


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Yields a port of this machine where nobody listens, and which is given to nobody who does not ask for it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that a server may listen there
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _address(family: int, text: str) -> str:
    """Words of four bytes, each in this machine's order."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(words))
