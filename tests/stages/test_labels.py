"""Which preferences come of scored or judged completions, and what tl;dr in miniature consists of."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.core.stage_sections import JudgeConfig
from slipstream.core.types import Prompt
from slipstream.observe.evaluation import evaluation_rows
from slipstream.prompts.tasks import Posts
from slipstream.rewards.functions import build_scorer, make_term
from slipstream.rewards.protocol import RewardJob
from slipstream.stages.completions import build_judge
from slipstream.stages.preferences import Candidate, ScoredPrompt, labelled


def config(**changes: Any) -> RunConfig:
    tables: dict[str, Any] = {
        "stages": ["preferences"],
        "prompts": {"dataset": "none"},
        "rewards": {"terms": [{"function": "overlap"}]},
    }
    return resolve(tables | changes)


def scored(*scores: float | None, name: str = "p") -> ScoredPrompt:
    prompt = Prompt(prompt_id=name, text="q", tokens=np.array([5], np.int32), task="dataset")
    candidates = [Candidate(text="x" * index, tokens=[index], score=score) for index, score in enumerate(scores)]
    return ScoredPrompt(prompt, candidates)


def as_pairs(lines: list[Any]) -> list[tuple[int, int]]:
    """(chosen, rejected) by token."""
    return [(line.candidates[line.best].tokens[0], line.candidates[1 - line.best].tokens[0]) for line in lines]


def test_all_pairs_but_ties() -> None:
    assert as_pairs(labelled([scored(0.5, 1.0, 0.5)], config())) == [(1, 0), (1, 2)]


def test_fours_with_one_best() -> None:
    fours = config(reward_model={"candidates": 4})
    (line,) = labelled([scored(0.5, 0.1, 0.9, 0.5), scored(0.5, 0.9, 0.9, 0.5, name="tied")], fours)
    assert line.best == 2
    assert [candidate.score for candidate in line.candidates] == [0.5, 0.1, 0.9, 0.5]


def test_a_limit_per_prompt_draws_by_the_seed_among_decided_pairs() -> None:
    limited = config(preferences={"max_per_prompt": 2})
    found = labelled([scored(0.1, 0.2, 0.3, 0.4, name="a"), scored(0.1, 0.1, 0.1, 0.2, name="b")], limited)
    assert Counter(line.prompt_id for line in found) == {"a": 2, "b": 2}
    assert found == labelled([scored(0.1, 0.2, 0.3, 0.4, name="a"), scored(0.1, 0.1, 0.1, 0.2, name="b")], limited)


def test_whole_prompts_are_held_out() -> None:
    many = [scored(0.1, 0.2, 0.3, name=str(index)) for index in range(400)]
    found = labelled(many, config(preferences={"held_out": 0.25}))
    sides: dict[str, set[bool]] = {}
    for line in found:
        sides.setdefault(line.prompt_id, set()).add(line.is_held_out)
    assert all(len(side) == 1 for side in sides.values())
    assert 60 < sum(side == {True} for side in sides.values()) < 140


def likes_length(prompt: str, a: str, b: str) -> str:
    return "tie" if abs(len(a) - len(b)) < 2 else "a" if len(a) > len(b) else "b"


def test_a_judge_decides_in_both_orders() -> None:
    judged = config(preferences={"labels": "judge"}, judge={"function": f"{Path(__file__)}:likes_length"})
    assert as_pairs(labelled([scored(None, None, None)], judged)) == [(2, 0)]


def test_a_judge_is_imported_as_other_functions_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also out of a module in the working folder; an error of its file is told with its line."""
    monkeypatch.chdir(tmp_path)
    Path("judge_here.py").write_text("def judge(prompt, a, b):\n    return 'b'\n")
    Path("broken.py").write_text("\nint('x')\njudge = min\n")
    assert build_judge(JudgeConfig(function="judge_here:judge"))("", "x", "y") == "b"
    with pytest.raises(ConfigError, match=r"'broken.py:judge' cannot be imported\n.*broken.py, line 2"):
        build_judge(JudgeConfig(function="broken.py:judge"))


def test_posts_are_a_pure_function_of_their_number() -> None:
    posts, shifted = Posts(seed=3, size=50), Posts(seed=4, size=50)
    assert [posts[i] for i in range(1, 50)] == [shifted[i] for i in range(49)]
    for post in (posts[i] for i in range(50)):
        question, key = post["question"], post["metadata"]["key"]
        assert "".join(question[i + 1] for i, letter in enumerate(question) if letter == "*") == key
        assert 2 <= len(key) <= 4
        assert set(post["answer"]) <= set(question)
    assert Posts(seed=0, size=1, forget=0.0, mention=0.0)[0]["answer"] == Posts(seed=0, size=1)[0]["metadata"]["key"]
    with pytest.raises(ValueError, match="does not hold"):
        Posts(seed=0, size=1, min_marked=5, max_marked=4)


@pytest.mark.parametrize(
    ("completion", "characters", "expected"),
    [
        ("dog sun", False, 1.0),
        ("sun dog", False, 1.0),
        ("dog", False, 2 / 3),
        ("dog dog", False, 0.5),
        ("cat", False, 0.0),
        ("", False, 0.0),
        ("god nus", True, 1.0),
        ("dgx", True, 4 / 9),
    ],
)
def test_overlap_by_hand(completion: str, characters: bool, expected: float) -> None:
    scorer = build_scorer(make_term("overlap", {"column": "key", "characters": characters}), {})
    assert scorer(RewardJob(0, "q", completion, [], "", None, {"key": "dog sun"})) == pytest.approx(expected)
    assert scorer(RewardJob(0, "q", completion, [], "", "dog", {})) is None


def test_rows_say_what_was_measured() -> None:
    spread = {"mean": 0.25, "std": 1.0, "standard_error": 0.125, "count": 64}
    perplexity = {"per_response_token": spread | {"mean": None, "standard_error": None}, "per_text_token": spread}
    measured = {
        "gold": {"mean_score": 0.5, "win_rate": spread, "difference": spread, "pass_at_k": {"1": 0.2, "4": 0.75}},
        "reward_models": {"helpful": 1.5},
        "judge": None,
        "drift": {"perplexity": perplexity, "kl": None},
        "lengths": {"mean": 12.0, "truncated_share": 0.5},
    }
    without = measured | {"reward_models": None}
    rows = {name: (before, after) for name, before, after in evaluation_rows({"before": without, "after": measured})}
    assert rows["gold win rate against references"] == ("0.250 ± 0.125", "0.250 ± 0.125")
    assert rows["score by helpful"] == ("-", "1.500")
    assert rows["perplexity per response token"][0] == "inf"
    assert rows["pass@4"] == ("0.750", "0.750")
    assert not any("judge" in name or "KL" in name for name in rows)
