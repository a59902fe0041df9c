"""Engines over pipeline stages of one replica, on the ranks of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from rank_jobs import Tokens, collected
from rank_models import whole_model
from rank_pool import Rank

from slipstream.core.rank_group import RankGroup
from slipstream.generator.engine import Engine
from slipstream.generator.requests import Finished, KvOnUpdate, Request
from slipstream.generator.staged_pages import StagedPages
from slipstream.generator.staged_slots import StagedSlots
from slipstream.models.config import TransformerConfig, local_config
from slipstream.models.hf import logical_tensors
from slipstream.models.sharded import Division
from slipstream.models.shards import load_shard
from slipstream.models.transformer import Transformer

_GROUPS: dict[tuple[int, int], tuple[RankGroup, ...]] = {}
"""Process groups of stages and of tensor-parallel ranks, made once for all jobs."""


@dataclass(frozen=True)
class Swap:
    """At engine step `step`: the weights of seed `version`."""

    step: int
    version: int
    kv_on_update: KvOnUpdate = "keep"


def divided(rank: Rank, config: TransformerConfig, stages: int) -> tuple[Transformer, RankGroup]:
    """This rank's part of the model of seed 0, and the ranks of its stages."""
    everyone, tensor = RankGroup.over(rank.group), RankGroup.alone()
    if stages < rank.world:
        if (rank.world, stages) not in _GROUPS:
            _GROUPS[rank.world, stages] = everyone.split(stages, rank.world // stages)[1:]
        everyone, tensor = _GROUPS[rank.world, stages]
    division = Division(pipeline_parallel=everyone, tensor_parallel=tensor, fixed_order=True)
    model = Transformer(local_config(config, tensor.world), division.ranks_of(config), division.stage)
    load(model, config, 0)
    return model, everyone


def load(model: Transformer, config: TransformerConfig, seed: int) -> None:
    load_shard(model, logical_tensors(whole_model(config, seed)))


def decode(
    engine: Engine,
    runner: Any,
    requests: Sequence[Request],
    swaps: Sequence[Swap],
    losses: Sequence[int],
    load_version: Any,
) -> Tokens:
    """Run all `requests`; at the steps `losses` two sequences lose their rows."""
    engine.submit(requests)
    finished: list[Finished] = []
    left, step = list(swaps), 0
    while not engine.is_idle:
        if left and left[0].step == step:
            swap = left.pop(0)
            runner.drain()
            load_version(swap.version)
            engine.set_version(swap.version, kv_on_update=swap.kv_on_update)
        if step in losses:
            engine.preempt(2)
        finished += engine.step()
        step += 1
    assert not left, "all versions came"
    return collected(finished)


def generate(
    rank: Rank,
    config: TransformerConfig,
    requests: list[Request],
    stages: int,
    *,
    paged: bool = False,
    swaps: Sequence[Swap] = (),
    losses: Sequence[int] = (),
    options: dict[str, Any] | None = None,
) -> Tokens:
    model, ranks = divided(rank, config, stages)
    runner: Any
    if paged:
        runner = StagedPages(model, ranks, num_rows=16, max_len=128, num_pages=40)
    else:
        runner = StagedSlots(model, ranks, num_rows=16, max_len=128)
    settings = {"seed": 7, "stop_token_ids": [1], "prefill_tokens": 32, "prefill_chunk": 8} | (options or {})
    engine = Engine(runner, **settings)
    with torch.no_grad():
        return decode(engine, runner, requests, swaps, losses, lambda version: load(model, config, version))


def held(rank: Rank, config: TransformerConfig, stages: int) -> tuple[int, int]:
    """Bytes of parameters, and of keys and values in slots, of this rank."""
    model, ranks = divided(rank, config, stages)
    runner = StagedSlots(model, ranks, num_rows=16, max_len=128)
    kv = sum(group._kv.keys.nbytes + group._kv.values.nbytes for group in runner._groups)
    return sum(p.nbytes for p in model.parameters()), kv


def busy_ticks(rank: Rank, config: TransformerConfig, requests: list[Request], stages: int) -> tuple[int, int]:
    """Ticks in all, and those in which this stage ran a pass."""
    model, ranks = divided(rank, config, stages)
    runner = StagedSlots(model, ranks, num_rows=16, max_len=128)
    counts = {"ticks": 0, "busy": 0}
    carry_out = runner.ticks._carry_out

    def counted(orders: Any) -> Any:
        counts["ticks"] += 1
        counts["busy"] += orders.whole is not None
        return carry_out(orders)

    runner.ticks._carry_out = counted  # type: ignore[method-assign]
    engine = Engine(runner, seed=7, stop_token_ids=[])
    engine.submit(requests)
    while not engine.is_idle:
        engine.step()
    return counts["ticks"], counts["busy"]


@cache
def _in_float64(config: TransformerConfig, seed: int) -> Transformer:
    return whole_model(config, seed).double()


def reread(config: TransformerConfig, request: Request, tokens: Sequence[int], seeds: Sequence[int]) -> np.ndarray:
    """The logprob of each token of a completion by a plain loop in float64, one position after the other.

    Token t, and the keys and values that it was sampled behind, are those of the model of `seeds[t]`; those of the
    prompt but its last token are of `seeds[0]`.
    """
    models = {seed: _in_float64(config, seed) for seed in set(seeds)}
    text, first = [*request.prompt_tokens.tolist(), *tokens], len(request.prompt_tokens) - 1
    cache: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    class Cached:
        def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = cache.setdefault(layer, ([], []))
            keys.append(k)
            values.append(v)
            repeat = q.shape[1] // k.shape[1]
            stored = [torch.cat(one).repeat_interleave(repeat, 1) for one in (keys, values)]
            scores = torch.einsum("qhd,thd->hqt", q, stored[0]) * q.shape[-1] ** -0.5
            return torch.einsum("hqt,thd->qhd", scores.softmax(-1), stored[1])

        def route(self, _layer: int, chosen: torch.Tensor) -> torch.Tensor:
            return chosen

    found = []
    with torch.no_grad():
        for position in range(len(text) - 1):
            seed = seeds[max(position - first, 0)]
            model = models[seed]
            out = model(torch.tensor(text[position : position + 1]), torch.tensor([position]), Cached())
            if position >= first:
                found.append(model.logits(out).double().log_softmax(-1)[0, text[position + 1]].item())
    return np.array(found)
