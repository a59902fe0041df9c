"""The losses made for stale tokens: against their printed formulas in numpy, and what they promise about the others."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import evaluate, finite_differences, random_inputs

from slipstream.algorithms.advantages import group_mean, optimal
from slipstream.algorithms.losses.m2po import m2po_cutoff
from slipstream.algorithms.losses.spec import sequence_weight_metrics
from slipstream.algorithms.ratios import effective_share, step_scale
from slipstream.algorithms.reduce import metric_values

LENGTHS = [3, 1, 4, 2, 5, 1, 2, 3]
INF = math.inf


def on_policy(inputs):
    return replace(inputs, behaviour_logprobs=inputs.policy_logprobs, proximal_logprobs=inputs.policy_logprobs)


def arrays(inputs):
    """policy, behaviour, proximal, advantages and segments as numpy arrays."""
    names = ("policy_logprobs", "behaviour_logprobs", "proximal_logprobs", "advantages", "segment_ids")
    return [getattr(inputs, name).numpy() for name in names]


def same_gradient(left, right):
    torch.testing.assert_close(left[1], right[1], rtol=1e-9, atol=1e-12)


# SAPO


def test_sapo_against_its_printed_formula():
    """f(r) = sigmoid(tau (r - 1)) 4 / tau, the mean of the completions' means."""
    inputs = replace(random_inputs(LENGTHS), reduction="sequence")
    policy, behaviour, _, advantages, segments = arrays(inputs)
    tau = np.where(advantages > 0, 1.0, 1.05)
    values = 4.0 / tau / (1.0 + np.exp(-tau * (np.exp(policy - behaviour) - 1.0))) * advantages
    means = [values[segments == one].mean() for one in range(len(LENGTHS))]
    assert evaluate("sapo", inputs)[0] == pytest.approx(-np.mean(means), rel=1e-12)


def test_on_policy_sapo_is_reinforce_and_with_a_wide_gate_it_has_no_clip():
    inputs = random_inputs(LENGTHS)
    got = evaluate("sapo", on_policy(inputs))
    same_gradient(got, evaluate("reinforce", on_policy(inputs)))
    assert got[2]["gate"] == pytest.approx(1.0)
    wide = evaluate("sapo", inputs, tau_pos=1e-5, tau_neg=1e-5)
    torch.testing.assert_close(wide[1], evaluate("ppo", inputs, eps_low=INF, eps_high=INF)[1], rtol=1e-6, atol=1e-8)
    assert evaluate("sapo", inputs)[2]["gate"] < 0.99


# IcePop


def test_icepop_against_its_printed_formula():
    inputs = random_inputs(LENGTHS)
    policy, behaviour, proximal, advantages, _ = arrays(inputs)
    correction, ratios = np.exp(proximal - behaviour), np.exp(policy - proximal)
    kept = np.where((correction >= 0.7) & (correction <= 1.5), correction, 0.0)
    clipped = np.minimum(ratios * advantages, np.clip(ratios, 0.8, 1.2) * advantages)
    loss, _, metrics = evaluate("icepop", inputs, min_ratio=0.7, max_ratio=1.5)
    assert loss == pytest.approx(-(kept * clipped).mean(), rel=1e-12)
    assert metrics["correction_truncated_frac"] == pytest.approx((kept == 0.0).mean())
    assert (correction < 0.7).any()
    assert (correction > 1.5).any()


def test_icepop_and_its_relatives():
    inputs = random_inputs(LENGTHS)
    open_below = evaluate("icepop", inputs, min_ratio=1e-9, max_ratio=1.5)
    masked = evaluate("decoupled_ppo", inputs, max_ratio=1.5, mode="mask")
    same_gradient(open_below, masked)
    assert open_below[0] == pytest.approx(masked[0], rel=1e-12)
    anchored = replace(inputs, proximal_logprobs=inputs.behaviour_logprobs)
    same_gradient(evaluate("icepop", anchored), evaluate("ppo", anchored))


# DPPO


def bernoulli_kl(p, q):
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


@pytest.mark.parametrize(("name", "delta"), [("dppo_tv", 0.05), ("dppo_kl", 0.01)])
def test_dppo_against_its_printed_formula(name, delta):
    inputs = random_inputs(LENGTHS)
    policy, behaviour, _, advantages, _ = arrays(inputs)
    behaviour = np.minimum(behaviour, -1e-3)
    inputs = replace(inputs, behaviour_logprobs=torch.from_numpy(behaviour))
    pi, mu = np.exp(policy), np.exp(behaviour)
    distance = np.abs(pi - mu) if name == "dppo_tv" else bernoulli_kl(mu, pi)
    is_masked = (distance > delta) & ((advantages > 0) == (pi > mu))
    weights = torch.from_numpy(np.where(is_masked, 0.0, np.minimum(pi / mu, 1.5)))

    def surrogate(logprobs):
        return -(weights * inputs.advantages * logprobs).mean()

    params = {"delta_low": delta, "delta_high": delta, "max_ratio": 1.5}
    loss, grad, metrics = evaluate(name, inputs, **params)
    assert loss == pytest.approx(surrogate(inputs.policy_logprobs).item(), rel=1e-12)
    torch.testing.assert_close(grad, finite_differences(surrogate, inputs.policy_logprobs), rtol=1e-7, atol=1e-9)
    of_sides = metrics["clipped_low_frac"] + metrics["clipped_high_frac"]
    assert of_sides == pytest.approx(is_masked.mean())
    assert metrics["clipped_frac"] > of_sides > 0
    assert (pi / mu > 1.5).any()


@pytest.mark.parametrize(("name", "delta"), [("dppo_tv", 1.0), ("dppo_kl", INF)])
def test_dppo_without_a_trust_region_is_aipo(name, delta):
    inputs = random_inputs(LENGTHS)
    got = evaluate(name, inputs, delta_low=delta, delta_high=delta, max_ratio=1.2)
    expected = evaluate("aipo", inputs, max_ratio=1.2)
    same_gradient(got, expected)
    assert got[0] == pytest.approx(expected[0], rel=1e-12)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_a_rare_token_may_move_by_any_ratio_and_a_likely_one_may_not(name):
    """Ratios 8 and 1.25: PPO would clip the first and, at 0.28, leave the second alone."""
    inputs = random_inputs([1, 1])
    inputs = replace(
        inputs,
        policy_logprobs=torch.tensor([0.008, 1.0], dtype=torch.float64).log(),
        behaviour_logprobs=torch.tensor([0.001, 0.8], dtype=torch.float64).log(),
        advantages=torch.ones(2, dtype=torch.float64),
    )
    for precision in (torch.float64, torch.float32):
        single = {key: getattr(inputs, key).to(precision) for key in ("policy_logprobs", "behaviour_logprobs")}
        _, grad, _ = evaluate(name, replace(inputs, **single))
        assert (grad != 0).tolist() == [True, False]


# M2PO


def kept_by_algorithm_1(squares, bounded, threshold):
    """The paper's loop: the largest trust-region token leaves until the mean of those that stay is small enough."""
    kept, inside = np.ones(len(squares), dtype=bool), list(np.flatnonzero(bounded))
    while inside and np.mean([squares[index] for index in inside]) > threshold:
        largest = max(inside, key=lambda index: squares[index])
        kept[largest] = False
        inside.remove(largest)
    return kept


def cutoff_of(inputs, threshold, *, others=()):
    """`m2po_cutoff` of this rank's `inputs`; `others` are what the other ranks bring."""
    return m2po_cutoff(
        inputs.advantages,
        inputs.behaviour_logprobs,
        inputs.proximal_logprobs,
        of_all_ranks=lambda own: torch.cat([own, *others]),
        threshold=threshold,
    )


@pytest.mark.parametrize("threshold", [1e-6, 0.01, 0.04, 0.2, 10.0])
@pytest.mark.parametrize("seed", range(4))
def test_m2po_masks_as_its_algorithm_1_does(seed, threshold):
    inputs = random_inputs([7] * 12, seed=seed)
    policy, behaviour, proximal, advantages, _ = arrays(inputs)
    squares = (proximal - behaviour) ** 2
    bounded = ((advantages > 0) & (proximal > behaviour)) | ((advantages < 0) & (proximal < behaviour))
    kept = kept_by_algorithm_1(squares, bounded, threshold)
    cutoff = cutoff_of(inputs, threshold)
    loss, grad, metrics = evaluate("m2po", replace(inputs, cutoff=cutoff), threshold=threshold)
    ratios = np.exp(policy - behaviour)
    assert loss == pytest.approx(-(kept * ratios * advantages).mean(), rel=1e-12)
    torch.testing.assert_close(grad, torch.from_numpy(-(kept * ratios * advantages) / len(kept)))
    assert metrics["clipped_frac"] == pytest.approx((~kept).mean())
    assert metrics["second_moment"] == pytest.approx(squares[bounded].mean())
    assert metrics["second_moment_kept"] <= threshold
    assert math.isinf(cutoff) == bool(kept.all())


def test_m2po_without_a_threshold_is_ppo_without_a_clip():
    inputs = random_inputs(LENGTHS)
    got = evaluate("m2po", inputs, threshold=INF)
    expected = evaluate("ppo", inputs, eps_low=INF, eps_high=INF)
    same_gradient(got, expected)
    assert got[0] == pytest.approx(expected[0], rel=1e-12)
    assert got[2]["clipped_frac"] == 0.0


@settings(max_examples=60, deadline=None)
@given(
    squares=st.lists(st.sampled_from([0.0, 0.01, 0.04, 0.05, 0.3, 1.0, 9.0]), max_size=12),
    cuts=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    threshold=st.sampled_from([0.01, 0.04, 0.4]),
)
def test_the_cutoff_is_the_same_however_ranks_divide_the_tokens(squares, cuts, threshold):
    """Also where squares are equal: they stay or go together, and a square up to the threshold stays."""
    moved = torch.tensor(squares, dtype=torch.float64).sqrt()
    inputs = replace(
        random_inputs([1]),
        advantages=torch.ones_like(moved),
        proximal_logprobs=moved,
        behaviour_logprobs=torch.zeros_like(moved),
    )
    whole = cutoff_of(inputs, threshold)
    kept = [square for square in moved.square().tolist() if square <= whole]
    assert not kept or np.mean(kept) <= threshold * (1 + 1e-12)
    assert all(square in kept for square in moved.square().tolist() if square <= threshold)
    parts = torch.tensor_split(moved, sorted(cuts))
    for own, part in enumerate(parts):
        others = [other.square()[other > 0] for index, other in enumerate(parts) if index != own]
        mine = replace(
            inputs,
            advantages=torch.ones_like(part),
            proximal_logprobs=part,
            behaviour_logprobs=torch.zeros_like(part),
        )
        assert torch.equal(cutoff_of(mine, threshold, others=others), whole)


# mu-GRPO


@drawn(
    20,
    60,
    completions=st.lists(
        st.tuples(
            st.sampled_from([-1.5, 0.0, 0.7]), st.lists(st.sampled_from([0.02, 0.5, 1.0, 3.0, 40.0]), min_size=1)
        ),
        min_size=1,
        max_size=6,
    ),
    band=st.sampled_from([(0.2, 5.0), (0.0, 5.0), (0.2, INF), (0.6, 1.1), (0.0, INF)]),
    clip=st.sampled_from([(0.2, 0.28), (0.8, 4.0), (INF, INF)]),
)
def test_mu_grpo_against_a_loop_over_tokens(completions, band, clip):
    (low, high), (eps_low, eps_high) = band, clip
    loss, grad, num_vetoed, total = 0.0, [], 0, sum(len(ratios) for _, ratios in completions)
    for advantage, ratios in completions:
        is_open = True
        for ratio in ratios:
            clipped = min(max(ratio, 1 - eps_low), 1 + eps_high)
            is_counted = is_open or advantage >= 0
            num_vetoed += not is_counted
            loss -= min(ratio * advantage, clipped * advantage) / total if is_counted else 0.0
            is_bound = (clipped - ratio) * advantage < 0
            grad.append(-ratio * advantage / total if is_counted and not is_bound else 0.0)
            is_open = is_open and low <= ratio <= high
    inputs = random_inputs([len(ratios) for _, ratios in completions])
    log_ratios = torch.tensor([ratio for _, ratios in completions for ratio in ratios], dtype=torch.float64).log()
    advantages = torch.tensor([one for one, ratios in completions for _ in ratios], dtype=torch.float64)
    inputs = replace(inputs, advantages=advantages, behaviour_logprobs=inputs.policy_logprobs - log_ratios)
    params = {"eps_low": eps_low, "eps_high": eps_high}
    got = evaluate("mu_grpo", inputs, veto_low=low, veto_high=high, **params)
    assert got[0] == pytest.approx(loss, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(got[1], torch.tensor(grad, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    assert got[2]["vetoed_frac"] == pytest.approx(num_vetoed / total)
    if band == (0.0, INF):
        expected = evaluate("grpo", inputs, **params)
        assert got[0] == expected[0]
        assert torch.equal(got[1], expected[1])


def test_on_policy_mu_grpo_is_grpo():
    inputs = on_policy(random_inputs(LENGTHS))
    got, expected = (evaluate(name, inputs, eps_low=0.2, eps_high=0.28) for name in ("mu_grpo", "grpo"))
    assert got[0] == expected[0]
    assert torch.equal(got[1], expected[1])
    assert got[2]["vetoed_frac"] == 0.0


# OAPL


def test_optimal_advantages_golden():
    """Rewards log 2, 0 and log 6 at beta = 1: the mean of 2, 1 and 6 is 3. A second group, at beta = 2, of equals."""
    rewards = torch.tensor([math.log(2), 0.0, math.log(6), 5.0], dtype=torch.float64)
    advantages = optimal(rewards, torch.tensor([4, 4, 4, 1]), beta=1.0)
    expected = [math.log(2 / 3), math.log(1 / 3), math.log(2), 0.0]
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64))
    assert (optimal(torch.full((3,), 0.1), torch.zeros(3, dtype=torch.int64), beta=0.3) == 0).all()


@settings(max_examples=50, deadline=None)
@given(
    rollouts=st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5, width=32)), min_size=1, max_size=20),
    beta=st.sampled_from([0.1, 1.0, 3.0]),
)
def test_optimal_advantages_against_loops_and_their_limits(rollouts, beta):
    groups = torch.tensor([9 - group for group, _ in rollouts])
    rewards = torch.tensor([reward for _, reward in rollouts], dtype=torch.float64)
    members = [[other for number, other in rollouts if number == group] for group, _ in rollouts]
    values = [beta * math.log(np.mean([math.exp(one / beta) for one in group])) for group in members]
    found = optimal(rewards, groups, beta=beta)
    torch.testing.assert_close(found, rewards - torch.tensor(values, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    best = rewards - torch.tensor([max(group) for group in members], dtype=torch.float64)
    torch.testing.assert_close(optimal(rewards, groups, beta=1e-9), best, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(optimal(rewards, groups, beta=1e6), group_mean(rewards, groups), rtol=1e-4, atol=1e-4)


def test_oapl_against_its_printed_formula():
    inputs = random_inputs(LENGTHS)
    policy, behaviour, _, advantages, segments = arrays(inputs)
    sums = np.array([(policy - behaviour)[segments == one].sum() for one in range(len(LENGTHS))])
    wanted = np.array([advantages[segments == one][0] for one in range(len(LENGTHS))])
    loss, grad, metrics = evaluate("oapl", inputs, beta=0.3)
    assert loss == pytest.approx(np.mean((0.3 * sums - wanted) ** 2), rel=1e-12)
    assert metrics["regression_error"] == pytest.approx(loss)
    expected = 2 * 0.3 * (0.3 * sums - wanted)[segments] / len(LENGTHS)
    torch.testing.assert_close(grad, torch.from_numpy(expected))


def test_oapl_is_at_rest_at_the_best_policy_and_otherwise_begins_as_rloo():
    """The policy mu exp(A / beta): its ratios have mean 1 in each group, as those of a policy should."""
    inputs, beta = random_inputs([1] * 8), 0.5
    groups = torch.arange(8) // 4
    advantages = optimal(torch.linspace(0, 1, 8, dtype=torch.float64), groups, beta=beta)
    best = replace(inputs, advantages=advantages, policy_logprobs=inputs.behaviour_logprobs + advantages / beta)
    loss, grad, metrics = evaluate("oapl", best, beta=beta)
    assert loss == pytest.approx(0.0, abs=1e-25)
    torch.testing.assert_close(grad, torch.zeros_like(grad))
    assert metrics["ratio"] == pytest.approx(1.0)
    fresh = on_policy(random_inputs(LENGTHS))
    torch.testing.assert_close(evaluate("oapl", fresh, beta=beta)[1], 2 * beta * evaluate("rloo", fresh)[1])


# VCPO's step


def test_the_effective_share_golden():
    assert effective_share(4.0, 4.0, 4) == 1.0
    assert effective_share(5.0, 25.0, 4) == pytest.approx(0.25), "one weight of four is all"
    assert effective_share(3.0, 5.0, 2) == pytest.approx(0.9), "weights 1 and 2"
    assert effective_share(0.0, 0.0, 0) == 1.0


def test_the_scale_of_a_step_golden():
    assert step_scale(0.25, base=1.0, rule="sqrt") == 0.5
    assert step_scale(0.25, base=1.0, rule="linear") == 0.25
    assert step_scale(0.25, base=0.5, rule="sqrt") == pytest.approx(math.sqrt(0.5))
    assert step_scale(0.6, base=0.55, rule="sqrt") == 1.0
    assert step_scale(1.0, base=1.0, rule="linear") == 1.0


def test_the_weights_are_the_ratios_of_whole_completions():
    """In float64, where a float would overflow; completions without a counted token are none."""
    inputs = random_inputs(LENGTHS)
    policy, behaviour, _, _, segments = arrays(inputs)
    mask = segments != 3
    weights = np.exp([(policy - behaviour)[segments == one].sum() for one in range(len(LENGTHS)) if one != 3])
    values = metric_values(sequence_weight_metrics(replace(inputs, mask=torch.from_numpy(mask))))
    assert values["sequence_ess"] == pytest.approx(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
    assert metric_values(sequence_weight_metrics(on_policy(inputs)))["sequence_ess"] == 1.0
    far = replace(inputs, policy_logprobs=inputs.policy_logprobs.float() + 50.0)
    assert math.isfinite(metric_values(sequence_weight_metrics(far))["sequence_weight_squared"])
