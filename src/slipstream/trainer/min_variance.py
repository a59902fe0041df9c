"""The gradient of an update under the group baselines of least variance, from one backward pass per completion."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from slipstream.algorithms.reduce import Mean, Metrics
from slipstream.core.packed import PackedMicrobatch, empty_microbatch
from slipstream.core.rank_group import RankGroup
from slipstream.trainer.measure import Key
from slipstream.trainer.optim import AdamW


class MinVariance:
    """Sum the gradients of an update's completions, each less its group's baseline of least variance.

        grad = sum_i (A_i - b) h_i,   b = sum_i |h_i|^2 A_i / sum_i |h_i|^2 over the group of i

    VCPO (arXiv:2602.17616): its authors print w_i |grad log pi(y_i)| for |h_i|. Here h_i is the gradient of the loss of
    completion i at advantage 1, with that loss's ratios and divisor: equal up to a constant where ratios are of whole
    completions, uncut, and the divisor is common. A constant of a group in its A_i cancels.

    Every rank reads `microbatches`, one completion at a time in canonical order, empty where it is another rank's: a
    gradient over all ranks is that of one completion then. Two more tensors like the gradient are held. Before each
    backward pass the optimizer's gradients are cleared, after it `take` is called, and `finish` leaves the sum in them.
    Identity: completions of equal norms have the group's mean as their baseline.
    """

    def __init__(self, optimizer: AdamW, microbatches: Sequence[PackedMicrobatch], ranks: RankGroup) -> None:
        own = {one.keys[0]: one for one in microbatches}
        told = msgspec.msgpack.encode([(key, float(one.advantages[0])) for key, one in own.items()])
        parts = [msgspec.msgpack.decode(part, type=list[tuple[Key, float]]) for part in ranks.gather(told)]
        self._advantages = sorted(item for part in parts for item in part)
        self.microbatches = [own.get(key, empty_microbatch()) for key, _ in self._advantages]
        self._optimizer, self._squares = optimizer, list[float]()
        grads = optimizer.parameters.stored_grads()
        self._total, self._group = [torch.zeros_like(one) for one in grads], [torch.zeros_like(one) for one in grads]
        self._baselines: list[float] = []
        self.centred: list[float] = []  # A_i - b of each completion

    def take(self) -> None:
        """Add the gradient of the next completion, at advantage 1. NonFiniteError if it is not finite."""
        index = len(self.centred) + len(self._squares)
        (ordinal, _), advantage = self._advantages[index]
        self._squares.append(self._optimizer.finite_grad_norm() ** 2)
        grads = self._optimizer.parameters.stored_grads()
        torch._foreach_add_(self._total, grads, alpha=advantage)
        torch._foreach_add_(self._group, grads)
        if index + 1 == len(self._advantages) or self._advantages[index + 1][0][0] != ordinal:
            self._close_group()

    def _close_group(self) -> None:
        first = len(self.centred)
        members = [advantage for _, advantage in self._advantages[first : first + len(self._squares)]]
        weighted = sum(square * one for square, one in zip(self._squares, members, strict=True))
        baseline = weighted / sum(self._squares) if any(self._squares) else 0.0
        torch._foreach_add_(self._total, self._group, alpha=-baseline)
        torch._foreach_zero_(self._group)
        self._baselines.append(baseline)
        self.centred += [one - baseline for one in members]
        self._squares.clear()

    def finish(self) -> Metrics:
        """Leave the sum in the optimizer's gradients; return how far the baselines are from the groups' means."""
        torch._foreach_copy_(self._optimizer.parameters.stored_grads(), self._total)
        moved = torch.tensor(self._baselines, dtype=torch.float64, device=self._total[0].device).abs()
        return {"baseline_shift": Mean(moved.sum(), torch.ones_like(moved).sum())}
