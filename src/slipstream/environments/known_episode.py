"""An open episode, as the environments' node knows it, and the hard limits of all episodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from slipstream.core.config import RunConfig
from slipstream.core.saved import prompt_crc32
from slipstream.core.turn_messages import Observation, with_branches
from slipstream.core.types import EpisodeRecord, FinishReason, Prompt, Segment
from slipstream.core.unfinished_messages import PartialEpisode
from slipstream.environments.chat import Chat
from slipstream.environments.protocol import ChatMessage, EnvironmentFault, episode_reward
from slipstream.environments.transcript import Branch, no_tokens

Key = tuple[int, int, int]
"""(evaluation or -1, ordinal, sample)"""
Phase = Literal["resetting", "restoring", "sampling", "stepping", "ending", "talking"]
"""Whom an episode waits for: its environment's reset or restore, the policy, the environment's answer, its last word.
An agent's is talking: it may ask at any time, and ends by itself."""
MAX_FAILURE_CHARS = 500


@dataclass(frozen=True)
class EpisodeLimits:
    """The hard ends of an episode. Tokens are those behind the prompt; `max_len` counts the prompt, too."""

    max_turns: int
    max_turn_tokens: int
    max_episode_tokens: int
    max_len: int
    episode_limit_s: float
    max_restarts: int
    num_ids: int = 1 << 31  # ids that there are

    @classmethod
    def of(cls, config: RunConfig, max_len: int, num_ids: int) -> EpisodeLimits:
        environment = config.environment
        return cls(
            max_turns=environment.max_turns,
            max_turn_tokens=config.generator.max_new_tokens,
            max_episode_tokens=config.longest_completion,
            max_len=max_len,
            episode_limit_s=environment.episode_limit_s,
            max_restarts=environment.max_restarts,
            num_ids=num_ids,
        )

    def room(self, num_context: int, num_behind: int) -> int:
        """Return how many tokens the next turn may have; less than 1: none.

        `num_context` are those that it reads, `num_behind` those of the whole episode behind its prompt.
        """
        return min(self.max_turn_tokens, self.max_episode_tokens - num_behind, self.max_len - num_context)


@dataclass
class KnownEpisode:
    """An episode as far as it is known here; `row` is the prompt as it was admitted.

    `messages` are the chat behind the prompt of an environment's episode. An agent's are those of its branches. `state`
    is the environment's at its last answer, where it can be restored. A resume brought `num_restored` of the tokens.
    """

    key: Key
    row: Prompt
    replica: int
    opening: int
    started_s: float
    life: int
    chat: Chat
    branches: list[Branch] = field(init=False)
    phase: Phase = "resetting"
    messages: list[ChatMessage] = field(default_factory=list)
    turn_rewards: list[float | None] = field(default_factory=list)
    is_cut: bool = False
    num_restarts: int = 0
    charges: int = 0
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    environment_s: float = 0.0
    state: str | None = None
    num_restored: int = 0
    finish_reason: FinishReason = "stop"  # of the last turn; "length": a limit of the run's ended it

    def __post_init__(self) -> None:
        self.branches = [Branch(0, self.row, self.chat)]

    @property
    def trunk(self) -> Branch:
        """The first branch; an environment's episode has no other."""
        return self.branches[0]

    @property
    def turn(self) -> int:
        """Turns that were sampled, in all branches."""
        return sum(branch.turn for branch in self.branches)

    @property
    def versions(self) -> tuple[int, ...]:
        """Those that have sampled its turns."""
        segments = [segment for branch in self.branches for segment in branch.segments]
        return tuple(sorted({span.version for segment in segments for span in segment.version_spans}))

    @property
    def num_begun(self) -> int:
        """Turns that were sampled, and those that are being sampled."""
        return self.turn + sum(branch.is_sampling for branch in self.branches)

    @property
    def num_behind(self) -> int:
        """Tokens behind the prompt, the contexts of further branches among them, and those that may be sampled now."""
        return (
            self.trunk.num_behind
            + sum(branch.num_tokens for branch in self.branches[1:])
            + sum(branch.num_asked for branch in self.branches if branch.is_sampling)
        )

    @property
    def has_no_answer(self) -> bool:
        """Whether the environment has not answered the last turn."""
        return len(self.turn_rewards) < self.turn

    def partial(self) -> PartialEpisode | None:
        """Return the episode as a checkpoint holds it; None where it cannot be gone on with, or nothing was sampled."""
        if self.state is None or not self.turn or self.phase not in ("sampling", "stepping", "restoring"):
            return None
        trunk, (_, ordinal, sample) = self.trunk, self.key
        return PartialEpisode(
            ordinal=ordinal,
            sample=sample,
            prompt_crc32=prompt_crc32(self.row.tokens),
            segments=(*trunk.segments, *([Segment(tokens=trunk.given)] if len(trunk.given) else [])),
            record=EpisodeRecord(
                messages=list(self.messages),
                turn_rewards=list(self.turn_rewards),
                num_tool_calls=self.num_tool_calls,
                num_tool_errors=self.num_tool_errors,
                num_restarts=self.num_restarts,
                environment_s=self.environment_s,
            ),
            prompt=None if trunk.prompt is self.row else trunk.prompt,
            state=self.state,
            charges=self.charges,
            finish_reason=self.finish_reason,
        )

    def go_on_from(self, partial: PartialEpisode) -> bool:
        """Take what a checkpoint held; False, and nothing is taken, where it does not fit together.

        `episode_limit_s` begins anew: its clock may have been another machine's.
        """
        record, segments = partial.record, list(partial.segments)
        given = segments.pop().tokens if segments and not segments[-1].is_sampled else no_tokens()
        num_turns = sum(segment.is_sampled for segment in segments)
        num_unanswered = num_turns - len(record.turn_rewards)
        is_said = bool(record.messages) and (not num_unanswered or record.messages[-1].get("role") == "assistant")
        if not num_turns or num_unanswered not in (0, 1) or not is_said or (num_unanswered and len(given)):
            return False
        self.phase, self.state, self.charges = "restoring", partial.state, partial.charges
        self.trunk.prompt, self.trunk.segments, self.trunk.given = partial.prompt or self.row, segments, given
        self.messages, self.turn_rewards = list(record.messages), list(record.turn_rewards)
        self.num_tool_calls, self.num_tool_errors = record.num_tool_calls, record.num_tool_errors
        self.num_restarts, self.environment_s = record.num_restarts, record.environment_s
        self.num_restored, self.finish_reason = partial.num_tokens, partial.finish_reason
        return True

    def restart(self, life: int, now_s: float) -> None:
        """Forget all but whose it is, and how often that happened."""
        self.life, self.started_s = life, now_s
        self.phase, self.is_cut = "resetting", False
        self.branches = [Branch(0, self.row, self.chat)]
        self.messages, self.turn_rewards = [], []
        self.num_tool_calls = self.num_tool_errors = 0
        self.state, self.num_restored, self.finish_reason = None, 0, "stop"

    def moved_to(self, replica: int, opening: int, life: int) -> None:
        """Another replica samples it from here on, and knows nothing of it."""
        self.replica, self.opening, self.life = replica, opening, life
        for branch in self.branches:
            branch.is_moved = True

    def observation(self, branch: Branch, *, max_new_tokens: int) -> Observation:
        """Return what the replica is to hear: the tokens since the branch's last turn, or the whole branch."""
        is_moved, branch.is_moved = branch.is_moved, False
        eval_id, ordinal, sample = self.key
        return Observation(
            ordinal=ordinal,
            sample=sample,
            replica=self.replica,
            turn=branch.turn,
            eval_id=eval_id,
            life=self.life,
            tokens=branch.given,
            max_new_tokens=max_new_tokens,
            replaces=is_moved,
            prompt=branch.prompt if is_moved and branch.prompt is not self.row else None,
            segments=tuple(branch.segments) if is_moved else (),
            branch=branch.number,
            opening=self.opening,
            versions=self.versions if is_moved else (),
            finish_reason=self.finish_reason,
        )

    def last_observation(self, record: EpisodeRecord) -> Observation:
        """Return the episode's end: all of it, where the replica may know less of it, or more.

        It knows more where a turn was sampled that nobody has heard of any more.
        """
        first, *others = self.branches
        for branch in self.branches:
            branch.given = no_tokens()
        first.is_moved = any(branch.is_moved for branch in self.branches)
        is_whole = first.is_moved or any(branch.is_sampling for branch in self.branches)
        forks = [(branch.prompt, branch.segments) for branch in others if branch.turn]
        told = self.observation(first, max_new_tokens=0)
        prompt = None if first.prompt is self.row else first.prompt
        segments = tuple(with_branches(first.segments, forks)) if is_whole else ()
        return msgspec.structs.replace(told, record=record, segments=segments, prompt=prompt, is_whole=is_whole)

    def record(self, final_reward: float | None = None, failure: str | None = None) -> EpisodeRecord:
        """Return the episode as it ends: failed, too, where its rewards have no finite sum."""
        reward = None
        try:
            reward = None if failure is not None else episode_reward(self.turn_rewards, final_reward)
        except EnvironmentFault as fault:
            failure = f"environment: {fault}"
        first, *others = self.branches
        num_prompt = len(first.prompt.messages or ())
        forks = [branch for branch in others if branch.turn]
        return EpisodeRecord(
            messages=self.messages or first.history[num_prompt:],
            reward=reward,
            turn_rewards=self.turn_rewards,
            is_cut=self.is_cut,
            num_tool_calls=self.num_tool_calls,
            num_tool_errors=self.num_tool_errors,
            num_restarts=self.num_restarts,
            environment_s=self.environment_s,
            failure=None if failure is None else failure[:MAX_FAILURE_CHARS],
            branches=[branch.history for branch in forks],
            contexts=[branch.ends[0] - 1 for branch in forks],
            num_restored=self.num_restored,
        )
