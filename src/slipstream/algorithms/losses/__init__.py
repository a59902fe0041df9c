"""Losses by name: one file each, one table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from slipstream.algorithms.losses.aipo import aipo_loss, aipo_masked_loss
from slipstream.algorithms.losses.best_of_n import best_of_n_loss
from slipstream.algorithms.losses.bradley_terry import bradley_terry_loss
from slipstream.algorithms.losses.choice import choice_loss
from slipstream.algorithms.losses.cispo import cispo_loss
from slipstream.algorithms.losses.copg import copg_loss
from slipstream.algorithms.losses.decoupled_ppo import decoupled_ppo_loss
from slipstream.algorithms.losses.grpo import grpo_loss
from slipstream.algorithms.losses.gspo import gspo_loss
from slipstream.algorithms.losses.online_dpo import online_dpo_loss, online_ipo_loss
from slipstream.algorithms.losses.ppo import ppo_loss
from slipstream.algorithms.losses.proximal_rloo import proximal_rloo_loss
from slipstream.algorithms.losses.rating import rating_loss
from slipstream.algorithms.losses.reinforce import reinforce_loss
from slipstream.algorithms.losses.rloo import rloo_loss
from slipstream.algorithms.losses.sft import sft_loss
from slipstream.algorithms.losses.spec import Atom, InputName, Kind, Loss, LossInputs, Unit
from slipstream.algorithms.losses.value import value_loss
from slipstream.algorithms.reduce import Reduction
from slipstream.core.errors import ConfigError, did_you_mean
from slipstream.core.other_names import sentence_of_value

__all__ = ["LOSSES", "Atom", "InputName", "Kind", "Loss", "LossInputs", "Reduction", "Unit", "loss_named"]

_POLICY: tuple[InputName, ...] = ("policy_logprobs", "advantages")
_OFF_POLICY: tuple[InputName, ...] = (*_POLICY, "behaviour_logprobs")
_PAIRED: tuple[InputName, ...] = ("policy_logprobs", "reference_logprobs")
_MODES = ("truncate", "mask")

LOSSES: dict[str, Loss] = {
    "reinforce": Loss(reinforce_loss, "token", _POLICY),
    "ppo": Loss(
        ppo_loss,
        "token",
        _OFF_POLICY,
        {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": math.inf},
        above={"dual_clip": 1.0},  # at 1 or less, tokens of negative advantage would have no gradient on-policy
    ),
    "grpo": Loss(grpo_loss, "token", _OFF_POLICY, {"eps_low": 0.2, "eps_high": 0.28}),
    "cispo": Loss(cispo_loss, "token", _OFF_POLICY, {"eps_low": math.inf, "eps_high": 4.0}),
    "gspo": Loss(gspo_loss, "sequence", _OFF_POLICY, {"eps_low": 3e-4, "eps_high": 4e-4}),
    "aipo": Loss(
        aipo_loss,
        "token",
        _OFF_POLICY,
        {"max_ratio": 4.0, "level": "token", "mode": "truncate", "eps_low": math.inf, "eps_high": math.inf},
        choices={"level": ("token", "sequence", "geometric"), "mode": _MODES},
    ),
    "aipo_masked": Loss(aipo_masked_loss, "token", _OFF_POLICY, {"max_ratio": 4.0}),
    "rloo": Loss(rloo_loss, "sequence", _POLICY),
    "proximal_rloo": Loss(proximal_rloo_loss, "sequence", _OFF_POLICY, {"eps": 0.2}),
    "copg": Loss(copg_loss, "sequence", _OFF_POLICY),
    "online_dpo": Loss(online_dpo_loss, "pair", _PAIRED, {"beta": 0.1}, selects=("best_and_worst",)),
    "online_ipo": Loss(online_ipo_loss, "pair", _PAIRED, {"beta": 0.1}, selects=("best_and_worst",)),
    "best_of_n": Loss(best_of_n_loss, "sequence", ("policy_logprobs",), selects=("best",)),
    "decoupled_ppo": Loss(
        decoupled_ppo_loss,
        "token",
        (*_OFF_POLICY, "proximal_logprobs"),
        {"eps_low": 0.2, "eps_high": 0.2, "max_ratio": 5.0, "mode": "truncate"},
        choices={"mode": _MODES},
    ),
    "value": Loss(value_loss, "token", ("values", "anchor_values", "returns"), {"clip": 0.2}, kind="value"),
    "sft": Loss(sft_loss, "token", ("policy_logprobs",), kind="supervised"),
    "bradley_terry": Loss(bradley_terry_loss, "pair", ("scores",), kind="reward_model"),
    "choice": Loss(choice_loss, "choice", ("scores", "labels"), {"num_candidates": 4}, kind="reward_model"),
    "rating": Loss(rating_loss, "sequence", ("scores", "ratings"), kind="reward_model"),
}


def loss_named(name: str, params: Mapping[str, float | str]) -> Loss:
    """Return the loss `name` with its constants set to `params`, defaults elsewhere; built once.

    Numbers exceed the loss's `above`, 0 by default (inf is allowed), words are one of its `choices`. ConfigError on
    anything else, and on an unknown name or parameter with the nearest known one.
    """
    return _built(name, tuple(params.items()))


@cache
def _built(name: str, params: tuple[tuple[str, float | str], ...]) -> Loss:
    if name not in LOSSES:
        policies = sorted(known for known, loss in LOSSES.items() if loss.kind == "policy")
        hint = sentence_of_value("loss.name", name) or did_you_mean(name, policies)
        raise ConfigError(f"unknown loss '{name}'", got=name, allowed=", ".join(policies), hint=hint)
    loss = LOSSES[name]
    for param, value in params:
        if param not in loss.params:
            raise ConfigError(
                f"loss '{name}' has no parameter '{param}'",
                got=param,
                allowed=", ".join(sorted(loss.params)) or "none",
                hint=did_you_mean(param, loss.params),
            )
        if param in loss.choices:
            if value not in loss.choices[param]:
                raise ConfigError(
                    f"loss '{name}' knows no {param} '{value}'",
                    got=value,
                    allowed=", ".join(loss.choices[param]),
                    hint=did_you_mean(str(value), loss.choices[param]),
                )
        elif isinstance(value, str) or not value > loss.above.get(param, 0.0):
            raise ConfigError(
                f"parameter '{param}' of loss '{name}' is out of range",
                got=value,
                allowed=f"number > {loss.above.get(param, 0.0):g}",
            )
    return replace(loss, params={**loss.params, **dict(params)})
