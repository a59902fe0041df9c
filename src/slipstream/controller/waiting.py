"""The reasons why executors have no work, which label their idle time: told to them when they change. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.controller.schedule import SchedulingPolicy
from slipstream.core.run_log import Event
from slipstream.core.service_messages import Waiting, WaitReason
from slipstream.core.types import ReplicaLost, Swapped


class WaitReasons:
    """The reason that each executor knows."""

    def __init__(self) -> None:
        self._trainer: WaitReason | None = None
        self._held_back: frozenset[int] | None = None  # versions on which nothing may start; None: all steps are done
        self._replicas: dict[int, WaitReason] = {}

    def changed(self, event: Event, schedule: SchedulingPolicy) -> Iterator[tuple[str, Waiting]]:
        """Yield (executor, reason) for those who have another one after `event`, which `schedule` has taken."""
        reason = schedule.waits_for()
        if reason != self._trainer:
            self._trainer = reason
            yield "trainer", Waiting(reason=reason)
        held_back = None if schedule.is_finished else schedule.held_back()
        moved = [event.replica] if isinstance(event, Swapped) else []
        concerned = moved if held_back == self._held_back else schedule.versions  # that is, seldom, every replica
        self._held_back = held_back
        if isinstance(event, ReplicaLost):
            self._replicas.pop(event.replica, None)
        for replica in concerned:
            is_held_back = held_back is not None and schedule.versions[replica] in held_back
            reason = "nothing" if held_back is None else "trainer" if is_held_back else "prompt"
            if self._replicas.get(replica, "trainer") != reason:
                self._replicas[replica] = reason
                yield f"generator-{replica}", Waiting(reason=reason)


def work_left(schedule: SchedulingPolicy, *, has_begun: bool) -> str:
    """Return in words what an interrupted run still does; `has_begun`: there is something to save."""
    if schedule.training:
        return f"finishing step {schedule.steps_done + 1}, then a checkpoint"
    if not has_begun:
        return "ending, as there is nothing to save yet"
    return f"writing a checkpoint of step {schedule.steps_done}"
