"""The base beside adapters in a trainer, held in fewer bytes: the numbers that engines at that precision multiply by.

    y = W x + b,  W as `quantized.py` stores it;   dL/dx = W^T dL/dy

The forward product is the engines' (`products.DenseProduct`), so both sides round activations alike, and the gradient's
is in float32. On CUDA both are of bfloat16 numbers, summed in float32. No float copy of W outlives a product, in which
there are `EXPANDED` of its numbers at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import repeat, starmap
from typing import Any

import torch
from torch import Tensor

from slipstream.core.fields import Precision
from slipstream.core.rank_group import RankGroup
from slipstream.models.head import wide_product
from slipstream.models.linear import Linear, linear
from slipstream.models.products import DenseProduct, WideProduct, cpu_dtype, looked_up
from slipstream.models.quantized import StoredWeight, WeightLayout
from slipstream.models.shards import base_digest
from slipstream.models.transformer import Transformer

EXPANDED = 1 << 24
"""Numbers of a matrix that are expanded at a time."""


class _StoredProduct(torch.autograd.Function):
    """y = x W^T + b of a frozen W, whose gradient alone passes: to x, of any shape [..., K]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, scales)
        out = x.new_empty(*x.shape[:-1], len(values))
        parts = (_blocks(values, tensor) for tensor in (values, scales, bias))
        for into, *own in zip(_blocks(values, out, -1), *parts, strict=True):
            into.copy_(_forward(x, *own))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, scales = ctx.saved_tensors
        dtype = grad.dtype
        grad = grad if scales is None else grad * scales
        parts = starmap(_passed, zip(_blocks(values, grad, -1), _blocks(values, values), strict=True))
        total = next(parts)
        for part in parts:
            total += part
        return total.to(dtype), None, None, None


def _forward(x: Tensor, values: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    if not values.is_cuda:
        return DenseProduct(values.to(cpu_dtype(values.dtype)), scales, bias)(x)
    if scales is None and x.dtype == torch.bfloat16:
        return DenseProduct(values, None, bias)(x)
    out = WideProduct(values.bfloat16(), scales)(x)
    return out if bias is None else out + bias


def _passed(grad: Tensor, values: Tensor) -> Tensor:
    """grad [..., M] times values [M, K], in float32."""
    if not values.is_cuda:
        return linear(grad.float().contiguous(), values.float().t())
    return wide_product(grad.flatten(0, -2).bfloat16(), values.bfloat16().t()).view(*grad.shape[:-1], values.shape[1])


def _blocks(values: Tensor, tensor: Tensor | None, dim: int = 0) -> Iterable[Any]:
    """Yield `tensor` in parts of the rows [M] of `values` that have at most `EXPANDED` numbers each."""
    size = max(1, EXPANDED // values.shape[1])
    return repeat(None, -(-len(values) // size)) if tensor is None else torch.split(tensor, size, dim)


def stored_product(x: Tensor, weight: StoredWeight, bias: Tensor | None = None) -> Tensor:
    """x [..., K], weight [M, K], bias [M] -> x W^T + b [..., M], differentiable in x.

    Identity: equals `DenseProduct` of the same weight.
    """
    out: Tensor = _StoredProduct.apply(x, weight.values, weight.scales, bias)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, eq=False)
class StoredBase:
    """The matrices of a base and its embedding of tokens, by their parameters' names; implements `transformer.Base`.

    `digest` is that of the fp32 numbers (`shards.base_digest`), `activations` the type of the residual stream.
    """

    digest: str
    weights: Mapping[str, StoredWeight]
    activations: torch.dtype = torch.float32

    def head(self, hidden: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
        """fp32 products [..., V] of hidden [..., hidden] with the head's own weights, or `rows` of the embedding's."""
        own, table = self.weights.get("head.weight"), self.weights["embedding.weight"]
        if own is None:
            own = StoredWeight(rows(table.values), None if table.scales is None else rows(table.scales))
        return stored_product(hidden, own)

    def put_into(self, model: Transformer) -> None:
        """Let `model` compute with these matrices, in place of parameters of its own, which are released."""
        model.stored_base = self
        for name, module in model.named_modules():
            if isinstance(module, Linear):
                module.register_parameter("weight", None)
                module.product = partial(stored_product, weight=self.weights[f"{name}.weight"], bias=module.bias)
        model.embedding.register_parameter("weight", None)
        model.embedding.product = partial(looked_up, table=self.weights["embedding.weight"], dtype=self.activations)


@torch.no_grad()
def store_base(
    model: Transformer,
    precision: Precision,
    *,
    ranks: RankGroup = RankGroup.alone(),
    activations: torch.dtype = torch.float32,
) -> None:
    """Hold the frozen base of `model` at `precision`. Matrix by matrix: each is released in its turn.

    The tensor-parallel `ranks` that share it call this together: scales are those of whole rows. Norms, biases and
    embeddings of positions are in the type of `activations`, as FSDP2 would give them to every pass.
    """
    digest, parameters, weights = base_digest(model), dict(model.named_parameters()), dict[str, StoredWeight]()
    layout = WeightLayout(model, precision, is_base=True)
    for name, weight in layout.stored_weights(parameters, over_ranks=ranks.max if ranks.world > 1 else None):
        if weight.values.dtype != torch.float32:
            weights[name] = weight
            parameters[name].data = weight.values.new_empty(0, dtype=torch.float32)
        else:
            parameters[name].data = weight.values.to(activations)
    StoredBase(digest, weights, activations).put_into(model)
