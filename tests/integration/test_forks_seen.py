"""A run of agents whose episodes fork, by its files: every branch is there to be read, and everything adds up."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
from accounted import check_runs
from audit import lines
from catalogued import check_metric_names

import slipstream

AGENT = '''
import json
import urllib.request


def ask(messages, base_url, api_key):
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        data=json.dumps({"model": "policy", "messages": messages}).encode(),
        headers={"Authorization": f"Bearer {api_key}"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)["choices"][0]["message"]


def agent(row, base_url, api_key):
    """Two turns, then, for odd answers, a fork behind a summary and one with what was said put otherwise."""
    chat = [{"role": "user", "content": row["prompt"]}]
    first = ask(chat, base_url, api_key)
    second = ask([*chat, first, {"role": "user", "content": "?"}], base_url, api_key)
    if int(row["answer"]) % 2:
        ask([{"role": "user", "content": "+"}], base_url, api_key)
        changed = {"role": "assistant", "content": "7"}
        ask([*chat, changed, {"role": "user", "content": "8"}], base_url, api_key)
    return float(len(first["content"] or "") % 3)


def forks(prompts, completions, completion_ids, branches, **columns):
    return [float(len(chats)) for chats in branches]
'''
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forks")
    (folder / "forking.py").write_text(AGENT)
    config = {
        "recipe": "forks",
        "steps": 3,
        "groups_per_step": 2,
        "completions_per_group": 4,
        "max_staleness": 1,
        "host": "process",
        "model": {**TINY, "max_positions": 128},
        "prompts": {"tasks": [{"name": "chain_sum"}], "num_train": 64, "num_eval": 4, "template": "{expression}="},
        "generator": {"num_slots": 8, "max_new_tokens": 6},
        "loss": {"name": "grpo", "advantages": "group_normalised", "several_rewards": "normalise_then_sum"},
        "rewards": {"terms": [{"function": f"{folder / 'forking.py'}:forks", "weight": 0.0}]},
        "eval": {"num_prompts": 4, "every": 0},
        "observe": {"tokens_every": 1},
        "environment": {"agent": f"{folder / 'forking.py'}:agent", "max_turns": 6, "max_episode_tokens": 100},
    }
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        slipstream.run(config, out=folder / "run")
    (folder / "shown.txt").write_text(shown.getvalue())
    return folder / "run"


def test_every_branch_is_in_the_files(run_dir: Path) -> None:
    rollouts = lines(run_dir / "rollouts.jsonl")
    assert {int(one["answer"]) % 2 for one in rollouts} == {0, 1}
    for one in rollouts:
        episode, has_forks = one["episode"], int(one["answer"]) % 2 == 1
        assert one["parts"]["forks"] == (2.0 if has_forks else 0.0), "functions read the same"
        assert set(one["parts"]) == {"forks", "environment"}
        assert episode["turns"] == (4 if has_forks else 2)
        assert len(episode["messages"]) == 3
        if not has_forks:
            assert "branches" not in episode
            continue
        compacted, changed = episode["branches"]
        assert [message["role"] for message in compacted] == ["user", "assistant"]
        assert [message["role"] for message in changed] == ["user", "assistant", "user", "assistant"]
        assert (changed[0]["content"], changed[1]["content"]) == (one["prompt"], "7")
        assert episode["contexts"] == [1, 3]


def test_single_tokens_say_where_branches_begin(run_dir: Path) -> None:
    rollouts = {(one["ordinal"], one["sample"]): one for one in lines(run_dir / "rollouts.jsonl")}
    written = lines(run_dir / "tokens.jsonl")
    assert len(written) == 3 * 8
    for one in written:
        episode = rollouts[one["ordinal"], one["sample"]]["episode"]
        assert len(one["branches"]) == len(episode.get("branches", []))
        assert len(one["turns"]) == episode["turns"]
        assert all(one["behaviour_logprobs"][first] is None for first in one["branches"]), "contexts are given"


def test_forks_are_counted_alike(run_dir: Path) -> None:
    rollouts = lines(run_dir / "rollouts.jsonl")
    for line in lines(run_dir / "metrics.jsonl"):
        if "episode/forks" in line:
            own = [len(one["episode"].get("branches", [])) for one in rollouts if one["step"] == line["step"]]
            assert line["episode/forks"] == pytest.approx(sum(own) / 8)
    found = json.loads((run_dir / "summary.json").read_text())["episodes"]
    assert found["forks"] >= sum(len(one["episode"].get("branches", [])) for one in rollouts) > 0
    assert (found["refused"], found["failed"]) == (0, 0)


def test_the_first_fork_is_told_of_once_and_the_report_shows_it(run_dir: Path) -> None:
    shown = " ".join((run_dir.parent / "shown.txt").read_text().split())
    assert shown.count("does not go on where its episode ends: it is a fork") == 1
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "fork 1 of 2" in page
    assert "a context of its own, of 3 messages" in page


def test_every_second_is_accounted_for(run_dir: Path) -> None:
    check_runs(run_dir.parent)
    check_metric_names(run_dir.parent)
