"""Versions that vLLM reads where they lie: every family, what is noticed, and whose slots they are meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import fill
from in_process import InProcess
from test_vllm_folder import fresh as fresh_model
from vllm_kit import PublishedModel, folder_of

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.core.channel import connect_local
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.errors import WeightSyncError
from slipstream.generator.vllm.slot_extension import SlotExtension, TornVersionError, read_push
from slipstream.generator.vllm.weights import SlotWeights, describe
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import logical_tensors
from slipstream.models.quantized import WeightLayout
from slipstream.models.shards import load_shard
from slipstream.models.tensor_parallel import TensorParallel
from slipstream.models.transformer import Transformer
from slipstream.weight_sync.copying import HOST
from slipstream.weight_sync.publisher import Publisher
from slipstream.weight_sync.segment import SharedMemory
from slipstream.weight_sync.slots import Commit
from slipstream.weight_sync.subscriber import Subscriber

FAMILIES = pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gpt2"])
TOKENS = np.arange(10, dtype=np.int32)


def fresh(family: str, *, tied: bool) -> Transformer:
    if family == "mistral":  # which only a checkpoint has
        return Transformer(replace(fresh_model("llama", tied=tied).config, family="mistral"))
    return fresh_model(family, tied=tied)


class FakeWorker(SlotExtension):
    """A worker of vLLM whose model is that of transformers, and whose reload copies tensors as they come."""

    def __init__(self, base: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)).eval()
        self.model_config = SimpleNamespace(dtype=self.model.dtype)
        self.loaded: set[str] = set()

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        own = self.model.state_dict()
        for name, tensor in weights_iterator:
            if name == "embed_out.weight" and name not in own:  # transformers 5 renames GPT-NeoX's head as it loads
                name = "lm_head.weight"
            assert own[name].shape == tensor.shape, name
            own[name].copy_(tensor)
            self.loaded.add(name)

    def logprobs(self) -> torch.Tensor:
        tokens = torch.from_numpy(TOKENS).long()
        with torch.no_grad():
            rows = torch.log_softmax(self.model(tokens[None]).logits[0].float(), -1)
        return rows[:-1].gather(1, tokens[1:, None])[:, 0]


@FAMILIES
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_read_is_the_policy(family: str, tied: bool) -> None:
    """transformers computes from it what the policy does, with a head of its own, and misses no parameter."""
    model = fresh(family, tied=tied)
    fill(model, 1)
    folder = folder_of(model)
    try:
        worker = FakeWorker(folder.base)
        worker.load_slipstream_push(str(folder.write(0)))
        assert worker.loaded == {name for name, _ in worker.model.named_parameters()}
        ours = torch.from_numpy(probe_logprobs(model, TOKENS))
        torch.testing.assert_close(worker.logprobs(), ours, atol=1e-5, rtol=0)
    finally:
        folder.close()


@FAMILIES
def test_slots_in_bfloat16_are_read_as_they_are(family: str, tmp_path: Path) -> None:
    model = fresh(family, tied=True)
    fill(model, 1)
    PublishedModel(model, "bfloat16").write(tmp_path / "push")
    found = dict(read_push(str(tmp_path / "push")))
    expected = logical_tensors(model)
    expected |= dict.fromkeys(found.keys() - expected.keys(), next(iter(expected.values())))  # the head
    assert len(found) == len(expected)
    num_halved = sum(tensor.numel() for tensor in found.values() if tensor.dtype == torch.bfloat16)
    assert num_halved > 0.9 * sum(tensor.numel() for tensor in found.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].float(), tensor, rtol=2**-8, atol=0)


def placed_ranks(model: Transformer, world: int, transport: SharedMemory) -> list[Any]:
    """A version of `model` divided over the ranks of a trainer; returns its places."""
    places = []
    for rank in range(world):
        part = TensorParallel(model.config, rank, world).new_model()
        load_shard(part, logical_tensors(model))
        layout = WeightLayout(part, "float32")
        slots = transport.create(layout.num_bytes, 2, layout.holding)
        for _ in layout.pack(dict(part.named_parameters()), slots.data(0)):
            pass
        slots.commit(0, Commit(7, 0))
        places.append(slots.place(0))
    return places


@FAMILIES
def test_parts_of_several_ranks_are_put_together(family: str, tmp_path: Path) -> None:
    model = fresh(family, tied=family != "qwen2")
    fill(model, 2)
    places = placed_ranks(model, 2, SharedMemory("slots", (tmp_path,)))
    push = tmp_path / "push"
    push.write_text(json.dumps(describe(places, model.config, "float32")))
    found = dict(read_push(str(push)))
    for name, tensor in logical_tensors(model).items():
        assert torch.equal(found.pop(name), tensor), name
    assert len(found) == model.config.tie_embeddings
    with pytest.raises(WeightSyncError, match="no rank of the trainer holds some"):
        describe(places[:1], model.config, "float32")
    with pytest.raises(WeightSyncError, match="not of vLLM's model"):
        describe(places, replace(model.config, intermediate_size=56), "float32")


def test_a_slot_that_is_written_meanwhile_is_noticed(tmp_path: Path) -> None:
    model = fresh("llama", tied=True)
    published = PublishedModel(model)
    push = tmp_path / "push"
    published.write(push)
    slots, slot = published.slots, published.slot

    def load(after: int) -> None:
        """Read, with the slot written again behind tensor number `after`."""
        for number, _ in enumerate(read_push(str(push))):
            if number == after:
                slots.invalidate(slot)

    num_tensors = sum(1 for _ in read_push(str(push)))
    for after in (0, num_tensors // 2, num_tensors - 1):
        with pytest.raises(TornVersionError, match="was written while it was read"):
            load(after)
        commit = Commit(slot, 0)
        slots.commit(slot, commit)
        with pytest.raises(TornVersionError):
            load(-1)  # it is another version's by now
        slots.commit(slot, Commit(slot, _checksum(slots, slot)))
    load(-1)


def _checksum(slots: Any, slot: int) -> int:
    return HOST.copy(torch.empty(slots.num_bytes, dtype=torch.uint8), slots.data(slot), slots.checksums(slot))


def test_what_is_read_cannot_be_written_to(tmp_path: Path) -> None:
    model = fresh("llama", tied=True)
    published = PublishedModel(model)
    published.write(tmp_path / "push")
    before = published.slots.data(published.slot).clone()
    for _, tensor in read_push(str(tmp_path / "push")):
        tensor.zero_()
    assert torch.equal(published.slots.data(published.slot), before)


class Rig:
    """A trainer, and a generator whose vLLM reads each version when it is committed; its probe is a norm's weight."""

    def __init__(self, folder: Path) -> None:
        self.model = fresh("llama", tied=True)
        parameters = FlatParameters(self.model)
        self.ports = connect_local(
            [
                ChannelSpec("offers", Kind.WEIGHTS, "t.offers", "g.offers"),
                ChannelSpec("releases", Kind.GATHER, "g.releases", "t.releases"),
            ]
        )
        transport = SharedMemory("slots", (folder,))
        trainer, generator = self.ports["t"], self.ports["g"]
        self.publisher = Publisher(trainer.outputs["offers"], trainer.inputs["releases"], transport, num_readers=1)
        self.publisher.open(parameters.flat, None, WeightLayout(self.model, "float32").holding)
        self.flat, self.file = parameters.flat, folder / "push"
        self.weights = SlotWeights(self.model.config, "float32")
        self.weights.push = self.read
        self.read_values: list[float] = []
        self.subscriber = Subscriber(generator.inputs["offers"], generator.outputs["releases"], transport, replica=0)
        self.subscriber.open(self.weights, lambda tokens: np.full(3, self.read_values[-1]), 1e-3, is_threaded=False)

    def read(self) -> None:
        """What vLLM does, now or when it is started again: all of the version must be there."""
        self.weights.write(self.file)
        values = {float(value) for _, tensor in read_push(str(self.file)) for value in tensor.unique()}
        assert len(values) == 1, "of several versions"
        self.read_values.append(values.pop())

    def publish(self, version: int, probe: float | None = None) -> bool:
        self.flat.fill_(float(version))
        value = version if probe is None else probe
        return self.publisher.publish(version, TOKENS[:4], np.full(3, value, np.float32))

    def take(self) -> Any:
        self.subscriber.poll()
        swap = self.subscriber.commit()
        self.publisher.poll()
        return swap

    def close(self) -> None:
        self.subscriber.close()
        self.publisher.close()
        for ports in self.ports.values():
            ports.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_the_live_version_can_be_read_again_until_another_is_live(rig: Rig) -> None:
    """However far the trainer is ahead: it never waits, and never writes where vLLM may look."""
    assert rig.publish(0)
    assert rig.take().version == 0
    assert rig.publish(1)
    rig.subscriber.poll()
    assert rig.subscriber.pending_version == 1
    for version in (2, 3, 4):
        assert not rig.publish(version), "one lies ready, and one is live"
        rig.read()
    assert rig.read_values == [0.0] * 4
    assert rig.take().version == 1
    rig.read()
    assert rig.take().version == 4, "it was offered when the slot of 0 came free"
    assert rig.read_values == [0.0] * 4 + [1.0, 1.0, 4.0]
    for version in range(5, 12):
        assert rig.publish(version)
        assert rig.take().version == version
        rig.read()
    assert rig.publisher.stats.num_skipped == 3


def test_a_version_that_waits_gives_way_to_a_newer_one_with_its_slot(rig: Rig) -> None:
    assert rig.publish(0)
    rig.subscriber.poll()
    assert rig.publish(1)
    rig.subscriber.poll()
    assert rig.subscriber.pending_version == 1
    rig.publisher.poll()
    assert rig.publish(2), "the slot of 0 is free again"
    assert rig.take().version == 2


def test_a_refused_version_gives_its_slot_back_and_the_old_one_is_loaded_again(rig: Rig) -> None:
    assert rig.publish(0)
    assert rig.take().version == 0
    assert rig.publish(1, probe=9.0)
    with pytest.raises(WeightSyncError, match="version 1 does not reproduce"):
        rig.take()
    assert rig.read_values == [0.0, 1.0, 0.0]
    rig.publisher.poll()
    for version in (2, 3, 4):
        assert rig.publish(version)
        assert rig.take().version == version


def test_a_damaged_slot_never_gets_to_vllm(rig: Rig) -> None:
    assert rig.publish(0)
    assert rig.take().version == 0
    assert rig.publish(1)
    slots, slot = rig.publisher._slots, 1
    assert slots is not None
    assert slots.committed(slot) is not None
    slots.data(slot)[slots.num_bytes // 2] ^= 1
    assert rig.take() is None
    assert "damaged" in str(rig.subscriber.failure)
    assert rig.read_values == [0.0]
    assert rig.publish(2), "its slot was released"
    assert rig.take().version == 2


def test_weights_that_vllm_does_not_take_leave_the_old_version(rig: Rig) -> None:
    assert rig.publish(0)
    assert rig.take().version == 0
    before = rig.weights.flat

    def fail() -> None:
        raise RuntimeError("vLLM is gone")

    rig.weights.push = fail
    assert rig.publish(1)
    with pytest.raises(RuntimeError, match="gone"):
        rig.take()
    assert rig.weights.flat is before
    rig.weights.push = rig.read
    rig.read()
    assert rig.read_values[-1] == 0.0


def test_the_places_of_one_process_alone_are_refused() -> None:
    with pytest.raises(WeightSyncError, match="memory of one process"):
        InProcess().create(8, 1).place(0)
    bare = SharedMemory("slots").create(8, 1)
    with pytest.raises(WeightSyncError, match="what lies where"):
        bare.place(0)
    bare.close()
