"""Fresh models: the shape a ModelConfig asks for, weights from a seed alone."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.core.sections import ModelConfig
from slipstream.models.config import TransformerConfig, usual_parts
from slipstream.models.transformer import Transformer

INIT_STD = 0.02


def new_config(
    config: ModelConfig, vocab_size: int, *, eos_token_id: int | None = None, pad_token_id: int | None = None
) -> TransformerConfig:
    """The decoder that `config` describes, with its family's usual norms, biases and activation."""
    is_gpt = config.family in ("gpt2", "gpt_neox")
    return TransformerConfig(
        family=config.family,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads if is_gpt else config.num_kv_heads,
        head_dim=config.hidden_size // config.num_heads,
        max_positions=config.max_positions,
        tie_embeddings=config.tie_embeddings,
        norm_eps=1e-5 if is_gpt else 1e-6,
        activation={"gpt2": "gelu_tanh", "gpt_neox": "gelu"}.get(config.family, "silu"),
        rotary_fraction={"gpt2": 0.0, "gpt_neox": 0.25}.get(config.family, 1.0),
        **usual_parts(config.family),
        parallel_residual=config.family == "gpt_neox",
        eos_token_ids=() if eos_token_id is None else (eos_token_id,),
        pad_token_id=pad_token_id,
    )


def new_model(
    config: ModelConfig,
    vocab_size: int,
    seed: int,
    *,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> Transformer:
    """A freshly initialised decoder, determined by its arguments alone; the global random state is left alone."""
    model = Transformer(new_config(config, vocab_size, eos_token_id=eos_token_id, pad_token_id=pad_token_id))
    initialise(model, seed)
    return model


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Draw all weights: matrices N(0, 0.02), those that write into the residual stream N(0, 0.02 / sqrt(2 num_layers)).

    Biases 0, norms 1. GPT-2 (Radford et al. 2019), section 2.3.
    """
    generator = torch.Generator().manual_seed(seed)
    residual_std = INIT_STD / (2 * model.config.num_layers) ** 0.5

    def draw(tensor: Tensor, std: float) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)

    for name, parameter in model.named_parameters():
        if name.endswith(("output.weight", "down.weight")):
            draw(parameter, residual_std)
        elif parameter.ndim == 2:
            draw(parameter, INIT_STD)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.fill_(1.0)
