"""The whole chain in miniature: sft, preferences, reward model, RL, evaluation; and what `--resume` leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from audit import lines
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import slipstream
from slipstream.core.errors import ConfigError
from slipstream.stages.named import resolve

CHAIN = {
    "stages": ["sft", "preferences", "reward_model", "rl", "evaluate"],
    "steps": 3,
    "groups_per_step": 4,
    "completions_per_group": 4,
    "host": "inline",
    "model": {
        "path": "stage:sft",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 2,
    },
    "prompts": {"num_train": 300, "num_eval": 24},
    "generator": {"num_slots": 16},
    "warm_start": {"steps": 0},
    "eval": {"every": 0, "num_prompts": 24, "num_slots": 8},
    "sft": {
        "steps": 60,
        "batch_size": 32,
        "demonstrations": [{"template": "{answer}"}, {"template": "{word}"}],
        "optimizer": {"lr": 3e-3},
    },
    "preferences": {"num_prompts": 40, "samples_per_prompt": 4, "with_reference": True, "held_out": 0.25},
    "reward_model": {"batch_size": 16, "normalise_samples": 32, "optimizer": {"lr": 1e-3}},
    "gold": {"terms": [{"function": "task"}]},
    "judge": {"function": "tests.integration.test_stages:shorter"},
    "rewards": {"terms": [], "models": [{"path": "stage:reward_model"}]},
    "kl": {"coef": 0.05, "reference": "stage:sft"},
    "evaluation": {"num_prompts": 24, "num_samples": 2},
}


def shorter(prompt: str, a: str, b: str) -> str:
    """A judge that knows one thing."""
    return "tie" if len(a) == len(b) else "a" if len(a) < len(b) else "b"


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, slipstream.Result]:
    out = tmp_path_factory.mktemp("chain") / "run"
    overrides = CHAIN | {"judge": {"function": f"{__file__}:shorter"}}
    return out, slipstream.run("quickstart", overrides=overrides, out=out, display=False)


def test_every_stage_leaves_what_the_next_takes(chain: tuple[Path, slipstream.Result]) -> None:
    out, result = chain
    assert result.status == "done"
    for checkpoint in ("sft/model", "model"):
        AutoModelForCausalLM.from_pretrained(out / checkpoint)
    AutoModelForSequenceClassification.from_pretrained(out / "reward_model" / "model")
    records = {stage: json.loads((out / stage / "stage.json").read_text()) for stage in ("sft", "preferences")}
    assert records["sft"]["last_loss"] < records["sft"]["first_loss"]
    assert records["preferences"]["num_preferences"] == len(lines(out / "preferences" / "preferences.jsonl"))
    reward_model = json.loads((out / "reward_model" / "stage.json").read_text())
    assert reward_model["held_out_accuracy"] > 0.5
    assert reward_model["sample_score_mean"] == pytest.approx(0.0, abs=1e-4)
    assert reward_model["sample_score_std"] == pytest.approx(1.0, abs=1e-4)


def test_preferences_prefer_what_gold_scores_higher(chain: tuple[Path, slipstream.Result]) -> None:
    found = lines(chain[0] / "preferences" / "preferences.jsonl")
    for line in found:
        scores = [candidate["score"] for candidate in line["candidates"]]
        assert scores[line["best"]] == max(scores)
        assert len(set(scores)) == 2
    assert {line["is_held_out"] for line in found} == {True, False}
    held_out = {line["prompt_id"] for line in found if line["is_held_out"]}
    assert not held_out & {line["prompt_id"] for line in found if not line["is_held_out"]}
    assert any(candidate["is_reference"] for line in found for candidate in line["candidates"])


def test_rl_is_rewarded_by_the_model_and_gold_stays_hidden(chain: tuple[Path, slipstream.Result]) -> None:
    rollouts = [line for line in lines(chain[0] / "rollouts.jsonl") if line["step"] is not None]
    assert len(rollouts) == 3 * 4 * 4
    assert all(list(rollout["parts"]) == ["reward_model"] for rollout in rollouts)
    metrics = [line for line in lines(chain[0] / "metrics.jsonl") if "kl_reference" in line]
    assert metrics[0]["kl_reference_sum"] == pytest.approx(0.0, abs=1e-3)  # the reference is the policy it starts as


def test_evaluation_before_and_after(chain: tuple[Path, slipstream.Result]) -> None:
    out, result = chain
    found = json.loads((out / "evaluation.json").read_text())
    assert result.summary["evaluation"] == found
    assert json.loads((out / "summary.json").read_text())["evaluation"] == found
    assert found["before"]["drift"]["kl"]["per_sequence"]["mean"] == pytest.approx(0.0, abs=1e-3)
    for moment in ("before", "after"):
        measured = found[moment]
        assert measured["gold"]["mean_reference_score"] == 1.0
        assert 0.0 <= measured["gold"]["win_rate"]["mean"] <= 0.5  # nothing beats a perfect reference
        assert set(measured["gold"]["pass_at_k"]) == {"1", "2"}
        drift = measured["drift"]["perplexity"]
        assert 1.0 < drift["per_text_token"]["mean"] < drift["per_response_token"]["mean"]
        assert measured["judge"]["position_bias"] == 0.0
        assert measured["lengths"]["count"] == 48
    report = (out / "report.html").read_text()
    assert "Gold, judge and drift" in report
    assert "perplexity per response token" in report


def test_what_is_done_is_not_done_again(chain: tuple[Path, slipstream.Result]) -> None:
    """A chain whose evaluation is missing evaluates, and nothing else; the numbers are the same."""
    out, result = chain
    (out / "evaluation.json").unlink()
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    again = slipstream.run("quickstart", resume=out, display=False)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")} == stamps
    for moment in ("before", "after"):
        assert again.summary["evaluation"][moment] == result.summary["evaluation"][moment]
    assert slipstream.evaluate_model(out, num_prompts=4).num_prompts == 4  # its reward model is found


@pytest.mark.slow
def test_a_stage_has_a_process_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What it shows is shown, what it makes is there, and what it says of bad input is raised here."""
    data = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    data.write_text("\n".join([json.dumps({"prompt": "abc>", "completion": "cba"})] * 20))
    tables: dict[str, Any] = {
        "stages": ["sft"],
        "recipe": "short",
        "model": CHAIN["model"] | {"path": None},
        "prompts": {"dataset": str(data)},
        "sft": {"dataset": str(data), "epochs": 2, "batch_size": 8, "loss_on": "all"},
    }
    result = slipstream.run(tables, out=tmp_path / "run")
    assert (result.status, result.summary["steps"], result.summary["num_demonstrations"]) == ("done", 6, 20)
    assert "sft" in capfd.readouterr().out
    metrics = lines(tmp_path / "run" / "sft" / "metrics.jsonl")
    each = 7  # "bc>" and "cba" with its end: all but the first token
    assert [line["num_tokens"] for line in metrics] == 2 * [8 * each, 8 * each, 4 * each], "two passes over 20"
    data.write_text(json.dumps({"messages": [*messages, messages[0]]}))
    with pytest.raises(ConfigError, match="ends with the assistant's answer"):
        slipstream.run(tables, out=tmp_path / "again", display=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ["rl", "sft"]}, "stages have one order"),
        ({"stages": []}, "stages have one order"),
        ({"stages": ["rl"]}, "a stage that this run does not go through"),
        ({"stages": ["sft", "reward_model", "rl"]}, "a reward model needs preferences"),
        ({"stages": ["sft", "preferences", "reward_model", "evaluate"]}, "what rl has changed"),
        ({"kl": {"reference": "stage:reward_model"}}, "no stage makes what kl.reference needs"),
        ({"gold": {"terms": []}}, "labelled by the reward model that is trained on them"),
        ({"preferences": {"labels": "judge"}, "judge": {}}, "needs a judge"),
        ({"preferences": {"samples_per_prompt": 1, "with_reference": False}}, "too few completions"),
        ({"evaluation": {"num_prompts": 25}}, "more prompts than are held out"),
        ({"model": CHAIN["model"] | {"path": None}}, "no checkpoint of the policy that RL starts from"),
    ],
)
def test_chains_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    tables = {name: value for name, value in CHAIN.items() if name != "judge"}
    merged = tables | {
        name: tables.get(name, {}) | value if isinstance(value, dict) else value for name, value in changes.items()
    }
    with pytest.raises(ConfigError, match=message):
        resolve("quickstart", merged)
