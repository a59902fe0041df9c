"""What the schedule keeps in order says the same as a look at every group and replica."""

from __future__ import annotations

import random

import pytest

from slipstream.controller.policies import POLICIES
from slipstream.controller.replicas import Replicas
from slipstream.controller.schedule import SchedulingPolicy
from slipstream.core.run_log import ScheduleConfig
from slipstream.core.types import CompletionFinished, GroupScored, ReplicaLost, StartGroup, StepDone, Swapped, TrainStep

EVENTS = 400


def plainly(policy: type[SchedulingPolicy]) -> type[SchedulingPolicy]:
    """`policy` with every question answered by looking at everything, as the rules are written down."""

    class PlainReplicas(Replicas):
        def __init__(self, schedule):
            super().__init__()
            self.schedule = schedule

        def least_loaded(self, most, may_start):
            load = dict.fromkeys(self.versions, 0)
            for group in self.schedule.in_flight.values():
                load[group.replica] += group.unfinished
            able = [
                (load[replica], -version, replica)
                for replica, version in self.versions.items()
                if load[replica] <= most and may_start(version)
            ]
            return min(able)[2] if able else None

    class Plain(policy):
        def __init__(self, config):
            super().__init__(config)
            self._replicas = PlainReplicas(self)

        def oldest_unfinished(self):
            return min([*self.in_flight, *self.readmit], default=None)

        def waits_for(self):
            if self.training or self.is_finished:
                return "nothing"
            oldest = min(self.in_flight, default=None)
            if oldest is not None and self.in_flight[oldest].unfinished == 0:
                return "rewards"
            return "straggler" if len(self.ready) >= self.config.groups_per_step else "generation"

        def _oldest_batch(self, window=None):
            batch = sorted(self.ready)[: self.config.groups_per_step]
            oldest = self.oldest_unfinished()
            return batch if window is None or oldest is None or batch[-1] < oldest + window else None

    return Plain


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", POLICIES)
def test_indexes_and_a_look_at_everything_decide_alike(name, seed):
    rng = random.Random(seed)
    config = ScheduleConfig(
        groups_per_step=rng.choice([1, 3]),
        completions_per_group=2,
        max_staleness=1 if name == "one_step" else rng.choice([0, 1, 3]),
        reorder_window=rng.choice([1, 2]) if name == "oldest_first" else 1,
        steps=30,
        capacity=rng.choice([2, 5, 9]),
        staleness_threshold=1.0,
        queue_groups=4,
    )
    fast, plain = POLICIES[name](config), plainly(POLICIES[name])(config)
    held: dict[int, int] = {}
    sampling: dict[int, list[int]] = {}  # ordinal -> replica, unfinished
    training: TrainStep | None = None
    published = 0

    def tell(event) -> None:
        nonlocal training
        commands = fast.apply(event)
        assert commands == plain.apply(event), event
        assert fast.waits_for() == plain.waits_for()
        for command in commands:
            match command:
                case StartGroup():
                    sampling[command.ordinal] = [command.replica, 2]
                case TrainStep():
                    training = command

    for _ in range(EVENTS):
        choices = [*sampling, *sampling, "step", "swap", "swap", "lose"]
        match rng.choice(choices):
            case "step" if training is not None:
                published, step, training = training.step + 1, training.step, None
                tell(StepDone(step=step, version=published, metrics={}))
            case "swap":
                replica = rng.randrange(3)
                held[replica] = rng.randint(held.get(replica, published), published)
                tell(Swapped(replica=replica, version=held[replica], transfer_s=0, pause_s=0, probe_error=0))
            case "lose" if rng.random() < 0.1 and held:
                replica = rng.choice(list(held))
                del held[replica]
                for ordinal in [o for o, (where, _) in sampling.items() if where == replica]:
                    del sampling[ordinal]
                tell(ReplicaLost(replica=replica))
            case int() as ordinal:
                replica, unfinished = sampling[ordinal]
                if unfinished and rng.random() < 0.8:
                    sampling[ordinal][1] -= 1
                    fields = {"num_tokens": 1, "min_version": 0, "max_version": 0}
                    tell(CompletionFinished(ordinal=ordinal, sample=2 - unfinished, replica=replica, **fields))
                else:  # sometimes its score overtakes the news of its last completions
                    del sampling[ordinal]
                    version = rng.randint(0, published)
                    tell(
                        GroupScored(
                            ordinal=ordinal,
                            has_signal=rng.random() < 0.8,
                            mean_reward=0,
                            num_failed=0,
                            min_version=version,
                            max_version=version,
                        )
                    )
    assert fast.steps_done > 0 or config.capacity == 2
