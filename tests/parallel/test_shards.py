"""Who holds which box of the checkpoint: all boxes of all ranks are the whole, neither more nor less."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from covering import covering
from drawn import drawn
from hypothesis import strategies as st
from rank_models import CONFIGS, LLAMA, shard_boxes, whole_model, whole_tensors

from slipstream.core.errors import ConfigError
from slipstream.models.config import TransformerConfig
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import logical_tensors, save_model
from slipstream.models.shards import load_shard, local_shards
from slipstream.models.tensor_parallel import TensorParallel
from slipstream.models.transformer import Transformer


@st.composite
def divisions(draw: st.DrawFn) -> tuple[TransformerConfig, int]:
    """A config and a number of ranks that divides it."""
    base = CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))]
    world = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    num_heads = world * draw(st.integers(1, 2))
    num_kv_heads = num_heads
    if base.family not in ("gpt2", "gpt_neox"):
        divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0 and (n % world == 0 or world % n == 0)]
        num_kv_heads = draw(st.sampled_from(divisors))
    config = replace(
        base,
        vocab_size=draw(st.integers(world, 3 * world + 5)),
        hidden_size=draw(st.sampled_from([8, 12])),
        head_dim=8,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=world * draw(st.integers(1, 3)),
        num_layers=draw(st.integers(1, 2)),
        max_positions=5,
        tie_embeddings=draw(st.booleans()),
    )
    return config, world


def numbered(config: TransformerConfig) -> tuple[Transformer, FlatParameters]:
    """A whole model whose weights all differ."""
    model = Transformer(config)
    flat = FlatParameters(model)
    flat.flat.copy_(torch.arange(flat.num_params, dtype=torch.float32))
    return model, flat


def copies_of(name: str, config: TransformerConfig, world: int) -> int:
    """How many ranks hold each element, from the names alone."""
    if any(part in name for part in ("norm", "ln_", "embed_tokens", "embed_in", "wte", "wpe")):
        return world
    if "k_proj" in name or "v_proj" in name:
        return max(world // config.num_kv_heads, 1)
    return 1


@drawn(6, 60, division=divisions())
def test_all_boxes_are_the_whole_and_restore_it(division: tuple[TransformerConfig, int]) -> None:
    check_boxes(*division)


@pytest.mark.parametrize(("case", "world"), covering(CONFIGS, [2, 4]))
def test_boxes_of_every_family(case: str, world: int) -> None:
    check_boxes(CONFIGS[case], world)


def check_boxes(config: TransformerConfig, world: int) -> None:
    """The boxes cover every tensor, each element as often as its name says, and put together they are the whole."""
    model, _ = numbered(config)
    whole = logical_tensors(model)
    restored = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
    copies = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in whole.items()}
    for rank in range(world):
        part = TensorParallel(config, rank, world).new_model()
        for parameter in part.parameters():
            parameter.data.fill_(torch.nan)
        load_shard(part, whole)
        assert not any(parameter.isnan().any() for parameter in part.parameters())  # all of the rank's storage is named
        held = local_shards(part)
        assert sum(shard.view.numel() for shard in held) == sum(p.numel() for p in part.parameters())  # and once
        assert [shard.box for shard in held] == shard_boxes(config, rank, world)
        for shard in held:
            box = shard.box
            assert box.shape == whole[box.name].shape
            restored[box.name][box.slices] = shard.view
            copies[box.name][box.slices] += 1
    for name, tensor in whole.items():
        assert torch.equal(restored[name], tensor), name
        assert (copies[name] == copies_of(name, config, world)).all(), name


@pytest.mark.parametrize("case", CONFIGS)
def test_flat_weights_of_the_whole_are_its_tensors(case: str) -> None:
    model, flat = numbered(CONFIGS[case])
    named = whole_tensors(CONFIGS[case], flat.flat)
    expected = logical_tensors(model)
    assert list(named) == list(expected)
    assert all(torch.equal(named[name], tensor) for name, tensor in expected.items())


def test_shards_follow_a_swap_of_a_ranks_flat_weights() -> None:
    """A rank stages its part of a version in a flat tensor of its own layout, and flips to it."""
    old, new = (logical_tensors(whole_model(LLAMA, seed)) for seed in (0, 1))
    live, shadow = (TensorParallel(LLAMA, 1, 2).new_model() for _ in range(2))
    weights, staged = FlatParameters(live), FlatParameters(shadow)
    load_shard(live, old)
    load_shard(shadow, new)
    weights.rebind(staged.flat)
    for shard in local_shards(live):
        assert torch.equal(shard.view, new[shard.box.name][shard.box.slices]), shard.box.name


def test_boxes_by_hand() -> None:
    """Rank 2 of 4 with 2 key-value heads of 8: the second of them, and query head 2."""
    held = {box.name: (box.start, box.stop) for box in shard_boxes(LLAMA, 2, 4)}
    layer = "model.layers.1"
    assert held[f"{layer}.self_attn.q_proj.weight"] == ((16, 0), (24, 32))
    assert held[f"{layer}.self_attn.k_proj.weight"] == ((8, 0), (16, 32))
    assert held[f"{layer}.self_attn.o_proj.weight"] == ((0, 16), (32, 24))
    assert held[f"{layer}.mlp.up_proj.weight"] == ((24, 0), (36, 32))
    assert held[f"{layer}.mlp.down_proj.weight"] == ((0, 24), (32, 36))
    assert held["lm_head.weight"] == ((33, 0), (50, 32))
    assert held["model.embed_tokens.weight"] == ((0, 0), (67, 32))
    gpt2 = [box for box in shard_boxes(CONFIGS["gpt2"], 1, 2) if box.name == "transformer.h.0.attn.c_attn.weight"]
    assert [(box.start, box.stop) for box in gpt2] == [
        ((0, 16), (32, 32)),
        ((0, 48), (32, 64)),
        ((0, 80), (32, 96)),
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "missing lm_head.weight"),
        (lambda tensors: tensors.update({"lm_head.bias": torch.zeros(67)}), "unexpected lm_head.bias"),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.zeros(70, 32)}),
            r"lm_head.weight has shape \[70, 32\]",
        ),
    ],
)
def test_only_the_tensors_of_the_whole_are_loaded(change, problem: str) -> None:
    tensors = dict(logical_tensors(whole_model(LLAMA)))
    change(tensors)
    part = TensorParallel(LLAMA, 0, 2).new_model()
    with pytest.raises(ConfigError, match=problem):
        load_shard(part, tensors)


@pytest.mark.parametrize("case", CONFIGS)
def test_a_whole_model_holds_whole_tensors(case: str) -> None:
    model, _ = numbered(CONFIGS[case])
    whole = logical_tensors(model)
    put_together = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
    for shard in local_shards(model):
        assert shard.view.shape == shard.box.extent
        put_together[shard.box.name][shard.box.slices] = shard.view
    assert all(torch.equal(put_together[name], tensor) for name, tensor in whole.items())


def test_a_ranks_part_is_not_saved_as_if_it_were_the_model(tmp_path) -> None:
    part = TensorParallel(LLAMA, 1, 2).new_model()
    with pytest.raises(ConfigError, match="one rank's part"):
        save_model(part, tmp_path / "model")
    assert not (tmp_path / "model").exists()
