"""The rules of the README give the right verdicts, contenders differ in their dials, and all of them can be run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.lab import Lab
from experiments.peers import runs as peers_runs
from experiments.peers.reading import Seen
from experiments.peers.runs import Scale
from experiments.section import render
from experiments.stragglers import experiment
from experiments.stragglers.experiment import CONTENDERS, SCALE, SLOTS, section, table, verdicts


def five(**values) -> list[Seen]:
    """Runs of five seeds, whose paces lie 1 % apart."""
    defaults = {"ended_s": (1.0, 2.0), "rewards": (0.9, 0.9), "completions_per_s": 100.0, "accuracy": 0.95}
    one = Seen(**(defaults | {"before": 0.5, "trainer_idle": 0.1, "age": (0.0,) * 6} | values))
    return [replace(one, completions_per_s=one.completions_per_s * (1 + seed / 100)) for seed in range(5)]


def everyone(**changed) -> dict[str, list[Seen]]:
    found = {
        "k2": five(staleness_mean=1.7, staleness_max=2, straggler=0.3),
        "k8": five(completions_per_s=150.0, staleness_mean=6.0, staleness_max=8),
        "tolerant": five(completions_per_s=140.0, staleness_mean=2.2, staleness_max=8, older=0.2),
        "drop_stale": five(completions_per_s=170.0, discarded=0.3, length_bias=-0.1),
        "areal": five(completions_per_s=139.0, staleness_max=5),
    }
    return found | changed


def told(found) -> list[bool | None]:
    return [one.holds for one in verdicts(found)]


def test_verdicts_by_the_rules():
    assert told(everyone()) == [True, True, True, True, True, None, True]
    assert verdicts(everyone())[0].found == "143 (3) and 102 (2) completions/s: 1.40 times"
    slow = five(completions_per_s=80.0, staleness_mean=1.0, staleness_max=9, accuracy=0.7)
    assert told(everyone(tolerant=slow)) == [False, False, True, False, True, True, False]


@pytest.mark.parametrize(
    "broken", [{"staleness_max": 9}, {"discarded": 0.01}, {"length_bias": 0.01}, {"longest_trained": 0.9}]
)
def test_one_broken_promise_in_one_run_is_a_no(broken):
    ours = everyone()["tolerant"]
    assert told(everyone(tolerant=[*ours[:4], replace(ours[4], **broken)]))[1] is False


def test_nothing_is_as_good_as_what_learned_nothing():
    theirs = everyone()["k2"]
    assert told(everyone(k2=[*theirs[:4], replace(theirs[4], before=0.92)]))[-1] is None


def test_the_table_has_everybody():
    text = table(everyone())
    assert "| k = 2 | 102 (2) | 30.0 (0.0) | 10 (0) | 1.70 (0.00) | 2 | 0.0 (0.0) | 0.0 (0.0) |" in text
    assert "| tolerant: k = 8, W = 6 P + 1 | 143 (3) | 0.0 (0.0) | 10 (0) | 2.20 (0.00) | 8 | 20.0 (0.0) |" in text
    assert text.count("\n") == 1 + len(CONTENDERS)


def test_contenders_differ_in_their_dials_alone(resolved_once):
    start = peers_runs.checkpoint(Path("train"), Path("held"), {})
    configs = {
        name: peers_runs.contest(name, contender, 0, start, Path("model"), 80).config()
        for name, contender in CONTENDERS.items()
    }
    assert {config.generator.num_slots for config in configs.values()} == {SLOTS}
    assert configs["k2"].completions_per_step == SLOTS
    dials = {
        name: (config.max_staleness, config.overtake_steps, config.schedule.policy, config.weight_update)
        for name, config in configs.items()
    }
    assert dials == {
        "k2": (2, 0, "oldest_first", "in_flight"),
        "k8": (8, 0, "oldest_first", "in_flight"),
        "tolerant": (8, 6, "oldest_first", "in_flight"),
        "drop_stale": (2, 0, "drop_stale", "in_flight"),
        "areal": (2, 0, "areal", "in_flight"),
    }


class Recorded(Lab):
    """Makes nothing, and tells what it was asked for."""

    asked: list[str]

    def run(self, spec):
        self.asked.append(spec.name)
        return self.place(spec)


def test_seeds_are_outside_and_everybody_has_a_turn_at_the_start(tmp_path, monkeypatch, undrawn):
    monkeypatch.setattr(experiment, "read_run", lambda run, length_of: five()[0])
    lab = Recorded(tmp_path)
    lab.asked = []
    text = render("stragglers", section(lab))
    first, *rest = (name.removeprefix("stragglers ") for name in lab.asked)
    assert first == "peers checkpoint"
    assert rest[:6] == ["k2 0", "k8 0", "tolerant 0", "drop_stale 0", "areal 0", "k8 1"]
    assert sorted(rest) == sorted(f"{name} {seed}" for name in CONTENDERS for seed in SCALE.seeds)
    assert {rest[5 * seed] for seed in SCALE.seeds} == {f"{name} {seed}" for seed, name in enumerate(CONTENDERS)}
    assert text.count("docs/staleness.md |") == 7


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_contender_runs(tmp_path):
    """Three small steps of each."""
    small = {"groups_per_step": 4, "completions_per_group": 4, "sft": {"steps": 20}, "eval": {"num_prompts": 8}}
    text = render("stragglers", section(Lab(tmp_path), Scale(tuple(CONTENDERS), (0,), 3, small)))
    assert text.count("\n| tolerant: k = 8") == 1
