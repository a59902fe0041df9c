"""A worker of environments: `python -m slipstream.environments.worker CONNECTION LAYOUT`, started by `workers.py` only.

Its processes are those of `jail/confinement.py`; the server imports the environments and runs their episodes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Sequence

import msgspec

from slipstream.core.errors import SlipstreamError
from slipstream.core.user_code import MAX_ERROR_CHARS, describe
from slipstream.environments.host import EpisodeHost
from slipstream.environments.hosting import MAX_EPISODES_PER_HOST, HostSetup, ToHost, ToolsFound
from slipstream.environments.sources import MakeEnvironment, load, with_tools_found
from slipstream.jail import confinement, isolation
from slipstream.jail.protocol import (
    FrameReader,
    SetupFailed,
    TriedNetwork,
    WorkerReady,
    framed,
    receive_frames,
)

_MAX_CALL_BYTES = 1 << 30  # frames of calls come from the trusted side
_READ_BYTES = 1 << 18
_STACK_BYTES = 1 << 20  # of each thread; all of them count as address space
_MAX_OPEN_FILES = 1024
_PER_PROGRAM = 4  # processes and threads of a program for each episode: itself, two threads, and one here that waits


def main(arguments: Sequence[str]) -> int:
    """Keep a server of environments, as `confinement.keep`."""
    return confinement.keep(arguments, serve)


def serve(connection: socket.socket, held: Sequence[str], _helper: socket.socket | None) -> None:
    """Import the environments, then run episodes. Ends by EOFError, or with the process."""
    reader = FrameReader(_MAX_CALL_BYTES)
    bodies = receive_frames(connection, reader)
    setup = msgspec.msgpack.decode(bodies.pop(0), type=HostSetup)
    to_pool = _Connection(connection)
    makers: list[MakeEnvironment] = []
    host = EpisodeHost(makers, to_pool.deliver, step_limit_s=setup.step_limit_s, max_chars=setup.max_chars)
    if setup.network != "host":
        _watch_network(to_pool, host, has_loopback=setup.has_agents)
    loop = asyncio.new_event_loop()
    try:
        found = [with_tools_found(load(source)) for source in setup.sources]
        makers += [make for make, _ in found]
        tools = msgspec.msgpack.encode(ToolsFound([schemas for _, schemas in found]))
        loop.run_until_complete(host.start(request_limit_s=setup.request_limit_s))
    except SlipstreamError as error:
        to_pool.deliver(msgspec.msgpack.encode(SetupFailed(error=str(error)[:MAX_ERROR_CHARS])))
        return
    except BaseException as error:  # noqa: BLE001 - the user's module may raise anything while it is imported
        to_pool.deliver(msgspec.msgpack.encode(SetupFailed(error=describe(error))))
        return
    threading.stack_size(_STACK_BYTES)
    isolation.use_few_arenas()
    per_episode = _PER_PROGRAM if any(source.kind == "program" for source in setup.sources) else 1
    isolation.limit_resources(
        setup.memory_bytes + MAX_EPISODES_PER_HOST * _STACK_BYTES,
        is_own_user="user" in held,
        open_files=_MAX_OPEN_FILES * min(2, per_episode),
        num_processes=isolation.MAX_PROCESSES + per_episode * MAX_EPISODES_PER_HOST,
    )
    to_pool.deliver(tools)
    to_pool.deliver(msgspec.msgpack.encode(WorkerReady(isolation=[*held, "limits"])))
    _run(loop, connection, reader, bodies, host, cpu_s=2 * setup.step_limit_s * (os.cpu_count() or 1))


def _run(
    loop: asyncio.AbstractEventLoop,
    connection: socket.socket,
    reader: FrameReader,
    bodies: list[bytes],
    host: EpisodeHost,
    *,
    cpu_s: float,
) -> None:
    """Run the loop of the episodes.

    Each call renews the limit of CPU time: it is more than all of them can use until the last of them is late.
    """
    decoder = msgspec.msgpack.Decoder(list[ToHost])

    def take(bodies: Sequence[bytes]) -> None:
        for body in bodies:
            isolation.limit_cpu(cpu_s)
            for message in decoder.decode(body):
                host.handle(message)

    def read() -> None:
        try:
            data = connection.recv(_READ_BYTES)
        except OSError:
            data = b""
        if not data:  # the pool is gone, or this is a copy of the process
            os._exit(0)
        take(list(reader.feed(data)))

    loop.add_reader(connection.fileno(), read)
    loop.call_soon(take, bodies)
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):  # of a task that an environment has started
            continue


class _Connection:
    """The worker's words to the pool, whole frames from any thread; what an environment forks is not heard."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=lambda: os.dup2(0, connection.fileno()))

    def deliver(self, body: bytes) -> None:
        """Send a message. Waits while the pool does not read."""
        if os.getpid() != self._pid:
            os._exit(0)
        with self._lock:
            try:
                self._connection.sendall(framed(body))
            except (BrokenPipeError, ConnectionResetError):
                os._exit(0)


def _watch_network(to_pool: _Connection, host: EpisodeHost, *, has_loopback: bool) -> None:
    """Tell the pool which episode, or whether the import of an environment, has asked for a network."""
    pid, is_told = os.getpid(), False

    def tell() -> None:
        nonlocal is_told
        if os.getpid() == pid and not host.asked_network() and not is_told:
            is_told = True
            to_pool.deliver(msgspec.msgpack.encode(TriedNetwork()))
        watch.is_told = False  # it is told once of each episode's call

    watch = confinement.NetworkWatch(tell, has_loopback=has_loopback)
    sys.addaudithook(watch.hear)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
