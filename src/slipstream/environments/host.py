"""Runs the environments of many episodes side by side: async methods in one loop, all others in threads.

Used on both sides of the jail: by workers, and for environments of the caller's in their process. Agents have one call,
their whole episode, and meanwhile ask for turns at a gateway in the same loop (`agents.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import queue
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.core.background import start_thread
from slipstream.core.errors import ConfigError
from slipstream.core.user_code import describe
from slipstream.environments.agents import Agent, AgentMaker, AgentSessions, NoProcessLeft, SharedFault
from slipstream.environments.asks import Ask, Refused
from slipstream.environments.hosting import (
    MAX_EPISODES_PER_HOST,
    MAX_REQUESTS,
    MAX_SPOKEN_BYTES,
    AskedNetwork,
    AskedTurn,
    Closed,
    EndEpisode,
    Faulted,
    FromEpisode,
    Interrupt,
    OpenEpisode,
    Replied,
    Spoke,
    Stuck,
    TakeTurn,
    ToHost,
)
from slipstream.environments.protocol import (
    IN_THREAD,
    MAX_CHARS,
    MAX_COUNT,
    MAX_STATE_BYTES,
    EnvironmentFault,
    Step,
    as_messages,
    as_restored,
    as_reward,
    as_state,
    as_step,
    can_be_restored,
    extends_prompt,
    restoring,
    taken_by,
)
from slipstream.environments.sources import MakeEnvironment
from slipstream.environments.trl import FactoryEnvironment

if TYPE_CHECKING:
    from slipstream.environments.gateway import GatewayServer

FREE_LIMIT_S = 2.0
FREE_AGAIN_S = 0.02
"""Processes that were killed count until their parent has waited for them, which tells nobody: a program is started
again after FREE_AGAIN_S, for FREE_LIMIT_S at most."""

_CANCEL_S = 1.0  # for an async call to end once it is cancelled
_CLOSE_S = 1.0  # for environments to close when their host ends

_current: ContextVar[int | None] = ContextVar("episode", default=None)
_Job = tuple[Context, Callable[[], Any], "asyncio.Future[tuple[bool, Any]]"]


def _do_nothing() -> None:
    """Be called for no reason."""


class _Lane:
    """A thread for one environment, which some need to be the same for all calls. It is started when it is needed."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[_Job | Callable[[], None]] | None = None
        self._num_calls = 0

    @property
    def is_busy(self) -> bool:
        return self._num_calls > 0

    async def call(self, function: Callable[[], Any]) -> Any:
        """Return or raise the outcome of `function`, called in the thread after all calls before."""
        loop = asyncio.get_running_loop()
        if self._inbox is None:
            inbox: queue.SimpleQueue[_Job | Callable[[], None]] = queue.SimpleQueue()
            start_thread(_serve_lane, args=(inbox, loop, self._settle), name="environment")
            self._inbox = inbox
        settled: asyncio.Future[tuple[bool, Any]] = loop.create_future()
        self._num_calls += 1
        context = copy_context()
        context.run(IN_THREAD.set, None)  # in the thread itself there is nothing to wait for
        self._inbox.put((context, function, settled))
        is_returned, outcome = await settled
        if not is_returned:
            raise outcome
        return outcome

    def rest(self, then: Callable[[], None] = _do_nothing) -> None:
        """End the thread with `then` when it has done what it has; the next call starts another."""
        if self._inbox is None:
            then()
        else:
            self._inbox.put(then)
            self._inbox = None

    def _settle(self, settled: asyncio.Future[tuple[bool, Any]], outcome: tuple[bool, Any]) -> None:
        self._num_calls -= 1
        if not settled.done():
            settled.set_result(outcome)


def _serve_lane(
    inbox: queue.SimpleQueue[_Job | Callable[[], None]],
    loop: asyncio.AbstractEventLoop,
    settle: Callable[[asyncio.Future[tuple[bool, Any]], tuple[bool, Any]], None],
) -> None:
    """Consumes calls, waits for the next one, ends with a function that is no call."""
    pid = os.getpid()
    while isinstance(job := inbox.get(), tuple):
        context, function, settled = job
        try:
            outcome = True, context.run(function)
        except BaseException as error:  # noqa: BLE001 - whatever an environment raises (SystemExit too) is its own
            outcome = False, error
        _end_of_a_copy(pid)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the end is in the inbox
            loop.call_soon_threadsafe(settle, settled, outcome)
        del job, context, function, settled, outcome
    job()


def _end_of_a_copy(pid: int) -> None:
    """End this process if an environment forked it and let its child return: only one of the two may go on."""
    if os.getpid() != pid:
        os._exit(0)


@dataclass
class _Hosted:
    """An episode: its environment, and the task that makes the present call."""

    number: int
    environment: Any = None
    lane: _Lane = field(default_factory=_Lane)
    task: asyncio.Task[None] | None = None
    key: str = ""  # of an agent's session
    has_begun: bool = False
    keeps_state: bool = False
    is_late: bool = False
    before: asyncio.Task[None] | None = None  # the call that was cancelled for the present one
    num_tool_calls: int = 0
    num_tool_errors: int = 0


class EpisodeHost:
    """Makes environments by `makers` and calls them; each answer is given to `deliver` as msgpack.

    All methods but `asked_network` are called in the thread of the loop. `free_processes` ends processes that agents'
    programs have left behind; it is called where there is none left for the next program. A call that is late is
    cancelled by an `Interrupt` if it is async, and nothing else is touched; what cannot be cancelled is `Stuck`.
    """

    def __init__(
        self,
        makers: Sequence[MakeEnvironment],
        deliver: Callable[[bytes], None],
        *,
        step_limit_s: float,
        max_chars: int = MAX_CHARS,
        free_processes: Callable[[], None] | None = None,
    ) -> None:
        self._makers = makers
        self._free_processes = free_processes
        self._max_chars = max_chars
        self._deliver = deliver
        self._step_limit_s = step_limit_s
        self._episodes: dict[int, _Hosted] = {}
        self._held: dict[asyncio.Task[None], Callable[[], None]] = {}  # calls of forgotten episodes
        self._encoder = msgspec.msgpack.Encoder()
        self._asked: set[int] = set()
        self._pid = os.getpid()
        self._sessions = AgentSessions(self._ask, max_requests=MAX_REQUESTS)
        self._gateway: GatewayServer | None = None

    async def open_gateway(self, *, request_limit_s: float) -> None:
        """Open the gateway where there are agents. ConfigError where none can be opened."""
        if not self._agents:
            return
        # Requests of episodes that have not begun may wait for a swap, and the swap for episodes that have: the few
        # threads that asyncio has by itself (`asyncio.to_thread`) would all be held by the former.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MAX_EPISODES_PER_HOST, "blocking"))
        from slipstream.environments.gateway import GatewayLimits, GatewayServer, build_app, listen_on_loopback

        limits = GatewayLimits(
            max_body_bytes=MAX_SPOKEN_BYTES * 3 // 4, max_pending=MAX_REQUESTS, request_limit_s=request_limit_s
        )
        app = build_app(self._sessions, limits=limits)
        try:
            listener = listen_on_loopback()
        except OSError as error:
            what = "agents ask for their turns at 127.0.0.1, and there is no network for that"
            allowed = "environment.network = 'gateway', with namespaces (see `slipstream doctor`), or 'host'"
            raise ConfigError(what, got=error, allowed=allowed) from error
        self._gateway = GatewayServer(app, listener, limits=limits)
        await self._gateway.start()

    async def start_agents(self) -> None:
        """Start what agents need. ConfigError where a program cannot be started."""
        for agent in self._agents:
            try:
                await agent.start()
            except EnvironmentFault as error:
                hint = "it runs without the network and most environment variables: see environment.variables"
                raise ConfigError("an agent cannot be started", got=error, hint=hint) from error

    @property
    def _agents(self) -> list[Agent]:
        return [make.agent for make in self._makers if isinstance(make, AgentMaker)]

    def handle(self, message: ToHost) -> None:
        """Begin what `message` asks for. An episode that is unknown has faulted meanwhile."""
        if isinstance(message, OpenEpisode):
            opened = self._episodes[message.episode] = _Hosted(message.episode, keeps_state=message.keeps_state)
            self._begin(opened, partial(self._open, opened, self._makers[message.source], message))
        elif (hosted := self._episodes.get(message.episode)) is None:
            return
        elif isinstance(message, Replied):
            refused = Refused(message.refusal, status=message.status, code=message.code)
            self._sessions.reply(message.episode, message.request, message.reply or refused)
        elif isinstance(message, TakeTurn):
            self._begin(hosted, partial(self._take, hosted, message))
        elif isinstance(message, EndEpisode):
            self._begin(hosted, partial(self._end, hosted, hosted.task, asks_reward=message.asks_reward))
        elif isinstance(message, Interrupt):
            self._interrupt(hosted)

    def asked_network(self) -> bool:
        """Tell that the environment which this thread or task runs has asked for a network; whether it runs one."""
        episode = _current.get()
        if episode is not None and episode not in self._asked:
            self._asked.add(episode)
            self._send(AskedNetwork(episode))
        return episode is not None

    def forget(self, episode: int, then: Callable[[], None] = _do_nothing) -> None:
        """Let go of an episode that is stuck: nothing of it is told. `then` is called when its call returns."""
        if (hosted := self._episodes.pop(episode, None)) is None:
            then()
            return
        calls = [task for task in (hosted.before, hosted.task) if task is not None and not task.done()]
        if calls and not hosted.lane.is_busy:  # of an async method, which may go on though it is cancelled
            self._held[calls[0]] = then
            calls[0].add_done_callback(lambda task: self._held.pop(task)())
            hosted.lane.rest()
        else:
            hosted.lane.rest(then)
        self._sessions.close(hosted.key)
        if hosted.task is not None and hosted.task is not asyncio.current_task(hosted.task.get_loop()):
            hosted.task.cancel()

    def end(self) -> None:
        """Let go of calls that have ended with the loop, which is closed. Threads tell by themselves."""
        for then in self._held.values():
            then()
        self._held.clear()

    async def close(self) -> None:
        """Close all environments, as far as they let themselves be closed in a second."""
        for number in list(self._episodes):
            self.handle(EndEpisode(number, asks_reward=False))
        tasks = [hosted.task for hosted in self._episodes.values() if hosted.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S)
        for number in list(self._episodes):
            self.forget(number)
        if self._gateway is not None:
            await self._gateway.stop()
        for agent in self._agents:
            await agent.stop()

    def _begin(self, hosted: _Hosted, call: Callable[[], Awaitable[FromEpisode]]) -> None:
        hosted.is_late = hosted.has_begun = False
        self._asked.discard(hosted.number)
        hosted.task = asyncio.get_running_loop().create_task(self._answer(hosted, call))

    async def _answer(self, hosted: _Hosted, call: Callable[[], Awaitable[FromEpisode]]) -> None:
        """Make a call and send its answer; whatever it raises is the episode's end."""
        _current.set(hosted.number)
        IN_THREAD.set(hosted.lane.call)
        hosted.has_begun, is_over = hosted.task is asyncio.current_task(), True
        try:
            answer = await call()
            body, is_over = self._encoded(answer), not isinstance(answer, Spoke)
        except SharedFault as error:
            body = await self._faulted(hosted, _described(error), is_shared=True)
        except asyncio.CancelledError:
            limit = f"timed out after {self._step_limit_s:g} s"
            body = await self._faulted(hosted, limit if hosted.is_late else "its call was cancelled")
        except BaseException as error:  # noqa: BLE001 - an environment may raise anything; it costs its episode
            body = await self._faulted(hosted, _described(error))
        _end_of_a_copy(self._pid)
        if not self._is_current(hosted):
            return
        if is_over:
            self.forget(hosted.number)
        self._deliver(body)

    def _is_current(self, hosted: _Hosted) -> bool:
        """Return whether this task speaks for the episode: it is not forgotten, and no other task closes it."""
        return hosted.task is asyncio.current_task() and self._episodes.get(hosted.number) is hosted

    def _encoded(self, answer: FromEpisode) -> bytes:
        body = self._encoder.encode(answer)
        if len(body) > MAX_SPOKEN_BYTES:
            raise EnvironmentFault(f"it said {len(body):,} bytes at once, at most {MAX_SPOKEN_BYTES:,} are allowed")
        return body

    async def _faulted(self, hosted: _Hosted, error: str, *, is_shared: bool = False) -> bytes:
        if self._is_current(hosted):
            with contextlib.suppress(BaseException):  # one error is enough, and a cancelled `close` must not wait
                await self._close(hosted)
        return self._encoder.encode(Faulted(hosted.number, error.encode("utf-8", "replace").decode(), is_shared))

    async def _open(self, hosted: _Hosted, make: MakeEnvironment, message: OpenEpisode) -> Spoke | Closed:
        start_s, columns = time.monotonic(), message.columns
        if isinstance(make, AgentMaker):
            return await self._run(hosted, make.agent, columns)
        environment = hosted.environment = await hosted.lane.call(make)
        is_async = inspect.iscoroutinefunction(environment.reset) and inspect.iscoroutinefunction(environment.step)
        if is_async and not isinstance(environment, FactoryEnvironment):  # whose object is called where it was made
            hosted.lane.rest()
        if message.state is not None:
            return await self._restore(hosted, message, start_s)
        reset = partial(environment.reset, **taken_by(environment.reset, columns))
        messages = await self._call(hosted, reset, partial(as_messages, max_chars=self._max_chars))
        state = await self._state(hosted)
        return self._spoke(hosted, 0, Step(messages), time.monotonic() - start_s, state)

    async def _restore(self, hosted: _Hosted, message: OpenEpisode, start_s: float) -> Spoke:
        """Let an environment go on from its state; it says nothing, and what it counts from here on is of its turns."""
        assert message.state is not None
        if not can_be_restored(hosted.environment):
            raise EnvironmentFault("it has no methods state and restore")
        await self._call(hosted, restoring(hosted.environment, message.state, message.columns), as_restored)
        hosted.num_tool_calls = _count(hosted.environment, "num_tool_calls")
        hosted.num_tool_errors = _count(hosted.environment, "num_tool_errors")
        return self._spoke(hosted, message.turn, Step(), time.monotonic() - start_s)

    async def _state(self, hosted: _Hosted) -> str | None:
        """Return an environment's state, where it is kept and there is one."""
        if not hosted.keeps_state or not can_be_restored(hosted.environment):
            return None
        state: str = await self._call(hosted, hosted.environment.state, as_state)
        return state

    async def _run(self, hosted: _Hosted, agent: Agent, columns: Mapping[str, Any]) -> Closed:
        """Let an agent play its episode; it ends with a reward, or without."""
        assert self._gateway is not None, "there are agents"
        hosted.key = self._sessions.open(hosted.number)
        base_url = f"{self._gateway.base_url}/s/{hosted.key}/v1"
        play = partial(agent.run, dict(columns), base_url, hosted.key)
        end_s = time.monotonic() + FREE_LIMIT_S
        while True:
            try:
                return Closed(hosted.number, as_reward(await play()))
            except NoProcessLeft:
                if self._free_processes is None or time.monotonic() > end_s:
                    raise
                self._free_processes()
                await asyncio.sleep(FREE_AGAIN_S)

    def _ask(self, episode: int, request: int, ask: Ask) -> None:
        body = self._encoder.encode(AskedTurn(episode, request, ask))
        if len(body) > MAX_SPOKEN_BYTES:
            raise Refused("the request is too large", status=413, code="body_too_large")
        self._deliver(body)

    async def _take(self, hosted: _Hosted, turn: TakeTurn) -> Spoke:
        start_s = time.monotonic()
        read = partial(as_step, max_chars=self._max_chars)
        step = await self._call(hosted, partial(hosted.environment.step, turn.message), read)
        state = None if step.done else await self._state(hosted)
        return self._spoke(hosted, turn.turn, step, time.monotonic() - start_s, state)

    async def _end(self, hosted: _Hosted, before: asyncio.Task[None] | None, *, asks_reward: bool) -> Closed:
        self._sessions.close(hosted.key)  # an agent that waits for a turn goes on, to its end
        hosted.before = before
        if before is not None and not before.done():
            before.cancel()
            await asyncio.wait([before])
        if hosted.key and hosted.lane.is_busy:
            await hosted.lane.call(lambda: None)  # behind the agent's function
        reward = None
        if asks_reward and hasattr(hosted.environment, "final_reward"):
            reward = await self._call(hosted, hosted.environment.final_reward, as_reward)
        await self._close(hosted)
        return Closed(hosted.number, reward)

    async def _close(self, hosted: _Hosted) -> None:
        environment, hosted.environment = hosted.environment, None
        if hasattr(environment, "close"):
            await self._call(hosted, environment.close, lambda _: None)

    async def _call(self, hosted: _Hosted, method: Callable[[], Any], read: Callable[[Any], Any]) -> Any:
        """Return what `read` makes of the result of `method`, wherever that runs; `read` meets the episode's objects.

        A function that is not async may return an awaitable all the same.
        """
        if inspect.iscoroutinefunction(method):
            return read(await method())

        def called() -> tuple[bool, Any]:
            value = method()
            return (True, value) if inspect.isawaitable(value) else (False, read(value))

        is_awaitable, value = await hosted.lane.call(called)
        return read(await value) if is_awaitable else value

    def _spoke(self, hosted: _Hosted, turn: int, step: Step, seconds: float, state: str | None = None) -> Spoke:
        calls, errors = (_count(hosted.environment, name) for name in ("num_tool_calls", "num_tool_errors"))
        size = 0 if state is None else len(state.encode())
        assert not isinstance(step.messages, str), "as_step and as_messages have read them"
        spoke = Spoke(
            hosted.number,
            turn,
            list(step.messages),
            step.done,
            step.reward,
            seconds,
            num_tool_calls=max(0, calls - hosted.num_tool_calls),
            num_tool_errors=max(0, errors - hosted.num_tool_errors),
            extends_prompt=turn == 0 and extends_prompt(hosted.environment),
            state=state if size <= MAX_STATE_BYTES else None,
            state_bytes=size,
        )
        hosted.num_tool_calls, hosted.num_tool_errors = calls, errors
        return spoke

    def _interrupt(self, hosted: _Hosted) -> None:
        task = hosted.task
        if task is None or task.done():
            return
        if not hosted.has_begun:  # cancelled now, it would never answer
            asyncio.get_running_loop().call_soon(self._interrupt, hosted)
        elif hosted.lane.is_busy or (hosted.before is not None and not hosted.before.done()):
            self._send(Stuck(hosted.number))
        else:
            hosted.is_late = True
            task.cancel()
            asyncio.get_running_loop().call_later(_CANCEL_S, self._check_cancelled, hosted, task)

    def _check_cancelled(self, hosted: _Hosted, task: asyncio.Task[None]) -> None:
        if hosted.task is task and not task.done():
            self._send(Stuck(hosted.number))

    def _send(self, message: msgspec.Struct) -> None:
        self._deliver(self._encoder.encode(message))


def _described(error: BaseException) -> str:
    try:
        return describe(error)
    except BaseException:  # noqa: BLE001 - the text of an error is made by the environment, too
        return type(error).__name__


def _count(environment: Any, name: str) -> int:
    """Return an environment's count of its tool calls or their errors in this episode; 0 for one that counts none."""
    if not hasattr(environment, name):
        return 0
    count = getattr(environment, name)
    if type(count) is not int or not 0 <= count <= MAX_COUNT:
        raise EnvironmentFault(f"{name} of an environment is a count, not {type(count).__name__}")
    return count
