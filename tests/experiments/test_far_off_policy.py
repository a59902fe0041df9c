"""Runs are what the README says, and verdicts follow its rules, on runs made up by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.corrections.experiment import NONE, SYNC
from experiments.far_off_policy import experiment
from experiments.far_off_policy.experiment import (
    FAR,
    LADDER,
    LAGS,
    LOSSES,
    NEW,
    RATES,
    SEEDS,
    STEPS,
    SYNC_RATES,
    TRIED,
    Outcome,
    compared,
    outcome,
    outcomes,
    section,
    specs,
    swept,
    verdicts,
    widened,
)
from experiments.kept import AT_ONCE
from experiments.lab import Lab, Made, Spec
from experiments.section import ROOT, render

pytestmark = pytest.mark.usefixtures("resolved_once")


def test_runs_are_what_the_readme_says(tmp_path, words_written_once):
    rates = {loss: 1e-5 * (1 + at) for at, loss in enumerate([SYNC, *LOSSES])}
    asked = [*swept(TRIED), *compared(rates)]
    cells = specs(Lab(tmp_path), asked)
    assert list(cells) == asked
    assert len({one.name for one in cells.values()}) == len(cells) == 8 * 3 * 3 + 4 * 3 + 5 * (1 + 8 * 3)
    for (loss, lag, rate, seed), one in cells.items():
        config = one.config()
        assert (config.seed, config.max_staleness, config.steps, one.cores) == (seed, lag, STEPS, 1)
        assert (config.updates_per_step, config.trainer.optimizer.lr) == (1, rate)
        assert config.loss.advantages == ("optimal" if loss.startswith("OAPL") else "group_mean")
        assert config.trainer.ess_scaling == ("sqrt" if loss == "VCPO" else "no")
        assert len(config.rewards.terms) == (1 if loss == SYNC else 2)
        assert f"seed={seed}" in str(config.model.path)
        assert "mixture" in str(config.model.path)
    assert {(loss, lag, rate) for loss, lag, rate, _ in swept(TRIED)} == {
        *((loss, FAR, rate) for loss in LOSSES for rate in RATES),
        *((SYNC, 0, rate) for rate in SYNC_RATES),
    }
    assert all(seed >= 100 for *_, seed in swept(TRIED))
    assert {(loss, rate) for loss, _, rate, _ in compared(rates)} == {*rates.items()}
    assert NEW.keys() <= LOSSES.keys()


def test_a_best_rate_at_an_end_has_the_next_one_tried():
    assert widened(RATES, 1e-4) == RATES
    assert widened(RATES, 5e-5) == (2e-5, *RATES)
    assert widened(RATES, 2e-4) == (*RATES, 4e-4)
    assert widened(LADDER, LADDER[0]) == widened(LADDER, LADDER[-1]) == LADDER


def test_an_outcome_is_read_from_a_runs_files():
    steps = [
        {"reward_mean": 0.5, "staleness_mean": float(min(step, 16)), "ess": None if step == 30 else 0.5}
        for step in range(48)
    ]
    told = {
        "eval": {"before": {"sampled_accuracy": 0.1}, "after": {"sampled_accuracy": 0.6}},
        "staleness": {"max": 16},
        "balance": {"wasted_tokens": {"stale": 0}},
    }
    found = outcome([*steps, {"eval_accuracy": 0.5}], told, 16)
    assert found == Outcome(0.1, 0.6, 0.0, 16.0, 16, 0, 0.5 * 31 / 32)


def group(after: float, lag: int = FAR) -> list[Outcome]:
    return [Outcome(0.1, after + 0.001 * seed, 0.0, float(lag), lag, 0, 0.5) for seed in SEEDS]


def all_runs(**after: float) -> dict[tuple[str, int], list[Outcome]]:
    """All as good as synchronous training but what is uncorrected."""
    runs = {(loss, lag): group(after.get(loss, 0.6), lag) for loss in LOSSES for lag in LAGS}
    return runs | {(SYNC, 0): group(0.6, 0), (NONE, FAR): group(after.get("none", 0.3))}


def said(runs) -> list[bool | None]:
    return [verdict.holds for verdict in verdicts(runs)]


def test_losses_that_keep_what_is_gained():
    assert said(all_runs()) == [True] * 11


def test_losses_that_do_not():
    assert said(all_runs(IcePop=0.5)) == [False, *[True] * 10]
    assert said(all_runs(M2PO=0.2)) == [True, False, *[True] * 4, False, *[True] * 4]
    assert said(all_runs(none=0.6)) == [*[True] * 5, *[None] * 5, True]


def test_nothing_is_as_good_as_what_learned_nothing():
    idle = [replace(one, before=one.after - 0.04) for one in group(0.6, 0)]
    assert said(all_runs() | {(SYNC, 0): [*group(0.6, 0)[1:], idle[0]]}) == [*[None] * 5, *[True] * 6]


def test_nothing_is_said_of_tokens_that_were_not_old():
    runs = all_runs()
    young = {loss: [replace(one, age=0.89 * FAR) for one in runs[loss, FAR]] for loss in (NONE, "OAPL")}
    assert said(runs | {("OAPL", FAR): young["OAPL"]}) == [True, True, None, *[True] * 4, None, *[True] * 3]
    assert said(runs | {(NONE, FAR): young[NONE]}) == [*[True] * 5, *[None] * 5, True]


def test_a_token_beyond_the_bound_or_thrown_away_is_told():
    runs = all_runs()
    for change in ({"oldest": LAGS[0] + 1}, {"discarded": 3}):
        spoilt = [replace(runs["M2PO", LAGS[0]][0], **change), *runs["M2PO", LAGS[0]][1:]]
        assert said(runs | {("M2PO", LAGS[0]): spoilt})[-1] is False


class MadeUp(Lab):
    """Uncorrected runs lose what they had, all others gain: most at 1e-4, but for OAPL at 2e-4, where it falls."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked: list[str] = []

    def run_all(self, specs: Sequence[Spec]) -> list[Path]:
        for spec in specs:
            self.asked.append(spec.name)
            self.used[self.place(spec)] = Made("run", 60.0, 1, 2, "a processor", "0123456789")
            config, folder = spec.config(), self.place(spec)
            folder.mkdir(exist_ok=True)
            loses, lag = config.loss.name == "reinforce" and config.max_staleness > 0, config.max_staleness
            rate = config.trainer.optimizer.lr
            gained = 0.1 if loses else 0.7 if rate == 1e-4 else 0.65
            rewards = [0.6] * 40 + [gained] * 216
            if config.loss.name == "oapl" and rate > 1e-4:
                gained, rewards = 0.8, [*rewards[:200], *[0.3] * 56]
            lines = [
                {"reward_mean": reward, "staleness_mean": float(min(step, lag)), "ess": 0.9}
                for step, reward in enumerate(rewards)
            ]
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
            told = {"before": {"sampled_accuracy": 0.2}, "after": {"sampled_accuracy": gained}}
            rest = {"staleness": {"max": lag}, "balance": {"wasted_tokens": {"stale": 0}}}
            (folder / "summary.json").write_text(json.dumps({"eval": told} | rest))
        return [self.place(spec) for spec in specs]


def test_a_run_that_is_kept_is_not_made_again(tmp_path, words_written_once):
    """Not in another folder either; one whose settings have changed since is."""
    kept = tmp_path / "outcomes.jsonl"
    keys = [("IcePop", FAR, 1e-4, 100 + at % 3) if at < 3 else ("M2PO", LAGS[at % 3], 1e-4, at % 5) for at in range(10)]
    assert len(set(keys)) == len(keys) > AT_ONCE
    here, there = MadeUp(tmp_path / "here"), MadeUp(tmp_path / "there")
    found = outcomes(here, keys[:-1], kept)
    assert sum(name.startswith("far") for name in here.asked) == len(keys) - 1
    assert outcomes(there, keys, kept).items() >= found.items()
    assert [name for name in there.asked if name.startswith("far")] == [
        f"far off-policy M2PO lag={keys[-1][1]} lr=0.0001 seed=4"
    ]
    assert [name for name in there.asked if "start" in name] == ["corrections start a mixture seed=4"]
    assert there.cost().startswith("11 runs, 6 minutes on 2 cores of a processor, commit `0123456`")

    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(row["loss"], row["lag"], row["lr"], row["seed"]) for row in rows] == keys
    rows[0]["settings"] = "of another edition"
    kept.write_text("".join(json.dumps(row) + "\n" for row in rows))
    again = MadeUp(tmp_path / "again")
    outcomes(again, keys, kept)
    assert [name for name in again.asked if name.startswith("far")] == [
        "far off-policy IcePop lag=64 lr=0.0001 seed=100"
    ]


def test_rows_that_another_process_adds_meanwhile_stay(tmp_path, monkeypatch, words_written_once):
    kept, key = tmp_path / "outcomes.jsonl", ("IcePop", FAR, 1e-4, 100)
    lab, run_all = MadeUp(tmp_path / "lab"), MadeUp.run_all

    def run_beside_another(self, specs: Sequence[Spec]) -> list[Path]:
        monkeypatch.setattr(MadeUp, "run_all", run_all)
        outcomes(MadeUp(tmp_path / "other"), [("M2PO", FAR, 1e-4, 100)], kept)
        return run_all(self, specs)

    monkeypatch.setattr(MadeUp, "run_all", run_beside_another)
    assert list(outcomes(lab, [key], kept)) == [key]
    assert [json.loads(line)["loss"] for line in kept.read_text().splitlines()] == ["M2PO", "IcePop"]


@pytest.mark.slow
def test_a_section_from_the_files_of_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "KEPT", tmp_path / "outcomes.jsonl")
    found = section(MadeUp(tmp_path / "lab"))
    text = render("far_off_policy", found)
    assert [verdict.holds for verdict in found.verdicts] == [True] * 11
    assert "synchronous 0.700 (0.000), RL begins at 0.200 (0.000)" in text
    assert "| no correction | 0.100 (0.000) | 0.100 (0.000) | 0.100 (0.000) |" in text
    assert "| no correction | 5 of 5 | 5 of 5 | 5 of 5 |" in text
    falls = "0.100 (0.000), 3 unstable"
    assert f"| no correction | {falls} | {falls} | {falls} | {falls} | {falls} |  |  | 1e-05 |" in text
    most, less = "0.700 (0.000)", "0.650 (0.000)"
    assert f"| OAPL |  |  | {less} | {most} | 0.800 (0.000), 3 unstable |  |  | 0.0001 |" in text
    assert "32.0 (bound 32), 64.0 (bound 64), 128.0 (bound 128)" in text
    assert f"| synchronous |  |  | {less} | {most} | {less} | {less} | {less} | 0.0001 |" in text
    assert "Unstable runs, synchronous 0 of 5" in text
    named = next(note for note in found.notes if "the bits of the synchronous trainer" in note).split("`")[1]
    assert (ROOT / named).is_file()
