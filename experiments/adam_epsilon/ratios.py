"""The ten statistics that N compares two formulations of Adam by, after some epochs of PPO on one batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.stylistic_details.runs import RECIPE
from slipstream.batching import collate as batching
from slipstream.core.config import RunConfig
from slipstream.core.recipes import resolve
from slipstream.core.types import Group
from slipstream.evals.sampling import sample_completions
from slipstream.evals.scoring import score_by
from slipstream.prompts import build_prompts
from slipstream.trainer.batch import train_sequence
from slipstream.trainer.measure import Auxiliary, LogprobReader, measure
from slipstream.trainer.policy import Policy
from slipstream.trainer.records import TokenSample
from slipstream.trainer.step import train_on_batch

TRAIN_STREAM = 0


def ratio_statistics(
    new_logprobs: np.ndarray, old_logprobs: np.ndarray, advantages: np.ndarray, *, clip: float
) -> dict[str, float]:
    """N's ten numbers over tokens, float64 [T] each: `new_logprobs` after training, `old_logprobs` before it.

        d = new - old,   r = exp(d),   approxkl = mean(d^2) / 2,   clipfrac = mean(-A clip(r, 1 +- eps) > -A r)

    Variances are over n. Identity: equal logprobs give ratios of 1 and zeros elsewhere.
    """
    difference = new_logprobs.astype(np.float64) - old_logprobs.astype(np.float64)
    ratio = np.exp(difference)
    clipped = np.clip(ratio, 1 - clip, 1 + clip)
    return {
        "policy/approxkl": float(0.5 * np.mean(difference**2)),
        "policy/clipfrac": float(np.mean(-advantages * clipped > -advantages * ratio)),
        "ratio_mean": float(ratio.mean()),
        "ratio_var": float(ratio.var()),
        "ratio_max": float(ratio.max()),
        "ratio_min": float(ratio.min()),
        "logprob_diff_mean": float(difference.mean()),
        "logprob_diff_var": float(difference.var()),
        "logprob_diff_max": float(difference.max()),
        "logprob_diff_min": float(difference.min()),
    }


def batch_config(*, policy: str, reward_model: str, adam: str, epochs: int, completions: int, seed: int) -> RunConfig:
    """The recipe's step for one batch: PPO with a value head, both whitenings and KL, by `adam`."""
    return resolve(
        RECIPE,
        {
            "seed": seed,
            "host": "inline",
            "stages": ["rl"],
            "groups_per_step": completions,
            "model": {"path": policy},
            "kl": {"reference": policy},
            "rewards": {"models": [{"path": reward_model}]},
            "trainer": {"epochs": epochs, "optimizer": {"adam": adam}},
            "critic": {"optimizer": {"adam": adam}},
        },
    )


def sampled_groups(config: RunConfig, policy: Policy) -> list[Group]:
    """A scored completion each of the first training prompts: a batch as the run's first step has it."""
    prompts = build_prompts(config, policy.tokenizer).train.prompts[: config.groups_per_step]
    completions = sample_completions(
        config,
        policy.model,
        policy.tokenizer,
        list(prompts),
        temperature=config.generator.temperature,
        num_slots=config.generator.rows,
        stream=TRAIN_STREAM,
    )
    rollouts = score_by(config, config.rewards, completions)
    return [Group(ordinal=rollout.ordinal, rollouts=(rollout,)) for rollout in rollouts]


def after_epochs(
    *, policy: str, reward_model: str, adams: Sequence[str], epochs: Sequence[int], completions: int, seed: int
) -> dict[str, Any]:
    """adam -> number of epochs -> the statistics on the batch trained on; `weights` has what epsilon meets.

    Each number of epochs begins anew from `policy`, with the same batch. `small_share` of the weights have a root of
    the second moment below epsilon after the first update: TensorFlow's Adam moves those less than half as far.
    """
    batch: list[Group] | None = None
    found: dict[str, Any] = {}
    for adam in adams:
        found[adam] = {}
        for count in epochs:
            config = batch_config(
                policy=policy,
                reward_model=reward_model,
                adam=adam,
                epochs=count,
                completions=completions,
                seed=seed,
            )
            trained = Policy(config)
            batch = sampled_groups(config, trained) if batch is None else batch
            tokens = TokenSample(every=1)
            train_on_batch(
                trained.model,
                trained.optimizer,
                batch,
                config=config,
                step=0,
                batching=batching,
                auxiliary=Auxiliary(trained.reference(policy), trained.new_critic()),
                tokens=tokens,
            )
            found[adam][str(count)] = ratio_statistics(
                *_columns(config, trained, batch, tokens), clip=float(config.loss.params["eps_high"])
            )
            if count == 1:
                found["weights"] = weights_below(trained, config.trainer.optimizer.eps)
    return found


def _columns(
    config: RunConfig, trained: Policy, batch: Sequence[Group], tokens: TokenSample
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """New and old logprobs and advantages of all tokens; the old ones are the policy's before its first update."""
    read = LogprobReader(trained.model, config.logprob_temperature)
    sequences = [train_sequence(rollout.completion) for group in batch for rollout in group.rollouts]
    new = measure(read, sequences, microbatch_tokens=config.trainer.microbatch_tokens, batching=batching)
    keys = [sequence.key for sequence in sequences]
    old = np.concatenate([tokens.trained[key][0] for key in keys])
    advantages = np.concatenate([tokens.trained[key][1] for key in keys])
    return np.concatenate([new[key] for key in keys]), old, advantages


def weights_below(trained: Policy, eps: float) -> dict[str, float]:
    """Of the optimizer's second moments: how many roots lie below `eps`, the middle one, and how many there are."""
    roots = torch.cat([view.flatten() for view in trained.optimizer.named_moments()["exp_avg_sq"].values()]).sqrt()
    return {
        "count": float(roots.numel()),
        "small_share": float((roots < eps).double().mean()),
        "median_root": float(roots.median()),
    }


def published() -> dict[str, Mapping[str, float]]:
    """N's table: OpenAI's TF1 Adam, PyTorch's Adam, the reproduction's Adam in TensorFlow's form; GPT-2, 124M."""
    names = tuple(ratio_statistics(np.zeros(1), np.zeros(1), np.zeros(1), clip=0.2))
    columns = {
        "TF1, original": (0.00037167023, 0.0045572915, 1.0051285, 0.0007716546, 1.227216, 0.7400441),
        "torch": (0.0023672834504395723, 0.02018229104578495, 1.0105520486831665, 0.005374275613576174)
        + (1.8121057748794556, 0.4011387825012207),
        "tensorflow": (0.000374998344341293, 0.0052083334885537624, 1.0044583082199097, 0.0007942612282931805)
        + (1.250215768814087, 0.7299948930740356),
    }
    differences = {
        "TF1, original": (0.0047487603, 0.0007207897, 0.20474821, -0.30104542),
        "torch": (0.008101251907646656, 0.004668936599045992, 0.594489574432373, -0.9134478569030762),
        "tensorflow": (0.004073789343237877, 0.0007334011606872082, 0.22331619262695312, -0.31471776962280273),
    }
    return {name: dict(zip(names, columns[name] + differences[name], strict=True)) for name in columns}


def excess(by_adam: Mapping[str, Mapping[str, float]], name: str) -> float:
    """How many times PyTorch's number is TensorFlow's; inf where the latter is 0, NaN where both are."""
    torch_value, tensorflow_value = by_adam["torch"][name], by_adam["tensorflow"][name]
    if tensorflow_value:
        return torch_value / tensorflow_value
    return math.inf if torch_value else math.nan


def checkpoint(run: Path) -> str:
    """The SFT policy of a run."""
    return str(run / "sft" / "model")
