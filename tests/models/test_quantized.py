"""Layouts and packing: error bounds, equal bytes for equal weights, no byte of a version outside of its checksum."""

from __future__ import annotations

import pytest
import torch
from row_scales import scales_of

from slipstream.core.errors import ShapeError
from slipstream.core.sections import ModelConfig
from slipstream.models.flat import FlatParameters
from slipstream.models.initialise import new_model
from slipstream.models.mxfp4 import MXFP4
from slipstream.models.quantized import FORMATS, FP8, Packer, WeightLayout
from slipstream.models.transformer import Transformer

CONFIG = ModelConfig(hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, max_positions=16)
PRECISIONS = list(FORMATS)


def tiny(seed: int = 0, **changes: object) -> Transformer:
    return new_model(CONFIG.model_copy(update=changes), vocab_size=11, seed=seed)


def packed(model: Transformer, precision: str) -> tuple[WeightLayout, torch.Tensor, list[slice]]:
    layout = WeightLayout(model, precision)
    out = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    pieces = list(Packer(layout, FlatParameters(model).named_views()).pack(out))
    return layout, out, pieces


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("family", "tie_embeddings"), [("llama", True), ("mixtral", False), ("gpt2", True)])
def test_every_weight_comes_back_within_its_bound(precision: str, family: str, tie_embeddings: bool) -> None:
    num_experts = 4 if family == "mixtral" else 0
    model = tiny(family=family, tie_embeddings=tie_embeddings, num_kv_heads=2, num_experts=num_experts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
            parameter[0] *= 100  # a row whose scale is its own
            parameter[-1] = 0
    weights = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    layout, out, _ = packed(model, precision)
    types = {stored.name: stored.dtype for stored in layout.stored}
    assert list(types) == list(weights)
    for name, view in layout.views(out).items():
        stored = view.in_type(torch.float32)
        numbers = stored.values if stored.scales is None else stored.values * stored.scales[:, None]
        error = (numbers.double() - weights[name]).abs()
        if types[name] == MXFP4:
            scales = (view.scales.int() << 23).view(torch.float32).double().repeat_interleave(32, 1)
            largest = torch.maximum(weights[name].abs(), scales[:, : error.shape[1]].clamp_min(2.0**-127))
            assert (error <= largest / 4).all(), name
            continue
        if view.scales is not None:
            assert torch.equal(view.scales, scales_of(weights[name].float(), types[name]))
        if types[name] == torch.float32:
            assert not error.any(), name
        elif types[name] == torch.bfloat16:
            assert (error <= weights[name].abs() * 2**-8).all(), name
        elif types[name] == torch.int8:
            assert (error <= view.scales[:, None].double() * (0.5 + 1e-4)).all(), name
        else:
            largest = torch.maximum(weights[name].abs() / 16, view.scales[:, None].double() / 1024)
            assert (error <= largest * (1 + 1e-4)).all(), name


def test_what_each_precision_stores() -> None:
    model = tiny(tie_embeddings=False)
    types = {
        precision: {stored.name: stored.dtype for stored in WeightLayout(model, precision).stored}
        for precision in PRECISIONS
    }
    for precision, matrix, head, embedding in (
        ("float32", torch.float32, torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("int8", torch.int8, torch.int8, torch.bfloat16),
        ("fp8", FP8, torch.bfloat16, torch.bfloat16),
        ("mxfp4", MXFP4, torch.bfloat16, torch.bfloat16),
    ):
        assert types[precision]["layers.0.qkv.weight"] == matrix
        assert types[precision]["head.weight"] == head
        assert types[precision]["embedding.weight"] == embedding
        assert types[precision]["layers.1.mlp_norm.weight"] == torch.float32
    tied = {stored.name: stored.dtype for stored in WeightLayout(tiny(), "int8").stored}
    assert tied["embedding.weight"] == torch.int8
    assert "head.weight" not in tied


def test_float32_has_the_bytes_of_flat_parameters() -> None:
    model = tiny()
    flat = FlatParameters(model).flat
    _, out, _ = packed(model, "float32")
    assert torch.equal(out, flat.view(torch.uint8))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_packing_is_deterministic_and_its_pieces_cover_everything(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    whole = packed(model, precision)[1]
    for block in (1, 100, 1 << 20):
        monkeypatch.setattr("slipstream.models.quantized._BLOCK", block)
        layout, out, pieces = packed(model, precision)
        assert torch.equal(out, whole)
        ends = [0, *(piece.stop for piece in pieces)]
        assert [piece.start for piece in pieces] == ends[:-1]
        assert ends[-1] == layout.num_bytes


@pytest.mark.parametrize("precision", PRECISIONS)
def test_pieces_are_final_when_they_are_named(precision: str) -> None:
    model = tiny()
    layout = WeightLayout(model, precision)
    whole = packed(model, precision)[1]
    out = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for piece in Packer(layout, dict(model.named_parameters())).pack(out):
        assert torch.equal(out[piece], whole[piece])


def test_bytes_on_the_way_shrink() -> None:
    model = new_model(CONFIG.model_copy(update={"hidden_size": 128, "intermediate_size": 512}), vocab_size=512, seed=0)
    sizes = {precision: WeightLayout(model, precision).num_bytes for precision in PRECISIONS}
    assert 1.9 < sizes["float32"] / sizes["bfloat16"] <= 2
    assert 3.7 < sizes["float32"] / sizes["int8"] <= 4
    tables = 2 * 512 * 128
    assert (sizes["mxfp4"] - tables) / (sizes["bfloat16"] - tables) < 0.28, "17/32 of a byte instead of two"


def test_bytes_of_another_layout_are_refused() -> None:
    layout = WeightLayout(tiny(), "int8")
    for wrong in (torch.zeros(layout.num_bytes + 1, dtype=torch.uint8), torch.zeros(layout.num_bytes)):
        with pytest.raises(ShapeError, match="int8"):
            layout.views(wrong)
