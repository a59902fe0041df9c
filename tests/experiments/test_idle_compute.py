"""What is read from runs and what is said of it, on runs made up by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from experiments.idle_compute import experiment
from experiments.idle_compute.course import gold
from experiments.idle_compute.experiment import (
    ALL,
    BOUND,
    CELLS,
    COLD_STEPS,
    EXTREMES,
    K4,
    NUM_POINTS,
    PIPELINE,
    PREAMBLE,
    SYNC,
    T1,
    T2,
    T3,
    TIMED,
    TIMED_SEEDS,
    USUAL_CELLS,
    Outcome,
    Point,
    Timing,
    equal_levels,
    figure,
    group_margin,
    places_at,
    quality,
    quality_table,
    seconds_to,
    section,
    timed,
    timing,
    verdicts,
)
from experiments.lab import Lab, RunFailed, Spec
from experiments.rlhf import LR, SEEDS, Ended
from experiments.section import render
from slipstream.core.types import Completion, Prompt

pytestmark = pytest.mark.usefixtures("resolved_once")

NUM_STEPS = 60
BEGAN = Ended(0.3, 0.5, 0.0, 5.0)


def rising(seed: int, *, per_step: float = 0.005, drift: float = 0.05, num_steps: int = NUM_STEPS) -> Outcome:
    """Wins go up from where the seed begins, drift by as much in each step."""
    begin = 0.3 + 0.01 * seed
    steps = range(0, num_steps + 1, num_steps // NUM_POINTS)
    course = tuple(Point(step, begin + per_step * step, drift * step) for step in steps)
    return Outcome(course, 1.0, Ended(begin, 0.5, 0.0, 5.0), Ended(course[-1].win_rate, 0.8, course[-1].kl, 4.0))


def runs(**changes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    names = {"sync": SYNC, "t1": T1, "t2": T2, "t3": T3, "k4": K4, "all": ALL, "extremes": EXTREMES}
    found = {name: [rising(seed) for seed in SEEDS] for name in CELLS}
    return found | {names[name]: list(group) for name, group in changes.items()}


def timings(sync: float = 0.3, k2: float = 0.2, k4: float = 0.2) -> dict[str, list[Timing]]:
    values = dict(zip(TIMED, (sync, k2, k4), strict=True))
    return {name: [Timing(step_s, 0.05, 0.4)] * len(TIMED_SEEDS) for name, step_s in values.items()}


def said(found: dict[str, list[Outcome]], times: dict[str, list[Timing]] | None = None) -> list[bool | None]:
    """The same runs in both set-ups."""
    return [verdict.holds for verdict in verdicts(found, found, timings() if times is None else times)]


def half(seed: int, **changed: float) -> Outcome:
    """Best and worst of 4: as far in half the steps."""
    one = rising(seed, per_step=0.01, drift=changed.get("drift", 0.15), num_steps=NUM_STEPS // 2)
    after = replace(one.after, win_rate=rising(seed).after.win_rate)
    return replace(one, after=after, margin=changed.get("margin", 1.9))


def test_where_a_run_reaches_a_win_rate():
    one = Outcome((Point(0, 0.25, 0), Point(10, 0.5, 2), Point(20, 0.25, 3), Point(40, 1.0, 7)), 1.0, BEGAN, BEGAN)
    assert one.at(0.2) == one.at(0.25) == Point(0, 0.25, 0)
    assert one.at(0.375) == Point(5, 0.375, 1)  # for the first time: later it falls and rises again
    assert one.at(0.5) == Point(10, 0.5, 2)
    assert one.at(0.625) == Point(30, 0.625, 5)
    assert one.at(1.01) is None
    assert one.mean_win == pytest.approx((0.375 * 10 + 0.375 * 10 + 0.625 * 20) / 40)


def test_equal_levels_are_reached_by_all_that_are_compared():
    found = runs(t2=[rising(seed, per_step=0.002) for seed in SEEDS])
    levels = equal_levels(found, T1, T2)
    assert levels == pytest.approx([0.3 + 0.01 * seed + 0.9 * 0.002 * NUM_STEPS for seed in SEEDS])
    for name, per_step in ((T1, 0.005), (T2, 0.002)):
        steps = [place.step for place in places_at(found, name, levels)]
        assert steps == pytest.approx([0.9 * 0.002 * NUM_STEPS / per_step] * len(SEEDS))


def test_runs_that_gain_next_to_nothing_are_not_compared_where_they_are_equal():
    found = runs(t2=[*(rising(seed) for seed in SEEDS[1:]), rising(0, per_step=0.0008)])
    assert equal_levels(found, T1, T2) is None
    assert said(found)[1] is None
    assert said(found)[2] is None
    assert said(runs(k4=[rising(seed, per_step=-0.001) for seed in SEEDS]))[5:8] == [None, None, None]


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
    assert seconds_to(runs(), timings(), T1, [0.5] * len(SEEDS)) == pytest.approx(
        [0.2 * (0.2 - 0.01 * seed) / 0.005 for seed in SEEDS]
    )


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


def test_claims_about_k_are_of_the_training_bound_runs():
    bound = runs(k4=[half(seed) for seed in SEEDS])
    usual = {name: group for name, group in runs().items() if name in USUAL_CELLS}
    of_k = {name: bound[name] for name in TIMED}
    found = [verdict.holds for verdict in verdicts(usual, of_k, timings(sync=0.5, k4=0.19))]
    assert found == [None, None, None, True, True, True, True, True, None]


def test_to_be_as_good_as_runs_that_never_learn_says_nothing():
    flat = [rising(seed, per_step=0.0) for seed in SEEDS]
    bound = runs() | {T1: flat, K4: flat}
    assert said(bound)[3] is None


def test_no_run_is_made_against_a_reward_model_that_has_not_learned(tmp_path, monkeypatch):
    lab = Lab(tmp_path)
    made: list[str] = []
    monkeypatch.setattr(lab, "run_all", lambda specs: made.extend(spec.name for spec in specs) or [])
    told = {lab.place(pipeline.judge(lab, seed)): 0.9 for pipeline in (PIPELINE, BOUND) for seed in SEEDS}
    told[lab.place(BOUND.judge(lab, 3))] = 0.55
    monkeypatch.setattr(experiment, "reward_accuracy", told.__getitem__)
    with pytest.raises(RunFailed, match=r"rlhf reward model M seed 3: accuracy 0\.55 on held-out pairs"):
        section(lab)
    assert not [name for name in made if "idle_compute" in name]


def test_where_the_trainer_waits_more_nothing_is_said_of_time():
    waiting = {name: [replace(one, trainer_idle=0.5) for one in group] for name, group in timings(sync=0.5).items()}
    found = said(runs(k4=[half(seed) for seed in SEEDS]), waiting)
    assert found[5:7] == [None, None]
    assert found[3:5] == [True, True]


def test_within_the_noise_nothing_is_said():
    mixed = [rising(seed, per_step=0.005 + (-1) ** seed * 0.001, drift=0.05) for seed in SEEDS]
    found = runs(t2=mixed, t3=mixed)
    assert said(found)[:3] == [None, None, None]
    assert said(found)[-1] is None


def test_tables_and_figure_have_every_run():
    rows = quality_table(runs()).splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == list(CELLS)
    assert f" | {NUM_STEPS} | 0.320 (0.020) | 0.620 (0.020) | 3.00 (0.00) | " in rows[2]
    image = figure(runs(), runs(k4=[half(seed) for seed in SEEDS]), timings())
    assert all(name in image for name in (SYNC, T1, T2, T3, K4))


def evaluated(win_rate: float, score: float, kl: float, perplexity: float) -> dict[str, object]:
    """A moment of `evaluation.json`, as far as it is read."""
    return {
        "gold": {"win_rate": {"mean": win_rate}, "mean_score": score},
        "drift": {"kl": {"per_sequence": {"mean": kl}}, "perplexity": {"per_response_token": {"mean": perplexity}}},
    }


class MadeUp(Lab):
    """A win rate of 0.3 at first, 0.9 in the end; best and worst of 4 take half the steps, synchronous steps longer."""

    def run_all(self, specs: Sequence[Spec]) -> list[Path]:
        for spec in specs:
            config, folder = spec.config(), self.place(spec)
            folder.mkdir(exist_ok=True)
            line = json.dumps({"step_s": 2.0 if config.max_staleness == 0 else 0.5})
            (folder / "metrics.jsonl").write_text("\n".join([line] * config.steps))
            rollouts = [{"ordinal": 0, "reward": float(sample)} for sample in range(config.completions_per_group)]
            (folder / "rollouts.jsonl").write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
            told = {"before": evaluated(0.3, 0.6, 0.0, 6.0), "after": evaluated(0.9, 0.9, 2.0, 3.0)}
            (folder / "evaluation.json").write_text(json.dumps(told))
            (folder / "summary.json").write_text(
                json.dumps({"balance": {"idle": {"trainer": 0.0, "generator-0": 0.5}}})
            )
            (folder / "config.json").write_text(json.dumps([config.trainer.epochs, config.completions_per_group]))
        return [self.place(spec) for spec in specs]


def made_up_course(*, run: str, steps: list[int]) -> list[dict[str, float]]:
    epochs, completions = json.loads((Path(run) / "config.json").read_text())
    shares = [step / steps[-1] for step in steps]
    return [
        {"step": step, "win_rate": 0.3 + 0.6 * share, "kl": epochs * completions * share}
        for step, share in zip(steps, shares, strict=True)
    ]


@pytest.mark.slow
def test_a_section_from_the_files_of_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "course", made_up_course)
    found = section(MadeUp(tmp_path))
    text = render("idle_compute", found)
    assert [verdict.holds for verdict in found.verdicts] == [None, True, True, True, False, True, True, True, None]
    assert f"| {K4} | {PIPELINE.updates // 2} | 0.300 (0.000) | 0.900 (0.000) | 2.00 (0.00) |" in text
    assert f"| {SYNC} | 2000 (0) | 0% | 50% |" in text
    assert "at K = 2 generators idle 50% of the time, the trainer 0%" in text


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
        assert config.steps % NUM_POINTS == 0
        assert config.trainer.checkpoint_every * config.trainer.keep_checkpoints == config.steps
        assert len(config.rewards.models) == 1
    for name in TIMED:
        config = quality(lab, name, 1, bound=True).config()
        short = quality(lab, name, 1).config()
        assert (config.steps, config.max_staleness) == (short.steps, short.max_staleness)
        assert config.model.path != short.model.path
        assert config.prompts.template.endswith(short.prompts.template)
        assert len(config.prompts.template) - len(short.prompts.template) == len(PREAMBLE)
        room = config.prompts.max_prompt_tokens + config.generator.max_new_tokens
        assert len(PREAMBLE) + short.prompts.max_prompt_tokens <= config.prompts.max_prompt_tokens
        assert room <= config.model.max_positions
    for name in TIMED:
        config = timed(lab, name, 0).config()
        assert config.model.path == quality(lab, name, 0, bound=True).config().model.path
        assert (config.host, config.stages, config.kl.coef) == ("process", ["rl"], 0.0)
        assert config.trainer.checkpoint_every == 0
        assert not config.rewards.terms  # one station less in the line
        assert timed(lab, name, 0).cores is None


def test_gold_is_what_completion_and_key_have_in_common():
    prompt = Prompt(prompt_id="0", text="*ab*c>", tokens=np.zeros(1, dtype=np.int32), task="posts", answer="ab")
    prompt = msgspec.structs.replace(prompt, columns={"key": "ac"})
    completions = [
        Completion(ordinal=0, sample=0, prompt=prompt, segments=(), text=text, finish_reason="stop")
        for text in ("ca", "a", "bd", "abc")
    ]
    assert [gold(completion) for completion in completions] == pytest.approx([1, 2 / 3, 0, 4 / 5])
