"""The prefix table: keys and values of prompts, made once for everybody who begins with the same tokens.

The context of an episode's later turn is in the table too, but belongs to that turn alone: it begins with the session's
parked keys, if there are any (`parked.py`), and is forgotten when the turn has its row. So is that of a fork, a branch
that begins as another one of its episode does: it begins with keys that are parked for that one, which stay there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slipstream.generator.parked import ParkedSessions
from slipstream.generator.requests import Session
from slipstream.generator.runner import Chunk, Prefix, Runner


class TurnKey(NamedTuple):
    """The key of a later turn's context."""

    session: Session
    tokens: bytes


class VersionKey(NamedTuple):
    """The key of a prompt for those who go on with `version`, whichever is the newest."""

    version: int
    tokens: bytes


PrefixKey = bytes | VersionKey | TurnKey
"""The bytes of a prompt's tokens, also with a version, or the key of a later turn."""


@dataclass(eq=False)
class StoredPrefix:
    """An entry: its tokens, where it lies, and how much of it is filled (or will be when this step's work is)."""

    context: np.ndarray  # int32 [n]
    storage: Prefix
    num_done: int = 0
    is_used: bool = False
    num_parked: int = 0  # tokens whose keys were parked
    num_lost: int = 0  # tokens whose keys had been made before, and must be made again
    kv_version: int | None = None  # of the oldest parked key; None: all are made under the present version

    @property
    def is_complete(self) -> bool:
        return self.num_done == len(self.context)

    def next_chunk(self, num_tokens: int, version: int) -> Chunk | None:
        """The next `num_tokens` tokens to prefill, fewer at the end; None when there are none. Does not take them."""
        tokens = self.context[self.num_done : self.num_done + num_tokens]
        return Chunk(self.storage, tokens, self.num_done, version) if len(tokens) else None


class PrefixTable:
    """Prefixes by key, made under one version but for parked keys: the engine clears the table with every swap.

    Requests that wait say which key they want; of prompts that nobody wants up to `cache_tokens` tokens are kept, and
    those used longest ago go first. Of turns nothing is kept that nobody wants.
    """

    def __init__(self, runner: Runner, cache_tokens: int, parked: ParkedSessions) -> None:
        self._runner, self._cache_tokens, self._parked = runner, cache_tokens, parked
        self._entries: OrderedDict[PrefixKey, StoredPrefix] = OrderedDict()  # least recently used first
        self._wanted: Counter[PrefixKey] = Counter()
        self._forgotten: set[bytes | VersionKey] = set()  # wanted, whose keys were there, in part at least

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._entries

    def __getitem__(self, key: PrefixKey) -> StoredPrefix:
        return self._entries[key]

    def want(self, key: PrefixKey) -> None:
        """One more request waits that begins with `key`."""
        self._wanted[key] += 1
        if isinstance(key, TurnKey):
            self._parked.want(key.session)

    def unwant(self, key: PrefixKey, count: int = 1) -> None:
        """Count `count` requests fewer that wait for `key`; call `trim` afterwards."""
        if isinstance(key, TurnKey):
            self._parked.unwant(key.session, count)
        self._wanted[key] -= count
        if self._wanted[key] == 0:
            del self._wanted[key]
            if not isinstance(key, TurnKey):
                self._forgotten.discard(key)

    def was_forgotten(self, key: PrefixKey) -> bool:
        """Whether somebody who still waits for `key` has seen its prefix made before."""
        return key in self._forgotten

    def get_or_open(
        self,
        key: PrefixKey,
        context: np.ndarray,
        in_use: Collection[PrefixKey],
        *,
        even_wanted: bool,
        fork: Session | None = None,
    ) -> StoredPrefix | None:
        """The entry of `key`, made if need be, for which others are forgotten as in `evict`; None without memory.

        That of a `fork` begins with the parked keys of another branch of its episode, as far as these go.
        """
        entry = self._entries.get(key)
        session = key.session if isinstance(key, TurnKey) else None
        while entry is None:
            entry = self._open(session, context, fork)
            if entry is not None:
                self._entries[key] = entry
            elif not self.evict(in_use, even_wanted=even_wanted, but=session):
                return None
        self._entries.move_to_end(key)
        return entry

    def _open(self, session: Session | None, context: np.ndarray, fork: Session | None) -> StoredPrefix | None:
        """A new entry, which takes over the parked keys of `session`; None without memory, and these stay then."""
        if fork is not None and (near := self._parked.nearest(fork, context)) is not None:
            shared = self._runner.share_prefix(near[0].storage, near[1], len(context))
            if shared is None:
                return None
            of_fork, num_done = shared
            kv_version = near[0].kv_version if num_done else None
            return StoredPrefix(context, of_fork, num_done, num_parked=num_done, kv_version=kv_version)
        parked = None if session is None else self._parked.find(session, context)
        if session is None or parked is None:
            storage = self._runner.open_prefix(len(context))
            if storage is None:
                return None
            num_lost = 0 if session is None else self._parked.take_lost(session)
            return StoredPrefix(context, storage, num_lost=num_lost)
        storage = self._runner.extend_prefix(parked.storage, len(context))
        if storage is None:
            return None
        self._parked.take(session)
        num_parked = len(parked.tokens)
        return StoredPrefix(context, storage, num_parked, num_parked=num_parked, kv_version=parked.kv_version)

    def evict(self, in_use: Collection[PrefixKey], *, even_wanted: bool, but: Session | None = None) -> bool:
        """Forget one thing: the least recently used prefix that nobody waits for, the longest idle session, or,
        `even_wanted`, a session or a prefix that somebody does wait for. None that is `in_use`, nor the session `but`.
        """
        unused = [key for key in self._entries if key not in in_use]
        key = next((key for key in unused if key not in self._wanted), None)
        if key is None and self._parked.evict(even_waiting=even_wanted, but=but):
            return True
        if key is None and even_wanted:
            key = next(iter(unused), None)
        if key is None:
            return False
        self._forget(key)
        return True

    def trim(self) -> None:
        """Keep no more of the prefixes that nobody waits for than the cache may hold."""
        unwanted = [key for key in self._entries if key not in self._wanted]
        for turn in [key for key in unwanted if self._is_of_turn(key)]:
            unwanted.remove(turn)
            self._forget(turn)
        num_tokens = sum(len(self._entries[key].context) for key in unwanted)
        for key in unwanted:
            if num_tokens <= self._cache_tokens:
                return
            num_tokens -= len(self._entries[key].context)
            self._forget(key)

    def clear(self, oldest: int | None, *, keeps_versions: bool = False) -> None:
        """Forget all entries: the weights have changed. Who waits goes on waiting.

        Those that parked keys begin stay, as rows do, unless they are older than the version `oldest`, if it is given.
        With `keeps_versions` those stay that somebody wants who goes on with an older version.
        """
        for key, entry in list(self._entries.items()):
            if keeps_versions and key in self._wanted and not isinstance(key, bytes):
                continue
            is_older = oldest is not None and entry.kv_version is not None and entry.kv_version < oldest
            if entry.kv_version is None or not isinstance(key, TurnKey) or is_older:
                self._forget(key)

    def _is_of_turn(self, key: PrefixKey) -> bool:
        """Whether nothing is kept of it for others: keys of an episode are in it."""
        return isinstance(key, TurnKey) or self._entries[key].kv_version is not None

    def _forget(self, key: PrefixKey) -> None:
        entry = self._entries.pop(key)
        self._runner.close_prefix(entry.storage)
        if key not in self._wanted:
            return
        num_lost = max(entry.num_done, entry.num_lost)
        if isinstance(key, TurnKey):
            self._parked.note_lost(key.session, num_lost)
        elif num_lost:
            self._forgotten.add(key)
