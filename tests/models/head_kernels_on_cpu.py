"""A process of its own for `test_head_kernels.py`: Triton reads TRITON_INTERPRET=1 where a kernel is defined.

With "few" as the last word it checks some cases: those that `generator/triton_on_cpu.py` runs beside others.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from slipstream.models import head
from slipstream.models.head_kernels import BLOCK, gradient, statistics

WIDTHS = (17, BLOCK, BLOCK + 1, 2 * BLOCK + 77)


def exact_of(logits: Tensor, targets: Tensor, g: Tensor, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropies and the gradient of logits by autograd, in float64; what is -inf in all rows has none."""
    wide = logits.double().requires_grad_()
    logprobs = wide[:, logits[0] > -torch.inf].log_softmax(-1)
    entropies = -torch.special.xlogy(logprobs.exp(), logprobs.exp()).sum(-1)
    chosen = logprobs.gather(1, targets[:, None]).squeeze(1)
    grad = torch.autograd.grad((chosen * g + entropies * e).sum(), wide)[0]
    return chosen.detach(), entropies.detach(), grad


def check_kernels(width: int, is_cut: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(5, width, generator=generator) * 4
    if is_cut:
        logits[:, width // 2 :] = -torch.inf  # also whole blocks
    targets = torch.randint(width // 2, (5,), generator=generator)
    g, e = torch.randn(5, generator=generator), torch.randn(5, generator=generator)
    logprobs, entropies, expected = exact_of(logits, targets, g, e)
    top, of_target, weighed, total = statistics(logits, targets)
    assert torch.equal(top, logits.amax(-1))
    assert torch.equal(of_target, logits.gather(1, targets[:, None]).squeeze(1))
    assert not statistics(logits, torch.full_like(targets, -1))[1].any(), "a target of another rank"
    normaliser = top + total.log()
    torch.testing.assert_close((of_target - normaliser).double(), logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close((normaliser - weighed / total).double(), entropies, atol=1e-5, rtol=1e-5)
    for has_g, has_e in ((True, True), (True, False), (False, True), (False, False)):
        expected = exact_of(logits, targets, g * has_g, e * has_e)[2]
        own = normaliser, normaliser - weighed / total, g if has_g else None, e if has_e else None
        found = gradient(logits, targets, *own, torch.float32)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)
        narrow = gradient(logits, targets, *own, torch.bfloat16)
        torch.testing.assert_close(
            narrow.double(), expected, atol=1e-5, rtol=2**-7
        )  # the interpreter cuts where a GPU rounds


def check_head(dtype: torch.dtype, temperature: float) -> None:
    """Whole: what torch's operations give, from the same products."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((7, 6), (BLOCK + 5, 6)))
    targets = torch.randint(len(weight), (7,), generator=generator)
    g, e = torch.randn(7, generator=generator), torch.randn(7, generator=generator)
    found, usual = [], head.takes_kernels
    for takes in (False, True):
        head.takes_kernels = lambda _, takes=takes: takes
        leaves = [one.clone().requires_grad_() for one in (hidden, weight)]
        out = head.head_logprobs(*leaves, targets, temperature=temperature, at_once=3)
        found.append([*(one.detach() for one in out), *torch.autograd.grad(out, leaves, (g, e))])
    head.takes_kernels = usual
    bound = 1e-5 if dtype == torch.float32 else 2**-7
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, atol=bound, rtol=bound)


if __name__ == "__main__":
    is_few = sys.argv[-1:] == ["few"]
    for width in () if is_few else WIDTHS:
        check_kernels(width, is_cut=False)
    check_kernels(BLOCK + 1 if is_few else 2 * BLOCK + 77, is_cut=True)
    heads = ((torch.float32, 0.7), (torch.float32, 1.0), (torch.bfloat16, 1.0))
    for dtype, temperature in heads[:1] if is_few else heads:
        check_head(dtype, temperature)
    print("right")  # noqa: T201
