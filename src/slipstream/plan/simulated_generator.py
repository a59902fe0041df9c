"""The generators of a simulated run: rows in lock step, prefill, swaps, by the rules of the real ones.

A `SimulatedEngine` is `generator/engine.py` in counts and seconds, a `Replica` the loop of `generator/executor.py`
around it. Decode steps between which nothing changes are one piece of work (`DecodeStretch`), which a message cuts at
the end of the step it comes in: a simulated run is as exact as one event per step, and costs one per change.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from slipstream.core.types import Swapped
from slipstream.generator.arrangement import round_up
from slipstream.plan.event_loop import CoreJob, Cores, EventLoop
from slipstream.plan.simulated_run import Costs, GroupWork, SimulatedSetup, SimulatedTurn

if TYPE_CHECKING:
    from slipstream.plan.simulator import Simulation

ROWS_PER_REQUEST_AHEAD = 8
"""For so many rows the prompt of one waiting request is stored before a row is free (`generator/engine.py`)."""

Spans = list[tuple[int, int]]
"""(version, tokens) of a completion, in order."""


class Account:
    """Seconds of one process by state."""

    def __init__(self, loop: EventLoop, state: str) -> None:
        self._loop, self._state, self._since_s = loop, state, loop.time_s
        self.seconds: dict[str, float] = {}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the last call of `enter` or `spend`."""
        return self._loop.time_s - self._since_s

    def enter(self, state: str) -> None:
        """Count the time since the last call for the state so far; begin `state`."""
        if self._loop.time_s > self._since_s:
            self.seconds[self._state] = self.seconds.get(self._state, 0.0) + self._loop.time_s - self._since_s
            self._since_s = self._loop.time_s
        self._state = state

    def spend(self, parts: Mapping[str, float]) -> None:
        """Count the time since the last call for `parts`, in these proportions."""
        elapsed_s, total = self.elapsed_s, sum(parts.values())
        if elapsed_s > 0 and total > 0:
            self._since_s = self._loop.time_s
            for state, part in parts.items():
                self.seconds[state] = self.seconds.get(state, 0.0) + elapsed_s * part / total


class SimulatedRow:
    """A completion of `length` tokens, of which `done` were sampled (`spans`) before it got into the row it is in.

    Of an episode `length` is that at the end of its turn, the first of `turns`, which are those that are not over;
    `done` has what environments gave, too, `given` in all. `version` is that of when it began, which it keeps where
    versions stay side by side: a completion begins with its row, an episode before.
    """

    __slots__ = (
        *("done", "given", "kv_version", "length", "ordinal", "prompt_tokens", "sample", "spans", "start_step"),
        *("turns", "version"),
    )

    def __init__(
        self, ordinal: int, sample: int, prompt_tokens: int, length: int, turns: Sequence[SimulatedTurn] = ()
    ) -> None:
        self.ordinal, self.sample, self.prompt_tokens = ordinal, sample, prompt_tokens
        self.length = turns[0].sampled if turns else length
        self.done = self.given = self.start_step = self.kv_version = 0
        self.version: int | None = None
        self.spans: Spans = []
        self.turns = deque(turns)

    @property
    def num_sampled(self) -> int:
        """Tokens that were sampled before the row it is in."""
        return self.done - self.given


class WaitingRows:
    """Completions that wait for a row behind one prefix of `tokens` to prefill.

    `is_open`: its turn to be stored has come. `has_begun`: they left a row unfinished; what is prefilled was before.
    `goes_on`: they are further turns of episodes.
    """

    __slots__ = ("goes_on", "has_begun", "is_open", "num_stored", "rows", "tokens")

    def __init__(
        self, tokens: int, rows: Sequence[SimulatedRow], *, has_begun: bool = False, goes_on: bool = False
    ) -> None:
        self.tokens, self.rows, self.has_begun, self.goes_on = tokens, deque(rows), has_begun, goes_on
        self.num_stored, self.is_open = 0, False

    @property
    def is_stored(self) -> bool:
        return self.num_stored >= self.tokens


def group_of(ordinal: int, work: GroupWork) -> WaitingRows:
    """Return the completions of a group, which wait for their prompt to be prefilled."""
    turns = work.turns or ((),) * len(work.lengths)
    rows = [
        SimulatedRow(ordinal, sample, work.prompt_tokens, length, turns[sample])
        for sample, length in enumerate(work.lengths)
    ]
    return WaitingRows(work.prompt_tokens - 1, rows)  # the last token is the first that a row decodes


class DecodeStretch(NamedTuple):
    """`ahead` (seconds by state), then `steps` decode steps, each `growth_s` longer than the one before."""

    ahead: Mapping[str, float]
    steps: int
    first_s: float
    growth_s: float
    rows: int

    def decode_s(self) -> float:
        return self.steps * self.first_s + self.growth_s * self.steps * (self.steps - 1) / 2

    def steps_in(self, seconds: float) -> int:
        """Return how many whole steps `seconds` are enough for."""
        if seconds <= 0 or self.first_s <= 0:
            return 0
        if abs(self.growth_s) <= 1e-12 * self.first_s:
            return int(seconds / self.first_s)
        half = self.first_s - self.growth_s / 2
        return int((math.sqrt(max(0.0, half * half + 2 * self.growth_s * seconds)) - half) / self.growth_s)


NO_DECODING = DecodeStretch({}, 0, 0.0, 0.0, 0)


class SimulatedEngine:
    """Rows that decode in lock step, and the completions that wait for one.

    `waiting`: those that have begun, then further turns, then new ones. `live`: a heap of (the step that a row ends
    with, its number among all starts, the row). `context`: tokens of all live rows.
    """

    def __init__(self, setup: SimulatedSetup, costs: Costs, replica: int, slots: int, version: int) -> None:
        self.setup, self.costs, self.replica, self.slots, self.version = setup, costs, replica, slots, version
        self.steps = self.context = self._num_starts = 0
        self.waiting: deque[WaitingRows] = deque()
        self.live: list[tuple[int, int, SimulatedRow]] = []
        self.is_paused = False

    @property
    def num_begun(self) -> int:
        return len(self.live) + sum(len(entry.rows) for entry in self.waiting if entry.has_begun)

    @property
    def holds_back(self) -> bool:
        """Whether a swap between batches waits for rows, or for what would go on in a pause."""
        return bool(self.live) or any(map(self._passes_pause, self.waiting))

    @property
    def versions_in_use(self) -> set[int | None]:
        """Those that rows, and waiting completions that are bound to one, go on with."""
        waiting = {row.version for entry in self.waiting for row in entry.rows}
        return {row.version for _, _, row in self.live} | waiting - {None}

    def _passes_pause(self, entry: WaitingRows) -> bool:
        return entry.has_begun or (entry.goes_on and self.setup.weight_update_at == "episode")

    def plan(self) -> DecodeStretch | None:
        """Prefill and start what can start; return what is decoded next, None where there is nothing to do."""
        ahead: dict[str, float] = {}
        has_prefilled = not self.live and self._prefill(self.slots, ahead, is_alone=True)
        self._admit()
        if not self.live:
            return DecodeStretch(ahead, 0, 0.0, 0.0, 0) if has_prefilled else None
        num_rows = len(self.live)
        if not has_prefilled:
            wanted = self.slots - num_rows + -(-self.slots // ROWS_PER_REQUEST_AHEAD)
            has_prefilled = self._prefill(wanted, ahead, is_alone=False)
        steps = 1 if has_prefilled else self.live[0][0] - self.steps
        rows = round_up(num_rows, self.setup.row_multiple)
        first_s, growth_s = self.costs.decode(self.replica, rows, self.context), 0.0
        if steps > 1:
            last_s = self.costs.decode(self.replica, rows, self.context + (steps - 1) * num_rows)
            growth_s = (last_s - first_s) / (steps - 1)
        return DecodeStretch(ahead, steps, first_s, growth_s, num_rows)

    def num_ending(self, steps: int) -> int:
        """Return how many rows end with the `steps`-th step from here."""
        end = self.steps + steps
        return sum(1 for entry in self.live if entry[0] == end) if self.live and self.live[0][0] == end else 0

    def decoded(self, steps: int) -> list[SimulatedRow]:
        """Count `steps` steps of all live rows; return the rows that have finished."""
        self.steps += steps
        self.context += steps * len(self.live)
        finished = []
        while self.live and self.live[0][0] <= self.steps:
            row = heapq.heappop(self.live)[2]
            self.context -= row.prompt_tokens + row.length
            finished.append(row)
        return finished

    def take_out(
        self, is_stale: Callable[[SimulatedRow], bool], spans: Callable[[SimulatedRow], Spans]
    ) -> list[SimulatedRow]:
        """Remove the live rows that are stale, with what they have; return them in the order in which they started."""
        leaving = sorted((entry for entry in self.live if is_stale(entry[2])), key=lambda entry: entry[1])
        gone = {entry[1] for entry in leaving}
        self.live = [entry for entry in self.live if entry[1] not in gone]
        heapq.heapify(self.live)
        rows = [entry[2] for entry in leaving]
        for row in rows:
            row.spans, row.done = spans(row), row.done + self.steps - row.start_step
            self.context -= row.prompt_tokens + row.done
        return rows

    def put_back(self, rows: Sequence[SimulatedRow]) -> None:
        """Queue `rows` before all that wait; their tokens are prefilled again."""
        entries: list[WaitingRows] = []
        by_prompt: dict[int, WaitingRows] = {}
        for row in rows:
            if row.done == 1 and row.ordinal in by_prompt:  # all that is to be stored of it is the prompt
                by_prompt[row.ordinal].rows.append(row)
                continue
            entries.append(WaitingRows(row.prompt_tokens + row.done - 1, [row], has_begun=True))
            if row.done == 1:
                by_prompt[row.ordinal] = entries[-1]
        self.waiting.extendleft(reversed(entries))

    def go_on(self, entries: Sequence[WaitingRows]) -> None:
        """Queue the next turns of episodes before everything that has not started; their keys were kept."""
        new = (i for i, one in enumerate(self.waiting) if not (one.has_begun or one.goes_on))
        for place, entry in enumerate(entries, next(new, len(self.waiting))):
            self.waiting.insert(place, entry)

    def set_version(self, version: int) -> None:
        """Forget the keys and values of prompts that are those of older weights: of all that keep no version."""
        self.version = version
        for entry in self.waiting:
            if self.setup.resident_versions == 1 or entry.rows[0].version is None:
                entry.num_stored, entry.is_open = 0, False

    def _prefill(self, num_wanted: int, ahead: dict[str, float], *, is_alone: bool) -> bool:
        """Prefill the next chunk of each prompt, oldest first, for `num_wanted` rows or until the budget is spent."""
        budget, num_ready, num_seen = self.setup.prefill_tokens, 0, 0
        tokens = {"prefill": 0, "re_prefill": 0}
        for entry in self.waiting:
            if num_ready >= num_wanted or num_seen >= self.slots or budget <= 0:
                break
            if self.is_paused and not self._passes_pause(entry):
                break
            num_seen += len(entry.rows)
            entry.is_open = True
            if not entry.is_stored:
                chunk = min(self.setup.prefill_chunk, entry.tokens - entry.num_stored)
                budget -= chunk
                if budget >= 0 or not any(tokens.values()):
                    entry.num_stored += chunk
                    state = "re_prefill" if entry.has_begun else "prefill"
                    tokens[state] += round_up(chunk, self.setup.row_multiple)
            if entry.is_stored:
                num_ready += len(entry.rows)
        ahead |= {state: self.costs.prefill(self.replica, count, is_alone) for state, count in tokens.items() if count}
        return any(tokens.values())

    def _admit(self) -> None:
        """Give rows, in order, to completions with a stored prefix; they pass only those whose prefix is under way.

        No more of them are looked at than there are rows.
        """
        passed: list[WaitingRows] = []
        to_see = self.slots
        while self.waiting and len(self.live) < self.slots and to_see > 0:
            entry = self.waiting[0]
            if (self.is_paused and not self._passes_pause(entry)) or not (entry.is_stored or entry.is_open):
                break
            self.waiting.popleft()
            seen, to_see = min(to_see, len(entry.rows)), to_see - len(entry.rows)
            for _ in range(min(seen, self.slots - len(self.live)) if entry.is_stored else 0):
                self._start(entry.rows.popleft())
            if entry.rows:
                passed.append(entry)
        self.waiting.extendleft(reversed(passed))

    def _start(self, row: SimulatedRow) -> None:
        row.start_step, row.kv_version = self.steps, self.version
        row.version = self.version if row.version is None else row.version
        self._num_starts += 1
        heapq.heappush(self.live, (self.steps + row.length - row.done, self._num_starts, row))
        self.context += row.prompt_tokens + row.done


def swapped(replica: int, version: int) -> Swapped:
    """Return the event of a replica that has swapped in a version."""
    return Swapped(replica=replica, version=version, transfer_s=0.0, pause_s=0.0, probe_error=0.0)


class Replica:
    """A generator process: one turn of its loop after the other.

    A version is `offered` until it is staged, `staging` meanwhile, `staged` until that is noticed, and `pending` until
    it is swapped in. `swap_steps` are the engine's steps at which `swap_versions` began. `num_evaluated` completions
    end with the evaluation step under way. `away` are the episodes whose environment works, `answered` the turns that
    may begin.
    """

    def __init__(self, simulation: Simulation, index: int, device: Cores) -> None:
        self.simulation, self.setup, self.costs = simulation, simulation.setup, simulation.costs
        self.index, self.device, self.name = index, device, f"generator-{index}"
        self.engine = SimulatedEngine(self.setup, self.costs, index, self.setup.slots, version=0)
        self.account = Account(simulation.loop, "wait_trainer")
        self.swap_steps, self.swap_versions = [0], [0]
        self.inbox: list[WaitingRows] = []
        self.answered: list[WaitingRows] = []
        self.away: set[SimulatedRow] = set()
        self.evaluations: deque[SimulatedEngine] = deque()
        self.offered: int | None = None
        self.staging: int | None = None
        self.staged: int | None = None
        self.pending: int | None = None
        self.num_evaluated = self.drain_steps = 0
        self.is_in_turn = self.has_news = False
        self.job: CoreJob | None = None
        self.stretch, self.num_ending, self.factor = NO_DECODING, 0, 1.0

    def admit(self, groups: Sequence[tuple[int, GroupWork]]) -> None:
        self.inbox.extend(group_of(ordinal, work) for ordinal, work in groups)
        self.wake()

    def offer(self, version: int) -> None:
        """Take the newest version on offer; an older one that waits is released unread."""
        if self.offered is not None:
            self.simulation.trainer.release(self.offered, self.index)
        self.offered = version
        self.wake()

    def evaluate(self, prompts: Sequence[GroupWork], version: int) -> None:
        engine = SimulatedEngine(self.setup, self.costs, self.index, self.setup.evaluation_slots, version)
        engine.waiting.extend(group_of(ordinal, work) for ordinal, work in enumerate(prompts))
        self.evaluations.append(engine)
        self.wake()

    def wake(self) -> None:
        """Look at news: at once where the replica is idle, else when its decode step is done."""
        self.has_news = True
        if self.is_in_turn:
            return
        if self.job is None:
            self.turn()
        elif self.stretch.steps > 1:
            self._end_with_this_step(self.job)

    def turn(self) -> None:
        """Handle messages, a swap and a step of evaluation; then decode until something changes."""
        self.is_in_turn, self.has_news = True, True
        planned: DecodeStretch | None = None
        while self.has_news and planned is None:
            self.has_news = False
            for row in (row for entry in self.inbox for row in entry.rows if row.turns):
                row.version = self.engine.version
            self.engine.waiting.extend(self.inbox)
            self.inbox.clear()
            if self.answered:
                self.engine.go_on(self.answered)
                self.answered.clear()
            ahead: dict[str, float] = {}
            self._poll_weights()
            self._swap(ahead)
            self._evaluate(ahead)
            planned = self.engine.plan()
            if planned is not None:
                ahead |= planned.ahead
            elif ahead:
                planned = NO_DECODING
        self.is_in_turn = False
        if planned is None:
            self.account.enter(self._idle_state)
            return
        self.account.enter(self._state)
        turn_s = self.costs.turn_s
        if turn_s and not planned.steps:
            ahead["receive"] = turn_s
        steps = planned.steps if planned.steps <= 1 else self._limited(planned.steps)
        self.stretch = DecodeStretch(ahead, steps, planned.first_s + turn_s, planned.growth_s, planned.rows)
        self.factor = self.simulation.drawn("decode", steps) if self.costs.jitter else 1.0
        self.job = self.device.run("decode", self.setup.generator_threads, self._work_s(), self._end)

    @property
    def _state(self) -> str:
        return "drain" if self.engine.is_paused else "decode"

    @property
    def _idle_state(self) -> str:
        if self.staging is not None:
            return "stage"
        return "wait_environment" if self.away else "wait_trainer"

    def _limited(self, steps: int) -> int:
        """Return how many of `steps` pass before the loop has something else to do."""
        if self.evaluations or self.has_news:
            return min(steps, 1)
        limit = self.setup.segment_tokens
        return steps if limit is None or not self.engine.is_paused else min(steps, max(1, limit - self.drain_steps))

    def _work_s(self) -> float:
        stretch = self.stretch
        self.num_ending = self.engine.num_ending(stretch.steps) if self.costs.send_s else 0
        return (sum(stretch.ahead.values()) + stretch.decode_s()) * self.factor + self.num_ending * self.costs.send_s

    def _steps_done(self, job: CoreJob) -> int:
        return self.stretch.steps_in(job.done_s() / self.factor - sum(self.stretch.ahead.values()))

    def _end_with_this_step(self, job: CoreJob) -> None:
        done = self._steps_done(job) + 1
        if done < self.stretch.steps:
            self.stretch = self.stretch._replace(steps=done)
            job.shorten(self._work_s())

    def _end(self) -> None:
        self.spend()
        self.is_in_turn, self.job = True, None
        stretch = self.stretch
        self.drain_steps += stretch.steps if self.engine.is_paused else 0
        finished = self.engine.decoded(stretch.steps)
        self.simulation.result.generated_tokens += stretch.rows * stretch.steps
        if self.num_evaluated:
            self.simulation.score([None] * self.num_evaluated)
            self.num_evaluated = 0
        if over := [row for row in finished if not row.turns]:
            self.simulation.finished(self.index, [(row, self._spans(row)) for row in over])
        if len(over) < len(finished):
            self._ask([row for row in finished if row.turns])
        self.turn()

    def _ask(self, rows: Sequence[SimulatedRow]) -> None:
        """Let the environments answer the turns that have ended; what they say at one moment comes together."""
        together: dict[float, list[tuple[SimulatedRow, int]]] = {}
        for row in rows:
            turn = row.turns.popleft()
            row.spans, row.done = self._spans(row), row.length
            together.setdefault(turn.environment_s, []).append((row, turn.given))
        self.away.update(rows)
        for seconds, answers in together.items():
            self.simulation.later(seconds, partial(self._answered, answers))

    def _answered(self, answers: Sequence[tuple[SimulatedRow, int]]) -> None:
        over = []
        for row, given in answers:
            self.away.discard(row)
            row.given += given
            row.done = row.length = row.length + given
            if row.turns:
                row.length += row.turns[0].sampled
                self.answered.append(WaitingRows(given, [row], goes_on=True))
            else:
                over.append((row, row.spans))
        if over:
            self.simulation.finished(self.index, over)
        self.wake()

    def spend(self) -> None:
        """Put the time so far of what is under way into the account."""
        stretch = self.stretch
        if self.job is None:
            self.account.enter(self._idle_state)
            return
        self.simulation.result.slot_busy_s += stretch.rows * self.account.elapsed_s
        if not stretch.ahead and not self.num_ending:
            self.account.enter(self._state)
            return
        sending_s = self.num_ending * self.costs.send_s / self.factor
        self.account.spend({**stretch.ahead, self._state: stretch.decode_s(), "send": sending_s})

    def end_run(self) -> int:
        """Account for what is under way; return the tokens of completions that are not finished."""
        self.spend()
        engine, done = self.engine, 0
        if self.job is not None:
            done = min(self.stretch.steps, self._steps_done(self.job))
        self.simulation.result.generated_tokens += done * len(engine.live)
        live = sum(row.num_sampled + engine.steps + done - row.start_step for _, _, row in engine.live)
        queues = (engine.waiting, self.answered)
        waiting = sum(row.num_sampled for queue in queues for entry in queue for row in entry.rows)
        return live + waiting + sum(row.num_sampled for row in self.away)

    def _poll_weights(self) -> None:
        """Notice a finished transfer; else stage the newest offer, before which a pending version gives way."""
        if self.staged is not None:
            self.simulation.trainer.release(self.staged, self.index)
            self.pending, self.staged, self.staging = self.staged, None, None
        elif self.offered is not None and self.staging is None:
            self.staging, self.offered, self.pending = self.offered, None, None
            self.device.run("stage", 1, self.costs.stage_s, partial(self._staged, self.staging), is_background=True)

    def _staged(self, version: int) -> None:
        self.staged = version
        self.wake()

    @property
    def _is_anything_begun(self) -> bool:
        return self.engine.holds_back or (self.setup.weight_update_at == "episode" and bool(self.away))

    def _swap(self, ahead: dict[str, float]) -> None:
        engine = self.engine
        if self.pending is None:
            if engine.is_paused and not self._is_anything_begun:
                self._resume()
            return
        if self.setup.resident_versions > 1:
            if len(engine.versions_in_use | {row.version for row in self.away}) < self.setup.resident_versions:
                self._commit(self.pending, ahead)
            return
        resumed: list[SimulatedRow] = []
        if self.setup.weight_update == "between_batches" and self._is_anything_begun:
            engine.is_paused = True
            limit = self.setup.segment_tokens
            if limit is None or self.drain_steps < limit:
                return
            resumed = engine.take_out(lambda _: True, self._spans)
        self._commit(self.pending, ahead)
        engine.put_back(sorted(resumed, key=lambda row: (row.ordinal, row.sample)))
        self._resume()

    def _resume(self) -> None:
        self.engine.is_paused, self.drain_steps = False, 0

    def _commit(self, version: int, ahead: dict[str, float]) -> None:
        engine, setup, self.pending = self.engine, self.setup, None
        engine.set_version(version)
        self.swap_steps.append(engine.steps)
        self.swap_versions.append(version)
        if setup.kv_on_update != "keep" and setup.resident_versions == 1:
            oldest = version - (0 if setup.kv_on_update == "recompute" else setup.max_kv_age)
            engine.put_back(engine.take_out(lambda row: row.kv_version < oldest, self._spans))
        if self.costs.swap_s:
            ahead["swap"] = self.costs.swap_s
        self.simulation.tell(swapped(self.index, version))

    def _spans(self, row: SimulatedRow) -> Spans:
        """Return the versions and tokens of what `row` has so far."""
        now, steps = self.engine.steps, self.swap_steps
        if self.setup.resident_versions > 1 and row.version is not None:
            return [*row.spans, (row.version, now - row.start_step)] if now > row.start_step else row.spans
        first = bisect.bisect_right(steps, row.start_step) - 1
        edges = [row.start_step, *steps[first + 1 :], now]
        spans = [(v, b - a) for v, a, b in zip(self.swap_versions[first:], edges, edges[1:], strict=False) if b > a]
        return row.spans + spans if row.spans else spans

    def _evaluate(self, ahead: dict[str, float]) -> None:
        """Run one decode step of the oldest evaluation, with the weights that it is pinned to."""
        while self.evaluations:
            engine = self.evaluations[0]
            planned = engine.plan()
            if planned is None:
                self.evaluations.popleft()
                continue
            steps = min(1, planned.steps)
            self.num_evaluated = len(engine.decoded(steps))
            seconds = sum(planned.ahead.values()) + steps * planned.first_s
            ahead["evaluate"] = seconds + self.num_evaluated * self.costs.send_s
            return
