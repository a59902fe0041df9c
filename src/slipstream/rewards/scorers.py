"""The scorers of a configuration: sandboxed workers, and this process for functions given from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from slipstream.algorithms.responses import truncate_at_token
from slipstream.core.clock import Clock
from slipstream.core.sections import FROM_PYTHON, RewardsConfig, TaskConfig
from slipstream.core.types import Completion, EpisodeRecord
from slipstream.rewards.assembly import Call, Where
from slipstream.rewards.calls import Scoring, call_function
from slipstream.rewards.checks import check_isolation, setup_of, terms_of
from slipstream.rewards.given import Functions, check_given, is_from_python
from slipstream.rewards.inline import CallableScorer
from slipstream.rewards.pool import ScoredJob, ScoringPool
from slipstream.rewards.protocol import AnyJob, RewardGroupJob, RewardJob


class Scorers:
    """A `ScoringPool`, a `CallableScorer`, or both, as one: calls in, one `ScoredJob` each out.

    `names` are those of the parts, `where` says who scores each. Starts the workers and waits until one has imported
    what it needs. ConfigError for functions that cannot be built, or that this platform cannot isolate.
    """

    def __init__(
        self,
        config: RewardsConfig,
        tasks: Mapping[str, TaskConfig],
        functions: Functions,
        *,
        clock: Clock | None = None,
        private: Sequence[str] = (),
        num_spares: int = 1,
    ) -> None:
        self._config = config
        check_given(config, functions)
        terms = terms_of(config)
        self.names = [term.name for term in terms]
        self.where: list[Where] = [(is_from_python(term), term.per) for term in terms]
        self._scorers: dict[bool, CallableScorer | ScoringPool] = {}
        if own := [term for term in terms if is_from_python(term)]:
            scorings = [
                Scoring(term.name, term.per, partial(call_function, functions[term.function.removeprefix(FROM_PYTHON)]))
                for term in own
            ]
            self._scorers[True] = CallableScorer(scorings, timeout_s=config.timeout_s, clock=clock)
        if len(own) < len(terms):
            setup = setup_of(config, tasks)
            pool = ScoringPool(
                setup, num_workers=config.num_workers, clock=clock, private=private, num_spares=num_spares
            )
            self._scorers[False] = pool
            try:
                pool.wait_ready()
                check_isolation(setup, pool.isolation, trust_verifier=config.trust_verifier)
            except BaseException:
                self.close()
                raise

    @property
    def isolation(self) -> frozenset[str]:
        """The barriers around workers; none without them."""
        pool = self._scorers.get(False)
        return pool.isolation if isinstance(pool, ScoringPool) else frozenset()

    @property
    def num_restarts(self) -> int:
        return sum(scorer.num_restarts for scorer in self._scorers.values())

    def submit(self, call: Call) -> None:
        """Queue `call`; its scorer gets it at the next `poll`."""
        jobs = [self._job(call.job_id, entry.completion) for entry in call.entries]
        is_own, per = call.where
        job: AnyJob = jobs[0] if per == "completion" else RewardGroupJob(call.job_id, jobs)
        self._scorers[is_own].submit(job)

    def poll(self) -> list[ScoredJob]:
        """Move what can be moved without waiting; results in the order they came."""
        return [scored for scorer in self._scorers.values() for scored in scorer.poll()]

    def fds(self) -> list[int]:
        """Readable when `poll` has something to do."""
        return [fd for scorer in self._scorers.values() for fd in scorer.fds()]

    def next_deadline_s(self) -> float | None:
        """When, on the clock, `poll` has to be called even if nothing arrives; None while nothing is awaited."""
        deadlines = [scorer.next_deadline_s() for scorer in self._scorers.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def close(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()

    def _job(self, job_id: int, completion: Completion) -> RewardJob:
        prompt, config, episode = completion.prompt, self._config, completion.episode
        text = completion.text if episode is None else last_turn(episode)
        ids = truncate_at_token(completion.trunk_tokens, config.truncate_token, after=config.truncate_after)
        return RewardJob(
            job_id=job_id,
            prompt=prompt.text if prompt.messages is None else prompt.messages,
            completion=text[: config.max_chars],
            completion_ids=ids.tolist(),
            task=prompt.task,
            answer=prompt.answer,
            columns=prompt.columns,
            messages=None if episode is None else episode.messages,
            branches=[] if episode is None else episode.branches,
        )


def last_turn(episode: EpisodeRecord) -> str:
    """Return the text of the policy's last turn."""
    turns = (message["content"] for message in reversed(episode.messages) if message["role"] == "assistant")
    return str(next(turns, ""))
