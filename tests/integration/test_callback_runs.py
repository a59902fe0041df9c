"""Callbacks of a run: what they hear, how they end it, and what becomes of the run when one fails."""

from __future__ import annotations

import json

import pytest
from audit import audit
from test_resume import SYNC, after_step, cut_off, small

import slipstream
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.run_log import read_metrics

__all__ = ["small"]


def test_a_callback_ends_the_run_as_a_whole_one(small, tmp_path):
    heard = []

    class Ending:
        def on_step(self, record):
            heard.append(("step", record.step, dict(record.metrics)))
            return "stop" if record.step == 1 else None

        def on_eval(self, record):
            heard.append(("eval", record.version, record.reward))

        def on_checkpoint(self, record):
            heard.append(("checkpoint", record.step, (record.path / "manifest.json").is_file()))

    tables = small | SYNC | {"steps": 50}
    result = slipstream.run("quickstart", overrides=tables, callbacks=Ending(), out=tmp_path / "run", display=False)
    steps = result.summary["steps"]
    assert (result.status, result.summary["stopped_because"]) == ("done", "callback")
    assert 2 <= steps < 50
    lines = [line for line in read_metrics(result.out / "metrics.jsonl") if "loss" in line]
    assert [one[1:] for one in heard if one[0] == "step"] == [(line["step"], line) for line in lines]
    assert heard[-1][:2] == ("checkpoint", steps), "the end is waited for"
    assert [one[1] for one in heard if one[0] == "eval"] == [0, 0, steps, steps]
    assert all(one[2] for one in heard if one[0] == "checkpoint")
    assert len(result.summary["callback_s"]) == 3
    assert result.summary["resume_call"] == f"slipstream.run(resume={str(result.out)!r}, ...) with the same callbacks"
    assert audit(result.out)["fates"]
    assert slipstream.replay(result.out).is_sound
    with pytest.raises(ConfigError, match=r"already complete[\s\S]*callback"):
        slipstream.run(resume=result.out, display=False)


@pytest.mark.slow
def test_a_run_whose_callback_fails_is_saved_and_goes_on(small, tmp_path):
    tables = small | SYNC | {"steps": 12, "trainer": {"checkpoint_every": 0}}
    file = tmp_path / "mine.py"
    file.write_text("def watch(record):\n    assert record.step != 2, 'on purpose'\n")
    tables["callbacks"] = {"on_step": [f"{file}:watch"]}
    with pytest.raises(SlipstreamError, match=r"on_step \(mine.py, line 1\) raised[\s\S]*on purpose"):
        slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "on purpose" in summary["error"]
    assert summary["steps"] >= 3
    file.write_text("def watch(record):\n    pass\n")
    resumed = slipstream.run(resume=tmp_path / "run", display=False)
    assert resumed.status == "done"
    del tables["callbacks"]
    whole = slipstream.run("quickstart", overrides=tables, out=tmp_path / "whole", display=False)
    models = [(run.out / "model" / "model.safetensors").read_bytes() for run in (resumed, whole)]
    assert models[0] == models[1], "no step was lost"


@pytest.mark.slow
def test_after_a_resume_only_steps_that_are_trained_again_are_told_again(small, tmp_path, monkeypatch):
    tables, heard = small | SYNC, []
    cut_off(monkeypatch, tables, tmp_path / "run", after_step(4))
    hooks = {"on_step": lambda record: heard.append(record.step)}
    slipstream.run(resume=tmp_path / "run", callbacks=hooks, display=False)
    assert heard == [4, 5], "the checkpoint is that of four steps"


@pytest.mark.slow
def test_what_a_callback_has_ended_goes_on_with_other_steps_alone(small, tmp_path):
    tables, hooks = small | SYNC | {"steps": 50}, {"on_step": lambda record: "stop" if record.step == 1 else None}
    run = tmp_path / "run"
    steps = slipstream.run("quickstart", overrides=tables, callbacks=hooks, out=run, display=False).summary["steps"]
    with pytest.raises(ConfigError, match="already complete"):
        slipstream.run(resume=run, overrides={"steps": 50}, display=False)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"status": "interrupted"}))  # killed behind its checkpoint
    again = slipstream.run(resume=run, display=False)
    assert (again.status, again.summary["stopped_because"], again.summary["steps"]) == ("done", "callback", steps)
    longer = slipstream.run(resume=run, overrides={"steps": steps + 2}, display=False)
    assert (longer.summary["stopped_because"], longer.summary["steps"]) == (None, steps + 2)
    assert slipstream.replay(run).is_sound
