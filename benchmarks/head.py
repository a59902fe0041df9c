"""Logprobs, entropies and gradients of a head in chunks: straight from states, and by checkpointed logits.

    python benchmarks/head.py [--vocab 49152] [--hidden 576] [--tokens 4096] [--rounds 5] [--device cpu]

Each forward and backward in turns, medians over the rounds; the floor are the four products of both (logits twice, the
gradients of states and of weights) at the rate of one alone. On CUDA in bfloat16, with the memory at its peak.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.algorithms.logprobs import token_logprobs_and_entropy
from slipstream.models.config import MAX_LOGITS
from slipstream.models.head import head_logprobs, wide_product
from slipstream.models.linear import linear
from slipstream.observe.hardware import describe


def by_checkpoints(hidden: Tensor, weight: Tensor, targets: Tensor, at_once: int) -> tuple[Tensor, ...]:
    """Logits in float32, chunk by chunk, computed again by autograd."""

    def head(rows: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs_and_entropy(linear(rows.float(), weight.float()), expected)

    pairs = zip(hidden.split(at_once), targets.split(at_once), strict=True)
    parts = [checkpoint(head, *pair, use_reentrant=False) for pair in pairs]
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def seconds(work: Callable[[], object], device: str) -> float:
    started_s = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    print(describe())
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    shapes = ((given.tokens, given.hidden), (given.vocab, given.hidden))
    hidden, weight = (torch.randn(shape, device=given.device).to(dtype).mul_(0.1).requires_grad_() for shape in shapes)
    targets = torch.randint(given.vocab, (given.tokens,), device=given.device)
    at_once = max(1, MAX_LOGITS[given.device] // given.vocab)

    def step(how: Callable[..., tuple[Tensor, ...]]) -> None:
        hidden.grad = weight.grad = None
        logprobs, entropies = how(hidden, weight, targets, at_once)
        torch.autograd.backward(logprobs.mean() + 0.01 * entropies.mean())

    ways: dict[str, Callable[[], object]] = {
        "states": lambda: step(lambda *args: head_logprobs(*args[:3], at_once=args[3])),
        "checkpoints": lambda: step(by_checkpoints),
        "one product": lambda: wide_product(hidden.detach()[:at_once], weight.detach()),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(given.rounds + 1):
        for name, work in ways.items():
            taken_s = seconds(work, given.device)
            if number:
                found[name].append(taken_s)
    medians = {name: statistics.median(all_s) for name, all_s in found.items()}
    floor_s = 4 * medians["one product"] * given.tokens / min(at_once, given.tokens)
    for name in ("states", "checkpoints"):
        spread = f"{min(found[name]):.3f} .. {max(found[name]):.3f}"
        print(f"{name}: {medians[name]:.3f} s ({spread}), {medians[name] / floor_s:.2f} x the floor of {floor_s:.3f} s")
        if given.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            ways[name]()
            print(f"  at its peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    print(f"checkpoints / states: {medians['checkpoints'] / medians['states']:.2f}")


if __name__ == "__main__":
    main()
