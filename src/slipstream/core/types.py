"""The messages of the loop, frozen msgspec structs with numpy arrays: its data, and the schedule's commands and events.

All that crosses a channel is here, in `service_messages.py` (around the loop), `turn_messages.py` (episodes),
`unfinished_messages.py` (of a checkpoint) or `peer_messages.py` (of processes that do one thing together).

The wire form is msgpack, in which arrays are raw buffers (`core/wire.py`). Legend: T sampled or given tokens of one
completion, Tp prompt tokens, G completions per prompt, P groups per step.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import msgspec
import numpy as np

FinishReason = Literal["stop", "length", "deadline"]
Purpose = Literal["train", "eval"]
SkipCause = Literal["no_signal", "failed", "stale"]
StopCause = Literal["stop_at", "patience", "callback"]
"""The reason of a run that ends before its last step without being interrupted."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of everything that may cross a channel."""


class Prompt(Message):
    """A question: its text, its tokens and the columns a reward needs.

    `prompt_id` is unique in a data split. The `text` of chats is their `messages` rendered by the template. `columns`
    are the data set's other fields (JSON types only), with `answer` where there is one.
    """

    prompt_id: str
    text: str
    tokens: np.ndarray  # int32 [Tp]
    task: str
    answer: str | None = None
    messages: list[dict[str, Any]] | None = None
    columns: dict[str, Any] = {}


class VersionSpan(Message):
    """Tokens `start` up to the next span's start were sampled by policy version `version`."""

    start: int
    version: int


class Segment(Message):
    """A run of completion tokens that were either all sampled or all given (a tool's answer, a user's turn).

    Sampled segments carry one behaviour logprob per token and the versions that sampled them; given ones neither.
    `kept_tokens` (`generator.keep_sets`) are the tokens that each was drawn from, ascending, set behind set, of
    `kept_counts` tokens. `routes` (`generator.routing_replay`) are the experts of all tokens but the last, the prompt's
    first; the type's largest number is "not known". A given segment that `begins` another branch is its whole context.
    """

    tokens: np.ndarray  # int32 [T]
    behaviour_logprobs: np.ndarray | None = None  # float32 [T]
    version_spans: tuple[VersionSpan, ...] = ()
    kept_tokens: np.ndarray | None = None  # int32 [sum of counts]
    kept_counts: np.ndarray | None = None  # int32 [T], each at least 1
    routes: np.ndarray | None = None  # uint8 or int16 [Tp + T - 1, layers, experts per token]
    begins: bool = False

    @property
    def is_sampled(self) -> bool:
        return self.behaviour_logprobs is not None


class EpisodeRecord(Message):
    """The environment's record of an episode that is over.

    `messages` are the chat behind the prompt, as people and rewards read it; the tokens are the completion's. `reward`
    is the environment's own, None without one, and `turn_rewards` its parts by turn (None: nothing was said). `failure`
    is there where the environment failed too often. `branches` are the chats of further branches, from their beginning,
    and `contexts` counts the messages of each before its first turn. A resume brought `num_restored` tokens.
    """

    messages: list[dict[str, Any]] = []
    reward: float | None = None
    turn_rewards: list[float | None] = []
    is_cut: bool = False  # by a limit: the environment had not said that it is done
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    num_restarts: int = 0
    environment_s: float = 0.0  # spent in the environment's answers
    failure: str | None = None
    branches: list[list[dict[str, Any]]] = []
    contexts: list[int] = []
    num_restored: int = 0


class Completion(Message):
    """A completion of a prompt: `sample` of G for group `ordinal`.

    `purpose = "eval"` completions belong to evaluation `eval_id`; their `ordinal` counts its prompts; they are never
    trained or entered in the ledger. With an environment the segments are the turns of an episode and what was said
    between them: the trunk behind `prompt` first, then one further branch after the other, each from a segment that
    `begins` it. What branches share is sampled in one of them. Versions are of sampled tokens, -1 where there are none.
    """

    ordinal: int
    sample: int
    prompt: Prompt
    segments: tuple[Segment, ...]
    text: str
    finish_reason: FinishReason
    replica: int = 0
    purpose: Purpose = "train"
    eval_id: int = -1
    started_s: float = 0.0
    finished_s: float = 0.0
    episode: EpisodeRecord | None = None

    @property
    def tokens(self) -> np.ndarray:
        """int32 [T]: all of them, sampled and given."""
        return np.concatenate([segment.tokens for segment in self.segments])

    @property
    def trunk_tokens(self) -> np.ndarray:
        """int32: those before any further branch, which rewards read."""
        trunk = itertools.takewhile(lambda segment: not segment.begins, self.segments)
        return np.concatenate([np.zeros(0, dtype=np.int32), *(segment.tokens for segment in trunk)])

    @property
    def num_branches(self) -> int:
        return 1 + sum(segment.begins for segment in self.segments)

    @property
    def num_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.segments)

    @property
    def num_sampled(self) -> int:
        return sum(len(s.tokens) for s in self.segments if s.is_sampled)

    @property
    def min_version(self) -> int:
        return min((span.version for s in self.segments for span in s.version_spans), default=-1)

    @property
    def max_version(self) -> int:
        return max((span.version for s in self.segments for span in s.version_spans), default=-1)


class Rollout(Message):
    """A completion with its reward; where scoring failed, `failure` says why and `reward` is the configured one."""

    completion: Completion
    reward: float
    reward_parts: dict[str, float | None] = {}
    failure: str | None = None
    logged: dict[str, float] = {}  # by reward functions: for metrics.jsonl, and, below, for its line of rollouts.jsonl
    extra: dict[str, str | bool | int | float | None] = {}
    scored_s: float = 0.0
    reference_logprobs: np.ndarray | None = None  # float32 [sampled tokens], by `kl.executor`
    teacher_tokens: np.ndarray | None = None  # int32 [sampled tokens, K]: likeliest by `teacher.executor`, ascending
    teacher_logprobs: np.ndarray | None = None  # float32 [sampled tokens, K + 1]: theirs, that of all others

    @property
    def ordinal(self) -> int:
        return self.completion.ordinal

    @property
    def sample(self) -> int:
        return self.completion.sample


class Group(Message):
    """Rollouts of one prompt, sorted by sample: all G, or those that one data-parallel rank was dealt."""

    ordinal: int
    rollouts: tuple[Rollout, ...]


class EpisodeHead(Message):
    """The numbers of an episode that advantages and metrics are made of; all but `turns` are of its `EpisodeRecord`."""

    turns: int
    turn_rewards: tuple[float | None, ...] = ()
    is_cut: bool = False
    tool_calls: int = 0
    tool_errors: int = 0
    restarts: int = 0
    environment_s: float = 0.0
    branches: int = 1


class RolloutHead(Message):
    """The part of a rollout that advantages, selection and metrics need. Its tokens stay on the rank that trains it."""

    ordinal: int
    sample: int
    reward: float
    reward_parts: dict[str, float | None] = {}
    failure: str | None = None
    logged: dict[str, float] = {}
    is_truncated: bool = False
    is_stopped: bool = True  # finish_reason = "stop": there is a step after the last token
    num_prompt: int = 0  # tokens before the completion
    num_tokens: int = 0
    num_sampled: int = 0  # of these, the ones that the policy drew: they can be trained on
    surprisal: float = 0.0  # -log behaviour(completion | prompt), in nats
    min_version: int = 0
    max_version: int = 0
    episode: EpisodeHead | None = None


# Commands of the schedule (`controller/schedule.py`)


class StartGroup(Message):
    """Admit group `ordinal` on `replica`; the controller attaches the prompt and sends `Admit`."""

    ordinal: int
    replica: int


class TrainStep(Message):
    """Train step `step` on exactly these groups. Rank 0 of the trainer passes it on, with their rollouts' `heads`."""

    step: int
    ordinals: tuple[int, ...]
    heads: tuple[RolloutHead, ...] = ()


class Skip(Message):
    """Drop these groups: without learning signal, with failed completions only, or discarded for their age."""

    ordinals: tuple[int, ...]
    cause: SkipCause = "no_signal"


# Events, which the schedule takes


class Swapped(Message):
    """Replica `replica` samples from `version` now; `transfer_s`: staging meanwhile, `pause_s`: decoding stopped."""

    replica: int
    version: int
    transfer_s: float
    pause_s: float
    probe_error: float


class CompletionFinished(Message):
    """A completion left the generator (it may not be scored yet). Its tokens are the sampled ones alone.

    A resume brought `num_restored` of them, or the replica `handed_over_by`, which began it and left (-1: none did).
    """

    ordinal: int
    sample: int
    replica: int
    num_tokens: int
    min_version: int
    max_version: int
    num_restored: int = 0
    handed_over_by: int = -1


class GroupScored(Message):
    """All G rollouts of a group lie in the trainer's buffer. `has_signal` is False when all its rewards are equal."""

    ordinal: int
    has_signal: bool
    mean_reward: float  # as scored, of the rollouts that may be trained on
    num_failed: int  # rollouts
    min_version: int
    max_version: int
    num_poisoned: int = 0  # of the failed ones: their completions are impossible (`core/vetting.py`)
    failure: str | None = None  # the first one's


class StepDone(Message):
    """Step `step` is trained: the policy is now version `step + 1`."""

    step: int
    version: int
    metrics: dict[str, float]


class ReplicaLost(Message):
    """Replica `replica` is gone: its unfinished groups are to be regenerated elsewhere."""

    replica: int


class Stop(Message):
    """End. As an event: learn what happens, start nothing. To an executor: finish the current step, and close.

    With `because` the run is over once the current step is: it has no further one. Else it may be resumed.
    """

    because: StopCause | None = None
