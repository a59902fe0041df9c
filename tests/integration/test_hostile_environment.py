"""A run whose environments raise, hang, die, flood, forge and talk nonsense: it goes on, and nothing gets out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from audit import audit
from hostile_environments import COSTLY, HARMLESS, NUM_TURNS, final_reward, turn_reward

import slipstream
from slipstream.core.run_log import RolloutLine, read_rollouts
from slipstream.observe.tokens import read_tokens

SOURCE = Path(__file__).with_name("hostile_environments.py")
NUM_PEACEFUL = 8
MAX_EPISODE_TOKENS = 40
EOS = 1  # of the tokenizer by characters


def turns_of(line: RolloutLine) -> list[str]:
    assert line.episode is not None
    return [message["content"] for message in line.episode.messages if message["role"] == "assistant"]


def true_reward(word: str, texts: list[str]) -> float:
    return sum(turn_reward(word, texts[: n + 1]) for n in range(len(texts))) + final_reward(texts)


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    attacks = [*COSTLY, *HARMLESS, *["none"] * NUM_PEACEFUL]
    return [{"prompt": f"{n}>", "answer": "", "attack": attack, "word": f"{n}"} for n, attack in enumerate(attacks)]


@pytest.mark.slow
def test_hostile_environments_cost_their_episodes_and_nothing_else(tiny, rows, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_TEST_SECRET", "token")
    outside, out = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    outside.chmod(0o777)
    overrides = tiny | {
        "steps": 6,  # once through all rows that can be trained on, and a little more
        "groups_per_step": 4,
        "completions_per_group": 2,
        "prompts": {"num_eval": 1, "tasks": []},
        "warm_start": {"steps": 0},
        "rewards": {"terms": []},
        "loss": {"skip_no_signal": False},
        "generator": {"num_slots": 8, "max_new_tokens": 8},
        "eval": {"every": 0, "num_prompts": 1, "num_slots": 8},
        "observe": {"tokens_every": 1},
        "environment": {
            "class_path": f"{SOURCE}:Attacked",
            "parameters": {"run_dir": str(out), "outside": str(outside)},
            "max_turns": 4,
            "max_episode_tokens": MAX_EPISODE_TOKENS,
            "step_limit_s": 3.0,
            "max_restarts": 1,
            "num_workers": 2,
            "memory_mb": 512,
            "dry_run": False,
        },
    }
    result = slipstream.run("quickstart", overrides=overrides, prompts=rows, out=out, display=False)
    assert result.status == "done"
    assert not list(outside.iterdir()), "a worker wrote outside of its folder"
    fates = audit(out)["fates"]
    assert fates["trained"] == 24

    row_of = {row["prompt"]: row for row in rows}
    found: dict[str, list[RolloutLine]] = {}
    for line in read_rollouts(out / "rollouts.jsonl"):
        row = row_of[line.prompt]
        found.setdefault(row["attack"], []).append(line)
        if row["attack"] in COSTLY:
            assert line.failure is not None, f"{row['attack']} gave {line.reward}"
            causes = (COSTLY[row["attack"]], "worker", "timed out")  # the last straw may be another one's of its worker
            assert any(cause in line.failure for cause in causes), line.failure
            assert len(line.failure) < 1000
            assert (line.reward, line.outcome) == (0.0, "failed")
        else:
            texts = turns_of(line)
            assert line.failure is None, f"{row['attack']}: {line.failure}"
            assert line.reward == true_reward(row["word"], texts), row["attack"]
            assert len(texts) == (2 if row["attack"] == "talk" else NUM_TURNS)
    assert len(rows) - 1 <= sum(row["attack"] in found for row in rows), f"missing: {[r['attack'] for r in rows]}"
    told_of = [a for a, cause in COSTLY.items() if any(cause in (one.failure or "") for one in found.get(a, ()))]
    assert len(told_of) > len(COSTLY) / 2, told_of
    num_failed = sum(len(found.get(attack, ())) for attack in COSTLY)
    prompts = result.summary["prompts"]
    assert num_failed >= 2 * (len(COSTLY) - 1)
    assert (prompts["failed"], prompts["failed_completions"]) == (fates["dropped"], num_failed)
    assert 2 * prompts["failed"] == num_failed
    check_what_was_said(found, out)


def check_what_was_said(found: dict[str, list[RolloutLine]], out: Path) -> None:
    """Nothing was read that is secret, and what looks like control tokens is text."""
    tokens = {(line.ordinal, line.sample): line for line in read_tokens(out / "tokens.jsonl")}
    for attack in ("read", "network", "markup", "half_a_character"):
        for line in found.get(attack, ()):
            assert line.episode is not None
            said = [message["content"] for message in line.episode.messages if message["role"] == "user"]
            expected = {"markup": "<eos><pad>", "half_a_character": "\ufffd"}.get(attack, "?")
            assert said == ["?", expected, "?"]
            if attack == "markup":
                told = tokens[line.ordinal, line.sample]
                entries = zip(told.tokens, told.behaviour_logprobs, strict=True)
                given = [token for token, logprob in entries if logprob is None]
                ends = given.count(EOS)  # of turns that were cut by length
                assert len(given) == len("?<eos><pad>") + ends, "letter by letter, not a control token"
                assert ends <= 2
    for line in found.get("talk", ()):
        assert line.finish_reason == "length"
        assert line.num_tokens <= MAX_EPISODE_TOKENS
