"""Episodes of environments without blocking: calls in, answers out, through hosts that may hang, die or lie."""

from __future__ import annotations

import itertools
import math
import selectors
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from slipstream.core.clock import Clock, WallClock
from slipstream.core.errors import ConfigError, ExecutorDied
from slipstream.core.plain import wrong_with
from slipstream.core.user_code import MAX_ERROR_CHARS
from slipstream.environments.answers import Answer, Asked, Key, LastWord, Lost, Said
from slipstream.environments.asks import Refused, TurnReply
from slipstream.environments.hosting import (
    MAX_EPISODES_PER_HOST,
    MAX_REQUESTS,
    AskedNetwork,
    AskedTurn,
    Closed,
    EndEpisode,
    Faulted,
    FromEpisode,
    FromHost,
    Interrupt,
    OpenEpisode,
    Replied,
    Spoke,
    Stuck,
    TakeTurn,
    ToHost,
    ToolsFound,
)
from slipstream.environments.protocol import (
    MAX_COUNT,
    MAX_MARK_CHARS,
    MAX_STATE_BYTES,
    ChatMessage,
    EnvironmentFault,
    as_messages,
)
from slipstream.jail.protocol import SetupFailed, TriedNetwork, WorkerReady
from slipstream.jail.sandbox import Spares, nested_selector

_START_S = 120.0  # imports of a large package on a busy machine
_SILENCE_S = 5.0  # for a host to say what became of a call that it was told to end
_MAX_FAILED_STARTS = 3  # in a row
NO_NETWORK = (
    "environments have no network: set environment.network = 'host' if you trust it, or give it to slipstream.run as a "
    "Python class"
)

Call = Literal["opening", "turn", "ending", "agent"]
"""The work of a host for an episode; an agent's is its whole episode."""


class _LieError(Exception):
    """A host sent what no honest one sends."""


class HostLink(Protocol):
    """The pool's end of a host. Nothing here waits; after the last message of one that ended, `failure` is set."""

    failure: str | None

    def fileno(self) -> int: ...
    @property
    def has_unsent(self) -> bool: ...
    def send(self, messages: Sequence[ToHost]) -> None: ...
    def flush(self) -> None: ...
    def receive(self) -> list[FromHost]: ...
    def close(self) -> None: ...


@dataclass
class _Episode:
    """An episode that is open. `call` is what its host is doing for it; `dropped` is an answer that nobody wants."""

    key: Key
    number: int
    source: int
    columns: dict[str, Any]
    keeps_state: bool = False
    state: str | None = None
    call: Call | None = "opening"
    turn: int = 0
    dropped: int | None = None
    deadline_s: float = math.inf
    is_interrupted: bool = False
    is_shut: bool = False
    has_asked_network: bool = False
    requests: set[int] = field(default_factory=set)  # of an agent, that have no reply
    since_s: float = 0.0  # when an agent last had none
    grace_s: float = math.inf  # until then an agent that was refused a turn may go on without one


@dataclass
class _Site:
    """A host and its episodes, by their numbers."""

    host: HostLink
    deadline_s: float
    is_ready: bool = False
    has_tried_network: bool = False
    episodes: dict[int, _Episode] = field(default_factory=dict)


class EpisodePool(ABC):
    """Episodes on `num_hosts` hosts and, once the run has started, a warm spare, behind one file descriptor.

    Consumes: `open`, then `take` for each turn and `finish`, one call of an episode at a time; `shut` at any time.
    Produces: one answer per call (`poll`), whatever the environment does; none after `shut`. Sources that are `agents`
    have one call, `open`, and ask meanwhile; `give` replies. An episode stays on the
    host that it was opened on, the one with the fewest. Each call has `step_limit_s` from the moment its host got it,
    and answers that wait are read before any deadline is judged. A call that is late is cancelled where that is
    possible and costs its own episode only; else all episodes of its host are lost. Ends: `close`.
    """

    def __init__(
        self,
        *,
        num_hosts: int,
        num_spares: int,
        num_sources: int,
        step_limit_s: float,
        max_chars: int,
        clock: Clock | None,
        agents: Collection[int] = (),
    ) -> None:
        self._clock = clock or WallClock()
        self._num_hosts, self._num_sources, self.agents = num_hosts, num_sources, frozenset(agents)
        self._step_limit_s, self._max_chars = step_limit_s, max_chars
        self._selector = nested_selector()
        self._numbers = itertools.count()
        self._by_key: dict[Key, _Episode] = {}
        self._waiting: deque[_Episode] = deque()  # for a host with room
        self._site_of: dict[int, _Site] = {}
        self._done: list[Answer] = []
        self._sites: list[_Site] = []
        self._failed_starts = 0
        self.num_restarts = 0
        self.isolation: frozenset[str] = frozenset()
        self.tool_schemas: list[list[dict[str, Any]]] = [[] for _ in range(num_sources)]
        """Of each source's environments; known when a host is ready."""
        self._spares = Spares(num_spares)
        for _ in range(num_hosts):
            self._start()

    @property
    def _closed_because(self) -> str | None:
        """Return why an episode that is opened now fails at the next `poll`; None: it does not."""
        return None

    @abstractmethod
    def _start_host(self) -> HostLink: ...

    @abstractmethod
    def _abandons(self, host: HostLink, episode: int) -> bool:
        """Let go of an episode that is stuck, if `host` can go on without it; else it is ended with all it has."""

    @property
    def num_open(self) -> int:
        """Episodes that are neither finished, nor shut, nor lost."""
        return len(self._by_key)

    @property
    def num_calls(self) -> int:
        """Calls that have no answer yet; an agent's is none while it waits for a turn."""
        return sum(episode.call is not None and not episode.requests for episode in self._by_key.values())

    def wait_ready(self) -> None:
        """Block until a host has imported what it needs. ConfigError when the environments cannot be made."""
        while not any(site.is_ready for site in self._sites):
            deadline_s = self.next_deadline_s()
            assert deadline_s is not None
            self._advance(max(0.0, deadline_s - self._clock.now_s()))

    def open(
        self,
        key: Key,
        source: int,
        columns: dict[str, Any],
        *,
        keeps_state: bool = False,
        state: str | None = None,
        turn: int = 0,
    ) -> None:
        """Make an environment by source number `source` and reset it. Its answer is that of turn 0.

        With `keeps_state` its answers bring its state. With a `state` it is restored in place of being reset, as it was
        behind turn `turn`, whose answer this is then.
        """
        if (reason := self._closed_because) is not None:
            self._done.append(Lost(key, reason))
            return
        assert key not in self._by_key, f"{key} is open"
        assert 0 <= source < self._num_sources, source
        episode = _Episode(key, next(self._numbers), source, columns, keeps_state, state, turn=turn)
        self._by_key[key] = episode
        self._waiting.append(episode)

    def take(self, key: Key, turn: int, message: ChatMessage) -> None:
        """Let the environment answer the policy's message of turn `turn`, from 1 on.

        Nothing of an episode that is lost: its host may have ended right behind an answer, in one `poll`.
        """
        if (episode := self._idle(key)) is not None:
            episode.turn = turn
            self._call(episode, "turn", TakeTurn(episode.number, turn, message))

    def give(self, key: Key, request: int, reply: TurnReply | Refused) -> None:
        """Give an agent the turn that it asked for, or say why there is none; nothing of an episode that is lost.

        It has `step_limit_s` from the moment on when it has no request open. Behind a refusal it has them once, until
        its next turn, however often it asks.
        """
        episode = self._by_key.get(key)
        if episode is None or request not in episode.requests:
            return
        episode.requests.discard(request)
        now_s = self._clock.now_s()
        late_s = now_s + self._step_limit_s
        episode.grace_s = min(episode.grace_s, late_s) if isinstance(reply, Refused) else math.inf
        if not episode.requests:
            episode.since_s = now_s
            if not episode.is_interrupted:
                episode.deadline_s = min(late_s, episode.grace_s)
        told = (
            Replied(episode.number, request, refusal=str(reply), status=reply.status, code=reply.code)
            if isinstance(reply, Refused)
            else Replied(episode.number, request, reply)
        )
        self._send(self._site_of[episode.number], told)

    def finish(self, key: Key) -> None:
        """Ask the environment for its final reward, and close it; nothing of an episode that is lost, as in `take`."""
        if (episode := self._idle(key)) is not None:
            self._call(episode, "ending", EndEpisode(episode.number, asks_reward=True))

    def shut(self, key: Key) -> None:
        """Close the environment, whatever it is doing; nothing more is told of this episode. Its key is free again."""
        self._done = [one for one in self._done if one.key != key]
        episode = self._by_key.pop(key, None)
        if episode is None:  # it has ended, or was lost
            return
        episode.is_shut = True
        if episode.number not in self._site_of:
            self._waiting.remove(episode)
            return
        episode.dropped = episode.turn if episode.call in ("opening", "turn") else None
        self._call(episode, "ending", EndEpisode(episode.number, asks_reward=False))

    def poll(self) -> list[Answer]:
        """Move what can be moved without waiting; answers in the order they came."""
        return list(self.answers())

    def answers(self) -> Iterator[Answer]:
        """Yield the answers of `poll` one by one: none that still waits, once its episode is shut."""
        self._advance(0)
        while self._done:
            yield self._done.pop(0)

    def fds(self) -> list[int]:
        """Readable when `poll` has something to do: one descriptor, which stands for all hosts."""
        return [self._selector.fileno()]

    def next_deadline_s(self) -> float | None:
        """When, on the clock, `poll` has to be called even if nothing arrives; None while nothing is awaited."""
        if self._done or (self._waiting and self._roomiest() is not None):
            return self._clock.now_s()
        deadlines = [site.deadline_s for site in self._sites if not site.is_ready]
        deadlines += [one.deadline_s for site in self._sites for one in site.episodes.values() if one.call is not None]
        return min(filter(math.isfinite, [*deadlines, *self._spares.due_s]), default=None)

    def close(self) -> None:
        for site in self._sites:
            site.host.close()
        self._sites.clear()
        self._by_key.clear()
        self._waiting.clear()
        self._selector.close()

    def _idle(self, key: Key) -> _Episode | None:
        """Return an episode that has no call; None if it is lost."""
        episode = self._by_key.get(key)
        assert episode is None or episode.call is None, f"{key} has a call"
        return episode

    def _start(self) -> None:
        site = _Site(self._start_host(), deadline_s=self._clock.now_s() + _START_S)
        self._sites.append(site)
        self._selector.register(site.host, selectors.EVENT_READ | selectors.EVENT_WRITE, site)

    def _call(self, episode: _Episode, call: Call, message: ToHost) -> None:
        episode.call, episode.is_interrupted, episode.has_asked_network = call, False, False
        episode.deadline_s = self._clock.now_s() + self._step_limit_s
        self._send(self._site_of[episode.number], message)

    def _send(self, site: _Site, message: ToHost) -> None:
        site.host.send([message])
        self._watch(site)

    def _advance(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            site: _Site = key.data
            site.host.flush()
            self._watch(site)
            self._read(site)
        now_s = self._clock.now_s()
        for site in list(self._sites):
            self._judge(site, now_s)
        for _ in range(self._spares.take(now_s)):
            self._start()
        while self._waiting and (roomiest := self._roomiest()) is not None:
            episode = self._waiting.popleft()
            roomiest.episodes[episode.number] = episode
            self._site_of[episode.number] = roomiest
            call: Call = "agent" if episode.source in self.agents else "opening"
            self._call(
                episode,
                call,
                OpenEpisode(
                    episode.number,
                    episode.source,
                    episode.columns,
                    keeps_state=episode.keeps_state,
                    state=episode.state,
                    turn=episode.turn,
                ),
            )
            episode.state = None  # its host has it
            episode.since_s = self._clock.now_s()

    def _roomiest(self) -> _Site | None:
        """The host with the fewest episodes, not counting the spare; None where none has room."""
        active = [site for site in self._sites if site.is_ready][: self._num_hosts]
        least = min(active, key=lambda site: len(site.episodes), default=None)
        return least if least is not None and len(least.episodes) < MAX_EPISODES_PER_HOST else None

    def _judge(self, site: _Site, now_s: float) -> None:
        """Interrupt calls that are late; end a host that does not even say what became of one."""
        if not site.is_ready and now_s >= site.deadline_s:
            self._replace(site, f"it was not ready after {_START_S:g} s")
            return
        late = [one for one in site.episodes.values() if one.call is not None and now_s >= one.deadline_s]
        if any(episode.is_interrupted for episode in late):
            self._replace(site, f"timed out after {self._step_limit_s:g} s, and its worker says nothing")
            return
        for episode in late:
            episode.is_interrupted, episode.deadline_s = True, now_s + _SILENCE_S
            self._send(site, Interrupt(episode.number))

    def _read(self, site: _Site) -> None:
        for message in site.host.receive():
            try:
                self._hear(site, message)
            except (_LieError, EnvironmentFault) as error:
                site.host.failure = f"worker sent bad output: {error}"[:MAX_ERROR_CHARS]
            if site not in self._sites:
                return  # replaced, with all that it may still have said
            if site.host.failure is not None:
                break
        if site.host.failure is not None:
            self._replace(site, site.host.failure)

    def _hear(self, site: _Site, message: FromHost) -> None:
        """Take one message of a host. _LieError or EnvironmentFault for one that answers no question."""
        if isinstance(message, TriedNetwork) and not site.is_ready:
            site.has_tried_network = True
        elif isinstance(message, ToolsFound) and not site.is_ready:
            if len(message.schemas) != self._num_sources:
                raise _LieError(f"the tools of {len(message.schemas)} environments for {self._num_sources}")
            self.tool_schemas = message.schemas
        elif isinstance(message, SetupFailed) and not site.is_ready:
            if "\n" in message.error and not site.has_tried_network:  # a whole error, with what is allowed
                raise ConfigError(message.error)
            raise ConfigError(
                "the environments cannot be set up",
                got=message.error,
                allowed="classes and functions whose files can be imported by a worker, with the packages of this "
                "Python",
                hint=NO_NETWORK
                if site.has_tried_network
                else "a worker has no network, and few environment variables: see environment.variables",
            )
        elif isinstance(message, WorkerReady) and not site.is_ready:
            site.is_ready = True
            self._failed_starts = 0
            self._spares.plan(self._clock.now_s())
            self.isolation = frozenset(message.isolation)
        elif isinstance(message, FromEpisode) and message.episode in site.episodes:
            self._answered(site, site.episodes[message.episode], message)
        elif not isinstance(message, TriedNetwork | AskedNetwork | AskedTurn):  # a thread may outlive its environment
            raise _LieError("an answer to no question")

    def _answered(self, site: _Site, episode: _Episode, message: FromEpisode) -> None:
        if isinstance(message, AskedNetwork):
            episode.has_asked_network = True
        elif isinstance(message, AskedTurn):
            self._asked(episode, message)
        elif isinstance(message, Stuck) and episode.is_interrupted and episode.call is not None:
            self._give_up(site, episode)
        elif isinstance(message, Spoke) and episode.dropped == message.turn:
            episode.dropped = None
        elif isinstance(message, Spoke) and episode.call in ("opening", "turn") and message.turn == episode.turn:
            answer = _checked(episode, message, max_chars=self._max_chars + MAX_MARK_CHARS)
            episode.call, episode.deadline_s = None, math.inf
            self._done.append(answer)
        elif isinstance(message, Closed) and episode.call in ("ending", "agent"):
            if message.reward is not None and not math.isfinite(message.reward):
                raise _LieError("a reward is finite")
            self._remove(site, episode, LastWord(episode.key, message.reward, self._thought(episode)))
        elif isinstance(message, Faulted) and episode.call is not None:
            is_guilty = None if message.is_shared else True
            self._remove(site, episode, _lost(episode, message.error[: 2 * MAX_ERROR_CHARS], is_guilty=is_guilty))
        else:
            raise _LieError("an answer to no question")

    def _asked(self, episode: _Episode, message: AskedTurn) -> None:
        """Take an agent's request; none of one that is being closed."""
        if episode.call != "agent" or episode.is_shut:
            return
        if message.request in episode.requests or len(episode.requests) >= MAX_REQUESTS:
            raise _LieError("a request that was made before, or too many of them")
        if (wrong := wrong_with([message.ask.messages, message.ask.tools])) is not None:
            raise _LieError(f"a request with {wrong}")
        seconds = self._thought(episode)
        episode.requests.add(message.request)
        if not episode.is_interrupted and episode.since_s < episode.grace_s:  # also one that is read late
            episode.deadline_s = math.inf
        self._done.append(Asked(episode.key, message.request, message.ask, seconds))

    def _thought(self, episode: _Episode) -> float:
        """Return for how many seconds an agent has had no request open."""
        return 0.0 if episode.call != "agent" or episode.requests else self._clock.now_s() - episode.since_s

    def _give_up(self, site: _Site, episode: _Episode) -> None:
        reason = f"timed out after {self._step_limit_s:g} s"
        if self._abandons(site.host, episode.number):
            self.num_restarts += 1
            self._remove(site, episode, _lost(episode, reason, is_guilty=True))
        else:
            self._replace(site, reason, guilty={episode.number})

    def _remove(self, site: _Site, episode: _Episode, last: LastWord | Lost) -> None:
        del site.episodes[episode.number], self._site_of[episode.number]
        if not episode.is_shut:
            del self._by_key[episode.key]
            self._done.append(last)

    def _replace(self, site: _Site, reason: str, *, guilty: Collection[int] | None = None) -> None:
        """End a host and start another. Its episodes are lost: by the `guilty`, else by one of those with a call.

        Where none has a call any of them may have left something behind, such as a thread.
        """
        self._sites.remove(site)
        self._selector.unregister(site.host)
        site.host.close()
        if not site.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise ExecutorDied(
                    f"{self._failed_starts} workers of environments in a row ended before they were ready",
                    got=reason,
                    hint="raise environment.memory_mb, or see `slipstream doctor`",
                )
        self.num_restarts += 1
        calling = [one.number for one in site.episodes.values() if one.call is not None]
        is_sure = guilty is not None or len(calling) == 1
        suspects = guilty or calling or list(site.episodes)
        for episode in list(site.episodes.values()):
            is_guilty = (True if is_sure else None) if episode.number in suspects else False
            told = reason if is_guilty is not False else f"another episode of its worker: {reason}"
            self._remove(site, episode, _lost(episode, told, is_guilty=is_guilty, is_suspected=guilty is None))
        self._start()

    def _watch(self, site: _Site) -> None:
        """Wake for writability exactly while something waits to be written."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if site.host.has_unsent else 0)
        if self._selector.get_key(site.host).events != events:
            self._selector.modify(site.host, events, site)


def _checked(episode: _Episode, spoke: Spoke, *, max_chars: int) -> Said:
    """Return what a host says that an environment said. _LieError or EnvironmentFault where that cannot be."""
    if spoke.reward is not None and not math.isfinite(spoke.reward):
        raise _LieError("a reward is finite")
    counts = (spoke.num_tool_calls, spoke.num_tool_errors, spoke.state_bytes)
    if not 0 <= spoke.seconds < math.inf or not all(0 <= count <= MAX_COUNT for count in counts):
        raise _LieError("a count below 0, or beyond all bounds")
    if spoke.state is not None and not (episode.keeps_state and len(spoke.state.encode()) <= MAX_STATE_BYTES):
        raise _LieError("a state that nobody asked for, or too large")
    return Said(
        key=episode.key,
        turn=spoke.turn,
        messages=as_messages(spoke.messages, max_chars=max_chars),
        is_done=spoke.done,
        reward=spoke.reward,
        seconds=spoke.seconds,
        num_tool_calls=spoke.num_tool_calls,
        num_tool_errors=spoke.num_tool_errors,
        extends_prompt=spoke.extends_prompt,
        state=spoke.state,
        state_bytes=spoke.state_bytes,
    )


def _lost(episode: _Episode, reason: str, *, is_guilty: bool | None, is_suspected: bool = False) -> Lost:
    """The failure of an episode, with what its environment could not know."""
    told = f"{reason} ({NO_NETWORK})" if episode.has_asked_network else reason
    return Lost(episode.key, told, is_guilty, is_suspected)
