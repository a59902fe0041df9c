"""Scores of whole completions by a scalar model, over the same packed path as training: the value at the last token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from slipstream.core.errors import ShapeError
from slipstream.core.packed import Batching, PackedMicrobatch, TrainSequence
from slipstream.core.rank_group import RankGroup
from slipstream.models.packed import at_targets
from slipstream.models.scalar import ScalarModel
from slipstream.models.turns import read_in_turns

MOST_TOGETHER = 4096  # samples: the search for microbatches takes their number times that of the microbatches
Sample = tuple[np.ndarray, np.ndarray]  # prompt tokens, completion tokens with EOS where it was sampled; int32


def scored_sequence(key: tuple[int, int], prompt: np.ndarray, completion: np.ndarray) -> TrainSequence:
    """A sequence whose last target is predicted from the row of its last real token, which is where a score is read.

    That target is one more token behind the completion; the model never reads it, so its id says nothing. The
    completion's own tokens are targets as well, so that completions of one ordinal share the rows that they begin with.
    """
    if not len(prompt):
        raise ShapeError("a score needs a prompt", got="no prompt tokens")
    tokens = np.concatenate([prompt, completion, [0]])
    return TrainSequence.read_only(key, tokens, np.arange(len(tokens)) >= len(prompt))


def microbatch_scores(model: ScalarModel, microbatch: PackedMicrobatch) -> tuple[Tensor, list[tuple[int, int]]]:
    """Scores [S] fp32 of a microbatch of `scored_sequence`s and their keys, in ascending order of key."""
    last = np.flatnonzero(np.diff(microbatch.segment_ids, append=len(microbatch.keys)))
    order = sorted(range(len(microbatch.keys)), key=microbatch.keys.__getitem__)
    values = at_targets(model, microbatch)
    scores = values.index_select(0, torch.from_numpy(last[order]).to(values.device))
    return scores, [microbatch.keys[index] for index in order]


def score(
    model: ScalarModel,
    samples: Sequence[Sample],
    *,
    microbatch_tokens: int,
    batching: Batching,
    ranks: RankGroup = RankGroup.alone(),
) -> np.ndarray:
    """One score per sample, float32 [len(samples)]: the value at its last token, of prompt and completion together.

    Read in microbatches of at most `microbatch_tokens` rows, MOST_TOGETHER after MOST_TOGETHER; completions with equal
    prompts share theirs. An empty completion is scored at the prompt's last token. Data-parallel `ranks` of the model
    call it with the same `samples`, and all get the scores. Identity: scores do not depend on what else is in
    `samples`, nor on the ranks.
    """
    if len(samples) > MOST_TOGETHER:
        score_part = partial(score, model, microbatch_tokens=microbatch_tokens, batching=batching, ranks=ranks)
        starts = range(0, len(samples), MOST_TOGETHER)
        return np.concatenate([score_part(samples[start : start + MOST_TOGETHER]) for start in starts])
    ordinals: dict[bytes, int] = {}  # of the distinct prompts
    sequences = []
    for index, (prompt, completion) in enumerate(samples):
        ordinal = ordinals.setdefault(np.asarray(prompt, dtype=np.int32).tobytes(), len(ordinals))
        sequences.append(scored_sequence((ordinal, index), prompt, completion))
    scores = np.zeros(len(samples), dtype=np.float32)
    microbatches = batching.collate(sequences, microbatch_tokens)
    found = read_in_turns(model, microbatches, lambda one: (microbatch_scores(model, one)[0],), ranks)
    for microbatch, (values,) in zip(microbatches, found, strict=True):
        scores[[index for _, index in sorted(microbatch.keys)]] = values
    return scores
