"""What the ranks do in these tests: functions of (Rank, arguments) that a `RankPool` runs in its processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rank_models import DIVISIBLE, whole_model
from rank_pool import Rank

from slipstream.core.rank_group import RankGroup
from slipstream.generator.engine import Engine
from slipstream.generator.native import native_engine
from slipstream.generator.paged_runner import PagedRunner
from slipstream.generator.requests import Finished, Request
from slipstream.models.attention import PackedAttention
from slipstream.models.config import TransformerConfig
from slipstream.models.hf import logical_tensors
from slipstream.models.sharded import Division, load_sharded
from slipstream.models.shards import load_shard
from slipstream.models.tensor_parallel import TensorParallel
from slipstream.models.transformer import Transformer

Tokens = dict[tuple[int, int], tuple[list[int], np.ndarray, tuple[Any, ...], str]]
"""(ordinal, sample) -> tokens, logprobs, version spans, why it ended."""


def new_engine(model: Transformer, **options: Any) -> Engine:
    """The engine of these tests, over one rank's part or a whole model."""
    defaults: dict[str, Any] = {"num_slots": 16, "max_len": 128, "seed": 7, "stop_token_ids": [1]}
    return native_engine(model, **(defaults | options))


def part_of(rank: Rank, config: TransformerConfig, seed: int = 0, *, fixed_order: bool = False) -> Transformer:
    model = TensorParallel.over(rank.group, config, fixed_order=fixed_order).new_model()
    load_shard(model, logical_tensors(whole_model(config, seed)))
    return model


def collected(finished: list[Finished]) -> Tokens:
    return {(f.ordinal, f.sample): (f.tokens.tolist(), f.logprobs, f.version_spans, f.finish_reason) for f in finished}


@torch.inference_mode()
def packed_logits(model: Transformer, tokens: torch.Tensor, lengths: list[int]) -> np.ndarray:
    positions = torch.cat([torch.arange(length) for length in lengths])
    return model.logits(model(tokens, positions, PackedAttention(lengths))).numpy()


# Jobs


def logits(rank: Rank, config: TransformerConfig, tokens: torch.Tensor, lengths: list[int], fixed: bool) -> np.ndarray:
    return packed_logits(part_of(rank, config, fixed_order=fixed), tokens, lengths)


def logits_of_checkpoint(rank: Rank, folder: str, tokens: torch.Tensor, lengths: list[int]) -> np.ndarray:
    return packed_logits(load_sharded(folder, Division(tensor_parallel=RankGroup.over(rank.group))), tokens, lengths)


def number_of_sums(rank: Rank, config: TransformerConfig) -> int:
    """All-reduces of one forward pass."""
    model, calls, run = part_of(rank, config), [], dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: calls.append(run(*args, **kwargs))  # type: ignore[assignment]
    try:
        packed_logits(model, torch.arange(5), [5])
    finally:
        dist.all_reduce = run
    return len(calls)


def sums(rank: Rank, num_rows: list[int], fixed: bool) -> list[bytes]:
    """x plus the sum of what the ranks hold, for the first of 64 rows, as many as asked for."""
    held = torch.randn(64, 576, generator=torch.Generator().manual_seed(rank.rank))
    parallel = TensorParallel.over(rank.group, DIVISIBLE, fixed_order=fixed)
    x = torch.zeros(64, 576)
    with torch.inference_mode():
        return [parallel.join(x[:n], held[:n].clone()).numpy().tobytes() for n in num_rows]


def generate(
    rank: Rank, config: TransformerConfig, requests: list[Request], fixed: bool, paged: bool = False
) -> Tokens:
    """Nothing but engines: what they do alike needs no agreement. `paged` takes CUDA's runner, on the CPU."""
    model = part_of(rank, config, fixed_order=fixed)
    if paged:
        engine = Engine(PagedRunner(model, num_rows=4, max_len=128, num_pages=24), seed=7, stop_token_ids=[1])
    else:
        engine = new_engine(model)
    engine.submit(requests)
    finished: list[Finished] = []
    while not engine.is_idle:
        finished += engine.step()
    return collected(finished)
