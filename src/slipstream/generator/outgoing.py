"""The end of a replica's work: finished completions to their verifiers, and the news of them to the controller."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.config import RunConfig
from slipstream.core.executor import Context
from slipstream.core.service_messages import Admit, CompletionsFinished, Settled
from slipstream.core.types import Completion, CompletionFinished, Prompt
from slipstream.generator.completions import completion_of, completion_of_episode
from slipstream.generator.episodes import EndedEpisode
from slipstream.generator.requests import Finished
from slipstream.generator.unsettled import Unsettled
from slipstream.models.tokenizer import Tokenizer

Ended = Finished | EndedEpisode

GATHER_S = 0.02
"""While the native engine decodes more, completions leave at most this often, between steps: a frame costs those who
score as much as several. The last one of a group is not held back: from then on the group waits for its scores."""


class Outgoing:
    """Knows the groups that are sampled here, `prompts`: ordinal -> prompt, completions still to come.

    Rank 0 sends, and keeps completions until they are settled; on other ranks `unsettled` is None.
    """

    def __init__(
        self, config: RunConfig, context: Context, *, replica: int, tokenizer: Tokenizer, stop_ids: list[int]
    ) -> None:
        self.prompts: dict[int, tuple[Prompt, int]] = {}
        self.rows: dict[int, Prompt] = {}  # as admitted, until the group is settled
        self.unsettled = Unsettled(context.outputs["completions"]) if context.group.is_leader else None
        self.generated_tokens = 0
        self._config, self._context, self._replica = config, context, replica
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._gather_s = GATHER_S if config.host == "process" else 0.0
        self._sent_s = -GATHER_S
        self._has_whole = False  # a group has ended since
        self.settled_early: set[int] = set()  # ordinals of `prompts` whose group was scored: others had sampled it

    def admit(self, message: Admit) -> None:
        self.prompts[message.ordinal] = (message.prompt, message.num_samples)
        self.rows[message.ordinal] = message.prompt

    def settle(self, message: Settled) -> None:
        self.settled_early.update(ordinal for ordinal in message.ordinals if ordinal in self.prompts)
        for ordinal in message.ordinals:
            self.rows.pop(ordinal, None)
        if self.unsettled is not None:
            self.unsettled.settle(message)

    def is_due(self, *, more_comes: bool) -> bool:
        """Whether there is anything to `send` that need not wait for what is still decoded."""
        if self.unsettled is None or not self.unsettled.num_unsent:
            return False
        is_urgent = self._has_whole or not more_comes
        return is_urgent or self._context.clock.now_s() - self._sent_s >= self._gather_s

    def send(self) -> bool:
        """Send what has not been sent, as far as there is room; whether anything was."""
        self._sent_s, self._has_whole = self._context.clock.now_s(), False
        return self.unsettled is not None and self.unsettled.send()

    def rejoined(self, executor: str) -> None:
        """Another process is `executor` now: who scores gets every completion again that has no verdict."""
        if self.unsettled is not None:
            self.unsettled.rejoined(executor)

    def pass_on(self, ended: Ended, *, num_restored: int = 0, handed_over_by: int = -1) -> CompletionFinished | None:
        """Take a finished completion of training for its verifier; return what the controller is to hear, from rank 0.

        A resume, or the replica `handed_over_by`, brought `num_restored` of its tokens, the first ones.
        """
        ordinal = ended.ordinal
        prompt, remaining = self.prompts.pop(ordinal)
        is_settled = ordinal in self.settled_early
        if remaining > 1:
            self.prompts[ordinal] = (prompt, remaining - 1)
        else:
            self.settled_early.discard(ordinal)
            self._has_whole = True
        if self.unsettled is None:
            return None
        completion = self.completion_of(ended, prompt)
        num_old, num_sampled_here = num_restored, 0
        for segment in completion.segments:
            num_new = max(0, len(segment.tokens) - num_old)
            num_old -= len(segment.tokens) - num_new
            num_sampled_here += num_new if segment.is_sampled else 0
        self.generated_tokens += num_sampled_here
        if not is_settled:
            self.unsettled.add(completion)
        return CompletionFinished(
            ordinal=ordinal,
            sample=completion.sample,
            replica=self._replica,
            num_tokens=completion.num_sampled,
            min_version=completion.min_version,
            max_version=completion.max_version,
            num_restored=completion.num_sampled - num_sampled_here,
            handed_over_by=handed_over_by,
        )

    def pass_on_answer(self, ended: Ended, prompt: Prompt, eval_id: int) -> None:
        """Take the finished answer to held-out prompt `prompt` for its verifier."""
        if self.unsettled is not None:
            self.unsettled.add(self.completion_of(ended, prompt, eval_id))

    def tell(self, events: Sequence[CompletionFinished | None]) -> None:
        """Let the controller hear of what one step has finished."""
        if told := tuple(event for event in events if event is not None):
            self._context.outputs["events"].put(CompletionsFinished(finished=told))

    def completion_of(self, ended: Ended, prompt: Prompt, eval_id: int = -1) -> Completion:
        """Return the completion of what ended, with its text."""
        if isinstance(ended, EndedEpisode):
            now_s = self._context.clock.now_s()
            return completion_of_episode(ended, tokenizer=self._tokenizer, replica=self._replica, finished_s=now_s)
        return completion_of(
            ended,
            prompt,
            tokenizer=self._tokenizer,
            stop_ids=self._stop_ids,
            rewards=self._config.rewards,
            replica=self._replica,
            eval_id=eval_id,
        )
