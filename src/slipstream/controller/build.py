"""From a config to a pipeline: the only place that knows all stages and hands each what it needs of the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from slipstream.algorithms.losses import LOSSES, loss_named
from slipstream.batching import collate
from slipstream.batching.buffer import GroupBuffer
from slipstream.controller.controller import Work
from slipstream.controller.pipeline import Node, Pipeline, gather, scatter, weights
from slipstream.controller.placement import check_processes, check_remote, computing_groups, num_cores, place
from slipstream.core.channel import ChannelSpec
from slipstream.core.channel_spec import MAX_MESSAGE_BYTES
from slipstream.core.config import RunConfig, stage_of
from slipstream.core.errors import ConfigError
from slipstream.core.executor import Executor
from slipstream.core.hub import check_model_path
from slipstream.core.other_names import sentence_of_value
from slipstream.core.types import WarmStart
from slipstream.generator.device import check_device
from slipstream.generator.executor import Generator
from slipstream.generator.vllm.backend import check_vllm
from slipstream.models.build import build_tokenizer, check_division
from slipstream.models.device import check_gpus
from slipstream.models.foreign_text import rehearse_tokenizer
from slipstream.models.preflight import Head, check_checkpoint, check_policy
from slipstream.models.sizes import check_sizes
from slipstream.models.tokenizer import has_tokenizer, load_tokenizer
from slipstream.prompts import PromptSet, build_prompts, demonstrations, task_table
from slipstream.rewards.checks import check_rewards
from slipstream.rewards.executor import Rewards
from slipstream.rewards.given import Functions, is_from_python
from slipstream.rewards.model_executor import RewardModels
from slipstream.trainer.executor import Trainer
from slipstream.trainer.measure import needed_columns
from slipstream.trainer.reference_executor import ReferencePolicy
from slipstream.trainer.scores import dealt_by


def check(config: RunConfig, *, given: Collection[str] = (), remote: Collection[str] = ()) -> None:
    """Raise ConfigError for what the schema cannot see: models, losses, tasks, rewards and GPUs that are not there.

    `given` are the names of the reward functions that were handed over from Python. What `remote` groups compute on is
    on their machines, where they look for it themselves.
    """
    check_model_path(config)
    check_remote(config, remote)
    here = computing_groups(config) - set(remote)
    check_processes(config, here, has_workers=has_workers(config))
    if "generator" in here:
        check_vllm(config)
        check_device(config)
    for group, section, device, field, ranks in (
        ("trainer", "trainer", config.trainer.device, "ranks", config.trainer.ranks),
        ("reward_models", "rewards", config.rewards.device, "model_ranks", config.rewards.model_ranks),
        ("reference", "kl", config.kl.device, "ranks", config.kl.ranks),
    ):
        if group in here:
            check_gpus(section, device, field, ranks)
    for ranks in {config.generator.tensor_parallel, config.trainer.tensor_parallel}:
        check_division(config.model, ranks)
    check_sizes(config, check_policy(config), here)
    check_loss(config)
    check_checkpoints(config, readers(config))
    if has_functions(config):
        check_rewards(config.rewards, task_table(config.prompts.tasks), given)


def check_room(config: RunConfig, *, remote: Collection[str] = ()) -> None:
    """Raise ConfigError where memory has no room for the longest prompt, which is known once all have been read."""
    here = computing_groups(config) - set(remote)
    if "generator" in here:
        check_vllm(config)
    check_sizes(config, check_policy(config), here)


Reader = tuple[str, str | None, Head]
"""What reads the policy's tokens, in words; where its checkpoint is (None: the policy's own); what that ends in."""


def readers(config: RunConfig) -> list[Reader]:
    """What reads the policy's tokens during RL."""
    found: list[Reader] = [
        (f"reward model '{model.name}' (rewards.models)", model.path, "score") for model in config.rewards.models
    ]
    if "reference_logprobs" in needed_columns(config):
        found.append(("reference policy (kl.reference)", config.kl.reference, "language"))
    if config.has_critic and config.critic.model == "own":
        found.append(("critic (critic.path)", config.critic.path, "any"))
    return found


def check_checkpoints(config: RunConfig, named: Sequence[Reader]) -> None:
    """Raise ConfigError for a checkpoint of `named` that is not there, or reads other tokens than the policy writes.

    It may know more tokens than the policy, under other ids. One without a tokenizer must have as many tokens at least.
    Those of stages that have not run yet are passed over.
    """
    given = [(what, Path(path), head) for what, path, head in named if path is not None and stage_of(path) is None]
    if not given:
        return
    policy = policy_tokenizer(config)
    vocabulary = policy.get_vocab().items()
    for what, path, head in given:
        if not (path / "config.json").exists():
            raise ConfigError(f"there is no {what}", got=path, allowed="a folder with config.json")
        vocab_size = check_checkpoint(path, head).vocab_size
        if has_tokenizer(path):
            rehearse_tokenizer(path)
        if has_tokenizer(path) and not vocabulary <= load_tokenizer(path).get_vocab().items():
            raise ConfigError(
                f"{what} and the policy have different tokenizers",
                got=path,
                allowed="a model with the policy's tokens, under the same ids",
                hint="it reads the tokens that were sampled, not their text",
            )
        if vocab_size < len(policy):
            raise ConfigError(
                f"{what} has a smaller vocabulary than the policy",
                got=f"{vocab_size} tokens in {path}",
                allowed=f"at least the {len(policy)} of the policy's tokenizer",
                hint="it reads the tokens that were sampled, not their text",
            )


def policy_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """The run's tokenizer, also before the stage `sft` has handed it on."""
    is_of_sft = stage_of(config.model.path) == "sft"
    path = config.sft.path if is_of_sft else config.model.path
    return build_tokenizer(config.model.model_copy(update={"path": path}))


def check_loss(config: RunConfig) -> None:
    """Raise ConfigError for a loss that is not there, is no policy loss, or cannot go with the rest."""
    loss = loss_named(config.loss.name, config.loss.params)
    if loss.kind != "policy":
        raise ConfigError(
            f"'{config.loss.name}' is not a loss of a policy",
            got=f"a {loss.kind.replace('_', ' ')} loss",
            allowed=", ".join(sorted(name for name, other in LOSSES.items() if other.kind == "policy")),
            hint=sentence_of_value("loss.name", config.loss.name),
        )
    if config.loss.select not in loss.selects:
        raise ConfigError(
            f"loss '{config.loss.name}' looks at no advantage: which completions it trains on must say it all",
            got=f"loss.select = '{config.loss.select}'",
            allowed=" or ".join(f"loss.select = '{select}'" for select in loss.selects),
        )
    ratios = {"behaviour_logprobs", "proximal_logprobs"} & set(loss.requires)
    if ratios and config.generator.truncates and not config.generator.keep_sets:
        raise ConfigError(
            f"the ratios of loss '{config.loss.name}' would compare a policy over the whole vocabulary with samples "
            "from a part of it",
            got="generator.top_k, top_p or min_p without generator.keep_sets",
            allowed="generator.keep_sets = true (with generator.top_k = 1..512), or no cut",
            hint="losses without ratios, such as 'reinforce', may be trained on such samples as they are",
        )
    if loss.atom == "pair" and config.loss.advantages == "greedy_baseline":
        raise ConfigError(
            f"loss '{config.loss.name}' has no use for a baseline: a greedy completion would be sampled for nothing",
            got="loss.advantages = 'greedy_baseline'",
            allowed="any other",
        )
    if config.has_critic and config.critic.vtrace and "behaviour_logprobs" not in loss.requires:
        raise ConfigError(
            f"V-trace leaves the importance ratio of the action to the loss, and '{config.loss.name}' has none",
            got=f"critic.vtrace with loss.name = '{config.loss.name}'",
            allowed="a loss with ratios, e.g. 'aipo' or 'ppo'",
        )
    if config.kl.coef and config.kl.place == "reward" and "advantages" not in loss.requires:
        raise ConfigError(
            f"loss '{config.loss.name}' takes no advantages: a KL penalty in the reward would change nothing",
            got="kl.place = 'reward'",
            allowed="kl.place = 'loss' with kl.estimator = 'k2' or 'k3', or kl.coef = 0",
        )
    if config.kl.executor == "own" and "reference_logprobs" not in needed_columns(config):
        raise ConfigError(
            "an executor of the reference would compute what nobody takes",
            got=f"kl.executor = 'own' with kl.coef = 0 and loss.name = '{config.loss.name}'",
            allowed="kl.coef > 0, or a loss that compares with the reference, e.g. 'online_dpo'",
        )
    if loss.unit != "token" and config.loss.reduction != "token":
        raise ConfigError(
            f"loss '{config.loss.name}' is of whole completions: there are no tokens to reduce",
            got=f"loss.reduction = '{config.loss.reduction}'",
            allowed="the default",
        )
    if loss.unit != "token" and config.has_critic:
        raise ConfigError(
            f"loss '{config.loss.name}' is of whole completions, a critic's advantages are of tokens",
            got="loss.advantages = 'gae'",
            allowed="a token loss with it, e.g. 'ppo'",
        )


def make_generator(config: RunConfig, replica: int = 0) -> Generator:
    """The generator executor of the default pipeline."""
    return Generator(config=config, replica=replica)


def make_trainer(config: RunConfig, resume: str | None = None) -> Trainer:
    """The trainer executor, with the group buffers and collation beside it."""
    in_flight = (config.max_staleness + 1) * config.groups_per_step + config.reorder_window
    in_flight += config.schedule.queue_groups or 0
    new_buffer = partial(GroupBuffer, config.samples_per_group, max_groups=16 * in_flight + 1024)
    return Trainer(config=config, new_buffer=new_buffer, batching=collate, resume=resume)


def make_rewards(config: RunConfig, functions: Functions | None = None) -> Rewards:
    """The reward executor: the config's terms in sandboxed workers, the caller's `functions` in this process."""
    tasks = task_table(config.prompts.tasks)
    return Rewards(config=config.rewards, tasks=tasks, functions=functions, group_size=config.samples_per_group)


def make_reward_models(config: RunConfig) -> RewardModels:
    """The executor of `rewards.models`, behind the functions that score first."""
    return RewardModels(
        config.rewards,
        terms=config.rewards.terms,
        batching=collate,
        microbatch_tokens=config.trainer.microbatch_tokens,
        max_tokens=config.least_sequence,
    )


def make_reference(config: RunConfig, *, is_resumed: bool = False) -> ReferencePolicy:
    """The executor of the reference policy, behind all that scores."""
    return ReferencePolicy(config=config, batching=collate, is_resumed=is_resumed)


def nodes(
    config: RunConfig,
    *,
    functions: Functions | None = None,
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
        )

    ranks = config.generator.tensor_parallel
    device = config.generator.device if ranks > 1 else "cpu"  # a single rank needs no process group
    made = [
        node(f"generator-{replica}", make_generator, ranks=ranks, device=device, replica=replica)
        for replica in range(config.generator.replicas)
    ]
    if has_functions(config):
        made.append(
            Node(
                name="rewards",
                factory=make_rewards,
                kwargs={"config": config} | ({"functions": functions} if functions else {}),
                host="inline" if functions else config.host,  # functions of the caller's live in their process
                is_replaceable=True,
            )
        )
    if config.rewards.models:
        made.append(node("reward_models", make_reward_models, ranks=config.rewards.model_ranks))
    if config.kl.executor == "own":
        made.append(node("reference", make_reference, ranks=config.kl.ranks, is_resumed=resume is not None))
    checkpoint = None if resume is None else str(resume.resolve())
    trainer = config.trainer
    made.append(node("trainer", make_trainer, ranks=trainer.ranks, device=trainer.device, resume=checkpoint))
    return tuple(made)


def has_functions(config: RunConfig) -> bool:
    """Whether any function scores: reward models alone need no executor of functions."""
    return bool(config.rewards.terms) or not config.rewards.models


def has_workers(config: RunConfig) -> bool:
    """Whether any function runs in a sandboxed worker."""
    return any(not is_from_python(term) for term in config.rewards.terms)


def default_pipeline(
    config: RunConfig,
    *,
    functions: Functions | None = None,
    resume: Path | None = None,
    remote: Collection[str] = (),
) -> Pipeline:
    """generators -> rewards -> reward models -> reference -> trainer -> weights -> generators.

    Rewards, reward models and reference where there are any of their own.
    """
    made = nodes(config, functions=functions, resume=resume, remote=remote)
    replicas = [node for node in made if node.name.startswith("generator")]
    trainer = next(node for node in made if node.name == "trainer")
    leaders = trainer.members[:: config.trainer.tensor_parallel]  # of the data-parallel ranks: they get the rollouts
    deadline_s = config.deadline_s
    channels = [
        *_through_stations(config, made, leaders),
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
            weights(f"weights/{member}", "trainer.weights", f"{member}.weights", deadline_s=deadline_s)
            for node in replicas
            for member in node.members
        ),
    ]
    return Pipeline(made, tuple(channels), deadline_s=deadline_s)


STATIONS = {
    "rewards": ("completions", "rollouts"),
    "reward_models": ("completions", "scored"),
    "reference": ("rollouts", "measured"),
}
"""What completions go through on their way to the trainer, in this order: the ports by which they come and leave."""


def _through_stations(config: RunConfig, made: Sequence[Node], leaders: Sequence[str]) -> Iterator[ChannelSpec]:
    """The way of completions from generators, through each station that there is, to the trainer's `leaders`.

    Over the ranks of a station they are dealt one by one; from there they go to whoever is next, not by its rank 0.
    """
    node_named = {node.name: node for node in made}
    sources = [f"{node.name}.completions" for node in made if node.name.startswith("generator")]
    for name, (port_in, port_out) in STATIONS.items():
        if name in node_named:
            members = node_named[name].members
            yield from _dealt(config, sources, [f"{member}.{port_in}" for member in members], "rollouts/samples")
            sources = [f"{member}.{port_out}" for member in members]
    targets = [f"{leader}.rollouts" for leader in leaders]
    yield from _dealt(config, sources, targets, f"rollouts/{dealt_by(config.loss)}")


def _dealt(config: RunConfig, sources: Sequence[str], targets: Sequence[str], route: str) -> Iterator[ChannelSpec]:
    """Channels from each of `sources` to all `targets`, of which `route` chooses one for each message."""
    for source in sources:
        executor, port = source.split(".")
        yield from scatter(f"{port}/{executor}", source, targets, route, deadline_s=config.deadline_s)


def build_work(config: RunConfig, *, is_resumed: bool = False) -> tuple[Work, PromptSet]:
    """Prompts, held-out prompts and the demonstrations of the warm start."""
    tokenizer = build_tokenizer(config.model)
    prompts = build_prompts(config, tokenizer)
    warm_start = None
    if config.warm_start.steps and not is_resumed:
        pairs = demonstrations(config.warm_start, prompts.train.prompts, tokenizer, seed=config.seed)
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
    return Work(prompt_of=prompts.train.prompt, held_out=tuple(prompts.eval), warm_start=warm_start), prompts
