"""Matrix products of every linear layer: oneDNN for float32 on a CPU, `F.linear` for everything else.

torch's own float32 product on a CPU is MKL's, which leaves half of some processors' rate (AMD's) unused. oneDNN, which
ships with torch too, reaches it (`benchmarks/linear.py` compares the two), and a row of its product has the same bits
at every number of rows but 1: the decode engine asks for less, multiples of 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def find_onednn() -> Any:
    """torch's operator (input, weight, bias, activation, its scalars, its algorithm) -> Tensor, or None without oneDNN.

    The one torch.compile emits for linear layers on CPUs; not public, hence the search.
    """
    namespace = torch.ops.mkldnn
    if torch._C._has_mkldnn and hasattr(namespace, "_linear_pointwise"):
        return namespace._linear_pointwise
    return None


def find_onednn_packing() -> Any:
    """torch's operator (weight [M, K], number of rows) -> the weight in oneDNN's own order, or None without oneDNN.

    What it returns is good for nothing but `find_onednn`'s operator.
    """
    namespace = torch.ops.mkldnn
    if find_onednn() is not None and hasattr(namespace, "_reorder_linear_weight"):
        return namespace._reorder_linear_weight
    return None


_onednn = find_onednn()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, K] times weight [M, K] transposed, plus bias [M]: [N, M] by oneDNN."""
    out: Tensor = _onednn(x, weight, bias, "none", [], "")
    return out


@torch.inference_mode()
def keeps_bits() -> bool:
    """Return whether a row's product has the same bits among 8 rows and among more, on this processor with this torch.

    Engine and trainer of a synchronous run have equal bits only where it has: not with oneDNN 3.10 (torch 2.11).
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 64, generator=generator, dtype=torch.float32) for rows in (128, 72))
    alone = torch.cat([linear(part, weight) for part in x.view(-1, 8, 64)])
    return all(torch.equal(linear(x[:rows], weight), alone[:rows]) for rows in (16, 64, 128))


class _OneDnnLinear(torch.autograd.Function):
    """y = x W^T + b;  dx = dy W,  dW = dy^T x,  db = sum over rows of dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()  # the gradient of a sum is one number with strides of 0
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _product(grad, weight.t()) if needs_x else None,
            _product(grad.t(), x.t()) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, K], weight [M, K], bias [M] -> x W^T + b [N, M], differentiable.

    Identity: equals `F.linear` up to rounding.
    """
    if _onednn is None or x.ndim != 2 or not (x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32):
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling():  # inductor takes weights for oneDNN that are constants only
        return F.linear(x, weight, bias)
    if not len(x):  # a microbatch without targets: oneDNN has no sum over no rows, which the gradient of `weight` is
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _product(x, weight, bias)
    out: Tensor = _OneDnnLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return out


class Linear(nn.Linear):
    """`nn.Linear` whose product is `linear`'s, or `product` where its weight is stored elsewhere (`stored_base.py`)."""

    product: Callable[[Tensor], Tensor] | None = None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias, dtype=torch.float32)

    def reset_parameters(self) -> None:
        """Draw nothing: weights come from a checkpoint or a seed, and the global random state is left alone."""

    def forward(self, x: Tensor) -> Tensor:
        """x [N, in_features] -> [N, out_features]."""
        return linear(x, self.weight, self.bias) if self.product is None else self.product(x)


class Embedding(nn.Embedding):
    """`nn.Embedding` whose rows are those of `product` where they are stored elsewhere."""

    product: Callable[[Tensor], Tensor] | None = None
    is_trained = True  # with its own weights, and not with an adapter beside them

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [N] -> [N, embedding_dim]."""
        return super().forward(tokens) if self.product is None else self.product(tokens)
