"""A critic of its own executor trains as the trainer's own does, to the bit, while the policy is updated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_data import TINY, VOCAB_SIZE, make_groups, run_config, sharing_prompts

from slipstream.batching import collate
from slipstream.controller.build import _of_critic
from slipstream.core.channel import Ports, connect_local, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.clock import WallClock
from slipstream.core.config import RunConfig
from slipstream.core.errors import ChannelTimeout, ConfigError, NonFiniteError
from slipstream.core.executor import Context
from slipstream.core.rank_group import RankGroup
from slipstream.core.spans import NoSpans
from slipstream.core.types import Group
from slipstream.models.build import build_policy
from slipstream.models.flat import FlatParameters
from slipstream.trainer.critic import Critic
from slipstream.trainer.critic_executor import CriticModel
from slipstream.trainer.critic_link import CriticLink
from slipstream.trainer.measure import Auxiliary
from slipstream.trainer.optim import AdamW
from slipstream.trainer.step import train_on_batch

FAST = {"lr": 1e-2, "max_grad_norm": 0.5}


def config_of(**changes: Any) -> RunConfig:
    critic = {"optimizer": FAST, "head_init": "reward", "clip": 0.05, **changes.pop("critic", {})}
    sections: dict[str, Any] = {
        "model": TINY,
        "loss": {"name": "ppo", "advantages": "gae", **changes.pop("loss", {})},
        "trainer": {"optimizer": FAST, "microbatch_tokens": 40, "minibatches": 2, "epochs": 2, "shuffle": True},
        "max_staleness": 2,
        "steps": 4,
    }
    return run_config(critic=critic, **{**sections, **changes})


def own(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"critic": config.critic.model_copy(update={"executor": "own"}), "host": "process"})


def channel(source: str, target: str) -> ChannelSpec:
    return ChannelSpec(f"{source}/{target}", Kind.BROADCAST, source, target)


@dataclass
class Apart:
    """A critic that runs in a thread, and the trainer's end of it."""

    critic: CriticModel
    link: CriticLink
    ports: dict[str, Ports]


@contextmanager
def apart(config: RunConfig, run_dir: Path, *, resume: Path | None = None) -> Iterator[Apart]:
    """Start the critic; tell it at the end to stop, and wait until it has."""
    channels = [*_of_critic(config), channel("critic.events", "run.events"), channel("run.commands", "critic.commands")]
    ports = connect_local(channels, is_threaded=True)
    critic = CriticModel(config=config, batching=collate, resume=None if resume is None else str(resume))

    def context(name: str) -> Context:
        ends = ports[name]
        return Context(name, run_dir, ends.inputs, ends.outputs, NoSpans(), WallClock(), together=ends.together)

    critic.init(context("critic"))
    link = CriticLink(context("trainer"), config, data_ranks=RankGroup.alone(), peers=RankGroup.alone())

    def serve() -> None:
        while not critic.is_finished:
            if not critic.step():
                wait(ports["critic"].inputs.values(), ports["critic"].outputs.values(), critic.wait_fds(), 0.5)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Apart(critic, link, ports)
    finally:
        link.stop()
        thread.join(60)
        assert not thread.is_alive()
        critic.close()
        for ends in ports.values():
            ends.close()


@dataclass
class Trained:
    policy: np.ndarray
    critic: dict[str, np.ndarray]
    metrics: list[dict[str, float]]


def trained(config: RunConfig, batches: list[list[Group]], at: Apart | None = None, *, first: int = 0) -> Trained:
    """Train one step on each batch; with the critic `at` its own executor, or inside."""
    model, _ = build_policy(config.model, seed=config.seed)
    optimizer = AdamW(FlatParameters(model), config.trainer.optimizer, total_updates=100)
    inside = Critic(config, model) if at is None else None
    auxiliary = Auxiliary(critic=inside, own_critic=None if at is None else at.link)
    found = []
    for number, groups in enumerate(batches, first):
        metrics = train_on_batch(
            model, optimizer, groups, config=config, step=number, batching=collate, auxiliary=auxiliary
        )
        found.append({name: value for name, value in metrics.items() if name != "train_s"})
    critic = inside or at.critic._critic  # type: ignore[union-attr]
    weights = {name: view.numpy().copy() for name, view in critic.parameters.named_views().items()}
    moments = {
        f"{m}/{n}": v.numpy().copy() for m, by in critic.optimizer.named_moments().items() for n, v in by.items()
    }
    return Trained(flat(model), weights | moments, found)


def flat(model: torch.nn.Module) -> np.ndarray:
    return torch.cat([one.detach().flatten() for one in model.parameters()]).numpy().copy()


def batches(count: int, *, staleness: int = 0, given: bool = False) -> list[list[Group]]:
    made = (make_groups(seed=n, given=given, version=max(0, n - staleness)) for n in range(count))
    return [sharing_prompts(groups) for groups in made]


def assert_same(one: Trained, other: Trained) -> None:
    assert one.metrics == other.metrics
    np.testing.assert_array_equal(one.policy, other.policy)
    assert one.critic.keys() == other.critic.keys()
    for name, values in one.critic.items():
        np.testing.assert_array_equal(values, other.critic[name], err_msg=name)


CASES: dict[str, dict[str, Any]] = {
    "stale": {},
    "vtrace": {"critic": {"vtrace": True, "gamma": 0.9, "score_place": "after_last"}, "loss": {"name": "ppo_prox"}},
    "whitened": {"critic": {"whiten_rewards": True}, "loss": {"whiten_advantages": "minibatch"}},
    "masked": {"loss": {"truncated": "mask"}, "kl": {"coef": 0.1, "executor": "trainer"}},
}


@pytest.mark.parametrize("staleness", [0, 2])
def test_it_trains_as_the_trainers_own_to_the_bit(staleness: int, tmp_path: Path) -> None:
    config, data = config_of(), batches(3, staleness=staleness, given=True)
    inside = trained(config, data)
    with apart(own(config), tmp_path) as at:
        assert_same(trained(own(config), data, at), inside)
    assert inside.metrics[-1]["critic_grad_norm"] > 0
    assert inside.metrics[-1]["value_clipped_frac"] > 0
