"""Code that runs in a jail: a program alone, or in two jails a program's functions and their tests.

    run_script      the program alone: its standard input and output are files
    serve_calls     the program as a module whose functions others call
    run_tests       the tests, in another process: names they do not define are the program's, called over a socket

A test never shares an interpreter with the code it tests. What comes back over the socket is plain data, or a handle to
an object that stays where it is, so no `__eq__`, patched builtin or early exit of the program reaches an assertion, and
nothing the tests expect reaches the program. Both ends are in jails; what counts are the tests' verdicts.

Only the standard library; a process is forked with this in memory, and ends in one of these functions.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import json
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType, ModuleType
from typing import Any, NoReturn

MAX_FRAME_BYTES = 4 << 20
_MAX_HANDLES = 10_000
_DECIMAL_BELOW = 1 << 1024  # Python writes no integer of more than 4,300 digits, and takes time by their square
_LENGTH = struct.Struct("<I")
PASSED, FAILED, IDLE = b"1", b"0", b"?"
"""Verdicts on tests; IDLE where one has ended well and asked nothing of the program."""


def run_script(program: int) -> NoReturn:
    """Run the program in file `program` as `__main__`. Exit code 0 when it ended by itself without an exception."""
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, argv=["program.py"])
    atexit._clear()
    code = 1
    try:
        _execute(_compiled(program), _module("__main__"))
        code = 0
    except SystemExit as end:
        code = 0 if end.code is None or end.code == 0 else 1
    except BaseException:  # noqa: BLE001 - a program may raise anything; its code says so
        code = 1
    _finish(code)


def _finish(code: int) -> NoReturn:
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # joins threads, those of executors too
        atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.__stdout__)):
            stream.flush()
    except BaseException:  # noqa: BLE001 - standard output may be full, or anything by now
        code = 1
    os._exit(code)


def serve_calls(program: int, peer: int) -> NoReturn:
    """Run the program as a module, then answer what is asked of it over `peer` until that closes.

    Consumes: requests. Ends when: the tests' process has ended.
    """
    module = _module("program")
    try:
        _execute(_compiled(program), module)
    except BaseException:  # noqa: BLE001 - without a program there is nobody to ask: every test fails
        os._exit(1)
    served = _Served(vars(module))
    try:
        while True:
            request = _receive(peer)
            try:
                body = _body({"value": served.answer(request)})
            except BaseException as error:  # noqa: BLE001 - it is the tests that this exception is for
                body = _body({"raised": [type(error).__name__, str(error)[:1000]]})
            _send(peer, body)
    except BaseException:  # noqa: BLE001
        os._exit(0)


def run_tests(tests: int, peer: int, verdicts: int) -> NoReturn:
    """Run the tests in file `tests` (JSON: seconds for each, sources) and write a verdict on each in turn.

    Ends when all have one, or the program is lost: those behind are to be asked of a new one.
    """
    with open(tests, encoding="utf-8") as file:
        seconds, sources = json.load(file)
    program = _Program(peer)
    scope = _Scope(program)
    signal.signal(signal.SIGALRM, _too_late)
    for source in sources:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        program.is_asked = False
        try:
            exec(compile(source, "tests.py", "exec", dont_inherit=True), scope)
            verdict = PASSED if program.is_asked else IDLE
        except BaseException as error:  # noqa: BLE001 - whatever a test raises, it did not pass
            verdict = FAILED
            program.is_lost |= isinstance(error, _TooLateError)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(verdicts, verdict)
        if program.is_lost:
            break
    os._exit(0)


class _TooLateError(BaseException):
    """Not an Exception: a test that expects one has not got what it expects."""


class _LostError(BaseException):
    """The program has ended, hangs, or talks nonsense."""


def _too_late(_number: int, _frame: FrameType | None) -> None:
    raise _TooLateError


def _compiled(file: int) -> CodeType:
    with open(file, encoding="utf-8") as source:
        return compile(source.read(), "program.py", "exec", dont_inherit=True)


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module
    return module


def _execute(code: CodeType, module: ModuleType) -> None:
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # the module `site`, which has not been imported, makes them
    exec(code, vars(module))


def _body(message: Any) -> bytes:
    body = json.dumps(message).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a value of {len(body)} bytes, at most {MAX_FRAME_BYTES} allowed")
    return body


def _send(peer: int, body: bytes) -> None:
    data = memoryview(_LENGTH.pack(len(body)) + body)
    while data:
        data = data[os.write(peer, data) :]


def _receive(peer: int) -> Any:
    """The next message. EOFError when the other side has ended; ValueError or RecursionError for nonsense."""
    (length,) = _LENGTH.unpack(_read(peer, _LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES} allowed")
    return json.loads(_read(peer, length))


def _read(peer: int, size: int) -> bytes:
    parts = []
    while size:
        data = os.read(peer, min(size, 1 << 16))
        if not data:
            raise EOFError
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


_OPERATIONS: dict[str, Callable[[Any], Any]] = {"list": list, "len": len, "str": str, "repr": repr, "bool": bool}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def _encode(value: Any, refer: Callable[[Any], int]) -> Any:
    """`value` in JSON: plain data with its types; `refer` numbers what is none."""
    if isinstance(value, int) and abs(value) >= _DECIMAL_BELOW:
        return {"int": hex(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {"dict": [[_encode(key, refer), _encode(item, refer)] for key, item in value.items()]}
    for name, kind in (("list", list), ("tuple", tuple), ("frozenset", frozenset), ("set", set)):
        if isinstance(value, kind):
            return {name: [_encode(item, refer) for item in value]}
    return {"handle": refer(value)}


def _decode(data: Any, resolve: Callable[[int], Any]) -> Any:
    """Inverse of `_encode`. ValueError or TypeError for anything else."""
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("malformed value")
    [(kind, content)] = data.items()
    if kind == "int":
        return int(content, 16)
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {_decode(key, resolve): _decode(item, resolve) for key, item in content}
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decode(item, resolve) for item in content)
    if kind == "handle":
        return resolve(content)
    raise ValueError("malformed value")


class _Served:
    """The program's end: does with its objects what it is asked to."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}  # by the object's id

    def answer(self, request: Any) -> Any:
        operation, target, *arguments = request
        subject = self._names[target] if isinstance(target, str) else self._objects[target]
        return _encode(self._do(operation, subject, arguments), self._refer)

    def _do(self, operation: str, subject: Any, arguments: list[Any]) -> Any:
        if operation == "get":
            return subject
        if operation == "call":
            args, kwargs = (_decode(argument, self._objects.__getitem__) for argument in arguments)
            return subject(*args, **kwargs)
        if operation == "attribute":
            return getattr(subject, arguments[0])
        if operation == "item":
            return subject[_decode(arguments[0], self._objects.__getitem__)]
        return _OPERATIONS[operation](subject)

    def _refer(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == _MAX_HANDLES:
            raise ValueError(f"more than {_MAX_HANDLES} objects")
        if number == len(self._objects):
            self._objects.append(value)  # alive from now on, so that no other gets its id
        return number


class _Program:
    """The tests' end: asks, and takes nothing but plain values and handles for an answer."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self.is_lost = self.is_asked = False

    def ask(self, operation: str, target: str | int, *arguments: Any) -> Any:
        self.is_asked = True
        if self.is_lost:
            raise _LostError
        try:
            _send(self._peer, _body([operation, target, *arguments]))
            reply = _receive(self._peer)
            if isinstance(reply, dict) and "value" in reply:
                return _decode(reply["value"], self._handle)
            name, text = reply["raised"]
            raised = _exception(str(name), str(text))
        except (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as nonsense:
            self.is_lost = True
            raise _LostError from nonsense
        raise raised

    def _handle(self, number: Any) -> _Handle:
        if type(number) is not int:
            raise ValueError("malformed handle")
        return _Handle(self, number)


def _exception(name: str, text: str) -> Exception:
    """Return Python's own exception of this name; RuntimeError for another, or one with other arguments."""
    kind = vars(builtins).get(name)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):
            return kind(text)
    return RuntimeError(f"{name}: {text}")


class _Handle:
    """An object of the program, as the tests see it. Equal to the same object only: its own `__eq__` is never asked."""

    def __init__(self, program: _Program, number: int) -> None:
        self.__program, self.__number = program, number

    def __ask(self, operation: str, *arguments: Any) -> Any:
        return self.__program.ask(operation, self.__number, *arguments)

    def _own_number(self) -> int:
        return self.__number

    def __eq__(self, other: object) -> bool:
        return type(other) is _Handle and other._own_number() == self.__number

    def __hash__(self) -> int:
        return self.__number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__ask("call", _encode(args, _own_number), _encode(kwargs, _own_number))

    def __getattr__(self, name: str) -> Any:
        return self.__ask("attribute", name)

    def __getitem__(self, key: Any) -> Any:
        return self.__ask("item", _encode(key, _own_number))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__ask("list"))

    def __len__(self) -> int:
        return int(self.__ask("len"))

    def __bool__(self) -> bool:
        return bool(self.__ask("bool"))

    def __str__(self) -> str:
        return str(self.__ask("str"))

    def __repr__(self) -> str:
        return str(self.__ask("repr"))


def _own_number(value: Any) -> int:
    if type(value) is not _Handle:
        raise TypeError(f"a {type(value).__name__} cannot be given to the program")
    return value._own_number()


class _Scope(dict[str, Any]):
    """Names of the tests: their own, Python's, and for all others the program's. Python's are never the program's."""

    def __init__(self, program: _Program) -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self._program = program

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or name in vars(builtins):
            raise KeyError(name)
        return self._program.ask("get", name)
