"""The default pipeline of a config: the only place that knows all nodes, and hands each what it needs of the others.

Executors are imported by what makes them: seldom the controller, which describes them to the processes that do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.batching import collate
from slipstream.batching.buffer import GroupBuffer
from slipstream.controller.checks import has_functions
from slipstream.controller.pipeline import Node, Pipeline, RunInput, gather, scatter, weights
from slipstream.controller.placement import place
from slipstream.core.channel_spec import MAX_MESSAGE_BYTES, ChannelSpec, Kind
from slipstream.core.config import RunConfig
from slipstream.core.environment_section import ENVIRONMENT
from slipstream.core.errors import ConfigError
from slipstream.core.executor import Executor
from slipstream.core.holders import HANDED, ranks_per_copy
from slipstream.core.machine import num_cores
from slipstream.core.sections import RewardTerm
from slipstream.core.service_messages import Evaluate, WarmStart
from slipstream.core.stage_sections import EvalSet
from slipstream.core.types import Prompt
from slipstream.core.wire import encode
from slipstream.environments.checks import Given, Schemas
from slipstream.generator.episodes import ENVIRONMENTS
from slipstream.models.build import build_tokenizer
from slipstream.prompts import PromptSet, build_prompts, demonstrations, task_table
from slipstream.rewards.given import Functions
from slipstream.rewards.user_functions import columns_needed
from slipstream.trainer.critic_link import ANSWERED, ASKED
from slipstream.trainer.scores import dealt_by


def make_generator(config: RunConfig, replica: int = 0) -> Executor:
    """The generator executor of the default pipeline."""
    from slipstream.generator.executor import Generator

    return Generator(config=config, replica=replica)


def make_trainer(config: RunConfig, resume: str | None = None) -> Executor:
    """The trainer executor, with the group buffers and collation beside it."""
    from slipstream.trainer.executor import Trainer

    in_flight = (config.max_staleness + 1) * config.groups_per_step + config.window
    in_flight += config.schedule.queue_groups or 0
    new_buffer = partial(GroupBuffer, config.samples_per_group, max_groups=16 * in_flight + 1024)
    return Trainer(config=config, new_buffer=new_buffer, batching=collate, resume=resume)


def make_rewards(config: RunConfig, functions: Functions | None = None) -> Executor:
    """The reward executor: the config's terms in sandboxed workers, the caller's `functions` in this process."""
    from slipstream.rewards.executor import Rewards

    tasks = task_table(config.prompts.tasks)
    return Rewards(
        config=config.rewards,
        tasks=tasks,
        functions=functions,
        group_size=config.samples_per_group,
        environment_weight=config.environment.reward_weight if config.environment.is_set else None,
    )


def make_environments(config: RunConfig, given: Given | None = None) -> Executor:
    """The executor of environments: in sandboxed workers, those that were `given` from Python in this process."""
    from slipstream.environments.executor import Environments

    return Environments(config=config, given=given)


def environment_term(config: RunConfig) -> list[RewardTerm]:
    """The environment's own reward as a term of the sum, if there is an environment."""
    environment = config.environment
    return [RewardTerm(function=ENVIRONMENT, weight=environment.reward_weight)] if environment.is_set else []


def make_reward_models(config: RunConfig) -> Executor:
    """The executor of `rewards.models`, behind the functions that score first."""
    from slipstream.rewards.model_executor import RewardModels

    return RewardModels(
        config.rewards,
        terms=[*config.rewards.asked, *environment_term(config)],
        batching=collate,
        microbatch_tokens=config.trainer.microbatch_tokens,
        max_tokens=config.least_sequence,
        deadline_s=config.deadline_s,
    )


def make_reference(config: RunConfig, *, is_resumed: bool = False) -> Executor:
    """The executor of the reference policy, behind all that scores."""
    from slipstream.trainer.reference_executor import ReferencePolicy

    return ReferencePolicy(config=config, batching=collate, is_resumed=is_resumed)


def make_teacher(config: RunConfig) -> Executor:
    """The executor of the teacher, the last station before the trainer."""
    from slipstream.generator.vllm.reader import VLLMReader
    from slipstream.trainer.teacher_executor import TeacherModel

    return TeacherModel(
        config=config, batching=collate, new_reader=VLLMReader if config.teacher.engine == "vllm" else None
    )


def make_critic(config: RunConfig, resume: str | None = None) -> Executor:
    """The executor of the critic, beside the trainer."""
    from slipstream.trainer.critic_executor import CriticModel

    return CriticModel(config=config, batching=collate, resume=resume)


def nodes(
    config: RunConfig,
    *,
    functions: Functions | None = None,
    environments: Given | None = None,
    resume: Path | None = None,
    remote: Collection[str] = (),
) -> tuple[Node, ...]:
    """The executors of the default pipeline, with threads placed.

    Those in `remote` ('generator' for all replicas) join it from other machines.
    """
    threads = place(config, num_cores())

    def node(name: str, factory: Callable[..., Executor], *, ranks: int, device: str = "cpu", **kwargs: Any) -> Node:
        kind = name.partition("-")[0]
        return Node(
            name=name,
            factory=factory,
            kwargs={"config": config, **kwargs},
            host="torchrun" if kind in remote else config.host,
            num_threads=threads[kind].together,
            num_threads_alone=threads[kind].alone,
            ranks=ranks,
            device=device,
            is_replaceable=kind == "generator",
            joins_later=kind == "generator" and kwargs["replica"] >= config.generator.replicas,
        )

    ranks = config.generator.ranks
    device = config.generator.device if ranks > 1 else "cpu"  # a single rank needs no process group
    made = [
        node(f"generator-{replica}", make_generator, ranks=ranks, device=device, replica=replica)
        for replica in range(config.generator.most_replicas)
    ]
    made += _scoring_nodes(config, functions, environments)

    def scorer(name: str, factory: Callable[..., Executor], ranks: int, device: str, **kwargs: Any) -> Node:
        """Ranks with copies of their own have no collectives."""
        is_divided = ranks_per_copy(config)[name] > 1
        return node(name, factory, ranks=ranks, device=device if is_divided else "cpu", **kwargs)

    rewards, kl, teacher = config.rewards, config.kl, config.teacher
    if rewards.models:
        made.append(scorer("reward_models", make_reward_models, rewards.model_ranks, rewards.device))
    if kl.executor == "own":
        made.append(scorer("reference", make_reference, kl.ranks, kl.device, is_resumed=resume is not None))
    if config.has_own_teacher:
        made.append(scorer("teacher", make_teacher, teacher.ranks, teacher.device))
    checkpoint = None if resume is None else str(resume.resolve())
    trainer, critic = config.trainer, config.critic
    if config.has_own_critic:
        made.append(node("critic", make_critic, ranks=critic.ranks, device=critic.device, resume=checkpoint))
    made.append(node("trainer", make_trainer, ranks=trainer.ranks, device=trainer.device, resume=checkpoint))
    return tuple(made)


def _scoring_nodes(config: RunConfig, functions: Functions | None, environments: Given | None) -> Iterator[Node]:
    """Yield the nodes of environments and functions, if there are any; those of the caller's live in their process."""
    if config.environment.is_set:
        yield Node(
            name=ENVIRONMENTS,
            factory=make_environments,
            kwargs={"config": config} | ({"given": environments} if environments else {}),
            host="inline" if environments else config.host,
            is_replaceable=True,
        )
    if has_functions(config):
        yield Node(
            name="rewards",
            factory=make_rewards,
            kwargs={"config": config} | ({"functions": functions} if functions else {}),
            host="inline" if functions else config.host,
            is_replaceable=True,
        )


def default_pipeline(
    config: RunConfig,
    *,
    functions: Functions | None = None,
    environments: Given | None = None,
    resume: Path | None = None,
    remote: Collection[str] = (),
) -> Pipeline:
    """generators -> rewards -> reward models -> reference -> teacher -> trainer -> weights -> generators.

    Rewards, reward models, reference and teacher where there are any of their own; a critic of its own is asked by the
    trainer. Generators and environments speak to each other turn by turn.
    """
    made = nodes(config, functions=functions, environments=environments, resume=resume, remote=remote)
    replicas = [node for node in made if node.name.startswith("generator")]
    trainer = next(node for node in made if node.name == "trainer")
    leaders = trainer.members[:: config.trainer.peers]  # of the data-parallel ranks: they get the rollouts
    deadline_s = config.deadline_s
    channels = [
        *_turn_by_turn(config, replicas),
        *_through_stations(config, made, leaders),
        *_handed(config, made),
        *_of_critic(config),
        *(
            gather(f"arrived/{name}", f"{name}.arrived", "trainer.arrived", deadline_s=deadline_s)
            for name in leaders[1:]
        ),
        *(
            gather(f"staged/{member}", f"{member}.staged", f"{node.name}.staged", deadline_s=deadline_s)
            for node in replicas
            for member in node.members[1:]
        ),
        *(
            weights(
                f"weights/{member}",
                "trainer.weights",
                f"{member}.weights",
                num_replicas=len(replicas),
                deadline_s=deadline_s,
            )
            for node in replicas
            for member in node.members
        ),
    ]
    return Pipeline(made, tuple(channels), deadline_s=deadline_s)


STATIONS = {
    "rewards": ("completions", "rollouts"),
    "reward_models": ("completions", "scored"),
    "reference": ("rollouts", "measured"),
    "teacher": ("rollouts", "measured"),
}
"""The stations of a completion on its way to the trainer, in order: the ports by which it comes and leaves."""


def _turn_by_turn(config: RunConfig, replicas: Sequence[Node]) -> Iterator[ChannelSpec]:
    """The way of turns from all replicas to the environments, and of observations back to the replica that sampled."""
    if not config.environment.is_set:
        return
    deadline_s = config.deadline_s
    for node in replicas:
        yield gather(f"turns/{node.name}", f"{node.name}.turns", f"{ENVIRONMENTS}.turns", deadline_s=deadline_s)
    targets = [f"{node.name}.commands" for node in replicas]
    yield from scatter("observations", f"{ENVIRONMENTS}.observations", targets, "replica", deadline_s=deadline_s)


def _through_stations(config: RunConfig, made: Sequence[Node], leaders: Sequence[str]) -> Iterator[ChannelSpec]:
    """The way of completions from generators, through each station that there is, to the trainer's `leaders`.

    Over the copies of a station's models they are dealt one by one, to the first rank that holds each; from there they
    go to whoever is next, not by its rank 0.
    """
    per_copy = ranks_per_copy(config)
    node_named = {node.name: node for node in made}
    sources = [f"{node.name}.completions" for node in made if node.name.startswith("generator")]
    for name, (port_in, port_out) in STATIONS.items():
        if name in node_named:
            members = node_named[name].members[:: per_copy.get(name, 1)]
            yield from _dealt(config, sources, [f"{member}.{port_in}" for member in members], "rollouts/samples")
            sources = [f"{member}.{port_out}" for member in members]
    targets = [f"{leader}.rollouts" for leader in leaders]
    yield from _dealt(config, sources, targets, f"rollouts/{dealt_by(config.loss)}")


def _handed(config: RunConfig, made: Sequence[Node]) -> Iterator[ChannelSpec]:
    """The way of batches from the first rank that holds a copy of a model that scores to the others that hold it."""
    per_copy = ranks_per_copy(config)
    for node in made:
        size = per_copy.get(node.name, 1)
        for first in range(0, node.ranks, size):
            for member in node.members[first + 1 : first + size]:
                source, target = f"{node.members[first]}.{HANDED}", f"{member}.{HANDED}"
                yield ChannelSpec(f"{HANDED}/{member}", Kind.BROADCAST, source, target, deadline_s=config.deadline_s)


def _of_critic(config: RunConfig) -> Iterator[ChannelSpec]:
    """The way of batches and returns from the trainer's rank 0 to the critic's, and of what it says of them back."""
    if config.has_own_critic:
        for port, source, target in ((ASKED, "trainer", "critic"), (ANSWERED, "critic", "trainer")):
            name = f"{port}/{target}"
            yield ChannelSpec(
                name, Kind.BROADCAST, f"{source}.{port}", f"{target}.{port}", deadline_s=config.deadline_s
            )


def _dealt(config: RunConfig, sources: Sequence[str], targets: Sequence[str], route: str) -> Iterator[ChannelSpec]:
    """Channels from each of `sources` to all `targets`, of which `route` chooses one for each message."""
    for source in sources:
        executor, port = source.split(".")
        yield from scatter(f"{port}/{executor}", source, targets, route, deadline_s=config.deadline_s)


def build_work(
    config: RunConfig,
    *,
    is_resumed: bool = False,
    tools: Schemas | None = None,
    functions: Functions | None = None,
) -> tuple[RunInput, PromptSet]:
    """Prompts, held-out prompts and the demonstrations of the warm start. Chats are told of `tools`.

    Rows have the columns that rewards need, of which `functions` were given from Python.
    """
    tokenizer = build_tokenizer(config.model)
    prompts = build_prompts(config, tokenizer, tools, columns_needed(config.rewards, functions or {}))
    warm_start = None
    if config.warm_start.steps and not is_resumed:
        pairs = demonstrations(
            config.warm_start,
            prompts.train.prompts,
            tokenizer,
            seed=config.seed,
            prompt_column=config.prompts.prompt_column,
        )
        warm_start = WarmStart(
            tokens=np.concatenate([part for pair in pairs for part in pair]).astype(np.int32),
            prompt_lengths=np.array([len(prompt) for prompt, _ in pairs], dtype=np.int32),
            completion_lengths=np.array([len(completion) for _, completion in pairs], dtype=np.int32),
        )
        if warm_start.tokens.nbytes + 8 * len(pairs) > MAX_MESSAGE_BYTES // 2:
            raise ConfigError(
                "the demonstrations of the warm start do not fit one message",
                got=f"{len(pairs)} demonstrations of {warm_start.tokens.nbytes:,} bytes together",
                allowed=f"{MAX_MESSAGE_BYTES // 2:,} bytes",
                hint="lower warm_start.num_demonstrations, or take the stage sft",
            )
    for one in config.eval.sets:
        _check_message(one, prompts.sets[one.name])
    work = RunInput(prompts.train.prompt, held_out=tuple(prompts.eval), warm_start=warm_start, sets=prompts.sets)
    return work, prompts


def _check_message(asked: EvalSet, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError for a set whose prompts, with their columns, are too large for the message that asks them."""
    message = Evaluate(eval_id=0, prompts=tuple(prompts), temperature=asked.temperature)
    size = asked.num_samples * len(encode(message))
    if size > MAX_MESSAGE_BYTES // 2:
        raise ConfigError(
            f"the prompts of eval.sets '{asked.name}' do not fit one message",
            got=f"{len(prompts)} prompts x {asked.num_samples} samples, {size:,} bytes with their columns",
            allowed=f"{MAX_MESSAGE_BYTES // 2:,} bytes",
            hint="lower its num_prompts or num_samples",
        )
