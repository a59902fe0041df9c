"""The judge behind an endpoint, through the chain: it labels preferences and compares at the end, and it may fail."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from audit import lines

import slipstream
from slipstream.evals.judge import JudgeError, JudgeRefused

sys.path.insert(0, str(Path(__file__).parents[1] / "evals"))
from fake_endpoint import Endpoint, Received, chat, http, serving

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
MODEL = "small-judge"


def shown(request: Received) -> tuple[str, str, str]:
    """(prompt, answer A, answer B) as a judge reads them."""
    found = dict(re.findall(r"\[(prompt|answer A|answer B) \w+\]\n(.*?)\n\[end of \1", request.text, re.DOTALL))
    return found["prompt"], found["answer A"], found["answer B"]


def longer(a: str, b: str) -> str:
    return "tie" if len(a) == len(b) else "A" if len(a) > len(b) else "B"


@dataclass
class Judging:
    """An endpoint in a thread of its own that prefers what is longer; where `fails` it says `failure` instead."""

    url: str = ""
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    fails: Callable[[], bool] = lambda: False
    failure: bytes = b""

    async def reply(self, request: Received, writer: asyncio.StreamWriter) -> None:
        assert request.body["model"] == MODEL
        if self.fails():
            writer.write(self.failure)
        else:
            self.asked.append(shown(request))
            self.keys.add(request.headers.get("authorization", ""))
            writer.write(chat(f"The longer one.\nVerdict: {longer(*self.asked[-1][1:])}"))
        await writer.drain()


@contextmanager
def judging() -> Iterator[Judging]:
    found, started = Judging(), threading.Event()
    stop: list[Callable[[], Any]] = []

    async def serve() -> None:
        stopped = asyncio.Event()
        async with serving(found.reply) as endpoint:
            assert isinstance(endpoint, Endpoint)
            found.url = endpoint.url
            loop = asyncio.get_running_loop()
            stop.append(lambda: loop.call_soon_threadsafe(stopped.set))
            started.set()
            await stopped.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(10)
    try:
        yield found
    finally:
        stop[0]()
        thread.join(10)


def tables(judge: Judging) -> dict[str, Any]:
    return {
        "stages": ["sft", "preferences", "reward_model", "rl", "evaluate"],
        "steps": 1,
        "groups_per_step": 4,
        "completions_per_group": 2,
        "host": "inline",
        "model": SMALL | {"path": "stage:sft"},
        "prompts": {"num_train": 100, "num_eval": 10},
        "generator": {"num_slots": 8, "max_new_tokens": 8},
        "warm_start": {"steps": 0},
        "eval": {"num_prompts": 4, "num_slots": 8},
        "sft": {"steps": 20, "batch_size": 16, "optimizer": {"lr": 5e-3}},
        "preferences": {"num_prompts": 8, "samples_per_prompt": 3, "max_per_prompt": 2, "labels": "judge"},
        "reward_model": {"normalise_samples": 8, "batch_size": 8},
        "judge": {"base_url": judge.url, "model": MODEL, "api_key_env": "JUDGE_KEY", "deadline_s": 10.0},
        "rewards": {"terms": [{"function": "task", "weight": 0.0}], "models": [{"path": "stage:reward_model"}]},
        "evaluation": {"num_prompts": 10},
    }


def assert_both_orders(asked: list[tuple[str, str, str]]) -> None:
    """Every comparison as often with its answers exchanged."""
    count = Counter(asked)
    assert all(count[prompt, b, a] == times for (prompt, a, b), times in count.items())


@pytest.mark.slow
def test_a_judge_labels_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-key")
    with judging() as judge:
        result = slipstream.run("quickstart", overrides=tables(judge), out=tmp_path / "run", display=False)
    assert judge.keys == {"Bearer secret-key"}
    assert_both_orders(judge.asked)
    found = lines(tmp_path / "run" / "preferences" / "preferences.jsonl")
    assert found
    for line in found:
        texts = [candidate["text"] for candidate in line["candidates"]]
        assert len(texts[line["best"]]) > len(texts[1 - line["best"]])
        assert all(candidate["score"] is None for candidate in line["candidates"]), "gold was not asked"
    assert max(Counter(line["prompt_id"] for line in found).values()) <= 2
    of_evaluation = judge.asked[-2 * 2 * 10 :]  # before and after, both orders, ten prompts
    assert_both_orders(of_evaluation)
    for moment in ("before", "after"):
        measured = result.summary["evaluation"][moment]["judge"]
        assert (measured["num_failed"], measured["consistency"], measured["position_bias"]) == (0, 1.0, 0.0)
        assert measured["num_wins"] + measured["num_ties"] + measured["num_losses"] == 10
        wins = (measured["num_wins"] + measured["num_ties"] / 2) / 10
        assert measured["win_rate"]["mean"] == pytest.approx(wins)
    saved = "".join(path.read_text() for path in (tmp_path / "run").rglob("*") if path.suffix in (".toml", ".json"))
    assert "secret-key" not in saved


@pytest.mark.slow
def test_a_judge_that_fails_midway_ends_the_stage_and_resume_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overloaded in `preferences`, refusing in `evaluate`: both are said, and no stage that was done is done again."""
    monkeypatch.setenv("JUDGE_KEY", "secret-key")
    run = tmp_path / "run"

    def stamps() -> dict[Path, int]:
        done = [stage for stage in ("sft", "preferences", "reward_model") if (run / stage / "stage.json").exists()]
        found = {path: path.stat().st_mtime_ns for stage in done for path in (run / stage).rglob("*")}
        return found | {path: path.stat().st_mtime_ns for path in [run / "model" / "config.json"] if path.exists()}

    with judging() as judge:
        judge.fails, judge.failure = lambda: len(judge.asked) >= 5, http(503, "overloaded")
        with pytest.raises(JudgeError, match="gave no verdict in 3 attempts") as failed:
            slipstream.run("quickstart", overrides=tables(judge), out=run, display=False)
        assert "status 503: overloaded" in str(failed.value)
        assert (run / "sft" / "stage.json").exists()
        assert not (run / "preferences" / "stage.json").exists()
        done = stamps()

        evaluating = itertools.count()
        judge.fails = lambda: (run / "model" / "config.json").exists() and next(evaluating) >= 7
        judge.failure = http(401, "no such key")
        with pytest.raises(JudgeRefused, match="refuses to judge") as refused:
            slipstream.run("quickstart", resume=run, display=False)
        assert "status 401: no such key" in str(refused.value)
        assert done.items() <= stamps().items()
        done = stamps()
        assert run / "model" / "config.json" in done
        assert json.loads((run / "summary.json").read_text())["status"] == "done", "RL is"
        assert not (run / "evaluation.json").exists()

        judge.asked.clear()
        judge.fails = lambda: False
        result = slipstream.run("quickstart", resume=run, display=False)
    assert result.status == "done"
    assert stamps() == done
    assert len(judge.asked) == 2 * 2 * 10, "the evaluation alone"
    assert result.summary["evaluation"]["after"]["judge"]["num_failed"] == 0
