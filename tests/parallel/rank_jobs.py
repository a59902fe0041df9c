"""What the ranks do in these tests: functions of (Rank, arguments) that a `RankPool` runs in its processes."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rank_models import DIVISIBLE, whole_model
from rank_pool import Rank

from slipstream.core.clock import VirtualClock
from slipstream.core.errors import RankError
from slipstream.generator.engine import Engine
from slipstream.generator.lockstep import AgreedClock, LockStep
from slipstream.generator.native import native_engine
from slipstream.generator.paged_runner import PagedRunner
from slipstream.generator.requests import Finished, Request
from slipstream.models.attention import PackedAttention
from slipstream.models.config import TransformerConfig
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import logical_tensors
from slipstream.models.shards import load_parallel_model, load_shard
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
    return packed_logits(load_parallel_model(folder, rank.group), tokens, lengths)


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


def swap(rank: Rank, config: TransformerConfig, requests: list[Request], arrivals: list[int], staged: list[Any]) -> Any:
    """Requests, and versions {step: version}, that arrive at steps of each rank's own: (tokens, versions and steps)."""
    model = part_of(rank, config)
    weights = FlatParameters(model)
    new = FlatParameters(part_of(rank, config, seed=1)).flat
    clock = AgreedClock()
    engine = new_engine(model, clock=clock)
    committed: list[tuple[int, int]] = []

    def commit(version: int) -> None:
        weights.rebind(new)
        engine.set_version(version)
        committed.append((version, together.num_steps))

    together = LockStep(engine, rank.group, commit=commit, clock=clock)
    finished: list[Finished] = []
    for step in range(200):
        if step == 0:
            together.submit(requests[:2])
        if step == arrivals[rank.rank]:
            together.submit(requests[2:])
        if step in staged[rank.rank]:
            together.stage(staged[rank.rank][step])
        finished += together.step()
    assert together.is_idle
    return collected(finished), committed


def time_limits(rank: Rank, config: TransformerConfig, requests: list[Request], rates: list[float]) -> Tokens:
    """Clocks of different speed: every rank goes by the slowest."""
    source, clock = VirtualClock(), AgreedClock()
    engine = new_engine(part_of(rank, config), clock=clock)
    together = LockStep(engine, rank.group, commit=engine.set_version, clock=clock, source=source)
    together.submit(requests)
    finished: list[Finished] = []
    while not together.is_idle:
        finished += together.step()
        source.advance(rates[rank.rank])
    return collected(finished)


def pause_and_stop(rank: Rank, config: TransformerConfig, requests: list[Request]) -> list[tuple[int, int]]:
    """(live, waiting) after every step; one rank pauses admission from step 0 to 4, another asks to stop at step 8."""
    clock = AgreedClock()
    engine = new_engine(part_of(rank, config), clock=clock)
    together = LockStep(engine, rank.group, commit=engine.set_version, clock=clock)
    together.submit(requests)
    seen: list[tuple[int, int]] = []
    while not together.is_stopped:
        if rank.rank == 0:
            together.pause_admission(together.num_steps < 4)
        if rank.rank == 1 and together.num_steps == 8:
            together.stop()
        together.step()
        seen.append((engine.num_live, engine.num_waiting))
    return seen


def diverge(rank: Rank, config: TransformerConfig, requests: list[list[Request]], seeds: list[int]) -> str:
    """Every rank has its own requests and seed: the error they end with."""
    clock = AgreedClock()
    engine = new_engine(part_of(rank, config), clock=clock, seed=seeds[rank.rank])
    together = LockStep(engine, rank.group, commit=engine.set_version, clock=clock)
    together.submit(requests[rank.rank])
    try:
        for _ in range(200):
            together.step()
    except RankError as error:
        return str(error)
    return ""


def lose(rank: Rank, config: TransformerConfig, requests: list[Request], how: str) -> tuple[str, float]:
    """The last rank dies or hangs amid decoding: the error the others end with, and after how many seconds."""
    clock = AgreedClock()
    engine = new_engine(part_of(rank, config), clock=clock)
    together = LockStep(engine, rank.group, commit=engine.set_version, clock=clock)
    together.submit(requests)
    started = time.monotonic()
    try:
        while True:
            if rank.rank == rank.world - 1 and together.num_steps == 5:
                if how == "dies":
                    os._exit(1)
                return "", 0.0  # stays away
            together.step()
            started = time.monotonic()
    except RankError as error:
        return str(error), time.monotonic() - started
