"""Checks of `[loss]` beside the rest of a configuration, and the columns that a loss takes; without torch."""

from __future__ import annotations

import math

from slipstream.algorithms.losses import LOSSES, loss_named
from slipstream.algorithms.losses.table import Loss
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.other_names import sentence_of_value

PROPORTIONAL = ("reinforce", "cispo", "aipo", "aipo_masked", "rloo", "copg")
"""Losses whose gradient is the advantage times something that does not depend on it (`aipo` without PPO's clip)."""


def needed_columns(config: RunConfig) -> tuple[str, ...]:
    """Return the columns to measure on a batch before its first update, for its loss, its penalty and its critic."""
    requires = loss_named(config.loss.name, config.loss.params).requires
    is_needed = {
        "behaviour_logprobs": config.rereads_behaviour,
        "reference_logprobs": "reference_logprobs" in requires or config.kl.coef > 0,
        "proximal_logprobs": "proximal_logprobs" in requires or (config.has_critic and config.critic.vtrace),
        "values": config.has_critic,
    }
    return tuple(name for name, needed in is_needed.items() if needed)


def needs_reference(config: RunConfig) -> bool:
    """Tell whether RL compares the policy with a reference."""
    return "reference_logprobs" in needed_columns(config)


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
    if loss.atom == "choice":
        what = f"loss '{config.loss.name}' compares candidates that people have chosen from, which RL has none of"
        raise ConfigError(what, got="unit 'choice'", allowed="a loss of tokens, sequences or pairs")
    selects = [one for one in loss.selects if loss.atom != "pair" or one == "best_and_worst"]
    if config.loss.select not in selects:
        what = f"loss '{config.loss.name}' looks at no advantage: which completions it trains on must say it all"
        got = f"loss.select = '{config.loss.select}'"
        raise ConfigError(what, got=got, allowed=" or ".join(f"loss.select = '{select}'" for select in selects))
    takers = [f"loss '{config.loss.name}'"] * bool({"behaviour_logprobs", "proximal_logprobs"} & set(loss.requires))
    takers += ["trainer.ess_scaling"] * (config.trainer.ess_scaling != "no")
    takers += ["kl.corrected"] * (config.kl.corrected and config.kl.coef > 0)
    if takers and config.generator.truncates and not config.generator.keep_sets:
        raise ConfigError(
            f"the ratios of {takers[0]} would compare a policy over the whole vocabulary with samples from a part "
            "of it",
            got="generator.top_k, top_p or min_p without generator.keep_sets",
            allowed="generator.keep_sets = true (with generator.top_k = 1..512), or no cut",
            hint="losses without ratios, such as 'reinforce', may be trained on such samples as they are",
        )
    if loss.atom == "pair" and config.loss.advantages == "greedy_baseline":
        what = f"loss '{config.loss.name}' has no use for a baseline: a greedy completion would be sampled for nothing"
        raise ConfigError(what, got="loss.advantages = 'greedy_baseline'", allowed="any other")
    _check_teacher(config, loss)
    _check_beside(config, loss)
    if config.loss.baseline == "min_variance":
        _check_min_variance(config, loss)
    if ":" in config.loss.name:
        from slipstream.algorithms.losses.trial import try_loss

        carried = {"reference_logprobs", "proximal_logprobs"} & set(needed_columns(config))
        carried |= {"teacher_divergences"} if config.teacher.path is not None else set()
        try_loss(loss, config.loss.name, carried, reduction=config.loss.reduction)


def _check_teacher(config: RunConfig, loss: Loss) -> None:
    """Raise ConfigError for a teacher without a loss that learns from it, or the reverse."""
    teacher, name = config.teacher, config.loss.name
    is_alone = "teacher_divergences" in loss.requires  # without teacher.coef
    if teacher.path is None and (is_alone or teacher.given):
        raise ConfigError(
            "there is no teacher to learn from",
            got=f"loss.name = '{name}' without teacher.path" if is_alone else f"{', '.join(teacher.given)} alone",
            allowed="teacher.path = a folder, the id of a model on the hub, or 'stage:sft'",
        )
    if teacher.path is not None and is_alone == bool(teacher.coef):
        raise ConfigError(
            "the divergence would be counted twice" if is_alone else "nothing is learned from the teacher",
            got=f"teacher.coef = {teacher.coef:g} with loss.name = '{name}'",
            allowed="loss.name = 'distill' with teacher.coef = 0, or another loss with teacher.coef > 0",
        )
    if is_alone and "advantages" not in loss.requires and config.loss.advantages in ("gae", "greedy_baseline"):
        what = f"loss '{name}' takes no advantages: a critic, or a greedy completion, would be computed for nothing"
        raise ConfigError(what, got=f"loss.advantages = '{config.loss.advantages}'", allowed="any other")


def _check_beside(config: RunConfig, loss: Loss) -> None:
    """Raise ConfigError where `loss` cannot go with the critic, the reference or the reduction."""
    if loss.advantages and (config.loss.advantages not in loss.advantages or config.loss.whiten_advantages != "no"):
        raise ConfigError(
            f"loss '{config.loss.name}' is fitted to the advantages themselves, in units of reward",
            got=f"loss.advantages = '{config.loss.advantages}', whiten_advantages = '{config.loss.whiten_advantages}'",
            allowed=" or ".join(f"loss.advantages = '{name}'" for name in loss.advantages) + ", not whitened",
        )
    if config.has_critic and config.critic.vtrace and "behaviour_logprobs" not in loss.requires:
        what = f"V-trace leaves the importance ratio of the action to the loss, and '{config.loss.name}' has none"
        got = f"critic.vtrace with loss.name = '{config.loss.name}'"
        raise ConfigError(what, got=got, allowed="a loss with ratios, e.g. 'aipo' or 'ppo'")
    if config.kl.coef and config.kl.place == "reward" and "advantages" not in loss.requires:
        what = f"loss '{config.loss.name}' takes no advantages: a KL penalty in the reward would change nothing"
        allowed = "kl.place = 'loss' with kl.estimator = 'k2' or 'k3', or kl.coef = 0"
        raise ConfigError(what, got="kl.place = 'reward'", allowed=allowed)
    if config.kl.sync_every is not None and "reference_logprobs" not in needed_columns(config):
        raise ConfigError(
            "nothing compares the policy with the reference that is to follow it",
            got=f"kl.sync_every = {config.kl.sync_every} with kl.coef = 0 and loss.name = '{config.loss.name}'",
            allowed="kl.coef > 0, or a loss that compares with the reference, e.g. 'online_dpo'",
        )
    if config.kl.executor == "own" and "reference_logprobs" not in needed_columns(config):
        got = f"kl.executor = 'own' with kl.coef = 0 and loss.name = '{config.loss.name}'"
        allowed = "kl.coef > 0, or a loss that compares with the reference, e.g. 'online_dpo'"
        raise ConfigError("an executor of the reference would compute what nobody takes", got=got, allowed=allowed)
    if loss.unit != "token" and config.loss.reduction != "token":
        what = f"loss '{config.loss.name}' is of whole completions: there are no tokens to reduce"
        raise ConfigError(what, got=f"loss.reduction = '{config.loss.reduction}'", allowed="the default")
    if config.loss.credit == "turn" and (loss.unit != "token" or "advantages" not in loss.requires):
        raise ConfigError(
            f"loss '{config.loss.name}' is of whole completions, or takes no advantages: turns have none of their own",
            got="loss.credit = 'turn'",
            allowed="a token loss with it, e.g. 'aipo' or 'grpo'",
        )
    if loss.unit != "token" and config.has_critic:
        what = f"loss '{config.loss.name}' is of whole completions, a critic's advantages are of tokens"
        raise ConfigError(what, got="loss.advantages = 'gae'", allowed="a token loss with it, e.g. 'ppo'")


def _check_min_variance(config: RunConfig, loss: Loss) -> None:
    """Raise ConfigError where a completion's gradient is not its advantage times the one at advantage 1."""
    section, clips = config.loss, [loss.params.get(f"eps_{side}", math.inf) for side in ("low", "high")]
    is_clipped = section.name == "aipo" and any(one != math.inf for one in clips)
    wrong = {
        f"loss.name = '{section.name}'" + " with eps_low or eps_high" * is_clipped: is_clipped
        or section.name not in PROPORTIONAL,
        f"loss.advantages = '{section.advantages}'": section.advantages not in ("group_mean", "group_normalised"),
        f"loss.whiten_advantages = '{section.whiten_advantages}'": section.whiten_advantages != "no",
        "loss.credit = 'turn'": section.credit == "turn",
        f"loss.select = '{section.select}'": section.select != "all",
        "loss.entropy_coef > 0": section.entropy_coef > 0,
        "kl.place = 'loss'": config.kl.coef > 0 and config.kl.place == "loss",
        "teacher.coef > 0": config.teacher.coef > 0,
    }
    if got := [one for one, is_wrong in wrong.items() if is_wrong]:
        raise ConfigError(
            "a baseline of least variance needs gradients that are proportional to one advantage per completion",
            got=f"loss.baseline = 'min_variance' with {', '.join(got)}",
            allowed=f"{', '.join(PROPORTIONAL)} (aipo without eps_low and eps_high); advantages = 'group_mean' or "
            "'group_normalised', not whitened, of whole episodes, all trained on; nothing else in the loss",
            hint="a KL penalty may be in the reward: kl.place = 'reward'",
        )
