"""Whole runs whose generator delivers what cannot be: now and then, and always."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest
from audit import lines

import slipstream
from slipstream.controller.build import default_pipeline
from slipstream.core.errors import SlipstreamError
from slipstream.core.types import VersionSpan
from slipstream.generator.executor import Generator
from slipstream.stages.rl import _draw

POISONS = (
    lambda s: msgspec.structs.replace(s, behaviour_logprobs=np.full_like(s.behaviour_logprobs, math.nan)),
    lambda s: msgspec.structs.replace(s, behaviour_logprobs=np.full_like(s.behaviour_logprobs, -math.inf)),
    lambda s: msgspec.structs.replace(s, tokens=s.tokens + 100_000),
    lambda s: msgspec.structs.replace(s, behaviour_logprobs=s.behaviour_logprobs[:-1]),
    lambda s: msgspec.structs.replace(s, version_spans=(VersionSpan(start=0, version=10**6),)),
    lambda s: msgspec.structs.replace(s, tokens=s.tokens[:0], behaviour_logprobs=s.behaviour_logprobs[:0]),
    lambda s: msgspec.structs.replace(s, tokens=s.tokens.reshape(1, -1)),
)


class Poisoning(Generator):
    """Every `every`-th completion of training is poisoned, in turn with each of the above."""

    every = 5
    num_sent = 0

    def init(self, context):
        super().init(context)
        self.outgoing.completion_of = partial(self.poisoned, self.outgoing.completion_of)

    def poisoned(self, honest, *args, **more):
        completion = honest(*args, **more)
        if completion.purpose != "train":
            return completion
        Poisoning.num_sent += 1
        if Poisoning.num_sent % self.every:
            return completion
        poison = POISONS[Poisoning.num_sent // self.every % len(POISONS)]
        return msgspec.structs.replace(completion, segments=tuple(map(poison, completion.segments)))


class AlwaysPoisoning(Poisoning):
    every = 1


def pipeline_with(kind):
    def pipeline(config):
        default = default_pipeline(config)
        nodes = [replace(node, factory=kind) if node.name.startswith("generator") else node for node in default.nodes]
        return replace(default, nodes=tuple(nodes))

    return pipeline


INLINE = {"host": "inline", "warm_start": {"steps": 0}, "loss": {"skip_no_signal": False}}


def test_a_run_outlives_poison_and_says_so(tiny, tmp_path):
    result = slipstream.run(
        "quickstart", overrides=tiny | INLINE, out=tmp_path / "run", pipeline=pipeline_with(Poisoning), display=False
    )
    assert result.status == "done"
    rollouts = lines(result.out / "rollouts.jsonl")
    poisoned = [one for one in rollouts if (one["failure"] or "").startswith("poisoned completion")]
    assert len({one["failure"].split(": ")[1][:12] for one in poisoned}) >= 5
    assert all(one["num_tokens"] == 0 and one["reward"] == 0.0 for one in poisoned)
    assert all(one["failure"] is None and one["num_tokens"] > 0 for one in rollouts if one not in poisoned)
    metrics = [line for line in lines(result.out / "metrics.jsonl") if "loss" in line]
    assert len(metrics) == 5
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in metrics)
    trained = [one for one in poisoned if one["step"] is not None]
    assert sum(line["poisoned"] for line in metrics) >= len(trained) > 0
    assert sum(line["failed_frac"] for line in metrics) * 16 == pytest.approx(len(trained))
    summary = json.loads((result.out / "summary.json").read_text())
    assert summary["prompts"]["trained"] == 20
    assert (summary["prompts"]["lost"], summary["prompts"]["repeated"]) == (0, 0)
    assert "poisoned" in {alarm["name"] for alarm in summary["alarms"]}
    assert "poisoned" in (result.out / "report.html").read_text()
    assert lines(result.out / "alarms.jsonl")[0]["event"] == "began"


def test_poison_in_every_completion_ends_the_run_with_its_cause(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.controller.policies.DROPPED_PER_GROUP", 4)
    with pytest.raises(SlipstreamError, match="every completion of a group fails") as caught:
        slipstream.run(
            "quickstart",
            overrides=tiny | INLINE,
            out=tmp_path / "run",
            pipeline=pipeline_with(AlwaysPoisoning),
            display=False,
        )
    assert "17 groups in a row" in str(caught.value)
    assert "poisoned completion:" in str(caught.value)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 0)
    assert summary["prompts"]["failed"] >= 16


def test_a_report_that_cannot_be_drawn_hides_nothing(tiny, tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise ZeroDivisionError("of a chart")

    monkeypatch.setattr("slipstream.controller.policies.DROPPED_PER_GROUP", 4)
    out = tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr("slipstream.observe.report.write_report", fail)
        with pytest.raises(SlipstreamError, match="every completion of a group fails"):
            slipstream.run(
                "quickstart", overrides=tiny | INLINE, out=out, pipeline=pipeline_with(AlwaysPoisoning), display=False
            )
    assert json.loads((out / "summary.json").read_text())["status"] == "failed"
    assert f"`slipstream report {out}` tries again" in caplog.text
    assert slipstream.report(out) == out / "report.html"


def test_what_is_damaged_in_a_resumed_run_is_named_without_a_traceback(tmp_path, caplog):
    (tmp_path / "config.toml").write_text('recipe = "quickstart"\n')
    (tmp_path / "metrics.jsonl").write_text("x\ny\n")
    _draw(tmp_path)
    (record,) = caplog.records
    assert record.exc_info is None
    assert f"`slipstream report {tmp_path}` tries again: " in caplog.text
    assert "metrics.jsonl is damaged" in caplog.text
