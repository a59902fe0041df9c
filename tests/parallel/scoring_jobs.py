"""What ranks that hold one copy of a frozen model do in tests of what they read together, and one rank alone."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rank_pool import Rank
from sharded_jobs import Layout, division_of

sys.path.insert(0, str(Path(__file__).parent.parent / "trainer"))  # its data serve here, too

from training_data import TINY, make_groups, run_config, sharing_prompts

from slipstream.batching import collate
from slipstream.controller import host
from slipstream.core.config import RunConfig
from slipstream.core.types import Rollout
from slipstream.models.scoring import Sample, score
from slipstream.models.sharded import Division, build_frozen, load_frozen_scalar
from slipstream.models.shards import local_tensor
from slipstream.models.tokenizer import CharTokenizer
from slipstream.trainer.reference_executor import reference_logprobs
from slipstream.trainer.teacher_executor import taught

TOKENIZER = CharTokenizer("abcdefghijklmnopq")
TOP_K = 5


def config_of(path: str, microbatch_tokens: int) -> RunConfig:
    """Reference and teacher are the checkpoint in folder `path`."""
    return run_config(
        model=TINY.model_copy(update={"path": path}),
        generator={"max_new_tokens": 16, "temperature": 0.7},
        trainer={"microbatch_tokens": microbatch_tokens},
        kl={"coef": 0.1, "executor": "own", "reference": path},
        teacher={"path": path, "coef": 0.1, "executor": "own", "top_k": TOP_K},
    )


def rollouts(num_groups: int) -> list[Rollout]:
    groups = sharing_prompts(make_groups(num_groups, given=True)) if num_groups else []
    return [rollout for group in groups for rollout in group.rollouts]


def read(division: Division, path: str, num_groups: int, microbatch_tokens: int) -> list[list[np.ndarray]]:
    """The logprobs of a reference, and what a teacher says, of the rollouts of so many groups, twice in a row."""
    config, batch = config_of(path, microbatch_tokens), rollouts(num_groups)
    model = build_frozen(config.model, division, seed=0, tokenizer=TOKENIZER)
    ranks = division.data_parallel
    for _ in range(2):  # the second time embedding and head have to be gathered again
        measured = reference_logprobs(model, batch, config=config, batching=collate, ranks=ranks)
        said = taught(model, batch, config=config, tokenizer=TOKENIZER, batching=collate, ranks=ranks)
    found: list[Any] = [
        [one.reference_logprobs for one in measured],
        [one.teacher_tokens for one in said],
        [one.teacher_logprobs for one in said],
    ]
    return found


def samples() -> list[Sample]:
    """Some share their prompt; one completion is empty."""
    return [
        (one.completion.prompt.tokens, one.completion.trunk_tokens[: 0 if index == 4 else None])
        for index, one in enumerate(rollouts(3))
    ]


def scored(division: Division, path: str, count: int, microbatch_tokens: int) -> np.ndarray:
    """The scores of the first `count` samples by the reward model in folder `path`."""
    model = load_frozen_scalar(path, division)
    return score(
        model,
        samples()[:count],
        microbatch_tokens=microbatch_tokens,
        batching=collate,
        ranks=division.data_parallel,
    )


def read_by(rank: Rank, layout: Layout, *args: Any) -> list[list[np.ndarray]]:
    return read(division_of(rank, layout), *args)


def scored_by(rank: Rank, layout: Layout, *args: Any) -> np.ndarray:
    return scored(division_of(rank, layout), *args)


def held(rank: Rank, layout: Layout, path: str, stored: Any = "float32") -> tuple[int, int]:
    """The bytes of parameters on this rank as the model is loaded, and between two batches."""
    config = config_of(path, 1000)
    division = replace(division_of(rank, layout), stored=stored)
    model = build_frozen(config.model, division, seed=0, tokenizer=TOKENIZER)
    sizes = []
    for count in (0, 2):
        reference_logprobs(model, rollouts(count), config=config, batching=collate, ranks=division.data_parallel)
        sizes.append(sum(local_tensor(parameter).nbytes for parameter in model.parameters()))
    return sizes[0], sizes[1]


def outlive_a_rank(rank: Rank, layout: Layout, path: str) -> tuple[bool, str]:
    """What this rank raises when rank 1 dies between two batches, and whether it may follow from another's end."""
    config, division = config_of(path, 24), division_of(rank, layout)
    model = build_frozen(config.model, division, seed=0, tokenizer=TOKENIZER)
    for is_last in (False, True):
        if is_last and rank.rank == 1:
            os._exit(1)
        try:
            reference_logprobs(model, rollouts(2), config=config, batching=collate, ranks=division.data_parallel)
        except Exception as error:  # noqa: BLE001 - as a process of the run takes it
            assert is_last
            return host._may_follow(error, layout.world), f"{type(error).__name__}: {error}"
    return False, "nothing was raised"
