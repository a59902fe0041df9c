"""What is measured on a batch before its first update, whatever it is packed with."""

import numpy as np
import pytest
import torch
from training_data import Recording, make_groups, run_config, sharing_prompts, tiny_policy

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.batching import collate as batching
from slipstream.core.errors import ShapeError
from slipstream.models.initialise import new_model
from slipstream.trainer.batch import train_sequence, without_targets
from slipstream.trainer.critic import Critic
from slipstream.trainer.loss_checks import needed_columns
from slipstream.trainer.measure import Auxiliary, measure, microbatch_logprobs, with_columns
from slipstream.trainer.optim import AdamW
from slipstream.trainer.step import train_on_batch

SHORT = {"max_new_tokens": 16}


def sequences_of(groups):
    return [train_sequence(rollout.completion) for group in groups for rollout in group.rollouts]


@pytest.mark.parametrize("capacity", [1, 30, 10_000])
def test_every_sequence_is_read_as_if_alone(capacity):
    model, _ = tiny_policy()
    sequences = sequences_of(sharing_prompts(make_groups(given=True)))
    sequences[3] = without_targets(sequences[3])

    def read(microbatch):
        return microbatch_logprobs(model, microbatch, temperature=1.0)[0]

    columns = measure(read, sequences[::-1], microbatch_tokens=capacity, batching=batching)
    assert set(columns) == {sequence.key for sequence in sequences}
    for sequence in sequences:
        column = columns[sequence.key]
        assert column.dtype == np.float32
        expected = probe_logprobs(model, sequence.tokens)[sequence.mask[1:]]
        np.testing.assert_allclose(column, expected, atol=1e-5)
        spread = with_columns(sequence, reference_logprobs=column).reference_logprobs
        np.testing.assert_array_equal(spread[sequence.mask], column)
        assert not spread[~sequence.mask].any()
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_a_sequence_without_targets_is_left_out_of_microbatches():
    whole = sequences_of(make_groups(1))
    masked = without_targets(whole[0])
    assert masked.num_targets == masked.num_inputs == 0
    assert not masked.behaviour_logprobs.any()
    assert set(masked.versions) == {-1}
    np.testing.assert_array_equal(masked.tokens, whole[0].tokens)
    (microbatch,) = batching.collate([masked, *whole[1:]], 1000)
    assert microbatch.keys == tuple(sorted((s.key for s in whole[1:]), key=microbatch.keys.index))


def test_columns_of_a_batch_are_the_same_ones():
    first, second, *_ = sequences_of(make_groups(1))
    with pytest.raises(ShapeError, match="different columns"):
        batching.collate([with_columns(first, values=np.zeros(first.num_targets)), second], 1000)


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"loss": {"name": "aipo"}}, ()),
        ({"loss": {"name": "decoupled_ppo"}}, ("proximal_logprobs",)),
        ({"loss": {"name": "online_dpo", "select": "best_and_worst"}}, ("reference_logprobs",)),
        ({"kl": {"coef": 0.1}}, ("reference_logprobs",)),
        ({"generator": {**SHORT, "temperature": 0.7}, "trainer": {"logprob_temperature": 0.7}}, ()),
        (
            {"max_staleness": 0, "generator": {**SHORT, "temperature": 0.7}, "trainer": {"logprob_temperature": 1.0}},
            ("behaviour_logprobs",),
        ),
        ({"loss": {"name": "ppo", "advantages": "gae"}}, ("values",)),
        ({"loss": {"name": "ppo", "advantages": "gae"}, "critic": {"vtrace": True}}, ("proximal_logprobs", "values")),
    ],
)
def test_only_what_is_needed_is_measured(changes, needed):
    assert needed_columns(run_config(**changes)) == needed


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_proximal_policy_is_the_one_at_the_start_of_the_batch(minibatches):
    """For every epoch and minibatch, however far updates have moved the policy; so are reference and values."""
    config = run_config(
        loss={"name": "decoupled_ppo", "advantages": "gae"},
        critic={"model": "own", "head_init": "reward", "optimizer": {"lr": 1e-2}},
        kl={"coef": 0.1},
        trainer={"minibatches": minibatches, "epochs": 2, "shuffle": True, "optimizer": {"lr": 1e-2}},
    )
    model, flat = tiny_policy()
    reference = new_model(config.model, model.config.vocab_size, 7)
    critic = Critic(config, model)
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=100)
    groups = make_groups()
    sequences = {sequence.key: sequence for sequence in sequences_of(groups)}
    before = {key: probe_logprobs(model, s.tokens)[s.mask[1:]] for key, s in sequences.items()}
    frozen = {key: probe_logprobs(reference, s.tokens)[s.mask[1:]] for key, s in sequences.items()}
    start = flat.flat.clone(), critic.parameters.flat.clone()
    recording = Recording()
    train_on_batch(
        model, optimizer, groups, config=config, step=0, batching=recording, auxiliary=Auxiliary(reference, critic)
    )
    assert not torch.equal(flat.flat, start[0])
    assert not torch.equal(critic.parameters.flat, start[1])
    trained = [m for packed in recording.packed for m in packed if m.returns is not None]
    assert len(trained) == 2 * minibatches
    values = {}
    for microbatch in trained:
        for segment, key in enumerate(microbatch.keys):
            at = microbatch.segment_ids == segment
            np.testing.assert_allclose(microbatch.proximal_logprobs[at], before[key], atol=1e-5)
            np.testing.assert_allclose(microbatch.reference_logprobs[at], frozen[key], atol=1e-5)
            np.testing.assert_array_equal(values.setdefault(key, microbatch.values[at]), microbatch.values[at])


def test_at_another_temperature_behaviour_and_reference_are_read_at_it():
    """Sampled at 0.5, trained at 1: recorded logprobs play no part, and the first ratio is 1 all the same."""
    config = run_config(
        max_staleness=0,
        loss={"name": "ppo", "advantages": "group_mean"},
        kl={"coef": 0.1},
        generator={"max_new_tokens": 16, "temperature": 0.5},
        trainer={"logprob_temperature": 1.0, "epochs": 2, "optimizer": {"lr": 1e-2}},
    )
    model, flat = tiny_policy()
    reference = new_model(config.model, model.config.vocab_size, 7)
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=100)
    groups = make_groups()
    sequences = {sequence.key: sequence for sequence in sequences_of(groups)}
    before, frozen = (
        {key: probe_logprobs(policy, s.tokens)[s.mask[1:]] for key, s in sequences.items()}
        for policy in (model, reference)
    )
    recording = Recording()
    metrics = train_on_batch(
        model, optimizer, groups, config=config, step=0, batching=recording, auxiliary=Auxiliary(reference)
    )
    (trained,) = recording.packed[-1]
    for segment, key in enumerate(trained.keys):
        at = trained.segment_ids == segment
        np.testing.assert_allclose(trained.behaviour_logprobs[at], before[key], atol=1e-5)
        np.testing.assert_allclose(trained.reference_logprobs[at], frozen[key], atol=1e-5)
    assert metrics["logprob_diff_max/lag_0"] < 1e-5
    assert metrics["kl_reference_sum"] == pytest.approx(
        np.mean([(before[key] - frozen[key]).sum() for key in sequences]), rel=1e-4
    )


def test_the_first_update_of_decoupled_ppo_has_ratio_1_to_the_bit():
    """The proximal policy's logprobs and the policy's come from the same microbatches by the same kernels."""
    config = run_config(loss={"name": "decoupled_ppo", "params": {"eps_low": 0.2}})
    model, flat = tiny_policy()
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=100)
    metrics = train_on_batch(model, optimizer, make_groups(), config=config, step=0, batching=batching)
    assert metrics["proximal_ratio"] == 1.0
    assert metrics["clipped_frac"] == 0.0
