"""`tokens.jsonl`: what is in a line, that the file stays bounded, and that nothing of it can hurt a run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from synthetic_run import HOSTILE, make_group

from slipstream.core.types import Completion, EpisodeRecord, Prompt, Segment, VersionSpan
from slipstream.observe.tokens import MAX_TOKENS, TokenLine, TokenRecorder, read_tokens, token_line


def names(tokens: list[int]) -> list[str]:
    return [f"<{token}>" for token in tokens]


def lines_of(*ordinals: int, size: int = 2) -> list[TokenLine]:
    return [
        token_line(rollout.completion, None, step=ordinal, texts=names)
        for ordinal in ordinals
        for rollout in make_group(ordinal, size=size).rollouts
    ]


def test_a_line_has_an_entry_for_each_token_of_the_completion() -> None:
    """Three sampled tokens, two given ones, one sampled: by hand."""
    completion = make_group(7).rollouts[0].completion
    trained = np.array([-0.5, -1.25, -3.0, -9.0], dtype=np.float32), np.array([1.0, 1.0, 0.0, -2.0], dtype=np.float32)
    line = token_line(completion, trained, step=9, texts=names)
    assert (line.ordinal, line.sample, line.step, line.num_tokens) == (7, 0, 9, 6)
    assert line.tokens == [0, 1, 2, 0, 1, 0]
    assert line.texts == ["<0>", "<1>", "<2>", "<0>", "<1>", "<0>"]
    assert line.versions == [(0, 7), (2, 8), (3, -1), (5, 8)]
    assert line.behaviour_logprobs == [-1.0, -2.0, -3.0, None, None, -6.0]
    assert line.policy_logprobs == [-0.5, -1.25, -3.0, None, None, -9.0]
    assert line.advantages == [1.0, 1.0, 0.0, None, None, -2.0]


def test_turns_of_an_episode_begin_where_their_tokens_do() -> None:
    """Three tokens of the first turn, two given ones, the second turn; and a third, to which nothing was said."""
    completion = make_group(7).rollouts[0].completion
    assert token_line(completion, None, step=9, texts=names).turns == []
    segments = (*completion.segments, completion.segments[-1])
    episode = msgspec.structs.replace(completion, segments=segments, episode=EpisodeRecord())
    line = token_line(episode, None, step=9, texts=names)
    assert line.turns == [0, 5, 6]
    assert [line.versions[i] for i in (2, 3)] == [(3, -1), (5, 8)]


def test_branches_begin_where_their_contexts_do() -> None:
    """Six tokens of the trunk, two of another context, three of a turn behind it."""
    completion = make_group(7).rollouts[0].completion
    begun = Segment(tokens=np.array([4, 5], dtype=np.int32), begins=True)
    segments = (*completion.segments, begun, completion.segments[0])
    episode = msgspec.structs.replace(completion, segments=segments, episode=EpisodeRecord())
    line = token_line(episode, None, step=9, texts=names)
    assert (line.turns, line.branches) == ([0, 5, 8], [6])
    assert line.behaviour_logprobs[5:] == [-6.0, None, None, -1.0, -2.0, -3.0]


def test_what_was_not_trained_on_has_no_policy_logprob_and_no_advantage() -> None:
    line = token_line(make_group(7).rollouts[0].completion, None, step=9, texts=names)
    assert line.policy_logprobs == line.advantages == [None] * 6
    assert line.behaviour_logprobs == [-1.0, -2.0, -3.0, None, None, -6.0]


def test_numbers_that_json_cannot_say_are_null(tmp_path: Path) -> None:
    completion = make_group(0).rollouts[0].completion
    trained = np.array([np.nan, -np.inf, -3.0, -9.0], dtype=np.float32), np.full(4, np.inf, dtype=np.float32)
    recorder = TokenRecorder(tmp_path / "t", every=1, max_bytes=1000)
    recorder.record([token_line(completion, trained, step=0, texts=names)])
    recorder.close()
    [line] = read_tokens(tmp_path / "t")
    assert line.policy_logprobs == [None, None, -3.0, None, None, -9.0]
    assert line.advantages == [None] * 6


def test_a_long_completion_is_cut() -> None:
    count = MAX_TOKENS + 5
    segment = Segment(
        tokens=np.arange(count, dtype=np.int32),
        behaviour_logprobs=np.zeros(count, dtype=np.float32),
        version_spans=(VersionSpan(start=0, version=1), VersionSpan(start=MAX_TOKENS + 1, version=2)),
    )
    prompt = Prompt(prompt_id="p", text="", tokens=np.zeros(1, dtype=np.int32), task="t")
    completion = Completion(ordinal=0, sample=0, prompt=prompt, segments=(segment,), text="", finish_reason="length")
    trained = np.zeros(count, dtype=np.float32), np.ones(count, dtype=np.float32)
    line = token_line(completion, trained, step=1, texts=names)
    assert line.num_tokens == count
    lists = (line.tokens, line.texts, line.behaviour_logprobs, line.policy_logprobs, line.advantages)
    assert {len(one) for one in lists} == {MAX_TOKENS}
    assert line.versions == [(0, 1)]


def test_groups_are_sampled_by_ordinal_and_sorted(tmp_path: Path) -> None:
    recorder = TokenRecorder(tmp_path / "t", every=3, max_bytes=10**6)
    recorder.record(lines_of(6, 2, 3)[::-1])
    recorder.record(lines_of(4, 5))
    recorder.record(lines_of(9))
    recorder.close()
    found = [(line.ordinal, line.sample) for line in read_tokens(tmp_path / "t")]
    assert found == [(3, 0), (3, 1), (6, 0), (6, 1), (9, 0), (9, 1)]


@pytest.mark.parametrize("restarts", [False, True])
def test_the_file_stays_bounded_and_keeps_whole_groups_of_the_whole_run(tmp_path: Path, restarts: bool) -> None:
    path, max_bytes, num_groups = tmp_path / "t", 10_000, 750
    recorder = TokenRecorder(path, every=1, max_bytes=max_bytes)
    for ordinal in range(num_groups):
        if restarts and ordinal % 175 == 174:
            recorder.close()
            recorder = TokenRecorder(path, every=1, max_bytes=max_bytes)
        recorder.record(lines_of(ordinal))
        assert path.stat().st_size <= max_bytes
    recorder.close()
    kept = [line.ordinal for line in read_tokens(path)]
    assert kept[0::2] == kept[1::2], "both samples of each"
    groups = kept[0::2]
    assert len(groups) > max_bytes // (4 * path.stat().st_size // len(groups)), "no more is dropped than is needed"
    assert groups[0] == 0
    assert groups[-1] > num_groups * 0.9
    assert len({b - a for a, b in itertools.pairwise(groups)}) == 1, "evenly"


def test_after_a_resume_as_few_groups_are_written_as_before(tmp_path: Path) -> None:
    path, seen = tmp_path / "t", set()
    recorder = TokenRecorder(path, every=3, max_bytes=20_000)
    for ordinal in range(0, 1500, 3):
        recorder.record(lines_of(ordinal))
        if ordinal % 150 == 0:
            seen.add(before := recorder.every)
            recorder.close()
            recorder = TokenRecorder(path, every=3, max_bytes=20_000)
            assert recorder.every == before
    recorder.close()
    assert {3, 6, 12} <= seen


def test_a_group_that_is_larger_than_the_file_may_be_does_not_hang(tmp_path: Path) -> None:
    recorder = TokenRecorder(tmp_path / "t", every=1, max_bytes=10)
    recorder.record(lines_of(0))
    recorder.record(lines_of(1))
    recorder.close()
    assert {line.ordinal for line in read_tokens(tmp_path / "t")} == {0}


def test_a_disk_that_refuses_ends_the_file_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = TokenRecorder(Path("/dev/full"), every=1, max_bytes=10**6)
    recorder.record(lines_of(0))
    recorder.record(lines_of(1))
    recorder.close()
    assert len(caplog.records) == 1, "it is told once"
    assert "full is not written any more" in caplog.text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    recorder = TokenRecorder(tmp_path / "t", every=1, max_bytes=10**6)
    line = msgspec.structs.replace(lines_of(0)[0], texts=[HOSTILE, "\n", "\r\n", '"', "\\", "\x00"])
    recorder.record([line])
    recorder.close()
    [raw] = (tmp_path / "t").read_bytes().splitlines()
    assert json.loads(raw)["texts"] == line.texts
