"""What ranks that divide experts do in tests, and one that has them all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from rank_jobs import new_engine, part_of
from rank_models import whole_model
from rank_pool import Rank
from sharded_jobs import Layout, axes_of
from sharded_jobs import division_of as divided
from sharded_jobs import part_of as trained_part
from torch import Tensor

from slipstream.core.rank_group import RankGroup
from slipstream.generator.engine import Engine
from slipstream.generator.paged_runner import PagedRunner
from slipstream.generator.requests import Finished, Request
from slipstream.models.config import TransformerConfig
from slipstream.models.expert_parallel import ExpertShare
from slipstream.models.experts import Experts
from slipstream.models.shards import Box, local_parts, local_tensor
from slipstream.models.transformer import ACTIVATIONS

Generated = dict[int, tuple[list[int], np.ndarray, np.ndarray]]
"""By ordinal: tokens, logprobs, recorded experts."""


@dataclass(frozen=True)
class Passed:
    """What a rank's tokens became, and the gradients of `loss_of`: of the tokens, the router, and its experts'."""

    out: Tensor
    tokens: Tensor
    router: Tensor
    up: Tensor
    down: Tensor


def whole_experts(config: TransformerConfig, dtype: torch.dtype) -> Experts:
    return whole_model(config).layers[0].experts.to(dtype)


def loss_of(out: Tensor, weights: Tensor) -> Tensor:
    return (out * weights).sum()


def passed(experts: Experts, x: Tensor, weights: Tensor) -> Passed:
    x = x.clone().requires_grad_()
    out = experts(x)
    inputs = [x, experts.router.weight, experts.up.weight, experts.down.weight]
    return Passed(out.detach(), *torch.autograd.grad(loss_of(out, weights), inputs))


def experts_of(share: ExpertShare | None, whole: Experts, config: TransformerConfig) -> Experts:
    """Return the part of `whole` that a rank has."""
    part = Experts(config, ACTIVATIONS[config.activation], share).to(whole.up.weight.dtype)
    with torch.no_grad():
        part.router.weight.copy_(whole.router.weight)
        for mine, theirs in ((part.up, whole.up), (part.down, whole.down)):
            rows = theirs.weight.unflatten(0, (whole.num_experts, -1))[part.own.start : part.own.stop]
            mine.weight.copy_(rows.flatten(0, 1))
    return part


# Jobs


def exchange(
    rank: Rank, config: TransformerConfig, rows: list[tuple[Tensor, Tensor]], dtype: torch.dtype
) -> list[Passed]:
    """Pass this rank's tokens, with the weights of what they become, through a layer's experts twice."""
    share = ExpertShare.of(config.num_experts, exchange=RankGroup.over(rank.group))
    experts = experts_of(share, whole_experts(config, dtype), config)
    return [passed(experts, *rows[rank.rank]) for _ in range(2)]


def generate(rank: Rank, config: TransformerConfig, requests: list[Request], paged: bool) -> Generated:
    return generated(new_recorder(part_of(rank, config), paged=paged), requests)


def held(rank: Rank, config: TransformerConfig, layout: Layout) -> tuple[list[Box], int, int]:
    """Return what this rank stores, how many bytes of it are experts', and the rank that it is of those."""
    model = trained_part(config, divided(rank, layout))
    sizes = {name: local_tensor(parameter).nbytes for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".up." in name or ".down." in name)
    return [part.box for part in local_parts(model)], experts, axes_of(rank, layout).experts.exchange.rank


# One rank


def generate_alone(config: TransformerConfig, requests: list[Request]) -> Generated:
    return generated(new_recorder(whole_model(config), paged=False), requests)


def new_recorder(model: torch.nn.Module, *, paged: bool) -> Engine:
    if not paged:
        return new_engine(model, records_routes=True)  # type: ignore[arg-type]
    runner = PagedRunner(model, num_rows=4, max_len=128, num_pages=24, records_routes=True)  # type: ignore[arg-type]
    return Engine(runner, seed=7, stop_token_ids=[1])


def generated(engine: Engine, requests: list[Request]) -> Generated:
    engine.submit([replace(request) for request in requests])
    finished: list[Finished] = []
    while not engine.is_idle:
        finished += engine.step()
    found: Generated = {}
    for one in finished:
        assert one.routes is not None
        found[one.ordinal] = one.tokens.tolist(), one.logprobs, one.routes
    return found
