"""Training data between the batching edge and the trainer: sequences, and microbatches packed from them.

Legend: N rows (input tokens) and M predicted tokens (targets) of a microbatch, S its sequences, C their contexts and T
the sum of the contexts' lengths. Contexts share the rows of tokens that they begin with, so N <= T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from slipstream.core.errors import ShapeError

OPTIONAL_COLUMNS = ("reference_logprobs", "proximal_logprobs", "values", "returns")


def sent(array: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `array` on `device`. A GPU gets it from pinned memory, in its turn: the host goes on to what comes next.

    Other copies wait until the GPU has done all that it was told before.
    """
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    if device.type == "cpu" or tensor.device == device:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


@dataclass(frozen=True)
class TrainSequence:
    """A prompt with its completion, ready to be packed.

    `tokens` int32 [T] are prompt and completion. `mask` bool [T] is True on tokens that are trained on: sampled ones,
    or a demonstration's. `behaviour_logprobs` and `advantages` float32 [T] and `versions` int32 [T] hold on these
    tokens; elsewhere they are 0, 0 and -1. `key` is (ordinal, sample): the canonical order, and the tie-breaker.
    `OPTIONAL_COLUMNS`, float32 [T] on the same tokens, are there when the loss or the critic needs them, in all
    sequences of a batch or in none. The same holds for the kept sets: `kept_counts` int32 [T] is the size of the set
    that each token was drawn from, 0 where nothing is trained on; the sets follow one another in `kept_tokens`.
    And for what a teacher has said at each target: its likeliest tokens, their logprobs, and that of all others.
    `starts` are the offsets, ascending from 0, where contexts begin: more than one in an episode with branches. Tokens
    attend to those before them in their context, and positions count from its start; the first token is not trained on.
    """

    key: tuple[int, int]
    tokens: np.ndarray
    mask: np.ndarray
    behaviour_logprobs: np.ndarray
    advantages: np.ndarray
    versions: np.ndarray
    reference_logprobs: np.ndarray | None = None
    proximal_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None  # the critic's, at the state before each token
    returns: np.ndarray | None = None  # the critic's targets
    kept_tokens: np.ndarray | None = None  # int32 [sum of counts]
    kept_counts: np.ndarray | None = None
    teacher_tokens: np.ndarray | None = None  # int32 [targets, K]
    teacher_logprobs: np.ndarray | None = None  # float32 [targets, K + 1]
    routes: np.ndarray | None = None  # [T - 1, layers, k]: the engine's experts (`types.Segment`)
    starts: tuple[int, ...] = (0,)

    @classmethod
    def read_only(
        cls, key: tuple[int, int], tokens: np.ndarray, mask: np.ndarray, *, starts: tuple[int, ...] = (0,)
    ) -> TrainSequence:
        """A sequence that nothing was sampled for: `mask` says which tokens a model is asked about."""
        zeros, versions = np.zeros(len(tokens), dtype=np.float32), np.full(len(tokens), -1, dtype=np.int32)
        return cls(key, tokens.astype(np.int32), mask, zeros, zeros, versions, starts=starts)

    @property
    def contexts(self) -> list[tuple[int, np.ndarray]]:
        """The start of each context that has a token to train on, and the offsets of these tokens.

        It is read up to the last of them; a context without any is not read.
        """
        trained = np.flatnonzero(self.mask)
        parts = np.split(trained, np.searchsorted(trained, self.starts[1:])) if len(self.starts) > 1 else [trained]
        return [(start, part) for start, part in zip(self.starts, parts, strict=True) if len(part)]

    @property
    def num_inputs(self) -> int:
        """The number of tokens that the model has to read: in each context all before the last that it predicts."""
        return sum(int(trained[-1]) - start for start, trained in self.contexts)

    @property
    def prompt(self) -> np.ndarray:
        """The tokens before the first one trained on, in the context of that one, int32.

        Sequences of one ordinal with equal prompts share it, and what they begin with alike behind it.
        """
        return next((self.tokens[start : trained[0]] for start, trained in self.contexts), self.tokens[:0])

    @property
    def num_targets(self) -> int:
        return int(np.count_nonzero(self.mask))


@dataclass(frozen=True)
class PackedMicrobatch:
    """Sequences stored one after the other without padding, each row once, for one forward and backward pass.

    `tokens` and `positions` int64 [N] are the model's inputs: for each group that is present, a prefix tree of its
    contexts. `lengths` [C] are the input tokens of each context (sum T), and `rows` int64 [T] are their rows: those of
    context 0, then of context 1, ...; shared rows occur once per context, in front of its own. A sequence has one
    context, an episode with branches one for each branch that is read.
    Row `target_index[m]` predicts `targets[m]`; all fields below `targets` are int64 / float32 [M] and aligned with it:
    a sampled token t is predicted from the row of token t - 1, so logits are needed at `target_index` only, and the
    last row that contexts share predicts the next token of each. `segment_ids` counts the sequences from
    0 within the microbatch; `keys` names them. `kept_counts` are the sizes of the targets' kept sets, which follow one
    another in `kept_tokens` int64; a logprob of such a target is taken over its set.
    `teacher_tokens` and `teacher_logprobs` are what a teacher of its own executor has said at each target.
    """

    tokens: np.ndarray
    positions: np.ndarray
    lengths: tuple[int, ...]
    rows: np.ndarray
    target_index: np.ndarray
    targets: np.ndarray
    behaviour_logprobs: np.ndarray
    advantages: np.ndarray
    versions: np.ndarray
    segment_ids: np.ndarray
    keys: tuple[tuple[int, int], ...]
    reference_logprobs: np.ndarray | None = None
    proximal_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    returns: np.ndarray | None = None
    kept_tokens: np.ndarray | None = None
    kept_counts: np.ndarray | None = None
    teacher_tokens: np.ndarray | None = None  # int64 [M, K]
    teacher_logprobs: np.ndarray | None = None  # float32 [M, K + 1]
    routes: np.ndarray | None = None  # [N, layers, k]: the engine's experts (`types.Segment`)

    @property
    def kept_sets(self) -> np.ndarray | None:
        """The kept set of each target, int64 [M, largest count], filled up with -1; None where none is kept."""
        if self.kept_tokens is None or self.kept_counts is None:
            return None
        is_kept = np.arange(self.kept_counts.max(initial=0)) < self.kept_counts[:, None]
        sets = np.full(is_kept.shape, -1, dtype=np.int64)
        sets[is_kept] = self.kept_tokens
        return sets

    def tensors(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the columns of the targets [M] on `device`, by name; optional ones that are absent are left out.

        `lengths` int64 [S] counts the targets of each sequence.
        """
        names = ("behaviour_logprobs", "advantages", "segment_ids", *OPTIONAL_COLUMNS)
        columns = {name: vars(self)[name] for name in names}
        columns["lengths"] = np.bincount(self.segment_ids)
        return {name: sent(column, device) for name, column in columns.items() if column is not None}

    @property
    def num_tokens(self) -> int:
        """The number of rows that the model reads: shared ones count once."""
        return len(self.tokens)

    @property
    def num_targets(self) -> int:
        return len(self.targets)


def empty_microbatch() -> PackedMicrobatch:
    """Make a microbatch of one input token and no target: its losses and gradients are 0.

    A rank that has no more microbatches reads it while other ranks still have some, as collectives inside the model
    need all ranks.
    """
    nothing = np.zeros(0, dtype=np.float32)
    none = np.zeros(0, dtype=np.int64)
    return PackedMicrobatch(
        tokens=np.zeros(1, dtype=np.int64),
        positions=np.zeros(1, dtype=np.int64),
        lengths=(1,),
        rows=np.zeros(1, dtype=np.int64),
        target_index=none,
        targets=none,
        behaviour_logprobs=nothing,
        advantages=nothing,
        versions=none,
        segment_ids=none,
        keys=(),
        teacher_tokens=np.zeros((0, 1), dtype=np.int64),
        teacher_logprobs=np.zeros((0, 2), dtype=np.float32),
        **dict.fromkeys(OPTIONAL_COLUMNS, nothing),
    )


class Numbered(Protocol):
    """An object with the ordinal of a group."""

    @property
    def ordinal(self) -> int: ...


class NumberedSample(Numbered, Protocol):
    """A rollout, or its head: an object with ordinal and sample."""

    @property
    def sample(self) -> int: ...


AnyGroup = TypeVar("AnyGroup", bound=Numbered)
AnySample = TypeVar("AnySample", bound=NumberedSample)


class Batching(Protocol):
    """The functions of the batching edge that the trainer calls; the module `batching.collate` has them."""

    def collate(
        self, sequences: Sequence[TrainSequence], capacity_tokens: int, *, atom_size: int = 1
    ) -> list[PackedMicrobatch]: ...

    def split_minibatches(
        self, groups: Sequence[AnyGroup], num_minibatches: int, *, order: Sequence[int] | None = None
    ) -> list[list[AnyGroup]]: ...

    def balanced_permutation(self, lengths: Sequence[int], num_ranks: int) -> list[list[int]]: ...

    def padding_frac(self, microbatches: Sequence[PackedMicrobatch]) -> float: ...

    def padded_layout_frac(self, microbatches: Sequence[PackedMicrobatch]) -> float: ...


class GroupCollector(Protocol[AnySample]):
    """The methods of the group buffer that the trainer calls (`batching.buffer.GroupBuffer`)."""

    num_duplicates: int

    def add(self, item: AnySample) -> bool: ...

    def is_complete(self, ordinal: int) -> bool: ...

    def group(self, ordinal: int) -> tuple[AnySample, ...]: ...

    def take(self, ordinals: Iterable[int]) -> dict[int, tuple[AnySample, ...]]: ...


Expects = Callable[[int, int], bool]
"""(ordinal, sample) -> whether this sample is expected here."""


class NewCollector(Protocol):
    """A constructor of empty group buffers, for rollouts or for their heads."""

    def __call__(self, *, expects: Expects | None = None) -> GroupCollector[Any]: ...


def check_kept_sets(tokens: np.ndarray, kept_tokens: np.ndarray, kept_counts: np.ndarray) -> None:
    """Raise ShapeError unless each of `tokens` int [T] is one of its set; the sets follow one another."""
    if len(kept_counts) != len(tokens) or int(kept_counts.sum()) != len(kept_tokens):
        got = f"{len(kept_counts)} sets with {int(kept_counts.sum())} tokens in all, {len(kept_tokens)} given"
        raise ShapeError("kept sets do not fit their tokens", got=got, allowed=f"{len(tokens)} sets")
    owners = np.repeat(np.arange(len(tokens)), kept_counts)
    num_found = np.bincount(owners[kept_tokens == tokens[owners]], minlength=len(tokens))
    if np.any(num_found != 1):
        place = int(np.argmax(num_found != 1))
        kept = kept_tokens[owners == place].tolist()
        raise ShapeError("a token was not drawn from its set", got=f"token {tokens[place]} at {place} from {kept}")
