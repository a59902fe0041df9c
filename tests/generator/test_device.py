"""Where replicas compute, what is refused before a run starts, and how a GPU's memory is divided: no GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.controller.pipeline import Node
from slipstream.controller.placement import Threads, place
from slipstream.controller.weights import gpu_of
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.sections import ModelConfig
from slipstream.generator.device import USABLE_MEMORY, check_device, kv_bytes_beside, most_on_one, replica_device
from slipstream.generator.native import move_but_linear
from slipstream.models.build import build_policy
from slipstream.models.linear import Linear
from slipstream.stages.named import resolve

GIB = 2**30


def config_of(host: str = "process", **generator: Any) -> RunConfig:
    return resolve("quickstart", {"host": host, "generator": generator})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes torch count so many GPUs of a compute capability."""

    def pretend(count: int, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return pretend


def test_replicas_are_dealt_out_to_the_gpus_or_put_on_one() -> None:
    spread = config_of(device="cuda", replicas=5)
    assert [str(replica_device(spread, replica, 2)) for replica in range(5)] == [f"cuda:{n}" for n in (0, 1, 0, 1, 0)]
    assert most_on_one(spread.generator, 2) == 3
    together = config_of(device="cuda:1", replicas=5)
    assert {str(replica_device(together, replica, 2)) for replica in range(5)} == {"cuda:1"}
    assert most_on_one(together.generator, 2) == 5
    assert replica_device(config_of(), 3, 0) == torch.device("cpu")


def test_ranks_get_a_gpu_each(gpus: Any) -> None:
    """Neighbours of one replica, as far as the GPUs go."""
    config = config_of(device="cuda", replicas=2, tensor_parallel=2)
    dealt = [str(replica_device(config, replica, 3, rank)) for replica in (0, 1) for rank in (0, 1)]
    assert dealt == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
    assert most_on_one(config.generator, 3) == 2
    gpus(3)
    check_device(config_of(device="cuda", replicas=2, tensor_parallel=2))
    for refused in ({"device": "cuda", "tensor_parallel": 4}, {"device": "cuda:1", "tensor_parallel": 2}):
        with pytest.raises(ConfigError, match="need a GPU each"):
            check_device(config_of(**refused))


@pytest.mark.parametrize(
    ("changes", "num_gpus", "expected"),
    [
        ({}, 8, [2, 3, 4, 5]),  # behind two ranks of the trainer
        ({}, 6, [2, 3, 4, 5]),
        ({}, 5, [0, 1, 2, 3]),  # not enough: with the trainer
        ({"trainer": {"ranks": 2}}, 8, [0, 1, 2, 3]),  # on the CPU
        ({"host": "inline", "trainer": {"device": "cuda"}}, 8, [0, 1, 2, 3]),
        ({"kl": {"coef": 0.1, "executor": "own", "ranks": 2, "device": "cuda"}}, 8, [2, 3, 4, 5]),
        ({"kl": {"coef": 0.1, "executor": "own", "ranks": 2, "device": "cuda"}}, 7, [0, 1, 2, 3]),  # it has the last
        ({"kl": {"coef": 0.1, "executor": "own", "ranks": 2}}, 6, [2, 3, 4, 5]),
        ({"generator": {"device": "cuda:1", "replicas": 4}}, 8, [1, 1, 1, 1]),
    ],
)
def test_replicas_have_the_gpus_behind_the_trainers(
    gpus: Any, changes: dict[str, Any], num_gpus: int, expected: list[int]
) -> None:
    gpus(num_gpus)
    of_four = {"trainer": {"ranks": 2, "device": "cuda"}, "generator": {"device": "cuda", "replicas": 4}}
    config = resolve("quickstart", of_four | changes)
    assert [replica_device(config, replica, num_gpus).index for replica in range(4)] == expected
    nodes = [Node(f"generator-{replica}", dict, kwargs={"config": config}) for replica in range(4)]
    assert [gpu_of(node, 0, 0).index for node in nodes] == expected
    if config.generator.device == "cuda":
        joined = [gpu_of(replace(node, host="torchrun"), 0, 0).index for node in nodes]
        assert joined == [0, 1, 2, 3], "on a machine that has no trainer, as far as the run knows"


def test_only_the_ranks_of_this_machine_need_gpus_here(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a torchrun says in which the run itself was started is no matter."""
    gpus(2)
    check_device(config_of(device="cuda", tensor_parallel=4), local_world=2)
    with pytest.raises(ConfigError, match="need a GPU each"):
        check_device(config_of(device="cuda", tensor_parallel=4), local_world=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    check_device(config_of(device="cuda:1"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="need a GPU each"):
        check_device(config_of(device="cuda", tensor_parallel=4))


@pytest.mark.parametrize("device", ["auto", "cuda:", "cuda:-1", "gpu", "mps", "CPU"])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        config_of(device=device)


@pytest.mark.parametrize(
    ("generator", "complaint"),
    [
        ({"engine": "vllm", "device": "cuda"}, "generator.device is the native engine's"),
        ({"kv_cache_gb": 1.0}, "every slot has room"),
        ({"kv_cache_gb": 1.0, "engine": "vllm"}, "generator.vllm.kv_cache_gb"),
    ],
)
def test_what_the_schema_refuses(generator: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        config_of(**generator)


def test_the_preflight_asks_for_the_gpus_that_are_named(gpus: Any) -> None:
    gpus(0)
    check_device(config_of())
    with pytest.raises(ConfigError, match="none, or none that this torch can use"):
        check_device(config_of(device="cuda"))
    gpus(2)
    check_device(config_of(device="cuda", replicas=3))
    check_device(config_of(device="cuda:1"))
    with pytest.raises(ConfigError, match=r"(?s)cuda:0, cuda:1.*'cuda:0' to 'cuda:1'"):
        check_device(config_of(device="cuda:2"))


def test_the_preflight_knows_what_a_device_multiplies(gpus: Any) -> None:
    gpus(1, (8, 0))
    check_device(config_of(device="cuda", precision="bfloat16"))
    check_device(config_of(precision="int8"))
    for device, precision in (("cpu", "fp8"), ("cuda", "fp8"), ("cuda", "int8"), ("cuda", "mxfp4")):
        with pytest.raises(ConfigError, match=precision):
            check_device(config_of(device=device, precision=precision))
    gpus(1, (9, 0))
    check_device(config_of(device="cuda", precision="fp8"))


def test_replicas_of_one_process_stay_on_one_gpu(gpus: Any) -> None:
    gpus(2)
    with pytest.raises(ConfigError, match="share a process share a GPU"):
        check_device(config_of("inline", device="cuda", replicas=2))
    check_device(config_of("inline", device="cuda"))
    check_device(config_of("inline", device="cuda:1", replicas=2))


def test_a_run_is_refused_before_it_starts(tmp_path: Any) -> None:
    """Here without a GPU, and as a run meets it."""
    import slipstream

    with pytest.raises(ConfigError, match="fp8 needs a GPU"):
        slipstream.run("quickstart", overrides={"generator": {"precision": "fp8"}}, out=tmp_path / "run", display=False)
    assert not (tmp_path / "run" / "events.jsonl").exists()


@pytest.mark.parametrize(("weights_gib", "memory_gib"), [(1, 80), (16, 80), (16, 141), (17, 80), (0, 8)])
def test_two_engines_and_their_weights_fit(weights_gib: int, memory_gib: int) -> None:
    """Both moments that take the most: an evaluation that starts, and one that runs."""
    kv_bytes = kv_bytes_beside(weights_gib * GIB, memory_gib * GIB)
    starting = 4 * weights_gib * GIB + kv_bytes
    running = 3 * weights_gib * GIB + 2 * kv_bytes
    assert max(starting, running) == pytest.approx(USABLE_MEMORY * memory_gib * GIB)


def test_only_linear_layers_stay_where_they_are() -> None:
    model, _ = build_policy(ModelConfig(family="gpt2", tie_embeddings=False), seed=0)
    names, tied = [name for name, _ in model.named_parameters()], model.config.tie_embeddings
    move_but_linear(model, torch.device("meta"))
    assert [name for name, _ in model.named_parameters()] == names
    assert not tied
    assert model.cos.device.type == "meta"
    for module in model.modules():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            assert tensor.device.type == ("cpu" if isinstance(module, Linear) else "meta")


def test_a_replica_on_a_gpu_takes_one_core() -> None:
    on_cpu, on_gpu = config_of(replicas=2), config_of(replicas=2, device="cuda")
    assert place(on_cpu, 8)["generator"] == Threads(together=2, alone=4)
    assert place(on_gpu, 8)["generator"] == Threads(together=1, alone=1)
    assert place(on_gpu, 8)["trainer"] == Threads(together=6, alone=8)
    assert place(on_gpu, 1)["trainer"] == Threads(together=1, alone=1)
