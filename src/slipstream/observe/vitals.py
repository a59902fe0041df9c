"""The metrics that the run adds to those of the trainer's step: about generators, rewards and weight sync."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from slipstream.core.service_messages import JUDGE_PREFIX, Counters, Published
from slipstream.core.types import GroupScored, ReplicaLost, Swapped
from slipstream.observe.states import side_of
from slipstream.observe.timeline import TIME_PREFIX
from slipstream.observe.waste import RE_PREFILLED, WASTE, Wasted

MOST_NAMED = 32
"""Processes of a side that have metrics of their own."""
ELSEWHERE = ("not_selected", "left")
"""Causes of waste that are not told here: a step's own is in its line (`Tally.stepped`), the end's in the summary."""


@dataclass
class Vitals:
    """Feed messages to `take` as they come; `of_step` says what came since the step before, and begins anew.

    `metrics.toml` says what the names mean. `poisoned` includes rollouts of no group. Executors report times and
    counters once a second, so that a short step may have none, and the next those of both (`observe/accounting.py` is
    exact). For a side with more than `MOST_NAMED` processes `wait_frac` is their mean, under the side's name. What
    there was none of is left out, but for wasted tokens.
    """

    hears = (GroupScored, Published, Swapped, ReplicaLost, Counters, Wasted)
    samples_per_group: int
    max_staleness: int
    scored: list[GroupScored] = field(default_factory=list)
    num_equal: int = 0  # groups without signal since the last with one
    equal_rewards: tuple[float, float] = (0.0, 0.0)  # the least and the greatest mean reward of these
    published: list[Published] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)  # replica -> version it samples from
    totals: dict[str, dict[str, float]] = field(default_factory=dict)  # executor -> state -> seconds, newest report
    told: dict[str, dict[str, float]] = field(default_factory=dict)  # the same, as of the last step that had news
    num_refused: float = 0.0  # rollouts of no group since the last step
    wasted: Counter[str] = field(default_factory=Counter)  # since the last step, by cause
    counted: dict[tuple[str, str], float] = field(default_factory=dict)  # (executor, counter) -> its newest value
    judged: dict[str, float] = field(default_factory=dict)  # since the last step, by counter

    def take(self, news: object) -> None:
        """Take a message, or `Wasted`; others are passed over."""
        match news:
            case GroupScored():
                self.scored.append(news)
                self._follow(news)
            case Published():
                self.published.append(news)
            case Swapped(replica=replica, version=version):
                self.versions[replica] = version
            case ReplicaLost(replica=replica):
                self.versions.pop(replica, None)
                for name in [name for name in self.totals if name.partition("@")[0] == f"generator-{replica}"]:
                    del self.totals[name]
            case Counters():
                self._count(news)
            case Wasted(cause=cause, tokens=tokens):
                self.wasted[cause] += tokens

    def _follow(self, group: GroupScored) -> None:
        if group.has_signal:
            self.num_equal = 0
        elif group.num_failed < self.samples_per_group:
            least, most = self.equal_rewards if self.num_equal else (group.mean_reward, group.mean_reward)
            self.equal_rewards = (min(least, group.mean_reward), max(most, group.mean_reward))
            self.num_equal += 1

    def _count(self, message: Counters) -> None:
        values = message.values
        if times := {k.removeprefix(TIME_PREFIX): v for k, v in values.items() if k.startswith(TIME_PREFIX)}:
            self.totals[message.executor] = times
        if "refused_rollouts" in values:
            self.num_refused += self._new(message.executor, "refused_rollouts", values["refused_rollouts"])
        if RE_PREFILLED in values:
            self.wasted["re_prefilled"] += int(self._new(message.executor, RE_PREFILLED, values[RE_PREFILLED]))
        for name in [name for name in values if name.startswith(JUDGE_PREFIX)]:
            self.judged[name] = self.judged.get(name, 0.0) + self._new(message.executor, name, values[name])

    def _new(self, executor: str, name: str, now: float) -> float:
        """Return how much a counter has grown since its last report."""
        before = self.counted.get((executor, name), 0.0)
        self.counted[executor, name] = now
        return now - before if now >= before else now  # a new process counts from 0

    def of_step(self, version: int) -> dict[str, float]:
        """Metrics of the step that made `version`."""
        metrics = {
            "groups_scored": float(len(self.scored)),
            "poisoned": sum(group.num_poisoned for group in self.scored) + self.num_refused,
        }
        if self.scored:
            num_completions = len(self.scored) * self.samples_per_group
            metrics["scored_reward_mean"] = sum(group.mean_reward for group in self.scored) / len(self.scored)
            metrics["no_signal_frac"] = sum(not group.has_signal for group in self.scored) / len(self.scored)
            metrics["no_signal_in_a_row"] = float(self.num_equal)
            metrics["scored_failed_frac"] = sum(group.num_failed for group in self.scored) / num_completions
        if self.published:
            metrics["publish_skipped_frac"] = sum(one.skipped for one in self.published) / len(self.published)
            metrics["publish_same_frac"] = sum(one.is_same for one in self.published) / len(self.published)
        if self.versions:
            metrics["version_lag_max"] = float(version - min(self.versions.values()))
            metrics["version_lag_excess"] = metrics["version_lag_max"] - (self.max_staleness + 1)
        num_of_side = Counter(map(side_of, self.totals))
        spent_of = {executor: self._spent(executor, totals) for executor, totals in self.totals.items()}
        spent_of = {executor: spent for executor, spent in spent_of.items() if sum(spent.values()) > 0.0}
        num_told = Counter(map(side_of, spent_of))
        for executor, spent in spent_of.items():
            side, total_s = side_of(executor), sum(spent.values())
            name, parts = (executor, 1) if num_of_side[side] <= MOST_NAMED else (side, num_told[side])
            for state, seconds in spent.items():
                if state[:5] == "wait_":
                    _add(metrics, f"wait_frac/{name}/{state}", seconds / total_s / parts)
                if seconds > 0.0:
                    _add(metrics, f"{TIME_PREFIX}{side}/{state}", seconds / num_of_side[side])
        metrics |= {f"wasted_tokens/{cause}": float(self.wasted[cause]) for cause in WASTE if cause not in ELSEWHERE}
        metrics |= self.judged
        self.scored, self.published, self.num_refused = [], [], 0.0
        self.wasted.clear()
        self.judged = dict.fromkeys(self.judged, 0.0)
        return metrics

    def _spent(self, executor: str, totals: Mapping[str, float]) -> dict[str, float]:
        """Seconds by state since the last step that had news of `executor`; none for the first after a new start."""
        before, self.told[executor] = self.told.get(executor, {}), dict(totals)
        spent = {state: seconds - before.get(state, 0.0) for state, seconds in totals.items()}
        return spent if min(spent.values()) >= 0.0 else {}  # else it was started again and counts from 0


def _add(metrics: dict[str, float], name: str, value: float) -> None:
    metrics[name] = metrics.get(name, 0.0) + value
