import math

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.algorithms.logprobs import (
    kept_token_logprobs,
    probe_logprobs,
    token_logprobs,
    token_logprobs_and_entropy,
)
from slipstream.core.errors import ShapeError


def test_golden_two_logits():
    logits = torch.tensor([[0.0, math.log(3.0)]])
    logprobs, entropy = token_logprobs_and_entropy(logits, torch.tensor([1]))
    assert logprobs.item() == pytest.approx(math.log(0.75), abs=1e-6)
    assert entropy.item() == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_log_softmax_in_float64(temperature):
    torch.manual_seed(0)
    logits = (torch.randn(9, 17) * 4).requires_grad_()
    targets = torch.randint(17, (9,))
    weights, entropy_weights = torch.randn(9), torch.randn(9)
    logprobs, entropy = token_logprobs_and_entropy(logits, targets, temperature)
    (logprobs @ weights + entropy @ entropy_weights).backward()

    exact = logits.detach().double().requires_grad_()
    everything = torch.log_softmax(exact / temperature, dim=-1)
    exact_logprobs = everything.gather(-1, targets[:, None])[:, 0]
    exact_entropy = -(everything.exp() * everything).sum(-1)
    (exact_logprobs @ weights.double() + exact_entropy @ entropy_weights.double()).backward()

    torch.testing.assert_close(logprobs.double(), exact_logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), exact_entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)


def test_gradient_of_logprobs_alone():
    torch.manual_seed(1)
    logits = torch.randn(5, 8, requires_grad=True)
    targets = torch.randint(8, (5,))
    token_logprobs(logits, targets).sum().backward()
    expected = nn.functional.one_hot(targets, 8) - torch.softmax(logits.detach(), -1)
    torch.testing.assert_close(logits.grad, expected.float())


def test_far_apart_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    logprobs, entropy = token_logprobs_and_entropy(logits, torch.tensor([1]))
    (logprobs + entropy).sum().backward()
    assert logprobs.item() == pytest.approx(-2e4)
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(logits.grad).all()


def test_shapes_must_fit():
    with pytest.raises(ShapeError):
        token_logprobs(torch.zeros(3, 5), torch.zeros(4, dtype=torch.int64))


class Bigram(nn.Module):
    """Logits that depend on the last token only, so the oracle is a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 6)

    def forward(self, tokens, positions, attention):
        return self.table(tokens)

    def logits(self, hidden):
        return hidden


def test_probe_gives_one_logprob_per_predicted_token():
    torch.manual_seed(0)
    model = Bigram()
    tokens = np.array([1, 4, 2, 2], dtype=np.int32)
    table = torch.log_softmax(model.table.weight.detach().double(), -1)
    expected = [table[a, b].item() for a, b in [(1, 4), (4, 2), (2, 2)]]
    probe = probe_logprobs(model, tokens)
    assert probe.dtype == np.float32
    np.testing.assert_allclose(probe, expected, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_over_kept_sets_equal_a_loop_in_float64(temperature):
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(9, 17)).astype(np.float32) * 6).requires_grad_()
    targets = torch.from_numpy(rng.integers(0, 17, 9))
    sets = [sorted({int(target), *rng.integers(0, 17, rng.integers(0, 6)).tolist()}) for target in targets]
    kept = torch.tensor([row + [-1] * (7 - len(row)) for row in sets])
    weights = torch.from_numpy(rng.normal(size=9))
    logprobs = kept_token_logprobs(logits, targets, kept, temperature)
    (logprobs * weights).sum().backward()

    exact = logits.detach().double().requires_grad_()
    expected = torch.stack(
        [
            exact[i, target] / temperature - torch.stack([(exact[i, j] / temperature).exp() for j in row]).sum().log()
            for i, (target, row) in enumerate(zip(targets.tolist(), sets, strict=True))
        ]
    )
    (expected * weights).sum().backward()
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)


def test_gradient_over_kept_sets_by_finite_differences():
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(size=(3, 6))).requires_grad_()
    targets, kept = torch.tensor([2, 0, 5]), torch.tensor([[1, 2, 4], [0, -1, -1], [3, 5, -1]])
    kept_token_logprobs(logits, targets, kept, 0.5).sum().backward()
    for row in range(3):
        for column in range(6):
            ends = []
            for sign in (1, -1):
                moved = logits.detach().clone()
                moved[row, column] += sign * 1e-2
                ends.append(kept_token_logprobs(moved, targets, kept, 0.5).double().sum())
            assert logits.grad[row, column] == pytest.approx(float(ends[0] - ends[1]) / 2e-2, abs=1e-3)
    assert logits.grad[1].abs().max() == 0, "of one token there is no choice"
    assert logits.grad[0, [0, 3, 5]].abs().max() == 0, "tokens outside the set have no part in it"


def test_a_set_of_everything_is_the_whole_distribution():
    logits, targets = torch.randn(4, 11, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 3, 10, 3])
    everything = torch.arange(11).expand(4, -1)
    torch.testing.assert_close(
        kept_token_logprobs(logits, targets, everything, 1.3), token_logprobs(logits, targets, 1.3)
    )


def test_kept_sets_must_fit():
    with pytest.raises(ShapeError):
        kept_token_logprobs(torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64))
