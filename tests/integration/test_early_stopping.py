"""A run that held-out results end is a whole one, and `best/` is the model that was evaluated."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from audit import audit
from safetensors.torch import load_file
from test_endings import START_DEADLINE_S, start
from test_resume import AHEAD, SYNC, Cut, cut_off, events, small

import slipstream
from slipstream.controller import held_out
from slipstream.core.errors import ConfigError
from slipstream.core.held_out import Measured
from slipstream.core.recipes import resolve
from slipstream.core.run_log import read_metrics
from slipstream.stages import run_folder

__all__ = ["small"]


@pytest.fixture
def rewards(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The mean rewards of the evaluations to come: the greedy one of the first version, the sampled one, others."""
    values: list[float] = []
    measure = held_out.measured

    def measured(scores: Any, *asked: Any) -> Measured:
        return Measured(reward=values.pop(0)) if values else measure(scores, *asked)

    monkeypatch.setattr(held_out, "measured", measured)
    return values


def evaluated(**more: Any) -> dict[str, Any]:
    return {"every": 1, "num_prompts": 4, "num_slots": 8, "metric": "reward", **more}


def weights_of(checkpoint: Path) -> dict[str, Any]:
    stored = load_file(checkpoint / "rank_00000.safetensors")
    return {name.removeprefix("policy/").partition("@")[0]: t for name, t in stored.items() if name[:7] == "policy/"}


def has_weights_of(model: Path, checkpoint: Path) -> bool:
    ours, theirs = load_file(model / "model.safetensors"), weights_of(checkpoint)
    return ours.keys() <= theirs.keys() and all(tensor.equal(theirs[name]) for name, tensor in ours.items())


@pytest.mark.slow
def test_a_run_that_held_out_results_end_is_a_whole_run(small, tmp_path, rewards):
    rewards += [0.1, 0.0, 0.2, 0.7]
    tables = small | SYNC | {"steps": 9, "eval": evaluated(stop_at=0.5)}
    result = slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False)
    summary, steps = result.summary, result.summary["steps"]
    assert (result.status, summary["stopped_because"]) == ("done", "stop_at")
    assert 2 <= steps < 9, "it was version 2 that reached it"
    assert summary["eval"]["after"]["sampled_reward"] is not None, "the last version is evaluated as ever"
    lines = [line["version"] for line in read_metrics(result.out / "metrics.jsonl") if "eval_reward" in line]
    assert lines == list(range(steps + 1)), "and once"
    assert audit(result.out)["fates"], "nothing is lost, and the log replays"
    assert slipstream.replay(result.out).is_sound
    assert [event["because"] for event in events(result.out, "Stop")] == ["stop_at"]
    assert has_weights_of(result.out / "model", result.out / "checkpoints" / f"step_{steps}")

    for more in ({}, {"steps": 12}, {"eval.patience": 9}):
        with pytest.raises(ConfigError, match=r"already complete[\s\S]*eval.stop_at"):
            slipstream.run(resume=result.out, overrides=more, display=False)


def test_two_results_of_one_version_count_once(tmp_path):
    """Earlier releases could evaluate the last version twice."""
    config = resolve("quickstart", {"eval": {"patience": 2, "metric": "reward"}})
    lines = [{"version": version, "eval_reward": value} for version, value in ((0, 0.5), (1, 0.4), (1, 0.4), (2, 0.3))]
    path = tmp_path / "metrics.jsonl"
    for count, ends in ((3, False), (4, True)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines[:count]))
        assert run_folder._stops_early(config, tmp_path) == ends


@pytest.mark.slow
def test_a_run_that_was_ended_goes_on_without_the_rule_as_if_it_never_had_one(small, tmp_path, rewards):
    rewards += [0.1, 0.0, 0.7]
    tables = small | SYNC | {"steps": 8, "eval": evaluated(stop_at=0.5)}
    result = slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False)
    assert result.summary["steps"] < 8
    further = slipstream.run(resume=result.out, overrides={"eval.stop_at": None}, display=False)
    assert (further.summary["steps"], further.summary["stopped_because"]) == (8, None)
    assert slipstream.replay(result.out).is_sound
    whole = slipstream.run("quickstart", overrides=tables | {"eval": evaluated()}, out=tmp_path / "w", display=False)
    models = [(run.out / "model" / "model.safetensors").read_bytes() for run in (further, whole)]
    assert models[0] == models[1]


def test_patience_and_the_best_model_while_training_runs_ahead(small, tmp_path, rewards):
    """Versions are published every second step: the last one, too, which is none of them."""
    rewards += [0.1, 0.0, 0.5, 0.3, 0.4]
    trainer = {"checkpoint_every": 1, "keep_checkpoints": 20}
    stopping = evaluated(patience=2, keep_best=True)
    tables = small | AHEAD | {"steps": 40, "publish_every": 2, "trainer": trainer, "eval": stopping}
    result = slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False)
    summary, best = result.summary, result.summary["best"]
    assert (result.status, summary["stopped_because"]) == ("done", "patience")
    assert 0 < summary["steps"] < 40
    assert summary["prompts"]["pending"] > 0, "what was under way is accounted for, and trained by nobody"
    assert audit(result.out)["fates"]
    assert slipstream.replay(result.out).is_sound
    assert summary["staleness"]["max"] <= 2
    assert json.loads((result.out / "best" / "best.json").read_text()) == best
    if best["value"] == 0.5:  # else the last version was better than all
        assert best["version"] % 2 == 0
    assert has_weights_of(result.out / "best", result.out / "checkpoints" / f"step_{best['version']}")
    assert not list(result.out.glob(".best*")), "no candidate is left"
    for more in ({}, {"steps": 60}):
        with pytest.raises(ConfigError, match=r"already complete[\s\S]*eval.patience"):
            slipstream.run(resume=result.out, overrides=more, display=False)


@pytest.mark.slow
def test_a_run_cut_off_after_the_last_result_ends_when_it_is_resumed(small, tmp_path, monkeypatch, rewards):
    rewards += [0.1, 0.0, 0.6, 0.2, 0.2, 0.2]
    tables = small | SYNC | {"steps": 9, "trainer": {"checkpoint_every": 1, "keep_checkpoints": 9}}
    tables["eval"] = evaluated(patience=2, keep_best=True)

    def is_stopped(_: Any, event: Any) -> bool:
        return type(event).__name__ == "Stop"

    cut_off(monkeypatch, tables, tmp_path / "run", is_stopped)
    steps = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step_?"))
    (tmp_path / "run" / ".best_7").mkdir()  # what a candidate leaves that was being written
    resumed = slipstream.run(resume=tmp_path / "run", display=False)
    assert (resumed.status, resumed.summary["stopped_because"]) == ("done", "patience")
    assert resumed.summary["steps"] == steps, "no step is trained again"
    assert resumed.summary["best"] == {"version": 1, "metric": "reward", "value": 0.6}
    assert has_weights_of(resumed.out / "best", resumed.out / "checkpoints" / "step_1")
    assert not list(resumed.out.glob(".best*"))
    assert slipstream.replay(resumed.out).is_sound


def test_a_run_cut_off_between_the_best_result_and_its_model_has_both_when_it_is_resumed(
    small, tmp_path, monkeypatch, rewards
):
    rewards += [0.1, 0.0, 0.2, 0.7]
    tables = small | SYNC | {"steps": 2, "trainer": {"checkpoint_every": 1, "keep_checkpoints": 9}}
    tables["eval"] = evaluated(keep_best=True)
    take = held_out.BestModel.evaluated

    def cut(self: held_out.BestModel, version: int, found: Measured) -> None:
        if version == 2:
            raise Cut
        take(self, version, found)

    with monkeypatch.context() as patch:
        patch.setattr(held_out.BestModel, "evaluated", cut)
        with pytest.raises(Cut):
            slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False)
    assert json.loads((tmp_path / "run" / "best" / "best.json").read_text())["version"] == 1
    resumed = slipstream.run(resume=tmp_path / "run", display=False)
    assert resumed.summary["best"] == {"version": 2, "metric": "reward", "value": 0.7}
    assert has_weights_of(resumed.out / "best", resumed.out / "checkpoints" / "step_2")


MINE = """
import os, pathlib, signal

def letters(completions, **_):
    return [sum(map(ord, text)) for text in completions]

def kill_once(record):
    killed = pathlib.Path(__file__).with_name("killed")
    if record.step == 8 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)  # of the controller
"""


@pytest.mark.slow
def test_the_best_model_survives_a_kill_and_is_what_two_replicas_have_evaluated(tiny, tmp_path):
    """Versions swap in flight in processes of their own, so which one answers is known to its replica alone.

    Version 0 answers nothing, and what is rewarded is text: another one is the best.
    """
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    tables = tiny | AHEAD | {"steps": 24, "rewards": {"terms": [{"function": f"{mine}:letters"}]}}
    tables["callbacks"] = {"on_step": [f"{mine}:kill_once"]}
    tables["trainer"] = {"checkpoint_every": 1, "keep_checkpoints": 99, "optimizer": {"lr": 3e-3}}
    tables["generator"] = tiny["generator"] | {"replicas": 2}
    tables["eval"] = {"every": 2, "num_prompts": 24, "num_slots": 8, "metric": "reward", "keep_best": True}
    run = tmp_path / "run"
    process = start(tables, run)
    output, _ = process.communicate(timeout=START_DEADLINE_S)
    assert process.returncode == -signal.SIGKILL, output
    resumed = slipstream.run(resume=run, display=False)
    assert resumed.status == "done"
    best = resumed.summary["best"]
    kept = json.loads((run / "best" / "best.json").read_text())
    assert kept == best
    assert best["version"] > 0
    assert has_weights_of(run / "best", run / "checkpoints" / f"step_{best['version']}")
    rewards = {
        line["version"]: line["eval_reward"] for line in read_metrics(run / "metrics.jsonl") if "eval_reward" in line
    }
    assert best["value"] >= max(rewards.values())
    assert not list(run.glob(".best*"))
    assert slipstream.replay(run).is_sound


@pytest.mark.slow
def test_the_best_of_adapters_is_an_adapter(small, tmp_path, rewards):
    rewards += [0.9, 0.0]
    tables = small | {"steps": 1, "warm_start": {"steps": 0}, "eval": evaluated(keep_best=True)}
    tables["model"] = small["model"] | {"lora": {"rank": 2}}
    result = slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False)
    assert result.summary["best"]["version"] == 0
    found = json.loads((result.out / "best" / "adapter_config.json").read_text())
    assert (
        found["base_model_name_or_path"]
        == json.loads((result.out / "model" / "adapter_config.json").read_text())["base_model_name_or_path"]
    )


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ({"stop_at": 0.5}, "nothing is evaluated before the end"),
        ({"patience": 2}, "nothing is evaluated before the end"),
        ({"every": 1, "stop_at": 1.5, "measure": "task"}, "never reaches"),
    ],
)
def test_rules_that_cannot_apply_are_refused(table, what):
    with pytest.raises(ConfigError, match=what):
        slipstream.resolve("quickstart", {"eval": {"every": 0} | table})
