"""Starts programs in jails: the one process of a worker that keeps its privileges, and never sees what it starts.

    python -P -s -S -X utf8 -c "...; launcher.main(CONNECTION, LAYOUT)"

A clean interpreter with the standard library in memory, from which a program is forked in a millisecond. Requests come
from the scorer, as a few numbers and descriptors; texts, inputs and outputs are files that are handed through unread.
Each process is the first of namespaces of its own, another user, without privileges, in an empty folder; it is ended
at the deadline, or when the scorer lets go.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NoReturn

from slipstream.core.interrupts import end_forked_as_usual, leave_to_the_run
from slipstream.jail import isolation
from slipstream.rewards import jailed

REQUEST = struct.Struct("<BdQQ")  # what, seconds, bytes of memory, bytes of a file
REPLY = struct.Struct("<ib")  # exit code or minus the signal, whether it was too late
PROBE, SCRIPT, TESTS = range(3)
MAX_DESCRIPTORS = 3

_PRELOADED = (  # what programs import most, beside what is here already; who imports something else pays for it
    *("array", "bisect", "collections", "copy", "datetime", "decimal", "enum", "fractions", "functools", "heapq"),
    *("itertools", "math", "operator", "queue", "random", "re", "statistics", "string", "textwrap", "typing"),
)


@dataclass(frozen=True)
class JailLayout:
    """The folder of the jails, and the result of `isolation.enter_namespaces`."""

    stash: str  # an empty folder
    program_uid: int | None
    is_separate: bool
    is_user_namespace: bool


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of one process in a jail."""

    seconds: float
    memory_bytes: int
    file_bytes: int


def command(connection: int, layout: JailLayout, package_root: str) -> list[str]:
    """The command line of a launcher."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from slipstream.rewards import launcher; del sys.path[0]; "
        "launcher.main(int(sys.argv[2]), sys.argv[3])"
    )
    options = ["-P", "-s", "-S", "-X", "utf8"]  # not -I: that would have each worker order its sets differently
    return [sys.executable, *options, "-c", code, package_root, str(connection), json.dumps(asdict(layout))]


def main(connection: int, layout: str) -> NoReturn:
    launcher = _Launcher(socket.socket(fileno=connection), JailLayout(**json.loads(layout)))
    try:
        launcher.serve()
    except (EOFError, ConnectionError, BrokenPipeError):
        os._exit(0)


class _Launcher:
    """One request at a time."""

    def __init__(self, connection: socket.socket, layout: JailLayout) -> None:
        self._connection, self._layout = connection, layout
        for name in _PRELOADED:
            importlib.import_module(name)
        self._wakeup = isolation.wake_at_childrens_ends()
        leave_to_the_run()
        end_forked_as_usual()
        self._null = os.open(os.devnull, os.O_RDWR)
        self._used_bytes = isolation.address_space_bytes()
        self._own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY) if layout.is_separate else -1
        library = os.path.join(sys.base_prefix, "lib")
        self._is_bare = layout.is_separate and isolation.enter_bare_root(layout.stash, [library])
        isolation.become_unreadable()
        gc.collect()
        gc.freeze()  # or the children's collections would copy every page

    def serve(self) -> NoReturn:
        """Consumes requests, replies to each. Ends by EOFError when the scorer has ended."""
        while True:
            request, files, _, _ = socket.recv_fds(self._connection, REQUEST.size, MAX_DESCRIPTORS)
            try:
                if not request:
                    raise EOFError
                what, seconds, memory_bytes, file_bytes = REQUEST.unpack(request)
                code, is_late = self._run(what, ProcessLimits(seconds, memory_bytes, file_bytes), files)
            finally:
                for file in files:
                    os.close(file)
            self._connection.sendall(REPLY.pack(code, is_late))

    def _run(self, what: int, limits: ProcessLimits, files: list[int]) -> tuple[int, bool]:
        null = self._null
        deadline_s = time.monotonic() + limits.seconds
        if what == PROBE:
            return self._wait([self._start(limits, [null, files[0], null], self._tell)], deadline_s)
        if what == SCRIPT:
            program, given, printed = files
            child = self._start(limits, [given, printed, null, program], lambda _: jailed.run_script(3))
            return self._wait([child], deadline_s)
        program, tests, verdicts = files
        ours, theirs = socket.socketpair()
        with ours, theirs:
            served = [null, null, null, program, ours.fileno()]
            testing = [null, null, null, tests, theirs.fileno(), verdicts]
            children = [
                self._start(limits, testing, lambda _: jailed.run_tests(3, 4, 5)),
                self._start(limits, served, lambda _: jailed.serve_calls(3, 4)),
            ]
        return self._wait(children, deadline_s)

    @staticmethod
    def _tell(held: list[str]) -> None:
        os.write(1, " ".join(held).encode())
        os._exit(0)

    def _start(self, limits: ProcessLimits, files: list[int], body: Callable[[list[str]], None]) -> int:
        is_separate = self._layout.is_separate and isolation.begin_process_namespace()
        try:
            child = os.fork()
        finally:
            if is_separate and os.getpid() != 1:
                isolation.end_process_namespace(self._own_namespace)
        if child == 0:
            try:
                body(self._confine(limits, files, is_separate=is_separate))
            finally:
                os._exit(2)
        return child

    def _confine(self, limits: ProcessLimits, files: list[int], *, is_separate: bool) -> list[str]:
        """In the new process: give up everything. What holds then, by name."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        held = []
        if is_separate:
            held.append("processes")
            if isolation.leave_all_others("/tmp" if self._is_bare else None):
                held += ["network", "files"] if self._is_bare else ["network"]
        os.chdir("/tmp" if self._is_bare else "/")
        os.environ.clear()
        held += isolation.drop_privileges(self._layout.program_uid, is_user_namespace=self._layout.is_user_namespace)
        above = [os.dup(file) for file in files]  # so that none is overwritten before its turn
        assert min(above) >= len(files)
        for number, file in enumerate(above):
            os.dup2(file, number)
        os.closerange(len(files), 1024)
        isolation.limit_resources(
            limits.memory_bytes,
            is_own_user="user" in held,
            used_bytes=self._used_bytes,
            file_bytes=limits.file_bytes,
        )
        isolation.limit_cpu(limits.seconds)
        isolation.become_unreadable()
        held += isolation.filter_syscalls(held, alone_as=os.getpid())
        return [*held, "limits"]

    def _wait(self, children: list[int], deadline_s: float) -> tuple[int, bool]:
        """Wait for the first of `children`, then end all. Unblocked by: its end, the deadline, the scorer's end."""
        first, is_late = children[0], False
        code: int | None = None
        while code is None:
            pid, status = os.waitpid(first, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                children = children[1:]
                break
            timeout_s = deadline_s - time.monotonic()
            if timeout_s <= 0:
                is_late = True
                break
            connection = self._connection.fileno()
            readable, _, _ = select.select([self._wakeup, connection], [], [], timeout_s)
            if connection in readable:  # nobody asks before the answer: the scorer is gone
                self._end(children)
                raise EOFError
            if readable:
                os.read(self._wakeup, 4096)
        self._end(children)
        return (-signal.SIGKILL if code is None else code), is_late

    def _end(self, children: list[int]) -> None:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if not self._layout.is_separate:  # nothing else ends what a program without a filter has started
            isolation.kill_descendants()
