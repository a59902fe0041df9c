"""All parameters of a model in one contiguous tensor: one copy ships a version, one pointer flip swaps it in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.core.errors import ShapeError


class FlatParameters:
    """Re-homes every parameter of `model` as a view into one contiguous fp32 tensor, `flat` [num_params].

    A tied weight counts once. Parameters lie in `named_parameters` order without gaps. `flatten_grads` does the same
    for gradients, so that clipping and the optimizer work on one tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())  # a shared parameter is listed once
        wrong = sorted(f"{name} ({p.dtype})" for name, p in self._parameters.items() if p.dtype != torch.float32)
        if wrong:
            raise ShapeError("flat parameters are fp32", got=", ".join(wrong))
        self.num_params = sum(p.numel() for p in self._parameters.values())
        device = next(iter(self._parameters.values())).device
        self.flat = torch.empty(self.num_params, device=device)
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

    @property
    def holding(self) -> None:
        """Not known: versions are whole (`core.executor.FlatWeights`)."""

    def prepare(self, flat: Tensor) -> None:
        """Nothing is to be done before `rebind` (`core.executor.FlatWeights`)."""

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

    def flatten_grads(self) -> Tensor:
        """Make every parameter's gradient a view into one zeroed tensor [num_params], which is returned.

        Backward passes then add into it. Zero that tensor between updates; `zero_grad(set_to_none=True)` would undo it.
        """
        grad_flat = torch.zeros_like(self.flat)
        for name, view in self.views_of(grad_flat).items():
            self._parameters[name].grad = view
        return grad_flat
