"""Agents: code that asks the policy for turns by itself, through an endpoint in OpenAI's form, and ends with a reward.

    async def run(row, base_url, api_key) -> float | None      a function, async or plain
    OPENAI_BASE_URL=... OPENAI_API_KEY=... my-agent ...         a program for each episode
    my-agent ...                                                a program that plays all episodes of its worker

An episode has a key of its own, in the address and as the API key. The gateway and all agents of a worker share its
loop; the turns come from outside of the worker, where the transcript is.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import os
import secrets
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slipstream.environments.asks import Ask, Refused, Reply
from slipstream.environments.protocol import EnvironmentFault

MAX_LINE_BYTES = 1 << 20
MAX_OUTPUT_BYTES = 64 << 10  # of a program's standard output, of which the last line counts
_ERROR_CHARS = 300
_END_S = 2.0  # for a program to end, once it is told to
_START_S = 90.0  # for a program to be ready: its imports
_KEY_BYTES = 16

Row = dict[str, Any]
Call = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function that is not async in a thread of the episode's."""


class Agent(ABC):
    """Plays episodes; many at once."""

    async def start(self) -> None:  # noqa: B027 - a function has nothing to start
        """Begin what all episodes need. Raises EnvironmentFault, or what its code raises."""

    @abstractmethod
    async def run(self, row: Row, base_url: str, api_key: str, call: Call) -> Any:
        """Play an episode; return its reward, or None. May raise anything, and may be cancelled at any time."""

    async def stop(self) -> None:  # noqa: B027
        """End what `start` began."""


class AgentMaker:
    """Stands where an environment's maker does: one agent plays all episodes of a source."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    def __call__(self) -> Agent:
        return self.agent


class FunctionAgent(Agent):
    """A function (row, base_url, api_key); one that is not async runs in a thread."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def run(self, row: Row, base_url: str, api_key: str, call: Call) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(row, base_url, api_key)
        value = await call(partial(self._function, row, base_url, api_key))
        return await value if inspect.isawaitable(value) else value


class ProgramAgent(Agent):
    """A program for each episode. It gets the row as JSON on standard input, and OPENAI_BASE_URL and OPENAI_API_KEY.

    Its last line of output may be its reward: a number, or {"reward": number}; else it gives none. Another exit code
    than 0 is a failure.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)

    async def run(self, row: Row, base_url: str, api_key: str, call: Call) -> Any:  # noqa: ARG002 - no thread
        told = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        process = await _started(self._command, told)
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            with contextlib.suppress(ConnectionError):  # it need not read its row
                process.stdin.write(json.dumps(row).encode() + b"\n")
                await process.stdin.drain()
                process.stdin.close()
            said, errors, code = await asyncio.gather(
                _tail(process.stdout, MAX_OUTPUT_BYTES), _tail(process.stderr, 4 * _ERROR_CHARS), process.wait()
            )
        finally:
            await _killed(process)
        if code != 0:
            raise EnvironmentFault(f"the program ended with exit code {code}: {_last(errors)}")
        return _reward_in(said)


@dataclass
class _Line:
    """A process that plays many episodes by lines of JSON, and who waits for its answers."""

    process: asyncio.subprocess.Process
    waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=8))


class LineAgent(Agent):
    """A program that plays all episodes of its worker, by lines of JSON; started again where it ends.

    in    {"episode": 1, "row": {...}, "base_url": "...", "api_key": "..."}      {"cancel": 1}
    out   {"ready": true}, once       {"episode": 1, "reward": 0.5}      {"episode": 1, "error": "a sentence"}
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._line: _Line | None = None
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        async with self._starting:
            if self._line is None:
                self._line = await self._begun()

    async def run(self, row: Row, base_url: str, api_key: str, call: Call) -> Any:  # noqa: ARG002 - no thread
        await self.start()
        line, number = self._line, next(self._numbers)
        if line is None:
            raise EnvironmentFault("the program has ended")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        line.waiting[number] = answer
        try:
            self._tell(line, {"episode": number, "row": row, "base_url": base_url, "api_key": api_key})
            return await answer
        except asyncio.CancelledError:
            self._tell(line, {"cancel": number})
            raise
        finally:
            line.waiting.pop(number, None)

    async def stop(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            await _killed(line.process)
        for task in self._tasks:
            task.cancel()

    async def _begun(self) -> _Line:
        """Start the program and wait for its first line. EnvironmentFault where none comes in time."""
        line = _Line(await _started(self._command, {}))
        self._watch(self._note_errors(line))
        assert line.process.stdout is not None
        try:
            first = await asyncio.wait_for(line.process.stdout.readline(), _START_S)
        except (TimeoutError, ValueError):
            first = b"?"
        if _parsed(first) != {"ready": True}:
            await _killed(line.process)
            await asyncio.sleep(0)
            found = _parsed(first)
            error = found.get("error") if isinstance(found, dict) else None
            said = error if isinstance(error, str) else _last("\n".join(line.errors).encode()) or repr(first[:80])
            raise EnvironmentFault(f"the program was not ready: {said[:_ERROR_CHARS]}")
        self._watch(self._read(line))
        return line

    def _watch(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _tell(line: _Line, message: dict[str, Any]) -> None:
        if line.process.stdin is not None and not line.process.stdin.is_closing():
            line.process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self, line: _Line) -> None:
        """Takes answers, waits for the next one. Ends when: the program does, or breaks the form."""
        assert line.process.stdout is not None
        why = "the program has ended"
        try:
            while raw := await line.process.stdout.readline():
                self._hear(line, _parsed(raw))
        except ValueError:
            why = "the program wrote a line that is too long"
        await _killed(line.process)
        if self._line is line:
            self._line = None
        said = f"{why}: {_last(chr(10).join(line.errors).encode())}" if line.errors else why
        for answer in line.waiting.values():
            if not answer.done():
                answer.set_exception(EnvironmentFault(said))

    @staticmethod
    def _hear(line: _Line, message: Any) -> None:
        """Take one answer; what is none, as a print of an environment, is passed over."""
        number = message.get("episode") if isinstance(message, dict) else None
        answer = line.waiting.get(number) if type(number) is int else None
        if answer is None or answer.done():
            return
        if isinstance(message.get("error"), str):
            answer.set_exception(EnvironmentFault(message["error"][:_ERROR_CHARS]))
        else:
            answer.set_result(message.get("reward"))

    @staticmethod
    async def _note_errors(line: _Line) -> None:
        """Keeps the last lines of errors. Ends when: the program does."""
        assert line.process.stderr is not None
        with contextlib.suppress(ValueError):
            while raw := await line.process.stderr.readline():
                line.errors.append(raw.decode(errors="replace").rstrip()[:_ERROR_CHARS])


class AgentSessions:
    """The endpoint of a gateway for the episodes of a host: each has a key, and asks through `deliver`.

    `deliver` is given (episode, request, ask); `reply` gives the turn. Bound: `max_pending` of the gateway for each.
    """

    model = "policy"

    def __init__(self, deliver: Callable[[int, int, Ask], None]) -> None:
        self._deliver = deliver
        self._episodes: dict[str, int] = {}
        self._waiting: dict[tuple[int, int], asyncio.Future[Reply]] = {}
        self._requests = itertools.count()

    def open(self, episode: int) -> str:
        """Return a new key of `episode`."""
        key = secrets.token_urlsafe(_KEY_BYTES)
        self._episodes[key] = episode
        return key

    def close(self, key: str) -> None:
        """Take a key back: what its episode still asks is refused."""
        episode = self._episodes.pop(key, None)
        for (number, _), turn in list(self._waiting.items()):
            if number == episode and not turn.done():
                turn.set_exception(Refused("the episode is over", code="episode_over"))

    def session_of(self, path_key: str | None, api_key: str | None) -> int | None:
        """Return the episode whose key both are."""
        if path_key is None or api_key is None or not secrets.compare_digest(path_key.encode(), api_key.encode()):
            return None
        return self._episodes.get(path_key)

    async def ask(self, session: Any, ask: Ask) -> Reply:
        """Return the turn. Refused where there is none."""
        number = next(self._requests)
        turn: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[session, number] = turn
        try:
            self._deliver(session, number, ask)
            return await turn
        finally:
            self._waiting.pop((session, number), None)

    def reply(self, episode: int, request: int, reply: Reply | Refused) -> None:
        """Give a turn to the request that asked for it, if that still waits."""
        turn = self._waiting.get((episode, request))
        if turn is None or turn.done():
            return
        if isinstance(reply, Refused):
            turn.set_exception(reply)
        else:
            turn.set_result(reply)


async def _started(command: Sequence[str], told: dict[str, str]) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | told,  # it is ours
            start_new_session=True,
            limit=MAX_LINE_BYTES,
        )
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"the program '{command[0]}' cannot be started: {error}") from error


async def _killed(process: asyncio.subprocess.Process) -> None:
    """End a program and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _END_S)


async def _tail(stream: asyncio.StreamReader, most: int) -> bytes:
    """Return the last bytes of all that a stream has."""
    kept = b""
    while piece := await stream.read(1 << 16):
        kept = (kept + piece)[-most:]
    return kept


def _last(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1][:_ERROR_CHARS] if lines else "it said nothing"


def _parsed(raw: bytes) -> Any:
    """Return a line as JSON; None for what is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _reward_in(said: bytes) -> Any:
    """Return the reward in a program's last line; None where it is no such line."""
    lines = said.strip().splitlines()
    value = _parsed(lines[-1]) if lines else None
    if isinstance(value, dict):
        value = value.get("reward")
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
