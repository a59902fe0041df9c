"""Recompute what a finished run claims, over all its attempts, from its files alone: no word of the package.

    python tests/chaos/lineage_audit.py RUN_DIR

prints the numbers, and one line for each claim that does not hold. Where `attempt_<n>/` folders lie beside the files,
the lineage is what the files hold; an attempt shares a first part of `events.jsonl` with it, where the resume cut.

    P groups per step, G completions per group, S steps, k = max_staleness, W = reorder_window, as in docs/staleness.md
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

Line = dict[str, Any]
MAX_FINDINGS_OF_A_KIND = 5
SEVERAL = "... and more of that kind"


def lines(path: Path) -> list[Line]:
    """All whole lines; a last one without its newline was not written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


@dataclass
class Audit:
    """The files of one run, what follows from them, and what contradicts."""

    run_dir: Path
    findings: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    _kinds: Counter[str] = field(default_factory=Counter)

    def need(self, holds: bool, kind: str, what: str = "") -> None:
        """Note that claim `kind` does not hold, and where."""
        if holds:
            return
        self._kinds[kind] += 1
        if self._kinds[kind] <= MAX_FINDINGS_OF_A_KIND:
            self.findings.append(f"{kind}: {what}" if what else kind)
        elif self._kinds[kind] == MAX_FINDINGS_OF_A_KIND + 1:
            self.findings.append(f"{kind}: {SEVERAL}")

    @cached_property
    def config(self) -> dict[str, Any]:
        return tomllib.loads((self.run_dir / "config.toml").read_text())

    @cached_property
    def events(self) -> list[Line]:
        return lines(self.run_dir / "events.jsonl")

    @cached_property
    def rollouts(self) -> list[Line]:
        return lines(self.run_dir / "rollouts.jsonl")

    @cached_property
    def attempts(self) -> list[Path]:
        folders = self.run_dir.glob("attempt_*")
        return sorted(folders, key=lambda path: int(path.name.removeprefix("attempt_")))

    @cached_property
    def resumed_at(self) -> set[int]:
        """Lines of `events.jsonl` before which the run was resumed: where an attempt parts with it."""
        parted = set()
        for attempt in self.attempts:
            theirs = lines(attempt / "events.jsonl")
            common = next(
                (n for n, (a, b) in enumerate(zip(self.events, theirs, strict=False)) if a != b),
                min(len(self.events), len(theirs)),
            )
            parted.add(common)
        return parted

    def run(self) -> Audit:
        fates = self._replay()
        self._check_ledger(fates)
        self._check_metrics()
        self._check_rollouts(fates)
        self._check_files()
        self._check_summary(fates)
        return self

    def _replay(self) -> Fates:
        """Follow every ordinal through the events of the surviving lineage."""
        fates = Fates(self, self.config)
        for number, line in enumerate(self.events):
            self.need(line["seq"] == number, "the events are numbered", f"line {number} has seq {line['seq']}")
            if number in self.resumed_at or line["event"]["type"] == "ScheduleBegan":
                fates.resumed()
            fates.take(line["event"])
            for command in line["commands"]:
                fates.carry_out(command)
        fates.end()
        return fates

    def _check_ledger(self, fates: Fates) -> None:
        states: dict[int, list[Line]] = defaultdict(list)
        for entry in lines(self.run_dir / "ledger.jsonl"):
            states[entry["ordinal"]].append(entry)
        for ordinal, entries in states.items():
            told = [entry["state"] for entry in entries]
            ends = [state for state in told if state != "admitted"]
            self.need(told.count("admitted") == 1, "the ledger admits an ordinal once", f"{ordinal}: {told}")
            self.need(len(ends) == 1, "the ledger has one fate for each ordinal", f"{ordinal}: {told}")
            if "trained" in told:
                step = next(entry["step"] for entry in entries if entry["state"] == "trained")
                self.need(
                    fates.step_of.get(ordinal) == step,
                    "ledger and events agree on what a step trained",
                    f"{ordinal}: step {step} and {fates.step_of.get(ordinal)}",
                )
            elif ends:
                self.need(ordinal in fates.dropped, "ledger and events agree on what was dropped", f"{ordinal}: {told}")
        known = set(states)
        self.need(
            known == set(fates.started), "ledger and events know the same ordinals", f"{known ^ set(fates.started)}"
        )
        self.need(
            known == set(range(len(known))), "no ordinal is lost", f"{set(range(max(known, default=-1) + 1)) - known}"
        )
        by_state = Counter(entries[-1]["state"] for entries in states.values())
        self.numbers |= {
            "admitted": len(states),
            **{state: by_state[state] for state in ("trained", "failed", "skipped")},
            "pending": by_state["admitted"],
            "lost": max(known, default=-1) + 1 - len(known),
            "repeated": sum([e["state"] for e in entries].count("trained") > 1 for entries in states.values()),
        }

    def _check_metrics(self) -> None:
        told = lines(self.run_dir / "metrics.jsonl")
        steps = [line["step"] for line in told if "reward_mean" in line]
        self.need(steps == list(range(self.config["steps"])), "each step is in the metrics once, in order", str(steps))
        versions = [line["version"] for line in told if "reward_mean" in line]
        self.need(versions == [step + 1 for step in steps], "a step makes the version after it", str(versions))
        for name in ("eval_accuracy", "eval_reward", "eval_sampled_accuracy", "eval_sampled_reward"):
            counts = Counter(line["version"] for line in told if name in line)
            for version, count in counts.items():
                self.need(count == 1, "a version is evaluated once", f"{name} of version {version}: {count} times")
        greedy = {line["version"] for line in told if "eval_accuracy" in line or "eval_reward" in line}
        every, last = self.config["eval"]["every"], self.config["steps"]
        due = {0, last, *(range(every, last, every) if every else ())}
        self.numbers["evaluations_missing"] = sorted(due - greedy)
        self.need({0, last} <= greedy, "the first and the last version are evaluated", f"only {sorted(greedy)}")

    def _check_rollouts(self, fates: Fates) -> None:
        """Token by token: what was trained is whole, of its step, not too old, and the prompt's own."""
        config = self.config
        samples: dict[int, Counter[int]] = defaultdict(Counter)
        histogram: Counter[int] = Counter()
        told_as_dropped: Counter[tuple[int, int]] = Counter()
        failed = 0
        for rollout in self.rollouts:
            ordinal = rollout["ordinal"]
            where = f"ordinal {ordinal}, sample {rollout['sample']}"
            if rollout["step"] is None:
                told_as_dropped[ordinal, rollout["sample"]] += 1
                continue
            samples[ordinal][rollout["sample"]] += 1
            failed += rollout["failure"] is not None
            self.need(rollout["step"] == fates.step_of.get(ordinal), "rollouts and events agree on a step", where)
            runs = rollout["versions"]
            ends = [start for start, _ in runs[1:]] + [rollout["num_tokens"]]
            for (start, version), end in zip(runs, ends, strict=True):
                if version < 0:  # an environment said it
                    continue
                lag = rollout["step"] - version
                histogram[lag] += end - start
                self.need(
                    0 <= lag <= config["max_staleness"], "step - version is in 0..k for every token", f"{where}: {lag}"
                )
            oldest = min((version for _, version in runs if version >= 0), default=None)
            self.need(
                oldest is None or oldest >= min(fates.started.get(ordinal, [0])),
                "no token is older than the admission",
                f"{where}: version {oldest}, admitted at {fates.started.get(ordinal)}",
            )
        group = dict.fromkeys(range(config["completions_per_group"]), 1)
        for ordinal in fates.step_of:
            self.need(
                dict(samples[ordinal]) == group,
                "a trained group is whole, each sample once",
                f"ordinal {ordinal}: {dict(samples[ordinal])}",
            )
        self.need(
            set(samples) == set(fates.step_of),
            "rollouts and events agree on what was trained",
            f"{set(samples) ^ set(fates.step_of)}",
        )
        whole = {(ordinal, sample) for ordinal in fates.dropped for sample in group}
        self.need(
            set(told_as_dropped) == whole and set(told_as_dropped.values()) <= {1},
            "a dropped group is recorded, each sample once",
            f"{sorted(set(told_as_dropped) ^ whole)[:5]}",
        )
        self.numbers |= {
            "histogram": dict(sorted(histogram.items())),
            "staleness_max": max(histogram, default=0),
            "failed_rollouts": failed,
        }
        self._check_prompts()

    def _check_prompts(self) -> None:
        """An ordinal stands for the same prompt in every attempt: that is what makes it safe to lose a completion."""
        prompts: dict[int, set[str]] = defaultdict(set)
        for folder in (*self.attempts, self.run_dir):
            for rollout in lines(folder / "rollouts.jsonl"):
                prompts[rollout["ordinal"]].add(rollout["prompt_id"])
        for ordinal, ids in prompts.items():
            self.need(len(ids) == 1, "an ordinal keeps its prompt", f"ordinal {ordinal}: {ids}")

    def _check_files(self) -> None:
        """Nothing half-written is left, and the last checkpoint and the model are there."""
        for path in self.run_dir.rglob("*tmp*"):
            self.need(False, "no temporary file is left in the run's folder", str(path.relative_to(self.run_dir)))
        found = (self.run_dir / "checkpoints").iterdir()
        checkpoints = [path for path in found if re.fullmatch(r"step_\d+", path.name)]  # others are beside one
        for path in checkpoints:
            self.need((path / "manifest.json").is_file(), "every checkpoint is whole", path.name)
        last = f"step_{self.config['steps']}"
        self.need(last in {path.name for path in checkpoints}, "there is a checkpoint of the last step", last)
        self.need((self.run_dir / "model" / "config.json").is_file(), "the model is exported")

    def _check_summary(self, fates: Fates) -> None:
        summary = json.loads((self.run_dir / "summary.json").read_text())
        prompts, staleness = summary["prompts"], summary["staleness"]
        self.need(summary["status"] == "done", "the summary says done", summary["status"])
        self.need(summary["steps"] == summary["policy_version"] == self.config["steps"], "all steps are in the summary")
        for name in ("admitted", "trained", "failed", "skipped", "pending", "lost", "repeated"):
            self.need(
                prompts[name] == self.numbers[name],
                f"the summary counts prompts {name}",
                f"{prompts[name]}, not {self.numbers[name]}",
            )
        self.need(
            (prompts["lost"], prompts["repeated"], prompts["pending"]) == (0, 0, 0),
            "nothing is lost, repeated or pending",
            str(prompts),
        )
        histogram = {int(lag): tokens for lag, tokens in staleness["histogram"].items() if tokens}
        self.need(
            histogram == self.numbers["histogram"],
            "the summary's staleness is that of the rollouts",
            f"{histogram}, not {self.numbers['histogram']}",
        )
        for process, states in summary["accounting"].items():
            off_s = sum(states.values()) - summary["wall_s"]
            self.need(abs(off_s) < 1e-3, "the seconds of a process add up", f"{process}: {off_s:+.3f} s")
        after = summary["eval"]["after"] or {}
        self.numbers |= {
            "steps": len(fates.done),
            "attempts": len(self.attempts) + 1,
            "accuracy": after.get("accuracy"),
            "sampled_accuracy": after.get("sampled_accuracy"),
            "regenerated_tokens": prompts["regenerated_tokens"],
            "wall_s": summary["wall_s"],
        }


@dataclass
class Fates:
    """What became of every ordinal, by the events and commands of the surviving lineage."""

    audit: Audit
    config: dict[str, Any]
    started: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # ordinal -> versions it began on
    alive: dict[int, int] = field(default_factory=dict)  # in flight: ordinal -> replica
    finished: set[tuple[int, int]] = field(default_factory=set)  # (ordinal, sample) of those in flight
    scored: dict[int, Line] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    batches: dict[int, list[int]] = field(default_factory=dict)  # as commanded
    done: list[int] = field(default_factory=list)
    step_of: dict[int, int] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)  # replica -> version
    lost: set[int] = field(default_factory=set)  # replicas that were lost at least once since the last resume

    def resumed(self) -> None:
        """Of what was under way nothing survives for sure: it may be started, finished and scored once more."""
        self.alive.clear()
        self.finished.clear()
        self.versions.clear()
        self.lost.clear()
        for ordinal in [o for o in self.scored if o not in self.step_of and o not in self.dropped]:
            del self.scored[ordinal]

    def take(self, event: Line) -> None:
        need = self.audit.need
        match event["type"]:
            case "Swapped":
                replica, version = event["replica"], event["version"]
                need(version >= self.versions.get(replica, 0), "a replica's version never falls", f"{event}")
                self.versions[replica] = version
            case "CompletionFinished":
                ordinal, sample = event["ordinal"], event["sample"]
                if self.alive.get(ordinal) == event["replica"]:
                    is_new = (ordinal, sample) not in self.finished
                    need(is_new, "what exists is not generated again", f"ordinal {ordinal}, sample {sample}")
                    self.finished.add((ordinal, sample))
                else:
                    is_known = ordinal in self.scored or event["replica"] in self.lost
                    need(is_known, "completions are of groups in flight", f"ordinal {ordinal}: {event}")
            case "GroupScored":
                ordinal = event["ordinal"]
                need(ordinal not in self.scored, "a group is scored once", f"ordinal {ordinal}")
                need(ordinal in self.started, "what is scored was admitted", f"ordinal {ordinal}")
                self.scored[ordinal] = event
                self.alive.pop(ordinal, None)
            case "StepDone":
                self._done(event["step"])
            case "ReplicaLost":
                self.versions.pop(event["replica"], None)
                self.lost.add(event["replica"])
                for ordinal in [o for o, replica in self.alive.items() if replica == event["replica"]]:
                    del self.alive[ordinal]
                    self.finished = {one for one in self.finished if one[0] != ordinal}

    def _done(self, step: int) -> None:
        need = self.audit.need
        need(step == len(self.done), "steps are done in order, each once", f"step {step} after {len(self.done)}")
        batch = self.batches.get(step, [])
        need(
            len(batch) == len(set(batch)) == self.config["groups_per_step"],
            "a step trains P groups",
            f"step {step}: {batch}",
        )
        for ordinal in batch:
            need(
                ordinal not in self.step_of,
                "an ordinal is trained once",
                f"{ordinal}: steps {self.step_of.get(ordinal)}, {step}",
            )
            need(ordinal not in self.dropped, "what was dropped is not trained", str(ordinal))
            self.step_of[ordinal] = step
        self.done.append(step)

    def carry_out(self, command: Line) -> None:
        need, config = self.audit.need, self.config
        match command["type"]:
            case "StartGroup":
                ordinal, replica = command["ordinal"], command["replica"]
                where = f"ordinal {ordinal} on replica {replica}"
                need(ordinal not in self.alive, "what is in flight is not started again", where)
                need(ordinal not in self.scored, "what is scored is not started again", where)
                need(
                    ordinal not in self.step_of and ordinal not in self.dropped, "what has a fate is not started", where
                )
                need(replica in self.versions, "groups start where a version is held", where)
                version = self.versions.get(replica, 0)
                place = ordinal - sum(dropped < ordinal for dropped in self.dropped)
                last = (place + config["reorder_window"] - 1) // config["groups_per_step"]
                need(
                    last - version <= config["max_staleness"],
                    "the admission rule",
                    f"{where}: place {place}, version {version}",
                )
                self.started[ordinal].append(version)
                self.alive[ordinal] = replica
            case "TrainStep":
                self._check_batch(command["step"], command["ordinals"])
                self.batches[command["step"]] = command["ordinals"]
            case "Skip":
                for ordinal in command["ordinals"]:
                    event = self.scored.get(ordinal, {"num_failed": 0, "has_signal": True})
                    has_failed = event["num_failed"] >= config["completions_per_group"]
                    need(
                        has_failed or not event["has_signal"],
                        "only groups without signal are dropped",
                        f"{ordinal}: {event}",
                    )
                    self.dropped[ordinal] = "failed" if has_failed else "skipped"

    def _check_batch(self, step: int, batch: list[int]) -> None:
        need = self.audit.need
        for ordinal in batch:
            need(ordinal in self.scored, "only scored groups are trained", f"step {step}: {ordinal}")
        newest, window = max(batch), self.config["reorder_window"]
        settled = set(self.step_of) | set(self.dropped) | set(batch)
        overtaken = [o for o in self.started if o not in settled and o + window <= newest]
        need(not overtaken, "nothing is overtaken by W or more", f"step {step} trains {newest} before {overtaken}")

    def end(self) -> None:
        """S steps of P groups; and at W = 1 exactly the first S P ordinals that were not dropped."""
        need, config = self.audit.need, self.config
        need(len(self.done) == config["steps"], "all steps are done", f"{len(self.done)} of {config['steps']}")
        owed = [ordinal for ordinal in sorted(self.started) if ordinal not in self.dropped]
        count = config["steps"] * config["groups_per_step"]
        need(len(self.step_of) == count, "S P groups are trained", f"{len(self.step_of)} of {count}")
        need(
            owed == sorted(self.step_of),
            "what was trained is what was owed",
            f"{sorted(set(owed) ^ set(self.step_of))}",
        )


def audit(run_dir: Path) -> Audit:
    """All that can be found in `run_dir`; `findings` is empty when every claim holds."""
    return Audit(run_dir).run()


if __name__ == "__main__":
    found = audit(Path(sys.argv[1]))
    sys.stdout.write(json.dumps(found.numbers, indent=2) + "\n" + "".join(f"{finding}\n" for finding in found.findings))
    sys.exit(bool(found.findings))
