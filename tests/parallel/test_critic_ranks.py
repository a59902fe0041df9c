"""A critic's executor over FSDP2 x tensor-parallel ranks: values, updates and checkpoints are those of one rank."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import critic_jobs
import numpy as np
import pytest
from covering import with_slow
from rank_pool import RankPool

sys.path.insert(0, str(Path(__file__).parent.parent / "trainer"))

from training_data import TINY, make_groups, run_config, sharing_prompts

from slipstream.algorithms.reduce import decode_metrics, metric_values
from slipstream.batching import collate
from slipstream.core import wire
from slipstream.core.packed import TrainSequence
from slipstream.core.peer_messages import CriticCheckpoint, CriticUpdate, CriticUpdated, TargetNumbers, ValuesWanted
from slipstream.core.rank_group import RankGroup
from slipstream.core.types import Message, Stop
from slipstream.trainer.batch import train_sequence
from slipstream.trainer.checkpoint_folder import verify_checkpoint
from slipstream.trainer.critic_link import returns_of, sent_sequence

LAYOUTS = {"tp2": (2, 2), "dp2": (2, 1), "dp2_tp2": (4, 2)}  # ranks, of which so many share each layer
STEPS, UPDATES = 2, 2


def tables(ranks: int = 1, tensor_parallel: int = 1) -> dict[str, Any]:
    own = {"executor": "own", "ranks": ranks, "tensor_parallel": tensor_parallel}
    config = run_config(
        loss={"name": "ppo", "advantages": "gae"},
        model=TINY,
        trainer={"microbatch_tokens": 24, "minibatches": UPDATES, "checkpoint_every": 1},
        critic={**own, "head_init": "reward", "clip": 0.1, "optimizer": {"lr": 3e-3, "max_grad_norm": 0.5}},
        steps=4,
    )
    return config.model_dump()


def asked(*, first: int = 0, steps: int = STEPS, save: Path | None = None) -> list[bytes]:
    """What a trainer sends in some steps; the returns are drawn, the last update of a step is of a single sequence."""
    messages: list[Message] = []
    for step in range(first, first + steps):
        groups = sharing_prompts(make_groups(seed=step, given=True))
        sequences = [train_sequence(one.completion) for group in groups for one in group.rollouts]
        messages += [sent_sequence(one) for one in sequences]
        messages.append(ValuesWanted(step=step, num_sequences=len(sequences)))
        for index in range(UPDATES):
            part = sequences[index::2] if index < UPDATES - 1 else sequences[:1]
            messages += [returns(part, seed=10 * step + index), CriticUpdate(step=step, index=index)]
    if save is not None:
        messages.append(CriticCheckpoint(step=first + steps, path=str(save)))
    return [wire.encode(message) for message in [*messages, Stop()]]


def returns(sequences: list[TrainSequence], *, seed: int) -> TargetNumbers:
    rng = np.random.default_rng(seed)
    drawn = [replace(one, returns=rng.normal(size=len(one.tokens)).astype(np.float32)) for one in sequences]
    return returns_of(collate.collate(drawn, 10_000))


def told(answers: list[bytes]) -> tuple[dict[tuple[int, ...], np.ndarray], list[dict[str, float]]]:
    """The values by batch and sequence, and of each update what was said of it."""
    values: dict[tuple[int, ...], np.ndarray] = {}
    updates: list[dict[str, float]] = []
    for payload in answers:
        message = wire.decode(payload)
        if isinstance(message, TargetNumbers):
            pieces = np.split(message.numbers, np.cumsum(message.counts)[:-1])
            for key, piece in zip(message.keys.tolist(), pieces, strict=True):
                values[len(updates), *key] = piece
        elif isinstance(message, CriticUpdated):
            assert not message.failure
            updates.append(metric_values(decode_metrics(message.metrics.tobytes())) | {"grad_norm": message.grad_norm})
    return values, updates


def joined(found: list[critic_jobs.Boxes]) -> dict[str, np.ndarray]:
    """The whole tensors, of which every rank has its boxes; what several have is alike on all of them."""
    whole: dict[str, np.ndarray] = {}
    for box, part in (one for boxes in found for one in boxes):
        tensor = whole.setdefault(box.name, np.full(box.shape, np.nan, np.float32))
        present = tensor[box.slices]
        np.testing.assert_allclose(present[~np.isnan(present)], part[~np.isnan(present)], atol=1e-6)
        tensor[box.slices] = part
    return whole


@pytest.mark.parametrize("layout", with_slow(["dp2_tp2"], ["tp2", "dp2"]))
def test_divided_it_says_and_learns_what_one_rank_does(ranks: RankPool, layout: str, tmp_path: Path) -> None:
    world, tensor_parallel = LAYOUTS[layout]
    answers, boxes, num_bytes = critic_jobs.carry_out(RankGroup.alone(), tables(), asked(), str(tmp_path))
    args = (tables(world, tensor_parallel), asked(), str(tmp_path))
    found = ranks.run(critic_jobs.carry_out_on, *args, world=world)
    assert [len(said) for said, _, _ in found[1:]] == [0] * (world - 1), "rank 0 speaks for all"
    (values, updates), (expected_values, expected_updates) = told(found[0][0]), told(answers)
    assert values.keys() == expected_values.keys()
    for key, column in values.items():
        np.testing.assert_allclose(column, expected_values[key], atol=1e-5)
    assert len(updates) == STEPS * UPDATES
    for mine, whole in zip(updates, expected_updates, strict=True):
        assert mine == pytest.approx(whole, rel=1e-4, abs=1e-5)
    whole = joined([boxes])
    for name, tensor in joined([boxes for _, boxes, _ in found]).items():
        np.testing.assert_allclose(tensor, whole[name], atol=1e-5, err_msg=name)
    for _, _, mine_bytes in found:
        assert mine_bytes == pytest.approx(num_bytes / world, rel=0.35), "norms are whole on tensor-parallel ranks"


def test_a_checkpoint_fits_any_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """Written by four, read by one and by two, which go on alike; its files stand behind those of the trainer's."""
    path = tmp_path / "checkpoints" / ".critic" / "step_1"
    ranks.run(critic_jobs.carry_out_on, tables(4, 2), asked(steps=1, save=path), str(tmp_path), world=4)
    verify_checkpoint(path)
    assert sorted(one.name for one in path.glob("rank_*")) == [f"rank_0000{rank}.safetensors" for rank in (1, 2, 3, 4)]
    kept = tmp_path / "kept" / "step_1"  # the executor clears what lies beside the checkpoints
    path.parent.rename(kept.parent)
    more = asked(first=1, steps=1)
    _, uninterrupted, _ = critic_jobs.carry_out(RankGroup.alone(), tables(), asked(steps=1)[:-1] + more, str(tmp_path))
    _, alone, _ = critic_jobs.carry_out(RankGroup.alone(), tables(), more, str(tmp_path), str(kept))
    args = (tables(2, 1), more, str(tmp_path), str(kept))
    divided = [boxes for _, boxes, _ in ranks.run(critic_jobs.carry_out_on, *args, world=2)]
    whole = joined([uninterrupted])
    for name, tensor in joined([alone]).items():
        np.testing.assert_allclose(tensor, whole[name], atol=1e-5, err_msg=name)
    for name, tensor in joined(divided).items():
        np.testing.assert_allclose(tensor, whole[name], atol=1e-5, err_msg=name)
