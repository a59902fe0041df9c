"""Not a contender but the measure: what this machine does for one decode step's arithmetic. Run by `engine.py`.

Every turn measures again, so that bounds and contenders see the same machine: the matrix products of one decode step
and nothing else, as the engine calls them on weights it has prepared, and on plain fp32 weights by `models/linear.py`
and by `F.linear`; the best rate of a large product, in bf16 too where the engine's precision is lower than fp32; and
the bandwidth of reading as many bytes as the weights have (in cache, where they fit).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from contenders.protocol import Job, Run, Workload, serve
from torch import nn

from slipstream.models.hf import load_model
from slipstream.models.linear import linear
from slipstream.models.served import ServedWeights
from slipstream.models.transformer import Transformer

SECONDS = 0.5  # per measurement


def seconds_each(work: Callable[[], object]) -> list[float]:
    work()
    taken: list[float] = []
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until or len(taken) < 3:
        started_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started_s)
    return taken


def served_products(model: Transformer, rows: int) -> Callable[[], None]:
    """The products of one decode step of `rows` tokens, called as the engine does."""
    calls = list(zip(*inputs(model, rows), strict=True))
    hidden = torch.randn(rows, model.config.hidden_size)

    def work() -> None:
        for module, x in calls:
            module(x)
        model.logits(hidden)

    return work


def plain_products(model: Transformer, rows: int, product: Callable[..., torch.Tensor]) -> Callable[[], None]:
    """The same of plain weights, by `product`."""
    calls = [(x, module.weight, module.bias) for module, x in zip(*inputs(model, rows), strict=True)]
    head = model.embedding.weight if model.config.tie_embeddings else model.head.weight
    calls.append((torch.randn(rows, model.config.hidden_size), head, None))

    def work() -> None:
        for x, weight, bias in calls:
            product(x, weight, bias)

    return work


def inputs(model: Transformer, rows: int) -> tuple[list[nn.Module], list[torch.Tensor]]:
    """Every linear layer but the head, in order, and what it may be given."""
    config = model.config
    hidden, mixed, inner = (
        torch.randn(rows, size) for size in (config.hidden_size, config.query_size, config.intermediate_size)
    )
    modules = [module for layer in model.layers for module in (layer.qkv, layer.output, layer.up, layer.down)]
    return modules, [hidden, mixed, hidden, inner] * config.num_layers


def start(job: Job) -> tuple[object, dict[str, str]]:
    torch.set_num_threads(job.threads)
    plain, served = (load_model(Path(job.model), max_positions=job.max_len) for _ in range(2))
    weights = ServedWeights(served, job.precision)
    products = {
        "engine_products_s": served_products(served, job.batch),
        "linear_products_s": plain_products(plain, job.batch, linear),
        "torch_products_s": plain_products(plain, job.batch, F.linear),
    }
    large = torch.randn(weights.num_bytes // 4)
    copied = torch.empty_like(large)
    types = [torch.float32] if job.precision == "float32" else [torch.float32, torch.bfloat16]
    squares = [torch.randn(2048, 2048).to(dtype) for dtype in types]

    @torch.inference_mode()
    def run(workload: Workload) -> Run:
        started_s = time.perf_counter()
        extra = {name: statistics.median(seconds_each(work)) for name, work in products.items()}
        gemm_s = min(
            min(seconds_each(partial(product, square, square))) for product in (torch.mm, linear) for square in squares
        )
        read_s = min(seconds_each(large.sum))
        copy_s = min(seconds_each(partial(copied.copy_, large)))
        extra["gemm_flop_per_s"] = 2 * 2048**3 / gemm_s
        extra["read_bytes_per_s"] = max(large.nbytes / read_s, 2 * large.nbytes / copy_s)
        return Run(time.perf_counter() - started_s, workload.lengths, extra)

    return run, {}


if __name__ == "__main__":
    serve(start)
