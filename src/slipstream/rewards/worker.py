"""A reward worker: `python -m slipstream.rewards.worker CONNECTION LAYOUT`, started by `sandbox.py` only.

    keeper    what the pool started: waits for the end of stdin (the pool let go, or died), then kills all below
      first   first process of the process namespace, where there is one: its end is the end of everything inside
        launcher  where programs are run (`launcher.py`): starts each in a jail of its own when the scorer asks for it
        scorer    unprivileged and limited: imports, scores, never trusted

The scorer alone talks to the pool. The modules it needs before it is confined are few, so that it starts quickly.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slipstream.core.errors import SlipstreamError
from slipstream.core.lifeline import die_with_parent
from slipstream.core.user_code import MAX_ERROR_CHARS, describe
from slipstream.rewards import isolation, launcher
from slipstream.rewards.calls import Scoring, answer
from slipstream.rewards.code import Programs
from slipstream.rewards.functions import build_scoring
from slipstream.rewards.protocol import (
    AnyJob,
    Began,
    FrameReader,
    JobResult,
    RewardJob,
    SetupFailed,
    Term,
    TriedNetwork,
    WorkerReady,
    WorkerSetup,
    frame,
)

_MAX_JOB_BYTES = 1 << 30  # frames of jobs come from the trusted side
_RESOLVER = "/etc/resolv.conf"
_TOGETHER_S = 1e-3  # answers of quick jobs wait for each other for so long: each frame wakes the pool's process
_NETWORK_CALLS = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}


class WorkerLayout(msgspec.Struct, frozen=True):
    """A worker's folders: its scratch, those that modules are imported from, and those that are hidden from it."""

    scratch: str
    sys_path: list[str]
    private: list[str]
    runs_programs: bool
    allow_network: bool = False


def main(arguments: Sequence[str]) -> int:
    """Keep a scorer until stdin ends or it dies; the exit code is the scorer's, or 128 + its signal."""
    connection = int(arguments[0])
    layout = msgspec.json.decode(arguments[1], type=WorkerLayout)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    isolation.be_killed_first()
    wakeup = isolation.wake_at_childrens_ends()
    namespaces = isolation.enter_namespaces(allow_network=layout.allow_network)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        _inner(connection, layout, namespaces)
    os.close(connection)  # so that the pool sees the scorer's end at once
    code = 0
    while True:
        readable, _, _ = select.select([0, wakeup], [], [])
        if 0 in readable:
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


def _inner(connection: int, layout: WorkerLayout, namespaces: isolation.Namespaces) -> None:
    """The keeper's child; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    held = []
    needed = [*layout.sys_path, os.path.join(sys.base_prefix, "lib")]
    if layout.allow_network:
        needed.append(os.path.dirname(os.path.realpath(_RESOLVER)))  # may lie below /run
    are_files_confined = False
    if namespaces.is_separate:
        die_with_parent()
        held += ["processes"] if layout.allow_network else ["network", "processes"]
    programs = _start_launcher(connection, layout, namespaces) if layout.runs_programs else None
    if namespaces.is_separate:
        is_other_user = namespaces.worker_uid is not None
        are_files_confined = isolation.confine_files(
            layout.scratch, needed, private=layout.private, is_other_user=is_other_user
        )
        scorer = os.fork()
        if scorer != 0:
            os.close(connection)
            os.close(0)
            if programs is not None:
                programs.close()
            while True:  # reaps orphans too; ends with the scorer, and the kernel ends the rest
                pid, status = os.wait()
                if pid == scorer:
                    os._exit(_exit_code(status))
    worker_uid = namespaces.worker_uid
    if are_files_confined:
        held.append("files")
    elif worker_uid is not None and isolation.is_reachable_by_others([os.path.dirname(os.__file__), *needed]):
        os.chmod(layout.scratch, 0o777)
    else:
        worker_uid = None  # another user could not import what the terms need
    os.chdir(layout.scratch)
    held += isolation.drop_privileges(worker_uid, is_user_namespace=namespaces.is_user_namespace)
    held += isolation.filter_syscalls(held, allow_network=layout.allow_network)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    kept = [os.dup2(connection, 3, inheritable=False)]  # the first descriptor that the keeper was given
    if programs is not None:
        kept.append(os.dup2(programs.detach(), 4, inheritable=False))
    os.closerange(3 + len(kept), 4096)  # the keeper was started with three descriptors and the connection
    sys.path[:] = layout.sys_path
    try:
        serve(socket.socket(fileno=3), dict.fromkeys(held), Programs(socket.socket(fileno=4)) if programs else None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
    os._exit(1)


def _start_launcher(connection: int, layout: WorkerLayout, namespaces: isolation.Namespaces) -> socket.socket:
    """Start the launcher; return our end of the connection. It sees all files until it has entered its bare root."""
    stash = os.path.join(layout.scratch, "jail")
    os.mkdir(stash)
    about = launcher.JailLayout(
        stash=stash,
        program_uid=namespaces.program_uid,
        is_separate=namespaces.is_separate,
        is_user_namespace=namespaces.is_user_namespace,
    )
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        die_with_parent()
        isolation.keep_capabilities()
        os.close(connection)
        os.set_inheritable(theirs.fileno(), True)
        command = launcher.command(theirs.fileno(), about, package_root=str(Path(__file__).resolve().parents[2]))
        environment = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        os.execve(sys.executable, command, environment)
    theirs.close()
    return ours


def serve(connection: socket.socket, held: Iterable[str], programs: Programs | None) -> None:
    """Build the scorers, then answer each job of each list of jobs with one JobResult, in order. Ends by EOFError.

    `held` are the barriers around this process; of those, what does not hold around programs too is not reported.
    """
    reader = FrameReader(_MAX_JOB_BYTES)
    bodies = _receive(connection, reader)
    setup = msgspec.msgpack.decode(bodies.pop(0), type=WorkerSetup)
    to_pool = _ToPool(connection)
    network = _NetworkWatch(to_pool)
    if not setup.allow_network:
        sys.addaudithook(network.hear)
    terms: list[Scoring] = []
    for term in setup.terms:
        try:
            terms.append(build_scoring(term, setup.tasks, programs=programs, timeout_s=setup.timeout_s))
            _warm_up(term, terms[-1])
        except SlipstreamError as error:
            to_pool.send(SetupFailed(error=str(error)[:MAX_ERROR_CHARS]))
            return
        except BaseException as error:  # noqa: BLE001 - the user's module may raise anything while it is imported
            to_pool.send(SetupFailed(error=f"{term.label}: {describe(error)}"))
            return
    isolation.limit_resources(setup.memory_bytes, is_own_user="user" in held)
    around_programs = programs.probe() if programs is not None else None
    reported = [name for name in (*held, "limits") if around_programs is None or name in around_programs]
    to_pool.send(WorkerReady(isolation=reported))
    pid = os.getpid()
    decoder = msgspec.msgpack.Decoder(list[AnyJob])
    num_of_kind = Counter(term.per for term in terms)

    def began(index: int) -> None:
        if is_alone and num_of_kind[terms[index].per] > 1:
            to_pool.send(Began(index))

    while True:
        for body in bodies:
            jobs = decoder.decode(body)
            is_alone = len(jobs) == 1  # else the pool asks again where one fails (`ScoringPool`)
            for job in jobs:
                isolation.limit_cpu(2 * setup.timeout_s)
                network.is_told = False
                result = answer(terms, job, began)
                if os.getpid() != pid:  # a verifier forked and let its child return: only one of the two may go on
                    os._exit(0)
                to_pool.answer(result)
            to_pool.flush()
        bodies = _receive(connection, reader)


class _ToPool:
    """The scorer's words to the pool, in order."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unsent = bytearray()
        os.register_at_fork(after_in_child=self._unsent.clear)  # what a verifier forks must not answer a second time
        self._sent_s = 0.0

    def send(self, message: msgspec.Struct) -> None:
        self._unsent += frame(message)
        self.flush()

    def answer(self, result: JobResult) -> None:
        """Send `result` with those that come within `_TOGETHER_S` of each other; `flush` sends the rest."""
        self._unsent += frame(result)
        if time.monotonic() - self._sent_s >= _TOGETHER_S:
            self.flush()

    def flush(self) -> None:
        if self._unsent:
            self._connection.sendall(self._unsent)
            self._unsent.clear()
        self._sent_s = time.monotonic()


class _NetworkWatch:
    """Tells the pool, once a job, that Python was asked for a network: the error that follows seldom says why."""

    def __init__(self, to_pool: _ToPool) -> None:
        self._to_pool = to_pool
        self.is_told = False

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook."""
        if not event.startswith("socket.") or self.is_told:
            return
        is_socket = event == "socket.__new__" and arguments[1] in (socket.AF_INET, socket.AF_INET6)
        if is_socket or event in _NETWORK_CALLS:
            self.is_told = True
            self._to_pool.send(TriedNetwork())


def _warm_up(term: Term, scoring: Scoring) -> None:
    """Let math_verify build its grammar now: its first call takes a second that no completion should be charged."""
    if term.function == "math":
        scoring.scores([RewardJob(0, "", "\\boxed{\\frac{1}{2}}", [], "", "0.5", {})])


def _receive(connection: socket.socket, reader: FrameReader) -> list[bytes]:
    """The next frames, at least one; EOFError when the pool is gone."""
    while True:
        data = connection.recv(1 << 18)
        if not data:
            raise EOFError
        if bodies := list(reader.feed(data)):
            return bodies


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
