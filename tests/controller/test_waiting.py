"""What executors are told that they wait for: each change once."""

from __future__ import annotations

from slipstream.controller.schedule import Schedule
from slipstream.controller.waiting import WaitReasons
from slipstream.core.run_log import Event, ScheduleConfig
from slipstream.core.types import CompletionFinished, GroupScored, ReplicaLost, StepDone, Swapped


def swapped(replica: int, version: int) -> Swapped:
    return Swapped(replica=replica, version=version, transfer_s=0.0, pause_s=0.0, probe_error=0.0)


def test_each_change_of_a_reason_is_told_once() -> None:
    """One group a step, at staleness 0: the next one waits for the version of the step before."""
    schedule = Schedule(
        ScheduleConfig(
            groups_per_step=1, completions_per_group=1, max_staleness=0, reorder_window=1, steps=2, capacity=2
        )
    )
    waits = WaitReasons()

    def told(event: Event) -> list[tuple[str, str]]:
        schedule.apply(event)
        return [(executor, waiting.reason) for executor, waiting in waits.changed(event, schedule)]

    def finished(ordinal: int) -> CompletionFinished:
        return CompletionFinished(
            ordinal=ordinal, sample=0, replica=0, num_tokens=1, min_version=ordinal, max_version=ordinal
        )

    def scored(ordinal: int) -> GroupScored:
        return GroupScored(
            ordinal=ordinal, has_signal=True, mean_reward=1.0, num_failed=0, min_version=ordinal, max_version=ordinal
        )

    def done(step: int) -> StepDone:
        return StepDone(step=step, version=step + 1, metrics={})

    assert told(swapped(0, 0)) == [("trainer", "generation")]  # group 0 starts; a generator waits for the trainer
    assert told(finished(0)) == [("trainer", "rewards")]
    assert told(scored(0)) == [("trainer", "nothing")]
    assert told(done(0)) == [("trainer", "generation")]
    assert told(swapped(0, 1)) == []
    assert told(ReplicaLost(replica=0)) == []
    assert told(swapped(0, 1)) == [], "a new process assumes that it waits for the trainer"
    assert told(finished(1)) == [("trainer", "rewards")]
    assert told(scored(1)) == [("trainer", "nothing")]
    assert told(done(1)) == [("generator-0", "nothing")]
