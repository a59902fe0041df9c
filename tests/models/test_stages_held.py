"""The layers and tensors of pipeline stages: every one is somewhere, and only a tied embedding twice."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.core.errors import ConfigError
from slipstream.models.shards import local_parts, whole_shapes
from slipstream.models.stages import Stage
from slipstream.models.transformer import Transformer

sys.path.insert(0, str(Path(__file__).parent.parent / "parallel"))  # its models serve here, too

from rank_models import CONFIGS


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_chunks_are_all_layers_in_order_dealt_in_turns(world: int, chunks: int) -> None:
    for num_layers in range(world * chunks, 30):
        stages = [Stage(rank, world, chunks) for rank in range(world)]
        by_chunk = {chunk: stage.layers_of(chunk, num_layers) for stage in stages for chunk in stage.held}
        assert [layer for chunk in sorted(by_chunk) for layer in by_chunk[chunk]] == list(range(num_layers))
        sizes = [len(layers) for layers in by_chunk.values()]
        assert max(sizes) - min(sizes) <= 1
        assert [chunk % world for stage in stages for chunk in stage.held] == [s.rank for s in stages for _ in s.held]


@pytest.mark.parametrize("case", CONFIGS)
def test_stages_hold_every_tensor_once_and_a_tied_embedding_on_both_ends(case: str) -> None:
    config = replace(CONFIGS[case], num_layers=7)
    held = Counter[str]()
    for rank in range(3):
        with torch.device("meta"):
            model = Transformer(config, stage=Stage(rank, 3, 2))
        parts = local_parts(model)
        assert sum(p.numel() for p in model.parameters()) == sum(torch.Size(one.box.extent).numel() for one in parts)
        held.update({part.box.name for part in parts})
    twice = {name for name, count in held.items() if count == 2}
    assert held.keys() == whole_shapes(config).keys()
    assert max(held.values()) <= 2
    assert len(twice) == int(config.tie_embeddings)
    assert all(name.endswith(("embed_tokens.weight", "embed_in.weight", "wte.weight")) for name in twice)


def test_fewer_layers_than_chunks_are_refused() -> None:
    Stage(0, 2, 2).check(4)
    with pytest.raises(ConfigError, match="fewer layers"):
        Stage(0, 2, 2).check(3)
