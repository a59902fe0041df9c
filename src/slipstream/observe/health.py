"""Alarms: whether the numbers of a run look like those of a run that goes well, step by step, in plain words.

`Health` is pure and incremental: lines of `metrics.jsonl` in, alarms out; no clock, no I/O, bounded memory. Each alarm
watches one statistic of recent steps, robust against single outliers where it looks at a level. It begins when the
statistic is beyond its threshold for some steps in a row, and ends when it has been back, by a margin, for as many: one
line at the beginning and one at the end, however noisy the number between them.

An alarm is a suspicion, not a verdict. Nothing is changed by one, unless `health.stop_on` names it. Of what a
configuration has chosen none rings (`unfit`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from slipstream.core.config import AlarmName, HealthConfig, RunConfig
from slipstream.core.errors import AlarmError
from slipstream.core.jsonl import JsonlWriter, read_jsonl
from slipstream.core.plain import shortened
from slipstream.core.run_log import read_metrics
from slipstream.observe.trends import (
    History,
    Statistic,
    above_baseline,
    clipped_tokens,
    entropy_left,
    equal_rewards,
    level,
    longer_with_reward,
    lowest,
    mean,
    spikes,
    times_baseline,
    total,
    waiting,
)

ALARMS_FILE = "alarms.jsonl"
_FAILURE_CHARS = 300  # of an exception's text, in an alarm

WATCHED_STEPS = 42
"""Steps after which every alarm could have rung: the longest window is one of 40, and it takes three in a row."""

Severity = Literal["notice", "warning"]


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `alarms.jsonl`: alarm `name` began or ended at `step`, its statistic being `value`."""

    step: int
    name: AlarmName
    event: Literal["began", "ended"]
    severity: Severity
    value: float
    threshold: float
    text: str


class AlarmSpan(msgspec.Struct, frozen=True, kw_only=True):
    """An alarm from the step it began at to the one it ended at; `ended` is None where it was on at the end."""

    name: AlarmName
    severity: Severity
    began: int
    ended: int | None
    value: float
    threshold: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An alarm: on beyond `threshold` for `persist` steps in a row, off again behind `clears` of it for as many.

    `is_low`: what is below the threshold is bad. `watches`, `meaning` and `advice` are for people; `reason` is why the
    threshold is where it is.
    """

    statistic: Statistic
    threshold: float
    watches: str
    meaning: str
    advice: str
    reason: str
    severity: Severity = "warning"
    is_low: bool = False
    clears: float = 0.8
    persist: int = 3

    def is_beyond(self, value: float, threshold: float) -> bool:
        return value < threshold if self.is_low else value >= threshold

    def is_back(self, value: float, threshold: float) -> bool:
        return value > threshold / self.clears if self.is_low else value < threshold * self.clears


RULES: dict[AlarmName, Rule] = {
    "logprob_mismatch": Rule(
        statistic=level("logprob_diff_mean/lag_0", 10),
        threshold=0.05,
        watches="mean |policy - behaviour logprob| of completions sampled wholly under the version that is trained, "
        "median of 10 steps that have some",
        meaning="Generator and trainer disagree about the same weights: they do not compute the same model",
        advice="compare precision, temperature and attention of both sides; corrections of the ratio (loss 'aipo') "
        "hide this and do not cure it",
        reason="float32 on both sides gives 0.002, bfloat16 with float32 heads 0.03 to 0.04",
    ),
    "logprob_mismatch_growing": Rule(
        statistic=times_baseline("logprob_diff_mean/lag_0", 10, floor=0.002),
        threshold=3.0,
        watches="the same, over its median in the first 10 steps that had some (at least 0.002 nats)",
        meaning="Generator and trainer drift apart while they should hold the same weights",
        advice="look for a cache that outlives its weights, a layer that is not synchronised, or a precision that the "
        "weights have outgrown; a run that goes on usually collapses",
        reason="a healthy mismatch is a property of the two engines and stays; below 0.006 nats it is rounding",
    ),
    "ess_collapse": Rule(
        statistic=level("ess", 5),
        threshold=0.5,
        is_low=True,
        watches="effective sample size of the importance ratios, mean(r)^2 / mean(r^2), median of 5 steps",
        meaning="A few tokens carry most of the update: the completions are no longer what this policy would say",
        advice="lower max_staleness, the learning rate or trainer.epochs, or truncate ratios lower",
        reason="1 on fresh completions, above 0.95 in the shipped recipes at staleness 2; half means half is wasted",
    ),
    "ratio_clipped": Rule(
        statistic=clipped_tokens(10),
        threshold=0.25,
        watches="share of trained tokens whose ratio the loss clips or truncates, median of 10 steps; not of losses "
        "whose ratios are those of whole completions, which clip most of them by design",
        meaning="The loss stops or weakens the gradient of very many tokens: updates are too large for its clip",
        advice="lower the learning rate, trainer.epochs or max_staleness",
        reason="PPO's published runs clip 0.005 to 0.02 of the tokens, the quickstart at most 0.07",
    ),
    "policy_drift": Rule(
        statistic=level("kl_k2", 5),
        threshold=0.1,
        watches="KL of behaviour policy and policy in nats per token (k2, PPO's approxkl), median of 5 steps",
        meaning="The policy runs away from the completions it is trained on",
        advice="lower the learning rate, trainer.epochs or max_staleness",
        reason="0.002 in PPO's published runs; implementations that stop early do so from 0.01 to 0.05 on",
    ),
    "kl_runaway": Rule(
        statistic=level("kl_reference", 5),
        threshold=0.5,
        watches="KL to the reference in nats per token, median of 5 steps, where there is a reference",
        meaning="The policy has left its reference far behind: whatever the reward cannot see is no longer held",
        advice="raise kl.coef or set kl.target; read rollouts.jsonl for text that only the reward likes",
        reason="preference-tuned models over-optimise from about 25 nats per completion of 50 tokens on",
    ),
    "length_hacking": Rule(
        statistic=longer_with_reward(40),
        threshold=1.5,
        watches="mean length of the last 10 of 40 steps over that of the first 10, if the reward rose with the length "
        "(rank correlation at least 0.7)",
        meaning="Reward rises together with length, and strongly: longer answers may be paid for being longer",
        advice="read rollouts.jsonl; give length a price, or measure the reward against the length",
        reason="half as long again within 40 steps is a change of behaviour, not noise",
        severity="notice",
    ),
    "truncation_growing": Rule(
        statistic=above_baseline("truncated_frac", 10),
        threshold=0.2,
        watches="share of completions without an end, median of 10 steps, less that of the first 10",
        meaning="More and more completions run into the length limit, and are scored or masked without their end",
        advice="raise generator.max_new_tokens, set loss.truncated, or look for repetition in rollouts.jsonl",
        reason="every fifth completion more",
    ),
    "entropy_collapse": Rule(
        statistic=entropy_left(10),
        threshold=0.1,
        is_low=True,
        watches="entropy over that of the first 10 steps, medians of 10; only while rewards differ within a batch and "
        "do not rise",
        meaning="The policy hardly tries anything new, and does not get better either",
        advice="raise loss.entropy_coef, generator.temperature or the upper clip; lower the learning rate",
        reason="a task that is solved needs no entropy, hence the condition",
    ),
    "grad_norm_spikes": Rule(
        statistic=spikes("grad_norm", 20, factor=5.0),
        threshold=2.0,
        watches="how many of the last 20 steps had a gradient norm beyond 5 times the median of the 20 before them, "
        "and beyond 10 of their deviations",
        meaning="Again and again one step's gradient is far larger than the others; clipping keeps its size, not its "
        "direction",
        advice="look at these steps in rollouts.jsonl and at ratio_max: PPO's clip does not bound a token that became "
        "likelier with a negative advantage, dual_clip (loss 'ppo') and max_ratio (loss 'aipo') do; lower the "
        "learning rate",
        reason="one alone happens: 31 times the median in one of three quickstarts, by one token of ratio 22",
        severity="notice",
        clears=0.5,
        persist=1,
    ),
    "no_signal": Rule(
        statistic=equal_rewards(10),
        threshold=0.9,
        watches="share of scored groups whose rewards are all equal, median of 10 steps; not where most have failed",
        meaning="Nearly all sampling is wasted: all completions of a group get the same reward, which teaches nothing",
        advice="harder or easier prompts, more completions per group, or stop: the task may be learned",
        reason="the quickstart ends at two thirds; at nine tenths a step costs ten times its completions",
        clears=0.95,
    ),
    "failed_rewards": Rule(
        statistic=level("failed_completions", 1),
        threshold=16.0,
        watches="completions that failed so far: a reward raised, was too slow, gave no number; rings at the 16th, "
        "also before the first step is done",
        meaning="Completions could not be scored, and count with rewards.failure_reward",
        advice="see `failure` in rollouts.jsonl; mend the reward, or raise rewards.timeout_s or rewards.memory_mb",
        reason="16 are no accident; where they are few of very many, they change little",
        persist=1,
    ),
    "poisoned": Rule(
        statistic=total("poisoned", 20),
        threshold=1.0,
        watches="completions that cannot be (no number for a logprob, unknown tokens, versions from the future), sum "
        "of 20 steps",
        meaning="A generator or a channel delivers what cannot be; it is not trained on",
        advice="see `failure` in rollouts.jsonl for what, which version and which replica; one may be a bit flip, many "
        "are a bug of the engine",
        reason="there is no healthy number of them",
        persist=1,
    ),
    "starving_trainer": Rule(
        statistic=waiting("trainer", "wait_generation", 10),
        threshold=0.8,
        watches="share of the trainer's time spent waiting for generation, mean of 10 reports",
        meaning="Generation is the bottleneck: the trainer idles most of its time",
        advice="where generators are busy meanwhile, more of them or more generator.num_slots; where they wait, too, a "
        "larger max_staleness",
        reason="four fifths of a process paid for nothing",
        severity="notice",
        clears=0.9,
    ),
    "starving_generator": Rule(
        statistic=waiting("generator-", "wait_trainer", 10),
        threshold=0.8,
        watches="share of the generators' time spent waiting for the trainer, mean of 10 reports and all replicas",
        meaning="Training is the bottleneck: generators idle most of their time",
        advice="where the trainer is busy meanwhile, fewer generators or more trainer ranks; where it waits, too, a "
        "larger max_staleness",
        reason="as above",
        severity="notice",
        clears=0.9,
    ),
    "slow_rewards": Rule(
        statistic=waiting("trainer", "wait_rewards", 10),
        threshold=0.5,
        watches="share of the trainer's time spent waiting for scores, mean of 10 reports",
        meaning="Scoring is the bottleneck: completions lie finished and unscored",
        advice="more rewards.num_workers, a shorter rewards.timeout_s, a faster verifier",
        reason="scoring overlaps with sampling, and should cost no time of its own",
    ),
    "straggler": Rule(
        statistic=waiting("trainer", "wait_straggler", 10),
        threshold=0.3,
        watches="share of the trainer's time in which a batch lay finished behind one older group, mean of 10 reports",
        meaning="The trainer waits for single slow completions while others are done: nothing is dropped, all wait",
        advice="a larger max_staleness or reorder_window, a lower generator.max_new_tokens; of several replicas, see "
        "timeline.json for one slower than the others: one ten times as slow is worse than none",
        reason="a third of the time; 0.003 in the quickstart",
        clears=0.7,
    ),
    "version_lag": Rule(
        statistic=lowest("version_lag_excess", 5),
        threshold=1.0,
        watches="steps by which the replica that lags most is behind max_staleness + 1, the least of 5 steps",
        meaning="A generator holds weights so old that it is given no work, and gets no newer ones",
        advice="see its log and docs/weight_sync.md: its link or its staging may be stuck",
        reason="a replica that swaps within a step of the bound is merely late",
    ),
    "publish_skipped": Rule(
        statistic=mean("publish_skipped_frac", 20),
        threshold=0.5,
        watches="share of versions that found no free slot, mean of 20 steps",
        meaning="Generators are still reading the last version when the next one is made, so versions are left out",
        advice="raise publish_every, or see docs/weight_sync.md for what transfers cost",
        reason="left out is every second version",
        severity="notice",
    ),
}


def unfit(config: RunConfig) -> frozenset[AlarmName]:
    """Alarms that would ring for what the configuration has chosen, whose advice it has declined.

    In one process executors wait for each other's turns, and at staleness 0 trainer and generators take turns. A
    schedule that promises no bound has none that a replica could be behind. Weights in 8 bits are another model.
    """
    found: set[AlarmName] = set()
    if config.generator.precision in ("int8", "fp8"):
        found.add("logprob_mismatch")
    if config.host == "inline":
        found |= {"starving_trainer", "starving_generator", "straggler"}
    if config.takes_turns:
        found |= {"starving_trainer", "starving_generator"}
    if config.staleness_bound is None:
        found.add("version_lag")
    return frozenset(found)


@dataclass
class _State:
    is_on: bool = False
    num_turning: int = 0  # steps in a row that ask for the other state


class Health:
    """All alarms of a run. `update` takes one line of `metrics.jsonl` and says which began and which ended with it.

    Those of `silent` never do.
    """

    def __init__(self, config: HealthConfig, *, silent: Collection[AlarmName] = ()) -> None:
        self._config = config
        self._history = History()
        self._states = {name: _State() for name in RULES if name not in silent}

    @property
    def active(self) -> list[AlarmName]:
        """Alarms that are on."""
        return [name for name, state in self._states.items() if state.is_on]

    def update(self, metrics: Mapping[str, Any]) -> list[Alarm]:
        """Take a step's metrics, in order of steps. Lines of evaluations are passed over."""
        if not self._config.alarms or "step_s" not in metrics:
            return []
        self._history.add(metrics)
        found = (self._turned(name, int(metrics["step"])) for name in self._states)
        return [alarm for alarm in found if alarm is not None]

    def failed(self, step: int, count: int, num_scored: int, failure: str) -> list[Alarm]:
        """Take that `count` of `num_scored` completions have failed by now, the last one with `failure`."""
        if not self._config.alarms:
            return []
        self._history.add({"failed_completions": count})
        detail = f"{count:,} of {num_scored:,} completions so far, the last: {shortened(failure, _FAILURE_CHARS)}"
        alarm = self._turned("failed_rewards", step, detail)
        return [] if alarm is None else [alarm]

    def _turned(self, name: AlarmName, step: int, detail: str = "") -> Alarm | None:
        rule, state = RULES[name], self._states[name]
        value = rule.statistic(self._history)
        if value is None:
            return None
        threshold = self._config.thresholds.get(name, rule.threshold)
        turns = rule.is_back(value, threshold) if state.is_on else rule.is_beyond(value, threshold)
        state.num_turning = state.num_turning + 1 if turns else 0
        if state.num_turning < rule.persist:
            return None
        state.is_on, state.num_turning = not state.is_on, 0
        return Alarm(
            step=step,
            name=name,
            event="began" if state.is_on else "ended",
            severity=rule.severity,
            value=value,
            threshold=threshold,
            text=f"{rule.meaning} ({detail or f'{value:.3g}, threshold {threshold:g}'}). Try: {rule.advice}.",
        )


class Watchman:
    """The alarms of the run in `run_dir`: each goes to `alarms.jsonl` and to all `sinks`; those of `health.stop_on` end
    the run.

    After a resume it has seen the steps that `metrics.jsonl` still holds, and rings for none of them again.
    """

    def __init__(
        self,
        config: HealthConfig,
        run_dir: Path,
        *,
        sinks: Sequence[Callable[[Alarm], None]] = (),
        silent: Collection[AlarmName] = (),
    ) -> None:
        self._config = config
        self._sinks = sinks
        self._health = Health(config, silent=silent)
        self._run_dir = run_dir
        for line in read_metrics(run_dir / "metrics.jsonl"):
            self._health.update(line)
        self._writer = JsonlWriter(run_dir / ALARMS_FILE)

    def watch(self, metrics: Mapping[str, Any]) -> list[Alarm]:
        """The alarms that began or ended with a step. AlarmError for one that is to end the run."""
        return self._tell(self._health.update(metrics))

    def failed(self, step: int, count: int, num_scored: int, failure: str) -> list[Alarm]:
        """The same as completions fail to be scored, which may be before any step is done (`Health.failed`)."""
        return self._tell(self._health.failed(step, count, num_scored, failure))

    def _tell(self, alarms: list[Alarm]) -> list[Alarm]:
        self._writer.write(*alarms)
        for alarm in alarms:
            for sink in self._sinks:
                sink(alarm)
        for alarm in alarms:
            if alarm.event == "began" and alarm.name in self._config.stop_on:
                raise AlarmError(
                    f"the alarm '{alarm.name}' began at step {alarm.step}, on which health.stop_on ends the run",
                    got=f"{alarm.value:.3g}, threshold {alarm.threshold:g}",
                    hint=f"{alarm.text} See {self._run_dir / ALARMS_FILE}",
                )
        return alarms

    def close(self) -> None:
        self._writer.close()


def in_a_line(alarm: Alarm) -> str:
    """For a log."""
    if alarm.event == "ended":
        return f"alarm ended at step {alarm.step}: {alarm.name} ({alarm.value:.3g}, threshold {alarm.threshold:g})"
    return f"{alarm.severity} at step {alarm.step}: {alarm.name}. {alarm.text}"


def read_alarms(path: Path) -> list[Alarm]:
    """All lines of `alarms.jsonl`; none for a missing file."""
    return list(read_jsonl(path, Alarm))


def spans(alarms: Iterable[Alarm]) -> list[AlarmSpan]:
    """Beginnings joined with their ends, by the step they began at."""
    found: list[AlarmSpan] = []
    open_at: dict[AlarmName, int] = {}
    for alarm in alarms:
        if alarm.event == "began":
            open_at[alarm.name] = len(found)
            found.append(
                AlarmSpan(
                    name=alarm.name,
                    severity=alarm.severity,
                    began=alarm.step,
                    ended=None,
                    value=alarm.value,
                    threshold=alarm.threshold,
                    text=alarm.text,
                )
            )
        elif (index := open_at.pop(alarm.name, None)) is not None:
            found[index] = msgspec.structs.replace(found[index], ended=alarm.step)
    return found
