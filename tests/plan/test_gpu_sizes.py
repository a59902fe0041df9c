"""Rows and prefill by the GPU, where a run does not say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.core.config import RunConfig
from slipstream.core.recipes import resolve
from slipstream.plan import gpu_sizes
from slipstream.plan.gpu_sizes import ROWS, device_called, prefill_tokens_on, rows_on, with_sizes
from slipstream.plan.hardware import DEVICES

H100 = DEVICES["H100"]
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_layers": 16, "num_heads": 16, "num_kv_heads": 4}


def config_of(model: dict[str, Any] | None = None, **generator: Any) -> RunConfig:
    given = {"device": "cuda", "precision": "bfloat16", "num_slots": None} | generator
    work = {"groups_per_step": 128, "completions_per_group": 8}
    return resolve("quickstart", work | {"model": model or {}, "generator": given})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    def pretend(name: str, gigabytes: float = 80.0, num_gpus: int = 1) -> None:
        found = SimpleNamespace(name=name, total_memory=int(gigabytes * 1e9))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)

    return pretend


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L40S", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_gpus_are_known_by_their_names(name: str, known: str | None) -> None:
    device = device_called(name)
    assert (None if device is None else device.name) == known


def test_a_prefill_is_long_enough_to_be_bound_by_products() -> None:
    """At the tokens chosen, reading 1 parameter takes at most a tenth of multiplying by it; at half of them not."""
    for name, device in DEVICES.items():
        tokens = prefill_tokens_on(device, config_of())
        read_s = 2 / (device.memory_bandwidth * 0.85)

        def multiply_s(tokens: float, device: Any = device) -> float:
            return 2 * tokens / (device.flops["bfloat16"] * 0.65)

        assert read_s <= 0.1 * multiply_s(tokens), name
        assert tokens == 512 or read_s > 0.1 * multiply_s(tokens / 2), name
    assert prefill_tokens_on(H100, config_of()) == 4096


def test_rows_are_as_many_as_still_pay_and_have_work_and_memory() -> None:
    plenty = 60e9
    rows = rows_on(H100, config_of(LARGE), plenty)
    assert rows in ROWS
    assert rows >= 256
    assert rows_on(H100, config_of(LARGE, replicas=16), plenty) < rows, "as many completions as are in flight"
    assert rows_on(H100, config_of(LARGE), 2e9) == 64, "and where nothing fits, `with_shares` refuses"


def test_what_is_given_stays_and_so_does_a_cpu_and_a_gpu_without_rates(gpu: Any) -> None:
    gpu("NVIDIA H100 80GB HBM3")
    sized, line = with_sizes(config_of(LARGE))
    assert line is not None
    assert line == f"on H100: generator.prefill_tokens = 4096, generator.num_slots = {sized.generator.num_slots}"
    assert (sized.generator.rows, sized.generator.prefilled) == (sized.generator.num_slots, 4096)
    assert with_sizes(sized) == (sized, None), "a resumed run keeps its sizes"
    given, line = with_sizes(config_of(num_slots=8))
    assert (given.generator.rows, line) == (8, "on H100: generator.prefill_tokens = 4096")
    assert with_sizes(config_of(), remote=["generator"])[1] is None
    gpu("NVIDIA GeForce RTX 4090")
    for same in (config_of(), config_of(device="cpu", precision="float32")):
        assert with_sizes(same) == (same, None)
        assert (same.generator.rows, same.generator.prefilled) == (64, 512)


def test_the_trainer_takes_no_half_of_a_gpu_that_it_is_not_on(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    free: list[float] = []
    monkeypatch.setattr(gpu_sizes, "rows_on", lambda device, config, usable: free.append(usable) or 64)
    alone = config_of()
    beside = alone.model_copy(update={"trainer": alone.trainer.model_copy(update={"device": "cuda"})})
    named = beside.model_copy(update={"generator": beside.generator.model_copy(update={"device": "cuda:1"})})
    for config, num_gpus in ((alone, 1), (beside, 2), (named, 2), (beside, 1)):
        gpu("NVIDIA H100 80GB HBM3", 80.0, num_gpus)
        with_sizes(config)
    assert free == pytest.approx([0.85 * 80e9, 0.85 * 80e9, 0.85 * 80e9, 0.85 * 40e9])
