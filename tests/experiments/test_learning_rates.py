"""The task is what it says, modes differ in their dials alone, rates are chosen and judged by the README's rules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.lab import Lab, Spec
from experiments.learning_rates import experiment, task
from experiments.learning_rates.experiment import (
    CONTINUOUS,
    MODES,
    SHIFTING,
    SPELLING,
    SYNC,
    TASKS,
    K,
    Outcome,
    best_rate,
    keys,
    largest_stable,
    section,
    specs,
    verdicts,
)
from experiments.section import render

pytestmark = pytest.mark.usefixtures("resolved_once")


def test_words_are_shifted():
    found = task.rows()
    assert len(found) == task.NUM_ROWS == len({row["prompt"] for row in found})
    letters = task.LETTERS + task.LETTERS[0]
    for row in found[:200]:
        word = row["prompt"].removesuffix(">")
        assert task.SHORTEST <= len(word) <= task.LONGEST
        assert row["answer"] == "".join(letters[letters.index(letter) + 1] for letter in word)
        assert len(row["careless"]) == len(row["answer"])


def test_slips_are_everywhere_alike():
    """Of 4,200 letters in each of the first twelve places, within five standard errors."""
    found = task.rows()
    for place in range(task.SHORTEST):
        slips = sum(row["careless"][place] != row["answer"][place] for row in found)
        assert abs(slips / len(found) - task.SLIPS) < 5 * (0.24 / len(found)) ** 0.5, place


def test_the_reward_is_the_share_of_right_letters():
    told = task.share_right(["abcd", "abxd", "ab", "abcdef", "", "xxxx"], answer=["abcd"] * 6)
    assert told == [1, 0.75, 0.5, 4 / 6, 0, 0]


def test_the_recipe_has_room_for_the_longest(tmp_path):
    config = specs(Lab(tmp_path))[1][SHIFTING, SYNC, 3e-5, 0].config()
    assert config.prompts.max_prompt_tokens >= task.LONGEST + 1
    assert config.generator.max_new_tokens >= task.LONGEST + 1
    assert set("".join(row["prompt"] + row["careless"] for row in task.rows()[:300])) <= set(
        config.model.alphabet or ""
    )


def test_runs_are_what_the_readme_says(tmp_path):
    starts, cells = specs(Lab(tmp_path))
    assert [one.config().stages for one in starts] == [["sft"], ["sft"]]
    assert list(cells) == keys()
    assert len({one.name for one in cells.values()}) == len(cells) == 6 * 2 * 5 + 3 * 2 * 3
    for (name, mode, lr, seed), one in cells.items():
        config = one.config()
        assert (config.seed, config.trainer.optimizer.lr, config.steps, config.stages) == (seed, lr, 80, ["rl"])
        assert (config.completions_per_step, config.loss.name, config.eval.measure) == (64, "aipo", None)
        assert (config.max_staleness, config.weight_update) == (
            (0, "between_batches") if mode == SYNC else (K, "in_flight")
        )
        assert (config.recipe, one.cores) == (name, None)


# What it comes to


def outcome(after: float, *, fall: float = 0.0, before: float = 0.5) -> Outcome:
    rewards = (0.6,) * 40 + (0.6 - fall,) * 40
    return Outcome(before=before, after=after, rewards=rewards, seconds=20.0, staleness=2.5, tokens=25.0)


def test_when_a_run_is_unstable():
    assert not outcome(0.7, fall=0.09).is_unstable
    assert outcome(0.7, fall=0.11).is_unstable
    assert outcome(0.49).is_unstable


def all_found(changed=None) -> dict[tuple[str, str, float], list[Outcome]]:
    """The second rate is the best everywhere, but for what is `changed`."""
    found = {
        (name, mode, lr): [
            outcome((0.7 if index else 0.6) + 0.001 * seed - 0.04 * max(0, index - 1)) for seed in one.seeds
        ]
        for name, one in TASKS.items()
        for mode in MODES
        for index, lr in enumerate(one.rates)
    }
    return found | (changed or {})


def said(found) -> list[bool | None]:
    return [verdict.holds for verdict in verdicts(found)]


def test_each_is_at_its_own_best_rate():
    found = all_found({(SHIFTING, CONTINUOUS, 3e-5): [outcome(0.9)] * 5})
    assert (best_rate(found, SHIFTING, SYNC), best_rate(found, SHIFTING, CONTINUOUS)) == (1e-4, 3e-5)
    assert said(all_found()) == [True] * 4


def test_a_worse_best_is_a_no_where_all_seeds_say_so():
    worse = {
        (SHIFTING, CONTINUOUS, lr): [outcome(0.6 + 0.001 * seed) for seed in range(5)] for lr in TASKS[SHIFTING].rates
    }
    assert said(all_found(worse))[:2] == [False, True]
    few = {(SPELLING, CONTINUOUS, lr): [outcome(0.6)] * 3 for lr in TASKS[SPELLING].rates}
    assert said(all_found(few))[:2] == [True, False]
    some = {(SPELLING, CONTINUOUS, lr): [outcome(0.6), outcome(0.6), outcome(0.71)] for lr in TASKS[SPELLING].rates}
    assert said(all_found(some))[:2] == [True, None]  # they overlap


def test_nothing_is_said_where_synchronous_training_learns_nothing():
    flat = {(SHIFTING, mode, lr): [outcome(0.59)] * 5 for mode in MODES for lr in TASKS[SHIFTING].rates}
    assert said(all_found(flat)) == [None, True, None, True]


def test_stable_means_all_smaller_rates_too():
    shaky = [outcome(0.7, fall=0.3), *[outcome(0.7)] * 4]
    found = all_found({(SHIFTING, CONTINUOUS, 4e-4): shaky})
    assert (largest_stable(found, SHIFTING, SYNC), largest_stable(found, SHIFTING, CONTINUOUS)) == (2e-3, 2e-4)
    assert said(found)[2:] == [False, True]
    assert said(all_found({(SHIFTING, SYNC, 3e-5): shaky}))[2] is None
    assert said(all_found({(SPELLING, CONTINUOUS, 3e-5): shaky[:3]}))[3] is False


class MadeUp(Lab):
    """Continuous runs collapse above 5e-4."""

    def run_all(self, specs: Sequence[Spec]) -> list[Path]:
        for spec in specs:
            folder, config = self.place(spec), spec.config()
            folder.mkdir()
            collapses = config.max_staleness > 0 and config.trainer.optimizer.lr > 5e-4
            rewards = [0.6] * 40 + [0.1 if collapses else 0.7] * 40
            lines = [{"reward": reward, "completion_tokens_mean": 25.0} for reward in rewards]
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
            told = {"before": {"sampled_reward": 0.5}, "after": {"sampled_reward": rewards[-1]}}
            staleness = {"mean": 0.7 * config.max_staleness}
            (folder / "summary.json").write_text(json.dumps({"eval": told, "staleness": staleness}))
        return [self.place(spec) for spec in specs]


def test_a_section_from_the_files_of_runs(tmp_path, monkeypatch):
    steps = [SimpleNamespace(start_s=1.0, end_s=2.0), SimpleNamespace(start_s=2.0, end_s=9.0)]
    monkeypatch.setattr(experiment, "read_accounting", lambda run: SimpleNamespace(steps=steps))
    found = section(MadeUp(tmp_path))
    text = render("learning_rates", found)
    assert [verdict.holds for verdict in found.verdicts] == [True, True, False, True]
    assert "up to 0.0004, synchronous up to 0.002" in text
    assert "| continuous | unstable runs | 0 of 5 | 0 of 5 | 0 of 5 | 0 of 5 | 5 of 5 | 5 of 5 |" in text
    assert "| synchronous | seconds | 8 (0) | 8 (0) | 8 (0) |" in text
    assert "chosen there with seed 0 so that `continuous` keeps" in text
    assert len(found.figures) == 1


@pytest.mark.parametrize("name", TASKS)
def test_rates_are_tried_in_order(name):
    assert list(TASKS[name].rates) == sorted(TASKS[name].rates)
