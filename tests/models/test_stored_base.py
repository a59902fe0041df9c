"""A base held in fewer bytes: the engines' numbers and products, PEFT's gradients beside the rounded model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from covering import covering
from hf_cases import CASES
from test_families import packed_inputs, packed_logits
from test_head import Products as TypesOfProducts
from test_lora import adapted, losses_and_gradients, ours_of, saved, targets_of, wrapped
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.pytorch_utils import Conv1D

from slipstream.core.errors import ConfigError
from slipstream.core.lora_section import LoraConfig
from slipstream.core.recipes import resolve
from slipstream.models import stored_base
from slipstream.models.hf import load_model
from slipstream.models.initialise import initialise, new_model
from slipstream.models.lora import base_of
from slipstream.models.peft import load_adapter, read_adapter, save_adapter, with_adapters
from slipstream.models.products import DenseProduct, cpu_dtype
from slipstream.models.quantized import StoredWeight, WeightLayout
from slipstream.models.served import ServedWeights
from slipstream.models.shards import base_digest
from slipstream.models.stored_base import _StoredProduct, store_base, stored_product

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
PRECISIONS = ["bfloat16", "int8"]


class Products(TypesOfProducts):
    """Notes the most numbers of a matrix in a product as well."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            weight = args[2 if func.overloadpacket is torch.ops.aten.addmm else 1]
            self.largest = max(self.largest, weight.numel())
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def in_float32(monkeypatch):
    """Products of stored weights as on CPUs without AVX512-BF16, where activations are not rounded."""
    monkeypatch.setattr(stored_base, "cpu_dtype", lambda stored: torch.float32)


def rounded(weight, precision, rows):
    """`weight` as a precision has it; `rows` is the dimension over input features, of which each row has its scale."""
    if precision == "bfloat16":
        return weight.bfloat16().float()
    scale = weight.abs().amax(rows, keepdim=True) / 127
    return (weight / scale).round() * scale


@torch.no_grad()
def round_base(model, precision):
    """Round the matrices of transformers' model in place; norms, biases and embeddings of positions stay."""
    head = model.get_output_embeddings()
    head = getattr(head, "base_layer", head)
    tied = head.weight is model.get_input_embeddings().weight
    for name, module in model.named_modules():
        if "lora_" in name or (module is head and tied):
            continue
        if isinstance(module, torch.nn.Linear | Conv1D):
            module.weight.copy_(rounded(module.weight, precision, 0 if isinstance(module, Conv1D) else 1))
        elif module is model.get_input_embeddings():
            module.weight.copy_(rounded(module.weight, precision if tied else "bfloat16", 1))


@pytest.mark.parametrize(
    ("case", "precision"),
    covering([case for case in CASES if "moe" not in case and case != "mixtral"], PRECISIONS),
)
def test_loss_and_gradients_are_peft_s_beside_the_rounded_model(case, precision, checkpoint, tmp_path, in_float32):
    theirs = wrapped(case, targets_of(case)[5])
    ours = ours_of(theirs, checkpoint(case)[1], tmp_path)
    store_base(ours, precision)
    round_base(theirs.get_base_model(), precision)
    (loss, expected), gradients = losses_and_gradients(ours, theirs)
    assert loss == pytest.approx(expected, abs=1e-6)
    for name, (got, grad) in gradients.items():
        torch.testing.assert_close(got, grad, atol=1e-6, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def parts(precision, rows=24, columns=16, num=7):
    draw = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(columns, rows)
    weight = torch.randn(rows, columns, generator=draw)
    scales = weight.abs().amax(1) / 127 if precision == "int8" else None
    values = weight.bfloat16() if scales is None else (weight / scales[:, None]).round().to(torch.int8)
    x, grad = (torch.randn(num, size, generator=draw) for size in (columns, rows))
    return StoredWeight(values, scales), model.bias.detach(), x, grad


@pytest.mark.parametrize("num", [7, 0])
@pytest.mark.parametrize("block", [1 << 24, 50])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_product_is_the_engines_and_its_gradient_that_of_the_rounded_weight(precision, block, num, monkeypatch):
    monkeypatch.setattr(stored_base, "EXPANDED", block)
    weight, bias, x, grad = parts(precision, num=num)
    x.requires_grad_()
    out = stored_product(x, weight, bias)
    engine = DenseProduct(weight.values.to(cpu_dtype(weight.values.dtype)), weight.scales, bias, packs=True)
    torch.testing.assert_close(out.detach(), engine(x.detach()), atol=1e-6, rtol=1e-6)
    out.backward(grad)
    scales = 1.0 if weight.scales is None else weight.scales.double()[:, None]
    expected = grad.double() @ (weight.values.double() * scales)
    torch.testing.assert_close(x.grad.double(), expected, atol=1e-5, rtol=1e-5)
    shaped = stored_product(x.detach().view(1, num, 16), weight, bias)
    assert torch.equal(shaped[0], out.detach())


@pytest.mark.parametrize("activations", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_on_cuda_products_are_of_bfloat16_and_nothing_expanded_is_kept(precision, activations, monkeypatch):
    """On tensors that only say where they lie; no product has operands of float32, nor more than a block of W."""
    monkeypatch.setattr(stored_base, "EXPANDED", 50)
    saved_by = SimpleNamespace(save_for_backward=lambda *tensors: setattr(saved_by, "saved_tensors", tensors))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: (source.expand(self.shape), self)[1])
    with FakeTensorMode(), Products() as seen:
        values = torch.empty(24, 16, dtype=torch.bfloat16 if precision == "bfloat16" else torch.int8, device="cuda")
        scales = torch.empty(24, device="cuda") if precision == "int8" else None
        bias, x = (torch.empty(n, dtype=activations, device="cuda") for n in ((24,), (7, 16)))
        out = _StoredProduct.forward(saved_by, x, values, scales, bias)
        given, *others = _StoredProduct.backward(saved_by, torch.empty_like(out))
    assert saved_by.saved_tensors == (values, scales), "the base itself, which lies there anyway"
    assert (out.dtype, out.shape, out.device.type) == (activations, (7, 24), "cuda")
    assert (given.dtype, given.shape, others) == (activations, (7, 16), [None] * 3)
    assert {one for types in seen.types for one in types[:2]} == {torch.bfloat16}
    assert seen.largest <= 50


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_in_bfloat16_computes_what_one_in_float32_does(precision):
    """As on GPUs, here on a CPU: the residual stream is bfloat16, adapters stay float32, and so do their gradients."""
    losses, norms = [], []
    for activations in (torch.float32, torch.bfloat16):
        model = adapted(model=FIELDS | {"family": "gpt2"}, targets=["c_attn", "lm_head", "wte"], rank=4)
        store_base(model, precision, activations=activations)
        assert {p.dtype for p in model.parameters() if not p.requires_grad and p.numel()} == {activations}
        tokens, positions = packed_inputs([24])
        logits = packed_logits(model, tokens % model.config.vocab_size, positions, [24])
        assert logits.dtype == torch.float32
        losses.append(logits.log_softmax(-1)[:, 3].mean())
        losses[-1].backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert {p.grad.dtype for p in trained} == {torch.float32}
        norms.append(torch.stack([p.grad.norm() for p in trained]))
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-2)
    torch.testing.assert_close(norms[1], norms[0], rtol=0.1, atol=1e-3)


FIELDS = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2}


@pytest.mark.parametrize("adapters", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_trainer_and_engine_compute_the_same_at_one_precision(precision, tied, adapters):
    """As with float32 on both sides. Beside the base in float32 they differ a hundred times as much."""
    built, targets = [], ["q_proj", "down_proj", "lm_head", "embed_tokens"]
    for _ in range(3):
        model = adapted(model=FIELDS | {"tie_embeddings": tied}, targets=targets, rank=4, adapter_precision=adapters)
        initialise(model, 3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(1.0 if "norm" in name else 3.0)
                if ".adapter." in name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        built.append(model)
    stored, served, _ = built
    digest = base_digest(stored)
    store_base(stored, precision)
    assert base_digest(stored) == base_digest(base_of(stored)) == digest, "of the numbers before they were rounded"
    ServedWeights(served, precision)
    tokens, positions = packed_inputs([24])
    tokens %= stored.config.vocab_size
    with torch.no_grad():
        got, engine, exact = (packed_logits(one, tokens, positions, [24]).log_softmax(-1) for one in built)
        plain = packed_logits(base_of(stored), tokens, positions, [24]).log_softmax(-1)
    assert (got - engine).abs().max() < 1e-5
    assert (exact - engine).abs().mean() > 1e-3
    assert (plain - got).abs().mean() > 1e-3, "without adapters"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_takes_its_bytes_and_no_more(precision):
    model = adapted(model=FIELDS)
    layout = WeightLayout(model, precision, is_base=True)
    first = next(p for n, p in model.named_parameters() if n == "layers.0.up.weight")
    store_base(model, precision)
    held = {weight.values.data_ptr(): weight for weight in model.stored_base.weights.values()}
    kept = [p for n, p in model.named_parameters() if "adapter" not in n]
    nbytes = sum(w.values.nbytes + (0 if w.scales is None else w.scales.nbytes) for w in held.values())
    nbytes += sum(parameter.nbytes for parameter in kept)
    assert layout.num_bytes - 64 * 2 * len(layout.stored) <= nbytes <= layout.num_bytes
    assert first.numel() == 0, "the float32 matrix is let go"
    assert {p.ndim for p in kept} == {1}, "norms"


def test_files_are_those_of_the_base_in_float32(tmp_path):
    import peft

    folder = saved(tmp_path, model=FIELDS)
    model = load_model(folder)
    store_base(model, "int8")
    save_adapter(model, tmp_path / "again", base=tmp_path / "base", digest=base_digest(model))
    load_adapter(load_model(tmp_path / "base"), tmp_path / "again")  # beside another base it would be refused
    read_adapter(model, tmp_path / "again")
    again = peft.PeftConfig.from_pretrained(tmp_path / "again")
    assert again.base_model_name_or_path == str(tmp_path / "base")
    other = with_adapters(new_model(resolve("quickstart").model, 11, 1), LoraConfig(rank=2), seed=0)
    store_base(other, "int8")
    with pytest.raises(ConfigError, match="beside another base"):
        read_adapter(other, tmp_path / "again")


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"model": {"lora": {"base_precision": "int8"}}}, "need a rank"),
        ({"model": {"lora": {"rank": 2, "base_precision": "fp8"}}}, "base_precision"),
    ],
)
def test_bases_that_cannot_be(tables, told):
    with pytest.raises(ConfigError, match=told):
        resolve("quickstart", tables)
