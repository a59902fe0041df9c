"""What can be known of captured steps without CUDA: when weights have moved under them, and that nothing else has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from engine_kit import adapted_model, adapters_of_version, random_model

from slipstream.core.errors import WeightSyncError
from slipstream.generator.step_graphs import StepGraphs, WeightAddresses
from slipstream.models.flat import FlatParameters
from slipstream.models.served import ServedWeights


def test_a_copy_into_the_same_tensors_moves_nothing() -> None:
    model = random_model(0)
    weights = FlatParameters(model)
    addresses = WeightAddresses(model)
    weights.flat.copy_(FlatParameters(random_model(1)).flat)
    model.load_state_dict(random_model(2).state_dict())
    addresses.check()
    addresses.check_known()


def test_rebound_weights_are_found_at_every_step() -> None:
    model = random_model(0)
    weights = FlatParameters(model)
    addresses = WeightAddresses(model)
    weights.rebind(weights.flat.clone())
    for check in (addresses.check, addresses.check_known):
        with pytest.raises(WeightSyncError, match=r"embedding\.weight.*more"):
            check()


def test_one_tensor_in_the_middle_is_found_at_every_step() -> None:
    model = random_model(0)
    addresses = WeightAddresses(model)
    model.layers[1].up.weight.data = model.layers[1].up.weight.detach().clone()
    for check in (addresses.check_known, addresses.check):
        with pytest.raises(WeightSyncError, match=r"layers\.1\.up\.weight"):
            check()


def test_another_parameter_over_the_same_memory_has_not_moved() -> None:
    model = random_model(0)
    addresses = WeightAddresses(model)
    model.layers[1].up.weight = torch.nn.Parameter(model.layers[1].up.weight.detach())
    addresses.check_known()


def test_every_tensor_that_a_version_swap_may_move_is_watched() -> None:
    """In place, with adapters: new versions move nothing. Then every tensor of every product is moved, one by one."""
    model = adapted_model(precision="bfloat16")
    weights = ServedWeights(model, "int8", in_place=True)
    addresses = WeightAddresses(model)
    for version in (1, 2):
        flat = adapters_of_version(weights, version)
        weights.prepare(flat)
        weights.rebind(flat)
    addresses.check_known()
    addresses.check()
    up, head, table = model.layers[1].up.product.keywords, model.served_head.keywords, model.embedding.product.keywords  # type: ignore[union-attr]
    matrices = [
        (up["base"], "_scales", r"layers\.1\.up\.product\.base\._scales"),
        (up["down"], "_weight", r"layers\.1\.up\.product\.down\._weight"),
        (up["up"][0]._product, "_weight", r"layers\.1\.up\.product\.up\.0\._product\._weight"),
        (head["down"], "_weight", r"served_head\.down\._weight"),
        (table["base"].keywords["table"], "values", r"embedding\.product\.base\.table\.values"),
    ]
    for holder, name, pattern in matrices:
        before = vars(holder)[name]
        vars(holder)[name] = before.clone()
        with pytest.raises(WeightSyncError, match=pattern):
            addresses.check_known()
        vars(holder)[name] = before
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
