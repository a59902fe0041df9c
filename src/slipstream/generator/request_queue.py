"""The requests that wait for a row: their order, and which chunk of which prompt is prefilled next."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slipstream.generator.noise import noise_keys
from slipstream.generator.prefixes import PrefixKey, PrefixTable, StoredPrefix, TurnKey, VersionKey
from slipstream.generator.requests import Request, Session
from slipstream.generator.runner import Chunk, RowStates
from slipstream.generator.stats import EngineStats


@dataclass(frozen=True, eq=False)
class QueuedRequest:
    """A request and the prefix it needs. `was_live`: it left its row unfinished in this engine.

    `version` is that of the weights it goes on with, whichever is the newest; None: the newest when it gets a row.
    """

    request: Request
    context: np.ndarray  # int32: the tokens to prefill, all known ones but the last
    last_token: int
    key: PrefixKey
    was_live: bool
    version: int | None = None

    @classmethod
    def of(cls, request: Request, *, was_live: bool, version: int | None) -> QueuedRequest:
        known = request.prompt_tokens.astype(np.int32)
        if request.resume is not None:
            known = np.concatenate([known, request.resume.tokens.astype(np.int32)])
        context = known[:-1]
        tokens = context.tobytes()
        key: PrefixKey = tokens if version is None or not tokens else VersionKey(version, tokens)
        if request.num_before:
            key = TurnKey(request.session, tokens)
        return cls(request, context, int(known[-1]), key, was_live, version)

    def version_or(self, newest: int) -> int:
        return newest if self.version is None else self.version

    @property
    def fork(self) -> Session | None:
        """The session, where it is a further branch of its episode and has no turn."""
        return self.request.session if self.request.branch and not self.request.num_before else None

    @property
    def is_again(self) -> bool:
        """Whether its keys and values have been made before, here or elsewhere."""
        return self.request.is_again or self.has_begun

    @property
    def has_begun(self) -> bool:
        """Whether it has had a row before, here or elsewhere."""
        return self.was_live or self.request.resume is not None

    def passes_pause(self, *, also_turns: bool = True) -> bool:
        """Whether it may start while what is new may not; `also_turns`: further turns that have no token yet, too."""
        return self.has_begun or (also_turns and self.request.goes_on)


class RequestQueue:
    """Waiting requests in their order: those that were live here, then resumed ones and further turns, then new ones.

    No more of them are looked at than `num_rows`. While `is_paused`, only those that have begun, and further turns of
    episodes that have (not with `holds_turns`), may start. `bound_to` says which version a request must go on with, if
    any.
    """

    def __init__(
        self, prefixes: PrefixTable, num_rows: int, stats: EngineStats, bound_to: Callable[[Request], int | None]
    ) -> None:
        self._prefixes, self._num_rows, self._stats, self._bound_to = prefixes, num_rows, stats, bound_to
        self._queue: deque[QueuedRequest] = deque()
        self.num_left = 0
        """Requests in the queue that were live here."""
        self.is_paused = self.holds_turns = False

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._queue)

    @property
    def num_begun(self) -> int:
        """Requests in the queue that have begun, here or elsewhere."""
        return sum(entry.has_begun for entry in self._queue)

    @property
    def versions(self) -> set[int]:
        """Those that waiting requests go on with."""
        return {entry.version for entry in self._queue if entry.version is not None}

    def add(self, requests: Sequence[Request], *, was_live: bool) -> None:
        """Queue `requests` in this order: what has begun before all others of its kind, the rest behind."""
        resumed: list[QueuedRequest] = []
        for request in requests:
            entry = QueuedRequest.of(request, was_live=was_live, version=self._bound_to(request))
            self._prefixes.want(entry.key)
            if request.goes_on and not entry.has_begun:
                self._queue.insert(self._num_ahead(), entry)
            elif not entry.has_begun:
                self._queue.append(entry)
            else:
                resumed.append(entry)
        ahead = 0 if was_live else self.num_left
        self._queue.rotate(-ahead)
        self._queue.extendleft(reversed(resumed))
        self._queue.rotate(ahead)
        self.num_left += len(requests) if was_live else 0

    def _num_ahead(self) -> int:
        """Return how many go before a further turn that comes now."""
        new = (place for place, entry in enumerate(self._queue) if not (entry.has_begun or entry.request.goes_on))
        return next(new, len(self._queue))

    def remove(self, started: Collection[QueuedRequest]) -> None:
        """Take these candidates, which are in rows now, out of the queue."""
        gone = {id(entry) for entry in started}
        head = [self._queue.popleft() for _ in range(min(len(self._queue), self._num_rows))]
        self._queue.extendleft(entry for entry in reversed(head) if id(entry) not in gone)
        self.num_left -= sum(entry.was_live for entry in started)

    def take(self, is_taken: Callable[[QueuedRequest], bool]) -> list[Request]:
        """Take those for which this holds out of the queue."""
        taken = [entry for entry in self._queue if is_taken(entry)]
        gone = {id(entry) for entry in taken}
        self._queue = deque(entry for entry in self._queue if id(entry) not in gone)
        self.num_left -= sum(entry.was_live for entry in taken)
        for entry in taken:
            self._prefixes.unwant(entry.key)
        self._prefixes.trim()
        return [entry.request for entry in taken]

    def stop_parking(self, session: Session) -> None:
        """Let the requests of `session` no longer park."""
        for index, entry in enumerate(self._queue):
            if entry.request.parks and entry.request.session == session:
                self._queue[index] = replace(entry, request=replace(entry.request, parks=False))

    def let_go_on(self, session: Session) -> None:
        """Let the other branches of an episode that has begun go before what is new, also while paused."""
        held = [
            entry
            for entry in self._queue
            if entry.request.parks and not entry.passes_pause() and entry.request.session[:3] == session[:3]
        ]
        for entry in held:
            self._queue.remove(entry)
            going = replace(entry, request=replace(entry.request, goes_on=True))
            self._queue.insert(self._num_ahead(), going)

    def candidates(self) -> Iterator[QueuedRequest]:
        """Yield the requests that may start, in their order."""
        for entry in itertools.islice(self._queue, self._num_rows):
            if not self.is_paused or entry.passes_pause(also_turns=not self.holds_turns):
                yield entry

    def ready(self) -> Iterator[QueuedRequest]:
        """Yield the candidates whose prompts are stored. They pass those whose prompts are being stored, since they
        would idle otherwise, but none that has nothing stored: it may lack the memory that they would take."""
        for entry in self.candidates():
            if entry.key and entry.key not in self._prefixes:
                return
            if self._is_ready(entry):
                yield entry

    def choose_chunks(
        self, num_wanted: int, *, newest: int, budget_tokens: int, chunk_tokens: int, even_wanted: bool
    ) -> list[Chunk]:
        """Choose the next chunk of each prompt, oldest first, until `num_wanted` requests can start or the budget is
        spent. `newest` is the version of those that are bound to none.

        The first in line always gets on by a chunk, so nobody waits for ever. A chunk too long ends the budget, and a
        prompt whose turn has not come holds no memory, which rows may need. With `even_wanted`, prefixes that others
        wait for may be forgotten for it.
        """
        chunks: list[Chunk] = []
        prefixes: dict[PrefixKey, StoredPrefix] = {}
        num_ready = 0
        for entry in self.candidates():
            if num_ready == num_wanted or budget_tokens <= 0:
                break
            if entry.key and entry.key not in prefixes:
                prefix = self._prefixes.get_or_open(
                    entry.key, entry.context, prefixes, even_wanted=even_wanted, fork=entry.fork
                )
                if prefix is None:
                    break
                prefixes[entry.key] = prefix
                if (chunk := prefix.next_chunk(chunk_tokens, entry.version_or(newest))) is not None:
                    budget_tokens -= len(chunk.tokens)
                    if budget_tokens >= 0 or not chunks:
                        prefix.num_done += len(chunk.tokens)
                        chunks.append(chunk)
                        self._count(entry, prefix, chunk)
            num_ready += self._is_ready(entry)
        return chunks

    def _count(self, entry: QueuedRequest, prefix: StoredPrefix, chunk: Chunk) -> None:
        """Count the tokens of `chunk`, and those whose keys and values have been made before."""
        num_again = len(chunk.tokens)
        if not entry.is_again and not self._prefixes.was_forgotten(entry.key):
            num_again = min(max(0, prefix.num_lost - chunk.start), num_again)
        self._stats.prefilled_tokens += len(chunk.tokens)
        self._stats.re_prefilled_tokens += num_again
        self._stats.parked_missed_tokens += num_again if entry.request.num_before and not entry.has_begun else 0

    def _is_ready(self, entry: QueuedRequest) -> bool:
        return not entry.key or self._prefixes[entry.key].is_complete


def row_states(entries: Sequence[QueuedRequest], seed: int, newest: int) -> RowStates:
    """Return how the rows of `entries` begin, in a run of `seed`, while `newest` is the newest version."""
    requests = [entry.request for entry in entries]
    return RowStates(
        input_tokens=np.array([entry.last_token for entry in entries], dtype=np.int64),
        positions=np.array([len(entry.context) for entry in entries], dtype=np.int64),
        num_new=np.array([r.num_before + (len(r.resume.tokens) if r.resume else 0) for r in requests], dtype=np.int64),
        noise_keys=noise_keys(seed, [request.noise_coordinates for request in requests]),
        temperatures=np.array([r.temperature for r in requests], dtype=np.float32),
        top_k=np.array([r.top_k for r in requests], dtype=np.int64),
        top_p=np.array([r.top_p for r in requests], dtype=np.float32),
        min_p=np.array([r.min_p for r in requests], dtype=np.float32),
        keep_sets=np.array([r.keep_sets for r in requests], dtype=bool),
        versions=np.array([entry.version_or(newest) for entry in entries], dtype=np.int64),
    )
