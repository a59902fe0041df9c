"""Generation at every precision: what is computed, that rows do not see each other, and that exchanges are whole."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from covering import covering
from engine_kit import (
    adapted_model,
    adapters_of_version,
    assert_same_bits,
    drain,
    new_engine,
    random_mixture,
    random_model,
    random_prompt,
    requests,
    run,
)
from row_scales import scales_of

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.core.errors import ConfigError, ShapeError
from slipstream.core.lora_section import AdapterPrecision
from slipstream.models import e4m3, products
from slipstream.models.mxfp4 import MXFP4
from slipstream.models.products import AddedProduct, DenseProduct, Fp8Product, cpu_dtype
from slipstream.models.quantized import FORMATS, FP8, WeightLayout
from slipstream.models.served import ServedWeights, check_precision
from slipstream.models.transformer import Transformer

PRECISIONS = list(FORMATS)
REDUCED = [precision for precision in PRECISIONS if precision != "float32"]
SHAPES = [(768, 256), (256, 704), (72, 256), (50, 48), (960, 576)]


def served(model: Transformer, precision: str, **options: bool) -> tuple[Transformer, ServedWeights]:
    """A copy of `model` at `precision`; the original stays as it is."""
    clone = copy.deepcopy(model)
    return clone, ServedWeights(clone, precision, **options)


def dequantized(model: Transformer, precision: str) -> Transformer:
    """A float64 model whose weights are what `precision` stores."""
    layout = WeightLayout(model, precision)
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    list(layout.pack(dict(model.named_parameters()), flat))
    clone = copy.deepcopy(model).double()
    views = layout.views(flat)
    for name, parameter in clone.named_parameters():
        weight, scales = views[name].values, views[name].scales
        if weight.dtype == torch.uint8:  # mxfp4, held against another oracle in tests/models/test_mxfp4.py
            parameter.data = views[name].in_type(torch.float32).values.double()
        else:
            parameter.data = weight.double() if scales is None else weight.double() * scales.double()[:, None]
    return clone


# What is computed


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("float32", 1e-5), ("bfloat16", 0.05), ("int8", 0.05), ("fp8", 0.3), ("mxfp4", 0.05)],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_logprobs_equal_those_of_the_dequantised_weights(precision: str, tolerance: float, in_place: bool) -> None:
    """The oracle multiplies in float64; fp8 rounds activations to 3 bits of mantissa, hence its tolerance."""
    check_logprobs(random_model(scale=0.1), precision, tolerance, in_place=in_place)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05), ("int8", 0.05), ("mxfp4", 0.05)]
)
def test_mixtures_of_experts_do_so_too(precision: str, tolerance: float, in_place: bool) -> None:
    """With a router that is sure of itself, as rounding may otherwise choose other experts."""
    model = random_mixture()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1.0 if parameter.ndim == 1 else 8.0 if "router" in name else 0.6)
    check_logprobs(model, precision, tolerance, in_place=in_place)


def test_mixtures_of_experts_do_not_generate_in_fp8() -> None:
    with pytest.raises(ConfigError, match="fp8"):
        served(random_mixture(), "fp8")


def check_logprobs(model: Transformer, precision: str, tolerance: float, *, in_place: bool) -> None:
    text = random_prompt(60)
    clone, _ = served(model, precision, in_place=in_place)
    oracle = dequantized(model, precision)
    oracle.cos, oracle.signed_sin = model.cos.double(), model.signed_sin.double()
    tokens = torch.from_numpy(text).long()
    positions = torch.arange(len(text) - 1)
    hidden = oracle(tokens[:-1], positions, PlainCausal())
    logits = hidden @ oracle.head.weight.T
    expected = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].detach().numpy()
    assert np.abs(probe_logprobs(clone, text) - expected).max() < tolerance


class PlainCausal:
    """Attention of one text by its formula, with the experts that routers choose."""

    def __call__(self, _layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    def route(self, _layer: int, chosen: torch.Tensor) -> torch.Tensor:
        return chosen


@pytest.mark.parametrize(
    ("num_threads", "new_model"), covering([1, 2], [random_model, random_mixture]), indirect=["num_threads"]
)
def test_float32_gives_the_bits_of_the_plain_model(num_threads: int, new_model: Callable[[], Transformer]) -> None:
    model = new_model()
    clone, _ = served(model, "float32")
    batch = requests(4, 2, max_new_tokens=12)
    plain = run(new_engine(model), batch)
    for key, completion in run(new_engine(clone), batch).items():
        assert_same_bits(completion, plain[key])


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_in_place_and_by_pointer_are_the_same_numbers(precision: str, tie_embeddings: bool) -> None:
    model = random_model()
    if tie_embeddings:
        model.config = model.config.__class__(**{**vars(model.config), "tie_embeddings": True})
        del model.head
    by_pointer, _ = served(model, precision, in_place=False)
    in_place, _ = served(model, precision, in_place=True)
    text = random_prompt(33)
    assert np.array_equal(probe_logprobs(by_pointer, text), probe_logprobs(in_place, text))


def test_a_tied_head_and_its_embedding_are_one_copy() -> None:
    model = random_model()
    model.config = model.config.__class__(**{**vars(model.config), "tie_embeddings": True})
    del model.head
    for precision in PRECISIONS:
        clone, weights = served(model, precision)
        rows = clone.embedding(torch.arange(48))
        heads = clone.logits(torch.eye(32))
        assert torch.allclose(heads.T, rows, rtol=2**-8, atol=1e-6)
        assert sum(stored.shape == (48, 32) for stored in weights._layout.stored) == 1


@pytest.mark.parametrize("stored", [torch.int8, FP8])
def test_expanded_weights_are_multiplied_without_loss(stored: torch.dtype) -> None:
    """Whole numbers in bfloat16's reach: every product and sum is exact, so the result is too."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-7, 8, (24, 16), generator=generator).float()
    x = torch.randint(-3, 4, (8, 16), generator=generator).float()
    product = DenseProduct(weight.to(stored).to(cpu_dtype(stored)), torch.full((24,), 0.5), packs=True)
    assert torch.equal(product(x).round(), (x @ weight.T * 0.5).bfloat16().float().round())


def test_the_reference_of_fp8_scales_each_row_by_itself() -> None:
    """Rows of very different size lose no more than their own roundings."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 48, generator=generator) * torch.logspace(-3, 3, 32)[:, None]
    x = torch.randn(16, 48, generator=generator) * torch.logspace(-4, 4, 16)[:, None]
    scales = scales_of(weight, FP8)
    stored = (weight / scales[:, None]).to(FP8)
    bias = torch.randn(32, generator=generator)
    out = Fp8Product(stored.to(cpu_dtype(FP8)), scales, bias, packs=True)(x)
    exact = x.double() @ weight.double().T
    bound = x.abs().double() @ weight.abs().double().T * 0.14  # 1/16 of each factor, and bfloat16's rounding
    assert ((out.double() - exact - bias).abs() <= bound + 1e-6 + bias.abs() * 1e-2).all()
    assert torch.isfinite(Fp8Product(stored.to(cpu_dtype(FP8)), scales)(torch.zeros(8, 48))).all()


def test_rows_are_rounded_to_the_nearest_number_of_e4m3() -> None:
    """The numbers are made of their definition, OCP's; those half way between two become the one with the even bit."""
    numbers = [2.0**-6 * mantissa / 8 for mantissa in range(8)]
    numbers += [2.0**exponent * (1 + mantissa / 8) for exponent in range(-6, 9) for mantissa in range(8)]
    known = torch.tensor(numbers[:-1], dtype=torch.float64)  # the last is NaN
    assert known[-1] == 448
    halves = (known[1:] + known[:-1]) / 2
    row = torch.cat([known, halves, -halves, 448 * torch.rand(800, dtype=torch.float64)])
    for factor in (1.0, 2.0**-30, 2.0**40):
        found = e4m3.in_torch(torch.stack([row * factor, torch.zeros_like(row)]).float())
        assert found.scales.squeeze().tolist() == [factor, 2.0**-126]
        assert not found.values[1].float().any()
        distances = (row.float().abs()[:, None] - known).abs()
        nearest = distances.argmin(1)
        is_tie = (distances == distances.amin(1, keepdim=True)).sum(1) == 2
        assert is_tie.sum() >= 2 * len(halves)
        nearest[is_tie] += nearest[is_tie] % 2
        assert torch.equal(found.values[0].double(), known[nearest].copysign(row))


# Rows do not see each other


HAS_AMX = sys.platform == "linux" and "amx_bf16" in Path("/proc/cpuinfo").read_text()
WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_of_a_product_are_stable_at_multiples_of_eight(num_threads: int, precision: str) -> None:
    if HAS_AMX and precision in REDUCED and WITHOUT_AMX.items() - os.environ.items():
        pytest.skip("oneDNN cuts the sums of AMX by the number of rows (docs/generator.md)")
    generator = torch.Generator().manual_seed(0)
    for shape in SHAPES:
        weight = torch.randn(shape, generator=generator)
        rows = torch.randn(512, shape[1], generator=generator)
        stored = FORMATS[precision].matrix
        if stored == MXFP4:  # in bfloat16 as far as products know
            stored = torch.bfloat16
        scales = scales_of(weight, stored) if stored in (torch.int8, FP8) else None
        values = weight if scales is None else (weight / scales[:, None]).to(stored)
        values = values.to(cpu_dtype(stored))
        packed, plain = (
            Fp8Product(values, scales, packs=packs) if stored == FP8 else DenseProduct(values, scales, packs=packs)
            for packs in (True, False)
        )
        whole = packed(rows)
        assert torch.equal(plain(rows), whole)
        for num_rows in (8, 16, 24, 40, 64, 136, 320):
            assert torch.equal(packed(rows[:num_rows]), whole[:num_rows])
            assert torch.equal(packed(rows[-num_rows:]), whole[-num_rows:])


@pytest.mark.skipif(not HAS_AMX, reason="this processor has no AMX")
def test_without_amx_they_are() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "stable_at_multiples"]
    told = subprocess.run(command, env=os.environ | WITHOUT_AMX, capture_output=True, text=True, timeout=240)
    assert f"{2 * len(PRECISIONS)} passed" in told.stdout, told.stdout


@pytest.mark.parametrize(
    ("num_threads", "precision"), covering([1, 2], [*REDUCED, "experts"]), indirect=["num_threads"]
)
def test_company_and_slots_change_no_bit(num_threads: int, precision: str) -> None:
    model, _ = served(random_mixture(), "int8") if precision == "experts" else served(random_model(), precision)
    batch = requests(4, 3, max_new_tokens=8)
    crowd = run(new_engine(model, num_slots=24), batch)
    for num_slots, prefill_tokens in ((1, 8), (13, 64)):
        part = batch[::3] if num_slots == 1 else batch
        other = run(new_engine(model, num_slots=num_slots, prefill_tokens=prefill_tokens), part)
        assert len(other) == len(part)
        for key, completion in other.items():
            assert_same_bits(completion, crowd[key])


# Exchanges


@pytest.mark.parametrize(("precision", "in_place"), covering(PRECISIONS, [False, True]))
def test_a_swap_to_the_same_weights_changes_nothing(precision: str, in_place: bool) -> None:
    model, weights = served(random_model(), precision, in_place=in_place)
    batch = requests(3, 2, max_new_tokens=20)
    expected = run(new_engine(model), batch)
    engine = new_engine(model)
    engine.submit(batch)
    finished = {}
    for version in range(1, 5):
        for _ in range(3):
            finished.update({(item.ordinal, item.sample): item for item in engine.step()})
        same = weights.flat.clone()
        weights.prepare(same)
        weights.rebind(same)
        engine.set_version(version)
    finished.update(drain(engine))
    for key, completion in expected.items():
        assert finished[key].tokens.tobytes() == completion.tokens.tobytes()
        assert finished[key].logprobs.tobytes() == completion.logprobs.tobytes()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_preparing_touches_nothing_and_an_exchange_can_be_undone(precision: str, in_place: bool) -> None:
    model, weights = served(random_model(0), precision, in_place=in_place)
    _, others = served(random_model(1), precision)
    old, new, text = weights.flat, others.flat.clone(), random_prompt(40)
    before = probe_logprobs(model, text)
    weights.prepare(new)
    assert np.array_equal(probe_logprobs(model, text), before)
    weights.rebind(new)
    after = probe_logprobs(model, text)
    assert np.abs(after - before).max() > 0.1
    assert weights.flat is new
    weights.rebind(old)
    assert np.array_equal(probe_logprobs(model, text), before)
    weights.rebind(new)  # without `prepare`
    assert np.array_equal(probe_logprobs(model, text), after)
    with pytest.raises(ShapeError):
        weights.rebind(new[:-1])
    assert np.array_equal(probe_logprobs(model, text), after)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_in_place_keeps_every_address(precision: str) -> None:
    """Captured graphs read where the weights lay when they were captured."""
    model, weights = served(random_model(0), precision, in_place=True)
    _, others = served(random_model(1), precision)

    def addresses() -> list[int]:
        tensors = [stored.values for stored in weights._storage.values()]
        tensors += [stored.scales for stored in weights._storage.values() if stored.scales is not None]
        return [tensor.data_ptr() for tensor in [*tensors, *model.parameters()]]

    before = addresses()
    called = model.layers[0].qkv.product
    weights.prepare(others.flat)
    weights.rebind(others.flat)
    assert addresses() == before
    assert model.layers[0].qkv.product is called
    text = random_prompt(40)
    assert np.array_equal(probe_logprobs(model, text), probe_logprobs(served(random_model(1), precision)[0], text))


@pytest.mark.parametrize(("adapters", "on_device"), covering(["float32", "bfloat16"], [False, True]))
def test_adapters_of_experts_change_in_place_with_the_version(adapters: AdapterPrecision, on_device: bool) -> None:
    """Their B is multiplied in another order than it lies: the copy must follow, where a graph knows its address."""
    start = adapted_model(precision=adapters, is_mixture=True)
    model, weights = served(start, "bfloat16", in_place=True, on_device=on_device)
    expected, others = served(start, "bfloat16", in_place=False)
    text = random_prompt(40)
    copies = [(copied.data_ptr(), copied) for copied, _ in weights._stable.reordered]
    assert len(copies) == 2 * len(model.layers)
    for version in (1, 2):
        new = adapters_of_version(weights, version)
        others.rebind(new.clone())
        before = probe_logprobs(model, text)
        weights.prepare(new)
        assert np.array_equal(probe_logprobs(model, text), before)
        assert np.array_equal(probe_logprobs(weights.prepared_model, text), probe_logprobs(expected, text))
        weights.rebind(new)
        after = probe_logprobs(model, text)
        assert np.array_equal(after, probe_logprobs(expected, text))
        assert np.abs(after - before).max() > 0.01
    assert [copied.data_ptr() for _, copied in copies] == [address for address, _ in copies]


def test_what_is_refused() -> None:
    cpu = torch.device("cpu")
    for precision in ("float32", "bfloat16", "int8", "mxfp4"):
        check_precision(precision, cpu)
    with pytest.raises(ConfigError, match="Hopper"):
        check_precision("fp8", cpu)
    with pytest.raises(ConfigError, match="int8"):
        check_precision("int8", torch.device("cuda"))
    with pytest.raises(ConfigError, match="mxfp4 weights are for CPUs"):
        check_precision("mxfp4", torch.device("cuda"))


def test_without_onednn_the_numbers_are_the_same_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    text = random_prompt(40)
    expected = {p: probe_logprobs(served(random_model(scale=0.1), p)[0], text) for p in PRECISIONS}
    monkeypatch.setattr(products, "_onednn", None)
    for precision in PRECISIONS:
        model, _ = served(random_model(scale=0.1), precision)
        assert np.abs(probe_logprobs(model, text) - expected[precision]).max() < 0.3


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("rank", "rows"), [(4, 24), (16, 192), (48, 576), (64, 1536)])
def test_a_sum_in_place_has_the_bits_of_a_product_and_a_sum(rank, rows, in_place, monkeypatch):
    """By MKL where a trial finds that, else by oneDNN: operands and result are columns of wider ones."""
    if not in_place:
        monkeypatch.setattr(products, "adds_in_place", lambda *shape: False)
    draw = torch.Generator().manual_seed(rank)
    low, whole = (torch.randn(72, width, generator=draw) for width in (3 * rank, rows + 32))
    weight = torch.randn(rows, rank, generator=draw)
    for num in (8, 24, 64, 72):
        part, out = low[:num, rank : 2 * rank], whole[:num].clone()
        AddedProduct(weight, packs=True)(part, out[:, 32:])
        expected = whole[:num, 32:] + DenseProduct(weight)(part.contiguous())
        assert torch.equal(out[:, 32:], expected)
        assert torch.equal(out[:, :32], whole[:num, :32])
