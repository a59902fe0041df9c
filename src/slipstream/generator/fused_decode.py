"""The model's part of a decode step in 9 kernels a layer, and one more where attention is joined from stretches.

    add + RMSNorm, qkv, head norms + rotation + keys and values, attention, output, add + RMSNorm, up, SiLU * up, down

At fp8 add + RMSNorm and SiLU * up give rows in e4m3, and one kernel more rounds those of attention.

The model knows nothing of it: this runs its layers in its place, over the products and vectors that it has, whatever
they are (`models/products.py`, adapters). Experts, and MLPs without a SiLU gate, run as the model has them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.generator.paged_attention import PagedDecodeAttention
from slipstream.models.device import has_triton, power_of_two
from slipstream.models.e4m3 import E4m3Rows, by_kernel, has_kernels
from slipstream.models.layer_functions import silu_mul
from slipstream.models.products import Fp8Product
from slipstream.models.served import ServedLinear
from slipstream.models.transformer import Layer, OneRank, Transformer

HEADS_TILE = 512  # numbers of whole heads that a program of 2 warps has: 16 bytes in bfloat16 for each thread


def default_fused(model: Transformer, device: torch.device) -> bool:
    """On CUDA with Triton, for layers that are fused and not divided over ranks."""
    return device.type == "cuda" and has_triton() and model.config.can_fuse and isinstance(model.ranks, OneRank)


def fused_forward(model: Transformer, tokens: Tensor, positions: Tensor, attention: PagedDecodeAttention) -> Tensor:
    """`model(tokens, positions, attention)` for one new token of each row; equal up to rounding."""
    x: Tensor = model.embedding(tokens)
    branch: Tensor | None = None
    for layer in model.layers:
        qkv = layer.qkv(normed_for(layer.qkv, x, branch, layer.attention_norm))
        queries = enter(layer, qkv, model.cos, model.signed_sin, positions, attention)
        mixed = attention.attend_stored(layer.index, queries)
        attended = layer.output(mixed.reshape(len(x), -1))
        if layer.is_sparse or not layer.config.gated_mlp or layer.activation is not F.silu:
            branch = layer.mlp(add_norm(x, attended, layer.mlp_norm), attention)
        else:
            gate_up = layer.up(normed_for(layer.up, x, attended, layer.mlp_norm))
            branch = layer.down(by_kernel(gate_up, is_gated=True) if reads_e4m3(layer.down, x) else silu_mul(gate_up))
    return add_norm(x, branch, model.final_norm)


def reads_e4m3(linear: nn.Module, x: Tensor) -> bool:
    """Tell whether the product of a layer reads rows that kernels have rounded, where `x` lies."""
    return isinstance(linear, ServedLinear) and isinstance(linear.product, Fp8Product) and has_kernels(x)


def normed_for(linear: nn.Module, stream: Tensor, branch: Tensor | None, norm: nn.Module) -> Tensor | E4m3Rows:
    """`add_norm`, rounded to e4m3 if that is what `linear` reads."""
    if not reads_e4m3(linear, stream):
        return add_norm(stream, branch, norm)
    rows = E4m3Rows.empty(stream, stream.shape[1])
    add_norm(stream, branch, norm, rows)
    return rows


def add_norm(stream: Tensor, branch: Tensor | None, norm: nn.Module, into: E4m3Rows | None = None) -> Tensor:
    """Add `branch` [B, hidden] to `stream` in place, if there is one; return the sum normalised by an RMSNorm."""
    from slipstream.generator import decode_kernels as kernels

    assert isinstance(norm, nn.RMSNorm)
    assert norm.eps is not None
    rows, hidden = stream.shape
    block = power_of_two(hidden)
    normed = torch.empty_like(stream) if into is None else into.values
    kernels.add_norm_kernel[(rows,)](
        stream,
        stream if branch is None else branch.contiguous(),
        norm.weight,
        normed,
        normed if into is None else into.scales,
        norm.eps,
        HIDDEN=hidden,
        BLOCK=block,
        ADDS=branch is not None,
        ROUNDS=into is not None,
        num_warps=norm_warps(block),
    )
    return normed


def norm_warps(block: int) -> int:
    """Warps of a program that normalises `block` numbers: 8 or 16 numbers a thread, of few programs."""
    return min(16, max(1, block // 256))


def enter(
    layer: Layer, qkv: Tensor, cos: Tensor, signed_sin: Tensor, positions: Tensor, attention: PagedDecodeAttention
) -> Tensor:
    """Store the keys and values of `qkv` [B, (H + 2 Hkv) D] in the pages; return the queries [B, H, D]."""
    from slipstream.generator import decode_kernels as kernels

    config, (keys, values) = layer.config, attention.stored(layer.index)
    norms = (layer.q_norm, layer.k_norm) if config.qk_norm else ()
    q_weight, k_weight = (norm.weight for norm in norms) if norms else (qkv, qkv)
    queries = torch.empty((len(qkv), config.num_heads, config.head_dim), dtype=qkv.dtype, device=qkv.device)
    heads, head_block = config.num_heads + 2 * config.num_kv_heads, power_of_two(config.head_dim)
    at_once = max(1, HEADS_TILE // head_block)
    kernels.enter_kernel[(len(qkv), -(-heads // at_once))](
        qkv.contiguous(),
        q_weight,
        k_weight,
        cos,
        signed_sin,
        positions,
        attention.slots,
        queries,
        keys,
        values,
        config.norm_eps,
        NUM_HEADS=config.num_heads,
        NUM_KV_HEADS=config.num_kv_heads,
        HEAD_DIM=config.head_dim,
        HEAD_BLOCK=head_block,
        HEADS=at_once,
        ROTARY=config.rotary_dim,
        NORMS=config.qk_norm,
        num_warps=2,
    )
    return queries
