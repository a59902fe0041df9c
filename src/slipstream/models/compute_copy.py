"""One rank's weights in the precision of its products, beside the float32 weights that the optimizer updates."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from slipstream.models.experts import Router


class ComputeCopy:
    """Copies of a model's parameters, which a forward pass puts in their places until `reshard`.

    To the rest of the trainer it is what FSDP2 is on one rank (`sharded.py`): a pass computes with `dtype`, what it
    adds to a gradient is rounded to that and summed in float32, and `reshard` comes after writing into weights. But
    nothing is cast, gathered or freed while layers run. Routers, whose products are in float32, have no copy.
    `reshard` always copies: torch counts writes into a tensor (`_version`), but not those of its fused optimizers.
    Identity: gradients and weights are FSDP2's, bit for bit; with float32, those of plain parameters.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        whole = {one.weight for one in model.modules() if isinstance(one, Router)}
        self._places = [
            (module, name, f"{prefix}.{name}".lstrip("."), parameter)
            for prefix, module in model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if parameter not in whole
        ]
        self._mains: list[Tensor] = [parameter for *_, parameter in self._places]
        self._copies: list[Tensor] = [nn.Parameter(torch.empty_like(one, dtype=dtype)) for one in self._mains]
        for copy, main in zip(self._copies, self._mains, strict=True):
            copy.register_post_accumulate_grad_hook(partial(_add, main))  # type: ignore[no-untyped-call]
        self._seen: list[int] = []  # the mains' versions when the copies were made
        model.register_forward_pre_hook(lambda *_: self._put_in_place())

    def _put_in_place(self) -> None:
        if self._versions() != self._seen:  # written into, as by `load_shard`, and nobody has said so
            self._refresh()
        for (module, name, *_, main), copy in zip(self._places, self._copies, strict=True):
            module._parameters[name] = copy.requires_grad_(main.requires_grad)

    def _versions(self) -> list[int]:
        return [main._version for main in self._mains]

    @torch.no_grad()
    def _refresh(self) -> None:
        torch._foreach_copy_(self._copies, self._mains)
        self._seen = self._versions()

    def reshard(self) -> None:
        """Put the float32 weights back in their places, and copy them."""
        for module, name, _, main in self._places:
            module._parameters[name] = main
        self._refresh()

    def lie_in(self, places: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keep copies in `places`, by parameter name, from now on; return those of their shapes and type, which hold
        them. The others stay where they are."""
        taken = dict[str, Tensor]()
        for (_, _, name, _), copy in zip(self._places, self._copies, strict=True):
            place = places.get(name)
            if place is not None and (place.shape, place.dtype) == (copy.shape, copy.dtype):
                copy.data = taken[name] = place.copy_(copy.detach())
        return taken

    def named_views(self) -> dict[str, Tensor]:
        """Return the copies by parameter name: live, and those of the weights as of the last `reshard` or pass."""
        return {name: copy.detach() for (_, _, name, _), copy in zip(self._places, self._copies, strict=True)}


def _add(main: Tensor, copy: Tensor) -> None:
    """Move the gradient of `copy` into that of `main`."""
    assert copy.grad is not None
    main.grad = copy.grad.float() if main.grad is None else main.grad.add_(copy.grad)
    copy.grad = None
