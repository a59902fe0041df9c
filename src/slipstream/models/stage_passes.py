"""Passes of packed microbatches through the stages of a model, in the orders of torch's schedules.

`torch.distributed.pipelining` orders forward and backward passes (1F1B; interleaved with several chunks to a stage) and
carries the residual stream [N, hidden] and its gradient between neighbours. What it is told of a microbatch is its
index: all ranks of a pipeline have the same microbatches, so each looks tokens, positions and targets up by itself.

- Shapes have to be the same for all microbatches: they are filled up to the rows of the longest. Buffers and schedule
  are made anew where that, or the number of microbatches, changes; one schedule each for training and for reading.
- A schedule asks for as many microbatches as there are stages, and more in particular numbers. What is missing runs
  through no layer: the stream is passed on as it is.
- torch never sees the modules of FSDP2, since it would keep each stage gathered, with whole gradients, over all
  passes. FSDP2's hooks gather and sum as they do without stages, also with `reduce_once`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from slipstream.core.packed import PackedMicrobatch, sent
from slipstream.core.rank_group import RankGroup, lost_rank
from slipstream.models.packed import read_rows, rounded_up, target_rows

if TYPE_CHECKING:
    from slipstream.models.transformer import Attention, Transformer

AtTargets = Callable[[int, Tensor], Tensor]
"""On the last stage: the index of a microbatch, and the states [M, hidden] at its targets -> a tensor."""


class BeforeBackward(Protocol):
    """A call before each backward pass of a chunk, which may be the chunk's last one until the next update."""

    def __call__(self, *, is_last: bool) -> None: ...


class _Chunk(nn.Module):
    """A chunk as torch's stages call it. It contains no module, so that torch treats none (see `stage_passes.py`)."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *stream: Tensor, microbatch: Tensor) -> Tensor:
        return self._run(int(microbatch), *stream)


class _TellingStage(PipelineStage):
    """A stage of torch's that says which backward pass is to come."""

    before_backward: Callable[[int], None]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        self.before_backward(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **options)


@dataclass
class _Pass:
    """A pass through the stages: `inputs` of the microbatches that have come by."""

    microbatches: Sequence[PackedMicrobatch]
    num_rows: int
    at_targets: AtTargets
    before_backward: BeforeBackward
    replays: bool
    inputs: dict[int, tuple[Tensor, Tensor, Attention]] = field(default_factory=dict)


class StagePasses:
    """Passes through the stage `model` and those of the other `ranks`, which all call every method together."""

    def __init__(self, model: Transformer, ranks: RankGroup, device: torch.device, dtype: torch.dtype) -> None:
        self._model, self._ranks, self._device, self._dtype = model, ranks, device, dtype
        self._schedules: dict[bool, tuple[tuple[int, int], Any]] = {}  # by whether it trains
        self._current: _Pass | None = None

    @property
    def is_last(self) -> bool:
        """Whether this stage computes logprobs."""
        return self._model.stage.is_last

    def from_last(self, payload: bytes) -> bytes:
        """Return the `payload` of the last stage; those of the others are ignored."""
        return self._ranks.broadcast(payload, source=self._ranks.world - 1)

    def train(
        self,
        microbatches: Sequence[PackedMicrobatch],
        loss: AtTargets,
        *,
        before_backward: BeforeBackward,
        replays: bool = False,
    ) -> None:
        """Add the gradients of the `loss` of every microbatch, which the last stage computes, to those of all stages.

        `before_backward` is told before each backward pass; it may be called more often than there are microbatches.
        """
        if microbatches:
            self._run(_Pass(microbatches, _most_rows(microbatches), loss, before_backward, replays), trains=True)

    @torch.no_grad()
    def read(
        self,
        microbatches: Sequence[PackedMicrobatch],
        number: Callable[[PackedMicrobatch, Tensor], Tensor],
        *,
        replays: bool = False,
    ) -> list[Tensor]:
        """Return `number(microbatch, states)` [M], one per target, of each: float32, on the CPU of every stage."""
        if not microbatches:
            return []
        found: dict[int, Tensor] = {}

        def note(index: int, states: Tensor) -> Tensor:
            found[index] = number(microbatches[index], states).float()
            return found[index].new_zeros(())

        self._run(_Pass(microbatches, _most_rows(microbatches), note, _ignore, replays), trains=False)
        own = torch.cat([found[index] for index in sorted(found)]).cpu().numpy() if found else np.zeros(0, np.float32)
        numbers = torch.from_numpy(np.frombuffer(self.from_last(own.tobytes()), dtype=np.float32).copy())
        return list(torch.split(numbers, [one.num_targets for one in microbatches]))

    def _run(self, current: _Pass, *, trains: bool) -> None:
        num_passes = self._num_passes(len(current.microbatches))
        schedule = self._schedule(num_passes, current.num_rows, trains=trains)
        indices = torch.arange(num_passes)
        self._current = current
        try:
            run = schedule.step if trains else schedule.eval
            run(target=indices if self.is_last else None, return_outputs=False, microbatch=indices)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if error.__cause__ is not None:  # torch wraps what went wrong in a pass of this stage
                raise error.__cause__ from None
            assert self._ranks.pg is not None
            raise lost_rank(self._ranks.pg, error) from error
        finally:
            self._current = None

    def _num_passes(self, num_microbatches: int) -> int:
        """Return how many microbatches a schedule takes: at least one per stage, in rounds of equally many."""
        world = self._ranks.world
        count = max(num_microbatches, world)
        while self._model.stage.chunks > 1 and count % (count // world):
            count += 1
        return count

    def _schedule(self, num_passes: int, num_rows: int, *, trains: bool) -> Any:
        key = num_passes, num_rows
        if trains not in self._schedules or self._schedules[trains][0] != key:
            self._schedules.pop(trains, None)  # its buffers first
            stages = [self._stage(chunk, num_rows) for chunk in self._model.stage.held]
            made: Schedule1F1B | ScheduleInterleaved1F1B
            if len(stages) == 1:
                made = Schedule1F1B(stages[0], num_passes, loss_fn=self._at_targets, scale_grads=False)
            else:
                made = ScheduleInterleaved1F1B(list(stages), num_passes, loss_fn=self._at_targets, scale_grads=False)
            self._schedules[trains] = key, made
        return self._schedules[trains][1]

    def _stage(self, chunk: int, num_rows: int) -> _TellingStage:
        """Return torch's stage for `chunk`, whose shapes are said here: it need not run anything to find them."""
        shape, hidden = self._model.stage, self._model.config.hidden_size
        stream = torch.empty(num_rows, hidden, dtype=self._dtype, device="meta", requires_grad=True)
        stage = _TellingStage(
            _Chunk(partial(self._forward, chunk)),
            chunk,
            shape.num_chunks,
            self._device,
            input_args=() if chunk == 0 else (stream,),
            output_args=(stream,),
            group=self._ranks.pg,
        )
        stage.before_backward = self._before_backward
        return stage

    # What a schedule calls

    def _forward(self, chunk: int, index: int, *stream: Tensor) -> Tensor:
        current, model = self._given(), self._model
        if index >= len(current.microbatches):
            if stream:
                return stream[0].view_as(stream[0])
            shape = current.num_rows, model.config.hidden_size
            is_trained = torch.is_grad_enabled()
            return torch.zeros(shape, dtype=self._dtype, device=self._device, requires_grad=is_trained)
        if index not in current.inputs:
            microbatch, num_rows = current.microbatches[index], current.num_rows
            read = read_rows(microbatch, num_rows, varlen=model.varlen, replays=current.replays)
            current.inputs[index] = sent(read.tokens, self._device), sent(read.positions, self._device), read.attention
        out: Tensor = model(*current.inputs[index], *stream, chunk=chunk)
        return out

    def _at_targets(self, out: Tensor, index: Tensor) -> Tensor:
        current, number = self._given(), int(index)
        if number >= len(current.microbatches):
            return out.sum() * 0.0
        return current.at_targets(number, target_rows(out, current.microbatches[number].target_index))

    def _before_backward(self, index: int) -> None:
        current = self._given()
        current.before_backward(is_last=index == len(current.microbatches) - 1)

    def _given(self) -> _Pass:
        assert self._current is not None, "a schedule runs inside of `_run`"
        return self._current


def _ignore(*, is_last: bool) -> None:
    """Take no notice."""


def _most_rows(microbatches: Sequence[PackedMicrobatch]) -> int:
    """Return the rows that the longest of `microbatches` is filled up to."""
    return max(rounded_up(microbatch.num_tokens) for microbatch in microbatches)
