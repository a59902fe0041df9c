"""Parked sessions: the keys and values of episodes between two of their turns.

At the end of a turn its row is freed, and its keys stay here under the episode's (stream, ordinal, sample). The next
turn takes them over, and only the tokens that came since are prefilled. It is a cache: what is given up is prefilled
again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.generator.requests import Session
from slipstream.generator.runner import Prefix, Runner
from slipstream.generator.stats import EngineStats

MOST_LOST = 65_536
"""Sessions whose keys are gone, and of which the number is still known: only to count what is computed again."""


@dataclass(frozen=True, eq=False)
class ParkedKeys:
    """The keys and values of a session's first n tokens, its last sampled one not included, and where they lie."""

    tokens: np.ndarray  # int32 [n]
    storage: Prefix
    kv_version: int  # of the oldest key


class ParkedSessions:
    """Parked keys by session, at most `max_tokens` tokens of them (None: any number), longest idle given up first.

    A session whose next turn waits is not idle: it is given up after all others, those that wait longest last.
    """

    def __init__(self, runner: Runner, max_tokens: int | None, stats: EngineStats) -> None:
        if max_tokens is not None and max_tokens < 0:
            raise ConfigError("parked_tokens must not be negative", got=max_tokens, hint="None is without a bound")
        self._runner, self._max_tokens, self._stats = runner, max_tokens, stats
        self._parked: OrderedDict[Session, ParkedKeys] = OrderedDict()  # longest idle first
        self._waiting: Counter[Session] = Counter()  # requests in the queue
        self._lost: OrderedDict[Session, int] = OrderedDict()  # number of tokens whose keys were made and are gone
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, session: Session) -> bool:
        return session in self._parked

    def make_room(self, session: Session, num_tokens: int) -> bool:
        """Give up idle sessions until `num_tokens` more may be parked for `session`.

        False, giving up none, where even that would not do; `session` counts as given up then.
        """
        self.drop(session)
        if self._max_tokens is None:
            return True
        idle = sum(len(parked.tokens) for key, parked in self._parked.items() if key not in self._waiting)
        if self.num_tokens - idle + num_tokens > self._max_tokens:
            self.note_lost(session, num_tokens)
            self._stats.evicted_sessions += self._max_tokens > 0
            return False
        while self.num_tokens + num_tokens > self._max_tokens:
            self.evict(even_waiting=False)
        return True

    def put(self, session: Session, parked: ParkedKeys) -> None:
        """Park the keys of a session that has none parked; `make_room` comes first."""
        assert session not in self._parked, "two caches of one session"
        self._lost.pop(session, None)
        self._parked[session] = parked
        self.num_tokens += len(parked.tokens)

    def find(self, session: Session, context: np.ndarray) -> ParkedKeys | None:
        """The session's keys, where `context`, int32 [n], begins with exactly their tokens; else they are dropped."""
        parked = self._parked.get(session)
        if parked is None:
            return None
        num_same = num_common(parked.tokens, context)
        if num_same == len(parked.tokens):
            return parked
        self.drop(session)
        self.note_lost(session, num_same)
        self._stats.mismatched_sessions += 1
        return None

    def nearest(self, session: Session, context: np.ndarray) -> tuple[ParkedKeys, int] | None:
        """The keys of that branch of the episode with which `context` has most tokens in common, and how many."""
        branches = [parked for key, parked in self._parked.items() if key[:3] == session[:3]]
        found = [(parked, num_common(parked.tokens, context)) for parked in branches]
        return max(found, key=lambda one: one[1], default=None)

    def take(self, session: Session) -> None:
        """The session's keys belong to its next turn from here on."""
        self.num_tokens -= len(self._parked.pop(session).tokens)

    def drop(self, session: Session) -> None:
        """Forget the session's keys, if there are any, and their number."""
        self._lost.pop(session, None)
        if session in self._parked:
            self._runner.close_prefix(self._parked[session].storage)
            self.take(session)

    def forget_older(self, oldest: int) -> None:
        """Give up the sessions with a key of a version before `oldest`."""
        for session in [key for key, parked in self._parked.items() if parked.kv_version < oldest]:
            self._give_up(session)

    def evict(self, *, even_waiting: bool, but: Session | None = None) -> bool:
        """Give up the session that has been idle longest; without one, the one that waits last. Whether there was."""
        idle = (key for key in self._parked if key not in self._waiting and key != but)
        session = next(idle, None)
        if session is None and even_waiting:
            session = next((key for key in reversed(self._parked) if key != but), None)
        if session is None:
            return False
        self._give_up(session)
        self._stats.evicted_sessions += 1
        return True

    # The queue

    def want(self, session: Session) -> None:
        """One more turn of `session` waits."""
        self._waiting[session] += 1
        if session in self._parked:
            self._parked.move_to_end(session)

    def unwant(self, session: Session, count: int) -> None:
        """Count `count` requests of `session` fewer that wait."""
        self._waiting[session] -= count
        if self._waiting[session] == 0:
            del self._waiting[session]

    # Lost keys

    def note_lost(self, session: Session, num_tokens: int) -> None:
        """Keys of the session's first `num_tokens` tokens were made, and are gone."""
        self._lost[session] = num_tokens
        self._lost.move_to_end(session)
        if len(self._lost) > MOST_LOST:
            self._lost.popitem(last=False)

    def take_lost(self, session: Session) -> int:
        """How many of the session's first tokens are made again when all are; they will not be lost any more."""
        return self._lost.pop(session, 0)

    def _give_up(self, session: Session) -> None:
        num_tokens = len(self._parked[session].tokens)
        self.drop(session)
        self.note_lost(session, num_tokens)


def num_common(left: np.ndarray, right: np.ndarray) -> int:
    """Return the length of the longest common beginning of two arrays, [n] and [m]."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length
