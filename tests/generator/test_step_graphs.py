"""What can be known of captured steps without CUDA: when weights have moved under them, and that nothing else has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from engine_kit import random_model

from slipstream.core.errors import WeightSyncError
from slipstream.generator.step_graphs import StepGraphs, WeightAddresses
from slipstream.models.flat import FlatParameters


def test_a_copy_into_the_same_tensors_moves_nothing() -> None:
    model = random_model(0)
    weights = FlatParameters(model)
    addresses = WeightAddresses(model)
    weights.flat.copy_(FlatParameters(random_model(1)).flat)
    model.load_state_dict(random_model(2).state_dict())
    addresses.check()
    addresses.check_ends()


def test_rebound_weights_are_found_at_every_step() -> None:
    model = random_model(0)
    weights = FlatParameters(model)
    addresses = WeightAddresses(model)
    weights.rebind(weights.flat.clone())
    for check in (addresses.check, addresses.check_ends):
        with pytest.raises(WeightSyncError, match=r"embedding\.weight.*more"):
            check()


def test_one_tensor_in_the_middle_is_found_by_the_whole_check() -> None:
    model = random_model(0)
    addresses = WeightAddresses(model)
    model.layers[1].up.weight.data = model.layers[1].up.weight.detach().clone()
    addresses.check_ends()
    with pytest.raises(WeightSyncError, match=r"layers\.1\.up\.weight"):
        addresses.check()


def test_a_new_buffer_is_found() -> None:
    model = random_model(0)
    addresses = WeightAddresses(model)
    model.register_buffer("scales", torch.ones(1))
    with pytest.raises(WeightSyncError, match="scales"):
        addresses.check()


def test_without_cuda_every_step_runs() -> None:
    calls = []
    graphs = StepGraphs(random_model(), torch.device("cpu"))
    for _ in range(2):
        graphs.run("key", lambda: calls.append(1) or torch.ones(1))
    assert len(calls) == 2
    assert len(graphs) == 0
    graphs.check_addresses()


class Recorded:
    """Stands for a CUDA graph: knows its pool and counts its replays."""

    made: list[Recorded]

    def __init__(self) -> None:
        self.given_pool: object = None
        self.num_replays = 0
        self.is_capturing = False
        self.made.append(self)

    def pool(self) -> object:
        return self.given_pool if self.given_pool is not None else id(self)

    def replay(self) -> None:
        self.num_replays += 1

    @staticmethod
    @contextmanager
    def capture(graph: Recorded, pool: object, capture_error_mode: str) -> Iterator[None]:
        graph.given_pool, graph.is_capturing = pool, True
        yield
        graph.is_capturing = False


def test_a_key_runs_once_and_is_replayed_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for CUDA: which calls run, are captured and replayed, and in which pool."""
    Recorded.made = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", Recorded.capture)
    model = random_model()
    weights = FlatParameters(model)
    graphs = StepGraphs(model, torch.device("cuda"))
    ran: list[bool] = []

    def step() -> torch.Tensor:
        ran.append(any(graph.is_capturing for graph in Recorded.made))
        return torch.tensor(len(ran))

    assert [int(graphs.run("a", step)) for _ in range(3)] == [1, 2, 2]
    assert ran == [False, True]
    assert int(graphs.run("b", step)) == 3
    assert int(graphs.run("a", step)) == 2
    first, second = Recorded.made
    assert (first.num_replays, second.num_replays, len(graphs)) == (3, 0, 2)
    assert first.given_pool is None
    assert second.given_pool == first.pool()
    weights.rebind(weights.flat.clone())
    with pytest.raises(WeightSyncError, match="moved"):
        graphs.run("a", step)
    with pytest.raises(WeightSyncError, match="moved"):
        graphs.check_addresses()
    assert first.num_replays == 3
