"""Counts of parameters, bytes and operations against the modules that have them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slipstream.core.errors import ConfigError
from slipstream.core.fields import Precision
from slipstream.core.lora_section import AdapterPrecision
from slipstream.generator.paged_kv import PagedKV
from slipstream.models.config import TransformerConfig, local_config
from slipstream.models.expert_parallel import ExpertShare
from slipstream.models.lora import Adapter, install, matrices, shapes_for, targeted
from slipstream.models.quantized import WeightLayout
from slipstream.models.transformer import OneRank, Transformer
from slipstream.plan.counts import Counts, adapters_of
from slipstream.plan.question import ARCHITECTURES

LLAMA = TransformerConfig(
    family="llama",
    vocab_size=67,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    max_positions=160,
    tie_embeddings=False,
)
BIASED = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
GPT = {**BIASED, "num_kv_heads": 8, "gated_mlp": False, "layer_norm": True}
CONFIGS = {
    "llama": LLAMA,
    "llama_tied": replace(LLAMA, tie_embeddings=True),
    "wide_heads": replace(LLAMA, head_dim=24, **BIASED),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True),
    "gpt_neox": replace(LLAMA, family="gpt_neox", **GPT, rotary_fraction=0.25, parallel_residual=True),
    "gpt2": replace(LLAMA, family="gpt2", **GPT, rotary_fraction=0.0, tie_embeddings=True),
}

EXPERTS = {"num_experts": 6, "experts_per_token": 2, "expert_width": 24}
MIXTURES = {
    "qwen3_moe": replace(LLAMA, family="qwen3_moe", qk_norm=True, **EXPERTS),
    "mixtral": replace(LLAMA, family="mixtral", tie_embeddings=True, **EXPERTS),
}


class FirstOf(OneRank):
    """The first of `world` ranks, whose rows of the head are the most there are."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world = world

    def experts(self, num_experts: int) -> ExpertShare | None:
        return ExpertShare.of(num_experts, world=self.world)

    def vocab_rows(self, vocab_size: int) -> range:
        return range(-(-vocab_size // self.world))


def share(config: TransformerConfig, world: int) -> Transformer:
    with torch.device("meta"):
        return Transformer(local_config(config, world), FirstOf(world))


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("case", CONFIGS)
def test_params_are_those_of_the_module(case: str, world: int) -> None:
    model = share(CONFIGS[case], world)
    counts = Counts(CONFIGS[case], world)
    assert counts.params == sum(parameter.numel() for parameter in model.parameters())
    assert counts.embedding == sum(p.numel() for name, p in model.named_parameters() if "embedding" in name)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "fp8", "mxfp4"])
@pytest.mark.parametrize("case", CONFIGS)
def test_served_bytes_are_those_of_the_layout(case: str, precision: Precision) -> None:
    config = replace(CONFIGS[case], hidden_size=128, intermediate_size=256, vocab_size=512)
    layout = WeightLayout(share(config, 2), precision)
    gaps = 2 * 64 * len(layout.stored)  # each parameter and its scales begin on a multiple of 64 bytes
    assert Counts(config, 2).served_bytes(precision) <= layout.num_bytes
    assert layout.num_bytes <= Counts(config, 2).served_bytes(precision) + gaps


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("fp8", torch.bfloat16)])
@pytest.mark.parametrize("world", [1, 4])
def test_kv_bytes_are_those_of_a_page(world: int, precision: Precision, dtype: torch.dtype) -> None:
    local = local_config(LLAMA, world)
    page = PagedKV.bytes_per_page(
        num_layers=local.num_layers, num_kv_heads=local.num_kv_heads, head_dim=local.head_dim, dtype=dtype
    )
    assert Counts(LLAMA, world).kv_bytes(precision) * 16 == page


class AttentionWithoutProducts:
    """Its operations are not counted: what comes out are the queries."""

    def __call__(self, _layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q

    def route(self, _layer: int, chosen: torch.Tensor) -> torch.Tensor:
        return chosen


@pytest.mark.parametrize("case", CONFIGS)
def test_operations_of_the_products_are_twice_their_weights(case: str) -> None:
    """Counted by torch in a forward pass whose attention computes nothing."""
    config, tokens = CONFIGS[case], 12
    counts, model = Counts(config), share(config, 1).to("meta")
    ids = torch.zeros(tokens, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.logits(model(ids, ids, AttentionWithoutProducts()))
    assert counter.get_total_flops() == 2 * tokens * (config.num_layers * counts.layer_matrix + counts.head_matrix)


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.6), ("llama-3.1-405b", 405.9)]
)
def test_published_sizes(name: str, billions: float) -> None:
    assert Counts(ARCHITECTURES[name]).params == pytest.approx(billions * 1e9, rel=1e-3)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", MIXTURES)
def test_counts_of_a_mixture_of_experts_are_those_of_the_module(case: str, world: int) -> None:
    config = MIXTURES[case]
    counts, model = Counts(config, world), share(config, world)
    assert counts.params == sum(parameter.numel() for parameter in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if "experts" in name and "router" not in name)
    assert counts.active_params == pytest.approx(counts.params - 4 / 6 * experts)
    for ranks in (1, 3):
        elsewhere = counts.layer - counts.gathered_layer(ranks)
        assert counts.experts_of(ranks) == (0 if ranks == 1 else experts / config.num_layers / ranks)
        assert elsewhere == pytest.approx(experts / config.num_layers * (1 - 1 / ranks))
    for precision in ("float32", "bfloat16", "int8"):
        layout = WeightLayout(model, precision)
        assert 0 <= layout.num_bytes - counts.served_bytes(precision) <= 2 * 64 * len(layout.stored)
    for targets in ([], ["q_proj", "gate_up_proj", "down_proj"], ["experts.down_proj", "lm_head"]):
        found = adapters_of(config, 3, targets)
        shapes = shapes_for(config, targeted(config, targets), rank=3, alpha=1.0, use_rslora=False)
        sizes = {name: sum(p.numel() for p in Adapter(shape).parameters()) for name, shape in shapes.items()}
        assert found.params == sum(sizes.values())
        joined = sum(size for name, size in sizes.items() if "experts" in name)
        assert (joined > 0) == bool(targets)
        assert found.multiplied == pytest.approx(found.params - 4 / 6 * joined, abs=1)
    with pytest.raises(ConfigError, match="cannot be divided"):
        _ = Counts(config, 4).params
    with pytest.raises(ConfigError, match="1 of 3 layers without"):
        _ = Counts(replace(config, dense_layers=(0,))).params


def test_operations_of_a_mixture_are_those_of_the_experts_that_a_token_has() -> None:
    """Counted by torch in a forward pass in float64, where 8 tokens of one kind have the same 2 experts."""
    config, tokens = MIXTURES["qwen3_moe"], 8
    counts, model = Counts(config), Transformer(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.zeros(tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, ids, AttentionWithoutProducts())
    assert counter.get_total_flops() == 2 * tokens * config.num_layers * counts.active_matrix


def test_experts_that_tokens_touch() -> None:
    """Against a simulation, in whole experts."""
    counts = Counts(MIXTURES["mixtral"])
    one = counts.touched_matrix(1)
    assert one == pytest.approx(counts.active_matrix - 6 * 32)
    draws = torch.rand(4000, 5, 6, generator=torch.Generator().manual_seed(0)).topk(2, -1).indices
    seen = torch.zeros(4000, 6).scatter_(1, draws.flatten(1), 1.0).sum(1).mean()
    expert = 3 * 32 * 24
    assert (counts.touched_matrix(5) - one) / expert == pytest.approx(float(seen) - 2, abs=0.05)
    assert counts.touched_matrix(10_000) == pytest.approx(counts.layer_matrix)
    attention = counts.layer_matrix - 6 * expert
    for ranks in (2, 3):  # that have as many tokens each read as many experts, together and each
        assert counts.touched_matrix(5, ranks) - attention == pytest.approx(
            (counts.touched_matrix(5 * ranks) - attention) / ranks
        )


def test_shapes_that_no_rank_can_share_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be divided"):
        _ = Counts(LLAMA, 3).params


# Adapters


def adapted(
    config: TransformerConfig, rank: int, targets: list[str], precision: AdapterPrecision = "float32"
) -> Transformer:
    """The policy that a run with `model.lora` trains, without numbers."""
    names = targeted(config, targets)
    model = share(config, 1)
    with torch.device("meta"):
        shapes = shapes_for(config, names, rank=rank, alpha=1.0, use_rslora=False, precision=precision)
        return install(model, shapes).to("meta")


@pytest.mark.parametrize(
    "targets",
    [
        *([], ["lm_head"], ["0.mlp.up_proj", "q_proj"], ["c_proj"], ["dense", "embed_out"]),
        *(["embed_tokens", "lm_head"], ["wte", "c_fc"], ["embed_in"]),
    ],
)
@pytest.mark.parametrize("case", CONFIGS)
def test_adapters_are_those_of_the_module(case: str, targets: list[str]) -> None:
    config = CONFIGS[case]
    try:
        model = adapted(config, 4, targets)
    except ConfigError:  # other families' names
        with pytest.raises(ConfigError, match="names no layer"):
            adapters_of(config, 4, targets)
        return
    found = adapters_of(config, 4, targets)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}
    assert found.params == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert found.head_params == sum(
        p.numel() for name, one in layers.items() if "head" in name for p in one.parameters()
    )
    assert found.kernels == sum(len(one.shape.pieces) + 2 for one in layers.values())
    assert found.version_bytes == WeightLayout(model, "bfloat16").num_bytes
    layout = WeightLayout(adapted(config, 4, targets, "bfloat16"), "int8")
    padding = layout.num_bytes - adapters_of(config, 4, targets, "bfloat16").version_bytes
    assert 0 <= padding < 64 * len(layout.stored)


@pytest.mark.parametrize("with_ends", [False, True])
def test_weights_beside_adapters_have_no_gradient(with_ends: bool) -> None:
    """Operations that torch counts of a forward and backward pass: four of the base's six, all six of the adapters'.

    The inputs of the first layer have no gradient: of q, k and v the base's product is left out, and that of their A.
    With an adapter of the embedding they have one. Its A is looked up.
    """
    config, tokens, rank = LLAMA, 12, 2
    targets = [piece.target for piece in matrices(config)] if with_ends else []
    model = adapted(config, rank, targets)
    ids = torch.zeros(tokens, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model.logits(model(ids, ids, lambda layer, q, k, v: q + k.sum() + v.sum())).sum().backward()
    counts, found = Counts(config), adapters_of(config, rank, targets)
    first = 0 if with_ends else config.hidden_size * (config.query_size + 2 * config.kv_size + 3 * rank)
    base = config.num_layers * counts.layer_matrix + counts.head_matrix
    assert counter.get_total_flops() == tokens * (4 * base + 6 * found.multiplied - 2 * first)
