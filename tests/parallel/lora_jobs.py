"""What ranks do with adapters beside a base that they share."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gradients import named_grads
from rank_models import whole_model
from rank_pool import Rank
from sharded_jobs import Boxes, Layout, axes_of, boxes, division_of, sequences_of, update_from
from training_jobs import config_of

from slipstream.core.errors import ConfigError
from slipstream.core.fields import Precision
from slipstream.core.lora_section import LoraConfig
from slipstream.core.rank_group import RankGroup
from slipstream.core.training_sections import OptimizerConfig
from slipstream.models.attention import PackedAttention
from slipstream.models.config import TransformerConfig, local_config
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import logical_tensors
from slipstream.models.lora import adapter_tensors, base_of, install, linear_layers, shapes_of
from slipstream.models.peft import with_adapters
from slipstream.models.served import ServedWeights
from slipstream.models.sharded import Division, ShardedParameters, divide, load_sharded, new_sharded
from slipstream.models.shards import base_digest, load_shard, local_shards, local_tensor
from slipstream.models.stored_base import store_base
from slipstream.models.transformer import Transformer
from slipstream.trainer.optim import AdamW
from slipstream.trainer.policy import Policy

TOKENS = torch.arange(9)


@torch.no_grad()
def logits_of(model: Transformer) -> torch.Tensor:
    return model.logits(model(TOKENS, TOKENS, PackedAttention([len(TOKENS)])))


@torch.no_grad()
def scattered(model: Transformer) -> Transformer:
    """B away from zero, which hides what is wrong with A."""
    for name, parameter in model.named_parameters():
        if name.endswith(("adapter.b", "embedding.adapter.a")):
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


def adapted(config: TransformerConfig, *, head: bool = True) -> Transformer:
    """A whole model with adapters of all linear layers."""
    targets = {piece.target for fused in linear_layers(config).values() for piece in fused.pieces}
    lora = LoraConfig(rank=2, targets=sorted(targets if head else targets - {"lm_head"}))
    return scattered(with_adapters(whole_model(config), lora, seed=0))


def beside(model: Transformer, precision: Precision, division: Division) -> AbstractContextManager[object]:
    """Hold the base at `precision`, and while that lasts multiply in float32 on every CPU, as in `served_logits`."""
    if precision != "float32":
        store_base(model, precision, ranks=division.tensor_parallel)
    return patch("slipstream.models.stored_base.cpu_dtype", lambda _stored: torch.float32)


def gradient_alone(config: TransformerConfig, precision: Precision = "float32") -> tuple[float, Boxes]:
    """Norm and gradient of one update on one rank, beside a base at `precision`."""
    model = adapted(config)
    with beside(model, precision, Division()):
        flat = FlatParameters(model)
        optimizer = AdamW(flat, OptimizerConfig(), total_updates=1)
        update_from(model, optimizer, sequences_of(0, config.vocab_size), Layout(1, 1), RankGroup.alone())
    return optimizer.finite_grad_norm(), boxes(model, named_grads(flat))


def gradient(
    rank: Rank, config: TransformerConfig, layout: Layout, precision: Precision = "float32"
) -> tuple[float, Boxes]:
    """This rank's part of it."""
    division, whole = division_of(rank, layout), adapted(config)
    model = Transformer(local_config(config, layout.tensor_parallel), division.ranks_of(config))
    divide(install(model, shapes_of(whole)), division)
    load_shard(model, logical_tensors(base_of(whole)))
    parameters = dict(whole.named_parameters())
    tensors = {tensor.name: tensor.read() for _, tensor in adapter_tensors(shapes_of(whole), parameters)}
    for shard in local_shards(model):
        shard.write(tensors[shard.box.name][shard.box.slices])
    assert base_of(model).reader is model.reader, "a reference reads what the policy does"
    with beside(model, precision, division):
        stored = ShardedParameters(model, division)
        optimizer = AdamW(stored, OptimizerConfig(), total_updates=1)
        update_from(model, optimizer, sequences_of(0, config.vocab_size), layout, axes_of(rank, layout).data)
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)
    return optimizer.finite_grad_norm(), boxes(model, named_grads(stored))


def digest(rank: Rank, config: TransformerConfig, layout: Layout) -> tuple[str, int]:
    """The digest of the base, and how many of its numbers are stored here."""
    model = new_sharded(config, 3, division_of(rank, layout), LoraConfig(rank=2))
    base = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return base_digest(model), sum(local_tensor(parameter).numel() for parameter in base)


def load(rank: Rank, path: str, layout: Layout) -> torch.Tensor | str:
    """Logits of the adapter in folder `path` with its base, or what is wrong with them."""
    try:
        return logits_of(load_sharded(path, division_of(rank, layout)))
    except ConfigError as error:
        return str(error)


def served_logits(model: Transformer, precision: Precision, group: RankGroup) -> torch.Tensor:
    """Logits of a generator's model or rank: with products in float32 on every CPU, which other sums hardly change."""
    with patch("slipstream.models.served.cpu_dtype", lambda _stored: torch.float32):
        ServedWeights(model, precision, group=group)
    return logits_of(model)


def served(rank: Rank, path: str, precision: Precision) -> torch.Tensor:
    division = replace(division_of(rank, Layout(1, rank.world)), fixed_order=True)
    return served_logits(load_sharded(path, division), precision, division.tensor_parallel)


def stored_in(model: Transformer, division: Division) -> dict[str, int]:
    """Where the base's rows that this rank stores begin, but for uneven ones, which FSDP2 pads."""
    ShardedParameters(model, division).reshard()
    world = division.data_parallel.world
    frozen = {name: p for name, p in model.named_parameters() if ".adapter." not in name and len(p) % world == 0}
    return {name: local_tensor(parameter.detach()).data_ptr() for name, parameter in frozen.items()}


def references(rank: Rank, sections: dict[str, Any], layout: Layout, adapter: str, out: str) -> dict[str, Any]:
    """Logits of the policy, its references and what it exports, measured in turns with an update between them."""
    config, division = config_of(sections), division_of(rank, layout)
    policy = Policy(config, RankGroup.over(rank.group), division.data_parallel, division.tensor_parallel)
    seen = {"fresh": logits_of(policy.model)}
    models = {"base": policy.reference(None), "adapter": policy.reference(adapter)}
    assert all(not parameter.requires_grad for model in models.values() for parameter in model.parameters())
    for turn in range(2):
        for name, model in models.items():
            seen[f"{name} {turn}"] = logits_of(model)
        with torch.no_grad():
            for view in policy.parameters.named_views().values():
                view.add_(0.1)
        policy.parameters.reshard()
    seen["trained"] = logits_of(policy.model)
    own = stored_in(policy.model, division)
    for model in models.values():
        for name, place in stored_in(model, division).items():
            assert place == own[name], f"{name} is stored twice"
    policy.export(Path(out))
    policy.close()
    return seen | {"digest": policy.base_digest}
