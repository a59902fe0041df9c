import json
import math
from pathlib import Path

import pytest
import torch
from drawn import drawn
from hypothesis import strategies as st

from slipstream.algorithms.advantages import gae, place_scores, vtrace, whiten_parts
from slipstream.algorithms.kl import AdaptiveKL, k1
from slipstream.algorithms.losses import LossInputs, loss_named
from slipstream.core.errors import ShapeError


def segments_of(lengths) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def gae_loop(rewards, values, gamma, lam):
    """One sequence as lists: the definition, from its end."""
    advantages, following, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + gamma * next_value - value + gamma * lam * following
        next_value = value
        advantages.append(following)
    return advantages[::-1]


def vtrace_sums(rewards, values, ratios, gamma, lam, max_rho, max_c):
    """One sequence as lists: IMPALA's sum over every later token, with its product of c, written out."""
    after = [*values[1:], 0.0]
    deltas = [min(w, max_rho) * (r + gamma * n - v) for r, v, w, n in zip(rewards, values, ratios, after, strict=True)]
    returns = []
    for start, value in enumerate(values):
        total, factor = value, 1.0
        for t in range(start, len(values)):
            total += factor * deltas[t]
            factor *= gamma * lam * min(ratios[t], max_c)
        returns.append(total)
    advantages = [
        r + gamma * (lam * target + (1 - lam) * n) - v
        for r, v, n, target in zip(rewards, values, after, [*returns[1:], 0.0], strict=True)
    ]
    return advantages, returns


def as_tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_gae_golden():
    """By hand: gamma 1/2, lam 1/2. Deltas of the first sequence: 1 + 1 - 4 = -2 and 3 - 2 = 1."""
    rewards, values = as_tensor([1.0, 3.0, 8.0]), as_tensor([4.0, 2.0, 1.0])
    advantages, returns = gae(rewards, values, segments_of([2, 1]), gamma=0.5, lam=0.5)
    torch.testing.assert_close(advantages, as_tensor([-2 + 0.25 * 1, 1.0, 7.0]))
    torch.testing.assert_close(returns, as_tensor([2.25, 3.0, 8.0]))


def test_gae_equals_the_loop_on_the_published_shape():
    """The reproduction's own test: 20 sequences of 40 tokens, uniform, gamma 1 and lam 0.95."""
    generator = torch.Generator().manual_seed(42)
    rewards, values = (torch.rand(20, 40, dtype=torch.float64, generator=generator) for _ in range(2))
    advantages, returns = gae(rewards.flatten(), values.flatten(), segments_of([40] * 20), gamma=1.0, lam=0.95)
    expected = as_tensor([gae_loop(r.tolist(), v.tolist(), 1.0, 0.95) for r, v in zip(rewards, values, strict=True)])
    torch.testing.assert_close(advantages.view(20, 40), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns.view(20, 40), expected + values, rtol=1e-12, atol=1e-12)


lengths_of_sequences = st.lists(st.integers(1, 9), min_size=1, max_size=5)
fractions = st.sampled_from([0.0, 0.3, 0.95, 1.0])


@drawn(25, 80, lengths=lengths_of_sequences, gamma=fractions, lam=fractions, seed=st.integers(0, 2**31))
def test_packed_gae_and_vtrace_equal_the_definitions_alone(lengths, gamma, lam, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards, values, log_ratios = (
        torch.randn(sum(lengths), dtype=torch.float64, generator=generator) for _ in range(3)
    )
    ratios, segments = log_ratios.exp(), segments_of(lengths)
    advantages, returns = gae(rewards, values, segments, gamma=gamma, lam=lam)
    traced = vtrace(rewards, values, ratios, segments, gamma=gamma, lam=lam, max_rho=1.5, max_c=0.8)
    for segment in range(len(lengths)):
        own = segments == segment
        mine = [x[own].tolist() for x in (rewards, values, ratios)]
        expected = as_tensor(gae_loop(*mine[:2], gamma, lam))
        torch.testing.assert_close(advantages[own], expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(returns[own], expected + values[own], rtol=1e-10, atol=1e-10)
        for ours, theirs in zip(traced, vtrace_sums(*mine, gamma, lam, 1.5, 0.8), strict=True):
            torch.testing.assert_close(ours[own], as_tensor(theirs), rtol=1e-10, atol=1e-10)
        zeros = torch.zeros(lengths[segment], dtype=torch.int64)
        alone, _ = gae(rewards[own], values[own], zeros, gamma=gamma, lam=lam)
        assert torch.equal(advantages[own], alone), "what a sequence gets depends on what it is packed with"


def test_nothing_crosses_a_boundary_not_even_nan():
    rewards, values = torch.tensor([1.0, 1.0, math.nan, 1.0]), torch.tensor([0.5, 0.5, math.inf, 0.5])
    advantages, _ = gae(rewards, values, segments_of([2, 1, 1]), gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages[[0, 1, 3]], torch.tensor([1.5, 0.5, 0.5]))
    assert advantages[2].isnan()


def test_lam_0_is_the_td_error_and_lam_1_the_return_minus_the_value():
    torch.manual_seed(0)
    lengths = [5, 1, 3]
    rewards, values, segments = torch.randn(9), torch.randn(9), segments_of(lengths)
    later = torch.cat([torch.cat([part[1:], torch.zeros(1)]) for part in values.split(lengths)])
    torch.testing.assert_close(gae(rewards, values, segments, gamma=0.9, lam=0.0)[0], rewards + 0.9 * later - values)
    to_come = torch.cat([part.flip(0).cumsum(0).flip(0) for part in rewards.split(lengths)])
    advantages, returns = gae(rewards, values, segments, gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages, to_come - values)
    torch.testing.assert_close(returns, to_come)


def test_vtrace_golden():
    """By hand: gamma 1, weights min(4, 1) and 1/2. Errors 1 + 1 - 2 = 0 and 3 - 1 = 2; corrections 1 and 1."""
    rewards, values, ratios = as_tensor([1.0, 3.0]), as_tensor([2.0, 1.0]), as_tensor([4.0, 0.5])
    advantages, returns = vtrace(rewards, values, ratios, segments_of([2]))
    torch.testing.assert_close(returns, as_tensor([3.0, 2.0]))
    torch.testing.assert_close(advantages, as_tensor([1 + 2 - 2.0, 3 - 1.0]))


@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_on_policy_vtrace_is_gae(lam):
    torch.manual_seed(0)
    rewards, values, segments = torch.randn(9), torch.randn(9), segments_of([5, 1, 3])
    traced = vtrace(rewards, values, torch.ones(9), segments, gamma=0.97, lam=lam, max_rho=2.0, max_c=1.0)
    for ours, theirs in zip(traced, gae(rewards, values, segments, gamma=0.97, lam=lam), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_impalas_gradient_is_aipo_with_the_advantages_of_vtrace():
    torch.manual_seed(0)
    rewards, values, segments = torch.randn(9), torch.randn(9), segments_of([5, 1, 3])
    policy, behaviour = (-2 * torch.rand(9)).requires_grad_(), -2 * torch.rand(9)
    ratios = (policy.detach() - behaviour).exp()
    advantages, returns = vtrace(rewards, values, ratios, segments, gamma=0.9, max_rho=1.2, max_c=1.0)
    inputs = LossInputs(
        policy_logprobs=policy,
        behaviour_logprobs=behaviour,
        advantages=advantages,
        mask=torch.ones(9, dtype=torch.bool),
        segment_ids=segments,
        num_units=1,
    )
    loss, _ = loss_named("aipo", {"max_ratio": 1.2})(inputs)
    (gradient,) = torch.autograd.grad(loss, policy)
    later = torch.cat([torch.cat([part[1:], torch.zeros(1)]) for part in returns.split([5, 1, 3])])
    torch.testing.assert_close(gradient, -ratios.clamp(max=1.2) * (rewards + 0.9 * later - values))


def test_the_posts_kl_reward_with_its_sign_corrected():
    """N's example: three tokens of "usually, he would"; the post prints another new_logprobs and no minus."""
    reference, policy = as_tensor([-3.3213, -4.9980, -3.8690]), as_tensor([-3.6528, -5.0406, -3.2339])
    kl = k1(policy, reference)
    torch.testing.assert_close(kl, as_tensor([-0.3315, -0.0426, 0.6351]))
    rewards = place_scores(as_tensor([0.4]), kl, segments_of([3]), kl_coef=0.15)
    torch.testing.assert_close(rewards, as_tensor([0.15 * 0.3315, 0.15 * 0.0426, 0.4 - 0.15 * 0.6351]))


def test_scores_go_to_the_last_token_of_their_sequence():
    scores, segments = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 2])  # sequence 1 has no tokens here
    torch.testing.assert_close(place_scores(scores, None, segments), torch.tensor([0.0, 1.0, 4.0]))
    half = place_scores(scores, None, segments, place="after_last", discount=0.5)
    torch.testing.assert_close(half, torch.tensor([0.0, 0.5, 2.0]))
    has_slot = torch.tensor([True, True, False])
    some = place_scores(scores, None, segments, place="after_last", discount=0.5, has_slot=has_slot)
    torch.testing.assert_close(some, torch.tensor([0.0, 0.5, 4.0]))
    with pytest.raises(ShapeError, match="one score"):
        place_scores(scores[:2], None, segments)
    with pytest.raises(ShapeError):
        place_scores(scores, torch.zeros(2), segments)


def test_the_place_after_eos_is_the_padded_loops_with_a_value_of_0_there():
    """The TL;DR reproduction: rows of 6, the score on the first padding token where there is one, else on the last."""
    torch.manual_seed(0)
    lengths, width, gamma, lam = [4, 6, 1, 5], 6, 0.9, 0.8
    scores = torch.randn(4, dtype=torch.float64)
    values = torch.zeros(4, width, dtype=torch.float64)
    expected = []
    for row, length in enumerate(lengths):
        values[row, :length] = torch.randn(length, dtype=torch.float64)
        rewards = [0.0] * width
        rewards[length if length < width else length - 1] = scores[row].item()
        expected += gae_loop(rewards, values[row].tolist(), gamma, lam)[:length]
    segments, real = segments_of(lengths), torch.arange(width) < torch.tensor(lengths)[:, None]
    has_slot = torch.tensor(lengths) < width
    rewards = place_scores(scores, None, segments, place="after_last", discount=gamma * lam, has_slot=has_slot)
    advantages, _ = gae(rewards, values[real], segments, gamma=gamma, lam=lam)
    torch.testing.assert_close(advantages, as_tensor(expected))


def whiten(values, **options):
    """Whiten `values` as one part, on one rank."""
    flat = values.flatten()
    return whiten_parts(flat, torch.zeros(len(flat), dtype=torch.int64), **options).view_as(values)


PUBLISHED = {  # N, section "Per-minibatch reward and advantage whitening": TensorFlow's moments, torch.var
    False: [[0.05080712, 0.4381051, 0.8254035], [1.2127019, 1.6, 1.9872988], [2.3745968, 2.7618952, 3.1491938]],
    True: [[0.1394, 0.5046, 0.8697], [1.2349, 1.6, 1.9651], [2.3303, 2.6954, 3.0606]],
}


@pytest.mark.parametrize(("unbiased", "tolerance"), [(False, 2e-6), (True, 5e-5)])
def test_whitening_golden(unbiased, tolerance):
    rewards = as_tensor([[1.2, 1.3, 1.4], [1.5, 1.6, 1.7], [1.8, 1.9, 2.0]])
    whitened = whiten(rewards, shift_mean=False, unbiased=unbiased)
    torch.testing.assert_close(whitened, as_tensor(PUBLISHED[unbiased]), rtol=0, atol=tolerance)
    torch.testing.assert_close(whiten(rewards, unbiased=unbiased), whitened - 1.6)


def test_whitening_one_value_or_equal_ones_gives_no_advantage():
    for values in (torch.tensor([3.7]), torch.full((7,), 0.1)):
        for unbiased in (False, True):
            torch.testing.assert_close(whiten(values, unbiased=unbiased), torch.zeros_like(values), rtol=0, atol=1e-7)
    assert whiten(torch.zeros(0)).shape == (0,)


def test_nothing_in_nothing_out():
    empty, no_segments = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert [part.shape for part in gae(empty, empty, no_segments)] == [(0,), (0,)]
    assert place_scores(torch.zeros(2), empty, no_segments, kl_coef=0.1).shape == (0,)


def test_shapes_must_fit():
    with pytest.raises(ShapeError):
        gae(torch.zeros(3), torch.zeros(2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError):
        whiten_parts(torch.zeros(3), torch.zeros(2, dtype=torch.int64))


def test_adaptive_kl_golden():
    """N: error clipped to 20%, coefficient moved by error * 512 / 10000; never in place."""
    controller = AdaptiveKL()
    assert controller.updated(9.0, 512).coef == pytest.approx(0.15 * (1 + 0.2 * 512 / 10_000))
    assert controller.updated(6.6, 512).coef == pytest.approx(0.15 * (1 + 0.1 * 512 / 10_000))
    assert controller.updated(0.0, 512).coef == pytest.approx(0.15 * (1 - 0.2 * 512 / 10_000))
    assert controller.updated(6.0, 512) == controller == AdaptiveKL(coef=0.15, target=6.0, horizon=10_000)


# What TRL's own PPO makes of random inputs (scripts/record_trl_gae.py)

TRL = json.loads((Path(__file__).parents[1] / "data" / "trl_gae.json").read_text())


def packed(name) -> torch.Tensor:
    return torch.cat([torch.tensor(row[:length]) for row, length in zip(TRL[name], TRL["lengths"], strict=True)])


def test_rewards_advantages_and_returns_equal_trls():
    segments = segments_of(TRL["lengths"])
    kl = k1(packed("logprobs"), packed("reference_logprobs"))
    torch.testing.assert_close(kl, packed("kl"))
    rewards = place_scores(torch.tensor(TRL["scores"]), kl, segments, kl_coef=TRL["kl_coef"])
    torch.testing.assert_close(rewards, packed("rewards"))
    advantages, returns = gae(rewards, packed("values"), segments, gamma=TRL["gamma"], lam=TRL["lam"])
    torch.testing.assert_close(returns, packed("returns"), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whiten(advantages, unbiased=True), packed("whitened_advantages"), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        whiten(rewards, shift_mean=False, unbiased=True), packed("whitened_rewards"), rtol=1e-5, atol=1e-5
    )


def test_adaptive_kl_equals_trls():
    controller, coefs = AdaptiveKL(coef=0.15, target=6.0, horizon=10_000), []
    for kl, num_episodes in TRL["adaptive_kl_steps"]:
        controller = controller.updated(kl, num_episodes)
        coefs.append(controller.coef)
    assert coefs == pytest.approx(TRL["adaptive_kl_coefs"], rel=1e-12)
