"""Every loss against arrays worked out by hand, and what they do with wrong or missing input."""

import inspect
import math
from dataclasses import fields, replace

import pytest
import torch
from loss_cases import NAMES, POLICY_NAMES, evaluate, leaf_name, random_inputs, units_of

from slipstream.algorithms.losses import LOSSES, LossInputs, loss_named
from slipstream.core.errors import ConfigError, MissingInputError, MissingLogprobsError, ShapeError

LN2 = math.log(2.0)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logs(*probabilities: float) -> torch.Tensor:
    return tensor(*probabilities).log()


# Two completions: ratios 2 and 1 with advantage 1; ratio 1/2 with advantage -2.
HAND = LossInputs(
    policy_logprobs=logs(0.5, 0.4, 0.2),
    behaviour_logprobs=logs(0.25, 0.4, 0.4),
    reference_logprobs=logs(0.25, 0.4, 0.4),
    advantages=tensor(1.0, 1.0, -2.0),
    teacher_divergences=tensor(0.3, 0.6, 0.9),
    mask=torch.ones(3, dtype=torch.bool),
    segment_ids=torch.tensor([0, 0, 1]),
    num_units=0,
)
LOG_A, LOG_B, LOG_C = math.log(0.5), math.log(0.4), math.log(0.2)

LABELLED = {"is_desirable": torch.tensor([True, False]), "reference_kl": tensor(0.0)[0]}

# name, changes to HAND, parameters, loss, gradient
HAND_DERIVED = [
    ("reinforce", {}, {}, -(LOG_A + LOG_B - 2 * LOG_C) / 3, [-1 / 3, -1 / 3, 2 / 3]),
    # Each completion's mean first: (log a + log b)/2 and -2 log c.
    (
        "reinforce",
        {"reduction": "sequence"},
        {},
        -((LOG_A + LOG_B) / 2 - 2 * LOG_C) / 2,
        [-1 / 4, -1 / 4, 1.0],
    ),
    (
        "reinforce",
        {"reduction": "constant", "max_tokens": 4},
        {},
        -(LOG_A + LOG_B - 2 * LOG_C) / 8,
        [-1 / 8, -1 / 8, 2 / 8],
    ),
    # min(2, 1.2), 1 and min(-1, -1.6): only the middle token is inside.
    ("ppo", {}, {}, -(1.2 + 1.0 - 1.6) / 3, [0.0, -1 / 3, 0.0]),
    # Ratio 2 with advantage -4 is worth -8, unless the dual clip bounds it at 1.5 * -4.
    ("ppo", {"advantages": tensor(-4.0, 1.0, -2.0)}, {}, -(-8.0 + 1.0 - 1.6) / 3, [8 / 3, -1 / 3, 0.0]),
    (
        "ppo",
        {"advantages": tensor(-4.0, 1.0, -2.0)},
        {"dual_clip": 1.5},
        -(-6.0 + 1.0 - 1.6) / 3,
        [0.0, -1 / 3, 0.0],
    ),
    # The same with DAPO's 0.28 above.
    ("grpo", {}, {}, -(1.28 + 1.0 - 1.6) / 3, [0.0, -1 / 3, 0.0]),
    ("grpo", {}, {"eps_low": 0.6, "eps_high": 1.5}, -(2.0 + 1.0 - 1.0) / 3, [-2 / 3, -1 / 3, 1 / 3]),
    # Weights 2, 1 and 1/2; then clipped to 1.5 and 0.8, with their gradients kept.
    ("cispo", {}, {}, -(2 * LOG_A + LOG_B - LOG_C) / 3, [-2 / 3, -1 / 3, 1 / 3]),
    (
        "cispo",
        {},
        {"eps_low": 0.2, "eps_high": 0.5},
        -(1.5 * LOG_A + LOG_B - 1.6 * LOG_C) / 3,
        [-1.5 / 3, -1 / 3, 1.6 / 3],
    ),
    # Geometric means sqrt(2) and 1/2; both outside GSPO's narrow clip.
    ("gspo", {}, {}, -(1.0004 - 2 * 0.9997) / 2, [0.0, 0.0, 0.0]),
    (
        "gspo",
        {},
        {"eps_low": 1.0, "eps_high": 1.0},
        -(math.sqrt(2) - 1.0) / 2,
        [-math.sqrt(2) / 4, -math.sqrt(2) / 4, 1 / 2],
    ),
    ("aipo", {}, {}, -(2 * LOG_A + LOG_B - LOG_C) / 3, [-2 / 3, -1 / 3, 1 / 3]),
    ("aipo", {}, {"max_ratio": 1.5}, -(1.5 * LOG_A + LOG_B - LOG_C) / 3, [-1.5 / 3, -1 / 3, 1 / 3]),
    ("aipo", {}, {"max_ratio": 1.5, "mode": "mask"}, -(LOG_B - LOG_C) / 3, [0.0, -1 / 3, 1 / 3]),
    # Both tokens of the first completion weigh its product, 2, or its geometric mean, sqrt(2).
    ("aipo", {}, {"level": "sequence"}, -(2 * LOG_A + 2 * LOG_B - LOG_C) / 3, [-2 / 3, -2 / 3, 1 / 3]),
    (
        "aipo",
        {},
        {"level": "geometric"},
        -(math.sqrt(2) * (LOG_A + LOG_B) - LOG_C) / 3,
        [-math.sqrt(2) / 3, -math.sqrt(2) / 3, 1 / 3],
    ),
    ("aipo", {}, {"level": "sequence", "mode": "mask", "max_ratio": 1.5}, LOG_C / 3, [0.0, 0.0, 1 / 3]),
    ("aipo", {}, {"eps_low": 0.2, "eps_high": 0.2}, -LOG_B / 3, [0.0, -1 / 3, 0.0]),
    ("aipo_masked", {}, {}, -(2.0 + 1.0 - 1.0) / 3, [-2 / 3, -1 / 3, 1 / 3]),
    ("aipo_masked", {}, {"max_ratio": 1.5}, -(1.5 + 1.0 - 1.0) / 3, [0.0, -1 / 3, 1 / 3]),
    ("rloo", {}, {}, -(LOG_A + LOG_B - 2 * LOG_C) / 2, [-1 / 2, -1 / 2, 1.0]),
    # Products 2 and 1/2: min(2, 1.2) and min(-1, -1.6).
    ("proximal_rloo", {}, {}, -(1.2 - 1.6) / 2, [0.0, 0.0, 0.0]),
    ("proximal_rloo", {}, {"eps": 1.5}, -(2.0 - 1.0) / 2, [-1.0, -1.0, 1 / 2]),
    ("copg", {}, {}, -(LN2 + 2 * LN2) / 2, [-1 / 2, -1 / 2, 1.0]),
    # Log-ratios to the reference log 2 and -log 2: sigmoid(0.5 * 2 log 2) = 2/3.
    ("online_dpo", {}, {"beta": 0.5}, math.log(1.5), [-1 / 6, -1 / 6, 1 / 6]),
    (
        "online_ipo",
        {},
        {"beta": 0.5},
        (2 * LN2 - 1) ** 2,
        [2 * (2 * LN2 - 1), 2 * (2 * LN2 - 1), -2 * (2 * LN2 - 1)],
    ),
    ("best_of_n", {}, {}, -(LOG_A + LOG_B + LOG_C) / 2, [-1 / 2, -1 / 2, -1 / 2]),
    # Weights 4 -> 2, 1, 1; ratios to the proximal policy 1.25, 1 and 1/2.
    (
        "decoupled_ppo",
        {"proximal_logprobs": logs(0.4, 0.4, 0.4), "behaviour_logprobs": logs(0.1, 0.4, 0.4)},
        {"max_ratio": 2.0},
        -(2 * 1.2 + 1.0 - 1.6) / 3,
        [0.0, -1 / 3, 0.0],
    ),
    (
        "decoupled_ppo",
        {"proximal_logprobs": logs(0.4, 0.4, 0.4), "behaviour_logprobs": logs(0.1, 0.4, 0.4)},
        {"max_ratio": 2.0, "eps_low": 0.6, "eps_high": 0.6},
        -(2 * 1.25 + 1.0 - 1.0) / 3,
        [-2.5 / 3, -1 / 3, 1 / 3],
    ),
    (
        "decoupled_ppo",
        {"proximal_logprobs": logs(0.4, 0.4, 0.4), "behaviour_logprobs": logs(0.1, 0.4, 0.4)},
        {"max_ratio": 2.0, "mode": "mask", "eps_low": 0.6, "eps_high": 0.6},
        0.0,
        [0.0, -1 / 3, 1 / 3],
    ),
    # Corrections 4, 1 and 1, of which the first is outside of the band; then 2/5, which is below it.
    (
        "icepop",
        {"proximal_logprobs": logs(0.4, 0.4, 0.4), "behaviour_logprobs": logs(0.1, 0.4, 0.4)},
        {"max_ratio": 3.0, "eps_low": 0.6, "eps_high": 0.6},
        0.0,
        [0.0, -1 / 3, 1 / 3],
    ),
    (
        "icepop",
        {"proximal_logprobs": logs(0.1, 0.4, 0.4), "behaviour_logprobs": logs(0.25, 0.4, 0.4)},
        {},
        -(1.0 - 1.6) / 3,
        [0.0, -1 / 3, 0.0],
    ),
    # Sigmoids of log 2, 0 and -log 2: 2/3, 1/2 and 1/3, whose gates are 8/9, 1 and 8/9.
    (
        "sapo",
        {},
        {"tau_pos": LN2, "tau_neg": 2 * LN2},
        -(4 * 2 / 3 + 4 * 1 / 2 - 2 * 2 * 1 / 3) / LN2 / 3,
        [-16 / 27, -1 / 3, 8 / 27],
    ),
    # Probabilities moved by 1/4, 0 and -1/5, each where its advantage pushes it.
    ("dppo_tv", {}, {}, -LOG_B / 3, [0.0, -1 / 3, 0.0]),
    ("dppo_tv", {}, {"delta_low": 0.22, "delta_high": 0.22}, -(LOG_B - LOG_C) / 3, [0.0, -1 / 3, 1 / 3]),
    ("dppo_tv", {"advantages": tensor(-1.0, 1.0, 2.0)}, {}, (2 * LOG_A - LOG_B - LOG_C) / 3, [2 / 3, -1 / 3, -1 / 3]),
    (
        "dppo_tv",
        {},
        {"delta_low": 1.0, "delta_high": 1.0, "max_ratio": 1.5},
        -(1.5 * LOG_A + LOG_B - LOG_C) / 3,
        [-1.5 / 3, -1 / 3, 1 / 3],
    ),
    # Divergences of 1/4 from 1/2 and of 2/5 from 1/5: 0.131 and 0.105.
    ("dppo_kl", {}, {}, -LOG_B / 3, [0.0, -1 / 3, 0.0]),
    ("dppo_kl", {}, {"delta_low": 0.11, "delta_high": 0.11}, -(LOG_B - LOG_C) / 3, [0.0, -1 / 3, 1 / 3]),
    # Squares log(2)^2 = 0.48, 0 and 0.48; the first and the last have moved where they are pushed.
    (
        "m2po",
        {"proximal_logprobs": logs(0.5, 0.4, 0.2), "cutoff": torch.tensor(0.3, dtype=torch.float64)},
        {},
        -1 / 3,
        [0.0, -1 / 3, 0.0],
    ),
    (
        "m2po",
        {"proximal_logprobs": logs(0.5, 0.4, 0.2), "cutoff": torch.tensor(0.5, dtype=torch.float64)},
        {},
        -(2.0 + 1.0 - 1.0) / 3,
        [-2 / 3, -1 / 3, 1 / 3],
    ),
    # Ratio 2 triggers in the first completion, whose second token is left out where its advantage is negative.
    ("mu_grpo", {}, {"veto_high": 1.5}, -(2.0 + 1.0 - 1.0) / 3, [-2 / 3, -1 / 3, 1 / 3]),
    (
        "mu_grpo",
        {"advantages": tensor(-1.0, -1.0, -2.0)},
        {"veto_high": 1.5, "eps_low": 0.2},
        (2.0 + 1.6) / 3,
        [2 / 3, 0.0, 0.0],
    ),
    # Log-ratios log 2 and -log 2, halved, to be 1 and -2.
    (
        "oapl",
        {},
        {"beta": 0.5},
        ((LN2 / 2 - 1) ** 2 + (2 - LN2 / 2) ** 2) / 2,
        [(LN2 / 2 - 1) / 2, (LN2 / 2 - 1) / 2, (2 - LN2 / 2) / 2],
    ),
    # Errors -1, 1 and -1; the first value moved by 1, clipped to 0.2: error -1.8, without gradient.
    (
        "value",
        {
            "values": tensor(1.0, 2.0, 3.0),
            "anchor_values": tensor(0.0, 2.0, 2.9),
            "returns": tensor(2.0, 1.0, 4.0),
        },
        {},
        0.5 * (1.8**2 + 1.0 + 1.0) / 3,
        [0.0, 1 / 3, -1 / 3],
    ),
    ("distill", {}, {}, 0.6, [1 / 3, 1 / 3, 1 / 3]),
    # The policy is twice as likely to get to the second state as the one that sampled, at most 1.5 times by the limit.
    ("distill", {}, {"weight": "prefix"}, (0.3 + 2 * 0.6 + 0.9) / 3, [1 / 3, 2 / 3, 1 / 3]),
    ("distill", {}, {"weight": "prefix", "max_ratio": 1.5}, (0.3 + 1.5 * 0.6 + 0.9) / 3, [1 / 3, 1.5 / 3, 1 / 3]),
    # Errors 2 and -1 of two completions.
    ("rating", {"scores": tensor(3.0, 0.0), "ratings": tensor(1.0, 1.0)}, {}, (4.0 + 1.0) / 2, [2.0, -1.0]),
    # The label is wrong in a quarter of all cases: log 1.5 + 0.25 * 0.5 * 2 log 2.
    ("dpo", {}, {"beta": 0.5}, math.log(1.5), [-1 / 6, -1 / 6, 1 / 6]),
    (
        "dpo",
        {},
        {"beta": 0.5, "label_smoothing": 0.25},
        math.log(1.5) + LN2 / 4,
        [-1 / 24, -1 / 24, 1 / 24],
    ),
    (
        "ipo",
        {},
        {"beta": 0.5},
        (2 * LN2 - 1) ** 2,
        [2 * (2 * LN2 - 1), 2 * (2 * LN2 - 1), -2 * (2 * LN2 - 1)],
    ),
    # Gains log 2 and -log 2, both as they should be: 1 - sigmoid(log 2) = 1/3 each.
    ("kto", LABELLED, {"beta": 1.0}, 1 / 3, [-1 / 9, -1 / 9, 1 / 9]),
    ("kto", LABELLED, {"beta": 1.0, "desirable_weight": 3.0}, (3 / 3 + 1 / 3) / 2, [-1 / 3, -1 / 3, 1 / 9]),
    # Less z0 = log 2: 0 and -2 log 2, so 1 - sigmoid(0) = 1/2 and 1 - sigmoid(2 log 2) = 1/5.
    (
        "kto",
        LABELLED | {"reference_kl": tensor(LN2)[0]},
        {"beta": 1.0},
        (1 / 2 + 1 / 5) / 2,
        [-1 / 8, -1 / 8, 2 / 25],
    ),
    # Mean logprobs log(0.2)/2 and log 0.2: log 5 - log 2 after beta and gamma.
    ("simpo", {}, {"beta": 2.0, "gamma": LN2}, math.log(1.4), [-2 / 7, -2 / 7, 4 / 7]),
    ("bradley_terry", {"scores": tensor(1.0 + LN2, 1.0)}, {}, math.log(1.5), [-1 / 3, 1 / 3]),
    # Softmax (1, 2, 1, 1)/5.
    (
        "choice",
        {
            "scores": tensor(0.0, LN2, 0.0, 0.0),
            "labels": torch.tensor([1]),
            "segment_ids": torch.tensor([0, 1, 2, 3]),
            "mask": torch.ones(4, dtype=torch.bool),
        },
        {},
        math.log(2.5),
        [0.2, -0.6, 0.2, 0.2],
    ),
]


@pytest.mark.parametrize(("name", "changes", "params", "loss", "grad"), HAND_DERIVED)
def test_hand_derived(name, changes, params, loss, grad):
    got_loss, got_grad, _ = evaluate(name, replace(HAND, **changes), **params)
    assert got_loss == pytest.approx(loss, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(got_grad, tensor(*grad), rtol=1e-12, atol=1e-12)


def test_every_loss_is_derived_by_hand():
    assert {case[0] for case in HAND_DERIVED} == set(LOSSES)


def test_aipo_and_aipo_masked_differ_above_max_ratio():
    """P3: LlamaRL's estimator keeps max_ratio * A * grad log pi there; PRIME-RL's objective as printed drops it."""
    inputs = replace(HAND, policy_logprobs=logs(0.2, 0.4, 0.8), behaviour_logprobs=logs(0.4, 0.2, 0.1))
    inputs = replace(inputs, advantages=tensor(1.0, -1.0, 2.0))
    _, kept, metrics = evaluate("aipo", inputs, max_ratio=4.0)
    _, dropped, _ = evaluate("aipo_masked", inputs, max_ratio=4.0)
    torch.testing.assert_close(kept, tensor(-0.5, 2.0, -8.0) / 3)
    torch.testing.assert_close(dropped, tensor(-0.5, 2.0, 0.0) / 3)
    assert metrics["clipped_frac"] == pytest.approx(1 / 3)
    assert metrics["ratio"] == pytest.approx(3.5)
    assert metrics["ratio_max"] == pytest.approx(8.0)
    assert metrics["ess"] == pytest.approx(10.5**2 / (3 * (0.25 + 4 + 64)))
    assert metrics["logprob_diff_max"] == pytest.approx(math.log(8))
    assert metrics["kl_k2"] == pytest.approx((LN2**2 + LN2**2 + 9 * LN2**2) / 6)


def test_clip_metrics_count_where_the_clip_binds():
    _, _, of_tokens = evaluate("ppo", HAND)
    assert of_tokens["clipped_low_frac"] == of_tokens["clipped_high_frac"] == pytest.approx(1 / 3)
    assert of_tokens["clipped_frac"] == pytest.approx(2 / 3)
    _, _, harmless = evaluate("ppo", replace(HAND, advantages=-HAND.advantages))
    assert harmless["clipped_frac"] == 0.0
    _, _, of_sequences = evaluate("proximal_rloo", HAND)
    assert of_sequences["clipped_low_frac"] == of_sequences["clipped_high_frac"] == 0.5
    assert of_sequences["sequence_ratio"] == pytest.approx(1.25)
    assert of_sequences["sequence_ratio_max"] == pytest.approx(2.0)
    assert "sequence_ratio" not in evaluate("aipo", HAND)[2], "which tells whose ratios are clipped"
    for level, ratio in (("sequence", (2.0 + 0.5) / 2), ("geometric", (2.0**0.5 + 0.5) / 2)):
        assert evaluate("aipo", HAND, level=level)[2]["sequence_ratio"] == pytest.approx(ratio)
    _, _, dual = evaluate("ppo", replace(HAND, advantages=tensor(-4.0, 1.0, -2.0)), dual_clip=1.5)
    assert dual["dual_clipped_frac"] == pytest.approx(1 / 3)


def test_value_metrics_explain_the_variance_of_the_returns():
    inputs = replace(
        HAND,
        values=tensor(1.0, 2.0, 3.0),
        anchor_values=tensor(0.0, 2.0, 2.9),
        returns=tensor(2.0, 1.0, 6.0),
    )
    _, _, metrics = evaluate("value", inputs)
    assert metrics["value_clipped_frac"] == pytest.approx(1 / 3)
    assert metrics["value_error"] == pytest.approx(11 / 3)
    assert metrics["explained_variance"] == pytest.approx(1 - (11 / 3) / (41 / 3 - 9))


def test_scores_by_label():
    _, _, labelled = evaluate("kto", replace(HAND, **LABELLED), beta=0.5)
    assert labelled["score_desirable"] == pytest.approx(0.5 * LN2)
    assert labelled["score_undesirable"] == pytest.approx(-0.5 * LN2)


def test_preference_and_choice_metrics():
    _, _, pairs = evaluate("online_dpo", HAND, beta=0.5)
    assert pairs["preference_accuracy"] == 1.0
    assert pairs["score_preferred"] == pytest.approx(0.5 * LN2)
    assert pairs["score_rejected"] == pytest.approx(-0.5 * LN2)
    assert pairs["preference_margin"] == pytest.approx(LN2)
    _, _, tied = evaluate("bradley_terry", replace(HAND, scores=tensor(3.0, 3.0)))
    assert tied["preference_accuracy"] == 0.5
    _, _, ranked = evaluate("bradley_terry", replace(HAND, scores=tensor(1.0, 3.0)))
    assert ranked["preference_accuracy"] == 0.0
    assert ranked["preference_margin"] == -2.0
    inputs = replace(random_inputs([1] * 8), scores=tensor(0, 1, 0, 0, 5, 1, 2, 4), labels=torch.tensor([1, 3]))
    _, _, chosen = evaluate("choice", inputs)
    assert chosen["choice_accuracy"] == 0.5
    assert chosen["score_chosen"] == 2.5
    assert chosen["score"] == pytest.approx(13 / 8)


@pytest.mark.parametrize(("name", "missing"), [(name, missing) for name in NAMES for missing in LOSSES[name].requires])
def test_a_missing_input_raises(name, missing):
    expected = MissingLogprobsError if missing.endswith("_logprobs") else MissingInputError
    with pytest.raises(expected, match=missing):
        LOSSES[name](replace(random_inputs([2, 1, 3, 2]), **{missing: None}, num_units=1))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_required_is_enough(name):
    inputs = random_inputs([2, 1, 3, 2])
    optional = {f.name for f in fields(LossInputs)} - {"mask", "segment_ids", "num_units", "reduction", "max_tokens"}
    without = replace(inputs, **dict.fromkeys(optional - set(LOSSES[name].requires)))
    loss, grad, _ = evaluate(name, without)
    full_loss, full_grad, _ = evaluate(name, inputs)
    assert loss == full_loss
    assert torch.equal(grad, full_grad)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_loss_says_how_far_it_is_from_the_sampler(name):
    inputs = random_inputs([2, 1, 3, 2])
    _, _, metrics = evaluate(name, inputs)
    ratios = (inputs.policy_logprobs - inputs.behaviour_logprobs).exp()
    assert metrics["ratio"] == pytest.approx(ratios.mean().item())
    assert metrics["ess"] == pytest.approx((ratios.mean().square() / ratios.square().mean()).item())
    if "behaviour_logprobs" not in LOSSES[name].requires:
        assert "ratio" not in evaluate(name, replace(inputs, behaviour_logprobs=None))[2]


@pytest.mark.parametrize("name", NAMES)
def test_metrics_do_not_hold_the_graph(name):
    inputs, loss = random_inputs([2, 1, 3, 2]), LOSSES[name]
    leaf = getattr(inputs, leaf_name(loss)).clone().requires_grad_()
    _, metrics = loss(replace(inputs, **{leaf_name(loss): leaf}, num_units=units_of(loss, inputs)))
    assert metrics
    assert all(not tensor.requires_grad for part in metrics.values() for tensor in vars(part).values())


def test_ill_formed_batches_are_refused():
    inputs = random_inputs([2, 1, 3])
    for name in ("online_dpo", "online_ipo", "bradley_terry", "dpo", "simpo"):
        with pytest.raises(ShapeError, match="two adjacent sequences"):
            evaluate(name, inputs)
    with pytest.raises(ShapeError, match="one label"):
        evaluate("choice", replace(inputs, labels=torch.tensor([0])), num_units=1)
    with pytest.raises(ShapeError, match="one label is needed per completion"):
        evaluate("kto", replace(inputs, is_desirable=torch.tensor([True])))
    with pytest.raises(ShapeError, match="ascend"):
        evaluate("gspo", replace(HAND, segment_ids=torch.tensor([0, 1, 0])))
    with pytest.raises(ConfigError, match="constant"):
        evaluate("grpo", replace(HAND, reduction="constant"))


def test_unknown_names_and_values_are_told_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'aipo'"):
        loss_named("aipoo", {})
    with pytest.raises(ConfigError, match="did you mean 'max_ratio'"):
        loss_named("aipo", {"max_ration": 3.0})
    with pytest.raises(ConfigError, match="did you mean 'geometric'"):
        loss_named("aipo", {"level": "geometrical"})
    with pytest.raises(ConfigError, match=r"allowed: .*none"):
        loss_named("rloo", {"eps": 0.2})


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, "4"])
def test_numbers_out_of_range_are_refused(value):
    with pytest.raises(ConfigError, match="number > 0"):
        loss_named("aipo", {"max_ratio": value})


def test_some_numbers_may_be_zero():
    assert loss_named("simpo", {"gamma": 0.0}).params["gamma"] == 0.0
    for value in (-1.0, math.nan):
        with pytest.raises(ConfigError, match="number >= 0"):
            loss_named("dpo", {"label_smoothing": value})


def test_a_band_has_1_inside():
    assert loss_named("mu_grpo", {"veto_low": 0.0, "veto_high": math.inf}).params["veto_low"] == 0.0
    for param, value in (("veto_low", 1.0), ("veto_high", 1.0)):
        with pytest.raises(ConfigError, match="number >= 0 and < 1" if param == "veto_low" else "number > 1"):
            loss_named("mu_grpo", {param: value})


def test_words_are_not_numbers():
    with pytest.raises(ConfigError, match="truncate, mask"):
        loss_named("aipo", {"mode": 1.0})


def test_parameters_override_defaults():
    assert loss_named("aipo", {"max_ratio": 2.0, "mode": "mask"}).params == {
        **LOSSES["aipo"].params,
        "max_ratio": 2.0,
        "mode": "mask",
    }
    assert LOSSES["aipo"].params["max_ratio"] == 4.0


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_well_formed(name):
    loss = LOSSES[name]
    assert set(loss.requires) <= {f.name for f in fields(LossInputs)}
    assert list(loss.params) == list(inspect.signature(loss.function).parameters)[1:]
    assert all(loss.params[param] in words for param, words in loss.choices.items())
    assert set(loss.choices) == {param for param, value in loss.params.items() if isinstance(value, str)}
    assert loss_named(name, loss.params) == loss
    assert loss.atom == ("sequence" if loss.unit == "token" else loss.unit)
    assert all(part in loss.function.__doc__ for part in ("L = ", "Identity:"))
