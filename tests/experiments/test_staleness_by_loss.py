"""Verdicts on staleness by loss: made-up worlds in which each claim holds, fails, or cannot be told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import exp, inf, isnan, log, nan

import numpy as np
import pytest
import torch

from experiments import rlhf
from experiments.lab import Lab, Made
from experiments.rlhf import (
    Cell,
    Ended,
    Pipeline,
    Run,
    Step,
    Tuned,
    effective_share,
    outcome,
    steps_of,
)
from experiments.staleness_by_loss import experiment
from experiments.staleness_by_loss.experiment import (
    Found,
    Plan,
    as_tuned,
    averaged,
    deviation,
    gold_at,
    points,
    runs_of,
    slopes_by_seed,
    told_of_tuning,
    unexplained,
)
from experiments.staleness_by_loss.tuning import (
    SEED,
    Ran,
    Trial,
    best,
    correction,
    nearest_drift,
    ran,
    tune,
)
from experiments.step_drift import kl_by_step
from slipstream.core.recipes import save_config
from slipstream.models.build import build_policy
from slipstream.models.hf import save_model

pytestmark = pytest.mark.usefixtures("resolved_once")

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
    "more than PPO",
    "more than Proximal RLOO",
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
TRIAL = Trial(Tuned(12.0, 2.0), on_policy=Ran(0.4, 1.42, 1.0), far=Ran(0.3, 1.3, 0.5))


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


def walked(num: int, above: float = 0.0) -> list[Step]:
    """192 updates in steps of N; KL grows to 2 nats, less far for larger N."""
    steps = 192 // num
    reached = 2.0 / (1 + 0.1 * num) ** 0.1
    return [
        Step(kl, frontier(kl) + (above if num > 1 else 0.0), 64 * num)
        for kl in (reached * at / steps for at in range(steps))
    ]


LOST = {"online_dpo": 0.01, "proximal_rloo": 0.05, "best_of_2": 0.05}
"""Gold that these lose at any N above 1; PPO loses what `above` says, less 0.02."""


def world(above: float = -0.02, spread: float = 1.0, ess: float = 0.5, **changed: tuple[float, ...]) -> Found:
    cells = {}
    for loss, own in (PAPER | changed).items():
        several = MINIBATCHES if loss == "ppo" else (1, 16, 64)
        cells |= {(loss, num): cell(rate, 2.0 - 0.1 * num**0.5, spread) for num, rate in zip(several, own, strict=True)}
    steps = {
        (loss, num): [walked(num, -LOST[loss] + 0.1 * JITTER[seed] if loss in LOST else above) for seed in SEEDS]
        for loss, num in cells
    }
    return Found(
        cells=cells,
        ess={(loss, num): [(ess if num == 16 else 1.0 / num) + jitter for jitter in JITTER] for loss, num in cells},
        steps=steps,
        oldest={num: num - 1 for num in MINIBATCHES},
        twins=(ENDED, ENDED),
        tuned={loss: replace(TRIAL, far=replace(TRIAL.far, ess=ess)) for loss in PAPER},
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
    told = zip(CLAIMS, experiment.verdicts(world(ess=0.7)), strict=True)
    assert {claim for claim, said in told if said.holds is None} == {
        *("most robust", "more than PPO", "more than Proximal RLOO", "best of 2", "equal drift", "proximal"),
    }


def test_a_loss_with_little_to_bear_that_is_worse_nevertheless_is_said_to_be():
    """And one with little to bear that is better is not."""
    found = world()
    for loss, others in (("proximal_rloo", [True] * 5), ("online_dpo", [None] * 5)):
        light = replace(found, ess={**found.ess, (loss, 16): [0.7] * 5})
        assert [said.holds for said in experiment.verdicts(light)[:5]] == others
    better = replace(world(proximal_rloo=(0.75, 0.75, 0.75)), ess={**found.ess, ("proximal_rloo", 16): [0.7] * 5})
    assert holds(better, "more than Proximal RLOO") is None


def test_gold_lost_at_equal_drift():
    assert holds(world(above=-0.005), "equal drift") is False  # PPO loses less than Online DPO
    found = world()
    near = replace(
        found,
        steps={**found.steps, ("ppo", 16): [[Step(0.0, 0.6, 1024), Step(0.5, 0.7, 1024)]] * 5},
        cells={**found.cells, ("ppo", 16): replaced(found.cells["ppo", 16], kl=[0.9] * 5)},
    )
    assert holds(near, "equal drift") is None
    assert "PPO not there" in experiment.verdicts(near)[CLAIMS.index("equal drift")].found


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
    beyond = [[one._replace(kl=one.kl + 5.0) for one in steps] for steps in found.steps["ppo", 64]]
    nowhere = {**found.steps, ("ppo", 64): beyond}
    assert holds(replace(found, steps=nowhere), "frontier") is None  # nothing to compare it with


def test_the_frontier_is_of_training_steps_alone():
    """What is measured at the end is of other prompts, and may lie anywhere."""
    found = world()
    elsewhere = {key: replaced(own, kl=[1.0] * 5, gold=[5.0] * 5) for key, own in found.cells.items()}
    assert experiment.one_frontier(replace(found, cells=elsewhere)) == experiment.one_frontier(found)


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


def noisy(*kl: float) -> list[Step]:
    return [Step(one, frontier(one), 64) for one in kl]


def test_points_of_a_path_are_means_over_equally_many_completions():
    steps = [Step(0.1 * at, 1.0 * at, 64) for at in range(8)]
    assert averaged(steps, 1) == [pytest.approx(point) for point in points(steps)]
    assert averaged(steps, 4) == [pytest.approx((0.15, 1.5)), pytest.approx((0.55, 5.5))]
    assert averaged(steps, 16) == [pytest.approx((0.35, 3.5))]
    assert averaged([Step(1.0, 0.0, 10), Step(4.0, 0.9, 20), Step(2.0, 0.5, 5)], 2) == [
        pytest.approx((3.0, 0.6)),
        (2.0, 0.5),
    ]
    assert averaged([], 4) == []


@pytest.mark.parametrize(("num", "completions"), [(1, 1024), (2, 1024), (16, 1024), (64, 4096)])
def test_a_path_goes_from_where_rl_began_to_its_end(num, completions):
    found = world()
    found = replace(found, steps={("ppo", num): found.steps["ppo", num]}, cells={("ppo", num): found.cells["ppo", num]})
    (first, *between, last), steps = found.paths("ppo", num)[1], found.steps["ppo", num][1]
    assert (first, last) == ((0.0, 0.6), (found.cells["ppo", num].ended[1].kl, 0.6))
    assert len(between) * completions == sum(one.completions for one in steps) == 12288
    assert between[0] == pytest.approx(tuple(np.mean(points(steps[: completions // (64 * num)]), axis=0)))


def test_gold_is_not_read_at_a_peak_of_noise():
    """One step of 64 completions looks as if it had come to 1 nat; the policy gets there much later."""
    steps = noisy(*[0.2] * 8, 1.2, *[0.2] * 7, *[0.6] * 16, *[1.4] * 16)
    assert gold_at(points(steps), 1.0) == pytest.approx(frontier(1.0))
    assert points(steps).index((1.2, frontier(1.2))) < 16
    found = replace(
        world(),
        steps={("ppo", 1): [[one._replace(gold=0.01 * at) for at, one in enumerate(steps)]] * 5},
    )
    assert found.golds("ppo", 1) == pytest.approx([0.01 * (23.5 + 8)] * 5)  # half-way between the last two points


Behaviour = Callable[[int, float, float], Ran]
"""N, rate and penalty (times the loss's own) -> what the run comes to."""
OWN_RATES = {"ppo": 1e-4, "online_dpo": 1e-4, "best_of_n": 1e-4 / 3}


class Measuring(Lab):
    """Runs that come to what `behaviour` says; `asked` has (loss, N, rate, penalty) of each, in their order."""

    behaviour: Behaviour

    def run_all(self, specs):
        for spec in specs:
            config, folder = spec.config(), self.place(spec)
            if folder.exists() or "rl" not in config.stages:
                continue
            folder.mkdir()
            self.used[folder] = Made("run", 60.0, 1, 2, "a processor", None)
            assert config.seed == SEED
            num, rate = config.trainer.minibatches, config.trainer.optimizer.lr / OWN_RATES[config.loss.name]
            assert (config.kl.place == "loss") == (config.loss.name == "best_of_n")
            penalty = config.loss.params.get("beta", config.kl.coef) / 0.1
            self.asked.append((config.loss.name, num, round(rate, 6), round(penalty, 6)))
            write_run(folder, self.behaviour(num, rate, penalty))
        return [self.place(spec) for spec in specs]


def write_run(folder, found: Ran) -> None:
    def moment(win_rate: float, kl: float) -> dict:
        return {
            "gold": {"win_rate": {"mean": win_rate}, "mean_score": 0.5},
            "drift": {"kl": {"per_sequence": {"mean": kl}}, "perplexity": {"per_response_token": {"mean": 4.0}}},
        }

    ends = {"before": moment(START, 0.0), "after": moment(START + found.gain, found.kl)}
    (folder / "evaluation.json").write_text(json.dumps(ends))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "ess": found.ess}))
    (folder / "summary.json").write_text(json.dumps({"staleness": {"updates_max": 15}}))


def tuning(tmp_path, behaviour: Behaviour, *losses: str) -> tuple[dict[str, Trial], list[tuple]]:
    """What is found, and which runs were made for it."""
    lab = Measuring(tmp_path)
    lab.behaviour, lab.asked = behaviour, []
    found = tune(lab, Plan().pipeline, [(loss, "M") for loss in losses], rounds=4)
    return {loss: trial for (loss, _), trial in found.items()}, lab.asked


def falling(at_eight: float, rate: float) -> float:
    """An effective sample size whose -ln goes with the square of the rate, from what it is at 8 times the rate."""
    return exp(log(at_eight) * (rate / 8) ** 2)


def test_a_loss_that_is_within_at_once_takes_five_runs(tmp_path):
    found, asked = tuning(tmp_path, lambda num, rate, penalty: Ran(0.3, 5.0 / penalty, falling(0.5, rate)), "ppo")
    assert asked == [("ppo", 1, 8.0, penalty) for penalty in (1.0, 2.0, 4.0, 8.0)] + [("ppo", 16, 8.0, 4.0)]
    trial = found["ppo"]
    assert (trial.tuned, trial.is_within) == (Tuned(8.0, 4.0), True)
    assert (trial.far.ess, trial.on_policy.kl) == pytest.approx((0.5, 1.25))


def test_a_rate_is_corrected_by_the_effective_sample_size(tmp_path):
    """sqrt(ln 0.45 / ln 0.8) = 1.89: 15 times the rate, where it is 0.46."""
    found, asked = tuning(tmp_path, lambda num, rate, penalty: Ran(0.3, 3.0 / penalty, falling(0.8, rate)), "ppo")
    assert asked[5:] == [("ppo", 1, 15.0, penalty) for penalty in (1.0, 2.0, 4.0)] + [("ppo", 16, 15.0, 2.0)]
    assert (found["ppo"].tuned, found["ppo"].is_within) == (Tuned(15.0, 2.0), True)
    assert found["ppo"].far.ess == pytest.approx(0.8 ** (15 / 8) ** 2)


def test_a_penalty_that_no_longer_suits_is_changed_with_the_rate(tmp_path):
    """A rate that is too large: drift and effective sample size change with both."""
    found, asked = tuning(
        tmp_path, lambda num, rate, penalty: Ran(0.3, 0.75 * rate / penalty, falling(0.05, rate)), "online_dpo"
    )
    assert [(rate, penalty) for _, num, rate, penalty in asked if num == 16] == [(8.0, 4.0), (4.1, 2.0)]
    assert [penalty for _, num, rate, penalty in asked if (num, rate) == (1, 4.1)] == [2.0, 4.0, 8.0]
    assert (found["online_dpo"].tuned, found["online_dpo"].is_within) == (Tuned(4.1, 2.0), True)


def test_a_penalty_under_which_nothing_is_learned_is_not_taken(tmp_path):
    """At 8 times the penalty the drift is 1.5 nats, and nothing is gained."""
    found, _ = tuning(tmp_path, lambda num, rate, penalty: Ran(0.0 if penalty > 4 else 0.3, 12.0 / penalty, 0.5), "ppo")
    assert found["ppo"].tuned == Tuned(8.0, 4.0)


def test_a_collapsed_policy_does_not_count_as_well_tuned(tmp_path):
    """Its effective sample size is what was asked for, at N = 16 or at a rate where N = 1 learns nothing."""
    for name, broken in (("far", 16), ("near", 1)):
        folder = tmp_path / name
        found, asked = tuning(
            folder,
            lambda num, rate, penalty, broken=broken: Ran(
                -0.2 if num == broken and rate > 5 else 0.3, 3.0 / penalty, 0.45 if rate > 5 else 0.4
            ),
            "ppo",
        )
        assert [rate for _, num, rate, _ in asked if num == 16] == [8.0, 4.0]
        assert (found["ppo"].tuned, found["ppo"].is_within) == (Tuned(4.0, 2.0), True)


def test_between_a_rate_that_collapsed_and_one_that_did_not_is_their_geometric_mean(tmp_path):
    """8 leaves 0.9, 16 collapses; 11 leaves 0.82, and 22 would be beyond what has collapsed: 13."""
    found, asked = tuning(
        tmp_path,
        lambda num, rate, penalty: Ran(-0.2 if num == 16 and rate > 12 else 0.3, 1.5 / penalty, falling(0.9, rate)),
        "ppo",
    )
    assert [rate for _, num, rate, _ in asked if num == 16] == [8.0, 16.0, 11.0, 13.0]
    assert (found["ppo"].tuned, found["ppo"].is_within) == (Tuned(11.0, 1.0), False)  # the nearest that is sound


def test_where_no_round_is_within_the_nearest_sound_one_counts(tmp_path):
    """The effective sample size leaps over what is asked for."""
    found, asked = tuning(
        tmp_path / "sound", lambda num, rate, penalty: Ran(0.3, 3.0 / penalty, 0.25 if rate > 7 else 0.7), "ppo"
    )
    assert [rate for _, num, rate, _ in asked if num == 16] == [8.0, 6.1, 9.1, 6.9]
    assert (found["ppo"].tuned, found["ppo"].is_within) == (Tuned(8.0, 2.0), False)
    found, asked = tuning(tmp_path / "none", lambda num, rate, penalty: Ran(0.01, 3.0 / penalty, 0.45), "ppo")
    assert [rate for _, num, rate, _ in asked if num == 16] == [8.0, 4.0, 2.0, 1.0]
    assert (found["ppo"].tuned, found["ppo"].is_within) == (Tuned(1.0, 2.0), False)


def test_losses_are_tuned_side_by_side_until_each_is_within(tmp_path):
    ess = {"ppo": 0.5, "online_dpo": 0.8, "best_of_n": 0.05}

    class Several(Measuring):
        def run_all(self, specs):
            batches.append([spec.config().loss.name for spec in specs if "rl" in spec.config().stages])
            for spec in specs:
                size = ess[spec.config().loss.name]
                self.behaviour = lambda num, rate, penalty, size=size: Ran(0.3, 1.5, falling(size, rate))
                super().run_all([spec])
            return [self.place(spec) for spec in specs]

    batches: list[list[str]] = []
    lab = Several(tmp_path)
    lab.asked = []
    found = tune(lab, Plan().pipeline, [(loss, "M") for loss in ("ppo", "online_dpo", "best_of_2")])
    rates = {loss: trial.tuned.lr_times for (loss, _), trial in found.items()}
    assert rates == {"ppo": 8.0, "online_dpo": 15.0, "best_of_2": 4.1}
    assert [sorted(set(batch)) for batch in batches if batch] == [
        *[["best_of_n", "online_dpo", "ppo"]] * 2,
        *[["best_of_n", "online_dpo"]] * 2,
    ]
    assert [len(batch) for batch in batches if batch] == [12, 3, 6, 2]


def test_corrections_stay_within_a_factor_of_two():
    assert [correction(ess) for ess in (1.0, 1.1, 0.99, 0.0, -1.0, nan, 1e-9)] == [2.0, 2.0, 2.0, 0.5, 0.5, 0.5, 0.5]
    assert correction(0.45) == pytest.approx(1.0)
    assert falling(0.6, 8 * correction(0.6)) == pytest.approx(0.45)


def test_the_nearest_drift_is_a_ratio():
    assert nearest_drift(drifts(0.9, 2.2, -0.1)) == Tuned(1.0, 2.0)
    assert nearest_drift(drifts(nan, 0.0, inf, 90.0)) == Tuned(1.0, 4.0)
    assert nearest_drift(drifts(1.5, 90.0, gains=(0.04, 0.05))) == Tuned(1.0, 2.0)  # the other learned nothing
    assert nearest_drift(drifts(1.5, 90.0, gains=(0.04, 0.04))) == Tuned(1.0, 1.0)


def drifts(*kl: float, gains: tuple[float, ...] = ()) -> dict[Tuned, Ran]:
    found = zip(kl, gains or [0.3] * len(kl), strict=True)
    return {Tuned(1.0, float(at + 1)): Ran(gain, one, 1.0) for at, (one, gain) in enumerate(found)}


def test_a_run_without_an_effective_sample_size_is_no_reason_to_stop(tmp_path):
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run", Ran(0.25, 2.0, nan))
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 0, "ess": None}))
    lab = Lab(tmp_path)
    found = ran(outcome(lab, Pipeline().rl(lab, Run("ppo", 1, 0)), tmp_path / "run", with_steps=False))
    assert (found.gain, found.kl) == pytest.approx((0.25, 2.0))
    assert isnan(found.ess)
    lost = Trial(Tuned(8.0), Ran(0.3, 1.5, 1.0), found)
    assert not lost.is_within
    assert best([lost, replace(lost, tuned=Tuned(4.0), far=replace(found, ess=0.9))]).tuned == Tuned(4.0)


TUNED = {loss: Tuned(6.0, 2.0) for loss in PAPER}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    return {key: [Plan().pipeline.rl(lab, run) for run in some] for key, some in runs_of(Plan(), TUNED).items()}


def test_what_is_tuned_is_in_the_runs(made):
    first = {loss: some[0].config() for (loss, num), some in made.items() if num == 1}
    assert first["ppo"].trainer.optimizer.lr == first["online_dpo"].trainer.optimizer.lr == pytest.approx(6e-4)
    assert first["best_of_2"].trainer.optimizer.lr == pytest.approx(2e-4)
    assert (first["ppo"].kl.coef, first["online_dpo"].kl.coef, first["best_of_2"].kl.coef) == (0.2, 0.0, 0.2)
    assert first["online_dpo"].loss.params["beta"] == 0.2
    trial = replace(TRIAL, tuned=Tuned(6.0, 2.0))
    assert as_tuned("ppo", trial) == ("6.0e-04", "KL 0.2", "0.50", "1.42", "yes")
    assert as_tuned("online_dpo", trial) == ("6.0e-04", "beta 0.2", "0.50", "1.42", "yes")
    assert as_tuned("best_of_2", trial) == ("2.0e-04", "KL 0.2 in the loss", "0.50", "1.42", "yes")
    lost = replace(trial, on_policy=Ran(0.01, -0.1, 1.0))
    assert as_tuned("ppo", lost) == ("6.0e-04", "KL 0.2", "0.50", "-0.10", "**no**")
    assert told_of_tuning({"PPO": trial, "CoPG": lost}).endswith("Not within: CoPG.")
    assert told_of_tuning({"PPO": trial}).endswith("Not within: none.")
    assert SEED not in Plan().seeds


def test_the_kl_of_a_step_is_over_all_completions_whatever_the_loss_trains_on(made):
    """A penalty in the reward measures them all in the run; runs without one keep all of their tokens."""
    for some in made.values():
        config = some[0].config()
        is_measured = config.kl.coef > 0 and config.kl.place == "reward" and config.kl.estimator == "k1"
        assert is_measured != (config.observe.tokens_every == 1)
        assert is_measured != (config.loss.name in ("online_dpo", "best_of_n"))
        largest = 12288 * 1000  # a line has less than 1,000 bytes
        assert config.observe.tokens_mb * 1_000_000 > largest


LOGPROBS = {0: (-0.25, -0.5), 1: (-1.0,)}
"""Of the tokens of each sample."""


@pytest.fixture
def kept(tmp_path):
    """A run of best of 2, two steps of one pair, and the tokens that its reference knows: all are equally probable."""
    lab, pipeline = Lab(tmp_path), Pipeline(updates=2, prompts_per_update=1)
    spec = pipeline.rl(lab, Run("best_of_2", 1, seed=0, measured=True))
    run, start = lab.place(spec), spec.config().kl.reference
    run.mkdir()
    save_config(spec.config(), run / "config.toml")
    model, tokenizer = build_policy(pipeline.sft(lab).config().model.model_copy(update={"path": None}), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    save_model(model, start, tokenizer)
    rollouts, tokens = [], []
    for step in (0, 1):
        for sample, logprobs in LOGPROBS.items():
            own = {"ordinal": step, "sample": sample, "step": step, "num_tokens": len(logprobs)}
            nothing = [None] * len(logprobs)
            rollouts.append(
                own
                | {"outcome": "trained", "prompt_id": "p", "task": "posts", "prompt": "*qz*r>", "completion": "q"}
                | {"answer": None, "reward": 0.0, "parts": {}, "failure": None, "finish_reason": "stop"}
                | {"versions": [[0, step]], "mean_behaviour_logprob": None, "replica": 0}
                | {"started_s": 0.0, "finished_s": 0.0, "scored_s": 0.0}
            )
            tokens.append(
                own
                | {"tokens": [5] * len(logprobs), "texts": ["q"] * len(logprobs), "versions": [[0, step]]}
                | {"behaviour_logprobs": [(1 + step) * one for one in logprobs]}
                | {"policy_logprobs": nothing, "advantages": nothing}
            )
    for name, lines in (("rollouts", rollouts), ("tokens", tokens), ("metrics", [{"step": 0}, {"step": 1}])):
        (run / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lab, spec, model.config.vocab_size


def test_kl_is_read_from_the_tokens_of_all_completions(kept):
    lab, spec, size = kept
    run, mean = lab.place(spec), sum(map(sum, LOGPROBS.values())) / 2
    expected = [mean + 1.5 * log(size), 2 * mean + 1.5 * log(size)]
    assert kl_by_step(str(run)) == pytest.approx(expected, abs=1e-5)
    assert steps_of(lab, spec) == [(pytest.approx(kl, abs=1e-5), pytest.approx(2 / 3), 2) for kl in expected]
    lines = (run / "tokens.jsonl").read_text().splitlines(keepends=True)
    (run / "tokens.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(ValueError, match=r"lacks 1 completions, the first \(1, 1\)"):
        kl_by_step(str(run))


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
    assert "| PPO | 1.2e-03 | KL 0.2 | 0.50 | 1.42 | yes |" in tables["Each loss as it was tuned"]
    assert "| Best of 2 | 4.0e-04 | KL 0.2 in the loss | 0.50 | 1.42 | yes |" in tables["Each loss as it was tuned"]
    assert experiment.who_keeps(found, 16).startswith("Online DPO")
    assert experiment.who_keeps(world(**{loss: (START,) * len(own) for loss, own in PAPER.items()}), 16) == (
        "nobody gained enough to say"
    )
    figure = experiment.figure(found)
    assert all(title in figure for title in ("CoPG = RLOO", "Online DPO", "PPO, step by step", "N = 64"))
    assert experiment.verdicts(found)[CLAIMS.index("zero")].found == "win rate 0.02 (0.01)"


class Making(Lab):
    """Every run comes to files with two steps of two completions; RL gains, the less the larger N is."""

    def run_all(self, specs):
        for spec in specs:
            config, folder = spec.config(), self.place(spec)
            folder.mkdir(exist_ok=True)
            self.used[folder] = Made("run", 60.0, 1, 2, "a processor", None)
            num = config.trainer.minibatches
            write_run(folder, Ran(0.4 / num**0.25, 1.5, 0.5))
            steps = [{"step": step, "ess": 0.5} | {"kl_reference_sum": 1.5 * step} for step in (0, 1)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
            (folder / "summary.json").write_text(json.dumps({"staleness": {"updates_max": num - 1}}))
            rollout = {"prompt": "*qz*r>", "completion": "q", "outcome": "trained"}
            lines = [json.dumps({"step": step} | rollout) for step in (0, 0, 1, 1)]
            (folder / "rollouts.jsonl").write_text("\n".join(lines))
        return [self.place(spec) for spec in specs]


def test_a_section_is_made_of_what_the_runs_left(tmp_path, monkeypatch, undrawn):
    monkeypatch.setattr(rlhf, "kl_by_step", lambda run: [0.0, 1.5])
    section = experiment.section(Making(tmp_path), Plan(seeds=(0, 1), kept=None))
    assert [verdict.holds for verdict in section.verdicts][CLAIMS.index("zero")] is False
    assert "the stalest minibatch is 0, 1, 3, 7, 15, 63 updates old" in " ".join(section.tables)
    assert (
        "| Best of 2 | 2.7e-04 | KL 0.1 in the loss | 0.50 | 1.50 | yes |"
        in section.tables["Each loss as it was tuned"]
    )
    matched = next(table for caption, table in section.tables.items() if "where the drift is 1 nat" in caption)
    assert "| CoPG | 0.61 (0.00) |  |  |  | 0.67 (0.00) | 0.67 (0.00) |" in matched
    assert section.notes[0].endswith("Not within: none.")
    assert section.notes[-1].endswith("ends as CoPG's does, bit for bit.")
