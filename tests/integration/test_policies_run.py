"""Whole runs under other systems' scheduling policies: they train, are audited and replayed, and hide no discards."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from audit import audit

import slipstream
from slipstream.controller.policies import POLICIES
from slipstream.core.run_log import read_metrics
from slipstream.observe.summary import read_summary, violations

RUN: dict[str, Any] = {
    "host": "inline",
    "steps": 4,
    "groups_per_step": 3,
    "completions_per_group": 4,
    "max_staleness": 1,
    "deadline_s": 60.0,
    "model": {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2},
    "prompts": {"num_train": 60, "num_eval": 4},
    "generator": {"num_slots": 16, "max_new_tokens": 24},
    "trainer": {"minibatches": 1},
    "warm_start": {"steps": 0},
    "loss": {"skip_no_signal": False},
    "eval": {"every": 0, "num_prompts": 4, "num_slots": 8},
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "sample_budget": {"staleness_threshold": 0.5},
    "finish_order": {"queue_groups": 6},
}


def run_under(policy: str, out, **overrides: Any):
    schedule = {"policy": policy, **PARAMETERS.get(policy, {})}
    result = slipstream.run("quickstart", overrides=RUN | {"schedule": schedule} | overrides, out=out, display=False)
    audit(out)
    assert violations(read_summary(out / "summary.json")) == []
    found = slipstream.replay(out)
    assert found.is_sound, (found.divergence, found.violations)
    assert found.policies == [policy]
    assert result.summary["steps"] == result.summary["prompts"]["trained"] / 3 == 4
    return result


def test_drop_stale_counts_what_it_discards(tmp_path):
    """At k = 0 whatever is in flight when a step ends is discarded once it is finished."""
    result = run_under("drop_stale", tmp_path / "run", max_staleness=0)
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "dropped/stale" in line]
    assert len(lines) == 4
    stale = sum(line["dropped/stale"] for line in lines)
    assert stale > 0
    assert sum(line["dropped/no_signal"] + line["dropped/failed"] for line in lines) == 0
    assert result.summary["prompts"]["skipped"] == stale == slipstream.replay(tmp_path / "run").num_dropped["stale"]
    assert (result.summary["staleness"]["max"], result.summary["staleness"]["bound"]) == (0, 0)


@pytest.mark.slow
def test_a_policy_without_a_bound_promises_none(tmp_path):
    result = run_under("finish_order", tmp_path / "run", max_staleness=0)
    assert result.summary["staleness"]["bound"] is None
    assert result.summary["staleness"]["max"] > 0, "beyond max_staleness, which it does not look at, and no error"
    assert "no bound was promised" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("host", ["inline", "process"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_runs(tmp_path, policy, host):
    result = run_under(policy, tmp_path / "run", host=host, generator={"num_slots": 16, "replicas": 2})
    bound = result.summary["staleness"]["bound"]
    assert bound == (1 if policy in ("oldest_first", "drop_stale", "one_step") else None)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_resumes(tmp_path, policy):
    """The last step's checkpoint is lost with the summary, so the run goes on from the one before."""
    out = tmp_path / "run"
    run_under(policy, out, trainer={"minibatches": 1, "checkpoint_every": 1, "keep_checkpoints": 4})
    for path in ("summary.json", "checkpoints/step_3", "checkpoints/step_4", "model"):
        target = out / path
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    result = slipstream.run("quickstart", resume=out, display=False)
    assert result.summary["steps"] == 4
    found = slipstream.replay(out)
    assert found.is_sound, (found.divergence, found.violations)
    assert found.policies == [policy] * 2
    assert (found.num_steps, found.num_trained) == (4, 12)
    assert slipstream.replay(out / "attempt_1").is_sound
