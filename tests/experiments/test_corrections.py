"""What is read from runs and what is said of it, on runs made up by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.corrections.experiment import (
    AIPO,
    ASKED,
    LOSSES,
    MIXTURE,
    NONE,
    ONE,
    RATES,
    SEEDS,
    SWEEP_SEEDS,
    SYNC,
    K,
    Outcome,
    best_stable_rate,
    by_rate,
    compared,
    figure,
    largest_fall,
    outcome,
    section,
    smoothed,
    specs,
    starts,
    swept,
    table,
    verdicts,
)
from experiments.corrections.slow import pause_1500_us
from experiments.corrections.tasks import NUM_ROWS, TASKS, rows, write
from experiments.lab import Lab, Spec
from experiments.section import render
from slipstream.rewards.functions import check_term
from slipstream.rewards.protocol import Term

pytestmark = pytest.mark.usefixtures("resolved_once")

STEADY = Outcome(
    rewards=tuple(0.2 + 0.005 * step for step in range(100)),
    before=0.2,
    after=0.7,
    staleness=7.9,
    effective_share=0.9,
)


def falling(depth: float, **changed: float) -> Outcome:
    """Rises, and then falls by `depth` at once and for good."""
    rewards = [0.5 + 0.001 * step for step in range(60)] + [0.559 - depth] * 40
    return replace(STEADY, rewards=tuple(rewards), **changed)


def all_runs(**groups: list[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    """Steady ones everywhere but in `groups`, of the mixture, by loss; of five seeds."""
    runs = {(tasks, loss): [STEADY] * 5 for tasks in ASKED for loss in (SYNC, *LOSSES)}
    names = {"none": NONE, "aipo": AIPO, "sync": SYNC, "clip": "PPO's clip", "decoupled": "decoupled PPO"}
    return runs | {(MIXTURE, names[name]): group for name, group in groups.items()}


def said(runs: dict[tuple[str, str], list[Outcome]]) -> list[bool | None]:
    """Of the mixture, and last of the mixture beside one task."""
    found = [verdict.holds for verdict in verdicts(runs)]
    return [*found[:6], found[-1]]


def test_falls_are_of_windowed_means():
    assert smoothed([1, 2, 3, 4], 2) == [1.5, 2.5, 3.5]
    assert smoothed([1, 2], 10) == [1.5]
    assert largest_fall([0, 4, 0, 4, 0, 4], 2) == 0  # noise within a window is no fall
    assert largest_fall([1, 1, 3, 3, 0, 0, 3, 3], 2) == 3
    assert largest_fall([3, 2, 1, 5], 1) == 2  # the rise afterwards does not undo it
    assert falling(0.2).fall == pytest.approx(0.1905)  # the best mean of twenty is 0.5495
    assert falling(0.2).is_unstable
    assert not falling(0.09).is_unstable
    assert STEADY.fall == 0


def test_an_outcome_is_read_from_a_runs_files():
    steps = [
        {"step": step, "reward_mean": step / 100, "staleness_mean": min(step, K), "ess": None if step == 30 else 0.5}
        for step in range(40)
    ]
    evaluations = [{"step": 20, "eval_accuracy": 0.9}]
    told = {"eval": {"before": {"sampled_accuracy": 0.1}, "after": {"sampled_accuracy": 0.6}}}
    found = outcome([*steps[:20], *evaluations, *steps[20:]], told)
    assert found.rewards == tuple(step / 100 for step in range(40))
    assert (found.before, found.after) == (0.1, 0.6)
    assert found.staleness == K  # the first 2 k steps, on the way there, are left out
    assert found.effective_share == pytest.approx(0.5 * 23 / 24)  # a ratio that is not finite leaves no sample


def test_claims_that_hold():
    falls = [falling(0.3), falling(0.2), falling(0.3), falling(0.25), falling(0.05)]
    assert said(all_runs(none=falls)) == [True, True, True, True, True, None, True]


def test_every_claim_is_made_of_both_tasks():
    runs = all_runs()
    mixture, one, last = (found := verdicts(runs))[:6], found[6:12], found[12:]
    assert [verdict.claim.replace("On a mixture", "On one task") for verdict in mixture] == [v.claim for v in one]
    assert len(last) == 1
    runs[ONE, NONE] = [falling(0.3)] * 5
    assert [verdict.holds for verdict in verdicts(runs)] == [
        *[False, None, True, True, True, None],
        *[True, True, True, True, True, None],
        False,  # one task is the less stable one
    ]


def test_instability_that_correction_does_not_cure():
    falls = [falling(0.3)] * 5
    assert said(all_runs(none=falls, aipo=[falling(0.3), *[STEADY] * 4]))[1] is False
    nothing_to_cure = said(all_runs())
    assert (nothing_to_cure[:2], nothing_to_cure[-1]) == ([False, None], None)
    assert said(all_runs(none=falls, sync=falls))[0] is None  # nor does staleness do it


def test_quality_claims_that_do_not_hold():
    worse = [replace(STEADY, after=value) for value in (0.5, 0.51, 0.52, 0.53, 0.54)]
    assert said(all_runs(aipo=worse))[2:6] == [False, False, False, None]
    assert said(all_runs(clip=worse))[5] is True
    assert said(all_runs(decoupled=worse))[5] is False
    better = [replace(STEADY, after=value) for value in (0.5, 0.6, 0.68, 0.69, 0.9)]
    assert said(all_runs(aipo=better))[2:4] == [True, True]  # no more than 0.05 below


def test_one_rho_that_fails_is_enough():
    runs = all_runs()
    runs[MIXTURE, "AIPO, rho = 10"] = [replace(STEADY, after=0.5 + 0.01 * seed) for seed in range(5)]
    assert said(runs)[3] is False


def test_without_staleness_nothing_is_said():
    runs = all_runs(none=[falling(0.3)] * 5)
    runs[ONE, AIPO] = [replace(STEADY, staleness=6.5)] * 5
    assert {verdict.holds for verdict in verdicts(runs)} == {None}
    assert "6.5 steps old" in verdicts(runs)[0].found
    runs = all_runs(none=[falling(0.3)] * 5, sync=[replace(STEADY, staleness=0.0)] * 5)
    assert said(runs)[0] is True  # the baseline is on-policy


def test_nothing_is_as_good_as_what_learned_nothing():
    idle = [*[STEADY] * 4, replace(STEADY, before=0.66)]
    assert said(all_runs(sync=idle)) == [False, None, None, True, True, None, None]


def at(*values: float) -> list[Outcome]:
    return [replace(STEADY, after=value) for value in values]


def test_the_best_rate_of_the_stable_ones():
    """However far seeds are apart there: they begin apart."""
    groups = {1e-4: at(0.5, 0.52, 0.54), 2e-4: at(0.55, 0.6, 0.65), 4e-4: at(0.6, 0.7, 0.8)}
    assert best_stable_rate(groups) == 4e-4
    assert best_stable_rate(groups | {4e-4: [*at(0.9, 0.9), falling(0.3, after=0.9)]}) == 2e-4
    assert best_stable_rate({lr: [falling(0.3, after=0.9)] for lr in (4e-4, 2e-4)}) == 2e-4  # none is: the smallest


def test_the_table_has_a_row_for_each_loss():
    rows = table({NONE: [falling(0.3), STEADY], SYNC: [STEADY]}).splitlines()
    assert rows[2].startswith("| no correction | 0.200 (0.000) | 0.700 (0.000) | 0.145 (0.145) | 1 of 2 | 7.90 (0.00)")
    assert len(rows) == 4


def sweep_of(**groups: list[Outcome]) -> dict[tuple[str, str, float], list[Outcome]]:
    found = {(tasks, loss, lr): [STEADY] * 3 for tasks, loss, lr, _ in swept()}
    names = {"sync": SYNC, "none": NONE, "aipo": AIPO}
    for key, group in groups.items():
        name, _, rate = key.partition("_")
        found[MIXTURE, names[name], RATES[int(rate)]] = group
    return found


def test_the_figure_shows_every_loss():
    image = figure(all_runs(), sweep_of())
    assert image.startswith("<?xml")
    assert all(loss.replace("'", "&#x27;") in image or loss in image for loss in LOSSES)


class MadeUp(Lab):
    """Stale runs without correction fall, all others stay as they are."""

    def run_all(self, specs: Sequence[Spec]) -> list[Path]:
        for spec in specs:
            config, folder = spec.config(), self.place(spec)
            folder.mkdir(exist_ok=True)
            lag, collapses = config.max_staleness, config.loss.name == "reinforce" and config.max_staleness > 0
            rewards = [0.5 if not collapses or step < 60 else 0.1 for step in range(80)]
            lines = [
                {"step": step, "reward_mean": reward, "staleness_mean": lag - 0.1 * (lag > 0), "ess": 0.9}
                for step, reward in enumerate(rewards)
            ]
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
            told = {"before": {"sampled_accuracy": 0.2}, "after": {"sampled_accuracy": 0.1 if collapses else 0.8}}
            (folder / "summary.json").write_text(json.dumps({"eval": told}))
        return [self.place(spec) for spec in specs]


def test_a_section_from_the_files_of_runs(tmp_path, undrawn, words_written_once):
    found = section(MadeUp(tmp_path))
    text = render("corrections", found)
    of_tasks = [True, True, True, True, True, None]
    assert [verdict.holds for verdict in found.verdicts] == [*of_tasks, *of_tasks, None]
    assert "7.90 steps old" in found.setup
    assert "Learning rates: 0.0001 on a mixture, 0.0001 on one task" in found.setup
    assert "100 steps of 16 x 8 completions in 2 updates" in found.setup
    assert "| no correction | 0.200 (0.000) | 0.100 (0.000) | 0.400 (0.000) | 10 of 10 | 7.90 (0.00) |" in text
    assert "| synchronous | 0.200 (0.000) | 0.800 (0.000) | 0.000 (0.000) | 0 of 10 | 0.00 (0.00) |" in text
    assert "| tasks | loss | 0.0001 | 0.0002 | 0.0004 | 0.001 |" in text
    assert "| a mixture | no correction | 0.100 (0.000) | 0.100 (0.000) | 0.100 (0.000) | 0.100 (0.000) |" in text
    assert len(found.figures) == 1
    assert "learns the mixture at 0.0001, 0.0002, 0.0004, 0.001;" in found.notes[0]
    assert f"{AIPO}: 0.0001, 0.0002, 0.0004, 0.001; {NONE}: none." in found.notes[0]


def test_rates_at_which_nothing_is_learned_are_not_compared():
    low, failed = [replace(STEADY, after=0.66)] * 3, [replace(STEADY, after=0.1)] * 3
    none = {f"none_{rate}": failed for rate in range(4)}
    told = by_rate(sweep_of(aipo_0=low, sync_3=failed, aipo_3=failed, **none))
    assert f"{AIPO}: 0.0001, 0.0002, 0.0004; {NONE}: none." in told
    assert "0.001" not in told


def test_runs_are_what_the_readme_says(tmp_path, words_written_once):
    lab = Lab(tmp_path)
    rates = {MIXTURE: 2e-4, ONE: 4e-4}
    cells = specs(lab, [*swept(), *compared(rates)])
    begun = {str(lab.place(one) / "sft" / "model"): one.config() for one in starts(lab).values()}
    datasets = {tasks: str(write(kinds, tmp_path)) for tasks, kinds in ASKED.items()}
    assert len({one.name for one in cells.values()}) == len(cells) == 48 + 160
    assert not set(SEEDS) & set(SWEEP_SEEDS)
    for (tasks, loss, lr, seed), one in cells.items():
        config = one.config()
        start = begun[config.model.path]
        assert (config.seed, start.seed, config.trainer.optimizer.lr) == (seed, seed, lr)
        assert seed in SWEEP_SEEDS or lr == rates[tasks]
        assert config.prompts.dataset == start.prompts.dataset == datasets[tasks]
        assert config.max_staleness == (0 if loss == SYNC else K)
        assert config.loss.advantages == "group_mean"
        assert len(config.rewards.terms) == (1 if loss == SYNC else 2)
        assert (config.host, one.cores, config.stages) == ("inline", 1, ["rl"])


def test_words_are_asked_about_once_each():
    found = rows(tuple(TASKS))
    assert len(found) == NUM_ROWS == len({row["word"] for row in found})
    assert [row["prompt"][:2] for row in found[:4]] == ["b:", "n:", "d:", "b:"]
    assert {kind: task("maze") for kind, task in TASKS.items()} == {"b": "ezam", "n": "nbaf", "d": "mmaazzee"}
    assert all(row["prompt"] == f"{row['prompt'][0]}:{row['word']}>" for row in found)
    assert all(row["answer"] == TASKS[row["prompt"][0]](row["word"]) for row in found)
    assert {row["prompt"][0] for row in rows(ASKED[ONE])} == {"b"}


def test_a_file_of_rows_is_named_after_them(tmp_path):
    mixed, single = (write(ASKED[tasks], tmp_path) for tasks in (MIXTURE, ONE))
    assert mixed != single
    assert [json.loads(line) for line in single.read_text().splitlines()] == rows(ASKED[ONE])
    assert write(ASKED[ONE], tmp_path) == single


def test_the_slow_reward_is_one_and_abstains():
    check_term(Term(function="experiments.corrections.slow:pause_1500_us", params={}))
    started_s = time.monotonic()
    assert pause_1500_us(["p"] * 20, ["c"] * 20, [[1]] * 20, answer=["a"] * 20) == [None] * 20
    assert time.monotonic() - started_s >= 0.03
