"""What a model computes at the targets of a packed microbatch: the same as of each sequence alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from drawn import drawn
from hypothesis import strategies as st
from test_varlen import one_by_one
from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs
from slipstream.algorithms.losses.table import loss_named
from slipstream.batching import collate as batching
from slipstream.core.packed import TrainSequence
from slipstream.core.sections import ModelConfig
from slipstream.models import attention
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


@st.composite
def trees(draw: st.DrawFn) -> list[TrainSequence]:
    """Two groups of sequences that go on from a beginning of an earlier one, some with a second context."""
    sequences = []
    for ordinal in range(2):
        read: list[list[int]] = []
        for sample in range(draw(st.integers(1, 4))):
            tokens: list[int] = []
            mask: list[bool] = []
            starts = []
            for _ in range(draw(st.sampled_from([1, 1, 2]))):
                earlier = draw(st.sampled_from(read)) if read else [1, 2]
                more = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
                context = [*earlier[: draw(st.integers(0, len(earlier)))], *more, draw(st.integers(0, 2))]
                trained = draw(st.lists(st.booleans(), min_size=len(context) - 1, max_size=len(context) - 1))
                starts.append(len(tokens))
                tokens, mask = (
                    [*tokens, *context],
                    [*mask, False, *(trained if any(trained) else trained[:-1] + [True])],
                )
                read.append(context)
            one = TrainSequence.read_only((ordinal, sample), np.array(tokens), np.array(mask), starts=tuple(starts))
            rng = np.random.default_rng(len(sequences))
            behaviour, advantages = (
                np.where(mask, column, 0).astype(np.float32)
                for column in (rng.uniform(-4, -2, len(mask)), rng.normal(size=len(mask)))
            )
            sequences.append(replace(one, behaviour_logprobs=behaviour, advantages=advantages))
    return sequences


def logprobs_of(model: Transformer, states: Tensor, targets: Tensor) -> Tensor:
    """In float64, as the model's own logits are not."""
    return torch.log_softmax(states @ model.embedding.weight.T, -1).gather(1, targets[:, None]).squeeze(1)


def logprobs_alone(model: Transformer, one: TrainSequence) -> Tensor:
    """The logprobs of a sequence's targets, each of its contexts read by itself."""
    found = []
    for start, end in zip(one.starts, [*one.starts[1:], len(one.tokens)], strict=True):
        tokens = torch.from_numpy(one.tokens[start:end].astype(np.int64))
        states = model(tokens[:-1], torch.arange(len(tokens) - 1), PackedAttention([len(tokens) - 1]))
        of_next = logprobs_of(model, states, tokens[1:])
        found.append(of_next[torch.from_numpy(one.mask[start + 1 : end])])
    return torch.cat(found)


def loss_of(name: str, logprobs: Tensor, behaviour: np.ndarray, advantages: np.ndarray, segments: np.ndarray) -> Tensor:
    if name == "plain":  # in float64, as losses are not
        return -(logprobs * torch.from_numpy(advantages).double()).sum()
    inputs = LossInputs(
        policy_logprobs=logprobs,
        behaviour_logprobs=torch.from_numpy(behaviour).double(),
        advantages=torch.from_numpy(advantages).double(),
        mask=torch.ones(len(logprobs), dtype=torch.bool),
        segment_ids=torch.from_numpy(segments),
        num_units=10,
    )
    loss, _ = loss_named(name, {"eps_low": 0.9, "eps_high": 9.0})(inputs)
    return loss


@drawn(
    6,
    300,
    sequences=trees(),
    capacity=st.sampled_from([1000, 12]),
    name=st.sampled_from(["plain", "grpo", "gspo"]),
    is_flash=st.booleans(),
)
def test_a_tree_of_rows_trains_as_every_context_alone(
    sequences: list[TrainSequence], capacity: int, name: str, is_flash: bool
) -> None:
    """Logprobs, losses and gradients in float64; also through one call, for which rows must lie as `_Ends` says."""
    model = new_model(ModelConfig(hidden_size=16, intermediate_size=24, num_layers=2), 19, 0).double()
    by_key = {one.key: one for one in sequences}
    parameters = list(model.parameters())
    with pytest.MonkeyPatch.context() as patched:
        if is_flash:
            patched.setattr(attention, "takes_flash", lambda q, k: True)
            patched.setattr(attention, "flash", lambda *args: one_by_one(*args).to(args[0].dtype))
            patched.setattr(PackedAttention, "padded", None)
        total = torch.zeros((), dtype=torch.float64)
        ours: dict[tuple[int, int], Tensor] = {}
        for one in batching.collate(sequences, capacity):
            logprobs = logprobs_of(model, at_targets(model, one), torch.from_numpy(one.targets))
            total = total + loss_of(name, logprobs, one.behaviour_logprobs, one.advantages, one.segment_ids)
            counts = np.bincount(one.segment_ids).tolist()
            ours |= dict(zip(one.keys, torch.split(logprobs.detach(), counts), strict=True))
        grads = torch.autograd.grad(total, parameters, allow_unused=True)
    expected = torch.zeros((), dtype=torch.float64)
    for key, one in by_key.items():
        alone = logprobs_alone(model, one)
        torch.testing.assert_close(ours[key], alone.detach(), rtol=1e-9, atol=1e-11)
        columns = one.behaviour_logprobs[one.mask], one.advantages[one.mask], np.zeros(len(alone), dtype=np.int64)
        expected = expected + loss_of(name, alone, *columns)
    near = {"rtol": 1e-9, "atol": 1e-11} if name == "plain" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(total, expected, **near)
    for found, gradient in zip(grads, torch.autograd.grad(expected, parameters, allow_unused=True), strict=True):
        if gradient is not None:
            torch.testing.assert_close(found, gradient, **near)
