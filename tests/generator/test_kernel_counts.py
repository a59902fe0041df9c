"""The planner's kernels of a decode step are those that run, counted on tensors that only say they lie on CUDA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import with_slow
from test_step_on_make_believe_cuda import CONFIG, CONFIGS, CUDA, cuda, served_model

from slipstream.core.fields import Precision
from slipstream.generator.native import move_but_linear
from slipstream.models.quantized import WeightLayout
from slipstream.models.served import ServedWeights
from slipstream.models.tensor_parallel import TensorParallel
from slipstream.models.transformer import Transformer
from slipstream.plan.kernel_counts import step_kernels

pytest.importorskip("triton")

from test_decode_kernels import MIXTURE, QWEN3, kernels_of

__all__ = ["cuda"]
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

NEOX = replace(
    CONFIGS["gpt2"], family="gpt_neox", head_dim=16, rotary_fraction=0.25, parallel_residual=True, tie_embeddings=False
)
MODELS = {
    "llama": CONFIG,
    "qwen2": CONFIGS["qwen2"],
    "qwen3": QWEN3,
    "gpt2": CONFIGS["gpt2"],
    "gpt_neox": NEOX,
    "in sequence": replace(NEOX, parallel_residual=False),
    "gelu": replace(CONFIG, activation="gelu"),
    "partly rotated": replace(CONFIG, rotary_fraction=0.5),
    "biases": replace(CONFIG, qkv_bias=True, output_bias=True, mlp_bias=True),
    "mixture": MIXTURE,
    "mixtral": replace(MIXTURE, family="mixtral", qk_norm=False, experts_per_token=3),
    "whole gates": replace(MIXTURE, normalises_gates=False),
}
MIXTURES = ("mixture", "mixtral", "whole gates")  # GPUs generate with these in bfloat16 alone


def cases(names: list[str], precisions: list[Precision]) -> list[tuple[str, Precision]]:
    return [(name, one) for name in names for one in precisions if one == "bfloat16" or name not in MIXTURES]


QUICK: list[tuple[str, Precision]] = [
    ("gpt2", "float32"),
    ("gpt_neox", "fp8"),
    ("mixtral", "bfloat16"),
]
ALL = cases(list(MODELS), ["bfloat16", "float32", "fp8"])


class TwoRanks(TensorParallel):
    """The first of two ranks, whose collectives are left out."""

    def _run(self, collective: Any, *tensors: torch.Tensor) -> None:
        pass


def both(
    build: Callable[[int], Transformer], monkeypatch: pytest.MonkeyPatch, **switches: bool | None
) -> tuple[int, int]:
    """Return the kernels of a layer, by which two models differ, and those of a step outside of its layers."""
    one, two = (kernels_of(build(num_layers), monkeypatch, **switches) for num_layers in (1, 2))
    layer: Counter[str] = two - one
    return layer.total(), one.total() - layer.total()


@pytest.mark.parametrize(("name", "precision"), with_slow(QUICK, [case for case in ALL if case not in QUICK]))
def test_of_one_rank(name: str, precision: Precision, cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = MODELS[name]

    def build(num_layers: int) -> Transformer:
        return served_model(replace(config, num_layers=num_layers), precision)[0]

    found = both(build, monkeypatch, fused=None, fused_sampling=True)
    assert found == step_kernels(config, precision)


STAGED = cases(["llama", "qwen3", "gelu", "partly rotated", "mixture"], ["bfloat16", "float32", "fp8"])


@pytest.mark.parametrize(("name", "precision"), with_slow([("qwen3", "float32")], STAGED))
def test_a_stage_runs_layers_as_the_model_has_them(
    name: str, precision: Precision, cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are taken to be those of one rank whose layers are not fused, sampled by torch."""
    config = MODELS[name]

    def build(num_layers: int) -> Transformer:
        return served_model(replace(config, num_layers=num_layers), precision)[0]

    found = both(build, monkeypatch, fused=False)
    assert found == step_kernels(config, precision, stages=2)


DIVIDED = cases(["llama", "gpt2", "gpt_neox", "mixture"], ["bfloat16", "float32", "fp8"])


@pytest.mark.parametrize(
    ("name", "precision", "vocab_size"),
    with_slow(
        [("mixture", "bfloat16", 2050)], [("llama", "bfloat16", 2048), *((*case, 2050) for case in DIVIDED[:-1])]
    ),
)
def test_of_ranks_that_share_each_layer(
    name: str, precision: Precision, vocab_size: int, cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(MODELS[name], intermediate_size=64, hidden_size=64, head_dim=16, vocab_size=vocab_size)

    def build(num_layers: int) -> Transformer:
        model = TwoRanks(replace(config, num_layers=num_layers), 0, 2).new_model()
        flat = torch.zeros(WeightLayout(model, precision).num_bytes, dtype=torch.uint8)
        move_but_linear(model, CUDA)
        ServedWeights(model, precision, flat=flat)
        return model

    found = both(build, monkeypatch, fused=None)
    assert found == step_kernels(config, precision, ranks=2)


def test_a_layer_in_few_kernels_is_ten() -> None:
    """Oracle of its own: `test_decode_kernels.py` and docs/generator.md list them."""
    assert step_kernels(CONFIG, "bfloat16")[0] == 10
    assert step_kernels(CONFIG, "fp8")[0] == 11
    assert step_kernels(CONFIG, "bfloat16", ranks=2)[0] == 14
