"""Verdicts on staleness by loss: made-up worlds in which each claim holds, fails, or cannot be told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from experiments.lab import Lab
from experiments.rlhf import Cell, Ended
from experiments.staleness_by_loss import experiment
from experiments.staleness_by_loss.experiment import (
    AtOneRate,
    Found,
    Plan,
    deviation,
    effective_share,
    slopes_by_seed,
    unexplained,
)

SEEDS = range(5)
START = 0.3
MINIBATCHES = (1, 2, 4, 8, 16)
PAPER = {
    "ppo": (0.80, 0.79, 0.70, 0.61, 0.52, 0.34),
    "proximal_rloo": (0.75, 0.74, 0.70, 0.64, 0.60),
    "copg": (0.75, 0.70, 0.50, 0.20, 0.02),
    "online_dpo": (0.77, 0.77, 0.76, 0.75, 0.74, 0.60),
    "best_of_2": (0.60, 0.58, 0.52, 0.47, 0.42),
    "grpo": (0.75, 0.74, 0.70, 0.66, 0.60),
    "aipo": (0.75, 0.74, 0.70, 0.66, 0.60),
}
"""Win rates at N = 1, 2, 4, 8, 16 (, 64) of a world in which all that the source says is so."""
JITTER = (0.0, 0.004, -0.004, 0.008, -0.008)
CLAIMS = (
    "most robust",
    "best of 2",
    "far off",
    "best on-policy",
    "alike",
    "logarithmic",
    "frontier",
    "slower",
    "zero",
    "proximal",
    "best on-policy, larger",
    "logarithmic, larger",
    "slower, larger",
    "zero, larger",
    "proximal, larger",
)
"""In the order of `verdicts`."""


ENDED = Ended(0.5, 0.5, 1.0, 4.0)


def cell(win_rate: float, kl: float, spread: float = 1.0) -> Cell:
    began = [Ended(START + 0.02 * seed, 0.6, 0.0, 6.0) for seed in SEEDS]
    return Cell(began, [Ended(win_rate + spread * JITTER[seed], 0.6, kl + JITTER[seed], 4.0) for seed in SEEDS])


def replaced(own: Cell, **columns: list[float]) -> Cell:
    """The cell with other values of some fields, by seed."""
    return replace(
        own,
        ended=[
            replace(one, **{name: values[seed] for name, values in columns.items()})
            for seed, one in enumerate(own.ended)
        ],
    )


def frontier(kl: float) -> float:
    return 0.6 + 0.1 * kl


def path(num: int, above: float = 0.0) -> list[tuple[float, float]]:
    """192 updates in steps of N; KL grows to 2 nats, less far for larger N."""
    steps = 192 // num
    reached = 2.0 / (1 + 0.1 * num) ** 0.1
    return [(kl, frontier(kl) + (above if num > 1 else 0.0)) for kl in (reached * at / steps for at in range(steps))]


def world(above: float = 0.0, spread: float = 1.0, **changed: tuple[float, ...]) -> Found:
    rates = PAPER | changed
    cells = {
        (loss, num): cell(rate, 2.0 - 0.1 * num**0.5, spread)
        for loss, own in rates.items()
        for num, rate in zip((*MINIBATCHES, 64), own, strict=False)
    }
    paths = {num: [path(num, above) for _ in SEEDS] for num in (*MINIBATCHES, 64)}
    ess = {(loss, num): [1.0 / num + jitter for jitter in JITTER] for loss, num in cells}
    oldest = {num: num - 1 for num in (*MINIBATCHES, 64)}
    keys = list(Plan().cells_at_larger_lr())
    larger = AtOneRate({key: cells[key] for key in keys}, {key: ess[key] for key in keys})
    return Found(cells, ess, paths, oldest, (ENDED, ENDED), larger)


def holds(found: Found, claim: str) -> bool | None:
    return experiment.verdicts(found)[CLAIMS.index(claim)].holds


def test_in_the_papers_world_every_claim_holds():
    assert [verdict.holds for verdict in experiment.verdicts(world())] == [True] * len(CLAIMS)


@pytest.mark.parametrize(
    ("claim", "changed"),
    [
        ("most robust", {"proximal_rloo": (0.75, 0.75, 0.75, 0.75, 0.75)}),  # keeps all
        ("best of 2", {"best_of_2": (0.60, 0.60, 0.60, 0.60, 0.62)}),
        ("far off", {"online_dpo": (0.77, 0.77, 0.76, 0.75, 0.74, 0.31)}),
        ("far off", {"ppo": (0.80, 0.79, 0.70, 0.61, 0.52, 0.50)}),
        ("best on-policy", {"online_dpo": (0.84, 0.77, 0.76, 0.75, 0.74, 0.60)}),
        ("alike", {"ppo": (0.80, 0.70, 0.69, 0.61, 0.52, 0.34)}),
        ("logarithmic", {"ppo": (0.80, 0.79, 0.78, 0.765, 0.73, 0.54)}),  # falls with N itself
        ("logarithmic", {"ppo": (0.80, 0.79, 0.80, 0.81, 0.82, 0.83)}),
        ("zero", {"copg": (0.75, 0.70, 0.50, 0.20, 0.06)}),
        ("proximal", {"proximal_rloo": (0.75, 0.74, 0.70, 0.64, 0.01)}),
    ],
)
def test_where_it_is_otherwise_it_does_not(claim, changed):
    assert holds(world(**changed), claim) is False


@pytest.mark.parametrize(
    ("claim", "changed"),
    [
        ("most robust", {"best_of_2": (0.34, 0.34, 0.34, 0.34, 0.34)}),  # gained too little to keep any of it
        ("best on-policy", {"online_dpo": (0.80, 0.77, 0.76, 0.75, 0.74, 0.60)}),
        ("proximal", {"proximal_rloo": (0.75, 0.74, 0.70, 0.64, 0.02)}),
    ],
)
def test_what_is_within_the_noise_is_not_said(claim, changed):
    assert holds(world(**changed), claim) is None


def test_a_fall_that_not_all_seeds_show_is_not_said():
    found = world(ppo=(0.80, 0.79, 0.79, 0.79, 0.79, 0.79))
    cells = dict(found.cells)
    for num, odd in ((2, 0), (64, 1)):
        win_rates = [one.win_rate + 0.5 * (seed == odd) for seed, one in enumerate(cells["ppo", num].ended)]
        cells["ppo", num] = replaced(cells["ppo", num], win_rate=win_rates)
    assert holds(replace(found, cells=cells), "logarithmic") is None
    assert holds(replace(found, cells=cells), "alike") is None


def test_the_frontier_is_left_upwards_and_downwards():
    assert holds(world(above=0.02), "frontier") is True
    assert holds(world(above=0.04), "frontier") is False
    assert holds(world(above=-0.04), "frontier") is False
    found = world()
    beyond = {**found.paths, 64: [[(kl + 5.0, gold) for kl, gold in one] for one in found.paths[64]]}
    assert holds(replace(found, paths=beyond), "frontier") is None  # nothing to compare it with


def test_a_policy_that_drifts_further_with_n_is_not_slower():
    found = world()
    drifting = {key: replaced(own, kl=[1.0 + 0.1 * key[1]] * 5) for key, own in found.cells.items()}
    assert holds(found, "slower") is True
    assert holds(replace(found, cells=drifting), "slower") is False


def test_deviation_is_from_the_nearest_steps_and_leaves_out_the_first():
    own = [(0.1 * step, 1.0 if step >= 50 else 0.0) for step in range(100)]
    assert deviation([(0.0, 5.0), (2.0, 0.25)], own) == pytest.approx(0.25)
    assert deviation([(0.0, 5.0), (2.0, 0.25), (8.0, 0.25)], own) == pytest.approx(-0.25)
    assert deviation([(0.0, 5.0), (4.95, 0.5)], own) == pytest.approx(0.0)  # eight of either side
    assert deviation([(0.0, 5.0), (2.0, 0.25), (20.0, 9.0)], own) == pytest.approx(0.25)
    assert deviation([(0.0, 5.0), (20.0, 9.0)], own) is None


def test_what_is_said_of_the_larger_rate_is_of_its_own_runs():
    found, elsewhere = world(), world(copg=(0.75, 0.7, 0.6, 0.5, 0.7), proximal_rloo=(0.75, 0.7, 0.6, 0.5, 0.6))
    usual_alone = replace(found, at_larger_lr=elsewhere.at_larger_lr)
    for claim in ("zero", "proximal"):
        assert (holds(usual_alone, claim), holds(usual_alone, f"{claim}, larger")) == (True, False)
        larger_alone = replace(elsewhere, at_larger_lr=found.at_larger_lr)
        assert (holds(larger_alone, claim), holds(larger_alone, f"{claim}, larger")) == (False, True)
    told = experiment.verdicts(found)[-1].claim
    assert told == "At 12 times the learning rate: Proximal RLOO is above CoPG at N = 16"


def test_the_larger_rate_is_twelve_times_each_losss_own(tmp_path):
    made = experiment.specs_at_larger_lr(Lab(tmp_path), Plan())
    rates = {loss: some[0].config().trainer.optimizer.lr for (loss, num), some in made.items() if num == 1}
    assert rates["ppo"] == pytest.approx(1.2e-3)
    assert rates["best_of_2"] == pytest.approx(4e-4)
    assert {num for loss, num in made if loss == "ppo"} == {1, 4, 16, 64}
    assert {num for loss, num in made if loss == "online_dpo"} == {1}
    assert "lr x12" in made["ppo", 1][0].name


def test_slopes_are_per_doubling():
    assert slopes_by_seed({1: [0.0, 1.0], 2: [0.5, 1.0], 4: [1.0, 1.0]}) == pytest.approx([0.5, 0.0])
    assert unexplained([0.0, 1.0, 2.0], [1.0, 3.0, 5.0]) == pytest.approx(0.0)
    assert unexplained([0.0, 1.0, 2.0], [0.0, 1.0, 0.0]) == pytest.approx(1.0)
    assert unexplained([0.0, 1.0, 2.0], [1.0, 1.0, 1.0]) == 0.0


def test_the_plan_has_what_the_figure_needs_and_rloo_once(tmp_path):
    made = experiment.specs(Lab(tmp_path), Plan())
    assert {(loss, num) for loss, num in made if loss != "rloo"} == {
        (loss, num) for loss in PAPER for num in (*MINIBATCHES, *((64,) if loss in ("ppo", "online_dpo") else ()))
    }
    assert {key: len(some) for key, some in made.items() if len(some) != 5} == {("rloo", 16): 1}
    assert made["rloo", 16][0].config().seed == made["copg", 16][0].config().seed == 0


def test_effective_sample_size_is_the_mean_over_steps(tmp_path):
    lines = ({"step": 0, "ess": 1.0}, {"step": 1, "ess": 0.5}, {"step": 1, "eval_accuracy": 0.1})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert effective_share(tmp_path) == 0.75


def test_what_is_told(tmp_path):
    found = world()
    tables = experiment.tables(found)
    win_rates = next(table for caption, table in tables.items() if caption.startswith("Gold win rate"))
    assert "| PPO | 0.80 (0.01) | 0.79 (0.01) | 0.70 (0.01) | 0.61 (0.01) | 0.52 (0.01) | 0.34 (0.01) |" in win_rates
    assert "| CoPG | 0.75 (0.01) | 0.70 (0.01) | 0.50 (0.01) | 0.20 (0.01) | 0.02 (0.01) |  |" in win_rates
    assert "the stalest minibatch is 0, 1, 3, 7, 15, 63 updates old" in next(iter(tables))
    ess = next(table for caption, table in tables.items() if caption.startswith("How far off-policy"))
    assert "| AIPO | 1.00 (0.01) | 0.50 (0.01) | 0.25 (0.01) | 0.12 (0.01) | 0.06 (0.01) |  |" in ess
    kept, larger = (table for caption, table in tables.items() if "the share of it that is kept" in caption)
    assert "| Best of 2 | 0.26 (0.04) | " in kept
    assert "| CoPG | 0.41 (0.04) | 0.39 (0.07) | -0.79 (0.20) |  |" in larger
    assert "| Best of 2 | 0.26 (0.04) |  |  |  |" in larger
    assert experiment.who_keeps(found.at_larger_lr, 16).endswith("PPO 0.39 (0.06), CoPG -0.79 (0.20)")
    assert experiment.who_keeps(world(**dict.fromkeys(PAPER, (START,) * 6)).at_larger_lr, 16).startswith("nobody")
    figure = experiment.figure(found)
    assert all(
        title in figure
        for title in ("N = 64, 12 x learning rate", "CoPG = RLOO", "Online DPO", "PPO, step by step", "N = 64")
    )
    assert experiment.verdicts(found)[8].found == "win rate 0.02 (0.01)"
