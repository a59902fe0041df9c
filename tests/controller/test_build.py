"""The default pipeline's channels: what completions go through, rank by rank."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from slipstream.controller.build import default_pipeline
from slipstream.controller.checks import check
from slipstream.core.channel import connect_local
from slipstream.core.channel_spec import ROUTES, ChannelSpec, Kind
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.core.types import Completion, Prompt, Rollout
from slipstream.stages.chain import check_stages

MODELS = {"models": [{"path": "rm"}], "model_ranks": 3}


def pipeline_of(**overrides: Any) -> Any:
    return default_pipeline(resolve("quickstart", overrides))


def ways(channels: tuple[ChannelSpec, ...]) -> dict[str, list[str]]:
    """Output port -> its targets, of the channels that completions take."""
    found: dict[str, list[str]] = {}
    for channel in channels:
        if channel.kind in (Kind.SCATTER, Kind.GATHER) and channel.target.split(".")[1] in ("completions", "rollouts"):
            found.setdefault(channel.source, []).append(channel.target)
    return found


def ranks(name: str, port: str, count: int) -> list[str]:
    return [f"{name}@{rank}.{port}" if rank else f"{name}.{port}" for rank in range(count)]


def test_every_rank_that_scores_sends_to_every_rank_that_trains() -> None:
    pipeline = pipeline_of(rewards=MODELS, trainer={"ranks": 4, "tensor_parallel": 2}, generator={"replicas": 2})
    leaders = ["trainer.rollouts", "trainer@2.rollouts"]
    assert ways(pipeline.channels) == {
        "generator-0.completions": ["rewards.completions"],
        "generator-1.completions": ["rewards.completions"],
        "rewards.rollouts": ranks("reward_models", "completions", 3),
        **dict.fromkeys(ranks("reward_models", "scored", 3), leaders),
    }
    connect_local(pipeline.all_channels)  # they fit together


def test_without_functions_replicas_send_to_the_models() -> None:
    pipeline = pipeline_of(rewards=MODELS | {"terms": []}, generator={"replicas": 2})
    models = ranks("reward_models", "completions", 3)
    assert ways(pipeline.channels) == {
        "generator-0.completions": models,
        "generator-1.completions": models,
        **{port: ["trainer.rollouts"] for port in ranks("reward_models", "scored", 3)},
    }


def test_an_own_reference_stands_before_the_trainer() -> None:
    kl = {"coef": 0.1, "executor": "own", "ranks": 2}
    with_models = pipeline_of(rewards=MODELS, kl=kl, trainer={"ranks": 2})
    assert ways(with_models.channels) == {
        "generator-0.completions": ["rewards.completions"],
        "rewards.rollouts": ranks("reward_models", "completions", 3),
        **{port: ranks("reference", "rollouts", 2) for port in ranks("reward_models", "scored", 3)},
        **{port: ranks("trainer", "rollouts", 2) for port in ranks("reference", "measured", 2)},
    }
    connect_local(with_models.all_channels)
    alone = pipeline_of(kl=kl)
    assert ways(alone.channels)["rewards.rollouts"] == ranks("reference", "rollouts", 2)
    assert "reference" not in [node.name for node in pipeline_of(kl={"coef": 0.1}).nodes]


def test_groups_join_from_elsewhere_by_name() -> None:
    config = resolve("quickstart", {"rewards": MODELS, "generator": {"replicas": 2}})
    pipeline = default_pipeline(config, remote=["generator", "reward_models"])
    assert {node.name: node.host for node in pipeline.nodes} == {
        "generator-0": "torchrun",
        "generator-1": "torchrun",
        "rewards": "process",
        "reward_models": "torchrun",
        "trainer": "process",
    }
    with pytest.raises(ConfigError, match="no such group"):
        check(resolve("quickstart", {}), remote=["trainer", "reference"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"host": "inline", "rewards": MODELS}, "processes of their own"),
        ({"host": "inline", "kl": {"coef": 0.1, "executor": "own", "ranks": 2}}, "processes of their own"),
        ({"rewards": {"precision": "bfloat16"}}, "on a CPU reward models compute in float32"),
        ({"gold": {"precision": "bfloat16"}}, "on a CPU reward models compute in float32"),
        ({"kl": {"coef": 0.1, "executor": "own", "precision": "bfloat16"}}, "on a CPU the reference computes"),
        ({"kl": {"coef": 0.1, "ranks": 2}}, "as it trains"),
        ({"kl": {"coef": 0.1, "device": "cuda"}}, "as it trains"),
        ({"rewards": {"device": "cuda:1"}}, "rewards.device"),
    ],
)
def test_what_the_schema_refuses(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve("quickstart", overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"kl": {"executor": "own"}}, "compute what nobody takes"),
        ({"kl": {"coef": 0.1, "executor": "own", "device": "cuda", "ranks": 99}}, "a GPU of its own"),
        ({"rewards": MODELS | {"device": "cuda", "model_ranks": 99}}, "a GPU of its own"),
        ({"trainer": {"device": "cuda", "ranks": 99}}, "a GPU of its own"),
    ],
)
def test_what_is_refused_before_a_run(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(resolve("quickstart", overrides))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_stages_that_score_need_the_gpu_here() -> None:
    gold = {"models": [{"path": "rm"}], "device": "cuda"}
    config = resolve(
        "quickstart",
        {"stages": ["rl", "evaluate"], "gold": gold, "kl": {"coef": 0.1}, "evaluation": {"num_prompts": 8}},
    )
    with pytest.raises(ConfigError, match=r"gold\.device"):
        check_stages(config)


def test_losses_that_compare_with_the_reference_may_have_it_elsewhere() -> None:
    loss = {"name": "online_dpo", "select": "best_and_worst", "advantages": "reward"}
    check(resolve({"prompts": {"tasks": [{"name": "chain_sum"}]}, "loss": loss, "kl": {"executor": "own"}}))


@pytest.mark.parametrize("purpose", ["train", "eval"])
def test_completions_and_their_rollouts_are_dealt_alike(purpose: Any) -> None:
    """A group's samples go round; evaluation has one sample per ordinal."""
    by = {route: ROUTES[f"rollouts/{route}"] for route in ("samples", "groups")}
    for ordinal in range(4):
        for sample in range(4):
            completion = Completion(
                ordinal=ordinal,
                sample=sample,
                prompt=Prompt(prompt_id="", text="", tokens=None, task=""),  # type: ignore[arg-type]
                segments=(),
                text="",
                finish_reason="stop",
                purpose=purpose,
            )
            for message in (completion, Rollout(completion=completion, reward=0.0)):
                assert by["samples"](message, 3) == (ordinal + sample) % 3
                assert by["groups"](message, 3) == ordinal % 3


def test_the_controller_imports_no_executor_and_no_report_before_it_needs_one():
    late = ["generator.executor", "trainer.executor", "trainer.teacher_executor", "observe.report"]
    script = (
        f"import sys, slipstream.stages.rl\nprint([name for name in {late} if 'slipstream.' + name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"


def test_ranks_that_hold_one_copy_are_dealt_completions_by_the_first_of_them() -> None:
    """Copies of a reference on two ranks each, and reward models that all ranks hold: who is sent, hands on, and
    sends on; whose process group reaches GPUs."""
    overrides: dict[str, Any] = {
        "rewards": {"terms": [], "models": [{"path": "rm"}], "model_ranks": 3, "models_sharded": True},
        "kl": {"coef": 0.1, "executor": "own", "ranks": 4, "tensor_parallel": 2, "device": "cuda"},
    }
    pipeline = default_pipeline(resolve("quickstart", overrides))
    ways = {(channel.source, channel.target) for channel in pipeline.channels}
    readers = {target for _, target in ways if target.split("@")[0] in ("reference.rollouts", "reference")}
    assert readers == {"reference.rollouts", "reference@2.rollouts", "reference@1.handed", "reference@3.handed"}
    assert {way for way in ways if way[1].startswith("reward_models")} == {
        ("generator-0.completions", "reward_models.completions"),
        ("reward_models.handed", "reward_models@1.handed"),
        ("reward_models.handed", "reward_models@2.handed"),
    }
    assert {source for source, target in ways if target == "trainer.rollouts"} == {
        "reference.measured",
        "reference@2.measured",
    }
    devices = {node.name: (node.device, node.needs_group) for node in pipeline.nodes}
    assert devices["reference"] == ("cuda", True)
    assert devices["reward_models"] == ("cpu", True)
    alone = {"kl": {"coef": 0.1, "executor": "own", "device": "cuda"}}
    found = {node.name: node for node in default_pipeline(resolve("quickstart", alone)).nodes}
    assert not found["reference"].needs_group, "with copies of their own ranks have no collectives"
