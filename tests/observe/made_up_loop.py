"""A whole run that never happened: every file a watcher reads, from a small loop in virtual time, and as it grows.

It shares no code with the package but the writers of the files. Its schedule is its own: bounded staleness, oldest
first, a replica that may be lost on the way.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.core.clock import VirtualClock
from slipstream.observe.timeline import Timeline, timeline_path

RAW_START_S = 5000.0  # of the machine's clock
WORDS = ("two", "and", "seven", "make", "nine", "so", "the", "answer", "is", "nine", ".")


class _WithoutCpu(Timeline):
    """Its files have the same bytes each time that they are written, but for the end."""

    def _write_until(self, now_s: float) -> None:
        self._flushed_s = now_s
        self._release_last()
        self._write()


@dataclass
class Loop:
    """Runs `steps` steps of `groups` groups of `size` completions. Times are of the machine's clock."""

    steps: int = 12
    groups: int = 4
    size: int = 4
    staleness: int = 1
    replicas: int = 2
    seed: int = 0
    lost_at_s: float | None = None  # after the start: replica 1 is lost then, and comes back two seconds later
    hostile: str | None = None  # what one completion in eight says, its prompt and its failure
    has_episodes: bool = False  # of two turns and a call of a tool each, with an environment that is always asked
    has_forks: bool = False  # of a third turn, in a branch of its own
    start_s: float = RAW_START_S
    lines: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    spans: dict[str, list[Any]] = field(default_factory=dict)  # process -> `Span`s, which may overlap

    def __post_init__(self) -> None:
        self.now_s = self.start_s
        self.random = random.Random(self.seed)
        self.numbers = itertools.count()
        self.queue: list[tuple[float, int, str, tuple[Any, ...]]] = []
        self.versions: dict[int, int] = {}
        self.version = 0
        self.next_ordinal = 0
        self.dropped = 0
        self.live: dict[int, dict[str, Any]] = {}  # sampled or scored: ordinal -> group
        self.ready: dict[int, dict[str, Any]] = {}
        self.training: list[dict[str, Any]] = []
        self.again: list[int] = []
        self.copies: dict[int, int] = {}

    def run(self) -> Loop:
        dials = {
            "groups_per_step": self.groups,
            "completions_per_group": self.size,
            "max_staleness": self.staleness,
            "reorder_window": 1,
            "steps": self.steps,
            "capacity": 3 * self.size,
        }
        self.tell({"type": "ScheduleBegan", "policy": "oldest_first", "config": dials, "snapshot": None}, [])
        for replica in range(self.replicas):
            self.at(2.0 + 0.1 * replica, "swap", replica, 0)
        if self.lost_at_s is not None:
            self.at(self.lost_at_s, "lose", 1)
        while self.queue:
            self.now_s, _, what, args = heapq.heappop(self.queue)
            getattr(self, what)(*args)
        return self

    def at(self, delay_s: float, what: str, *args: Any) -> None:
        heapq.heappush(self.queue, (self.now_s + delay_s, next(self.numbers), what, args))

    def tell(self, event: dict[str, Any], commands: list[dict[str, Any]]) -> None:
        self.lines.append({"seq": len(self.lines), "time_s": self.now_s, "event": event, "commands": commands})

    def span(self, process: str, start_s: float, end_s: float, state: str, **args: Any) -> None:
        self.spans.setdefault(process, []).append((start_s, end_s, state, args))

    # What happens

    def swap(self, replica: int, version: int) -> None:
        self.versions[replica] = version
        self.tell(
            {
                "type": "Swapped",
                "replica": replica,
                "version": version,
                "transfer_s": 0.01,
                "pause_s": 0.001,
                "probe_error": 0.0,
            },
            self.admit(),
        )

    def lose(self, replica: int) -> None:
        del self.versions[replica]
        for ordinal in [o for o, group in self.live.items() if group["replica"] == replica]:
            del self.live[ordinal]
            self.again.append(ordinal)
        self.again.sort()
        self.tell({"type": "ReplicaLost", "replica": replica}, self.admit())
        self.at(2.0, "swap", replica, self.version)

    def finish(self, ordinal: int, copy: int, sample: int) -> None:
        group = self.live.get(ordinal)
        if group is None or self.copies[ordinal] != copy:
            return
        rollout = group["rollouts"][sample]
        rollout["finished_s"] = self.now_s
        group["unfinished"] -= 1
        self.span(f"generator-{group['replica']}", group["started_s"], self.now_s, "decode")
        event = {
            "type": "CompletionFinished",
            "ordinal": ordinal,
            "sample": sample,
            "replica": group["replica"],
            "num_tokens": rollout["num_tokens"],
            "min_version": group["version"],
            "max_version": group["version"],
            "num_restored": 0,
        }
        self.tell(event, self.admit())
        self.at(self.random.uniform(0.02, 0.15), "score", ordinal, copy, sample)

    def score(self, ordinal: int, copy: int, sample: int) -> None:
        group = self.live.get(ordinal)
        if group is None or self.copies[ordinal] != copy:
            return
        rollout = group["rollouts"][sample]
        rollout["scored_s"] = self.now_s
        self.span("rewards", rollout["finished_s"], self.now_s, "score")
        group["unscored"] -= 1
        if group["unscored"]:
            return
        del self.live[ordinal]
        rewards = [one["reward"] for one in group["rollouts"]]
        commands: list[dict[str, Any]] = []
        if len(set(rewards)) == 1:
            self.dropped += 1
            commands.append({"type": "Skip", "ordinals": [ordinal], "cause": "no_signal"})
            self.settle(group, None)
        else:
            self.ready[ordinal] = group
        event = {
            "type": "GroupScored",
            "ordinal": ordinal,
            "has_signal": not commands,
            "mean_reward": sum(rewards) / self.size,
            "num_failed": 0,
            "min_version": group["version"],
            "max_version": group["version"],
            "num_poisoned": 0,
            "failure": None,
        }
        self.tell(event, commands + self.train() + self.admit())

    def done(self) -> None:
        step, trained, self.training = self.version, self.training, []
        self.version += 1
        for group in trained:
            self.settle(group, step)
        rewards = [one["reward"] for group in trained for one in group["rollouts"]]
        lags = [step - group["version"] for group in trained]
        self.metrics.append(
            (
                self.now_s,
                {
                    "step": step,
                    "version": self.version,
                    "wall_s": self.now_s - self.start_s,
                    "reward": sum(rewards) / len(rewards),
                    "staleness_mean": sum(lags) / len(lags),
                    "staleness_max": max(lags),
                    "loss": 0.1,
                    "entropy": 1.0 / (1 + step),
                    "generated_tokens_per_s": 900.0 + step,
                    "trained_tokens_per_s": 800.0,
                    "logprob_diff_mean": 0.01,
                },
            )
        )
        if step % 5 == 0:
            wall_s = self.now_s - self.start_s
            evaluation = {"step": step, "version": step, "wall_s": wall_s, "eval_accuracy": 0.3 + 0.05 * step}
            self.metrics.append((self.now_s, evaluation))
        for replica in self.versions:
            self.at(self.random.uniform(0.05, 0.2), "swap", replica, self.version)
        event = {"type": "StepDone", "step": step, "version": self.version, "metrics": {}}
        self.tell(event, self.train() + self.admit())

    # What is decided

    def admit(self) -> list[dict[str, Any]]:
        commands = []
        while self.version < self.steps:
            ordinal = self.again[0] if self.again else self.next_ordinal
            place = ordinal - self.dropped
            load = dict.fromkeys(self.versions, 0)
            for one in self.live.values():
                load[one["replica"]] += one["unfinished"]
            able = [
                replica
                for replica in sorted(load, key=lambda r: (load[r], r))
                if load[replica] <= 2 * self.size and place // self.groups - self.versions[replica] <= self.staleness
            ]
            if not able or place >= self.steps * self.groups:
                break
            if self.again:
                self.again.pop(0)
            else:
                self.next_ordinal += 1
            self.start(ordinal, able[0])
            commands.append({"type": "StartGroup", "ordinal": ordinal, "replica": able[0]})
        return commands

    def start(self, ordinal: int, replica: int) -> None:
        copy = self.copies[ordinal] = self.copies.get(ordinal, -1) + 1
        is_hostile = self.hostile is not None and ordinal % 8 == 0
        text = self.hostile if is_hostile else " ".join(WORDS[: self.random.randint(3, len(WORDS))])
        rollouts = [
            {
                "ordinal": ordinal,
                "sample": sample,
                "step": None,
                "outcome": "skipped",
                "prompt_id": f"p{ordinal}",
                "task": "sums",
                "prompt": self.hostile if is_hostile else f"2 + {ordinal} = ?",
                "completion": text,
                "answer": str(ordinal + 2),
                "reward": float(self.random.random() < 0.6),
                "parts": {"sums": 1.0},
                "failure": self.hostile if is_hostile and sample == 1 else None,
                "finish_reason": "stop",
                "num_tokens": 6,
                "versions": [[0, self.versions[replica]]],
                "mean_behaviour_logprob": -1.0,
                "replica": replica,
                "started_s": self.now_s,
            }
            | ({"episode": episode(text) | (forked(text) if self.has_forks else {})} if self.has_episodes else {})
            for sample in range(self.size)
        ]
        self.live[ordinal] = {
            "ordinal": ordinal,
            "replica": replica,
            "version": self.versions[replica],
            "unfinished": self.size,
            "unscored": self.size,
            "started_s": self.now_s,
            "rollouts": rollouts,
        }
        for sample in range(self.size):
            self.at(self.random.uniform(0.1, 0.8), "finish", ordinal, copy, sample)

    def train(self) -> list[dict[str, Any]]:
        oldest = sorted(self.ready)[: self.groups]
        waiting = min([*self.live, *self.again], default=1 << 30)
        if self.training or len(oldest) < self.groups or self.version >= self.steps or oldest[-1] > waiting:
            return []
        self.training = [self.ready.pop(ordinal) for ordinal in oldest]
        length_s = self.random.uniform(0.3, 0.6)
        self.span("trainer", self.now_s, self.now_s + 0.8 * length_s, "forward_backward", step=self.version)
        self.span("trainer", self.now_s + 0.8 * length_s, self.now_s + length_s, "optimizer", step=self.version)
        self.at(length_s, "done")
        return [{"type": "TrainStep", "step": self.version, "ordinals": oldest, "heads": []}]

    def settle(self, group: dict[str, Any], step: int | None) -> None:
        outcome = "skipped" if step is None else "trained"
        fate = {"step": step, "outcome": outcome, "settled_s": self.now_s}
        self.rollouts += [one | fate for one in group["rollouts"]]

    # The files

    def files(self) -> dict[str, list[tuple[float, bytes]]]:
        """Of each growing file its lines, with the time by which each is written."""
        rollouts = [(one["settled_s"], {k: v for k, v in one.items() if k != "settled_s"}) for one in self.rollouts]
        return {
            "events.jsonl": [(line["time_s"], _line(line)) for line in self.lines],
            "metrics.jsonl": [(time_s, _line(line)) for time_s, line in self.metrics],
            "rollouts.jsonl": [(time_s, _line(line)) for time_s, line in rollouts],
            "tokens.jsonl": [
                (time_s, _line(self.tokens_of(one)))
                for time_s, one in rollouts
                if one["step"] is not None and one["ordinal"] % 2 == 0
            ],
            "alarms.jsonl": self.alarms(),
        }

    def tokens_of(self, rollout: dict[str, Any]) -> dict[str, Any]:
        is_hostile = rollout["completion"] == self.hostile
        texts = [rollout["completion"]] if is_hostile else ["2", "+", " so", "\n", " 9", "<eos>"]
        count = len(texts)
        version = rollout["versions"][0][1]
        if self.has_episodes and count > 3:
            return self.tokens_of_two_turns(rollout, texts)
        return {
            "ordinal": rollout["ordinal"],
            "sample": rollout["sample"],
            "step": rollout["step"],
            "num_tokens": count,
            "tokens": list(range(count)),
            "texts": texts,
            "versions": [[0, version], [3, version + 1]][: 1 + (count > 3)],
            "behaviour_logprobs": [-0.5 * i for i in range(count)],
            "policy_logprobs": [-0.5 * i + 0.1 * (i - 2) for i in range(count)],
            "advantages": [rollout["reward"] - 0.5] * (count - 1) + [None],
        }

    def tokens_of_two_turns(self, rollout: dict[str, Any], texts: list[str]) -> dict[str, Any]:
        version = rollout["versions"][0][1]
        numbers = [-0.5, -0.5, None, None, -0.5, -0.5]
        forks = {"turns": [0, 1, 4], "branches": [2]} if self.has_forks else {"turns": [0, 4]}
        return {
            **{name: rollout[name] for name in ("ordinal", "sample", "step", "num_tokens")},
            "tokens": list(range(len(texts))),
            "texts": texts,
            "versions": [[0, version], [2, -1], [4, version]],
            "behaviour_logprobs": numbers,
            "policy_logprobs": numbers,
            "advantages": numbers,
            **forks,
        }

    def alarms(self) -> list[tuple[float, bytes]]:
        steps = [(time_s, line["step"]) for time_s, line in self.metrics if "reward" in line]
        if len(steps) < 6:
            return []
        alarm = {
            "name": "entropy_collapse",
            "severity": "warning",
            "value": 0.1,
            "threshold": 0.3,
            "text": "It is sure.",
        }
        return [
            (time_s, _line(alarm | {"step": step, "event": event}))
            for (time_s, step), event in ((steps[3], "began"), (steps[5], "ended"))
        ]

    def write(self, run_dir: Path, *, until_s: float | None = None) -> Path:
        """The files as they are `until_s` seconds after the start; all of them, and a summary, with None."""
        run_dir.mkdir(parents=True, exist_ok=True)
        cut_s = None if until_s is None else self.start_s + until_s
        (run_dir / "config.toml").write_text(CONFIG.format(steps=self.steps, groups=self.groups, size=self.size))
        for name, lines in self.files().items():
            (run_dir / name).write_bytes(b"".join(line for time_s, line in lines if cut_s is None or time_s <= cut_s))
        self.write_timelines(run_dir, cut_s)
        if cut_s is None:
            summary = {"status": "done", "steps": self.version, "wall_s": self.now_s - self.start_s}
            (run_dir / "summary.json").write_text(json.dumps(summary | {"balance": {"verdict": VERDICT}}))
        return run_dir

    def write_timelines(self, run_dir: Path, cut_s: float | None) -> None:
        idle = {"controller": "idle", "rewards": "wait_completions", "trainer": "wait_generation"}
        idle |= {"environments": "wait_turns"}
        generators = [f"generator-{replica}" for replica in range(self.replicas)]
        asked = ["environments"] if self.has_episodes else []
        names = ["controller", *asked, "rewards", "trainer", *generators]
        for name in names:
            timeline_path(run_dir, name).unlink(missing_ok=True)
            clock = VirtualClock(self.start_s - 0.01)
            timeline = _WithoutCpu(name, timeline_path(run_dir, name), clock)
            timeline.set_idle_state(idle.get(name, "wait_trainer"))
            for start_s, end_s, state, args in _joined(self.spans.get(name, [])):
                if cut_s is not None and end_s > cut_s:
                    break
                with timeline.idle():
                    clock.advance(max(0.0, start_s - clock.now_s()))
                with timeline.span(state, **args):
                    clock.advance(end_s - start_s)
            end_s = self.now_s if cut_s is None else cut_s
            with timeline.idle():
                clock.advance(max(0.0, end_s - clock.now_s()))
            if cut_s is None:
                timeline.close()
            else:
                timeline.flush()
                timeline._stop_writing()


def episode(text: str) -> dict[str, Any]:
    """An episode that says `text` wherever a model or an environment can."""
    call = {"type": "function", "function": {"name": text[:40], "arguments": {text[:40]: text}}}
    return {
        "messages": [
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "name": text[:40], "content": f"heard: {text}"},
            {"role": "assistant", "content": "done"},
        ],
        "turns": 2,
        "turn_rewards": [0.25, None],
        "environment_s": 0.125,
        "tool_calls": 1,
        "tool_errors": 1,
        "is_cut": True,
    }


def forked(text: str) -> dict[str, Any]:
    """Return the fork that an episode has besides."""
    return {
        "turns": 3,
        "branches": [[{"role": "user", "content": f"so far: {text}"}, {"role": "assistant", "content": "aside"}]],
        "contexts": [1],
    }


Span = tuple[float, float, str, dict[str, Any]]  # start, end, state, args


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Disjoint and ascending: overlapping ones of a state are one."""
    found: list[Span] = []
    for start_s, end_s, state, args in sorted(spans, key=lambda span: span[:2]):
        if found and start_s < found[-1][1] and found[-1][2] == state:
            found[-1] = (found[-1][0], max(found[-1][1], end_s), state, args)
        else:
            found.append((start_s, end_s, state, args))
    return found


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


VERDICT = "The trainer starves: it waits 40 % of its time; a third generator would balance it."
CONFIG = """recipe = "made-up"
steps = {steps}
groups_per_step = {groups}
completions_per_group = {size}
max_staleness = 1
weight_update = "in_flight"

[[prompts.tasks]]
name = "chain_sum"
"""
