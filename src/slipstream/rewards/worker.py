"""A reward worker: `python -m slipstream.rewards.worker CONNECTION LAYOUT`, started by `pool.py` only.

Its processes are those of `jail/confinement.py`. The server is the scorer; the helper, where programs are run, is the
launcher (`launcher.py`), which starts each in a jail of its own when the scorer asks for it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from slipstream.core.errors import SlipstreamError
from slipstream.core.lifeline import die_with_parent
from slipstream.core.user_code import MAX_ERROR_CHARS, describe
from slipstream.jail import confinement, isolation
from slipstream.jail.protocol import (
    FrameReader,
    SetupFailed,
    TriedNetwork,
    WorkerReady,
    frame,
    receive_frames,
)
from slipstream.rewards import launcher
from slipstream.rewards.calls import Scoring, answer
from slipstream.rewards.code import Programs
from slipstream.rewards.functions import build_scoring
from slipstream.rewards.protocol import AnyJob, Began, JobResult, RewardJob, Term, WorkerSetup

_MAX_JOB_BYTES = 1 << 30  # frames of jobs come from the trusted side
_TOGETHER_S = 1e-3  # answers of quick jobs wait for each other for so long: each frame wakes the pool's process
_LOOK_EVERY = 256  # jobs; also the fewest for which a worker is started anew because little memory is left
_FULL, _LEFT_BEHIND = 0.9, 0.1  # shares of the memory that jobs may use


def main(arguments: Sequence[str]) -> int:
    """Keep a scorer, as `confinement.keep`."""
    return confinement.keep(arguments, serve, start_helper=_start_launcher)


def _start_launcher(
    connection: int, layout: confinement.WorkerLayout, namespaces: isolation.Namespaces
) -> socket.socket:
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


def serve(connection: socket.socket, held: Sequence[str], to_launcher: socket.socket | None) -> None:
    """Build the scorers, then answer each job of each list of jobs with one JobResult, in order. Ends by EOFError.

    `held` are the barriers around this process; of those, what does not hold around programs too is not reported.
    """
    programs = None if to_launcher is None else Programs(to_launcher)
    reader = FrameReader(_MAX_JOB_BYTES)
    bodies = receive_frames(connection, reader)
    setup = msgspec.msgpack.decode(bodies.pop(0), type=WorkerSetup)
    to_pool = _ToPool(connection)
    network = confinement.NetworkWatch(lambda: to_pool.send(TriedNetwork()))
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
    memory = _Memory(setup.memory_bytes)
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
            to_pool.began_s = time.monotonic()
            for job in jobs:
                isolation.limit_cpu(2 * setup.timeout_s)
                network.is_told = False
                result = answer(terms, job, began)
                if os.getpid() != pid:  # a verifier forked and let its child return: only one of the two may go on
                    os._exit(0)
                to_pool.answer(memory.judge(result))
            to_pool.flush()
        bodies = receive_frames(connection, reader)


class _Memory:
    """How much of the `room_bytes` of address space that jobs may use is taken by what earlier ones have left."""

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes, self._first_bytes = room_bytes, isolation.address_space_bytes()
        self._num_answered = 0

    def judge(self, result: JobResult) -> JobResult:
        """Return `result`, exhausted where little is left, or where it had a MemoryError and some is gone for good."""
        self._num_answered += 1
        if not result.is_exhausted and self._num_answered % _LOOK_EVERY:
            return result
        most_bytes = (_LEFT_BEHIND if result.is_exhausted else _FULL) * self._room_bytes
        try:
            is_exhausted = isolation.address_space_bytes() - self._first_bytes > most_bytes
        except (OSError, MemoryError):  # no file can be opened any more, or nothing allocated
            is_exhausted = True
        return msgspec.structs.replace(result, is_exhausted=is_exhausted)


class _ToPool:
    """The scorer's words to the pool, in order."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unsent = bytearray()
        os.register_at_fork(after_in_child=self._unsent.clear)  # what a verifier forks must not answer a second time
        self.began_s = 0.0  # with what has not been answered

    def send(self, message: msgspec.Struct) -> None:
        self._unsent += frame(message)
        self.flush()

    def answer(self, result: JobResult) -> None:
        """Send `result` with those that come within `_TOGETHER_S` of work; `flush` sends the rest."""
        self._unsent += frame(result)
        if time.monotonic() - self.began_s >= _TOGETHER_S:
            self.flush()

    def flush(self) -> None:
        if self._unsent:
            self._connection.sendall(self._unsent)
            self._unsent.clear()
        self.began_s = time.monotonic()


def _warm_up(term: Term, scoring: Scoring) -> None:
    """Let math_verify build its grammar now: its first call takes a second that no completion should be charged."""
    if term.function == "math":
        scoring.scores([RewardJob(0, "", "\\boxed{\\frac{1}{2}}", [], "", "0.5", {})])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
