"""Slots over pipeline stages: a `SlotRunner` for each of the groups of rows that are on their way at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import Tensor

from slipstream.core.rank_group import RankGroup
from slipstream.generator.arrangement import ROW_MULTIPLE, round_up
from slipstream.generator.kv_cache import PrefixKV
from slipstream.generator.runner import Chunk, Decoded, Prefix, RowStates, check_room
from slipstream.generator.slot_runner import SlotRunner, SlotStep
from slipstream.generator.stage_ticks import StagePass, StageTicks, packed, unpacked
from slipstream.models.transformer import Transformer

_CLOSED = -1


class StagedSlots:
    """Implements `runner.Runner` on every rank of `stages`, which have a stage `model` each.

    A row is of the group that has fewest when it is opened. It has its first token P ticks later, then one in P ticks
    (`stage_ticks.py`): `decode` is a tick.
    """

    joins_prefill = True

    def __init__(self, model: Transformer, stages: RankGroup, *, num_rows: int, max_len: int) -> None:
        check_room(model.config, num_rows=num_rows, max_len=max_len)
        self.num_rows, self.max_len, self.ticks = num_rows, max_len, StageTicks(model, stages)
        each = -(-num_rows // stages.world)
        self._groups = [
            SlotRunner(model, num_rows=each, max_len=max_len, later=self.ticks.later) for _ in range(stages.world)
        ]
        self._is_last = model.stage.is_last
        self._group_of = np.full(num_rows, _CLOSED)
        self._row_in_group = np.zeros(num_rows, dtype=np.int64)
        self._free = [list(range(each - 1, -1, -1)) for _ in self._groups]
        self._under_way: list[SlotStep | None] = [None] * stages.world

    def drain(self) -> None:
        """Before weights change: carry out what was ordered. Tokens under way are made again."""
        self.ticks.drain()
        self._under_way = [None] * len(self._groups)

    def open_prefix(self, num_tokens: int) -> PrefixKV:
        return self._groups[0].open_prefix(num_tokens)

    def extend_prefix(self, prefix: Prefix, num_tokens: int) -> PrefixKV:
        return self._groups[0].extend_prefix(prefix, num_tokens)

    def share_prefix(self, prefix: Prefix, num_shared: int, num_tokens: int) -> tuple[PrefixKV, int]:
        return self._groups[0].share_prefix(prefix, num_shared, num_tokens)

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        assert (self._group_of == _CLOSED).all(), "chunks are beside rows that decode"
        self.decode(0, chunks)

    def close_prefix(self, prefix: Prefix) -> None:
        """Its memory goes with its last user."""

    def open_rows(self, rows: Sequence[int], prefix: Prefix | None, states: RowStates) -> bool:
        chosen: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            turns = [(number + self.ticks.turn) % len(self._groups) for number in range(len(self._groups))]
            group = max(turns, key=lambda one: len(self._free[one]))
            self._group_of[row], self._row_in_group[row] = group, self._free[group].pop()
            chosen.setdefault(group, []).append(index)
        for group, indices in chosen.items():
            own = self._row_in_group[[rows[index] for index in indices]].tolist()
            self._groups[group].open_rows(own, prefix, states.take(indices) if len(states.positions) > 1 else states)
        return True

    def close_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            group, own = self._forget(row)
            self._groups[group].close_rows([own])

    def park_row(self, row: int) -> PrefixKV:
        group, own = self._forget(row)
        return self._groups[group].park_row(own)

    def move_rows(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        here, there = list(sources), list(destinations)
        for values in (self._group_of, self._row_in_group):
            values[there] = values[here]
        self._group_of[here] = _CLOSED

    def rows_without_room(self) -> list[int]:
        return []

    def settle(self) -> None:
        """`drain` was called before the weights have changed."""

    def routes(self, row: int) -> None:
        """None are recorded of `row`: each stage has those of its layers."""

    def decode(self, num_rows: int, chunks: Sequence[Chunk] = ()) -> Decoded:
        turn = self.ticks.turn
        ending = (turn + 1) % len(self._groups)
        group, count = self._groups[turn], int(np.count_nonzero(self._group_of == turn))
        begun = None
        if count or chunks:
            step = group.begin(round_up(count, ROW_MULTIPLE), chunks).kept()
            self._under_way[turn] = step
            num_tokens = step.num_slots + sum(round_up(len(chunk.tokens), ROW_MULTIPLE) for chunk in chunks)
            begun = StagePass(step.num_slots, num_tokens, 2 + step.plan.num_kept, partial(self._run, group, step))
        output = self.ticks.tick(begun)
        ended, self._under_way[ending] = self._under_way[ending], None
        if output is None or ended is None:
            return Decoded(np.zeros(num_rows, np.int64), np.zeros(num_rows, np.float32), None, np.zeros(num_rows, bool))
        rows = np.flatnonzero(self._group_of[:num_rows] == ending)
        slots = self._groups[ending].slots_of(self._row_in_group[rows].tolist())
        self._groups[ending].end(ended, output[:, 0].astype(np.int64))
        by_row, is_new = np.zeros((num_rows, output.shape[1]), np.int32), np.zeros(num_rows, bool)
        by_row[rows] = output.take(slots, axis=0, mode="clip")
        is_new[rows] = ended.took_part[slots] > 0
        return unpacked(by_row, is_new)

    def _run(self, group: SlotRunner, step: SlotStep, stream: Tensor | None) -> Tensor:
        out = group.states_of(step, stream)
        return packed(group.sample(step, out)) if self._is_last and step.num_slots else out

    def _forget(self, row: int) -> tuple[int, int]:
        """Note that `row` is closed, also to a step under way; return its group, and the row that it is there."""
        group, own = int(self._group_of[row]), int(self._row_in_group[row])
        if (step := self._under_way[group]) is not None:
            step.took_part[self._groups[group].slots_of([own])] = 0
        self._group_of[row] = _CLOSED
        self._free[group].append(own)
        return group, own
