"""The losses of the stage `dpo`: against loops over Python numbers, TRL's own, each other, and what they promise."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import evaluate, random_inputs

from slipstream.algorithms.losses.kto import mismatched_kl

LENGTHS = [3, 1, 4, 2, 5, 1, 2, 3]
BETA = 0.3


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def gains_of(inputs, *, is_mean: bool = False) -> list[float]:
    """The sum over each completion of policy less reference, or the mean of the policy alone."""
    policy, reference = inputs.policy_logprobs.tolist(), inputs.reference_logprobs.tolist()
    gains = []
    for sequence in range(int(inputs.segment_ids.max()) + 1):
        tokens = [t for t, of in enumerate(inputs.segment_ids.tolist()) if of == sequence]
        if is_mean:
            gains.append(sum(policy[t] for t in tokens) / len(tokens))
        else:
            gains.append(sum(policy[t] - reference[t] for t in tokens))
    return gains


def expected(name: str, inputs, params) -> float:
    """The equations of DPO (7), IPO (17), KTO (section 4.1) and SimPO (6)."""
    gains = gains_of(inputs, is_mean=name == "simpo")
    pairs = list(zip(gains[::2], gains[1::2], strict=True))
    beta = params["beta"]
    if name == "dpo":
        wrong = params["label_smoothing"]
        margins = [beta * (y - n) for y, n in pairs]
        return -sum((1 - wrong) * log_sigmoid(m) + wrong * log_sigmoid(-m) for m in margins) / len(pairs)
    if name == "ipo":
        return sum((y - n - 1 / (2 * beta)) ** 2 for y, n in pairs) / len(pairs)
    if name == "simpo":
        return -sum(log_sigmoid(beta * (y - n) - params["gamma"]) for y, n in pairs) / len(pairs)
    z0 = float(inputs.reference_kl)
    total = 0.0
    for gain, is_desirable in zip(gains, inputs.is_desirable.tolist(), strict=True):
        sign = 1 if is_desirable else -1
        value = math.exp(log_sigmoid(sign * beta * (gain - z0)))
        total += params["desirable_weight" if is_desirable else "undesirable_weight"] * (1 - value)
    return total / len(gains)


CASES = {
    "dpo": {"beta": BETA, "label_smoothing": 0.2},
    "ipo": {"beta": BETA},
    "kto": {"beta": BETA, "desirable_weight": 1.3, "undesirable_weight": 0.7},
    "simpo": {"beta": 2.5, "gamma": 0.4},
}


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(sorted(CASES)),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6).map(lambda some: some + some[::-1]),
    seed=st.integers(0, 1000),
)
def test_the_equations_as_printed(name, lengths, seed):
    inputs = random_inputs(lengths, seed=seed)
    assert evaluate(name, inputs, **CASES[name])[0] == pytest.approx(expected(name, inputs, CASES[name]), rel=1e-10)


ORACLE = json.loads((Path(__file__).parents[1] / "data" / "trl_oracle.json").read_text(encoding="utf-8"))


def test_dpo_agrees_with_trls_trainer():
    """The recorded loss and gradient of DPOTrainer; `test_trl_oracle.py` has those of what IPO shares with RL."""
    drawn = {name: torch.tensor(values, dtype=torch.float64) for name, values in ORACLE["inputs"].items()}
    mask = drawn["mask"].bool()
    adjacent = torch.arange(len(mask)).view(2, -1).T.flatten()  # TRL puts all preferred completions first
    inputs = replace(
        random_inputs([1] * len(mask)),
        policy_logprobs=drawn["policy"][adjacent][mask[adjacent]],
        reference_logprobs=drawn["reference"][adjacent][mask[adjacent]],
        mask=torch.ones(int(mask.sum()), dtype=torch.bool),
        segment_ids=torch.arange(len(mask)).repeat_interleave(mask.sum(1)[adjacent]),
        behaviour_logprobs=None,
    )
    recorded = ORACLE["cases"]["dpo"]
    loss, grad, _ = evaluate("dpo", inputs, beta=recorded["settings"]["beta"])
    assert loss == pytest.approx(recorded["loss"], rel=1e-12)
    expected_grad = torch.tensor(recorded["grad"], dtype=torch.float64)[adjacent][mask[adjacent]]
    torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-14)


def swapped(inputs):
    """Every pair the other way round; all lengths are equal."""
    order = torch.arange(len(inputs.segment_ids)).view(-1, 2, 3).flip(1).flatten()
    return replace(
        inputs, policy_logprobs=inputs.policy_logprobs[order], reference_logprobs=inputs.reference_logprobs[order]
    )


def test_a_swapped_pair_is_a_wrong_label():
    inputs = random_inputs([3] * 8)
    own, other = (
        evaluate("dpo", some, label_smoothing=wrong) for some, wrong in ((inputs, 0.3), (swapped(inputs), 0.7))
    )
    assert own[0] == pytest.approx(other[0], rel=1e-12)
    assert own[2]["preference_margin"] == pytest.approx(-other[2]["preference_margin"])
    right, half = (evaluate("dpo", inputs, label_smoothing=wrong)[0] for wrong in (0.0, 0.5))
    assert half == pytest.approx((right + evaluate("dpo", swapped(inputs))[0]) / 2)
    assert right == evaluate("online_dpo", inputs)[0]


def test_an_unmoved_policy_has_log_2_and_half_the_weight():
    inputs = random_inputs(LENGTHS)
    inputs = replace(inputs, reference_logprobs=inputs.policy_logprobs, reference_kl=torch.tensor(0.0))
    for wrong in (0.0, 0.3):
        assert evaluate("dpo", inputs, label_smoothing=wrong)[0] == pytest.approx(math.log(2))
    weights = torch.where(inputs.is_desirable, 3.0, 0.5)
    loss, grad, _ = evaluate("kto", inputs, desirable_weight=3.0, undesirable_weight=0.5)
    assert loss == pytest.approx(weights.mean().item() / 2)
    signs = torch.where(inputs.is_desirable, -1.0, 1.0)
    slopes = (0.1 / 4 * weights * signs / len(LENGTHS)).double()
    torch.testing.assert_close(grad, slopes[inputs.segment_ids])


def test_ipo_rests_at_its_margin():
    inputs = random_inputs([2, 2])
    reference = inputs.policy_logprobs - torch.tensor([1.0, 1.5, 0.0, 0.0], dtype=torch.float64)
    loss, grad, metrics = evaluate("ipo", replace(inputs, reference_logprobs=reference), beta=0.2)  # 1/(2 beta) = 2.5
    assert loss == pytest.approx(0.0, abs=1e-20)
    assert grad.abs().max() == pytest.approx(0.0, abs=1e-12)
    assert metrics["preference_margin"] == pytest.approx(0.5)


def test_simpo_is_dpo_whose_reference_asks_for_the_margin():
    """Completions of n = 3 tokens; the reference gives each token of the preferred one gamma / beta more."""
    inputs, beta, gamma = random_inputs([3] * 8), 2.0, 0.6
    is_preferred = inputs.segment_ids % 2 == 0
    reference = gamma / beta * is_preferred.double()
    simpo = evaluate("simpo", inputs, beta=beta, gamma=gamma)
    dpo = evaluate("dpo", replace(inputs, reference_logprobs=reference), beta=beta / 3)
    assert simpo[0] == pytest.approx(dpo[0], rel=1e-12)
    torch.testing.assert_close(simpo[1], dpo[1], rtol=1e-10, atol=1e-14)


def test_kto_weighs_gains_against_the_usual_one():
    """Whoever has gained z0 has gained nothing; beyond it, value saturates on both sides."""
    inputs = replace(random_inputs([1, 1]), is_desirable=torch.tensor([True, False]))
    for gain, z0, value in ((2.0, 2.0, 0.5), (100.0, 1.0, 1.0), (-100.0, 1.0, 0.0)):
        moved = replace(inputs, reference_logprobs=inputs.policy_logprobs - gain, reference_kl=torch.tensor(z0))
        desirable, undesirable = (
            evaluate("kto", replace(moved, is_desirable=torch.full((2,), label)), beta=1.0)[0]
            for label in (True, False)
        )
        assert 1 - desirable == pytest.approx(value, abs=1e-9)
        assert 1 - undesirable == pytest.approx(1 - value, abs=1e-9)


def test_the_estimate_of_the_kl_is_a_mean_that_is_not_negative():
    gains = torch.tensor([1.0, 2.0, -0.5], dtype=torch.float64, requires_grad=True)
    assert float(mismatched_kl(gains)) == pytest.approx(2.5 / 3)
    assert not mismatched_kl(gains).requires_grad
    assert float(mismatched_kl(-gains)) == 0.0
