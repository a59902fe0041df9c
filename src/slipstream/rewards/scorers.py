"""The scorers of a configuration: sandboxed workers, and this process for functions from Python, and for judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from slipstream.algorithms.responses import truncate_at_token
from slipstream.core.clock import Clock
from slipstream.core.sections import FROM_JUDGE, JudgeTerm, RewardsConfig, RewardTerm, TaskConfig
from slipstream.core.service_messages import JUDGE_PREFIX
from slipstream.core.types import Completion, EpisodeRecord
from slipstream.core.user_code import FROM_PYTHON
from slipstream.rewards.assembly import Call, Where
from slipstream.rewards.awaited import LoopScorer, Seat
from slipstream.rewards.calls import Scoring, await_function, call_function, is_async
from slipstream.rewards.checks import NETWORK, WORKERS, check_isolation, setups_by_place, terms_of
from slipstream.rewards.given import Functions, check_given, is_from_python
from slipstream.rewards.inline import CallableScorer
from slipstream.rewards.judge import Judge
from slipstream.rewards.pool import ScoredJob, ScoringPool
from slipstream.rewards.protocol import AnyJob, RewardGroupJob, RewardJob, Term
from slipstream.rewards.score_cache import ScoreCache

SCORES_FOLDER = "judge_scores"
THREADS = "threads"


class Scorers:
    """The scorers of all places as one: calls in, one `ScoredJob` each out.

    Places are workers without network and with it, threads for functions given from Python, a loop for those that are
    `async def`, and another for judges, whose scores are kept below `run_dir`. `names` are those of the parts, `where`
    says who scores each. Starts the workers and waits until one of each kind has imported what it needs. ConfigError
    for functions that cannot be built, or that this platform cannot isolate, and for judges that cannot be asked.
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
        run_dir: Path | None = None,
        max_attempts: int | None = None,
    ) -> None:
        self._config = config
        check_given(config, functions)
        terms = terms_of(config)
        places = [self._place(term, one, functions) for term, one in zip(terms, config.terms, strict=True)]
        self.names = [*(term.name for term in terms), *(judge.name for judge in config.judges)]
        self.where: list[Where] = [
            *((place, term.per) for place, term in zip(places, terms, strict=True)),
            *((FROM_JUDGE + judge.name, "completion") for judge in config.judges),
        ]
        self._pools: dict[str, ScoringPool | CallableScorer] = {}
        self._judges = {
            FROM_JUDGE + judge.name: Judge(
                judge, max_chars=config.max_chars, cache=_cache(judge, run_dir), max_attempts=max_attempts
            )
            for judge in config.judges
        }
        own = [
            (place, term, functions[term.function.removeprefix(FROM_PYTHON)])
            for place, term in zip(places, terms, strict=True)
            if is_from_python(term)
        ]
        if threaded := [
            Scoring(term.name, term.per, partial(call_function, function))
            for place, term, function in own
            if place == THREADS
        ]:
            self._pools[THREADS] = CallableScorer(
                threaded, timeout_s=config.timeout_s, num_threads=config.num_threads, clock=clock
            )
        awaited = {place: self._seat(term, function) for place, term, function in own if place != THREADS}
        judging = {place: judge.seat for place, judge in self._judges.items()}
        self._loops = [
            LoopScorer(seats, clock=clock, keeps_loop=seats is awaited) for seats in (awaited, judging) if seats
        ]
        self._loop_of = {place: loop for loop in self._loops for place in loop.places}
        if len(own) < len(terms):
            try:
                self._start_workers(tasks, clock, private, num_spares)
            except BaseException:
                self.close()
                raise

    def _start_workers(
        self, tasks: Mapping[str, TaskConfig], clock: Clock | None, private: Sequence[str], num_spares: int
    ) -> None:
        setups, num_workers = setups_by_place(self._config, tasks), self._config.num_workers
        for place, setup in setups.items():
            self._pools[place] = ScoringPool(
                setup, num_workers=num_workers, clock=clock, private=private, num_spares=num_spares
            )
        for place, setup in setups.items():
            pool = self._pools[place]
            assert isinstance(pool, ScoringPool)
            pool.wait_ready()
            check_isolation(setup, pool.isolation, trust_verifier=self._config.trust_verifier)

    def _place(self, term: Term, config: RewardTerm, functions: Functions) -> str:
        if not is_from_python(term):
            return NETWORK if self._config.has_own_network(config) else WORKERS
        return f"loop:{term.name}" if is_async(functions[term.function.removeprefix(FROM_PYTHON)]) else THREADS

    def _seat(self, term: Term, function: Callable[..., Any]) -> Seat:
        async def score(job: AnyJob) -> list[float | None]:
            return await await_function(function, job.jobs if isinstance(job, RewardGroupJob) else [job])

        return Seat(term.name, score, self._config.timeout_s, self._config.max_awaited)

    @property
    def num_restarts(self) -> int:
        return sum(scorer.num_restarts for scorer in self._scorers)

    @property
    def counts(self) -> dict[str, float]:
        """The counts of judges, by 'judge/NAME/COUNT'."""
        of = {place.removeprefix(FROM_JUDGE): judge.counts for place, judge in self._judges.items()}
        return {f"{JUDGE_PREFIX}{name}/{what}": float(n) for name, counts in of.items() for what, n in counts.items()}

    @property
    def _scorers(self) -> list[ScoringPool | CallableScorer | LoopScorer]:
        return [*self._pools.values(), *self._loops]

    def submit(self, call: Call) -> None:
        """Queue `call`; its scorer gets it at the next `poll`."""
        place, per = call.where
        jobs = [self._job(call.job_id, entry.completion) for entry in call.entries]
        job: AnyJob = jobs[0] if per == "completion" else RewardGroupJob(call.job_id, jobs)
        if place in self._loop_of:
            self._loop_of[place].submit(job, place)
        else:
            self._pools[place].submit(job)

    def poll(self) -> list[ScoredJob]:
        """Move what can be moved without waiting; results in the order they came."""
        return [scored for scorer in self._scorers for scored in scorer.poll()]

    def fds(self) -> list[int]:
        """Readable when `poll` has something to do."""
        return [fd for scorer in self._scorers for fd in scorer.fds()]

    def next_deadline_s(self) -> float | None:
        """When, on the clock, `poll` has to be called even if nothing arrives; None while nothing is awaited."""
        deadlines = [scorer.next_deadline_s() for scorer in self._scorers]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def close(self) -> None:
        for scorer in self._scorers:
            scorer.close()
        for judge in self._judges.values():
            judge.close()

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


def _cache(judge: JudgeTerm, run_dir: Path | None) -> ScoreCache | None:
    if run_dir is None or not judge.cached_scores:
        return None
    name = blake2b(judge.name.encode(), digest_size=8).hexdigest()
    return ScoreCache(run_dir / SCORES_FOLDER / f"{name}.bin", judge.cached_scores)


def last_turn(episode: EpisodeRecord) -> str:
    """Return the text of the policy's last turn."""
    turns = (message["content"] for message in reversed(episode.messages) if message["role"] == "assistant")
    return str(next(turns, ""))
