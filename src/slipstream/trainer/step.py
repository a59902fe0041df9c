"""One training step: minibatches x epochs optimizer updates, each accumulated over packed microbatches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, reduce

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.algorithms.kl import KL_ESTIMATORS
from slipstream.algorithms.logprobs import kept_token_logprobs, token_logprobs_and_entropy
from slipstream.algorithms.losses import Loss, LossInputs, loss_named
from slipstream.algorithms.reduce import (
    Mean,
    Metrics,
    decode_metrics,
    encode_metrics,
    masked_max,
    masked_mean,
    merge_metrics,
    metric_values,
    sum_over_units,
)
from slipstream.core.config import RunConfig
from slipstream.core.errors import NonFiniteError
from slipstream.core.executor import NoSpans, Spans
from slipstream.core.packed import Batching, PackedMicrobatch, TrainSequence
from slipstream.core.rank_group import RankGroup
from slipstream.core.staleness import staleness_in_updates
from slipstream.core.types import Group, RolloutHead
from slipstream.models.packed import at_targets
from slipstream.models.transformer import Transformer
from slipstream.trainer.batch import prepare_batch
from slipstream.trainer.critic import ValueFunction
from slipstream.trainer.measure import Columns, brought, filled, measure
from slipstream.trainer.metric_names import count_tokens, published_names
from slipstream.trainer.optim import Optimizer
from slipstream.trainer.refused import Finding, findings, located
from slipstream.trainer.scores import head_of, scored_groups
from slipstream.trainer.token_sample import TokenSample

# Logits held at once, in elements (256 MiB of float32); larger heads run in chunks that are recomputed backward.
MAX_LOGITS = 1 << 26


def microbatch_logprobs(
    model: Transformer, microbatch: PackedMicrobatch, *, temperature: float, states: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Policy logprobs of the microbatch's targets and the entropies they were drawn with, float32 [M] each.

    `states` are the final ones at those targets, for a caller who has them. Logits are computed only where a target
    is predicted. Where the microbatch has kept sets, logprobs are those over the sets; entropies never are.
    """
    predicting = at_targets(model, microbatch) if states is None else states
    columns = [predicting, torch.from_numpy(microbatch.targets).to(predicting.device)]
    if (kept_sets := microbatch.kept_sets) is not None:
        columns.append(torch.from_numpy(kept_sets).to(predicting.device))

    def head(rows: Tensor, targets: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits = model.logits(rows)
        logprobs, entropies = token_logprobs_and_entropy(logits, targets, temperature)
        return logprobs if kept is None else kept_token_logprobs(logits, targets, kept, temperature), entropies

    rows_at_once = max(1, MAX_LOGITS // model.config.vocab_size)
    if microbatch.num_targets <= rows_at_once:
        return head(*columns)
    chunks = [
        checkpoint(head, *chunk, use_reentrant=False)
        for chunk in zip(*(torch.split(column, rows_at_once) for column in columns), strict=True)
    ]
    return torch.cat([chunk[0] for chunk in chunks]), torch.cat([chunk[1] for chunk in chunks])


@dataclass(frozen=True)
class Auxiliary:
    """The trainer's models besides the policy: the frozen `reference` and the `critic`, where the config has them.

    `kl_coef` is the present coefficient of an adaptive KL penalty; None takes `kl.coef`.
    """

    reference: Transformer | None = None
    critic: ValueFunction | None = None
    kl_coef: float | None = None


@dataclass(frozen=True)
class Totals:
    """What all ranks know of one update: tokens and sequences it trains on, and the most microbatches a rank has."""

    num_tokens: int
    num_sequences: int
    num_microbatches: int


def train_on_batch(
    model: Transformer,
    optimizer: Optimizer,
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
    """Train step `step` on `groups`: the policy goes from version `step` to `step + 1`. Returns its metrics.

    Reference and proximal logprobs, values and advantages once per batch, at consumption: stale completions are judged
    by the policy and critic that train on them. Then `epochs` passes over `minibatches` updates. The first update
    measures how far the policy is from the behaviour policy before any weight of this step changed
    (`logprob_diff_max/lag_<n>`: completions sampled wholly under the version n steps back; rounding only at lag 0).
    `tokens_read` counts the rows of all microbatches of the first pass, a prompt once per microbatch; `tokens_trained`
    its targets. `tokens` takes what it wants of each microbatch; `spans` hears what the time goes to (on CUDA as this
    thread sees it: it waits for the device with each loss and gradient norm, and nowhere else for the spans' sake).
    Raises StalenessError when a token breaks the bound, and NonFiniteError before an update with a loss or gradient
    that is not finite.

    With several data-parallel `ranks`, all of them call it: each with its own rollouts in `groups`, and with the
    `heads` of all rollouts in canonical order (None: `groups` are all there are). `optimizer` then adds up gradients
    over ranks; every loss is divided by a count over all of them. Metrics are those of all ranks, `train_s` this one's;
    the paddings are means over ranks, by their microbatches. Errors are raised on every rank or on none.
    Identity: the updates are those of one rank with all rollouts, up to rounding.
    """
    started_s = time.perf_counter()
    if heads is None:
        heads = [head_of(rollout, config) for group in groups for rollout in group.rollouts]
    scored = scored_groups(heads)
    loss = loss_named(config.loss.name, config.loss.params)
    labels = _Labels(NoSpans() if spans is None else spans, step)
    update_of = _Update(
        model, optimizer, config=config, loss=loss, auxiliary=auxiliary, ranks=ranks, tokens=tokens, labels=labels
    )
    batch = prepare_batch(
        groups,
        config=config,
        step=step,
        measure=partial(update_of.measure, groups, batching=batching) if update_of.columns else None,
        kl_coef=auxiliary.kl_coef,
        heads=heads,
        ranks=ranks,
    )
    optimizers = [optimizer] if auxiliary.critic is None else [optimizer, auxiliary.critic.optimizer]
    num_minibatches = config.trainer.minibatches
    parts: Metrics = {}
    losses: list[float] = []
    grad_norms: list[float] = []
    critic_grad_norms: list[float] = []
    first_pass: list[PackedMicrobatch] = []
    staleness_updates_max = 0
    minibatches: list[list[PackedMicrobatch]] = []
    totals: list[Totals] = []
    for update in range(config.updates_per_step):
        for one in optimizers:  # a minibatch with nothing to train on has its place in the schedule, too
            one.planned = step * config.updates_per_step + update
        epoch, index = divmod(update, num_minibatches)
        if index == 0 and (epoch == 0 or config.trainer.shuffle):
            minibatches = [
                batching.collate(batch.of(part), config.trainer.microbatch_tokens, atom_size=update_of.atom_size)
                for part in batching.split_minibatches(
                    scored, num_minibatches, order=_epoch_order(len(scored), config, step=step, epoch=epoch)
                )
            ]
            totals = _totals(minibatches, ranks)
        microbatches = minibatches[index]
        if epoch == 0:
            first_pass += microbatches
        if not totals[index].num_microbatches:  # every completion of this minibatch is masked
            continue
        lr = optimizer.lr
        try:
            with labels.span("forward_backward"):
                loss_value, update_parts = update_of.accumulate(
                    filled(microbatches, totals[index].num_microbatches),
                    totals[index],
                    measured_step=None if losses else step,
                )
            with labels.span("optimizer"):
                if auxiliary.critic is not None:
                    auxiliary.critic.optimizer.finite_grad_norm()  # before either of them changes weights
                grad_norms.append(optimizer.step())
        except NonFiniteError as error:  # on all ranks alike
            raise located(
                error,
                step=step,
                update=update,
                num_minibatches=num_minibatches,
                lr=lr,
                own=[key for microbatch in microbatches for key in microbatch.keys],
                ranks=ranks,
            ) from error
        if auxiliary.critic is not None:
            with labels.span("optimizer"):
                critic_grad_norms.append(auxiliary.critic.optimizer.step())
        losses.append(loss_value)
        parts = merge_metrics(parts, update_parts) if parts else update_parts
        staleness = np.concatenate([[0], *(step - microbatch.versions for microbatch in microbatches)])
        distance = staleness_in_updates(staleness, updates_per_step=config.updates_per_step, update_in_step=update)
        staleness_updates_max = max(staleness_updates_max, int(distance.max()))
    metrics = {
        **batch.metrics,
        **metric_values(_of_all_ranks(parts, ranks)),
        "loss": float(np.mean(losses)) if losses else 0.0,
        "grad_norm": float(np.mean(grad_norms)) if grad_norms else 0.0,
        "lr": lr if losses else optimizer.lr,
        "num_updates": float(len(losses)),
        "staleness_updates_max": float(ranks.max(torch.tensor(staleness_updates_max))),
        **_reading_metrics(first_pass, batching, ranks),
        "train_s": time.perf_counter() - started_s,
    }
    if not config.has_critic:
        return metrics
    metrics["critic_grad_norm"] = float(np.mean(critic_grad_norms)) if critic_grad_norms else 0.0
    return metrics | published_names(
        metrics,
        value_coef=config.critic.coef,
        step=step,
        num_episodes=(step + 1) * config.completions_per_step,
        max_new_tokens=config.generator.max_new_tokens,
        num_eos_tokens=int(ranks.sum(torch.tensor(count_tokens(groups, model.config.eos_token_ids)))),
    )


def _epoch_order(num_groups: int, config: RunConfig, *, step: int, epoch: int) -> list[int] | None:
    """In which order the groups are dealt into the minibatches of `epoch`: None is the canonical one."""
    if not config.trainer.shuffle:
        return None
    order: list[int] = np.random.default_rng((config.seed, step, epoch)).permutation(num_groups).tolist()
    return order


def _totals(minibatches: Sequence[Sequence[PackedMicrobatch]], ranks: RankGroup) -> list[Totals]:
    """Of each minibatch, over all ranks."""
    counts = [[sum(one.num_targets for one in part), sum(len(one.keys) for one in part)] for part in minibatches]
    sums = ranks.sum(torch.tensor(counts, dtype=torch.int64)).tolist()
    most = ranks.max(torch.tensor([len(part) for part in minibatches])).tolist()
    return [Totals(tokens, sequences, count) for (tokens, sequences), count in zip(sums, most, strict=True)]


def _of_all_ranks(parts: Metrics, ranks: RankGroup) -> Metrics:
    """The metrics of all ranks' microbatches, from the parts of each rank's own."""
    return reduce(merge_metrics, (decode_metrics(part) for part in ranks.gather(encode_metrics(parts))))


def _reading_metrics(
    microbatches: Sequence[PackedMicrobatch], batching: Batching, ranks: RankGroup
) -> dict[str, float]:
    """How the first pass was packed."""
    own = [
        sum(microbatch.num_targets for microbatch in microbatches),
        sum(microbatch.num_tokens for microbatch in microbatches),
        len(microbatches),
        len(microbatches) * batching.padding_frac(microbatches),
        len(microbatches) * batching.padded_layout_frac(microbatches),
    ]
    trained, read, count, padding, layout = ranks.sum(torch.tensor(own, dtype=torch.float64)).tolist()
    return {
        "tokens_trained": trained,
        "tokens_read": read,
        "num_microbatches": count,
        "padding_frac": padding / max(count, 1.0),
        "padded_layout_frac": layout / max(count, 1.0),
    }


def needed_columns(config: RunConfig) -> tuple[str, ...]:
    """What has to be measured on a batch before its first update, for its loss, its penalty and its critic."""
    requires = loss_named(config.loss.name, config.loss.params).requires
    is_needed = {
        "behaviour_logprobs": config.rereads_behaviour,
        "reference_logprobs": "reference_logprobs" in requires or config.kl.coef > 0,
        "proximal_logprobs": "proximal_logprobs" in requires or (config.has_critic and config.critic.vtrace),
        "values": config.has_critic,
    }
    return tuple(name for name, needed in is_needed.items() if needed)


def brings_reference(config: RunConfig) -> bool:
    """Whether rollouts come with the reference's logprobs, measured by an executor of its own."""
    return config.kl.executor == "own" and "reference_logprobs" in needed_columns(config)


class _Labels:
    """The spans of one step: each names it."""

    def __init__(self, spans: Spans, step: int) -> None:
        self._spans, self._step = spans, step

    def span(self, state: str) -> AbstractContextManager[None]:
        return self._spans.span(state, step=self._step)

    def did(self, num_tokens: int) -> None:
        self._spans.did(num_tokens)


MEASURED_IN = {
    "behaviour_logprobs": "proximal",
    "reference_logprobs": "reference",
    "proximal_logprobs": "proximal",
    "values": "values",
}
"""The state in which each column is measured."""


class _Update:
    """One step's way from microbatches to gradients, of the policy and of the critic beside it."""

    def __init__(
        self,
        model: Transformer,
        optimizer: Optimizer,
        *,
        config: RunConfig,
        loss: Loss,
        auxiliary: Auxiliary,
        ranks: RankGroup,
        labels: _Labels,
        tokens: TokenSample | None = None,
    ) -> None:
        self.labels = labels
        self.model, self.optimizer, self.config, self.loss = model, optimizer, config, loss
        self.auxiliary, self.ranks, self.tokens = auxiliary, ranks, tokens
        self.columns = needed_columns(config)
        self.brings_reference = brings_reference(config)
        self.atom_size = 2 if loss.atom == "pair" else 1
        self.kl_coef = config.kl.coef if auxiliary.kl_coef is None else auxiliary.kl_coef
        self.kl_in_loss = self.kl_coef if config.kl.place == "loss" else 0.0

    def measure(
        self, groups: Sequence[Group], sequences: Sequence[TrainSequence], *, batching: Batching
    ) -> dict[str, Columns]:
        """The columns that the config needs of `sequences`, of `groups`, under the weights of this moment.

        Of a reference with an executor of its own, as the rollouts have brought them.
        """
        readers: dict[str, Callable[[PackedMicrobatch], Tensor]] = {
            "behaviour_logprobs": partial(self._logprobs, self.model),  # at staleness 0, the only case, it sampled
            "reference_logprobs": partial(self._logprobs, self.auxiliary.reference),
            "proximal_logprobs": partial(self._logprobs, self.model),
            "values": self._values,
        }
        measured: dict[str, Columns] = {}
        for name in self.columns:
            if self.brings_reference and name == "reference_logprobs":
                continue
            with self.labels.span(MEASURED_IN[name]):
                measured[name] = measure(
                    readers[name],
                    sequences,
                    microbatch_tokens=self.config.trainer.microbatch_tokens,
                    batching=batching,
                    ranks=self.ranks,
                )
        if self.brings_reference:
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            measured["reference_logprobs"] = brought(rollouts, sequences)
        return measured

    def _logprobs(self, model: Transformer | None, microbatch: PackedMicrobatch) -> Tensor:
        assert model is not None, "the config needs a reference policy, and none was built"
        return microbatch_logprobs(model, microbatch, temperature=self.config.logprob_temperature)[0]

    def _values(self, microbatch: PackedMicrobatch) -> Tensor:
        critic = self.auxiliary.critic
        assert critic is not None, "the config needs a critic, and none was built"
        states = at_targets(self.model, microbatch) if critic.is_head else torch.empty(0)
        return critic.values(microbatch, states)

    def accumulate(
        self, microbatches: Sequence[PackedMicrobatch], totals: Totals, *, measured_step: int | None
    ) -> tuple[float, Metrics]:
        """Gradients of one update in the optimizers, the policy's loss over all ranks, and this rank's metrics.

        Every rank comes with as many microbatches, some of them empty.
        """
        num_tokens, num_sequences = totals.num_tokens, totals.num_sequences
        by_token = self.loss.unit == "token" and self.config.loss.reduction == "token"
        num_units = num_tokens if by_token else num_sequences // self.atom_size
        self.optimizer.zero_grad()
        critic = self.auxiliary.critic
        if critic is not None:
            critic.optimizer.zero_grad()
        total, value_total = 0.0, 0.0
        parts: Metrics = {}
        found: list[Finding] = []
        for index, microbatch in enumerate(microbatches):
            with self.labels.span("forward_backward"):
                for optimizer in (self.optimizer,) if critic is None else (self.optimizer, critic.optimizer):
                    optimizer.before_backward(is_last=index == len(microbatches) - 1)
                states = at_targets(self.model, microbatch)
                logprobs, entropies = microbatch_logprobs(
                    self.model, microbatch, temperature=self.config.logprob_temperature, states=states
                )
                inputs = self._inputs(microbatch, logprobs, num_units=num_units)
                policy_loss, microbatch_parts = self.loss(inputs)
                if self.config.loss.entropy_coef:
                    policy_loss = policy_loss - self.config.loss.entropy_coef * self._reduced(
                        entropies, inputs, num_sequences=num_sequences
                    )
                if self.kl_in_loss:
                    kl = KL_ESTIMATORS[self.config.kl.estimator](logprobs, inputs.need("reference_logprobs"))
                    policy_loss = policy_loss + self.kl_in_loss * self._reduced(kl, inputs, num_sequences=num_sequences)
                is_joint = critic is not None and critic.is_head  # both losses go through the policy's trunk
                if not is_joint:  # the activations of one model at a time
                    torch.autograd.backward(policy_loss)
                value = 0.0
                if critic is not None:
                    value_loss, value_parts = self._value_loss(critic, microbatch, states, inputs, num_tokens)
                    value_loss = self.config.critic.coef * value_loss
                    torch.autograd.backward(policy_loss + value_loss if is_joint else value_loss)
                    microbatch_parts |= value_parts
                    value = float(value_loss.detach())
                loss = float(policy_loss.detach())
                total, value_total = total + loss, value_total + value
                if not (math.isfinite(loss) and math.isfinite(value)):
                    found += findings(microbatch, inputs, entropy=entropies)
                microbatch_parts["entropy"] = masked_mean(entropies.detach(), inputs.mask)
                if self.tokens is not None:
                    self.tokens.take(microbatch, logprobs)
                if measured_step is not None:
                    microbatch_parts |= _difference_per_lag(microbatch, inputs, step=measured_step)
                parts = merge_metrics(parts, microbatch_parts)
                self.labels.did(microbatch.num_tokens)
        sums = self.ranks.sum(torch.tensor([total, value_total], dtype=torch.float64))
        for name, value in zip(("loss", "value loss"), sums.tolist(), strict=True):
            if not math.isfinite(value):  # on one rank, and so in the sum that all have
                raise NonFiniteError(
                    f"the {name} is not finite; weights were not changed",
                    got=f"{name} {value} at update {self.optimizer.num_updates}",
                    hint="lower trainer.optimizer.lr, or look at this batch's rewards and logprobs",
                    report={"findings": [msgspec.to_builtins(one) for one in found]},
                )
        total = float(sums[0])
        return total, parts

    def _reduced(self, values: Tensor, inputs: LossInputs, *, num_sequences: int) -> Tensor:
        """Token `values` [T] as the loss reduces its own: under `loss.reduction`, or summed over each completion and
        averaged over completions beside a loss of whole completions or pairs, whose logprobs are such sums."""
        if self.loss.unit == "token":
            return inputs.average(values)
        return sum_over_units(values, inputs.mask, num_units=num_sequences)

    def _value_loss(
        self, critic: ValueFunction, microbatch: PackedMicrobatch, states: Tensor, inputs: LossInputs, num_tokens: int
    ) -> tuple[Tensor, Metrics]:
        def column(values: np.ndarray | None) -> Tensor:
            assert values is not None, "a batch for a critic carries values and returns"
            return torch.from_numpy(values).to(inputs.mask.device)

        loss, parts = loss_named("value", {"clip": self.config.critic.clip})(
            LossInputs(
                policy_logprobs=None,
                advantages=None,
                mask=inputs.mask,
                segment_ids=inputs.segment_ids,
                num_units=num_tokens,
                values=critic.values(microbatch, states),
                anchor_values=column(microbatch.values),
                returns=column(microbatch.returns),
            )
        )
        total = loss.detach().double() * num_tokens
        return loss, parts | {"value_loss": Mean(total, inputs.mask.sum())}

    def _inputs(self, microbatch: PackedMicrobatch, logprobs: Tensor, *, num_units: int) -> LossInputs:
        device = logprobs.device

        def column(values: np.ndarray | None) -> Tensor | None:
            return None if values is None else torch.from_numpy(values).to(device)

        return LossInputs(
            policy_logprobs=logprobs,
            behaviour_logprobs=torch.from_numpy(microbatch.behaviour_logprobs).to(device),
            reference_logprobs=column(microbatch.reference_logprobs),
            proximal_logprobs=column(microbatch.proximal_logprobs),
            advantages=torch.from_numpy(microbatch.advantages).to(device),
            mask=torch.ones(len(logprobs), dtype=torch.bool, device=device),
            segment_ids=torch.from_numpy(microbatch.segment_ids).to(device),
            num_units=num_units,
            reduction=self.config.loss.reduction,
            max_tokens=self.config.generator.max_new_tokens,
        )


def _difference_per_lag(microbatch: PackedMicrobatch, inputs: LossInputs, *, step: int) -> Metrics:
    """|policy - behaviour| of completions sampled wholly under one version, by that version's lag in steps."""
    if not microbatch.num_targets:
        return {}
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
