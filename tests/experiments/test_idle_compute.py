"""What is read from runs and what is said of it, on runs made up by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.idle_compute.experiment import (
    ALL,
    CELLS,
    COLD_STEPS,
    DRIFT,
    EXTREMES,
    K4,
    PIPELINE,
    SEEDS,
    SYNC,
    T1,
    T2,
    T3,
    TIMED,
    TIMED_SEEDS,
    WIN,
    WINDOW,
    Outcome,
    Timing,
    crossing,
    drifts_at,
    equal_levels,
    figure,
    group_margin,
    outcome,
    quality,
    quality_table,
    seconds_to,
    section,
    smoothed,
    timed,
    timing,
    verdicts,
)
from experiments.idle_compute.gold import win
from experiments.lab import Lab, Spec
from experiments.rlhf import LR, Ended
from experiments.section import render
from slipstream.rewards.functions import check_term
from slipstream.rewards.protocol import Term

NUM_STEPS = 60


def rising(seed: int, *, per_step: float = 0.005, drift: float = 0.05, num_steps: int = NUM_STEPS) -> Outcome:
    """Wins go up from where the seed begins, drift by as much in each step."""
    begin = 0.3 + 0.01 * seed
    wins = tuple(begin + per_step * step for step in range(num_steps))
    drifts = tuple(drift * step for step in range(num_steps))
    return Outcome(wins, drifts, 1.0, Ended(begin, 0.5, 0.0, 5.0), Ended(wins[-1], 0.8, drifts[-1], 4.0))


def runs(**changes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    names = {"sync": SYNC, "t1": T1, "t2": T2, "t3": T3, "k4": K4, "all": ALL, "extremes": EXTREMES}
    found = {name: [rising(seed) for seed in SEEDS] for name in CELLS}
    return found | {names[name]: list(group) for name, group in changes.items()}


def timings(sync: float = 0.3, k2: float = 0.2, k4: float = 0.2) -> dict[str, list[Timing]]:
    values = dict(zip(TIMED, (sync, k2, k4), strict=True))
    return {name: [Timing(step_s, 0.05, 0.4)] * len(TIMED_SEEDS) for name, step_s in values.items()}


def said(found: dict[str, list[Outcome]], times: dict[str, list[Timing]] | None = None) -> list[bool | None]:
    return [verdict.holds for verdict in verdicts(found, timings() if times is None else times)]


def half(seed: int, **changed: float) -> Outcome:
    """Best and worst of 4: as far in half the steps."""
    one = rising(seed, per_step=0.01, drift=changed.get("drift", 0.15), num_steps=NUM_STEPS // 2)
    after = replace(one.after, win_rate=rising(seed).after.win_rate)
    return replace(one, after=after, margin=changed.get("margin", 1.9))


def test_where_a_run_reaches_a_win_rate():
    one = rising(0)
    assert smoothed([1, 2, 3, 6], 3) == [2, pytest.approx(11 / 3)]
    assert one.best == pytest.approx(0.3 + 0.005 * (NUM_STEPS - 1 - (WINDOW - 1) / 2))
    assert one.steps_to(0.0) == WINDOW
    wins = smoothed(one.wins)
    assert one.steps_to(wins[7]) == pytest.approx(WINDOW + 7)
    between = 0.75 * wins[7] + 0.25 * wins[8]
    assert one.steps_to(between) == pytest.approx(WINDOW + 7.25)
    assert one.drift_at(between) == pytest.approx(0.05 * (7.25 + (WINDOW - 1) / 2))
    assert one.drift_at(0.0) == pytest.approx(0.05 * (WINDOW - 1) / 2)
    assert one.steps_to(0.99) is None
    assert one.drift_at(0.99) is None


def test_the_first_crossing_counts():
    assert crossing([0.0, 1.0, 0.0, 3.0], 0.5) == 0.5
    assert crossing([0.0, 1.0, 0.0, 3.0], 1.0) == 1.0
    assert crossing([0.0, 1.0, 0.0, 3.0], 2.0) == pytest.approx(2 + 2 / 3)
    assert crossing([2.0, 1.0], 1.5) == 0
    assert crossing([0.0, 1.0], 1.5) is None


def test_equal_levels_are_reached_by_all_that_are_compared():
    found = runs(t2=[rising(seed, per_step=0.002) for seed in SEEDS])
    levels = equal_levels(found, T1, T2)
    for level, slow in zip(levels, found[T2], strict=True):
        assert level == pytest.approx(slow.before.win_rate + 0.9 * (slow.best - slow.before.win_rate))
    assert all(drift > 0 for drift in drifts_at(found, T1, levels))
    worse = runs(t2=[rising(seed, per_step=-0.002) for seed in SEEDS])  # what learns nothing is compared at its start
    assert equal_levels(worse, T1, T2) == pytest.approx([one.before.win_rate for one in worse[T2]])


def evaluated(win_rate: float, gold: float, kl: float, perplexity: float) -> dict[str, object]:
    """A moment of `evaluation.json`, as far as it is read."""
    return {
        "gold": {"win_rate": {"mean": win_rate}, "mean_score": gold},
        "drift": {"kl": {"per_sequence": {"mean": kl}}, "perplexity": {"per_response_token": {"mean": perplexity}}},
    }


def test_an_outcome_is_read_from_a_runs_files():
    steps = [{"step": step, f"reward_parts/{WIN}": 0.25, DRIFT: 0.1 * step} for step in range(20)]
    told = {"before": evaluated(0.3, 0.6, 0.0, 6.0), "after": evaluated(0.7, 0.9, 2.5, 3.0)}
    rollouts = [{"ordinal": 0, "reward": 1.0}, {"ordinal": 0, "reward": -1.0}]
    one = outcome([*steps, {"step": 20, "eval_accuracy": 0.0}], rollouts, told)
    assert one.wins == (0.25,) * 20
    assert one.drifts == tuple(0.1 * step for step in range(20))
    assert (one.before, one.after, one.margin) == (Ended(0.3, 0.6, 0.0, 6.0), Ended(0.7, 0.9, 2.5, 3.0), 2.0)


def test_margins_are_of_the_oldest_groups():
    rewards = {5: [9.0, 0.0], 0: [1.0, 2.0, 4.0], 2: [0.5, 0.5]}  # as they were finished
    lines = [{"ordinal": ordinal, "reward": reward} for ordinal, group in rewards.items() for reward in group]
    assert group_margin(lines, 2) == 1.5
    assert group_margin(lines, 3) == 4.0


def test_times_are_medians_of_warm_steps():
    cold = [{"step_s": 9.0}] * COLD_STEPS
    told = {"balance": {"idle": {"trainer": 0.1, "generator-0": 0.3, "rewards": 0.9}}}
    found = timing([*cold, {"eval_accuracy": 1.0}, {"step_s": 1.0}, {"step_s": 2.0}, {"step_s": 7.0}], told)
    assert found == Timing(2.0, 0.1, 0.3)
    assert seconds_to(runs(), timings(), T1, [0.0] * len(SEEDS)) == pytest.approx([WINDOW * 0.2] * len(SEEDS))


def test_claims_that_hold():
    found = runs(
        t2=[rising(seed, per_step=0.006, drift=0.08) for seed in SEEDS],
        t3=[rising(seed, per_step=0.007, drift=0.12) for seed in SEEDS],
        k4=[half(seed) for seed in SEEDS],
        all=[rising(seed, per_step=0.006) for seed in SEEDS],
    )
    assert said(found, timings(sync=0.5, k4=0.19)) == [True, True, True, True, True, True, True, True, True]


def test_claims_that_do_not_hold():
    found = runs(
        t2=[rising(seed, per_step=0.006, drift=0.04) for seed in SEEDS],
        t3=[rising(seed, per_step=0.004, drift=0.03) for seed in SEEDS],
        k4=[half(seed, margin=1.2, drift=0.04) for seed in SEEDS],
        extremes=[rising(seed, per_step=0.006) for seed in SEEDS],
    )
    found[K4] = [replace(one, after=replace(one.after, win_rate=0.4)) for one in found[K4]]
    assert said(found, timings(sync=0.2, k4=0.4)) == [False, False, False, False, False, False, False, False, False]


def test_within_the_noise_nothing_is_said():
    mixed = [rising(seed, per_step=0.005 + (-1) ** seed * 0.001, drift=0.05) for seed in SEEDS]
    found = runs(t2=mixed, t3=mixed)
    assert said(found)[:3] == [None, None, None]
    assert said(found)[-1] is None


def test_tables_and_figure_have_every_run():
    rows = quality_table(runs()).splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == list(CELLS)
    assert f" | {NUM_STEPS} | 0.320 (0.020) | 0.615 (0.020) | 2.95 (0.00) | " in rows[2]
    image = figure(runs(k4=[half(seed) for seed in SEEDS]), timings())
    assert all(name in image for name in (SYNC, T1, T2, T3, K4))


class MadeUp(Lab):
    """A win rate of 0.3 at first, 0.9 in the end; K = 4 takes half the steps, and a step half a second."""

    def run_all(self, specs: Sequence[Spec]) -> list[Path]:
        for spec in specs:
            config, folder = spec.config(), self.place(spec)
            folder.mkdir()
            steps = range(config.steps)
            lines = [
                {
                    "step": step,
                    f"reward_parts/{WIN}": 0.3 + 0.6 * step / config.steps,
                    DRIFT: step / config.steps * config.trainer.epochs * config.completions_per_group,
                    "step_s": 2.0 if config.max_staleness == 0 else 0.5,
                }
                for step in steps
            ]
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
            rollouts = [{"ordinal": 0, "reward": float(sample)} for sample in range(config.completions_per_group)]
            (folder / "rollouts.jsonl").write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
            told = {"before": evaluated(0.3, 0.6, 0.0, 6.0), "after": evaluated(0.9, 0.9, 2.0, 3.0)}
            (folder / "evaluation.json").write_text(json.dumps(told))
            (folder / "summary.json").write_text(
                json.dumps({"balance": {"idle": {"trainer": 0.0, "generator-0": 0.5}}})
            )
        return [self.place(spec) for spec in specs]


def test_a_section_from_the_files_of_runs(tmp_path):
    found = section(MadeUp(tmp_path))
    text = render("idle_compute", found)
    assert [verdict.holds for verdict in found.verdicts] == [None, True, True, True, False, True, True, True, None]
    assert f"| {K4} | {PIPELINE.updates // 2} | 0.300 (0.000) | 0.900 (0.000) | 2.00 (0.00) |" in text
    assert f"| {SYNC} | 2000 (0) | 0% | 50% |" in text
    assert "generators idle 50% of the time at K = 2" in text


def test_runs_are_what_the_readme_says(tmp_path):
    lab = Lab(tmp_path)
    for name in CELLS:
        config = quality(lab, name, 1).config()
        assert config.host == "inline"
        assert config.steps == PIPELINE.updates // (2 if name == K4 else 1)
        assert config.trainer.optimizer.lr == pytest.approx(LR / 2 if name == K4 else LR)
        assert config.max_staleness == (0 if name == SYNC else 1)
        assert config.completions_per_group == (4 if name in (K4, ALL, EXTREMES) else 2)
        assert config.trainer.epochs == {T2: 2, T3: 3}.get(name, 1)
        assert config.loss.select == ("all" if name == ALL else "best_and_worst")
        assert (config.loss.name, config.kl.coef > 1e-3) == (
            ("rloo", True) if name in (ALL, EXTREMES) else ("online_dpo", False)
        )
        assert [term.function for term in config.rewards.terms] == [WIN]
        assert len(config.rewards.models) == 1
    for name in TIMED:
        config = timed(lab, name, 0).config()
        assert (config.host, config.stages, config.kl.coef) == ("process", ["rl"], 0.0)
        assert not config.rewards.terms  # one station less in the line
        assert timed(lab, name, 0).cores is None


def test_gold_says_who_wins():
    check_term(Term(function=WIN, params={}))
    told = {"answer": ["ab", "abx", "a"], "key": ["abc", "abc", "ab"], "other": [1, 2, 3]}
    # F1 with the key: 1 beats 4/5; 2/3 equals 2 * 2 / 6; 0 loses to 2/3
    assert win(["p"] * 3, ["cab", "ab y", "z"], [[1]] * 3, **told) == [1.0, 0.5, 0.0]
