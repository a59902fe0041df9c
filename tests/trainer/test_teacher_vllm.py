"""A teacher that vLLM holds, over the worker with a make-believe vLLM: as the native one says; lost, hung, wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from ports import start
from test_branches_trained import groups_with_branches
from test_teacher import ALPHABET, bigger, config_of, told_to_stop
from training_data import TINY, VOCAB_SIZE
from transformers import AutoModelForCausalLM

from slipstream.algorithms.distillation import LEAST_LOGPROB, coarse_logprobs
from slipstream.batching import collate as batching
from slipstream.core.config import RunConfig
from slipstream.core.errors import ChannelError, ChannelTimeout, ExecutorDied
from slipstream.core.lora_section import LoraConfig
from slipstream.core.types import Rollout
from slipstream.core.vetting import POISONED
from slipstream.generator.vllm import reader
from slipstream.generator.vllm.folder import save_base
from slipstream.generator.vllm.reader import VLLMReader, coarse, cut
from slipstream.models.attention import PackedAttention
from slipstream.models.hf import load_model, save_model
from slipstream.models.initialise import new_model
from slipstream.models.lora import merged
from slipstream.models.peft import save_adapter, with_adapters
from slipstream.models.tokenizer import CharTokenizer
from slipstream.models.transformer import Transformer
from slipstream.trainer.teacher_executor import TeacherModel, taught

FAKE = Path(__file__).parents[1] / "generator" / "fake_vllm.py"
TOKENS = ALPHABET + "nop"  # with the special tokens, VOCAB_SIZE
ROLLOUTS = [rollout for group in groups_with_branches() for rollout in group.rollouts]

Run = Callable[..., list[Rollout]]


def whole() -> Transformer:
    """A teacher without rows that stand for no token."""
    model = new_model(TINY.model_copy(update={"hidden_size": 32}), VOCAB_SIZE, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.ndim >= 2 else 1.0)
    return model.requires_grad_(False)


def served_config(folder: Path, *, vllm: dict[str, Any] | None = None, **teacher: Any) -> RunConfig:
    vllm = {"python": sys.executable} | (vllm or {})
    served = {"path": str(folder), "executor": "own", "engine": "vllm", "top_k": 4, "vllm": vllm}
    model = TINY.model_copy(update={"alphabet": TOKENS})
    return config_of(served | teacher, model=model, trainer={"microbatch_tokens": 4000})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Rollouts by the executor of a served teacher; `fake` says what its vLLM does wrong."""
    monkeypatch.setattr(reader, "WORKER", FAKE)
    monkeypatch.setattr(reader, "ROOMS", 3)

    def by_executor(
        model: Transformer, *, fake: dict[str, Any] | None = None, rollouts: list[Rollout] = ROLLOUTS, **changes: Any
    ) -> list[Rollout]:
        monkeypatch.setenv(
            "FAKE", json.dumps({"vocab_size": VOCAB_SIZE, "rooms": 3, "once": str(tmp_path / "once")} | (fake or {}))
        )
        save_model(model, tmp_path / "teacher", CharTokenizer(TOKENS))
        config = served_config(tmp_path / "teacher", **changes)
        executor = TeacherModel(config=config, batching=batching, new_reader=VLLMReader)
        try:
            ports = start(executor, tmp_path, name="teacher")
            for rollout in rollouts:
                ports["rollouts"].put(rollout)
            return told_to_stop(executor, ports)
        finally:
            executor.close()

    return by_executor


def test_an_adapter_teaches_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is given base and adapter as one model."""
    monkeypatch.setattr(reader, "WORKER", FAKE)
    monkeypatch.setenv("FAKE", json.dumps({"vocab_size": VOCAB_SIZE, "rooms": 3, "once": str(tmp_path / "once")}))
    save_model(whole(), tmp_path / "base", CharTokenizer(TOKENS))
    model = with_adapters(load_model(tmp_path / "base"), LoraConfig(rank=2, targets=["q_proj"]), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("adapter.b"):
                parameter.fill_(0.5)
    save_adapter(model, tmp_path / "teacher", base=tmp_path / "base", digest="")
    CharTokenizer(TOKENS).save_pretrained(tmp_path / "teacher")
    config = served_config(tmp_path / "teacher")
    served: list[Transformer] = []
    monkeypatch.setattr(
        reader, "save_base", lambda one, folder, *_, **__: served.append(one) or save_model(one, folder)
    )
    executor = TeacherModel(config=config, batching=batching, new_reader=VLLMReader)
    try:
        start(executor, tmp_path, name="teacher")
    finally:
        executor.close()
    expected = dict(merged(model).named_parameters())
    for name, parameter in served[0].named_parameters():
        torch.testing.assert_close(parameter, expected[name][: len(parameter)])
    bare = dict(whole().named_parameters())
    assert any(not torch.equal(one, bare[name]) for name, one in expected.items())


def check(found: list[Rollout], expected: list[Rollout]) -> None:
    """Compare up to the rounding of logprobs."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.teacher_tokens is not None
        assert one.teacher_logprobs is not None
        np.testing.assert_array_equal(one.teacher_tokens, other.teacher_tokens)
        np.testing.assert_allclose(one.teacher_logprobs, other.teacher_logprobs, atol=2e-5)
        assert one.teacher_tokens.dtype == np.int32
        assert one.teacher_logprobs.dtype == np.float32


def scripted_logits(tokens: list[int]) -> np.ndarray:
    """float64 [V] behind `tokens`, as the make-believe vLLM's script has it (`fake_vllm.scripted_logprobs`)."""
    state = tokens[-1] + 0.1 * (len(tokens) - 1) + 0.01 * sum(tokens)
    return 3 * np.sin((1 + state) * (1 + np.arange(VOCAB_SIZE)))


def check_script(found: list[Rollout]) -> None:
    """Every place of every branch has the script's distribution, of the branch's own tokens before it."""
    assert len(found) == len(ROLLOUTS)
    for one, rollout in zip(found, ROLLOUTS, strict=True):
        expected, context = [], rollout.completion.prompt.tokens.tolist()
        for segment in rollout.completion.segments:
            context = [] if segment.begins else context
            for token in segment.tokens.tolist():
                if segment.is_sampled:
                    expected.append(scripted_logits(context))
                context.append(token)
        rows = torch.from_numpy(np.array(expected))
        assert one.teacher_tokens is not None
        assert one.teacher_logprobs is not None
        np.testing.assert_array_equal(one.teacher_tokens, rows.topk(4).indices.sort(dim=-1).values)
        wanted = coarse_logprobs(rows, torch.from_numpy(one.teacher_tokens).long())
        np.testing.assert_allclose(one.teacher_logprobs, wanted, atol=2e-5)


def test_each_token_is_judged_behind_its_own_branch(run: Run, tmp_path: Path) -> None:
    """With given tokens between; more branches than there are rooms."""
    check_script(run(whole()))
    assert not list(tmp_path.glob("**/push*")), "what vLLM can read as it lies is not written anew"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (whole, {}),
        (whole, {"top_k": VOCAB_SIZE}),
        (bigger, {}),
        (bigger, {"temperature": 0.6, "top_k": 1}),
    ],
    ids=["as it lies", "all tokens", "without rows for no token", "colder, one token"],
)
def test_it_says_what_the_native_one_says(
    run: Run, tmp_path: Path, model: Callable[[], Transformer], changes: dict[str, Any]
) -> None:
    config, tokenizer = served_config(tmp_path / "teacher", **changes), CharTokenizer(TOKENS)
    found = run(model(), fake={"samples": True}, **changes)
    check(found, taught(model(), ROLLOUTS, config=config, tokenizer=tokenizer, batching=batching))


@pytest.mark.parametrize("is_tied", [True, False])
def test_what_is_written_for_it_is_the_teacher_over_the_tokens_alone(is_tied: bool, tmp_path: Path) -> None:
    """Read by transformers, in float64: rows of no token are gone, and the logits are divided by the temperature."""
    model = bigger()
    if not is_tied:
        loose = Transformer(replace(model.config, tie_embeddings=False))
        loose.load_state_dict(model.state_dict() | {"head.weight": 2.0 * model.embedding.weight.flip(0)})
        model = loose.requires_grad_(False)
    tokens = torch.arange(VOCAB_SIZE).roll(5)
    hidden = model(tokens, torch.arange(VOCAB_SIZE), PackedAttention([VOCAB_SIZE]))
    expected = (model.logits(hidden)[:, :VOCAB_SIZE].double() / 0.6).log_softmax(-1)
    save_base(cut(model, VOCAB_SIZE), tmp_path / "written", "float32", temperature=0.6)
    twin = AutoModelForCausalLM.from_pretrained(tmp_path / "written").double()
    assert twin.config.vocab_size == VOCAB_SIZE
    with torch.no_grad():
        found = twin(tokens[None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_a_lost_process_is_replaced_and_asked_again(run: Run, tmp_path: Path, fault: str) -> None:
    vllm = {"silence_timeout_s": 0.5 if fault == "hangs" else 20.0, "max_restarts": 1}
    found = run(whole(), fake={"fails_at": 5, "fault": fault}, vllm=vllm)
    assert (tmp_path / "once").exists()
    check_script(found)


@pytest.mark.parametrize(
    ("fake", "vllm", "error", "message"),
    [
        ({"fails_at": 5, "fault": "dies"}, {}, ExecutorDied, r"the teacher's vLLM process \(pid .*SIGKILL"),
        (
            {"fails_at": 5, "fault": "hangs"},
            {"silence_timeout_s": 0.5},
            ChannelTimeout,
            r"nothing for 0.5 s while waiting for what the teacher says of \d sequences",
        ),
        (
            {"never_starts": True},
            {"start_timeout_s": 0.5},
            ChannelTimeout,
            "waiting for vLLM to start with the teacher",
        ),
        ({"cannot_start": True}, {"max_restarts": 3}, ExecutorDied, "no memory for the cache"),
        ({"first_token": 1}, {}, ExecutorDied, "logprobs of a prompt are not those of token"),
        ({"predicts": "id"}, {"max_restarts": 3}, ChannelError, "answered what nobody asked"),
        ({"predicts": "short"}, {}, ChannelError, "not about what it was asked"),
        ({"predicts": "nan"}, {}, ChannelError, "not about what it was asked"),
        ({"predicts": "token"}, {}, ChannelError, "not about what it was asked"),
    ],
)
def test_errors_say_what_was_awaited(
    run: Run, fake: dict[str, Any], vllm: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=rf"(?s){message}"):
        run(whole(), fake=fake, vllm={"max_restarts": 0} | vllm)


def test_a_rollout_that_it_cannot_read_fails_alone(run: Run) -> None:
    """An id that stands for no token, and more tokens than a run has, would end vLLM's process."""
    completion = ROLLOUTS[0].completion
    segment = completion.segments[0]
    unknown = msgspec.structs.replace(segment, tokens=np.full_like(segment.tokens, VOCAB_SIZE + 1))
    bad = msgspec.structs.replace(completion, segments=(unknown, *completion.segments[1:]))
    rollouts = [msgspec.structs.replace(ROLLOUTS[0], completion=bad), *ROLLOUTS[1:]]
    found = run(whole(), rollouts=rollouts)
    assert [one.failure for one in found[1:]] == [None] * (len(found) - 1)
    assert found[0].failure is not None
    assert found[0].failure.startswith(POISONED)


@pytest.mark.parametrize("gap", [1.0, 12.0, 40.0])
def test_the_rest_is_kept_between_what_the_next_token_allows(gap: float) -> None:
    """Where 1 - sum is rounding alone, as behind tokens that are far likelier, it is within the bounds of the next."""
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    logits[:, :4] += gap
    best = logits.log_softmax(-1).sort(descending=True, dim=-1)
    tokens, logprobs = best.indices[:, :5].int().numpy(), best.values[:, :5].numpy()
    kept, found = coarse(tokens, logprobs, 4, 30)
    expected = coarse_logprobs(logits.double(), torch.from_numpy(kept).long()).numpy()
    np.testing.assert_allclose(found[:, :4], expected[:, :4], atol=2e-6)
    np.testing.assert_allclose(np.exp(found[:, 4]), np.exp(expected[:, 4]), atol=1e-6)
    apart = found[:, 4] - expected[:, 4]
    assert (found[:, 4] >= logprobs[:, 4] - 1e-5).all()
    assert (apart <= np.log(26)).all()
    if gap == 1.0:
        assert np.abs(apart).max() < 1e-4
    assert coarse(tokens, logprobs, 5, 5)[1][:, 5] == pytest.approx(LEAST_LOGPROB)
