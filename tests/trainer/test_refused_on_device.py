"""On one GPU the host reads losses and norms behind the launch of an update: one that is refused there has changed
nothing, and says what it says where the host has read them before.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from training_data import TINY, VOCAB_SIZE, make_groups, run_config

from slipstream.batching import collate
from slipstream.core.errors import NonFiniteError
from slipstream.models.initialise import new_model
from slipstream.models.sharded import Division, ShardedParameters, divide
from slipstream.trainer.critic import Critic
from slipstream.trainer.measure import Auxiliary
from slipstream.trainer.optim import AdamW
from slipstream.trainer.step import train_on_batch
from slipstream.trainer.update import Updater

STORED = Division(precision="bfloat16", copies=True)
ON_A_GPU = Division(device=torch.device("meta"), precision="bfloat16", copies=True)
"""Parameters that lie so take the CPU for a GPU."""
CRITICS: dict[str, dict[str, Any]] = {
    "no critic": {},
    "own": {"loss": {"name": "ppo", "advantages": "gae"}, "critic": {"model": "own"}},
    "head": {"loss": {"name": "ppo", "advantages": "gae"}, "critic": {"model": "head"}},
}


class Step:
    """A step of two updates with weight decay, whose second one is spoiled at `places`."""

    def __init__(self, critic: str, *, on_device: bool) -> None:
        optimizer = {"lr": 1e-2, "weight_decay": 0.1}
        trainer = {"minibatches": 2, "microbatch_tokens": 20, "optimizer": optimizer}
        self.config = run_config(**CRITICS[critic], trainer=trainer)
        self.model = new_model(TINY, VOCAB_SIZE, 0)
        divide(self.model, STORED)
        parameters = ShardedParameters(self.model, STORED)
        self.optimizers = [AdamW(parameters, self.config.trainer.optimizer, total_updates=2)]
        self.critic = Critic(self.config, self.model, STORED) if self.config.has_critic else None
        if self.critic is not None:  # stored as a GPU's rank stores it
            self.critic.parameters = ShardedParameters(self.critic.module, STORED)
            self.critic.optimizer = AdamW(self.critic.parameters, self.config.critic.optimizer, total_updates=2)
            self.optimizers.append(self.critic.optimizer)
        for one in self.optimizers:
            assert isinstance(one.parameters, ShardedParameters)
            if on_device:
                one.parameters._division = ON_A_GPU
        self.states: list[list[torch.Tensor]] = []

    def state(self) -> list[torch.Tensor]:
        """Weights, those that passes compute with, moments and counts."""
        found = []
        for one in self.optimizers:
            moments = [moment for views in one.named_moments().values() for moment in views.values()]
            computed = one.parameters.computed_views().values()
            counts = [*one._steps, torch.tensor(one.num_updates)]
            found += [each.clone() for each in (*one.parameters.stored(), *computed, *moments, *counts)]
        return found

    def train(self, monkeypatch: pytest.MonkeyPatch, *places: str, value: float = math.inf) -> dict[str, float]:
        accumulate = Updater._accumulate

        def spoiled(updater: Updater, update: Any) -> Any:
            self.states.append(self.state())
            numbers, told = accumulate(updater, update)
            for place in places if update.index == 1 else ():
                if place in ("loss", "value loss"):
                    numbers[("loss", "value loss").index(place)] = value
                else:
                    optimizer = self.optimizers[("gradient", "critic's gradient").index(place)]
                    optimizer.parameters.stored_grads()[0].view(-1)[-1] = value
            return numbers, told

        with monkeypatch.context() as patched:
            patched.setattr(Updater, "_accumulate", spoiled)
            return train_on_batch(
                self.model,
                self.optimizers[0],
                make_groups(),
                config=self.config,
                step=0,
                batching=collate,
                auxiliary=Auxiliary(critic=self.critic),
            )


SPOILED = [
    ("no critic", ["loss"]),
    ("no critic", ["gradient"]),
    ("no critic", ["gradient", "loss"]),
    ("own", ["value loss"]),
    ("own", ["critic's gradient"]),
    ("own", ["gradient", "critic's gradient"]),
    ("head", ["loss", "value loss"]),
    ("head", ["critic's gradient"]),
]


@pytest.mark.parametrize(
    ("value", "critic", "places"),
    [
        pytest.param(value, *one, marks=[] if (i + j) % 2 == 0 else [pytest.mark.slow])
        for i, value in enumerate((math.inf, math.nan))
        for j, one in enumerate(SPOILED)
    ],
    ids=lambda one: "+".join(one) if isinstance(one, list) else str(one),
)
def test_it_is_refused_as_where_the_host_looks_first(
    critic: str, places: list[str], value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    for on_device in (False, True):
        step = Step(critic, on_device=on_device)
        with pytest.raises(NonFiniteError) as caught:
            step.train(monkeypatch, *places, value=value)
        begun, last, now = *step.states, step.state()
        assert not torch.equal(begun[0], last[0]), "the first update was made"
        assert all(torch.equal(before, after) for before, after in zip(last, now, strict=True))
        told.append((str(caught.value), caught.value.report))
    host, device = told
    assert "weights were not changed" in host[0]
    assert repr(device) == repr(host), "a report may have NaN in it"


@pytest.mark.parametrize("critic", CRITICS)
def test_what_is_finite_is_made(critic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, norms and weights are those of a host that looks first, up to where gradients are divided."""
    host, device = (Step(critic, on_device=on_device) for on_device in (False, True))
    expected, found = (step.train(monkeypatch) for step in (host, device))
    assert found.keys() == expected.keys()
    for name in ("loss", "grad_norm", *(["critic_grad_norm"] if device.critic else [])):
        assert found[name] == pytest.approx(expected[name], rel=2e-2), name
    before = device.states[0]
    for begun, one, other in zip(before, host.state(), device.state(), strict=True):
        assert not torch.equal(begun, other)
        torch.testing.assert_close(one, other, rtol=1e-2, atol=2e-3)
    assert [one.num_updates for one in device.optimizers] == [2] * len(device.optimizers)
