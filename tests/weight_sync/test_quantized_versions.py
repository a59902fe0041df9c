"""Versions at every precision, from a trainer's model to a generator's, through all transports."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from covering import covering
from file_handles import ipc
from in_process import InProcess

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.core.channel import connect_local, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.errors import WeightSyncError
from slipstream.core.fields import Precision
from slipstream.core.sections import PROBE_TOLERANCES, ModelConfig
from slipstream.generator.step_graphs import WeightAddresses
from slipstream.models.flat import FlatParameters
from slipstream.models.initialise import new_model
from slipstream.models.quantized import FORMATS, Packer, WeightLayout
from slipstream.models.served import ServedLinear, ServedWeights
from slipstream.weight_sync.copying import HOST
from slipstream.weight_sync.publisher import MOST_UNREAD, Publisher
from slipstream.weight_sync.reader import SegmentReader
from slipstream.weight_sync.segment import SharedMemory
from slipstream.weight_sync.slots import Transport
from slipstream.weight_sync.subscriber import Subscriber

CONFIG = ModelConfig(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1, max_positions=64)
TOKENS = np.random.default_rng(0).integers(0, 40, 32).astype(np.int32)


class Loop:
    """A trainer's model and a generator's, built apart, with weight sync between them."""

    def __init__(
        self,
        transport: Transport,
        precision: Precision,
        *,
        in_place: bool,
        is_threaded: bool,
        on_device: bool = False,
        probes_prepared: bool = True,
    ) -> None:
        self.ports = connect_local(
            [
                ChannelSpec("offers", Kind.WEIGHTS, "t.offers", "g.offers"),
                ChannelSpec("releases", Kind.GATHER, "g.releases", "t.releases"),
            ]
        )
        self.trained = new_model(CONFIG, vocab_size=40, seed=0)
        flat = FlatParameters(self.trained)
        self.layout = WeightLayout(self.trained, precision)
        trainer, generator = self.ports["t"], self.ports["g"]
        self.publisher = Publisher(trainer.outputs["offers"], trainer.inputs["releases"], transport, num_readers=1)
        self.publisher.open(flat.flat, None if precision == "float32" else Packer(self.layout, flat.named_views()))
        self.model = new_model(CONFIG, vocab_size=40, seed=1)
        self.served = ServedWeights(self.model, precision, in_place=in_place, on_device=on_device)
        self.subscriber = Subscriber(generator.inputs["offers"], generator.outputs["releases"], transport, replica=0)
        self.subscriber.open(
            self.served,
            lambda tokens: probe_logprobs(self.served.prepared_model if probes_prepared else self.model, tokens),
            PROBE_TOLERANCES[precision],
            is_threaded=is_threaded,
            probes_prepared=probes_prepared,
        )

    def train(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.trained.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))

    def publish(self, version: int, *, offset: float = 0.0) -> bool:
        return self.publisher.publish(version, TOKENS, probe_logprobs(self.trained, TOKENS) + np.float32(offset))

    def packed(self) -> torch.Tensor:
        out = torch.zeros(self.layout.num_bytes, dtype=torch.uint8)
        list(self.layout.pack(dict(self.trained.named_parameters()), out))
        return out

    def close(self) -> None:
        self.publisher.close()
        self.subscriber.close()
        for ports in self.ports.values():
            ports.close()


def poll_until_quiet(subscriber: Subscriber) -> None:
    while subscriber.poll() or wait([], [], subscriber.wait_fds(), timeout_s=10):
        pass


WAYS = ["process-by-pointer", "process-in-place", "memory-by-pointer", "memory-in-place", "ipc"]
"""The transport, and how weights are exchanged; over IPC they are as on GPUs."""


@pytest.fixture(params=[pytest.param(pair.values, marks=pair.marks) for pair in covering(WAYS, FORMATS)], ids="-".join)
def loop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loop]:
    way, precision = request.param
    transport: Transport = SharedMemory("test", (tmp_path,)) if way.startswith("process") else InProcess()
    if way == "ipc":
        transport = ipc("test", tmp_path)
    loop = Loop(transport, precision, in_place=way.endswith("in-place"), is_threaded=False, on_device=way == "ipc")
    yield loop
    loop.close()


def test_versions_arrive_as_they_were_packed(loop: Loop) -> None:
    for version in range(4):
        loop.train(version)
        sent = loop.packed()
        assert loop.publish(version)
        loop.train(100 + version)  # the optimizer goes on at once
        loop.subscriber.poll()
        swap = loop.subscriber.commit()
        assert swap is not None
        assert swap.version == version
        assert torch.equal(loop.served.flat, sent)
        assert loop.publisher.poll()
    assert loop.publisher.stats.payload_bytes == 4 * loop.layout.num_bytes == 4 * loop.publisher.num_bytes


def test_a_skipped_version_is_offered_as_it_was_then(loop: Loop) -> None:
    for version in range(MOST_UNREAD + 3):  # two slots, and what is taken back unread
        loop.train(version)
        assert loop.publish(version) == (version < MOST_UNREAD + 2)
    sent = loop.packed()
    loop.train(99)
    loop.subscriber.poll()
    loop.publisher.poll()
    loop.subscriber.poll()
    swap = loop.subscriber.commit()
    assert swap is not None
    assert swap.version == MOST_UNREAD + 2
    assert torch.equal(loop.served.flat, sent)


def test_damaged_bytes_are_refused(loop: Loop) -> None:
    before, bytes_before = probe_logprobs(loop.model, TOKENS), loop.served.flat.clone()
    assert loop.publish(0)
    slots = loop.publisher._slots
    assert slots is not None
    for index in (0, loop.layout.num_bytes // 2, loop.layout.num_bytes - 1):
        slots.data(0)[index] ^= 1
    loop.subscriber.poll()
    assert loop.subscriber.pending_version is None
    assert loop.subscriber.failure is not None
    assert "damaged" in str(loop.subscriber.failure)
    assert np.array_equal(probe_logprobs(loop.model, TOKENS), before)
    assert not loop.served.reads_flat or torch.equal(loop.served.flat, bytes_before)


def test_a_failed_probe_changes_nothing(loop: Loop) -> None:
    assert loop.publish(0)
    loop.subscriber.poll()
    loop.subscriber.commit()
    before, bytes_before = probe_logprobs(loop.model, TOKENS), loop.served.flat.clone()
    loop.publisher.poll()
    loop.train(1)
    assert loop.publish(1, offset=10.0)
    loop.subscriber.poll()
    with pytest.raises(WeightSyncError, match="does not reproduce"):
        loop.subscriber.commit()
    assert loop.subscriber.version == 0
    assert np.array_equal(probe_logprobs(loop.model, TOKENS), before)
    assert not loop.served.reads_flat or torch.equal(loop.served.flat, bytes_before)


@pytest.mark.parametrize("precision", list(FORMATS))
def test_what_is_live_or_pinned_does_not_read_the_buffer_it_came_in(precision: Precision) -> None:
    """On a CPU the next version arrives in the same one, while rows and evaluations go on."""
    models = [new_model(CONFIG, vocab_size=40, seed=1) for _ in range(2)]
    served = ServedWeights(models[0], precision)
    before = probe_logprobs(models[0], TOKENS)
    served.serve(models[1], served.pinned())
    assert not served.reads_flat
    assert served.flat.any()
    served.flat.zero_()
    assert all(np.array_equal(probe_logprobs(model, TOKENS), before) for model in models)
    served.prepare(served.flat)
    served.rebind(served.flat)
    assert not np.array_equal(probe_logprobs(models[0], TOKENS), before)
    assert np.array_equal(probe_logprobs(models[1], TOKENS), before), "an evaluation keeps its version"
    served.rebind(served.flat)
    assert np.array_equal(probe_logprobs(models[0], TOKENS), before), "undone"


@pytest.mark.parametrize("precision", list(FORMATS))
def test_an_exchange_on_the_device_moves_no_weight_and_can_be_undone(precision: Precision, tmp_path: Path) -> None:
    """Where the probe follows the exchange: bytes, logprobs and addresses are those of the version before."""
    loop = Loop(
        ipc("test", tmp_path), precision, in_place=True, is_threaded=False, on_device=True, probes_prepared=False
    )
    assert loop.publish(0)
    loop.subscriber.poll()
    assert loop.subscriber.commit() is not None
    addresses, before = [tensor.data_ptr() for tensor in _tensors_of(loop.model)], loop.served.flat
    bytes_before, logprobs = before.clone(), probe_logprobs(loop.model, TOKENS)
    loop.publisher.poll()
    loop.train(1)
    assert loop.publish(1, offset=10.0)
    loop.subscriber.poll()
    with pytest.raises(WeightSyncError, match="does not reproduce"):
        loop.subscriber.commit()
    assert loop.served.flat is before
    assert torch.equal(before, bytes_before)
    assert np.array_equal(probe_logprobs(loop.model, TOKENS), logprobs)
    loop.publisher.poll()
    loop.train(2)
    sent = loop.packed()
    assert loop.publish(2)
    loop.subscriber.poll()
    assert loop.subscriber.commit() is not None
    assert loop.served.flat is not before
    assert torch.equal(loop.served.flat, sent)
    assert torch.equal(before, bytes_before), "the other tensor has the version before"
    assert [tensor.data_ptr() for tensor in _tensors_of(loop.model)] == addresses
    loop.close()


def _tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """All that a served model computes with."""
    products = [module.product for module in model.modules() if isinstance(module, ServedLinear)]
    found = [each for product in products for each in vars(product).values() if isinstance(each, torch.Tensor)]
    return [*found, model.embedding.product.keywords["table"].values, *model.parameters()]


@pytest.mark.parametrize("in_place", [False, True])
def test_what_staging_has_probed_is_what_a_commit_makes_live(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging runs the probe text, with the new weights; commit exchanges and computes nothing, whatever it finds."""
    loop = Loop(InProcess(), "float32", in_place=in_place, is_threaded=False)
    loop.train(0)
    before, probed = probe_logprobs(loop.model, TOKENS), probe_logprobs(loop.trained, TOKENS)
    assert loop.publish(0)
    loop.subscriber.poll()
    assert np.array_equal(probe_logprobs(loop.model, TOKENS), before)
    assert np.abs(probe_logprobs(loop.served.prepared_model, TOKENS) - probed).max() < 1e-5
    monkeypatch.setattr(loop.subscriber, "_probe", None)
    swap = loop.subscriber.commit()
    assert swap is not None
    assert swap.probe_error < 1e-5
    assert np.abs(probe_logprobs(loop.model, TOKENS) - probed).max() < 1e-5
    loop.close()


def test_a_version_that_staging_found_wrong_never_becomes_live(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(InProcess(), "float32", in_place=False, is_threaded=False)
    assert loop.publish(0, offset=10.0)
    loop.subscriber.poll()
    monkeypatch.setattr(loop.served, "rebind", None)
    with pytest.raises(WeightSyncError, match="mean difference 10 nats"):
        loop.subscriber.commit()
    assert loop.subscriber.pending_version is None
    loop.close()


@pytest.mark.parametrize("is_threaded", [False, True])
def test_a_probe_that_breaks_down_is_no_failed_transfer(is_threaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the run with its own error, where a transfer that failed would only be waited out."""
    loop = Loop(InProcess(), "float32", in_place=False, is_threaded=is_threaded)

    def probe(tokens: np.ndarray) -> np.ndarray:
        raise MemoryError("no room for the probe")

    monkeypatch.setattr(loop.subscriber, "_probe", probe)
    assert loop.publish(0)
    with pytest.raises(MemoryError, match="no room for the probe"):
        poll_until_quiet(loop.subscriber)
    assert loop.subscriber.pending_version is None
    loop.close()


def test_prepared_weights_that_were_passed_over_are_let_go() -> None:
    """Two versions at a time are in memory, never three."""
    model = new_model(CONFIG, vocab_size=40, seed=1)
    served = ServedWeights(model, "int8")
    flats = [served.flat.clone() for _ in range(3)]
    served.prepare(flats[0])
    heads = [weakref.ref(served.prepared_model.served_head)]
    served.prepare(flats[1])
    assert heads[0]() is None
    heads.append(weakref.ref(served.prepared_model.served_head))
    served.rebind(flats[1])
    assert model.served_head is heads[1]()
    served.prepare(flats[2])
    served.rebind(flats[2])
    served.prepare(flats[0])
    assert heads[1]() is None


@pytest.mark.parametrize("precision", list(FORMATS))
def test_staging_in_a_thread_prepares_beside_the_live_weights(precision: Precision, tmp_path: Path) -> None:
    loop = Loop(SharedMemory("test", (tmp_path,)), precision, in_place=False, is_threaded=True)
    loop.train(0)
    assert loop.publish(0)
    before = probe_logprobs(loop.model, TOKENS)
    num_threads, priority = torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, 0)
    loop.subscriber.poll()
    assert loop.subscriber._thread is not None
    loop.subscriber._thread.join(30)
    assert (torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, 0)) == (num_threads, priority)
    assert np.array_equal(probe_logprobs(loop.model, TOKENS), before)
    loop.subscriber.poll()
    assert loop.subscriber.pending_version == 0
    assert loop.subscriber.commit() is not None
    assert torch.equal(loop.served.flat, loop.packed())
    loop.close()


def test_an_evaluation_computes_with_a_copy_on_the_device() -> None:
    served = ServedWeights(new_model(CONFIG, vocab_size=40, seed=1), "bfloat16", on_device=True)
    pinned = served.flat.to("cpu", copy=True)
    model = new_model(CONFIG, vocab_size=40, seed=2)
    ServedWeights(model, "bfloat16", flat=pinned, on_device=True)
    logprobs = probe_logprobs(model, TOKENS)
    served.rebind(torch.zeros_like(served.flat))
    assert np.array_equal(probe_logprobs(model, TOKENS), logprobs)


def test_ends_of_different_precision_refuse_each_other() -> None:
    transport = InProcess()
    loop = Loop(transport, "int8", in_place=False, is_threaded=False)
    other = ServedWeights(new_model(CONFIG, vocab_size=40, seed=1), "bfloat16")
    loop.subscriber._parameters, loop.subscriber._shadow = other, torch.empty_like(other.flat)
    loop.subscriber._fetch = SegmentReader(transport, other.holding)
    assert loop.publish(0)
    loop.subscriber.poll()
    assert "disagree about model.embed_tokens.weight" in str(loop.subscriber.failure)
    assert len(HOST.bytes_of(other.flat)) == other.num_bytes
    loop.close()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("precision", list(FORMATS))
def test_weights_of_evaluations_stay_in_place_from_version_to_version(precision: Precision, on_device: bool) -> None:
    models = [new_model(CONFIG, vocab_size=40, seed=1) for _ in range(2)]
    served = ServedWeights(models[0], precision, in_place=True, on_device=on_device)
    own = served.serve(models[1], served.pinned())
    assert own is not None
    addresses = WeightAddresses(models[1])
    versions = [ServedWeights(new_model(CONFIG, vocab_size=40, seed=seed), precision).flat for seed in (2, 3, 4)]
    for version in versions[:2]:
        served.rebind(version.clone())
        expected = probe_logprobs(models[0], TOKENS)
        pinned = served.pinned()
        served.rebind(versions[2].clone())
        assert not np.array_equal(probe_logprobs(models[0], TOKENS), expected)
        own.load(pinned)
        assert np.array_equal(probe_logprobs(models[1], TOKENS), expected)
        addresses.check()
