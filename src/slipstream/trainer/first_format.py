"""Checkpoints of the first format, which one CPU rank wrote: read, so that runs from before can go on.

policy.safetensors (by parameter name), optimizer.safetensors (AdamW's moments, flat), critic*.safetensors (the same two
of a critic, where there is one), random.safetensors and state.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from slipstream.core.errors import CheckpointError
from slipstream.models.safetensors_file import tensor_headers
from slipstream.models.scalar import ScalarModel
from slipstream.models.sharded import module_parts
from slipstream.models.shards import Shard
from slipstream.models.tensor_parallel import whole_config
from slipstream.models.transformer import Transformer
from slipstream.trainer.optim import MOMENTS

FILES = {
    "policy": ("policy.safetensors", "optimizer.safetensors"),
    "critic": ("critic.safetensors", "critic_optimizer.safetensors"),
}


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the policy's parameters in checkpoint `path`, by parameter name."""
    return {name: tuple(entry.shape) for name, entry in tensor_headers(path / FILES["policy"][0]).items()}


def updates(path: Path) -> dict[str, int]:
    """Return how many updates were made of each trained model."""
    present = {name: path / file for name, (_, file) in FILES.items() if (path / file).is_file()}
    return {name: int(load_file(file)["num_updates"]) for name, file in present.items()}


def random_state(path: Path, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return `checkpoint.random_state` as it was; `state` is state.json."""
    return load_file(path / "random.safetensors"), state["random"]


def shards(path: Path, modules: Mapping[str, nn.Module]) -> Iterator[Shard]:
    """Yield the tensors of `modules` ("policy", "critic"), each as one box, under their names in a checkpoint.

    Files are mapped, not read. `modules` may be a rank's parts of the models. CheckpointError for other models.
    """
    for name, module in modules.items():
        weights_file, moments_file = (path / file for file in FILES[name])
        if not weights_file.is_file():
            raise CheckpointError(f"checkpoint {path} belongs to another model", got=f"no {weights_file.name}")
        whole = _undivided(module)
        shapes = {parameter: tuple(tensor.shape) for parameter, tensor in whole.named_parameters()}
        stored = {name: load_file(weights_file)}
        if {parameter: tuple(tensor.shape) for parameter, tensor in stored[name].items()} != shapes:
            raise CheckpointError(f"checkpoint {path} belongs to another model", got=f"other parameters of the {name}")
        moments = load_file(moments_file)
        for moment in MOMENTS:
            pieces = torch.split(moments[moment], [tensor.numel() for tensor in whole.parameters()])
            stored[f"{name}.{moment}"] = {
                parameter: piece.view(shape) for (parameter, shape), piece in zip(shapes.items(), pieces, strict=True)
            }
        for part in module_parts(whole):
            for kind, views in stored.items():
                yield Shard(replace(part.box, name=f"{kind}/{part.box.name}"), part.of(views[part.parameter]))


def _undivided(module: nn.Module) -> nn.Module:
    """Return a module like the one that a single rank trains, on "meta": its parameters say how flat weights lie."""
    with torch.device("meta"):
        if isinstance(module, Transformer):
            return Transformer(whole_config(module))
        if isinstance(module, ScalarModel):
            return ScalarModel(whole_config(module.backbone))
        return module  # a head, which is whole on every rank
