"""How long everything takes on a machine, from the files of a run there: what curves of both sides alone leave out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from slipstream.core.config import RunConfig
from slipstream.plan.calibrate import Calibration, calibrate, row_multiple
from slipstream.plan.layouts import AsynchronousPlan, GeneratorLayout, Parts, TrainerLayout, Workload
from slipstream.plan.recorded import RecordedWorkload, read_run
from slipstream.plan.simulated_run import Costs


class RunTimes:
    """What `calibration` says of both sides. Implements `machine.Times`."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        outcomes = [line.outcome for run in calibration.runs for line in run.rollouts]
        self._drawn_per_trained = len(outcomes) / max(1, outcomes.count("trained"))

    def train(self, layout: TrainerLayout, workload: Workload) -> Parts:
        """Seconds of a step: its passes, updates, and what the trainer's process does besides for each rollout."""
        seconds, updates = self.calibration.seconds, workload.epochs * workload.minibatches
        rows = workload.rollouts * (workload.trained_tokens - 1) * workload.epochs
        capacity = max(1.0, layout.microbatch * workload.trained_tokens)
        passes = self.calibration.train.seconds(
            layout.devices, microbatches=max(updates, math.ceil(rows / capacity)), tokens=rows
        )
        received = workload.rollouts * self._drawn_per_trained
        return Parts(
            {
                "forward_backward": passes,
                "optimizer": updates * seconds["optimizer"],
                "stage": seconds["publish"],
                "collate": workload.rollouts * seconds["collate"],
                "receive": received * (seconds["receive"] + seconds["record"]),
            }
        )

    def generate(self, layout: GeneratorLayout, workload: Workload) -> Parts:
        """Seconds of the replicas for a step's completions and those of groups that are dropped."""
        decode, seconds, cores = self.calibration.decode, self.calibration.seconds, layout.tensor_parallel
        lengths, slots = workload.lengths, layout.slots
        mine = workload.rollouts * self._drawn_per_trained / layout.replicas
        context = slots * (lengths.prompt_mean + lengths.mean_square / lengths.mean / 2)
        step_s = decode.seconds(cores, steps=1, rows=slots, context=context) + seconds["turn"]
        prompts = mine / workload.group_size * lengths.prompt_mean
        return Parts(
            {
                "decode": mine * lengths.mean / slots * step_s,
                "prefill": prompts * decode.seconds(cores, rows=1),
                "send": mine * seconds["send"],
                "pause": seconds["swap"],
            }
        )

    def together(self, trainer_cores: int, generator_cores: int) -> tuple[float, float]:
        """With all cores busy; with fewer, both sides are in proportion less in each other's way."""
        cores = self.calibration.cores
        busy = 1.0 if cores == 1 else min(1.0, (trainer_cores + generator_cores - 1) / (cores - 1))
        sides = self.calibration.train.beside, self.calibration.decode.beside
        trainer, generator = (1 / (1 - busy * (1 - beside)) for beside in sides)
        return trainer, generator

    def beside(self, plan: AsynchronousPlan) -> dict[str, float]:  # noqa: ARG002
        """The speed of each kind of work with all cores busy, of its speed alone."""
        return {"train": self.calibration.train.beside, "decode": self.calibration.decode.beside}

    def row_multiple(self, config: RunConfig) -> int:
        """Rows that a decode step is filled up to: a recorded one says what its rows took."""
        return row_multiple(config)

    def guessed(self, plan: AsynchronousPlan) -> str | None:
        """What the runs did not show of the cores that `plan` takes, in words."""
        seen = {"trainer": self.calibration.train.speeds, "generators": self.calibration.decode.speeds}
        wanted = {"trainer": plan.trainer.devices, "generators": plan.generator.tensor_parallel}
        unseen = [f"the {name} on {wanted[name]}" for name, speeds in seen.items() if wanted[name] not in speeds]
        if not unseen:
            return None
        return f"No run had {' or '.join(unseen)} threads a process: how fast that is was extrapolated."

    def costs(self, config: RunConfig, plan: AsynchronousPlan, workload: Workload) -> Costs:  # noqa: ARG002
        """What the simulator is to take for every piece of work."""
        return self.calibration.costs(config)

    def work(self, workload: Workload, seed: int) -> RecordedWorkload:
        """The run's own groups, those without signal included."""
        return RecordedWorkload(
            self.calibration.runs,
            groups_per_step=workload.groups,
            samples=workload.group_size,
            num_held_out=1,
            seed=seed,
        )


def times_of_runs(paths: Sequence[Path]) -> RunTimes:
    """Of finished runs of one model on one machine. ConfigError for what is none."""
    return RunTimes(calibrate([read_run(path) for path in paths]))
