"""The files of a finished run in the simulator's terms: the groups that it sampled, and its outcome.

`RecordedWorkload` gives a simulated run the groups of a recorded one: the same ones where the dials still ask for the
same groups, and others of the same time of training where they do not. `measured` is what a simulation is held against.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.files import no_run
from slipstream.core.recipes import resolve
from slipstream.core.run_log import (
    Decision,
    Metrics,
    RolloutLine,
    num_missing,
    read_decisions,
    read_metrics,
    read_rollouts,
)
from slipstream.core.training_sections import GROUP_RELATIVE
from slipstream.core.types import CompletionFinished
from slipstream.observe.accounting import RunAccounting, read_accounting
from slipstream.observe.timeline import Record, process_files, read_timeline
from slipstream.plan.lengths import num_sampled, recorded_turns
from slipstream.plan.simulated_run import GroupWork, RunOutcome, SimulatedTurn, for_environments

NEARBY_STEPS = 2
"""Groups of so many steps before and after are of the same time of training: lengths change as a policy learns."""
EXPONENTS = np.linspace(0.0, 1.0, 21)
USUAL_EXPONENT, EXPONENT_ERROR = 0.5, 0.25
"""The prior of `learning_exponent`: with four times the samples a step, half as many steps."""
PROGRESS_BINS = 8


class RecordedGroup(NamedTuple):
    """A recorded group: when it was, or would have been, trained, its prompt's characters, lengths and rewards."""

    ordinal: int
    step: int
    prompt_chars: int
    lengths: tuple[int, ...]
    rewards: tuple[float | None, ...]
    has_signal: bool
    turns: tuple[tuple[SimulatedTurn, ...], ...] = ()  # of each completion, with an environment


@dataclass(frozen=True)
class RecordedRun:
    """The files of a run, read once."""

    path: Path
    config: RunConfig
    metrics: list[Metrics]  # of its steps
    rollouts: list[RolloutLine]
    events: list[Decision]
    timelines: dict[str, list[Record]]
    accounting: RunAccounting

    @property
    def loop_s(self) -> tuple[float, float]:
        """From the first admission to the end of the last step, on the run's clock."""
        assert self.accounting.loop is not None, "`read_run` has seen to that"
        start_s, end_s = self.accounting.loop
        return self.accounting.start_s + start_s, self.accounting.start_s + end_s

    @property
    def num_steps(self) -> int:
        return len(self.accounting.steps)


def read_run(path: Path) -> RecordedRun:
    """Read the run in `path`. ConfigError for a folder that is none, or of a run that has not done two steps."""
    config_path = path / "config.toml"
    if not config_path.is_file():
        raise no_run(path, "config.toml")
    config = resolve(config_path)
    if config.host != "process":
        what = "executors of one process take turns: there is nothing to schedule"
        raise ConfigError(what, got=f"host = '{config.host}' in {config_path}", allowed="a run with host = 'process'")
    accounting = read_accounting(path)
    if accounting.loop is None or len(accounting.steps) < 2:
        what = "a run is simulated from what its steps took, and this one has done too few"
        raise ConfigError(what, got=f"{len(accounting.steps)} steps in {path}", allowed="2 steps or more")
    if lost := num_missing(path / "events.jsonl"):
        what = "a run is simulated from all of its events, and lines of this one are lost"
        got = f"{lost} events are missing in {path / 'events.jsonl'}"
        raise ConfigError(what, got=got, hint="`slipstream replay` says where")
    return RecordedRun(
        path=path,
        config=config,
        metrics=[line for line in read_metrics(path / "metrics.jsonl") if "tokens_trained" in line],
        rollouts=list(read_rollouts(path / "rollouts.jsonl")),
        events=list(read_decisions(path / "events.jsonl")),
        timelines={file.stem: list(read_timeline(file)) for file in process_files(path)},
        accounting=accounting,
    )


def of_last_attempt(run: RecordedRun) -> list[Metrics]:
    """Return the metrics of the steps that the run's timelines are of: a resume begins new ones."""
    steps = {step.step for step in run.accounting.steps}
    return [line for line in run.metrics if line["step"] in steps]


def measured(run: RecordedRun) -> RunOutcome:
    """Return the recorded outcome of the run's loop."""
    start_s, end_s = run.loop_s
    lags: Counter[int] = Counter()
    for line in of_last_attempt(run):
        for name, value in line.items():
            if name.startswith("staleness_tokens/"):
                lags[int(name.rpartition("_")[2])] += int(value)
    within = [line.event for line in run.events if start_s <= line.time_s <= end_s]
    generated = sum(event.num_tokens - event.num_restored for event in within if isinstance(event, CompletionFinished))
    idle = {side: run.accounting.idle[side] for side in ("trainer", "generator")}
    idle |= for_environments(run.accounting.accounting, end_s - start_s)
    return RunOutcome.of(run.num_steps, end_s - start_s, lags, generated, idle)


def groups_of(run: RecordedRun) -> list[RecordedGroup]:
    """Return the groups whose fate is known, by ordinal."""
    rollouts = sorted(run.rollouts, key=lambda line: (line.ordinal, line.sample))
    groups, num_dropped = [], 0
    for ordinal, found in itertools.groupby(rollouts, lambda line: line.ordinal):
        lines = list(found)
        is_dropped = lines[0].step is None
        groups.append(
            RecordedGroup(
                ordinal=ordinal,
                step=(ordinal - num_dropped) // run.config.groups_per_step,
                prompt_chars=len(lines[0].prompt),
                lengths=tuple(max(num_sampled(line), 1) for line in lines),
                rewards=tuple(line.reward for line in lines),
                has_signal=not is_dropped,
                turns=() if lines[0].episode is None else tuple(map(recorded_turns, lines)),
            )
        )
        num_dropped += is_dropped
    return groups


def learning_exponent(runs: Sequence[RecordedRun]) -> float:
    """Return a, where runs with n samples a step are equally far at equal step x n^a, by groups without signal.

    Runs of one n do not tell; then, and beside what they tell, it is about `USUAL_EXPONENT`.
    """
    sizes = [run.config.completions_per_step for run in runs]
    if len(set(sizes)) == 1:
        return USUAL_EXPONENT
    steps, signals = [], []
    for groups in map(groups_of, runs):
        steps.append(np.array([group.step for group in groups], dtype=np.float64))
        signals.append(np.array([group.has_signal for group in groups], dtype=np.float64))

    def misfit(exponent: float) -> float:
        progress = [own * size**exponent for own, size in zip(steps, sizes, strict=True)]
        shared = min(float(own.max()) for own in progress)  # how far all of them have come
        edges = np.linspace(0.0, shared, PROGRESS_BINS + 1)
        counts = {size: np.zeros((2, PROGRESS_BINS)) for size in sizes}  # groups, and those with signal
        for own, signal, size in zip(progress, signals, sizes, strict=True):
            counts[size] += np.stack([np.histogram(own, edges, weights=w)[0] for w in (np.ones_like(signal), signal)])
        total = np.sum(list(counts.values()), axis=0)
        share = total[1] / np.maximum(total[0], 1)
        apart = np.sum([(one[1] - share * one[0]) ** 2 / np.maximum(one[0], 1) for one in counts.values()], axis=0)
        found = float((apart / (share * (1 - share) + 0.01)).sum())
        return found + ((exponent - USUAL_EXPONENT) / EXPONENT_ERROR) ** 2

    return float(min(EXPONENTS.tolist(), key=misfit))


def prompt_tokens_per_char(run: RecordedRun) -> float:
    """Return the mean tokens of a prompt's character: rows that were read and belong to no completion.

    Of a completion that is trained on all tokens but the last are read: those sampled, which the run has counted, and
    its share of the given ones. Counted are the rows of contexts read alone, each with its prompt; a run of before they
    were counted had each prompt once, and shared nothing else (`batching/collate.py`).
    """
    trained = [line for line in run.rollouts if line.step is not None]
    is_counted = all("tokens_unshared" in line for line in run.metrics)
    prompts = {(line.step, line.ordinal, is_counted and line.sample): len(line.prompt) for line in trained}
    share = run.config.trained_per_group / run.config.samples_per_group
    chars = sum(prompts.values()) * (share if is_counted else 1)
    sampled = sum(float(line["tokens_trained"]) for line in run.metrics)
    completion_rows = sampled + share * sum(line.num_tokens - num_sampled(line) - 1 for line in trained)
    rows = sum(float(line["tokens_unshared" if is_counted else "tokens_read"]) for line in run.metrics)
    return max(rows - completion_rows, 0.0) / max(chars, 1)


class RecordedWorkload:
    """Groups of recorded runs, for a run of `groups_per_step` and `samples` completions per group.

    Group `ordinal` is that of the first run, where it has the same shape. Else one is drawn, by `seed` and ordinal,
    from all of the runs, of a policy that had learned about as much (`learning_exponent`), with as many of its
    completions as are asked for, some of them twice if need be; it has signal where they differ in reward.
    """

    def __init__(
        self, runs: Sequence[RecordedRun], *, groups_per_step: int, samples: int, num_held_out: int, seed: int = 0
    ) -> None:
        self._samples, self._num_held_out, self._seed = samples, num_held_out, seed
        recorded = [groups_of(run) for run in runs]
        self._per_char = fmean(prompt_tokens_per_char(run) for run in runs)
        first = runs[0].config
        self._compares = first.loss.advantages in GROUP_RELATIVE
        is_same = (first.groups_per_step, first.samples_per_group) == (groups_per_step, samples)
        self._same = {group.ordinal: group for group in recorded[0]} if is_same else {}
        self._by_step: dict[int, list[RecordedGroup]] = defaultdict(list)  # by the step of this run that is as far
        exponent = learning_exponent(runs)
        for run, groups in zip(runs, recorded, strict=True):
            pace = (run.config.completions_per_step / (groups_per_step * samples)) ** exponent
            for group in groups:
                self._by_step[round(group.step * pace)].append(group)
        self._last_step = max(self._by_step)

    def group(self, ordinal: int, step: int) -> GroupWork:
        if (same := self._same.get(ordinal)) is not None:
            return self._work(same, range(len(same.lengths)), same.has_signal)
        rng = np.random.default_rng((self._seed, ordinal))
        group, samples = self._drawn(rng, step), self._samples
        recorded = len(group.lengths)
        if recorded == samples:
            return self._work(group, range(recorded), group.has_signal)
        picks = rng.choice(recorded, samples, replace=samples > recorded)
        has_signal = not self._compares or len({group.rewards[pick] for pick in picks}) > 1
        return self._work(group, picks.tolist(), has_signal)

    def held_out(self, version: int) -> Sequence[GroupWork]:
        rng = np.random.default_rng((self._seed, 1 << 40, version))
        drawn = [self._drawn(rng, version) for _ in range(self._num_held_out)]
        return [GroupWork(self._prompt_tokens(group), (int(rng.choice(group.lengths)),)) for group in drawn]

    def _drawn(self, rng: np.random.Generator, step: int) -> RecordedGroup:
        middle, reach = min(max(step, 0), self._last_step), NEARBY_STEPS
        while not (near := [g for s in range(middle - reach, middle + reach + 1) for g in self._by_step.get(s, ())]):
            reach *= 2
        return near[int(rng.integers(len(near)))]

    def _prompt_tokens(self, group: RecordedGroup) -> int:
        return max(1, round(group.prompt_chars * self._per_char))

    def _work(self, group: RecordedGroup, picks: Sequence[int], has_signal: bool) -> GroupWork:
        lengths = tuple(group.lengths[pick] for pick in picks)
        turns = tuple(group.turns[pick] for pick in picks) if group.turns else ()
        return GroupWork(self._prompt_tokens(group), lengths, has_signal, turns)
