"""The logits that a trainer on a GPU holds at once: bounds, ranks, gradients that are there, resumed runs."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.core.rank_group import RankGroup
from slipstream.core.service_messages import Noted
from slipstream.core.training_sections import OptimizerConfig
from slipstream.models.config import MAX_LOGITS, TransformerConfig
from slipstream.models.flat import FlatParameters
from slipstream.models.transformer import Transformer
from slipstream.plan.cost_model import LOGITS_AT_ONCE
from slipstream.trainer import executor
from slipstream.trainer.executor import Trainer
from slipstream.trainer.logit_room import choose_logits, free_bytes, logits_that_fit
from slipstream.trainer.measure import rows_at_once
from slipstream.trainer.optim import AdamW

GIB = 2**30
CONFIG = TransformerConfig(
    family="llama",
    vocab_size=64,
    hidden_size=8,
    intermediate_size=12,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_positions=16,
    tie_embeddings=True,
)


@given(st.integers(-(2**34), 2**40))
def test_the_largest_power_of_two_whose_copies_take_a_quarter(free: int) -> None:
    chosen = logits_that_fit(free)
    assert chosen in [2**power for power in range(24, 29)]
    assert chosen <= MAX_LOGITS["cuda"] == LOGITS_AT_ONCE, "which the planner counts"
    assert chosen == 2**24 or 4 * 16 * chosen <= free
    assert chosen == 2**28 or 4 * 16 * 2 * chosen > free


def test_examples() -> None:
    assert logits_that_fit(100 * GIB) == logits_that_fit(16 * GIB) == 2**28, "4 GiB of 16"
    assert logits_that_fit(16 * GIB - 1) == logits_that_fit(8 * GIB) == 2**27
    assert logits_that_fit(0) == 2**24


@pytest.fixture
def optimizer() -> AdamW:
    parameters = FlatParameters(Transformer(CONFIG))
    parameters.flat.zero_()
    return AdamW(parameters, OptimizerConfig(), total_updates=1)


class BesideAnother(RankGroup):
    """Rank 0 of two, as far as a maximum goes; the other one says `other`."""

    def __init__(self, other: int) -> None:
        super().__init__()
        self._other = other

    def max(self, values: Tensor) -> Tensor:
        return torch.maximum(values, torch.tensor(self._other))


def test_all_ranks_take_what_fits_the_fullest(optimizer: AdamW) -> None:
    for mine, other in ((8 * GIB, 2 * GIB), (2 * GIB, 8 * GIB)):
        found = choose_logits([optimizer], BesideAnother(-other), lambda mine=mine: mine)
        assert found == (2**25, 2 * GIB)


def test_gradients_are_there_while_it_is_read(optimizer: AdamW) -> None:
    def read() -> int:
        assert "grad" in vars(optimizer.parameters), "made when it is first needed"
        optimizer.parameters.stored_grads()[0].fill_(1.0)
        return 4 * GIB

    assert "grad" not in vars(optimizer.parameters)
    assert choose_logits([optimizer], RankGroup.alone(), read) == (2**26, 4 * GIB)
    assert not optimizer.parameters.stored_grads()[0].any(), "cleared"


@pytest.mark.parametrize(
    ("before", "expected"), [(None, 2**26), (2**24, 2**24), (2**27, 2**27), (2**28, 2**26)], ids=str
)
def test_a_resumed_run_keeps_its_number_while_it_fits(before: int | None, expected: int, optimizer: AdamW) -> None:
    assert choose_logits([optimizer], RankGroup.alone(), lambda: 4 * GIB, before)[0] == expected


@pytest.mark.parametrize(("share", "expected"), [(None, 30 + 20 - 15), (0.5, 80 // 2 - 15), (0.9, 30 + 20 - 15)])
def test_the_bytes_that_are_free(share: float | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 GiB of the driver's, and 5 that torch has taken and does not use."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 15 * GIB)
    assert free_bytes(torch.device("cuda", 0), share) == expected * GIB


def test_rows_follow_the_model() -> None:
    model = Transformer(CONFIG)
    assert (rows_at_once(model), rows_at_once(model, device="cuda")) == (2**26 // 64, 2**28 // 64)
    model.max_logits = 2**25
    assert rows_at_once(model, device="cuda") == 2**25 // 64
    assert rows_at_once(model, 4, "cuda") == 2**25 // 256


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_gpu_all_models_of_the_trainer_take_it_and_people_are_told(
    device: str, optimizer: AdamW, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "free_bytes", lambda device, share: int(5.5 * GIB))
    told: list[Any] = []
    policy, reference, teacher = (Transformer(CONFIG) for _ in range(3))
    trainer = SimpleNamespace(
        policy=SimpleNamespace(
            division=SimpleNamespace(device=torch.device(device)), optimizer=optimizer, model=policy
        ),
        config=SimpleNamespace(trainer=SimpleNamespace(gpu_share=None)),
        context=SimpleNamespace(name="trainer"),
        ranks=RankGroup.alone(),
        critic=None,
        reference=reference,
        teacher=SimpleNamespace(model=teacher),
        _tell=told.append,
    )
    partial(Trainer._choose_logits, trainer)()  # type: ignore[arg-type]
    expected = 2**26 if device == "cuda" else None
    assert [model.max_logits for model in (policy, reference, teacher)] == [expected] * 3
    assert told == [Noted(executor="trainer", text="2^26 logits at once, of 5.5 GiB free on a GPU")] * (
        device == "cuda"
    )
