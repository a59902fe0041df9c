"""Ranks that hold copies of a frozen model, as threads: who takes, who reads what, who emits, when all end."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ports import Port
from rank_threads import ThreadRanks, on_ranks, results
from training_data import make_rollout, run_config

from slipstream.core.clock import WallClock
from slipstream.core.executor import Context
from slipstream.core.holders import HANDED, Holders, ranks_per_copy
from slipstream.core.spans import NoSpans
from slipstream.core.types import Rollout, Stop
from slipstream.trainer.station import Station

CONFIG = run_config(trainer={"microbatch_tokens": 20})
MODEL = SimpleNamespace(config=SimpleNamespace(vocab_size=19, max_positions=64))


class Fan:
    """The writing end of a channel with several targets."""

    def __init__(self, *ports: Port) -> None:
        self.ports = ports

    def put(self, message: Any) -> None:
        for port in self.ports:
            port.put(message)


def rollouts(count: int) -> list[Rollout]:
    rng = np.random.default_rng(0)
    return [make_rollout(ordinal, 0, rng) for ordinal in range(count)]


def keys(messages: Any) -> list[int]:
    return [message.ordinal for message in messages if isinstance(message, Rollout)]


def run_stations(tensor_parallel: int, *, sharded: bool, num_rollouts: int) -> list[tuple[list[list[int]], list[int]]]:
    """The batches that each of four ranks reads, and what it emits, until it ends."""
    size = 4 if sharded else tensor_parallel
    commands, handed, measured = ([Port() for _ in range(4)] for _ in range(3))
    arrived = {first: Port() for first in range(0, 4, size)}
    for index, rollout in enumerate(rollouts(num_rollouts)):
        arrived[index % len(arrived) * size].put(rollout)
    commands[0].put(Stop())

    def job(ranks: ThreadRanks) -> tuple[list[list[int]], list[int]]:
        rank, read = ranks.rank, []
        is_first = rank % size == 0
        inputs = {"commands": commands[rank]} | ({"rollouts": arrived[rank]} if is_first else {HANDED: handed[rank]})
        outputs = {"measured": measured[rank]} | ({"relay": Fan(*commands[1:])} if rank == 0 else {})
        if is_first and size > 1:
            outputs[HANDED] = Fan(*handed[rank + 1 : rank + size])
        context = Context(f"station@{rank}", Path(), inputs, outputs, NoSpans(), WallClock(), group=ranks)  # type: ignore[arg-type]
        holders = Holders(context, tensor_parallel=tensor_parallel, is_sharded=sharded)
        assert holders.world == size
        assert holders.is_leader == is_first

        def note(model: Any, batch: list[Rollout]) -> list[Rollout]:
            assert model is MODEL
            holders.data_parallel.gather(b"")  # as a divided model would meet
            holders.tensor_parallel.gather(b"")
            read.append(keys(batch))
            return batch

        station = Station(context, CONFIG, holders=holders, state="reference", load=lambda: MODEL, read=note)  # type: ignore[arg-type]
        while not station.is_finished:
            station.step()
        return read, keys(measured[rank].messages)

    return results(on_ranks(4, job))


@pytest.mark.parametrize("num_rollouts", [0, 1, 23])
@pytest.mark.parametrize(("tensor_parallel", "sharded"), [(1, False), (2, False), (4, False), (1, True), (2, True)])
def test_holders_of_a_copy_read_the_same_and_the_first_emits(
    tensor_parallel: int, sharded: bool, num_rollouts: int
) -> None:
    by_rank = run_stations(tensor_parallel, sharded=sharded, num_rollouts=num_rollouts)
    size = 4 if sharded else tensor_parallel
    emitted: list[int] = []
    for first in range(0, 4, size):
        (batches, sent), *others = by_rank[first : first + size]
        assert (
            sent == [key for batch in batches for key in batch] == list(range(num_rollouts))[first // size :: 4 // size]
        )
        assert all(seen == (batches, []) for seen in others)
        emitted += sent
    assert sorted(emitted) == list(range(num_rollouts)), "nothing is lost, nothing comes twice"


def test_a_batch_is_about_a_microbatch_for_each_data_parallel_rank() -> None:
    sizes = [len(one.completion.prompt.tokens) + one.completion.num_tokens for one in rollouts(23)]
    for data_parallel in (1, 2, 4):
        batches = run_stations(4 // data_parallel, sharded=True, num_rollouts=23)[0][0]
        enough = next(n for n in range(1, 24) if sum(sizes[:n]) >= 20 * data_parallel)
        assert len(batches[0]) == enough < 23


def test_ranks_sleep_until_the_first_has_a_whole_batch_for_them() -> None:
    port = deque[Any]()
    inbox = SimpleNamespace(get_nowait=lambda: port.popleft() if port else None)
    sent: list[Any] = []
    two = [ThreadRanks(rank, (0, 1), {}) for rank in range(2)]
    contexts: list[Any] = [
        SimpleNamespace(group=two[0], outputs={HANDED: SimpleNamespace(put=sent.append)}),
        SimpleNamespace(group=two[1], inputs={HANDED: inbox}),
    ]
    first, other = (Holders(context, tensor_parallel=2) for context in contexts)
    assert first.batch(list) == other.batch(pytest.fail) == sent == []
    batch = rollouts(3)
    assert first.batch(lambda: batch) == batch
    port.extend(sent[:2])
    assert other.batch(pytest.fail) == [], "the rest is on its way"
    port.extend(sent[2:])
    assert other.batch(pytest.fail) == batch
    assert not first.ends(is_stopping=False)
    assert not other.ends(is_stopping=True), "the first rank may still have a batch"
    assert first.ends(is_stopping=True)
    port.append(sent[-1])
    assert other.batch(pytest.fail) == []
    assert other.ends(is_stopping=False)


def test_ranks_per_copy() -> None:
    one = ranks_per_copy(run_config())
    assert set(one.values()) == {1}
    divided = run_config(
        kl={"coef": 0.1, "executor": "own", "ranks": 4, "tensor_parallel": 2},
        rewards={"model_ranks": 6, "model_tensor_parallel": 3, "models_sharded": True},
        loss={"advantages": "gae"},
        critic={"executor": "own", "ranks": 3},
    )
    assert ranks_per_copy(divided) == {"reference": 2, "reward_models": 6, "teacher": 1, "critic": 3}
