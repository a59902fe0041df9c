"""The messages around the loop: ready and warm start, evaluation, checkpoint and export, and what is only told.

Frozen structs, as those of `core/types.py`. The schedule neither takes nor gives any of them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from slipstream.core.types import CompletionFinished, EpisodeRecord, Message, Prompt, Rollout
from slipstream.core.unfinished_messages import Unfinished

WaitReason = Literal["generation", "rewards", "straggler", "nothing", "trainer", "prompt"]


# Generator -> controller


class CompletionsFinished(Message):
    """The completions that one decode step has finished; the controller takes them as that many events."""

    finished: tuple[CompletionFinished, ...]


class Evaluating(Message):
    """The generator has taken an `Evaluate`: its answers will be those of `version`."""

    eval_id: int
    version: int


# Controller -> generator


class Admit(Message):
    """Start group `ordinal` on `replica`: `num_samples` completions of `prompt`, some perhaps from `partials` on.

    `is_again`: it was admitted before, and lost.
    """

    ordinal: int
    replica: int
    prompt: Prompt
    num_samples: int
    partials: tuple[Unfinished, ...] = ()
    is_again: bool = False


class Evaluate(Message):
    """Answer held-out prompts in reserved slots, pinned to the version held on arrival; temperature 0 is greedy."""

    eval_id: int
    prompts: tuple[Prompt, ...]
    temperature: float


class Settled(Message):
    """These groups are scored and these evaluations complete: whatever is kept of them is no longer needed."""

    ordinals: tuple[int, ...] = ()
    eval_ids: tuple[int, ...] = ()


# Controller -> trainer


class WarmStart(Message):
    """Demonstrations for the supervised warm start: prompt and completion tokens, one pair after the other."""

    tokens: np.ndarray  # int32 [sum of all lengths]
    prompt_lengths: np.ndarray  # int32 [N]
    completion_lengths: np.ndarray  # int32 [N]


class Export(Message):
    """Write the policy as a Hugging Face checkpoint under `path`; answer with `Exported`."""

    path: str


class Publish(Message):
    """Offer the present version to the generators, where that was not done: the last one of a run that ends early."""


# Controller -> several executors


class Waiting(Message):
    """The reason for which an executor without work waits; it labels the executor's idle time.

    A trainer waits for generation, rewards, a straggler or nothing. A generator waits for the trainer while the bound
    admits no group on the version that it holds, for a prompt while it would, and for nothing once all steps are done.
    """

    reason: WaitReason


class Checkpoint(Message):
    """Save policy, optimizer and random state of `step` under `path`; the trainer answers with `CheckpointSaved`.

    `schedule` is the schedule's state at the same instant (JSON types), `num_events` what it had been told by then, in
    lines of `events.jsonl`, and `run` the tally's counters; all are saved with them: one consistent cut, called
    `cut`. Generators and environments save what they have of the groups that the cut owes (`core/saved.py`), under the
    same name; of the schedule they are sent these groups alone, `readmit`, a replica those that it holds.
    """

    step: int
    path: str
    schedule: dict[str, Any]
    num_events: int
    cut: str = ""
    run: dict[str, float] = msgspec.field(default_factory=dict)


# Executor -> controller


class Ready(Message):
    """The executor is initialised. The trainer adds the numbers of parameters, of the model and of its adapters (0:
    there are none), and the version it holds."""

    executor: str
    num_params: int = 0
    num_adapter_params: int = 0
    version: int = 0


class Published(Message):
    """The trainer offered `version` to the generators (`skipped` when every slot was still being read).

    `is_same`: it has the bytes of the version before, or gives the same logprobs to the bit, although there were
    gradients in between.
    """

    version: int
    payload_bytes: int
    staging_s: float
    skipped: bool = False
    is_same: bool = False


NUM_SHOWN = 6
"""Held-out prompts, the first ones of an evaluation, whose answers a run shows."""


class EvalScored(Message):
    """One evaluation rollout, without its tokens: the reward as it would be trained on, and its parts.

    `episode` is there with an environment, for the first `NUM_SHOWN` prompts.
    """

    eval_id: int
    ordinal: int
    reward: float
    completion_text: str
    prompt_text: str
    answer: str | None
    num_tokens: int
    version: int = -1
    reward_parts: dict[str, float | None] = msgspec.field(default_factory=dict)
    failure: str | None = None
    episode: EpisodeRecord | None = None

    @classmethod
    def of(cls, rollout: Rollout) -> EvalScored:
        completion = rollout.completion
        return cls(
            eval_id=completion.eval_id,
            ordinal=completion.ordinal,
            reward=rollout.reward,
            completion_text=completion.text,
            prompt_text=completion.prompt.text,
            answer=completion.prompt.answer,
            num_tokens=completion.num_tokens,
            version=completion.min_version,
            reward_parts=rollout.reward_parts,
            failure=rollout.failure,
            episode=completion.episode if completion.ordinal < NUM_SHOWN else None,
        )


class CheckpointSaved(Message):
    """The checkpoint of `step` is whole, on disk, at `path`."""

    step: int
    path: str


class Exported(Message):
    """The model lies at `path`."""

    path: str


class Progress(Message):
    """Free-form progress of a phase outside the RL loop (warm start), for the display."""

    executor: str
    phase: str
    done: int
    total: int
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


JUDGE_PREFIX = "judge/"
"""Begins the names of `Counters` that are of a judge: its name and the count follow, 'judge/NAME/requests'."""


def counters_every_s(num_replicas: int) -> float:
    """Return the seconds between two `Counters` of a replica: 1, or so many that 64 of them come in a second."""
    return max(1.0, num_replicas / 64)


class Counters(Message):
    """Cumulative counters of one executor, sent about once a second and at the end."""

    executor: str
    values: dict[str, float]


class Noted(Message):
    """A line for people to see now, of at most a thousand characters."""

    executor: str
    text: str
