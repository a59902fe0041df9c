"""`generator.seeds`: whose noise a training sample is drawn with, and that evaluation does not care."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.core.config import RunConfig
from slipstream.core.run_log import read_rollouts
from slipstream.core.sections import TaskConfig
from slipstream.generator import native
from slipstream.generator.backends import training_seed


def test_seeds_of_replicas() -> None:
    """N, item 9: seed + rank * 100003."""

    def seeds_of(mode: str) -> list[int]:
        sections = {"prompts": {"tasks": [TaskConfig(name="chain_sum")]}, "generator": {"seeds": mode}}
        config = RunConfig.model_validate({"seed": 7, **sections})
        return [training_seed(config, replica) for replica in range(3)]

    assert seeds_of("shared") == [7, 7, 7]
    assert seeds_of("per_replica") == [7, 100_010, 200_013]


def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """In the place of a verifier, whose process takes longer to start than a run to sample."""
    return [float(len(text)) for text in completions]


def sampled(out: Path, **generator: Any) -> dict[tuple[int, int], tuple[int, str]]:
    """{(ordinal, sample): (replica, text)} of one step of an untrained model."""
    overrides = {
        "seed": 7,
        "steps": 1,
        "host": "inline",
        "groups_per_step": 8,
        "completions_per_group": 2,
        "max_staleness": 0,
        "weight_update": "between_batches",
        "model": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2},
        "prompts": {"num_train": 100, "num_eval": 8},
        "generator": {"num_slots": 8, "max_new_tokens": 8, **generator},
        "loss": {"skip_no_signal": False},
        "trainer": {"minibatches": 1},
        "warm_start": {"steps": 0},
        "eval": {"every": 0, "num_prompts": 8, "num_slots": 8},
    }
    slipstream.run("quickstart", overrides=overrides, reward=length, out=out, display=False)
    return {(r.ordinal, r.sample): (r.replica, r.completion) for r in read_rollouts(out / "rollouts.jsonl")}


def test_a_replicas_own_seed_changes_what_it_samples_and_no_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[tuple[str | None, int]] = []

    class Recorded(native.Engine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            seeds.append((kwargs["spans"].state, kwargs["seed"]))
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(native, "Engine", Recorded)
    one = sampled(tmp_path / "one")
    shared = sampled(tmp_path / "shared", replicas=2)
    assert {key: text for key, (_, text) in shared.items()} == {key: text for key, (_, text) in one.items()}
    seeds.clear()
    apart = sampled(tmp_path / "apart", replicas=2, seeds="per_replica")
    assert {replica for replica, _ in apart.values()} == {0, 1}
    for key, (replica, text) in apart.items():
        assert (text == one[key][1]) == (replica == 0), key
    assert sorted(seed for state, seed in seeds if state is None) == [7, 100_010]
    evaluations = [seed for state, seed in seeds if state == "evaluate"]
    assert evaluations
    assert set(evaluations) == {7}
