"""The interface between engine and model: room for keys and values, prefill by chunks, one decode step.

The engine (`engine.py`) decides who runs where; a runner owns the device memory and the per-row state of decoding. Two
runners stand behind this interface: `slot_runner.SlotRunner`, dense slots on a CPU, the reference; and
`paged_runner.PagedRunner`, pages with reference counts, its decode step captured on CUDA.

Words: a *row* is one sequence being decoded, at a fixed index. A *prefix* is the stored keys and values of the first
tokens of a sequence; rows are opened on it, any number of them, and it may be closed while they live on. It may grow
into a longer one, and a row that has ended may become one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.generator.version_table import HeldVersions
from slipstream.models.config import TransformerConfig


class Prefix(Protocol):
    """Room for the keys and values of `num_tokens` tokens; filled by `Runner.prefill`, chunk by chunk."""

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Chunk:
    """Tokens `start` to `start + n` of a prefix, to be prefilled; the ones before `start` are stored already."""

    prefix: Prefix
    tokens: np.ndarray  # int32 [n], n >= 1
    start: int
    version: int = 0  # as in `RowStates`


@dataclass(frozen=True, eq=False)
class RowStates:
    """Where decoding begins in N rows. Numpy arrays of length N."""

    input_tokens: np.ndarray  # int64: the first token to decode
    positions: np.ndarray  # int64: its position = number of tokens with stored keys
    num_new: np.ndarray  # int64: tokens known so far behind the prompt; the noise of the next one is of this index
    noise_keys: np.ndarray  # uint64
    temperatures: np.ndarray  # float32, 0: greedy
    top_k: np.ndarray  # int64, 0: off
    top_p: np.ndarray  # float32, 1: off
    min_p: np.ndarray  # float32, 0: off
    keep_sets: np.ndarray  # bool: report the kept set of every token
    versions: np.ndarray  # int64: the weights it decodes with, where several versions are held (`ResidentVersions`)

    @classmethod
    def closed(cls, count: int) -> RowStates:
        """Return rows that decode token 0 at position 0, as padding."""
        return cls(**{name: np.full(count, 1 if name in _ONES else 0, dtype) for name, dtype in _TYPES.items()})

    def put(self, rows: Sequence[int] | np.ndarray, states: RowStates) -> None:
        """Write `states` to these rows; a single state goes to all of them."""
        for name, values in vars(self).items():
            values[rows] = getattr(states, name)

    def take(self, rows: Sequence[int] | np.ndarray) -> RowStates:
        """Return copies of these rows."""
        return RowStates(**{name: values[rows] for name, values in vars(self).items()})

    @property
    def sampling(self) -> dict[str, np.ndarray]:
        """The arrays that `SamplingPlan.of` takes."""
        return {name: getattr(self, name) for name in ("temperatures", "top_k", "top_p", "min_p", "keep_sets")}


_TYPES: dict[str, type] = {
    **dict.fromkeys(("input_tokens", "positions", "num_new", "top_k", "versions"), np.int64),
    **dict.fromkeys(("temperatures", "top_p", "min_p"), np.float32),
    "noise_keys": np.uint64,
    "keep_sets": np.bool_,
}
_ONES = ("temperatures", "top_p")
CLOSED = RowStates.closed(1)


def check_room(config: TransformerConfig, *, num_rows: int, max_len: int) -> None:
    """Raise ConfigError unless a runner of `num_rows` sequences of `max_len` tokens is possible for this model."""
    if num_rows < 1:
        raise ConfigError("the engine needs at least one row", got=num_rows)
    if max_len > config.max_positions:
        raise ConfigError(
            "max_len exceeds the positions the model was built for", got=max_len, allowed=config.max_positions
        )


@dataclass(frozen=True, eq=False)
class Decoded:
    """One token for each of the rows 0 .. R-1; entries of rows that are not open mean nothing.

    `kept` int32 [R, K], filled up with -1, is there when some open row has `keep_sets`: the tokens it was drawn from.
    """

    tokens: np.ndarray  # int64 [R]
    logprobs: np.ndarray  # float32 [R]: under the distribution the token was drawn from
    kept: np.ndarray | None = None
    is_new: np.ndarray | None = None  # bool [R], None for all: rows that have a token; others have their first later

    def rows_of(self, rows: np.ndarray) -> np.ndarray:
        """Return those of the open `rows`, int64 [N], that have a token."""
        return rows if self.is_new is None else rows[self.is_new[rows]]


class ResidentVersions(HeldVersions, Protocol):
    """Weights of several versions at once (`models.served.ServedWeights`)."""

    def select(self, versions: np.ndarray) -> None:
        """Compute the next pass with these versions, int64 [N], one for each of its rows."""
        ...


class Runner(Protocol):
    """Runs one model for one engine. Called from one thread, between two decode steps."""

    num_rows: int
    """Rows that may be open at once."""
    max_len: int
    """Tokens of the longest sequence."""
    joins_prefill: bool
    """Whether `decode` takes chunks: prefill beside decoding costs less there than in a pass of its own."""

    def open_prefix(self, num_tokens: int) -> Prefix | None:
        """Room for a prefix; None when memory is short now (the engine tries again when something was closed)."""
        ...

    def extend_prefix(self, prefix: Prefix, num_tokens: int) -> Prefix | None:
        """Room for `num_tokens` tokens, at least as many as `prefix` has, which holds what `prefix` holds.

        It takes the place of `prefix`, which is not to be used any more; None, changing nothing, without memory.
        """
        ...

    def share_prefix(self, prefix: Prefix, num_shared: int, num_tokens: int) -> tuple[Prefix, int] | None:
        """Room for `num_tokens` tokens that begin as `prefix` does, and how many of them it holds from the start.

        That is up to the `num_shared` tokens that both begin with. `prefix` stays as it is. None without memory.
        """
        ...

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Compute and store the chunks' keys and values under the present weights; no prefix occurs twice."""
        ...

    def close_prefix(self, prefix: Prefix) -> None:
        """The engine opens no further row on it. Rows that are open on it keep what they share."""
        ...

    def open_rows(self, rows: Sequence[int], prefix: Prefix | None, states: RowStates) -> bool:
        """Start the closed `rows` behind `prefix` (None: behind nothing). False, changing nothing, without memory."""
        ...

    def close_rows(self, rows: Sequence[int]) -> None:
        """Forget these rows; their memory is free."""
        ...

    def park_row(self, row: int) -> Prefix:
        """Close this row; return all the keys and values it has stored, those of its tokens but the last."""
        ...

    def move_rows(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Rename open rows; destinations are closed, and the two sets are disjoint."""
        ...

    def rows_without_room(self) -> list[int]:
        """Open rows, that cannot store another token now, after giving room to those that can, lowest row first.

        The engine preempts until this is empty; always empty where rows have their full length from the start.
        """
        ...

    def settle(self) -> None:
        """The model's weights have changed: what was computed ahead is computed again."""
        ...

    def routes(self, row: int) -> np.ndarray | None:
        """The experts of all tokens of this row but its last, [n, L, k] (`models.experts.route_type`), if recorded."""
        ...

    def decode(self, num_rows: int, chunks: Sequence[Chunk] = ()) -> Decoded:
        """One token for every open row; all of them lie below `num_rows`. Advances the rows by that token.

        Where steps are launched ahead, a row has its first token one step after it was opened (`Decoded.is_new`).
        With `joins_prefill` also what `prefill` does with `chunks`, in the same pass over the weights.
        """
        ...
