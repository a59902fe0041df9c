"""`generator.tensor_parallel` with vLLM: its arguments, threads and processes. A run: `test_vllm_weights.py`."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.controller.build import nodes
from slipstream.controller.placement import check_processes, most_processes, place
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.generator.vllm.backend import environment, spec_of
from slipstream.generator.vllm.settings import check_settings


def config_of(engine: str = "vllm", **generator: Any) -> RunConfig:
    return resolve("quickstart", {"generator": {"engine": engine, **generator}})


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_vllm_is_given_the_ranks_of_the_recipe(ranks: int) -> None:
    config = config_of(tensor_parallel=ranks)
    check_settings(config)
    assert spec_of(config, max_len=100, stop_token_ids=[]).engine_args["tensor_parallel_size"] == ranks


def test_ranks_divide_the_threads_of_a_replica() -> None:
    def threads(num_threads: int, ranks: int) -> str:
        return environment(config_of().generator.vllm, num_threads=num_threads, ranks=ranks)["OMP_NUM_THREADS"]

    assert [threads(8, 1), threads(8, 2), threads(7, 2), threads(1, 2)] == ["8", "4", "3", "1"]


def test_one_process_of_ours_drives_all_ranks() -> None:
    """It has all threads of the replica; native ranks are processes of their own, which share them."""
    vllm, native = config_of(tensor_parallel=2), config_of("native", tensor_parallel=2)
    for config, ranks, together in ((vllm, 1, 4), (native, 2, 2)):
        assert place(config, 8)["generator"].together == together
        assert [node.ranks for node in nodes(config) if node.name == "generator-0"] == [ranks]


@pytest.mark.parametrize("engine", ["vllm", "native"])
def test_a_machine_has_room_for_the_ranks(engine: str) -> None:
    most, _ = most_processes()
    check_processes(config_of(engine, replicas=2, tensor_parallel=most // 2), ["generator"], has_workers=False)
    with pytest.raises(ConfigError, match="more processes than this machine can have"):
        check_processes(config_of(engine, replicas=2, tensor_parallel=most // 2 + 1), ["generator"], has_workers=False)


def test_only_native_ranks_need_processes_of_the_run() -> None:
    def inline(engine: str) -> RunConfig:
        return resolve("quickstart", {"host": "inline", "generator": {"engine": engine, "tensor_parallel": 2}})

    assert inline("vllm").generator.ranks == 1
    with pytest.raises(ConfigError, match="processes of their own"):
        inline("native")


@pytest.mark.parametrize("engine", ["vllm", "native"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_argument_is_refused_in_favour_of_the_field(engine: str, size: int) -> None:
    """The error has all four parts; the hint is what takes the argument's place."""
    config = config_of(engine, vllm={"engine_args": {"tensor_parallel_size": size, "block_size": 32}})
    with pytest.raises(ConfigError) as refused:
        check_settings(config)
    assert [line.split(maxsplit=1)[1] for line in str(refused.value).splitlines()] == [
        "divides the model, whatever the engine is",
        f"generator.vllm.engine_args with tensor_parallel_size = {size}",
        "generator.tensor_parallel, without generator.vllm.engine_args.tensor_parallel_size",
        f"generator.tensor_parallel = {size}",
    ]
