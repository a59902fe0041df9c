"""The ranks of a replica in pipeline stages: who works on what in each tick, and what travels between them.

All ranks run the same engine in lock step (`lockstep.py`), so each knows of every pass which rows it has. Rows lie in
as many groups as there are stages. An engine's step is a *tick*:

    at tick t stage s carries out what was ordered at tick t - s: a pass of the rows of group (t - s) mod P
    then it gives the stream [rows, hidden] to stage s + 1, and the last one tells all which tokens it has sampled

These are of the group that begins again at tick t + 1. So once the pipeline is full no stage waits for another one,
but for what their parts differ by: a replica idles P - 1 ticks where decoding begins or weights change, (P - 1) /
(n + P - 1) of n + P - 1 ticks, and where a group is empty.

A stage is late with everything that touches keys and values, also with copies of prefixes and chunks of prompts, which
travel beside the rows of a pass. All of it is carried out in the order in which it was ordered, as on one rank: memory
that was freed and given away meanwhile is read before it is written. Before weights change all that was ordered is
carried out; the tokens that this makes are dropped and made again under the new weights (`drain`), so every token has
one version.

Messages are sent and received within a tick, so ranks are never apart in what they expect of each other, whatever an
evaluation's engine or a probe does between two ticks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.algorithms.logprobs import OneSequence, token_logprobs
from slipstream.core.rank_group import RankGroup
from slipstream.generator.kv_cache import JoinedAttention
from slipstream.generator.runner import Decoded
from slipstream.generator.sampler import SampledTokens
from slipstream.models.transformer import Attention, Transformer


@dataclass(frozen=True, eq=False)
class StagePass:
    """A pass through all stages of `num_rows` rows that decode, and of chunks: `num_tokens` tokens in all.

    `run` takes the stream [num_tokens, hidden] of the stage before (None: this is the first one) and gives that of this
    stage; on the last one int32 [num_rows, num_columns], see `packed`.
    """

    num_rows: int
    num_tokens: int
    num_columns: int
    run: Callable[[Tensor | None], Tensor]


@dataclass
class _Orders:
    """The orders of a tick, to be carried out in this order."""

    works: list[Callable[[], None]] = field(default_factory=list)
    whole: StagePass | None = None


class StageTicks:
    """This rank's part of the ticks of one runner, over the stage `model`; `stages` are the ranks of all stages."""

    def __init__(self, model: Transformer, stages: RankGroup) -> None:
        weight = stream_weight(model)
        self._stages, self._hidden = stages, model.config.hidden_size
        self._dtype, self._device = weight.dtype, weight.device
        self._orders = deque([_Orders() for _ in range(stages.world)], maxlen=stages.world)  # of ticks, the last newest
        self._next = _Orders()
        self._stream: Tensor | None = None  # for this stage's next pass
        self._num_ticks = 0

    @property
    def turn(self) -> int:
        """The group whose pass the next tick begins."""
        return self._num_ticks % self._stages.world

    def later(self, work: Callable[[], None]) -> None:
        """Order `work`, before the pass of the next tick."""
        self._next.works.append(work)

    @torch.inference_mode()
    def tick(self, begun: StagePass | None) -> np.ndarray | None:
        """Begin a pass of the group `turn`, or none. Return the output of the pass that ends, None where none does."""
        self._next.whole = begun
        self._orders.append(self._next)
        self._next = _Orders()
        self._num_ticks += 1
        out = self._carry_out(self._orders[-1 - self._stages.rank])
        self._exchange(out)
        return self._told(self._orders[0].whole, out)

    def drain(self) -> None:
        """Carry out all that was ordered; the tokens that this makes are lost."""
        if self._next.works or any(one.works or one.whole is not None for one in self._orders):
            for _ in range(self._stages.world):
                self.tick(None)

    def _carry_out(self, orders: _Orders) -> Tensor | None:
        for work in orders.works:
            work()
        return None if orders.whole is None else orders.whole.run(self._stream)

    def _exchange(self, out: Tensor | None) -> None:
        """Give the stream to the next stage, and take that of the stage before, for the next tick."""
        rank, before = self._stages.rank, None
        if rank > 0:
            before = self._orders[-rank].whole  # its pass of this tick
        self._stream = None
        if before is not None:
            self._stream = torch.empty(before.num_tokens, self._hidden, dtype=self._dtype, device=self._device)
        hand_on(self._stages, out if rank < self._stages.world - 1 else None, self._stream)

    def _told(self, ended: StagePass | None, out: Tensor | None) -> np.ndarray | None:
        """Return the output of the pass that has `ended` on the last stage, on every stage."""
        if ended is None or ended.num_rows == 0:
            return None
        if self._stages.rank < self._stages.world - 1:
            out = torch.empty(ended.num_rows, ended.num_columns, dtype=torch.int32, device=self._device)
        assert out is not None
        if self._stages.pg is not None:
            self._stages.run(dist.broadcast, out, group_src=self._stages.world - 1)
        return out.cpu().numpy()


def hand_on(stages: RankGroup, sent: Tensor | None, received: Tensor | None) -> None:
    """Send `sent` to the next stage, and fill `received` from the one before, at the same time."""
    operations: list[tuple[Any, Tensor, int]] = []
    if sent is not None:
        operations.append((dist.isend, sent.contiguous(), stages.rank + 1))
    if received is not None:
        operations.append((dist.irecv, received, stages.rank - 1))
    if not operations:
        return

    def run(group: dist.ProcessGroup) -> None:
        made = [dist.P2POp(operation, tensor, group=group, group_peer=peer) for operation, tensor, peer in operations]
        for work in dist.batch_isend_irecv(made):
            work.wait()

    stages.run(run)


@torch.no_grad()
def probe_stages(model: Transformer, stages: RankGroup, tokens: np.ndarray) -> np.ndarray:
    """`algorithms.logprobs.probe_logprobs` of a model in `stages`, which all call it together: the same on each."""
    weight, rank = stream_weight(model), stages.rank
    sequence = torch.as_tensor(tokens, dtype=torch.int64, device=weight.device)
    stream = None
    if rank > 0:
        shape = len(sequence) - 1, model.config.hidden_size
        stream = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        hand_on(stages, None, stream)
    out = model(sequence[:-1], torch.arange(len(sequence) - 1, device=weight.device), OneSequence(), stream, chunk=rank)
    if rank < stages.world - 1:
        hand_on(stages, out, None)
        found = b""
    else:
        found = token_logprobs(model.logits(out), sequence[1:]).cpu().numpy().tobytes()
    return np.frombuffer(stages.broadcast(found, source=stages.world - 1), dtype=np.float32).copy()


# A pass over the layers of one stage


def stream_weight(model: Transformer) -> Tensor:
    """Return a weight of the residual stream's precision, whatever matrices are stored in."""
    weight = next(iter(model.layers)).attention_norm.weight
    assert isinstance(weight, Tensor)
    return weight


class OwnLayers:
    """An `Attention` that counts layers as the stage's memory does: the first one that lies here is layer 0."""

    def __init__(self, inner: Attention | JoinedAttention, first: int) -> None:
        self._inner, self._first = inner, first

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._inner(layer - self._first, q, k, v)

    def route(self, layer: int, chosen: Tensor) -> Tensor:
        """Record the experts, if they are to be."""
        return self._inner.route(layer - self._first, chosen)


def over_layers(
    model: Transformer,
    tokens: Tensor,
    positions: Tensor,
    attention: Attention | JoinedAttention,
    stream: Tensor | None,
    *,
    num_rows: int,
) -> Tensor:
    """Return the stream behind the layers of this stage, or from the last one the states [num_rows, hidden]."""
    stage = model.stage
    own = attention if stage.is_first else OwnLayers(attention, next(iter(model.layers)).index)
    if num_rows == 0 and stage.is_last:
        model.prefill(tokens, positions, own, stream)
        return torch.empty(0, model.config.hidden_size, device=tokens.device, dtype=torch.float32)
    out: Tensor = model(tokens, positions, own, stream, chunk=stage.rank)
    return out


def packed(sampled: SampledTokens) -> Tensor:
    """int32 [B, 2 + K]: the token, the bits of its logprob, and the kept set, if there is one."""
    columns = [sampled.tokens.int().unsqueeze(1), sampled.logprobs.view(torch.int32).unsqueeze(1)]
    return torch.cat(columns if sampled.kept is None else [*columns, sampled.kept], 1)


def unpacked(output: np.ndarray, is_new: np.ndarray) -> Decoded:
    """Return what `packed` has put together, of all rows, of which those that are not new mean nothing."""
    return Decoded(
        tokens=output[:, 0].astype(np.int64),
        logprobs=output[:, 1].copy().view(np.float32),
        kept=output[:, 2:] if output.shape[1] > 2 else None,
        is_new=is_new,
    )
