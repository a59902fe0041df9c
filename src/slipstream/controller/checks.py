"""Checks of a configuration that need what several nodes know; what one alone knows, it checks itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from slipstream.controller.placement import check_processes, check_remote, computing_groups
from slipstream.core.config import RunConfig, stage_of
from slipstream.core.errors import ConfigError
from slipstream.environments.checks import Given, check_environments
from slipstream.generator.device import check_device
from slipstream.generator.vllm.backend import check_vllm
from slipstream.models.build import build_tokenizer, check_division
from slipstream.models.device import check_gpus
from slipstream.models.foreign_text import rehearse_tokenizer
from slipstream.models.hub import check_model_path, has_checkpoint
from slipstream.models.peft import tokenizer_folder
from slipstream.models.preflight import Head, check_checkpoint, check_policy
from slipstream.models.sizes import check_sizes
from slipstream.models.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from slipstream.prompts import task_table
from slipstream.rewards.checks import check_rewards
from slipstream.rewards.given import is_from_python
from slipstream.trainer.loss_checks import check_loss, needed_columns


def check(
    config: RunConfig,
    *,
    given: Collection[str] = (),
    environments: Given | None = None,
    remote: Collection[str] = (),
) -> None:
    """Raise ConfigError for what the schema cannot see: models, losses, tasks, rewards and GPUs that are not there.

    `given` are the names of the reward functions that were handed over from Python, `environments` what was besides.
    What `remote` groups compute on is on their machines, where they look for it themselves.
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
    check_environments(config, environments)
    if config.needs_functions:
        check_rewards(config.rewards, task_table(config.prompts.tasks), given)


def check_room(config: RunConfig, *, remote: Collection[str] = ()) -> None:
    """Raise ConfigError where memory has no room for the longest prompt, which is known once all have been read."""
    here = computing_groups(config) - set(remote)
    if "generator" in here:
        check_vllm(config)
    check_sizes(config, check_policy(config), here)


Reader = tuple[str, str | None, Head]
"""A model that reads the policy's tokens, in words; its checkpoint (None: the policy's own); the kind of its head."""


def readers(config: RunConfig) -> list[Reader]:
    """Return the models that read the policy's tokens during RL."""
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
        if not has_checkpoint(path):
            raise ConfigError(f"there is no {what}", got=path, allowed="a folder with config.json")
        vocab_size = check_checkpoint(path, head).vocab_size
        tokens = tokenizer_folder(path)
        if has_tokenizer(tokens):
            rehearse_tokenizer(tokens)
        if has_tokenizer(tokens) and not vocabulary <= load_tokenizer(tokens).get_vocab().items():
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


def policy_tokenizer(config: RunConfig) -> Tokenizer:
    """The run's tokenizer, also before the stage `sft` has handed it on."""
    is_of_sft = stage_of(config.model.path) == "sft"
    path = config.sft.path if is_of_sft else config.model.path
    return build_tokenizer(config.model.model_copy(update={"path": path}))


def has_functions(config: RunConfig) -> bool:
    """Whether any function scores, or an environment: reward models alone need no executor of functions."""
    return bool(config.rewards.terms) or not config.rewards.models or config.environment.is_set


def has_workers(config: RunConfig) -> bool:
    """Whether any function runs in a sandboxed worker."""
    return any(not is_from_python(term) for term in config.rewards.terms)
