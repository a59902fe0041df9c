"""Scores completions outside a run, by the same reward executor as inside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from slipstream.batching import collate
from slipstream.core.channel import connect_local, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.clock import WallClock
from slipstream.core.config import RunConfig
from slipstream.core.environment_section import ENVIRONMENT
from slipstream.core.executor import Context
from slipstream.core.sections import RewardsConfig, RewardTerm
from slipstream.core.spans import NoSpans
from slipstream.core.types import Completion, Rollout
from slipstream.prompts import task_table
from slipstream.rewards.executor import Rewards
from slipstream.rewards.given import Functions
from slipstream.rewards.model_executor import ModelScorer

EVALUATION, REWARDS = "evaluation", "rewards"
WAKE_EVERY_S = 1.0


def score(completions: Sequence[Completion], rewards: Rewards) -> list[Rollout]:
    """One rollout per completion, in their order; `rewards` is started for it, and closed.

    Consumes: rollouts. Unblocked by: a reward worker. Ends when: every completion has its rollout; one that hangs its
    worker has it at its deadline.
    """
    channels = [
        _channel("completions", EVALUATION, REWARDS, capacity=len(completions) + 1),
        _channel("rollouts", REWARDS, EVALUATION, capacity=len(completions) + 1),
        _channel("events", REWARDS, EVALUATION, capacity=1024),
        _channel("commands", EVALUATION, REWARDS, capacity=1),
    ]
    ports = connect_local(channels)
    mine, theirs = ports[EVALUATION], ports[REWARDS]
    scored: dict[tuple[int, int], Rollout] = {}
    try:
        rewards.init(
            Context(
                name=REWARDS,
                run_dir=Path(),
                inputs=theirs.inputs,
                outputs=theirs.outputs,
                spans=NoSpans(),
                clock=WallClock(),
            )
        )
        for completion in completions:
            mine.outputs["completions"].put(completion)
        while len(scored) < len(completions):
            has_worked = rewards.step()
            while mine.inputs["events"].get_nowait() is not None:
                pass
            while (rollout := mine.inputs["rollouts"].get_nowait()) is not None:
                assert isinstance(rollout, Rollout)
                scored[rollout.completion.ordinal, rollout.completion.sample] = rollout
            if not has_worked:
                due_s = rewards.wait_s()
                timeout_s = WAKE_EVERY_S if due_s is None else min(due_s, WAKE_EVERY_S)
                held = [theirs.inputs[name] for name in rewards.held_inputs()]
                wait(theirs.inputs.values(), theirs.outputs.values(), rewards.wait_fds(), timeout_s, held=held)
    finally:
        rewards.close()
        mine.close()
        theirs.close()
    return [scored[completion.ordinal, completion.sample] for completion in completions]


def numbered(completions: Sequence[Completion], group_size: int = 1) -> list[Completion]:
    """The same with ordinals of their own, which tell several samples or evaluations of one prompt apart.

    With a `group_size`, so many that follow each other are samples of one ordinal.
    """
    return [
        msgspec.structs.replace(completion, ordinal=index // group_size, sample=index % group_size)
        for index, completion in enumerate(completions)
    ]


def score_by(
    config: RunConfig,
    rewards: RewardsConfig,
    completions: Sequence[Completion],
    *,
    functions: Functions | None = None,
    group_size: int = 1,
    environment_weight: float | None = None,
) -> list[Rollout]:
    """One rollout per completion as `rewards` scores it: by functions, in their workers, then by reward models.

    `functions` are those of terms from Python. Terms of groups get `group_size` completions of one ordinal, all of
    which must be there. With an `environment_weight` all completions are episodes, and the environment's own reward is
    a part behind the functions'; without, none is. The rest of `config` says what tasks there are and how long texts
    may be.
    """
    terms = rewards.asked
    if environment_weight is not None:
        terms.append(RewardTerm(function=ENVIRONMENT, weight=environment_weight))
    if terms or not rewards.models:
        tasks, weight = task_table(config.prompts.tasks), environment_weight
        executor = Rewards(rewards, tasks, functions=functions, group_size=group_size, environment_weight=weight)
        rollouts = score(completions, executor)
    else:
        rollouts = [Rollout(completion=completion, reward=0.0) for completion in completions]
    if not rewards.models:
        return rollouts
    scorer = ModelScorer(
        rewards,
        terms=terms,
        batching=collate,
        microbatch_tokens=config.trainer.microbatch_tokens,
        max_tokens=config.least_sequence,
    )
    return scorer.score(rollouts)


def _channel(name: str, source: str, target: str, *, capacity: int) -> ChannelSpec:
    return ChannelSpec(name, Kind.GATHER, f"{source}.{name}", f"{target}.{name}", capacity=capacity)
