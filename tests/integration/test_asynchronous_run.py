"""An asynchronous run of real processes: its claims recomputed from its files, its presets, its logprobs."""

from __future__ import annotations

import re

import numpy as np
import pytest
from audit import audit
from audit import lines as read_lines
from catalogued import check_metric_names
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trace_audit import audit_trace

import slipstream
from slipstream.core.run_log import read_metrics, read_rollouts
from slipstream.observe.summary import read_summary, violations
from slipstream.observe.tokens import read_tokens
from slipstream.observe.watch.answers import ANSWERS
from slipstream.observe.watch.index import RunIndex
from slipstream.plan.what_if import what_if

LONGER = {"max_new_tokens": 40, "num_slots": 16}  # completions long enough for a swap to fall into


@pytest.fixture(scope="module")
def continuous(tmp_path_factory):
    """An untrained model rambles: with no EOS habit its completions are long, and versions change inside them."""
    overrides = {
        "steps": 12,
        "groups_per_step": 4,
        "completions_per_group": 4,
        "max_staleness": 2,
        "weight_update": "in_flight",
        "deadline_s": 60.0,
        "model": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2},
        "prompts": {"num_train": 300, "num_eval": 24},
        "generator": LONGER,
        "loss": {"skip_no_signal": False},
        "warm_start": {"steps": 0},
        "eval": {"every": 4, "num_prompts": 24, "num_slots": 8},
        "observe": {"tokens_every": 3},
        "trackers": {"names": ["tensorboard"]},
    }
    return slipstream.run(
        "quickstart", overrides=overrides, out=tmp_path_factory.mktemp("runs") / "continuous", display=False
    )


def test_the_files_bear_out_the_summary(continuous):
    found = audit(continuous.out)
    assert found["steps"] == 12
    assert found["fates"]["pending"] == 0
    assert max(found["histogram"]) >= 1, "nothing was asynchronous"
    assert violations(read_summary(continuous.out / "summary.json")) == []


def test_weights_change_within_completions(continuous):
    assert audit(continuous.out)["spanning"] > 0
    assert continuous.summary["weight_sync"]["count"] >= 4, "12 steps at k = 2 need a new version at least every third"


def test_trainer_and_generator_agree_on_tokens_of_the_consumed_version(continuous):
    at_lag_0 = [line["logprob_diff_max/lag_0"] for line in read_metrics(continuous.out / "metrics.jsonl")
                if "logprob_diff_max/lag_0" in line]  # fmt: skip
    assert at_lag_0
    assert max(at_lag_0) <= 1e-4


def test_evaluations_during_the_run_are_pinned_and_not_admitted(continuous):
    lines = [line for line in read_metrics(continuous.out / "metrics.jsonl") if "eval_accuracy" in line]
    assert lines[0]["version"] == 0
    assert lines[-1]["version"] == 12
    assert len(lines) >= 3


def test_every_documented_file_is_there(continuous):
    for name in (
        "config.toml",
        "metrics.jsonl",
        "timeline.json",
        "rollouts.jsonl",
        "events.jsonl",
        "summary.json",
        "report.html",
        "model/config.json",
        "checkpoints/step_12/manifest.json",
    ):
        assert (continuous.out / name).exists(), name
    events = [line["event"] for line in read_lines(continuous.out / "events.jsonl")]
    taken = [event["version"] for event in events if event["type"] == "Swapped"]
    assert (taken[0], taken[-1]) == (0, 12)  # of those in between one may be superseded before it is taken
    assert audit_trace(continuous.out)["swaps"] == len(taken)
    check_metric_names(continuous.out)


def test_tokens_are_those_of_the_rollouts(continuous):
    rollouts = {(line.ordinal, line.sample): line for line in read_rollouts(continuous.out / "rollouts.jsonl")}
    tokens = {(line.ordinal, line.sample): line for line in read_tokens(continuous.out / "tokens.jsonl")}
    assert set(tokens) == {key for key, line in rollouts.items() if key[0] % 3 == 0 and line.step is not None}
    for key, line in tokens.items():
        rollout = rollouts[key]
        assert (line.step, line.num_tokens, line.versions) == (rollout.step, rollout.num_tokens, rollout.versions)
        assert re.sub("<(eos|unk|pad)>", "", "".join(line.texts)) == re.sub("<(eos|unk|pad)>", "", rollout.completion)
        assert np.mean(line.behaviour_logprobs) == pytest.approx(rollout.mean_behaviour_logprob, abs=1e-3)
        assert None not in line.policy_logprobs
    groups = {o: [line for (ordinal, _), line in tokens.items() if ordinal == o] for o, _ in tokens}
    for (
        ordinal,
        lines,
    ) in groups.items():  # GRPO: advantages of a group rise with its rewards, and are one per completion
        assert all(len(set(line.advantages)) == 1 for line in lines)
        by_reward = sorted(lines, key=lambda line: rollouts[ordinal, line.sample].reward)
        assert [line.advantages[0] for line in by_reward] == sorted(line.advantages[0] for line in lines)


def test_the_watched_loop_moves_when_the_rollouts_say(continuous):
    """Times of its events come after those of the rollouts, by the time that messages take and the trainer is busy."""
    index = RunIndex(continuous.out)
    while index.advance():
        pass
    assert (index.num_damaged, index.life()[0]) == (0, "done")
    [stretch] = index.events.stretches
    whole = index.events.passage(-1.0, index.end_s)
    assert not whole.loop.groups
    entered = {}
    for move in whole.moves:
        phase = move.fate or move.group.phase
        entered.setdefault((move.group.ordinal, phase), (move.time_s, move.group))
    groups = {}
    for line in read_rollouts(continuous.out / "rollouts.jsonl"):
        groups.setdefault(line.ordinal, []).append(line)
    assert len(groups) == 48
    assert sum(phase == "scoring" for _, phase in entered) > 24
    for ordinal, lines in groups.items():
        at_s = {phase: entered[ordinal, phase][0] for phase in ("sampling", "ready", "training", "trained")}
        started_s, finished_s, scored_s = (
            stretch.run_s(pick(getattr(line, name) for line in lines))
            for pick, name in ((min, "started_s"), (max, "finished_s"), (max, "scored_s"))
        )
        assert at_s["sampling"] <= started_s <= finished_s
        if (ordinal, "scoring") in entered:  # a score may overtake the word of the last completion
            assert finished_s <= entered[ordinal, "scoring"][0] <= at_s["ready"]
        assert scored_s <= at_s["ready"] <= at_s["training"] < at_s["trained"]
        assert entered[ordinal, "training"][1].step == lines[0].step
        assert entered[ordinal, "sampling"][1].replica == lines[0].replica
    steps = [(time_s, version) for time_s, version in whole.steps]
    assert [version for _, version in steps] == list(range(1, 13))
    lanes = ANSWERS["/api/lanes"](index, {"from": "0", "to": str(index.end_s)})["lanes"]
    training = [bar for bar in lanes["trainer"] if bar[2] == "forward_backward"]
    for time_s, version in steps:
        assert any(bar[0] < time_s and bar[4].get("step") == version - 1 for bar in training), "a step is on its lane"


def test_its_files_are_enough_to_simulate_it(continuous):
    """The same groups, so the same tokens; the bound; and about its pace, as far as twelve steps tell it."""
    found = what_if(continuous.out, {"max_staleness": 0}, seeds=1)
    assert found.measured.steps == found.as_it_was.steps == 12
    assert found.measured.staleness == {int(lag): n for lag, n in continuous.summary["staleness"]["histogram"].items()}
    assert sum(found.as_it_was.staleness.values()) == sum(found.measured.staleness.values())
    assert 1 <= found.as_it_was.staleness_max <= 2
    assert found.as_it_was.step_s == pytest.approx(found.measured.step_s, rel=0.5)
    assert list(found.changed.staleness) == [0]


def test_a_tracker_has_every_line_of_the_metrics_and_what_the_run_came_to(continuous):
    found = EventAccumulator(str(continuous.out / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    told = {
        (name, event.step, np.float32(event.value)) for name in found.Tags()["scalars"] for event in found.Scalars(name)
    }
    lines = read_metrics(continuous.out / "metrics.jsonl")
    assert told == {
        (name if "/" in name else f"run/{name}", line["step"], np.float32(value))
        for line in lines
        for name, value in line.items()
        if name != "step" and value is not None
    }
    assert b'"status": "done"' in found.Tensors("summary")[0].tensor_proto.string_val[0]


@pytest.mark.parametrize(
    ("preset", "more"),
    [
        pytest.param("sync", {}, marks=pytest.mark.slow),
        ("one_step", {"steps": 3}),
        pytest.param("bounded", {"max_staleness": 2, "generator": {"segment_tokens": 4}}, marks=pytest.mark.slow),
        pytest.param("continuous", {"max_staleness": 3}, marks=pytest.mark.slow),
    ],
)
def test_presets(preset, more, tiny, tmp_path):
    generator = tiny["generator"] | more.pop("generator", {})
    overrides = tiny | more | {"generator": generator, "host": "inline", "publish_every": 1}
    overrides["warm_start"] = tiny["warm_start"] | {"steps": 5}
    result = slipstream.run("quickstart", overrides=overrides, preset=preset, out=tmp_path / preset, display=False)
    found = audit(result.out)
    assert found["fates"]["trained"] == 4 * overrides["steps"]
    if preset in ("sync", "one_step"):
        assert found["spanning"] == 0, "between_batches: no completion spans versions"
