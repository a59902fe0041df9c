"""The reference runner: one dense slot of keys and values per row, float32, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from slipstream.generator.arrangement import LENGTH_MULTIPLE, ROW_MULTIPLE, SlotSpan, round_up, spans, swaps
from slipstream.generator.kv_cache import (
    DecodeAttention,
    JoinedAttention,
    PrefillAttention,
    PrefixKV,
    SlotKV,
    unknown_like,
)
from slipstream.generator.noise import uniform
from slipstream.generator.runner import CLOSED, Chunk, Decoded, Prefix, ResidentVersions, RowStates, check_room
from slipstream.generator.sampler import SampledTokens, SamplingPlan, SamplingRows, sample_tokens
from slipstream.generator.stage_ticks import over_layers
from slipstream.models.transformer import Transformer

_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class SlotStep:
    """A decode step of the first slots, and chunks beside them, as all this was when the step began."""

    states: RowStates  # of these slots
    spans: list[SlotSpan]
    plan: SamplingPlan
    took_part: np.ndarray  # int64 [all slots]: 1 for those that were open, 0 if they were closed meanwhile
    chunks: Sequence[Chunk]

    @property
    def num_slots(self) -> int:
        return len(self.states.positions)

    def kept(self) -> SlotStep:
        """Return a copy that stays as it is, but for rows that are closed."""
        return replace(self, states=self.states.take(np.arange(self.num_slots)), took_part=self.took_part.copy())


def _now(work: Callable[[], None]) -> None:
    work()


class SlotRunner:
    """Implements `runner.Runner`. Each row has a slot, opened on a copy of its prefix; rows always have room.

    Which slot a row has is decided here, and changes while it lives (`arrangement.py`): all arrays are by slot. With
    `residents` every row and every chunk has the weights of its own version. `later` is told of all that touches keys
    and values, but for passes: one stage of several is late with it (`staged_slots.py`).
    """

    joins_prefill = True

    def __init__(
        self,
        model: Transformer,
        *,
        num_rows: int,
        max_len: int,
        residents: ResidentVersions | None = None,
        records_routes: bool = False,
        later: Callable[[Callable[[], None]], None] = _now,
    ) -> None:
        config = model.config
        check_room(config, num_rows=num_rows, max_len=max_len)
        self.num_rows = num_rows
        self.max_len = max_len
        self._model, self._residents, self._later = model, residents, later
        self._kv = SlotKV(
            num_layers=len(model.layers),
            num_slots=num_rows,
            num_kv_heads=config.num_kv_heads,
            max_len=max_len,
            head_dim=config.head_dim,
            recorded=(config.experts_per_token, config.num_experts) if records_routes else None,
        )
        self._attention = DecodeAttention(self._kv, num_heads=config.num_heads)
        # Numpy, so that a step costs few small operations. Slots that are not open decode token 0 at position 0 as
        # padding up to a multiple of 8; nobody reads what they produce.
        slots = self._kv.num_slots
        self._slot_of = np.arange(slots)  # row -> slot
        self._steps_settled = 0  # decode steps since rows came, went or moved
        self._is_open = np.zeros(slots, dtype=bool)
        self._advance = np.zeros(slots, dtype=np.int64)  # 1 for open rows
        self._states = RowStates.closed(slots)
        self._plan: SamplingPlan | None = None  # of the open slots; None: they have changed

    def open_prefix(self, num_tokens: int) -> PrefixKV:
        layers, _, heads, _, head_dim = self._kv.keys.shape
        shape = (layers, heads, num_tokens, head_dim)
        routes = unknown_like(self._kv.routes, (layers, 1, num_tokens))
        return PrefixKV(self._kv.keys.new_empty(shape), self._kv.values.new_empty(shape), routes)

    def extend_prefix(self, prefix: Prefix, num_tokens: int) -> PrefixKV:
        return self.share_prefix(prefix, prefix.num_tokens, num_tokens)[0]

    def share_prefix(self, prefix: Prefix, num_shared: int, num_tokens: int) -> tuple[PrefixKV, int]:
        base, other = _own(prefix), self.open_prefix(num_tokens)

        def copy() -> None:
            for here, there in zip(other.stored, base.stored, strict=True):
                here[:, :, :num_shared] = there[:, :, :num_shared]

        self._later(copy)
        return other, num_shared

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        tokens, positions, attention, versions = _pass_over(chunks)
        self._select(0, versions)
        self._model.prefill(tokens, positions, attention)
        attention.store()

    def close_prefix(self, prefix: Prefix) -> None:
        """Its memory goes with its last user."""

    def open_rows(self, rows: Sequence[int], prefix: Prefix | None, states: RowStates) -> bool:
        slots = self._slot_of[list(rows)]
        if prefix is not None:
            self._later(partial(self._kv.write_prefix, slots.tolist(), _own(prefix)))
        self._states.put(slots, states)
        self._later(partial(self._attention.open_slots, slots.tolist(), states.positions.tolist()))
        self._plan = None
        self._is_open[slots] = True
        self._advance[slots] = 1
        self._steps_settled = 0
        return True

    def close_rows(self, rows: Sequence[int]) -> None:
        slots = self._slot_of[list(rows)]
        self._plan = None
        self._is_open[slots] = False
        self._advance[slots] = 0
        self._steps_settled = 0
        self._states.put(slots, CLOSED)

    def park_row(self, row: int) -> PrefixKV:
        slot = int(self._slot_of[row])
        prefix = self.open_prefix(int(self._states.positions[slot]))
        self._later(partial(self._kv.read_prefix, slot, prefix))
        self.close_rows([row])
        return prefix

    def move_rows(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        here, there = list(sources), list(destinations)
        self._slot_of[here], self._slot_of[there] = self._slot_of[there], self._slot_of[here]
        self._steps_settled = 0

    def rows_without_room(self) -> list[int]:
        return []

    def settle(self) -> None:
        """Nothing is computed ahead."""

    def routes(self, row: int) -> np.ndarray | None:
        if (routes := self._kv.routes) is None:
            return None
        slot = int(self._slot_of[row])
        return routes[:, slot, 0, : int(self._states.positions[slot])].transpose(0, 1).numpy().copy()

    def decode(self, num_rows: int, chunks: Sequence[Chunk] = ()) -> Decoded:
        step = self.begin(round_up(num_rows, ROW_MULTIPLE), chunks)
        sampled = self.sample(step, self.states_of(step))
        self.end(step, sampled.tokens.numpy())
        slots = self._slot_of[:num_rows]  # those of closed rows may lie anywhere: nobody reads what is found there
        return Decoded(
            sampled.tokens.numpy().take(slots, mode="clip"),
            sampled.logprobs.numpy().take(slots, mode="clip"),
            None if sampled.kept is None else sampled.kept.numpy().take(slots, axis=0, mode="clip"),
        )

    # A step's parts, which several stages take at different times

    def begin(self, num_slots: int, chunks: Sequence[Chunk]) -> SlotStep:
        """Begin a step of the open rows, at most `num_slots`, a multiple of ROW_MULTIPLE, and of `chunks`."""
        spans_of_slots = self._arranged(num_slots) if num_slots else []
        if self._plan is None:
            self._plan = SamplingPlan.of(**self._states.sampling, is_open=self._is_open)
        states = RowStates(**{name: values[:num_slots] for name, values in vars(self._states).items()})
        return SlotStep(states, spans_of_slots, self._plan, self._advance, chunks)

    def states_of(self, step: SlotStep, stream: Tensor | None = None) -> Tensor:
        """Run `step` through the layers that lie here, see `over_layers`."""
        num_slots, states = step.num_slots, step.states
        tokens, positions = torch.from_numpy(states.input_tokens), torch.from_numpy(states.positions)
        attention: DecodeAttention | JoinedAttention | PrefillAttention = self._attention
        if num_slots:
            self._attention.prepare(positions, step.spans)
        if not step.chunks:
            self._select(num_slots)
            return over_layers(self._model, tokens, positions, self._attention, stream, num_rows=num_slots)
        goes_on = not self._model.stage.is_last
        more_tokens, more_positions, prefill, more_versions = _pass_over(step.chunks, goes_on=goes_on)
        self._select(num_slots, more_versions)
        tokens, positions = torch.cat((tokens, more_tokens)), torch.cat((positions, more_positions))
        attention = JoinedAttention(self._attention, num_slots, prefill) if num_slots else prefill
        out = over_layers(self._model, tokens, positions, attention, stream, num_rows=num_slots)
        prefill.store()
        return out

    def sample(self, step: SlotStep, hidden: Tensor) -> SampledTokens:
        """Sample a token for each slot of `step` from its state [num_slots, hidden]."""
        states = step.states
        uniforms = uniform(states.noise_keys, states.num_new)
        cuts = SamplingRows(*map(torch.from_numpy, (states.temperatures, states.top_k, states.top_p, states.min_p)))
        return sample_tokens(self._model.logits(hidden), cuts, torch.from_numpy(uniforms), step.plan)

    def end(self, step: SlotStep, tokens: np.ndarray) -> None:
        """Advance the rows that took part in `step` by their `tokens`, int64 [num_slots]."""
        here = slice(0, step.num_slots)
        took_part = step.took_part[here]
        self._states.positions[here] += took_part
        self._states.num_new[here] += took_part
        np.copyto(self._states.input_tokens[here], tokens, where=took_part > 0)

    def slots_of(self, rows: Sequence[int]) -> np.ndarray:
        """Return the slots of `rows`, int64 [N], until the next `begin`."""
        slots: np.ndarray = self._slot_of[list(rows)]
        return slots

    def _select(self, num_slots: int, more: np.ndarray = _NONE) -> None:
        """Have the next pass, of the first slots and of `more` tokens, compute with the version of each."""
        if self._residents is not None:
            is_open, versions = self._is_open[:num_slots], self._states.versions[:num_slots]
            padding = np.concatenate((versions[is_open], more))[0]  # of a version that is there anyway
            self._residents.select(np.concatenate((np.where(is_open, versions, padding), more)))

    def _arranged(self, num_slots: int) -> list[SlotSpan]:
        """All open slots brought below `num_slots`, long ones to the front now and then; the spans that this makes."""
        if self._steps_settled % LENGTH_MULTIPLE == 0:
            lengths = self._states.positions + self._advance  # of free slots 0
            # Where every span has the whole length all are equally long.
            self._exchange(swaps(lengths if self._attention.has_buckets else self._advance, num_slots), lengths)
        self._steps_settled += 1
        if not self._attention.has_buckets:
            return [SlotSpan(0, num_slots, self._kv.max_len)]
        return spans(self._states.positions[:num_slots] + 1)

    def _exchange(self, pairs: Sequence[tuple[int, int]], lengths: np.ndarray) -> None:
        """Exchange what lies in these pairs of slots, one pair after the other; before it they hold `lengths`."""
        if not pairs:
            return
        came_from = np.arange(len(lengths))
        for one, other in pairs:
            here, there = came_from[one], came_from[other]
            self._later(partial(self._kv.swap, one, other, (int(lengths[here]), int(lengths[there]))))
            came_from[one], came_from[other] = there, here
        for values in (*vars(self._states).values(), self._is_open, self._advance):
            values[:] = values[came_from]
        slot_of = np.empty_like(came_from)
        slot_of[came_from] = np.arange(len(lengths))
        self._slot_of = slot_of[self._slot_of]
        changed = np.flatnonzero(came_from != np.arange(len(lengths))).tolist()
        self._later(partial(self._attention.open_slots, changed, self._states.positions[changed].tolist()))


def _pass_over(
    chunks: Sequence[Chunk], *, goes_on: bool = False
) -> tuple[Tensor, Tensor, PrefillAttention, np.ndarray]:
    """Tokens and positions int64 [N] of the chunks, each padded, their attention, and versions int64 [N]."""
    # Those that begin a sequence first, and by length: neighbours of equal length share a call.
    chunks = sorted(chunks, key=lambda chunk: (chunk.start > 0, len(chunk.tokens)))
    lengths = [len(chunk.tokens) for chunk in chunks]
    padded = [round_up(length, ROW_MULTIPLE) for length in lengths]
    tokens = np.zeros(sum(padded), dtype=np.int64)
    positions = np.zeros(sum(padded), dtype=np.int64)
    row = 0
    for chunk, length, room in zip(chunks, lengths, padded, strict=True):
        tokens[row : row + length] = chunk.tokens
        positions[row : row + length] = np.arange(chunk.start, chunk.start + length)
        row += room
    prefixes, starts = [_own(chunk.prefix) for chunk in chunks], [chunk.start for chunk in chunks]
    attention = PrefillAttention(prefixes, starts, lengths, goes_on=goes_on)
    versions = np.repeat([chunk.version for chunk in chunks], padded)
    return torch.from_numpy(tokens), torch.from_numpy(positions), attention, versions


def _own(prefix: Prefix) -> PrefixKV:
    if not isinstance(prefix, PrefixKV):
        raise TypeError(f"a prefix of another runner: {type(prefix).__name__}")
    return prefix
