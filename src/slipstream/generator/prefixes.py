"""The prefix table: keys and values of prompts, made once for everybody who begins with the same tokens."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from slipstream.generator.runner import Chunk, Prefix, Runner


@dataclass(eq=False)
class StoredPrefix:
    """An entry: its tokens, where it lies, and how much of it is filled (or will be when this step's work is)."""

    context: np.ndarray  # int32 [n]
    storage: Prefix
    num_done: int = 0
    is_used: bool = False

    @property
    def is_complete(self) -> bool:
        return self.num_done == len(self.context)

    def next_chunk(self, num_tokens: int) -> Chunk | None:
        """The next `num_tokens` tokens to prefill, fewer at the end; None when there are none. Does not take them."""
        tokens = self.context[self.num_done : self.num_done + num_tokens]
        return Chunk(self.storage, tokens, self.num_done) if len(tokens) else None


class PrefixTable:
    """Prefixes by key (the tokens' bytes), all made under one version: the engine clears the table with every swap.

    Requests that wait say which key they want; of prefixes that nobody wants up to `cache_tokens` tokens are kept,
    and those used longest ago go first.
    """

    def __init__(self, runner: Runner, cache_tokens: int) -> None:
        self._runner, self._cache_tokens = runner, cache_tokens
        self._entries: OrderedDict[bytes, StoredPrefix] = OrderedDict()  # least recently used first
        self._wanted: Counter[bytes] = Counter()
        self._forgotten: set[bytes] = set()  # wanted ones whose keys and values were there, in part at least

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __getitem__(self, key: bytes) -> StoredPrefix:
        return self._entries[key]

    def want(self, key: bytes) -> None:
        """One more request waits that begins with `key`."""
        self._wanted[key] += 1

    def unwant(self, key: bytes, count: int = 1) -> None:
        """So many fewer; `trim` when done."""
        self._wanted[key] -= count
        if self._wanted[key] == 0:
            del self._wanted[key]
            self._forgotten.discard(key)

    def was_forgotten(self, key: bytes) -> bool:
        """Whether somebody who still waits for `key` has seen its prefix made before."""
        return key in self._forgotten

    def get_or_open(
        self, key: bytes, context: np.ndarray, in_use: Collection[bytes], *, even_wanted: bool
    ) -> StoredPrefix | None:
        """The entry of `key`, made if need be, for which others are forgotten as in `evict`; None without memory."""
        entry = self._entries.get(key)
        if entry is None:
            while (storage := self._runner.open_prefix(len(context))) is None:
                if not self.evict(in_use, even_wanted=even_wanted):
                    return None
            entry = self._entries[key] = StoredPrefix(context, storage)
        self._entries.move_to_end(key)
        return entry

    def evict(self, in_use: Collection[bytes], *, even_wanted: bool) -> bool:
        """Forget the least recently used prefix that nobody waits for, or that somebody does, but none `in_use`."""
        for key in self._entries:
            if key not in in_use and (even_wanted or key not in self._wanted):
                self._forget(key)
                return True
        return False

    def trim(self) -> None:
        """Keep no more of the prefixes that nobody waits for than the cache may hold."""
        unwanted = [key for key in self._entries if key not in self._wanted]
        num_tokens = sum(len(self._entries[key].context) for key in unwanted)
        for key in unwanted:
            if num_tokens <= self._cache_tokens:
                return
            num_tokens -= len(self._entries[key].context)
            self._forget(key)

    def clear(self) -> None:
        """Forget all entries: the weights have changed. Who waits goes on waiting."""
        for key in list(self._entries):
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._runner.close_prefix(entry.storage)
        if key in self._wanted and entry.num_done:
            self._forgotten.add(key)
