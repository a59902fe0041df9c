"""A run's folder, written by a simulation: files whose true costs are known. Only what calibration reads is there."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from slipstream.controller.policies import schedule_for
from slipstream.core.config import RunConfig
from slipstream.core.jsonl import JsonlWriter
from slipstream.core.recipes import save_config
from slipstream.core.run_log import RolloutLine
from slipstream.observe.metrics import MetricsWriter
from slipstream.observe.timeline import Instant, ProcessStart, Record, Slice, timeline_path
from slipstream.plan.simulated_generator import Replica, SimulatedEngine, SimulatedRow
from slipstream.plan.simulated_run import Batch, Costs, Simulated, SimulatedSetup, SimulatedWorkload
from slipstream.plan.simulator import Simulation, _Trainer

LEAST_NS = 100


class Track:
    """The timeline of one process: what is written lies end to end."""

    def __init__(self, loop) -> None:
        self.loop, self.since_s = loop, 0.0
        self.records: list[Record] = []

    def write(self, parts: list[tuple[str, float, dict]]) -> None:
        """The time since the last call went to `parts` (state, share, what else the slice says) in this order."""
        total, elapsed_s = sum(share for _, share, _ in parts), self.loop.time_s - self.since_s
        if elapsed_s <= 0 or not total:
            return
        for state, share, more in parts:
            end_s = self.since_s + elapsed_s * share / total
            start_ns, end_ns = round(self.since_s * 1e9), round(end_s * 1e9)
            if end_ns - start_ns > LEAST_NS:
                self.records.append(Slice(state, start_ns, end_ns, **more))
            self.since_s = end_s
        self.since_s = self.loop.time_s


class WrittenEngine(SimulatedEngine):
    was_alone, alone_s = False, 0.0

    def _start(self, row: SimulatedRow) -> None:
        super()._start(row)
        self.began.setdefault((row.ordinal, row.sample), self.track.loop.time_s + self.alone_s)

    def _prefill(self, num_wanted: int, ahead: dict[str, float], *, is_alone: bool) -> bool:
        has_prefilled = super()._prefill(num_wanted, ahead, is_alone=is_alone)
        self.was_alone, self.alone_s = is_alone, sum(ahead.values()) if is_alone else 0.0
        return has_prefilled


class WrittenReplica(Replica):
    def turn(self) -> None:
        self.track.write([("wait_trainer", 1.0, {})])
        super().turn()

    def spend(self) -> None:
        if self.job is not None:
            stretch = self.stretch
            decode_s, parts = stretch.decode_s(), []
            for state, seconds in stretch.ahead.items():
                if self.engine.was_alone:
                    parts.append((state, seconds, {"count": 1}))
                else:  # in the pass that decodes
                    decode_s += seconds
            work = {"count": stretch.steps, "units": stretch.steps * stretch.rows}
            parts.append((self._state, decode_s, work))
            parts.append(("send", self.num_ending * self.costs.send_s / self.factor, {}))
            self.track.write(parts)
        super().spend()


class WrittenTrainer(_Trainer):
    def wake(self) -> None:
        if not self.is_busy:
            self.track.write([(f"wait_{self.reason}", 1.0, {})])
        super().wake()

    def _next(self):
        """One state, and one microbatch, at a time."""
        found = super()._next()
        if found is None or "collate" not in found[0] or len(found[0]) == 1:
            return found
        states, then = found
        fixed, token = self.true
        seconds = [fixed + token * rows for rows in self.microbatches]
        scale = states["forward_backward"] / sum(seconds)
        pieces = [{"forward_backward": scale * each} for each in seconds]
        pieces += [{state: each} for state, each in states.items() if state != "forward_backward"]
        self.rows_to_do = list(self.microbatches)
        self.todo.extendleft(reversed([(piece, lambda: None) for piece in pieces[1:-1]] + [(pieces[-1], then)]))
        return pieces[0], lambda: None

    def _done(self, then) -> None:
        ((state, seconds),) = self.working.items()
        more = {"args": {"step": self.step}} if state in ("forward_backward", "optimizer", "collate") else {}
        if state == "forward_backward":
            more |= {"count": 1, "units": self.rows_to_do.pop(0)}
        self.track.write([(state, seconds, more)])
        if state == "collate":  # the last of a step, here
            self.track.records.append(Instant("trained", round(self.track.loop.time_s * 1e9), {"step": self.step}))
        super()._done(then)


class WrittenRun(Simulation):
    """Runs, and writes `folder`. `microbatch` are the true (fixed, per token) seconds of forward-backward."""

    def __init__(
        self,
        config: RunConfig,
        setup: SimulatedSetup,
        workload: SimulatedWorkload,
        costs: Costs,
        folder: Path,
        microbatch,
    ) -> None:
        folder.mkdir()
        super().__init__(schedule_for(config), setup, workload, costs, seed=7, events=folder / "events.jsonl")
        self.config, self.folder = config, folder
        self.began_s: dict[tuple[int, int], float] = {}
        self.completions: dict[int, list[dict]] = defaultdict(list)
        self.lines: list[dict[str, float]] = []
        self.trainer.__class__ = WrittenTrainer
        self.trainer.track, self.trainer.true = Track(self.loop), microbatch
        for replica in self.replicas:
            replica.__class__, replica.engine.__class__ = WrittenReplica, WrittenEngine
            replica.track = replica.engine.track = Track(self.loop)
            replica.engine.began = self.began_s

    def finished(self, replica, rows) -> None:
        for row, _ in rows:
            self.completions[row.ordinal].append(
                {
                    "sample": row.sample,
                    "replica": replica,
                    "num_tokens": row.length,
                    "started_s": self.began_s[row.ordinal, row.sample],
                    # Word of it is sent when all that finished with it has been handed on.
                    "finished_s": self.loop.time_s - len(rows) * self.costs.send_s,
                }
            )
        super().finished(replica, rows)

    def began(self, command) -> Batch:
        lags: dict[str, float] = defaultdict(float)
        for ordinal in command.ordinals:
            self._tell_fate(ordinal, command.step)
            for version, count in self._tokens[ordinal].items():
                lags[f"staleness_tokens/lag_{command.step - version}"] += count
        batch = super().began(command)
        rows = batch.prompt_tokens + batch.completion_tokens - batch.completions
        self.lines.append({"tokens_trained": float(batch.completion_tokens), "tokens_read": float(rows)} | lags)
        first = rows // 3  # of two microbatches, so that their sizes differ
        self.trainer.step, self.trainer.microbatches = command.step, (first, rows - first)
        return batch

    def _skip(self, command) -> None:
        for ordinal in command.ordinals:
            self._tell_fate(ordinal, None)
        super()._skip(command)

    def _tell_fate(self, ordinal: int, step: int | None) -> None:
        for completion in self.completions[ordinal]:
            completion |= {"step": step, "prompt": "p" * self._groups[ordinal].prompt_tokens}

    def write(self) -> Simulated:
        """Run, and write what is not written meanwhile."""
        found = self.run()
        for replica in self.replicas:
            if replica.job is None:
                replica.track.write([("wait_trainer", 1.0, {})])
        save_config(self.config, self.folder / "config.toml")
        metrics = MetricsWriter(self.folder / "metrics.jsonl")
        for step, line in enumerate(self.lines):
            metrics.write(step=step, version=step + 1, wall_s=0.0, metrics=line)
        metrics.close()
        end_ns = round(self.loop.time_s * 1e9)
        self._write(
            "rollouts.jsonl",
            [
                self._rollout(ordinal, one)
                for ordinal, completions in self.completions.items()
                for one in completions
                if "prompt" in one
            ],
        )
        tracks = {"trainer": self.trainer.track} | {replica.name: replica.track for replica in self.replicas}
        for name, track in tracks.items():
            threads = self.setup.trainer_threads if name == "trainer" else self.setup.generator_threads
            start = ProcessStart(name, 1, 0, threads=threads, threads_alone=self.setup.cores or 1)
            self._write(timeline_path(Path(), name), [start, *track.records])
        self._write(timeline_path(Path(), "controller"), [ProcessStart("controller", 1, 0), Slice("idle", 0, end_ns)])
        return found

    def _write(self, path: str | Path, records: list) -> None:
        writer = JsonlWriter(self.folder / path)
        writer.write(*records)
        writer.close()

    def _rollout(self, ordinal: int, one: dict) -> RolloutLine:
        is_trained = one["step"] is not None
        return RolloutLine(
            **one,
            ordinal=ordinal,
            outcome="trained" if is_trained else "skipped",
            prompt_id=f"p{ordinal}",
            task="",
            completion="",
            answer=None,
            reward=float(one["sample"]) if is_trained else 0.0,
            parts={},
            failure=None,
            finish_reason="stop",
            versions=[],
            mean_behaviour_logprob=None,
            scored_s=one["finished_s"] + self.costs.to_rewards_s + self.costs.score_s,
        )
