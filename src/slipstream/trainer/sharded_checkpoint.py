"""Checkpoints of a trainer on several ranks, and its Hugging Face export, without any rank seeing the whole.

Signatures for callers; filled in by the commits that follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from slipstream.core.ranks import RankGroup
from slipstream.models.config import TransformerConfig
from slipstream.models.shards import Shard
from slipstream.trainer.checkpoint import Restored

Parts = Mapping[str, Sequence[Shard]]
"""What is saved, by name: "policy", "policy.exp_avg", "policy.exp_avg_sq", and the same of "critic"."""


def trained_parts(
    name: str, weights: Sequence[Shard], exp_avg: Sequence[Shard], exp_avg_sq: Sequence[Shard]
) -> dict[str, Sequence[Shard]]:
    """The parts of one trained model, "policy" or "critic": what this rank holds of weights and AdamW's moments.

    Several parts go into one mapping: trained_parts("policy", ...) | trained_parts("critic", ...).
    """
    return {name: weights, f"{name}.exp_avg": exp_avg, f"{name}.exp_avg_sq": exp_avg_sq}


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole and on disk."""

    path: Path
    step: int


class ShardedCheckpoints:
    """Saves in the background, and loads on any number of ranks. Every rank has one, and all call alike.

    `timeout_s` bounds every wait for the disk and for other ranks.
    """

    def __init__(self, group: RankGroup, *, timeout_s: float = 1800.0) -> None:
        raise NotImplementedError

    def save(
        self,
        path: Path,
        parts: Parts,
        *,
        step: int,
        updates: Mapping[str, int],
        keep: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy what this rank writes of `parts`, return, and write it in the background; `poll` says when it is there.

        `updates`: made so far, by trained model ({"policy": 12, "critic": 16}). `extra` (JSON) counts from rank 0.
        Waits for a save that still runs; raises what became of it.
        """
        raise NotImplementedError

    def poll(self) -> Saved | None:
        """What has been finished since the last call; raises CheckpointError or OSError when it failed. Does not wait."""
        raise NotImplementedError

    def wait(self, timeout_s: float | None = None) -> Saved | None:
        """The same once nothing runs any more. CheckpointError when that takes longer."""
        raise NotImplementedError

    def load(self, path: Path, parts: Parts, *, wholes: Mapping[str, nn.Module] | None = None) -> Restored:
        """Fill the shards of `parts` and the random generators from `path`, whatever ranks wrote it; `Restored.updates`.

        A checkpoint of one CPU rank (`trainer/checkpoint.py`) is read with `wholes`: by "policy" and "critic" a module
        of the whole model, best on "meta", which says how flat weights lie. CheckpointError, with nothing changed, when
        it is torn or of another model.
        """
        raise NotImplementedError

    def load_newest(
        self, root: Path, parts: Parts, *, wholes: Mapping[str, nn.Module] | None = None
    ) -> Restored | None:
        """The newest whole one under `root`; torn ones are logged and passed over."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait for what is being written, and drop the process group."""
        raise NotImplementedError


def whole_shards(module: nn.Module, views: Mapping[str, Tensor]) -> list[Shard]:
    """A whole model's tensors as shards that are whole boxes, stored in `views` (by parameter name).

    `module`: a `Transformer`, a `ScalarModel` or the linear head of a critic. `FlatParameters.views_of` gives views into
    weights or moments. Tensors that Hugging Face's checkpoint does not have (a critic's head, gain and bias) go by their
    parameters' names: head.weight, head.bias, gain, bias.
    """
    raise NotImplementedError


def export_sharded(
    shards: Sequence[Shard],
    path: Path,
    group: RankGroup,
    config: TransformerConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write the model of the whole `config` as a Hugging Face checkpoint; every rank writes a file of its own.

    All ranks call it. Tensors are put together one by one, each on the rank that writes it.
    """
    raise NotImplementedError
