"""Runs that judges pay: two beside a Python function, one that is `slipstream serve`, one that goes away meanwhile."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from audit import audit

import slipstream
from slipstream.core.run_log import read_metrics, read_rollouts

sys.path += [str(Path(__file__).parents[1] / name) for name in ("rewards", "evals")]
from judge_server import Answer, JudgeServer
from listeners import held_port
from reward_jobs import job
from test_serve import make_checkpoint

from slipstream.rewards.judge import question

KEY, KEY_ENV = "sk-very-secret-4567", "SLIPSTREAM_TEST_RUN_KEY"


def length_of(question: str) -> int:
    found = re.search(r"\[completion \w+\]\n(.*)\n\[end of completion", question, re.DOTALL)
    assert found is not None
    return len(found[1])


def by_length(question: str) -> Answer:
    return f"Score: {min(10, 1 + length_of(question) % 10)}"


def as_json(question: str) -> Answer:
    return json.dumps({"even": 1 - length_of(question) % 2})


def no_file_has_the_key(run: Path) -> bool:
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 10
    return not any(KEY.encode() in path.read_bytes() for path in files)


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(character in "aeiou" for character in completions[0]) / 10]


def judged(tiny: dict[str, Any], *judges: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return tiny | {
        "warm_start": {"steps": 0},
        "loss": {"skip_no_signal": False},
        "prompts": {**tiny["prompts"], "num_eval": 8},
        "eval": {"num_prompts": 8, "num_slots": 8},
        "rewards": {"terms": [], "judges": [{"model": "m"} | judge for judge in judges]},
    } | fields  # fmt: skip


def test_two_judges_and_a_function_pay_a_run(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the run says of its requests is what the servers have counted."""
    monkeypatch.setenv(KEY_ENV, KEY)
    with JudgeServer(by_length) as first, JudgeServer(as_json) as second:
        long = {"name": "long", "base_url": first.url, "api_key_env": KEY_ENV, "output_price": 1e6}
        even = {"name": "even", "base_url": second.url, "json_field": "even", "score_min": 0.0, "score_max": 1.0}
        tables = judged(tiny, long, even | {"weight": 0.5}, steps=1, host="inline")
        result = slipstream.run("quickstart", overrides=tables, reward=vowels, out=tmp_path / "run", display=False)
        assert audit(result.out)["steps"] == 1
        asked = [len(server.questions) for server in (first, second)]
    assert first.keys == {f"Bearer {KEY}"}
    assert second.keys == {None}
    counts = result.summary["judges"]
    assert list(counts) == ["long", "even"]
    for (name, found), num_asked in zip(counts.items(), asked, strict=True):
        assert found["requests"] == num_asked - 1, f"{name}: all but the dry call"
        assert (found["input_tokens"], found["output_tokens"]) == (11 * found["requests"], 7 * found["requests"])
        assert found["scored"] == found["requests"] + found["cached"]
        assert (found["failures"], found["retries"]) == (0, 0)
        assert found["seconds"] > 0
    assert counts["long"]["cost"] == pytest.approx(7 * counts["long"]["requests"])
    for one in read_rollouts(result.out / "rollouts.jsonl"):
        parts, n = one.parts, len(one.completion)
        assert parts == {"vowels": vowels([one.completion])[0], "long": n % 10 / 9, "even": float(1 - n % 2)}
        assert one.reward == pytest.approx(parts["vowels"] + parts["long"] + 0.5 * parts["even"])
    assert ">Judges<" in (result.out / "report.html").read_text()
    assert no_file_has_the_key(result.out)


@pytest.mark.slow
def test_a_run_that_goes_on_asks_nothing_twice(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own, which get the key."""

    def slowly(question: str) -> Answer:
        time.sleep(0.05)  # a report of the counts comes once a second
        return by_length(question)

    monkeypatch.setenv(KEY_ENV, KEY)
    with JudgeServer(slowly) as server:
        tables = judged(tiny, {"base_url": server.url, "max_concurrent": 1, "api_key_env": KEY_ENV}, steps=2)
        result = slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False)
        num_asked = len(server.questions)
        told = sum(line.get("judge/judge/requests", 0.0) for line in read_metrics(result.out / "metrics.jsonl"))
        assert 0 < told <= result.summary["judges"]["judge"]["requests"] == num_asked - 1
        again = slipstream.run(resume=result.out, overrides={"steps": 3}, display=False)
    assert server.keys == {f"Bearer {KEY}"}
    assert no_file_has_the_key(result.out)
    assert len(server.questions) > num_asked
    assert len(server.questions) - len(set(server.questions)) == 1, (
        "all but the second attempt's dry call was asked once"
    )
    assert again.summary["judges"]["judge"]["requests"] == len(server.questions) - num_asked - 1


@pytest.mark.slow
def test_a_run_goes_on_while_its_judge_is_away(tiny: Any, tmp_path: Path) -> None:
    """In processes. The judge dies at its tenth question; by the time it is back, some completions have failed."""
    away = threading.Event()

    def reply(question: str) -> Answer:
        if len(server.questions) == 10:
            away.set()
        return by_length(question)

    with held_port() as port, JudgeServer(reply, port=port) as server:
        over, back = threading.Event(), JudgeServer(by_length, port=port)

        def replace() -> None:
            away.wait(60)
            server.__exit__()
            time.sleep(2.5)
            back.__enter__()
            over.wait(60)
            back.__exit__()

        swapping = threading.Thread(target=replace)
        swapping.start()
        one = {"base_url": server.url, "timeout_s": 1.0, "max_concurrent": 4}
        try:
            tables = judged(tiny, one, steps=3)
            result = slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False)
        finally:
            away.set()
            over.set()
            swapping.join()
        assert audit(result.out)["steps"] == 3
        failed = [found.failure for found in read_rollouts(result.out / "rollouts.jsonl") if found.failure is not None]
        [counts] = result.summary["judges"].values()
        assert counts["failures"] >= result.summary["prompts"]["failed_completions"] >= len(failed) > 0
        assert all("gave no answer" in failure for failure in failed)
        assert counts["scored"] > 0
        assert back.questions
        server.__enter__()


@contextmanager
def served_by_command(folder: Path) -> Iterator[tuple[str, str]]:
    """The name and the address that `slipstream serve` tells."""
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "serve",
        str(folder),
        "--port",
        "0",
        "--slots",
        "8",
        "--max-len",
        "768",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = next(line for line in process.stdout if line.startswith("serving "))
            yield re.findall(r"serving (\S+) at (\S+)", told)[0]
        finally:
            process.send_signal(signal.SIGINT)


@pytest.mark.slow
def test_a_served_model_judges(tiny: Any, tmp_path: Path) -> None:
    """`slipstream serve` of another checkpoint, over HTTP; what it says is asked once more by hand."""
    folder = make_checkpoint(tmp_path / "judge", max_positions=768)
    with served_by_command(folder) as (name, base_url):
        one = {
            "name": "served", "base_url": base_url, "model": name, "prompt": "{prompt} {completion}",
            "pattern": "([0-9])", "score_min": 0.0, "score_max": 9.0, "max_tokens": 48, "on_failure": "abstain",
        }  # fmt: skip
        tables = judged(tiny, one, steps=1)
        tables["rewards"] |= {"terms": [{"function": "length", "params": {"target_tokens": 4}}]}
        result = slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False)
        rollouts = list(read_rollouts(result.out / "rollouts.jsonl"))
        for rollout in rollouts[:8]:
            asked = question(one["prompt"], job(0, rollout.completion, prompt=rollout.prompt), 20_000)
            body = {"model": name, "temperature": 0, "max_tokens": 48}
            body["messages"] = [{"role": "user", "content": asked}]
            request = urllib.request.Request(
                f"{base_url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                said = json.load(answer)["choices"][0]["message"]["content"]
            digits = re.findall("[0-9]", said)
            assert rollout.parts["served"] == (pytest.approx(int(digits[-1]) / 9) if digits else None)
    [counts] = result.summary["judges"].values()
    assert counts["requests"] > 0
    assert counts["scored"] > 0
