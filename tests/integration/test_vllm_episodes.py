"""Whole runs of episodes over vLLM: logprobs, versions, evaluations, and what its prefix cache has of later turns.

Over a make-believe one that samples from our own model; and over a real one, by `make test-vllm`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import turn_environments
from audit import audit, lines
from test_agent_runs import branches_of, largest_gap
from test_episode_versions import ROUNDING, SYNCHRONOUS, Heard, episodes, heard, versions_of
from test_vllm_run import FAKE, HEADS_FOR_VLLM
from turn_environments import Talkative, Unpunctual, forking_agent

import slipstream
from slipstream.core.packed import TrainSequence
from slipstream.core.run_log import read_metrics
from slipstream.generator.requests import Finished
from slipstream.generator.vllm import backend
from slipstream.generator.vllm.engine import VLLMEngine
from slipstream.trainer import batch

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


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in_flight", "between_batches"])
@pytest.mark.parametrize("rank", [None, 4])
def test_episodes_are_sampled_by_the_versions_they_name(
    mode: str, rank: int | None, heard: Heard, over_vllm: dict[str, Any], tmp_path: Path
) -> None:
    """Every token's logprob is what its version gives it behind all that came before, sampled and given."""
    overrides = over_vllm | {"weight_update": mode, "max_staleness": 2 if mode == "in_flight" else 1}
    overrides |= {"steps": 5, "groups_per_step": 4}  # long enough for swaps to fall into episodes
    overrides |= {"model": HEADS_FOR_VLLM | {"lora": {"rank": rank}}}
    result = run(overrides, tmp_path / "run", environment=Unpunctual)
    trained = heard.of("train")
    assert max(len(one.segments) for one in trained) >= 5, "three turns and what was said in between"
    spanning = [one for one in trained if len({*versions_of(one)}) > 1]
    assert bool(spanning) == (mode == "in_flight")
    if mode == "between_batches":
        assert ("drain" in result.summary["accounting"]["generator-0"]) == (rank is None)
    check_versions(heard, result.out)
    assert 0 < heard.largest_gap() < ROUNDING
    check_cache(result.out)


def check_versions(heard: Heard, out: Path) -> None:
    """Versions ascend in an episode; those of an evaluation are all of the version that it was asked for."""
    assert all(versions_of(one) == sorted(versions_of(one)) for one in heard.of("train"))
    evaluated: dict[int, set[int]] = {}
    for one in heard.of("eval"):
        evaluated.setdefault(one.eval_id, set()).update(versions_of(one))
    asked = {line["version"] for line in lines(out / "metrics.jsonl") if "eval_reward" in line}
    assert all(len(versions) == 1 for versions in evaluated.values())
    assert {min(versions) for versions in evaluated.values()} == asked
    assert {0, json.loads((out / "summary.json").read_text())["steps"]} <= asked


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


# With a real vLLM


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[Finished]:
    """All that vLLM has finished, with the contexts that it was asked for."""
    found: list[Finished] = []
    step = VLLMEngine.step

    def noted(engine: VLLMEngine) -> list[Finished]:
        finished = step(engine)
        found.extend(finished)
        return finished

    monkeypatch.setattr(VLLMEngine, "step", noted)
    return found


@pytest.fixture
def sequences(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], TrainSequence]:
    """All that is trained."""
    found: dict[tuple[int, int], TrainSequence] = {}
    make = batch.train_sequence

    def noted(*given: Any) -> TrainSequence:
        made = make(*given)
        found[made.key] = made
        return made

    monkeypatch.setattr(batch, "train_sequence", noted)
    return found


def check_ids(sampled: list[Finished], sequences: dict[tuple[int, int], TrainSequence]) -> None:
    """Each turn was sampled behind just the ids that it is trained behind, and its own ids and logprobs are trained."""
    masks = {key: np.zeros(len(one.tokens), dtype=bool) for key, one in sequences.items()}
    for turn in sampled:
        key = turn.ordinal, turn.sample
        if turn.request.stream == 0 and key in sequences:
            trained, start = sequences[key], len(turn.request.prompt_tokens)
            end = start + len(turn.tokens)
            assert trained.tokens[:start].tolist() == turn.request.prompt_tokens.tolist()
            assert trained.tokens[start:end].tolist() == turn.tokens.tolist()
            np.testing.assert_array_equal(trained.behaviour_logprobs[start:end], turn.logprobs)
            masks[key][start:end] = True
    for key, mask in masks.items():
        np.testing.assert_array_equal(sequences[key].mask, mask)


def whole_blocks_frac(sampled: list[Finished]) -> float:
    """Of what vLLM has computed of an episode before each later turn, the part that lies in whole blocks."""
    num_known = num_found = 0
    computed: dict[Any, int] = {}  # evaluations count their episodes alike
    for turn in sampled:
        if turn.request.num_before:
            num_known += computed[turn.request.session]
            num_found += computed[turn.request.session] // BLOCK * BLOCK
        computed[turn.request.session] = len(turn.request.prompt_tokens) + len(turn.tokens) - 1
    return num_found / num_known


BLOCK = 32  # tokens; the least that vLLM takes on a CPU
LONG_EPISODES = {"max_turns": 6, "max_episode_tokens": 880, "observation": "{content}"}
CHOICES = [
    {"name": "environment", "class": f"{turn_environments.__file__}:Talkative"},
    {"name": "agent", "agent": f"{turn_environments.__file__}:talkative_agent"},
]


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mode", "rank"), [("synchronous", None), ("in_flight", 4), ("between_batches", 4)])
def test_episodes_with_a_real_vllm(
    mode: str,
    rank: int | None,
    heard: Heard,
    sampled: list[Finished],
    sequences: dict[tuple[int, int], TrainSequence],
    episodes: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Turns of environments, and those that agents ask for through the gateway.

    The oracle is a pass of our own model over each whole episode, under the version that every token names.
    """
    is_synchronous = mode == "synchronous"
    vllm = {"engine_args": {"block_size": BLOCK}}
    overrides = episodes | {
        "steps": 3,
        "groups_per_step": 4,
        "deadline_s": 400.0,
        "model": HEADS_FOR_VLLM | {"max_positions": 960, "lora": {"rank": rank}},
        "generator": {
            "engine": "vllm",
            "num_slots": 8,
            "max_new_tokens": 48,
            "vllm": vllm,
            "kv_on_update": "recompute",
        },
        "environment": LONG_EPISODES | ({"choices": CHOICES} if is_synchronous else {}),
        "rewards": {"terms": []},
        "eval": {"every": 3, "num_prompts": 4, "num_slots": 4},
    }
    overrides |= SYNCHRONOUS if is_synchronous else {"weight_update": mode, "max_staleness": 1, "steps": 4}
    result = run(overrides, tmp_path / "run", **({} if is_synchronous else {"environment": Talkative}))
    check_ids(sampled, sequences)
    trained = heard.of("train")
    assert max(len(one.segments) for one in trained) >= 5
    if is_synchronous:
        has_agents = {one.episode is not None and not one.episode.turn_rewards for one in trained}
        assert has_agents == {False, True}, "an agent gives no reward to a turn"
    check_versions(heard, result.out)
    spanning = [one for one in trained if len({*versions_of(one)}) > 1]
    assert bool(spanning) == (mode == "in_flight")
    assert 0 < heard.largest_gap() < ROUNDING
    found = [line for line in read_metrics(result.out / "metrics.jsonl") if "reward_mean" in line]
    at_lag_0 = [line["logprob_diff_max/lag_0"] for line in found if "logprob_diff_max/lag_0" in line]
    assert len(at_lag_0) == overrides["steps"] if is_synchronous else at_lag_0
    assert 0 < max(at_lag_0) < ROUNDING
    summary = result.summary["episodes"]
    assert summary["failed"] == summary["restarts"] == 0
    if mode == "in_flight":
        assert 0.5 < summary["parked_hit_frac"] < whole_blocks_frac(sampled), "a swap has the rest computed again"
    else:
        assert summary["parked_hit_frac"] == pytest.approx(whole_blocks_frac(sampled), abs=1e-9)
        assert summary["parked_hit_frac"] > 0.9
