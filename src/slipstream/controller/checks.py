"""Checks of a configuration that need what several nodes know; what one alone knows, it checks itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from slipstream.algorithms.losses import LOSSES, loss_named
from slipstream.algorithms.losses.table import Loss
from slipstream.controller.placement import check_processes, check_remote, computing_groups
from slipstream.core.config import RunConfig, stage_of
from slipstream.core.errors import ConfigError
from slipstream.core.other_names import sentence_of_value
from slipstream.generator.device import check_device
from slipstream.generator.vllm.backend import check_vllm
from slipstream.models.build import build_tokenizer, check_division
from slipstream.models.device import check_gpus
from slipstream.models.foreign_text import rehearse_tokenizer
from slipstream.models.hub import check_model_path
from slipstream.models.preflight import Head, check_checkpoint, check_policy
from slipstream.models.sizes import check_sizes
from slipstream.models.tokenizer import has_tokenizer, load_tokenizer
from slipstream.prompts import task_table
from slipstream.rewards.checks import check_rewards
from slipstream.rewards.given import is_from_python
from slipstream.trainer.measure import needed_columns


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
    _check_beside(config, loss)


def _check_beside(config: RunConfig, loss: Loss) -> None:
    """Raise ConfigError where `loss` cannot go with the critic, the reference or the reduction."""
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


def has_functions(config: RunConfig) -> bool:
    """Whether any function scores: reward models alone need no executor of functions."""
    return bool(config.rewards.terms) or not config.rewards.models


def has_workers(config: RunConfig) -> bool:
    """Whether any function runs in a sandboxed worker."""
    return any(not is_from_python(term) for term in config.rewards.terms)
