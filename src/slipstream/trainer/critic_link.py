"""The trainer's end of a critic with an executor of its own: what it is sent of a step, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import numpy as np

from slipstream.core import wire
from slipstream.core.channel import wait
from slipstream.core.config import RunConfig
from slipstream.core.errors import ChannelTimeout, CheckpointError
from slipstream.core.executor import Context
from slipstream.core.packed import PackedMicrobatch, TrainSequence
from slipstream.core.peer_messages import (
    CriticCheckpoint,
    CriticSaved,
    CriticSequence,
    CriticSequences,
    CriticStart,
    CriticUpdate,
    CriticUpdated,
    TargetNumbers,
    ValuesRead,
    ValuesWanted,
)
from slipstream.core.ports import Inbox, Outbox
from slipstream.core.rank_group import RankGroup
from slipstream.core.types import Message, Stop
from slipstream.trainer.measure import Columns

ASKED, ANSWERED = "asked", "answered"
"""The trainer's ports to the critic and from it, and the critic's own two."""
PARTS_FOLDER = ".critic"
"""Beside the checkpoints: where the critic writes its part of the one that is being saved."""


class CriticLink:
    """Ask the critic for values, send it its updates, and wait for what it says of them.

    Rank 0 of the trainer alone speaks with it; what the data-parallel ranks send goes by rank 0, what it answers goes
    to all ranks, which call every method together. The critic carries messages out in the order in which they come:
    values of step n + 1 are read behind the last update of step n. Each wait for an answer ends after `deadline_s` with
    a ChannelTimeout that says what is missing.
    """

    def __init__(self, context: Context, config: RunConfig, *, data_ranks: RankGroup, peers: RankGroup) -> None:
        self._context, self._deadline_s = context, config.deadline_s
        self._ranks, self._data_ranks, self._peers = context.group, data_ranks, peers
        self._step = 0
        self._saved: Future[None] | None = None

    def start(self, path: Path) -> None:
        """Let the critic start from the policy in folder `path`."""
        if self._ranks.is_leader:
            self._put(CriticStart(path=str(path)))

    def ask_values(self, sequences: Sequence[TrainSequence], step: int) -> None:
        """Ask for the values of this rank's `sequences`, which `step` trains on."""
        self._step = step
        told = tuple(sent_sequence(one) for one in sequences)
        parts = self._of_data_ranks(CriticSequences(sequences=told))
        everything = [one for part in parts if isinstance(part, CriticSequences) for one in part.sequences]
        if self._ranks.is_leader:
            with self._context.together():
                for one in everything:  # one by one: each fits a message, together they need not
                    self._put(one)
                self._put(ValuesWanted(step=step, num_sequences=len(everything)))

    def values(self, sequences: Sequence[TrainSequence]) -> Columns:
        """Return the values that were asked for, of this rank's `sequences`: float32 [num_targets] each."""
        columns: Columns = {}
        with self._context.spans.span("wait_critic", step=self._step):
            while isinstance(message := self._next(f"values of step {self._step}"), TargetNumbers):
                columns |= by_key(message)
        assert isinstance(message, ValuesRead)
        assert message.step == self._step, "answers come in order"
        return {one.key: columns.get(one.key, np.zeros(0, np.float32)) for one in sequences}  # some have no target

    def train(self, index: int, microbatches: Sequence[PackedMicrobatch]) -> None:
        """Let the critic make update `index` of the step, on the returns of this rank's `microbatches`."""
        parts = self._of_data_ranks(returns_of(microbatches))
        if self._ranks.is_leader:
            with self._context.together():
                for part in parts:
                    self._put(part)
                self._put(CriticUpdate(step=self._step, index=index))

    def updated(self, index: int) -> CriticUpdated:
        """Return what the critic says of update `index`, once it has made it."""
        with self._context.spans.span("wait_critic", step=self._step):
            message = self._next(f"update {index} of step {self._step}")
        assert isinstance(message, CriticUpdated)
        assert (message.step, message.index) == (self._step, index), "answers come in order"
        return message

    # Checkpoints

    def save(self, path: Path, step: int) -> None:
        """Let the critic write its part of checkpoint `path`; `part` is where it lies then."""
        if self._ranks.is_leader:
            self._saved = Future()
            self._put(CriticCheckpoint(step=step, path=str(part_path(path))))

    def hear_of_part(self, *, wait: bool) -> None:
        """Hear whether the critic has written its part, if it was asked to: at once, or `wait` until it has."""
        if self._is_saving:
            inbox = self._context.inputs[ANSWERED]
            message = self._receive("its part of a checkpoint") if wait else inbox.get_nowait()
            if message is not None:
                self._take_saved(message)

    def part(self, path: Path, timeout_s: float) -> Path:
        """Return the folder of the critic's part of `path`, once it is whole; the thread that saves may wait here."""
        assert self._saved is not None, "it was asked to save"
        try:
            self._saved.result(timeout_s)
        except FutureTimeout as error:
            what = f"checkpoint {path} lacks the critic's part"
            raise CheckpointError(what, got=f"not written after {timeout_s:g} s") from error
        return part_path(path)

    def stop(self) -> None:
        """Tell the critic that nothing will be asked any more."""
        if self._ranks.is_leader:
            self._put(Stop())

    # Messages

    def _of_data_ranks(self, message: Message) -> list[Message]:
        """Return the `message` of each data-parallel rank, by rank; nothing on ranks that train on another's."""
        if not self._peers.is_leader:
            return []
        if self._data_ranks.world == 1:
            return [message]
        return [wire.decode(part, (type(message),)) for part in self._data_ranks.gather(wire.encode(message))]

    def _put(self, message: Message) -> None:
        self._context.outputs[ASKED].put(message)

    def _next(self, what: str) -> Message:
        """Return the critic's next answer, `what` is waited for, on all ranks."""
        message = None
        if self._ranks.is_leader:
            message = self._receive(what)
            if isinstance(message, CriticSaved):
                self._take_saved(message)
                message = self._receive(what)
        if self._ranks.world > 1:
            payload = self._ranks.broadcast(b"" if message is None else wire.encode(message))
            message = wire.decode(payload, (TargetNumbers, ValuesRead, CriticUpdated))
        assert message is not None
        return message

    @property
    def _is_saving(self) -> bool:
        return self._saved is not None and not self._saved.done()

    def _take_saved(self, message: Message) -> None:
        assert isinstance(message, CriticSaved), "between two steps it is asked for nothing else"
        assert self._saved is not None, "it was asked to save"
        self._saved.set_result(None)

    def _receive(self, what: str) -> Message:
        inbox, now_s = self._context.inputs[ANSWERED], self._context.clock.now_s
        outboxes = [one for one in self._context.outputs.values() if isinstance(one, Outbox)]
        assert isinstance(inbox, Inbox)
        started_s = now_s()
        while (message := inbox.get_nowait()) is None:
            if not wait([inbox], outboxes, timeout_s=max(0.0, started_s + self._deadline_s - now_s())):
                raise ChannelTimeout(
                    f"the critic has not answered for {now_s() - started_s:.0f} s: the trainer waits for {what}",
                    allowed=f"deadline_s = {self._deadline_s:g}",
                    hint="see logs/critic.log; raise deadline_s if one of its passes over a batch takes longer",
                )
        return message


def returns_of(microbatches: Iterable[PackedMicrobatch]) -> TargetNumbers:
    """Return the returns of all sequences of `microbatches`."""
    keys, counts, numbers = list[tuple[int, int]](), [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
    for one in microbatches:
        assert one.returns is not None, "a batch for a critic carries returns"
        keys += one.keys
        counts.append(np.bincount(one.segment_ids, minlength=len(one.keys)))
        numbers.append(one.returns)
    return TargetNumbers(
        keys=np.array(keys, np.int64).reshape(-1, 2), counts=np.concatenate(counts), numbers=np.concatenate(numbers)
    )


def sent_sequence(one: TrainSequence) -> CriticSequence:
    """Return what a critic reads of a sequence."""
    ordinal, sample = one.key
    return CriticSequence(ordinal=ordinal, sample=sample, tokens=one.tokens, mask=one.mask, starts=one.starts)


def by_key(message: TargetNumbers) -> Columns:
    """Return the numbers of each sequence."""
    pieces = np.split(message.numbers, np.cumsum(message.counts)[:-1])
    return {(ordinal, sample): piece for (ordinal, sample), piece in zip(message.keys.tolist(), pieces, strict=False)}


def part_path(path: Path) -> Path:
    """Return where the critic writes its part of checkpoint `path`."""
    return path.parent / PARTS_FOLDER / path.name
