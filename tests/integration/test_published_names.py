"""SFT, a reward model from ratings, actor-critic PPO: one chain writes every metric that docs/ppo_details.md names."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slipstream
from slipstream.core.errors import ConfigError
from slipstream.core.jsonl import read_jsonl
from slipstream.observe.samples import read_samples

PAGE = Path(__file__).parents[2] / "docs" / "ppo_details.md"
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}


def named(heading: str) -> set[str]:
    """Every name in the first column of the table below a heading; `a/{b,c}` stands for `a/b` and `a/c`."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n", maxsplit=1)[1].split("\n## ")[0]
    found: set[str] = set()
    for line in section.splitlines():
        if not line.startswith("| `"):
            continue
        for pattern in re.findall(r"`([^`]+)`", line.split("|")[1]):
            head, _, rest = pattern.partition("{")
            inside, _, tail = rest.partition("}")
            found |= {f"{head}{part}{tail}" for part in inside.split(",")} if rest else {head}
    return found


def tables(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    data = tmp_path / "rated.jsonl"
    if not data.exists():
        rows = [
            {"prompt": prompt, "completion": "y" * y + "n" * (4 - y), "rating": 5 + y, "answer": "yy"}
            for prompt in map(chr, range(ord("a"), ord("y")))
            for y in range(5)
        ]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "stages": ["sft", "reward_model", "rl"],
        "steps": 2,
        "groups_per_step": 4,
        "completions_per_group": 2,
        "max_staleness": 0,
        "weight_update": "between_batches",
        "host": "inline",
        "model": {**SMALL, "path": "stage:sft", "max_positions": 24},
        "prompts": {"dataset": str(data), "template": "{question}>", "max_prompt_tokens": 8, "num_eval": 2},
        "generator": {"max_new_tokens": 6, "num_slots": 8},
        "sft": {"steps": 2, "batch_size": 8},
        "reward_model": {
            "preferences": str(data),
            "candidates": 1,
            "normalise_samples": 16,
            "steps": 60,
            "batch_size": 16,
            "optimizer": {"lr": 5e-3},
        },
        "preferences": {"held_out": 0.25},
        "rewards": {"terms": [], "models": [{"path": "stage:reward_model"}]},
        "loss": {"name": "ppo", "advantages": "gae", "whiten_advantages": "minibatch"},
        "kl": {"coef": 0.1},
        "critic": {"model": "head"},
        "eval": {"every": 1, "num_prompts": 2, "num_slots": 8},
        **changes,
    }


def test_every_name_on_the_page_is_written(tmp_path: Path) -> None:
    out = tmp_path / "run"
    slipstream.run(tables(tmp_path), out=out, display=False)
    rl = list(read_jsonl(out / "metrics.jsonl", dict[str, Any]))
    steps = [line for line in rl if "loss" in line]
    written: set[str] = {name for line in rl for name in line}
    for stage in ("sft", "reward_model"):
        written |= {name for line in read_jsonl(out / stage / "metrics.jsonl", dict[str, Any]) for name in line}
    record = json.loads((out / "reward_model" / "stage.json").read_text())
    names = named("Metrics under their published names")
    assert len(names) > 50
    assert not names - written - set(record), "named on the page and not written"
    published = {n for n in written if n.startswith(("objective/", "ppo/", "elapsed/", "train/"))}
    assert not published - names, "written and not on the page"

    assert record["held_out_accuracy"] == record["test/accuracy"] > 0.8
    assert record["sample_score_mean"] == pytest.approx(0, abs=1e-4), "normalised after training"
    assert record["sample_score_std"] == pytest.approx(1, rel=1e-3)
    first, last = steps
    assert (first["elapsed/updates"], last["elapsed/updates"]) == (1, 2)
    assert last["elapsed/steps/serial"] == 2 * 6
    assert last["elapsed/steps/total"] == 2 * 8 * 6
    assert 0 < first["elapsed/time"] < last["elapsed/time"]
    assert last["elapsed/fps"] == math.floor(8 * 6 / last["step_s"])
    assert last["ppo/eps"] > 0

    shown = read_samples(out / "samples.json")
    assert len(shown) == 2, "all held-out prompts"
    validated = [line for line in rl if "objective/validation_score" in line]
    assert [line["version"] for line in validated] == [0, 1, 2]
    rewards = np.array([(one.before_reward, one.after_reward) for one in shown], dtype=np.float64)
    found = [validated[at]["objective/validation_score"] for at in (0, 2)]
    assert found == pytest.approx(rewards.mean(axis=0).tolist(), rel=1e-5)


@pytest.mark.parametrize("wrong", [{"rating": "5"}, {"rating": True}, {"completion": None}, {"rating": None}])
def test_a_row_without_a_number_is_no_rating(tmp_path: Path, wrong: dict[str, Any]) -> None:
    config = tables(tmp_path, stages=["reward_model", "rl"], model={**SMALL, "max_positions": 24})
    data = Path(config["prompts"]["dataset"])
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    torn = tmp_path / "torn.jsonl"
    torn.write_text("".join(json.dumps(row) + "\n" for row in [rows[0], rows[1] | wrong]))
    config["reward_model"]["preferences"] = str(torn)
    with pytest.raises(ConfigError, match="line 2 is no rating"):
        slipstream.run(config, out=tmp_path / "run", display=False)


def test_the_stage_preferences_rates_nothing() -> None:
    with pytest.raises(ConfigError, match="compares completions and rates none"):
        slipstream.resolve(
            {
                "stages": ["preferences", "reward_model", "rl"],
                "prompts": {"tasks": [{"name": "chain_sum"}]},
                "reward_model": {"candidates": 1},
            }
        )
