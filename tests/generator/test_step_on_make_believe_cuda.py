"""The decode step and served weights on tensors that only say they lie on CUDA: devices, types and layouts are checked.

`FakeTensorMode` applies an operator's rules, those for CUDA here, and computes nothing. It refuses what a capture does:
looking at a value from the host. `NoCopies` refuses what is left, bringing values of the host's along.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from covering import covering, with_slow
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.core.fields import Precision
from slipstream.core.lora_section import LoraConfig
from slipstream.generator import fused_sampling, paged_attention, paged_kv, paged_runner
from slipstream.generator.native import move_but_linear
from slipstream.generator.paged_runner import PagedRunner
from slipstream.generator.runner import Chunk, RowStates
from slipstream.generator.sampler import SamplingPlan
from slipstream.models import e4m3, products, served
from slipstream.models.config import TransformerConfig
from slipstream.models.lora import install
from slipstream.models.peft import planned_shapes
from slipstream.models.products import DenseProduct, Fp8Product, WideProduct
from slipstream.models.quantized import FP8, WeightLayout
from slipstream.models.served import ServedWeights
from slipstream.models.transformer import Transformer

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # by deepcopy

CUDA = torch.device("cuda", 0)
CONFIG = TransformerConfig(
    family="llama",
    vocab_size=2050,  # more than the sampler reads at once, and no whole number of its blocks
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,  # `test_decode_kernels.py` has steps of two
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=512,
    tie_embeddings=False,
)
CONFIGS = {
    "llama": CONFIG,
    "qwen2": replace(CONFIG, family="qwen2", qkv_bias=True, tie_embeddings=True),
    "gpt2": replace(
        CONFIG,
        family="gpt2",
        layer_norm=True,
        num_kv_heads=4,
        rotary_fraction=0.0,
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        activation="gelu_tanh",
        tie_embeddings=True,
    ),
}
PLANS = (
    SamplingPlan(),
    SamplingPlan(has_greedy=True, all_greedy=True),
    SamplingPlan(has_greedy=True, has_temperature=True, truncates=True, has_whole=True),
    SamplingPlan(has_temperature=True, truncates=True, has_whole=False, num_candidates=8, num_kept=8),
)


class NoCopies(TorchDispatchMode):
    """Refuses operations on values that lie elsewhere than on CUDA, single numbers excepted, and moves to there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs or {}, out)):
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.device.type != "cuda":
                raise AssertionError(f"{func} touches a tensor on {tensor.device}")
        return out


def indexed(x: torch.Tensor, index: Any) -> torch.Tensor:
    """`x[index]` by operators: Python's own indexing looks for a CUDA library first, which CPU builds have not."""
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [item for item in items if not isinstance(item, torch.Tensor)]:
        place = items.index(Ellipsis)
        missing = x.ndim - sum(item is not None for item in items) + 1
        items[place : place + 1] = [slice(None)] * missing
    axis = 0
    for item in items:
        if item is None:
            x = x.unsqueeze(axis)
        elif isinstance(item, slice):
            x = torch.ops.aten.slice.Tensor(x, axis, item.start, item.stop, item.step or 1)
        elif isinstance(item, int):
            x, axis = x.select(axis, item), axis - 1
        else:
            x = torch.ops.aten.index.Tensor(x, [None] * axis + [item])
        axis += 1
    return x


class Indexing(TorchFunctionMode):
    """`indexed` in the place of indexing. An attribute of the class, put there and taken away again, would leave every
    tensor of the process a sequence to C, and lists of numbers in tensors unreadable to torch.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return indexed(*args) if func is torch.Tensor.__getitem__ else func(*args, **(kwargs or {}))


def launches(name: str, names: Counter[str]) -> dict[Any, Callable[..., None]]:
    """Stand in for a kernel of Triton: whatever the grid, count it, and see to what it asks of its arguments."""
    rounded = {FP8} if name in ("e4m3_kernel", "add_norm_kernel") else set()

    def launch(*args: Any, **constants: Any) -> None:
        tensors = [arg for arg in tree_leaves(args) if isinstance(arg, torch.Tensor)]
        assert all(x.is_contiguous() and x.device == CUDA for x in tensors), name
        assert {x.dtype for x in tensors if x.dtype.is_floating_point} <= {torch.bfloat16, torch.float32} | rounded
        names[name] += 1

    class Grid(dict[Any, Callable[..., None]]):
        def __missing__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            assert all(size > 0 for size in grid)
            return launch

    return Grid()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hopper, as far as tensors can tell. What a CPU build of torch refuses even so is replaced."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None))
    monkeypatch.setattr(served, "base_digest", lambda model: "of numbers that are not there")
    monkeypatch.setattr(ServedWeights, "_bring", lambda self, flat: setattr(self, "_arrived", flat))
    monkeypatch.setattr(
        torch.Tensor,
        "pin_memory",
        lambda self: SimpleNamespace(numpy=lambda: np.zeros(self.shape, np.int64), shape=self.shape),
    )
    monkeypatch.setattr(fused_sampling, "agrees", lambda device, width: False)  # it would launch, and look at numbers
    monkeypatch.setattr(torch.Tensor, "__invert__", lambda self: torch.bitwise_not(self))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: (source.expand(self.shape), self)[1])
    if importlib.util.find_spec("triton") is not None:
        for name in ("silu_mul_kernel", "rotate_kernel"):
            monkeypatch.setattr(f"slipstream.models.layer_kernels.{name}", launches(name, Counter()))
        monkeypatch.setattr("slipstream.models.e4m3_kernels.e4m3_kernel", launches("e4m3_kernel", Counter()))
    monkeypatch.setattr(e4m3, "kernel_is_right", lambda device: True)  # their examples are computed
    monkeypatch.setattr(products, "adds_bias", lambda device: True)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), Indexing():
        yield


def served_model(
    config: TransformerConfig, precision: Precision, lora: LoraConfig = LoraConfig()
) -> tuple[Transformer, ServedWeights]:
    model = Transformer(config)
    if lora.is_set:
        install(model, planned_shapes(lora, config))
    flat = torch.zeros(WeightLayout(model, precision).num_bytes, dtype=torch.uint8)
    move_but_linear(model, CUDA)
    return model, ServedWeights(model, precision, flat=flat)


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor, lengths: torch.Tensor
) -> Any:
    """In the place of the kernels, which `test_paged_attention.py` compiles: what they ask of their arguments."""
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert q.stride(-1) == blocks.stride(-1) == lengths.stride(-1) == 1
    assert (blocks.dtype, lengths.dtype) == (torch.int32, torch.int64)
    assert {x.device for x in (q, keys, values, blocks, lengths)} == {CUDA}
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        *covering(CONFIGS, ["float32", "bfloat16", "fp8"]),
        pytest.param("gpt2", "bfloat16", marks=pytest.mark.slow, id="gpt2-bfloat16-all plans"),
        pytest.param("qwen2", "fp8", marks=pytest.mark.slow, id="qwen2-fp8-all plans"),
    ],
)
def test_a_step_stays_on_the_device(
    family: str, precision: Precision, cuda: None, request: pytest.FixtureRequest
) -> None:
    """From tokens to sampled tokens, for every kind of plan: nothing in it needs the host.

    What is sampled from are float32 logits of any model: outside of the slow cases one family has all plans.
    """
    is_slow = request.node.get_closest_marker("slow") is not None
    of_all = PLANS if is_slow or family == "llama" else PLANS[2:3]
    model, weights = served_model(CONFIGS[family], precision)
    wide = torch.float32 if precision == "float32" else torch.bfloat16
    assert {(p.device, p.dtype) for p in model.parameters()} == {(CUDA, wide)}
    runner = PagedRunner(model, num_rows=4, max_len=512, attend=attend, fused=False, captures=False)
    assert (runner._kv.keys.device, runner._kv.keys.dtype) == (CUDA, wide)
    for version, plans in ((weights.flat, of_all), (torch.zeros_like(weights.flat), PLANS[:1])):
        weights.prepare(version)
        weights.rebind(version)
        for plan in plans:
            with NoCopies():
                out = runner._step(runner._shape(3, 300, plan))
            assert (out.shape, out.dtype, out.device) == ((4, 2 + plan.num_kept), torch.int32, CUDA)


def test_whole_rows_are_drawn_in_two_kernels(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an example agrees; noise, temperatures and greedy rows are in them. Rows that are cut have torch's way."""
    kernels = pytest.importorskip("slipstream.generator.sampler_kernels")
    launched: Counter[str] = Counter()
    for name in ("blocks_kernel", "draw_kernel"):
        monkeypatch.setattr(kernels, name, launches(name, launched))
    model, _ = served_model(replace(CONFIG, num_layers=1), "bfloat16")
    operations: list[list[str]] = []
    for is_right in (True, False):
        monkeypatch.setattr(fused_sampling, "agrees", lambda device, width, is_right=is_right: is_right)
        runner = PagedRunner(model, num_rows=4, max_len=512, attend=attend, fused=False, captures=False)
        plans = (SamplingPlan(), SamplingPlan(has_greedy=True, has_temperature=True), *PLANS[1:])
        for plan in (
            plans if is_right else plans[:2]
        ):  # `test_a_step_stays_on_the_device` has torch's way for the others
            launched.clear()
            with NoCopies(), Computing() as own:
                out = runner._step(runner._shape(3, 300, plan))
            assert (out.shape, out.dtype, out.device) == ((4, 2 + plan.num_kept), torch.int32, CUDA)
            assert set(launched.values()) == ({1} if is_right and not plan.truncates else set())
            assert len(launched) == (2 if is_right and not plan.truncates else 0)
            operations.append(own.names)
    assert len(operations[5]) - len(operations[0]) >= 25, "noise alone is 17"
    assert operations[0] == operations[1] == operations[2], "nothing that depends on the plan is left to torch"


class Computing(TorchDispatchMode):
    """Lists operators that are no views and make no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
            self.names += [] if is_view else [func._schema.name]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("precision", "adapters"),
    with_slow(
        [("bfloat16", "bfloat16"), ("fp8", "float32")],
        [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"), ("fp8", "bfloat16")],
    ),
)
def test_a_step_beside_adapters_stays_on_the_device(
    precision: Precision, adapters: Literal["float32", "bfloat16"], cuda: None
) -> None:
    """A version is A and B, also of the embedding; the base lies there already."""
    targets = ["q_proj", "v_proj", "down_proj", "lm_head", "embed_tokens"]
    model, weights = served_model(CONFIG, precision, LoraConfig(rank=4, targets=targets, adapter_precision=adapters))
    item = 4 if adapters == "float32" else 2
    num_bytes = item * 4 * ((2 * 32 + 48) + (32 + 16 + 32) + 2 * (32 + 2050))
    assert num_bytes <= weights.num_bytes < num_bytes + (item == 2) * 64 * 20 + 1
    runner = PagedRunner(model, num_rows=4, max_len=512, attend=attend, fused=False, captures=False)
    for version in (weights.flat, torch.zeros_like(weights.flat)):
        weights.prepare(version)
        weights.rebind(version)
        with NoCopies():
            out = runner._step(runner._shape(3, 300, PLANS[0]))
        assert (out.dtype, out.device) == (torch.int32, CUDA)


@pytest.mark.parametrize("family", CONFIGS)
def test_fp8_matrices_are_multiplied_as_they_are(family: str, cuda: None) -> None:
    model, weights = served_model(CONFIGS[family], "fp8")
    weights.prepare(torch.zeros_like(weights.flat))
    for one in (model, weights.prepared_model):
        found = [module.product for layer in one.layers for module in (layer.qkv, layer.output, layer.up, layer.down)]
        assert all(isinstance(p, Fp8Product) and p._weight.dtype == FP8 for p in found)
        assert isinstance(one.served_head, WideProduct)
        logits = one.logits(torch.empty(3, 32, dtype=torch.bfloat16, device=CUDA))
        assert (logits.shape, logits.dtype) == ((3, 2050), torch.float32)


@pytest.mark.parametrize(("records", "lora"), with_slow([(True, True)], [(False, False), (True, False)]))
def test_a_step_of_a_mixture_of_experts_stays_on_the_device(records: bool, lora: bool, cuda: None) -> None:
    """Its rows are sorted by expert, and their experts recorded, without a number that the host has to see."""
    mixture = replace(CONFIG, family="qwen3_moe", qk_norm=True, num_experts=8, experts_per_token=2, expert_width=16)
    targets = ["q_proj", "gate_up_proj", "down_proj"]
    model, _ = served_model(mixture, "bfloat16", *([LoraConfig(rank=8, targets=targets)] if lora else []))
    runner = PagedRunner(model, num_rows=8, max_len=64, attend=attend, fused=False, records_routes=records)
    with NoCopies():
        output = runner._step(runner._shape(8, 48, PLANS[0]))
    assert (output.shape, output.dtype) == ((8, 2), torch.int32)
    assert (runner._kv.routes is not None) == records


def test_sizes_that_fp8_cannot_multiply_are_bfloat16(cuda: None) -> None:
    model, _ = served_model(replace(CONFIG, intermediate_size=40, num_layers=1), "fp8")
    assert model.layers[0].qkv.product._weight.dtype == FP8
    assert model.layers[0].down.product._weight.dtype == torch.bfloat16
    out = model.layers[0].mlp(torch.empty(3, 32, dtype=torch.bfloat16, device=CUDA))
    assert (out.shape, out.dtype) == ((3, 32), torch.bfloat16)


@pytest.fixture
def crossings(cuda: None, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what goes from the host to the device (`sent`, staged) and back (read), and the waits."""
    found: Counter[str] = Counter()

    def count(name: str, answer: Any) -> Any:
        return lambda *args, **kwargs: (found.update([name]), answer(*args, **kwargs))[1]

    def sent(array: Any, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(array.shape), dtype=torch.int64, device=device)

    def copied(runner: PagedRunner, output: torch.Tensor) -> Any:
        return SimpleNamespace(numpy=lambda: np.zeros(tuple(output.shape), dtype=np.int32))

    def staged(self: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
        if not isinstance(source, torch.Tensor):  # pinned memory
            assert non_blocking
            found["staged"] += 1
        return self

    for module in (paged_runner, paged_kv):
        monkeypatch.setattr(module, "sent", count("sent", sent))
    # Its indices are made on the host: `test_nothing_waits_for_a_gpu.py` has it.
    monkeypatch.setattr(paged_attention, "PackedAttention", lambda lengths: lambda layer, q, k, v: torch.empty_like(q))
    monkeypatch.setattr(PagedRunner, "_copied", count("read", copied))
    monkeypatch.setattr(PagedRunner, "_wait", count("wait", lambda runner: None))
    monkeypatch.setattr(torch.Tensor, "copy_", staged)
    for name in ("cpu", "numpy", "tolist"):  # `item` and `bool` are refused
        monkeypatch.setattr(torch.Tensor, name, count(name, getattr(torch.Tensor, name)))
    return found


@pytest.mark.parametrize("family", with_slow(["qwen2"], ["llama", "gpt2"]))
def test_rows_come_and_go_and_a_step_is_read_once(family: str, crossings: Counter[str]) -> None:
    """A prompt in two chunks, rows on it, steps ahead, a row that ends, one that moves, a swap, one that is parked."""
    model, _ = served_model(CONFIGS[family], "bfloat16")
    runner = PagedRunner(model, num_rows=4, max_len=512, attend=attend, fused=False, captures=False)
    prefix, tokens = runner.open_prefix(45), np.zeros(24, dtype=np.int32)
    assert prefix is not None
    crossings.clear()

    def crossed() -> dict[str, int]:
        found = dict(crossings)
        crossings.clear()
        return found

    runner.prefill([Chunk(prefix, tokens, 0)])
    assert crossed() == {"sent": 1}
    runner.prefill([Chunk(prefix, tokens[:21], 24)])
    assert crossed() == {"sent": 2}, "the slots of what came before, too"
    states = RowStates.closed(3)
    states.positions[:] = 45
    assert runner.open_rows([0, 1, 2], prefix, states)
    assert not crossed(), "pages to copy come along with the step"
    with NoCopies():
        runner.decode(3)
        assert crossed() == {"staged": 1, "read": 1, "wait": 1}
        for _ in range(2):  # to the end of a page
            runner.decode(3)
        assert crossed() == {"staged": 1, "read": 2, "wait": 2}, "block tables change with a page"
        runner.close_rows([0])
        runner.move_rows([2], [0])
        runner.settle()
        assert not crossed()
        for _ in range(2):
            runner.decode(2)
        assert crossed() == {"staged": 1, "read": 2, "wait": 2}
        assert runner.park_row(1).num_tokens == 45 + 3 + 2
    assert not crossed()


def test_what_these_tests_refuse(cuda: None) -> None:
    """The oracle itself: it knows a look from the host, and a copy to the device."""
    x = torch.empty(3, device=CUDA)
    with pytest.raises(DataDependentOutputException):
        x.sum().item()
    with pytest.raises(AssertionError, match="cpu"), NoCopies():
        torch.zeros(3).to(CUDA)
    with NoCopies():
        assert torch.where(x > 0, 1.0, x).device == CUDA
    assert isinstance(DenseProduct(torch.empty(4, 3, device=CUDA))(x[None]), torch.Tensor)
