"""The reference runner: one dense slot of keys and values per row, float32, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.generator.kv_cache import (
    ROW_MULTIPLE,
    DecodeAttention,
    JoinedAttention,
    PrefillAttention,
    PrefixKV,
    SlotKV,
    round_up,
)
from slipstream.generator.noise import uniform
from slipstream.generator.runner import Chunk, Decoded, Prefix, RowStates
from slipstream.generator.sampler import SamplingPlan, SamplingRows, sample_tokens
from slipstream.models.transformer import Transformer


class SlotRunner:
    """Implements `runner.Runner`. Rows are slots, opened on a copy of their prefix; they always have room."""

    joins_prefill = True

    def __init__(self, model: Transformer, *, num_rows: int, max_len: int) -> None:
        config = model.config
        if num_rows < 1:
            raise ConfigError("the engine needs at least one slot", got=num_rows)
        if max_len > config.max_positions:
            raise ConfigError(
                "max_len exceeds the positions the model was built for", got=max_len, allowed=config.max_positions
            )
        self.num_rows = num_rows
        self.max_len = max_len
        self._model = model
        self._kv = SlotKV(
            num_layers=config.num_layers,
            num_slots=num_rows,
            num_kv_heads=config.num_kv_heads,
            max_len=max_len,
            head_dim=config.head_dim,
        )
        self._attention = DecodeAttention(self._kv, num_heads=config.num_heads)
        # Numpy, so that a step costs few small operations. Rows that are not open decode token 0 at position 0 as
        # padding up to a multiple of 8; nobody reads what they produce.
        slots = self._kv.num_slots
        self._is_open = np.zeros(slots, dtype=bool)
        self._advance = np.zeros(slots, dtype=np.int64)  # 1 for open rows
        self._states = RowStates(
            input_tokens=np.zeros(slots, dtype=np.int64),
            positions=np.zeros(slots, dtype=np.int64),
            num_new=np.zeros(slots, dtype=np.int64),
            noise_keys=np.zeros(slots, dtype=np.uint64),
            temperatures=np.ones(slots, dtype=np.float32),
            top_k=np.zeros(slots, dtype=np.int64),
            top_p=np.ones(slots, dtype=np.float32),
            min_p=np.zeros(slots, dtype=np.float32),
            keep_sets=np.zeros(slots, dtype=bool),
        )
        self._tensors = {name: torch.from_numpy(values) for name, values in vars(self._states).items()}
        self._plan: SamplingPlan | None = None  # of the open rows; None: they have changed

    def open_prefix(self, num_tokens: int) -> PrefixKV:
        layers, _, heads, _, head_dim = self._kv.keys.shape
        shape = (layers, heads, num_tokens, head_dim)
        return PrefixKV(torch.empty(shape), torch.empty(shape))

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        tokens, positions, attention = _pass_over(chunks)
        self._model.prefill(tokens, positions, attention)
        attention.store()

    def close_prefix(self, prefix: Prefix) -> None:
        """Its memory goes with its last user."""

    def open_rows(self, rows: Sequence[int], prefix: Prefix | None, states: RowStates) -> bool:
        if prefix is not None:
            self._kv.write_prefix(rows, _own(prefix))
        for name, values in vars(self._states).items():
            values[rows] = getattr(states, name)
        self._attention.open_slots(rows, states.positions.tolist())
        self._plan = None
        self._is_open[rows] = True
        self._advance[rows] = 1
        return True

    def close_rows(self, rows: Sequence[int]) -> None:
        self._plan = None
        self._is_open[rows] = False
        self._advance[rows] = 0
        self._states.input_tokens[rows] = 0
        self._states.positions[rows] = 0
        self._states.temperatures[rows] = 1.0
        self._states.top_k[rows] = 0
        self._states.top_p[rows] = 1.0
        self._states.min_p[rows] = 0.0
        self._states.keep_sets[rows] = False

    def move_rows(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self._kv.move(sources, destinations, int(self._states.positions[sources].max()))
        for values in (*vars(self._states).values(), self._is_open, self._advance):
            values[destinations] = values[sources]
        self._attention.open_slots(destinations, self._states.positions[destinations].tolist())
        self.close_rows(sources)

    def rows_without_room(self) -> list[int]:
        return []

    def decode(self, num_rows: int, chunks: Sequence[Chunk] = ()) -> Decoded:
        states, rows = self._states, round_up(num_rows, ROW_MULTIPLE)
        if self._plan is None:
            self._plan = SamplingPlan.of(
                states.temperatures, states.top_k, states.top_p, states.min_p, states.keep_sets, self._is_open
            )
        tensors = {name: tensor[:rows] for name, tensor in self._tensors.items()}
        positions = tensors["positions"]
        self._attention.prepare(positions, self._attention.bucket(int(states.positions.max()) + 1))
        if chunks:
            more_tokens, more_positions, prefill = _pass_over(chunks)
            hidden = self._model(
                torch.cat((tensors["input_tokens"], more_tokens)),
                torch.cat((positions, more_positions)),
                JoinedAttention(self._attention, rows, prefill),
            )
            prefill.store()
        else:
            hidden = self._model(tensors["input_tokens"], positions, self._attention)
        uniforms = uniform(states.noise_keys[:rows], states.num_new[:rows])
        cuts = SamplingRows(tensors["temperatures"], tensors["top_k"], tensors["top_p"], tensors["min_p"])
        sampled = sample_tokens(self._model.logits(hidden), cuts, torch.from_numpy(uniforms), self._plan)
        tokens = sampled.tokens.numpy()
        advance = self._advance[:rows]
        states.positions[:rows] += advance
        states.num_new[:rows] += advance
        np.multiply(tokens, advance, out=states.input_tokens[:rows])
        return Decoded(tokens, sampled.logprobs.numpy(), None if sampled.kept is None else sampled.kept.numpy())


def _pass_over(chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor, PrefillAttention]:
    """Tokens and positions int64 [N] of the chunks, each padded, and their attention."""
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
    attention = PrefillAttention([_own(chunk.prefix) for chunk in chunks], [c.start for c in chunks], lengths)
    return torch.from_numpy(tokens), torch.from_numpy(positions), attention


def _own(prefix: Prefix) -> PrefixKV:
    if not isinstance(prefix, PrefixKV):
        raise TypeError(f"a prefix of another runner: {type(prefix).__name__}")
    return prefix
