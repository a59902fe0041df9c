"""A trainer's warm start: at no time are there moments of its optimizer beside those of the policy's."""

from __future__ import annotations

import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from test_executor_over_ranks import demonstrations
from test_poisoned import Run
from torch import Tensor

from slipstream.batching import collate
from slipstream.trainer import policy as policies
from slipstream.trainer.optim import AdamW
from slipstream.trainer.supervised import supervised_updates


@pytest.mark.parametrize("offloads", [False, True])
def test_one_set_of_moments_is_alive_at_a_time(offloads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most, in_updates = dict[int, int](), list[int](), list[int]()
    made, applied = AdamW._new_moment, AdamW._apply

    def new_moment(self: AdamW, tensor: Tensor) -> Tensor:
        moment = made(self, tensor)
        alive[id(moment)] = moment.nbytes
        weakref.finalize(moment, alive.pop, id(moment))
        most.append(sum(alive.values()))
        return moment

    def apply(self: AdamW, *args: Any, **how: Any) -> None:
        in_updates.append(sum(alive.values()))
        applied(self, *args, **how)

    def offloading(*args: Any, **how: Any) -> AdamW:
        return AdamW(*args, **how | {"offloads": offloads})

    monkeypatch.setattr(AdamW, "_new_moment", new_moment)
    monkeypatch.setattr(AdamW, "_apply", apply)
    monkeypatch.setattr(policies, "AdamW", offloading)
    with closing(Run(tmp_path).trainer) as trainer:
        trained = trainer.policy
    one_set = 2 * sum(tensor.nbytes for tensor in trained.parameters.stored())
    assert in_updates == [one_set] * 2
    assert max(most) == one_set
    assert trained.optimizer.num_updates == 0
    assert not any(view.any() for views in trained.optimizer.named_moments().values() for view in views.values())


def test_it_trains_as_an_optimizer_of_its_own_does(tmp_path: Path) -> None:
    with closing(Run(tmp_path).trainer) as trainer:
        trained, config = trainer.policy, trainer.config
    apart, message = policies.Policy(config), demonstrations()
    pairs, start = [], 0
    for prompt, completion in zip(message.prompt_lengths, message.completion_lengths, strict=True):
        middle, end = start + prompt, start + prompt + completion
        pairs.append((message.tokens[start:middle], message.tokens[middle:end]))
        start = end
    updates = supervised_updates(
        apart.model,
        AdamW(apart.parameters, config.warm_start.optimizer, total_updates=config.warm_start.steps),
        pairs,
        config=config.warm_start,
        microbatch_tokens=config.trainer.microbatch_tokens,
        seed=config.seed,
        batching=collate,
    )
    assert len(list(updates)) == 2
    assert trained.optimizer.lr == config.trainer.optimizer.lr
    for name, view in apart.parameters.named_views().items():
        assert torch.equal(view, trained.parameters.named_views()[name])
