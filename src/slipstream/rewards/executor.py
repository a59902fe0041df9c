"""The reward node: completions in, rollouts out, one at a time and as soon as each is finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from slipstream.core.environment_section import ENVIRONMENT
from slipstream.core.executor import Context, Executor
from slipstream.core.sections import RewardsConfig, RewardTerm, TaskConfig
from slipstream.core.service_messages import Counters, EvalScored, Noted, Ready
from slipstream.core.types import Completion, Rollout, Stop
from slipstream.core.vetting import POISONED, Limits, completion_faults, without_tokens
from slipstream.rewards.assembly import Assembly, ScoreEntry
from slipstream.rewards.functions import combined_reward, why_no_reward
from slipstream.rewards.given import Functions
from slipstream.rewards.scorers import Scorers

_MAX_PENDING = 1024  # completions taken from the channel and not yet scored; beyond, the channel holds them back
_MAX_TOGETHER = 64  # completions that are vetted at once, before their calls are counted
_COUNTERS_EVERY_S = 1.0
_MAX_NOTES = 8  # failures that are shown at once, each the first of its kind


class Rewards(Executor):
    """Scores completions; never hangs on one, and loses none.

    Consumes `completions`; emits a `Rollout` on `rollouts` for training, `EvalScored` on `events` for evaluation
    (a failed one has reward `failure_reward`). Where reward models follow, rollouts have their parts and no sum yet,
    and those for evaluation go to the models, too.
    `functions` are Python callables with TRL's signature, which terms 'python:NAME' stand for and which run in this
    process; judges are asked from here, too, and their scores are kept in the run's folder. Terms with per = "group"
    wait until the `group_size` completions of a group are here, for an evaluation's one. With an `environment_weight`
    the reward of a completion's episode is the last part. Stop: takes no more, finishes what is being scored.
    """

    inputs = ("completions",)
    outputs = ("rollouts",)

    def __init__(
        self,
        config: RewardsConfig,
        tasks: Mapping[str, TaskConfig],
        *,
        functions: Functions | None = None,
        group_size: int = 1,
        environment_weight: float | None = None,
    ) -> None:
        self._config, self._tasks = config, tasks
        self._functions = functions or {}
        self._group_size = group_size
        self._terms = self._config.asked
        if environment_weight is not None:
            self._terms.append(RewardTerm(function=ENVIRONMENT, weight=environment_weight))
        self._unsent: deque[Rollout] = deque()  # with those being scored, at most `_MAX_PENDING`
        self._noted: set[str] = set()
        self._counts = {"scored": 0, "failed": 0, "eval_scored": 0}
        self._counted_s = 0.0
        self._is_stopping = False
        self._is_finished = False
        self._scorers: Scorers | None = None

    def init(self, context: Context) -> None:
        """Start the workers and wait until they have imported what they need."""
        self._context = context
        self._scorers = Scorers(
            self._config,
            self._tasks,
            self._functions,
            clock=context.clock,
            private=[str(context.run_dir)],
            run_dir=context.run_dir if context.run_dir.name else None,  # an evaluation outside of runs has none
        )
        self._assembly = Assembly(self._scorers.where, self._group_size)
        self._names = [*self._scorers.names, *(ENVIRONMENT for _ in self._terms[len(self._config.asked) :])]
        self._label_idle_time()
        context.outputs["events"].put(Ready(executor=context.name))

    def step(self) -> bool:
        """Take what arrived, hand it to the workers, and pass on what they answered."""
        assert self._scorers is not None
        while (command := self._context.inputs["commands"].get_nowait()) is not None:
            self._is_stopping |= isinstance(command, Stop)
        with self._context.spans.span("receive"):
            num_taken = self._take(self._scorers)
        # Also with nothing to score: a spare worker that gets ready is news, and would wake this process until read.
        with self._context.spans.span("score"), self._context.together():
            scored = self._scorers.poll()
            for one in scored:
                for entry in self._assembly.answer(one.job_id, one.parts, one.failure, one.logged):
                    self._emit(entry)
        num_done = len(scored)
        self._report(is_last=False)
        with self._context.spans.span("send"), self._context.together():
            has_sent = self._send()
        self._label_idle_time()
        if self._is_stopping and not self._assembly.num_called and not self._unsent and not self._is_finished:
            self._report(is_last=True)
            self._is_finished = True
            return True
        return has_sent or num_taken + num_done > 0

    def _label_idle_time(self) -> None:
        """While workers score, this process has nothing to do and is not idle."""
        self._context.spans.set_idle_state("score" if self._assembly.num_called else "wait_completions")

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    @property
    def _room(self) -> int:
        """Completions that may be taken from the channel now."""
        return 0 if self._is_stopping else _MAX_PENDING - self._assembly.num_called - len(self._unsent)

    def held_inputs(self) -> tuple[str, ...]:
        return () if self._room > 0 else ("completions",)

    def wait_fds(self) -> list[int]:
        return [] if self._scorers is None else self._scorers.fds()

    def wait_s(self) -> float | None:
        deadline_s = None if self._scorers is None else self._scorers.next_deadline_s()
        return None if deadline_s is None else max(0.0, deadline_s - self._context.clock.now_s())

    def close(self) -> None:
        if self._scorers is not None:
            self._scorers.close()
            self._scorers = None

    def _take(self, scorers: Scorers) -> int:
        """Hand every completion that arrived to the scorers, up to a bound; how many."""
        taken: list[Completion] = []
        room = min(_MAX_TOGETHER, self._room)
        while len(taken) < room and (completion := self._context.inputs["completions"].get_nowait()) is not None:
            assert isinstance(completion, Completion)
            taken.append(completion)
        faults = completion_faults(taken, Limits(may_be_given=True))
        for completion, fault in zip(taken, faults, strict=True):
            episode = completion.episode
            if fault is not None:  # there is nothing to score
                calls = self._assembly.leave_out(completion)
                self._emit(ScoreEntry(without_tokens(completion), [], num_open=0, failure=POISONED + fault))
            elif not self._config.asked or (episode is not None and episode.failure is not None):
                calls = self._assembly.leave_out(completion)
                failure = None if episode is None else episode.failure
                self._emit(ScoreEntry(completion, [], num_open=0, failure=failure))
            else:
                calls = self._assembly.add(completion)
            for call in calls:
                scorers.submit(call)
        return len(taken)

    def _emit(self, entry: ScoreEntry) -> None:
        completion, parts = entry.completion, entry.parts
        if completion.episode is not None:
            parts = [*parts, completion.episode.reward]
        reward, failure = self._config.failure_reward, entry.failure
        if failure is None and not self._terms:  # a teacher teaches without any reward
            reward = 0.0
        elif failure is None and not self._config.models:  # else the sum is made where the models' parts are known
            try:
                reward = combined_reward(self._terms, parts, violation_cap=self._config.violation_cap)
            except ValueError as error:
                failure = why_no_reward(error, completion.episode)
        rollout = Rollout(
            completion=completion,
            reward=reward,
            reward_parts=dict(zip(self._names, parts, strict=True)) if failure is None else {},
            failure=failure,
            logged=entry.metrics,
            extra=entry.extra,
            scored_s=self._context.clock.now_s(),
        )
        is_evaluation = completion.purpose == "eval"
        if failure is not None:
            self._counts["failed"] += 1
            self._note(failure)
        self._counts["eval_scored" if is_evaluation else "scored"] += 1
        if is_evaluation and not self._config.models:
            self._context.outputs["events"].put(EvalScored.of(rollout))
        else:
            self._unsent.append(rollout)

    def _send(self) -> bool:
        """Pass on what there is room for: one that waited in a `put` would seem dead, and could kill no worker in time.

        Whether any was.
        """
        has_sent = False
        rollouts = self._context.outputs["rollouts"]
        while self._unsent and rollouts.has_room_for(self._unsent[0]):
            rollouts.put(self._unsent.popleft())
            has_sent = True
        return has_sent

    def _note(self, failure: str) -> None:
        """Show the first failure of its kind at once: an alarm comes after 16, and a group's fate when it is whole."""
        kind = ": ".join(failure.split(": ", 2)[:2])  # its term and the type of error
        if kind in self._noted or len(self._noted) == _MAX_NOTES:
            return
        self._noted.add(kind)
        name, told = self._context.name, f"and counts with rewards.failure_reward: {failure}"
        if failure.startswith(of_episode := "environment: "):
            name, told = "environment", f"an episode failed, {told.replace(of_episode, '', 1)}"
        else:
            told = f"a completion could not be scored, {told}"
        self._context.outputs["events"].put(Noted(executor=name, text=told))

    def _report(self, *, is_last: bool) -> None:
        now_s = self._context.clock.now_s()
        if not is_last and now_s - self._counted_s < _COUNTERS_EVERY_S:
            return
        assert self._scorers is not None
        self._counted_s = now_s
        values = {
            **{name: float(count) for name, count in self._counts.items()},
            "restarts": float(self._scorers.num_restarts),
            **self._scorers.counts,
        }
        self._context.outputs["events"].put(Counters(executor=self._context.name, values=values))
