"""Hugging Face's tensor names as views into our fused parameters, one table per family.

Every logical tensor is a strided view of exactly one parameter: rows of a stack (q in `qkv`, gate in `up`), a transpose
(GPT-2 keeps weights as [in, out]), or a permutation (GPT-NeoX interleaves q, k and v by head). So reading and writing a
checkpoint, and publishing single tensors, need no special cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from slipstream.models.config import TransformerConfig
from slipstream.models.experts import Experts
from slipstream.models.transformer import Transformer


@dataclass(frozen=True)
class LogicalTensor:
    """One tensor of a checkpoint: its name, a view of our storage, and the shape the file gives it.

    `stacked` equal tensors lie behind one another in its last dimension (GPT-2's q, k and v). A division over ranks
    (`tensor_parallel.py`) never cuts inside of `unit` indices: one head's.
    """

    name: str
    view: Tensor
    shape: tuple[int, ...]
    stacked: int = 1
    unit: int = 1

    def read(self) -> Tensor:
        """The tensor in the file's shape: a view where strides allow, else a copy."""
        return self.view.reshape(self.shape)

    def write(self, value: Tensor) -> None:
        """Copy `value` (of the file's shape, any precision) into the model."""
        self.view.copy_(value.reshape(self.view.shape))


def layout(model: Transformer) -> list[LogicalTensor]:
    """Every tensor of the model's Hugging Face checkpoint, in the order of the layers. A tied head has none."""
    families = {"gpt2": _gpt2, "gpt_neox": _gpt_neox}
    return list(families.get(model.config.family, _llama)(model))


def _whole(name: str, tensor: Tensor) -> LogicalTensor:
    return LogicalTensor(name, tensor.detach(), tuple(tensor.shape))


def _affine(name: str, module: nn.Module) -> Iterator[LogicalTensor]:
    """Weight and, if there is one, bias of a linear layer or norm."""
    for suffix, parameter in module.named_parameters(recurse=False):
        yield _whole(f"{name}.{suffix}", parameter)


def _rows(prefix: str, names: list[str], sizes: list[int], linear: nn.Module, unit: int = 1) -> Iterator[LogicalTensor]:
    """Several linear layers stacked in one: each is a range of rows."""
    for suffix, parameter in linear.named_parameters(recurse=False):
        for name, piece in zip(names, torch.split(parameter.detach(), sizes), strict=True):
            yield LogicalTensor(f"{prefix}.{name}.{suffix}", piece, tuple(piece.shape), unit=unit)


def _llama(model: Transformer) -> Iterator[LogicalTensor]:
    """Llama, Mistral, Qwen2 and Qwen3, and the mixtures of experts Mixtral and Qwen3-MoE."""
    c: TransformerConfig = model.config
    if model.has_embedding:
        yield _whole("model.embed_tokens.weight", model.embedding.weight)
    for layer in model.layers:
        prefix = f"model.layers.{layer.index}"
        yield from _affine(f"{prefix}.input_layernorm", layer.attention_norm)
        sizes = [c.query_size, c.kv_size, c.kv_size]
        yield from _rows(f"{prefix}.self_attn", ["q_proj", "k_proj", "v_proj"], sizes, layer.qkv, unit=c.head_dim)
        if c.qk_norm:
            yield from _affine(f"{prefix}.self_attn.q_norm", layer.q_norm)
            yield from _affine(f"{prefix}.self_attn.k_norm", layer.k_norm)
        yield from _affine(f"{prefix}.self_attn.o_proj", layer.output)
        yield from _affine(f"{prefix}.post_attention_layernorm", layer.mlp_norm)
        if layer.is_sparse:
            yield from _experts(prefix, c, layer.experts)
            continue
        yield from _rows(f"{prefix}.mlp", ["gate_proj", "up_proj"], [c.intermediate_size] * 2, layer.up)
        yield from _affine(f"{prefix}.mlp.down_proj", layer.down)
    yield from _end(model, "model.norm", "lm_head")


def _end(model: Transformer, norm: str, head: str) -> Iterator[LogicalTensor]:
    """Final norm and head, where the last layers are."""
    if model.stage.is_last:
        yield from _affine(norm, model.final_norm)
        if not model.config.tie_embeddings:
            yield from _affine(head, model.head)


def _experts(prefix: str, config: TransformerConfig, experts: Experts) -> Iterator[LogicalTensor]:
    is_mixtral = config.family == "mixtral"
    prefix = f"{prefix}.block_sparse_moe" if is_mixtral else f"{prefix}.mlp"
    up, down = (["w1", "w3"], "w2") if is_mixtral else (["gate_proj", "up_proj"], "down_proj")
    yield from _affine(f"{prefix}.gate", experts.router)
    each = [f"experts.{expert}" for expert in experts.own]
    names = [f"{expert}.{name}" for expert in each for name in up]
    yield from _rows(prefix, names, [config.expert_width] * len(names), experts.up)
    yield from _rows(prefix, [f"{expert}.{down}" for expert in each], [config.hidden_size] * len(each), experts.down)


def _gpt_neox(model: Transformer) -> Iterator[LogicalTensor]:
    c: TransformerConfig = model.config
    if model.has_embedding:
        yield _whole("gpt_neox.embed_in.weight", model.embedding.weight)
    for layer in model.layers:
        prefix = f"gpt_neox.layers.{layer.index}"
        yield from _affine(f"{prefix}.input_layernorm", layer.attention_norm)
        yield from _affine(f"{prefix}.post_attention_layernorm", layer.mlp_norm)
        for suffix, parameter in layer.qkv.named_parameters(recurse=False):
            stacked = parameter.detach().view(3, c.num_heads, c.head_dim, *parameter.shape[1:])
            by_head = stacked.transpose(0, 1)
            yield LogicalTensor(f"{prefix}.attention.query_key_value.{suffix}", by_head, tuple(parameter.shape))
        yield from _affine(f"{prefix}.attention.dense", layer.output)
        yield from _affine(f"{prefix}.mlp.dense_h_to_4h", layer.up)
        yield from _affine(f"{prefix}.mlp.dense_4h_to_h", layer.down)
    yield from _end(model, "gpt_neox.final_layer_norm", "embed_out")


def _gpt2(model: Transformer) -> Iterator[LogicalTensor]:
    if model.has_embedding:
        yield _whole("transformer.wte.weight", model.embedding.weight)
    if model.stage.is_first:
        yield _whole("transformer.wpe.weight", model.position_embedding.weight)
    for layer in model.layers:
        prefix = f"transformer.h.{layer.index}"
        yield from _affine(f"{prefix}.ln_1", layer.attention_norm)
        yield from _conv1d(f"{prefix}.attn.c_attn", layer.qkv, stacked=3)
        yield from _conv1d(f"{prefix}.attn.c_proj", layer.output)
        yield from _affine(f"{prefix}.ln_2", layer.mlp_norm)
        yield from _conv1d(f"{prefix}.mlp.c_fc", layer.up)
        yield from _conv1d(f"{prefix}.mlp.c_proj", layer.down)
    yield from _end(model, "transformer.ln_f", "lm_head")


def _conv1d(name: str, linear: nn.Linear, stacked: int = 1) -> Iterator[LogicalTensor]:
    yield replace(_whole(f"{name}.weight", linear.weight.T), stacked=stacked)
    if linear.bias is not None:
        yield replace(_whole(f"{name}.bias", linear.bias), stacked=stacked)
