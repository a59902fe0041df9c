"""A model over a packed microbatch: what it computes at the rows from which targets are predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.core.packed import PackedMicrobatch, sent
from slipstream.models.attention import PackedAttention

if TYPE_CHECKING:
    from slipstream.models.transformer import Attention

ROW_MULTIPLE = 64
"""Rows of a microbatch are filled up to a multiple: oneDNN compiles a kernel for every number of rows it meets."""


@dataclass(frozen=True)
class ReadRows:
    """The rows of a microbatch that a rank reads: `tokens` and `positions` int64 [N], and how they attend.

    `target_index` int64 [M] are those among them from which this rank's targets are predicted.
    """

    tokens: np.ndarray
    positions: np.ndarray
    attention: Attention
    target_index: np.ndarray


class MicrobatchReader(Protocol):
    """How ranks read a microbatch: one by itself (`OneReader`), or several together (`ContextParallel`)."""

    def rows(self, microbatch: PackedMicrobatch, *, varlen: bool, replays: bool) -> ReadRows:
        """The rows of this rank."""
        ...

    def targets(self, microbatch: PackedMicrobatch) -> slice | np.ndarray:
        """The targets that are predicted from rows of this rank, as an index into all M, ascending."""
        ...

    def joined(self, microbatch: PackedMicrobatch, *columns: Tensor) -> tuple[Tensor, ...]:
        """Columns [M], alike on every rank, from each rank's numbers at its own `targets`; each gets its gradients."""
        ...


class OneReader:
    """A rank that reads microbatches by itself: all rows and targets are its own."""

    def rows(self, microbatch: PackedMicrobatch, *, varlen: bool, replays: bool) -> ReadRows:
        """Read all rows. With `replays` tokens go through the experts that the engine chose, where they are known."""
        routes = torch.from_numpy(microbatch.routes) if replays and microbatch.routes is not None else None
        tokens, positions, lengths, rows = filled_rows(microbatch, ROW_MULTIPLE)
        attention = PackedAttention(lengths, torch.from_numpy(rows), routes, varlen=varlen)
        return ReadRows(tokens, positions, attention, microbatch.target_index)

    def targets(self, microbatch: PackedMicrobatch) -> slice | np.ndarray:  # noqa: ARG002 - the MicrobatchReader protocol
        return slice(None)

    def joined(self, microbatch: PackedMicrobatch, *columns: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG002
        return columns


def filled_rows(
    microbatch: PackedMicrobatch, multiple: int
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...], np.ndarray]:
    """Return tokens, positions, lengths and rows of a microbatch with its number of rows filled up to a multiple.

    Filler rows are one more sequence, which is never read.
    """
    num_rows, lengths, rows = microbatch.num_tokens, microbatch.lengths, microbatch.rows
    filler = np.zeros(-num_rows % multiple, dtype=np.int64)
    if len(filler):
        lengths = (*lengths, len(filler))
        rows = np.concatenate([rows, num_rows + np.arange(len(filler))])
    tokens = np.concatenate([microbatch.tokens, filler])
    return tokens, np.concatenate([microbatch.positions, filler]), lengths, rows


def at_targets(model: nn.Module, microbatch: PackedMicrobatch, *, replays: bool = False) -> Tensor:
    """`model(tokens, positions, attention)` [N, ...] at the M rows that the targets are predicted from: [M, ...].

    A prompt shared by several completions is read once. Of ranks that read a microbatch together each gets what its
    own targets are predicted from (`MicrobatchReader.targets`). With `replays` tokens go through the experts that the
    engine chose, where the microbatch knows them.
    """
    device = next(model.parameters()).device
    reader = cast(MicrobatchReader, model.reader)
    read = reader.rows(microbatch, varlen=bool(model.varlen), replays=replays)
    out = model(sent(read.tokens, device), sent(read.positions, device), read.attention)
    # A shared prompt's last row predicts several targets. The gradient of `out[index]` adds them up by atomic
    # additions, in any order, as soon as there are two threads; that of an embedding has one fixed order.
    index = sent(read.target_index, device)
    return F.embedding(index, out.flatten(1) if out.ndim > 1 else out[:, None]).view(-1, *out.shape[1:])
