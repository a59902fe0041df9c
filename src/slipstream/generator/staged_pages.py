"""Pages over pipeline stages: the rows of all groups in one table, the layers of a stage behind each page.

The host says what a pass needs, as all ranks know it: tokens, positions, block tables. No step is captured, and none is
launched ahead: the next pass of a group begins when its tokens have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from slipstream.core.packed import sent
from slipstream.core.rank_group import RankGroup
from slipstream.generator.kv_cache import JoinedAttention
from slipstream.generator.noise import uniform
from slipstream.generator.paged_attention import PagedDecodeAttention, PagedPrefillAttention, default_attend
from slipstream.generator.paged_kv import PAGE_SIZE, PagedKV
from slipstream.generator.paged_runner import check_current, own_prefix, pages_for, pass_over
from slipstream.generator.pages import PagedPrefix, PageTable, pages_of
from slipstream.generator.runner import CLOSED, Chunk, Decoded, Prefix, RowStates, check_room
from slipstream.generator.sampler import SamplingPlan, SamplingRows, sample_tokens
from slipstream.generator.stage_ticks import StagePass, StageTicks, over_layers, packed, stream_weight, unpacked
from slipstream.models.transformer import Attention, Transformer

_NO_GROUP = -1


@dataclass(frozen=True, eq=False)
class PageStep:
    """A decode step of some rows as they were when it began, `chunks` beside them, and each row's place in it or -1."""

    states: RowStates
    blocks: np.ndarray  # int32 [B, M]
    plan: SamplingPlan
    chunks: tuple[Tensor, Tensor, PagedPrefillAttention] | None
    places: np.ndarray  # int64 [rows]

    @property
    def num_rows(self) -> int:
        return len(self.blocks)


class StagedPages:
    """Implements `runner.Runner` on every rank of `stages`, which have a stage `model` each, as `StagedSlots` does.

    `kv_bytes` and `parked_tokens` bound the pages as those of `PagedRunner`; all ranks must have as many.
    """

    joins_prefill = True

    def __init__(
        self,
        model: Transformer,
        stages: RankGroup,
        *,
        num_rows: int,
        max_len: int,
        kv_bytes: int | None = None,
        parked_tokens: int | None = 0,
        num_pages: int | None = None,
    ) -> None:
        config, weight = model.config, stream_weight(model)
        check_room(config, num_rows=num_rows, max_len=max_len)
        check_current(weight.device)
        self.num_rows, self.max_len, self.ticks = num_rows, max_len, StageTicks(model, stages)
        self._model, self._device = model, weight.device
        if num_pages is None:
            most_layers = -(-config.num_layers // stages.world)
            num_pages = pages_for(
                config,
                num_rows,
                max_len,
                kv_bytes=kv_bytes,
                parked_tokens=parked_tokens,
                kv_dtype=weight.dtype,
                num_layers=most_layers,
            )
        self._pages = PageTable(num_pages=num_pages, page_size=PAGE_SIZE, num_rows=num_rows, max_len=max_len)
        self._kv = PagedKV(
            num_layers=len(model.layers),
            num_pages=num_pages,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=weight.dtype,
            device=weight.device,
        )
        self._attend = default_attend(weight.device)
        self._states = RowStates.closed(num_rows)
        self._group_of = np.full(num_rows, _NO_GROUP)
        self._under_way: list[PageStep | None] = [None] * stages.world

    def drain(self) -> None:
        """Before weights change: carry out what was ordered. Tokens under way are made again."""
        self.ticks.drain()
        self._under_way = [None] * len(self._under_way)

    def open_prefix(self, num_tokens: int) -> PagedPrefix | None:
        return self._pages.open_prefix(num_tokens)

    def extend_prefix(self, prefix: Prefix, num_tokens: int) -> PagedPrefix | None:
        return self._pages.extend_prefix(own_prefix(prefix), num_tokens)

    def share_prefix(self, prefix: Prefix, num_shared: int, num_tokens: int) -> tuple[PagedPrefix, int] | None:
        found = self._pages.share_prefix(own_prefix(prefix), num_shared, num_tokens)
        return None if found is None else (found, num_shared - num_shared % PAGE_SIZE)

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        assert not self._pages.is_open.any(), "chunks are beside rows that decode"
        self.decode(0, chunks)

    def close_prefix(self, prefix: Prefix) -> None:
        self._pages.close_prefix(own_prefix(prefix))

    def open_rows(self, rows: Sequence[int], prefix: Prefix | None, states: RowStates) -> bool:
        copies = self._pages.open_rows(rows, None if prefix is None else own_prefix(prefix))
        if copies is None:
            return False
        if copies.sources:
            self.ticks.later(partial(self._kv.copy_pages, *copies))
        self._states.put(rows, states)
        turns = [(number + self.ticks.turn) % len(self._under_way) for number in range(len(self._under_way))]
        for row in rows:
            self._group_of[row] = min(turns, key=lambda group: int(np.count_nonzero(self._group_of == group)))
        return True

    def close_rows(self, rows: Sequence[int]) -> None:
        self._pages.close_rows(rows)
        self._forget(rows)

    def park_row(self, row: int) -> PagedPrefix:
        prefix = self._pages.park_row(row)
        self._forget([row])
        return prefix

    def move_rows(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        here, there = list(sources), list(destinations)
        self._pages.move_rows(here, there)
        self._states.put(there, self._states.take(here))
        self._group_of[there] = self._group_of[here]
        for step in self._under_way:
            if step is not None:
                step.places[there] = step.places[here]
        self._forget(here)

    def rows_without_room(self) -> list[int]:
        return self._pages.grow()

    def settle(self) -> None:
        """`drain` was called before the weights have changed."""

    def routes(self, row: int) -> None:
        """None are recorded of `row`: each stage has those of its layers."""

    def decode(self, num_rows: int, chunks: Sequence[Chunk] = ()) -> Decoded:
        turn = self.ticks.turn
        ending = (turn + 1) % len(self._under_way)
        rows = np.flatnonzero(self._group_of == turn)
        begun = None
        if len(rows) or chunks:
            step = self._under_way[turn] = self._begin(rows, chunks)
            num_tokens = len(rows) + (0 if step.chunks is None else len(step.chunks[0]))
            begun = StagePass(len(rows), num_tokens, 2 + step.plan.num_kept, partial(self._run, step))
        output = self.ticks.tick(begun)
        ended, self._under_way[ending] = self._under_way[ending], None
        if output is None or ended is None:
            return Decoded(np.zeros(num_rows, np.int64), np.zeros(num_rows, np.float32), None, np.zeros(num_rows, bool))
        is_new = ended.places >= 0
        self._pages.advance(is_new)
        for counts in (self._states.positions, self._states.num_new):
            counts += is_new
        self._states.input_tokens[is_new] = output[ended.places[is_new], 0]
        return unpacked(output[ended.places[:num_rows]], is_new[:num_rows])

    def _begin(self, rows: np.ndarray, chunks: Sequence[Chunk]) -> PageStep:
        states, places = self._states.take(rows), np.full(self.num_rows, -1)
        places[rows] = np.arange(len(rows))
        assert (states.positions == self._pages.lengths[rows]).all(), "what was decoded was stored"
        num_blocks = pages_of(int(states.positions.max(initial=0)) + 1, PAGE_SIZE)
        goes_on = not self._model.stage.is_last
        return PageStep(
            states,
            self._pages.blocks[rows, :num_blocks].copy(),
            SamplingPlan.of(**states.sampling),
            pass_over(chunks, self._pages, self._kv, goes_on=goes_on) if chunks else None,
            places,
        )

    def _run(self, step: PageStep, stream: Tensor | None) -> Tensor:
        num_rows, states = step.num_rows, step.states
        numbers = np.stack([states.input_tokens, states.positions])
        tokens, positions = sent(numbers, self._device)
        blocks = sent(step.blocks, self._device)
        places = positions // PAGE_SIZE
        slots = blocks.gather(1, places.unsqueeze(1)).squeeze(1).long() * PAGE_SIZE + positions % PAGE_SIZE
        attention: Attention | JoinedAttention = PagedDecodeAttention(
            self._kv, self._attend, slots=slots, blocks=blocks, lengths=positions + 1
        )
        if step.chunks is not None:
            more_tokens, more_positions, prefill = step.chunks
            attention = JoinedAttention(attention, num_rows, prefill) if num_rows else prefill
            tokens, positions = torch.cat((tokens, more_tokens)), torch.cat((positions, more_positions))
        out = over_layers(self._model, tokens, positions, attention, stream, num_rows=num_rows)
        if not self._model.stage.is_last or not num_rows:
            return out
        cuts = SamplingRows(
            *(sent(values, self._device) for values in (states.temperatures, states.top_k, states.top_p, states.min_p))
        )
        uniforms = sent(uniform(states.noise_keys, states.num_new), self._device)
        return packed(sample_tokens(self._model.logits(out), cuts, uniforms, step.plan))

    def _forget(self, rows: Sequence[int]) -> None:
        """Note that `rows` are closed, also to steps under way."""
        self._group_of[rows] = _NO_GROUP
        self._states.put(rows, CLOSED)
        for step in self._under_way:
            if step is not None:
                step.places[rows] = -1
