"""AdamW over one flat tensor, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.core.errors import CheckpointError, NonFiniteError
from slipstream.core.training_sections import OptimizerConfig
from slipstream.models.flat import FlatParameters


def lr_factor(config: OptimizerConfig, *, update: int, total_updates: int) -> float:
    """Share of the peak learning rate at 0-indexed `update`: linear warm-up, then the schedule's decay to 0.

    Update 0 of a warm-up of n has 1/n; the first update after the warm-up has 1, and update `total_updates` has 0.
    """
    if update < config.warmup_updates:
        return (update + 1) / config.warmup_updates
    progress = (update - config.warmup_updates) / max(1, total_updates - config.warmup_updates)
    progress = min(1.0, progress)
    return {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.schedule]


def corrected_eps(config: OptimizerConfig, *, update: int) -> float:
    """The epsilon with which torch's Adam makes the 1-indexed `update` of the configured formulation.

        torch:       p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
        tensorflow:  p -= lr * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps)

    TensorFlow's is the form "just before section 2.1" of Kingma and Ba (arXiv:1412.6980); N, section "PyTorch Adam
    optimizer numerical issues". Identity: dividing the second form's fraction by sqrt(1 - b2^t) gives the first with
    eps / sqrt(1 - b2^t); so with the same eps and very small gradients torch's first update is 31.6 times as large
    (b2 = 0.999).
    """
    if config.adam == "torch":
        return config.eps
    return config.eps / math.sqrt(1.0 - config.betas[1] ** update)


class LearningRates:
    """The learning rate of every planned update: `updates_per_step` of them share one where `schedule_by` says so."""

    def __init__(self, config: OptimizerConfig, *, total_updates: int, updates_per_step: int) -> None:
        self._config, self._total_updates = config, total_updates
        self._lr_every = updates_per_step if config.schedule_by == "step" else 1

    def at(self, planned: int) -> float:
        """Of the update whose place in the schedule is `planned`, 0-indexed."""
        update = planned - planned % self._lr_every
        return self._config.lr * lr_factor(self._config, update=update, total_updates=self._total_updates)


MAX_NAMED = 8
"""Rollouts or parameters that a message names; a report has all."""


def named(names: Iterable[Any]) -> str:
    """At most MAX_NAMED of them, and how many more there are."""
    listed = [str(name) for name in names]
    more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    return ", ".join(listed[:MAX_NAMED]) + more


def require_finite(grad_norm: float, *, num_updates: int, non_finite: Callable[[], list[str]]) -> float:
    """`grad_norm`. NonFiniteError when it is NaN or inf, with the parameters that `non_finite` names then."""
    if not math.isfinite(grad_norm):
        names = non_finite()
        raise NonFiniteError(
            "the gradient is not finite; weights were not changed",
            got=f"gradient norm {grad_norm} at update {num_updates}, not finite in "
            + (named(names) or "any single parameter: their squares overflow"),
            hint="lower trainer.optimizer.lr, or look at this batch's rewards and logprobs",
            report={"parameters": names, "num_updates": num_updates},
        )
    return grad_norm


class Optimizer(Protocol):
    """AdamW with clipping and a schedule, over a whole model (`FlatAdamW`) or one rank's part of it (`ShardedAdamW`).

    On several ranks everything but `zero_grad` is called by all of them together, and gives all the same numbers.
    """

    num_updates: int
    """Updates made."""

    planned: int
    """The next update's place in the schedule: beyond `num_updates` where planned ones had nothing to train on."""

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        ...

    def zero_grad(self) -> None:
        """Clear the gradients: backward passes add to them until `step`."""
        ...

    def before_backward(self, *, is_last: bool) -> None:
        """Say before a backward pass whether it is the last one until `step`; unless told, each is taken for it."""
        ...

    def finite_grad_norm(self) -> float:
        """The norm of the whole model's gradient, each element once. NonFiniteError when it is NaN or inf."""
        ...

    def step(self) -> float:
        """Clip by global norm and update; the gradient norm before clipping.

        NonFiniteError, with weights and state unchanged, when that norm is NaN or inf.
        """
        ...


class FlatAdamW:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) over all parameters as one tensor, with gradients alongside.

    Every parameter's `.grad` is a view into one flat tensor: clearing, clipping and updating are one kernel each.
    Decoupled weight decay is applied to matrices only, not to norms or biases. `OptimizerConfig.adam` chooses where
    epsilon stands (`corrected_eps`), `OptimizerConfig.schedule_by` whether `updates_per_step` updates share a rate.
    Implements `Optimizer`. Identity: equals torch.optim.AdamW with two parameter groups.
    """

    def __init__(
        self,
        model: nn.Module,
        flat: FlatParameters,
        config: OptimizerConfig,
        *,
        total_updates: int,
        updates_per_step: int = 1,
    ) -> None:
        self._flat = flat
        self._config = config
        self._rates = LearningRates(config, total_updates=total_updates, updates_per_step=updates_per_step)
        self._parameter = nn.Parameter(flat.flat.detach())
        self._parameter.grad = torch.zeros_like(flat.flat)
        self._adamw = torch.optim.AdamW(
            [self._parameter], lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=0.0, fused=True
        )
        grads = flat.views_of(self.grad)
        self._parameters = [(parameter, grads[name]) for name, parameter in model.named_parameters()]
        self.num_updates = 0
        self.planned = 0

    @property
    def grad(self) -> Tensor:
        """The flat gradient, float32 [num_params]; parameters' `.grad` are views into it."""
        assert self._parameter.grad is not None
        return self._parameter.grad

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return self._rates.at(self.planned)

    def zero_grad(self) -> None:
        """Clear the gradient and point every parameter's `.grad` at it (another optimizer may have had them)."""
        self.grad.zero_()
        for parameter, grad in self._parameters:
            parameter.grad = grad

    def before_backward(self, *, is_last: bool) -> None:
        """Nothing is put off until the last backward pass."""

    @torch.no_grad()
    def step(self) -> float:
        """Clip by global norm and update; the gradient norm before clipping.

        NonFiniteError, with weights and state unchanged, when that norm is NaN or inf.
        """
        grad_norm = self.finite_grad_norm()
        if grad_norm > self._config.max_grad_norm:
            self.grad.mul_(self._config.max_grad_norm / (grad_norm + 1e-6))
        lr = self.lr
        if self._config.weight_decay:
            for parameter, _ in self._parameters:
                if parameter.ndim >= 2:
                    parameter.mul_(1.0 - lr * self._config.weight_decay)
        self._parameter.data = self._flat.flat
        self._adamw.param_groups[0]["lr"] = lr
        self._adamw.param_groups[0]["eps"] = corrected_eps(self._config, update=self.num_updates + 1)
        self._adamw.step()
        self.num_updates += 1
        self.planned += 1
        return grad_norm

    def finite_grad_norm(self) -> float:
        """The gradient's norm. NonFiniteError when it is NaN or inf."""
        return require_finite(
            float(torch.linalg.vector_norm(self.grad)), num_updates=self.num_updates, non_finite=self._non_finite
        )

    def _non_finite(self) -> list[str]:
        views = self._flat.views_of(self.grad)
        return [name for name, view in views.items() if not bool(torch.isfinite(view).all())]

    def state_dict(self) -> dict[str, Tensor]:
        """`exp_avg` and `exp_avg_sq` float32 [num_params] (live, not copies) and `num_updates` int64 []."""
        state = self._adamw.state[self._parameter]
        zeros = torch.zeros_like(self._parameter) if not state else None
        return {
            "exp_avg": state["exp_avg"] if zeros is None else zeros,
            "exp_avg_sq": state["exp_avg_sq"] if zeros is None else zeros.clone(),
            "num_updates": torch.tensor(self.num_updates),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue exactly where `state_dict` was taken. CheckpointError when the sizes are another model's."""
        if state["exp_avg"].shape != self._parameter.shape:
            raise CheckpointError(
                "the optimizer state belongs to another model",
                got=f"{state['exp_avg'].numel()} parameters",
                allowed=self._parameter.numel(),
            )
        self.num_updates = self.planned = int(state["num_updates"])
        self._adamw.state[self._parameter] = {
            "step": torch.tensor(float(self.num_updates), device=self._parameter.device),
            "exp_avg": state["exp_avg"].to(self._parameter.device, copy=True),
            "exp_avg_sq": state["exp_avg_sq"].to(self._parameter.device, copy=True),
        }
