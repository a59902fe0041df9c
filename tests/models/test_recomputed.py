"""Layers that run again in the backward pass, keep what products gave, or are compiled: the same gradients."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.models.attention import PackedAttention
from slipstream.models.config import TransformerConfig
from slipstream.models.initialise import initialise
from slipstream.models.sharded import Division, divide
from slipstream.models.transformer import Transformer, product_operators
from slipstream.plan.counts import counts_of

LLAMA = TransformerConfig(
    family="llama",
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    tie_embeddings=True,
)
CONFIGS = {
    "llama": LLAMA,
    "parallel": replace(
        LLAMA, family="gpt_neox", num_kv_heads=4, parallel_residual=True, layer_norm=True, gated_mlp=False
    ),
    "mixture": replace(LLAMA, family="qwen3_moe", qk_norm=True, num_experts=4, experts_per_token=2, expert_width=16),
}


class Products(TorchDispatchMode):
    """Counts products and attention, and the elements of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.elements = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in product_operators():
            self.calls += 1
            self.elements += tree_leaves(out)[0].numel()
        return out


def trained(case: str, lengths: list[int], **division):
    """Gradients after a pass over sequences of `lengths`; products of both passes, and elements of the first's."""
    model = Transformer(CONFIGS[case])
    initialise(model, 0)
    divide(model, Division(**division))
    return backward(model, lengths)


def backward(model: Transformer, lengths: list[int], *, counts: bool = True):
    """Nothing is compiled, nor is what is compiled called, while operators are counted."""
    num_tokens = sum(lengths)
    tokens = torch.arange(num_tokens) % model.config.vocab_size
    positions = torch.cat([torch.arange(length) for length in lengths])
    products = Products()
    with products if counts else nullcontext():
        states = model(tokens, positions, PackedAttention(lengths))
        elements = products.elements
        states.square().sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return grads, products.calls, elements


@pytest.mark.parametrize("case", CONFIGS)
def test_what_is_kept_changes_time_and_memory_only(case):
    plain, calls, _ = trained(case, [5, 9, 2])
    again, more_calls, _ = trained(case, [5, 9, 2], recomputes=True)
    kept, as_many, elements = trained(case, [5, 9, 2], recomputes=True, keeps_products=True)
    assert as_many == calls < more_calls
    assert all(torch.equal(plain[name], again[name]) and torch.equal(plain[name], kept[name]) for name in plain)
    if case != "mixture":  # whose rows a CPU fills up
        padding = 9 + 9 + 9 - 16  # attention's batches, of which queries are kept
        counts = counts_of(CONFIGS[case])
        assert elements == 2 * (16 * counts.product_elements + padding * counts.local.query_size)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo hides it, if it is no error
@pytest.mark.parametrize(
    ("case", "batches"),
    [("parallel", 2), ("llama", 3), ("parallel", 3)],
)
def test_compiled_layers_give_the_same(case, batches):
    """For another number of tokens nothing is compiled again."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, model = Transformer(CONFIGS[case]).double(), Transformer(CONFIGS[case]).double()
    for each in (plain, model):  # rounding to float32 alone may change gradients by more than is allowed here
        initialise(each, 0)
    divide(model, Division(compiles="aot_eager", recomputes=case == "llama"))
    stats: list[Counter[str]] = []
    for lengths in ([5, 9, 2], [7, 4], [30])[:batches]:
        plain.zero_grad()
        model.zero_grad()
        exact, *_ = backward(plain, lengths)
        found, *_ = backward(model, lengths, counts=False)
        for name, expected in exact.items():
            torch.testing.assert_close(found[name], expected, atol=1e-10, rtol=1e-10)
        stats.append(Counter(torch._dynamo.utils.counters["stats"]))
    assert [one["unique_graphs"] for one in stats] == [2] * batches  # of the two layers' two parts
    torch._dynamo.reset()
