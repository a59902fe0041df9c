"""Every sentence that advises or judges, on runs in which it would be wrong: there it is not said.

`CASES` has an entry for each sentence of the report and `ODD_SERIES` one for what alarms should not ring for; verdicts
are in `test_accounting.py`, comparisons in `test_comparison.py`.
"""

from __future__ import annotations

import functools
import json
import random
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from synthetic_run import make_run_dir, make_summary
from test_health import healthy, watched

from slipstream.core.held_out import Measured
from slipstream.core.jsonl import JsonlWriter
from slipstream.core.observe_sections import AlarmName, HealthConfig
from slipstream.core.recipes import resolve
from slipstream.observe import display, noise
from slipstream.observe.health import RULES, WATCHED_STEPS, Alarm, Health, unfit
from slipstream.observe.report import overview, write_report
from slipstream.observe.report.data import RunData, read_run
from slipstream.observe.samples import Sample
from slipstream.observe.summary import Evaluation, Evaluations, Throughput, write_summary

OLD_S = 3600.0


@pytest.fixture(autouse=True)
def _runs_are_accounted_for() -> None:
    """The runs here are made up, and some of them contradict themselves."""


# The report

Reward = Callable[[int], float]


def flat(step: int) -> float:
    return 0.5


def wobbling(step: int) -> float:
    return 0.5 + random.Random(step).gauss(0, 0.05)


def learning(step: int) -> float:
    return 0.2 + step / 100 + random.Random(step).gauss(0, 0.02)


def saturating(step: int) -> float:
    return min(0.2 + step / 40, 0.9) + random.Random(step).gauss(0, 0.02)


def falling(step: int) -> float:
    return 0.9 - step / 100


def made(
    run_dir: Path,
    *,
    steps: int = 60,
    reward: Reward = wobbling,
    held_out: Mapping[int, float] | None = None,
    sampled: Mapping[int, float] | None = None,
    num_prompts: int = 500,
    score: str = "eval_accuracy",
    error: float | None = None,
    num_judged: int | None = None,
    status: str = "done",
    checkpoint: bool = False,
    refused: bool = False,
    alarms: tuple[Alarm, ...] = (),
    config: str = "",
    line: Mapping[str, Any] | None = None,
    waste: Mapping[str, int] | None = None,
    timeline: bool = False,
    decisions: bool = False,
    has_dial: bool = False,
    resumed: bool = False,
) -> RunData:
    """A run of which everything but this is as it should be. `held_out`: version -> accuracy, of those measured."""
    make_run_dir(run_dir, steps=steps)
    (run_dir / "config.toml").write_text(f"steps = {steps}\n{config}")
    held_out = held_out or {}
    lines = [json.loads(one) for one in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [
        one
        | {"reward": reward(one["step"])}
        | {n: v(one["step"]) if callable(v) else v for n, v in (line or {}).items()}
        for one in lines
        if "reward" in one
    ]
    told = {"eval_reward_error": error, "eval_num_judged": num_judged}
    lines += [{"step": v, "version": v, "wall_s": 0.62 * v, score: value} | told for v, value in held_out.items()]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    judged = {"num_judged": num_judged, "sampled_num_judged": num_judged}
    scores = {v: Evaluation(value, (sampled or {}).get(v), num_prompts, **judged) for v, value in held_out.items()}
    summary = make_summary(
        status=status, steps=steps, eval=Evaluations(before=scores.get(0), after=scores.get(steps)), balance=None
    )
    write_summary(summary, run_dir / "summary.json")
    if checkpoint:
        (run_dir / "checkpoints" / f"step_{steps}").mkdir(parents=True)
    if refused:
        (run_dir / "refused_step_9.json").write_text("{}")
    writer = JsonlWriter(run_dir / "alarms.jsonl")
    writer.write(*alarms)
    writer.close()
    if decisions:
        (run_dir / "events.jsonl").write_text("")
    if timeline:
        (run_dir / "timeline.json").write_text("{}")
    if resumed:
        (run_dir / "attempt_1").mkdir()
    run = read_run(run_dir)
    if has_dial:
        run = replace(run, times=replace(run.times, balance=make_summary().balance))
    if waste is not None and run.times.balance is not None:
        run.times.balance.wasted_tokens.clear()
        run.times.balance.wasted_tokens.update(waste)
    return run


def alarm(event: str, *, severity: str = "warning", name: AlarmName = "ess_collapse") -> Alarm:
    return Alarm(step=9, name=name, event=event, severity=severity, value=0.1, threshold=0.5, text="Bad. Try: x.")  # type: ignore[arg-type]


BEFORE_AND_AFTER = {0: 0.412, 60: 0.934}
SAID, NOT_SAID = True, False
CASES: dict[str, dict[str, tuple[dict[str, Any], str, bool]]] = {
    "learned": {
        "better": ({"held_out": BEFORE_AND_AFTER}, "went from 41.2% to 93.4% (500 prompts, greedy) in 60 steps.", SAID),
        "noise": (
            {"held_out": {0: 0.840, 60: 0.844}},
            "from 84.0% to 84.4% (500 prompts, greedy) in 60 steps, which may be chance.",
            SAID,
        ),
        "few prompts": ({"held_out": {0: 0.4, 60: 0.7}, "num_prompts": 10}, "which may be chance", SAID),
        "few judged": ({"held_out": {0: 0.40, 60: 0.52}, "num_judged": 50}, "which may be chance", SAID),
        "all judged": ({"held_out": {0: 0.40, 60: 0.52}}, "chance", NOT_SAID),
        "few judged of the sampled ones": (
            {"held_out": {0: 0.4, 60: 0.4}, "sampled": {0: 0.40, 60: 0.52}, "num_judged": 50},
            "from 40.0% to 52.0%, which may be chance",
            SAID,
        ),
        "no prompts": ({"held_out": {0: 0.0, 60: 1.0}, "num_prompts": 0}, "which may be chance", SAID),
        "no change": ({"held_out": {0: 0.0, 60: 0.0}}, "chance", NOT_SAID),
        "no change, in words": ({"held_out": {0: 0.0, 60: 0.0}}, "accuracy stayed at 0.0% (500 prompts, greedy)", SAID),
        "no change but of the sampled ones": (
            {"held_out": {0: 0.0, 60: 0.0}, "sampled": {0: 0.02, 60: 0.3}},
            "in 60 steps. Sampled at temperature 1, it went from 2.0% to 30.0%.",
            SAID,
        ),
        "both better": ({"held_out": BEFORE_AND_AFTER, "sampled": {0: 0.02, 60: 0.3}}, "Sampled", NOT_SAID),
        "one step, held out": ({"held_out": {0: 0.1, 1: 0.9}, "steps": 1}, "greedy) in 1 step.", SAID),
        "eval off": ({"reward": learning}, "The reward went from 0.", SAID),
        "eval off, noise": ({"reward": wobbling}, " went from ", NOT_SAID),
        "eval off, constant": ({"reward": flat}, "The reward was 0.500 (mean of 60 steps).", SAID),
        "eval off, short": ({"reward": learning, "steps": 20}, " went from ", NOT_SAID),
        "one step": ({"reward": flat, "steps": 1}, "The reward was 0.500 (mean of 1 step).", SAID),
        "no step": ({"steps": 0}, "No step was trained.", SAID),
    },
    "taught": {
        "nearer": ({"line": {"teacher_kl": falling}}, "The KL to the teacher went from 0.8", SAID),
        "noise": ({"line": {"teacher_kl": wobbling}}, " went from ", NOT_SAID),
        "constant": ({"line": {"teacher_kl": 0.25}}, "The KL to the teacher was 0.25 nats per token.", SAID),
        "alike": (
            {"line": {"teacher_kl": 0.25, "teacher_agreement": 0.9}},
            "0.25 nats per token; at last both like one token best in 90% of places.",
            SAID,
        ),
        "no teacher": ({}, "teacher", NOT_SAID),
        "no step": ({"steps": 0, "line": {"teacher_kl": 0.25}}, "teacher", NOT_SAID),
    },
    "aged": {
        "within its bound": ({}, "2 at most, as promised at most 2.", SAID),
        "beyond its bound": ({"line": {"staleness_tokens/lag_3": 9.0}}, "promised", NOT_SAID),
        "fresh": ({"line": {"staleness_tokens/lag_1": 0, "staleness_tokens/lag_2": 0}}, "as promised at most 2", SAID),
        "no step": ({"steps": 0}, "trained", NOT_SAID),
    },
    "starved": {
        "starving": ({}, "trainer", SAID),
        "one step": ({"steps": 1}, "trainer", NOT_SAID),
        "short": ({"steps": 9}, "trainer", NOT_SAID),
        "no step": ({"steps": 0}, "trainer", NOT_SAID),
    },
    "wasted": {
        "much": (
            {"waste": {"no_signal": 4050, "stale": 100}},
            "Wasted: 51% as many tokens as were trained on, most of them of groups whose rewards",
            SAID,
        ),
        "of several causes": (
            {"waste": {"no_signal": 1000, "stale": 900, "failed": 900}},
            "the largest part of groups whose",
            SAID,
        ),
        "little": ({"waste": {"no_signal": 400}}, "Wasted", NOT_SAID),
        "chosen": ({"waste": {"not_selected": 40_500, "left": 4050}}, "Wasted", NOT_SAID),
        "resumed": (
            {"waste": {"regenerated": 4050}, "resumed": True},
            "most of them sampled again after the run was resumed.",
            SAID,
        ),
        "a process lost": ({"waste": {"regenerated": 4050}}, "because the first copy was lost with a process.", SAID),
        "left by a run that ended early": ({"waste": {"left": 8000}, "status": "interrupted"}, "Wasted", NOT_SAID),
        "short": ({"waste": {"no_signal": 4050}, "steps": 5}, "Wasted", NOT_SAID),
        "no step": ({"waste": {"no_signal": 4050}, "steps": 0}, "Wasted", NOT_SAID),
    },
    "shared": {
        "much": (
            {"steps": 12, "line": {"tokens_unshared": 1000.0, "tokens_read": 600.0}},
            "The trainer computed 7,200 of 12,000 rows, 40% saved where contexts begin alike.",
            SAID,
        ),
        "little": ({"line": {"tokens_unshared": 1000.0, "tokens_read": 960.0}}, "rows", NOT_SAID),
        "of an older version": ({"line": {"tokens_read": 960.0}}, "rows", NOT_SAID),
        "no step": ({"steps": 0}, "rows", NOT_SAID),
    },
    "rang": {
        "one rang": ({"alarms": (alarm("began"),)}, "Alarms that rang: ess_collapse.", SAID),
        "none rang": ({}, "No alarm rang.", SAID),
        "too short for some": ({"steps": WATCHED_STEPS - 1}, "No alarm rang.", NOT_SAID),
        "none watched": ({"config": "[health]\nalarms = false\n"}, "No alarm rang.", NOT_SAID),
    },
    "few_signals": {
        "collapsed": (
            {"steps": 12, "line": {"no_signal_frac": 0.92, "groups_scored": 48.0}},
            "Only 8.0% of the groups had a signal: in the others all completions got the same reward, so nothing is "
            "learned from them and the trainer waits for other groups. Where all fail, try an easier task, a warm",
            SAID,
        ),
        "trained anyway": (
            {"line": {"no_signal_frac": 0.92, "groups_scored": 48.0}, "config": "[loss]\nskip_no_signal = false\n"},
            "trainer waits",
            NOT_SAID,
        ),
        "as the quickstart at its end": ({"line": {"no_signal_frac": 0.67, "groups_scored": 24.0}}, "Only", NOT_SAID),
        "failed": (
            {"line": {"no_signal_frac": 1.0, "groups_scored": 48.0, "scored_failed_frac": 0.9}},
            "Only",
            NOT_SAID,
        ),
        "of a few": ({"steps": 2, "line": {"no_signal_frac": 1.0, "groups_scored": 8.0}}, "Only", NOT_SAID),
        "no step": ({"steps": 0}, "Only", NOT_SAID),
    },
    "go_on": {
        "stopped": ({"status": "interrupted", "checkpoint": True}, "slipstream run --resume", SAID),
        "no checkpoint": ({"status": "interrupted"}, "--resume", NOT_SAID),
        "done": ({"checkpoint": True}, "--resume", NOT_SAID),
        "would fail again": ({"status": "failed", "checkpoint": True, "refused": True}, "--resume", NOT_SAID),
    },
    "alarming": {
        "on at the end": ({"alarms": (alarm("began"),)}, "ess collapse: Bad. Try: x.", SAID),
        "ended": ({"alarms": (alarm("began"), alarm("ended"))}, "ess collapse", NOT_SAID),
        "notice": ({"alarms": (alarm("began", severity="notice"),)}, "ess collapse", NOT_SAID),
        "said already": (
            {"alarms": (alarm("began", name="no_signal"),), "line": {"no_signal_frac": 0.95, "groups_scored": 48.0}},
            "no signal",
            NOT_SAID,
        ),
    },
    "use_idle": {
        "idle": ({"has_dial": True}, "Use what is idle: trainer.epochs = 2 would use it.", SAID),
        "no dial": ({}, "Use what is idle: ", NOT_SAID),
        "short": ({"steps": 9}, "Use what is idle", NOT_SAID),
    },
    "go_further": {
        "rising": ({"reward": learning}, "The reward still rose at the end: more steps may help.", SAID),
        "held-out scores rise, rewards do not": (
            {"reward": flat, "held_out": {0: 0.5, 45: 0.734, 60: 0.850}},
            "Held-out accuracy still rose at the end",
            SAID,
        ),
        "held-out scores fall, rewards rise": (
            {"reward": learning, "held_out": {0: 0.5, 45: 0.850, 60: 0.734}},
            "rose",
            NOT_SAID,
        ),
        "held-out mean rewards rise": (
            {"reward": flat, "held_out": {0: 0.5, 45: 0.734, 60: 0.850}, "score": "eval_reward", "error": 0.022},
            "The held-out mean reward still rose at the end",
            SAID,
        ),
        "held-out mean rewards rise, of any size": (
            {"reward": flat, "held_out": {0: -9.0, 45: -8.0, 60: -7.0}, "score": "eval_reward", "error": 0.1},
            "The held-out mean reward still rose at the end",
            SAID,
        ),
        "held-out mean rewards of a model, whose scores deviate by 3": (
            {"reward": flat, "held_out": {0: 0.1, 45: 0.30, 60: 0.46}, "score": "eval_reward", "error": 3 / 500**0.5},
            "rose",
            NOT_SAID,
        ),
        "held-out mean rewards of unknown spread": (
            {"reward": flat, "held_out": {0: -9.0, 45: -8.0, 60: -7.0}, "score": "eval_reward"},
            "rose",
            NOT_SAID,
        ),
        "held-out mean rewards of unknown spread fall": (
            {"reward": learning, "held_out": {0: -9.0, 45: -7.0, 60: -8.0}, "score": "eval_reward"},
            "rose",
            NOT_SAID,
        ),
        "held-out noise": ({"held_out": {0: 0.5, 45: 0.840, 60: 0.850}}, "rose", NOT_SAID),
        "held-out noise of few judged prompts": (
            {"held_out": {0: 0.5, 45: 0.70, 60: 0.80}, "num_judged": 50},
            "rose",
            NOT_SAID,
        ),
        "held-out scores of prompts that are all judged": (
            {"held_out": {0: 0.5, 45: 0.70, 60: 0.80}},
            "Held-out accuracy still rose",
            SAID,
        ),
        "held-out noise of few prompts": (
            {"held_out": {0: 0.5, 45: 0.7, 60: 0.9}, "num_prompts": 10},
            "rose",
            NOT_SAID,
        ),
        "noise": ({"reward": wobbling}, "rose", NOT_SAID),
        "constant": ({"reward": flat}, "rose", NOT_SAID),
        "saturated": ({"reward": saturating}, "rose", NOT_SAID),
        "falling": ({"reward": falling}, "rose", NOT_SAID),
        "short": ({"reward": learning, "steps": 19}, "rose", NOT_SAID),
        "one step": ({"steps": 1}, "rose", NOT_SAID),
        "ended early": ({"reward": learning, "status": "interrupted"}, "rose", NOT_SAID),
    },
    "open_timeline": {
        "there": ({"timeline": True}, "Open timeline.json", SAID),
        "not there": ({}, "timeline.json", NOT_SAID),
    },
    "watch": {"always": ({"steps": 0}, "slipstream watch", SAID)},
    "put_beside": {"always": ({"steps": 0}, "slipstream report", SAID)},
}
ALL = {sentence.__name__: sentence for sentence in (*overview.SENTENCES, *overview.ADVICE)}


def test_every_sentence_has_its_cases() -> None:
    """A new one needs a run in which it would be wrong; those that only point somewhere have none."""
    assert set(CASES) == set(ALL)
    for name, cases in CASES.items():
        assert name in ("watch", "put_beside") or any(not is_said for _, _, is_said in cases.values()) or len(cases) > 1


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases])
def test_a_sentence_is_said_where_it_holds(name: str, case: str, tmp_path: Path) -> None:
    settings, words, is_said = CASES[name][case]
    told = ALL[name](made(tmp_path, **settings))
    assert (words in told) == is_said, told
    assert "no longer" not in told


@pytest.mark.parametrize("steps", [0, 1, 5, 20, 60])
@pytest.mark.parametrize("status", ["done", "interrupted", "failed"])
def test_a_page_says_of_a_run_what_its_sentences_do(steps: int, status: str, tmp_path: Path) -> None:
    run = made(tmp_path, steps=steps, status=status, reward=learning)
    for told in (overview.sentences(run), overview.advice(run)):
        assert all(sentence.strip() for sentence in told)
        assert len(set(told)) == len(told)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_run_whose_step_takes_long_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_held: bool
) -> None:
    """Nor has one that was interrupted and resumed since: another process holds its folder."""
    monkeypatch.setattr("slipstream.observe.report.data.is_held", lambda _: is_held)
    made(tmp_path, status="interrupted", checkpoint=True)
    run = read_run(tmp_path)
    assert overview.status_of(run) == ("running" if is_held else "interrupted")
    assert bool(overview.go_on(run)) != is_held
    (tmp_path / "summary.json").unlink()
    run = replace(read_run(tmp_path), written_s=OLD_S)
    assert overview.status_of(run) == ("running" if is_held else "not finished")
    assert bool(overview.go_on(run)) != is_held


def test_commands_can_be_copied_whatever_the_folder_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    made(folder, status="interrupted", checkpoint=True)
    run = read_run(folder)
    for told in (overview.go_on(run), overview.watch(run), overview.put_beside(run)):
        assert str(folder) in shlex.split(told.partition(": ")[2])
    assert run.summary is not None
    run = replace(run, summary=msgspec.structs.replace(run.summary, resume_call="jobs/a/submit.sh"))
    assert overview.go_on(run) == "Go on from the last checkpoint: jobs/a/submit.sh", "its groups are elsewhere"


NOTES = {
    "a bound that was broken": ({"line": {"staleness_tokens/lag_3": 9.0}}, "The bound holds for every token", NOT_SAID),
    "a bound that was kept": ({}, "The bound holds for every token", SAID),
    "a synchronous run": ({"config": "max_staleness = 0\n"}, "should go on decoding", NOT_SAID),
    "nothing trained": ({"steps": 0, "decisions": True}, "every sampled token was trained on", NOT_SAID),
    "all trained": ({"decisions": True}, "every sampled token was trained on", SAID),
    "functions from Python": ({}, "Enough to repeat it", NOT_SAID),
    "rewards that are no verdicts": ({}, "all right or all wrong", NOT_SAID),
    "lengths": ({}, "short answers are preferred", NOT_SAID),
}


@pytest.mark.parametrize("case", NOTES)
def test_a_note_beside_a_picture_holds_in_its_run(case: str, tmp_path: Path) -> None:
    settings, words, is_said = NOTES[case]
    made(tmp_path, **settings)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert (words in page) == is_said


# Trends and differences


@pytest.mark.parametrize("correlation", [0.0, 0.7])
def test_noise_alone_seldom_rises_whether_its_neighbours_are_alike_or_not(correlation: float) -> None:
    rng = np.random.default_rng(0)
    num_rising = 0
    for _ in range(400):
        values = [0.0]
        for shock in rng.normal(0, 1, 99):
            values.append(correlation * values[-1] + shock)
        num_rising += noise.rises(values)
    assert num_rising <= 12  # at three standard errors one in 700, were they known; of 25 values they are not quite


def test_what_rises_by_more_than_its_noise_does() -> None:
    rng = np.random.default_rng(0)
    found = [noise.rises((0.1 * np.arange(100) + rng.normal(0, 0.3, 100)).tolist()) for _ in range(50)]
    assert all(found)
    assert not noise.rises([float(i) for i in range(noise.LEAST_TREND - 1)])
    assert not noise.rises([])


def test_differences_of_noise_are_within_two_errors_nineteen_times_in_twenty() -> None:
    rng = np.random.default_rng(0)
    pairs = [rng.normal(0, 1, (2, 50)).tolist() for _ in range(400)]
    means = [(noise.mean_of(a), noise.mean_of(b)) for a, b in pairs]
    assert sum(a.differs(b) for a, b in means if a and b) <= 32
    shares = rng.binomial(200, 0.9, (400, 2)) / 200
    assert sum(noise.share(a, 200).differs(noise.share(b, 200)) for a, b in shares) <= 32
    assert noise.share(0.9, 200).differs(noise.share(0.8, 200))


def test_what_rests_on_too_little_differs_from_nothing() -> None:
    few = noise.mean_of([1.0] * (noise.LEAST_VALUES - 1))
    assert few is not None
    assert few.error is None
    assert not few.differs(noise.Estimate(9.0, 0.1))
    assert not noise.Estimate(9.0, 0.1).differs(few)
    assert noise.mean_of([]) is None
    assert not noise.share(0.0, 0).differs(noise.share(1.0, 500))
    assert noise.share(-3.0, 500).error is None, "a mean reward is no share"


# Alarms


def without_signal(rng: np.random.Generator, step: int, *, reward: float, failed: float) -> dict[str, Any]:
    """Rewards that never differ: no gradient, but for a step in which one did; entropy sinks by itself."""
    return healthy(rng, step) | {
        "reward": reward, "reward_std": 0.0, "no_signal_frac": 1.0, "scored_failed_frac": failed,
        "entropy": 0.8 * 0.9**step, "grad_norm": 0.5 if step % 9 == 0 else 0.0,
    }  # fmt: skip


def dreadful(step: int) -> dict[str, Any]:
    """Every number as bad as can be."""
    return {
        "step": step, "step_s": 0.3, "reward": 0.0, "reward_std": 0.3, "entropy": 0.0, "ess": 0.01, "clipped_frac": 1.0,
        "kl_k2": 9.0, "kl_reference": 9.0, "grad_norm": 1e9, "completion_tokens_mean": 1e3, "truncated_frac": 1.0,
        "no_signal_frac": 1.0, "publish_skipped_frac": 1.0, "version_lag_excess": 9.0, "logprob_diff_mean/lag_0": 9.0,
        "wait_frac/trainer/wait_generation": 0.99, "wait_frac/generator-0/wait_trainer": 0.99,
    }  # fmt: skip


Series = Callable[[np.random.Generator, int], dict[str, Any]]
ODD_SERIES: dict[str, tuple[Series, int, set[AlarmName]]] = {
    "one step": (lambda rng, step: dreadful(step), 1, set()),
    "a few steps": (lambda rng, step: dreadful(step), 4, set()),
    "nothing but noise": (lambda rng, step: healthy(rng, 0), 160, set()),
    "no completion": (lambda rng, step: {"step": step, "step_s": 0.3}, 160, set()),
    "solved from the start": (lambda rng, step: without_signal(rng, step, reward=1.0, failed=0.0), 160, {"no_signal"}),
    "never right": (lambda rng, step: without_signal(rng, step, reward=0.0, failed=0.0), 160, {"no_signal"}),
    "every reward failed": (
        lambda rng, step: without_signal(rng, step, reward=0.0, failed=1.0),
        160,
        {"failed_rewards"},
    ),
    "ratios of whole completions": (
        lambda rng, step: healthy(rng, step) | {"clipped_frac": 0.65, "sequence_ratio": 0.998},
        160,
        set(),
    ),
    "gradients now and then": (
        lambda rng, step: healthy(rng, step) | {"grad_norm": 2.0 if step % 7 == 0 else 0.0},
        160,
        set(),
    ),
    "slow progress at low entropy": (
        lambda rng, step: (
            healthy(rng, step) | {"entropy": 0.8 * 0.96**step, "reward": 0.2 + 0.0018 * step, "reward_std": 0.4}
        ),
        160,
        set(),
    ),
}


@pytest.mark.parametrize("name", ODD_SERIES)
def test_alarms_do_not_ring_for_odd_runs(name: str) -> None:
    series, steps, expected = ODD_SERIES[name]
    rng = np.random.default_rng(0)
    assert {one.name for one in watched(series(rng, step) for step in range(steps))} <= expected


WAITING = {
    "wait_frac/trainer/wait_generation": 0.9,
    "wait_frac/generator-0/wait_trainer": 0.9,
    "wait_frac/generator-1/wait_trainer": 0.9,
}
CHOSEN: dict[str, tuple[dict[str, Any], dict[str, float], set[AlarmName]]] = {
    "synchronous": (
        {"max_staleness": 0, "weight_update": "between_batches"},
        {**WAITING},
        {"starving_trainer", "starving_generator"},
    ),
    "one process": (
        {"host": "inline"},
        {**WAITING, "wait_frac/trainer/wait_straggler": 0.9},
        {"starving_trainer", "starving_generator", "straggler"},
    ),
    "no bound": ({"schedule": {"policy": "areal"}}, {"version_lag_excess": 5.0}, {"version_lag"}),
    "weights in 8 bits": (
        {"generator": {"precision": "int8"}},
        {"logprob_diff_mean/lag_0": 0.14},
        {"logprob_mismatch"},
    ),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_alarms_do_not_ring_for_what_was_chosen(name: str) -> None:
    overrides, numbers, silent = CHOSEN[name]
    assert unfit(resolve("quickstart")) == set()
    config = resolve("quickstart", overrides=overrides)
    assert unfit(config) == silent
    for is_silent in (True, False):
        rng = np.random.default_rng(0)
        health = Health(HealthConfig(), silent=unfit(config) if is_silent else ())
        rung = {one.name for step in range(60) for one in health.update(healthy(rng, step) | numbers)}
        assert rung == (set() if is_silent else silent)


def test_no_alarm_needs_more_steps_than_it_is_said_that_none_rang_after() -> None:
    """The last of them would have rung by then."""
    for rule in RULES.values():
        longest = next((steps for steps in range(1, 99) if rule.statistic(_history(steps)) is not None), None)
        assert longest is None or longest + rule.persist - 1 <= WATCHED_STEPS


@functools.cache
def _history(steps: int) -> Any:
    health = Health(HealthConfig())
    rng = np.random.default_rng(0)
    for step in range(steps):
        health.update(healthy(rng, step))
    return vars(health)["_history"]


# The terminal's last lines


def finished(capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    shown = display.Display({"recipe": "q"}, steps=1, max_staleness=2)
    shown.finish(make_summary(**changes), {})
    return capsys.readouterr().out


def test_a_run_that_ended_before_its_first_step_has_no_rates_and_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    none = Throughput(None, None, None)
    staleness = make_summary().staleness
    empty = type(staleness)(max=0, mean=0.0, bound=2, histogram={}, updates_max=0)
    balance = type(make_summary().balance)  # of no step: nothing can be told
    nothing = make_summary().balance
    assert nothing is not None
    told = finished(
        capsys,
        status="interrupted",
        steps=0,
        throughput=none,
        staleness=empty,
        eval=Evaluations(),
        balance=balance(
            idle={},
            interference=nothing.interference,
            wasted_tokens={},
            starves=None,
            bottleneck=None,
            verdict="",
            split=None,
            dial=None,
        ),
    )
    assert "interrupted: 0 steps in 12 s\n" in told
    for word in ("tokens/s", "staleness", "None"):
        assert word not in told
    assert "\n\n" not in told


def test_the_time_of_a_resumed_run_is_that_of_all_attempts(capsys: pytest.CaptureFixture[str]) -> None:
    assert "done: 20 steps in 1 min 12 s, 1 min 00 s of it before the resume  gen" in finished(capsys, earlier_s=60.0)
    assert "done: 20 steps in 12 s  generated" in finished(capsys)


def test_the_last_lines_say_where_a_tracker_writes_and_what_adapters_train(capsys: pytest.CaptureFixture[str]) -> None:
    config = resolve("quickstart", {"model": {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}}})
    shown = display.Display(display.config_summary(config), steps=1, max_staleness=2)
    shown.finish(make_summary(adapter_params=1_500), {"tensorboard": Path("runs/q/tensorboard")})
    lines = capsys.readouterr().out.splitlines()
    assert "adapters LoRA rank 4 on q_proj, v_proj   " in lines[0]
    assert "LoRA rank 4 on q_proj, v_proj, 1,500 trainable of 651,500 parameters" in lines
    assert lines[-1] == "tensorboard runs/q/tensorboard   look: tensorboard --logdir runs/q/tensorboard"
    assert (
        "on every linear layer but experts and the head"
        in resolve("quickstart", {"model.lora.rank": 4}).model.lora.in_words
    )


def test_an_interrupted_run_has_no_column_of_answers_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    shown = display.Display({"recipe": "q"}, steps=1, max_staleness=2)
    shown.samples([Sample(prompt="abc>", answer="cba", before="abc", after=None)])
    cells = [[cell.strip() for cell in re.split("[│┃]", line)] for line in capsys.readouterr().out.splitlines()]
    assert [row for row in cells if len(row) > 1] == [["prompt", "answer", "before"], ["abc>", "cba", "abc"]]


def test_a_mean_reward_within_its_error_may_be_chance() -> None:
    before, after = Measured(0.651, reward_error=0.12), Measured(0.842, reward_error=0.1)
    assert overview.reward_may_be_chance(before, after) == ", which may be chance"
    assert overview.reward_may_be_chance(before, replace(after, reward=1.4)) == ""
    assert overview.reward_may_be_chance(before, replace(after, reward_error=None)) == "", "nothing is known of it"
