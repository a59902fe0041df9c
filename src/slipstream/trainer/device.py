"""What the trainer's ranks compute on."""

from __future__ import annotations

import torch

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError


def check_trainer_device(config: RunConfig) -> None:
    """Raise ConfigError unless this machine has a GPU for every rank of a trainer on CUDA."""
    num_gpus, ranks = torch.cuda.device_count(), config.trainer.ranks
    if config.trainer.device == "cuda" and ranks > num_gpus:
        raise ConfigError(
            "every rank of the trainer needs a GPU of its own",
            got=f"trainer.device = 'cuda' with trainer.ranks = {ranks} and {num_gpus} GPUs",
            allowed=f"trainer.ranks <= {num_gpus}" if num_gpus else "trainer.device = 'cpu'",
            hint="`slipstream doctor` shows GPUs; `slipstream launch` spreads a group over machines",
        )
