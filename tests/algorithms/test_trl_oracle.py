"""The losses against what TRL's own code computes, recorded by scripts/record_trl_oracle.py."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loss_cases import units_of

from slipstream.algorithms.kl import k3
from slipstream.algorithms.losses import LossInputs, loss_named
from slipstream.algorithms.losses.kto import mismatched_kl

ORACLE = json.loads((Path(__file__).parents[1] / "data" / "trl_oracle.json").read_text(encoding="utf-8"))
DRAWN = {name: torch.tensor(values, dtype=torch.float64) for name, values in ORACLE["inputs"].items()}
MASK = DRAWN["mask"].bool()
LENGTHS = MASK.sum(1)
# TRL puts all preferred completions first; our pairs are adjacent: 0, S/2, 1, S/2 + 1, ...
ADJACENT = torch.arange(len(MASK)).view(2, -1).T.flatten()
IN_ORDER = torch.arange(len(MASK))

# TRL's case -> our loss, its parameters, and the order of the sequences.
OURS = {
    "dapo": ("grpo", {"eps_low": 0.2, "eps_high": 0.28}, IN_ORDER),
    "dapo_delta": ("ppo", {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 1.5}, IN_ORDER),
    "grpo": ("grpo", {"eps_low": 0.2, "eps_high": 0.2}, IN_ORDER),
    "grpo_kl": ("grpo", {"eps_low": 0.2, "eps_high": 0.2}, IN_ORDER),
    "dr_grpo": ("grpo", {"eps_low": 0.2, "eps_high": 0.2}, IN_ORDER),
    "cispo": ("cispo", {"eps_high": 0.5}, IN_ORDER),  # TRL's epsilon_high = 1.5 is the largest weight itself
    "sapo": ("sapo", {"tau_pos": 1.0, "tau_neg": 1.25}, IN_ORDER),
    "gspo": ("gspo", {"eps_low": 3e-2, "eps_high": 4e-2}, IN_ORDER),
    "rloo": ("proximal_rloo", {"eps": 0.2}, IN_ORDER),
    "dpo": ("online_dpo", {"beta": 0.1}, ADJACENT),
    "dpo_ipo": ("online_ipo", {"beta": 0.1}, ADJACENT),
    "online_dpo": ("online_dpo", {"beta": 0.1}, ADJACENT),
    "online_ipo": ("online_ipo", {"beta": 0.1}, ADJACENT),
    "kto": ("kto", {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}, IN_ORDER),
    "kto_below_zero": ("kto", {"beta": 0.3}, IN_ORDER),
    "simpo": ("simpo", {"beta": 2.0, "gamma": 0.6}, ADJACENT),
    "reward": ("bradley_terry", {}, ADJACENT),
}
REDUCTION = {"grpo": "sequence", "grpo_kl": "sequence", "sapo": "sequence", "dr_grpo": "constant"}


def packed(padded: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return padded[order][MASK[order]]


@pytest.mark.parametrize("case", sorted(ORACLE["cases"]))
def test_agrees_with_trl(case):
    recorded = ORACLE["cases"][case]
    name, params, order = OURS[case]
    loss = loss_named(name, params)
    policy = DRAWN["policy"].clone().requires_grad_()
    scores = DRAWN["scores"].clone().requires_grad_()
    # TRL's offline IPO averages the log-ratios over each completion's tokens; its online IPO sums them, as ours does.
    scale = 1.0 / LENGTHS.double().unsqueeze(1) if case == "dpo_ipo" else torch.ones(len(MASK), 1)
    inputs = LossInputs(
        policy_logprobs=packed(policy * scale, order),
        behaviour_logprobs=packed(DRAWN["behaviour"], order),
        reference_logprobs=packed(DRAWN["reference"] * scale, order),
        advantages=packed(DRAWN["advantages"].unsqueeze(1).expand(MASK.shape), order),
        mask=torch.ones(int(MASK.sum()), dtype=torch.bool),
        segment_ids=torch.arange(len(MASK)).repeat_interleave(LENGTHS[order]),
        num_units=0,
        scores=scores[order],
        is_desirable=order < len(MASK) // 2,
        reference_kl=mismatched_kl(scores - scores.mean() + recorded["settings"].get("kl", 0.0)),
        reduction=REDUCTION.get(case, "token"),
        max_tokens=ORACLE["max_tokens"],
    )
    inputs = replace(inputs, num_units=units_of(loss, inputs))
    value, _ = loss(inputs)
    if case == "grpo_kl":
        value = value + recorded["settings"]["beta"] * inputs.average(
            k3(inputs.policy_logprobs, inputs.reference_logprobs)
        )
    (grad,) = torch.autograd.grad(value, scores if case == "reward" else policy)
    assert value.item() == pytest.approx(recorded["loss"], rel=1e-12)
    torch.testing.assert_close(grad, torch.tensor(recorded["grad"], dtype=torch.float64), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("case", sorted(set(ORACLE["cases"]) - {"reward"}))
def test_the_recorded_gradients_are_not_all_zero(case):
    """A clip that held everything back would agree with anything."""
    grad = torch.tensor(ORACLE["cases"][case]["grad"])
    assert (grad[MASK] != 0).any()
    assert (grad[~MASK] == 0).all()
