"""The ids of an episode: none is lost, moved or changed, and a completion made of them crosses a channel."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core import wire
from slipstream.core.errors import ShapeError
from slipstream.core.types import Completion, Prompt, Segment, VersionSpan
from slipstream.core.vetting import Limits, completion_faults
from slipstream.environments.transcript import Transcript, cut_observation

IDS = st.lists(st.integers(0, 150_000), max_size=6)
LIMITS = Limits(vocab_size=150_001, max_new_tokens=10_000, max_positions=100_000, keeps_sets=None)


def row(ids: list[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)


def turn(ids: list[int], *versions: int, keeps: bool = False) -> Segment:
    """Return a sampled segment, whose tokens from index i on are of `versions[i]`."""
    return Segment(
        tokens=row(ids),
        behaviour_logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) / 7,
        version_spans=tuple(VersionSpan(start=i, version=v) for i, v in enumerate(versions or (0,))),
        kept_tokens=row(ids) if keeps else None,
        kept_counts=np.ones(len(ids), dtype=np.int32) if keeps else None,
    )


@st.composite
def episodes(draw: st.DrawFn) -> tuple[list[int], list[tuple[str, Any]]]:
    """Return a prompt, and what is added to it: given ids, and turns whose versions never fall."""
    version, keeps, added = 0, draw(st.booleans()), []
    for kind in draw(st.lists(st.sampled_from(["sampled", "given"]), max_size=8)):
        if kind == "given":
            added.append((kind, draw(IDS)))
            continue
        ids = draw(IDS.filter(bool))
        steps = draw(st.lists(st.integers(1, 3), max_size=len(ids) - 1))
        version += draw(st.integers(0, 2))
        versions = [version := version + step for step in (0, *steps)]
        added.append((kind, turn(ids, *versions, keeps=keeps)))
    return draw(IDS.filter(bool)), added


def filled(prompt: list[int], added: list[tuple[str, Any]]) -> Transcript:
    transcript = Transcript(row(prompt))
    for kind, what in added:
        if kind == "given":
            transcript.add_given(row(what))
        else:
            transcript.add_sampled(what, "stop")
    return transcript


@given(episodes())
@settings(max_examples=200)
def test_all_ids_in_order(episode: tuple[list[int], list[tuple[str, Any]]]) -> None:
    prompt, added = episode
    transcript = filled(prompt, added)
    turns = [what for kind, what in added if kind == "sampled"]
    behind = [token for kind, what in added for token in (what if kind == "given" else what.tokens.tolist())]
    assert transcript.context.tolist() == prompt + behind
    assert transcript.context.dtype == np.int32
    assert transcript.num_before == len(behind)
    assert transcript.num_turns == len(turns)
    assert transcript.num_sampled == sum(len(one.tokens) for one in turns)
    kinds = [segment.is_sampled for segment in transcript.segments]
    assert all(a != b for a, b in itertools.pairwise(kinds)), "in turn"
    sampled = [segment for segment in transcript.segments if segment.is_sampled]
    for field in ("tokens", "behaviour_logprobs", "kept_tokens", "kept_counts"):
        arrays = [getattr(one, field) for one in turns]
        found = [getattr(one, field) for one in sampled]
        if turns and arrays[0] is not None:
            assert np.concatenate(found).tobytes() == np.concatenate(arrays).tobytes()
        else:
            assert all(one is None for one in found)
    assert [v for one in sampled for v in token_versions(one)] == [v for one in turns for v in token_versions(one)]
    versions = [span.version for one in turns for span in one.version_spans]
    assert transcript.min_version == min(versions, default=-1)
    assert transcript.max_version == max(versions, default=-1)


def token_versions(segment: Segment) -> list[int]:
    """Return the version of each token."""
    starts = {span.start: span.version for span in segment.version_spans}
    versions: list[int] = []
    for index in range(len(segment.tokens)):
        versions.append(starts.get(index, versions[-1] if versions else -1))
    return versions


@given(episodes())
@settings(max_examples=200)
def test_a_completion_crosses_a_channel_and_is_possible(episode: tuple[list[int], list[tuple[str, Any]]]) -> None:
    prompt_ids, added = episode
    transcript = filled(prompt_ids, added)
    prompt = Prompt(prompt_id="p", text="q", tokens=row(prompt_ids), task="t")
    if not transcript.num_turns:
        with pytest.raises(ShapeError, match="without a turn"):
            transcript.as_completion(prompt, ordinal=1, sample=2, text="")
        return
    completion = transcript.as_completion(prompt, ordinal=1, sample=2, text="x", replica=3, finished_s=2.5)
    decoded = wire.decode(wire.encode(completion))
    assert isinstance(decoded, Completion)
    assert wire.encode(decoded) == wire.encode(completion)
    assert (decoded.ordinal, decoded.sample, decoded.replica, decoded.finish_reason) == (1, 2, 3, "stop")
    context = [*decoded.prompt.tokens, *decoded.tokens]
    assert context == transcript.context.tolist()[: len(context)]
    assert decoded.segments[-1].is_sampled, "nothing is trained behind the last turn"
    assert sum(len(one.tokens) for one in decoded.segments if one.is_sampled) == transcript.num_sampled
    assert (decoded.min_version, decoded.max_version) == (transcript.min_version, transcript.max_version)
    assert completion_faults([decoded], LIMITS) == [None]


def test_the_end_of_an_episode_is_that_of_its_last_turn() -> None:
    transcript = Transcript(row([1]))
    assert transcript.finish_reason is None
    transcript.add_sampled(turn([2]), "stop")
    transcript.add_given(row([3]))
    transcript.add_sampled(turn([4]), "length")
    assert transcript.finish_reason == "length"
    prompt = Prompt(prompt_id="p", text="q", tokens=row([1]), task="t")
    assert transcript.as_completion(prompt, ordinal=0, sample=0, text="").finish_reason == "length"
    late = transcript.as_completion(prompt, ordinal=0, sample=0, text="", finish_reason="deadline")
    assert late.finish_reason == "deadline"
    other = Prompt(prompt_id="other", text="q", tokens=row([1, 1]), task="t")
    with pytest.raises(ShapeError, match="not the one of this transcript"):
        transcript.as_completion(other, ordinal=0, sample=0, text="")


def test_what_is_added_later_does_not_change_what_was_read() -> None:
    given_ids = row([7, 8])
    transcript = Transcript(row([1]))
    transcript.add_given(given_ids)
    context, segments = transcript.context, transcript.segments
    given_ids[:] = 0
    transcript.add_given(row([9]))
    assert context.tolist() == [1, 7, 8]
    assert [segment.tokens.tolist() for segment in segments] == [[7, 8]]
    assert transcript.context.tolist() == [1, 7, 8, 9]


def test_room() -> None:
    transcript = Transcript(row([1, 2, 3]))
    limits = {"max_turns": 2, "max_episode_tokens": 10, "max_len": 12}
    assert transcript.room(**limits) == 9, "the model reads 12 with the prompt"
    assert transcript.room(**limits | {"max_len": 100}) == 10
    transcript.add_sampled(turn([4, 5]), "stop")
    transcript.add_given(row([6, 7, 8]))
    assert transcript.room(**limits) == 4
    assert transcript.room(**limits | {"max_len": 100}) == 5
    assert transcript.room(**limits | {"max_episode_tokens": 3}) == 0, "never negative"
    assert transcript.room(**limits | {"max_turns": 1}) == 0
    transcript.add_sampled(turn([9]), "stop")
    assert transcript.room(**limits | {"max_len": 100}) == 0, "both turns are taken"


@pytest.mark.parametrize(("length", "room", "is_kept"), [(0, 1, True), (3, 4, True), (4, 4, False), (9, 4, False)])
def test_an_observation_leaves_room_for_a_turn(length: int, room: int, is_kept: bool) -> None:
    tokens = row(list(range(length)))
    kept = cut_observation(tokens, room)
    assert (kept is tokens) if is_kept else (kept is None)


@pytest.mark.parametrize(
    ("segment", "told"),
    [
        (Segment(tokens=row([1])), "one behaviour logprob for each"),
        (turn([]), "one behaviour logprob for each"),
        (Segment(tokens=row([1]), behaviour_logprobs=np.zeros(2, np.float32)), "one behaviour logprob for each"),
        (Segment(tokens=row([1]), behaviour_logprobs=np.zeros(1, np.float32)), "begin with its first token"),
        (turn([1, 2], 5, 4), "never fall"),
        (turn([1, 2], 1), "never fall"),  # below the turn before
        (turn([1], 5, 6), "begin with its first token"),
        (turn([1], 5, keeps=True), "kept sets in one"),
        (Segment(tokens=np.zeros(1, np.float32), behaviour_logprobs=np.zeros(1, np.float32)), "row of integers"),
    ],
)
def test_turns_that_cannot_be(segment: Segment, told: str) -> None:
    transcript = Transcript(row([1]))
    transcript.add_sampled(turn([2], 3), "stop")
    with pytest.raises(ShapeError, match=told):
        transcript.add_sampled(segment, "stop")
    assert transcript.context.tolist() == [1, 2], "nothing is added, and nothing is gone"
    assert transcript.num_turns == 1
