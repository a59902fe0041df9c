"""Several ranks compute what one computes, in real processes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import rank_jobs
import torch
from covering import covering
from rank_models import CONFIGS, LLAMA, whole_model
from rank_pool import RankPool

from slipstream.core.errors import ConfigError
from slipstream.models.config import local_config
from slipstream.models.hf import save_model
from slipstream.models.tensor_parallel import TensorParallel

LENGTHS = [11, 5]
TOKENS = torch.tensor([(7 * i + 3) % 67 for i in range(sum(LENGTHS))])


@pytest.mark.parametrize(("case", "world"), covering(CONFIGS, [2, 4]))
def test_logits_are_those_of_one_rank_and_the_same_bits_on_all(ranks: RankPool, case: str, world: int) -> None:
    config = CONFIGS[case]
    expected = rank_jobs.packed_logits(whole_model(config), TOKENS, LENGTHS)
    assert expected.std() > 0.3, "nothing to be seen in equal logits"
    for fixed_order in (False, True):
        by_rank = ranks.run(rank_jobs.logits, config, TOKENS, LENGTHS, fixed_order, world=world)
        assert all(logits.tobytes() == by_rank[0].tobytes() for logits in by_rank)
        np.testing.assert_allclose(by_rank[0], expected, rtol=0, atol=1e-5)


def test_one_token_and_hardly_more_words_than_ranks(ranks: RankPool) -> None:
    config = replace(LLAMA, vocab_size=5)
    expected = rank_jobs.packed_logits(whole_model(config), TOKENS[:1] % 5, [1])
    for logits in ranks.run(rank_jobs.logits, config, TOKENS[:1] % 5, [1], False, world=4):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("case", "per_layer"), [("llama", 2), ("gpt_neox", 1), ("gpt_neox_serial", 2), ("gpt2", 2)])
def test_sums_per_layer(ranks: RankPool, case: str, per_layer: int) -> None:
    config = CONFIGS[case]
    assert ranks.run(rank_jobs.number_of_sums, config, world=2) == [per_layer * config.num_layers] * 2


@pytest.mark.parametrize("case", ["qwen2", "gpt_neox", "gpt2"])
def test_ranks_read_their_part_of_a_checkpoint(ranks: RankPool, case: str, tmp_path) -> None:
    model = whole_model(CONFIGS[case])
    save_model(model, tmp_path, max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = rank_jobs.packed_logits(model, TOKENS, LENGTHS)
    for logits in ranks.run(rank_jobs.logits_of_checkpoint, str(tmp_path), TOKENS, LENGTHS, world=2):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("fixed_order", [False, True])
def test_sums_have_the_same_bits_on_every_rank(ranks: RankPool, world: int, fixed_order: bool) -> None:
    by_rank = ranks.run(rank_jobs.sums, [64, 8, 1], fixed_order, world=world)
    assert all(sums == by_rank[0] for sums in by_rank)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_in_fixed_order_a_row_does_not_depend_on_the_number_of_rows(ranks: RankPool, world: int) -> None:
    whole, some, one = ranks.run(rank_jobs.sums, [64, 8, 1], True, world=world)[0]
    assert whole.startswith(some)
    assert some.startswith(one)


@pytest.mark.parametrize("world", [0, 3, 5, 8])
def test_what_cannot_be_divided_says_what_can(world: int) -> None:
    with pytest.raises(ConfigError, match=r"allowed: 1, 2, 4 ranks"):
        local_config(LLAMA, world)


@pytest.mark.parametrize(
    ("changes", "world"),
    [({"num_heads": 12, "num_kv_heads": 6}, 4), ({"intermediate_size": 50}, 4), ({"vocab_size": 3}, 4)],
)
def test_each_condition_of_a_division(changes: dict, world: int) -> None:
    with pytest.raises(ConfigError, match="cannot be divided"):
        TensorParallel(replace(LLAMA, **changes), 0, world)


def test_a_ranks_config_has_its_heads_and_the_whole_vocabulary() -> None:
    config = local_config(LLAMA, 4)
    assert (config.num_heads, config.num_kv_heads, config.intermediate_size) == (1, 1, 12)
    assert (config.vocab_size, config.hidden_size) == (LLAMA.vocab_size, LLAMA.hidden_size)
