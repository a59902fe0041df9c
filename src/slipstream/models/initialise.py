"""Fresh models: the shape a ModelConfig asks for, weights from a seed alone."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.core.sections import ModelConfig
from slipstream.models.config import new_config
from slipstream.models.transformer import Transformer

INIT_STD = 0.02


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
        tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float32) * std)

    for name, parameter in model.named_parameters():
        if name.endswith(("output.weight", "down.weight")):
            draw(parameter, residual_std)
        elif parameter.ndim == 2:
            draw(parameter, INIT_STD)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.fill_(1.0)
