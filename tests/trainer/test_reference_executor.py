"""The reference policy's own executor: what it computes, when it loads, and a trainer that takes it."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from ports import Port, start
from test_kept_sets import kept_groups
from training_data import (
    TINY,
    VOCAB_SIZE,
    hugging_face_twin,
    make_groups,
    make_rollout,
    run_config,
    sharing_prompts,
    tiny_policy,
)

from slipstream.batching import collate
from slipstream.core import wire
from slipstream.core.config import RunConfig
from slipstream.core.errors import ShapeError
from slipstream.core.executor import takes_stop
from slipstream.core.rank_group import RankGroup
from slipstream.core.service_messages import Ready, Waiting
from slipstream.core.types import Group, Rollout, Stop
from slipstream.models.build import build_policy
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.transformer import Transformer
from slipstream.trainer.measure import Auxiliary
from slipstream.trainer.optim import AdamW
from slipstream.trainer.reference_executor import ReferencePolicy, reference_logprobs
from slipstream.trainer.step import train_on_batch

OWN = {"coef": 0.1, "executor": "own"}


def reference() -> Transformer:
    return new_model(TINY, VOCAB_SIZE, 7)


def rollouts_of(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def by_transformers(rollout: Rollout, model: Transformer, temperature: float) -> np.ndarray:
    """Each sampled token's logprob in float64, over its kept set where it has one; the sequence read alone."""
    segments = rollout.completion.segments
    tokens = np.concatenate([rollout.completion.prompt.tokens, *(segment.tokens for segment in segments)])
    with torch.no_grad():
        logits = hugging_face_twin(model)(torch.from_numpy(tokens).long()[None]).logits[0].numpy() / temperature
    at, found = len(rollout.completion.prompt.tokens), []
    for segment in segments:
        sets: list[Any] = [range(VOCAB_SIZE)] * len(segment.tokens)
        if segment.kept_tokens is not None and segment.kept_counts is not None:
            sets = np.split(segment.kept_tokens, np.cumsum(segment.kept_counts))
        for token, kept in zip(segment.tokens, sets, strict=False):
            row = logits[at - 1]
            if segment.is_sampled:
                found.append(row[token] - np.log(np.exp(row[list(kept)]).sum()))
            at += 1
    return np.array(found)


@pytest.mark.parametrize("capacity", [1, 40, 10_000])
@pytest.mark.parametrize("kept", [False, True])
def test_logprobs_are_those_of_each_completion_alone(kept: bool, capacity: int) -> None:
    """Under the temperature, over kept sets, behind shared prompts, with given tokens between; what else is there does
    not matter."""
    config = run_config(
        generator={"max_new_tokens": 16, "temperature": 0.7} | ({"top_k": 6, "keep_sets": True} if kept else {}),
        trainer={"microbatch_tokens": capacity},
        kl=OWN,
    )
    groups = kept_groups(given=True) if kept else sharing_prompts(make_groups(given=True))
    rollouts = rollouts_of(groups)
    # A second version of a rollout, sampled anew after its replica was lost, and one that is truncated.
    rng = np.random.default_rng(3)
    if not kept:
        rollouts += [make_rollout(0, 1, rng), make_rollout(9, 0, rng, finish_reason="length")]
    model = reference()
    measured = reference_logprobs(model, rollouts[::-1], config=config, batching=collate)[::-1]
    for rollout, before in zip(measured, rollouts, strict=True):
        assert rollout.reference_logprobs is not None
        assert rollout.reference_logprobs.dtype == np.float32
        np.testing.assert_allclose(rollout.reference_logprobs, by_transformers(rollout, model, 0.7), atol=1e-5)
        assert msgspec.structs.replace(rollout, reference_logprobs=None) == before


def test_golden_logprobs() -> None:
    """By transformers, in float64."""
    (rollout,) = reference_logprobs(
        tiny_policy()[0], [make_rollout(0, 0, np.random.default_rng(0))], config=run_config(kl=OWN), batching=collate
    )
    golden = [-3.825999, -2.556592, -2.676441, -1.76033, -4.216982, -2.603127, -2.797892, -4.122143]
    np.testing.assert_allclose(rollout.reference_logprobs, golden, atol=1e-5)


def test_they_survive_the_wire() -> None:
    (rollout, *_) = reference_logprobs(
        reference(), rollouts_of(make_groups(1)), config=run_config(kl=OWN), batching=collate
    )
    back = wire.decode(wire.encode(rollout), (Rollout,))
    assert isinstance(back, Rollout)
    np.testing.assert_array_equal(back.reference_logprobs, rollout.reference_logprobs)


@pytest.mark.parametrize(
    "changes",
    [
        {"kl": {"coef": 0.2}},
        {"kl": {"coef": 0.2, "place": "loss", "estimator": "k3"}},
        {"kl": {"coef": 0.2, "place": "loss", "estimator": "k2"}, "loss": {"truncated": "mask"}},
        {"kl": {"coef": 0.2}, "loss": {"truncated": "mask", "select": "best_and_worst"}},
        {"loss": {"name": "online_dpo", "select": "best_and_worst"}},
        {"kl": {"coef": 0.2}, "loss": {"name": "ppo", "advantages": "reward"}},
    ],
    ids=["reward", "loss", "masked", "selected", "pairs", "ppo"],
)
def test_a_trainer_takes_them_instead_of_measuring(changes: dict[str, Any]) -> None:
    groups = sharing_prompts(make_groups())
    cut = msgspec.structs.replace(groups[1].rollouts[2].completion, finish_reason="length")
    members = (*groups[1].rollouts[:2], msgspec.structs.replace(groups[1].rollouts[2], completion=cut))
    groups[1] = Group(ordinal=1, rollouts=members)
    frozen = reference()

    def trained(config: RunConfig, groups: list[Group], auxiliary: Auxiliary) -> tuple[dict[str, float], np.ndarray]:
        model, flat = tiny_policy()
        optimizer = AdamW(flat, config.trainer.optimizer, total_updates=10)
        metrics = train_on_batch(model, optimizer, groups, config=config, step=0, batching=collate, auxiliary=auxiliary)
        metrics.pop("train_s")
        return metrics, flat.flat.detach().numpy().copy()

    beside = trained(run_config(**changes), groups, Auxiliary(frozen))
    own = run_config(**changes | {"kl": changes.get("kl", {}) | {"executor": "own"}})
    bringing = [
        Group(
            ordinal=group.ordinal,
            rollouts=tuple(reference_logprobs(frozen, group.rollouts, config=own, batching=collate)),
        )
        for group in groups
    ]
    brought = trained(own, bringing, Auxiliary())
    assert brought[0] == pytest.approx(beside[0], rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(brought[1], beside[1], atol=1e-6)
    with pytest.raises(ShapeError, match="bring the reference's logprobs"):
        trained(own, groups, Auxiliary())
    if changes.get("kl"):  # they are what decides
        other = [
            Group(
                ordinal=g.ordinal,
                rollouts=tuple(
                    msgspec.structs.replace(r, reference_logprobs=r.reference_logprobs - 1.0)  # type: ignore[operator]
                    for r in g.rollouts
                ),
            )
            for g in bringing
        ]
        assert trained(own, other, Auxiliary())[0]["kl_reference"] != pytest.approx(beside[0]["kl_reference"], rel=0.1)


def executor_of(config: RunConfig, *, is_resumed: bool = False) -> ReferencePolicy:
    return ReferencePolicy(config=config, batching=collate, is_resumed=is_resumed)


def told_to_stop(executor: ReferencePolicy, ports: dict[str, Port]) -> list[Rollout]:
    ports["commands"].put(Stop())
    for _ in range(100):
        if executor.is_finished:
            break
        executor.step()
    assert executor.is_finished
    return [message for message in ports["measured"].messages if isinstance(message, Rollout)]


class CharTokenizer:
    """What `save_model` needs of one."""

    def save_pretrained(self, path: Path) -> None: ...


def test_the_executor_takes_a_microbatch_at_once_and_loses_nothing(tmp_path: Path) -> None:
    save_model(reference(), tmp_path / "kl", CharTokenizer())  # type: ignore[arg-type]
    config = run_config(kl=OWN | {"reference": str(tmp_path / "kl")}, trainer={"microbatch_tokens": 24})
    executor = executor_of(config)
    ports = start(executor, tmp_path, name="reference")
    assert isinstance(ports["events"].messages[0], Ready)
    rollouts = rollouts_of(make_groups())
    for rollout in rollouts:
        ports["rollouts"].put(rollout)
    assert executor.step()
    first = len(ports["measured"].messages)
    sizes = [len(r.completion.prompt.tokens) + r.completion.num_tokens for r in rollouts]
    assert first == next(n for n in range(1, 99) if sum(sizes[:n]) >= 24) < len(rollouts)
    measured = told_to_stop(executor, ports)
    assert [(r.ordinal, r.sample) for r in measured] == [(r.ordinal, r.sample) for r in rollouts]
    for rollout in measured:
        np.testing.assert_allclose(rollout.reference_logprobs, by_transformers(rollout, reference(), 1.0), atol=1e-5)


def test_the_start_is_the_reference_without_a_warm_start(tmp_path: Path) -> None:
    """A fresh model is drawn from the seed, as the trainer's is."""
    config = run_config(kl=OWN, seed=5)
    executor = executor_of(config)
    ports = start(executor, tmp_path, name="reference")
    rollout = make_rollout(0, 0, np.random.default_rng(0))
    ports["rollouts"].put(rollout)
    (measured,) = told_to_stop(executor, ports)
    policy, _ = build_policy(config.model, seed=5)
    (expected,) = reference_logprobs(policy, [rollout], config=config, batching=collate)
    np.testing.assert_array_equal(measured.reference_logprobs, expected.reference_logprobs)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_what_the_warm_start_made_is_loaded_once_it_is_there(is_resumed: bool, tmp_path: Path) -> None:
    """With the first rollout; on a resume it is there from the start."""
    executor = executor_of(run_config(kl=OWN, warm_start={"steps": 3}), is_resumed=is_resumed)
    if is_resumed:
        save_model(reference(), tmp_path / "reference", CharTokenizer())  # type: ignore[arg-type]
    ports = start(executor, tmp_path, name="reference")
    assert not executor.step()
    if not is_resumed:
        save_model(reference(), tmp_path / "reference", CharTokenizer())  # type: ignore[arg-type]
    rollout = make_rollout(0, 0, np.random.default_rng(0))
    ports["rollouts"].put(rollout)
    (measured,) = told_to_stop(executor, ports)
    np.testing.assert_allclose(measured.reference_logprobs, by_transformers(rollout, reference(), 1.0), atol=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_passes_the_end_on(rank: int) -> None:
    context: Any = SimpleNamespace(
        group=RankGroup(rank, 2, object()),  # type: ignore[arg-type]
        inputs={"commands": Port()},
        outputs={"relay": Port()},
    )
    assert not takes_stop(context)
    context.inputs["commands"].put(Waiting(reason="nothing"))
    context.inputs["commands"].put(Stop())
    assert takes_stop(context)
    assert not takes_stop(context)
    assert context.outputs["relay"].messages == deque([Stop()] if rank == 0 else [])
