"""The trained parameters of a model in one contiguous tensor: one copy ships a version, one flip swaps it in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from slipstream.core.errors import ShapeError


class FlatParameters:
    """Re-homes every parameter of `model` as a view into one contiguous fp32 tensor, `flat` [num_params].

    Frozen ones, which require no gradient, are left alone. A tied weight counts once. Parameters lie in
    `named_parameters` order without gaps. In training their gradients are views into one tensor as well, so that
    clearing, clipping and updating are one kernel each; `sharded.py` has the counterpart for several ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}  # a shared one once
        wrong = sorted(f"{name} ({p.dtype})" for name, p in self._parameters.items() if p.dtype != torch.float32)
        if wrong:
            raise ShapeError("flat parameters are fp32", got=", ".join(wrong))
        self.num_params = sum(p.numel() for p in self._parameters.values())
        device = next(iter(self._parameters.values())).device
        self.flat = torch.empty(self.num_params, device=device, dtype=torch.float32)
        for name, view in self.views_of(self.flat).items():
            view.copy_(self._parameters[name].detach())
        self.rebind(self.flat)

    def views_of(self, flat: Tensor) -> dict[str, Tensor]:
        """Views into any `flat` [num_params] of this layout, by parameter name and in the parameters' shapes."""
        pieces = torch.split(flat, [p.numel() for p in self._parameters.values()])
        return {name: piece.view(p.shape) for (name, p), piece in zip(self._parameters.items(), pieces, strict=True)}

    def named_views(self) -> dict[str, Tensor]:
        """The current weights by parameter name, as views into `flat`."""
        return self.views_of(self.flat)

    def rebind(self, flat: Tensor) -> None:
        """Point every parameter at `flat` [num_params] fp32, without copying; the old tensor is left as it is."""
        if flat.shape != (self.num_params,) or flat.dtype != torch.float32 or not flat.is_contiguous():
            raise ShapeError(
                "cannot rebind parameters to this tensor",
                got=f"{list(flat.shape)} {flat.dtype}, contiguous = {flat.is_contiguous()}",
                allowed=f"[{self.num_params}] torch.float32, contiguous",
            )
        for name, view in self.views_of(flat).items():
            self._parameters[name].data = view
        self.flat = flat

    # In training

    @cached_property
    def grad(self) -> Tensor:
        """The gradient of `flat`, float32 [num_params]."""
        return torch.zeros_like(self.flat)

    @cached_property
    def _grad_views(self) -> dict[str, Tensor]:
        return self.views_of(self.grad)

    def stored(self) -> list[Tensor]:
        """Return the tensors in which the parameters lie: live, never copies."""
        return [self.flat]

    def stored_grads(self) -> list[Tensor]:
        """Return the gradients of `stored`."""
        return [self.grad]

    def by_name(self, stored: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return views into tensors like `stored`, by parameter name."""
        [flat] = stored
        return self.views_of(flat)

    def zero_grad(self) -> None:
        """Zero the gradient, and point every parameter's `.grad` at its view: backward passes add into that."""
        self.grad.zero_()
        for name, view in self._grad_views.items():
            self._parameters[name].grad = view

    def before_backward(self, *, is_last: bool) -> None:
        """Do nothing: there are no sums over ranks to put off."""

    def grad_norm(self) -> float:
        """Return the norm of the whole gradient; no backward pass may follow before `zero_grad`."""
        return float(torch.linalg.vector_norm(self.grad))

    def norm_on_device(self) -> None:
        """Return None: the norm is here."""

    def non_finite_grads(self) -> list[str]:
        """Return the parameters whose gradient is NaN or inf somewhere."""
        return [name for name, view in self._grad_views.items() if not bool(torch.isfinite(view).all())]

    def reshard(self) -> None:
        """Do nothing: the model computes with the stored weights themselves."""
