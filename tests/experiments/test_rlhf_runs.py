"""Both experiments on `tldr_mini` as a whole, at toy size: every kind of run, its files, and what is said of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.lab import Lab
from experiments.policy_or_reward_size import experiment as by_size
from experiments.rlhf import Pipeline
from experiments.section import Section
from experiments.staleness_by_loss import experiment as by_loss

pytestmark = pytest.mark.slow

TOY = Pipeline(
    updates=64,
    prompts_per_update=2,
    overrides={
        "prompts": {"num_train": 300, "num_eval": 40},
        "generator": {"num_slots": 16},
        "sft": {"steps": 20, "batch_size": 32, "num_demonstrations": 200},
        "preferences": {"num_prompts": 40, "held_out": 0.3},
        "reward_model": {"epochs": 1, "normalise_samples": 32},
        "eval": {"num_prompts": 8, "num_slots": 8},
        "evaluation": {"num_prompts": 40},
    },
)
LOSSES = ("ppo", "proximal_rloo", "copg", "online_dpo", "best_of_2")
BY_LOSS = by_loss.Plan(TOY, seeds=(0,), losses=LOSSES, minibatches=(1, 2, 16, 64))
BY_SIZE = by_size.Plan(TOY, seeds=(0,), minibatches=(1, 16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def losses(folder: Path) -> Section:
    return by_loss.section(Lab(folder), BY_LOSS)


@pytest.mark.timeout(900)
def test_staleness_by_loss(losses, folder):
    """CoPG and RLOO, of one gradient, end alike to the last bit; what is there is not made again."""
    assert len(losses.verdicts) == 11
    assert "the stalest minibatch is 0, 1, 15, 63 updates old" in " ".join(losses.tables)
    assert "bit for bit" in losses.notes[-1]
    made: list[str] = []
    assert by_loss.section(Lab(folder, say=made.append), BY_LOSS) == losses
    assert made == []


@pytest.mark.timeout(900)
def test_policy_or_reward_size(folder):
    section = by_size.section(Lab(folder), BY_SIZE)
    assert len(section.verdicts) == 3
    *_, sizes = section.tables.values()
    small, middle, large = (int(number.replace(",", "")) for number in re.findall(r"\| [SML] \| ([\d,]+) ", sizes))
    assert 3 * small < middle < large / 3
