"""Versions that generators read from the weights which the trainer computes with, where both sides take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from file_handles import CPU, FileHandles, ipc
from gradients import named_grads
from in_process import InProcess
from test_ipc_fallback import Foreign, Unshareable, warnings_of

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.core.channel import connect_local
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.errors import WeightSyncError
from slipstream.core.peer_messages import WeightsOffered, WeightsWanted
from slipstream.core.sections import PROBE_TOLERANCES, ModelConfig
from slipstream.core.training_sections import OptimizerConfig
from slipstream.models.compute_copy import ComputeCopy
from slipstream.models.initialise import new_model
from slipstream.models.quantized import Packer, WeightLayout
from slipstream.models.served import ServedWeights
from slipstream.models.sharded import Division, ShardedParameters
from slipstream.trainer.optim import AdamW
from slipstream.weight_sync import cuda_ipc
from slipstream.weight_sync.cuda_ipc import CudaIpc
from slipstream.weight_sync.device_memory import DeviceMemory
from slipstream.weight_sync.publisher import Publisher
from slipstream.weight_sync.segment import SegmentSlots, SharedMemory
from slipstream.weight_sync.slots import Transport
from slipstream.weight_sync.subscriber import Subscriber

SIZES = ModelConfig(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1, max_positions=64)
TOKENS = np.random.default_rng(0).integers(0, 40, 32).astype(np.int32)
NUM_REPLICAS = 2


class Trained:
    """A model as one GPU trains it in bfloat16: float32 weights, the copy that passes compute with, AdamW."""

    def __init__(self, *, has_head: bool) -> None:
        config = SIZES.model_copy(update={"tie_embeddings": not has_head})
        self.model = new_model(config, vocab_size=40, seed=0)
        self.model.compute_copy = ComputeCopy(self.model, torch.bfloat16)
        self.parameters = ShardedParameters(self.model, Division(precision="bfloat16", copies=True))
        self.optimizer = AdamW(self.parameters, OptimizerConfig(lr=1e-2), total_updates=8)
        self.layout = WeightLayout(self.model, "bfloat16")

    def packer(self) -> Packer:
        return Packer(self.layout, self.parameters.named_views(), copy=self.model.compute_copy)

    def update(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for grad in named_grads(self.parameters).values():
            grad.copy_(torch.randn(grad.shape, generator=generator))
        self.optimizer.step()
        self.parameters.zero_grad()

    def rounded(self) -> torch.Tensor:
        """The bytes of a version, from the float32 weights."""
        out = torch.zeros(self.layout.num_bytes, dtype=torch.uint8)
        list(self.layout.pack(self.parameters.named_views(), out))
        return out


class Turns:
    """A trainer that publishes in place, and two replicas, which have its transport or the `readers`' own."""

    def __init__(self, transport: Transport, *, has_head: bool, readers: Sequence[Transport] = ()) -> None:
        names = [f"g{replica}" for replica in range(NUM_REPLICAS)]
        offers = [ChannelSpec(f"offers-{name}", Kind.BROADCAST, "t.offers", f"{name}.offers") for name in names]
        releases = [ChannelSpec(f"releases-{name}", Kind.GATHER, f"{name}.releases", "t.releases") for name in names]
        self.ports = connect_local([*offers, *releases])
        self.trained = Trained(has_head=has_head)
        self.publisher = Publisher(
            self.ports["t"].outputs["offers"],
            self.ports["t"].inputs["releases"],
            transport,
            num_readers=NUM_REPLICAS,
            num_slots=1,
            in_place=True,
        )
        self.publisher.open(None, self.trained.packer())
        self.served, self.subscribers = list[ServedWeights](), list[Subscriber]()
        for replica, (name, of_reader) in enumerate(zip(names, readers or [transport] * NUM_REPLICAS, strict=True)):
            self.join(replica, name, of_reader)

    def join(self, replica: int, name: str, transport: Transport) -> None:
        ports = self.ports[name]
        model = new_model(self.trained_config, vocab_size=40, seed=1)
        served = ServedWeights(model, "bfloat16", on_device=True)
        subscriber = Subscriber(ports.inputs["offers"], ports.outputs["releases"], transport, replica=replica)
        tolerance = PROBE_TOLERANCES["bfloat16"]
        subscriber.open(served, lambda tokens: probe_logprobs(model, tokens), tolerance, is_threaded=False)
        self.served.append(served)
        self.subscribers.append(subscriber)

    @property
    def trained_config(self) -> ModelConfig:
        return SIZES.model_copy(update={"tie_embeddings": self.trained.model.config.tie_embeddings})

    def publish(self, version: int) -> None:
        assert self.publisher.publish(version, TOKENS, probe_logprobs(self.trained.model, TOKENS))

    def close(self) -> None:
        self.publisher.close()
        for subscriber in self.subscribers:
            subscriber.close()
        for ports in self.ports.values():
            ports.close()


@pytest.fixture(params=["memory", "process", "ipc"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Transport:
    ways = {
        "memory": InProcess,
        "process": lambda: SharedMemory("test", (tmp_path,)),
        "ipc": lambda: ipc("test", tmp_path),
    }
    return ways[request.param]()


@pytest.fixture(params=[False, True], ids=["tied", "head"])
def turns(request: pytest.FixtureRequest, transport: Transport) -> Iterator[Turns]:
    made = Turns(transport, has_head=request.param)
    yield made
    made.close()


def test_what_is_computed_with_is_what_is_published(turns: Turns) -> None:
    """Weights, and versions, are to the bit those of a trainer that publishes copies."""
    plain = Trained(has_head=not turns.trained.model.config.tie_embeddings)
    for version in range(4):
        assert turns.publisher.withdraw()
        turns.trained.update(version)
        plain.update(version)
        turns.publish(version)
        for served, subscriber in zip(turns.served, turns.subscribers, strict=True):
            subscriber.poll()
            swap = subscriber.commit()
            assert swap is not None
            assert swap.probe_error < 0.05  # one side rounds what the other multiplies
            assert torch.equal(served.flat, plain.rounded())
        for name, weight in plain.parameters.named_views().items():
            assert torch.equal(turns.trained.parameters.named_views()[name], weight), name
    assert turns.publisher.stats.num_published == 4
    assert turns.publisher.stats.num_skipped == 0


def test_weights_wait_for_everyone_who_reads_them(turns: Turns) -> None:
    turns.publish(0)
    first, second = turns.subscribers
    first.poll()
    assert not turns.publisher.withdraw(), "the other has not read it"
    second.poll()
    assert turns.publisher.withdraw()
    assert turns.publisher.withdraw(), "asking twice changes nothing"


def test_weights_do_not_wait_for_the_dead(turns: Turns) -> None:
    turns.publish(0)
    turns.subscribers[0].poll()
    assert not turns.publisher.withdraw()
    turns.publisher.drop_reader(1)
    assert turns.publisher.withdraw()


def test_who_comes_back_while_weights_change_gets_the_next_version(turns: Turns, transport: Transport) -> None:
    turns.publish(0)
    for subscriber in turns.subscribers:
        subscriber.poll()
    assert turns.publisher.withdraw()
    turns.publisher.drop_reader(1)
    turns.publisher.add_reader(1)
    turns.subscribers[1].close()
    turns.join(1, "g1", transport)
    turns.publisher.poll()
    turns.subscribers[2].poll()
    assert turns.subscribers[2].pending_version is None
    turns.trained.update(0)
    turns.publish(1)
    turns.subscribers[2].poll()
    assert turns.subscribers[2].commit() is not None
    assert torch.equal(turns.served[2].flat, turns.trained.rounded())


def test_a_late_reader_never_gets_what_is_being_changed(turns: Turns, transport: Transport) -> None:
    """It had been given up, and reads all the same: the marker is gone with the first change."""
    late = turns.ports["g1"].inputs["offers"]
    turns.publish(0)
    turns.publisher.drop_reader(1)
    turns.subscribers[0].poll()
    assert turns.publisher.withdraw()
    turns.trained.update(0)
    offer = late.get_nowait()
    assert isinstance(offer, WeightsOffered)
    slots = transport.attach(offer.segments[0])
    assert slots.committed(offer.slot) is None


def test_nothing_but_what_is_float32_in_a_version_lies_elsewhere(turns: Turns) -> None:
    slot = turns.publisher._opened().data(0)
    copy = turns.trained.model.compute_copy
    assert copy is not None
    begin, end = slot.data_ptr(), slot.data_ptr() + slot.nbytes
    types = {stored.name: stored.dtype for stored in turns.trained.layout.stored}
    for name, view in copy.named_views().items():
        assert (begin <= view.data_ptr() < end) == (types[name] == torch.bfloat16), name


def test_in_place_needs_weights_that_can_be_put_there() -> None:
    publisher = Publisher(None, None, InProcess(), num_readers=0, in_place=True)
    with pytest.raises(WeightSyncError, match="need a packer"):
        publisher.open(torch.zeros(8))


# By way of host memory


@pytest.mark.parametrize("fault", ["exported by nobody", "opened by one of two"])
@pytest.mark.parametrize("has_head", [False, True], ids=["tied", "head"])
def test_where_memory_cannot_be_shared_the_mirror_has_each_version(
    fault: str, has_head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To the bit, while the weights that it was copied from wait for everyone who reads, and change after that."""
    monkeypatch.setattr(cuda_ipc, "MIRROR_WAIT_S", 0.05)  # nobody answers while the one thread waits
    is_foreign = fault == "opened by one of two"
    sender, *handles = (FileHandles(tmp_path), Foreign(tmp_path)) if is_foreign else (Unshareable(tmp_path),) * 2
    transport, *readers = (
        CudaIpc("test", DeviceMemory(CPU), handles=one, directories=(tmp_path,))
        for one in (sender, *handles, FileHandles(tmp_path))
    )
    turns, plain = Turns(transport, has_head=has_head, readers=readers), Trained(has_head=has_head)
    slots = turns.publisher._opened()
    assert isinstance(slots, SegmentSlots)
    mirror = None if slots.mirror_name is None else SegmentSlots(Path(slots.mirror_name), is_owner=False)
    assert (mirror is None) == is_foreign, "nobody has asked for it"
    for version in range(3):
        assert turns.publisher.withdraw()
        before = None if mirror is None else mirror.data(0).clone()
        for trained in (turns.trained, plain):
            trained.update(version)
        expected = plain.rounded()
        assert mirror is None or torch.equal(mirror.data(0), before), "a copy of its own"
        turns.publish(version)
        assert mirror is None or torch.equal(mirror.data(0), expected)
        for served, subscriber in zip(turns.served, turns.subscribers, strict=True):
            for _ in range(5):
                assert not turns.publisher.withdraw(), "it is being read; who asks for host memory is heard"
                subscriber.poll()
                if subscriber.pending_version == version:
                    break
            swap = subscriber.commit()
            assert swap is not None
            assert swap.version == version
            assert swap.probe_error < 0.05
            assert torch.equal(served.flat, expected)
        assert slots.mirror_name is not None
        mirror = SegmentSlots(Path(slots.mirror_name), is_owner=False)
        assert torch.equal(mirror.data(0), expected)
        assert mirror.committed(0) == slots.committed(0) is not None
    assert turns.publisher.withdraw()
    assert [one.stats.num_failed_transfers for one in turns.subscribers] == [0, 0]
    assert turns.publisher.stats.num_skipped == 0
    (warning,) = warnings_of(caplog)
    assert "by way of host memory" in warning
    turns.close()
    assert not list(tmp_path.glob("slipstream*")), "segments are gone, both of them"


def test_who_cannot_map_while_weights_change_gets_nothing_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica comes back, cannot open the handle, and asks for host memory between `withdraw` and the next version:
    the mirror that is made then is empty until that version."""
    monkeypatch.setattr(cuda_ipc, "MIRROR_WAIT_S", 0.05)
    foreign = CudaIpc("test", DeviceMemory(CPU), handles=Foreign(tmp_path), directories=(tmp_path,))
    turns = Turns(ipc("test", tmp_path), has_head=True)
    late = turns.ports["g1"].inputs["offers"]
    turns.publish(0)
    turns.subscribers[0].poll()
    offer = late.get_nowait()
    assert isinstance(offer, WeightsOffered)
    turns.publisher.drop_reader(1)
    assert turns.publisher.withdraw()
    turns.trained.update(0)
    turns.subscribers[1].close()
    turns.join(1, "g1", foreign)
    turns.publisher._want(WeightsWanted(replica=1, rank=0, world=1, is_linked=False, in_host_memory=True))
    slots = turns.publisher._opened()
    assert isinstance(slots, SegmentSlots)
    assert slots.mirror_name is not None
    assert SegmentSlots(Path(slots.mirror_name), is_owner=False).committed(0) is None
    turns.publisher.add_reader(1)
    turns.publish(1)
    for _ in range(5):
        turns.publisher.poll()
        turns.subscribers[2].poll()
    assert turns.subscribers[2].commit() is not None
    assert torch.equal(turns.served[2].flat, turns.trained.rounded())
    turns.close()
