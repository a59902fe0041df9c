"""AdamW over one rank's part of a model that is divided over ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from slipstream.core.errors import CheckpointError
from slipstream.core.training_sections import OptimizerConfig
from slipstream.models.sharded import ShardedParameters
from slipstream.trainer.optim import LearningRates, corrected_eps, require_finite

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) of what lies on this rank, clipped by the whole model's norm.

    Implements `optim.Optimizer`; options as `FlatAdamW`'s. Gradients are sums over ranks (`sharded.py`), so what
    several ranks hold they change alike. Identity: the same weights as `FlatAdamW` of the whole model, up to rounding.

    With `reduce_once`, gradients are summed over data-parallel ranks in the last backward pass before `step` only, as
    `before_backward` says; until then each rank has one of all rows. All ranks must say alike.
    """

    def __init__(
        self,
        parameters: ShardedParameters,
        config: OptimizerConfig,
        *,
        total_updates: int,
        updates_per_step: int = 1,
        reduce_once: bool = False,
    ) -> None:
        self._parameters, self._config, self._reduce_once = parameters, config, reduce_once
        self._rates = LearningRates(config, total_updates=total_updates, updates_per_step=updates_per_step)
        self._views = {name: nn.Parameter(view) for name, view in parameters.named_views().items()}
        self._adamw = torch.optim.AdamW(
            list(self._views.values()),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=0.0,
            fused=True,
        )
        self._is_finished = False  # whether the gradients are sums over ranks already
        self.num_updates = 0
        self.planned = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return self._rates.at(self.planned)

    def zero_grad(self) -> None:
        """Drop the gradients: the next backward pass makes new ones."""
        self._parameters.zero_grad()
        self._is_finished = False

    def before_backward(self, *, is_last: bool) -> None:
        """Say before a backward pass whether it is the last one until `step`; unless told, each is taken for it."""
        if self._reduce_once:
            self._parameters.sum_gradients(is_last)

    def finite_grad_norm(self) -> float:
        """The whole gradient's norm, on all ranks alike. NonFiniteError, there too, when it is NaN or inf."""
        if not self._is_finished:
            self._parameters.finish_gradients()
            self._is_finished = True
        return require_finite(
            self._parameters.grad_norm(), num_updates=self.num_updates, non_finite=self._parameters.non_finite_grads
        )

    @torch.no_grad()
    def step(self) -> float:
        """Clip by global norm and update; the gradient norm before clipping. NonFiniteError as `finite_grad_norm`'s."""
        grad_norm = self.finite_grad_norm()
        lr = self.lr
        grads = self._parameters.named_grads()
        if grad_norm > self._config.max_grad_norm:
            torch._foreach_mul_(list(grads.values()), self._config.max_grad_norm / (grad_norm + 1e-6))
        if self._config.weight_decay:
            matrices: list[Tensor] = [view for view in self._views.values() if view.ndim >= 2]
            torch._foreach_mul_(matrices, 1.0 - lr * self._config.weight_decay)
        for name, view in self._views.items():
            view.grad = grads[name]
        self._adamw.param_groups[0]["lr"] = lr
        self._adamw.param_groups[0]["eps"] = corrected_eps(self._config, update=self.num_updates + 1)
        self._adamw.step()
        for view in self._views.values():
            view.grad = None
        self._parameters.reshard()
        self.num_updates += 1
        self.planned += 1
        return grad_norm

    def named_moments(self) -> dict[str, dict[str, Tensor]]:
        """`exp_avg` and `exp_avg_sq` of `ShardedParameters.named_views`, by parameter name: live, not copies."""
        for view in self._views.values():
            if not self._adamw.state[view]:
                self._adamw.state[view] = {
                    "step": torch.tensor(float(self.num_updates), device=view.device),
                    **{moment: torch.zeros_like(view, requires_grad=False) for moment in MOMENTS},
                }
        return {
            moment: {name: self._adamw.state[view][moment] for name, view in self._views.items()} for moment in MOMENTS
        }

    def resume(self, moments: Mapping[str, Mapping[str, Tensor]], num_updates: int) -> None:
        """Continue where `named_moments` were taken after `num_updates`. CheckpointError for another model's shapes."""
        for moment, live in self.named_moments().items():
            for name, tensor in live.items():
                if moments[moment][name].shape != tensor.shape:
                    raise CheckpointError(
                        f"the optimizer state of {name} belongs to another model or division",
                        got=list(moments[moment][name].shape),
                        allowed=list(tensor.shape),
                    )
        for moment, live in self.named_moments().items():
            for name, tensor in live.items():
                tensor.copy_(moments[moment][name])
        self.num_updates = self.planned = num_updates
        for state in self._adamw.state.values():
            state["step"].fill_(float(num_updates))
