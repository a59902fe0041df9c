"""Float32 matrix products of a small model's linear layers: torch's own (MKL) beside oneDNN, forward and backward.

    python benchmarks/linear.py [--threads N] [--rows 8 64 1024]

Microseconds and GFLOP/s, the best of many. `models/linear.py` takes oneDNN.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from slipstream.models.linear import linear
from slipstream.observe.hardware import describe

SHAPES = [(768, 256), (256, 256), (1536, 256), (256, 768), (72, 256)]  # [out, in]: qkv, output, up, down, head


def best_us(work: Callable[[], object], seconds: float = 0.2) -> float:
    work()
    best = float("inf")
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return 1e6 * best


def forward_backward(product: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor) -> None:
    out = product(x, weight)
    torch.autograd.grad(out, (x, weight), torch.ones_like(out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 1024])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    print(f"{platform.machine()}, {args.threads} threads, torch {torch.__version__}\n")
    print("| rows | out x in | pass | MKL, us | oneDNN, us | MKL, GFLOP/s | oneDNN, GFLOP/s | times as fast |")
    print("|---|---|---|---|---|---|---|---|")
    for rows in args.rows:
        for outer, inner in SHAPES:
            x, weight = torch.randn(rows, inner), torch.randn(outer, inner)
            flop = 2 * rows * inner * outer
            with torch.inference_mode():
                mkl, onednn = (best_us(partial(product, x, weight)) for product in (F.linear, linear))
            show(rows, (outer, inner), "forward", flop, mkl, onednn)
            x.requires_grad_()
            weight.requires_grad_()
            mkl, onednn = (best_us(partial(forward_backward, product, x, weight)) for product in (F.linear, linear))
            show(rows, (outer, inner), "both", 3 * flop, mkl, onednn)


def show(rows: int, shape: tuple[int, int], name: str, flop: int, mkl_us: float, onednn_us: float) -> None:
    print(
        f"| {rows} | {shape[0]} x {shape[1]} | {name} | {mkl_us:.0f} | {onednn_us:.0f} | {flop / mkl_us / 1e3:.0f} "
        f"| {flop / onednn_us / 1e3:.0f} | {mkl_us / onednn_us:.2f} |"
    )


if __name__ == "__main__":
    main()
