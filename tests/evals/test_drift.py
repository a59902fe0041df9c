"""Perplexity and sampled KL: against transformers, arrays worked out by hand, and samples read one by one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from drawn import drawn
from hypothesis import strategies as st

from slipstream.core.errors import ConfigError, ShapeError
from slipstream.core.sections import ModelConfig
from slipstream.core.types import Completion, Prompt, Segment, VersionSpan
from slipstream.evals.drift import DriftSample, measure_drift, perplexity, sample_of, sampled_kl, sampled_token_logprobs
from slipstream.models.hf import load_model
from slipstream.models.initialise import new_model
from slipstream.models.transformer import Transformer
from slipstream.trainer import measure

VOCAB_SIZE = 23
SHAPE = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48}


def tiny_model(seed: int = 0, gain: float = 8.0) -> Transformer:
    config = ModelConfig(
        family="llama",
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_positions=48,
    )
    model = new_model(config, VOCAB_SIZE, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(gain)
    return model


def sample(num_prompt: int, num_tokens: int, seed: int = 0, *, with_policy: bool = False) -> DriftSample:
    rng = np.random.default_rng([seed, num_prompt, num_tokens])
    return DriftSample(
        prompt_tokens=rng.integers(1, VOCAB_SIZE, num_prompt).astype(np.int32),
        tokens=rng.integers(1, VOCAB_SIZE, num_tokens).astype(np.int32),
        policy_logprobs=-rng.random(num_tokens).astype(np.float32) if with_policy else None,
    )


@pytest.fixture(scope="module")
def theirs_and_ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[transformers.PreTrainedModel, Transformer]:
    folder: Path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SHAPE, **HEADS, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    transformers.utils.logging.disable_progress_bar()
    theirs.save_pretrained(folder)
    return theirs, load_model(folder)


def test_perplexity_equals_that_from_the_loss_of_transformers(theirs_and_ours) -> None:
    theirs, ours = theirs_and_ours
    samples = [sample(5, 7), sample(1, 4), sample(11, 1), sample(5, 9)]
    per_response, per_text = [], []
    for one in samples:
        ids = torch.from_numpy(np.concatenate([one.prompt_tokens, one.tokens])).long()[None]
        labels = ids.clone()
        labels[:, : len(one.prompt_tokens)] = -100
        with torch.no_grad():
            mean_nll = float(theirs(input_ids=ids, labels=labels).loss)
        per_response.append(math.exp(mean_nll))
        per_text.append(math.exp(mean_nll * len(one.tokens) / (ids.shape[1] - 1)))
    drift = measure_drift(ours, samples)
    assert drift.perplexity.per_response_token.mean == pytest.approx(np.mean(per_response), rel=1e-4)
    assert drift.perplexity.per_text_token.mean == pytest.approx(np.mean(per_text), rel=1e-4)
    assert drift.perplexity.per_response_token.std == pytest.approx(np.std(per_response, ddof=1), rel=1e-3)
    assert drift.kl is None
    assert drift.num_tokens == 21


def test_the_second_denominator_is_that_of_a_padded_batch_with_prompt_labels_ignored(theirs_and_ours) -> None:
    """The published computation on a right-padded batch: ignored labels add nothing, the mask counts all tokens."""
    theirs, ours = theirs_and_ours
    samples = [sample(6, 5), sample(3, 8)]
    ids, mask = torch.zeros(2, 14, dtype=torch.int64), torch.zeros(2, 14, dtype=torch.int64)
    labels = torch.full((2, 14), -100)
    for row, one in enumerate(samples):
        text = torch.from_numpy(np.concatenate([one.prompt_tokens, one.tokens])).long()
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
        labels[row, len(one.prompt_tokens) : len(text)] = text[len(one.prompt_tokens) :]
    with torch.no_grad():
        logits = theirs(input_ids=ids, attention_mask=mask).logits
    nll = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    expected = torch.exp((nll * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1)).mean()
    assert measure_drift(ours, samples).perplexity.per_text_token.mean == pytest.approx(float(expected), rel=1e-4)


def test_perplexity_by_hand() -> None:
    logprobs = [np.log([0.5, 0.125]).astype(np.float32), np.log([0.1]).astype(np.float32)]
    result = perplexity(logprobs, [4, 1])
    assert result.per_response_token.mean == pytest.approx((4 + 10) / 2, rel=1e-6)  # 16^(1/2), 10
    assert result.per_response_token.std == pytest.approx(math.sqrt(18), rel=1e-6)
    assert result.per_response_token.standard_error == pytest.approx(3, rel=1e-6)
    assert result.per_text_token.mean == pytest.approx((2 + 10) / 2, rel=1e-6)  # 16^(1/4), and one token alone


def test_perplexity_of_impossible_text_is_infinite() -> None:
    result = perplexity([np.array([-5000.0], dtype=np.float32), np.array([0.0], dtype=np.float32)], [1, 1])
    assert result.per_response_token.mean == math.inf
    assert math.isnan(result.per_response_token.std)


def test_a_uniform_model_gives_the_size_of_its_vocabulary() -> None:
    drift = measure_drift(tiny_model(gain=0.0), [sample(4, 6), sample(2, 3)])
    assert drift.perplexity.per_response_token.mean == pytest.approx(VOCAB_SIZE, rel=1e-5)


def test_kl_by_hand() -> None:
    policy = [np.array([-1.0, -2.0], dtype=np.float32), np.array([-0.5], dtype=np.float32)]
    reference = [np.array([-1.5, -3.0], dtype=np.float32), np.array([-0.25], dtype=np.float32)]
    kl = sampled_kl(policy, reference)
    assert kl.per_sequence.mean == pytest.approx((1.5 - 0.25) / 2)
    assert kl.per_sequence.std == pytest.approx(1.75 / math.sqrt(2))
    assert kl.per_token == pytest.approx(1.25 / 3)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_policy_that_is_the_reference_has_no_drift(temperature: float) -> None:
    model = tiny_model()
    texts = [sample(4, 6), sample(2, 3, seed=1)]
    logprobs = sampled_token_logprobs(model, texts, temperature=temperature)
    samples = [DriftSample(one.prompt_tokens, one.tokens, own) for one, own in zip(texts, logprobs, strict=True)]
    drift = measure_drift(model, samples, temperature=temperature)
    assert drift.kl is not None
    assert drift.kl.per_sequence.mean == 0.0
    assert drift.perplexity == measure_drift(model, texts).perplexity  # at temperature 1, whatever sampling was


def test_sampled_kl_estimates_the_exact_one() -> None:
    """One token after one prompt: the exact KL is a sum over the vocabulary."""
    policy, reference = tiny_model(0, gain=12.0), tiny_model(1, gain=12.0)
    prompt = np.array([3, 9, 4], dtype=np.int32)
    every = [DriftSample(prompt, np.array([token], dtype=np.int32)) for token in range(VOCAB_SIZE)]
    ours, theirs = (
        np.concatenate(sampled_token_logprobs(model, every)).astype(np.float64) for model in (policy, reference)
    )
    exact = float((np.exp(ours) * (ours - theirs)).sum())
    assert exact > 0.01
    tokens = np.random.default_rng(0).choice(VOCAB_SIZE, size=4000, p=np.exp(ours) / np.exp(ours).sum())
    samples = [
        DriftSample(prompt, np.array([t], dtype=np.int32), np.array([ours[t]], dtype=np.float32)) for t in tokens
    ]
    kl = measure_drift(reference, samples).kl
    assert kl is not None
    assert abs(kl.per_sequence.mean - exact) < 4 * kl.per_sequence.standard_error


@drawn(
    8,
    20,
    shapes=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(0, 1)), min_size=1, max_size=8),
    microbatch_tokens=st.sampled_from([1, 16, 4096]),
)
def test_packing_changes_nothing(shapes: list[tuple[int, int, int]], microbatch_tokens: int) -> None:
    model = tiny_model()
    samples = [sample(*shape) for shape in shapes]
    packed = sampled_token_logprobs(model, samples, microbatch_tokens=microbatch_tokens)
    for one, own in zip(samples, packed, strict=True):
        assert len(own) == len(one.tokens)
        np.testing.assert_allclose(own, sampled_token_logprobs(model, [one])[0], atol=1e-5)


def test_a_large_head_runs_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = tiny_model(), [sample(4, 6), sample(2, 9)]
    whole = sampled_token_logprobs(model, samples)
    monkeypatch.setitem(measure.MAX_LOGITS, "cpu", 2 * VOCAB_SIZE)
    for ours, expected in zip(sampled_token_logprobs(model, samples), whole, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)


def test_given_tokens_are_read_and_not_measured() -> None:
    model = tiny_model()
    one = sample(4, 6, with_policy=True)
    mask = np.array([True, True, False, False, True, True])
    [everywhere] = sampled_token_logprobs(model, [one])
    partly = DriftSample(one.prompt_tokens, one.tokens, one.policy_logprobs, mask)
    [measured] = sampled_token_logprobs(model, [partly])
    np.testing.assert_allclose(measured, everywhere[mask], atol=1e-6)
    drift = measure_drift(model, [partly])
    assert drift.kl is not None
    assert one.policy_logprobs is not None
    assert drift.kl.per_sequence.mean == pytest.approx(float((one.policy_logprobs - everywhere)[mask].sum()), abs=1e-5)
    assert drift.num_tokens == 4


def test_branches_are_read_each_by_itself() -> None:
    """Two tokens of the trunk, a branch of two given and two sampled tokens: both as if they were all there is."""
    model = tiny_model()
    trunk, other = sample(4, 2, with_policy=True), sample(2, 2, seed=1, with_policy=True)
    assert trunk.policy_logprobs is not None
    assert other.policy_logprobs is not None
    segments = [
        Segment(tokens=trunk.tokens, behaviour_logprobs=trunk.policy_logprobs),
        Segment(tokens=other.prompt_tokens, begins=True),
        Segment(tokens=other.tokens, behaviour_logprobs=other.policy_logprobs),
    ]
    prompt = Prompt(prompt_id="p", text="", tokens=trunk.prompt_tokens, task="t")
    episode = Completion(ordinal=0, sample=0, prompt=prompt, segments=tuple(segments), text="", finish_reason="stop")
    both = sample_of(episode)
    assert (both.branches, both.starts, both.num_predicted) == ((2,), (0, 6), 5 + 3)
    [measured] = sampled_token_logprobs(model, [both])
    np.testing.assert_allclose(measured, np.concatenate(sampled_token_logprobs(model, [trunk, other])), atol=1e-6)
    assert measure_drift(model, [both]).num_tokens == 4
    long = DriftSample(trunk.prompt_tokens, np.ones(90, dtype=np.int32), branches=(40,))
    with pytest.raises(ConfigError, match="longer than the model reads"):
        sampled_token_logprobs(model, [long])
    assert len(sampled_token_logprobs(model, [DriftSample(long.prompt_tokens, long.tokens[:85], branches=(40,))])) == 1


def test_empty_completions_and_unknown_policies_are_counted() -> None:
    drift = measure_drift(tiny_model(), [sample(3, 0), sample(3, 5), sample(2, 4, with_policy=True)])
    assert (drift.num_empty, drift.num_with_policy, drift.num_tokens) == (1, 1, 9)
    assert drift.kl is not None
    assert drift.kl.per_sequence.count == 1


def test_a_completion_of_the_generator() -> None:
    sampled = Segment(
        tokens=np.array([5, 6], dtype=np.int32),
        behaviour_logprobs=np.array([-0.5, -1.0], dtype=np.float32),
        version_spans=(VersionSpan(start=0, version=0),),
    )
    completion = Completion(
        ordinal=0,
        sample=0,
        prompt=Prompt(prompt_id="0", text="?", tokens=np.array([2, 3], dtype=np.int32), task=""),
        segments=(sampled, Segment(tokens=np.array([7], dtype=np.int32)), sampled),
        text="",
        finish_reason="stop",
    )
    one = sample_of(completion)
    assert one.tokens.tolist() == [5, 6, 7, 5, 6]
    assert one.mask.tolist() == [True, True, False, True, True]
    assert one.policy_logprobs is not None
    assert one.policy_logprobs[one.mask].tolist() == [-0.5, -1.0, -0.5, -1.0]
    assert measure_drift(tiny_model(), [one]).num_tokens == 4


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (sample(0, 3), ConfigError, "sample 1 has no prompt"),
        (sample(40, 20), ConfigError, "longer than the model reads"),
        (DriftSample(np.array([1]), np.array([99])), ConfigError, "share a tokenizer"),
        (DriftSample(np.array([1]), np.array([2]), np.zeros(2, dtype=np.float32)), ShapeError, "policy_logprobs"),
        (DriftSample(np.array([1]), np.array([2, 3]), None, np.ones(3, dtype=bool)), ShapeError, "is_sampled"),
    ],
)
def test_samples_that_do_not_fit_are_refused(bad: DriftSample, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        sampled_token_logprobs(tiny_model(), [sample(2, 2), bad])


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ConfigError, match="sampled tokens"):
        measure_drift(tiny_model(), [sample(3, 0)])
    with pytest.raises(ShapeError):
        perplexity([np.zeros(0, dtype=np.float32)], [3])
    with pytest.raises(ShapeError):
        sampled_kl([np.zeros(2, dtype=np.float32)], [np.zeros(1, dtype=np.float32)])
