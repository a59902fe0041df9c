"""Environments given as Python callables, in the caller's process: trusted, but held to their deadline."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from slipstream.core.background import start_thread
from slipstream.core.clock import Clock
from slipstream.core.errors import SlipstreamError
from slipstream.core.mailbox import Mailbox
from slipstream.core.user_code import MAX_ERROR_CHARS, describe
from slipstream.environments.agents import AgentMaker
from slipstream.environments.host import EpisodeHost
from slipstream.environments.hosting import FromHost, OpenEpisode, TakeTurn, ToHost
from slipstream.environments.pool import EpisodePool, HostLink
from slipstream.environments.protocol import MAX_CHARS
from slipstream.environments.sources import with_tools_found
from slipstream.jail.protocol import SetupFailed, WorkerReady

_MAX_ABANDONED = 8  # threads and loops that have not come back; they cannot be killed
_JOIN_S = 2.0  # for a loop that is not blocked to end, with environments that close


@contextlib.contextmanager
def _past_proxies() -> Iterator[None]:
    """Let clients that are made meanwhile reach the gateway itself, where the environment names proxies."""
    named = urllib.request.getproxies_environment()
    if named.keys() <= {"no"} or urllib.request.proxy_bypass("127.0.0.1"):
        yield
        return
    before = {name: os.environ.pop(name, None) for name in ("no_proxy", "NO_PROXY")}
    direct = ",".join(filter(None, [named.get("no"), "127.0.0.1", "localhost"]))
    os.environ.update(dict.fromkeys(before, direct))
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


class InlinePool(EpisodePool):
    """`makers` make environments, which run in one loop and in threads of this process.

    A call that is late and cannot be cancelled is failed, its thread abandoned (its answer is ignored). An async one
    that blocks the loop costs all episodes, and the loop is abandoned. While 8 of them have not come back no
    environment is opened.
    While it is open, an agent's requests to this process pass by the proxies that the environment names.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[], Any]],
        *,
        step_limit_s: float,
        max_chars: int = MAX_CHARS,
        request_limit_s: float = 600.0,
        clock: Clock | None = None,
    ) -> None:
        found = [with_tools_found(make) for make in makers]
        self._makers = [make for make, _ in found]
        self._request_limit_s = request_limit_s
        agents = [index for index, make in enumerate(self._makers) if isinstance(make, AgentMaker)]
        self._open = contextlib.ExitStack()
        self._host: _Thread | None = None
        self._abandoned: list[threading.Event] = []
        if agents:
            self._open.enter_context(_past_proxies())
        super().__init__(
            num_hosts=1,
            num_spares=0,
            num_sources=len(makers),
            step_limit_s=step_limit_s,
            max_chars=max_chars,
            clock=clock,
            agents=agents,
        )
        self.tool_schemas = [schemas for _, schemas in found]

    @property
    def _closed_because(self) -> str | None:
        self._abandoned = [returned for returned in self._abandoned if not returned.is_set()]
        hang = f"environments hang in {len(self._abandoned)} calls, and none is opened meanwhile"
        return hang if len(self._abandoned) >= _MAX_ABANDONED else None

    def close(self) -> None:
        super().close()
        self._open.close()

    def _start_host(self) -> HostLink:
        if self._host is not None:  # it has been closed
            self._abandoned.append(self._host.is_over)
        self._host = _Thread(self._makers, self._step_limit_s, self._max_chars, self._request_limit_s)
        return self._host

    def _abandons(self, host: HostLink, episode: int) -> bool:
        assert isinstance(host, _Thread)
        self._abandoned.append(host.forget(episode))
        return True


class _Thread:
    """The pool's end of a host in a thread of this process: messages in by the loop, out by a mailbox."""

    def __init__(
        self, makers: Sequence[Callable[[], Any]], step_limit_s: float, max_chars: int, request_limit_s: float
    ) -> None:
        self.failure: str | None = None
        self.has_unsent = False
        self.is_over = threading.Event()
        self._decoder = msgspec.msgpack.Decoder(FromHost, strict=True)
        self._said: Mailbox[bytes] = Mailbox()
        self._loop = asyncio.new_event_loop()
        self._request_limit_s = request_limit_s
        self._closing = asyncio.Event()
        self._host = EpisodeHost(makers, self._said.put, step_limit_s=step_limit_s, max_chars=max_chars)
        self._thread = start_thread(self._serve, name="environments")

    def fileno(self) -> int:
        return self._said.fileno()

    def send(self, messages: Sequence[ToHost]) -> None:
        for message in messages:
            changes = isinstance(message, OpenEpisode | TakeTurn)  # an environment may change what it is given
            self._loop.call_soon_threadsafe(self._host.handle, copy.deepcopy(message) if changes else message)

    def flush(self) -> None:
        """Do nothing: what is sent has arrived."""

    def receive(self) -> list[FromHost]:
        return [self._decoder.decode(body) for body in self._said.take()]

    def forget(self, episode: int) -> threading.Event:
        """Let go of an episode. The event is set when its call has come back."""
        returned = threading.Event()
        self._loop.call_soon_threadsafe(self._host.forget, episode, returned.set)
        return returned

    def close(self) -> None:
        """End the loop, if it lets itself be ended; its threads end when their calls return."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_JOIN_S)
        self._said.close()

    async def _started(self) -> WorkerReady | SetupFailed:
        """Return the first word to the pool: whether all is there that agents need."""
        try:
            await self._host.open_gateway(request_limit_s=self._request_limit_s)
            await self._host.start_agents()
        except SlipstreamError as error:
            return SetupFailed(str(error)[:MAX_ERROR_CHARS])
        except BaseException as error:  # noqa: BLE001 - an agent's code may raise anything
            return SetupFailed(describe(error))
        return WorkerReady(isolation=[])

    async def _main(self) -> None:
        """Waits for `close` while episodes run beside it. Ends when: all that was open then is closed."""
        self._said.put(msgspec.msgpack.encode(await self._started()))
        await self._closing.wait()
        await self._host.close()

    def _serve(self) -> None:
        """Runs the loop of the episodes. Ends when: `_main` does."""
        main = self._loop.create_task(self._main())
        while not main.done():
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a task that an environment has started
                self._loop.run_until_complete(main)
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            self._loop.run_until_complete(asyncio.wait(left, timeout=1.0) if left else asyncio.sleep(0))
            self._loop.run_until_complete(asyncio.sleep(0))  # the connections that they have closed
        self._loop.close()
        self._host.end()
        self.is_over.set()
