"""The default pipeline's channels: what completions go through, rank by rank."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.controller.build import default_pipeline
from slipstream.core.channel import ROUTES, Kind, connect_local
from slipstream.core.channel_spec import ChannelSpec
from slipstream.core.recipes import resolve
from slipstream.core.types import Completion, Prompt, Rollout

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
