"""Both experiments on `tldr_mini` as a whole, at toy size: every kind of run, its files, and what is said of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.lab import Lab, metrics
from experiments.policy_or_reward_size import experiment as by_size
from experiments.rlhf import Pipeline, Run, gold_score, steps_of
from experiments.section import Section, render
from experiments.staleness_by_loss import experiment as by_loss
from experiments.step_drift import kl_by_step

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
BY_LOSS = by_loss.Plan(TOY, seeds=(0,), losses=LOSSES, minibatches=(1, 2, 16, 64), rounds=2, kept=None)
BY_SIZE = by_size.Plan(TOY, seeds=(0,), minibatches=(1, 16), rounds=1, kept=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lab")


@pytest.mark.parametrize("loss", ["ppo", "online_dpo", "best_of_2"])
@pytest.mark.timeout(900)
def test_the_kl_of_every_step_is_over_all_completions(folder, loss):
    """As a run with a penalty measures it, it is read from the tokens afterwards: of all losses on the same scale."""
    lab = Lab(folder)
    spec = TOY.rl(lab, Run(loss, 16, seed=0, measured=True))
    spec = replace(spec, overrides={**spec.overrides, "observe": {"tokens_every": 1}})  # of PPO, too: to compare
    (run,) = TOY.make(lab, [0], [spec])
    afterwards = kl_by_step(str(run))
    steps = steps_of(lab, spec)
    assert [one.completions for one in steps] == [64] * 4
    assert [one.kl for one in steps] == pytest.approx(afterwards, abs=1e-3)
    assert abs(steps[0].kl) < 1e-3 < max(abs(one.kl) for one in steps)  # it begins where the reference is
    rollouts = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    golds = [gold_score(one["prompt"], one["completion"]) for one in rollouts if one["step"] == 3]
    assert steps[3].gold == pytest.approx(sum(golds) / len(golds))
    of_run = [line["kl_reference_sum"] for line in metrics(run) if "kl_reference_sum" in line]
    if loss == "best_of_2":
        assert of_run != pytest.approx(afterwards, abs=1e-3)  # it is of the better ones
    else:  # Online DPO, too: no pair of this reward model ties, so it trains on all
        assert of_run == pytest.approx(afterwards, abs=1e-3)


@pytest.fixture(scope="module")
def losses(folder: Path) -> Section:
    return by_loss.section(Lab(folder), BY_LOSS)


@pytest.mark.timeout(3600)
def test_staleness_by_loss(losses, folder):
    """CoPG and RLOO, of one gradient, end alike to the last bit; what is there is not made again."""
    assert len(losses.verdicts) == 13
    assert "the stalest minibatch is 0, 1, 15, 63 updates old" in " ".join(losses.tables)
    assert "bit for bit" in losses.notes[-1]
    tuned = losses.tables["Each loss as it was tuned"]
    assert len(re.findall(r"\| (yes|\*\*no\*\*) \|$", tuned, flags=re.MULTILINE)) == len(LOSSES)
    assert all(figure.lstrip().startswith("<?xml") for figure in losses.figures.values())
    assert "Best of 2" in render("staleness_by_loss", losses)
    made: list[str] = []
    assert by_loss.section(Lab(folder, say=made.append), BY_LOSS) == losses
    assert made == []


@pytest.mark.timeout(3600)
def test_policy_or_reward_size(folder):
    section = by_size.section(Lab(folder), BY_SIZE)
    assert len(section.verdicts) == 3
    *_, sizes = section.tables.values()
    small, middle, large = (int(number.replace(",", "")) for number in re.findall(r"\| [SML] \| ([\d,]+) ", sizes))
    assert 3 * small < middle < large / 3
    assert all(figure.lstrip().startswith("<?xml") for figure in section.figures.values())
    assert "**Setup.** Online DPO" in render("policy_or_reward_size", section)
