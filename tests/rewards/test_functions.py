"""Built-in reward functions, the user's own with TRL's signature, and weighted sums."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from covering import with_slow

from slipstream.core.clock import VirtualClock
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.core.sections import RewardsConfig, RewardTerm, TaskConfig
from slipstream.jail.isolation import BARRIERS
from slipstream.rewards.calls import Scoring, call_function
from slipstream.rewards.checks import check_isolation, check_rewards, setup_of, unsafe_verifiers
from slipstream.rewards.functions import (
    BUILTINS,
    UNSAFE_VERIFIERS,
    build_scorer,
    build_scoring,
    combined_reward,
    make_term,
    weighted_sum,
)
from slipstream.rewards.inline import CallableScorer
from slipstream.rewards.pool import ScoredJob
from slipstream.rewards.protocol import RewardJob, Task, Term

HERE = Path(__file__).parent
MakePool = Callable[..., Any]


def job(
    completion: str, *, answer: str | None = None, ids: int = 0, task: str = "", prompt: Any = "q", **columns: Any
) -> RewardJob:
    return RewardJob(0, prompt, completion, list(range(ids)), task, answer, columns)


def score(function: str, params: dict[str, Any], one: RewardJob, tasks: dict[str, Task] | None = None) -> float | None:
    return build_scoring(make_term(function, params), tasks or {}).scores([one])[0]


@pytest.mark.parametrize("size", with_slow([6], [20]))
def test_task_gives_the_verifiers_partial_credit(size: int) -> None:
    tasks = {"words": Task("spell_backward", {"min_word_len": 3})}
    dataset = reasoning_gym.create_dataset("spell_backward", seed=3, size=size)
    for entry in dataset:
        right, wrong = entry["answer"], entry["metadata"]["word"]
        one = job(f" {right}\n", task="words", entry=entry)
        assert score("task", {}, one, tasks) == 1.0
        one = job(wrong, task="words", entry=entry)
        assert score("task", {}, one, tasks) == pytest.approx(dataset.score_answer(wrong, entry))
        assert score("task", {"binary": True}, one, tasks) == float(right == wrong)
        one = job(f"<answer>x</answer> no, <answer> {right} </answer>", task="words", entry=entry)
        assert score("task", {"answer_pattern": "<answer>(.*?)</answer>"}, one, tasks) == 1.0
    assert (
        score("task", {"answer_pattern": "<answer>(.*?)</answer>"}, job("none", task="words", entry=entry), tasks) == 0
    )


def test_math_logs_nothing_and_silences_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert score("math", {}, job("\\frac{1}{", answer="$2$")) == 0.0
    assert [record.getMessage() for record in caplog.records if record.name.startswith(("math", "latex"))] == []
    logging.getLogger("slipstream.rewards").warning("heard")
    assert "heard" in caplog.text


def test_task_restores_tuples_that_json_made_lists() -> None:
    entry = reasoning_gym.create_dataset("rearc", seed=1, size=1)[0]
    answer = entry["answer"]
    metadata = {**entry["metadata"], **{k: [list(r) for r in entry["metadata"][k]] for k in ("input", "output")}}
    one = job(answer, task="rearc", entry={**entry, "metadata": metadata})
    assert score("task", {}, one, {"rearc": Task("rearc", {})}) == 1.0


def test_exact_match() -> None:
    assert score("exact_match", {}, job(" 42\n", answer="42 ")) == 1.0
    assert score("exact_match", {}, job("420", answer="42")) == 0.0
    assert score("exact_match", {}, job("Yes", answer="yes")) == 0.0
    assert score("exact_match", {"ignore_case": True}, job("Yes", answer="yes")) == 1.0
    assert score("exact_match", {"answer_pattern": r"####\s*(\S+)"}, job("7+7\n#### 14", answer="14")) == 1.0
    assert score("exact_match", {}, job("42")) is None
    gsm8k = {"answer_pattern": r"#### (\-?[0-9\.\,]+)", "reference_pattern": r"#### (\-?[0-9\.\,]+)", "ignore": ","}
    assert score("exact_match", gsm8k, job("so\n#### 1000", answer="1 + 999 = 1,000\n#### 1,000")) == 1.0
    assert score("exact_match", gsm8k, job("so 1000", answer="#### 1,000")) == 0.0
    assert score("exact_match", gsm8k, job("#### 1", answer="no number")) is None
    assert score("exact_match", {"ignore": "$,"}, job("$ 5", answer="5")) == 1.0
    assert score("exact_match", {"ignore": "."}, job("5 .", answer="5")) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"The answer is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        ("It is $x + 1$", "$1 + x$", 1.0),
        (r"$\sqrt{8}$", r"$2\sqrt{2}$", 1.0),
        ("so 41", "42", 0.0),
        ("no idea", "42", 0.0),
        (r"\boxed{\$18.90}", r"\$18.90", 1.0),  # so in MATH-500
        (r"\boxed{18.90}", r"\$18.90", 1.0),
        (r"\boxed{32348}", r"\$32,\!348", 1.0),
        (r"\boxed{\$36}", r"\$35", 0.0),
        (r"\boxed{36}", r"it is $\$36$", 1.0),
    ],
)
def test_math_compares_values(completion: str, answer: str, expected: float) -> None:
    assert score("math", {}, job(completion, answer=answer)) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("She pays $3 x 14 = $<<3*14=42>>42.\n#### 42", 1.0),
        ("6 of 42\n#### 6", 0.0),
        (r"So $x = 6 \cdot 7 = \boxed{42}$.", 1.0),
        ("42", 1.0),
        (r"\frac{84}{2}", 1.0),
    ],
)
def test_math_finds_the_reference_of_each_data_set_of_its_recipe(answer: str, expected: float) -> None:
    """GSM8K's solutions, MATH's, and MATH-500's answers."""
    [term] = resolve("math").rewards.terms
    assert score("math", term.params, job(r"Thus \boxed{42}.", answer=answer)) == expected


@pytest.mark.parametrize("answer", ["", " "])
def test_a_reference_that_is_no_mathematics_is_no_wrong_answer(answer: str) -> None:
    with pytest.raises(ValueError, match="cannot read the reference"):
        score("math", {}, job(r"\boxed{\frac{1}{2}}", answer=answer))


def test_math_abstains_where_the_reference_is_not_found() -> None:
    assert score("math", {"reference_pattern": "#### (.+)"}, job("42", answer="42")) is None


def test_regex() -> None:
    assert score("regex", {"pattern": "a.c"}, job("xa\ncx")) == 1.0
    assert score("regex", {"pattern": "a.c", "full": True}, job("xabc")) == 0.0


def test_length_shaping() -> None:
    assert [score("length", {"target_tokens": 4}, job("", ids=n)) for n in (0, 2, 4, 6, 100)] == [-1, -0.5, 0, -0.5, -1]
    overlong = [score("length", {"max_tokens": 10, "buffer_tokens": 4}, job("", ids=n)) for n in (0, 6, 7, 8, 10, 11)]
    assert overlong == [0, 0, -0.25, -0.5, -1, -1]


def test_user_functions_get_trls_keywords() -> None:
    path = HERE / "user_rewards.py"
    assert score(f"{path}:starts_with", {}, job(" four!", answer="four", level=1)) == 1.0
    assert score(f"{path}:slow_length", {}, job("x", ids=5, answer="a")) == 5.0
    assert score(f"{path}:slow_length", {}, job("x", answer="a")) is None
    assert score(f"{path}:sees_everything", {}, job("4", answer="four", level=3)) == 3.0
    chat = [{"role": "user", "content": "2+2"}]
    assert score(f"{path}:sees_everything", {}, job("4", prompt=chat, answer="four", level=2)) == 2.0


@pytest.mark.parametrize("start", [b"# coding: latin-1\ncafe = 'caf\xe9'\n", b"\xef\xbb\xbfcafe = 'caf\xc3\xa9'\n"])
def test_a_file_has_the_encoding_that_it_names(start: bytes, tmp_path: Path) -> None:
    file = tmp_path / "cafes.py"
    file.write_bytes(start + b"def f(completions, **_): return [float(cafe == one) for one in completions]\n")
    scoring = build_scoring(make_term(f"{file}:f", {}), {})
    assert scoring.scores([job("café"), job("cafe")]) == [1.0, 0.0]


def test_user_functions_run_in_workers(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    from reward_jobs import run_jobs

    monkeypatch.syspath_prepend(str(HERE))
    pool = make_pool(("user_rewards:starts_with", {}), (f"{HERE / 'user_rewards.py'}:slow_length", {}))
    done = run_jobs(pool, [RewardJob(9, "q", "four", [1, 2], "", "four", {})])
    assert done[9].parts == [1.0, 2.0]


@pytest.mark.parametrize(
    ("function", "params", "message"),
    [
        ("exact_mach", {}, "did you mean 'exact_match'"),
        ("regex", {}, "needs the parameter 'pattern'"),
        ("regex", {"patern": "x"}, "no parameter 'patern'"),
        ("regex", {"pattern": "("}, "pattern"),
        ("length", {}, "exactly one of its parameters"),
        ("module:function", {"a": 1}, "parameters are for built-in"),
        ("nowhere.py:function", {}, "no such file"),
    ],
)
def test_malformed_terms(function: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_term(function, params)


def test_malformed_parameters() -> None:
    for function, params in (
        ("regex", {"pattern": "("}),
        ("length", {}),
        ("length", {"target_tokens": 3, "max_tokens": 4}),
        ("length", {"target_tokens": 0}),
        ("length", {"max_tokens": 3, "buffer_tokens": 4}),
        ("task", {}),
    ):
        with pytest.raises(ConfigError):
            build_scorer(Term(function, params), {})


def test_weighted_sum() -> None:
    assert weighted_sum([1.0, 0.5], [1.0, -1.0]) == 0.5
    assert weighted_sum([1.0, 0.5], [None, -1.0]) == -0.5
    for parts in ([None, None], [math.nan, 1.0], [math.inf, 1.0], [1.0], [1e308, 1.7e308]):
        with pytest.raises(ValueError, match=r"abstained|finite|parts"):
            weighted_sum([1.0, 10.0], parts)
    for parts in ([1e308, 1e308], [math.inf, -math.inf]):  # which `fsum` itself refuses
        with pytest.raises(ValueError, match="finite"):
            weighted_sum([1.0, 1.0], parts)


def test_every_verifier_that_evaluates_its_answer_is_listed() -> None:
    """Runs each one's source through a search for evaluators, so that a new release of the library is noticed."""
    import inspect
    import re

    from reasoning_gym.factory import DATASETS

    calls = re.compile(r"\beval\(|\bexec\(|parse_expr\(|sympify\(")
    harmless = {
        "number_sorting": "evaluates the reference answer only",
    }
    found = {name for name, (dataset, _) in DATASETS.items() if calls.search(inspect.getsource(dataset.score_answer))}
    assert found - harmless.keys() == UNSAFE_VERIFIERS.keys() - {"math", "code"}


def test_unsafe_verifiers_need_isolation_or_trust() -> None:
    config = RewardsConfig(terms=[RewardTerm(function="task")])
    unsafe = setup_of(config, {"countdown": TaskConfig(name="countdown")})
    safe = setup_of(config, {"spell_backward": TaskConfig(name="spell_backward")})
    assert unsafe_verifiers(unsafe) == ["countdown"]
    assert unsafe_verifiers(safe) == []
    check_isolation(safe, [], trust_verifier=False)
    check_isolation(unsafe, BARRIERS, trust_verifier=False)
    check_isolation(unsafe, [], trust_verifier=True)
    with pytest.raises(ConfigError, match=r"(?s)countdown.*parse_expr.*network.*trust_verifier"):
        check_isolation(unsafe, ["limits"], trust_verifier=False)
    with pytest.raises(ConfigError, match=r"(?s)needs reasoning-gym tasks.*default of rewards\.terms") as refused:
        check_rewards(config, {})
    assert all(f"'{name}'" in str(refused.value.allowed) for name in BUILTINS.keys() - {"task"})


def test_a_callable_is_scored_with_a_deadline() -> None:
    import select
    import threading

    from reward_jobs import GENEROUS_S

    release, hangs, clock = threading.Event(), threading.Event(), VirtualClock()

    def reward(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        if completions[0] == "hang":
            hangs.set()
            release.wait(GENEROUS_S)
        if completions[0] == "raise":
            raise KeyError("x")
        return [float(completions[0] == answer[0])]

    scorer = CallableScorer([Scoring("mine", "completion", partial(call_function, reward))], timeout_s=0.2, clock=clock)

    def scored(jobs: list[RewardJob]) -> dict[int, ScoredJob]:
        """The clock moves on when a call hangs, and at no other time."""
        done: dict[int, ScoredJob] = {}
        for one in jobs:
            scorer.submit(one)
        while len(done) < len(jobs):
            done |= {one.job_id: one for one in scorer.poll()}
            select.select(scorer.fds(), [], [], 0.01)
            if hangs.is_set():
                hangs.clear()
                clock.advance(0.2)
        return done

    jobs = [RewardJob(i, "q", text, [], "", "a", {}) for i, text in enumerate(["a", "b", "hang", "a", "raise", "a"])]
    done = scored(jobs)
    assert [done[i].parts for i in (0, 1, 3, 5)] == [[1.0], [0.0], [1.0], [1.0]]
    assert done[2].failure == "mine: timed out after 0.2 s"
    assert "KeyError" in (done[4].failure or "")
    hanging = [RewardJob(10 + i, "q", "hang", [], "", "a", {}) for i in range(10)]
    done = scored(hanging)
    assert scorer.num_restarts == 8
    assert done[19].failure == "the reward function hangs in 8 threads and is not called meanwhile"
    hanging_threads = [thread for thread in threading.enumerate() if thread.name == "reward-function"]
    release.set()
    for thread in hanging_threads:
        thread.join(GENEROUS_S)
    assert scored([RewardJob(30, "q", "a", [], "", "a", {})])[30].parts == [1.0]  # all have come back
    scorer.close()


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((0.9, 1.0, 0.7), 0.9),
        ((0.9, 0.0, 0.7), 0.0),  # the first constraint is violated
        ((0.9, 1.0, 0.4), 0.0),  # the second
        ((-0.5, 0.0, 0.0), -0.5),  # the reward is below the cap already
        ((0.9, None, 0.5), 0.9),  # a constraint that abstains is not violated, one that is just met neither
        ((0.9, math.nan, 0.7), 0.0),  # no number is no proof
    ],
)
def test_violated_constraints_cap_the_reward(parts: tuple[float | None, ...], expected: float) -> None:
    terms = [
        RewardTerm(function="task"),
        RewardTerm(function="regex", params={"pattern": "a"}, at_least=1.0),
        RewardTerm(function="length", params={"target_tokens": 4}, at_least=0.5),
    ]
    assert combined_reward(terms, parts, violation_cap=0.0) == expected
    assert combined_reward(terms, parts, violation_cap=math.inf) == parts[0]


@pytest.mark.parametrize(
    ("function", "params"),
    [
        ("regex", {"pattern": r"(a+)+$"}),
        ("exact_match", {"answer_pattern": r"^(([a-z])+.)+[A-Z]([a-z])+$"}),
    ],
)
def test_a_pattern_that_backtracks_forever_is_given_up(function: str, params: dict[str, Any]) -> None:
    text = "a" * 5000 + "!"
    scorer = build_scorer(make_term(function, params), {}, timeout_s=0.4)
    with pytest.raises(TimeoutError):
        scorer(job(text, answer=text))
    assert scorer(job("ab", answer="ab")) is not None  # and the worker goes on
