"""What cannot be is found, by a table of single changes to a sound rollout; what can be is passed on as it is."""

import math
import time

import msgspec
import numpy as np
import pytest

from slipstream.core import wire
from slipstream.core.types import Completion, EpisodeRecord, Prompt, Rollout, Segment, VersionSpan
from slipstream.core.vetting import (
    MAX_BRANCHES,
    MAX_REWARD,
    POISONED,
    Limits,
    completion_faults,
    emptied,
    is_of_run,
    vetted,
)

VOCAB = 50
LIMITS = Limits(
    vocab_size=VOCAB, max_new_tokens=12, max_positions=20, keeps_sets=False, num_trained=4, failure_reward=-3.0
)
NEWEST = 7


def ints(*values):
    return np.array(values, dtype=np.int32)


def floats(*values):
    return np.array(values, dtype=np.float32)


def spans(*pairs):
    return tuple(VersionSpan(start=start, version=version) for start, version in pairs)


def sound(*, kept=False):
    """Six sampled tokens in two segments around two given ones, of versions 5, 6 and 7."""
    first = Segment(tokens=ints(4, 9, 1), behaviour_logprobs=floats(-1, -0.5, 0), version_spans=spans((0, 5), (2, 6)))
    last = Segment(tokens=ints(3, 49, 0), behaviour_logprobs=floats(-9, -2, -3), version_spans=spans((0, 6), (1, 7)))
    if kept:
        first = msgspec.structs.replace(first, kept_tokens=ints(4, 9, 30, 0, 1), kept_counts=ints(1, 2, 2))
        last = msgspec.structs.replace(last, kept_tokens=ints(3, 49, 0, 1, 2), kept_counts=ints(1, 1, 3))
    completion = Completion(
        ordinal=11,
        sample=2,
        prompt=Prompt(prompt_id="p", text="what?", tokens=ints(1, 2, 3), task="t"),
        segments=(first, Segment(tokens=ints(7, 7)), last),
        text="said",
        finish_reason="stop",
        replica=1,
        started_s=1.0,
        finished_s=2.0,
    )
    return Rollout(completion=completion, reward=0.5, reward_parts={"a": 0.5, "b": None}, scored_s=3.0)


def vetted_alone(rollout, limits, **known):
    return vetted([rollout], limits, **known)[0]


def with_segment(rollout, index, **changes):
    segments = list(rollout.completion.segments)
    segments[index] = msgspec.structs.replace(segments[index], **changes)
    return with_completion(rollout, segments=tuple(segments))


def with_completion(rollout, **changes):
    return msgspec.structs.replace(rollout, completion=msgspec.structs.replace(rollout.completion, **changes))


def with_prompt(rollout, **changes):
    return with_completion(rollout, prompt=msgspec.structs.replace(rollout.completion.prompt, **changes))


LONG = Segment(
    tokens=np.zeros(13, dtype=np.int32), behaviour_logprobs=-np.ones(13, np.float32), version_spans=spans((0, 5))
)

POISON = {
    "nan logprob": (lambda r: with_segment(r, 0, behaviour_logprobs=floats(-1, math.nan, -1)), "nan at token 1 of 3"),
    "inf logprob": (lambda r: with_segment(r, 2, behaviour_logprobs=floats(math.inf, -1, -1)), "inf at token 0"),
    "-inf logprob": (lambda r: with_segment(r, 0, behaviour_logprobs=floats(-1, -1, -math.inf)), "-inf at token 2"),
    "probability above 1": (lambda r: with_segment(r, 0, behaviour_logprobs=floats(-1, 0.1, -1)), "0.1"),
    "too few logprobs": (lambda r: with_segment(r, 0, behaviour_logprobs=floats(-1, -1)), "for 3 tokens"),
    "logprobs of two dimensions": (
        lambda r: with_segment(r, 0, behaviour_logprobs=-np.ones((3, 1), np.float32)),
        "shape",
    ),
    "logprobs that are integers": (lambda r: with_segment(r, 0, behaviour_logprobs=ints(-1, -1, -1)), "int32"),
    "token beyond the vocabulary": (lambda r: with_segment(r, 2, tokens=ints(3, VOCAB, 0)), f"token id {VOCAB} at 1"),
    "negative token": (lambda r: with_segment(r, 0, tokens=ints(4, 9, -1)), "token id -1 at 2"),
    "given token beyond the vocabulary": (lambda r: with_segment(r, 1, tokens=ints(7, 10**6)), "token id 1000000"),
    "tokens that are numbers": (lambda r: with_segment(r, 0, tokens=floats(1, 2, 3)), "float32"),
    "tokens without a shape": (lambda r: with_segment(r, 0, tokens=np.array(3, dtype=np.int32)), "shape []"),
    "no segment": (lambda r: with_completion(r, segments=()), "no token was sampled"),
    "an empty completion": (
        lambda r: with_completion(r, segments=(Segment(tokens=ints(), behaviour_logprobs=floats()),)),
        "no token was sampled",
    ),
    "only given tokens": (lambda r: with_completion(r, segments=(Segment(tokens=ints(1, 2)),)), "no token was sampled"),
    "longer than asked for": (lambda r: with_completion(r, segments=(LONG,)), "13 sampled tokens, at most 12"),
    "longer than the model reads": (lambda r: with_prompt(r, tokens=np.ones(13, np.int32)), "21 tokens"),
    "empty prompt": (lambda r: with_prompt(r, tokens=ints()), "prompt has no token"),
    "prompt beyond the vocabulary": (lambda r: with_prompt(r, tokens=ints(VOCAB)), f"prompt has token id {VOCAB}"),
    "no versions": (lambda r: with_segment(r, 0, version_spans=()), "version spans"),
    "versions from the second token on": (lambda r: with_segment(r, 0, version_spans=spans((1, 5))), "start at [1]"),
    "a version behind the end": (lambda r: with_segment(r, 0, version_spans=spans((0, 5), (3, 6))), "[0, 3] of 3"),
    "spans out of order": (lambda r: with_segment(r, 0, version_spans=spans((0, 5), (2, 6), (1, 6))), "[0, 2, 1]"),
    "falling versions": (lambda r: with_segment(r, 0, version_spans=spans((0, 6), (2, 5))), "[6, 5] that fall"),
    "falling over segments": (lambda r: with_segment(r, 2, version_spans=spans((0, 5))), "[5] that fall"),
    "a negative version": (lambda r: with_segment(r, 0, version_spans=spans((0, -1))), "[-1] that fall"),
    "a version from the future": (lambda r: with_segment(r, 2, version_spans=spans((0, 8))), "8 from the future"),
    "versions of given tokens": (lambda r: with_segment(r, 1, version_spans=spans((0, 6))), "given"),
    "kept sets that nobody asked for": (
        lambda r: with_segment(r, 0, kept_tokens=ints(4, 9, 1), kept_counts=ints(1, 1, 1)),
        "nobody asked for",
    ),
    "times that are no numbers": (lambda r: with_completion(r, started_s=math.nan), "started at nan"),
    "a reference logprob that is nan": (
        lambda r: msgspec.structs.replace(r, reference_logprobs=floats(-1, -1, math.nan, -1, -1, -1)),
        "reference logprob nan at token 2 of 6",
    ),
    "too few reference logprobs": (
        lambda r: msgspec.structs.replace(r, reference_logprobs=floats(-1)),
        "for 6 sampled tokens",
    ),
}


@pytest.mark.parametrize("name", POISON)
def test_what_cannot_be_is_poisoned(name):
    change, words = POISON[name]
    found = vetted_alone(change(sound()), LIMITS, newest_version=NEWEST)
    assert found.failure.startswith(POISONED)
    assert words in found.failure
    assert (found.reward, found.reward_parts) == (-3.0, {})
    assert (found.ordinal, found.sample, found.completion.text) == (11, 2, "said")
    assert found.completion.num_tokens == 0
    assert wire.encode(vetted_alone(found, LIMITS, newest_version=NEWEST)) == wire.encode(found)
    again = wire.decode(wire.encode(found))
    assert vetted_alone(again, Limits(failure_reward=-3.0)).failure == found.failure


def test_what_is_sound_stays_as_it_is():
    rollout = sound()
    assert vetted_alone(rollout, LIMITS, newest_version=NEWEST) is rollout
    failed = msgspec.structs.replace(rollout, failure="timed out", reward=-3.0, reward_parts={})
    assert vetted_alone(failed, LIMITS, newest_version=NEWEST) is failed
    with_sets = sound(kept=True)
    assert vetted_alone(with_sets, limits_with(keeps_sets=True), newest_version=NEWEST) is with_sets
    assert completion_faults([rollout.completion], Limits())[0] is None  # who knows no limits minds none


def limits_with(**changes):
    return Limits(**{**vars(LIMITS), **changes})


KEPT = {
    "none": (lambda r: sound(), "no kept sets"),
    "not all": (lambda r: with_segment(r, 2, kept_tokens=None, kept_counts=None), "1 of 2 segments"),
    "no counts": (lambda r: with_segment(r, 0, kept_counts=None), "wrong shape"),
    "above the vocabulary": (lambda r: with_segment(r, 0, kept_tokens=ints(4, 9, 50, 0, 1)), "ids 0..50"),
    "negative": (lambda r: with_segment(r, 2, kept_tokens=ints(3, 49, 0, 1, -1)), "ids -1..49"),
    "empty set": (lambda r: with_segment(r, 0, kept_counts=ints(0, 3, 2)), "empty kept set"),
    "wrong sizes": (lambda r: with_segment(r, 0, kept_counts=ints(1, 2, 3)), "do not fit"),
    "a token not of its set": (
        lambda r: with_segment(r, 0, kept_tokens=ints(4, 8, 30, 0, 1)),
        "not drawn from its set",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept_sets_fit_their_tokens(name):
    change, words = KEPT[name]
    found = vetted_alone(change(sound(kept=True)), limits_with(keeps_sets=True), newest_version=NEWEST)
    assert words in found.failure
    baseline = with_completion(sound(), sample=4)  # ReMax's: greedy, so drawn from no set
    assert vetted_alone(baseline, limits_with(keeps_sets=True), newest_version=NEWEST).failure is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2 * MAX_REWARD, -2 * MAX_REWARD])
@pytest.mark.parametrize("where", ["reward", "part"])
def test_a_reward_that_is_no_number_fails_its_rollout_alone(value, where):
    rollout = sound()
    changes = {"reward": value} if where == "reward" else {"reward_parts": {"a": value}}
    found = vetted_alone(msgspec.structs.replace(rollout, **changes), LIMITS, newest_version=NEWEST)
    assert str(value) in found.failure
    assert not found.failure.startswith(POISONED)
    assert (found.reward, found.reward_parts) == (-3.0, {})
    assert found.completion is rollout.completion


def test_a_reference_that_was_to_come_is_missed():
    limits = limits_with(brings_reference=True)
    assert "without the reference's" in vetted_alone(sound(), limits, newest_version=NEWEST).failure
    measured = msgspec.structs.replace(sound(), reference_logprobs=-np.ones(6, np.float32))
    assert vetted_alone(measured, limits, newest_version=NEWEST) is measured
    assert len(emptied(sound(), "x", failure_reward=0.0).reference_logprobs) == 0


@pytest.mark.parametrize(
    ("ordinal", "sample", "known"), [(11, 0, True), (11, 3, True), (11, 4, False), (11, -1, False), (-1, 0, False)]
)
def test_a_place_that_no_group_has(ordinal, sample, known):
    assert is_of_run(with_completion(sound(), ordinal=ordinal, sample=sample), samples_per_group=4) is known


def test_one_that_cannot_be_does_no_harm_to_those_beside_it():
    changes = [*(change for change, _ in POISON.values()), lambda rollout: rollout]
    rollouts = [change(sound()) for change in changes]
    alone = [vetted_alone(rollout, LIMITS, newest_version=NEWEST) for rollout in rollouts]
    assert list(map(wire.encode, vetted(rollouts, LIMITS, newest_version=NEWEST))) == list(map(wire.encode, alone))
    assert alone[-1] is rollouts[-1]
    assert vetted([], LIMITS) == []


def test_random_damage_never_raises_and_never_passes_numbers_that_are_none():
    """Any bytes for any array: the verdict is a rollout, and what passes has only finite logprobs and known tokens."""
    rng = np.random.default_rng(0)

    def damaged(array):
        kind = rng.integers(6)
        if kind == 0:
            return array[: rng.integers(0, len(array) + 1)]
        if kind == 1:
            return array.astype(rng.choice(["i1", "i8", "f2", "f8", "u4", "b1"]))
        if kind == 2:
            return array.reshape(1, -1)
        copy = array.copy()
        if len(copy):
            raw = copy.view(np.uint8)
            raw[rng.integers(len(raw))] = rng.integers(256)
        return copy

    num_passed = 0
    for _ in range(3000):
        rollout = sound()
        index = int(rng.choice([0, 2]))
        name = str(rng.choice(["tokens", "behaviour_logprobs"]))
        rollout = with_segment(rollout, index, **{name: damaged(vars_of(rollout.completion.segments[index])[name])})
        found = vetted_alone(rollout, LIMITS, newest_version=NEWEST)
        if found.failure is None:
            num_passed += 1
            for segment in found.completion.segments:
                assert segment.tokens.ndim == 1
                assert ((segment.tokens >= 0) & (segment.tokens < VOCAB)).all()
                if segment.behaviour_logprobs is not None:
                    assert np.isfinite(segment.behaviour_logprobs).all()
                    assert len(segment.behaviour_logprobs) == len(segment.tokens)
    assert 100 < num_passed < 2900


def branch(*tokens, **changes):
    return Segment(tokens=ints(*tokens), begins=True, **changes)


def with_more(*segments):
    rollout = sound()
    return with_completion(rollout, segments=(*rollout.completion.segments, *segments))


TURN = Segment(tokens=ints(2, 3), behaviour_logprobs=floats(-1, -1), version_spans=spans((0, 5)))

BRANCHES = {
    "sampled": (
        lambda: with_more(msgspec.structs.replace(TURN, begins=True)),
        "a branch that begins with sampled tokens (segment 3)",
    ),
    "empty": (lambda: with_more(branch(), TURN), "a branch that begins with no tokens (segment 3)"),
    "first": (lambda: with_completion(sound(), segments=(branch(1), TURN)), "at the prompt, where the trunk begins"),
    "longer than the model": (
        lambda: with_more(branch(*range(19)), TURN, branch(1)),
        "21 tokens in a branch, the model reads 20",
    ),
    "a trunk longer than the model": (
        lambda: with_prompt(with_more(branch(1), TURN), tokens=np.ones(13, np.int32)),
        "21 tokens with its prompt",
    ),
    "too many sampled": (
        lambda: with_more(*(part for _ in range(4) for part in (branch(1), TURN))),
        "14 sampled tokens, at most 12",
    ),
    "too many": (lambda: with_more(*(branch(1) for _ in range(MAX_BRANCHES))), "257 branches, at most 256"),
    "a token that is none": (lambda: with_more(branch(VOCAB), TURN), f"token id {VOCAB} at 0"),
    "falling versions": (
        lambda: with_more(branch(1), TURN, msgspec.structs.replace(TURN, version_spans=spans((0, 4)))),
        "[4] that fall",
    ),
    "a version from the future": (
        lambda: with_more(branch(1), msgspec.structs.replace(TURN, version_spans=spans((0, 8)))),
        "8 from the future",
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_that_cannot_be_is_poisoned(name):
    make, words = BRANCHES[name]
    found = vetted_alone(make(), LIMITS, newest_version=NEWEST)
    assert found.failure.startswith(POISONED)
    assert words in found.failure
    assert (found.completion.num_tokens, found.completion.num_branches) == (0, 1)


def test_branches_are_bounded_each_by_itself_and_may_be_sampled_side_by_side():
    """The trunk's last turn is of version 7, the branch's of version 5; together they have 31 tokens."""
    rollout = with_more(branch(*range(18)), TURN)
    assert vetted_alone(rollout, LIMITS, newest_version=NEWEST) is rollout
    assert (rollout.completion.num_branches, len(rollout.completion.trunk_tokens)) == (2, 8)
    assert rollout.completion.trunk_tokens.tolist() == sound().completion.tokens.tolist()
    of_the_trunk = limits_with(reads_branches=False, max_positions=11)
    assert vetted_alone(rollout, of_the_trunk, newest_version=NEWEST) is rollout
    assert (
        "11 tokens with its prompt"
        in vetted_alone(rollout, limits_with(reads_branches=False, max_positions=10), newest_version=NEWEST).failure
    )


def vars_of(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_it_is_cheap():
    rollout = sound()
    best_s = math.inf
    for _ in range(5):
        started_s = time.perf_counter()
        for _ in range(100):
            vetted_alone(rollout, LIMITS, newest_version=NEWEST)
        best_s = min(best_s, (time.perf_counter() - started_s) / 100)
    assert best_s < 1e-3  # 15 microseconds on one core of a server


def test_a_reference_that_is_only_scored_needs_no_sampled_token():
    reference = Completion(
        ordinal=0,
        sample=-1,
        prompt=Prompt(prompt_id="p", text="2+2", tokens=ints(1, 2), task="sums"),
        segments=(Segment(tokens=ints(4)),),
        text="4",
        finish_reason="stop",
    )
    assert completion_faults([reference], Limits())[0] is not None
    assert completion_faults([reference], Limits(may_be_given=True))[0] is None
    nothing = msgspec.structs.replace(reference, segments=())
    assert completion_faults([nothing], Limits(may_be_given=True))[0] is not None


def test_an_episode_that_failed_before_its_first_turn_says_why():
    """It has no token, like a poisoned completion, but is none."""
    why = "environment: ValueError: no such maze"
    nothing = (Segment(tokens=ints()),)
    empty = with_completion(sound(), segments=nothing, episode=EpisodeRecord(failure=why))
    assert completion_faults([empty.completion], LIMITS) == [None]
    failed = vetted_alone(msgspec.structs.replace(empty, failure=why), LIMITS)
    assert (failed.failure, failed.reward, failed.reward_parts) == (why, LIMITS.failure_reward, {})
    assert (failed.completion.num_tokens, len(failed.completion.prompt.tokens)) == (0, 1)
    assert vetted_alone(failed, LIMITS).failure == why
    for episode in (None, EpisodeRecord()):
        [fault] = completion_faults([with_completion(sound(), segments=nothing, episode=episode).completion], LIMITS)
        assert "no token was sampled" in fault


def routed(shape=(8, 4, 2), dtype=np.uint8, value=5):
    """One segment of six tokens behind a prompt of three, with the experts of the first eight."""
    [first, _, _] = sound().completion.segments
    segment = msgspec.structs.replace(
        first,
        tokens=ints(*range(6)),
        behaviour_logprobs=floats(*[-1.0] * 6),
        routes=np.full(shape, value, dtype=dtype),
    )
    return with_completion(sound(), segments=(segment,))


@pytest.mark.parametrize(
    ("rollout", "fault"),
    [
        (routed(), None),
        (routed(value=255), None),
        (routed(dtype=np.int16, value=np.iinfo(np.int16).max), None),
        (routed(value=6), "expert 6 of 6"),
        (routed(dtype=np.int16, value=-1), "expert -1 of 6"),
        (routed(shape=(9, 4, 2)), "experts of tokens of shape"),
        (routed(shape=(8, 4)), "experts of tokens of shape"),
        (routed(dtype=np.float32), "experts of tokens of shape"),
    ],
)
def test_recorded_experts(rollout, fault):
    limits = Limits(vocab_size=VOCAB, routed=(4, 2, 6))
    [found] = completion_faults([rollout.completion], limits)
    assert (found is None) if fault is None else found.startswith(fault)
    assert "nobody asked for" in completion_faults([rollout.completion], Limits(routed=(0, 0, 0)))[0]
    assert completion_faults([rollout.completion], Limits()) == [None]


def test_experts_that_are_missing():
    [segment] = routed().completion.segments
    bare = with_completion(sound(), segments=(msgspec.structs.replace(segment, routes=None),))
    assert "experts of tokens" in completion_faults([bare.completion], Limits(routed=(4, 2, 6)))[0]
