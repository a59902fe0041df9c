"""The reward node: completions in, rollouts out, one at a time and as soon as each is finished (M2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from slipstream.algorithms.responses import truncate_at_token
from slipstream.core.config import RewardsConfig, RewardTerm, TaskConfig
from slipstream.core.executor import Context, Executor
from slipstream.core.sections import names_of
from slipstream.core.types import Completion, Counters, EvalScored, Ready, Rollout, Stop
from slipstream.core.vetting import POISONED, Limits, completion_fault, without_tokens
from slipstream.rewards.checks import check_isolation, setup_of
from slipstream.rewards.functions import combined_reward
from slipstream.rewards.inline import OWN_NAMES, CallableScorer
from slipstream.rewards.pool import Scored, ScoringPool
from slipstream.rewards.protocol import Job

_MAX_PENDING = 1024  # completions taken from the channel and not yet scored; beyond, the channel holds them back
_COUNTERS_EVERY_S = 1.0


class _Pool(Protocol):
    """What `ScoringPool` and `CallableScorer` have in common."""

    num_restarts: int
    isolation: frozenset[str]

    def wait_ready(self) -> None: ...

    def submit(self, job: Job) -> None: ...

    def poll(self) -> list[Scored]: ...

    def fds(self) -> list[int]: ...

    def next_deadline_s(self) -> float | None: ...

    def close(self) -> None: ...


class Rewards(Executor):
    """Scores completions; never hangs on one, and loses none.

    Consumes `completions`; emits a `Rollout` on `rollouts` for training, `EvalScored` on `events` for evaluation
    (a failed one has reward `failure_reward`). Where reward models follow, rollouts have their parts and no sum yet,
    and those for evaluation go to the models, too.
    Constructor arguments are models, or what `model_dump` made of them, apart from `function`: a Python callable with
    TRL's signature that replaces the configured terms and runs in this process. Stop: takes no more, finishes what it
    has.
    """

    inputs = ("completions",)
    outputs = ("rollouts",)

    def __init__(
        self,
        config: RewardsConfig | Mapping[str, Any],
        tasks: Mapping[str, TaskConfig | Mapping[str, Any]],
        *,
        function: Callable[..., Any] | None = None,
    ) -> None:
        self._config = RewardsConfig.model_validate(config)
        self._tasks = {key: TaskConfig.model_validate(task) for key, task in tasks.items()}
        self._function = function
        self._completions: dict[int, Completion] = {}
        self._unsent: deque[Rollout] = deque()  # with those being scored, at most `_MAX_PENDING`
        self._next_job = 0
        self._counts = {"scored": 0, "failed": 0, "eval_scored": 0}
        self._counted_s = 0.0
        self._is_stopping = False
        self._is_finished = False
        self._pool: _Pool | None = None

    def init(self, context: Context) -> None:
        """Start the workers and wait until they have imported what they need."""
        self._context = context
        if self._function is not None:
            self._names, self._terms = list(OWN_NAMES), [RewardTerm(function="reward")]
            self._pool = CallableScorer(self._function, timeout_s=self._config.timeout_s, clock=context.clock)
        else:
            setup = setup_of(self._config, self._tasks)
            self._names = names_of([term.function for term in self._config.terms])
            self._terms = self._config.terms
            self._pool = ScoringPool(
                setup,
                num_workers=self._config.num_workers,
                clock=context.clock,
                private=[str(context.run_dir)],
            )
            self._pool.wait_ready()
            check_isolation(setup, self._pool.isolation, trust_verifier=self._config.trust_verifier)
        self._label_idle_time()
        info = {"isolation": sorted(self._pool.isolation)}
        context.outputs["events"].put(Ready(executor=context.name, info=info))

    def step(self) -> bool:
        """Take what arrived, hand it to the workers, and pass on what they answered."""
        assert self._pool is not None
        while (command := self._context.inputs["commands"].get_nowait()) is not None:
            self._is_stopping |= isinstance(command, Stop)
        with self._context.spans.span("receive"):
            num_taken = self._take(self._pool)
        # Also with nothing to score: a spare worker that gets ready is news, and would wake this process until read.
        with self._context.spans.span("score"):
            scored = self._pool.poll()
            for one in scored:
                self._emit(self._completions.pop(one.job_id), one)
        num_done = len(scored)
        self._report(is_last=False)
        with self._context.spans.span("send"):
            has_sent = self._send()
        self._label_idle_time()
        if self._is_stopping and not self._completions and not self._unsent and not self._is_finished:
            self._report(is_last=True)
            self._is_finished = True
            return True
        return has_sent or num_taken + num_done > 0

    def _label_idle_time(self) -> None:
        """While workers score, this process has nothing to do and is not idle."""
        self._context.spans.set_idle_state("score" if self._completions else "wait_completions")

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def wait_fds(self) -> list[int]:
        return [] if self._pool is None else self._pool.fds()

    def wait_s(self) -> float | None:
        deadline_s = None if self._pool is None else self._pool.next_deadline_s()
        return None if deadline_s is None else max(0.0, deadline_s - self._context.clock.now_s())

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _take(self, pool: _Pool) -> int:
        """Hand every completion that arrived to the workers, up to a bound; how many."""
        num_taken = 0
        while not self._is_stopping and len(self._completions) + len(self._unsent) < _MAX_PENDING:
            completion = self._context.inputs["completions"].get_nowait()
            if completion is None:
                break
            assert isinstance(completion, Completion)
            num_taken += 1
            if (fault := completion_fault(completion, Limits(may_be_given=True))) is None:
                self._submit(pool, completion)
            else:  # there is nothing to score
                self._emit(without_tokens(completion), Scored(job_id=-1, parts=[], failure=POISONED + fault))
        return num_taken

    def _submit(self, pool: _Pool, completion: Completion) -> None:
        prompt = completion.prompt
        job = Job(
            job_id=self._next_job,
            prompt=prompt.text if prompt.messages is None else prompt.messages,
            completion=completion.text[: self._config.max_chars],
            completion_ids=truncate_at_token(
                completion.tokens, self._config.truncate_token, after=self._config.truncate_after
            ).tolist(),
            task=prompt.task,
            answer=prompt.answer,
            columns=prompt.columns,
        )
        self._completions[self._next_job] = completion
        self._next_job += 1
        pool.submit(job)

    def _emit(self, completion: Completion, scored: Scored) -> None:
        reward, failure = self._config.failure_reward, scored.failure
        if failure is None and not self._config.models:  # else the sum is made where the models' parts are known
            try:
                reward = combined_reward(self._terms, scored.parts, violation_cap=self._config.violation_cap)
            except ValueError as error:
                failure = str(error)
        rollout = Rollout(
            completion=completion,
            reward=reward,
            reward_parts=dict(zip(self._names, scored.parts, strict=True)) if failure is None else {},
            failure=failure,
            scored_s=self._context.clock.now_s(),
        )
        is_evaluation = completion.purpose == "eval"
        self._counts["failed"] += failure is not None
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
        while self._unsent and self._context.outputs["rollouts"].has_room_for(self._unsent[0]):
            self._context.outputs["rollouts"].put(self._unsent.popleft())
            has_sent = True
        return has_sent

    def _report(self, *, is_last: bool) -> None:
        now_s = self._context.clock.now_s()
        if not is_last and now_s - self._counted_s < _COUNTERS_EVERY_S:
            return
        assert self._pool is not None
        self._counted_s = now_s
        values = {
            **{name: float(count) for name, count in self._counts.items()},
            "restarts": float(self._pool.num_restarts),
        }
        self._context.outputs["events"].put(Counters(executor=self._context.name, values=values))
