"""Versions of a trainer divided over ranks arrive at generators divided otherwise, bit for bit.

The trainer's ranks are processes of the pool; the generators' ranks are in this one, each with a subscriber and
channels of its own. The oracle are the bytes that a generator's own layout gives the whole model's tensors.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import with_slow
from rank_models import CONFIGS, MIXTURE
from rank_pool import RankPool
from reshard_jobs import DEADLINE_S, Trainer, links_of, some_news, specs, train, transport_of, version_of

from slipstream.core.channel import Ports, connect, make_transport_dir, wait
from slipstream.core.fields import Precision
from slipstream.core.peer_messages import Holding
from slipstream.core.scratch import cleanup
from slipstream.core.service_messages import Export
from slipstream.core.types import Stop
from slipstream.generator.vllm.slot_extension import read_push
from slipstream.generator.vllm.weights import SlotWeights
from slipstream.models.config import TransformerConfig
from slipstream.models.hf import logical_tensors
from slipstream.models.quantized import WeightLayout
from slipstream.models.shards import load_shard
from slipstream.models.tensor_parallel import TensorParallel
from slipstream.models.transformer import Transformer
from slipstream.weight_sync.subscriber import Subscriber

_NUMBER = itertools.count()


def generator_model(config: TransformerConfig, rank: int, world: int) -> Transformer:
    return Transformer(config) if world == 1 else TensorParallel(config, rank, world).new_model()


def expected_bytes(
    config: TransformerConfig, precision: Precision, rank: int, world: int, version: int
) -> torch.Tensor:
    """What the layout of rank `rank` makes of the whole model of a version, with the scales of whole rows."""
    whole = version_of(config, version)
    model = generator_model(config, rank, world)
    load_shard(model, logical_tensors(whole))
    layout = WeightLayout(model, precision)
    out = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    largest = {name: p.detach().abs().amax(1) for name, p in whole.named_parameters() if p.ndim == 2}
    every = [name for name, _ in model.named_parameters() if ".experts." not in name]
    cut = [name for name in every if name.endswith(("output.weight", "down.weight"))]

    def over_ranks(own: torch.Tensor) -> torch.Tensor:
        return torch.cat([largest[name] for name in cut])

    for _ in layout.pack(dict(model.named_parameters()), out, over_ranks=over_ranks if world > 1 else None):
        pass
    return out


class Weights:
    """Stands for `ServedWeights`: bytes in a layout, exchanged by pointer."""

    reads_flat = True

    def __init__(self, layout: WeightLayout) -> None:
        self.flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        self.layout = layout

    @property
    def holding(self) -> Holding:
        return self.layout.holding

    def prepare(self, flat: torch.Tensor) -> None: ...

    def rebind(self, flat: torch.Tensor) -> None:
        self.flat = flat


class GeneratorRank:
    """One rank of a generator replica."""

    def __init__(self, trainer: Trainer, channels: list, replica: int, rank: int, world: int, incarnation: int = 1):
        self.replica, self.rank, self.world = replica, rank, world
        self.trainer, self.channels = trainer, channels
        self.ports: Ports = connect(channels, f"generator-{replica}@{rank}", Path(trainer.folder), incarnation)
        self.weights = self.new_weights()
        self.subscriber = Subscriber(
            self.ports.inputs["offers"],
            self.ports.outputs["releases"],
            transport_of(trainer),
            replica=replica,
            rank=rank,
            world=world,
            links=links_of(trainer, "far" if trainer.is_far else "near"),
        )
        self.probed = -1.0
        self.subscriber.open(self.weights, self._probe, 1e9, is_threaded=True)

    def new_weights(self) -> Any:
        model = generator_model(self.trainer.config, self.rank, self.world)
        return Weights(WeightLayout(model, self.trainer.precision))

    def _probe(self, tokens: np.ndarray) -> np.ndarray:
        return np.zeros(3, np.float32)

    def check(self, version: int) -> None:
        expected = expected_bytes(self.trainer.config, self.trainer.precision, self.rank, self.world, version)
        layout = self.weights.layout
        for name, (mine, theirs) in {
            name: (view, layout.views(expected)[name]) for name, view in layout.views(self.weights.flat).items()
        }.items():
            assert torch.equal(mine.values.view(torch.uint8), theirs.values.view(torch.uint8)), name
            if mine.scales is not None:
                assert torch.equal(mine.scales, theirs.scales), name

    def close(self) -> None:
        self.subscriber.close()
        self.ports.close()


class ReadingRank(GeneratorRank):
    """A replica whose weights another program reads where they lie, as vLLM does: here with the same file."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.found: dict[str, torch.Tensor] = {}

    def new_weights(self) -> SlotWeights:
        weights = SlotWeights(self.trainer.config, self.trainer.precision)
        weights.push = self._push
        return weights

    def _push(self) -> None:
        file = Path(self.trainer.folder) / "push"
        self.weights.write(file)
        self.found = {name: tensor.clone() for name, tensor in read_push(str(file))}

    def check(self, version: int) -> None:
        whole = version_of(self.trainer.config, version)
        layout = WeightLayout(whole, self.trainer.precision)
        out = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        for _ in layout.pack(dict(whole.named_parameters()), out):
            pass
        for name, view in layout.views(out).items():
            whole.get_parameter(name).data = view.values
        expected = logical_tensors(whole)
        assert self.found.keys() - expected.keys() == ({"lm_head.weight"} if whole.config.tie_embeddings else set())
        for name, tensor in expected.items():
            assert torch.equal(self.found[name], tensor), name
        if whole.config.tie_embeddings:
            assert torch.equal(self.found["lm_head.weight"], next(iter(expected.values())))


@contextmanager
def running(
    pool: RankPool,
    config: TransformerConfig,
    replicas: list[int],
    precision: Precision = "float32",
    kind: type[GeneratorRank] = GeneratorRank,
    **how,
) -> Iterator[tuple[list[GeneratorRank], Ports, Future]]:
    """A trainer in the pool and all ranks of `replicas` (their worlds) here."""
    folder = make_transport_dir()
    trainer = Trainer(config, precision, str(folder), f"reshard-{next(_NUMBER)}", **how)
    every = [(replica, rank) for replica, world in enumerate(replicas) for rank in range(world)]
    channels = specs(trainer, every)
    test = connect(channels, "test", folder, 1)
    generators: list[GeneratorRank] = []
    with ThreadPoolExecutor(1) as thread:
        outcome = thread.submit(pool.run, train, trainer, every, world=trainer.world)
        try:
            generators += [kind(trainer, channels, replica, rank, replicas[replica]) for replica, rank in every]
            yield generators, test, outcome
        finally:
            test.outputs["commands"].put(Stop())
            outcome.result(DEADLINE_S)
            for generator in generators:
                generator.close()
            test.close()
            cleanup(trainer.run_id)
            shutil.rmtree(folder)


def take(generators: list[GeneratorRank], version: int) -> None:
    """Wait until all have staged `version`, and commit it."""
    fds = [fd for generator in generators for fd in generator.subscriber.wait_fds()]
    while any(generator.subscriber.pending_version != version for generator in generators):
        if not sum(generator.subscriber.poll() for generator in generators):  # of all, also after the first True
            failures = [generator.subscriber.failure for generator in generators]
            late = f"version {version} did not arrive: {failures}"
            assert some_news([generator.ports for generator in generators], fds), late
    for generator in generators:
        assert generator.subscriber.commit() is not None


def publish(test: Ports, version: int) -> None:
    tell(test, f"publish {version}")


def tell(test: Ports, words: str) -> None:
    """A command to the trainer (`reshard_jobs`)."""
    test.outputs["commands"].put(Export(path=words))


def deliver(
    pool: RankPool, config: TransformerConfig, replicas: list[int], precision: Precision = "float32", **how
) -> None:
    with running(pool, config, replicas, precision, **how) as (generators, test, _):
        for version in range(2):
            publish(test, version)
            take(generators, version)
            for generator in generators:
                generator.check(version)


@pytest.mark.parametrize(
    ("precision", "is_linked"),
    with_slow(
        [("int8", True)],
        [
            ("float32", False),
            ("float32", True),
            ("int8", False),
            *itertools.product(["bfloat16", "fp8"], [False, True]),
        ],
    ),
)
def test_two_ranks_of_fsdp_to_a_pair_and_to_two_single_replicas(
    ranks: RankPool, precision: Precision, is_linked: bool
) -> None:
    config = CONFIGS["llama"]
    deliver(ranks, config, [2], precision, data_parallel=2, is_linked=is_linked)
    deliver(ranks, config, [1, 1], precision, data_parallel=2, is_linked=is_linked)


def test_a_pair_hands_its_parts_on_to_another_pair(ranks: RankPool) -> None:
    """Llama's two key-value heads are one for each rank; what all ranks hold comes from either."""
    with running(ranks, CONFIGS["llama"], [2, 2], "int8", data_parallel=2, is_linked=True, is_far=True) as (
        generators,
        test,
        _,
    ):
        for version in range(3):
            publish(test, version)
            take(generators, version)
            for generator in generators:
                generator.check(version)
        links = [generator.subscriber._fetch._linked for generator in generators]
        assert sorted({(linked.replica, linked.parent) for linked in links}) in ([(0, -1), (1, 0)], [(0, 1), (1, -1)])


@pytest.mark.parametrize(
    ("case", "is_linked"),
    with_slow(
        [("mistral", True)],
        [
            ("gpt2", False),
            ("qwen3", True),
            ("qwen3", False),
            ("gpt2", True),
            ("mistral", False),
            *itertools.product(["qwen2", "gpt_neox"], [False, True]),
        ],
    ),
)
def test_two_by_two_ranks_to_one(ranks: RankPool, case: str, is_linked: bool) -> None:
    """FSDP2 over two pairs that share each layer; Mistral's pairs both hold the only key-value head."""
    precision: Precision = "int8" if case in ("qwen3", "gpt2") else "float32"
    deliver(ranks, CONFIGS[case], [1], precision, data_parallel=2, tensor_parallel=2, is_linked=is_linked)


@pytest.mark.parametrize(
    ("case", "is_linked"),
    with_slow(
        [("qwen2", False), ("gpt2", True)],
        [("qwen2", True), ("gpt2", False), ("gpt_neox", False), ("gpt_neox", True)],
    ),
)
def test_two_by_two_ranks_to_a_program_that_reads_where_they_lie(ranks: RankPool, case: str, is_linked: bool) -> None:
    """In the four slots of the trainer's ranks, or over links in those of the generator's own."""
    precision: Precision = "float32" if case == "gpt2" else "bfloat16"
    how = {"data_parallel": 2, "tensor_parallel": 2, "is_linked": is_linked, "kind": ReadingRank}
    deliver(ranks, CONFIGS[case], [1], precision, **how)


@pytest.mark.parametrize(
    ("precision", "is_linked"),
    with_slow(
        [("bfloat16", False), ("fp8", True)],
        [("bfloat16", True), ("fp8", False), ("int8", False), ("int8", True)],
    ),
)
def test_versions_that_stay_on_devices(ranks: RankPool, precision: Precision, is_linked: bool) -> None:
    """What is done with bytes on GPUs, from several sources to a pair and to single replicas."""
    deliver(ranks, CONFIGS["llama"], [2], precision, data_parallel=2, is_linked=is_linked, on_device=True)
    how = {"data_parallel": 2, "tensor_parallel": 2, "is_linked": is_linked, "on_device": True}
    deliver(ranks, CONFIGS["gpt2" if precision == "int8" else "qwen3"], [1], precision, **how)


@pytest.mark.parametrize("precision", with_slow(["int8"], ["float32", "bfloat16"]))
def test_a_mixture_of_experts_from_two_ranks_to_two_replicas(ranks: RankPool, precision: Precision) -> None:
    """Ranks of FSDP2 cut through the middle of the third of five experts."""
    deliver(ranks, MIXTURE, [1, 1], precision, data_parallel=2)


@pytest.mark.parametrize(
    ("world", "replicas", "precision"),
    [
        pytest.param(2, [2], "int8", marks=pytest.mark.slow),
        (4, [2], "bfloat16"),
        pytest.param(2, [1], "float32", marks=pytest.mark.slow),
    ],
)
def test_experts_from_the_ranks_that_have_them_to_those_that_want_them(
    ranks: RankPool, world: int, replicas: list[int], precision: Precision
) -> None:
    deliver(ranks, replace(MIXTURE, num_experts=4), replicas, precision, data_parallel=world, experts=True)


@pytest.mark.parametrize("is_linked", with_slow([True], [False]))
def test_two_pipeline_stages_to_one_and_to_a_pair(ranks: RankPool, is_linked: bool) -> None:
    """A tied embedding lies on both stages; GPT-2's positions on the first, with chunks 0 and 2 of four."""
    deliver(ranks, replace(CONFIGS["gpt2"], num_layers=5), [1], "int8", stages=2, chunks=2, is_linked=is_linked)
    deliver(ranks, CONFIGS["qwen2"], [2], "float32", stages=2, tensor_parallel=2, is_linked=is_linked)
    deliver(ranks, CONFIGS["llama"], [1], "bfloat16", data_parallel=2, stages=2, is_linked=is_linked)


def test_uneven_and_replicated_shards(ranks: RankPool) -> None:
    """Three ranks cut rows that three does not divide; two times two ranks hold everything twice."""
    deliver(ranks, replace(CONFIGS["llama"], intermediate_size=52), [2], "int8", data_parallel=3)
    deliver(ranks, CONFIGS["gpt_neox"], [2], data_parallel=4, replicate=True)


def test_changes_alone_travel_where_they_are_less(ranks: RankPool) -> None:
    config = CONFIGS["llama"]
    with running(ranks, config, [2], "bfloat16", data_parallel=2, is_linked=True, delta=True) as (generators, test, _):
        received: list[list[int]] = []
        for version in (0, 1000, 2000, 2001, 3001):  # a thousand apart, versions differ in a few weights
            publish(test, version)
            take(generators, version)
            for generator in generators:
                generator.check(version)
            received.append([generator.subscriber._fetch.received_bytes for generator in generators])
        for rank in range(2):
            first, _, _, changed, fewer = np.diff([0, *(row[rank] for row in received)])
            assert first == changed
            assert fewer < first / 3


def test_a_replica_that_dies_touches_no_other_and_comes_back(ranks: RankPool) -> None:
    config = CONFIGS["llama"]
    with running(ranks, config, [1, 1], data_parallel=2, is_linked=True) as (generators, test, _):
        publish(test, 0)
        take(generators, 0)
        dead, alive = generators
        dead.close()
        tell(test, "lost 0")
        for version in (1, 2, 3):
            publish(test, version)
            take([alive], version)
        generators[0] = GeneratorRank(alive.trainer, alive.channels, 0, 0, 1, incarnation=2)
        tell(test, "back 0 2")
        take(generators[:1], 3)
        for generator in generators:
            generator.check(3)


def test_a_source_that_hangs_costs_one_transfer(ranks: RankPool) -> None:
    """The old version runs on; when the source goes on, a new link brings what was missed."""
    config = CONFIGS["llama"]
    with running(ranks, config, [1], data_parallel=2, is_linked=True, timeout_s=1.0) as (generators, test, _):
        (generator,) = generators
        publish(test, 0)
        take(generators, 0)
        publish(test, 1)
        assert wait(generator.ports.inputs.values(), [], timeout_s=DEADLINE_S)
        hung = ranks.processes[1].pid
        os.kill(hung, signal.SIGSTOP)
        try:
            while generator.subscriber.stats.num_failed_transfers == 0:
                if not generator.subscriber.poll():
                    assert wait([], [], generator.subscriber.wait_fds(), timeout_s=DEADLINE_S)
        finally:
            os.kill(hung, signal.SIGCONT)
        assert "broke before version 1" in str(generator.subscriber.failure)
        assert generator.subscriber.version == 0
        generator.check(0)
        take(generators, 1)
        generator.check(1)
