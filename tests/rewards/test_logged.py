"""TRL's `log_extra` and `log_metric`: in workers and in this process, of completions and groups, good and hostile."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from reward_jobs import job, run_jobs

from slipstream.core.sections import MAX_GROUP_SCORES, RewardsConfig, RewardTerm
from slipstream.core.types import Completion, Prompt
from slipstream.rewards.assembly import Assembly
from slipstream.rewards.calls import Scoring, answer, call_function
from slipstream.rewards.checks import setup_of
from slipstream.rewards.logged import (
    MAX_CELL_CHARS,
    MAX_CELLS,
    MAX_LOGGED_NAME_CHARS,
    MAX_LOGGED_NAMES,
    Logged,
    RewardLog,
)
from slipstream.rewards.pool import ScoringPool
from slipstream.rewards.protocol import MAX_RESULT_BYTES, JobResult, RewardGroupJob


def called(function: Any, count: int = 1) -> Any:
    """What comes of a call for `count` completions, as workers and this process make it."""
    term = Scoring("f", "group", lambda jobs: call_function(function, jobs))
    return answer([term], RewardGroupJob(1, [job(1, "text") for _ in range(count)]), lambda _: None)


def test_trls_own_reward_logs_as_it_is() -> None:
    """The shape of TRL's accuracy_reward: `log_extra` named, its columns one value a completion."""

    def accuracy(completions: list[str], log_extra: Any = None, log_metric: Any = None, **kwargs: Any) -> list[float]:
        assert not {"log_extra", "log_metric"} & kwargs.keys()
        if log_extra is not None:
            log_extra("parsed", [f"<{index}>" for index, _ in enumerate(completions)])
            log_extra("number", [0.5, 3, None])
        for value in (1, 0, 0):
            log_metric("accuracy", value)
        return [1.0] * len(completions)

    found = called(accuracy, 3)
    assert found.error is None
    assert found.logged.metrics == {"accuracy": 1 / 3}
    assert found.logged.columns == {"parsed": ["<0>", "<1>", "<2>"], "number": [0.5, 3, None]}
    assert found.parts == [1.0, 1.0, 1.0]


def test_they_are_given_to_those_who_take_them() -> None:
    def by_key(**kwargs: Any) -> list[float]:
        kwargs["log_metric"]("a", 2.0)
        return [0.0]

    def plain(**kwargs: Any) -> list[float]:
        return [float(len(kwargs))]

    assert called(by_key).logged.metrics == {"a": 2.0}
    names = {"prompts", "completions", "completion_ids", "answer", *job(1, "text").columns}
    assert called(plain).parts == [float(len(names))], "others see columns alone"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (lambda extra, metric: extra("c", [1]), r"log_extra\('c', ...\) got 1 values for 2 completions"),
        (lambda extra, metric: extra("", [1, 2]), "takes a name"),
        (lambda extra, metric: metric("a\nb", 1), "takes a name"),
        (lambda extra, metric: metric("x" * 101, 1), "takes a name"),
        (lambda extra, metric: [metric(str(i), 1) for i in range(9)], "8 names in a call"),
        (lambda extra, metric: metric("a", "one"), "could not convert"),
    ],
)
def test_what_cannot_be_logged_fails_the_call(log: Any, said: str) -> None:
    def reward(completions: Any, log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log(log_extra, log_metric)
        return [0.0, 0.0]

    error = called(reward, 2).error
    assert error is not None
    assert re.search(said, error)


def test_values_are_small_and_of_jsons_types() -> None:
    log = RewardLog(2)
    log.log_extra("c", ["x" * 100_000, {"a": 1}])
    log.log_extra("d", [math.nan, 2**80])
    log.log_extra("e", [True, "\ud800"])
    log.log_extra("n", [np.int64(3), np.float32(0.5)])
    log.log_extra("z", [np.bool_(True), torch.tensor(0.5)])
    log.log_metric("m", math.nan)
    found = log.all()
    assert len(str(found.columns["c"][0])) < 5000
    assert found.columns["c"][1] == "{'a': 1}"
    assert found.columns["d"] == ["nan", str(2**80)]
    assert found.columns["e"] == [True, "?"]
    assert found.columns["n"] == [3, 0.5]
    assert [type(value) for value in (*found.columns["n"], *found.columns["z"])] == [int, float, bool, float]
    assert found.metrics == {}
    for value in (1e308, 1e308, 1e308):
        log.log_metric("large", value)
    assert log.all().metrics == {"large": pytest.approx(1e308)}
    with pytest.raises(ValueError, match="values in all columns"):
        RewardLog(MAX_CELLS + 1).log_extra("c", [0] * (MAX_CELLS + 1))


def test_all_that_a_call_may_log_fits_into_an_answer() -> None:
    log = RewardLog(1)
    for index in range(MAX_LOGGED_NAMES):
        log.log_extra(f"{index}" * MAX_LOGGED_NAME_CHARS, ["\U0001f600" * (MAX_CELL_CHARS + 1)])
        log.log_metric(f"{index}" * MAX_LOGGED_NAME_CHARS, 1.0)
    result = JobResult(job_id=1, parts=[1.0], logged=log.all())
    assert len(msgspec.msgpack.encode(result)) + MAX_GROUP_SCORES * 9 < MAX_RESULT_BYTES


def completion(sample: int) -> Completion:
    prompt = Prompt(prompt_id="p", text="", tokens=np.array([1], dtype=np.int32), task="t")
    return Completion(ordinal=0, sample=sample, prompt=prompt, segments=(), text="", finish_reason="stop")


@pytest.mark.parametrize(
    "lie",
    [
        Logged(columns={"c": [1]}),
        Logged(columns={"": [1, 2]}),
        Logged(metrics={"a\x1b": 1.0}),
        Logged(metrics={"m": math.inf}),
        Logged(metrics={str(i): 1.0 for i in range(9)}),
    ],
)
def test_what_a_worker_says_is_checked(lie: Logged) -> None:
    for said, is_well in ((Logged(metrics={"m": 1.0}, columns={"c": ["a", "b"]}), True), (lie, False)):
        assembly = Assembly([(False, "group")], 2)
        [call] = [call for sample in (0, 1) for call in assembly.add(completion(sample))]
        entries = assembly.answer(call.job_id, [0.0, 0.0], None, said)
        if is_well:
            assert [(entry.metrics, entry.extra) for entry in entries] == [({"m": 1.0}, {"c": c}) for c in "ab"]
        else:
            assert {entry.failure for entry in entries} == {"worker sent bad output: what it logged is malformed"}


def test_a_file_logs_from_a_worker(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "def f(completions, log_metric, log_extra, **_):\n"
        "    log_metric('n', len(completions))\n"
        "    log_extra('text', completions)\n"
        "    return [0.0] * len(completions)\n"
    )
    terms = [RewardTerm(function=f"{path}:f", per=per) for per in ("completion", "group")]
    config = RewardsConfig(terms=terms, timeout_s=120.0, memory_mb=512)
    pool = ScoringPool(setup_of(config, {}), num_workers=1)
    try:
        pool.wait_ready()
        found = run_jobs(pool, [job(1, "a"), RewardGroupJob(2, [job(0, "b"), job(0, "c")])])
    finally:
        pool.close()
    assert [(one.failure, one.logged.metrics, one.logged.columns) for one in (found[1], found[2])] == [
        (None, {"n": 1.0}, {"text": ["a"]}),
        (None, {"n": 2.0}, {"text": ["b", "c"]}),
    ]
