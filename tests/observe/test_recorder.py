from pathlib import Path

import msgspec
import pytest
from synthetic_run import make_group

from slipstream.core.clock import VirtualClock
from slipstream.core.types import GroupScored, StepDone, Swapped, TrainStep
from slipstream.observe.recorder import EventRecorder, RolloutRecorder, read_events, read_rollouts

SWAPPED = Swapped(replica=1, version=3, transfer_s=0.1, pause_s=0.0, probe_error=1e-6)
DONE = StepDone(step=0, version=1, metrics={"loss": 0.5})


def test_events_come_back_as_the_messages_they_were(tmp_path: Path):
    clock, path = VirtualClock(2.0), tmp_path / "events.jsonl"
    recorder = EventRecorder(path, clock)
    assert recorder.record(SWAPPED, [TrainStep(step=0, ordinals=(0, 1))]) == 0
    clock.advance(1.0)
    assert recorder.record(DONE, []) == 1
    assert recorder.record(SWAPPED, [], error="no signal") == 2
    recorder.sync()
    recorder.close()
    lines = list(read_events(path))
    assert [(line.seq, line.time_s) for line in lines] == [(0, 2.0), (1, 3.0), (2, 3.0)]
    assert [line.error for line in lines] == [None, None, "no signal"]
    event = Swapped | StepDone | GroupScored
    assert [msgspec.convert(line.event, event) for line in lines] == [SWAPPED, DONE, SWAPPED]
    assert msgspec.convert(lines[0].commands[0], TrainStep) == TrainStep(step=0, ordinals=(0, 1))


def test_numbering_goes_on_after_a_crash_in_the_middle_of_a_line(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    first = EventRecorder(path, VirtualClock())
    first.record(SWAPPED, [])
    first.close()
    with path.open("ab") as file:
        file.write(b'{"seq": 1, "time_s"')
    second = EventRecorder(path, VirtualClock())
    assert second.record(DONE, []) == 1
    second.close()
    assert [line.seq for line in read_events(path)] == [0, 1]


def test_a_rollout_line_says_who_sampled_what_and_when_it_was_trained(tmp_path: Path):
    recorder = RolloutRecorder(tmp_path / "rollouts.jsonl")
    recorder.record_group(make_group(5), step=4)
    recorder.record_group(make_group(6), step=None)
    recorder.record_group(make_group(7, failure="timeout"), step=None)
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


def test_every_keeps_whole_groups(tmp_path: Path):
    recorder = RolloutRecorder(tmp_path / "rollouts.jsonl", every=3)
    for ordinal in range(7):
        recorder.record_group(make_group(ordinal), step=0)
    recorder.close()
    assert [x.ordinal for x in read_rollouts(tmp_path / "rollouts.jsonl")] == [0, 0, 3, 3, 6, 6]
