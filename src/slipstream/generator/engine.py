"""Continuous batching: prompts in, completions out, weights replaced between two steps.

One step gives free rows to waiting requests whose prompts are prefilled, decodes ONE token for every live row, samples,
and retires the rows that finished. Prompts are prefilled within a token budget, once for their group, in the pass that
decodes or in one of their own, as suits the `Runner`, which has the model. The engine has no processes, channels or
configuration.

The prefill covers all tokens but the last; that one is the first the row decodes. So every sampled token comes out of
the same decode path, also a resumed completion's, and a prefix is keys and values only.

A sequence may leave its row unfinished: exported, preempted for want of memory, or because its cache is to be made anew
under new weights. It becomes a request that carries what it has generated, goes before everything that has not started,
and continues with the same noise. Its keys are made again by the present weights, equal up to rounding.

A request may be one turn of an episode (`Request.num_before`). Its keys may stay, parked (`parked.py`), and the next
turn prefills only what came since; a fork (`Request.branch`) begins with parked keys of other branches. Parked sessions
are treated as live rows when the version changes, and are given up before any row is when memory is short.

On a CPU a completion's tokens and logprobs depend, bit for bit, on nothing but its request and the weights (conditions
and evidence: `kv_cache.py`, `noise.py`); those of later turns and forks besides on what was parked, in rounding only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import torch

from slipstream.core.clock import Clock, WallClock
from slipstream.core.errors import ConfigError, NonFiniteError
from slipstream.core.spans import NoSpans
from slipstream.generator.parked import ParkedKeys, ParkedSessions
from slipstream.generator.prefixes import PrefixKey, PrefixTable
from slipstream.generator.request_queue import RequestQueue, row_states
from slipstream.generator.requests import (
    Finished,
    KvOnUpdate,
    Request,
    Session,
    StateSpans,
    check_request,
    in_order,
)
from slipstream.generator.rows import Rows
from slipstream.generator.runner import Chunk, Prefix, ResidentVersions, RowStates, Runner
from slipstream.generator.stats import EngineStats
from slipstream.generator.version_table import VersionTable

PREFILL_CHUNK = 512
"""Prompts longer than this are prefilled in pieces, whose places do not depend on the step's budget: so bits do not."""
ROWS_PER_REQUEST_AHEAD = 8
"""One waiting request per so many rows is prefilled before a row is free for it: a stop token may free one any time."""


class Engine:
    """Decodes up to `runner.num_rows` completions at a time; `seed` is the run's.

    `prefill_tokens` bounds the prompt tokens of one step, so that admission never stalls decoding for long; one chunk
    (`PREFILL_CHUNK`) is always made. `prefix_cache_tokens` bounds what is kept of prompts that no request
    waits for, until the version changes; `parked_tokens` bounds what is kept of episodes between their turns (None: no
    bound). With `residents`, the model's weights, versions stay side by side (`version_table.py`).

    The driver's loop: `submit` whenever there are requests; `step` until `is_idle`; between two steps `set_version`,
    `pause_admission`, `preempt`, `withdraw` or `export_live`; `release` when an episode with parked keys has ended.
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
        parked_tokens: int | None = 0,
        version: int = 0,
        spans: StateSpans | None = None,
        clock: Clock | None = None,
        residents: ResidentVersions | None = None,
    ) -> None:
        self.version, self.max_len, self.stats = version, runner.max_len, EngineStats()
        self._runner, self._seed = runner, seed
        self._prefill_tokens, self._prefill_chunk = prefill_tokens, prefill_chunk
        self._spans: StateSpans = spans if spans is not None else NoSpans()
        self._clock = clock if clock is not None else WallClock()
        self._stop_ids = np.unique(np.asarray(stop_token_ids, dtype=np.int64))
        self._parked = ParkedSessions(runner, parked_tokens, self.stats)
        self._prefixes = PrefixTable(runner, prefix_cache_tokens, self._parked)
        self._rows = Rows.empty(runner.num_rows, runner.max_len)
        self._versions = VersionTable(residents, lambda: self._rows.versions | self._queue.versions, version)
        self._queue = RequestQueue(self._prefixes, runner.num_rows, self.stats, self._versions.bound_to)

    @property
    def num_live(self) -> int:
        return self._rows.num_live + self._queue.num_left

    @property
    def num_begun(self) -> int:
        return self._rows.num_live + self._queue.num_begun

    @property
    def num_waiting(self) -> int:
        return len(self._queue) - self._queue.num_left

    @property
    def is_idle(self) -> bool:
        return not len(self._queue) and not self._rows.is_live.any()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: a pause may hold back all that waits."""
        return bool(self._rows.is_live.any()) or any(self._queue.candidates())

    @property
    def num_re_prefilled(self) -> int:
        return self.stats.re_prefilled_tokens

    @property
    def session_counts(self) -> dict[str, int]:
        return self.stats.of_sessions

    @property
    def versions_in_use(self) -> set[int]:
        return self._versions.in_use

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue `requests` in this order; resumed ones go before everything that has not started.

        Raises ConfigError for a request that can never fit, before queueing any.
        """
        for request in requests:
            check_request(request, max_len=self.max_len)
        for request in requests:
            if request.num_before == 0:
                self._parked.drop(request.session)  # the episode begins again
        self._queue.add(requests, was_live=False)

    def pause_admission(self, is_paused: bool, *, holds_turns: bool = False) -> None:
        """While paused nothing new starts; what has begun goes on, further turns of episodes not with `holds_turns`."""
        self._queue.is_paused, self._queue.holds_turns = is_paused, holds_turns

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Prefill within the budget, admit, decode one token per live row, return what finished."""
        has_prefilled = self._prefill_alone()
        with self._spans.span("decode"):
            self._admit()
            if not self._rows.is_live.any():
                return []
            self._make_room()
            if not len(self._queue) or self._queue.is_paused:
                self._compact()
            return self._decode(() if has_prefilled else self._chunks_beside())

    def set_version(self, version: int, *, kv_on_update: KvOnUpdate = "keep", max_kv_age: int = 0) -> None:
        """Go on with `version`, the model's weights from here on; call between two steps.

        Tokens and behaviour logprobs stay. Live sequences keep the keys and values that old weights made ("keep"), or
        those with any key older than `max_kv_age` versions ("recompute": 0) leave their rows and are prefilled again
        within the budget of the next steps. Parked sessions stay or are forgotten by the same rule. Shared prefixes are
        forgotten in every case. With `residents` all that has begun keeps its version, and so its keys.
        """
        self.version = version
        self._runner.settle()
        if self._versions.take(version):
            return self._prefixes.clear(None, keeps_versions=True)
        oldest = {"keep": None, "recompute": version}.get(kv_on_update, version - max_kv_age)
        self._prefixes.clear(oldest)
        self._rows.go_on_with(version)
        if oldest is not None:
            self._parked.forget_older(oldest)
            stale = [row for row in self._rows.live_rows if self._rows.live_at(row).kv_version < oldest]
            self.stats.recomputed_caches += len(stale)
            self._requeue(stale)

    def preempt(self, count: int) -> None:
        """Take the `count` youngest live sequences out of their rows; they go on as soon as there is room."""
        rows = np.flatnonzero(self._rows.is_live)
        self._requeue(rows[np.argsort(-self._rows.starts[rows])][:count].tolist())

    def begun(self) -> list[Request]:
        """Every completion that has tokens, as `submit` could resume it elsewhere; here it goes on undisturbed."""
        requests = [entry.request for entry in self._queue if entry.request.resume is not None]
        return in_order(requests + self._resumable(row for row in self._rows.live_rows if self._rows.num_new[row] > 0))

    def export_live(self) -> list[Request]:
        """Take every live completion out, resumable by `submit` here or elsewhere; by ordinal and sample."""
        return in_order([*self._queue.take(lambda entry: entry.was_live), *self._leave(self._rows.live_rows)])

    def withdraw(self, is_unwanted: Callable[[Request], bool]) -> list[Request]:
        """Take out the requests for which this holds, waiting or live, resumable by `submit`."""
        rows = [row for row in self._rows.live_rows if is_unwanted(self._rows.live_at(row).request)]
        return in_order([*self._queue.take(lambda entry: is_unwanted(entry.request)), *self._leave(rows)])

    # Turns

    def release(self, session: Session) -> None:
        """The episode has ended: forget its parked keys. A turn that is not finished goes on, but will not park."""
        self._parked.drop(session)
        self._versions.release(session)
        self._queue.stop_parking(session)
        self._rows.stop_parking(session)

    def let_go_on(self, session: Session) -> None:
        """An episode has begun: its other branches wait for no pause, which may wait for the episode's end."""
        self._queue.let_go_on(session)

    def _park(self, row: int) -> bool:
        """Free a row whose turn has finished and park its keys; False, doing nothing, if it may not or has no room."""
        live = self._rows.live_at(row)
        tokens = self._rows.known_tokens(row)[:-1] if live.request.parks else None
        if tokens is None or not self._parked.make_room(live.request.session, len(tokens)):
            return False
        self._parked.put(live.request.session, ParkedKeys(tokens, self._runner.park_row(row), live.kv_version))
        self._rows.close([row])
        return True

    # Rows

    def _close(self, rows: list[int]) -> None:
        self._runner.close_rows(rows)
        self._rows.close(rows)

    def _leave(self, rows: list[int]) -> list[Request]:
        """Close `rows`; return the requests that continue them."""
        requests = self._resumable(rows)
        self._close(rows)
        return requests

    def _resumable(self, rows: Iterable[int]) -> list[Request]:
        return [self._rows.resumable(row, self._runner.routes(row)) for row in rows]

    def _requeue(self, rows: list[int]) -> None:
        """Let the sequences in `rows` wait, before all others, oldest first."""
        rows = sorted(rows, key=lambda row: int(self._rows.starts[row]))
        self._queue.add(self._leave(rows), was_live=True)

    # Admission

    def _prefill_alone(self) -> bool:
        """Prefill for free rows in a pass of its own, where decoding takes no chunks or there is nothing to decode.

        Return whether there was anything to prefill.
        """
        is_any_live = bool(self._rows.is_live.any())
        if is_any_live and self._runner.joins_prefill:
            return False
        before = self.stats.re_prefilled_tokens
        chunks = self._choose_chunks(self._runner.num_rows - self._rows.num_live)
        if chunks:
            num_tokens, num_again = sum(len(chunk.tokens) for chunk in chunks), self.stats.re_prefilled_tokens - before
            with self._spans.span("re_prefill" if 2 * num_again > num_tokens else "prefill"):
                self._runner.prefill(chunks)
                self._spans.did(num_tokens)
        elif not is_any_live and any(self._queue.candidates()) and not any(self._queue.ready()):
            raise self._no_room()
        return bool(chunks)

    def _chunks_beside(self) -> Sequence[Chunk]:
        """Choose what the pass that decodes prefills: for rows that are free or at their last token, and some more."""
        if not self._runner.joins_prefill:
            return ()
        rows = self._rows  # those that end on a stop token cannot be predicted
        num_free_soon = int(np.count_nonzero(~rows.is_live | (rows.num_new + 1 >= rows.max_new)))
        return self._choose_chunks(num_free_soon + -(-self._runner.num_rows // ROWS_PER_REQUEST_AHEAD))

    def _choose_chunks(self, num_wanted: int) -> list[Chunk]:
        return self._queue.choose_chunks(
            num_wanted,
            newest=self.version,
            budget_tokens=self._prefill_tokens,
            chunk_tokens=self._prefill_chunk,
            even_wanted=not self._rows.is_live.any(),
        )

    def _admit(self) -> None:
        """Start requests whose prompts are stored, oldest first, lowest row first; without memory they stay queued."""
        free = np.flatnonzero(~self._rows.is_live).tolist()
        ready = list(itertools.islice(self._queue.ready(), len(free)))
        if not ready:
            return
        members_of: dict[PrefixKey, list[int]] = {}
        for index, entry in enumerate(ready):
            members_of.setdefault(entry.key, []).append(index)
        states = row_states(ready, self._seed, self.version)
        started, now_s = set[int](), self._clock.now_s()
        for key, members in members_of.items():
            prefix = self._prefixes[key] if key else None
            storage, oldest = (None, None) if prefix is None else (prefix.storage, prefix.kv_version)
            rows = [free[index] for index in members]
            num_open = self._open_rows(rows, storage, states.take(members), members_of)
            for row, index in zip(rows[:num_open], members, strict=False):
                version = ready[index].version_or(self.version)
                kv_version = version if oldest is None else oldest
                self._rows.start(row, ready[index].request, version=version, kv_version=kv_version, now_s=now_s)
            started.update(members[:num_open])
            self._prefixes.unwant(key, num_open)
            if prefix is not None and num_open:
                self.stats.prefix_hits += num_open - (not prefix.is_used)
                self.stats.parked_hit_tokens += num_open * prefix.num_parked
                prefix.is_used = True
        if not started and not self._rows.is_live.any():
            raise self._no_room()
        self._queue.remove([ready[index] for index in sorted(started)])
        self._prefixes.trim()

    def _open_rows(
        self, rows: list[int], storage: Prefix | None, states: RowStates, in_use: Collection[PrefixKey]
    ) -> int:
        """Open `rows` on one prefix, all or the first few; how many."""
        while not self._runner.open_rows(rows, storage, states):
            if self._prefixes.evict(in_use, even_wanted=False):
                continue
            if not self._rows.is_live.any() and self._parked.evict(even_waiting=True):
                continue
            for count in range(len(rows)):
                if not self._runner.open_rows([rows[count]], storage, states.take([count])):
                    return count
            break
        return len(rows)

    # Decoding

    def _make_room(self) -> None:
        """Give every live row room for one more token, from prefixes, then parked sessions, then the youngest rows.

        A preempted request is the first in the queue, and no other passes it: it starts again once a row frees memory.
        """
        while self._runner.rows_without_room():
            num_live = self._rows.num_live
            if self._prefixes.evict((), even_wanted=num_live == 1) or self._parked.evict(even_waiting=True):
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
        num_live = self._rows.num_live
        sources = (num_live + np.flatnonzero(self._rows.is_live[num_live:])).tolist()
        if sources:
            destinations = np.flatnonzero(~self._rows.is_live[:num_live])[: len(sources)].tolist()
            self._runner.move_rows(sources, destinations)
            self._rows.move(sources, destinations)

    def _decode(self, chunks: Sequence[Chunk]) -> list[Finished]:
        """One token for every live row, and `chunks` prefilled."""
        rows, live_rows = self._rows, np.flatnonzero(self._rows.is_live)
        decoded = self._runner.decode(int(live_rows[-1]) + 1, chunks)
        live_rows = decoded.rows_of(live_rows)
        tokens, logprobs = decoded.tokens[live_rows], decoded.logprobs[live_rows]
        if not np.isfinite(logprobs).all():
            raise NonFiniteError(f"the policy of version {self.version} gave a logprob that is not finite")
        rows.append(live_rows, tokens, logprobs, decoded.kept)
        self.stats.generated_tokens += len(live_rows)
        self._spans.did(len(live_rows))
        now_s = self._clock.now_s()
        ended = rows.ended(live_rows, (tokens[:, None] == self._stop_ids).any(1), now_s)
        finished = [rows.finished(row, reason, now_s, self._runner.routes(row)) for row, reason in ended]
        if finished:
            self._close([row for row, _ in ended if not self._park(row)])
            self._versions.let_go()
        return finished
