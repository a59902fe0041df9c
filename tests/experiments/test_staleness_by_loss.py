"""Verdicts on staleness by loss: made-up worlds in which each claim holds, fails, or cannot be told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from experiments.lab import Lab
from experiments.rlhf import Cell, Ended, Tuned
from experiments.staleness_by_loss import experiment
from experiments.staleness_by_loss.experiment import (
    Found,
    Plan,
    as_tuned,
    deviation,
    gold_at,
    slopes_by_seed,
    unexplained,
)
from experiments.staleness_by_loss.tuning import PENALTIES, RATES, SEED, effective_share, nearest_drift, tune

SEEDS = range(5)
START = 0.3
MINIBATCHES = (1, 2, 4, 8, 16, 64)
PAPER = {
    "ppo": (0.80, 0.79, 0.70, 0.61, 0.52, 0.34),
    "proximal_rloo": (0.75, 0.60, 0.50),
    "copg": (0.75, 0.02, 0.0),
    "online_dpo": (0.77, 0.74, 0.60),
    "best_of_2": (0.60, 0.42, 0.40),
    "grpo": (0.75, 0.60, 0.50),
    "aipo": (0.75, 0.60, 0.50),
}
"""Win rates at N = 1, 16 and 64, PPO's at all of MINIBATCHES, of a world in which all that the source says is so."""
JITTER = (0.0, 0.004, -0.004, 0.008, -0.008)
CLAIMS = (
    "most robust",
    "best of 2",
    "equal drift",
    "far off",
    "best on-policy",
    "alike",
    "logarithmic",
    "frontier",
    "slower",
    "zero",
    "proximal",
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
    """192 updates in steps of N, and the end; KL grows to 2 nats, less far for larger N."""
    steps = 192 // num
    reached = 2.0 / (1 + 0.1 * num) ** 0.1
    return [
        (kl, frontier(kl) + (above if num > 1 else 0.0)) for kl in (reached * at / steps for at in range(steps + 1))
    ]


LOST = {"online_dpo": 0.01, "proximal_rloo": 0.05, "best_of_2": 0.05}
"""Gold that these lose at any N above 1; PPO loses what `above` says, less 0.02."""


def world(above: float = -0.02, spread: float = 1.0, ess: float = 0.5, **changed: tuple[float, ...]) -> Found:
    cells = {}
    for loss, own in (PAPER | changed).items():
        several = MINIBATCHES if loss == "ppo" else (1, 16, 64)
        cells |= {(loss, num): cell(rate, 2.0 - 0.1 * num**0.5, spread) for num, rate in zip(several, own, strict=True)}
    paths = {
        (loss, num): [path(num, -LOST[loss] + 0.1 * JITTER[seed] if loss in LOST else above) for seed in SEEDS]
        for loss, num in cells
    }
    return Found(
        cells=cells,
        ess={(loss, num): [(ess if num == 16 else 1.0 / num) + jitter for jitter in JITTER] for loss, num in cells},
        paths=paths,
        oldest={num: num - 1 for num in MINIBATCHES},
        twins=(ENDED, ENDED),
        tuned={loss: Tuned(12.0, 2.0) for loss in PAPER},
    )


def holds(found: Found, claim: str) -> bool | None:
    return experiment.verdicts(found)[CLAIMS.index(claim)].holds


def test_in_the_papers_world_every_claim_holds():
    assert [verdict.holds for verdict in experiment.verdicts(world())] == [True] * len(CLAIMS)


@pytest.mark.parametrize(
    ("claim", "changed"),
    [
        ("most robust", {"proximal_rloo": (0.75, 0.75, 0.75)}),  # keeps all
        ("best of 2", {"best_of_2": (0.60, 0.62, 0.60)}),
        ("far off", {"online_dpo": (0.77, 0.74, 0.31)}),
        ("far off", {"ppo": (0.80, 0.79, 0.70, 0.61, 0.52, 0.50)}),
        ("best on-policy", {"online_dpo": (0.84, 0.74, 0.60)}),
        ("alike", {"ppo": (0.80, 0.70, 0.69, 0.61, 0.52, 0.34)}),
        ("logarithmic", {"ppo": (0.80, 0.79, 0.78, 0.765, 0.73, 0.54)}),  # falls with N itself
        ("logarithmic", {"ppo": (0.80, 0.79, 0.80, 0.81, 0.82, 0.83)}),
        ("zero", {"copg": (0.75, 0.06, 0.0)}),
        ("proximal", {"proximal_rloo": (0.75, 0.01, 0.0)}),
    ],
)
def test_where_it_is_otherwise_it_does_not(claim, changed):
    assert holds(world(**changed), claim) is False


@pytest.mark.parametrize(
    ("claim", "changed"),
    [
        ("most robust", {"best_of_2": (0.34, 0.34, 0.34)}),  # gained too little to keep any of it
        ("best on-policy", {"online_dpo": (0.80, 0.74, 0.60)}),
        ("proximal", {"proximal_rloo": (0.75, 0.02, 0.0)}),
    ],
)
def test_what_is_within_the_noise_is_not_said(claim, changed):
    assert holds(world(**changed), claim) is None


def test_losses_with_nothing_to_bear_are_not_compared():
    told = {claim: holds(world(ess=0.7), claim) for claim in CLAIMS}
    assert {claim for claim, said in told.items() if said is None} == {
        *("most robust", "best of 2", "equal drift", "proximal"),
    }


def test_gold_lost_at_equal_drift():
    assert holds(world(above=-0.005), "equal drift") is False  # PPO loses less than Online DPO
    found = world()
    short = {**found.paths, ("ppo", 16): [[(0.0, 0.6), (0.5, 0.7)]] * 5}
    assert holds(replace(found, paths=short), "equal drift") is None
    assert "PPO not there" in experiment.verdicts(replace(found, paths=short))[2].found


def test_gold_is_read_where_the_drift_is_first_there():
    own = [(0.0, 0.5), (0.5, 0.6), (1.5, 0.8), (0.9, 0.0), (2.0, 1.0)]
    assert gold_at(own, 1.0) == pytest.approx(0.7)
    assert gold_at(own, 0.0) == 0.5
    assert gold_at(own, 2.5) is None
    assert gold_at([(0.0, 0.5), (0.0, 0.6), (1.0, 0.7)], 0.0) == 0.6  # where the drift began to move


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
    beyond = [[(kl + 5.0, gold) for kl, gold in one] for one in found.paths["ppo", 64]]
    nowhere = {**found.paths, ("ppo", 64): beyond}
    assert holds(replace(found, paths=nowhere), "frontier") is None  # nothing to compare it with


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


TUNED = {loss: Tuned(6.0, 2.0) for loss in PAPER}


class Measuring(Lab):
    """ESS falls with the rate, KL with the penalty: each loss by a factor of its own."""

    def run_all(self, specs):
        for spec in specs:
            config, folder = spec.config(), self.place(spec)
            folder.mkdir(exist_ok=True)
            lr, own = config.trainer.optimizer.lr, {"ppo": 1e-4, "online_dpo": 2e-4, "best_of_n": 1e-4}
            ess = 0.45 * 6e-4 / lr if config.loss.name == "ppo" else 0.45 * 12 * own[config.loss.name] / lr / 2
            penalty = config.loss.params.get("beta", config.kl.coef)
            (folder / "metrics.jsonl").write_text(json.dumps({"ess": min(1.0, ess)}))
            ends = {
                moment: {
                    "gold": {"win_rate": {"mean": 0.5}, "mean_score": 0.5},
                    "drift": {
                        "kl": {"per_sequence": {"mean": 0.3 / penalty if penalty else 9.0}},
                        "perplexity": {"per_response_token": {"mean": 4.0}},
                    },
                }
                for moment in ("before", "after")
            }
            (folder / "evaluation.json").write_text(json.dumps(ends))
        return [self.place(spec) for spec in specs]


def test_rates_are_chosen_for_ess_and_penalties_for_drift(tmp_path):
    found = tune(Measuring(tmp_path), Plan().pipeline, ("ppo", "online_dpo", "best_of_2"))
    assert found == {"ppo": Tuned(6.0, 2.0), "online_dpo": Tuned(12.0, 2.0), "best_of_2": Tuned(24.0)}
    names = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert sum("rlhf_ppo_N=16" in name for name in names) == len(RATES)
    assert sum("rlhf_ppo_N=1_" in name for name in names) == len(PENALTIES)
    assert not [name for name in names if "rlhf_best_of_2_N=1_" in name]  # it has no penalty
    assert SEED not in Plan().seeds


def test_the_nearest_drift_is_a_ratio():
    assert nearest_drift({Tuned(1.0, 1.0): 0.9, Tuned(1.0, 2.0): 2.2, Tuned(1.0, 4.0): -0.1}) == Tuned(1.0, 2.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return experiment.specs(Lab(tmp_path_factory.mktemp("lab")), Plan(), TUNED)


def test_what_is_tuned_is_in_the_runs(made):
    first = {loss: some[0].config() for (loss, num), some in made.items() if num == 1}
    assert first["ppo"].trainer.optimizer.lr == first["online_dpo"].trainer.optimizer.lr == pytest.approx(6e-4)
    assert first["best_of_2"].trainer.optimizer.lr == pytest.approx(2e-4)
    assert (first["ppo"].kl.coef, first["online_dpo"].kl.coef, first["best_of_2"].kl.coef) == (0.2, 0.0, 0.0)
    assert first["online_dpo"].loss.params["beta"] == 0.2
    assert as_tuned("ppo", TUNED["ppo"]) == ("6.0e-04", "KL 0.2")
    assert as_tuned("online_dpo", TUNED["online_dpo"]) == ("6.0e-04", "beta 0.2")
    assert as_tuned("best_of_2", TUNED["best_of_2"]) == ("2.0e-04", "none")


def test_slopes_are_per_doubling():
    assert slopes_by_seed({1: [0.0, 1.0], 2: [0.5, 1.0], 4: [1.0, 1.0]}) == pytest.approx([0.5, 0.0])
    assert unexplained([0.0, 1.0, 2.0], [1.0, 3.0, 5.0]) == pytest.approx(0.0)
    assert unexplained([0.0, 1.0, 2.0], [0.0, 1.0, 0.0]) == pytest.approx(1.0)
    assert unexplained([0.0, 1.0, 2.0], [1.0, 1.0, 1.0]) == 0.0


def test_the_plan_has_what_the_figure_needs_and_rloo_once(made):
    assert {(loss, num) for loss, num in made if loss != "rloo"} == {
        (loss, num) for loss in PAPER for num in (MINIBATCHES if loss == "ppo" else (1, 16, 64))
    }
    assert {key: len(some) for key, some in made.items() if len(some) != 10} == {("rloo", 16): 1}
    rloo, copg = made["rloo", 16][0].config(), made["copg", 16][0].config()
    assert (rloo.seed, rloo.trainer.optimizer.lr, rloo.kl.coef) == (copg.seed, copg.trainer.optimizer.lr, copg.kl.coef)


def test_effective_sample_size_is_the_mean_over_steps(tmp_path):
    lines = ({"step": 0, "ess": 1.0}, {"step": 1, "ess": 0.5}, {"step": 1, "eval_accuracy": 0.1})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert effective_share(tmp_path) == 0.75


def test_what_is_told():
    found = world()
    tables = experiment.tables(found)
    win_rates = next(table for caption, table in tables.items() if caption.startswith("Gold win rate"))
    assert "| PPO | 0.80 (0.01) | 0.79 (0.01) | 0.70 (0.01) | 0.61 (0.01) | 0.52 (0.01) | 0.34 (0.01) |" in win_rates
    assert "| CoPG | 0.75 (0.01) |  |  |  | 0.02 (0.01) | 0.00 (0.01) |" in win_rates
    assert any("the stalest minibatch is 0, 1, 3, 7, 15, 63 updates old" in caption for caption in tables)
    ess = next(table for caption, table in tables.items() if caption.startswith("How far off-policy"))
    assert "| AIPO | 1.00 (0.01) |  |  |  | 0.50 (0.01) | 0.02 (0.01) |" in ess
    kept = next(table for caption, table in tables.items() if "the share of it that is kept" in caption)
    assert "| Best of 2 | 0.26 (0.04) | " in kept
    matched = next(table for caption, table in tables.items() if "where the drift is 1 nat" in caption)
    assert "| Online DPO | 0.70 (0.00) |  |  |  | 0.69 (0.00) | 0.69 (0.00) |" in matched
    assert "| PPO | 1.2e-03 | KL 0.2 |" in tables["Each loss as it was tuned"]
    assert experiment.who_keeps(found, 16).startswith("Online DPO")
    assert experiment.who_keeps(world(**{loss: (START,) * len(own) for loss, own in PAPER.items()}), 16) == (
        "nobody gained enough to say"
    )
    figure = experiment.figure(found)
    assert all(title in figure for title in ("CoPG = RLOO", "Online DPO", "PPO, step by step", "N = 64"))
    assert experiment.verdicts(found)[CLAIMS.index("zero")].found == "win rate 0.02 (0.01)"
