"""The numbers of a run so far, behind the display, the metrics and `summary.json`."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, get_args

import msgspec

from slipstream.controller.evaluations import GREEDY, EvaluationDone
from slipstream.controller.ledger import counts
from slipstream.core.clock import Clock, WallClock
from slipstream.core.config import RunConfig
from slipstream.core.held_out import GREEDY_PREFIX, SAMPLED_PREFIX, Measured, in_metrics, is_right, set_prefix
from slipstream.core.run_log import Command, Decision
from slipstream.core.service_messages import JUDGE_PREFIX, NUM_SHOWN, Counters, EvalScored, Published, Ready
from slipstream.core.types import (
    GroupScored,
    Skip,
    SkipCause,
    StartGroup,
    StepDone,
    Stop,
    StopCause,
    Swapped,
    TrainStep,
)
from slipstream.observe import summary as s
from slipstream.observe.accounting import accounting_bytes, read_accounting
from slipstream.observe.health import ALARMS_FILE, read_alarms, spans
from slipstream.observe.metrics import rate
from slipstream.observe.samples import Sample, read_samples, write_samples
from slipstream.observe.states import model_share, side_of, totals_of
from slipstream.observe.transcript import TranscriptPart, transcript_of
from slipstream.observe.waste import Wasted, not_selected

NUM_REPORTS = 10  # of sampled tokens, behind their rate
ENDED_AT = "callback_ended_run_of_steps"


@dataclass
class VersionAnswers:
    """The measures of one version's answers to held-out prompts, and the greedy answers for the samples shown."""

    greedy: Measured | None = None
    sampled: Measured | None = None
    scores: list[EvalScored] = field(default_factory=list)
    sets: dict[str, Measured] = field(default_factory=dict)
    """The answers to further sets, by name."""


@dataclass
class Tally:
    """Counts and sums; times are seconds on the run's clock.

    After a resume, steps, staleness, padding, evaluations, `regenerated_tokens` and failed completions are those of the
    surviving lineage: what led to the checkpoint, and what came after it. Rates, swaps and accounting are of this
    attempt alone.
    """

    hears = (Decision, GroupScored, Counters, Swapped, Published, Ready, Wasted, EvaluationDone)
    config: RunConfig
    started_s: float
    clock: Clock = field(default_factory=WallClock)
    status: s.Status = "running"
    error: str | None = None
    resume_call: str | None = None
    stopped_because: StopCause | None = None
    ended_s: float = 0.0
    steps_done: int = 0
    num_params: int = 0
    num_adapter_params: int = 0
    rl_started_s: float | None = None
    last_step_s: float | None = None
    trained_tokens: int = 0
    trained_completions: int = 0
    padded_tokens: float = 0.0
    padding_weight: float = 0.0
    rows: Counter[str] = field(default_factory=Counter)  # of the trainer, by metric
    staleness: Counter[int] = field(default_factory=Counter)
    staleness_updates_max: int = 0
    counters: dict[str, dict[str, float]] = field(default_factory=dict)
    generated_tokens: float = 0.0
    generated: deque[tuple[float, float]] = field(default_factory=deque)  # (time, tokens so far), recent
    evaluations: dict[int, VersionAnswers] = field(default_factory=dict)
    transfers_s: array[float] = field(default_factory=lambda: array("d"))  # one of each swap
    pauses_s: array[float] = field(default_factory=lambda: array("d"))
    publishes_skipped: int = 0
    payload_bytes: int = 0
    prompts: dict[str, int] = field(default_factory=lambda: counts({}))
    dropped: Counter[SkipCause] = field(default_factory=Counter)  # groups since the last step, by cause
    restarts: Counter[str] = field(default_factory=Counter)  # executor -> how often it was started again
    data: s.Data | None = None
    earlier_s: float = 0.0
    """The seconds of the attempts before this one, up to where it goes on."""
    callback_s: dict[str, float] = field(default_factory=dict)
    """The seconds in the calls of each callback."""
    regenerated_tokens: int = 0
    scored_completions: int = 0
    failed_completions: int = 0
    """The part of `scored_completions` that could not be scored, trained or not."""
    failed_of: dict[int, int] = field(default_factory=dict)
    """The same by group, of those that were scored since the last checkpoint, or waited for their step at it."""

    # News

    def take(self, news: object) -> None:
        """Count what `news` tells; a step is counted by `stepped`."""
        match news:
            case Decision(commands=commands, event=event):
                if isinstance(event, Stop):
                    self.stopped_because = event.because or self.stopped_because
                for command in commands:
                    self._command(command)
            case GroupScored(ordinal=ordinal, num_failed=num_failed):
                self.scored_completions += self.config.samples_per_group
                self.failed_completions += num_failed
                if num_failed:
                    self.failed_of[ordinal] = num_failed
            case Counters():
                known = self.counters.setdefault(news.executor, {})
                if (tokens := news.values.get("generated_tokens")) is not None:
                    self._generated(tokens - known.get("generated_tokens", 0.0))
                known.update(news.values)
            case Swapped() if news.version > 0:
                self.transfers_s.append(news.transfer_s)
                self.pauses_s.append(news.pause_s)
            case Published(skipped=skipped, payload_bytes=payload_bytes):
                self.publishes_skipped += skipped
                self.payload_bytes = payload_bytes
            case Ready(num_params=num_params, num_adapter_params=num_adapter_params):
                self.num_params = max(self.num_params, num_params)
                self.num_adapter_params = max(self.num_adapter_params, num_adapter_params)
            case Wasted(cause="regenerated", tokens=tokens):
                self.regenerated_tokens += tokens
            case EvaluationDone():
                self._evaluated(news)

    def _generated(self, tokens: float) -> None:
        """Count tokens; keep the last reports: ten, or those of so many seconds, where there are more replicas."""
        now_s, self.generated_tokens = self.clock.now_s(), self.generated_tokens + tokens
        self.generated.append((now_s, self.generated_tokens))
        while len(self.generated) > NUM_REPORTS and self.generated[1][0] < now_s - NUM_REPORTS:
            self.generated.popleft()

    def _command(self, command: Command) -> None:
        """The first admission, or (after a resume) the first step, begins the RL phase and its rates."""
        if isinstance(command, StartGroup | TrainStep) and self.rl_started_s is None:
            self.rl_started_s = self.last_step_s = self.clock.now_s()
            self.generated = deque([(self.rl_started_s, self.generated_tokens)])
        elif isinstance(command, Skip):
            self.dropped[command.cause] += len(command.ordinals)

    def lost(self, executors: Iterable[str]) -> None:
        """Keep what these processes have counted, which are gone: when they come back they count from 0."""
        for executor in executors:
            if executor in self.counters:
                self.counters[f"{executor} until {len(self.counters)}"] = self.counters.pop(executor)

    def stepped(self, message: StepDone) -> dict[str, float]:
        """Count a step; return its metrics with the run's own added."""
        metrics, now_s = dict(message.metrics), self.clock.now_s()
        self.steps_done = message.step + 1
        self.trained_tokens += int(metrics["tokens_trained"])
        self.trained_completions += self.config.completions_per_step
        self._consume(metrics)
        metrics["reward"] = metrics["reward_mean"]
        metrics["failed_completions"] = float(self.failed_completions)
        metrics["wasted_tokens/not_selected"] = float(not_selected(metrics))
        metrics |= {f"dropped/{cause}": float(self.dropped[cause]) for cause in get_args(SkipCause)}
        self.dropped.clear()
        assert self.last_step_s is not None
        metrics["step_s"] = now_s - self.last_step_s
        self.last_step_s = now_s
        metrics |= _known(
            {
                "trained_tokens_per_s": rate(metrics["tokens_trained"], metrics["step_s"]),
                "generated_tokens_per_s": self.generated_tokens_per_s,
            }
        )
        if self.config.has_critic:
            metrics |= self._published_times(now_s, metrics["step_s"])
        return metrics

    def _published_times(self, now_s: float, step_s: float) -> dict[str, float]:
        """Return what the original RLHF code and the TL;DR reproduction (ppo/eps) log of the run's clock.

        Theirs have completions of one length; fps counts ours at that length, too.
        """
        assert self.rl_started_s is not None
        steps = self.config.completions_per_step * self.config.longest_completion
        fps = rate(steps, step_s)
        return {"elapsed/time": self.wall_s} | _known(
            {
                "elapsed/fps": None if fps is None else float(int(fps)),
                "ppo/eps": rate(self.trained_completions, now_s - self.rl_started_s),
            }
        )

    @property
    def wall_s(self) -> float:
        """Return the seconds since the run began, without what was abandoned and the time between attempts."""
        return self.earlier_s + self.clock.now_s() - self.started_s

    def saved(self, waiting: Collection[int]) -> dict[str, float]:
        """Return what a checkpoint keeps of this, besides what `recall` finds in the metrics.

        Without the groups `waiting`, scored and not trained yet: a resume hears of them anew.
        """
        self.failed_of = {ordinal: self.failed_of[ordinal] for ordinal in waiting if ordinal in self.failed_of}
        return {
            "wall_s": self.wall_s,
            "regenerated_tokens": float(self.regenerated_tokens),
            "scored_completions": float(self.scored_completions - len(waiting) * self.config.samples_per_group),
            "failed_completions": float(self.failed_completions - sum(self.failed_of.values())),
        } | ({ENDED_AT: float(self.config.steps)} if self.stopped_because == "callback" else {})

    def restore(self, saved: Mapping[str, float]) -> None:
        """Go on from what a checkpoint has kept."""
        self.earlier_s = saved.get("wall_s", 0.0)
        if saved.get(ENDED_AT) == self.config.steps:  # with more steps it goes on
            self.stopped_because = "callback"
        self.regenerated_tokens = int(saved.get("regenerated_tokens", 0.0))
        self.scored_completions = int(saved.get("scored_completions", 0.0))
        self.failed_completions = int(saved.get("failed_completions", 0.0))

    def recall(self, line: Mapping[str, Any]) -> None:
        """Take a line of `metrics.jsonl` from before a resume: what was consumed, and what evaluations said."""
        if "staleness_updates_max" in line:
            self.steps_done = line["step"] + 1
            self._consume(line)
        if (greedy := in_metrics(line, GREEDY_PREFIX)) is not None:
            self.evaluations.setdefault(line["version"], VersionAnswers()).greedy = greedy
        if (sampled := in_metrics(line, SAMPLED_PREFIX)) is not None:
            self.evaluations.setdefault(line["version"], VersionAnswers()).sampled = sampled
        for one in self.config.eval.sets[1:]:
            if (found := in_metrics(line, set_prefix(one.name))) is not None:
                self.evaluations.setdefault(line["version"], VersionAnswers()).sets[one.name] = found

    def _consume(self, metrics: Mapping[str, Any]) -> None:
        self.padding_weight += metrics["tokens_read"]
        self.padded_tokens += metrics["padding_frac"] * metrics["tokens_read"]
        if "tokens_unshared" in metrics:  # not in lines of versions before there was this metric
            self.rows.update({name: int(metrics[name]) for name in ("tokens_unshared", "tokens_read")})
        self.staleness_updates_max = max(self.staleness_updates_max, int(metrics["staleness_updates_max"]))
        for name in [name for name in metrics if name.startswith("staleness_tokens/")]:
            self.staleness[int(name.rpartition("_")[2])] += int(metrics[name])

    def _evaluated(self, done: EvaluationDone) -> None:
        answers = self.evaluations.setdefault(done.version, VersionAnswers())
        if done.name:
            answers.sets[done.name] = done.found
        elif done.temperature == GREEDY:
            answers.greedy = done.found
            answers.scores = sorted(done.scores, key=lambda score: score.ordinal)[:NUM_SHOWN]
            for version in self.evaluations.keys() - {0, max(self.evaluations)}:  # samples are of the first and last
                self.evaluations[version].scores = []
        else:
            answers.sampled = done.found

    def knows(self, version: int, name: str, temperature: float) -> bool:
        """Return whether an evaluation of `version` is done: that of a further set, or without name the primary one."""
        found = self.evaluations.get(version, VersionAnswers())
        if name:
            return name in found.sets
        return (found.greedy if temperature == GREEDY else found.sampled) is not None

    # Asked by metrics and summary

    @property
    def generated_tokens_per_s(self) -> float | None:
        """Return the rate over the last few reports of the generators; None before there are two."""
        if len(self.generated) < 2:
            return None
        (first_s, first), (last_s, last) = self.generated[0], self.generated[-1]
        return rate(last - first, last_s - first_s)

    @property
    def episodes(self) -> s.EpisodeCounts:
        """Return the counts of this attempt's episodes, those of processes that are gone included."""
        of_side: dict[str, list[dict[str, float]]] = {"environments": [], "generator": []}
        for name, values in self.counters.items():
            of_side.get(side_of(name.partition(" ")[0]), []).append(values)
        told, keys = (totals_of(parts) for parts in of_side.values())
        names = (
            *("episodes", "turns", "restarts", "restored", "begun_again"),
            *("failed", "cut", "tool_calls", "tool_errors", "forks", "refused"),
        )
        hit, missed = (keys.get(f"parked_{what}_tokens", 0.0) for what in ("hit", "missed"))
        ended = told.get("ended", 0.0)
        return s.EpisodeCounts(
            **{name: int(told.get(name, 0.0)) for name in names},
            mean_turns=told["turns_of_ended"] / ended if ended else None,
            environment_s=told.get("environment_s", 0.0),
            parked_hit_frac=hit / (hit + missed) if hit + missed else None,
            evicted_sessions=int(keys.get("evicted_sessions", 0.0)),
        )

    @property
    def judges(self) -> dict[str, s.JudgeCounts]:
        """Return the counts of this attempt's judges by name, those of processes that are gone included."""
        told = totals_of(self.counters.values())
        counts: dict[str, dict[str, Any]] = {}
        for key in [key for key in told if key.startswith(JUDGE_PREFIX)]:
            name, _, what = key.removeprefix(JUDGE_PREFIX).rpartition("/")
            counts.setdefault(name, {})[what] = told[key] if what in ("seconds", "cost") else int(told[key])
        return {name: s.JudgeCounts(**found) for name, found in counts.items()}

    @property
    def staleness_mean(self) -> float:
        total = sum(self.staleness.values())
        return sum(steps * tokens for steps, tokens in self.staleness.items()) / total if total else 0.0

    def evaluation(self, version: int) -> s.Evaluation | None:
        found = self.evaluations.get(version)
        if found is None or (found.greedy is None and found.sampled is None):
            return None
        greedy, sampled = found.greedy or Measured(), found.sampled or Measured()
        return s.Evaluation.of(greedy, sampled, self._num_held_out(self.config.eval.primary))

    def _evaluations(self) -> s.Evaluations:
        before, after = (self.evaluations.get(version, VersionAnswers()).sets for version in (0, self.steps_done))

        def of(name: str, found: Mapping[str, Measured]) -> s.Evaluation | None:
            return s.Evaluation.of(found[name], Measured(), self._num_held_out(name)) if name in found else None

        return s.Evaluations(
            before=self.evaluation(0),
            after=self.evaluation(self.steps_done),
            primary=self.config.eval.primary,
            sets={
                one.name: s.Evaluations(of(one.name, before), of(one.name, after)) for one in self.config.eval.sets[1:]
            },
        )

    def _num_held_out(self, name: str) -> int:
        return (self.data.sets if self.data else {}).get(name, self.config.eval.num_prompts)

    def write_samples(self, run_dir: Path) -> list[Sample]:
        """Write the first few held-out prompts with their greedy answers before and after to `samples.json`.

        After a resume, what was answered before it is known from there.
        """
        path, measure = run_dir / "samples.json", self.config.eval.measure_of("")
        before, after = (self.evaluations.get(version, VersionAnswers()) for version in (0, self.steps_done))
        samples = [
            Sample(
                one.prompt_text,
                one.answer,
                one.completion_text,
                None,
                before_reward=one.reward,
                before_is_right=is_right(one, measure),
                before_turns=_turns(one),
            )
            for one in before.scores
        ] or read_samples(path)
        if self.steps_done and after.scores:
            samples = [
                msgspec.structs.replace(
                    sample,
                    after=last.completion_text,
                    after_reward=last.reward,
                    after_is_right=is_right(last, measure),
                    after_turns=_turns(last),
                )
                for sample, last in zip(samples, after.scores, strict=False)
            ]
        write_samples(samples, path)
        return samples

    def _throughput(self) -> s.Throughput:
        rl_start_s = self.started_s if self.rl_started_s is None else self.rl_started_s
        rl_s = (self.last_step_s or rl_start_s) - rl_start_s  # 0 where this attempt has finished no step
        return s.Throughput(
            generated_tokens_per_s=rate(self.generated_tokens, rl_s),
            trained_tokens_per_s=rate(self.trained_tokens, rl_s),
            completions_per_s=rate(self.trained_completions, rl_s),
        )

    def summary(self, run_dir: Path, *, most_bytes: int | None = None) -> s.Summary:
        """Return `summary.json`. Accounting is read back from decisions and timelines: of a killed process, too.

        Where these have more than `most_bytes`, it is left out.
        """
        is_read = most_bytes is None or accounting_bytes(run_dir) <= most_bytes
        found = read_accounting(run_dir, window_s=(self.started_s, self.ended_s)) if is_read else None
        return s.Summary(
            recipe=self.config.recipe,
            seed=self.config.seed,
            status=self.status,
            error=self.error if self.status == "failed" else None,
            stopped_because=self.stopped_because if self.status == "done" else None,
            best=s.read_best(run_dir) if self.config.eval.keep_best else None,
            steps=self.steps_done,
            wall_s=self.ended_s - self.started_s,
            earlier_s=self.earlier_s,
            policy_version=self.steps_done,
            model_params=self.num_params,
            adapter_params=self.num_adapter_params or None,
            eval=self._evaluations(),
            throughput=self._throughput(),
            staleness=s.Staleness(
                max=max(self.staleness, default=0),
                mean=self.staleness_mean,
                bound=self.config.staleness_bound,
                histogram=dict(sorted(self.staleness.items())),
                updates_max=self.staleness_updates_max,
            ),
            accounting=found.accounting if found else {},
            model_share=model_share(found.accounting) if found else None,
            model_cpu_share=found.model_cpu_share if found else None,
            balance=found.balance if found else None,
            callback_s=self.callback_s,
            restarts=dict(self.restarts),
            prompts=s.Prompts(
                **self.prompts,
                regenerated_tokens=self.regenerated_tokens,
                failed_completions=self.failed_completions,
            ),
            weight_sync=s.WeightSync(
                count=len(self.pauses_s),
                skipped=self.publishes_skipped,
                bytes=self.payload_bytes * len(self.pauses_s),
                transfer_s_p50=median(self.transfers_s) if self.transfers_s else None,
                pause_s_p50=median(self.pauses_s) if self.pauses_s else None,
                pause_s_max=max(self.pauses_s, default=None),
            ),
            padding_frac=self.padded_tokens / self.padding_weight if self.padding_weight else 0.0,
            rows=s.TrainedRows.of([self.rows]),
            resume_call=self.resume_call,
            versions=s.versions(),
            stages=s.stage_records(run_dir),
            data=self.data,
            alarms=spans(read_alarms(run_dir / ALARMS_FILE)),
            judges=self.judges,
            episodes=self.episodes if self.config.environment.is_set else None,
        )


def _turns(answer: EvalScored) -> list[TranscriptPart] | None:
    episode = answer.episode
    return None if episode is None else transcript_of(episode)


def _known(rates: Mapping[str, float | None]) -> dict[str, float]:
    """Return the rates that are known: a line of metrics leaves out the others."""
    return {name: value for name, value in rates.items() if value is not None}
