"""Reward functions that do what hostile completions try to make verifiers do. Imported by workers only."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

_KEPT: list[bytes] = []


def _fork_and_hide(count: int) -> int:
    started = 0
    for _ in range(count):
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            try:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(600)
            finally:
                os._exit(0)
        started += 1
    return started


def _network() -> float:
    try:
        socket.create_connection(("127.0.0.1", int(os.environ.get("PORT", "9"))), timeout=0.2)
    except OSError as error:
        return 0.0 if "unreachable" in str(error).lower() or error.errno == errno.EPERM else -1.0
    return 1.0


def _files_of(count: int) -> float:
    """Make empty files, as many as it can up to `count`."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for number in range(count):
            try:
                Path(folder, str(number)).touch()
            except OSError:
                return float(number)
    return float(count)


def attack(completions: list[str], **columns: Any) -> list[float]:
    """Does what the completion says and returns a number about it."""
    command, _, argument = completions[0].partition(" ")
    if command == "ok":
        return [1.0]
    if command == "loop":
        while True:
            pass
    if command == "memory":
        return [float(len([0] * (1 << 30)))]  # 8 GiB
    if command == "keep":  # KiB, for ever; they are zeros that are never touched
        _KEPT.append(bytes(int(argument) << 10))
        return [1.0]
    if command == "keep_all":
        while True:
            _KEPT.append(bytes(10 << 20))
    if command == "need":  # MiB, for now
        return [float(len(bytes(int(argument) << 20)) >> 20)]
    if command == "fork":
        _fork_and_hide(200)
        return [1.0]
    if command == "fork_and_hang":
        _fork_and_hide(200)
        time.sleep(600)
    if command == "fork_and_die":
        _fork_and_hide(20)
        os._exit(7)
    if command == "stdout":
        os.write(1, b"x" * 100_000_000)
        print("y" * 10_000_000)  # noqa: T201
        return [1.0]
    if command == "flood":  # onto the connection itself
        for fd in range(3, 10):
            try:
                os.write(fd, b"\xff" * 100_000_000)
            except OSError:
                continue
        time.sleep(600)
    if command == "forge":
        for fd in range(3, 10):
            try:
                os.write(fd, b"\x05\x00\x00\x00\x93\x01\x91\x01\xc0")
            except OSError:
                continue
    if command == "fork_and_call":
        if (pid := os.fork()) == 0:
            _network()
            os._exit(0)
        os.waitpid(pid, 0)
        return [1.0]
    if command == "fork_and_return":
        os.fork()
        return [1.0]
    if command == "raise":
        raise ValueError("z" * 1_000_000)
    if command == "exit":
        raise SystemExit(0)
    if command == "nan":
        return [float("nan")]
    if command == "many":
        return [1.0] * 100
    if command == "text":
        return ["not a number"]  # type: ignore[list-item]
    if command == "write":
        Path(argument).write_text("was here")
        return [1.0]
    if command == "read":
        return [float(len(Path(argument).read_text()))]
    if command == "scratch":
        Path("note.txt").write_text("fine")
        return [float(len(Path("note.txt").read_text()))]
    if command == "fill":
        with open("big", "wb") as file:
            for _ in range(200):
                file.write(b"x" * (1 << 20))
        return [1.0]
    if command == "network":
        return [_network()]
    if command == "environment":
        return [float("SLIPSTREAM_TEST_SECRET" in os.environ)]
    if command == "descriptors":
        return [float(len(os.listdir("/proc/self/fd")))]
    if command == "processes":
        return [float(sum(name.isdigit() for name in os.listdir("/proc")))]
    if command == "identity":
        return [float(os.getuid() == 0 or os.access("/etc/shadow", os.R_OK))]
    if command == "oom":
        return [float(Path("/proc/self/oom_score_adj").read_text())]
    if command == "core":
        return [float(max(resource.getrlimit(resource.RLIMIT_CORE), key=abs))]
    if command == "inodes":
        return [_files_of(int(argument))]
    if command == "ipc":
        return [float(os.readlink("/proc/self/ns/ipc") == argument)]
    if command == "terminate":  # a child of its own
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        os.kill(pid, signal.SIGTERM)
        return [float(os.WTERMSIG(os.waitpid(pid, 0)[1]))]
    if command == "closes":
        os.closerange(3, 100)
        time.sleep(600)
    raise AssertionError(command)
