"""A mixture of experts in place of a layer's MLP: a router chooses k of E small MLPs for every token.

    y_n = sum_j g_nj MLP_{e_nj}(x_n),   e_n = the k largest of p_n = softmax(R x_n),   g_n = p_n at e_n, or over its sum

Shazeer et al. (arXiv:1701.06538), section 2, with the softmax of Mixtral (arXiv:2401.04088) and Qwen3. Tokens are
sorted by expert, so an expert is one product per matrix. The weights of all experts are rows of one parameter, expert
behind expert: storage, precisions, weight sync and FSDP2 treat it like any other matrix.

On a CPU every expert's rows are filled up to a multiple of 8, at which a row of a product has the same bits whatever
the other rows are (`linear.py`), and a token's experts are added in the order of their weights: so a token's bits do
not depend on who else is in the batch. On CUDA bfloat16 goes through `torch._grouped_mm`, which needs no number of
rows on the host, and so can be captured; other types, and GPUs without it, take the loop, which cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slipstream.models.config import TransformerConfig
from slipstream.models.layer_functions import gated
from slipstream.models.linear import Linear, linear

if TYPE_CHECKING:
    from slipstream.models.expert_parallel import ExpertShare

Choose = Callable[[Tensor], Tensor]
"""Chosen experts int64 [N, k] -> those that are computed with."""
ROWS = 8
"""An expert's rows on a CPU are a multiple of this."""


def multiplies_groups(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the products of all experts are one kernel, `torch._grouped_mm`'s, on this device and in this type."""
    return (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and hasattr(torch, "_grouped_mm")
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def route_type(num_experts: int) -> torch.dtype:
    """Return the type in which chosen experts are recorded; its largest number stands for "not known"."""
    return torch.uint8 if num_experts < torch.iinfo(torch.uint8).max else torch.int16


def replayed(recorded: Tensor, chosen: Tensor) -> Tensor:
    """Return the `recorded` experts [N, k] where they are known, elsewhere those `chosen`, int64 [N, k]."""
    return torch.where(recorded < torch.iinfo(recorded.dtype).max, recorded.long(), chosen)


@dataclass(frozen=True, eq=False)
class Groups:
    """Where tokens lie when they are sorted by expert: row r is of token `source[r]`, int64 [P].

    The j-th expert of token n has row `places[n, j]`, int64 [N, k]. Expert e has the next `sizes[e]` rows; or, on the
    device alone, those up to `ends[e]`, int32 [E].
    """

    source: Tensor
    places: Tensor
    sizes: Sequence[int]
    ends: Tensor | None = None


def group(chosen: Tensor, num_experts: int, *, on_device: bool = False) -> Groups:
    """Sort tokens by the experts `chosen` for them, int64 [N, k]; within an expert they stay in order.

    Without `on_device` an expert's rows are filled up to a multiple of `ROWS` with the first token's.
    """
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    ranks = torch.arange(len(flat), device=flat.device)
    counts = counts_of(flat, num_experts)
    token = order // chosen.shape[1]
    if on_device:
        places = torch.empty_like(flat).scatter_(0, order, ranks)
        return Groups(token, places.view_as(chosen), (), counts.cumsum(0, dtype=torch.int32))
    filled = (counts + ROWS - 1) // ROWS * ROWS
    shifts = (filled.cumsum(0) - filled) - (counts.cumsum(0) - counts)  # how far an expert's rows move
    rows = ranks + shifts[flat[order]]
    sizes = filled.tolist()
    source = torch.zeros(sum(sizes), dtype=torch.int64, device=flat.device).scatter_(0, rows, token)
    places = torch.empty_like(flat).scatter_(0, order, rows)
    return Groups(source, places.view_as(chosen), sizes)


def counts_of(chosen: Tensor, num_experts: int) -> Tensor:
    """Return how often each of the experts is `chosen`, int64 [E]. The host would wait for the length of a bincount."""
    flat = chosen.flatten()
    return torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def each_expert(x: Tensor, sizes: Sequence[int], products: Sequence[Callable[[Tensor], Tensor]], width: int) -> Tensor:
    """Rows x [P, K], of which `sizes[e]` are expert e's, through their experts' `products`: [P, width]."""
    out = x.new_empty(len(x), width)
    start = 0
    for size, product in zip(sizes, products, strict=True):
        if size:
            out[start : start + size] = product(x[start : start + size])
            start += size
    return out


class _Grouped(torch.autograd.Function):
    """y = x W_e^T for the rows of each expert e;  dx = dy W_e,  dW_e = dy^T x, both over its rows; 0 of no rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        return _multiply(x, weight, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dx = _multiply(grad, weight.transpose(1, 2), ctx.sizes) if needs_x else None
        if not needs_weight:
            return dx, None, None
        pieces = zip(torch.split(grad, ctx.sizes), torch.split(x, ctx.sizes), strict=True)
        dw = torch.zeros_like(weight)
        for expert, (dy, rows) in enumerate(pieces):
            if len(rows):
                dw[expert] = linear(dy.t(), rows.t())
        return dx, dw, None


def _multiply(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    with torch.no_grad():
        products = [partial(linear, weight=one) for one in weight.unbind()]
        return each_expert(x, sizes, products, weight.shape[1])


def grouped_product(x: Tensor, groups: Groups, weight: Tensor) -> Tensor:
    """Rows x [P, K] times their experts' weights [E, M, K] transposed: [P, M], differentiable."""
    if groups.ends is not None:
        out: Tensor = torch._grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)
        return out
    out = _Grouped.apply(x, weight, groups.sizes)  # type: ignore[no-untyped-call]
    return out


class ExpertsLinear(Linear):
    """A linear layer of each of E experts: `weight` [E out_features, in_features], those of one behind the other."""

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__(in_features, num_experts * out_features, bias=False)
        self.num_experts = num_experts

    def forward(self, x: Tensor, groups: Groups) -> Tensor:  # type: ignore[override]
        """x [P, in_features], sorted by expert -> [P, out_features of one]."""
        return grouped_product(x, groups, torch.unflatten(self.weight, 0, (self.num_experts, -1)))


class Router(nn.Module):
    """Chooses experts; its weights [E, hidden] stay float32 at every precision, and so does what it computes."""

    def __init__(self, num_experts: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """x [N, hidden] -> probabilities [N, E]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return linear(x.to(wide), self.weight.to(wide)).softmax(-1)


class Experts(nn.Module):
    """Router and experts of a layer; with a `share`, those of this rank. `chosen` int64 [N, k]: the experts of each row
    in the last pass with gradients, of those that this rank has.
    """

    def __init__(
        self, config: TransformerConfig, activation: Callable[[Tensor], Tensor], share: ExpertShare | None = None
    ) -> None:
        super().__init__()
        self.share = share
        self.own = range(config.num_experts) if share is None else share.own
        self.num_experts, self.per_token = config.num_experts, config.experts_per_token
        self.normalises, self.activation = config.normalises_gates, activation
        hidden, width = config.hidden_size, config.expert_width
        self.router = Router(self.num_experts, hidden)
        self.up = ExpertsLinear(len(self.own), hidden, 2 * width)
        self.down = ExpertsLinear(len(self.own), width, hidden)
        self.chosen: Tensor | None = None

    def forward(self, x: Tensor, choose: Choose | None = None) -> Tensor:
        """x [N, hidden] -> [N, hidden], by the experts that `choose` makes of those that the router would."""
        gates, chosen = self.route(x, choose)
        parts = self._answers(x, chosen) if self.share is None else self.share.answers(x, chosen, self._products)
        total: Tensor = parts[:, 0] * gates[:, :1]
        for choice in range(1, self.per_token):
            total = total + parts[:, choice] * gates[:, choice : choice + 1]
        return total.to(x.dtype)

    def _answers(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return what the experts `chosen` for each token give, [N, k, hidden]."""
        groups = group(chosen, self.num_experts, on_device=multiplies_groups(x.device, x.dtype))
        out = self._products(x.index_select(0, groups.source), groups)
        return out.index_select(0, groups.places.flatten()).view(*chosen.shape, out.shape[1])

    def _products(self, rows: Tensor, groups: Groups) -> Tensor:
        """Rows [P, hidden], sorted by expert, through this rank's experts."""
        out: Tensor = self.down(gated(self.activation, self.up(rows, groups)), groups)
        return out

    def route(self, x: Tensor, choose: Choose | None = None) -> tuple[Tensor, Tensor]:
        """Gates float32 [N, k], differentiable, and chosen experts int64 [N, k], by falling probability."""
        probabilities = self.router(x)
        chosen = probabilities.topk(self.per_token, -1).indices
        if choose is not None:
            chosen = choose(chosen)
        gates = probabilities.gather(-1, chosen)
        if self.normalises:
            gates = gates / gates.sum(-1, keepdim=True)
        if torch.is_grad_enabled():
            self.chosen = chosen
        return gates, chosen


def expert_loads(model: nn.Module, num_tokens: int) -> Tensor:
    """Return the tokens of each expert in each layer of `model` that has experts, int64 [layers, E].

    They are those of the first `num_tokens` rows in the last pass with gradients: fillers lie behind these.
    """
    found = [module for module in model.modules() if isinstance(module, Experts) and module.chosen is not None]
    chosen = torch.stack([layer.chosen[:num_tokens].flatten() for layer in found if layer.chosen is not None])
    counts = torch.zeros(len(found), found[0].num_experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(1, chosen, torch.ones_like(chosen))


def busiest_load(model: nn.Module, num_tokens: int) -> Tensor:
    """Return the busiest expert's `expert_loads` over an average one's, in the layer where that is the most.

    1 when all are equal, at most E / k, 0 without tokens. Float64, a scalar.
    """
    loads = expert_loads(model, num_tokens).double()
    return (loads.amax(1) / loads.mean(1).clamp_min(1e-9)).amax()
