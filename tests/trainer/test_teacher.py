"""Learning from a teacher: against transformers in float64, over microbatches and ranks, in an executor of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from ports import start
from rank_threads import on_ranks, results
from test_over_ranks import SummedAdamW, dealt, heads_of
from training_data import (
    TINY,
    VOCAB_SIZE,
    hugging_face_twin,
    make_groups,
    make_rollout,
    run_config,
    scored_group,
    sharing_prompts,
    tiny_policy,
)

from slipstream.algorithms.distillation import coarse_logprobs, divergences
from slipstream.batching import collate as batching
from slipstream.core import wire
from slipstream.core.config import RunConfig
from slipstream.core.errors import ShapeError
from slipstream.core.service_messages import Ready
from slipstream.core.types import Group, Rollout, Stop
from slipstream.core.vetting import POISONED, Limits, vetted
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.tokenizer import CharTokenizer
from slipstream.models.transformer import Transformer
from slipstream.trainer import measure
from slipstream.trainer.batch import train_sequence
from slipstream.trainer.measure import Auxiliary
from slipstream.trainer.optim import AdamW
from slipstream.trainer.scores import has_signal
from slipstream.trainer.step import train_on_batch
from slipstream.trainer.teacher import Teacher
from slipstream.trainer.teacher_executor import TeacherModel, taught

PADDED = 3  # rows of the policy's embedding that stand for no token
NUM_TOKENS = VOCAB_SIZE - PADDED
ALPHABET = "abcdefghijklm"  # with the special tokens, NUM_TOKENS


def bigger(seed: int = 3) -> Transformer:
    """A teacher of another size, whose embedding has more rows that stand for no token."""
    sizes = TINY.model_copy(update={"hidden_size": 32, "num_layers": 3})
    model = new_model(sizes, VOCAB_SIZE + 2, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(6.0)
    return model.requires_grad_(False)


def config_of(teacher: dict[str, Any], **changes: Any) -> RunConfig:
    loss = {"loss": {"name": "distill"}} if "coef" not in teacher else {}
    return run_config(**loss | {"teacher": {"path": "teacher"} | teacher} | changes)


def auxiliary(config: RunConfig, model: Transformer | None) -> Auxiliary:
    """With a reference too, for losses that need one."""
    return Auxiliary(
        reference=new_model(TINY, VOCAB_SIZE, 7), teacher=Teacher.of(config, CharTokenizer(ALPHABET), model)
    )


def trained(
    config: RunConfig, groups: list[Group], beside: Auxiliary, *, heads: Any = None, ranks: Any = None
) -> tuple[dict[str, float], torch.Tensor, torch.Tensor]:
    """The metrics of a step, its last gradient and the weights that it leaves."""
    model, flat = tiny_policy()
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=10)
    if ranks is not None:
        optimizer = SummedAdamW(flat, config.trainer.optimizer, total_updates=10).over(ranks)
    over = {} if ranks is None else {"heads": heads, "ranks": ranks}
    metrics = train_on_batch(
        model, optimizer, groups, config=config, step=0, batching=batching, auxiliary=beside, **over
    )
    metrics.pop("train_s")
    return metrics, model.embedding.weight.grad.double().clone(), flat.flat.detach().clone()


FORMS: dict[str, dict[str, Any]] = {
    "reverse": {},
    "forward": {"alpha": 0.0},
    "between": {"alpha": 0.3},
    "coarse": {"top_k": 4},
    "coarse forward": {"top_k": 4, "alpha": 0.0, "temperature": 1.3},
}


def distributions(twin: Any, tokens: np.ndarray, mask: np.ndarray, temperature: float) -> torch.Tensor:
    """float64 [M, NUM_TOKENS]: logits where each sampled token was predicted; the sequence read alone."""
    ids, at = torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(mask[1:])
    logits: torch.Tensor = twin(ids[None]).logits[0, :-1][at][:, :NUM_TOKENS] / temperature
    return logits


@pytest.mark.parametrize("form", FORMS)
def test_an_update_is_that_of_transformers_in_float64(form: str) -> None:
    """Under a temperature, behind shared prompts, with given tokens between; rows for no token count for nothing."""
    settings = FORMS[form]
    generator = {"max_new_tokens": 16, "temperature": 0.7}
    config = config_of(settings, generator=generator, trainer={"optimizer": {"max_grad_norm": 1e9}})
    groups, frozen = sharing_prompts(make_groups(given=True)), bigger()
    metrics, grad, _ = trained(config, groups, auxiliary(config, frozen))
    twin, its = hugging_face_twin(tiny_policy()[0]), hugging_face_twin(frozen)
    distances, kls, masses, alike = [], [], [], []
    for rollout in (one for group in groups for one in group.rollouts):
        sequence = train_sequence(rollout.completion)
        policy = distributions(twin, sequence.tokens, sequence.mask, 0.7)
        with torch.no_grad():
            teacher = distributions(its, sequence.tokens, sequence.mask, settings.get("temperature", 0.7))
        alike.append(policy.argmax(-1) == teacher.argmax(-1))
        if (top_k := settings.get("top_k")) is None:
            policy, teacher = policy.log_softmax(-1), teacher.log_softmax(-1)
            masses.append(torch.ones(len(policy)))
        else:
            kept = teacher.topk(top_k).indices
            policy, teacher = coarse_logprobs(policy, kept), coarse_logprobs(teacher, kept)
            masses.append(teacher[:, :-1].exp().sum(-1))
        distances.append(divergences(policy, teacher, settings.get("alpha", 1.0)))
        kls.append(divergences(policy, teacher, 1.0).detach())
    loss = torch.cat(distances).mean()
    loss.backward()
    expected = twin.model.embed_tokens.weight.grad
    torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["teacher_divergence"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["teacher_kl"] == pytest.approx(torch.cat(kls).mean().item(), rel=1e-4)
    assert metrics["teacher_top_k_mass"] == pytest.approx(torch.cat(masses).mean().item(), rel=1e-4)
    assert metrics["teacher_agreement"] == pytest.approx(torch.cat(alike).double().mean().item(), abs=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_policy_that_is_its_teacher_stays(form: str) -> None:
    config = config_of({name: value for name, value in FORMS[form].items() if name != "temperature"})
    metrics, grad, _ = trained(config, make_groups(), auxiliary(config, tiny_policy()[0].requires_grad_(False)))
    assert abs(metrics["loss"]) < 1e-6
    assert metrics["teacher_agreement"] == 1.0
    assert grad.abs().max() < 1e-5


def test_all_tokens_apart_are_the_whole_vocabulary() -> None:
    found = [
        trained(config, make_groups(), auxiliary(config, bigger()))
        for config in (config_of({}), config_of({"top_k": NUM_TOKENS}))
    ]
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("executor", ["trainer", "own"])
def test_microbatches_and_chunks_of_the_head_change_nothing(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, groups, frozen = {"top_k": 4, "executor": executor}, sharing_prompts(make_groups()), bigger()
    whole, cut = (config_of(settings, trainer={"microbatch_tokens": size}) for size in (10_000, 30))
    beside = auxiliary(whole, frozen if executor == "trainer" else None)
    if executor == "own":
        groups = bringing(groups, frozen, whole)
    expected = trained(whole, groups, beside)
    monkeypatch.setitem(measure.MAX_LOGITS, "cpu", 4 * 3 * VOCAB_SIZE)
    found = trained(cut, groups, beside)
    assert found[0]["num_microbatches"] >= 4
    assert expected[0]["num_microbatches"] == 1
    for name in ("loss", "teacher_kl", "teacher_agreement", "entropy"):
        assert found[0][name] == pytest.approx(expected[0][name], rel=1e-5), name
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("executor", ["trainer", "own"])
def test_two_ranks_are_one(executor: str) -> None:
    settings, groups, frozen = {"top_k": 4, "executor": executor}, sharing_prompts(make_groups()), bigger()
    config = config_of(settings, trainer={"microbatch_tokens": 30, "minibatches": 2})
    if executor == "own":
        groups = bringing(groups, frozen, config)
    beside = auxiliary(config, frozen if executor == "trainer" else None)
    expected = trained(config, groups, beside)
    shares, heads = dealt(groups, config, 5), heads_of(groups, config)  # one of five is dealt next to nothing

    def job(ranks: Any) -> Any:
        return trained(config, shares[ranks.rank], beside, heads=heads, ranks=ranks)

    for found in results(on_ranks(5, job)):
        for name in ("loss", "grad_norm", "teacher_kl", "teacher_agreement", "teacher_top_k_mass"):
            assert found[0][name] == pytest.approx(expected[0][name], rel=1e-4), name
        torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-5)


# An executor of its own


def bringing(groups: list[Group], model: Transformer, config: RunConfig) -> list[Group]:
    read = {"config": config, "tokenizer": CharTokenizer(ALPHABET), "batching": batching}
    return [Group(ordinal=group.ordinal, rollouts=tuple(taught(model, group.rollouts, **read))) for group in groups]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"teacher": {"alpha": 0.3, "temperature": 1.3}},
        {"loss": {"name": "distill", "truncated": "mask"}},
        {"loss": {"name": "grpo"}, "teacher": {"coef": 0.5}},
        {"loss": {"name": "rloo", "advantages": "leave_one_out"}, "teacher": {"coef": 0.5}},
        {"loss": {"name": "online_dpo", "select": "best_and_worst"}, "teacher": {"coef": 0.5}},
    ],
    ids=["alone", "between", "masked", "beside grpo", "beside rloo", "beside pairs"],
)
def test_a_trainer_takes_what_it_would_have_read(changes: dict[str, Any]) -> None:
    groups, frozen = sharing_prompts(make_groups()), bigger()
    cut = msgspec.structs.replace(groups[1].rollouts[2].completion, finish_reason="length")
    members = (*groups[1].rollouts[:2], msgspec.structs.replace(groups[1].rollouts[2], completion=cut))
    groups[1] = Group(ordinal=1, rollouts=members)
    teacher = {"top_k": 4} | changes.get("teacher", {})
    configs = [
        run_config(**{"loss": {"name": "distill"}} | changes | {"teacher": {"path": "t", "executor": place} | teacher})
        for place in ("trainer", "own")
    ]
    beside = trained(configs[0], groups, auxiliary(configs[0], frozen))
    brought = trained(configs[1], bringing(groups, frozen, configs[1]), auxiliary(configs[1], None))
    assert brought[0] == pytest.approx(beside[0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(brought[2], beside[2], rtol=1e-5, atol=1e-6)
    with pytest.raises(ShapeError, match="what the teacher says"):
        trained(configs[1], groups, auxiliary(configs[1], None))
    other = trained(configs[1], bringing(groups, bigger(8), configs[1]), auxiliary(configs[1], None))
    assert not torch.allclose(other[2], brought[2], atol=1e-5), "it is what decides"


def told_to_stop(executor: TeacherModel, ports: Any) -> list[Rollout]:
    ports["commands"].put(Stop())
    for _ in range(100):
        if executor.is_finished:
            break
        executor.step()
    assert executor.is_finished
    return [message for message in ports["measured"].messages if isinstance(message, Rollout)]


def test_its_executor_loses_nothing_and_the_trainer_takes_what_it_says(tmp_path: Path) -> None:
    save_model(bigger(), tmp_path / "teacher", CharTokenizer(ALPHABET))
    own = {"path": str(tmp_path / "teacher"), "executor": "own", "top_k": 4}
    model = TINY.model_copy(update={"alphabet": ALPHABET})
    config = config_of(own, model=model, trainer={"microbatch_tokens": 24})
    executor = TeacherModel(config=config, batching=batching)
    ports = start(executor, tmp_path, name="teacher")
    assert isinstance(ports["events"].messages[0], Ready)
    rollouts = [rollout for group in make_groups(given=True) for rollout in group.rollouts]
    for rollout in rollouts:
        ports["rollouts"].put(rollout)
    executor.step()
    assert 0 < len(ports["measured"].messages) < len(rollouts)
    measured = told_to_stop(executor, ports)
    assert [(one.ordinal, one.sample) for one in measured] == [(one.ordinal, one.sample) for one in rollouts]
    whole = taught(bigger(), rollouts, config=config, tokenizer=CharTokenizer(ALPHABET), batching=batching)
    limits = Limits.of(config, vocab_size=VOCAB_SIZE, max_positions=64, brings_reference=False)
    for one, alone in zip(measured, whole, strict=True):
        assert one.teacher_tokens is not None
        assert one.teacher_tokens.shape == (one.completion.num_sampled, 4)
        assert one.teacher_tokens.max() < NUM_TOKENS
        np.testing.assert_array_equal(one.teacher_tokens, alone.teacher_tokens)
        np.testing.assert_allclose(one.teacher_logprobs, alone.teacher_logprobs, atol=1e-5)
        back = wire.decode(wire.encode(one), (Rollout,))
        assert isinstance(back, Rollout)
        np.testing.assert_array_equal(back.teacher_logprobs, one.teacher_logprobs)
        assert vetted([back], limits)[0].failure is None


def broken(rollout: Rollout, **changes: Any) -> Rollout:
    return msgspec.structs.replace(rollout, **changes)


def test_what_a_teacher_cannot_have_said_is_refused() -> None:
    config = config_of({"executor": "own", "top_k": 4})
    limits = Limits.of(config, vocab_size=VOCAB_SIZE, max_positions=64, brings_reference=False)
    rollout = make_rollout(0, 0, np.random.default_rng(0))
    read = {"config": config, "tokenizer": CharTokenizer(ALPHABET), "batching": batching}
    [sound] = taught(bigger(), [rollout], **read)
    tokens, logprobs = sound.teacher_tokens, sound.teacher_logprobs
    assert tokens is not None
    assert logprobs is not None
    wrong = {
        "without": rollout,
        "of shape": broken(sound, teacher_tokens=tokens[:-1]),
        "of shape ": broken(sound, teacher_logprobs=logprobs[:, :-1]),
        "distinct": broken(sound, teacher_tokens=np.repeat(tokens[:, :1], 4, axis=1)),
        "distinct ": broken(sound, teacher_tokens=tokens[:, ::-1].copy()),
        "distinct  ": broken(sound, teacher_tokens=tokens + VOCAB_SIZE),
        "of a distribution": broken(sound, teacher_logprobs=logprobs - 0.1),
        "of a distribution ": broken(sound, teacher_logprobs=np.full_like(logprobs, np.nan)),
    }
    assert vetted([sound], limits)[0].failure is None
    for fault, one in wrong.items():
        [found] = vetted([one], limits)
        assert found.failure is not None, fault
        assert found.failure.startswith(POISONED), fault
        assert fault.strip() in found.failure
        assert wire.encode(vetted([found], limits)[0]) == wire.encode(found)
    assert vetted([rollout], Limits())[0].failure is None, "nobody else needs it"


# Groups


def test_every_group_teaches_whatever_its_rewards() -> None:
    rng = np.random.default_rng(0)
    equal = Group(ordinal=0, rollouts=tuple(make_rollout(0, sample, rng, reward=1.0) for sample in range(3)))
    failed = Group(
        ordinal=1, rollouts=tuple(broken(make_rollout(1, s, rng, reward=0.0), failure="no verdict") for s in range(3))
    )
    rewarded, alone = run_config(), config_of({})
    beside = config_of({"coef": 0.5})
    pairs = config_of({"coef": 0.5}, loss={"name": "online_dpo", "select": "best_and_worst"})
    for group in (equal, failed):
        told = [has_signal(scored_group(group, config), config) for config in (rewarded, alone, beside, pairs)]
        assert told == [False, True, True, False]


def test_one_completion_per_prompt_is_enough() -> None:
    config = config_of({}, completions_per_group=1)
    metrics, grad, _ = trained(config, make_groups(6, 1), auxiliary(config, bigger()))
    assert metrics["teacher_kl"] > 0.1
    assert grad.abs().max() > 0
    assert metrics["advantage_mean"] == 0.0
