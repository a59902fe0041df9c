"""One training step: prepare the batch, make minibatches x epochs updates, summarise them as metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from slipstream.core.config import RunConfig
from slipstream.core.packed import Batching, PackedMicrobatch
from slipstream.core.rank_group import RankGroup
from slipstream.core.spans import NoSpans, Spans
from slipstream.core.types import Group, RolloutHead
from slipstream.models.transformer import Transformer
from slipstream.trainer.batch import PreparedBatch, prepare_batch, select_batch
from slipstream.trainer.dealing import order_of_groups
from slipstream.trainer.measure import Auxiliary, StepContext, measured_columns
from slipstream.trainer.optim import AdamW
from slipstream.trainer.records import TokenSample
from slipstream.trainer.scores import ScoredGroup
from slipstream.trainer.step_metrics import episode_metrics, published_metrics, training_metrics
from slipstream.trainer.update import PlannedUpdate, Totals, Updater


def train_on_batch(
    model: Transformer,
    optimizer: AdamW,
    groups: Sequence[Group],
    *,
    config: RunConfig,
    step: int,
    batching: Batching,
    auxiliary: Auxiliary = Auxiliary(),
    heads: Sequence[RolloutHead] | None = None,
    ranks: RankGroup = RankGroup.alone(),
    tokens: TokenSample | None = None,
    spans: Spans | None = None,
) -> dict[str, float]:
    """Train step `step` on `groups`: the policy goes from version `step` to `step + 1`. Return its metrics.

    Reference and proximal logprobs, values and advantages are measured once per batch, at consumption: stale
    completions are judged by the policy and critic that train on them. The first update measures how far the policy is
    from the behaviour policy before any weight changed (`logprob_diff_max/lag_<n>`: completions sampled wholly under
    the version n steps back; rounding only at lag 0). `tokens_read` counts the rows of all microbatches of the first
    pass, shared ones once each; `tokens_trained` its targets. `tokens` collects logprobs and advantages of the
    groups it samples; `spans` gets the time by state (on CUDA as this thread sees it, which waits for the device behind
    an update's last microbatch and for its gradient norm). Raises StalenessError when a token breaks the bound, and
    NonFiniteError before an update with a loss or gradient that is not finite.

    With several data-parallel `ranks`, all call it: each with its own rollouts in `groups`, and the `heads` of all
    rollouts in canonical order (None: `groups` are all there are). `optimizer` then adds up gradients over ranks; every
    loss is divided by a count over all of them. Metrics are those of all ranks, `train_s` this one's; the paddings are
    means over ranks, by their microbatches. Errors are raised on every rank or on none.
    Identity: the updates are those of one rank with all rollouts, up to rounding.
    """
    started_s = time.perf_counter()
    at = StepContext(config, step, batching, ranks, NoSpans() if spans is None else spans)
    selection = select_batch(groups, config=config, step=step, heads=heads, ranks=ranks)
    columns = measured_columns(model, auxiliary, groups, selection.to_measure, at)
    batch = prepare_batch(selection, columns, config=config, kl_coef=auxiliary.kl_coef, ranks=ranks)
    updater = Updater(model, optimizer, auxiliary, at, tokens=tokens)
    updates = _updates(selection.groups, batch, updater.atom_size, at)
    made = updater.make_all(updates)
    metrics = batch.metrics | episode_metrics(selection.trainable) | training_metrics(made, optimizer, at)
    metrics["train_s"] = time.perf_counter() - started_s
    if config.has_critic:
        metrics |= published_metrics(metrics, groups, model.config.eos_token_ids, at)
    return metrics


def _updates(
    groups: Sequence[ScoredGroup], batch: PreparedBatch, atom_size: int, step: StepContext
) -> Iterator[PlannedUpdate]:
    """Yield `epochs` passes over `minibatches`, dealt anew in each if that is asked for. All ranks iterate together."""
    trainer = step.config.trainer
    minibatches, totals = list[list[PackedMicrobatch]](), list[Totals]()
    for epoch in range(trainer.epochs):
        if epoch == 0 or trainer.shuffle:
            order = order_of_groups(step.config, step.number, epoch, len(groups))
            minibatches = [
                step.batching.collate(batch.of(part), step.config.capacity_tokens, atom_size=atom_size)
                for part in step.batching.split_minibatches(groups, trainer.minibatches, order=order)
            ]
            totals = _totals(minibatches, step.ranks)
        for index, microbatches in enumerate(minibatches):
            yield PlannedUpdate(epoch * trainer.minibatches + index, microbatches, totals[index])


def _totals(minibatches: Sequence[Sequence[PackedMicrobatch]], ranks: RankGroup) -> list[Totals]:
    """Count each minibatch over all ranks."""
    counts = [[sum(one.num_targets for one in part), sum(len(one.keys) for one in part)] for part in minibatches]
    sums = ranks.sum(torch.tensor(counts, dtype=torch.int64)).tolist()
    most = ranks.max(torch.tensor([len(part) for part in minibatches])).tolist()
    return [Totals(tokens, sequences, count) for (tokens, sequences), count in zip(sums, most, strict=True)]
