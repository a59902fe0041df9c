import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from synthetic_run import make_group, record_group

from slipstream.core.clock import VirtualClock
from slipstream.core.run_log import Decision, RolloutLine, RolloutTimes, num_missing, read_decisions, read_rollouts
from slipstream.core.types import EpisodeRecord, Rollout, Segment, StepDone, Swapped, TrainStep
from slipstream.observe.recorder import EventRecorder, RolloutRecorder

SWAPPED = Swapped(replica=1, version=3, transfer_s=0.1, pause_s=0.0, probe_error=1e-6)
DONE = StepDone(step=0, version=1, metrics={"loss": 0.5})


def test_events_come_back_as_the_messages_they_were(tmp_path: Path):
    clock, path = VirtualClock(2.0), tmp_path / "events.jsonl"
    recorder = EventRecorder(path, clock)
    recorded = [recorder.record(SWAPPED, [TrainStep(step=0, ordinals=(0, 1))])]
    clock.advance(1.0)
    recorded.append(recorder.record(DONE, []))
    recorded.append(recorder.record(SWAPPED, [], error="no signal"))
    recorder.sync()
    recorder.close()
    assert recorded == [
        Decision(0, 2.0, SWAPPED, [TrainStep(step=0, ordinals=(0, 1))]),
        Decision(1, 3.0, DONE, []),
        Decision(2, 3.0, SWAPPED, [], "no signal"),
    ]
    assert list(read_decisions(path)) == recorded


def test_the_bytes_of_a_decision_are_those_of_older_runs(tmp_path: Path):
    """By hand, from a file of the version before there was a schema."""
    path = tmp_path / "events.jsonl"
    recorder = EventRecorder(path, VirtualClock(2.0))
    recorder.record(DONE, [TrainStep(step=1, ordinals=(2, 3))])
    recorder.record(StepDone(step=1, version=2, metrics={}), [], error="no signal")
    recorder.close()
    assert path.read_bytes().splitlines() == [
        b'{"seq":0,"time_s":2.0,"event":{"type":"StepDone","step":0,"version":1,"metrics":{"loss":0.5}},'
        b'"commands":[{"type":"TrainStep","step":1,"ordinals":[2,3],"heads":[]}]}',
        b'{"seq":1,"time_s":2.0,"event":{"type":"StepDone","step":1,"version":2,"metrics":{}},"commands":[],'
        b'"error":"no signal"}',
    ]


def test_what_json_cannot_say_comes_back_as_nan(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    recorder = EventRecorder(path, VirtualClock())
    recorder.record(msgspec.structs.replace(SWAPPED, probe_error=math.nan), [])
    recorder.record(StepDone(step=0, version=1, metrics={"loss": math.nan, "reward": 0.5}), [])
    recorder.close()
    swapped, done = [line.event for line in read_decisions(path)]
    assert isinstance(swapped, Swapped)
    assert isinstance(done, StepDone)
    assert math.isnan(swapped.probe_error)
    assert math.isnan(done.metrics["loss"])
    assert (swapped.transfer_s, done.metrics["reward"]) == (0.1, 0.5)


def test_numbers_that_are_left_out_are_counted_as_missing(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    for num_events in (0, 5):
        recorder = EventRecorder(path, VirtualClock(), num_events=num_events)
        recorder.record(DONE, [])
        recorder.close()
    assert [line.seq for line in read_decisions(path)] == [0, 5]
    assert num_missing(path) == 4


def test_the_parts_of_a_rollout_line_have_its_fields():
    whole = {field.name: field.type for field in msgspec.structs.fields(RolloutLine)}
    assert {field.name: field.type for field in msgspec.structs.fields(RolloutTimes)}.items() <= whole.items()


def test_numbering_goes_on_after_a_crash_in_the_middle_of_a_line(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    first = EventRecorder(path, VirtualClock())
    first.record(SWAPPED, [])
    first.close()
    with path.open("ab") as file:
        file.write(b'{"seq": 1, "time_s"')
    second = EventRecorder(path, VirtualClock())
    assert second.record(DONE, []).seq == 1
    second.close()
    assert [line.seq for line in read_decisions(path)] == [0, 1]


def test_a_rollout_line_says_who_sampled_what_and_when_it_was_trained(tmp_path: Path):
    recorder = RolloutRecorder(tmp_path / "rollouts.jsonl")
    record_group(recorder, make_group(5), step=4)
    record_group(recorder, make_group(6), step=None)
    record_group(recorder, make_group(7, failure="timeout"), step=None)
    recorder.close()
    lines = list(read_rollouts(tmp_path / "rollouts.jsonl"))
    assert [(x.ordinal, x.sample, x.step, x.outcome) for x in lines[::2]] == [
        (5, 0, 4, "trained"),
        (6, 0, None, "skipped"),
        (7, 0, None, "failed"),
    ]
    line = lines[1]
    assert line.versions == [(0, 5), (2, 6), (3, -1), (5, 6)]  # by hand: 2 + 1 sampled, 2 given, 1 sampled
    assert line.mean_behaviour_logprob == pytest.approx((-1 - 2 - 3 - 6) / 4)
    assert (line.prompt, line.completion, line.answer, line.num_tokens, line.reward) == ("abc>", "cba", "cba", 6, 1.0)
    assert lines[4].failure == "timeout"


def test_the_line_of_an_episode_has_the_chats_of_its_branches(tmp_path: Path):
    group = make_group(5)
    begun = Segment(tokens=np.array([4, 5], dtype=np.int32), begins=True)
    chat = [{"role": "user", "content": "in short: <7>"}, {"role": "assistant", "content": "8"}]
    record = EpisodeRecord(messages=[chat[1]], branches=[chat], contexts=[1])
    told = [
        msgspec.structs.replace(one.completion, segments=(*one.completion.segments, begun), episode=record)
        for one in group.rollouts
    ]
    rollouts = tuple(Rollout(completion=one, reward=0.0) for one in told)
    recorder = RolloutRecorder(tmp_path / "rollouts.jsonl")
    record_group(recorder, msgspec.structs.replace(group, rollouts=rollouts), step=4)
    recorder.close()
    line = next(iter(read_rollouts(tmp_path / "rollouts.jsonl")))
    assert line.episode is not None
    assert (line.episode.branches, line.episode.contexts) == ([chat], [1])
    assert (line.episode.turns, line.num_tokens) == (2, 8)
    assert line.versions == [(0, 5), (2, 6), (3, -1), (5, 6), (6, -1)]


def test_every_keeps_whole_groups(tmp_path: Path):
    recorder = RolloutRecorder(tmp_path / "rollouts.jsonl", every=3)
    for ordinal in range(7):
        record_group(recorder, make_group(ordinal), step=0)
    recorder.close()
    assert [x.ordinal for x in read_rollouts(tmp_path / "rollouts.jsonl")] == [0, 0, 3, 3, 6, 6]
