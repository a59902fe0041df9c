"""Shares of one GPU's memory for trainer and generator: chosen from planned bytes, refused where these do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import slipstream
from slipstream.batching import collate
from slipstream.core.clock import WallClock
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.rank_group import RankGroup
from slipstream.core.recipes import resolve
from slipstream.core.spans import NoSpans
from slipstream.generator import backends
from slipstream.generator.device import kv_bytes_beside
from slipstream.generator.native import NativeBackend
from slipstream.models.build import build_tokenizer
from slipstream.models.config import config_to_hf
from slipstream.models.device import take_share
from slipstream.models.preflight import check_policy
from slipstream.models.sizes import num_parameters
from slipstream.plan.one_gpu import costs_of, critic_bytes, generator_bytes, trainer_bytes, with_shares
from slipstream.prompts import build_prompts
from slipstream.stages.chain import check_data, check_stages
from slipstream.stages.rl import FromPython
from slipstream.trainer.critic_executor import CriticModel
from slipstream.trainer.policy import Policy

LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_layers": 8, "num_heads": 8, "num_kv_heads": 8}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes torch count so many GPUs of so many GB."""

    def pretend(count: int, gigabytes: float) -> None:
        found = SimpleNamespace(total_memory=int(gigabytes * 1e9))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    return pretend


def config_of(trainer: dict[str, Any] | None = None, generator: dict[str, Any] | None = None, **rest: Any) -> RunConfig:
    bf16 = {"device": "cuda", "precision": "bfloat16"}
    return resolve(
        "quickstart",
        {"model": LARGE, "trainer": bf16 | (trainer or {}), "generator": bf16 | (generator or {})} | rest,
    )


def test_shares_are_chosen_where_both_sides_share_a_gpu_and_said_in_one_line(gpus: Any) -> None:
    gpus(1, 24)
    config = config_of()
    shared, line = with_shares(config)
    trainer, generator = shared.trainer.gpu_share, shared.generator.gpu_share
    assert line is not None
    assert "\n" not in line
    assert f"trainer.gpu_share = {trainer:g}" in line
    assert f"generator.gpu_share = {generator:g}" in line
    assert trainer + generator <= 0.95
    shape = check_policy(config)
    assert trainer_bytes(config, shape).total <= trainer * 24e9
    assert generator_bytes(config, shape, all_slots=True).total <= 0.85 * generator * 24e9
    assert with_shares(shared) == (shared, None), "what is chosen passes its own check"


def test_prompts_without_a_limit_are_planned_when_they_are_read(gpus: Any) -> None:
    """A model has far more positions than most data: with prompts as long as that this one takes several GPUs."""
    gpus(1, 24)
    model, prompts = LARGE | {"max_positions": 131072}, {"max_prompt_tokens": None}
    config = config_of({"microbatch_tokens": 2048}, model=model, prompts=prompts)
    with pytest.raises(ConfigError, match="do not fit one GPU together"):
        with_shares(config)
    check_stages(config)
    with pytest.raises(ConfigError, match="do not fit one GPU together") as refused:
        check_stages(config_of(model=model, prompts={"max_prompt_tokens": 130000}))
    assert "prompts.max_prompt_tokens" in str(refused.value)


def test_a_chain_is_planned_with_its_longest_prompt_before_its_first_stage(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus(1, 24)
    config = config_of(stages=["sft", "rl"], prompts={"max_prompt_tokens": None})
    planned: list[int | None] = []

    def noted(config: RunConfig, **_: Any) -> None:
        planned.append(config.prompts.max_prompt_tokens)

    monkeypatch.setattr("slipstream.plan.one_gpu.with_shares", noted)
    check_stages(config)
    check_data(config, tmp_path, FromPython(display=False))
    assert planned == [1, build_prompts(config, build_tokenizer(config.model)).report.longest]
    assert planned[1] > 1


def test_without_a_shared_gpu_all_is_as_it_was(gpus: Any) -> None:
    gpus(2, 24)
    for apart in (config_of(), config_of(generator={"device": "cuda:1"}), resolve("quickstart", {})):
        assert with_shares(apart) == (apart, None)
    replicas = config_of(generator={"device": "cuda:1", "replicas": 2})
    assert with_shares(replicas) == (replicas, None)
    gpus(1, 24)
    assert with_shares(config_of(), remote=["generator"])[1] is None
    inline = config_of(host="inline")
    assert with_shares(inline) == (inline, None)


def test_a_teacher_inside_the_trainer_is_counted_whole(gpus: Any, tmp_path: Path) -> None:
    gpus(1, 24)
    shape = check_policy(config_of())
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(replace(shape, num_layers=2 * shape.num_layers))))
    of = {
        where: trainer_bytes(config_of(teacher={"path": str(tmp_path), "executor": where, "top_k": 8}), shape)
        for where in ("trainer", "own")
    }
    num = num_parameters(replace(shape, num_layers=2 * shape.num_layers))
    assert of["trainer"].total - of["own"].total == of["trainer"]["teacher"] == 6 * num


def test_several_replicas_on_the_trainers_gpu_divide_what_it_leaves(gpus: Any) -> None:
    gpus(1, 24)
    shared, _ = with_shares(config_of(generator={"replicas": 3}))
    assert shared.trainer.gpu_share + 3 * shared.generator.gpu_share <= 0.95


def test_the_side_without_a_share_gets_what_the_other_leaves(gpus: Any) -> None:
    gpus(1, 24)
    shared, line = with_shares(config_of(trainer={"gpu_share": 0.5}))
    assert (shared.trainer.gpu_share, shared.generator.gpu_share) == (0.5, 0.45)
    assert line is not None
    shared, _ = with_shares(config_of(generator={"gpu_share": 0.25}))
    assert shared.trainer.gpu_share == 0.7


@pytest.mark.parametrize(
    ("changes", "gigabytes", "complaint"),
    [
        ({"trainer": {"gpu_share": 0.7}, "generator": {"gpu_share": 0.4}}, 24, r"(?s)sum to more than 1.*0\.7.*0\.4"),
        ({"generator": {"gpu_share": 0.6, "replicas": 2}}, 24, r"(?s)sum to more than 1.*2 x generator.gpu_share"),
        ({"trainer": {"gpu_share": 0.05}}, 24, "(?s)trainer is planned to take more.*0.05.*offload_moments"),
        ({"generator": {"gpu_share": 0.01}}, 24, "(?s)generator is planned to take more.*num_slots"),
        ({}, 3, "(?s)do not fit one GPU together.*trainer: .*weights.*generator: .*cuda:1"),
        ({"generator": {"device": "cuda:1"}, "trainer": {"gpu_share": 0.01}}, 24, "trainer is planned to take more"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    changes: dict[str, Any], gigabytes: float, complaint: str, gpus: Any, tmp_path: Any
) -> None:
    gpus(2 if changes.get("generator", {}).get("device") == "cuda:1" else 1, gigabytes)
    config = config_of(**changes)
    with pytest.raises(ConfigError, match=complaint):
        with_shares(config)
    with pytest.raises(ConfigError, match=complaint):
        slipstream.run("quickstart", overrides=_overrides(changes), out=tmp_path / "run", display=False)
    assert not (tmp_path / "run" / "events.jsonl").exists()


def _overrides(changes: dict[str, Any]) -> dict[str, Any]:
    bf16 = {"device": "cuda", "precision": "bfloat16"}
    sides = {name: bf16 | changes.get(name, {}) for name in ("trainer", "generator")}
    return {"model": LARGE, **sides}


PPO = {"loss": {"name": "ppo", "advantages": "gae"}}
OWN = {"executor": "own", "device": "cuda"}


def test_a_critic_of_its_own_on_the_gpu_of_both_sides_is_a_third_one(gpus: Any) -> None:
    gpus(1, 48)
    config = config_of(critic=OWN, **PPO)
    shared, line = with_shares(config)
    shares = {name: vars(shared)[name].gpu_share for name in ("trainer", "generator", "critic")}
    assert sum(shares.values()) <= 0.95
    assert line is not None
    assert all(f"{name}.gpu_share = {share:g}" in line for name, share in shares.items())
    shape = check_policy(config)
    planned = critic_bytes(config, shape).total
    assert planned <= 0.92 * shares["critic"] * 48e9 < planned + 0.01 * 48e9
    assert planned > 16 * (trainer_bytes(config, shape)["moments"] / 8)
    assert trainer_bytes(config, shape).total <= 0.92 * shares["trainer"] * 48e9
    assert generator_bytes(config, shape, all_slots=True).total <= 0.85 * shares["generator"] * 48e9
    assert with_shares(shared) == (shared, None), "what is chosen passes its own check"
    alone, _ = with_shares(config_of())
    assert shares["trainer"] < alone.trainer.gpu_share


@pytest.mark.parametrize(
    ("count", "critic", "generator", "remote"),
    [
        (2, OWN, {"device": "cuda:1"}, []),
        (2, OWN, {"device": "cuda:0"}, []),
        (1, OWN, {}, ["critic"]),
        (1, {"executor": "own"}, {}, []),
        (1, {}, {}, []),
    ],
)
def test_a_critic_elsewhere_is_no_side(
    count: int, critic: dict[str, Any], generator: dict[str, Any], remote: list[str], gpus: Any
) -> None:
    gpus(count, 48)
    trainer = {"precision": "bfloat16" if "device" in critic or not critic else "float32"}
    config = config_of(trainer, generator, critic=critic, **PPO)
    shared, line = with_shares(config, remote=remote)
    assert shared.critic.gpu_share is None
    if generator.get("device") != "cuda:1":
        assert shared.trainer.gpu_share + shared.generator.gpu_share > 0.93
        assert "critic" not in str(line)
    else:
        assert (shared, line) == (config, None)


def test_a_critic_gets_what_its_side_leaves_and_a_share_that_is_given_holds(gpus: Any) -> None:
    gpus(1, 48)
    shared, _ = with_shares(config_of({"gpu_share": 0.3}, {"gpu_share": 0.2}, critic=OWN, **PPO))
    assert 0 < shared.critic.gpu_share <= 0.5
    shared, _ = with_shares(config_of(critic=OWN | {"gpu_share": 0.4}, **PPO))
    assert shared.critic.gpu_share == 0.4
    assert 0.5 < shared.trainer.gpu_share + shared.generator.gpu_share <= 0.55


@pytest.mark.parametrize(
    ("sides", "gigabytes", "complaint"),
    [
        (({}, {}, {}), 10, "(?s)trainer and generator and critic do not fit.*critic: .*moments.*critic.executor = 't"),
        (
            ({"gpu_share": 0.5}, {"gpu_share": 0.45}, {}),
            48,
            "(?s)sum to more than 1.*critic.gpu_share.*critic.executor",
        ),
        (({}, {}, {"gpu_share": 0.02}), 48, "(?s)critic is planned to take more.*0.02.*offload_moments"),
    ],
)
def test_a_critic_that_does_not_fit_beside_both_is_refused(
    sides: tuple[dict[str, Any], ...], gigabytes: float, complaint: str, gpus: Any
) -> None:
    gpus(1, gigabytes)
    trainer, generator, critic = sides
    with pytest.raises(ConfigError, match=complaint):
        with_shares(config_of(trainer, generator, critic=OWN | critic, **PPO))
    if gigabytes < 48:
        assert with_shares(config_of(trainer, generator))[1] is not None, "both sides alone fit"


def test_a_critic_that_starts_from_another_model_is_planned_by_its_size(tmp_path: Any) -> None:
    config = config_of(critic=OWN, **PPO)
    shape = check_policy(config)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(replace(shape, num_layers=16))))
    larger = config.model_copy(update={"critic": config.critic.model_copy(update={"path": str(tmp_path)})})
    layers = 8 * (4 * 1024 * 1024 + 3 * 1024 * 4096 + 2 * 1024)
    own, other = critic_bytes(config, shape), critic_bytes(larger, shape)
    assert other["moments"] - own["moments"] == 8 * layers
    later = config.critic.model_copy(update={"path": "stage:reward_model"})
    assert critic_bytes(config.model_copy(update={"critic": later}), shape) == own


CAST = {"device": "cuda", "precision": "bfloat16"}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"critic": {"gpu_share": 0.5}}, "critic.executor = 'own'"),
        ({"critic": {"gpu_share": 0.5, "executor": "own"}}, "critic.device = 'cuda'"),
        ({"trainer": {"gpu_share": 0.5}}, "trainer.device = 'cuda'"),
        ({"trainer": {"offload_moments": True}}, "moments lie there"),
        ({"generator": {"gpu_share": 0.5}}, "generator.device = 'cuda'"),
        ({"generator": {"gpu_share": 0.5, "engine": "vllm"}}, "generator.vllm.kv_cache_gb"),
        ({"generator": {"gpu_share": 1.5}}, "gpu_share"),
        ({"generator": {"gpu_share": 0.5, "device": "cuda"}, "host": "inline"}, "is a process's"),
        ({"trainer": CAST | {"compute_copy": False}, "host": "inline"}, "compute_copy = false with host = 'inline'"),
        ({"trainer": CAST, "model": {"lora": {"rank": 8}}, "host": "inline"}, "model.lora with host = 'inline'"),
    ],
)
def test_what_the_schema_refuses(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        resolve("quickstart", changes)


def test_offloaded_moments_are_planned_with_one_tensors(gpus: Any) -> None:
    plain, offloaded = (config_of(trainer={"offload_moments": offloads}) for offloads in (False, True))
    shape = check_policy(plain)
    with_moments, without = (trainer_bytes(config, shape) for config in (plain, offloaded))
    largest = 2 * shape.intermediate_size * shape.hidden_size  # gate and up: the vocabulary has few characters
    assert largest > shape.vocab_size * shape.hidden_size
    assert without["moments"] == 8 * largest
    assert with_moments.total - without.total == with_moments["moments"] - 8 * largest > 0
    gpus(1, 24)
    assert with_shares(offloaded)[0].generator.gpu_share >= with_shares(plain)[0].generator.gpu_share


@pytest.mark.parametrize(
    ("changes", "is_in_place"),
    [
        ({}, True),
        ({"max_staleness": 1}, False),
        ({"trainer": {"publish_in_place": False}}, False),
        ({"trainer": {"compute_copy": False}}, False),
        ({"generator": {"precision": "fp8"}}, False),
        ({"generator": {"delta": True}}, False),
        ({"model": {**LARGE, "lora": {"rank": 4}}}, False),
    ],
)
def test_versions_in_place_take_no_bytes(changes: dict[str, Any], is_in_place: bool) -> None:
    """Where both sides take turns on GPUs, in bfloat16."""
    config = config_of(**{"max_staleness": 0, "weight_update": "between_batches", **changes})
    assert config.publishes_in_place is is_in_place
    shape = check_policy(config)
    assert ("staging" in trainer_bytes(config, shape).parts) is not is_in_place


def test_pages_are_bounded_by_the_share(gpus: Any) -> None:
    """Of all the GPU's memory, not of a part that is divided by replicas already."""
    gpus(1, 24)
    backend = NativeBackend.__new__(NativeBackend)
    backend._device, backend.weights = torch.device("cuda", 0), SimpleNamespace(num_bytes=10**9, base_bytes=0)
    backend._group, backend._is_remote = SimpleNamespace(max=lambda one: one), False
    for share, expected in ((0.5, 12e9), (None, 24e9)):
        backend._config = config_of(generator={"gpu_share": share})
        assert backend._kv_bytes() == kv_bytes_beside(10**9, int(expected))
    backend._config = config_of(generator={"gpu_share": 0.25, "replicas": 2})
    assert backend._kv_bytes() == kv_bytes_beside(10**9, int(6e9))
    for is_remote, expected in ((False, 12e9), (True, 24e9)):  # the run's two replicas; another machine's GPU has one
        backend._config, backend._is_remote = config_of(generator={"replicas": 2}), is_remote
        assert backend._kv_bytes() == kv_bytes_beside(10**9, int(expected))
    backend.weights.base_bytes = 4 * 10**9
    assert backend._kv_bytes() == pytest.approx((0.85 * 24e9 - 4e9 - 3e9) / 2), "beside the base of adapters"


def test_a_replica_that_joins_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(backends, "NativeBackend", lambda config, *, is_remote, **rest: told.append(is_remote))
    for is_remote in (True, False):
        context = SimpleNamespace(group=RankGroup.alone(), is_remote=is_remote)
        here = SimpleNamespace(config=config_of(), context=context, replica=0, tokenizer=None, stop_token_ids=())
        here.spans = here.clock = None
        backends.BACKENDS["native"](here)  # type: ignore[arg-type]
    assert told == [True, False]


@pytest.mark.parametrize(
    ("changes", "is_read"),
    [
        ({}, False),
        ({"kl": {"coef": 0.1}}, True),
        ({"kl": {"coef": 0.1, "executor": "own"}}, False),
        ({"loss": {"name": "online_dpo", "select": "best_and_worst"}}, True),  # without a penalty
    ],
)
def test_a_reference_is_planned_beside_the_trainer_that_reads_it(changes: dict[str, Any], is_read: bool) -> None:
    config = config_of(**changes)
    assert costs_of(config, check_policy(config)).workload.reference == is_read


def test_a_trainer_of_adapters_is_planned_by_their_rank() -> None:
    plain, adapted = config_of(), config_of(model={**LARGE, "lora": {"rank": 4}})
    shape = check_policy(plain)
    whole, few = (trainer_bytes(config, shape) for config in (plain, adapted))
    assert 0 < few["moments"] < 0.05 * whole["moments"]
    assert few["weights"] >= whole["weights"]


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("rows", [8, 4096])
def test_planned_bytes_of_a_generator_are_those_that_its_pages_take(rows: int, rank: int | None) -> None:
    config = config_of(generator={"num_slots": rows})
    shape = check_policy(config)
    planned = generator_bytes(config, shape, all_slots=True)
    weights, base = planned["weights"] / 3, 0.0
    if rank is not None:  # a base, once, and versions of A and B of four square matrices and of gate, up and down
        base, weights = weights, 4 * rank * 8 * (4 * (1024 + 1024) + 3 * (1024 + 4096))
        config = config_of(model={**LARGE, "lora": {"rank": rank}}, generator={"num_slots": rows})
        planned = generator_bytes(config, shape, all_slots=True)
        assert planned["weights"] == base + 3 * weights
    numbers = 2 * shape.num_layers * shape.kv_size * 2  # bytes of a token's keys and values in bfloat16
    pages = -(-config.longest_sequence(shape.max_positions) // 16)
    found = kv_bytes_beside(int(weights), int(planned.total / 0.85), int(base))
    assert found == pytest.approx(rows * pages * 16 * numbers, rel=1e-3)


@pytest.mark.parametrize(
    ("divided", "part"),
    [
        ({"context_parallel": 2}, "activations"),
        ({"pipeline_parallel": 2}, "activations"),
        ({"expert_parallel": 2}, "gathered"),
    ],
)
def test_what_ranks_divide_is_planned_once(divided: dict[str, int], part: str) -> None:
    model = LARGE | {"family": "qwen3_moe", "num_experts": 4, "experts_per_token": 2}
    plain, shared = (config_of(model=model, trainer={"ranks": 2, **fields}) for fields in ({}, divided))
    shape = check_policy(plain)
    assert trainer_bytes(shared, shape)[part] < 0.75 * trainer_bytes(plain, shape)[part]
    if "pipeline_parallel" in divided:
        return  # without a critic
    own = {"critic": {"executor": "own", "ranks": 2, "device": "cuda"}, "loss": {"name": "ppo", "advantages": "gae"}}
    critics = [config_of(model=model, trainer={"ranks": 2, **fields}, **own) for fields in ({}, divided)]
    assert critic_bytes(critics[0], shape) == critic_bytes(critics[1], shape), "a critic's own ranks divide none of it"


def test_a_stage_of_a_replica_is_planned_with_its_layers_and_counted_on_its_gpu(gpus: Any) -> None:
    plain, staged = config_of(), config_of(generator={"pipeline_parallel": 2})
    shape = check_policy(plain)
    whole, half = (generator_bytes(config, shape, all_slots=True) for config in (plain, staged))
    assert half["keys_and_values"] == pytest.approx(whole["keys_and_values"] / 2, rel=0.01)
    assert half["weights"] == pytest.approx(whole["weights"] / 2, rel=0.01)
    gpus(3, 48)
    stages = {"pipeline_parallel": 2, "replicas": 2, "gpu_share": 0.3}  # on GPUs 0 and 1, 2 and 0
    with pytest.raises(ConfigError, match=r"(?s)on cuda:0.*2 x generator.gpu_share = 0.3"):
        with_shares(config_of(trainer={"gpu_share": 0.5}, generator=stages))


@pytest.mark.parametrize(("num_gpus", "generates_on"), [(1, "cuda:0"), (2, "cuda:1")])
def test_each_process_takes_its_share_before_anything_lies_on_the_gpu(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, num_gpus: int, generates_on: str
) -> None:
    gpus(num_gpus, 24)
    taken: list[tuple[float, str]] = []

    def take(share: float, device: torch.device) -> None:
        taken.append((share, str(device)))
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", take)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    config = config_of(trainer={"gpu_share": 0.5}, generator={"gpu_share": 0.25})
    with_share = config.critic.model_copy(update=OWN | {"gpu_share": 0.125})
    with pytest.raises(InterruptedError):
        Policy(config)
    tokenizer = build_tokenizer(config.model)
    with pytest.raises(InterruptedError):
        NativeBackend(config, tokenizer=tokenizer, seed=0, stop_token_ids=[], spans=NoSpans(), clock=WallClock())
    critic = CriticModel(config=config.model_copy(update={"critic": with_share}), batching=collate)
    critic._context = SimpleNamespace(group=RankGroup.alone())
    with pytest.raises(InterruptedError):
        _ = critic._division
    assert taken == [(0.5, "cuda:0"), (0.25, generates_on), (0.125, f"cuda:{num_gpus - 1}")]
    take_share(None, torch.device("cuda", 0))
    take_share(0.5, torch.device("cpu"))
