"""Finished completions until their verdict, so that none is sampled again when the rewards process is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from slipstream.core.errors import ChannelClosed
from slipstream.core.executor import Sender
from slipstream.core.service_messages import Settled
from slipstream.core.types import Completion

Key = tuple[int, int]
"""(evaluation or NO_EVALUATION, ordinal)"""
NO_EVALUATION = -1


class Unsettled:
    """Sends completions, when asked to and as far as there is room, and keeps each until it is settled.

    Bound: what a replica was admitted and the controller has not heard to be scored, at most `num_slots` and a group in
    reserve being decoded, and (k + 1) P + W groups of G waiting for their step; and the evaluations it was asked for.
    Consumes `Settled`. Never blocks: what finds no room, or nobody, goes when there is somebody.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._kept: dict[Key, list[Completion]] = {}
        self._unsent: deque[Completion] = deque()
        self._is_away = False

    def __len__(self) -> int:
        """Completions."""
        return sum(map(len, self._kept.values()))

    @property
    def num_unsent(self) -> int:
        """The number of completions not sent yet."""
        return len(self._unsent)

    def add(self, completion: Completion) -> None:
        """Keep it; the next `send` sends it."""
        self._kept.setdefault(_key(completion), []).append(completion)
        self._unsent.append(completion)

    def send(self) -> bool:
        """Send what has not been sent, in order; whether anything was."""
        has_sent = False
        while self._unsent and not self._is_away:
            completion = self._unsent[0]
            if _key(completion) in self._kept:
                if not self._sender.has_room_for(completion):
                    break
                try:
                    self._sender.put(completion)
                except ChannelClosed:  # who scores is gone: what happens now is the controller's to decide
                    self._is_away = True
                    break
                has_sent = True
            self._unsent.popleft()
        return has_sent

    def of_groups(self, ordinals: Collection[int]) -> list[Completion]:
        """Return the completions that are kept of these groups."""
        return [
            completion
            for (evaluation, ordinal), kept in self._kept.items()
            if evaluation == NO_EVALUATION and ordinal in ordinals
            for completion in kept
        ]

    def settle(self, settled: Settled) -> None:
        """Forget what has its verdict."""
        for ordinal in settled.ordinals:
            self._kept.pop((NO_EVALUATION, ordinal), None)
        if settled.eval_ids:
            self._kept = {key: kept for key, kept in self._kept.items() if key[0] not in settled.eval_ids}

    def rejoined(self, executor: str) -> None:
        """Send everything again where `executor` is who gets it: the one before it may have had some of it."""
        if executor in self._sender.targets:
            self._is_away = False
            self._unsent = deque(completion for group in self._kept.values() for completion in group)
            self.send()


def _key(completion: Completion) -> Key:
    return completion.eval_id, completion.ordinal
