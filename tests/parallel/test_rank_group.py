"""Collectives of a group's ranks, over gloo."""

from __future__ import annotations

import group_jobs
import pytest
import torch
from rank_pool import RankPool

from slipstream.core.errors import ConfigError, RankError
from slipstream.core.rank_group import RankGroup

PAYLOADS = [b"", b"a", b"\x00" * 5, b"four"]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_and_maxima_are_those_of_all_and_leave_alone_what_is_handed_in(ranks: RankPool, world: int) -> None:
    last = world - 1
    total = float(sum(range(world)))
    for rank, (summed, largest, values) in enumerate(ranks.run(group_jobs.reduced, world=world)):
        assert summed == [total, -total]
        assert largest == [float(last), 0.0]
        assert values == [float(rank), -float(rank)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_payloads_of_any_length_come_as_they_were(ranks: RankPool, world: int) -> None:
    assert ranks.run(group_jobs.gathered, PAYLOADS, world=world) == [PAYLOADS[:world]] * world
    assert ranks.run(group_jobs.gathered, [b""] * world, world=world) == [[b""] * world] * world
    for source in range(world):
        assert ranks.run(group_jobs.broadcast, PAYLOADS, source, world=world) == [PAYLOADS[source]] * world


@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_rank_gets_what_was_sent_to_it(ranks: RankPool, world: int) -> None:
    sent = [[b"" if (r + to) % 3 == 0 else bytes([r, to]) * (1 + 50 * r) for to in range(world)] for r in range(world)]
    assert ranks.run(group_jobs.exchanged, sent, world=world) == [list(column) for column in zip(*sent, strict=True)]
    nothing = [[b""] * world] * world
    assert ranks.run(group_jobs.exchanged, nothing, world=world) == nothing


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_neighbours_share_a_model_and_every_so_many_the_data(ranks: RankPool, tensor_parallel: int) -> None:
    """As `split` says: rank = data_parallel_rank * tensor_parallel + t."""
    for rank, (data, model) in enumerate(ranks.run(group_jobs.split, tensor_parallel, world=4)):
        data_rank, t = divmod(rank, tensor_parallel)
        replicas = 4 // tensor_parallel
        assert data[:2] == (data_rank, replicas)
        assert model[:2] == (t, tensor_parallel)
        assert data[2] == [str(d * tensor_parallel + t).encode() for d in range(replicas)]
        assert model[2] == [str(data_rank * tensor_parallel + i).encode() for i in range(tensor_parallel)]


def test_ranks_divide_along_two_axes(ranks: RankPool) -> None:
    """rank = (data_parallel_rank * 2 + stage) * 2 + t, and along each axis the others stay the same."""
    for rank, groups in enumerate(ranks.run(group_jobs.split, 2, 2, world=4)):
        stage, t = divmod(rank, 2)
        assert groups[0] == (0, 1, [str(rank).encode()])
        assert groups[1] == (stage, 2, [str(s * 2 + t).encode() for s in range(2)])
        assert groups[2] == (t, 2, [str(stage * 2 + i).encode() for i in range(2)])


def test_one_process_alone_needs_nobody() -> None:
    group = RankGroup.alone()
    values = torch.ones(2)
    summed = group.sum(values)
    summed += 1
    assert values.tolist() == [1.0, 1.0], "a new tensor, as with others"
    assert group.gather(b"x") == [b"x"]
    assert group.broadcast(b"x") == b"x"
    assert group.split() == (group,)
    assert group.split(1, 1) == (group, group, group)
    assert group.is_leader
    with pytest.raises(ConfigError, match="do not divide"):
        group.split(1, 2)
    for rank, world in ((0, 2), (1, 1), (-1, 1)):
        with pytest.raises(ConfigError, match="no such rank"):
            RankGroup(rank, world)


def test_what_goes_wrong_in_a_collective_is_a_rank_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> RankError:
        return RankError("a collective failed")

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("slipstream.core.rank_group.lost_rank", lost)
    monkeypatch.setattr("torch.distributed.all_reduce", failing)
    group = RankGroup(0, 1, object())  # type: ignore[arg-type]
    with pytest.raises(RankError) as raised:
        group.sum(torch.zeros(1))
    assert isinstance(raised.value.__cause__, RuntimeError)
