"""Tiny models of every family, with weights that are the same in every process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.models.config import TransformerConfig
from slipstream.models.layout import layout
from slipstream.models.shards import Box, local_parts
from slipstream.models.tensor_parallel import TensorParallel
from slipstream.models.transformer import Transformer

VOCAB = 67  # neither 2 nor 4 divides it

LLAMA = TransformerConfig(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=160,
    tie_embeddings=False,
)
DIVISIBLE = replace(LLAMA, num_heads=12, num_kv_heads=12)
"""By 2, 3 and 4 ranks."""
_BIASED: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
_GPT: dict[str, Any] = {**_BIASED, "num_kv_heads": 4, "gated_mlp": False, "layer_norm": True}
CONFIGS = {
    "llama": LLAMA,
    "llama_tied": replace(LLAMA, tie_embeddings=True),
    "llama_biased": replace(LLAMA, **_BIASED, head_dim=16),
    "mistral": replace(LLAMA, family="mistral", num_kv_heads=1),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True, tie_embeddings=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True, head_dim=16),
    "gpt_neox": replace(LLAMA, family="gpt_neox", **_GPT, rotary_fraction=0.25, parallel_residual=True),
    "gpt_neox_serial": replace(LLAMA, family="gpt_neox", **_GPT, tie_embeddings=True),
    "gpt2": replace(LLAMA, family="gpt2", **_GPT, rotary_fraction=0.0, tie_embeddings=True, activation="gelu_tanh"),
    "gpt2_untied": replace(LLAMA, family="gpt2", **_GPT, rotary_fraction=0.0, activation="gelu_tanh"),
}

MIXTURE = replace(CONFIGS["qwen3"], family="qwen3_moe", num_experts=5, experts_per_token=2, expert_width=24)
"""Experts in every layer, which no number of ranks divides."""
MIXED = replace(MIXTURE, num_experts=8)
"""Experts that 2, 4 and 8 ranks divide."""


@torch.no_grad()
def whole_model(config: TransformerConfig, seed: int = 0) -> Transformer:
    """Weights large enough for distributions far from uniform; biases and norms away from their defaults."""
    model = Transformer(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        parameter.copy_(mean + 0.15 * torch.randn(parameter.shape, generator=generator))
    return model


def shard_boxes(config: TransformerConfig, rank: int, world: int) -> list[Box]:
    """What rank `rank` of `world` holds of a model of the whole `config`."""
    with torch.device("meta"):
        model = TensorParallel(config, rank, world).new_model()
    return [part.box for part in local_parts(model)]


def whole_tensors(config: TransformerConfig, flat: Tensor) -> dict[str, Tensor]:
    """Hugging Face's tensors of a whole model, from its flat weights (`flat.FlatParameters`) [num_params]."""
    with torch.device("meta"):
        model = Transformer(config)
    parameters = dict(model.named_parameters())
    pieces = torch.split(flat, [p.numel() for p in parameters.values()])
    views = {name: piece.view(p.shape) for (name, p), piece in zip(parameters.items(), pieces, strict=True)}
    model.load_state_dict(views, assign=True)
    return {tensor.name: tensor.read() for tensor in layout(model)}
