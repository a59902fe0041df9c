"""What the losses promise about each other, their gradients, and how a batch may be cut and padded."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from covering import covering
from drawn import drawn as examples
from hypothesis import strategies as st
from loss_cases import (
    NAMES,
    POLICY_NAMES,
    evaluate,
    finite_differences,
    leaf_name,
    padded,
    random_inputs,
    sequences,
    sequences_per_atom,
    units_of,
)

from slipstream.algorithms.losses import LOSSES, loss_named
from slipstream.algorithms.reduce import merge_metrics, metric_values

LENGTHS = [3, 1, 4, 2, 5, 1, 2, 3]
INF = math.inf
UNCLIPPED = {"eps_low": INF, "eps_high": INF}
REDUCTIONS = ["token", "sequence", "constant"]


def same(left, right, *, of_loss: bool = True) -> None:
    """Equal gradients, and equal losses unless only the gradients are meant."""
    torch.testing.assert_close(left[1], right[1], rtol=1e-10, atol=1e-12)
    if of_loss:
        assert left[0] == pytest.approx(right[0], rel=1e-10, abs=1e-12)


def on_policy(inputs):
    return replace(inputs, behaviour_logprobs=inputs.policy_logprobs, proximal_logprobs=inputs.policy_logprobs)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("aipo", {"max_ratio": INF}),
        ("aipo", {"level": "sequence"}),
        ("aipo", {"level": "geometric", "eps_low": 0.2, "eps_high": 0.2}),
        ("aipo_masked", {}),
        ("cispo", {}),
        ("ppo", {}),
        ("grpo", {}),
        ("decoupled_ppo", {}),
    ],
)
def test_on_policy_token_losses_are_reinforce(name, params, reduction):
    inputs = replace(on_policy(random_inputs(LENGTHS)), reduction=reduction)
    got = evaluate(name, inputs, **params)
    same(got, evaluate("reinforce", inputs), of_loss=False)
    assert got[2]["kl_k1"] == got[2]["kl_k3"] == got[2]["clipped_frac"] == 0.0
    assert got[2]["ess"] == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["proximal_rloo", "copg"])
def test_on_policy_sequence_losses_are_rloo(name):
    inputs = on_policy(random_inputs(LENGTHS))
    same(evaluate(name, inputs), evaluate("rloo", inputs), of_loss=False)


def test_copg_has_the_gradient_of_rloo_off_policy_too():
    inputs = random_inputs(LENGTHS)
    same(evaluate("copg", inputs), evaluate("rloo", inputs), of_loss=False)
    assert evaluate("copg", on_policy(inputs))[0] == 0.0


def test_on_policy_gspo_is_reinforce_averaged_per_sequence():
    inputs = on_policy(random_inputs(LENGTHS))
    same(evaluate("gspo", inputs), evaluate("reinforce", replace(inputs, reduction="sequence")), of_loss=False)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ppo_and_its_relatives(reduction):
    inputs = replace(random_inputs(LENGTHS), reduction=reduction)
    eps = {"eps_low": 0.1, "eps_high": 0.3}
    ppo = evaluate("ppo", inputs, **eps)
    same(ppo, evaluate("grpo", inputs, **eps))
    same(evaluate("aipo", inputs, max_ratio=INF, **eps), ppo, of_loss=False)
    same(
        evaluate("decoupled_ppo", replace(inputs, proximal_logprobs=inputs.behaviour_logprobs), **eps),
        ppo,
    )
    unclipped = evaluate("ppo", inputs, **UNCLIPPED)
    same(unclipped, evaluate("aipo_masked", inputs, max_ratio=INF))
    same(unclipped, evaluate("aipo", inputs, max_ratio=INF), of_loss=False)


def test_unclipped_grpo_is_ratio_times_advantage():
    inputs = random_inputs(LENGTHS)
    loss, grad, _ = evaluate("grpo", inputs, **UNCLIPPED)
    objective = (inputs.policy_logprobs - inputs.behaviour_logprobs).exp() * inputs.advantages
    assert loss == pytest.approx(-objective.mean().item())
    torch.testing.assert_close(grad, -objective / len(objective))


def test_the_dual_clip_bounds_what_ppo_leaves_unbounded():
    inputs = random_inputs(LENGTHS, spread=3.0)
    bound, free = (evaluate("ppo", inputs, dual_clip=c) for c in (3.0, INF))
    ratios = (inputs.policy_logprobs - inputs.behaviour_logprobs).exp()
    beyond = (ratios > 3.0) & (inputs.advantages < 0)
    assert beyond.any()
    assert (bound[1][beyond] == 0).all()
    torch.testing.assert_close(bound[1][~beyond], free[1][~beyond])


def test_proximal_equal_to_policy_is_aipo():
    """The clip is idle, and the correction from behaviour to proximal is the whole ratio."""
    inputs = random_inputs(LENGTHS)
    inputs = replace(inputs, proximal_logprobs=inputs.policy_logprobs)
    for mode in ("truncate", "mask"):
        decoupled = evaluate("decoupled_ppo", inputs, max_ratio=1.3, mode=mode)
        same(decoupled, evaluate("aipo", inputs, max_ratio=1.3, mode=mode), of_loss=False)


def test_aipo_and_aipo_masked_agree_below_max_ratio_and_under_masking():
    inputs = random_inputs(LENGTHS)
    same(evaluate("aipo", inputs, max_ratio=100.0), evaluate("aipo_masked", inputs, max_ratio=100.0), of_loss=False)
    masked = evaluate("aipo_masked", inputs, max_ratio=1.2)
    same(evaluate("aipo", inputs, max_ratio=1.2, mode="mask"), masked, of_loss=False)
    assert not torch.equal(evaluate("aipo", inputs, max_ratio=1.2)[1], masked[1])


def test_cispo_without_a_lower_bound_is_aipo():
    inputs = random_inputs(LENGTHS)
    same(evaluate("cispo", inputs, eps_high=0.5), evaluate("aipo", inputs, max_ratio=1.5))


def test_sequence_levels_of_aipo_are_the_gradients_of_gspo_and_proximal_rloo():
    inputs = random_inputs(LENGTHS)
    eps = {"eps_low": 0.1, "eps_high": 0.2}
    geometric = evaluate("aipo", replace(inputs, reduction="sequence"), level="geometric", max_ratio=INF, **eps)
    same(geometric, evaluate("gspo", inputs, **eps), of_loss=False)
    per_sequence = replace(inputs, reduction="constant", max_tokens=1)
    product = evaluate("aipo", per_sequence, level="sequence", max_ratio=INF, eps_low=0.3, eps_high=0.3)
    same(product, evaluate("proximal_rloo", inputs, eps=0.3), of_loss=False)


def test_sequences_of_one_token_need_no_sequence_losses():
    inputs = random_inputs([1] * 12)
    eps = {"eps_low": 0.2, "eps_high": 0.2}
    grpo = evaluate("grpo", inputs, **eps)
    same(evaluate("gspo", inputs, **eps), grpo)
    same(evaluate("proximal_rloo", inputs, eps=0.2), grpo)
    for level in ("sequence", "geometric"):
        same(evaluate("aipo", inputs, level=level), evaluate("aipo", inputs))


def test_an_advantage_of_one_is_imitation():
    inputs = random_inputs(LENGTHS)
    inputs = replace(inputs, advantages=torch.ones_like(inputs.advantages))
    logprobs = inputs.policy_logprobs
    same(evaluate("reinforce", inputs), (-logprobs.mean().item(), torch.full_like(logprobs, -1 / len(logprobs))))
    same(evaluate("best_of_n", inputs), evaluate("rloo", inputs))


def test_preferences_of_an_unmoved_policy():
    inputs = random_inputs(LENGTHS)
    inputs = replace(inputs, reference_logprobs=inputs.policy_logprobs)
    sign = torch.where(inputs.segment_ids % 2 == 0, 1.0, -1.0).double()
    loss, grad, _ = evaluate("online_dpo", inputs, beta=0.1)
    assert loss == pytest.approx(math.log(2))
    torch.testing.assert_close(grad, -0.05 * sign / 4)
    loss, grad, _ = evaluate("online_ipo", inputs, beta=0.1)
    assert loss == pytest.approx(25.0)
    torch.testing.assert_close(grad, -10.0 * sign / 4)


def test_ipo_is_zero_at_its_margin():
    inputs = random_inputs([1, 1])
    reference = inputs.policy_logprobs - torch.tensor([5.0, 0.0], dtype=torch.float64)
    loss, grad, _ = evaluate("online_ipo", replace(inputs, reference_logprobs=reference), beta=0.1)
    assert loss == pytest.approx(0.0, abs=1e-20)
    torch.testing.assert_close(grad, torch.zeros_like(grad))


def test_bradley_terry_is_a_choice_of_two():
    inputs = random_inputs([1] * 8)
    first = replace(inputs, labels=torch.zeros(4, dtype=torch.int64))
    same(evaluate("bradley_terry", inputs), evaluate("choice", first, num_candidates=2, num_units=4))
    equal = replace(inputs, scores=torch.zeros(8, dtype=torch.float64))
    assert evaluate("bradley_terry", equal)[0] == pytest.approx(math.log(2))
    assert evaluate("choice", equal)[0] == pytest.approx(math.log(4))


def test_an_unclipped_value_loss_is_half_the_squared_error():
    inputs = random_inputs(LENGTHS)
    loss, grad, metrics = evaluate("value", inputs, clip=INF)
    error = inputs.values - inputs.returns
    assert loss == pytest.approx(0.5 * error.square().mean().item())
    torch.testing.assert_close(grad, error / len(error))
    assert metrics["value_clipped_frac"] == 0.0
    variance = inputs.returns.var(correction=0).item()
    assert metrics["explained_variance"] == pytest.approx(1 - error.square().mean().item() / variance)


@pytest.mark.parametrize("name", ["reinforce", "ppo", "value"])
def test_reductions_agree_on_equal_lengths(name):
    inputs = random_inputs([3] * 4)
    token, sequence, constant = (
        evaluate(name, replace(inputs, reduction=reduction, max_tokens=3)) for reduction in REDUCTIONS
    )
    same(token, sequence)
    same(token, constant)


# A stop-gradient is not visible to finite differences of the loss: these are compared with those of the surrogate
# that its docstring states, its weights worked out here once and held fixed.
STOPPED = {
    ("aipo", "token", "truncate"): {"max_ratio": 1.2},
    ("aipo", "token", "mask"): {"max_ratio": 1.2},
    ("aipo", "sequence", "truncate"): {"max_ratio": 1.2},
    ("aipo", "sequence", "mask"): {"max_ratio": 1.2},
    ("aipo", "geometric", "truncate"): {"max_ratio": 1.2, "eps_low": 0.2, "eps_high": 0.1},
    ("aipo", "token", "combined"): {"max_ratio": 1.5, "eps_low": 0.2, "eps_high": 0.28},
    ("cispo", "token", "two-sided"): {"eps_low": 0.2, "eps_high": 0.3},
}


def held_weights(inputs, level: str, params) -> list[float]:
    """The weights of the surrogate, by loops over Python numbers."""
    differences = (inputs.policy_logprobs - inputs.behaviour_logprobs).tolist()
    segments, advantages = inputs.segment_ids.tolist(), inputs.advantages.tolist()
    weights = []
    for own, segment, advantage in zip(differences, segments, advantages, strict=True):
        of_sequence = [d for d, s in zip(differences, segments, strict=True) if s == segment]
        log_ratio = {"token": own, "sequence": sum(of_sequence)}.get(level, sum(of_sequence) / len(of_sequence))
        ratio = math.exp(log_ratio)
        low, high = 1 - params.get("eps_low", INF), 1 + params.get("eps_high", INF)
        if "max_ratio" not in params:
            weights.append(min(max(ratio, low), high))
        else:
            is_clipped = (ratio < low and advantage < 0) or (ratio > high and advantage > 0)
            is_masked = params.get("mode") == "mask" and ratio > params["max_ratio"]
            weights.append(0.0 if is_clipped or is_masked else min(ratio, params["max_ratio"]))
    return weights


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", STOPPED, ids=" ".join)
def test_gradients_of_stopped_weights_against_finite_differences(case, reduction):
    name, level, mode = case
    params = dict(STOPPED[case])
    if name == "aipo":
        params |= {"level": level, "mode": "mask" if mode == "mask" else "truncate"}
    inputs = replace(random_inputs(LENGTHS), reduction=reduction)
    weights = torch.tensor(held_weights(inputs, level, params), dtype=torch.float64)
    counts = torch.bincount(inputs.segment_ids)[inputs.segment_ids]
    divisor = {"token": sum(LENGTHS), "sequence": len(LENGTHS) * counts, "constant": len(LENGTHS) * 16}[reduction]

    def surrogate(policy):
        return -(weights * inputs.advantages * policy / divisor).sum()

    loss, grad, _ = evaluate(name, inputs, **params)
    assert loss == pytest.approx(surrogate(inputs.policy_logprobs).item())
    torch.testing.assert_close(grad, finite_differences(surrogate, inputs.policy_logprobs), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "reduction"),
    covering([name for name in NAMES if name not in ("aipo", "cispo", "dppo_tv", "dppo_kl")], REDUCTIONS),
)
def test_gradients_against_finite_differences(name, reduction):
    loss = loss_named(name, {"dual_clip": 1.5} if name == "ppo" else {})
    for seed in range(2):
        inputs = replace(random_inputs(LENGTHS, seed=seed), reduction=reduction)
        inputs = replace(inputs, num_units=units_of(loss, inputs))
        if name == "gspo":  # small enough for its clip not to bind everywhere
            near = 1e-3 * (inputs.behaviour_logprobs - inputs.policy_logprobs)
            inputs = replace(inputs, behaviour_logprobs=inputs.policy_logprobs + near)
        leaf = getattr(inputs, leaf_name(loss))

        def value(point, inputs=inputs):
            return loss(replace(inputs, **{leaf_name(loss): point}))[0]

        variable = leaf.clone().requires_grad_()
        (grad,) = torch.autograd.grad(value(variable), variable)
        assert grad.abs().sum() > 0
        torch.testing.assert_close(grad, finite_differences(value, leaf), rtol=1e-6, atol=1e-8)


batches = st.tuples(
    st.sampled_from(REDUCTIONS),
    st.lists(st.integers(1, 6), min_size=4, max_size=16).map(lambda lengths: lengths[: len(lengths) // 4 * 4]),
    st.integers(0, 1000),
)


def drawn(batch):
    reduction, lengths, seed = batch
    return replace(random_inputs(lengths, seed=seed), reduction=reduction)


@pytest.mark.parametrize("name", NAMES)
@examples(6, 12, batch=batches, cuts=st.sets(st.integers(1, 15)))
def test_microbatches_add_up_to_the_whole(name, batch, cuts):
    inputs = drawn(batch)
    loss = LOSSES[name]
    num_units, num_sequences = units_of(loss, inputs), int(inputs.segment_ids.max()) + 1
    whole_loss, whole_grad, whole_metrics = evaluate(name, inputs)
    atom = sequences_per_atom(loss)
    edges = [0, *sorted({cut * atom for cut in cuts if cut * atom < num_sequences}), num_sequences]
    total, grads, metrics = 0.0, [], {}
    for first, last in pairwise(edges):
        part = sequences(replace(inputs, num_units=num_units), first, last)
        leaf = getattr(part, leaf_name(loss)).clone().requires_grad_()
        value, parts = loss(replace(part, **{leaf_name(loss): leaf}))
        total += value.item()
        grads.append(torch.autograd.grad(value, leaf)[0])
        metrics = merge_metrics(metrics, parts)
    assert total == pytest.approx(whole_loss, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(torch.cat(grads), whole_grad, rtol=1e-9, atol=1e-12)
    assert metric_values(metrics) == pytest.approx(whole_metrics, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@examples(4, 12, batch=batches, extra=st.integers(0, 5), junk=st.sampled_from([0.0, -1e4, -INF]))
def test_padding_changes_nothing(name, batch, extra, junk):
    inputs = drawn(batch)
    lengths = torch.bincount(inputs.segment_ids)
    wide, real = padded(inputs, int(lengths.max()) + extra, junk=junk)
    loss, grad, metrics = evaluate(name, inputs)
    wide_loss, wide_grad, wide_metrics = evaluate(name, wide)
    assert wide_loss == pytest.approx(loss, rel=1e-12, abs=1e-15)
    assert wide_metrics == pytest.approx(metrics, rel=1e-12, abs=1e-15)
    if leaf_name(LOSSES[name]) == "scores":
        torch.testing.assert_close(wide_grad, grad)
    else:
        torch.testing.assert_close(wide_grad[real], grad, rtol=1e-12, atol=1e-15)
        assert (wide_grad[~real] == 0).all()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_completions_without_a_counted_token_change_nothing(name):
    inputs = random_inputs(LENGTHS)
    atom = sequences_per_atom(LOSSES[name])
    kept = sequences(inputs, 0, 8 - atom)
    mask = inputs.segment_ids < 8 - atom
    got = evaluate(name, replace(inputs, mask=mask), num_units=5)
    expected = evaluate(name, kept, num_units=5)
    if LOSSES[name].unit == "pair":  # a pair of nothing is a pair of equals: a constant, without gradient
        assert (got[1][~mask] == 0).all()
    else:
        assert got[0] == pytest.approx(expected[0])
    torch.testing.assert_close(got[1][mask], expected[1])


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize(("name", "params"), [("proximal_rloo", {}), ("aipo", {"level": "sequence"})])
def test_a_ratio_that_no_float_holds_leaves_the_gradient_finite(name, params, advantage):
    inputs = random_inputs([200, 3])
    inputs = replace(
        inputs,
        policy_logprobs=inputs.policy_logprobs.float(),
        behaviour_logprobs=(inputs.policy_logprobs - (inputs.segment_ids == 0).double()).float(),
        advantages=torch.full((203,), advantage),
    )
    assert (inputs.policy_logprobs - inputs.behaviour_logprobs).sum().exp() == INF
    loss, grad, _ = evaluate(name, inputs, **params)
    assert math.isfinite(loss)
    assert grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_float32_inputs_stay_float32(name):
    inputs = random_inputs(LENGTHS)
    single = {
        key: value.float()
        for key, value in vars(inputs).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    got, expected = evaluate(name, replace(inputs, **single)), evaluate(name, inputs)
    assert got[1].dtype == torch.float32
    assert got[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-5)
