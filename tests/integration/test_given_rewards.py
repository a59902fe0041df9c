"""A run with rewards from Python, as TRL takes them: weighted, one of whole groups, one that fails at times."""

from __future__ import annotations

import json
from typing import Any

import pytest
from audit import audit

import slipstream
from slipstream.core.errors import ConfigError
from slipstream.core.run_log import read_metrics, read_rollouts
from slipstream.observe.health import read_alarms


def flaky(completions: list[str], **_: Any) -> list[float]:
    """Fails for a third of all texts, which the dry call's are not among."""
    if sum(map(ord, completions[0])) % 3 == 0 and "I think" not in completions[0]:
        raise ValueError("\x1b[31mthe third")
    return [float(len(completions[0]) % 5)]


def ranks(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float | None]:
    log_extra("length", [len(text) for text in completions])
    log_metric("longest", max(map(len, completions)))
    return [float(sorted(completions).index(text)) for text in completions]


def test_a_run_of_several_rewards(tiny, tmp_path, capfd):
    overrides = tiny | {
        "steps": 4,
        "host": "inline",
        "warm_start": {"steps": 0},
        "rewards": {"dry_call": False},
        "loss": {"skip_no_signal": False},
        "prompts": {**tiny["prompts"], "num_eval": 8},
        "eval": tiny["eval"] | {"num_prompts": 8},
    }
    rewards = [flaky, {"function": ranks, "per": "group"}, {"function": "length", "params": {"target_tokens": 4}}]
    result = slipstream.run(
        "quickstart", overrides=overrides, reward=rewards, reward_weights=[1.0, 0.5, 2.0], out=tmp_path / "run"
    )
    assert audit(result.out)["steps"] == 4
    rollouts = list(read_rollouts(result.out / "rollouts.jsonl"))
    failed = [one for one in rollouts if one.failure is not None]
    assert len(failed) > 16
    assert len(failed) < len(rollouts)
    lines = [line for line in read_metrics(result.out / "metrics.jsonl") if "loss" in line]
    assert len(lines) == 4
    for line in lines:
        longest = [one.logged["longest"] for one in rollouts if one.step == line["step"] and one.logged]
        assert line.get("logged/longest") == (pytest.approx(sum(longest) / len(longest)) if longest else None)
    groups: dict[int, list[Any]] = {}
    for one in rollouts:
        groups.setdefault(one.ordinal, []).append(one)
    for group in groups.values():
        texts = sorted(one.completion for one in group)
        assert len(texts) == 4
        for one in group:
            if one.failure is not None:
                assert one.failure.startswith("flaky: ValueError: \x1b[31mthe third (test_given_rewards.py, line ")
                continue
            assert (one.extra, one.logged) == ({"length": len(one.completion)}, {"longest": max(map(len, texts))})
            parts = one.parts
            assert list(parts) == ["flaky", "ranks", "length"]
            assert parts["ranks"] == float(texts.index(one.completion))
            assert one.reward == pytest.approx(parts["flaky"] + 0.5 * parts["ranks"] + 2.0 * parts["length"])

    scored = [json.loads(line) for line in (result.out / "events.jsonl").read_text().splitlines()]
    counts = [line["event"].get("num_failed", 0) for line in scored if "event" in line]
    assert result.summary["prompts"]["failed_completions"] == sum(counts) >= len(failed)
    (alarm,) = [one for one in read_alarms(result.out / "alarms.jsonl") if one.name == "failed_rewards"]
    assert 16 <= alarm.value < 20
    assert "the last: flaky: ValueError:" in alarm.text
    told = "".join(capfd.readouterr()).replace("\n", " ")
    assert "rewards: a completion could not be scored" in told
    assert "completions so far, the last: flaky: ValueError: \\x1b[31mthe third" in told
    assert "completions could not be scored, and counted with" in told
    assert "\x1b[31mthe third" not in told

    with pytest.raises(ConfigError, match="'flaky' is a Python function"):
        slipstream.run(result.out, resume=result.out, overrides={"steps": 8})
    with pytest.raises(ConfigError, match="already complete"):
        slipstream.run(result.out, resume=result.out, reward=rewards)


def test_a_broken_function_is_refused_before_anything_is_made(tiny, tmp_path, capfd):
    def broken(completions, **_):
        return 1.0

    with pytest.raises(ConfigError, match=r"broken: TypeError: it returned 1\.0"):
        slipstream.run("quickstart", overrides=tiny, reward=broken, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    assert "prompts:" not in "".join(capfd.readouterr())
