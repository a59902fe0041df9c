"""Verdicts on sizes: made-up worlds in which each claim holds, fails, or cannot be told."""

from __future__ import annotations

import pytest

from experiments.lab import Lab
from experiments.policy_or_reward_size import experiment
from experiments.policy_or_reward_size.experiment import POLICIES, REWARD_MODELS, Found, Plan
from experiments.rlhf import Cell, Ended
from experiments.staleness_by_loss import experiment as by_loss

SEEDS = range(5)
MINIBATCHES = (1, 4, 16, 64)
JITTER = (0.0, 0.01, -0.01, 0.02, -0.02)
PAPER = {"SM": (0.5, 0.3), "MM": (0.5, 0.6), "LM": (0.5, 0.9), "MS": (0.5, 0.6), "ML": (0.5, 0.6)}
"""Gain in win rate at N = 1, and the share of it that is kept at all others, in a world as the source has it."""
KL = {"SM": 2.0, "MM": 2.0, "LM": 2.0, "MS": 3.0, "ML": 1.0}


def cell(gain: float, kl: float) -> Cell:
    began = [Ended(0.25 + JITTER[seed], 0.5, 0.0, 6.0) for seed in SEEDS]
    return Cell(began, [Ended(one.win_rate + gain, 0.6, kl + j, 4.0) for one, j in zip(began, JITTER, strict=True)])


def world(kl: dict[str, float] = KL, **changed: tuple[float, float]) -> Found:
    cells = {}
    for sizes, (gain, kept) in (PAPER | changed).items():
        for num in MINIBATCHES:
            cells[(sizes[0], sizes[1]), num] = cell(gain * (1.0 if num == 1 else kept), KL.get(sizes, 0.0))
        cells[(sizes[0], sizes[1]), 1] = cell(gain, kl[sizes])
    return Found(cells, {"S": 100_000, "M": 600_000, "L": 3_000_000}, dict.fromkeys("SML", [0.7] * 5))


def holds(found: Found) -> list[bool | None]:
    return [verdict.holds for verdict in experiment.verdicts(found)]


def noisy(found: Found, sizes: tuple[str, str]) -> Found:
    """One seed keeps little more than nothing."""
    cells = dict(found.cells)
    for num in MINIBATCHES[1:]:
        own = cells[sizes, num]
        odd = Ended(own.began[0].win_rate + 0.01, 0.6, own.ended[0].kl, 4.0)
        cells[sizes, num] = Cell(own.began, [odd, *own.ended[1:]])
    return Found(cells, found.parameters, found.accuracies)


def test_in_the_papers_world_every_claim_holds():
    assert holds(world()) == [True, True, True]


def test_a_larger_policy_that_keeps_less_is_not_more_robust():
    assert holds(world(LM=(0.5, 0.2)))[0] is False
    assert holds(world(LM=(0.5, 0.3)))[0] is None  # as much, in every seed
    assert holds(noisy(world(), ("L", "M")))[0] is None
    assert holds(world(LM=(0.02, 0.3)))[:2] == [None, None]  # nothing was gained that could be kept


def test_a_larger_reward_model_may_help_as_well():
    assert holds(world(ML=(0.5, 0.7)))[1] is False
    assert holds(world(ML=(0.5, 0.5)))[1] is True
    assert holds(world(LM=(0.5, 0.3)))[1] is None  # neither does
    assert holds(world(LM=(0.5, 0.2)))[1] is None  # the policy's size harms: no claim of the source


def test_less_drift_counts_only_at_an_equal_win_rate():
    assert holds(world(kl=KL | {"ML": 4.0}))[2] is False
    assert holds(world(kl=KL | {"ML": 3.0}))[2] is None
    assert holds(world(ML=(0.4, 0.6)))[2] is False
    assert holds(world(ML=(0.46, 0.6)))[2] is True


def test_shares_are_means_over_all_larger_n():
    found = world()
    cells = {**found.cells, (("S", "M"), 4): cell(0.5, 2.0)}
    kept = Found(cells, found.parameters, found.accuracies).kept(("S", "M"))
    assert kept == pytest.approx([(1.0 + 0.3 + 0.3) / 3] * 5)


def test_the_plan_is_a_cross_of_both_sizes(tmp_path):
    made = experiment.specs(Lab(tmp_path), Plan())
    assert {models for models, _ in made} == {*POLICIES, *REWARD_MODELS}
    assert len(made) == 5 * 4
    assert {len(some) for some in made.values()} == {5}
    assert {spec.config().loss.name for some in made.values() for spec in some} == {"online_dpo"}


def test_the_middle_sizes_are_the_other_experiments_runs(tmp_path):
    """Made once for both."""
    lab = Lab(tmp_path)
    ours, theirs = experiment.specs(lab, Plan()), by_loss.specs(lab, by_loss.Plan())
    for num in (1, 4, 16, 64):
        places = [[lab.place(spec) for spec in some] for some in (ours[("M", "M"), num], theirs["online_dpo", num])]
        assert places[0] == places[1]


def test_what_is_told():
    found = world()
    win_rates, _, kept, sizes = experiment.tables(found).values()
    assert "| L | M | 0.75 (0.02) | 0.70 (0.02) | 0.70 (0.02) | 0.70 (0.02) |" in win_rates
    assert "| S | M | 0.25 (0.02) | 0.50 (0.00) | 0.30 (0.00) |" in kept
    assert "| L | 3,000,000 | 0.70 (0.00) |" in sizes
    figure = experiment.figure(found)
    assert all(text in figure for text in ("Policy (reward model M)", "Reward model (policy M)", "L, N = 64"))
