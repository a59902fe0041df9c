"""The layers of each pipeline stage, and the sum over the two stages that hold a tied embedding.

A stage's `Transformer` has its own layers under their indices in the whole model; the first stage also has the
embedding, the last one final norm and head. The boxes of a stage (`shards.base_parts`) are those of what it holds, so
weight sync, checkpoints and exports need not know of stages. How passes run through them: `stage_passes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.core.rank_group import RankGroup


@dataclass(frozen=True)
class Stage:
    """Stage `rank` of the `world` that a model is divided into; it holds `chunks` chunks of consecutive layers.

    Chunk c of K = world * chunks has the layers [c L / K, (c + 1) L / K) of L, and lies on stage c mod world:
    Megatron-LM's interleaved assignment (Narayanan et al., arXiv:2104.04473, section 2.2). One stage holds everything.
    """

    rank: int = 0
    world: int = 1
    chunks: int = 1

    @property
    def num_chunks(self) -> int:
        """The chunks of the whole model."""
        return self.world * self.chunks

    @property
    def held(self) -> range:
        """The chunks that lie here."""
        return range(self.rank, self.num_chunks, self.world)

    @property
    def is_first(self) -> bool:
        """Whether chunk 0, before which tokens are looked up, lies here."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether the last chunk, behind which the head is, lies here."""
        return self.rank == self.world - 1

    def layers_of(self, chunk: int, num_layers: int) -> range:
        """Return the layers of `chunk` of a model of `num_layers`."""
        return range(chunk * num_layers // self.num_chunks, (chunk + 1) * num_layers // self.num_chunks)

    def layers(self, num_layers: int) -> list[int]:
        """Return the layers that lie here, ascending."""
        return [layer for chunk in self.held for layer in self.layers_of(chunk, num_layers)]

    def check(self, num_layers: int, *, section: str = "trainer") -> None:
        """Raise ConfigError for a model with fewer layers than chunks; `section` of the recipe asks for them."""
        if num_layers < self.num_chunks:
            chunks = f" x {section}.pipeline_chunks = {self.chunks}" if self.chunks > 1 else ""
            raise ConfigError(
                "the model has fewer layers than pipeline stages and their chunks",
                got=f"{num_layers} layers for {section}.pipeline_parallel = {self.world}{chunks}",
                allowed=f"at most {num_layers} chunks in all",
            )


@torch.no_grad()
def add_of_peer(part: Tensor, ranks: RankGroup, *, peer: int) -> None:
    """Add to `part` what rank `peer` of `ranks` has in its place, while that rank adds what is here.

    Two numbers have one sum, in whichever order they are added: both ranks then hold the same bits.
    """
    if not part.numel():
        return
    sent, received = part.contiguous(), torch.empty_like(part, memory_format=torch.contiguous_format)
    ends = ((dist.isend, sent), (dist.irecv, received))

    def exchange(group: dist.ProcessGroup) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(op, at, group=group, group_peer=peer) for op, at in ends]):
            work.wait()

    ranks.run(exchange)
    part.add_(received)
