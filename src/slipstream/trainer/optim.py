"""AdamW over the parameters that a rank stores, and learning-rate schedules."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from slipstream.core.errors import NonFiniteError
from slipstream.core.training_sections import OptimizerConfig
from slipstream.models.sharded import Parameters

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of each parameter, by torch's names."""
MAX_NAMED = 8
"""Rollouts or parameters that a message names; a report has all."""


def named(names: Iterable[Any]) -> str:
    """Join at most MAX_NAMED of `names`, and say how many more there are."""
    listed = [str(name) for name in names]
    more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    return ", ".join(listed[:MAX_NAMED]) + more


def lr_factor(config: OptimizerConfig, *, update: int, total_updates: int) -> float:
    """Return the share of the peak learning rate at 0-indexed `update`: linear warm-up, then the schedule's decay to 0.

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
    """Return the epsilon with which torch's Adam makes the 1-indexed `update` of the configured formulation.

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


def require_finite_loss(loss: float, *, update: int, kind: str, chosen: Iterable[int]) -> None:
    """Raise NonFiniteError for a loss of `update` on the `chosen` ones, by number, of `kind` that is NaN or inf."""
    if not math.isfinite(loss):
        numbers = sorted(chosen)
        raise NonFiniteError(
            f"the loss on {kind} is not finite; weights were not changed",
            got=f"loss {loss} at update {update}, on {kind} {named(numbers)}",
            hint=f"lower the learning rate of this stage, or look at these {kind}",
            report={"update": update, kind: numbers},
        )


class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with clipping by global norm and a schedule.

    Decoupled weight decay is applied to matrices only, not to norms or biases. `OptimizerConfig.adam` chooses where
    epsilon stands (`corrected_eps`), `OptimizerConfig.schedule_by` whether `updates_per_step` updates share a rate.
    `num_updates` counts updates made; `planned` is the next update's place in the schedule, beyond `num_updates` where
    planned ones had nothing to train on. On several ranks all of them call everything but `zero_grad` together.
    With `offloads` the moments lie in host memory (pinned, beside a GPU): an update brings those of one stored tensor
    after the other to it, and back.
    Identities: equals torch.optim.AdamW with two parameter groups, whose function this calls (the class would import
    torch.compile, for seconds); several ranks get the weights of one, up to rounding; `offloads` changes no bit.
    """

    def __init__(
        self,
        parameters: Parameters,
        config: OptimizerConfig,
        *,
        total_updates: int,
        updates_per_step: int = 1,
        offloads: bool = False,
    ) -> None:
        self.parameters, self._config, self._total_updates = parameters, config, total_updates
        self._updates_per_rate = updates_per_step if config.schedule_by == "step" else 1
        self._stored = list(parameters.stored())
        self._offloads = offloads
        self._moments = {moment: [self._new_moment(tensor) for tensor in self._stored] for moment in MOMENTS}
        self._steps = [torch.zeros((), device=tensor.device, dtype=torch.float32) for tensor in self._stored]
        self.num_updates = 0
        self.planned = 0

    def _new_moment(self, tensor: Tensor) -> Tensor:
        if not self._offloads:
            return torch.zeros_like(tensor)
        return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda and torch.cuda.is_available())

    def lent(self, config: OptimizerConfig, *, total_updates: int) -> AdamW:
        """Return another AdamW over the same weights in the memory of these moments, of which no update was made.

        Between its last update and the first of this one comes `restart`: there are never moments of both.
        """
        assert not self.num_updates
        other = copy.copy(self)
        other._config, other._total_updates, other._updates_per_rate = config, total_updates, 1
        return other

    def restart(self) -> None:
        """Go on as if no update had been made."""
        for views in self.named_moments().values():
            for view in views.values():
                view.zero_()
        self.resumed(0)

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        update = self.planned - self.planned % self._updates_per_rate
        return self._config.lr * lr_factor(self._config, update=update, total_updates=self._total_updates)

    def zero_grad(self) -> None:
        """Clear the gradients: backward passes add to them until `step`."""
        self.parameters.zero_grad()

    def before_backward(self, *, is_last: bool) -> None:
        """Say before a backward pass whether it is the last one until `step`; unless told, each is taken for it."""
        self.parameters.before_backward(is_last=is_last)

    def finite_grad_norm(self) -> float:
        """Return the norm of the whole model's gradient. NonFiniteError when it is NaN or inf."""
        return self.require_finite(self.parameters.grad_norm())

    def require_finite(self, grad_norm: float) -> float:
        """Return `grad_norm`, the norm of the present gradient. NonFiniteError when it is NaN or inf."""
        if not math.isfinite(grad_norm):
            names = self.parameters.non_finite_grads()
            raise NonFiniteError(
                "the gradient is not finite; weights were not changed",
                got=f"gradient norm {grad_norm} at update {self.num_updates}, not finite in "
                + (named(names) or "any single parameter: their squares overflow"),
                hint="lower trainer.optimizer.lr, or look at this batch's rewards and logprobs",
                report={"parameters": names, "num_updates": self.num_updates},
            )
        return grad_norm

    @torch.no_grad()
    def step(self, *, scale: float = 1.0) -> float:
        """Clip by global norm and update, at `scale` times the learning rate; return the norm before clipping.

        NonFiniteError, with weights and state unchanged, when that norm is NaN or inf.
        """
        if (norm := self.parameters.norm_on_device()) is not None:
            return self.landed(float(self.launch(norm, scale=scale)[0]))
        grad_norm, lr, most = self.finite_grad_norm(), self.lr * scale, self._config.max_grad_norm
        if grad_norm > most:
            torch._foreach_mul_(self.parameters.stored_grads(), most / (grad_norm + 1e-6))
        self._apply(lr, 1.0 - lr * self._config.weight_decay)
        return self.landed(grad_norm)

    @torch.no_grad()
    def launch(self, norm: Tensor, *beside: Tensor, scale: float = 1.0) -> Tensor:
        """Launch `step` where the gradient's `norm` is, float64 []; nobody waits. Return it, and `beside`, float64 too.

        The update divides gradients as it reads them, and leaves all as it is where one of these numbers is not finite.
        The host is to read them, and to call `landed` unless one that is `beside` the norm is not finite.
        """
        numbers, most = torch.cat([one.flatten() for one in (norm, *beside)]), self._config.max_grad_norm
        divisor = torch.where(norm > most, (norm + 1e-6) / most, 1.0).float()
        is_refused, lr = (~numbers.isfinite().all()).float(), self.lr * scale
        decay = 1.0 - (1.0 - is_refused) * (lr * self._config.weight_decay)
        self._apply(lr, decay, grad_scale=divisor, found_inf=is_refused)
        return numbers

    def landed(self, grad_norm: float) -> float:
        """Count and return an update's `grad_norm`. NonFiniteError where it is not finite: then none was made."""
        self.require_finite(grad_norm)
        self.num_updates += 1
        self.planned += 1
        return grad_norm

    def _apply(self, lr: float, decay: float | Tensor, **on_device: Tensor) -> None:
        if self._config.weight_decay:
            matrices = [view for view in self.parameters.by_name(self._stored).values() if view.ndim >= 2]
            torch._foreach_mul_(matrices, decay)
        grads, update = self.parameters.stored_grads(), partial(self._update, lr=lr, **on_device)
        if not self._offloads:
            update(self._stored, list(grads), *self._moments.values(), self._steps)
        else:
            for tensor, grad, steps, *homes in zip(
                self._stored, grads, self._steps, *self._moments.values(), strict=True
            ):
                moments = [torch.empty_like(tensor).copy_(home, non_blocking=True) for home in homes]
                update([tensor], [grad], *([moment] for moment in moments), [steps])
                for home, moment in zip(homes, moments, strict=True):
                    home.copy_(moment, non_blocking=True)  # read again in the order of this stream
                del moments, moment  # before the next tensor's are made
        self.parameters.reshard()

    def _update(self, *state: list[Tensor], lr: float, **on_device: Any) -> None:
        """AdamW's rule for weights, gradients, both moments and counts of steps, in this order."""
        weights, grads, means, squares, steps = state
        beta1, beta2 = self._config.betas
        adamw(
            weights,
            grads,
            means,
            squares,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=0.0,
            eps=corrected_eps(self._config, update=self.num_updates + 1),
            maximize=False,
            **on_device,
        )

    def named_moments(self) -> dict[str, dict[str, Tensor]]:
        """Return each of MOMENTS by parameter name, like `Parameters.named_views`: live, never copies."""
        if self._offloads and self._stored and self._stored[0].is_cuda:
            torch.cuda.current_stream(self._stored[0].device).synchronize()  # the host is to read what is on its way
        return {moment: self.parameters.by_name(tensors) for moment, tensors in self._moments.items()}

    def resumed(self, num_updates: int) -> None:
        """Go on after `num_updates`, whose weights and moments were written into the live ones."""
        self.num_updates = self.planned = num_updates
        for steps in self._steps:
            steps.fill_(float(num_updates))
        self.parameters.reshard()
