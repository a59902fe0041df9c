"""A decode step in few kernels: counted, compared with the model's own operations, and compiled; none of it on a GPU.

Counted on tensors that only say they lie on CUDA: operators that compute, and launches of our own kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import with_slow
from test_step_on_make_believe_cuda import CONFIG, CONFIGS, CUDA, NoCopies, cuda, launches, served_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.core.fields import Precision
from slipstream.core.lora_section import LoraConfig
from slipstream.generator.paged_runner import PagedRunner
from slipstream.generator.sampler import SamplingPlan
from slipstream.models.config import TransformerConfig
from slipstream.models.transformer import Transformer

pytest.importorskip("triton")

from slipstream.generator import decode_kernels, sampler_kernels
from slipstream.models import e4m3, e4m3_kernels, layer_kernels

__all__ = ["cuda"]
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

QWEN3 = replace(CONFIG, family="qwen3", qk_norm=True)
MIXTURE = replace(QWEN3, family="qwen3_moe", num_experts=8, experts_per_token=2, expert_width=16)
ATTENTION = ("split", "join")  # kernels of attention to long rows (`paged_attention.attend_split`)
DECODE_KERNELS = 10
NO_KERNEL = ("empty", "new_empty", "_unsafe_view", "detach", "alias", "prim::device", "promote_types")


class Kernels(TorchDispatchMode):
    """Counts operators that compute: views and new memory launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if not is_view and not name.startswith(NO_KERNEL):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def kernels_of(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, *, fused: bool | None, fused_sampling: bool = False
) -> Counter[str]:
    """Return the kernels of a decode step of 4 rows, sampled from the whole vocabulary."""
    # torch has a kernel for RMSNorm on CUDA, which a CPU build takes apart.
    monkeypatch.setattr(nn.RMSNorm, "forward", lambda self, x: F.layer_norm(x, x.shape[-1:], self.weight))
    kernels = Kernels()

    def attend(q: Tensor, *rest: Tensor) -> Tensor:
        kernels.names.update(ATTENTION)
        return torch.empty_like(q)

    own = dict.fromkeys(("silu_mul_kernel", "rotate_kernel"), layer_kernels) | {"e4m3_kernel": e4m3_kernels}
    own |= dict.fromkeys(("add_norm_kernel", "enter_kernel"), decode_kernels)
    for name, module in (own | dict.fromkeys(("blocks_kernel", "draw_kernel"), sampler_kernels)).items():
        monkeypatch.setattr(module, name, launches(name, kernels.names))
    runner = PagedRunner(
        model, num_rows=4, max_len=512, attend=attend, captures=False, fused=fused, fused_sampling=fused_sampling
    )
    with NoCopies(), kernels:
        out = runner._step(runner._shape(4, 512, SamplingPlan()))
    assert (out.shape, out.device) == ((4, 2), CUDA)
    return kernels.names


@pytest.fixture
def count(cuda: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Counter[str]]:
    """Return the kernels of one layer: the difference of two models, one of which has a layer more."""
    known: dict[tuple[TransformerConfig, Precision, str], list[Transformer]] = {}

    def counted(
        config: TransformerConfig, precision: Precision, *, fused: bool | None, lora: LoraConfig = LoraConfig()
    ) -> Counter[str]:
        key = config, precision, lora.model_dump_json()
        if key not in known:
            known[key] = [served_model(replace(config, num_layers=number), precision, lora)[0] for number in (1, 2)]
        fewer, more = (kernels_of(model, monkeypatch, fused=fused) for model in known[key])
        return more - fewer

    return counted


@pytest.mark.parametrize("config", with_slow([CONFIGS["qwen2"]], [CONFIG, QWEN3]), ids=lambda config: config.family)
def test_a_layer_is_ten_kernels(config: TransformerConfig, count: Callable[..., Counter[str]]) -> None:
    """With biases, in the slow cases without them and with head norms, and by default.

    `test_kernel_counts.py` counts other models, too.
    """
    found = count(config, "bfloat16", fused=None)
    assert found["add_norm_kernel"] == 2
    assert found["mm"] + found["addmm"] == 4
    assert found.total() == DECODE_KERNELS, found
    plain = count(config, "bfloat16", fused=False)
    assert plain["silu_mul_kernel"] == plain["rotate_kernel"] == 1
    assert plain.total() == 14 + 3 * config.qk_norm, plain


@pytest.mark.slow
def test_in_float32_seven_are_saved(count: Callable[..., Counter[str]]) -> None:
    plain, fused = (count(CONFIG, "float32", fused=fused) for fused in (False, True))
    assert plain.total() - fused.total() == 7
    assert fused["add_norm_kernel"] == 2


@pytest.mark.parametrize("config", with_slow([CONFIGS["qwen2"]], [CONFIG, QWEN3]), ids=lambda config: config.family)
def test_in_fp8_a_layer_has_one_kernel_more(config: TransformerConfig, count: Callable[..., Counter[str]]) -> None:
    """It rounds the rows of attention; norms and SiLU x up round their own, and products add the biases."""
    found = count(config, "fp8", fused=None)
    assert found["add_norm_kernel"] == 2
    assert found["e4m3_kernel"] == 2, "attention's rows, and SiLU x up"
    assert found["_scaled_mm"] == 4
    assert found.total() == DECODE_KERNELS + 1, found
    plain = count(config, "fp8", fused=False)
    assert plain["e4m3_kernel"] == 4
    assert plain.total() == 14 + 3 * config.qk_norm + 4, plain


def test_in_fp8_without_the_kernel_torch_rounds(
    count: Callable[..., Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e4m3, "kernel_is_right", lambda device: False)
    found = count(CONFIG, "fp8", fused=None)
    assert (found["add_norm_kernel"], found["silu_mul_kernel"], found["e4m3_kernel"]) == (2, 1, 0)
    assert found["clamp_min"] == found["_scaled_mm"] == 4
    assert found.total() == DECODE_KERNELS + 4 * 7, found


@pytest.mark.parametrize("fault", ["no compiler", "the last bit", "none"])
def test_the_kernel_is_tried_before_it_is_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small example: a kernel that does not run, and one that scales otherwise in the last bit, are found."""

    def by_kernel(x: Tensor) -> e4m3.E4m3Rows:
        if fault == "no compiler":
            raise RuntimeError("Failed to find C compiler")
        rows = e4m3.in_torch(x)
        return rows._replace(scales=rows.scales.nextafter(torch.ones(()))) if fault == "the last bit" else rows

    monkeypatch.setattr(e4m3, "by_kernel", by_kernel)
    assert e4m3.kernel_is_right.__wrapped__(torch.device("cpu")) == (fault == "none")


@pytest.mark.parametrize(("fault", "adds"), [("no bias", False), ("twice", False), ("refused", False), ("none", True)])
def test_biases_are_added_by_products_where_these_do_so(
    fault: str, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled_product(rows: e4m3.E4m3Rows, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
        out = (rows.values.float() @ weight.float().t()) * rows.scales * scales
        if bias is None or fault == "no bias":
            return out.bfloat16()
        if fault == "refused":
            raise RuntimeError("bias is not supported")
        return (out + (2 if fault == "twice" else 1) * bias).bfloat16()

    monkeypatch.setattr(e4m3, "scaled_product", scaled_product)
    assert e4m3.adds_bias.__wrapped__(torch.device("cpu")) == adds


@pytest.mark.parametrize("what", with_slow(["adapters"], ["experts"]))
def test_adapters_and_experts_are_beside_fused_kernels(what: str, count: Callable[..., Counter[str]]) -> None:
    """`test_kernel_counts.py` counts all kernels of mixtures of experts, in the usual tests too."""
    lora = LoraConfig(rank=4, targets=["q_proj", "down_proj"])
    config, options = (CONFIG, {"lora": lora}) if what == "adapters" else (MIXTURE, {})
    plain, fused = (count(config, "bfloat16", fused=fused, **options) for fused in (False, None))
    assert fused["add_norm_kernel"] == 2
    assert fused["silu_mul_kernel"] == 1
    assert plain.total() - fused.total() == (4 if config is CONFIG else 7), (plain, fused)


@pytest.mark.slow
def test_layers_of_another_kind_run_as_they_are(count: Callable[..., Counter[str]]) -> None:
    found = count(CONFIGS["gpt2"], "bfloat16", fused=None)
    assert not {name for name in found if name.endswith("_kernel")}
    assert found == count(CONFIGS["gpt2"], "bfloat16", fused=False)


@pytest.mark.slow
def test_the_kernels_compute_what_the_model_does() -> None:
    """In float32 and bfloat16, by Triton's interpreter: each kernel, whole models, whole texts.

    In all cases; `test_paged_kernels.py` has a few of them in every run.
    """
    script = Path(__file__).with_name("triton_on_cpu.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, str(script), "decode"], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_the_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """At the sizes of benchmarked models: no spills, few registers, 16 bytes at once."""
    script = Path(__file__).with_name("triton_for_gpus.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, str(script), "decode"], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
