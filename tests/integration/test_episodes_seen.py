"""A run of episodes in processes, by its files: what is said of them adds up, and every second is accounted for."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from accounted import check_runs
from audit import lines
from catalogued import check_metric_names
from trace_audit import audit_trace

import slipstream
from slipstream.controller.replay import replay

ENVIRONMENT = '''
class Asks:
    """Asks on for as many turns as the answer says, 1..4; of an odd answer one object fails at its second turn."""

    failed = set()

    def reset(self, answer, **columns):
        self.turns, self.answer, self.left = 0, int(answer), 1 + int(answer) % 4

    def step(self, message):
        self.turns += 1
        self.left -= 1
        if self.turns == 2 and self.answer % 2 and self.answer not in Asks.failed:
            Asks.failed.add(self.answer)
            raise RuntimeError("lost my notes")
        said = [{"role": "tool", "name": "look", "content": "<script>"}, {"role": "user", "content": "?"}]
        return {"messages": said, "done": self.left == 0, "reward": float(len(message["content"]) % 3)}
'''
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("episodes")
    (folder / "asks.py").write_text(ENVIRONMENT)
    config = {
        "recipe": "episodes",
        "steps": 4,
        "groups_per_step": 2,
        "completions_per_group": 4,
        "max_staleness": 1,
        "weight_update": "in_flight",
        "host": "process",
        "model": {**TINY, "max_positions": 128},
        "prompts": {"tasks": [{"name": "chain_sum"}], "num_train": 64, "num_eval": 8, "template": "{expression}="},
        "generator": {"num_slots": 8, "max_new_tokens": 6, "replicas": 2},
        "eval": {"num_prompts": 8, "every": 0},
        "observe": {"tokens_every": 1},
        "environment": {"class_path": f"{folder / 'asks.py'}:Asks", "max_turns": 3, "max_episode_tokens": 60},
    }
    slipstream.run(config, out=folder / "run")
    return folder / "run"


def test_the_files_tell_the_same_of_episodes(run_dir: Path) -> None:
    rollouts = lines(run_dir / "rollouts.jsonl")
    steps = [line for line in lines(run_dir / "metrics.jsonl") if "episode/turns_mean" in line]
    assert len(steps) == 4
    for line in steps:
        own = [(one, one["episode"]) for one in rollouts if one["step"] == line["step"]]
        turns = [episode["turns"] for _, episode in own]
        assert line["episode/turns_mean"] == pytest.approx(sum(turns) / 8)
        assert line["episode/turns_max"] == max(turns)
        assert line["episode/cut_frac"] == sum(episode.get("is_cut", False) for _, episode in own) / 8
        assert line["episode/restarts_mean"] == sum(episode.get("restarts", 0) for _, episode in own) / 8
        seconds = [episode["environment_s"] for _, episode in own]
        assert line["episode/environment_s_mean"] == pytest.approx(sum(seconds) / 8)
        assert line["episode/environment_s_max"] == pytest.approx(max(seconds))
        given = sum(_given(one["versions"], one["num_tokens"]) for one, _ in own)
        assert line["episode/given_frac"] == pytest.approx(given / sum(one["num_tokens"] for one, _ in own))
    for one in rollouts:
        episode = one["episode"]
        said = [message for message in episode["messages"] if message["role"] == "assistant"]
        assert len(said) == episode["turns"] == len(episode["turn_rewards"]) == min(3, 1 + int(one["answer"]) % 4)
        assert episode.get("is_cut", False) == (int(one["answer"]) % 4 == 3)
        assert one["reward"] == pytest.approx(math.fsum(episode["turn_rewards"]))


def _given(versions: list[list[int]], num_tokens: int) -> int:
    ends = [first for first, _ in versions[1:]] + [num_tokens]
    return sum(end - first for (first, version), end in zip(versions, ends, strict=True) if version == -1)


def test_tokens_that_were_given_are_marked_and_turns_begin_behind_them(run_dir: Path) -> None:
    rollouts = {(one["ordinal"], one["sample"]): one for one in lines(run_dir / "rollouts.jsonl")}
    written = lines(run_dir / "tokens.jsonl")
    assert len(written) == 32
    for one in written:
        ends = [first for first, _ in one["versions"][1:]] + [one["num_tokens"]]
        given = [
            index
            for (first, version), end in zip(one["versions"], ends, strict=True)
            for index in range(first, end)
            if version == -1
        ]
        assert [i for i, value in enumerate(one["behaviour_logprobs"]) if value is None] == given
        assert all(one["policy_logprobs"][i] is None and one["advantages"][i] is None for i in given)
        assert len(one["turns"]) == rollouts[one["ordinal"], one["sample"]]["episode"]["turns"]
        assert one["turns"] == [0, *(i + 1 for i in given if i + 1 not in given)]


def test_the_summary_counts_them(run_dir: Path) -> None:
    found = json.loads((run_dir / "summary.json").read_text())["episodes"]
    rollouts = lines(run_dir / "rollouts.jsonl")
    restarts = sum(one["episode"].get("restarts", 0) for one in rollouts)
    assert found["restarts"] >= restarts > 0, "those of evaluations included"
    assert found["episodes"] >= len(rollouts) + 4 * 8 - 16, "training, and two evaluations at two temperatures"
    assert found["turns"] > sum(one["episode"]["turns"] for one in rollouts)
    assert 1.0 <= found["mean_turns"] <= 3.0
    assert (found["failed"], found["tool_calls"], found["evicted_sessions"]) == (0, 0, 0)
    assert found["cut"] >= sum(one["episode"].get("is_cut", False) for one in rollouts)
    assert found["environment_s"] >= 0.99 * sum(one["episode"]["environment_s"] for one in rollouts)
    assert found["parked_hit_frac"] == pytest.approx(1.0, abs=0.2)


def test_every_second_and_every_decision_is_accounted_for(run_dir: Path) -> None:
    check_runs(run_dir.parent)
    check_metric_names(run_dir.parent)
    accounting = json.loads((run_dir / "summary.json").read_text())["accounting"]
    assert list(accounting) == ["controller", "generator-0", "generator-1", "environments", "rewards", "trainer"]
    assert accounting["environments"]["wait_turns"] > 0.0
    assert accounting["environments"]["step"] > 0.0
    assert audit_trace(run_dir)["groups"] >= 8
    assert replay(run_dir).divergence is None


def test_the_report_shows_transcripts_and_runs_nothing_of_them(run_dir: Path) -> None:
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "Turns of an episode" in page
    assert "tool look" in page
    assert "&lt;script&gt;" in page
    assert "<script" not in page
