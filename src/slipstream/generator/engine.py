"""Continuous batching: prompts in, completions out, weights replaced between two steps.

One step admits waiting requests whose prompts are stored into free rows, decodes ONE token for every live row, samples,
and retires what finished. Prompts are prefilled within a token budget, once for their group, in the pass that decodes
or in one of their own, as suits the runner. The engine knows nothing of processes, channels or configuration; whoever
drives it replaces the weights between two steps and says so with `set_version`. The model is a `Runner`'s business.

The prefill covers all tokens but the last; that one is the first the row decodes. So every sampled token comes out of
the same decode path, a completion's first one and a resumed one's included, and a prefix is keys and values only.

A sequence may leave its row unfinished: exported, preempted for want of memory, or because its cache is to be made anew
under new weights. In all three cases it becomes a request that carries what it has generated, goes before everything
that has not started, and continues with the same noise. Its prefilled keys differ from decoded ones in rounding only,
and are made by the present weights.

On a CPU a completion's tokens and logprobs depend, bit for bit, on nothing but its request and the weights: not on its
neighbours, row, the number of rows or the budget (conditions and evidence: `kv_cache.py`, `noise.py`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from slipstream.core.clock import Clock, WallClock
from slipstream.core.errors import ConfigError, NonFiniteError
from slipstream.core.executor import NoSpans
from slipstream.core.types import FinishReason, VersionSpan
from slipstream.generator.kept import KeptRecorder
from slipstream.generator.noise import noise_keys
from slipstream.generator.prefixes import PrefixTable, StoredPrefix
from slipstream.generator.requests import (
    Finished,
    KvOnUpdate,
    Request,
    Resume,
    StateSpans,
    check_request,
    extended_spans,
)
from slipstream.generator.runner import Chunk, Prefix, RowStates, Runner

PREFILL_CHUNK = 512
"""Prompts longer than this are prefilled in pieces, whose places do not depend on the step's budget: so bits do not."""
ROWS_PER_REQUEST_AHEAD = 8
"""For so many rows the prompt of one waiting request is stored before a row is free: a stop token may free one."""


@dataclass
class EngineStats:
    """Cumulative. `prefilled_tokens` are those that were computed, of these `re_prefilled_tokens` not for the first
    time; `preemptions` were for want of memory."""

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    re_prefilled_tokens: int = 0
    prefix_hits: int = 0  # prompts found in the table of an earlier request
    preemptions: int = 0
    recomputed_caches: int = 0


@dataclass(frozen=True, eq=False)
class _Waiting:
    request: Request
    context: np.ndarray  # int32: the tokens to prefill, all known ones but the last
    last_token: int
    key: bytes
    was_live: bool  # left its row unfinished in this engine; goes on even while admission is paused

    @property
    def is_again(self) -> bool:
        """Whether its keys and values have been made before, here or elsewhere."""
        return self.was_live or self.request.is_again or self.request.resume is not None


@dataclass(eq=False)
class _Live:
    """The part of a row's state that no step touches."""

    request: Request
    version_spans: list[VersionSpan]
    started_s: float
    kv_version: int  # that of its oldest key
    kept: KeptRecorder | None


@dataclass(eq=False)
class _Rows:
    """What the engine remembers of every row. Numpy arrays, so that a step costs few small operations."""

    is_live: np.ndarray  # bool [rows]
    num_new: np.ndarray  # int64 [rows]
    max_new: np.ndarray  # int64 [rows]
    ends_s: np.ndarray  # float64 [rows]: when its time is over
    starts: np.ndarray  # int64 [rows]: counts up with every start; the largest is the youngest
    tokens: np.ndarray  # int32 [rows, max_len]
    logprobs: np.ndarray  # float32 [rows, max_len]
    live: list[_Live | None] = field(default_factory=list)

    @classmethod
    def empty(cls, num_rows: int, max_len: int) -> _Rows:
        return cls(
            is_live=np.zeros(num_rows, dtype=bool),
            num_new=np.zeros(num_rows, dtype=np.int64),
            max_new=np.ones(num_rows, dtype=np.int64),
            ends_s=np.full(num_rows, np.inf),
            starts=np.zeros(num_rows, dtype=np.int64),
            tokens=np.zeros((num_rows, max_len), dtype=np.int32),
            logprobs=np.zeros((num_rows, max_len), dtype=np.float32),
            live=[None] * num_rows,
        )

    def move(self, sources: list[int], destinations: list[int]) -> None:
        for each in fields(self):
            values = getattr(self, each.name)
            if isinstance(values, np.ndarray):
                values[destinations] = values[sources]
        for source, destination in zip(sources, destinations, strict=True):
            self.live[destination], self.live[source] = self.live[source], None
        self.is_live[sources] = False


class Engine:
    """Decodes up to `runner.num_rows` completions at a time (see the module's docstring).

    `prefill_tokens` bounds the prompt tokens of one step, so that admission never stalls decoding for long; one chunk
    (`PREFILL_CHUNK`) is always made. `prefix_cache_tokens` bounds what is kept of prompts that nobody waits for any
    more, until the version changes. `seed` is the run's.

    The driver's loop: `submit` whenever there are requests; `step` until `is_idle`; between two steps `set_version`,
    `pause_admission`, `preempt` or `export_live`.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        seed: int,
        stop_token_ids: Sequence[int],
        prefill_tokens: int = 512,
        prefill_chunk: int = PREFILL_CHUNK,
        prefix_cache_tokens: int = 0,
        version: int = 0,
        spans: StateSpans | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.version = version
        self.stats = EngineStats()
        self._runner = runner
        self._seed = seed
        self._prefill_tokens, self._prefill_chunk = prefill_tokens, prefill_chunk
        self._spans: StateSpans = spans if spans is not None else NoSpans()
        self._clock = clock if clock is not None else WallClock()
        self._stop_ids = np.unique(np.asarray(stop_token_ids, dtype=np.int64))
        self._is_paused = False
        self._waiting: deque[_Waiting] = deque()  # those that were live here, then resumed ones, then new ones
        self._num_left = 0  # waiting requests that were live here
        self._num_starts = 0
        self._prefixes = PrefixTable(runner, prefix_cache_tokens)
        self._rows = _Rows.empty(runner.num_rows, runner.max_len)

    @property
    def max_len(self) -> int:
        return self._runner.max_len

    @property
    def num_live(self) -> int:
        """Completions that have begun here and are not finished; those that wait to get back into a row included."""
        return int(np.count_nonzero(self._rows.is_live)) + self._num_left

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun here."""
        return len(self._waiting) - self._num_left

    @property
    def num_free_rows(self) -> int:
        return self._runner.num_rows - int(np.count_nonzero(self._rows.is_live))

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._rows.is_live.any()

    @property
    def num_re_prefilled(self) -> int:
        return self.stats.re_prefilled_tokens

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue `requests` in this order; resumed ones go before everything that has not started.

        Raises ConfigError for a request that can never fit, before queueing any.
        """
        for request in requests:
            check_request(request, max_len=self.max_len)
        self._enqueue(requests, was_live=False)

    def pause_admission(self, is_paused: bool) -> None:
        """While paused no waiting request starts; live ones go on. Draining before a swap between batches."""
        self._is_paused = is_paused

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Prefill within the budget, admit, decode one token per live row, return what finished."""
        has_prefilled = self._prefill_alone()
        with self._spans.span("decode"):
            self._admit()
            if not self._rows.is_live.any():
                return []
            self._make_room()
            if not self._waiting or self._is_paused:
                self._compact()
            return self._decode(() if has_prefilled else self._chunks_beside())

    def set_version(self, version: int, *, kv_on_update: KvOnUpdate = "keep", max_kv_age: int = 0) -> None:
        """The model's weights are `version` from here on; call between two steps, after they were replaced.

        Tokens and behaviour logprobs stay. Live sequences keep the keys and values that old weights made
        ("keep"), or those who hold any key older than `max_kv_age` versions ("recompute": 0) leave their rows and are
        prefilled again within the budget of the next steps, so that the others go on meanwhile. Shared prefixes are
        forgotten in every case.
        """
        self.version = version
        self._prefixes.clear()
        rows = np.flatnonzero(self._rows.is_live).tolist()
        for row in rows:
            live = self._live_at(row)
            live.version_spans = extended_spans(live.version_spans, start=int(self._rows.num_new[row]), version=version)
        if kv_on_update != "keep":
            oldest = version if kv_on_update == "recompute" else version - max_kv_age
            stale = [row for row in rows if self._live_at(row).kv_version < oldest]
            self.stats.recomputed_caches += len(stale)
            self._requeue(stale)

    def preempt(self, count: int) -> None:
        """Take the `count` youngest live sequences out of their rows; they go on as soon as there is room."""
        rows = np.flatnonzero(self._rows.is_live)
        self._requeue(rows[np.argsort(-self._rows.starts[rows])][:count].tolist())

    def begun(self) -> list[Request]:
        """Every completion that has tokens, as `submit` could resume it elsewhere; here it goes on undisturbed."""
        requests = [entry.request for entry in self._waiting if entry.request.resume is not None]
        requests += [
            self._resumable(row) for row in np.flatnonzero(self._rows.is_live & (self._rows.num_new > 0)).tolist()
        ]
        return sorted(requests, key=lambda request: (request.stream, request.ordinal, request.sample))

    def export_live(self) -> list[Request]:
        """Take every live completion out, resumable by `submit` here or elsewhere; by ordinal and sample."""
        left = [entry for entry in self._waiting if entry.was_live]
        self._waiting = deque(entry for entry in self._waiting if not entry.was_live)
        self._num_left = 0
        for entry in left:
            self._prefixes.unwant(entry.key)
        self._prefixes.trim()
        exported = [entry.request for entry in left]
        exported.extend(self._leave(np.flatnonzero(self._rows.is_live).tolist()))
        return sorted(exported, key=lambda request: (request.stream, request.ordinal, request.sample))

    # Rows

    def _live_at(self, row: int) -> _Live:
        live = self._rows.live[row]
        assert live is not None, f"row {row} is not live"
        return live

    def _close(self, rows: list[int]) -> None:
        self._runner.close_rows(rows)
        self._rows.is_live[rows] = False
        for row in rows:
            self._rows.live[row] = None

    def _leave(self, rows: list[int]) -> list[Request]:
        """Close `rows`; the requests that continue them."""
        requests = [self._resumable(row) for row in rows]
        self._close(rows)
        return requests

    def _resumable(self, row: int) -> Request:
        live = self._live_at(row)
        num_new = int(self._rows.num_new[row])
        resume = Resume(
            tokens=self._rows.tokens[row, :num_new].copy(),
            logprobs=self._rows.logprobs[row, :num_new].copy(),
            version_spans=tuple(span for span in live.version_spans if span.start < num_new),
            started_s=live.started_s,
            kept=None if live.kept is None else live.kept.taken(),
        )
        return live.request.resumed_with(resume)

    def _requeue(self, rows: list[int]) -> None:
        """Let the sequences in `rows` wait, before all others, oldest first."""
        rows = sorted(rows, key=lambda row: int(self._rows.starts[row]))
        self._enqueue(self._leave(rows), was_live=True)

    def _enqueue(self, requests: Sequence[Request], *, was_live: bool) -> None:
        resumed: list[_Waiting] = []
        for request in requests:
            known = request.prompt_tokens.astype(np.int32)
            if request.resume is not None:
                known = np.concatenate([known, request.resume.tokens.astype(np.int32)])
            entry = _Waiting(request, known[:-1], int(known[-1]), known[:-1].tobytes(), was_live)
            self._prefixes.want(entry.key)
            if request.resume is None and not was_live:
                self._waiting.append(entry)
            else:
                resumed.append(entry)
        ahead = 0 if was_live else self._num_left
        self._waiting.rotate(-ahead)
        self._waiting.extendleft(reversed(resumed))
        self._waiting.rotate(ahead)
        self._num_left += len(requests) if was_live else 0

    # Admission

    def _prefill_alone(self) -> bool:
        """Prefill for free rows in a pass of its own, where decoding takes no chunks or there is nothing to decode.

        Whether there was anything to prefill.
        """
        is_any_live = bool(self._rows.is_live.any())
        if is_any_live and self._runner.joins_prefill:
            return False
        before = self.stats.re_prefilled_tokens
        chunks = self._choose_chunks(self.num_free_rows)
        if chunks:
            num_tokens, num_again = sum(len(chunk.tokens) for chunk in chunks), self.stats.re_prefilled_tokens - before
            with self._spans.span("re_prefill" if 2 * num_again > num_tokens else "prefill"):
                self._runner.prefill(chunks)
                self._spans.did(num_tokens)
        elif not is_any_live and any(self._candidates()) and not any(self._ready()):
            raise self._no_room()
        return bool(chunks)

    def _chunks_beside(self) -> Sequence[Chunk]:
        """What to prefill in the pass that decodes: for rows that are free or at their last token, and some more.

        Which rows a stop token frees nobody knows, and a prompt that is not stored by then leaves them empty.
        """
        if not self._runner.joins_prefill:
            return ()
        rows = self._rows
        num_free_soon = int(np.count_nonzero(~rows.is_live | (rows.num_new + 1 >= rows.max_new)))
        return self._choose_chunks(num_free_soon + -(-self._runner.num_rows // ROWS_PER_REQUEST_AHEAD))

    def _candidates(self) -> Iterator[_Waiting]:
        """Requests that may start, in their order; no more of them are looked at than there are rows."""
        for entry in itertools.islice(self._waiting, self._runner.num_rows):
            if self._is_paused and not entry.was_live:
                return
            yield entry

    def _ready(self) -> Iterator[_Waiting]:
        """Candidates whose prompts are stored. They pass those whose prompts are being stored, since they would idle
        otherwise, but none that has nothing stored: it may lack the memory that they would take."""
        for entry in self._candidates():
            if entry.key and entry.key not in self._prefixes:
                return
            if self._is_ready(entry):
                yield entry

    def _choose_chunks(self, num_wanted: int) -> list[Chunk]:
        """The next chunk of each prompt, oldest first, until `num_wanted` requests can start or the budget is spent.

        The first in line always gets on by a chunk, so nobody waits for ever. A chunk too long ends the budget, and a
        prompt whose turn has not come holds no memory, which rows may need.
        """
        chunks: list[Chunk] = []
        prefixes: dict[bytes, StoredPrefix] = {}
        budget = self._prefill_tokens
        is_alone = not self._rows.is_live.any()
        num_ready = 0
        for entry in self._candidates():
            if num_ready == num_wanted or budget <= 0:
                break
            if entry.key and entry.key not in prefixes:
                prefix = self._prefixes.get_or_open(entry.key, entry.context, prefixes, even_wanted=is_alone)
                if prefix is None:
                    break
                prefixes[entry.key] = prefix
                if (chunk := prefix.next_chunk(self._prefill_chunk)) is not None:
                    budget -= len(chunk.tokens)
                    if budget >= 0 or not chunks:
                        prefix.num_done += len(chunk.tokens)
                        chunks.append(chunk)
                        if entry.is_again or self._prefixes.was_forgotten(entry.key):
                            self.stats.re_prefilled_tokens += len(chunk.tokens)
            num_ready += self._is_ready(entry)
        self.stats.prefilled_tokens += sum(len(chunk.tokens) for chunk in chunks)
        return chunks

    def _is_ready(self, entry: _Waiting) -> bool:
        return not entry.key or self._prefixes[entry.key].is_complete

    def _admit(self) -> None:
        """Move requests whose prompts are stored into free rows, oldest first, lowest row first."""
        free = np.flatnonzero(~self._rows.is_live).tolist()
        if ready := list(itertools.islice(self._ready(), len(free))):
            self._place(ready, free)

    def _place(self, ready: list[_Waiting], free: list[int]) -> None:
        """Start `ready` in the first of the `free` rows, those of one prefix together; without memory they stay."""
        members_of: dict[bytes, list[int]] = {}
        for index, entry in enumerate(ready):
            members_of.setdefault(entry.key, []).append(index)
        states = self._row_states(ready)
        started: set[int] = set()
        now_s = self._clock.now_s()
        for key, members in members_of.items():
            prefix = self._prefixes[key] if key else None
            storage = None if prefix is None else prefix.storage
            rows = [free[index] for index in members]
            num_open = self._open_rows(rows, storage, _take(states, members), members_of)
            for row, index in zip(rows[:num_open], members, strict=False):
                self._start(row, ready[index], now_s)
            started.update(members[:num_open])
            self._prefixes.unwant(key, num_open)
            if prefix is not None and num_open:
                self.stats.prefix_hits += num_open - (not prefix.is_used)
                prefix.is_used = True
        if not started and not self._rows.is_live.any():
            raise self._no_room()
        gone = {id(ready[index]) for index in started}
        head = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._runner.num_rows))]
        self._waiting.extendleft(entry for entry in reversed(head) if id(entry) not in gone)
        self._prefixes.trim()

    def _open_rows(self, rows: list[int], storage: Prefix | None, states: RowStates, in_use: Collection[bytes]) -> int:
        """Open `rows` on one prefix, all or the first few; how many."""
        while not self._runner.open_rows(rows, storage, states):
            if self._prefixes.evict(in_use, even_wanted=False):
                continue
            for count in range(len(rows)):
                if not self._runner.open_rows([rows[count]], storage, _take(states, [count])):
                    return count
            break
        return len(rows)

    def _row_states(self, entries: list[_Waiting]) -> RowStates:
        requests = [entry.request for entry in entries]
        resumes = [request.resume for request in requests]
        return RowStates(
            input_tokens=np.array([entry.last_token for entry in entries], dtype=np.int64),
            positions=np.array([len(entry.context) for entry in entries], dtype=np.int64),
            num_new=np.array([0 if resume is None else len(resume.tokens) for resume in resumes], dtype=np.int64),
            noise_keys=noise_keys(self._seed, [(r.stream, r.ordinal, r.sample) for r in requests]),
            temperatures=np.array([r.temperature for r in requests], dtype=np.float32),
            top_k=np.array([r.top_k for r in requests], dtype=np.int64),
            top_p=np.array([r.top_p for r in requests], dtype=np.float32),
            min_p=np.array([r.min_p for r in requests], dtype=np.float32),
            keep_sets=np.array([r.keep_sets for r in requests], dtype=bool),
        )

    def _start(self, row: int, entry: _Waiting, now_s: float) -> None:
        request, resume, rows = entry.request, entry.request.resume, self._rows
        num_new, spans, started_s = 0, [], now_s
        if resume is not None:
            num_new, spans, started_s = len(resume.tokens), list(resume.version_spans), resume.started_s
            rows.tokens[row, :num_new] = resume.tokens
            rows.logprobs[row, :num_new] = resume.logprobs
        spans = extended_spans(spans, start=num_new, version=self.version)
        kept = KeptRecorder(resume.kept if resume is not None else None) if request.keep_sets else None
        rows.live[row] = _Live(request, spans, started_s, self.version, kept)
        rows.is_live[row] = True
        rows.num_new[row] = num_new
        rows.max_new[row] = request.max_new_tokens
        rows.ends_s[row] = np.inf if request.time_limit_s is None else started_s + request.time_limit_s
        rows.starts[row] = self._num_starts
        self._num_starts += 1
        self._num_left -= entry.was_live

    # Decoding

    def _make_room(self) -> None:
        """Give every live row room for one more token: what the prefix table holds first, then the youngest rows.

        One that leaves is the first in line and finds no memory, and lets nobody pass, until a row gives some back.
        """
        while self._runner.rows_without_room():
            num_live = int(np.count_nonzero(self._rows.is_live))
            if self._prefixes.evict((), even_wanted=num_live == 1):
                continue
            if num_live == 1:
                raise self._no_room()
            self.stats.preemptions += 1
            self.preempt(1)

    def _no_room(self) -> ConfigError:
        return ConfigError(
            "no sequence fits into the memory for keys and values", hint="give the engine more of it or lower max_len"
        )

    def _compact(self) -> None:
        """Move live rows down so that they fill the smallest number of rows; a smaller batch is a faster step."""
        num_live = int(np.count_nonzero(self._rows.is_live))
        sources = (num_live + np.flatnonzero(self._rows.is_live[num_live:])).tolist()
        if sources:
            destinations = np.flatnonzero(~self._rows.is_live[:num_live])[: len(sources)].tolist()
            self._runner.move_rows(sources, destinations)
            self._rows.move(sources, destinations)

    def _decode(self, chunks: Sequence[Chunk]) -> list[Finished]:
        """One token for every live row, and `chunks` prefilled."""
        rows = self._rows
        live_rows = np.flatnonzero(rows.is_live)
        decoded = self._runner.decode(int(live_rows[-1]) + 1, chunks)
        tokens, logprobs = decoded.tokens[live_rows], decoded.logprobs[live_rows]
        if not np.isfinite(logprobs).all():
            raise NonFiniteError(f"the policy of version {self.version} gave a logprob that is not finite")
        num_old = rows.num_new[live_rows]
        rows.tokens[live_rows, num_old] = tokens
        rows.logprobs[live_rows, num_old] = logprobs
        rows.num_new[live_rows] = num_old + 1
        if decoded.kept is not None:
            for row in live_rows.tolist():
                if (recorder := self._live_at(row).kept) is not None:
                    recorder.append(decoded.kept[row])
        self.stats.generated_tokens += len(live_rows)
        self._spans.did(len(live_rows))
        now_s = self._clock.now_s()
        is_stop = (tokens[:, None] == self._stop_ids).any(1)
        is_full = num_old + 1 == rows.max_new[live_rows]
        is_over = rows.ends_s[live_rows] <= now_s
        finished = []
        for index in np.flatnonzero(is_stop | is_full | is_over).tolist():
            reason: FinishReason = "stop" if is_stop[index] else "length" if is_full[index] else "deadline"
            finished.append(self._finished(int(live_rows[index]), reason, now_s))
        if finished:
            self._close(live_rows[is_stop | is_full | is_over].tolist())
        return finished

    def _finished(self, row: int, reason: FinishReason, now_s: float) -> Finished:
        live, num_new = self._live_at(row), self._rows.num_new[row]
        return Finished(
            request=live.request,
            tokens=self._rows.tokens[row, :num_new].copy(),
            logprobs=self._rows.logprobs[row, :num_new].copy(),
            version_spans=tuple(live.version_spans),
            finish_reason=reason,
            started_s=live.started_s,
            finished_s=now_s,
            kept=None if live.kept is None else live.kept.taken(),
        )


def _take(states: RowStates, index: list[int]) -> RowStates:
    return RowStates(**{name: values[index] for name, values in vars(states).items()})
