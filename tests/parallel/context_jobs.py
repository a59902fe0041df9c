"""What ranks do that read microbatches together, and what one does alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from gradients import named_grads
from rank_models import VOCAB, whole_model, whole_tensors
from rank_pool import Rank
from sharded_jobs import Boxes, Layout, boxes, division_of, part_of
from torch import Tensor

from slipstream.batching.collate import collate
from slipstream.core.packed import PackedMicrobatch, TrainSequence, empty_microbatch
from slipstream.core.teacher_section import TeacherConfig
from slipstream.models.config import TransformerConfig
from slipstream.models.flat import FlatParameters
from slipstream.models.packed import at_targets
from slipstream.models.sharded import ShardedParameters
from slipstream.models.transformer import Transformer
from slipstream.trainer.measure import microbatch_logprobs
from slipstream.trainer.teacher import Teacher

TEACHER = Teacher(TeacherConfig(path="teacher", executor="own", top_k=3), VOCAB, 0.9)
BESIDE = TeacherConfig(path="teacher", top_k=2, temperature=0.6)


@dataclass
class Read:
    """Columns of each microbatch, by rank alike, and this rank's part of the gradient of all of them together."""

    columns: list[tuple[np.ndarray, ...]]
    gradient: Boxes


def sequence(key: tuple[int, int], lengths: list[int], *, starts: tuple[int, ...] = (0,)) -> TrainSequence:
    """Prompts, of which samples of one ordinal have the same, and completions in turns, behind each other."""
    prompt = np.random.default_rng(key[0]).integers(0, VOCAB, lengths[0])
    rng = np.random.default_rng([*key, 1])
    tokens = np.concatenate([prompt, rng.integers(0, VOCAB, sum(lengths[1:]))]).astype(np.int32)
    mask = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
    for start in starts[1:]:  # a branch begins as the first does
        size = min(len(tokens) - start - 1, lengths[0] + 1)
        tokens[start : start + size] = tokens[:size]
        mask[start] = False
    nothing = np.zeros(len(tokens), dtype=np.float32)
    return TrainSequence(key, tokens, mask, nothing, nothing, np.where(mask, 0, -1).astype(np.int32), starts=starts)


def microbatches() -> dict[str, PackedMicrobatch]:
    branched = [sequence((9, sample), [5, 4, 6, 7, 5, 9], starts=(0, 15)) for sample in range(2)]
    batches = {
        "long": [sequence((0, 0), [20, 120])],
        "shared": [sequence((1, sample), [17, 3 + 11 * sample]) for sample in range(4)],
        "long_and_short": [sequence((2, 0), [3, 90]), *(sequence((3, sample), [1, 1]) for sample in range(5))],
        "branches": [*branched, sequence((8, 0), [4, 6, 3, 2])],
        "two_rows": [sequence((4, 0), [1, 2])],
    }
    found = {}
    for name, sequences in batches.items():
        [found[name]] = collate(sequences, 4096)
    assert len(found["branches"].lengths) > 3, "a branch is a context of its own"
    assert found["shared"].num_tokens < sum(found["shared"].lengths), "a prompt is read once"
    return found | {"empty": empty_microbatch()}


def with_more(microbatch: PackedMicrobatch) -> PackedMicrobatch:
    """Kept sets, and what a teacher of its own executor has said."""
    rng, count = np.random.default_rng(0), microbatch.num_targets
    kept_counts = rng.integers(1, 5, count)
    starts = kept_counts.cumsum() - kept_counts
    kept = rng.integers(0, VOCAB, int(kept_counts.sum()))
    kept[starts] = microbatch.targets
    tokens = np.sort(rng.permuted(np.tile(np.arange(VOCAB), (count, 1)), axis=1)[:, :3], axis=1)
    logprobs = np.log(rng.dirichlet(np.ones(4), count)).astype(np.float32)
    return replace(
        microbatch, kept_tokens=kept, kept_counts=kept_counts, teacher_tokens=tokens, teacher_logprobs=logprobs
    )


def weights_of(count: int) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(count))


def read(model: Transformer, frozen: Transformer) -> list[tuple[np.ndarray, ...]]:
    """Logprobs, entropies and divergences of all microbatches, whose weighed sums go backward.

    Without a teacher; with one of its own executor; with `frozen` as one beside the trainer.
    """
    found = []
    for plain in microbatches().values():
        more, beside = with_more(plain), Teacher(BESIDE, VOCAB, 0.9, frozen.requires_grad_(False))
        for microbatch, teacher in ((plain, None), (more, TEACHER), (plain, beside)):
            states = at_targets(model, microbatch)
            said = () if teacher is None else teacher.said(microbatch, model.reader.targets(microbatch))
            columns = microbatch_logprobs(model, microbatch, temperature=0.9, states=states, teacher=teacher, said=said)
            parts = zip(columns[:3], weights_of(len(columns[0])).unbind(1), strict=False)
            torch.autograd.backward(torch.stack([(one * weight).sum() for one, weight in parts]).sum())
            found.append(tuple(column.detach().numpy().copy() for column in columns))
    return found


# Jobs


def read_together(rank: Rank, config: TransformerConfig, layout: Layout) -> Read:
    division = division_of(rank, layout)
    model = part_of(config, division)
    parameters = ShardedParameters(model, division)
    columns = read(model, part_of(config, division))
    parameters.grad_norm()
    return Read(columns, boxes(model, named_grads(parameters)))


# One rank


def read_alone(config: TransformerConfig) -> tuple[list[tuple[np.ndarray, ...]], dict[str, np.ndarray]]:
    model = whole_model(config)
    flat = FlatParameters(model)
    flat.zero_grad()
    columns = read(model, whole_model(config))
    return columns, {name: tensor.numpy().copy() for name, tensor in whole_tensors(config, flat.grad).items()}
