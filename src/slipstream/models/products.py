"""Products x W^T with stored weights, for generation: packed once per version, in the arithmetic a machine is best at.

A product takes x [N, K] of any float type and returns [N, M] of that type. On a CPU, oneDNN's products read weights in
blocks of its own; bringing them into that order once per version instead of once per call saves 10 to 40 % of a decode
step's products (`benchmarks/precision.py`), and gives the same bits.

int8 and e4m3 numbers are bfloat16 numbers too, so quantised weights are expanded without loss, multiplied in bfloat16
(AVX512-BF16; float32 on machines without), and scaled behind the product. torch's int8 kernel is slower at every number
of rows (docs/log.md). A row's bits do not depend on how many rows there are, in multiples of 8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models.e4m3 import E4m3Rows, adds_bias, by_kernel, has_kernels, in_torch, scaled_product
from slipstream.models.experts import Groups, each_expert, grouped_product, multiplies_groups
from slipstream.models.linear import find_onednn, find_onednn_packing
from slipstream.models.quantized import FP8, StoredWeight

Product = Callable[[Tensor], Tensor]

_onednn = find_onednn()
_pack = find_onednn_packing()
PACKS = _pack is not None
"""Whether packed products have memory of their own."""
_FP8_MULTIPLE = 16  # of rows and columns, which torch._scaled_mm asks for
_PACK_FOR_ROWS = 8  # the order of blocks is the same for all numbers of rows that decoding has


def cpu_dtype(stored: torch.dtype) -> torch.dtype:
    """Return the type that weights stored so are multiplied in on this CPU."""
    if stored == torch.float32 or _onednn is None or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32  # oneDNN may be told to do without what the processor has (ONEDNN_MAX_CPU_ISA)
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


class DenseProduct:
    """Weights [M, K] in float32 or bfloat16, their products times `scales` [M], plus `bias` [M].

    `packs`: the weights are final, and may be kept in oneDNN's order; otherwise the tensor is read anew at each call.
    """

    def __init__(
        self, weight: Tensor, scales: Tensor | None = None, bias: Tensor | None = None, *, packs: bool = False
    ) -> None:
        self._dtype = weight.dtype
        self._is_onednn = _onednn is not None and weight.device.type == "cpu"
        self._weight = _pack(weight, _PACK_FOR_ROWS) if packs and self._is_onednn and _pack is not None else weight
        self._scales, self._bias = scales, bias
        self._fused_bias = bias if bias is not None and scales is None and bias.dtype == weight.dtype else None

    def __call__(self, x: Tensor) -> Tensor:
        narrow = x.to(self._dtype)
        if self._is_onednn:
            out: Tensor = _onednn(narrow, self._weight, self._fused_bias, "none", [], "")
        else:
            out = F.linear(narrow, self._weight, self._fused_bias)
        if self._scales is not None:
            out = out * self._scales
        if self._bias is not None and self._fused_bias is None:
            out = out + self._bias
        return out.to(x.dtype)


@functools.cache
@torch.inference_mode()
def adds_in_place(width: int, in_features: int) -> bool:
    """Return whether MKL adds products with weights [width, in_features] with oneDNN's bits, at any number of rows.

    It sums in the order of the inner index where that is short, as oneDNN does, at a third of the price of a call.
    """
    if _onednn is None:
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, in_features, generator=generator, dtype=torch.float32) for rows in (1024, width))
    out = torch.randn(1024, width, generator=generator, dtype=torch.float32)
    expected = out + _onednn(x, weight, None, "none", [], "")
    turned = weight.t().contiguous()
    sizes = (8, 16, 24, 40, 64, 72, 128, 136, 1024)
    return all(torch.equal(out[:rows].addmm(x[:rows], turned), expected[:rows]) for rows in sizes)


class AddedProduct:
    """The products of x [N, K] with float weights [M, K] of few columns, added to `out` [N, M] in place."""

    def __init__(self, weight: Tensor, *, packs: bool = False) -> None:
        is_turned = packs and weight.is_cpu and weight.dtype == torch.float32 and adds_in_place(*weight.shape)
        self._turned = weight.t().contiguous() if is_turned else None
        self._product = None if is_turned else DenseProduct(weight, packs=packs)

    def __call__(self, x: Tensor, out: Tensor | None) -> Tensor:
        assert out is not None, "without gradients"
        if self._product is not None:
            return out.add_(self._product(x))
        assert self._turned is not None, "one of the two"
        return out.addmm_(x, self._turned)


class Fp8Product:
    """Weights [M, K] and activations in e4m3, each with one scale per row (`e4m3.py`); takes such rows, too.

        y_nm = a_n s_m sum_k Qx_nk Qw_mk

    `torch._scaled_mm` on Hopper. Elsewhere the same numbers are multiplied in bfloat16 or float32, which hold them
    exactly: a reference, not faster than bfloat16.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, packs: bool = False) -> None:
        self._scales, self._bias = scales, bias
        self._is_native = weight.dtype == FP8
        self._weight = weight
        self._dense = None if self._is_native else DenseProduct(weight, packs=packs)
        is_fused = self._is_native and bias is not None and bias.dtype == torch.bfloat16 and adds_bias(bias.device)
        self._fused_bias = bias if is_fused else None

    @staticmethod
    def is_native(shape: Sequence[int], device: torch.device) -> bool:
        """Whether `device` multiplies e4m3, in weights of this shape [M, K]."""
        return (
            device.type == "cuda"
            and torch.cuda.get_device_capability(device) >= (9, 0)
            and all(size % _FP8_MULTIPLE == 0 for size in shape)
        )

    def __call__(self, x: Tensor | E4m3Rows) -> Tensor:
        rows = x if isinstance(x, E4m3Rows) else by_kernel(x) if has_kernels(x) else in_torch(x)
        if self._dense is None:
            out = scaled_product(rows, self._weight, self._scales, self._fused_bias)
        else:
            out = self._dense(rows.values.float()) * rows.scales * self._scales
        if self._bias is not None and self._fused_bias is None:
            out = out + self._bias
        return out.to(x.dtype)


class ExpertsProduct:
    """The products of E experts, whose weights [E M, K], one behind the other, have `scales` [E M] or none.

    Identity: equals `ExpertsLinear` with the same weights, on a CPU with the same bits.
    """

    def __init__(self, weight: Tensor, scales: Tensor | None, num_experts: int, *, packs: bool = False) -> None:
        self._stacked, self._width = weight.view(num_experts, -1, weight.shape[1]), len(weight) // num_experts
        self._products: list[DenseProduct] = []
        if not multiplies_groups(weight.device, weight.dtype):
            of_experts = [None] * num_experts if scales is None else scales.chunk(num_experts)
            pairs = zip(self._stacked, of_experts, strict=True)
            self._products = [DenseProduct(one, own, packs=packs) for one, own in pairs]
            del self._stacked

    def __call__(self, x: Tensor, groups: Groups) -> Tensor:
        if groups.ends is not None:
            return grouped_product(x, groups, self._stacked)
        return each_expert(x, groups.sizes, self._products, self._width)


class WideProduct:
    """A head on CUDA: bfloat16 weights [M, K], logits accumulated and returned in float32, without a float32 copy."""

    def __init__(self, weight: Tensor, scales: Tensor | None = None) -> None:
        self._weight, self._scales = weight, scales

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(self._weight.dtype)
        out = torch.mm(rows, self._weight.t(), out_dtype=torch.float32)
        out = out if self._scales is None else out * self._scales
        return out.view(*x.shape[:-1], -1)


def looked_up(tokens: Tensor, *, table: StoredWeight, dtype: torch.dtype) -> Tensor:
    """tokens int64 [N] -> their rows of `table` [N, hidden] in `dtype`, which alone are expanded."""
    rows = table.values.index_select(0, tokens).to(dtype)
    return rows if table.scales is None else (rows * table.scales.index_select(0, tokens)[:, None]).to(dtype)
