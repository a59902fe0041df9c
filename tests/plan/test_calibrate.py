"""Calibration from a run's files, held against the costs that the run was really made with."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from covering import with_slow
from recorded_simulation import WrittenRun

from slipstream.cli import main
from slipstream.controller.policies import schedule_for
from slipstream.controller.replay import replay
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.core.types import CompletionFinished
from slipstream.plan import fits
from slipstream.plan.calibrate import calibrate, scoring
from slipstream.plan.fits import Pieces, fit
from slipstream.plan.recorded import (
    RecordedRun,
    RecordedWorkload,
    groups_of,
    learning_exponent,
    measured,
    prompt_tokens_per_char,
    read_run,
)
from slipstream.plan.simulated_run import Batch, Costs, GroupWork
from slipstream.plan.simulator import simulate
from slipstream.plan.what_if import as_simulated, changed_config, predict, setup_of, what_if

STEP_S, ROW_S = 0.004, 0.0002
MICROBATCH_S, TOKEN_S = 0.03, 0.0004
COLLATE_S, OPTIMIZER_S = 0.001, 0.01
BESIDE = {"train": 0.7, "decode": 0.8}
CORES = 2


def true_costs() -> Costs:
    def train(batch: Batch) -> dict[str, float]:
        rows = batch.prompt_tokens + batch.completion_tokens - batch.completions
        return {
            "forward_backward": 2 * MICROBATCH_S + rows * TOKEN_S,
            "optimizer": 2 * OPTIMIZER_S,
            "collate": batch.completions * COLLATE_S,
        }

    return Costs(
        decode=lambda _, rows, __: STEP_S + ROW_S * rows,
        prefill=lambda _, tokens, is_alone: ROW_S * tokens + STEP_S * is_alone,
        train=train,
        send_s=0.0003,
        publish_s=0.02,
        receive_s=0.0004,
        wake_s=0.0006,
        record_s=0.0001,
        score_s=0.002,
        to_controller_s=0.003,
        to_generator_s=0.004,
        to_trainer_s=0.005,
        to_rewards_s=0.006,
    )


class Words:
    """Groups whose lengths grow with the step; one in six is without signal."""

    def group(self, ordinal, step):
        rng = np.random.default_rng(ordinal)
        lengths = rng.integers(4, 12 + round(step * self.pace) // 2, self.samples)
        return GroupWork(int(rng.integers(4, 9)), tuple(lengths.tolist()), ordinal % 6 != 1)

    def held_out(self, version):
        return ()

    def __init__(self, samples: int = 4, groups_per_step: int = 12) -> None:
        self.samples, self.pace = samples, (groups_per_step * samples / 48) ** 0.5  # as is usual


def config(**changes) -> RunConfig:
    """Never run: a run's dials, as far as they are simulated."""
    dials = {
        "steps": 40,
        "groups_per_step": 12,
        "completions_per_group": 4,
        "max_staleness": 1,
        "eval": {"num_prompts": 1},
        "generator": {"num_slots": 24},
        "trainer": {"minibatches": 2, "checkpoint_every": 0},
        "warm_start": {"steps": 0},
    }
    return resolve(resolve("quickstart", dials).model_dump(), changes)


def truth(of: RunConfig):
    """What the true costs make of a configuration."""

    class True_:
        cores, train, decode = CORES, fits.Fit({}, {1: 1.0}, BESIDE["train"], 0.0, ()), None
        background = 0.1

    True_.decode = replace(True_.train, beside=BESIDE["decode"])
    return replace(setup_of(of, True_), evaluates_first=0, workers=0)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "recorded"
    found = WrittenRun(config(), truth(config()), Words(), true_costs(), folder, (MICROBATCH_S, TOKEN_S)).write()
    return folder, found


@pytest.fixture(scope="module")
def told(run):
    return calibrate([run])


@pytest.fixture(scope="module")
def run(recorded):
    """As it is read; tests take copies with other lines."""
    return read_run(recorded[0])


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A run of fewer steps, for what is read anew."""
    few, folder = config(steps=12), tmp_path_factory.mktemp("runs") / "short"
    WrittenRun(few, truth(few), Words(), true_costs(), folder, (MICROBATCH_S, TOKEN_S)).write()
    return folder


@pytest.fixture
def read_already(recorded, told, run, monkeypatch):
    """What is asked of the recorded run is answered from what has been read of it."""
    monkeypatch.setattr("slipstream.plan.what_if.read_run", lambda at: run if Path(at) == recorded[0] else read_run(at))
    monkeypatch.setattr("slipstream.plan.what_if.calibrate", lambda runs: told)


def test_what_was_measured_is_what_happened(recorded, run):
    _, found = recorded
    outcome = measured(run)
    assert outcome.steps == 40
    assert outcome.step_s == pytest.approx(found.timed[-1].done_s / 40, rel=0.01)  # less the last word on its way
    assert outcome.staleness == dict(sorted(found.lags.items()))
    assert outcome.staleness_mean == pytest.approx(found.outcome.staleness_mean)
    assert outcome.idle["trainer"] == pytest.approx(found.outcome.idle["trainer"], abs=0.01)
    assert outcome.idle["generator"] == pytest.approx(found.outcome.idle["generator"], abs=0.01)
    assert outcome.generated_tokens_per_s == pytest.approx(found.outcome.generated_tokens_per_s, rel=0.03)


def test_tokens_that_a_resume_brought_were_sampled_before(run):
    def restored(line):
        is_news = isinstance(line.event, CompletionFinished)
        event = msgspec.structs.replace(line.event, num_restored=line.event.num_tokens) if is_news else line.event
        return msgspec.structs.replace(line, event=event)

    assert measured(run).generated_tokens_per_s > 0
    assert measured(replace(run, events=[restored(line) for line in run.events])).generated_tokens_per_s == 0


def test_the_true_costs_are_found(told):
    assert told.cores == CORES
    assert told.train.beside == pytest.approx(BESIDE["train"], abs=0.03)
    assert told.decode.beside == pytest.approx(BESIDE["decode"], abs=0.03)
    assert told.train.terms == pytest.approx({"microbatches": MICROBATCH_S, "tokens": TOKEN_S}, rel=0.05)
    assert told.decode.seconds(1, steps=1, rows=24) == pytest.approx(STEP_S + 24 * ROW_S, rel=0.03)
    assert told.decode.seconds(1, steps=1, rows=8) == pytest.approx(STEP_S + 8 * ROW_S, rel=0.1)
    true = true_costs()
    for name in ("send", "record", "publish"):
        assert told.seconds[name] == pytest.approx(vars(true)[f"{name}_s"], rel=0.05), name
    assert told.seconds["optimizer"] == pytest.approx(OPTIMIZER_S, rel=0.05)
    assert told.seconds["collate"] == pytest.approx(COLLATE_S, rel=0.05)
    assert told.seconds["receive"] == pytest.approx(true.receive_s, rel=0.1)
    assert told.seconds["wake"] == pytest.approx(true.wake_s, rel=0.2)
    assert told.seconds["to_controller"] == pytest.approx(true.to_controller_s, rel=0.05)
    assert told.seconds["to_trainer"] == pytest.approx(true.to_trainer_s, rel=0.1)
    assert told.seconds["to_rewards"] == pytest.approx(true.to_rewards_s + true.score_s, rel=0.1)


CHANGES = {
    "k = 3": {"max_staleness": 3},
    "in turns": {"max_staleness": 0, "weight_update": "between_batches"},
    "two replicas": {"generator": {"replicas": 2}},
    "a small batch": {"groups_per_step": 6},
    "more samples": {"completions_per_group": 8},
}


USUAL = "in turns"


@pytest.mark.parametrize("name", with_slow([USUAL], [name for name in CHANGES if name != USUAL]))
def test_another_run_is_predicted_from_the_files_of_one(told, name):
    """The truth is a simulation with the true costs, and with lengths of its own."""
    changed = config(**CHANGES[name])
    samples = changed.completions_per_group
    costs = true_costs()
    if changed.max_staleness == 0:  # with both cores to itself, a process of two threads is as fast as two beside
        costs = with_two_threads(costs)
    words = Words(samples, changed.groups_per_step)
    real = simulate(schedule_for(changed), truth(changed), words, costs, seed=1)
    seeds = 2 if name == USUAL else 4  # which completions are drawn makes 4 % of a step, and 2 % in turns
    predicted = predict(told, changed, seeds=seeds)
    assert predicted.step_s == pytest.approx(real.outcome.step_s, rel=0.06)
    assert predicted.idle["trainer"] == pytest.approx(real.outcome.idle["trainer"], abs=0.04)
    assert predicted.idle["generator"] == pytest.approx(real.outcome.idle["generator"], abs=0.04)
    assert predicted.staleness_mean == pytest.approx(real.outcome.staleness_mean, rel=0.08, abs=0.01)


def with_two_threads(costs: Costs) -> Costs:
    """What two threads make of forward-backward and decoding where `BESIDE` is all that slows them."""

    def train(batch: Batch) -> dict[str, float]:
        states = dict(costs.train(batch))
        return states | {"forward_backward": states["forward_backward"] / (2 * BESIDE["train"])}

    return replace(
        costs,
        decode=lambda *what: costs.decode(*what) / (2 * BESIDE["decode"]),
        prefill=lambda *what: costs.prefill(*what) / (2 * BESIDE["decode"]),
        train=train,
    )


def test_what_if_tells_three_outcomes(recorded, run, told, read_already, tmp_path):
    folder, found = recorded
    result = what_if(folder, {"max_staleness": 3, "generator.replicas": 2}, seeds=1, events=tmp_path / "events.jsonl")
    assert result.overrides == {"max_staleness": 3, "generator": {"replicas": 2}}
    assert result.as_it_was.step_s == pytest.approx(found.outcome.step_s, rel=0.04)
    assert result.as_it_was.staleness_mean == pytest.approx(found.outcome.staleness_mean, rel=0.05)
    assert result.changed.staleness_max > result.as_it_was.staleness_max
    assert result.to_dict()["changed"]["step_s"] == result.changed.step_s
    replayed = replay(tmp_path / "events.jsonl")
    assert replayed.is_sound
    assert replayed.num_steps == 40
    same = what_if(folder, seeds=1)
    alone = predict(told, changed_config(as_simulated(run), {"max_staleness": 3}), seeds=1)
    assert result.changed != alone, "two replicas are not one"
    assert not same.is_changed
    assert same.changed == same.as_it_was == result.as_it_was, "the same seeds, the same completions"


def test_a_slower_reward_is_a_dial(recorded, read_already):
    """Each of 48 completions a step takes its one worker 50 ms."""
    result = what_if(recorded[0], reward_s=0.05, seeds=1)
    assert result.changed.step_s == pytest.approx(48 * 6 / 5 * 0.05, rel=0.1), "one in six is scored for nothing"
    assert result.changed.idle["trainer"] > 0.5


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        ({"model.num_layers": 4}, "model.num_layers"),
        ({"generator": {"max_new_tokens": 5}}, "generator.max_new_tokens"),
        ({"reorder_window": 1000}, "reorder_window"),
        ({"max_stalness": 1}, "max_stalness"),
    ],
)
def test_what_no_file_tells_is_refused(recorded, read_already, overrides, what):
    with pytest.raises(ConfigError, match=what):
        what_if(recorded[0], overrides, seeds=1)


def test_what_is_no_run_is_refused(tmp_path, recorded, read_already):
    with pytest.raises(ConfigError, match=r"no config\.toml"):
        what_if(tmp_path)
    with pytest.raises(ConfigError, match="unknown preset 'fast'"):
        what_if(recorded[0], preset="fast")
    with pytest.raises(ConfigError, match="contradict"):
        what_if(recorded[0], {"max_staleness": 4}, preset="sync")
    with pytest.raises(ConfigError, match="seeds"):
        what_if(recorded[0], seeds=0)


def test_a_run_without_all_of_its_events_is_not_simulated(recorded, tmp_path):
    shutil.copytree(recorded[0], tmp_path / "cut")
    path = tmp_path / "cut" / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[20:]))
    with pytest.raises(ConfigError, match="20 events are missing"):
        read_run(tmp_path / "cut")


@pytest.mark.parametrize(("workers", "score_s"), [(1, 0.004), (4, 0.02), (2, 0.0005)])
def test_scoring_is_told_from_the_way_to_it(run, workers, score_s):
    """Batches of finished completions, a queue before the workers, and 5 ms on the way, with some noise."""
    rng = np.random.default_rng(0)
    free, lines, at = [0.0] * workers, [], 0.0
    for number in range(600):
        at += 0.05 * (number % 8 == 0)
        begin = max(at + 0.005, min(free))
        free[free.index(min(free))] = begin + score_s
        scored_s = begin + score_s + rng.exponential(1e-4)
        lines.append(msgspec.structs.replace(run.rollouts[0], ordinal=number, finished_s=at, scored_s=scored_s))
    changed = run.config.model_copy(update={"rewards": run.config.rewards.model_copy(update={"num_workers": workers})})
    on_the_way, found = scoring(replace(run, config=changed, rollouts=lines))
    assert found == pytest.approx(score_s, rel=0.15)
    assert on_the_way == pytest.approx(0.005, abs=0.0015)


def test_a_run_that_selects_trains_on_that_part_of_its_groups(told):
    """Two of four completions with as many tokens are what a run on all of them reads of groups of two."""
    pairs = {"loss": {"name": "online_dpo", "select": "best_and_worst", "advantages": "group_mean"}}
    chosen, whole = (told.costs(config(**changes)) for changes in (pairs, {}))
    seconds, expected = (
        costs.train(Batch(groups=12, completions=count, prompt_tokens=72, completion_tokens=count * 20))
        for costs, count in ((chosen, 48), (whole, 24))
    )
    assert seconds["forward_backward"] == expected["forward_backward"]


# Lengths


def test_prompts_are_what_was_read_besides_the_completions_that_were_selected(run):
    """Of each group the shortest and the longest: a token for each of the prompt's characters, as it was written."""
    metrics = []
    for line in run.metrics:
        groups = itertools.groupby((one for one in run.rollouts if one.step == line["step"]), lambda one: one.ordinal)
        groups = [sorted(group, key=lambda one: one.num_tokens) for _, group in groups]
        chosen = [one for group in groups for one in (group[0], group[-1])]
        rows = sum(len(one.prompt) + one.num_tokens - 1 for one in chosen)
        trained = sum(one.num_tokens for one in chosen)
        metrics.append(line | {"tokens_trained": float(trained), "tokens_unshared": float(rows)})
    loss = run.config.loss.model_copy(update={"select": "best_and_worst"})
    chosen = replace(run, metrics=metrics, config=run.config.model_copy(update={"loss": loss}))
    assert prompt_tokens_per_char(chosen) == pytest.approx(1.0)
    assert prompt_tokens_per_char(run) == pytest.approx(1.0)


def test_the_same_dials_ask_for_the_same_groups(run):
    work = RecordedWorkload([run], groups_per_step=12, samples=4, num_held_out=0)
    for ordinal in (0, 1, 50, 200):
        true = Words().group(ordinal, 0)
        told = work.group(ordinal, 99)
        assert len(told.lengths) == 4
        assert told.has_signal == true.has_signal
        assert told.prompt_tokens == true.prompt_tokens


def test_other_dials_draw_groups_of_the_same_time(run):
    """Lengths grow with the step; with twice the samples a group has its own, and they are of that time."""
    work = RecordedWorkload([run], groups_per_step=6, samples=8, num_held_out=300)
    early, late = ([work.group(o, step).lengths for o in range(150)] for step in (2, 37))
    assert all(len(lengths) == 8 for lengths in early)
    recorded = {group.ordinal: group for group in groups_of(run)}
    for found, steps in ((early, range(5)), (late, range(35, 40))):
        of_then = [n for group in recorded.values() if group.step in steps for n in group.lengths]
        assert np.mean(found) == pytest.approx(np.mean(of_then), rel=0.05)
    assert np.mean(late) > 1.5 * np.mean(early)
    assert work.group(3, 5) == work.group(3, 5)
    held_out = [group.lengths[0] for group in work.held_out(37)]
    assert len(held_out) == 300
    assert np.mean(held_out) == pytest.approx(np.mean(late), rel=0.1)


def learned(run: RecordedRun, groups_per_step: int, exponent: float, steps: int = 60) -> RecordedRun:
    """What is left without signal grows with step x P^exponent; that of step s has s + 1 tokens."""
    rng, lines, ordinal = np.random.default_rng(groups_per_step), [], 0
    for step in range(steps):
        share = 0.8 * (1 - np.exp(-step * groups_per_step**exponent / 300))
        trained = 0
        while trained < groups_per_step:
            has_signal = bool(rng.random() >= share)
            trained += has_signal
            told = {"ordinal": ordinal, "sample": 0, "step": step if has_signal else None, "num_tokens": step + 1}
            lines.append(msgspec.structs.replace(run.rollouts[0], **told))
            ordinal += 1
    return replace(run, config=run.config.model_copy(update={"groups_per_step": groups_per_step}), rollouts=lines)


@pytest.mark.parametrize("exponent", [0.2, 0.6, 0.9])
def test_how_much_faster_larger_batches_learn_is_seen_in_their_signals(run, exponent):
    runs = [learned(run, size, exponent) for size in (16, 32)]
    assert learning_exponent(runs) == pytest.approx(exponent, abs=0.11)
    assert learning_exponent(runs[:1]) == 0.5


def test_groups_for_another_batch_size_are_those_of_a_policy_that_was_as_far(run):
    runs = [learned(run, size, 0.6) for size in (16, 32)]
    work = RecordedWorkload(runs, groups_per_step=64, samples=4, num_held_out=0)
    pace = 4 ** learning_exponent(runs)
    lengths = [work.group(ordinal, 10).lengths[0] for ordinal in range(400)]
    of_16 = [length for length in lengths if abs(length - 1 - 10 * pace) < abs(length - 1 - 10 * pace**0.5)]
    assert np.mean(of_16) - 1 == pytest.approx(10 * pace, abs=3)
    assert np.mean([one for one in lengths if one not in of_16]) - 1 == pytest.approx(10 * pace**0.5, abs=3)


# Fits


def rates_of(overlap: np.ndarray, threads: int) -> np.ndarray:
    """The rates of spans of time that overlap with one other thread for these shares of them, on two cores."""
    if threads == 2:
        return np.stack([0 * overlap, 1 - overlap + overlap * 2 / 3], axis=1)
    return np.stack([1 - overlap, overlap], axis=1)


def test_a_noisy_run_does_not_spoil_what_others_tell():
    """Of another number of threads, a few of its pieces taking six times as long: what one thread takes is known."""
    quiet = pieces(0, beside=0.6, threads=1, speed=1.0, noise=0.02)
    noisy = pieces(1, beside=0.6, threads=2, speed=1.3, noise=0.02)
    seconds = noisy.seconds.copy()
    seconds[::40] *= 6
    told = fit(("microbatches", "tokens"), CORES, [quiet, replace(noisy, seconds=seconds)])
    alone = fit(("microbatches", "tokens"), CORES, [quiet])
    for tokens in (8, 64):
        size = {"microbatches": 1, "tokens": tokens}
        assert told.seconds(1, **size) == pytest.approx(alone.seconds(1, **size), rel=0.04)
    assert told.beside == pytest.approx(alone.beside, abs=0.03)


def pieces(seed: int, beside: float, threads: int, speed: float, noise: float, overlap=None) -> Pieces:
    rng = np.random.default_rng(seed)
    count = 400
    overlap = rng.random(count) if overlap is None else np.full(count, overlap)
    counts = np.stack([np.ones(count), rng.integers(1, 9, count) * 8.0], axis=1)
    work = counts @ np.array([0.004, 0.0003]) / speed * rng.gamma(1 / noise**2, noise**2, count)
    rates, own = rates_of(overlap, threads), 1.0 if threads == 1 else beside
    seconds = work / (rates @ np.array([1.0, beside]) / own)
    return Pieces(seconds, counts, np.ones(count), rates, np.full(count, threads), np.full(count, seed))


@pytest.mark.parametrize("noise", with_slow([0.5], [0.02]))
def test_a_fit_finds_costs_and_interference_in_noise(noise):
    found = fit(("steps", "rows"), CORES, [pieces(seed, 0.6, 1, 1.0, noise) for seed in range(4)])
    assert found.beside == pytest.approx(0.6, abs=0.02 + 0.1 * noise)
    expected = 0.004 + 0.0003 * 36
    assert found.seconds(1, steps=1, rows=36) == pytest.approx(expected, rel=0.02 + 0.1 * noise), "no bias by noise"
    assert found.error == pytest.approx(noise, rel=0.15)


def test_a_fit_over_runs_finds_the_speed_of_threads():
    found = fit(("steps", "rows"), CORES, [pieces(0, 0.6, 1, 1.0, 0.1), pieces(1, 0.6, 2, 1.3, 0.1, overlap=0.0)])
    assert found.speed(2) / found.speed(1) == pytest.approx(1.3, rel=0.05)
    assert found.beside == pytest.approx(0.6, abs=0.03)


def test_work_at_low_priority_is_told_by_when_there_was_a_core():
    """Jobs of 40 ms, which get 0.3 of a core where there is none."""
    rng = np.random.default_rng(0)
    alone = rng.random(60) * 0.04
    work, share = fits.fit_background(list(zip(alone, (0.04 * rng.normal(1, 0.05, 60) - alone) / 0.3, strict=True)))
    assert work == pytest.approx(0.04, rel=0.05)
    assert share == pytest.approx(0.3, rel=0.2)
    assert fits.fit_background([(0.0, 0.4)] * 9)[1] == pytest.approx(0.1, rel=0.1), "nobody could tell"


def test_a_run_on_a_slow_day_says_nothing_of_sizes():
    """Two runs with pieces of one size each, the small ones on a day that was a fifth slower: within each run sizes
    vary a little, and that is what tells."""
    rng = np.random.default_rng(0)
    parts = []
    for run, (rows, slow) in enumerate(((16.0, 1.2), (64.0, 1.0))):
        counts = np.stack([np.ones(400), rows * rng.uniform(0.8, 1.2, 400)], axis=1)
        seconds = counts @ np.array([0.004, 0.0003]) * slow * rng.gamma(400, 1 / 400, 400)
        rates, ones = rates_of(np.zeros(400), 1), np.ones(400, dtype=int)
        parts.append(Pieces(seconds, counts, ones, rates, ones, run * ones))
    found = fit(("steps", "rows"), CORES, parts)
    middle = found.seconds(1, steps=1, rows=32)
    assert found.seconds(1, steps=1, rows=64) / middle == pytest.approx((4 + 19.2) / (4 + 9.6), rel=0.04)
    assert found.seconds(1, steps=1, rows=16) / middle == pytest.approx((4 + 4.8) / (4 + 9.6), rel=0.08)


def test_what_the_pieces_do_not_tell_is_as_usual():
    """Always overlapped: r is what it is on such machines, and the costs follow from it."""
    found = fit(("steps", "rows"), CORES, [pieces(0, 0.6, 1, 1.0, 0.05, overlap=1.0)])
    assert found.beside == pytest.approx(fits.PRIORS["beside"].value, abs=0.1)
    overlapped = found.seconds(1, steps=1, rows=36) / found.beside
    assert overlapped == pytest.approx((0.004 + 0.0003 * 36) / 0.6, rel=0.03)
    assert found.speed(2) == pytest.approx(2 * found.beside), "unseen: as two processes"


# The command


def test_the_command_shows_three_columns(short, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["simulate", str(short), "--max-staleness", "3", "--generators", "2", "--seeds", "1"]) == 0
    text = capsys.readouterr().out
    assert "what if: max_staleness = 3, generator.replicas = 2" in text
    for word in ("measured", "simulated", "what if", "step time", "trainer waits", "generators wait", "tokens 3 stale"):
        assert word in text
    assert "The simulation of the run as it was is" in text


def test_the_command_prints_json_and_needs_no_torch(short):
    code = "import sys; from slipstream.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    argv = [
        sys.executable,
        "-c",
        code,
        "simulate",
        str(short),
        "--preset",
        "sync",
        "--seeds",
        "1",
        "--json",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["overrides"] == {"max_staleness": 0, "weight_update": "between_batches"}
    assert told["changed"]["staleness_max"] == 0
    assert told["measured"]["steps"] == told["changed"]["steps"] == 12
    assert set(told["as_it_was"]["idle"]) == {"trainer", "generator"}


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        ([], "a run is needed"),
        (["/nowhere"], "no folder '/nowhere'"),
        (["RUN", "--reward-s", "-1"], "reward"),
        (["RUN", "--reorder-window", "1000"], "reorder_window"),
    ],
)
def test_bad_input_to_the_command_is_exit_code_2(recorded, read_already, argv, what, capsys):
    assert main(["simulate", *(str(recorded[0]) if word == "RUN" else word for word in argv)]) == 2
    assert what in capsys.readouterr().err
