"""Whole runs of episodes over a make-believe vLLM that samples from our own model: logprobs, versions, evaluations."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from audit import audit, lines
from test_agent_runs import branches_of, largest_gap
from test_episode_versions import ROUNDING, SYNCHRONOUS, Heard, episodes, heard, versions_of
from test_vllm_run import FAKE, HEADS_FOR_VLLM
from turn_environments import Unpunctual, forking_agent

import slipstream
from slipstream.core.run_log import read_metrics
from slipstream.generator.vllm import backend

__all__ = ["episodes", "heard"]


@pytest.fixture
def over_vllm(episodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Overrides of a run. Its vLLM finds nothing in a cache of other weights: that would fail its own assertion."""
    monkeypatch.setattr(backend, "WORKER", FAKE)
    monkeypatch.setenv("FAKE", json.dumps({"samples": True}))
    generator = {"engine": "vllm", "vllm": {"python": sys.executable}, "kv_on_update": "recompute"}
    return episodes | {
        "steps": 3,
        "groups_per_step": 2,
        "deadline_s": 240.0,
        "model": HEADS_FOR_VLLM,
        "generator": episodes["generator"] | generator,
        "eval": {"every": 3, "num_prompts": 4, "num_slots": 4},
    }


def run(overrides: dict[str, Any], out: Path, **source: Any) -> slipstream.RunResult:
    result = slipstream.run("quickstart", overrides=overrides, out=out, display=False, **source)
    assert result.status == "done"
    assert audit(result.out)["steps"] == overrides["steps"]
    return result


def check_cache(out: Path) -> None:
    found = json.loads((out / "summary.json").read_text())["episodes"]
    assert 0 < found["parked_hit_frac"] < 1
    assert found["failed"] == found["restarts"] == 0


def first_sampled(segments: list[Any]) -> list[int]:
    tokens: list[int] = next(one for one in segments if one.is_sampled).tokens.tolist()
    return tokens


@pytest.mark.parametrize("mode", ["in_flight", pytest.param("between_batches", marks=pytest.mark.slow)])
def test_episodes_are_sampled_by_the_versions_they_name(
    mode: str, heard: Heard, over_vllm: dict[str, Any], tmp_path: Path
) -> None:
    """Every token's logprob is what its version gives it behind all that came before, sampled and given."""
    overrides = over_vllm | {"weight_update": mode, "max_staleness": 2 if mode == "in_flight" else 1}
    overrides |= {"steps": 5, "groups_per_step": 4}  # long enough for swaps to fall into episodes
    out = run(overrides, tmp_path / "run", environment=Unpunctual).out
    trained = heard.of("train")
    assert max(len(one.segments) for one in trained) >= 5, "three turns and what was said in between"
    spanning = [one for one in trained if len({*versions_of(one)}) > 1]
    assert bool(spanning) == (mode == "in_flight")
    assert all(versions_of(one) == sorted(versions_of(one)) for one in trained)
    assert 0 < heard.largest_gap() < ROUNDING
    evaluated: dict[int, set[int]] = {}
    for one in heard.of("eval"):
        evaluated.setdefault(one.eval_id, set()).update(versions_of(one))
    asked = {line["version"] for line in lines(out / "metrics.jsonl") if "eval_reward" in line}
    assert all(len(versions) == 1 for versions in evaluated.values())
    assert {min(versions) for versions in evaluated.values()} == asked
    assert {0, 5} < asked
    check_cache(out)


@pytest.mark.slow
@pytest.mark.parametrize("is_synchronous", [False, True])
def test_branches_of_agents_are_sampled_each_behind_its_own_context(
    is_synchronous: bool, heard: Heard, over_vllm: dict[str, Any], tmp_path: Path
) -> None:
    """Between batches a version waits for the end of begun episodes, none of whose branches may wait for it."""
    environment = {"max_turns": 6, "max_episode_tokens": 90, "observation": "{content}"}
    asynchronous = {"max_staleness": 1, "weight_update": "between_batches"}
    overrides = over_vllm | (SYNCHRONOUS if is_synchronous else asynchronous)
    result = run(overrides | {"environment": environment}, tmp_path / "run", agent=forking_agent)
    trained = heard.of("train")
    assert {one.num_branches for one in trained} <= {3, 4}
    assert all(len({*versions_of(one)}) == 1 for one in trained)
    openings = [[first_sampled(branch) for branch in branches_of(one)[:2]] for one in trained]
    assert any(first != second for first, second in openings), "branches have noise of their own"
    assert largest_gap(heard) < ROUNDING
    found = [line for line in read_metrics(result.out / "metrics.jsonl") if "reward_mean" in line]
    assert max(line["logprob_diff_max/lag_0"] for line in found if "logprob_diff_max/lag_0" in line) < ROUNDING
    check_cache(result.out)
