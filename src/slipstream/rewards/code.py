"""The reward function `code`: a completion's program, run against the row's tests in jails of its own.

This side is trusted: it finds the program in the text, hands it to the launcher as a file, and compares. What a program
should print stays here. Tests in Python run in a jail beside the program's (`jailed.py`), which never sees them.
"""

from __future__ import annotations

import ast
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from slipstream.core.errors import ConfigError
from slipstream.rewards.jailed import FAILED, IDLE
from slipstream.rewards.launcher import PROBE, REPLY, REQUEST, SCRIPT, TESTS, ProcessLimits
from slipstream.rewards.protocol import RewardJob

Scorer = Callable[[RewardJob], float | None]

_LAUNCHER_DIED = 70  # exit code (EX_SOFTWARE): a worker without its launcher is of no use
_SHARE_OF_DEADLINE = 0.8  # of rewards.timeout_s, for the tests of one program; past it the worker would be killed
_VALUES = (ast.Constant, ast.Dict, ast.List, ast.Set, ast.Tuple)
_PYTHON = {"", "python", "python3", "py"}
_MAX_SOURCE_BYTES = 1 << 20  # of all the tests of a row in Python; programs are bounded by rewards.max_chars


@dataclass(frozen=True)
class InOut:
    """A test by standard input and output."""

    given: str
    expected: str


class Programs:
    """The scorer's end of the launcher. One program at a time, as a worker has one completion at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def probe(self) -> frozenset[str]:
        """The barriers that hold around a program, found by starting one."""
        with _UnnamedFile() as out:
            self._request(PROBE, ProcessLimits(10.0, 1 << 28, 1 << 16), [out.writable])
            return frozenset(out.content(1 << 16).decode().split())

    def run_script(self, source: str, given: str, limits: ProcessLimits) -> str | None:
        """Return what the program prints when it is `given` this; None when it fails, or takes too long."""
        with _UnnamedFile(_bytes(source)) as program, _UnnamedFile(_bytes(given)) as stdin, _UnnamedFile() as stdout:
            code = self._request(SCRIPT, limits, [program.readable, stdin.readable, stdout.writable])
            return stdout.content(limits.file_bytes).decode("utf-8", "replace") if code == 0 else None

    def run_tests(
        self, source: str, tests: Sequence[str], limits: ProcessLimits, *, end_s: float, may_stop: bool
    ) -> int:
        """Count the `tests` that pass; `may_stop` at the first that does not. `limits.seconds` is for each.

        Tests behind one that the program does not outlive are asked of a new process. ValueError where all end well
        and none asks anything of the program: they would pass for any.
        """
        told = b""
        while len(told) < len(tests):
            remaining_s = max(0.01, end_s - time.monotonic())
            told += self._verdicts(source, tests[len(told) :], limits, total_s=remaining_s) or FAILED
            if (may_stop and FAILED in told) or time.monotonic() >= end_s:
                break
        if told == IDLE * len(tests):
            raise ValueError("no test asks anything of the program; a test in Python calls its functions itself")
        return len(told) - told.count(FAILED)

    def _verdicts(self, source: str, tests: Sequence[str], limits: ProcessLimits, *, total_s: float) -> bytes:
        """Return those on the first of `tests`, up to one that the program does not outlive."""
        content = json.dumps([limits.seconds, list(tests)]).encode()
        if len(content) > _MAX_SOURCE_BYTES:
            raise ValueError(f"tests of {len(content)} bytes, at most {_MAX_SOURCE_BYTES} allowed")
        with _UnnamedFile(_bytes(source)) as program, _UnnamedFile(content) as file, _UnnamedFile() as verdicts:
            all_of_them = ProcessLimits(total_s, limits.memory_bytes, limits.file_bytes)
            self._request(TESTS, all_of_them, [program.readable, file.readable, verdicts.writable])
            return verdicts.content(len(tests))

    def _request(self, what: int, limits: ProcessLimits, files: list[int]) -> int:
        """The exit code, or minus the signal."""
        request = REQUEST.pack(what, limits.seconds, limits.memory_bytes, limits.file_bytes)
        try:
            socket.send_fds(self._connection, [request], files)
            reply = self._connection.recv(REPLY.size)
        except OSError:
            reply = b""
        if len(reply) != REPLY.size:
            os._exit(_LAUNCHER_DIED)
        return int(REPLY.unpack(reply)[0])


class _UnnamedFile:
    """A file without a name: nobody can open it who has not been given a descriptor."""

    def __init__(self, content: bytes = b"") -> None:
        self.writable, path = tempfile.mkstemp()
        self.readable = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.unlink(path)
        with open(self.writable, "wb", closefd=False) as file:
            file.write(content)

    def content(self, max_bytes: int) -> bytes:
        with open(self.readable, "rb", closefd=False) as file:
            return file.read(max_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.writable)
        os.close(self.readable)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # a row may have half of a surrogate pair


def code_reward(
    *,
    tests: str = "tests",
    test_timeout_s: float = 2.0,
    memory_mb: int = 256,
    max_output_kb: int = 64,
    max_tests: int = 32,
    partial: bool = False,
    fenced: bool = True,
    programs: Programs | None,
    timeout_s: float,
) -> Scorer:
    """1 when the completion's program passes all tests of the row (`partial`: the share that it passes).

    The program is the last closed ``` block of Python; without `fenced` all of a completion that has none. `tests`
    names the column of tests (`parse_tests`), of which the first `max_tests` count. Each test may take
    `test_timeout_s`, all together four fifths of `rewards.timeout_s`; a process may use `memory_mb` and print
    `max_output_kb`. None for a row without tests.
    """
    for name, value in (
        ("test_timeout_s", test_timeout_s),
        ("memory_mb", memory_mb),
        ("max_output_kb", max_output_kb),
        ("max_tests", max_tests),
    ):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1 << 20:
            raise ConfigError(f"{name} of reward 'code' must be a positive number", got=repr(value))
    if not isinstance(tests, str):
        raise ConfigError("tests of reward 'code' must name a column", got=repr(tests))
    if max_tests < 1 or max_tests != int(max_tests):
        raise ConfigError("max_tests of reward 'code' must be an integer", got=repr(max_tests), allowed="1 or more")
    limits = ProcessLimits(float(test_timeout_s), int(memory_mb * (1 << 20)), int(max_output_kb * 1024))
    if not (limits.memory_bytes and limits.file_bytes):
        raise ConfigError(
            "memory_mb and max_output_kb of reward 'code' must be a byte at least",
            got=f"memory_mb = {memory_mb}, max_output_kb = {max_output_kb}",
        )

    def score(job: RewardJob) -> float | None:
        column = job.answer if tests == "answer" else job.columns.get(tests)
        if column is None:
            return None
        wanted = parse_tests(column)[: int(max_tests)]
        if not wanted:
            return None
        source = last_program(job.completion, fenced=fenced)
        if source is None:
            return 0.0
        assert programs is not None, "a worker with this term has a launcher"
        end_s = time.monotonic() + _SHARE_OF_DEADLINE * timeout_s
        passed = _passed(programs, source, wanted, limits, end_s=end_s, may_stop=not partial)
        return passed / len(wanted) if partial else float(passed == len(wanted))

    return score


def _passed(
    programs: Programs,
    source: str,
    tests: Sequence[InOut | str],
    limits: ProcessLimits,
    *,
    end_s: float,
    may_stop: bool,
) -> int:
    """Count the tests that pass; `may_stop` at the first that does not."""
    in_python = [test for test in tests if isinstance(test, str)]
    passed = 0
    if in_python:
        passed += programs.run_tests(source, in_python, limits, end_s=end_s, may_stop=may_stop)
    for test in tests:
        if isinstance(test, str):
            continue
        remaining_s = end_s - time.monotonic()
        if remaining_s <= 0:
            break
        each = ProcessLimits(min(limits.seconds, remaining_s), limits.memory_bytes, limits.file_bytes)
        printed = programs.run_script(source, test.given, each)
        if printed is not None and _lines(printed) == _lines(test.expected):
            passed += 1
        elif may_stop:
            break
    return passed


def _lines(text: str) -> list[str]:
    """Return an output's lines without spaces at their ends, up to the last that is not empty."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def last_program(text: str, *, fenced: bool = True) -> str | None:
    """The last closed fenced block that is marked as Python, or not marked. In one pass over the lines.

    None without one; with `fenced = False` the whole text then.
    """
    found: str | None = None
    block: list[str] | None = None
    fence = indent = language = ""
    for line in text.replace("\r\n", "\n").split("\n"):  # `splitlines` breaks within literals, at U+2028 say
        bare = line.strip()
        if block is None:
            if bare.startswith("```"):
                language = bare.lstrip("`")
                fence, indent = bare[: len(bare) - len(language)], line[: len(line) - len(line.lstrip())]
                if "`" not in language:  # else it is code within a line
                    block = []
        elif len(bare) >= len(fence) and not bare.strip("`"):
            if language.strip().lower() in _PYTHON:
                found = "\n".join(block)
            block = None
        else:
            block.append(line.removeprefix(indent))
    return text if found is None and not fenced else found


def parse_tests(column: Any) -> list[InOut | str]:
    """The tests of a row: of standard input and output, or in Python. ValueError for anything else.

    {"inputs": [...], "outputs": [...]}              standard input and output (APPS, TACO)
    {"inputs", "outputs", "fn_name": "f"}            calls: a list of arguments, and the value (or [the value])
    [{"input": "...", "output": "..."}, ...]         standard input and output
    ["assert f(1) == 2", ...]                        Python, each a test (MBPP)
    "for i in range(9): assert f(i) == i"            Python, one test; or any of the above as JSON
    """
    if isinstance(column, str):
        try:
            decoded = json.loads(column)
        except ValueError:
            decoded = None
        return parse_tests(decoded) if isinstance(decoded, (dict, list)) else [_python(column)]
    if isinstance(column, Mapping):
        return _of_table(column)
    if isinstance(column, list):
        return [_of_entry(entry) for entry in column]
    raise ValueError(f"tests are text, a list or an object, not {type(column).__name__}")


def _python(text: str) -> str:
    """Return `text`; ValueError where it is no Python, or a mere value: JSON with a fault, or the `repr` of tests."""
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise ValueError(f"tests are neither JSON nor Python: {error}") from error
    if not body or (len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, _VALUES)):
        raise ValueError("tests are neither JSON nor Python that asks anything")
    return text


def _of_entry(entry: Any) -> InOut | str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Mapping) and {"input", "output"} <= entry.keys():
        return InOut(_text(entry["input"]), _text(entry["output"]))
    raise ValueError("a test is Python, or has an 'input' and an 'output'")


def _of_table(table: Mapping[str, Any]) -> list[InOut | str]:
    inputs, outputs, name = table.get("inputs"), table.get("outputs"), table.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("'inputs' and 'outputs' are lists of one length")
    if name is None:
        return [InOut(_text(given), _text(expected)) for given, expected in zip(inputs, outputs, strict=True)]
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError("'fn_name' is the name of a function")
    return [_call(name, arguments, expected) for arguments, expected in zip(inputs, outputs, strict=True)]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise ValueError(f"an input or output is text or a list of lines, not {type(value).__name__}")


def _call(name: str, arguments: Any, expected: Any) -> str:
    """A test in Python that calls `name`, of the module or of its class Solution; tuples count as the lists of JSON.

    Rows of APPS have values in lists of one, which counts as the value or as the list.
    """
    if not isinstance(arguments, list):
        raise ValueError("the arguments of a call are a list")
    values = [expected, *(expected if isinstance(expected, list) and len(expected) == 1 else [])]
    return (
        "def _plain(value):\n"
        "    if isinstance(value, dict):\n"
        "        return {key: _plain(item) for key, item in value.items()}\n"
        "    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value\n"
        "try:\n"
        f"    _function = {name}\n"
        "except NameError:\n"
        f"    _function = Solution().{name}\n"
        f"assert _plain(_function(*{arguments!r})) in {values!r}\n"
    )
