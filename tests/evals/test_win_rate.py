"""Win rates by hand, their symmetries, and judges that fail, stall or cheat."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from drawn import drawn
from hypothesis import strategies as st

from slipstream.core.errors import ConfigError
from slipstream.evals.judge import JudgeError, JudgeRefused, Verdict
from slipstream.evals.statistics import spread
from slipstream.evals.win_rate import (
    Comparison,
    Judgement,
    gold_win_rate,
    judge_pairs,
    judge_win_rate,
    summarise,
)

SCORES = st.integers(-3, 3).map(float)
VERDICTS = st.sampled_from(["a", "b", "tie"])


def test_gold_win_rate_by_hand() -> None:
    result = gold_win_rate([1.0, 2.0, 0.5, 3.0], [0.0, 2.0, 1.5, 1.0])  # win, tie, loss, win
    assert result.win_rate.mean == 0.625
    assert result.win_rate.standard_error == pytest.approx(math.sqrt((0.375**2 * 2 + 0.125**2 + 0.625**2) / 3 / 4))
    assert (result.strict_win_rate, result.tie_rate) == (0.5, 0.25)
    assert result.difference.mean == 0.5  # differences 1, 0, -1, 2
    assert result.difference.std == pytest.approx(math.sqrt(5 / 3))
    assert result.difference.count == 4
    assert (result.mean_score, result.mean_reference_score) == (1.625, 1.125)


def test_the_same_completions_again_make_no_win_rate_surer() -> None:
    once = gold_win_rate([1.0, 2.0, 0.5, 3.0], [0.0, 2.0, 1.5, 1.0])
    twice = gold_win_rate(
        [1.0, 1.0, 2.0, 2.0, 0.5, 0.5, 3.0, 3.0], [0.0, 0.0, 2.0, 2.0, 1.5, 1.5, 1.0, 1.0], "aabbccdd"
    )
    assert twice.win_rate.standard_error == pytest.approx(once.win_rate.standard_error)
    assert twice.difference.standard_error == pytest.approx(once.difference.standard_error)
    judged = [Judgement("a", "b"), Judgement("b", "a"), Judgement("tie", "tie")]
    alone, pairs = summarise(judged, "abc"), summarise([one for one in judged for _ in range(2)], "aabbcc")
    assert pairs.win_rate.standard_error == pytest.approx(alone.win_rate.standard_error)
    failed = Judgement(None, None, failure="silent")
    assert summarise([*judged, failed], "abcd").win_rate == alone.win_rate


@drawn(30, 100, pairs=st.lists(st.tuples(SCORES, SCORES), min_size=1))
def test_swapping_the_sides_swaps_the_win_rate(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = np.array(pairs).T
    forward, backward = gold_win_rate(ours, theirs), gold_win_rate(theirs, ours)
    assert forward.win_rate.mean + backward.win_rate.mean == pytest.approx(1)
    assert forward.win_rate.mean == pytest.approx(forward.strict_win_rate + forward.tie_rate / 2)
    assert forward.difference.mean == pytest.approx(-backward.difference.mean)


@pytest.mark.parametrize(
    ("scores", "references"), [([], []), ([1.0], [1.0, 2.0]), ([math.nan], [0.0]), ([0.0], [math.inf])]
)
def test_scores_that_do_not_compare_are_refused(scores: list[float], references: list[float]) -> None:
    with pytest.raises(ConfigError, match="win rate needs"):
        gold_win_rate(scores, references)


def test_the_spread_of_one_value_is_unknown() -> None:
    one = spread([2.0])
    assert (one.mean, one.count) == (2.0, 1)
    assert math.isnan(one.std)
    assert math.isnan(one.standard_error)
    with pytest.raises(ConfigError):
        spread([])


def test_judge_win_rate_by_hand() -> None:
    judgements = [
        Judgement("a", "b"),  # the completion in both orders
        Judgement("a", "b"),
        Judgement("b", "a"),  # the reference in both
        Judgement("a", "a"),  # whatever came first
        Judgement("a", "tie"),
        Judgement("tie", "tie"),
        Judgement(None, None, failure="no answer"),
    ]
    result = summarise(judgements)
    assert (result.num_wins, result.num_ties, result.num_losses, result.num_failed) == (2, 3, 1, 1)
    assert result.win_rate.mean == pytest.approx(3.5 / 6)
    assert result.consistency == pytest.approx(4 / 6)
    assert result.position_bias == pytest.approx((6 - 3) / 12)  # a: 1+1+1+2+1, b: 1+1+1


@drawn(30, 100, pairs=st.lists(st.tuples(VERDICTS, VERDICTS), min_size=1))
def test_exchanging_completion_and_reference(pairs: list[tuple[Verdict, Verdict]]) -> None:
    forward = summarise([Judgement(first, second) for first, second in pairs])
    backward = summarise([Judgement(second, first) for first, second in pairs])
    assert forward.win_rate.mean == pytest.approx(1 - backward.win_rate.mean)
    assert (forward.consistency, forward.position_bias) == (backward.consistency, backward.position_bias)


@pytest.mark.parametrize(("answer", "bias"), [("a", 1.0), ("b", -1.0), ("tie", 0.0)])
def test_a_judge_that_does_not_look_gives_one_half(answer: Verdict, bias: float) -> None:
    result = judge_win_rate(lambda *_: answer, [Comparison("p", str(i), "r") for i in range(5)])
    assert result.win_rate.mean == 0.5
    assert result.position_bias == bias
    assert result.consistency == (1.0 if answer == "tie" else 0.0)


def longer(_prompt: str, a: str, b: str) -> Verdict:
    return "tie" if len(a) == len(b) else "a" if len(a) > len(b) else "b"


async def longer_async(prompt: str, a: str, b: str) -> Verdict:
    await asyncio.sleep(0)
    return longer(prompt, a, b)


@pytest.mark.parametrize("judge", [longer, longer_async])
def test_judgements_come_in_the_order_of_comparisons(judge) -> None:
    comparisons = [Comparison("p", "x" * length, "xxx") for length in (1, 5, 3, 9, 2)]
    result = judge_win_rate(judge, comparisons, max_concurrency=3)
    assert [judgement.outcome for judgement in result.judgements] == [0.0, 1.0, 0.5, 1.0, 0.0]
    assert result.consistency == 1.0


def test_it_may_be_called_where_a_loop_runs_already() -> None:
    async def notebook_cell() -> float:
        return judge_win_rate(longer_async, [Comparison("p", "xx", "x")]).win_rate.mean

    assert asyncio.run(notebook_cell()) == 1.0


def failing(bad: set[str]):
    def judge(_prompt: str, a: str, b: str) -> Verdict:
        if bad & {a, b}:
            raise JudgeError("no verdict")
        return longer(_prompt, a, b)

    return judge


def test_a_failed_comparison_is_recorded_and_counted() -> None:
    comparisons = [Comparison("p", "x" * (i + 2), "x") for i in range(10)]
    result = judge_win_rate(failing({"xxx"}), comparisons)
    assert (result.num_wins, result.num_failed) == (9, 1)
    assert result.judgements[1] == Judgement(None, None, failure="no verdict")
    assert result.win_rate.mean == 1.0


def test_too_many_failures_end_it() -> None:
    comparisons = [Comparison("p", "x" * (i + 2), "x") for i in range(10)]
    with pytest.raises(JudgeError, match="no verdict"):
        judge_win_rate(failing({"xxx", "xxxx"}), comparisons)
    assert judge_win_rate(failing({"xxx", "xxxx"}), comparisons, max_failed_share=0.2).num_failed == 2
    with pytest.raises(ConfigError, match="needs verdicts"):
        judge_win_rate(failing({"x"}), comparisons, max_failed_share=1.0)


def test_a_refusal_ends_it_at_once_and_leaves_nobody_waiting() -> None:
    cancelled = []

    async def judge(prompt: str, _a: str, _b: str) -> Verdict:
        if prompt == "3":
            raise JudgeRefused("wrong key")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(prompt)
            raise
        return "tie"

    async def run() -> None:
        with pytest.raises(JudgeRefused):
            await judge_pairs(judge, [Comparison(str(i), "x", "y") for i in range(6)], max_failed_share=1.0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    assert sorted(cancelled) == ["0", "1", "2", "4", "5"]


@pytest.mark.parametrize("nonsense", ["A", "c", None, 1, ""])
def test_a_callable_is_not_trusted_either(nonsense: object) -> None:
    with pytest.raises(JudgeError, match="is no verdict"):
        judge_win_rate(lambda *_: nonsense, [Comparison("p", "x", "y")])  # type: ignore[arg-type, return-value]


def test_other_errors_of_a_judge_pass_through() -> None:
    def judge(*_: str) -> Verdict:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        judge_win_rate(judge, [Comparison("p", "x", "y")])


@pytest.mark.parametrize("options", [{"max_concurrency": 0}, {"max_failed_share": 1.5}])
def test_limits_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="concurrency"):
        judge_win_rate(longer, [Comparison("p", "x", "y")], **options)


def test_no_comparisons_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs verdicts"):
        judge_win_rate(longer, [])
