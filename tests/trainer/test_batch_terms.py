"""N's words for the parts of a batch, in ours."""

import numpy as np
from training_data import make_groups

from slipstream.batching.collate import collate, split_minibatches
from slipstream.core.packed import TrainSequence


def test_a_batch_of_8_in_2_minibatches_accumulated_twice():
    """Its example: minibatches of 4 and microbatches of 2. Ours hold whole groups, and count tokens, not sequences."""
    groups = make_groups(4, 2)
    sequences = {
        (ordinal, sample): TrainSequence(
            key=(ordinal, sample),
            tokens=np.full(5, 10 * ordinal + sample, dtype=np.int32),
            mask=np.arange(5) > 0,
            behaviour_logprobs=np.zeros(5, dtype=np.float32),
            advantages=np.zeros(5, dtype=np.float32),
            versions=np.zeros(5, dtype=np.int32),
        )
        for ordinal in range(4)
        for sample in range(2)
    }
    tokens_of_two = 2 * sequences[0, 0].num_inputs
    minibatches = split_minibatches(groups, 2)
    assert [sum(len(group.rollouts) for group in groups) for groups in minibatches] == [4, 4]
    for groups in minibatches:
        keys = [
            (rollout.completion.ordinal, rollout.completion.sample) for group in groups for rollout in group.rollouts
        ]
        microbatches = collate([sequences[key] for key in keys], tokens_of_two)
        assert [len(microbatch.keys) for microbatch in microbatches] == [2, 2]
