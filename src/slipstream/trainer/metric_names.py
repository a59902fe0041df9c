"""Our metrics under the names that PPO's implementations for RLHF publish, so that curves lie over each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from slipstream.algorithms.losses.spec import RATIO_SHARE
from slipstream.core.types import Group

SAME: dict[str, tuple[str, ...]] = {
    "kl_reference_sum": ("objective/kl",),
    "kl_coef": ("objective/kl_coef",),
    "behaviour_surprisal_sum": ("objective/entropy",),
    "loss": ("ppo/loss/policy", "ppo/loss/policy_avg"),
    "value_loss": ("ppo/loss/value", "ppo/loss/value_avg"),
    "entropy": ("ppo/policy/entropy", "ppo/policy/entropy_avg"),
    "kl_k2": ("ppo/policy/approxkl", "ppo/policy/approxkl_avg"),
    "clipped_frac": ("ppo/policy/clipfrac", "ppo/policy/clipfrac_avg"),
    "return": ("ppo/returns/mean",),
    "value": ("ppo/val/vpred",),
    "value_error": ("ppo/val/error",),
    "value_clipped_frac": ("ppo/val/clipfrac", "ppo/val/clipfrac_avg"),
    "value_before_mean": ("ppo/val/mean",),
    "explained_variance": ("ppo/val/var_explained",),
    "ratio": ("ppo/val/ratio",),
    "advantage_mean": ("ppo/val/advantage",),
    "lr": ("ppo/lr",),
}
"""Ours -> theirs, for what both have. `_avg` are those of the reproduction: ours are means over a step's updates."""


def published_names(
    metrics: Mapping[str, float],
    *,
    value_coef: float,
    step: int,
    num_episodes: int,
    max_new_tokens: int,
    num_eos_tokens: int,
) -> dict[str, float]:
    """Return those of `metrics` that the original RLHF code and its reproduction log, under their names.

    OpenAI's lm-human-preferences (objective/*, ppo/*, elapsed/*) and lm-human-preference-details, N's own code, whose
    are the names with `_avg`, ppo/val/{ratio, advantage, num_eos_tokens, ratio_hist} and ppo/{lr, episode}.
    `num_episodes` counts the completions up to now, `num_eos_tokens` the EOS tokens of this batch.

        objective/score_total = objective/score + objective/non_score_reward
        objective/non_score_reward = -kl_coef * kl, or 0 where the penalty is not in the reward
        elapsed/steps/serial = updates * max_new_tokens,   elapsed/steps/total = episodes * max_new_tokens

    kl is the sum over a completion and the mean over completions, of the policy that sampled; approxkl, ratio and
    clipfrac are measured against it, too. A name is absent where we have no such number (objective/kl without a
    penalty). `controller/tally.py` adds what depends on the run's clock; docs/ppo_details.md lists all names, and those
    that are left out.
    """
    published = {name: metrics[ours] for ours, names in SAME.items() if ours in metrics for name in names}
    published |= {
        f"ppo/val/ratio_hist/{name.removeprefix(RATIO_SHARE)}": share
        for name, share in metrics.items()
        if name.startswith(RATIO_SHARE)
    }
    published |= {
        "objective/score": metrics["score_mean"],
        "objective/scores": metrics["score_mean"],
        "ppo/episode": float(num_episodes),
        "ppo/val/num_eos_tokens": float(num_eos_tokens),
        "elapsed/updates": float(step + 1),
        "elapsed/episodes": float(num_episodes),
        "elapsed/steps/serial": float((step + 1) * max_new_tokens),
        "elapsed/steps/total": float(num_episodes * max_new_tokens),
    }
    penalty = metrics.get("kl_penalty", 0.0)
    published |= {
        "objective/non_score_reward": -penalty,
        "objective/score_total": metrics["score_mean"] - penalty,
    }
    if "value_loss" not in metrics:  # nothing was trained
        return published
    if "ratio_squared" in metrics and "ratio" in metrics:  # a loss of one's own may have no metrics
        published["ppo/val/ratio_var"] = metrics["ratio_squared"] - metrics["ratio"] ** 2
    return published | {
        "ppo/loss/total": metrics["loss"] + value_coef * metrics["value_loss"],
        "ppo/returns/var": metrics["return_squared"] - metrics["return"] ** 2,
        "ppo/val/var": metrics["value_before_std"] ** 2,
        "ppo/val/advantage_var": metrics["advantage_std"] ** 2,
    }


def count_tokens(groups: Iterable[Group], token_ids: Iterable[int]) -> int:
    """Count the tokens of all completions that are among `token_ids`, without the contexts of further branches."""
    wanted = list(token_ids)
    return sum(
        int(np.isin(segment.tokens, wanted).sum())
        for group in groups
        for rollout in group.rollouts
        for segment in rollout.completion.segments
        if not segment.begins
    )


def reward_model_names(*, loss: float, accuracy: float, chosen: float, rejected: float, lr: float) -> dict[str, float]:
    """Name an update of the reward model as lm-human-preference-details and the TL;DR reproduction do."""
    shared = {"loss": loss, "accuracy": accuracy, "lr": lr}
    both = {f"{prefix}/{name}": value for prefix in ("train", "train/rm") for name, value in shared.items()}
    return both | {"train/rm/chosen_rewards": chosen, "train/rm/rejected_rewards": rejected}


def sft_names(*, loss: float, lr: float) -> dict[str, float]:
    """Name an update of supervised fine-tuning as the TL;DR reproduction does."""
    return {"train/sft/loss": loss, "train/sft/lr": lr}


def dpo_names(accuracy: float, margin: float, chosen: float, rejected: float) -> dict[str, float]:
    """Name an update of the stage `dpo` as TRL's trainers of preferences do."""
    return {
        "rewards/accuracies": accuracy,
        "rewards/margins": margin,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
    }
