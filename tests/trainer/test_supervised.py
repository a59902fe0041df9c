import numpy as np
import pytest
import torch
from training_data import VOCAB_SIZE, hugging_face_twin, tiny_policy

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.batching import collate as batching
from slipstream.core.errors import ConfigError, ShapeError
from slipstream.core.stage_sections import WarmStartConfig
from slipstream.core.training_sections import OptimizerConfig
from slipstream.trainer.measure import MAX_LOGITS
from slipstream.trainer.optim import AdamW
from slipstream.trainer.supervised import measure_prediction, supervised_updates

DEMONSTRATIONS = [(np.array([2, 3 + i], dtype=np.int32), np.array([3 + i, 10, 1], dtype=np.int32)) for i in range(6)]


def updates(model, flat, config, demonstrations=DEMONSTRATIONS, seed=0, microbatch_tokens=64):
    return supervised_updates(
        model,
        AdamW(flat, config.optimizer, total_updates=config.steps),
        demonstrations,
        config=config,
        microbatch_tokens=microbatch_tokens,
        seed=seed,
        batching=batching,
    )


def test_first_loss_is_the_mean_over_completion_tokens():
    model, flat = tiny_policy()
    expected = []
    for prompt, completion in DEMONSTRATIONS:
        expected.extend(probe_logprobs(model, np.concatenate([prompt, completion]))[len(prompt) - 1 :])
    config = WarmStartConfig(steps=1, batch_size=len(DEMONSTRATIONS))
    (update,) = updates(model, flat, config)
    assert update.loss == pytest.approx(-np.mean(expected), rel=1e-5)
    assert update.num_tokens == 18
    assert update.index == 0


def test_it_learns_and_the_host_may_stop_between_updates():
    model, flat = tiny_policy()
    config = WarmStartConfig(steps=30, batch_size=6, optimizer=OptimizerConfig(lr=1e-2))
    losses = [update.loss for update in updates(model, flat, config)]
    assert len(losses) == 30
    assert losses[-1] < 0.3 * losses[0]
    assert losses[0] > 0.5 * np.log(VOCAB_SIZE)


def test_the_seed_decides_the_order_and_nothing_else_does():
    config = WarmStartConfig(steps=3, batch_size=2)
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed + len(weights))
        model, flat = tiny_policy()
        list(updates(model, flat, config, seed=seed))
        weights.append(flat.flat)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_microbatches_do_not_change_the_update():
    config = WarmStartConfig(steps=1, batch_size=6)
    results = []
    for microbatch_tokens in (5, 1000):
        model, flat = tiny_policy()
        (update,) = updates(model, flat, config, microbatch_tokens=microbatch_tokens)
        results.append((update.loss, update.grad_norm))
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_empty_demonstrations_are_refused():
    model, flat = tiny_policy()
    with pytest.raises(ConfigError):
        next(updates(model, flat, WarmStartConfig(steps=1), demonstrations=[]))
    with pytest.raises(ShapeError):
        next(updates(model, flat, WarmStartConfig(steps=1), demonstrations=[(np.array([1]), np.array([]))]))


def test_predictions_are_those_of_transformers():
    model, _ = tiny_policy()
    twin = hugging_face_twin(model)
    losses, found = [], []
    for prompt, completion in DEMONSTRATIONS:
        tokens = torch.from_numpy(np.concatenate([prompt, completion])).long()
        with torch.no_grad():
            logprobs = twin(tokens[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        losses += (-logprobs[torch.arange(len(completion)), tokens[len(prompt) :]]).tolist()
        found += (logprobs.argmax(-1) == tokens[len(prompt) :]).tolist()
    assert 0 < sum(found) < len(found), "a case that tells right from wrong"
    for capacity in (4, 64):
        measured = measure_prediction(model, DEMONSTRATIONS, microbatch_tokens=capacity, batching=batching)
        assert measured.loss == pytest.approx(np.mean(losses), rel=1e-5)
        assert (measured.accuracy, measured.num_tokens) == (np.mean(found), len(found))
    with pytest.raises(ConfigError, match="takes demonstrations"):
        measure_prediction(model, [], microbatch_tokens=64, batching=batching)


def test_predictions_of_a_large_head_in_chunks(monkeypatch):
    model, _ = tiny_policy()
    whole = measure_prediction(model, DEMONSTRATIONS, microbatch_tokens=64, batching=batching)
    monkeypatch.setitem(MAX_LOGITS, "cpu", 5 * VOCAB_SIZE)
    chunked = measure_prediction(model, DEMONSTRATIONS, microbatch_tokens=64, batching=batching)
    assert chunked.loss == pytest.approx(whole.loss, rel=1e-6)
    assert chunked.accuracy == whole.accuracy
