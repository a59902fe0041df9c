"""What of losses, penalties, selection and critics cannot go together, said before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.trainer.loss_checks import check_loss

BASE: dict[str, Any] = {"prompts": {"tasks": [{"name": "spell_backward"}]}}
TERMS = [{"function": "task"}, {"function": "length", "params": {"target_tokens": 4}}]
GDPO = {"several_rewards": "normalise_then_sum"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"completions_per_group": 1}, "at least two completions"),
        ({"completions_per_group": 1, "loss": {"advantages": "gae", "select": "best_and_worst"}}, "at least two"),
        ({"loss": GDPO | {"advantages": "leave_one_out"}}, "another estimator"),
        ({"loss": GDPO | {"truncated": "penalty"}}, "no sum"),
        ({"loss": GDPO, "kl": {"coef": 0.1}}, "no sum"),
        ({"loss": GDPO, "rewards": {"terms": [TERMS[0], TERMS[1] | {"at_least": 0.0}]}}, "no sum"),
        ({"kl": {"coef": 0.1, "place": "loss"}}, "gradient of k1"),
        ({"kl": {"target": 6.0}}, "needs a start"),
        ({"kl": {"coef": 0.1, "target": 6.0, "horizon": 25.0}}, "whole KL coefficient"),
        ({"generator": {"stop_at_eos": False}, "loss": {"truncated": "mask"}}, "none can end"),
        ({"loss": {"name": "gpro"}}, "unknown loss"),
        ({"loss": {"name": "bradley_terry"}}, "not a loss of a policy"),
        ({"loss": {"name": "online_dpo"}}, "say it all"),
        ({"loss": {"name": "best_of_n"}}, "say it all"),
        ({"loss": {"name": "best_of_n", "select": "best_and_worst"}}, "say it all"),
        (
            {"loss": {"name": "online_dpo", "select": "best_and_worst", "advantages": "greedy_baseline"}},
            "for nothing",
        ),
        ({"loss": {"name": "reinforce", "advantages": "gae"}, "critic": {"vtrace": True}}, "ratio of the action"),
        ({"loss": {"name": "ppo", "params": {"dual_clip": 1.0}}}, "out of range"),
        ({"loss": {"truncated": "subtract"}}, "lose by it"),
        ({"loss": {"name": "rloo", "reduction": "sequence"}}, "no tokens to reduce"),
        ({"loss": {"name": "rloo", "advantages": "gae"}}, "a critic's advantages are of tokens"),
        ({"loss": {"name": "online_dpo", "select": "best_and_worst"}, "kl": {"coef": 0.1}}, "change nothing"),
        ({"loss": {"name": "best_of_n", "select": "best"}, "kl": {"coef": 0.1}}, "change nothing"),
        ({"generator": {"top_k": 8}}, "ratios of loss 'aipo'"),
        ({"generator": {"top_p": 0.9}, "loss": {"name": "ppo"}}, "ratios of loss 'ppo'"),
        ({"generator": {"min_p": 0.05}, "loss": {"name": "decoupled_ppo"}}, "ratios of loss"),
        ({"loss": {"name": "oapl"}}, "in units of reward"),
        ({"loss": {"name": "oapl", "advantages": "optimal", "whiten_advantages": "batch"}}, "in units of reward"),
        ({"completions_per_group": 1, "loss": {"advantages": "optimal"}}, "at least two completions"),
        ({"generator": {"top_k": 8}, "loss": {"name": "reinforce"}, "trainer": {"ess_scaling": "sqrt"}}, "ess_scaling"),
        (
            {
                "generator": {"top_p": 0.9},
                "loss": {"name": "reinforce"},
                "kl": {"coef": 0.04, "place": "loss", "estimator": "k3", "corrected": True},
            },
            r"ratios of kl\.corrected",
        ),
        ({"generator": {"keep_sets": True}}, "bound on their size"),
        ({"generator": {"keep_sets": True, "top_p": 0.9}}, "bound on their size"),
        ({"generator": {"keep_sets": True, "top_k": 513}}, "bound on their size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_conflicts_raise(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_loss(resolve(BASE, overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        {"completions_per_group": 1, "loss": {"advantages": "gae"}},
        {"completions_per_group": 1, "loss": {"advantages": "greedy_baseline"}},
        {"loss": GDPO, "rewards": {"terms": TERMS}},
        {"loss": GDPO, "kl": {"coef": 0.1, "place": "loss", "estimator": "k3"}},
        {"kl": {"coef": 0.15, "target": 6.0}},
        {"loss": {"name": "online_dpo", "select": "best_and_worst"}},
        {
            "loss": {"name": "online_dpo", "select": "best_and_worst"},
            "kl": {"coef": 0.1, "place": "loss", "estimator": "k2"},
        },
        {
            "generator": {"stop_at_eos": False},
            "loss": {"truncated": "penalty"},
            "rewards": {"truncate_token": 13, "truncate_after": 16},
        },
        {"generator": {"keep_sets": True, "top_k": 512, "top_p": 0.95}},
        {"loss": {"name": "oapl", "advantages": "optimal"}},
        {"generator": {"top_p": 0.95}, "loss": {"name": "reinforce"}},
        {"generator": {"top_k": 8}, "loss": {"name": "online_dpo", "select": "best_and_worst"}},
    ],
)
def test_what_goes_together_is_accepted(overrides: dict[str, Any]) -> None:
    check_loss(resolve(BASE, overrides))


def test_the_greedy_completion_is_sampled_besides() -> None:
    config = resolve(BASE, {"loss": {"advantages": "greedy_baseline"}, "completions_per_group": 4})
    assert (config.samples_per_group, config.completions_per_step) == (5, 4 * config.groups_per_step)
