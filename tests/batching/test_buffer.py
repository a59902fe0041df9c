import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.batching.buffer import GroupBuffer
from slipstream.core.errors import SlipstreamError
from slipstream.core.types import Completion, Prompt, Rollout, Segment, VersionSpan

PROMPT = Prompt(prompt_id="p", text="?", tokens=np.array([3], dtype=np.int32), task="t")


def rollout(ordinal: int, sample: int, reward: float = 0.0) -> Rollout:
    segment = Segment(
        tokens=np.array([1], dtype=np.int32),
        behaviour_logprobs=np.array([-1.0], dtype=np.float32),
        version_spans=(VersionSpan(start=0, version=0),),
    )
    completion = Completion(
        ordinal=ordinal, sample=sample, prompt=PROMPT, segments=(segment,), text="", finish_reason="stop"
    )
    return Rollout(completion=completion, reward=reward)


def test_the_last_rollout_completes_its_group_in_sample_order():
    buffer = GroupBuffer(3)
    for sample in (2, 0, 1):
        assert not buffer.is_complete(5)
        assert buffer.add(rollout(5, sample))
    assert buffer.is_complete(5)
    assert [one.sample for one in buffer.group(5)] == [0, 1, 2]


def test_incomplete_groups_cannot_be_taken_and_stay():
    buffer = GroupBuffer(2)
    buffer.add(rollout(0, 0))
    with pytest.raises(SlipstreamError, match="0 \\(1 rollouts\\)"):
        buffer.take([0])
    assert len(buffer) == 1


def test_late_duplicates_of_taken_groups_are_dropped():
    buffer = GroupBuffer(1)
    buffer.add(rollout(0, 0))
    buffer.take([0])
    assert not buffer.add(rollout(0, 0))
    assert buffer.num_duplicates == 1
    assert len(buffer) == 0


def test_what_a_resumed_run_has_taken_is_known_in_little_room():
    """The checkpoint owed groups 1000 and 1003; those below and between were trained before it."""
    buffer = GroupBuffer(1)
    ordinals = [1003, 1000, *range(1005, 3000), 1004]
    for ordinal in ordinals:
        buffer.add(rollout(ordinal, 0))
        buffer.take([ordinal])
    assert not any(buffer.add(rollout(ordinal, 0)) for ordinal in ordinals)
    assert len(buffer._retired) == 4


@given(order=st.permutations(range(12)), count=st.integers(0, 12))
def test_in_whatever_order_groups_are_taken_just_they_are_known(order, count):
    buffer = GroupBuffer(1, expects=lambda ordinal, sample: ordinal % 5 > 0)
    buffer.take([ordinal for ordinal in order[:count] if ordinal % 5 == 0] * 2)  # of these nothing comes here
    for ordinal in [ordinal for ordinal in order[:count] if ordinal % 5]:
        buffer.add(rollout(ordinal, 0))
        buffer.take([ordinal])
    assert [ordinal for ordinal in range(12) if buffer._is_retired(ordinal)] == sorted(order[:count])


def test_the_first_of_two_equal_rollouts_wins():
    buffer = GroupBuffer(2)
    buffer.add(rollout(0, 0, reward=1.0))
    buffer.add(rollout(0, 0, reward=2.0))
    buffer.add(rollout(0, 1))
    assert buffer.group(0)[0].reward == 1.0
    assert buffer.num_duplicates == 1


def test_bounds():
    buffer = GroupBuffer(2, max_groups=1)
    buffer.add(rollout(0, 0))
    with pytest.raises(SlipstreamError, match="full"):
        buffer.add(rollout(1, 0))
    with pytest.raises(SlipstreamError, match="outside its group"):
        buffer.add(rollout(0, 2))


@given(
    arrivals=st.permutations([(o, s) for o in range(5) for s in range(3)]),
    repeats=st.lists(st.integers(0, 14), max_size=10),
    first=st.sets(st.integers(0, 4)),
)
def test_every_rollout_leaves_exactly_once(arrivals, repeats, first):
    buffer = GroupBuffer(3)
    stream = list(arrivals)
    for index in repeats:
        stream.insert(index, arrivals[index % len(arrivals)])
    completed = [key[0] for key in stream if buffer.add(rollout(*key)) and buffer.is_complete(key[0])]
    assert sorted(completed) == [0, 1, 2, 3, 4]
    assert buffer.num_duplicates == len(repeats)
    for chosen in (first, set(completed) - first):
        groups = buffer.take([o for o in reversed(completed) if o in chosen])
        keys = [(r.ordinal, r.sample) for group in groups.values() for r in group]
        assert keys == [(o, s) for o in range(5) if o in chosen for s in range(3)]
    assert len(buffer) == 0
