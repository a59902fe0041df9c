"""A reward worker: `python -m slipstream.rewards.worker CONNECTION LAYOUT`, started by `sandbox.py` only.

    keeper    what the pool started: waits for the end of stdin (the pool let go, or died), then kills all below
      first   first process of the process namespace, where there is one: its end is the end of everything inside
        scorer  unprivileged and limited: imports, scores, never trusted

The scorer alone talks to the pool. The modules it needs before it is confined are few, so that it starts quickly.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Sequence

import msgspec

from slipstream.core.errors import SlipstreamError
from slipstream.rewards import isolation
from slipstream.rewards.functions import Scorer, build_scorer
from slipstream.rewards.protocol import (
    MAX_ERROR_CHARS,
    FrameReader,
    Job,
    Result,
    Setup,
    SetupFailed,
    Term,
    WorkerReady,
    frame,
)

_MAX_JOB_BYTES = 1 << 30  # frames of jobs come from the trusted side


class Layout(msgspec.Struct, frozen=True):
    """Where a worker lives: its scratch folder, the folders modules are imported from, and the home it may not see."""

    scratch: str
    sys_path: list[str]
    home: str


def main(arguments: Sequence[str]) -> int:
    """Keep a scorer until stdin ends or it dies; the exit code is the scorer's, or 128 + its signal."""
    connection = int(arguments[0])
    layout = msgspec.json.decode(arguments[1], type=Layout)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    namespaces = isolation.enter_namespaces()
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        _inner(connection, layout, namespaces)
    os.close(connection)  # so that the pool sees the scorer's end at once
    code = 0
    while True:
        readable, _, _ = select.select([0, wakeup_read], [], [])
        if 0 in readable:
            break
        os.read(wakeup_read, 4096)
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


def _inner(connection: int, layout: Layout, namespaces: isolation.Namespaces) -> None:
    """The keeper's child; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    held = []
    needed = [*layout.sys_path, os.path.join(sys.base_prefix, "lib")]
    are_files_confined = False
    if namespaces.is_separate:
        isolation.die_with_parent()
        held += ["network", "processes"]
        is_other_user = namespaces.worker_uid is not None
        are_files_confined = isolation.confine_files(
            layout.scratch, needed, home=layout.home, is_other_user=is_other_user
        )
        scorer = os.fork()
        if scorer != 0:
            os.close(connection)
            os.close(0)
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
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    connection = os.dup2(connection, 3, inheritable=False)
    os.closerange(4, 4096)  # the keeper was started with three descriptors and the connection
    sys.path[:] = layout.sys_path
    try:
        serve(socket.socket(fileno=connection), held)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
    os._exit(1)


def serve(connection: socket.socket, held: list[str]) -> None:
    """Build the scorers, then answer each job of each list of jobs with one Result, in order. Ends by EOFError."""
    reader = FrameReader(_MAX_JOB_BYTES)
    bodies = _receive(connection, reader)
    setup = msgspec.msgpack.decode(bodies.pop(0), type=Setup)
    try:
        scorers = [build_scorer(term, setup.tasks) for term in setup.terms]
        _warm_up(setup.terms, scorers)
    except SlipstreamError as error:
        connection.sendall(frame(SetupFailed(error=str(error)[:MAX_ERROR_CHARS])))
        return
    except BaseException as error:  # noqa: BLE001 - the user's module may raise anything while it is imported
        connection.sendall(frame(SetupFailed(error=_describe(error))))
        return
    isolation.limit_resources(setup.memory_bytes, is_own_user="user" in held)
    connection.sendall(frame(WorkerReady(isolation=[*held, "limits"])))
    pid = os.getpid()
    decoder = msgspec.msgpack.Decoder(list[Job])
    while True:
        for body in bodies:
            for job in decoder.decode(body):
                isolation.limit_cpu(2 * setup.timeout_s)
                result = _score(scorers, setup.terms, job)
                if os.getpid() != pid:  # a verifier forked and let its child return: only one of the two may go on
                    os._exit(0)
                connection.sendall(frame(result))
        bodies = _receive(connection, reader)


def _score(scorers: Sequence[Scorer], terms: Sequence[Term], job: Job) -> Result:
    parts: list[float | None] = []
    for scorer, term in zip(scorers, terms, strict=True):
        try:
            parts.append(scorer(job))
        except BaseException as error:  # noqa: BLE001 - whatever a verifier raises (SystemExit too) fails one rollout
            return Result(job_id=job.job_id, parts=[], error=f"{term.function}: {_describe(error)}")
    return Result(job_id=job.job_id, parts=parts)


def _warm_up(terms: Sequence[Term], scorers: Sequence[Scorer]) -> None:
    """Let math_verify build its grammar now: its first call takes a second that no completion should be charged."""
    for term, scorer in zip(terms, scorers, strict=True):
        if term.function == "math":
            scorer(Job(0, "", "\\boxed{\\frac{1}{2}}", [], "", "0.5", {}))


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]


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
