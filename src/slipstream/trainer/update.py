"""One optimizer update: packed microbatches into gradients of policy and critic, gradients into weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from slipstream.algorithms.kl import KL_ESTIMATORS
from slipstream.algorithms.losses import LossInputs, loss_named
from slipstream.algorithms.losses.distill import weighed_divergences
from slipstream.algorithms.losses.spec import sequence_weight_metrics
from slipstream.algorithms.ratios import effective_share, step_scale, token_ratios
from slipstream.algorithms.reduce import (
    Max,
    Mean,
    Metrics,
    decode_metrics,
    encode_metrics,
    masked_max,
    masked_mean,
    merge_metrics,
    sum_over_units,
)
from slipstream.core.errors import NonFiniteError
from slipstream.core.packed import PackedMicrobatch, sent
from slipstream.models.experts import busiest_load
from slipstream.models.packed import at_targets
from slipstream.models.transformer import Transformer
from slipstream.trainer.measure import Auxiliary, StepContext, filled, microbatch_logprobs
from slipstream.trainer.min_variance import MinVariance
from slipstream.trainer.optim import AdamW
from slipstream.trainer.records import TokenSample
from slipstream.trainer.refused import Finding, findings, located
from slipstream.trainer.teacher import COMPARED, teacher_metrics

if TYPE_CHECKING:
    from slipstream.models.stage_passes import StagePasses
    from slipstream.trainer.critic_link import CriticLink


@dataclass(frozen=True)
class Totals:
    """Counts of one update over all ranks: its targets and sequences, and the most microbatches that a rank has.

    `cutoff` is what the loss masks beyond, where it has that: of all the update's targets.
    """

    num_tokens: int
    num_sequences: int
    num_microbatches: int
    cutoff: Tensor | None = None


@dataclass(frozen=True)
class PlannedUpdate:
    """Update `index` of a step: this rank's `microbatches`, and the counts over all ranks."""

    index: int
    microbatches: Sequence[PackedMicrobatch]
    totals: Totals


@dataclass(frozen=True)
class Made:
    """An update that was made: the loss over all ranks, gradient norms before clipping, this rank's metrics."""

    update: PlannedUpdate
    loss: float
    grad_norm: float
    critic_grad_norm: float | None
    lr: float
    metrics: Metrics


@dataclass(frozen=True)
class _Read:
    """One microbatch that went forward and backward: its part of both losses, float64 [2], and what made it.

    All is where it was computed: nobody waits for a device before the update's last microbatch.
    """

    losses: Tensor
    metrics: Metrics
    microbatch: PackedMicrobatch
    inputs: LossInputs
    entropies: Tensor


@dataclass(frozen=True)
class _Own:
    """An update's microbatches on this rank: `sums` of both losses, and behind them of what scales its step.

    `findings` are those of microbatches whose losses are not finite.
    """

    sums: list[float]
    metrics: Metrics
    findings: list[Finding]


_Unread = tuple[Tensor, Callable[[list[float]], _Own]]
"""The numbers of an update on this rank, float64 [N], where they were computed, and what they tell once read."""


class _LastStageRead(msgspec.Struct, frozen=True):
    """An `_Own` on its way to the other stages, with the logprobs of the microbatches that are sampled, by index."""

    sums: list[float]
    metrics: bytes
    findings: list[Finding]
    logprobs: dict[int, bytes]


class Updater:
    """Make the updates of `step`: of the policy `model`, and of the critic in `auxiliary`.

    A critic of its own executor makes its own meanwhile. `tokens` takes what it wants of each microbatch.
    """

    def __init__(
        self,
        model: Transformer,
        optimizer: AdamW,
        auxiliary: Auxiliary,
        step: StepContext,
        *,
        tokens: TokenSample | None = None,
    ) -> None:
        self._model, self._optimizer, self._critic = model, optimizer, auxiliary.critic
        self._teacher, self._own_critic = auxiliary.teacher, auxiliary.own_critic
        self._optimizers = [optimizer] if self._critic is None else [optimizer, self._critic.optimizer]
        self._config, self._step, self._ranks, self._spans = step.config, step.number, step.ranks, step.spans
        self._tokens, config = tokens, step.config
        self._loss = loss_named(config.loss.name, config.loss.params)
        kl_coef = config.kl.coef if auxiliary.kl_coef is None else auxiliary.kl_coef
        self._kl_in_loss = kl_coef if config.kl.place == "loss" else 0.0
        self._takes_single = config.loss.baseline == "min_variance"  # one completion in each microbatch
        self._is_scaled = config.trainer.ess_scaling != "no"  # what scales the step is read before it
        self._has_changed_weights = False

    @property
    def atom_size(self) -> int:
        """Number of sequences that must share a microbatch: the two of a pair, for losses of pairs."""
        return 2 if self._loss.atom == "pair" else 1

    def make_all(self, updates: Iterable[PlannedUpdate]) -> list[Made]:
        """Make the updates that have anything to train on, as `make` does; all ranks call it."""
        made = [one for update in updates if (one := self.make(update)) is not None]
        return made if self._own_critic is None else [self._joined(one, self._own_critic) for one in made]

    def make(self, update: PlannedUpdate) -> Made | None:
        """Make one update; None where no rank has anything to train on. All ranks call it.

        The first update also measures how far the policy is from the one that sampled. NonFiniteError, on all ranks
        alike and with nothing changed, for a loss or gradient that is not finite.
        """
        for optimizer in self._optimizers:  # an update with nothing to train on has its place in the schedule, too
            optimizer.planned = self._step * self._config.updates_per_step + update.index
        if not update.totals.num_microbatches:
            return None
        lr, critic_norm = self._optimizer.lr, None
        if self._own_critic is not None:
            self._own_critic.train(update.index, update.microbatches)
        try:
            with self._spans.span("forward_backward", step=self._step):
                numbers, told = self._accumulate(update)
                found = [] if self._is_scaled else [one.parameters.norm_on_device() for one in self._optimizers]
                norms = [norm for norm in found if norm is not None]
                if not norms:
                    loss, scale, metrics = self._agreed(told(numbers.tolist()))
            with self._spans.span("optimizer", step=self._step):
                if norms:
                    loss, scale, metrics, norm = self._launched((numbers, told), norms)
                else:
                    if self._critic is not None:
                        self._critic.optimizer.finite_grad_norm()  # before either of them changes weights
                    norm = self._optimizer.step(scale=scale)
        except NonFiniteError as error:  # on all ranks alike
            raise self._located(error, update, lr) from error
        if self._critic is not None:
            with self._spans.span("optimizer", step=self._step):
                critic_norm = self._critic.optimizer.step()
        self._has_changed_weights = True
        return Made(update, loss, norm, critic_norm, lr * scale, metrics)

    def _joined(self, made: Made, critic: CriticLink) -> Made:
        """Return `made` with what the critic's own update has told; NonFiniteError, on all ranks, if it was refused."""
        told = critic.updated(made.update.index)
        if told.failure:
            hint = "lower critic.optimizer.lr, or look at this batch's rewards"
            what = "the critic's loss or gradient is not finite; the critic was not changed"
            raise self._located(NonFiniteError(what, got=told.failure, hint=hint), made.update, made.lr)
        metrics = decode_metrics(told.metrics.tobytes()) if self._ranks.is_leader else {}
        return replace(made, critic_grad_norm=told.grad_norm, metrics=made.metrics | metrics)

    def _located(self, error: NonFiniteError, update: PlannedUpdate, lr: float) -> NonFiniteError:
        return located(
            error,
            step=self._step,
            update=update.index,
            num_minibatches=self._config.trainer.minibatches,
            lr=lr,
            own=[key for microbatch in update.microbatches for key in microbatch.keys],
            ranks=self._ranks,
        )

    def _accumulate(self, update: PlannedUpdate) -> _Unread:
        """Leave the update's gradients in the optimizers; return what this rank's microbatches gave, or stages read.
        Every rank reads as many, some of them empty."""
        totals = replace(update.totals, cutoff=self._cutoff(update.microbatches))
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        if self._model.passes is not None:
            own = self._through_stages(self._model.passes, update.microbatches, totals)
            return torch.empty(0, dtype=torch.float32), lambda _: own
        return self._unread(*self._one_by_one(update.microbatches, totals))

    def _agreed(self, own: _Own) -> tuple[float, float, Metrics]:
        """Return the policy's loss over all ranks, the factor on its learning rate (by its effective completions), and
        this rank's metrics, where they were computed. NonFiniteError, on all ranks, for a loss that is not finite."""
        sums = self._ranks.sum(torch.tensor(own.sums, dtype=torch.float64)).tolist()
        for name, value in zip(("loss", "value loss"), sums, strict=False):
            if not math.isfinite(value):  # on one rank, and so in the sum that all have
                raise NonFiniteError(
                    f"the {name} is not finite; weights were not changed",
                    got=f"{name} {value} at update {self._optimizer.num_updates}",
                    hint="lower trainer.optimizer.lr, or look at this batch's rewards and logprobs",
                    report={"findings": [msgspec.to_builtins(one) for one in own.findings]},
                )
        rule, base = self._config.trainer.ess_scaling, self._config.trainer.ess_base
        if rule == "no":
            return sums[0], 1.0, own.metrics
        total, count, squares, _ = sums[2:]
        return sums[0], step_scale(effective_share(total, squares, count), base=base, rule=rule), own.metrics

    def _launched(self, unread: _Unread, norms: list[Tensor]) -> tuple[float, float, Metrics, float]:
        """Update the policy where the optimizers' `norms` are; read all numbers together, behind the launch."""
        numbers, told = unread
        passed = torch.cuda.current_stream(norms[0].device).record_event() if norms[0].is_cuda else None
        launched = self._optimizer.launch(*norms, numbers)
        if passed is not None:  # tells the passes' time from the update's, which is queued behind them
            with self._spans.span("forward_backward", step=self._step):
                passed.synchronize()
        known = launched.tolist()
        agreed = self._agreed(told(known[len(norms) :]))
        for optimizer, norm in zip(self._optimizers[1:], known[1:], strict=False):
            optimizer.require_finite(norm)
        return *agreed, self._optimizer.landed(known[0])

    def _one_by_one(self, microbatches: Sequence[PackedMicrobatch], totals: Totals) -> tuple[list[_Read], Metrics]:
        """Read the microbatches one after the other."""
        reads: list[_Read] = []
        metrics: Metrics = {}
        single = MinVariance(self._optimizer, microbatches, self._ranks) if self._takes_single else None
        microbatches = filled(microbatches, totals.num_microbatches)
        for index, microbatch in enumerate(microbatches if single is None else single.microbatches):
            with self._spans.span("forward_backward", step=self._step):
                if single is not None:
                    self._optimizer.zero_grad()
                for optimizer in self._optimizers:
                    optimizer.before_backward(is_last=single is not None or index == len(microbatches) - 1)
                states = at_targets(self._model, microbatch, replays=True)
                reads.append(self._read(microbatch, states, totals, torch.autograd.backward))
                if single is not None:
                    single.take()
                metrics = merge_metrics(metrics, reads[-1].metrics)
                self._spans.did(microbatch.num_tokens)
        if single is not None:
            metrics |= single.finish()
            reads = [replace(one, losses=one.losses * a) for one, a in zip(reads, single.centred, strict=True)]
        return reads, metrics

    def _unread(self, reads: Sequence[_Read], metrics: Metrics) -> _Unread:
        weights = _parts(metrics["sequence_weight"], metrics["sequence_weight_squared"]) if self._is_scaled else []
        return torch.cat([*(read.losses for read in reads), *weights]), partial(_summed, reads, metrics)

    def _through_stages(self, passes: StagePasses, microbatches: Sequence[PackedMicrobatch], totals: Totals) -> _Own:
        """Send the microbatches through the pipeline's stages; return on all of them what the last one has read."""
        reads: list[_Read] = []
        microbatches = filled(microbatches, totals.num_microbatches)

        def loss(index: int, states: Tensor) -> Tensor:
            given: list[Tensor] = []  # the stage goes backward from it
            reads.append(self._read(microbatches[index], states, totals, given.append))
            return given[0]

        with self._spans.span("forward_backward", step=self._step):
            passes.train(microbatches, loss, before_backward=self._optimizer.before_backward, replays=True)
            self._spans.did(sum(microbatch.num_tokens for microbatch in microbatches))
            payload = b""
            if passes.is_last:
                metrics: Metrics = reduce(merge_metrics, (read.metrics for read in reads))
                numbers, told = self._unread(reads, metrics)
                payload = _encoded(told(numbers.tolist()), reads, self._tokens)
            own, logprobs = _decoded(passes.from_last(payload))
        if self._tokens is not None and not passes.is_last:
            for index, values in logprobs.items():
                self._tokens.take(microbatches[index], values)
        return own

    def _cutoff(self, microbatches: Sequence[PackedMicrobatch]) -> Tensor | None:
        """Return what the loss masks beyond in the update of these `microbatches` and the other ranks'."""
        if self._loss.cutoff is None:
            return None
        parts = [microbatch.tensors(torch.device("cpu")) for microbatch in microbatches]
        names = {"advantages", "behaviour_logprobs", "proximal_logprobs"} & set(self._loss.requires)
        none = torch.zeros(0, dtype=torch.float32)
        columns = {name: torch.cat([none, *(part[name] for part in parts)]) for name in names}
        return self._loss.cutoff_of(columns, self._of_all_ranks)

    def _of_all_ranks(self, values: Tensor) -> Tensor:
        """Join float32 `values` [N] of all ranks, by rank."""
        parts = self._ranks.gather(values.numpy().tobytes())
        return torch.from_numpy(np.concatenate([np.frombuffer(part, dtype=np.float32) for part in parts]))

    def _read(
        self,
        microbatch: PackedMicrobatch,
        states: Tensor,
        totals: Totals,
        backward: Callable[[Tensor], None],
    ) -> _Read:
        """Compute the losses of a microbatch from the `states` at its targets, and let `backward` have them: one loss,
        or with a critic that has a trunk of its own two."""
        critic = self._critic
        columns = microbatch.tensors(states.device)
        logprobs, entropies, *compared = microbatch_logprobs(
            self._model,
            microbatch,
            temperature=self._config.logprob_temperature,
            states=states,
            teacher=self._teacher,
            said=self._said(microbatch),
        )
        columns |= dict(zip(COMPARED, compared, strict=False))  # none without a teacher
        if self._takes_single:
            columns["advantages"] = torch.ones_like(columns["advantages"])
        inputs = self._inputs(columns, logprobs, totals)
        policy_loss, metrics = self._policy_loss(inputs, logprobs, entropies, totals)
        is_joint = critic is not None and critic.is_head  # both losses go through the policy's trunk
        if not is_joint:  # the activations of one model at a time
            backward(policy_loss)
        losses = [policy_loss, torch.zeros_like(policy_loss)]
        if critic is not None:
            values = critic.values(microbatch, states)
            value_loss, value_metrics = critic.loss(columns, values, num_tokens=totals.num_tokens)
            backward(policy_loss + value_loss if is_joint else value_loss)
            metrics |= value_metrics
            losses[1] = value_loss
        metrics["entropy"] = masked_mean(entropies.detach(), inputs.mask)
        if self._model.config.num_experts and self._model.passes is None:
            has_targets = torch.full((), int(microbatch.num_targets > 0), device=states.device)
            load = busiest_load(self._model, microbatch.num_tokens)
            metrics["expert_load_max"] = Mean(load * has_targets, has_targets)
        if self._is_scaled:
            metrics |= sequence_weight_metrics(inputs)
        if self._teacher is not None:
            metrics |= teacher_metrics(columns, inputs.mask)
        if self._tokens is not None:
            self._tokens.take(microbatch, logprobs)
        if not self._has_changed_weights:
            metrics |= _difference_per_lag(microbatch, inputs, step=self._step)
        read = torch.stack([loss.detach().double() for loss in losses])
        return _Read(read, metrics, microbatch, _without_graph(inputs), entropies.detach())

    def _said(self, microbatch: PackedMicrobatch) -> tuple[Tensor, ...]:
        """Return what the teacher has to say of the microbatch's targets."""
        if self._teacher is None:
            return ()
        state = "forward_backward" if self._teacher.model is None else "teacher"
        with self._spans.span(state, step=self._step):
            return self._teacher.said(microbatch, self._model.reader.targets(microbatch))

    def _policy_loss(
        self, inputs: LossInputs, logprobs: Tensor, entropies: Tensor, totals: Totals
    ) -> tuple[Tensor, Metrics]:
        """Return the configured loss with its entropy bonus and KL penalty, and the loss's metrics."""
        loss, metrics = self._loss(inputs)
        if coef := self._config.teacher.coef:
            values, of_teacher = weighed_divergences(inputs, weight="none", max_ratio=math.inf)
            loss, metrics = loss + coef * self._reduced(values, inputs, totals), metrics | of_teacher
        if entropy_coef := self._config.loss.entropy_coef:
            loss = loss - entropy_coef * self._reduced(entropies, inputs, totals)
        if self._kl_in_loss:
            kl = KL_ESTIMATORS[self._config.kl.estimator](logprobs, inputs.need("reference_logprobs"))
            if self._config.kl.corrected:
                kl = kl * token_ratios(logprobs, inputs.need("behaviour_logprobs"), inputs.mask)
            loss = loss + self._kl_in_loss * self._reduced(kl, inputs, totals)
        return loss, metrics

    def _reduced(self, values: Tensor, inputs: LossInputs, totals: Totals) -> Tensor:
        """Reduce token `values` [T] as the loss reduces its own: under `loss.reduction`, or summed over each completion
        and averaged over completions beside a loss of whole completions or pairs, whose logprobs are such sums."""
        if self._loss.unit == "token":
            return inputs.average(values)
        return sum_over_units(values, inputs.mask, num_units=totals.num_sequences)

    def _inputs(self, columns: dict[str, Tensor], logprobs: Tensor, totals: Totals) -> LossInputs:
        """Return what the loss is computed from, for one microbatch."""
        by_token = self._loss.unit == "token" and self._config.loss.reduction == "token"
        return LossInputs(
            policy_logprobs=logprobs,
            behaviour_logprobs=columns["behaviour_logprobs"],
            reference_logprobs=columns.get("reference_logprobs"),
            teacher_divergences=columns.get("teacher_divergences"),
            proximal_logprobs=columns.get("proximal_logprobs"),
            advantages=columns["advantages"],
            mask=torch.ones(len(logprobs), dtype=torch.bool, device=logprobs.device),
            segment_ids=columns["segment_ids"],
            lengths=columns["lengths"],
            num_units=totals.num_tokens if by_token else totals.num_sequences // self.atom_size,
            reduction=self._config.loss.reduction,
            max_tokens=self._config.longest_completion,
            cutoff=None if totals.cutoff is None else sent(totals.cutoff, logprobs.device),
        )


def _summed(reads: Sequence[_Read], metrics: Metrics, table: list[float]) -> _Own:
    by_microbatch = [table[at : at + 2] for at in range(0, 2 * len(reads), 2)]
    losses = [reduce(add, column) for column in zip(*by_microbatch, strict=True)]
    return _Own([*losses, *table[2 * len(reads) :]], metrics, _findings(zip(reads, by_microbatch, strict=True)))


def _encoded(own: _Own, reads: Sequence[_Read], tokens: TokenSample | None) -> bytes:
    logprobs: dict[int, bytes] = {}
    for index, read in enumerate(reads):
        if tokens is not None and any(tokens.wants(ordinal) for ordinal, _ in read.microbatch.keys):
            logprobs[index] = read.inputs.need("policy_logprobs").float().cpu().numpy().tobytes()
    return msgspec.msgpack.encode(_LastStageRead(own.sums, encode_metrics(own.metrics), own.findings, logprobs))


def _decoded(payload: bytes) -> tuple[_Own, dict[int, Tensor]]:
    told = msgspec.msgpack.decode(payload, type=_LastStageRead)
    logprobs = {at: torch.from_numpy(np.frombuffer(one, np.float32).copy()) for at, one in told.logprobs.items()}
    return _Own(told.sums, decode_metrics(told.metrics), told.findings), logprobs


def _without_graph(inputs: LossInputs) -> LossInputs:
    tensors: dict[str, Any] = {name: one.detach() for name, one in vars(inputs).items() if isinstance(one, Tensor)}
    return replace(inputs, **tensors)


def _parts(*metrics: Mean | Max) -> list[Tensor]:
    """Return total and count of each mean, float64 [2]."""
    means = [one for one in metrics if isinstance(one, Mean)]
    return [torch.stack([one.total.double(), one.count.double()]) for one in means]


def _findings(reads: Iterable[tuple[_Read, list[float]]]) -> list[Finding]:
    """Return what is not finite in the microbatches whose losses are not."""
    bad = [read for read, losses in reads if not all(map(math.isfinite, losses))]
    return [one for read in bad for one in findings(read.microbatch, read.inputs, entropy=read.entropies)]


def _difference_per_lag(microbatch: PackedMicrobatch, inputs: LossInputs, *, step: int) -> Metrics:
    """Return |policy - behaviour| of completions sampled wholly under one version, by that version's lag in steps."""
    if not microbatch.num_targets:
        return {}
    starts = np.flatnonzero(np.diff(microbatch.segment_ids, prepend=-1))
    oldest = np.minimum.reduceat(microbatch.versions, starts)[microbatch.segment_ids]
    newest = np.maximum.reduceat(microbatch.versions, starts)[microbatch.segment_ids]
    difference = (inputs.need("policy_logprobs").detach() - inputs.need("behaviour_logprobs")).abs()
    parts: Metrics = {}
    for version in np.unique(oldest[oldest == newest]):
        chosen = sent((oldest == version) & (newest == version), difference.device)
        parts[f"logprob_diff_mean/lag_{step - version}"] = masked_mean(difference, chosen)
        parts[f"logprob_diff_max/lag_{step - version}"] = masked_max(difference, chosen)
    return parts
