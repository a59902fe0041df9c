"""What the trainer's ranks do in tests of whole training steps, and one rank that does all of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from gradients import named_grads
from rank_models import whole_model
from rank_pool import Rank
from sharded_jobs import Layout, axes_of, division_of, part_of, sequences_of
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "trainer"))  # its data serve here, too

from training_data import TINY, make_groups, run_config, sharing_prompts

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.batching import collate
from slipstream.core.config import RunConfig
from slipstream.core.errors import NonFiniteError
from slipstream.core.rank_group import RankGroup
from slipstream.core.ranks import data_parallel_rank
from slipstream.core.sections import ModelConfig
from slipstream.core.stage_sections import WarmStartConfig
from slipstream.core.types import Group
from slipstream.models.config import TransformerConfig
from slipstream.models.sharded import module_parts
from slipstream.models.shards import Box
from slipstream.trainer.checkpoint import CRITIC
from slipstream.trainer.critic import Critic
from slipstream.trainer.measure import Auxiliary, Columns, LogprobReader, measure, probed
from slipstream.trainer.policy import Policy
from slipstream.trainer.scores import dealt_by, head_of
from slipstream.trainer.step import train_on_batch
from slipstream.trainer.supervised import supervised_updates

Boxes = list[tuple[Box, np.ndarray]]
Named = dict[str, Tensor]
PROBE = np.arange(9, dtype=np.int32)


@dataclass
class Seen:
    """Of policy and critic, by "policy/<tensor>" and "critic/<tensor>"; and the metrics of each step."""

    first_gradient: Boxes = field(default_factory=list)
    weights: Boxes = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    num_params: int = 0


@dataclass(frozen=True)
class Span:
    """Steps `first` up to `stop`, from the checkpoint `load` if they do not begin; then kept as `save`, as `export`."""

    stop: int
    first: int = 0
    load: Path | None = None
    save: Path | None = None
    export: Path | None = None


def config_of(sections: dict[str, Any]) -> RunConfig:
    model = sections.get("model", TINY.model_dump() | {"max_positions": 64})
    return run_config(**sections | {"model": ModelConfig(**model)})


def batch_of(config: RunConfig, step: int) -> list[Group]:
    groups = sharing_prompts(make_groups(num_samples=config.samples_per_group, seed=step, version=step))
    return routed(groups, config) if config.generator.routing_replay else groups


def routed(groups: list[Group], config: RunConfig) -> list[Group]:
    """Every completion with experts of its tokens, drawn by its key, as if an engine had recorded them."""
    shape, found = config.model, []
    for group in groups:
        rollouts = []
        for rollout in group.rollouts:
            [segment] = rollout.completion.segments
            rng = np.random.default_rng((rollout.ordinal, rollout.sample))
            count = len(rollout.completion.prompt.tokens) + len(segment.tokens) - 1
            drawn = [rng.permutation(shape.num_experts)[: shape.experts_per_token] for _ in range(count)]
            routes = np.repeat(np.stack(drawn).astype(np.uint8)[:, None], shape.num_layers, 1)
            routes[: len(rollout.completion.prompt.tokens)] = 255  # the prompt's, which rollouts share, are not known
            segment = msgspec.structs.replace(segment, routes=routes)
            completion = msgspec.structs.replace(rollout.completion, segments=(segment,))
            rollouts.append(msgspec.structs.replace(rollout, completion=completion))
        found.append(Group(ordinal=group.ordinal, rollouts=tuple(rollouts)))
    return found


def share_of(groups: list[Group], config: RunConfig, ranks: RankGroup) -> list[Group]:
    by = dealt_by(config.loss)
    shares = []
    for group in groups:
        mine = [o for o in group.rollouts if data_parallel_rank(o.ordinal, o.sample, ranks.world, by=by) == ranks.rank]
        shares += [Group(ordinal=group.ordinal, rollouts=tuple(mine))] if mine else []
    return shares


def _boxes(prefix: str, module: nn.Module, views: Named) -> Boxes:
    return [
        (replace(one.box, name=f"{prefix}/{one.box.name}"), one.of(views[one.parameter].detach()).numpy().copy())
        for one in module_parts(module)
    ]


def _weights(one: Policy | Critic) -> Named:
    return one.parameters.named_views()


def _module(one: Any) -> nn.Module:
    module: nn.Module = one.module if hasattr(one, "module") else one.model
    return module


@torch.no_grad()
def _sharpen(policy: Policy) -> None:
    """Fresh weights give nearly uniform logits: too easy. A base beside adapters brings its own."""
    if policy.base_digest:
        return
    for view in _weights(policy).values():
        if view.ndim >= 2:
            view.mul_(8.0)
    policy.parameters.reshard()


def _train(policy: Policy, config: RunConfig, span: Span, ranks: RankGroup) -> Seen:
    _sharpen(policy)
    seen = Seen(num_params=policy.num_params)
    critic = policy.new_critic() if config.has_critic else None
    trained: dict[str, Any] = {"policy": policy} | ({} if critic is None else {"critic": critic})
    others = {} if critic is None else {CRITIC: (critic.module, critic.optimizer)}
    first = policy.optimizer.step

    def step_and_note(**how: float) -> float:
        policy.optimizer.finite_grad_norm()
        for name, one in trained.items():
            seen.first_gradient.extend(_boxes(name, _module(one), named_grads(one.parameters)))
        vars(policy.optimizer).pop("step")
        return first(**how)

    vars(policy.optimizer)["step"] = step_and_note
    auxiliary = Auxiliary(policy.reference(None), critic)
    if span.load is not None:
        assert policy.load(span.load, others).step == span.first
    for step in range(span.first, span.stop):
        metrics = _step(policy, config, batch_of(config, step), ranks, auxiliary, step=step)
        seen.metrics.append(metrics)
    if span.save is not None:
        policy.save(span.save, step=span.stop, extra={}, others=others)
        saved = policy.saved(wait=True)
        assert saved is not None
        assert saved.path == span.save
        assert not policy.is_saving
    if span.export is not None:
        policy.export(span.export)
    for name, one in trained.items():
        seen.weights += _boxes(name, _module(one), _weights(one))
    return seen


def _step(
    policy: Policy, config: RunConfig, groups: list[Group], ranks: RankGroup, auxiliary: Auxiliary, step: int = 0
) -> dict[str, float]:
    return train_on_batch(
        policy.model,
        policy.optimizer,
        share_of(groups, config, ranks),
        config=config,
        step=step,
        batching=collate,
        auxiliary=auxiliary,
        heads=[head_of(rollout, config.rewards) for group in groups for rollout in group.rollouts],
        ranks=ranks,
    )


def _warm_up(policy: Policy, config: RunConfig, ranks: RankGroup) -> Seen:
    _sharpen(policy)
    seen = Seen()
    rng = np.random.default_rng(0)
    pairs = [
        (rng.integers(0, 19, 4).astype(np.int32), rng.integers(0, 19, int(rng.integers(1, 9))).astype(np.int32))
        for _ in range(13)
    ]
    warm_start = WarmStartConfig(steps=8, batch_size=5)
    for update in supervised_updates(
        policy.model,
        policy.new_optimizer(warm_start.optimizer, total_updates=8),
        pairs,
        config=warm_start,
        microbatch_tokens=24,
        seed=config.seed,
        batching=collate,
        ranks=ranks,
    ):
        seen.metrics.append({"loss": update.loss, "grad_norm": update.grad_norm, "tokens": float(update.num_tokens)})
    seen.weights += _boxes("policy", policy.model, _weights(policy))
    return seen


def _divided(rank: Rank, config: RunConfig, layout: Layout) -> tuple[Policy, RankGroup]:
    axes = axes_of(rank, layout)
    policy = Policy(
        config, RankGroup.over(rank.group), axes.sharing, axes.tensor, axes.context, axes.stage, axes.experts
    )
    return policy, axes.data


# Jobs


def train(rank: Rank, sections: dict[str, Any], layout: Layout, span: Span) -> Seen:
    config = config_of(sections)
    policy, ranks = _divided(rank, config, layout)
    seen = _train(policy, config, span, ranks)
    policy.close()
    return seen


def warm_up(rank: Rank, layout: Layout) -> Seen:
    config = config_of({})
    policy, ranks = _divided(rank, config, layout)
    return _warm_up(policy, config, ranks)


def read(rank: Rank, configs: dict[str, TransformerConfig], layout: Layout) -> dict[str, list[Columns]]:
    """The logprobs of `sequences_of` under models in stages, read in microbatches; and of the probe."""
    division, found = division_of(rank, layout), {}
    for name, config in configs.items():
        model, sequences = part_of(config, division), sequences_of(0, config.vocab_size)
        read = measure(LogprobReader(model, 1.0), sequences, microbatch_tokens=60, batching=collate)
        found[name] = [read, {(0, 0): probed(model, PROBE, collate)}]
    return found


def refused(rank: Rank, sections: dict[str, Any], layout: Layout) -> list[str]:
    """Errors of a step with a logprob that is no number, and of one with such a gradient on rank 0; weights stay."""
    config = config_of(sections)
    policy, ranks = _divided(rank, config, layout)
    before = _boxes("policy", policy.model, _weights(policy))
    errors = []
    for is_gradient in (False, True):
        groups = batch_of(config, 0)
        if is_gradient:
            policy.optimizer.step = partial(_poisoned, rank, policy, policy.optimizer.step)  # type: ignore[method-assign]
        else:
            groups[1].rollouts[2].completion.segments[0].behaviour_logprobs[:] = np.nan
        try:
            _step(policy, config, groups, ranks, Auxiliary(policy.reference(None)))
        except NonFiniteError as error:
            errors.append(str(error))
    after = _boxes("policy", policy.model, _weights(policy))
    assert all(np.array_equal(old, new) for (_, old), (_, new) in zip(before, after, strict=True))
    policy.close()
    return errors


def _poisoned(rank: Rank, policy: Policy, step: Callable[..., float], **how: float) -> float:
    policy.optimizer.finite_grad_norm()
    if rank.rank == 0:
        named_grads(policy.parameters)["layers.0.qkv.weight"][0, 0] = np.inf
    return step(**how)


# One rank


def read_alone(configs: dict[str, TransformerConfig]) -> dict[str, list[Columns]]:
    found = {}
    for name, config in configs.items():
        model, sequences = whole_model(config), sequences_of(0, config.vocab_size)
        read = measure(LogprobReader(model, 1.0), sequences, microbatch_tokens=400, batching=collate)
        found[name] = [read, {(0, 0): probe_logprobs(model, PROBE)}]
    return found


def alone(work: Callable[..., Seen], sections: dict[str, Any], *args: Any) -> Seen:
    config = config_of(sections)
    return work(Policy(config), config, *args, RankGroup.alone())


def train_alone(sections: dict[str, Any], span: Span) -> Seen:
    return alone(_train, sections, span)


def warm_up_alone() -> Seen:
    return alone(_warm_up, {})
