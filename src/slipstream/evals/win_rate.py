"""Win rates against reference answers: by a gold reward model's scores, and by a judge asked in both orders."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.evals.judge import Judge, JudgeError, JudgeRefused, Verdict
from slipstream.evals.statistics import Spread, spread


@dataclass(frozen=True)
class GoldWinRate:
    """How often, and by how much, completions score above the references of their prompts.

    `win_rate` counts a tie as half a win; its `mean` lies in 0..1. `strict_win_rate` counts ties as losses.
    `difference` is score minus reference score; `mean_score` and `mean_reference_score` are its two parts.
    """

    win_rate: Spread
    strict_win_rate: float
    tie_rate: float
    difference: Spread
    mean_score: float
    mean_reference_score: float


def gold_win_rate(
    scores: Sequence[float] | np.ndarray,
    reference_scores: Sequence[float] | np.ndarray,
    prompts: Sequence[Hashable] | None = None,
) -> GoldWinRate:
    """Compare the gold scores [N] of N completions with those [N] of the references of the same prompts.

        win_rate = mean_i([s_i > r_i] + [s_i = r_i] / 2),   strict_win_rate = mean_i [s_i > r_i]
        difference = mean_i (s_i - r_i)

    `prompts` [N] say which completions are of one prompt, and so not independent (`spread`); None: each has its own.
    Asynchronous RLHF (arXiv:2410.18252): `strict_win_rate` is the win rate of its figures, and of its code.
    ConfigError when the scores do not pair up or are not finite.
    Identity: swapping the two gives 1 - win_rate.
    """
    ours, theirs = np.asarray(scores, dtype=np.float64), np.asarray(reference_scores, dtype=np.float64)
    if ours.ndim != 1 or ours.shape != theirs.shape or not len(ours):
        raise ConfigError("a win rate needs one reference score per score", got=f"{ours.shape} and {theirs.shape}")
    if num_bad := int(np.count_nonzero(~np.isfinite(ours) | ~np.isfinite(theirs))):
        raise ConfigError("a win rate needs finite scores", got=f"{num_bad} of {len(ours)} pairs with NaN or infinity")
    return GoldWinRate(
        win_rate=spread((ours > theirs) + 0.5 * (ours == theirs), prompts),
        strict_win_rate=float(np.mean(ours > theirs)),
        tie_rate=float(np.mean(ours == theirs)),
        difference=spread(ours - theirs, prompts),
        mean_score=float(ours.mean()),
        mean_reference_score=float(theirs.mean()),
    )


@dataclass(frozen=True)
class Comparison:
    """A prompt, the policy's completion and the answer to hold it against."""

    prompt: str
    completion: str
    reference: str


@dataclass(frozen=True)
class Judgement:
    """A judge's verdicts on one comparison: with the completion shown first (as "a"), then with it second (as "b").

    `failure` says why there are no verdicts.
    """

    completion_first: Verdict | None
    completion_second: Verdict | None
    failure: str | None = None

    @property
    def outcome(self) -> float:
        """1 where the completion wins in both orders, 0 where the reference does, else a tie: 0.5."""
        if (self.completion_first, self.completion_second) == ("a", "b"):
            return 1.0
        return 0.0 if (self.completion_first, self.completion_second) == ("b", "a") else 0.5

    @property
    def is_consistent(self) -> bool:
        """Whether both orders name the same answer, or both none."""
        return (self.completion_first, self.completion_second) in (("a", "b"), ("b", "a"), ("tie", "tie"))


@dataclass(frozen=True)
class JudgeWinRate:
    """Win rate by a judge asked in both orders; ties, and pairs with inconsistent verdicts, count half.

    `consistency` is the share of pairs whose two verdicts agree. `position_bias` in -1..1 is how much more often the
    answer shown first was named than the other, over all verdicts: each pair is shown both ways, so the answers' merit
    cancels and 0 is fair. `num_failed` comparisons have no verdicts and count nowhere else.
    """

    win_rate: Spread
    num_wins: int
    num_ties: int
    num_losses: int
    num_failed: int
    consistency: float
    position_bias: float
    judgements: tuple[Judgement, ...]


def summarise(judgements: Sequence[Judgement], prompts: Sequence[Hashable] | None = None) -> JudgeWinRate:
    """The win rate in `judgements`, which are of these `prompts` (as in `gold_win_rate`).

        win_rate = (wins + ties / 2) / judged,   position_bias = (#"a" - #"b") / #verdicts

    Zheng et al. (arXiv:2306.05685), section 3.4: a win must hold in both orders, inconsistent verdicts are a tie.
    ConfigError without verdicts. Identities: a judge that always names the first has a win rate of 1/2, consistency 0
    and position bias 1; exchanging completion and reference gives 1 - win_rate.
    """
    judged = [judgement for judgement in judgements if judgement.failure is None]
    if not judged:
        raise ConfigError("a win rate needs verdicts", got=f"none in {len(judgements)} comparisons")
    outcomes = [judgement.outcome for judgement in judged]
    asked = prompts and [one for one, judgement in zip(prompts, judgements, strict=True) if judgement.failure is None]
    verdicts = [v for judgement in judged for v in (judgement.completion_first, judgement.completion_second)]
    return JudgeWinRate(
        win_rate=spread(outcomes, asked),
        num_wins=outcomes.count(1.0),
        num_ties=outcomes.count(0.5),
        num_losses=outcomes.count(0.0),
        num_failed=len(judgements) - len(judged),
        consistency=sum(judgement.is_consistent for judgement in judged) / len(judged),
        position_bias=(verdicts.count("a") - verdicts.count("b")) / len(verdicts),
        judgements=tuple(judgements),
    )


def judge_win_rate(
    judge: Judge, comparisons: Sequence[Comparison], *, max_concurrency: int = 8, max_failed_share: float = 0.1
) -> JudgeWinRate:
    """Ask `judge` about every comparison in both orders, and summarise.

    Arguments and errors are those of `judge_pairs`. May be called from a notebook, whose loop waits meanwhile.
    """
    asked = [comparison.prompt for comparison in comparisons]

    def run() -> list[Judgement]:
        return asyncio.run(
            judge_pairs(judge, comparisons, max_concurrency=max_concurrency, max_failed_share=max_failed_share)
        )

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return summarise(run(), asked)
    with ThreadPoolExecutor(1) as thread:
        return summarise(thread.submit(run).result(), asked)


async def judge_pairs(
    judge: Judge, comparisons: Sequence[Comparison], *, max_concurrency: int = 8, max_failed_share: float = 0.1
) -> list[Judgement]:
    """One judgement per comparison, in their order; at most `max_concurrency` comparisons are open at a time.

    A JudgeError is a failed comparison. When more than `max_failed_share` of all have failed, the rest is given up and
    the last error raised: what is left would be no fair sample. JudgeRefused, and what else a judge raises, end it at
    once. A judge that is not async is called one comparison at a time.

    Consumes: comparisons. Waits for: verdicts. Unblocked by: any one of them, or the judge's own deadline.
    Ends when: every comparison has its judgement.
    """
    if max_concurrency < 1 or not 0 <= max_failed_share <= 1:
        what = "judging needs a concurrency of at least 1, and a share that may fail in 0..1"
        raise ConfigError(what, got=f"max_concurrency = {max_concurrency}, max_failed_share = {max_failed_share}")
    judgements: list[Judgement | None] = [None] * len(comparisons)
    num_failed = 0

    async def work(open_comparisons: Iterator[tuple[int, Comparison]]) -> None:
        nonlocal num_failed
        for index, comparison in open_comparisons:
            try:
                judgements[index] = await _judge_both_orders(judge, comparison)
            except JudgeRefused:
                raise
            except JudgeError as error:
                num_failed += 1
                if num_failed > max_failed_share * len(comparisons):
                    raise
                judgements[index] = Judgement(None, None, failure=str(error))

    shared = iter(enumerate(comparisons))
    workers = [asyncio.create_task(work(shared)) for _ in range(min(max_concurrency, len(comparisons)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [judgement for judgement in judgements if judgement is not None]


async def _judge_both_orders(judge: Judge, comparison: Comparison) -> Judgement:
    first = await _ask(judge, comparison.prompt, comparison.completion, comparison.reference)
    second = await _ask(judge, comparison.prompt, comparison.reference, comparison.completion)
    return Judgement(completion_first=first, completion_second=second)


async def _ask(judge: Judge, prompt: str, a: str, b: str) -> Verdict:
    verdict = judge(prompt, a, b)
    if inspect.isawaitable(verdict):
        verdict = await verdict
    if not isinstance(verdict, str) or verdict not in ("a", "b", "tie"):
        raise JudgeError("a judge's answer is no verdict", got=repr(verdict)[:80], allowed="'a', 'b' or 'tie'")
    return verdict
