"""Held-out examples: as many prompts as asked for, whole ones, whatever the order."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.stages.completions import split_by_prompt

EXAMPLES = [(np.array([index // 3, 7], np.int32), index) for index in range(60)]  # three examples of each of 20 prompts


def split(examples: list[tuple[np.ndarray, int]], share: float, seed: int = 0) -> tuple[list[int], list[int]]:
    train, held_out = split_by_prompt(examples, lambda example: example[0], share=share, seed=seed)
    return [index for _, index in train], [index for _, index in held_out]


@pytest.mark.parametrize(("share", "num_prompts"), [(0.0, 0), (0.02, 0), (0.03, 1), (0.25, 5), (1.0, 20)])
def test_so_many_whole_prompts(share: float, num_prompts: int) -> None:
    train, held_out = split(EXAMPLES, share)
    assert sorted([*train, *held_out]) == list(range(60))
    assert (train, held_out) == (sorted(train), sorted(held_out))
    prompts = {index // 3 for index in held_out}
    assert len(prompts) == num_prompts
    assert len(held_out) == 3 * num_prompts


def test_neither_order_nor_repetition_decides() -> None:
    _, held_out = split(EXAMPLES, 0.25)
    _, reversed_held_out = split(EXAMPLES[::-1], 0.25)
    assert sorted(reversed_held_out) == held_out
    _, of_firsts = split(EXAMPLES[::3], 0.25)
    assert of_firsts == held_out[::3]
    assert split(EXAMPLES, 0.25, seed=1)[1] != held_out
