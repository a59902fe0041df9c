"""The untrusted end of a worker up to where it serves: a kind of worker is a module that calls `keep`.

    keeper    what the pool started: waits for the end of stdin (the pool let go, or died), then kills all below
      first   first process of the process namespace, where there is one: its end is the end of everything inside
        helper    where the kind of worker has one: forked before the rest is confined, for work between the two
        server    unprivileged and limited: imports the user's code, serves, never trusted

The server alone talks to the pool. The modules it needs before it is confined are few, so that it starts quickly.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from slipstream.core.interrupts import end_forked_as_usual, leave_to_the_run
from slipstream.core.lifeline import die_with_parent
from slipstream.jail import isolation

_RESOLVER = "/etc/resolv.conf"
_OWN_ADDRESSES = ("127.0.0.1", "localhost", b"127.0.0.1", b"localhost", None, "")
_NETWORK_CALLS = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}

Serve = Callable[[socket.socket, Sequence[str], socket.socket | None], None]
"""(connection to the pool, barriers that hold, connection to the helper): serves until EOFError."""


class WorkerLayout(msgspec.Struct, frozen=True):
    """A worker's folders: its scratch, those of modules and of programs that it may see, and those that it may not."""

    scratch: str
    sys_path: list[str]
    private: list[str]
    has_helper: bool = False
    network: isolation.Network = "none"
    listens: bool = False
    programs: list[str] = []


StartHelper = Callable[[int, WorkerLayout, isolation.Namespaces], socket.socket]
"""(descriptor of the pool's connection, which the helper closes; layout; namespaces): our end of its connection."""


def keep(arguments: Sequence[str], serve: Serve, *, start_helper: StartHelper | None = None) -> int:
    """Keep a server until stdin ends or it dies; the exit code is the server's, or 128 + its signal.

    `arguments`: the descriptor of the connection, and the layout as JSON.
    """
    connection = int(arguments[0])
    layout = msgspec.json.decode(arguments[1], type=WorkerLayout)
    leave_to_the_run()
    isolation.be_killed_first()
    wakeup = isolation.wake_at_childrens_ends()
    namespaces = isolation.enter_namespaces(network=layout.network)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        _inner(connection, layout, namespaces, serve, start_helper if layout.has_helper else None)
    code = 0  # `connection` stays open: the pool sees its end with ours, so a server that closes it is merely silent
    while True:
        readable, _, _ = select.select([0, wakeup], [], [])
        if 0 in readable:
            os.kill(child, signal.SIGKILL)  # without /proc `kill_descendants` finds nothing, and waits
            break
        os.read(wakeup, 4096)
        pid, status = os.waitpid(-1, os.WNOHANG)
        while pid > 0 and pid != child:
            pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            code = _exit_code(status)
            break
    isolation.kill_descendants()
    shutil.rmtree(layout.scratch, ignore_errors=True)  # here too: the pool may have been killed
    return code


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _inner(
    connection: int,
    layout: WorkerLayout,
    namespaces: isolation.Namespaces,
    serve: Serve,
    start_helper: StartHelper | None,
) -> None:
    """The keeper's child; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    held = []
    needed = [*layout.sys_path, *layout.programs, os.path.join(sys.base_prefix, "lib")]
    if layout.network == "host":
        needed.append(os.path.dirname(os.path.realpath(_RESOLVER)))  # may lie below /run
    are_files_confined = False
    if namespaces.is_separate:
        die_with_parent()
        held += ["processes"] if layout.network == "host" else ["network", "processes"]
    helper = None if start_helper is None else start_helper(connection, layout, namespaces)
    if namespaces.is_separate:
        is_other_user = namespaces.worker_uid is not None
        are_files_confined = isolation.confine_files(
            layout.scratch, needed, private=layout.private, is_other_user=is_other_user
        )
        _fork_server(connection, helper)
    worker_uid = namespaces.worker_uid
    if are_files_confined:
        held.append("files")
    elif worker_uid is not None and isolation.is_reachable_by_others([os.path.dirname(os.__file__), *needed]):
        os.chmod(layout.scratch, 0o777)
    else:
        worker_uid = None  # another user could not import what the worker needs
    os.chdir(layout.scratch)
    held += isolation.drop_privileges(worker_uid, is_user_namespace=namespaces.is_user_namespace)
    network = layout.network if layout.network != "gateway" or namespaces.has_loopback else "none"
    held += isolation.filter_syscalls(held, network=network, listens=layout.listens)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    kept = [os.dup2(connection, 3, inheritable=False)]  # the first descriptor that the keeper was given
    if helper is not None:
        kept.append(os.dup2(helper.detach(), 4, inheritable=False))
    os.closerange(3 + len(kept), 4096)  # the keeper was started with three descriptors and the connection
    sys.path[:] = layout.sys_path
    end_forked_as_usual()  # the user's code may terminate what it forks
    try:
        serve(socket.socket(fileno=3), list(dict.fromkeys(held)), socket.socket(fileno=4) if helper else None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
    os._exit(1)


def _fork_server(connection: int, helper: socket.socket | None) -> None:
    """Return in the server, a new process. The first process of the namespace stays in here, and ends with it."""
    server = os.fork()
    if server == 0:
        return
    os.close(connection)
    os.close(0)
    if helper is not None:
        helper.close()
    while True:  # reaps orphans too; ends with the server, and the kernel ends the rest
        pid, status = os.wait()
        if pid == server:
            os._exit(_exit_code(status))


class NetworkWatch:
    """Calls `tell`, once until `is_told` is reset, when Python is asked for a network; or, with `has_loopback`, for
    another address than its own.

    The error that follows seldom says why.
    """

    def __init__(self, tell: Callable[[], None], *, has_loopback: bool = False) -> None:
        self._tell, self._has_loopback = tell, has_loopback
        self.is_told = False

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook."""
        if not event.startswith("socket.") or self.is_told:
            return
        if event in _NETWORK_CALLS:
            is_asked = not self._has_loopback or arguments[0] not in _OWN_ADDRESSES
        elif self._has_loopback:
            address = arguments[1] if event == "socket.connect" else None
            is_asked = isinstance(address, tuple) and address[0] not in _OWN_ADDRESSES
        else:
            is_asked = event == "socket.__new__" and arguments[1] in (socket.AF_INET, socket.AF_INET6)
        if is_asked:
            self.is_told = True
            self._tell()
