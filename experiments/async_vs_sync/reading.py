"""What finished runs say, as numbers: step times and who waited, learning curves, win rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from slipstream.evals.evaluate import evaluate_model
from slipstream.evals.win_rate import gold_win_rate
from slipstream.observe.accounting import RunAccounting, StepAccounting, read_accounting
from slipstream.observe.states import idle_share, kind, seconds_of, side_of

Side = Literal["trainer", "generator"]


@dataclass(frozen=True)
class Times:
    """A run in its stride. Seconds are per step, shares of the time that a side was there.

    `loop_s` is per step of all of them, with the first one's wait for a batch and the last ones' empty generators.
    `trainer_waits` is by state. `interference` is how much slower each side is beside the other, where that was seen.
    """

    step_s: float
    loop_s: float
    training_s: float
    generating_s: float
    trainer_idle: float
    generator_idle: float
    trainer_waits: dict[str, float]
    decode_interference: float | None
    train_interference: float | None


def read_times(*, run: str, cold: int, last: int) -> dict[str, Any]:
    """`times_of` a run's folder, for `Lab.measure`."""
    return asdict(times_of(read_accounting(Path(run)), cold=cold, last=last))


def times_of(accounting: RunAccounting, *, cold: int, last: int) -> Times:
    """Without the first `cold` and the last `last` steps. ValueError where no step is left."""
    steps = accounting.steps[cold : len(accounting.steps) - last]
    if not steps:
        raise ValueError(f"{len(accounting.steps)} steps are too few to leave out {cold} and {last}")
    trainer, generator = _states("trainer", steps), _states("generator", steps)
    trainer_s = sum(trainer.values()) - seconds_of("gone", trainer)
    all_steps = accounting.steps
    return Times(
        step_s=(steps[-1].end_s - steps[0].start_s) / len(steps),
        loop_s=(all_steps[-1].end_s - all_steps[0].start_s) / len(all_steps),
        training_s=seconds_of("work", trainer) / len(steps),
        generating_s=seconds_of("work", generator) / len(steps),
        trainer_idle=idle_share(trainer),
        generator_idle=idle_share(generator),
        trainer_waits={state: s / trainer_s for state, s in sorted(trainer.items()) if kind(state) == "wait"},
        decode_interference=accounting.balance.interference.decode,
        train_interference=accounting.balance.interference.train,
    )


def overlapped_s(in_turns: Times) -> float:
    """Seconds of a step of ideal overlap, from a run in which each side worked alone with the cores of its share.

        ideal = max(T_generating, T_training)

    Asynchronous RLHF's ideal (arXiv:2410.18252, appendix on GSM8k: 12.9 s there, 15.1 s reached).
    """
    return max(in_turns.generating_s, in_turns.training_s)


@dataclass(frozen=True)
class Curve:
    """Windows of steps: the last step of each, seconds from the first admission to its end, means over the window."""

    steps: list[int]
    seconds: list[float]
    reward: list[float]
    gold: list[float]


def read_curve(*, run: str, metrics: Sequence[Mapping[str, Any]], window: int) -> dict[str, Any]:
    """`curve_of` a run's metrics, on the clock of its accounting."""
    accounting = read_accounting(Path(run))
    return asdict(curve_of(accounting, metrics, window=window))


def curve_of(accounting: RunAccounting, metrics: Sequence[Mapping[str, Any]], *, window: int) -> Curve:
    """Reward, and gold: the share of answers that are right to the last character, under a term of weight 0."""
    lines = [line for line in metrics if "reward" in line]
    ends = [step.end_s - accounting.steps[0].start_s for step in accounting.steps]
    starts = range(0, len(lines) - window + 1, window)
    return Curve(
        steps=[at + window for at in starts],
        seconds=[ends[at + window - 1] for at in starts],
        reward=[fmean(line["reward"] for line in lines[at : at + window]) for at in starts],
        gold=[fmean(line["reward_parts/exact_match"] for line in lines[at : at + window]) for at in starts],
    )


def mean_tokens(metrics: Sequence[Mapping[str, Any]]) -> float:
    """Of a completion, over all steps: the task's, unless training has changed what the policy does."""
    return fmean(line["completion_tokens_mean"] for line in metrics if "reward" in line)


def time_to(curve: Curve, gold: float) -> float | None:
    """Seconds until a window's gold score reached `gold`; None where none did."""
    return next((s for s, score in zip(curve.seconds, curve.gold, strict=True) if score >= gold), None)


def measure_quality(*, run: str, start: str) -> dict[str, float]:
    """Held out: greedy accuracy, and how often a sampled answer is worth more than the first policy's to that prompt.

    Gold is 1 for the right answer and 0 for all others; a tie is half a win.
    """
    ended = evaluate_model(run)
    began = evaluate_model(start, recipe=Path(run) / "config.toml")
    scores = [
        [float(answer.is_correct) for answer in result.answers[result.num_prompts :]] for result in (ended, began)
    ]
    return {
        "accuracy": ended.accuracy,
        "sampled_accuracy": ended.sampled_accuracy,
        "accuracy_before": began.accuracy,
        "win_rate": gold_win_rate(*scores).win_rate.mean,
    }


def _states(side: Side, steps: Iterable[StepAccounting]) -> dict[str, float]:
    """Seconds by state of the processes of one side, over these steps."""
    total: dict[str, float] = {}
    for step in steps:
        for process, states in step.states.items():
            if side_of(process) == side:
                for state, seconds in states.items():
                    total[state] = total.get(state, 0.0) + seconds
    return total
