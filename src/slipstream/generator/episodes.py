"""The episodes that are open on a replica: their tokens so far, and whose turn it is.

    begin ----> the environment resets ----> a turn is decoded ----> the environment answers ----> ... ----> over

The environments' executor decides (it answers, limits and ends); this side has the tokens, as every sampled one must
have its logprob and version, and makes the completion. All of it is lost with the replica. The environments' side knows
the turns too, so that another replica may go on; if that side is lost, its episodes begin again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from slipstream.core.errors import ChannelClosed
from slipstream.core.executor import Sender
from slipstream.core.turn_messages import Observation, TurnSampled, with_branches
from slipstream.core.types import EpisodeRecord, FinishReason, Prompt, Segment, VersionSpan
from slipstream.core.unfinished_messages import PartialEpisode
from slipstream.generator.requests import Finished, Request, segment_of

ENVIRONMENTS = "environments"
Key = tuple[int, int, int]
"""(evaluation or -1, ordinal, sample)"""


@dataclass
class SampledBranch:
    """A context that is sampled here: `live` is the turn that is decoded now, if any."""

    prompt: Prompt
    segments: list[Segment] = field(default_factory=list)
    turn: int = 0  # turns sampled
    live: Request | None = None

    @property
    def num_behind(self) -> int:
        """Tokens behind the prompt."""
        return sum(len(segment.tokens) for segment in self.segments)


@dataclass
class Episode:
    """An episode on this replica: `request` is that of its admission.

    `row` is the prompt as it was admitted; that of a branch ends with what the environment said first. Only agents'
    episodes have more than branch 0.
    """

    request: Request
    row: Prompt
    eval_id: int
    branches: dict[int, SampledBranch] = field(init=False)
    life: int = 0  # of the last observation that replaced what was known
    opening: int = 0  # the last one that was sent: what is still said to another counts for nothing
    finish_reason: FinishReason = "stop"
    started_s: float | None = None  # when the first turn began
    began_before: bool = False  # elsewhere
    is_new: bool = True  # nothing was asked of the engine yet

    def __post_init__(self) -> None:
        self.branches = {0: SampledBranch(self.row)}

    @property
    def key(self) -> Key:
        return self.eval_id, self.request.ordinal, self.request.sample

    @property
    def prompt(self) -> Prompt:
        """That of the first branch."""
        return self.branches[0].prompt

    @property
    def has_begun(self) -> bool:
        """Whether a turn was sampled, here or elsewhere."""
        return self.began_before or any(branch.turn for branch in self.branches.values())

    @property
    def segments(self) -> list[Segment]:
        """Those of the first branch; then of each other one its whole context, and its segments."""
        first, *others = (self.branches[number] for number in sorted(self.branches))
        return with_branches(first.segments, [(one.prompt, one.segments) for one in others if one.turn])

    def next_turn(self, number: int, max_new_tokens: int) -> Request:
        """Return the request for a branch's next turn: the prompt, and all that was sampled and given since."""
        branch = self.branches[number]
        branch.live = replace(
            self.request,
            prompt_tokens=np.concatenate([branch.prompt.tokens, *(segment.tokens for segment in branch.segments)]),
            num_before=branch.num_behind,
            max_new_tokens=max_new_tokens,
            parks=True,
            goes_on=self.has_begun,
            is_again=self.request.is_again and self.is_new,
            branch=number,
        )
        self.is_new = False
        return branch.live


@dataclass(frozen=True)
class EndedEpisode:
    """An episode that is over, with what its completion is made of."""

    episode: Episode
    record: EpisodeRecord

    @property
    def ordinal(self) -> int:
        return self.episode.request.ordinal

    @property
    def sample(self) -> int:
        return self.episode.request.sample

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Those of all turns."""
        return tuple(span for segment in self.episode.segments for span in segment.version_spans)

    @property
    def finish_reason(self) -> FinishReason:
        """'length' also for what the environment's limits have cut."""
        return "length" if self.record.is_cut and self.episode.finish_reason == "stop" else self.episode.finish_reason


def ended_before(request: Request, row: Prompt, partial: PartialEpisode) -> EndedEpisode:
    """Return an episode that was over at the checkpoint from which the run goes on."""
    episode = Episode(request, row, eval_id=-1, finish_reason=partial.finish_reason)
    episode.branches = {0: SampledBranch(partial.prompt or row, list(partial.segments))}
    return EndedEpisode(episode, msgspec.structs.replace(partial.record, num_restored=partial.num_tokens))


class Episodes:
    """Sends turns, takes observations. Consumes nothing itself; produces: `TurnSampled` through `sender`.

    Never blocks: what finds no room, or nobody, goes when there is somebody. Bound: the episodes that were admitted.
    `sender` is None on ranks that only decode along. `release` frees what an engine keeps of an episode. `may_follow`
    says whether turns that another replica sampled may be followed by one of the present version; else the episode
    begins again. `new_opening` numbers openings: no other one has that number, of this process or the one before.
    """

    def __init__(
        self,
        sender: Sender | None,
        *,
        replica: int,
        release: Callable[[Request], None],
        may_follow: Callable[[Collection[int]], bool],
        new_opening: Callable[[], int],
    ) -> None:
        self._sender, self._replica, self._release, self._may_follow = sender, replica, release, may_follow
        self._new_opening = new_opening
        self._open: dict[Key, Episode] = {}
        self._unsent: deque[TurnSampled] = deque()
        self._is_away = False

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_begun(self) -> int:
        """Episodes of training that have sampled a turn and are not over."""
        return sum(1 for one in self._open.values() if one.has_begun and one.eval_id < 0)

    @property
    def num_unsent(self) -> int:
        return len(self._unsent)

    def begin(
        self,
        request: Request,
        prompt: Prompt,
        *,
        eval_id: int = -1,
        may_continue: bool = False,
        partial: PartialEpisode | None = None,
    ) -> None:
        """Open an episode: its environment is asked to reset, or to go on from `partial`."""
        episode = Episode(request, prompt, eval_id)
        self._open[episode.key] = episode
        opening = self._opening(episode, may_continue=may_continue, is_again=request.is_again)
        self._ask(opening if partial is None else msgspec.structs.replace(opening, partial=partial))

    def finished(self, item: Finished, eval_id: int = -1) -> bool:
        """Take a turn that was decoded; whether others of its episode are to be decoded, too.

        One of an episode that has begun again since is void.
        """
        episode = self._open.get((eval_id, item.ordinal, item.sample))
        branch = None if episode is None else episode.branches.get(item.request.branch)
        if episode is None or branch is None or branch.live is None:
            return False
        if branch.live.prompt_tokens is not item.request.prompt_tokens:
            return False
        branch.live = None
        branch.turn += 1
        episode.started_s = item.started_s if episode.started_s is None else episode.started_s
        segment = segment_of(item)
        branch.segments.append(segment)
        self._ask(
            TurnSampled(
                ordinal=item.ordinal,
                sample=item.sample,
                replica=self._replica,
                turn=branch.turn,
                eval_id=eval_id,
                life=episode.life,
                segment=segment,
                finish_reason=item.finish_reason,
                branch=item.request.branch,
            )
        )
        return any(one.live is not None for one in episode.branches.values())

    def observe(self, message: Observation) -> Request | EndedEpisode | None:
        """Return the turn to decode now, or the episode that is over; None for an answer to what is void."""
        key = (message.eval_id, message.ordinal, message.sample)
        episode = self._open.get(key)
        if episode is None or message.opening != episode.opening:
            return None
        is_moved = message.replaces and message.life != episode.life  # else its turns were sampled here
        if is_moved and message.record is None and not self._may_follow(message.versions):
            self._begin_again(episode)
            return None
        if not message.replaces and message.life != episode.life:
            return None
        if is_whole := message.replaces or message.is_whole:
            self._replace(episode, message)
        branch = episode.branches.get(message.branch)
        if branch is None or (not is_whole and message.turn != branch.turn):
            return None
        if len(message.tokens):
            branch.segments.append(Segment(tokens=message.tokens))
        if message.record is not None:
            del self._open[key]
            episode.finish_reason = message.finish_reason
            self._release_all(episode)
            return EndedEpisode(episode, message.record)
        return episode.next_turn(message.branch, message.max_new_tokens)

    def _replace(self, episode: Episode, message: Observation) -> None:
        """Forget the branch for what is told of it; in another life, and at the end, the whole episode."""
        if message.life != episode.life or message.record is not None:
            self._release_all(episode)
            episode.life, episode.branches = message.life, {0: SampledBranch(episode.row)}
            episode.began_before = False
        prompt = episode.row if message.prompt is None else message.prompt
        turn = sum(segment.is_sampled for segment in message.segments)
        episode.began_before |= len(message.versions) > 0
        episode.branches[message.branch] = SampledBranch(prompt, list(message.segments), turn)

    def _release_all(self, episode: Episode) -> None:
        """Free what the engine keeps of an episode's branches."""
        for request in [replace(episode.request, branch=number) for number in episode.branches]:
            self._release(request)

    def begin_again(self) -> None:
        """The environments' process restarted, without its episodes: each begins again."""
        self._is_away = False
        self._unsent.clear()
        for episode in self._open.values():
            self._begin_again(episode)

    def send(self) -> bool:
        """Send what has not been sent, in order; whether anything was."""
        has_sent = False
        while self._unsent and not self._is_away and self._sender is not None:
            if not self._sender.has_room_for(self._unsent[0]):
                break
            try:
                self._sender.put(self._unsent[0])
            except ChannelClosed:  # a successor may come: it is told everything again
                self._is_away = True
                break
            self._unsent.popleft()
            has_sent = True
        return has_sent

    def _begin_again(self, episode: Episode) -> None:
        self._release_all(episode)
        episode.branches, episode.started_s = {0: SampledBranch(episode.row)}, None
        episode.began_before = False
        self._ask(self._opening(episode, may_continue=False, is_again=True))

    def _ask(self, message: TurnSampled) -> None:
        if self._sender is not None:  # else rank 0 asks
            self._unsent.append(message)
            self.send()

    def _opening(self, episode: Episode, *, may_continue: bool, is_again: bool) -> TurnSampled:
        request, episode.opening = episode.request, self._new_opening()
        return TurnSampled(
            ordinal=request.ordinal,
            sample=request.sample,
            replica=self._replica,
            turn=0,
            eval_id=episode.eval_id,
            prompt=episode.row,
            may_continue=may_continue,
            is_again=is_again,
            opening=episode.opening,
        )
