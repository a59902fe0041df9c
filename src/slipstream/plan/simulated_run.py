"""Input and output of the simulator: the work to sample, the seconds of its pieces, and the course of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from slipstream.observe.states import idle_share
from slipstream.plan.event_loop import BACKGROUND_SHARE

FOR_ENVIRONMENTS = "generator for environments"
"""The part of the generators' idle share in which they wait for environments, in `RunOutcome.idle`."""


class SimulatedTurn(NamedTuple):
    """A turn of an episode: tokens that are sampled, and those that its environment gives, `environment_s` later."""

    sampled: int
    given: int = 0
    environment_s: float = 0.0


class GroupWork(NamedTuple):
    """The work of one prompt: its tokens, the sampled ones of each completion, and whether their rewards differ.

    `turns`: of each completion, where it is an episode with an environment.
    """

    prompt_tokens: int
    lengths: tuple[int, ...]
    has_signal: bool = True
    turns: tuple[tuple[SimulatedTurn, ...], ...] = ()

    @property
    def given_tokens(self) -> int:
        """Tokens behind the prompt that were not sampled."""
        return sum(turn.given for episode in self.turns for turn in episode)


class SimulatedWorkload(Protocol):
    """The groups that a run samples."""

    def group(self, ordinal: int, step: int) -> GroupWork:
        """Return group `ordinal`, which step `step` is likely to train. Called once for each."""
        ...

    def held_out(self, version: int) -> Sequence[GroupWork]:
        """Return the prompts of an evaluation of `version`, with one completion each."""
        ...


@dataclass(frozen=True, kw_only=True)
class MadeUp:
    """A workload by ordinal alone, so that every policy gets the same completions. Nothing is evaluated."""

    lengths: Callable[[int], tuple[int, ...]]
    has_signal: Callable[[int], bool] = lambda _: True
    prompt_tokens: int = 1

    def group(self, ordinal: int, step: int) -> GroupWork:  # noqa: ARG002
        return GroupWork(self.prompt_tokens, self.lengths(ordinal), self.has_signal(ordinal))

    def held_out(self, version: int) -> Sequence[GroupWork]:  # noqa: ARG002
        return ()


class Batch(NamedTuple):
    """The tokens that a training step reads."""

    groups: int
    completions: int
    prompt_tokens: int  # each prompt counted once
    completion_tokens: int
    given_tokens: int = 0  # of these, by environments


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds that everything takes alone on its device, with the threads it has.

    `decode(replica, rows, context)`: one decode step of `rows` sequences with `context` tokens together; between two
    events it is taken to be linear in `context`. `prefill(replica, tokens, is_alone)`: that many prompt tokens in a
    pass of their own, or what they add to one that decodes. `train(batch)`: a step, by state. `jitter`: factors of mean
    1, of which one is drawn for every piece of work of a kind ('decode', 'train', 'score').
    """

    decode: Callable[[int, int, float], float]
    train: Callable[[Batch], Mapping[str, float]]
    prefill: Callable[[int, int, bool], float] = lambda *_: 0.0
    turn_s: float = 0.0  # generator, for each turn of its loop: messages, bookkeeping
    send_s: float = 0.0  # generator, for each finished completion
    stage_s: float = 0.0  # generator, in the background: copy, verify and prepare a version
    swap_s: float = 0.0  # generator: decoding stands still
    publish_s: float = 0.0  # trainer: staging copy and probe
    receive_s: float = 0.0  # trainer, for each rollout that arrives
    wake_s: float = 0.0  # trainer, besides: whenever something arrives while it waits
    record_s: float = 0.0  # trainer, for each rollout that was trained or skipped
    checkpoint_s: float = 0.0  # trainer
    score_s: float = 0.0  # of one completion, by one worker
    decide_s: float = 0.0  # controller, for each event
    to_controller_s: float = 0.0
    to_generator_s: float = 0.0  # from the controller, and a version from the trainer
    to_trainer_s: float = 0.0  # from the controller
    to_rewards_s: float = 0.0
    from_rewards_s: float = 0.0
    jitter: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SimulatedSetup:
    """A run's layout, as far as `ScheduleConfig` does not have it.

    `cores`: of the machine that trainer and generators share, each with its threads; `beside` is how fast 'train',
    'decode' and 'stage' go with all cores busy, of their speed alone, `background` what staging gets of a core then
    (`event_loop.Cores`). Without `cores` every executor has devices of its own. `workers` = 0: any number of
    completions are scored at once.
    """

    replicas: int = 1
    slots: int = 64
    row_multiple: int = 1
    weight_update: Literal["in_flight", "between_batches"] = "in_flight"
    weight_update_at: Literal["turn", "episode"] = "episode"
    resident_versions: int = 1  # that a replica holds side by side: more with adapters, between batches
    segment_tokens: int | None = None
    kv_on_update: Literal["keep", "recompute", "recompute_if_older_than"] = "keep"
    max_kv_age: int = 0
    prefill_tokens: int = 512
    prefill_chunk: int = 512
    workers: int = 0
    evaluates_first: int = 0  # evaluations at version 0
    evaluate_every: int = 0
    evaluation_slots: int = 64
    checkpoint_every: int = 0
    cores: int | None = None
    trainer_threads: int = 1
    generator_threads: int = 1
    beside: Mapping[str, float] = field(default_factory=dict)
    background: float = BACKGROUND_SHARE


class Timed(NamedTuple):
    """A training step: when it began and was done, in seconds from the first admission."""

    ordinals: tuple[int, ...]
    start_s: float
    done_s: float
    batch: Batch


@dataclass(frozen=True)
class RunOutcome:
    """The result of a run, recorded or simulated: seconds per step, rates, idle share by side, staleness in steps."""

    steps: int
    step_s: float
    trained_tokens_per_s: float
    generated_tokens_per_s: float
    idle: dict[str, float]
    staleness_mean: float
    staleness_max: int
    staleness: dict[int, int]  # steps -> tokens

    @classmethod
    def of(
        cls, steps: int, wall_s: float, lags: Counter[int], generated_tokens: int, idle: dict[str, float]
    ) -> RunOutcome:
        """Return the outcome of steps that took `wall_s` together and trained tokens with these `lags`."""
        return cls(
            steps=steps,
            step_s=wall_s / max(steps, 1),
            trained_tokens_per_s=lags.total() / max(wall_s, 1e-9),
            generated_tokens_per_s=generated_tokens / max(wall_s, 1e-9),
            idle=idle,
            staleness_mean=sum(lag * tokens for lag, tokens in lags.items()) / max(lags.total(), 1),
            staleness_max=max(lags, default=0),
            staleness=dict(sorted(lags.items())),
        )


@dataclass
class Simulated:
    """The course of a run from the first admission to the end of the last step, `wall_s` later.

    `lags` counts trained tokens by staleness in steps; `accounting` has the seconds of each process by state, which sum
    to `wall_s`; `generated_tokens` include what was not trained.
    """

    timed: list[Timed] = field(default_factory=list)
    lags: Counter[int] = field(default_factory=Counter)
    dropped: dict[int, str] = field(default_factory=dict)  # ordinal -> cause
    started: Counter[int] = field(default_factory=Counter)  # replica -> groups
    accounting: dict[str, dict[str, float]] = field(default_factory=dict)
    generated_tokens: int = 0
    stale_tokens: int = 0  # of groups that were discarded for their age
    left_tokens: int = 0  # generated by the end, of groups that no step trained
    publishes_skipped: int = 0
    wall_s: float = 0.0
    slot_busy_s: float = 0.0
    slot_s: float = 0.0  # slots times wall_s
    num_events: int = 0  # that the schedule took
    num_jumps: int = 0  # of the clock

    @property
    def outcome(self) -> RunOutcome:
        """The figures of the course; the idle share of generators is that of the mean replica."""
        idle = {name: idle_share(states) for name, states in self.accounting.items()}
        replicas = [share for name, share in idle.items() if name.startswith("generator")]
        sides = {"trainer": idle["trainer"], "generator": sum(replicas) / len(replicas)}
        sides |= for_environments(self.accounting, self.wall_s)
        return RunOutcome.of(len(self.timed), self.wall_s, self.lags, self.generated_tokens, sides)


def for_environments(accounting: Mapping[str, Mapping[str, float]], wall_s: float) -> dict[str, float]:
    """Return the share of `wall_s` in which the mean replica waits for environments; nothing where none does.

    `accounting` has the seconds of each process by state.
    """
    replicas = [states for name, states in accounting.items() if name.startswith("generator")]
    if not any("wait_environment" in states for states in replicas):
        return {}
    waited_s = sum(states.get("wait_environment", 0.0) for states in replicas)
    return {FOR_ENVIRONMENTS: waited_s / len(replicas) / max(wall_s, 1e-9)}
