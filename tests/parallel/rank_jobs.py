"""What the ranks do in these tests: functions of (Rank, arguments) that a `RankPool` runs in its processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rank_models import DIVISIBLE, LLAMA, whole_model
from rank_pool import Rank
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.core.packed import PackedMicrobatch
from slipstream.core.rank_group import RankGroup
from slipstream.generator.engine import Engine
from slipstream.generator.native import native_engine
from slipstream.generator.paged_runner import PagedRunner
from slipstream.generator.requests import Finished, Request
from slipstream.models.attention import PackedAttention
from slipstream.models.config import TransformerConfig
from slipstream.models.head import head_logprobs
from slipstream.models.hf import logical_tensors
from slipstream.models.packed import at_targets
from slipstream.models.sharded import Division, load_sharded
from slipstream.models.shards import load_shard
from slipstream.models.tensor_parallel import TensorParallel
from slipstream.models.transformer import Transformer
from slipstream.trainer.measure import microbatch_logprobs

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


@dataclass(frozen=True)
class HeadCase:
    """Arguments of `head_logprobs` for a whole head, and the gradients of what it returns."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    kept: Tensor | None
    grads: tuple[Tensor, Tensor]
    temperature: float
    at_once: int


def head(rank: Rank, case: HeadCase, fixed_order: bool) -> list[Tensor]:
    """Logprobs, entropies, and the gradients of states and of this rank's rows of the head."""
    config = replace(LLAMA, vocab_size=len(case.weight))
    parallel = TensorParallel.over(rank.group, config, fixed_order=fixed_order)
    hidden, weight = (one.clone().requires_grad_() for one in (case.hidden, parallel.local_vocab(case.weight)))
    found = head_logprobs(
        hidden, weight, case.targets, case.kept, temperature=case.temperature, at_once=case.at_once, ranks=parallel
    )
    return [*(one.detach() for one in found), *torch.autograd.grad(found, (hidden, weight), case.grads)]


class Largest(TorchDispatchMode):
    """Notes the most numbers of a floating-point tensor, and the operators that make ranks communicate."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.collectives = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.collectives.add(func.overloadpacket.__name__)
        floats = [one for one in tree_leaves(out) if isinstance(one, Tensor) and one.is_floating_point()]
        self.most = max([self.most, *(one.numel() for one in floats)])
        return out


def largest_tensor(rank: Rank, config: TransformerConfig, microbatch: PackedMicrobatch) -> tuple[int, set[str]]:
    """Of logprobs and entropies and of their way back; layers before them not counted."""
    model = part_of(rank, config)
    states = at_targets(model, microbatch).detach().requires_grad_()
    with Largest() as seen:
        logprobs, entropies = microbatch_logprobs(model, microbatch, temperature=1.0, states=states)
        torch.autograd.backward(logprobs.sum() + entropies.sum())
    return seen.most, seen.collectives
