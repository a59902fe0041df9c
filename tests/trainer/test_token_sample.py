"""What `tokens.jsonl` says of a step, against transformers' model, one sequence at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from training_data import hugging_face_twin, make_groups, run_config, tiny_policy

from slipstream.batching import collate as batching
from slipstream.trainer.optim import AdamW
from slipstream.trainer.records import TokenSample
from slipstream.trainer.step import train_on_batch

TEMPERATURE = 0.8


def trained(groups, sample, **changes):
    config = run_config(
        generator={"max_new_tokens": 16, "temperature": TEMPERATURE},
        loss={"name": "reinforce", "advantages": "group_mean"},
        **changes,
    )
    model, flat = tiny_policy()
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=100)
    metrics = train_on_batch(model, optimizer, groups, config=config, step=0, batching=batching, tokens=sample)
    return metrics, flat.flat


def by_the_twin(rollout):
    """Of the policy before any update: logprobs of the sampled tokens."""
    completion = rollout.completion
    pieces = [completion.prompt.tokens, *(segment.tokens for segment in completion.segments)]
    ids = torch.from_numpy(np.concatenate(pieces).astype(np.int64))
    with torch.no_grad():
        logits = hugging_face_twin(tiny_policy()[0])(ids[None]).logits[0]
    logprobs = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    place, found = len(completion.prompt.tokens), []
    for segment in completion.segments:
        for _ in segment.tokens:
            if segment.is_sampled:
                found.append(float(logprobs[place - 1, ids[place]]))
            place += 1
    return found


def test_logprobs_and_advantages_of_the_sampled_groups_and_of_no_others():
    groups = make_groups(seed=3, given=True)
    sample = TokenSample(every=2)
    trained(groups, sample, trainer={"microbatch_tokens": 40, "epochs": 2})
    assert set(sample.trained) == {(group.ordinal, index) for group in groups[::2] for index in range(3)}
    for group in groups[::2]:
        mean = np.mean([rollout.reward for rollout in group.rollouts])
        for rollout in group.rollouts:
            logprobs, advantages = sample.trained[rollout.ordinal, rollout.sample]
            np.testing.assert_allclose(logprobs, by_the_twin(rollout), atol=1e-4)  # not those of the second epoch
            np.testing.assert_allclose(advantages, np.full(len(logprobs), rollout.reward - mean), atol=1e-6)


def test_the_policy_is_the_one_that_is_updated_with_the_completion():
    """In the second minibatch that is one update on."""
    groups = make_groups(seed=3)
    sample = TokenSample(every=1)
    trained(groups, sample, trainer={"minibatches": 2, "optimizer": {"lr": 0.05}})
    differences = [
        max(np.abs(sample.trained[one.ordinal, one.sample][0] - by_the_twin(one)).max() for one in group.rollouts)
        for group in groups
    ]
    assert max(differences[0::2]) < 1e-4
    assert min(differences[1::2]) > 0.01


@pytest.mark.parametrize("every", [0, 1])
def test_looking_changes_nothing(every):
    groups = make_groups(seed=5)
    plain, looked_at = trained(groups, None), trained(groups, sample := TokenSample(every))
    assert torch.equal(plain[1], looked_at[1])
    assert {k: v for k, v in plain[0].items() if k != "train_s"} == {
        k: v for k, v in looked_at[0].items() if k != "train_s"
    }
    assert bool(sample.trained) == bool(every)


def test_completions_that_are_masked_have_nothing():
    groups = make_groups(seed=5, finish_reason="length")
    sample = TokenSample(every=1)
    config = run_config(loss={"truncated": "mask"})
    model, flat = tiny_policy()
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=100)
    train_on_batch(model, optimizer, groups, config=config, step=0, batching=batching, tokens=sample)
    assert sample.trained == {}
