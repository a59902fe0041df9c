"""What a model computes at the targets of a packed microbatch: the same as of each sequence alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.batching import collate as batching
from slipstream.core.packed import TrainSequence
from slipstream.core.sections import ModelConfig
from slipstream.models.attention import PackedAttention
from slipstream.models.initialise import new_model
from slipstream.models.packed import ROW_MULTIPLE, at_targets
from slipstream.models.transformer import Transformer


def sequence(key: tuple[int, int], prompt: list[int], completion: list[int]) -> TrainSequence:
    tokens = np.array([*prompt, *completion], dtype=np.int32)
    zeros = np.zeros(len(tokens), dtype=np.float32)
    return TrainSequence(key, tokens, np.arange(len(tokens)) >= len(prompt), zeros, zeros, zeros.astype(np.int32))


def alone(model: Transformer, one: TrainSequence) -> Tensor:
    """The states before each of the completion's tokens, read by themselves."""
    tokens = torch.from_numpy(one.tokens[:-1].astype(np.int64))
    states = model(tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)]))
    return states[len(one.prompt) - 1 :]


@pytest.mark.parametrize("num_groups", [1, 9, 32])
def test_filler_rows_change_neither_states_nor_gradients(num_groups: int) -> None:
    rng = np.random.default_rng(num_groups)
    model = new_model(ModelConfig(hidden_size=16, intermediate_size=24, num_layers=2), 19, 0).double()
    sequences = []
    for ordinal in range(num_groups):
        prompt = rng.integers(0, 19, 4).tolist()
        sequences += [
            sequence((ordinal, sample), prompt, [sample, *rng.integers(0, 19, 3).tolist()]) for sample in range(2)
        ]
    (microbatch,) = batching.collate(sequences, 4096)
    assert (microbatch.num_tokens % ROW_MULTIPLE == 0) == (num_groups == 32)
    by_key = {one.key: one for one in sequences}
    weights = torch.from_numpy(rng.normal(size=(microbatch.num_targets, 16)))

    packed = at_targets(model, microbatch)
    single = torch.cat([alone(model, by_key[key]) for key in microbatch.keys])
    torch.testing.assert_close(packed, single, rtol=1e-10, atol=1e-12)

    parameters = list(model.parameters())
    ours = torch.autograd.grad((packed * weights).sum(), parameters, allow_unused=True)
    theirs = torch.autograd.grad((single * weights).sum(), parameters, allow_unused=True)
    for gradient, expected in zip(ours, theirs, strict=True):
        if expected is not None:
            torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-11)
