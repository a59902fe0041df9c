"""A layer's element-wise kernels: by Triton's interpreter, compiled for Hopper, and, where there is a GPU, on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from slipstream.models import device, head, layer_functions
from slipstream.models.attention import PackedAttention
from slipstream.models.config import TransformerConfig
from slipstream.models.initialise import initialise
from slipstream.models.transformer import Layer, Transformer

pytest.importorskip("triton")

SCRIPTS = Path(__file__).parents[1] / "generator"


def run(script: str, **environment: str) -> None:
    plain = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPTS / script), "layer"]
    told = subprocess.run(
        command, env=plain | {"OMP_NUM_THREADS": "1"} | environment, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr


@pytest.mark.slow
def test_the_kernels_compute_what_the_layer_does() -> None:
    """In half precision the bits of its operations, gradients nearer to float64's; whole models in float32.

    In all cases; `tests/generator/test_paged_kernels.py` has a few of them in every run.
    """
    run("triton_on_cpu.py", TRITON_INTERPRET="1")


@pytest.mark.slow
def test_the_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """At the sizes of benchmarked models: no spills, few registers, 16 bytes at once."""
    run("triton_for_gpus.py", TRITON_CACHE_DIR=str(tmp_path))


CONFIG = TransformerConfig(
    family="qwen2",
    vocab_size=64,
    hidden_size=512,
    intermediate_size=1408,
    num_layers=1,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    max_positions=1024,
    tie_embeddings=True,
    qkv_bias=True,
)


def passed(layer: Layer, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """Return what the layer gives of x, and the gradients of x and of all parameters."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    out = layer(x, rope, PackedAttention([300, 1, 211]))
    (out.float() * torch.linspace(-1, 1, out.shape[1], device=out.device)).sum().backward()
    return [one.detach().double() for one in (out, x.grad, *(p.grad for p in layer.parameters())) if one is not None]


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["", "again", "again but products"])
def test_a_layer_on_a_gpu_is_as_near_to_float32_with_kernels(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients: by norm within 2% of float32's, and at most a tenth further from them than without."""
    model = Transformer(CONFIG)
    initialise(model, 0)
    model = model.cuda()
    layer, positions = model.layers[0], torch.arange(512, device="cuda")
    rope = (model.cos[positions][:, None], model.signed_sin[positions][:, None])
    x = torch.randn(512, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    for parameter in layer.parameters():  # what bfloat16 holds, so that only what is computed differs
        parameter.data = parameter.data.bfloat16().float()
    exact = passed(layer, x.float(), tuple(table.bfloat16().float() for table in rope))  # type: ignore[arg-type]
    half, narrow = layer.bfloat16(), tuple(table.bfloat16() for table in rope)
    half.recomputes, half.keeps_products = bool(recompute), "products" in recompute
    assert layer_functions.is_fused(x)
    found = passed(half, x, narrow)  # type: ignore[arg-type]
    monkeypatch.setattr(device, "KERNELS", False)
    plain = passed(half, x, narrow)  # type: ignore[arg-type]
    assert not all(torch.equal(one, other) for one, other in zip(found, plain, strict=True)), "the kernels took part"
    for own, other, true in zip(found, plain, exact, strict=True):
        error, plain_error = ((one - true).norm() / true.norm() for one in (own, other))
        assert error <= min(0.02, 1.1 * plain_error + 1e-6), (own.shape, error, plain_error)


def test_a_switch_takes_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of head and layers, which ask the same function, for what says that it lies on CUDA."""
    with FakeTensorMode():
        x = torch.empty(2, 2, dtype=torch.bfloat16, device="cuda")
    assert device.takes_kernels(x)
    assert layer_functions.is_fused(x)
    monkeypatch.setattr(device, "KERNELS", False)
    assert not device.takes_kernels(x)
    assert not layer_functions.is_fused(x)
    assert head.takes_kernels is device.takes_kernels
