"""The nursery: the process from which those of a run are forked. It has imported once what all of them need.

    python -m slipstream.core.lifeline PARENT slipstream.controller.forking DESCRIPTOR [MODULE ...]

A forked process is the controller's child, not the nursery's: the nursery forks twice, and the controller adopts the
orphan (`PR_SET_CHILD_SUBREAPER`). So it dies with the controller, and its exit status is the controller's to read. What
differs from process to process (environment, search path, number of threads) comes with the request. Forking is safe
because the nursery has a single thread; if an import has started others, the forked process becomes a new interpreter
at once, which imports for itself.

Waits for: requests of `nursery.py`. Ends when: the controller closes the socket, or dies.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import setproctitle

from slipstream.controller.nursery import HEADER_BYTES, received
from slipstream.core import lifeline

PRELOADED = (
    "slipstream.controller.process",
    "slipstream.controller.weights",
    "slipstream.generator.executor",
    "slipstream.generator.native",
    "slipstream.rewards.executor",
    "slipstream.trainer.executor",
)
"""Modules that most processes of a run import. One that cannot be imported fails where it is needed."""


def main(descriptor: int, *also: str) -> None:
    """Import PRELOADED and the modules `also`, then fork a process for each request."""
    setproctitle.getproctitle()  # finds its place in memory, for which the environment must be as it was
    connection = socket.socket(fileno=descriptor)
    gc.disable()  # imports leave hardly any garbage, and a search of all that torch has made takes long
    for module in (*PRELOADED, *also):
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    lifeline.live_on()  # from here on the socket tells when the controller has ended
    gc.freeze()  # nor is it searched in the processes that are forked, which so share its memory
    is_single = len(os.listdir("/proc/self/task")) == 1
    while True:
        try:
            header, fds, _, _ = socket.recv_fds(connection, HEADER_BYTES, 16)
            request = json.loads(received(connection, int.from_bytes(header))) if header else None
        except (OSError, ValueError):
            return
        if request is None:
            return
        try:
            _fork(connection, request, fds, is_single=is_single)
        finally:
            for fd in fds:
                os.close(fd)


def _fork(connection: socket.socket, request: Mapping[str, Any], fds: Sequence[int], *, is_single: bool) -> None:
    """Fork the process of `request`; it is an orphan, adopted by the controller, before it goes on."""
    go, tell = os.pipe()
    try:
        between = os.fork()
    except OSError:  # too many processes
        os.close(go)
        os.close(tell)
        connection.sendall(bytes(HEADER_BYTES))
        return
    if between == 0:
        code = 1
        try:
            if os.fork() == 0:
                os.close(tell)
                os.read(go, 1)  # the end of file: the process between has ended
                os.close(go)
                _become(connection, request, fds, is_single=is_single)
            code = 0
        finally:
            os._exit(code)
    os.close(go)
    if os.waitpid(between, 0)[1]:
        connection.sendall(bytes(HEADER_BYTES))
    os.close(tell)


def _become(connection: socket.socket, request: Mapping[str, Any], fds: Sequence[int], *, is_single: bool) -> NoReturn:
    """Turn this fork of the nursery into the process of `request`, and run it to its end."""
    code = 1
    try:
        stdin, log, folder, *kept = fds
        os.setsid()
        lifeline.die_with_parent(parent=request["parent"])
        os.fchdir(folder)
        for target, fd in enumerate((stdin, log, log)):
            os.dup2(fd, target)
        for fd in (stdin, log, folder):
            os.close(fd)
        for fd in kept:
            os.set_inheritable(fd, True)
        gc.enable()
        os.environ.clear()
        os.environ.update(request["environment"])
        connection.sendall(os.getpid().to_bytes(HEADER_BYTES))
        connection.close()
        if not is_single:
            command = lifeline.command("slipstream.controller.process", *request["arguments"])
            command[command.index(str(os.getpid()))] = str(request["parent"])
            os.execv(command[0], command)
        sys.path[:] = request["path"]
        code = _serve(request["arguments"])
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _serve(arguments: Sequence[str]) -> int:
    from slipstream.controller.process import MODULE
    from slipstream.controller.process import main as serve

    setproctitle.setproctitle(" ".join((sys.executable, "-m", MODULE, *arguments)))
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # the library has read the nursery's
    try:
        return serve(list(arguments))
    except Exception:  # noqa: BLE001 - as an interpreter does with what nobody has caught
        sys.excepthook(*sys.exc_info())
        return 1


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
