"""Seconds of one update's forward and backward passes, by layout: a model of ours over microbatches as they lie."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from experiments.collation.packing import LONGEST, Collation, draw, first_come, greedy, no_packing
from slipstream.algorithms.losses import LossInputs, loss_named
from slipstream.batching.collate import collate
from slipstream.core.packed import PackedMicrobatch, TrainSequence
from slipstream.core.sections import ModelConfig
from slipstream.core.training_sections import OptimizerConfig
from slipstream.models.flat import FlatParameters
from slipstream.models.initialise import new_model
from slipstream.models.transformer import Transformer
from slipstream.trainer.measure import microbatch_logprobs
from slipstream.trainer.optim import AdamW

VOCAB_SIZE = 64
PROMPT_TOKENS = 8


def sequence(index: int, num_rows: int, rng: np.random.Generator) -> TrainSequence:
    """A sequence of which the model reads `num_rows` tokens, all but a short prompt trained on."""
    num_tokens = num_rows + 1  # the last one is predicted and never read
    mask = np.arange(num_tokens) >= PROMPT_TOKENS
    return TrainSequence(
        key=(index, 0),
        tokens=rng.integers(2, VOCAB_SIZE, num_tokens).astype(np.int32),
        mask=mask,
        behaviour_logprobs=np.where(mask, -math.log(VOCAB_SIZE), 0.0).astype(np.float32),
        advantages=np.where(mask, rng.normal(size=num_tokens), 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )


def packed(sequences: Sequence[TrainSequence]) -> PackedMicrobatch:
    """All of them in one microbatch."""
    (microbatch,) = collate(sequences, sum(one.num_inputs for one in sequences))
    return microbatch


def as_rectangle(microbatch: PackedMicrobatch) -> PackedMicrobatch:
    """The same targets, each sequence followed by padding up to the longest: what a model without packing reads.

    Identity: targets and their logprobs are those of `microbatch`; padding lies behind all that is predicted.
    """
    count, longest = len(microbatch.lengths), max(microbatch.lengths)
    lengths = np.array(microbatch.lengths)
    shift = np.arange(count) * longest - (np.cumsum(lengths) - lengths)
    moved = np.arange(microbatch.num_tokens) + np.repeat(shift, lengths)
    tokens = np.zeros(count * longest, dtype=np.int64)
    tokens[moved] = microbatch.tokens
    return replace(
        microbatch,
        tokens=tokens,
        positions=np.tile(np.arange(longest, dtype=np.int64), count),
        lengths=(longest,) * count,
        rows=np.arange(count * longest, dtype=np.int64),
        target_index=moved[microbatch.target_index],
    )


def filled_to(microbatch: PackedMicrobatch, capacity: int) -> PackedMicrobatch:
    """The same, with padding behind it up to `capacity` rows, as microbatches of a fixed size have it.

    The padding counts as sequences of at most LONGEST tokens of its own. Identity: as of `as_rectangle`.
    """
    num_rows, missing = microbatch.num_tokens, capacity - microbatch.num_tokens
    pieces = [min(LONGEST, missing - start) for start in range(0, missing, LONGEST)]
    padding = np.zeros(missing, dtype=np.int64)
    positions = [np.arange(piece, dtype=np.int64) for piece in pieces]
    return replace(
        microbatch,
        tokens=np.concatenate([microbatch.tokens, padding]),
        positions=np.concatenate([microbatch.positions, *positions]),
        lengths=(*microbatch.lengths, *pieces),
        rows=np.concatenate([microbatch.rows, np.arange(num_rows, capacity, dtype=np.int64)]),
    )


Lay = Callable[[Sequence[TrainSequence], Sequence[int], int], list[PackedMicrobatch]]
"""Sequences, their lengths and the capacity -> microbatches."""


def _laid(collation: Collation, shape: Callable[[PackedMicrobatch, int], PackedMicrobatch]) -> Lay:
    def lay(sequences: Sequence[TrainSequence], lengths: Sequence[int], capacity: int) -> list[PackedMicrobatch]:
        chosen = [[sequences[index] for index in one.members] for one in collation(lengths, capacity)]
        return [shape(packed(members), capacity) for members in chosen]

    return lay


LAYOUTS: Mapping[str, Lay] = {
    "no packing": _laid(no_packing, lambda microbatch, _: as_rectangle(microbatch)),
    "first-come, filled": _laid(first_come, filled_to),
    "greedy, filled": _laid(greedy, filled_to),
    "first-come": _laid(first_come, lambda microbatch, _: microbatch),
    "greedy": lambda sequences, _, capacity: collate(sequences, capacity),
}
"""`filled`: microbatches of a fixed size, padding computed; without: as Slipstream has them, nothing padded."""


class Step:
    """Forward and backward of one update over packed microbatches, and the optimizer's update."""

    def __init__(self, *, hidden_size: int, num_layers: int, capacity: int) -> None:
        config = ModelConfig(
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_layers=num_layers,
            num_heads=4,
            num_kv_heads=4,
            max_positions=capacity,
        )
        self.model: Transformer = new_model(config, VOCAB_SIZE, 0)
        self.flat = FlatParameters(self.model)
        self.optimizer = AdamW(self.flat, OptimizerConfig(lr=1e-6), total_updates=1)
        self.loss = loss_named("grpo", {"eps_low": 0.2, "eps_high": 0.28})

    def run(self, microbatches: Sequence[PackedMicrobatch]) -> float:
        """Seconds; the gradient of all microbatches is left in `flat`."""
        started_s = time.perf_counter()
        num_targets = sum(microbatch.num_targets for microbatch in microbatches)
        self.optimizer.zero_grad()
        for microbatch in microbatches:
            logprobs, _ = microbatch_logprobs(self.model, microbatch, temperature=1.0)
            loss, _ = self.loss(
                LossInputs(
                    policy_logprobs=logprobs,
                    behaviour_logprobs=torch.from_numpy(microbatch.behaviour_logprobs),
                    advantages=torch.from_numpy(microbatch.advantages),
                    mask=torch.ones(len(logprobs), dtype=torch.bool),
                    segment_ids=torch.from_numpy(microbatch.segment_ids),
                    num_units=num_targets,
                )
            )
            torch.autograd.backward(loss)
        self.optimizer.step()
        return time.perf_counter() - started_s


def step_seconds(
    *,
    distributions: Sequence[str],
    capacity: int,
    completions: int,
    hidden_size: int,
    num_layers: int,
    repeats: int,
    seed: int,
) -> dict[str, dict[str, list[float]]]:
    """Distribution -> layout -> seconds of each repeat, a minibatch of its own, the same for all layouts.

    The layouts take turns in each repeat, so that a machine that slows down does so to all; each is run once before,
    as kernels for new numbers of rows are compiled then.
    """
    step = Step(hidden_size=hidden_size, num_layers=num_layers, capacity=capacity)
    found: dict[str, dict[str, list[float]]] = {}
    for distribution in distributions:
        rng = np.random.default_rng(seed)
        found[distribution] = {layout: [] for layout in LAYOUTS}
        for _ in range(repeats):
            lengths = draw(distribution, completions, rng)
            sequences = [sequence(index, length, rng) for index, length in enumerate(lengths)]
            laid_out = {name: layout(sequences, lengths, capacity) for name, layout in LAYOUTS.items()}
            for microbatches in laid_out.values():
                step.run(microbatches)
            for name, microbatches in laid_out.items():
                found[distribution][name].append(step.run(microbatches))
    return found
