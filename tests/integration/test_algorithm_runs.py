"""Whole runs of what needs more than a policy: a critic, a reference, a greedy baseline, constraints, fixed lengths."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit import audit
from covering import with_slow
from safetensors.torch import load_file

import slipstream
from slipstream.core.recipes import resolve
from slipstream.core.run_log import read_metrics
from slipstream.models.attention import PackedAttention
from slipstream.models.build import build_policy, build_tokenizer

SYNC: dict[str, Any] = {"max_staleness": 0, "weight_update": "between_batches", "host": "inline"}
ACTOR_CRITIC: dict[str, Any] = {
    "steps": 4,
    "loss": {"name": "ppo", "params": {"eps_low": 0.2, "eps_high": 0.2}, "advantages": "gae"},
    "kl": {"coef": 0.1, "target": 0.01, "horizon": 64.0},
    "trainer": {"minibatches": 2, "epochs": 2, "shuffle": True, "checkpoint_every": 2, "keep_checkpoints": 3},
}


def rollouts_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] is not None]


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run_dir / "metrics.jsonl") if "reward_mean" in line]


def assert_same_state(run_dir: Path, other_dir: Path, *, step: int) -> None:
    """Weights and moments of policy and critic are the same to the bit."""
    mine, other = (
        load_file(folder / "checkpoints" / f"step_{step}" / "rank_00000.safetensors") for folder in (run_dir, other_dir)
    )
    parts = {f"{model}{moment}" for model in ("policy", "critic") for moment in ("", ".exp_avg", ".exp_avg_sq")}
    assert mine.keys() == other.keys()
    assert {name.split("/")[0] for name in mine} >= parts
    for name, tensor in mine.items():
        if name.split("/")[0] in parts:
            assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("critic", with_slow(["own"], ["head"]))
def test_resumed_with_critic_reference_and_adaptive_kl_equals_uninterrupted(critic, tiny, tmp_path):
    """Weights, coefficient and the reference after the warm start are those of the first attempt."""
    overrides = tiny | SYNC | ACTOR_CRITIC | {"critic": {"model": critic}}
    overrides["warm_start"] = tiny["warm_start"] | {"steps": 10}
    whole = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "whole", display=False)
    cut = tmp_path / "cut"
    shutil.copytree(whole.out, cut)
    shutil.rmtree(cut / "checkpoints" / "step_4")
    shutil.rmtree(cut / "model")
    resumed = slipstream.run("quickstart", resume=cut, display=False)
    assert_same_state(whole.out, resumed.out, step=4)
    ours, theirs = steps_of(whole.out), steps_of(resumed.out)
    assert len(ours) == len(theirs) == 4
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("kl_coef", "kl_reference_sum", "value_loss", "loss", "objective/kl", "ppo/val/vpred"):
            assert mine[name] == other[name], name
    assert ours[0]["kl_reference_sum"] == pytest.approx(0, abs=1e-4), "the reference is the policy after the warm start"
    assert len({line["kl_coef"] for line in ours}) == 4, "the coefficient adapts"


@pytest.mark.slow
def test_a_critic_run_is_the_same_to_the_bit_whatever_hosts_it(tiny, tmp_path):
    overrides = tiny | SYNC | ACTOR_CRITIC | {"steps": 2, "critic": {"model": "own"}}
    inline = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "inline", display=False)
    process = slipstream.run(
        "quickstart", overrides=overrides | {"host": "process"}, out=tmp_path / "process", display=False
    )
    assert_same_state(inline.out, process.out, step=2)
    at_lag_0 = [line["logprob_diff_max/lag_0"] for line in steps_of(inline.out)]
    assert max(at_lag_0) <= 1e-4


@pytest.mark.slow
def test_an_asynchronous_critic_with_vtrace_keeps_the_bound(tiny, tmp_path):
    overrides = tiny | {
        "steps": 4,
        "max_staleness": 2,
        "weight_update": "in_flight",
        "loss": {"name": "aipo", "params": {"max_ratio": 2.0}, "advantages": "gae", "whiten_advantages": "minibatch"},
        "critic": {"vtrace": True, "whiten_rewards": True},
        "kl": {"coef": 0.05, "estimator": "k3"},
    }
    result = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert audit(result.out)["steps"] == 4
    assert all(np.isfinite(line["value_loss"]) for line in steps_of(result.out))


def greedy_text(model, tokenizer, prompt: np.ndarray, limit: int) -> str:
    tokens = prompt.astype(np.int64).tolist()
    for _ in range(limit):
        ids = torch.tensor(tokens)
        with torch.no_grad():
            logits = model.logits(model(ids, torch.arange(len(ids)), PackedAttention([len(ids)]))[-1:])
        tokens.append(int(logits.argmax()))
        if tokens[-1] == tokenizer.eos_token_id:
            break
    return str(tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True))


def test_the_greedy_baseline_is_sampled_greedily_scored_and_never_trained(tiny, tmp_path):
    overrides = tiny | SYNC
    overrides |= {
        "steps": 1,
        "loss": {"name": "reinforce", "params": {}, "advantages": "greedy_baseline"},
        "warm_start": {"steps": 0},
        "trainer": {"minibatches": 1},
    }

    def vowels(completions, **_):
        return [float(sum(letter in "aeiou" for letter in text)) for text in completions]

    result = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", reward=vowels, display=False)
    config = resolve("quickstart", overrides)
    model, tokenizer = build_policy(config.model, seed=config.seed)
    lines = rollouts_of(result.out)
    assert sorted({line["sample"] for line in lines}) == [0, 1, 2, 3, 4]
    for line in lines:
        if line["sample"] == 4:
            prompt = np.array(tokenizer.encode(line["prompt"], add_special_tokens=False))
            assert line["completion"] == greedy_text(model, tokenizer, prompt, config.generator.max_new_tokens)
            assert line["reward"] == vowels([line["completion"]])[0]
    (metrics,) = steps_of(result.out)
    trained = [line for line in lines if line["sample"] < 4]
    assert metrics["tokens_trained"] == sum(line["num_tokens"] for line in trained)
    assert metrics["reward_mean"] == pytest.approx(np.mean([line["reward"] for line in trained]))
    baselines = {line["ordinal"]: line["reward"] for line in lines if line["sample"] == 4}
    weighed = sum(line["num_tokens"] * (line["reward"] - baselines[line["ordinal"]]) for line in trained)
    assert metrics["advantage_mean"] == pytest.approx(weighed / metrics["tokens_trained"], rel=1e-5, abs=1e-6)
    unselected = sum(line["num_tokens"] for line in lines if line["sample"] == 4)
    assert result.summary["balance"]["wasted_tokens"]["not_selected"] == unselected
    assert metrics["wasted_tokens/not_selected"] == unselected
    scored = [json.loads(line)["event"] for line in (result.out / "events.jsonl").read_text().splitlines()]
    means = {event["ordinal"]: event["mean_reward"] for event in scored if event["type"] == "GroupScored"}
    for ordinal in baselines:
        assert means[ordinal] == pytest.approx(np.mean([one["reward"] for one in trained if one["ordinal"] == ordinal]))
    audit(result.out)


def test_completions_of_fixed_length_are_scored_up_to_the_truncate_token(tiny, tmp_path):
    tables = tiny | SYNC
    end = build_tokenizer(resolve("quickstart", tables).model).get_vocab()["e"]
    tables |= {
        "steps": 2,
        "warm_start": {"steps": 0},
        "generator": {"num_slots": 16, "max_new_tokens": 40, "stop_at_eos": False},
        "rewards": {"truncate_token": end, "truncate_after": 4},
        "loss": {"truncated": "penalty", "truncation_reward": -1.0, "skip_no_signal": False},
    }

    def length(completions, completion_ids, **_):
        return [float(len(text)) for text in completions]

    result = slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", reward=length, display=False)
    lines = rollouts_of(result.out)
    assert {line["num_tokens"] for line in lines} == {40}
    assert {line["finish_reason"] for line in lines} == {"length"}
    ended = [line for line in lines if "e" in line["completion"][4:]]
    assert ended
    assert all(
        line["completion"].index("e", 4) == len(line["completion"]) - 1 for line in ended if "e" in line["completion"]
    )
    for line in steps_of(result.out):
        of_step = [rollout for rollout in lines if rollout["step"] == line["step"]]
        assert line["tokens_trained"] == 40 * len(of_step), "what follows the token is trained on, too"
        assert line["score_mean"] <= line["reward_mean"]
        assert 0 < line["truncated_frac"] < 1


def test_steps_that_measure_nothing_leave_the_kl_coefficient_and_the_weights(tiny, tmp_path):
    """Every completion is masked, so there is no KL to steer by; 0 would have lowered the coefficient."""
    overrides = tiny | SYNC
    overrides |= {
        "steps": 2,
        "warm_start": {"steps": 0},
        "generator": {"num_slots": 16, "max_new_tokens": 2, "stop_at_eos": False},
        "rewards": {"truncate_token": 1, "truncate_after": 2},
        "loss": {"truncated": "mask", "skip_no_signal": False},
        "kl": {"coef": 0.1, "target": 6.0, "horizon": 64.0, "place": "loss", "estimator": "k3"},
    }
    result = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert [line["num_updates"] for line in steps_of(result.out)] == [0, 0]
    state = json.loads((result.out / "checkpoints" / "step_2" / "state.json").read_text())
    assert state["extra"]["kl_coef"] == 0.1


def test_a_violated_constraint_caps_the_reward(tiny, tmp_path):
    overrides = tiny | SYNC
    overrides |= {
        "steps": 1,
        "rewards": {
            "terms": [
                {"function": "length", "weight": -1.0, "params": {"target_tokens": 1}},
                {"function": "regex", "params": {"pattern": "a"}, "at_least": 1.0},
            ],
            "violation_cap": 0.25,
        },
        "loss": {"skip_no_signal": False},
    }
    result = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    lines = rollouts_of(result.out)
    assert {line["parts"]["regex"] for line in lines} == {0.0, 1.0}
    for line in lines:
        summed = -line["parts"]["length"]
        assert line["reward"] == (summed if line["parts"]["regex"] else min(summed, 0.25))
