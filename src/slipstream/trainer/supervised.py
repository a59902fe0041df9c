"""Supervised fine-tuning over the same packed path: the warm start before RL, and the stage `sft`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import msgspec
import numpy as np
import torch
from torch import Tensor

from slipstream.algorithms.logprobs import token_logprobs_and_entropy
from slipstream.core.errors import ConfigError, ShapeError
from slipstream.core.packed import Batching, PackedMicrobatch, TrainSequence
from slipstream.core.rank_group import RankGroup
from slipstream.core.stage_sections import WarmStartConfig
from slipstream.models.packed import at_targets
from slipstream.models.transformer import Transformer
from slipstream.trainer.measure import in_step, microbatch_logprobs, rows_at_once
from slipstream.trainer.optim import AdamW, require_finite_loss

Demonstration = tuple[np.ndarray, np.ndarray]  # prompt tokens, completion tokens with EOS; int32


@dataclass(frozen=True)
class SupervisedUpdate:
    """An update that was made, `index` counted from 0. `loss` is nats per completion token, before the update."""

    index: int
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int


def supervised_updates(
    model: Transformer,
    optimizer: AdamW,
    demonstrations: Sequence[Demonstration],
    *,
    config: WarmStartConfig,
    microbatch_tokens: int,
    seed: int,
    batching: Batching,
    ranks: RankGroup = RankGroup.alone(),
    batches: Iterator[Sequence[int]] | None = None,
) -> Iterator[SupervisedUpdate]:
    """Maximise the likelihood of completions given prompts; yields after each of `config.steps` updates.

        L = -(1/num_tokens) * sum over completion tokens of log policy(y_t | x, y_<t)

    `batches` are endless, of indices of demonstrations; None: of `config.batch_size`, from seeded shuffles of all, one
    behind the other. Temperature is 1. Of `config`'s optimizer, `optimizer` is one over all its steps. With several
    data-parallel `ranks` all come with the same demonstrations and `optimizer` adds up their gradients; each reads its
    share of every batch.
    ConfigError without demonstrations; NonFiniteError, on every rank, before an update that is not finite.
    Identity: the updates are those of one rank, up to rounding.
    """
    if config.steps and not demonstrations:
        raise ConfigError("a warm start needs demonstrations", got="none", allowed="at least one")
    sequences = [_sequence(index, *demonstration) for index, demonstration in enumerate(demonstrations)]
    order = _shuffled(len(sequences), seed)
    for update in range(config.steps):
        chosen = next(batches) if batches is not None else [next(order) for _ in range(config.batch_size)]
        batch = [sequences[index] for index in chosen]
        num_tokens = sum(sequence.num_targets for sequence in batch)
        optimizer.zero_grad()
        microbatches = in_step(batching.collate(batch[ranks.rank :: ranks.world], microbatch_tokens), ranks)
        own = _forward_backward(model, optimizer, microbatches, num_tokens)
        total = float(ranks.sum(torch.tensor(own, dtype=torch.float64)))
        require_finite_loss(total, update=update, kind="demonstrations", chosen=chosen)
        lr = optimizer.lr
        grad_norm = optimizer.step()
        yield SupervisedUpdate(update, total, grad_norm, lr, num_tokens)


def _forward_backward(
    model: Transformer, optimizer: AdamW, microbatches: Sequence[PackedMicrobatch], num_tokens: int
) -> float:
    """Add the gradients of all microbatches; return this rank's part of the loss, the same on all pipeline stages."""
    losses: list[Tensor] = []

    def loss_of(index: int, states: Tensor) -> Tensor:
        logprobs, _ = microbatch_logprobs(model, microbatches[index], temperature=1.0, states=states)
        loss = -logprobs.sum() / num_tokens
        losses.append(loss.detach().double())
        return loss

    if model.passes is not None:
        model.passes.train(microbatches, loss_of, before_backward=optimizer.before_backward)
    else:
        for index, microbatch in enumerate(microbatches):
            optimizer.before_backward(is_last=index == len(microbatches) - 1)
            torch.autograd.backward(loss_of(index, at_targets(model, microbatch)))
    total: float = reduce(add, torch.stack(losses).tolist()) if losses else 0.0
    if model.passes is not None:
        total = msgspec.msgpack.decode(model.passes.from_last(msgspec.msgpack.encode(total)), type=float)
    return total


@dataclass(frozen=True)
class Prediction:
    """Predictions of demonstrations by a model: means over the `num_tokens` tokens of all completions.

    `loss` is in nats per token, `accuracy` the share of tokens that the model finds likeliest.
    """

    loss: float
    accuracy: float
    num_tokens: int


@torch.no_grad()
def measure_prediction(
    model: Transformer, demonstrations: Sequence[Demonstration], *, microbatch_tokens: int, batching: Batching
) -> Prediction:
    """Measure the loss of `supervised_updates` on demonstrations that it may not have seen, at temperature 1.

    ConfigError without demonstrations. Identity: `loss` is that of an update whose batch is all of them.
    """
    if not demonstrations:
        raise ConfigError("measuring a model's predictions takes demonstrations", got="none", allowed="at least one")
    sequences = [_sequence(index, *demonstration) for index, demonstration in enumerate(demonstrations)]
    total, num_found, num_tokens = 0.0, 0, 0
    for microbatch in batching.collate(sequences, microbatch_tokens):
        states = at_targets(model, microbatch)
        targets = torch.from_numpy(microbatch.targets).to(states.device)
        at_once = rows_at_once(model, device=states.device.type)
        chunks = zip(torch.split(states, at_once), torch.split(targets, at_once), strict=True)
        for rows, expected in chunks:
            logits = model.logits(rows)
            logprobs, _ = token_logprobs_and_entropy(logits, expected, 1.0)
            total -= float(logprobs.double().sum())
            num_found += int((logits.argmax(dim=-1) == expected).sum())
        num_tokens += microbatch.num_targets
    return Prediction(total / num_tokens, num_found / num_tokens, num_tokens)


def _shuffled(count: int, seed: int) -> Iterator[int]:
    """Endless: passes over 0..count-1, each in an order of its own."""
    generator = np.random.default_rng(seed)
    while True:
        yield from generator.permutation(count).tolist()


def _sequence(index: int, prompt: np.ndarray, completion: np.ndarray) -> TrainSequence:
    if not len(prompt) or not len(completion):
        raise ShapeError(
            f"demonstration {index} is empty", got=f"{len(prompt)} prompt and {len(completion)} completion tokens"
        )
    tokens = np.concatenate([prompt, completion])
    return TrainSequence.read_only((index, 0), tokens, np.arange(len(tokens)) >= len(prompt))
