"""The filter of system calls on both architectures, played by an interpreter of its instructions; the kernel plays it
in the attacks of `tests/rewards/hostile_programs.py`."""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest
from system_calls import DENIED, DENIED_ALONE, MACHINES, numbers_of

from slipstream.jail import seccomp

pytestmark = pytest.mark.skipif(sys.platform != "linux" or sys.byteorder != "little", reason="there is no filter")

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED, DENIES, UNKNOWN = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
OWN, OTHER = 41, 42
# What depends on the arguments, and numbers that both kinds of filter have: name -> x86-64, aarch64.
CALLS = {"clone": (56, 220), "clone3": (435, 435), "socketpair": (53, 199), "prlimit64": (302, 261), "ioctl": (16, 29)}
SIGNALS = {"kill": (62, 129), "tgkill": (234, 131)}
SIGCHLD, CLONE_THREAD, CLONE_NEWUSER = 17, 0x00010000, 0x10000000
DATAGRAM, STREAM, CLOEXEC = socket.SOCK_DGRAM, socket.SOCK_STREAM, 0o2000000
UNIX, INET, INET6, NETLINK = 1, 2, 10, 16
NUM_CALLS = 1024

Answer = Callable[..., int]


@pytest.fixture(params=MACHINES)
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, Answer]]:
    """Install a filter on a machine of each architecture: (machine, answer to a call by its number and arguments)."""

    def install(**options: Any) -> tuple[str, Answer]:
        programs: list[bytes] = []

        class Library:
            def prctl(self, option: int, mode: int, program: bytes, *_: int) -> int:
                assert (option, mode) == (22, 2)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
                length, address = struct.unpack("HxxxxxxP", program)
                programs.append(ctypes.string_at(address, 8 * length))
                return 0

        with monkeypatch.context() as patch:
            patch.setattr(platform, "machine", lambda: request.param)
            patch.setattr(ctypes, "CDLL", lambda *_, **__: Library())
            assert seccomp.install(**options)
        [program] = programs

        def answer(number: int, *arguments: int, arch: int = AUDIT_ARCH[request.param]) -> int:
            padded = [*arguments, *[0] * (6 - len(arguments))]
            return run(program, struct.pack("<iIQ6Q", number, arch, 0, *padded))

        return request.param, answer

    return install


def run(program: bytes, data: bytes) -> int:
    """Play a classic BPF program on struct seccomp_data; linux/bpf_common.h has the codes."""
    at, accumulator = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("<HBBI", program, 8 * at)
        at += 1
        if code == 0x06:  # BPF_RET
            return value
        if code == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:  # BPF_ALU | BPF_AND
            accumulator &= value
        else:  # BPF_JMP | BPF_JEQ, BPF_JGE, BPF_JSET
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize(("options", "denied"), [({}, DENIED), ({"alone_as": OWN}, DENIED_ALONE)])
def test_just_these_calls_are_denied(installed: Any, options: dict[str, Any], denied: dict[str, Any]) -> None:
    machine, answer = installed(**options)
    conditional = numbers_of(CALLS | (SIGNALS if options else {}), machine)
    found = {number for number in range(NUM_CALLS) if number not in conditional and answer(number) != ALLOWED}
    assert found == set(numbers_of(denied, machine))
    assert {answer(number) for number in found} == {DENIES}


NETWORKS = [
    ({"allow_network": True}, {"socket", "connect", "bind"}),
    ({"allow_network": True, "allow_listening": True}, {"socket", "connect", "bind", "listen", "accept", "accept4"}),
]


@pytest.mark.parametrize(("options", "allowed"), NETWORKS)
def test_a_network_is_allowed_call_by_call(installed: Any, options: dict[str, Any], allowed: set[str]) -> None:
    machine, answer = installed(**options)
    column = MACHINES.index(machine)
    now = {name for name, numbers in DENIED.items() if numbers[column] >= 0 and answer(numbers[column]) == ALLOWED}
    assert now == allowed


def test_only_sockets_of_the_internet(installed: Any) -> None:
    machine, answer = installed(allow_network=True, only_internet=True)
    [number] = numbers_of({"socket": DENIED["socket"]}, machine)
    answers = {family: answer(number, family) for family in (UNIX, INET, INET6, NETLINK)}
    assert answers == {UNIX: DENIES, INET: ALLOWED, INET6: ALLOWED, NETLINK: DENIES}


# Name, arguments, what a worker gets, what a process that stays alone gets.
CONDITIONS: list[tuple[str, tuple[int, ...], int, int]] = [
    ("clone", (SIGCHLD,), ALLOWED, DENIES),
    ("clone", (CLONE_THREAD,), ALLOWED, ALLOWED),
    ("clone", (CLONE_NEWUSER | SIGCHLD,), DENIES, DENIES),
    ("clone", (CLONE_NEWUSER | CLONE_THREAD,), DENIES, DENIES),
    ("clone3", (), UNKNOWN, UNKNOWN),
    ("kill", (OWN, 9), ALLOWED, ALLOWED),
    ("kill", (OTHER, 9), ALLOWED, DENIES),
    ("kill", (0xFFFFFFFFFFFFFFFF, 9), ALLOWED, DENIES),
    ("tgkill", (OWN, OWN, 9), ALLOWED, ALLOWED),
    ("tgkill", (OTHER, OTHER, 9), ALLOWED, DENIES),
    ("socketpair", (UNIX, STREAM), ALLOWED, ALLOWED),
    ("socketpair", (UNIX, STREAM | CLOEXEC), ALLOWED, ALLOWED),
    ("socketpair", (UNIX, DATAGRAM), DENIES, DENIES),
    ("socketpair", (INET, STREAM), DENIES, DENIES),
    ("prlimit64", (0,), ALLOWED, ALLOWED),
    ("prlimit64", (OTHER,), DENIES, DENIES),
    ("ioctl", (0, 0x5412), DENIES, DENIES),  # TIOCSTI
    ("ioctl", (0, 0x541C), DENIES, DENIES),  # TIOCLINUX
    ("ioctl", (0, 0x5413), ALLOWED, ALLOWED),
]


@pytest.mark.parametrize(("name", "arguments", "to_worker", "to_program"), CONDITIONS)
def test_what_depends_on_the_arguments(
    installed: Any, name: str, arguments: tuple[int, ...], to_worker: int, to_program: int
) -> None:
    for options, expected in (({}, to_worker), ({"alone_as": OWN}, to_program)):
        machine, answer = installed(**options)
        [number] = numbers_of({name: (CALLS | SIGNALS)[name]}, machine)
        assert answer(number, *arguments) == expected


def test_a_foreign_calling_convention_has_no_calls(installed: Any) -> None:
    """That of 32 bits, of the other architecture, and of x32 behind the same architecture."""
    machine, answer = installed()
    for arch in {0x40000003, 0x40000028, *AUDIT_ARCH.values()} - {AUDIT_ARCH[machine]}:
        assert {answer(number, arch=arch) for number in range(NUM_CALLS)} == {DENIES}
    if machine == "x86_64":
        assert {answer(0x40000000 | number) for number in range(NUM_CALLS)} == {DENIES}
