"""The head's kernels against autograd in float64: interpreted, compiled without a GPU, and with `-m gpu` on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.models.head import head_logprobs

HERE = Path(__file__).parent


@pytest.mark.slow
def test_interpreted_they_are_right() -> None:
    """In all cases; `test_paged_kernels.py` has a few of them in every run."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, HERE / "head_kernels_on_cpu.py"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "right\n"


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from slipstream.models import head_kernels as kernels

sizes = {"WIDTH": 151936, "BLOCK": kernels.BLOCK}
for kernel, types, flags in (
    (kernels.statistics_kernel, {"logits": "*fp32", "places": "*i64", "found": "*fp32", "num_rows": "i32"}, {}),
    (
        kernels.gradient_kernel,
        {"logits": "*fp32", "places": "*i64"}
        | dict.fromkeys(("normalisers", "entropies", "of_logprobs", "of_entropies"), "*fp32")
        | {"gradient": "*bf16"},
        {"HAS_LOGPROBS": True, "HAS_ENTROPIES": True},
    ),
):
    constants = sizes | flags
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(types.values()) if kind[0] == "*"}
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert "ld.global.v4.b32" in built.asm["ptx"], "logits in 16 bytes a thread"
print("compiled")
"""


@pytest.mark.slow
def test_compiled_for_a_gpu_they_read_16_bytes_at_once() -> None:
    """`test_paged_kernels.py` compiles the same two for Hopper in every run, and looks at their registers too."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "compiled\n"


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2**-7)])
def test_on_a_gpu_they_are_right(dtype: torch.dtype, bound: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((200, 64), (50000, 64)))
    targets, g, e = (
        torch.randint(len(weight), (200,), generator=generator),
        *torch.randn(2, 200, generator=generator),
    )
    exact = [one.double().requires_grad_() for one in (hidden, weight)]
    logprobs = (exact[0] @ exact[1].t()).log_softmax(-1)
    wanted = logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)
    theirs = torch.autograd.grad(wanted, exact, (g.double(), e.double()))
    leaves = [one.cuda().requires_grad_() for one in (hidden, weight)]
    found = head_logprobs(*leaves, targets.cuda(), at_once=64)
    ours = torch.autograd.grad(found, leaves, (g.cuda(), e.cuda()))
    for mine, right in zip((*found, *ours), (*wanted, *theirs), strict=True):
        error = (mine.detach().double().cpu() - right.detach()).norm() / right.detach().norm()
        assert error < bound
