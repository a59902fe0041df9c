"""What the ranks of a critic's executor do in tests: they carry out what a trainer once asked of one rank."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from rank_pool import Rank

sys.path.insert(0, str(Path(__file__).parent.parent / "trainer"))  # its data serve here, too

from ports import Port

from slipstream.batching import collate
from slipstream.core import wire
from slipstream.core.clock import WallClock
from slipstream.core.config import RunConfig
from slipstream.core.executor import Context
from slipstream.core.holders import HANDED
from slipstream.core.rank_group import RankGroup
from slipstream.core.spans import NoSpans
from slipstream.models.shards import Shard, local_tensor
from slipstream.trainer.checkpoint import CRITIC, trained_shards
from slipstream.trainer.critic_executor import CriticModel
from slipstream.trainer.critic_link import ANSWERED, ASKED

Boxes = list[tuple[Any, np.ndarray]]


def carry_out(
    group: RankGroup, tables: dict[str, Any], asked: list[bytes], run_dir: str, resume: str | None = None
) -> tuple[list[bytes], Boxes, int]:
    """Return the answers of rank 0, what this rank stores of weights and moments, and the bytes of its weights."""
    critic = CriticModel(config=RunConfig.model_validate(tables), batching=collate, resume=resume)
    ports = {name: Port() for name in (ASKED, ANSWERED, HANDED, "commands", "events")}
    messages = deque(wire.decode(payload) for payload in asked)
    ports[ASKED if group.is_leader else HANDED].messages = messages
    inputs = {name: ports[name] for name in (ASKED, HANDED, "commands")}
    outputs = {name: ports[name] for name in (ANSWERED, "events")} | {HANDED: Port()}
    critic.init(Context("critic", Path(run_dir), inputs, outputs, NoSpans(), WallClock(), group=group))
    try:
        while not critic.is_finished:
            assert critic.step(), "no rank waits for more than it was sent"
        one = critic._critic
        shards: list[Shard] = trained_shards({CRITIC: (one.module, one.optimizer)})
        boxes = [(shard.box, shard.view.detach().numpy().copy()) for shard in shards]
        num_bytes = sum(local_tensor(parameter).nbytes for parameter in one.module.parameters())
        return [wire.encode(message) for message in ports[ANSWERED].messages], boxes, num_bytes
    finally:
        critic.close()


def carry_out_on(rank: Rank, *args: Any) -> tuple[list[bytes], Boxes, int]:
    return carry_out(RankGroup.over(rank.group), *args)
