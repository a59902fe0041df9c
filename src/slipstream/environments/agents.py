"""Agents: code that asks the policy for turns by itself, through an endpoint in OpenAI's form, and ends with a reward.

    async def run(row, base_url, api_key) -> float | None      a function, async or plain
    OPENAI_BASE_URL=... OPENAI_API_KEY=... my-agent ...         a program for each episode
    my-agent ...                                                a program that plays all episodes of its worker

An episode has a key of its own, in the address and as the API key. The gateway and all agents of a worker share its
loop; the turns come from outside of the worker, where the transcript is. What shares a worker is not hidden from each
other: an agent may find the keys of its worker's other episodes, but none of another worker's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.environments.asks import Ask, Refused, Tell, TurnReply, looked_at
from slipstream.environments.protocol import EnvironmentFault, called

MAX_LINE_BYTES = 1 << 20
MAX_OUTPUT_BYTES = 64 << 10  # of a program's standard output, of which the last line counts
MAX_ERROR_BYTES = 2 << 10
MAX_UNREAD_BYTES = 16 << 20  # that wait for a program to read them
_ERROR_CHARS = 300
_END_S = 0.5  # for a program that is killed to be gone; less than a host gives to what it cancels
_START_S = 90.0  # for a program to be ready: its imports
_KEY_BYTES = 16

Row = dict[str, Any]


class SharedFault(EnvironmentFault):
    """The fault of something that several episodes share: any of them may have caused it."""


class NoProcessLeft(EnvironmentFault):
    """A program cannot be started, since there are as many processes as there may be."""


class Agent(ABC):
    """Plays episodes; many at once."""

    async def start(self) -> None:  # noqa: B027 - a function has nothing to start
        """Begin what all episodes need. Raises EnvironmentFault, or what its code raises."""

    @abstractmethod
    async def run(self, row: Row, base_url: str, api_key: str) -> Any:
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

    async def run(self, row: Row, base_url: str, api_key: str) -> Any:
        return await called(self._function, row, base_url, api_key)


class ProgramAgent(Agent):
    """A program for each episode. It gets the row as JSON on standard input, and OPENAI_BASE_URL and OPENAI_API_KEY.

    Its last line of output may be its reward: a number, or {"reward": number}; else it gives none. Another exit code
    than 0 is a failure. Its end is the episode's: what it has started and left behind is killed.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)

    async def start(self) -> None:
        """Start nothing; raise EnvironmentFault where the program cannot be run."""
        if not os.access(self._command[0], os.X_OK):
            raise EnvironmentFault(f"the program '{self._command[0]}' cannot be run here")

    async def run(self, row: Row, base_url: str, api_key: str) -> Any:
        program = await _RunningProgram.started(self._command, {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key})
        said, errors = _Tail(MAX_OUTPUT_BYTES), _Tail(MAX_ERROR_BYTES)
        loop = asyncio.get_running_loop()
        tails = [loop.create_task(said.take(program.stdout)), loop.create_task(errors.take(program.stderr))]
        told = loop.create_task(_tell_all(program.stdin, json.dumps(row).encode() + b"\n"))
        try:
            await asyncio.wait([program.ended])
            program.kill()  # all that it has left, which may hold its pipes
            await asyncio.wait(tails, timeout=_END_S)
        finally:
            await program.end()
            for task in (told, *tails):
                task.cancel()
        if program.code != 0:
            raise EnvironmentFault(f"the program ended with exit code {program.code}: {errors.last_line}")
        return _reward_in(said.kept)


@dataclass
class _Line:
    """A process that plays many episodes by lines of JSON, and the episodes that wait for its answers."""

    program: _RunningProgram
    errors: _Tail
    waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    failure: str | None = None

    def tell(self, message: dict[str, Any]) -> None:
        """Send a line. A program that does not read is killed when too much waits for it."""
        if self.program.stdin.is_closing():
            return  # it has ended, as the reader of its output will notice
        if self.program.stdin.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.failure = self.failure or "the program did not read its lines"
            self.program.kill()
        else:
            self.program.stdin.write(json.dumps(message).encode() + b"\n")

    def hear(self, message: Any) -> None:
        """Take one answer; any other line, as a print of an environment, is passed over."""
        number = message.get("episode") if isinstance(message, dict) else None
        answer = self.waiting.get(number) if type(number) is int else None
        if answer is None or answer.done():
            return
        if isinstance(message.get("error"), str):
            answer.set_exception(EnvironmentFault(message["error"][:_ERROR_CHARS]))
        else:
            answer.set_result(message.get("reward"))


class LineAgent(Agent):
    """A program that plays all episodes of its worker, by lines of JSON; started again where it ends.

    in    {"episode": 1, "row": {...}, "base_url": "...", "api_key": "..."}      {"cancel": 1}
    out   {"ready": true}, once       {"episode": 1, "reward": 0.5}      {"episode": 1, "error": "a sentence"}

    A reward is what the program says, of whichever of its episodes. Its end costs all of them. Only an episode starts
    it again, and all that wait for a start share its failure: it is never started more often than episodes fail.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._line: _Line | None = None
        self._starting: asyncio.Task[_Line] | None = None
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the program. EnvironmentFault where it is not ready in time."""
        if self._line is not None:  # of a host whose loop was blocked for good
            self._line.program.kill()
        self._line = self._starting = None
        self._tasks = set()
        await self._ready()

    async def run(self, row: Row, base_url: str, api_key: str) -> Any:
        line, number = await self._ready(), next(self._numbers)
        if line.failure is not None:
            raise EnvironmentFault(line.failure)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        line.waiting[number] = answer
        try:
            line.tell({"episode": number, "row": row, "base_url": base_url, "api_key": api_key})
            return await answer
        except asyncio.CancelledError:
            line.tell({"cancel": number})
            raise
        finally:
            del line.waiting[number]

    async def stop(self) -> None:
        """Kill the program."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        line, self._line = self._line, None
        if line is not None:
            await line.program.end()
        for task in self._tasks:
            task.cancel()

    async def _ready(self) -> _Line:
        """Return the program, started where there is none. The start goes on if the episode that began it is over."""
        if self._line is not None:
            return self._line
        if self._starting is None or self._starting.done():
            self._starting = asyncio.get_running_loop().create_task(self._begun())
            self._starting.add_done_callback(looked_at)
        return await asyncio.shield(self._starting)

    async def _begun(self) -> _Line:
        """Start the program and wait for its first line. EnvironmentFault where none comes in time."""
        program = await _RunningProgram.started(self._command, {})
        line = _Line(program, _Tail(MAX_ERROR_BYTES))
        errors = self._watch(line.errors.take(program.stderr))
        first: bytes | None = None
        try:
            first = await asyncio.wait_for(program.stdout.readline(), _START_S)
        except ValueError:
            first = b"a line that is too long"
        except TimeoutError:
            pass
        finally:
            if _parsed(first or b"") != {"ready": True}:
                await program.end()
        if program.is_over:
            await asyncio.wait([errors], timeout=_END_S)
            raise EnvironmentFault(f"the program was not ready: {_why_not_ready(first, line.errors)[:_ERROR_CHARS]}")
        self._watch(self._read(line))
        self._line = line
        return line

    def _watch(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _read(self, line: _Line) -> None:
        """Takes answers, waits for the next one. Ends when: the program does, or writes a line that is too long."""
        try:
            while raw := await line.program.stdout.readline():
                line.hear(_parsed(raw))
        except ValueError:
            line.failure = "the program wrote a line that is too long"
        if self._line is line:
            self._line = None
        await line.program.end()
        why = line.failure or f"the program has ended (exit code {line.program.code})"
        line.failure = f"{why}: {line.errors.last_line}"
        kind = SharedFault if len(line.waiting) > 1 else EnvironmentFault
        for answer in line.waiting.values():
            if not answer.done():
                answer.set_exception(kind(line.failure))


def _why_not_ready(first: bytes | None, errors: _Tail) -> str:
    """Return in words why a program's first line was not the one that it has to be; None: no line came in time."""
    found = _parsed(first or b"")
    if isinstance(found, dict) and isinstance(found.get("error"), str):
        return str(found["error"])
    if first is None:
        return f'it did not say {{"ready": true}} within {_START_S:g} s: {errors.last_line}'
    if first:
        return f'its first line is {{"ready": true}}, and not {first[:80]!r}'
    return f"it ended: {errors.last_line}"


class AgentSessions:
    """The endpoint of a gateway for the episodes of a host: each has a key, and asks through `deliver`.

    `deliver` is given (episode, request, ask); `reply` gives the turn. Bound: `max_requests` of an episode, of which
    those count, too, whose clients have gone, until they have their replies.
    """

    model = "policy"

    def __init__(self, deliver: Callable[[int, int, Ask], None], *, max_requests: int) -> None:
        self._deliver, self._max_requests = deliver, max_requests
        self._episodes: dict[str, int] = {}
        self._unanswered: dict[int, set[int]] = {}  # of each open episode
        self._waiting: dict[tuple[int, int], asyncio.Future[TurnReply]] = {}
        self._requests = itertools.count()

    def open(self, episode: int) -> str:
        """Return a new key of `episode`."""
        key = secrets.token_urlsafe(_KEY_BYTES)
        self._episodes[key] = episode
        self._unanswered[episode] = set()
        return key

    def close(self, key: str) -> None:
        """Take a key back: what its episode still asks is refused."""
        if key not in self._episodes:
            return
        episode = self._episodes.pop(key)
        del self._unanswered[episode]
        for (number, _), turn in list(self._waiting.items()):
            if number == episode and not turn.done():
                turn.set_exception(Refused("the episode is over", code="episode_over"))

    def session_of(self, path_key: str | None, api_key: str | None) -> int | None:
        """Return the episode whose key both are."""
        if path_key is None or api_key is None or not secrets.compare_digest(path_key.encode(), api_key.encode()):
            return None
        return self._episodes.get(path_key)

    async def ask(self, session: Any, ask: Ask, tell: Tell | None = None) -> TurnReply:  # noqa: ARG002
        """Return the turn. Refused where there is none."""
        unanswered = self._unanswered.get(session)
        if unanswered is None:
            raise Refused("the episode is over", code="episode_over")
        if len(unanswered) >= self._max_requests:
            raise Refused(f"{self._max_requests} requests wait already", status=429, code="too_many_pending")
        number = next(self._requests)
        turn: asyncio.Future[TurnReply] = asyncio.get_running_loop().create_future()
        self._waiting[session, number] = turn
        try:
            self._deliver(session, number, ask)
            unanswered.add(number)
            return await turn
        finally:
            self._waiting.pop((session, number), None)

    def reply(self, episode: int, request: int, reply: TurnReply | Refused) -> None:
        """Give a turn to the request that asked for it, if that still waits."""
        self._unanswered.get(episode, set()).discard(request)
        turn = self._waiting.get((episode, request))
        if turn is None or turn.done():
            return
        if isinstance(reply, Refused):
            turn.set_exception(reply)
        else:
            turn.set_result(reply)


class _Watched(asyncio.subprocess.SubprocessStreamProtocol):
    """Notes a program's end when it is there; asyncio's `wait` also waits for all that hold the program's pipes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=MAX_LINE_BYTES, loop=loop)
        self.ended: asyncio.Future[None] = loop.create_future()

    def process_exited(self) -> None:
        """Take the end of the process."""
        super().process_exited()
        if not self.ended.done():
            self.ended.set_result(None)


class _RunningProgram:
    """A program that runs, in a session of its own, and its pipes."""

    def __init__(self, transport: asyncio.SubprocessTransport, protocol: _Watched) -> None:
        assert protocol.stdin is not None, "it was started with three pipes"
        assert protocol.stdout is not None, "it was started with three pipes"
        assert protocol.stderr is not None, "it was started with three pipes"
        self.stdin, self.stdout, self.stderr = protocol.stdin, protocol.stdout, protocol.stderr
        self.ended = protocol.ended
        self.is_over = False
        self._transport = transport

    @classmethod
    async def started(cls, command: Sequence[str], told: dict[str, str]) -> _RunningProgram:
        """Start `command` with the variables of this process and `told`. EnvironmentFault where that cannot be."""
        loop = asyncio.get_running_loop()
        pipe = asyncio.subprocess.PIPE
        try:
            transport, protocol = await loop.subprocess_exec(
                lambda: _Watched(loop),
                *command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | told,  # it is ours
                start_new_session=True,
            )
        except (OSError, ValueError, RuntimeError) as error:  # the last for asyncio's thread that waits for its end
            kind = NoProcessLeft if isinstance(error, BlockingIOError | RuntimeError) else EnvironmentFault
            raise kind(f"the program '{command[0]}' cannot be started: {error}") from error
        return cls(transport, protocol)

    @property
    def code(self) -> int | None:
        """Its exit code, or minus the signal that has ended it; None: it was killed a moment ago."""
        return self._transport.get_returncode()

    def kill(self) -> None:
        """Kill all of its process group, whether it has ended or not."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    async def end(self) -> None:
        """Kill it, and close its pipes."""
        self.is_over = True
        self.kill()
        await asyncio.wait([self.ended], timeout=_END_S)
        self._transport.close()


class _Tail:
    """The last bytes of a stream."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.kept = b""

    async def take(self, stream: asyncio.StreamReader) -> None:
        """Reads all of a stream. Ends when: the stream does."""
        while piece := await stream.read(1 << 16):
            self.kept = (self.kept + piece)[-self._most :]

    @property
    def last_line(self) -> str:
        lines = self.kept.decode(errors="replace").strip().splitlines()
        return lines[-1][:_ERROR_CHARS] if lines else "it said nothing"


async def _tell_all(stream: asyncio.StreamWriter, data: bytes) -> None:
    """Write `data` and close the stream; a program need not read it."""
    with contextlib.suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
        stream.close()


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
