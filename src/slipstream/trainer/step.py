"""One training step: minibatches x epochs optimizer updates, each accumulated over packed microbatches."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.algorithms.logprobs import token_logprobs_and_entropy
from slipstream.algorithms.losses import Loss, LossInputs, loss_named
from slipstream.algorithms.reduce import (
    Metrics,
    masked_max,
    masked_mean,
    merge_metrics,
    metric_values,
    sum_over_units,
)
from slipstream.core.config import RunConfig
from slipstream.core.errors import NonFiniteError
from slipstream.core.packed import Batching, PackedMicrobatch
from slipstream.core.staleness import staleness_in_updates
from slipstream.core.types import Group
from slipstream.models.attention import PackedAttention
from slipstream.models.transformer import Transformer
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.policy import prepare_batch

# Logits held at once, in elements (256 MiB of float32); larger heads run in chunks that are recomputed backward.
MAX_LOGITS = 1 << 26


def microbatch_logprobs(
    model: Transformer, microbatch: PackedMicrobatch, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Policy logprobs of the microbatch's targets and the entropies they were drawn with, float32 [M] each.

    A prompt shared by several completions is read once; logits are computed only where a target is predicted.
    """
    device = next(model.parameters()).device
    hidden = model(
        torch.from_numpy(microbatch.tokens).to(device),
        torch.from_numpy(microbatch.positions).to(device),
        PackedAttention(microbatch.lengths, torch.from_numpy(microbatch.rows)),
    )
    # A shared prompt's last row predicts several targets. The gradient of `hidden[index]` adds them up by atomic
    # additions, in any order, as soon as there are two threads; that of an embedding has one fixed order.
    predicting = F.embedding(torch.from_numpy(microbatch.target_index).to(device), hidden)
    targets = torch.from_numpy(microbatch.targets).to(device)

    def head(rows: Tensor, chunk_targets: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs_and_entropy(model.logits(rows), chunk_targets, temperature)

    rows_at_once = max(1, MAX_LOGITS // model.config.vocab_size)
    if len(targets) <= rows_at_once:
        return head(predicting, targets)
    chunks = [
        checkpoint(head, rows, chunk_targets, use_reentrant=False)
        for rows, chunk_targets in zip(
            torch.split(predicting, rows_at_once), torch.split(targets, rows_at_once), strict=True
        )
    ]
    return torch.cat([chunk[0] for chunk in chunks]), torch.cat([chunk[1] for chunk in chunks])


def train_on_batch(
    model: Transformer,
    optimizer: FlatAdamW,
    groups: Sequence[Group],
    *,
    config: RunConfig,
    step: int,
    batching: Batching,
) -> dict[str, float]:
    """Train step `step` on `groups`: the policy goes from version `step` to `step + 1`. Returns its metrics.

    Advantages once per batch; then `epochs` passes over `minibatches` updates. The first update measures how far the
    policy is from the behaviour policy before any weight of this step changed (`logprob_diff_max/lag_<n>`: completions
    sampled wholly under the version n steps back; rounding only at lag 0).
    `tokens_read` counts the rows of all microbatches, a prompt once per microbatch; `tokens_trained` the targets.
    Raises StalenessError when a token breaks the bound, and NonFiniteError before an update with a loss or gradient
    that is not finite.
    """
    started_s = time.perf_counter()
    loss = loss_named(config.loss.name, config.loss.params)
    batch = prepare_batch(groups, config=config.loss, step=step, max_staleness=config.max_staleness)
    minibatches = [
        batching.collate(batch.of(part), config.trainer.microbatch_tokens)
        for part in batching.split_minibatches(groups, config.trainer.minibatches)
    ]
    parts: Metrics = {}
    losses: list[float] = []
    grad_norms: list[float] = []
    staleness_updates_max = 0
    for update in range(config.updates_per_step):
        microbatches = minibatches[update % len(minibatches)]
        if not microbatches:  # every completion of this minibatch is masked
            continue
        loss_value, update_parts = _accumulate(
            model, optimizer, microbatches, loss=loss, config=config, measured_step=None if losses else step
        )
        lr = optimizer.lr
        grad_norms.append(optimizer.step())
        losses.append(loss_value)
        parts = merge_metrics(parts, update_parts) if parts else update_parts
        staleness = np.concatenate([step - microbatch.versions for microbatch in microbatches])
        distance = staleness_in_updates(staleness, updates_per_step=config.updates_per_step, update_in_step=update)
        staleness_updates_max = max(staleness_updates_max, int(distance.max()))
    everything = [microbatch for microbatches in minibatches for microbatch in microbatches]
    return {
        **batch.metrics,
        **metric_values(parts),
        "loss": float(np.mean(losses)) if losses else 0.0,
        "grad_norm": float(np.mean(grad_norms)) if grad_norms else 0.0,
        "lr": lr if losses else optimizer.lr,
        "num_updates": float(len(losses)),
        "staleness_updates_max": float(staleness_updates_max),
        "tokens_trained": float(sum(microbatch.num_targets for microbatch in everything)),
        "tokens_read": float(sum(microbatch.num_tokens for microbatch in everything)),
        "num_microbatches": float(len(everything)),
        "padding_frac": batching.padding_frac(everything),
        "padded_layout_frac": batching.padded_layout_frac(everything),
        "train_s": time.perf_counter() - started_s,
    }


def _accumulate(
    model: Transformer,
    optimizer: FlatAdamW,
    microbatches: Sequence[PackedMicrobatch],
    *,
    loss: Loss,
    config: RunConfig,
    measured_step: int | None,
) -> tuple[float, Metrics]:
    """Gradient of one update in `optimizer.grad`, its loss, and its metrics as parts."""
    num_tokens = sum(microbatch.num_targets for microbatch in microbatches)
    num_sequences = sum(len(microbatch.keys) for microbatch in microbatches)
    optimizer.zero_grad()
    total = 0.0
    parts: Metrics = {}
    for microbatch in microbatches:
        logprobs, entropies = microbatch_logprobs(model, microbatch, temperature=config.generator.temperature)
        inputs = _loss_inputs(
            microbatch, logprobs, num_units={"token": num_tokens, "sequence": num_sequences}[loss.unit]
        )
        microbatch_loss, microbatch_parts = loss(inputs)
        if config.loss.entropy_coef:
            bonus = sum_over_units(entropies, inputs.mask, num_units=num_tokens)
            microbatch_loss = microbatch_loss - config.loss.entropy_coef * bonus
        torch.autograd.backward(microbatch_loss)
        total += float(microbatch_loss.detach())
        microbatch_parts["entropy"] = masked_mean(entropies.detach(), inputs.mask)
        if measured_step is not None:
            microbatch_parts |= _difference_per_lag(microbatch, inputs, step=measured_step)
        parts = merge_metrics(parts, microbatch_parts)
    if not math.isfinite(total):
        raise NonFiniteError(
            "the loss is not finite; weights were not changed",
            got=f"loss {total} at update {optimizer.num_updates}",
            hint="lower trainer.optimizer.lr, or look at this batch's rewards and logprobs",
        )
    return total, parts


def _loss_inputs(microbatch: PackedMicrobatch, logprobs: Tensor, *, num_units: int) -> LossInputs:
    device = logprobs.device
    return LossInputs(
        policy_logprobs=logprobs,
        behaviour_logprobs=torch.from_numpy(microbatch.behaviour_logprobs).to(device),
        advantages=torch.from_numpy(microbatch.advantages).to(device),
        mask=torch.ones(len(logprobs), dtype=torch.bool, device=device),
        segment_ids=torch.from_numpy(microbatch.segment_ids).to(device),
        num_units=num_units,
    )


def _difference_per_lag(microbatch: PackedMicrobatch, inputs: LossInputs, *, step: int) -> Metrics:
    """|policy - behaviour| of completions sampled wholly under one version, by that version's lag in steps."""
    starts = np.flatnonzero(np.diff(microbatch.segment_ids, prepend=-1))
    oldest = np.minimum.reduceat(microbatch.versions, starts)[microbatch.segment_ids]
    newest = np.maximum.reduceat(microbatch.versions, starts)[microbatch.segment_ids]
    difference = (inputs.need("policy_logprobs").detach() - inputs.need("behaviour_logprobs")).abs()
    parts: Metrics = {}
    for version in np.unique(oldest[oldest == newest]):
        chosen = torch.from_numpy((oldest == version) & (newest == version)).to(difference.device)
        parts[f"logprob_diff_mean/lag_{step - version}"] = masked_mean(difference, chosen)
        parts[f"logprob_diff_max/lag_{step - version}"] = masked_max(difference, chosen)
    return parts
