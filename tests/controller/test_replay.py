"""A recorded log through the schedule again: a real run's, logs that were changed, torn, cut, resumed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

import slipstream
from slipstream.cli import main
from slipstream.controller.policies import POLICIES, make_policy
from slipstream.core.clock import VirtualClock
from slipstream.core.errors import ConfigError
from slipstream.core.jsonl import cut_jsonl
from slipstream.core.run_log import ScheduleConfig
from slipstream.core.types import CompletionFinished, GroupScored, ReplicaLost, StartGroup, StepDone, Swapped, TrainStep
from slipstream.observe.recorder import EventRecorder

CONFIG = ScheduleConfig(
    groups_per_step=2,
    completions_per_group=2,
    max_staleness=2,
    reorder_window=2,
    steps=12,
    capacity=8,
    staleness_threshold=0.5,
    queue_groups=4,
)


class Writer:
    """Plays a run at random on two replicas, and writes its log; may be resumed from the last step's snapshot."""

    def __init__(self, path: Path, policy: str = "oldest_first", config: ScheduleConfig = CONFIG, seed: int = 0):
        self.path, self.policy, self.config = path, policy, config
        self.rng = random.Random(seed)
        self.snapshot, self.num_events = None, 0

    def play(self, until_step: int) -> None:
        schedule = make_policy(self.policy, self.config, self.snapshot)
        recorder = EventRecorder(self.path, VirtualClock(), num_events=self.num_events)
        recorder.record(schedule.began(), [])
        todo: list = []

        def tell(event) -> None:
            commands = schedule.apply(event)
            recorder.record(event, commands)
            if isinstance(event, StepDone):
                self.snapshot, self.num_events = schedule.snapshot(), recorder.num_events
            for command in commands:
                match command:
                    case StartGroup():
                        version = held[command.replica]
                        todo.extend([("finish", command, s) for s in range(2)] + [("score", command, version)])
                    case TrainStep():
                        todo.append(("train", command, None))

        held = {0: schedule.steps_done, 1: schedule.steps_done}
        for replica in held:
            tell(swapped(replica, schedule.steps_done))
        while schedule.steps_done < until_step:
            if self.rng.random() < 0.02:
                tell(ReplicaLost(replica=1))
                todo = [item for item in todo if item[0] == "train" or item[1].replica != 1]
                held[1] = schedule.steps_done
                tell(swapped(1, held[1]))
                continue
            kind, command, what = item = self.rng.choice(todo)
            todo.remove(item)
            match kind:
                case "finish":
                    tell(finished(command.ordinal, what, command.replica))
                case "score":
                    if any(other[0] == "finish" and other[1] is command for other in todo):
                        todo.append(item)
                        continue
                    tell(scored(command.ordinal, what, self.rng.random() > 0.2))
                case "train":
                    tell(StepDone(step=command.step, version=command.step + 1, metrics={"loss": float("nan")}))
                    for replica in held:
                        held[replica] = command.step + 1
                        tell(swapped(replica, command.step + 1))
        recorder.close()

    def cut(self) -> None:
        """What a resume does with the log."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        self.path.write_bytes(b"".join(lines[: self.num_events]))


def swapped(replica: int, version: int) -> Swapped:
    return Swapped(replica=replica, version=version, transfer_s=0.0, pause_s=0.0, probe_error=float("nan"))


def finished(ordinal: int, sample: int, replica: int) -> CompletionFinished:
    return CompletionFinished(
        ordinal=ordinal, sample=sample, replica=replica, num_tokens=1, min_version=0, max_version=0
    )


def scored(ordinal: int, version: int, has_signal: bool) -> GroupScored:
    return GroupScored(
        ordinal=ordinal,
        has_signal=has_signal,
        mean_reward=0.5,
        num_failed=0,
        min_version=version,
        max_version=version,
    )


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    Writer(path).play(12)
    return path


def test_the_command_says_whether_the_schedule_decides_as_it_did(log, capsys):
    lines = lines_of(log)
    started = {each["ordinal"] for line in lines for each in line["commands"] if each["type"] == "StartGroup"}
    assert slipstream.replay(log).num_admitted == len(started) > 24
    assert main(["replay", str(log)]) == 0
    assert "decides as it did" in capsys.readouterr().out
    starts = [i for i, line in enumerate(lines) if line["commands"] and line["commands"][-1]["type"] == "StartGroup"]
    lines[starts[-1]]["commands"].pop()
    assert main(["replay", str(write(log, lines))]) == 1
    assert f"line {starts[-1] + 1} differs" in capsys.readouterr().out


@pytest.mark.slow
def test_a_real_run_replays_without_divergence_from_its_folder(tmp_path, tiny_run, capsys):
    out = slipstream.run("quickstart", overrides=tiny_run, out=tmp_path / "run", display=False).out
    found = slipstream.replay(out)
    assert found.is_sound, (found.divergence, found.violations)
    prompts = json.loads((out / "summary.json").read_text())["prompts"]
    assert (found.num_steps, found.num_trained) == (4, prompts["trained"])
    assert found.num_admitted == prompts["admitted"]
    assert sum(found.num_dropped.values()) == prompts["skipped"] + prompts["failed"]
    assert main(["replay", str(out)]) == 0
    assert "decides as it did" in capsys.readouterr().out
    lines = lines_of(out / "events.jsonl")
    starts = [i for i, line in enumerate(lines) if line["commands"] and line["commands"][-1]["type"] == "StartGroup"]
    lines[starts[-1]]["commands"].pop()
    write(out / "events.jsonl", lines)
    assert slipstream.replay(out).divergence.line == starts[-1] + 1
    assert main(["replay", str(out / "events.jsonl")]) == 1
    assert f"line {starts[-1] + 1} differs" in capsys.readouterr().out


@pytest.fixture
def tiny_run() -> dict:
    return {
        "host": "inline",
        "steps": 4,
        "groups_per_step": 3,
        "completions_per_group": 4,
        "model": {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2},
        "prompts": {"num_train": 60, "num_eval": 4},
        "generator": {"num_slots": 16},
        "trainer": {"minibatches": 1},
        "warm_start": {"steps": 0},
        "loss": {"skip_no_signal": False},
        "eval": {"every": 0, "num_prompts": 4, "num_slots": 8},
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_the_log_of_every_policy_replays(tmp_path, policy):
    path = tmp_path / "events.jsonl"
    config = CONFIG if policy == "oldest_first" else replaced(reorder_window=1, max_staleness=1)
    Writer(path, policy, config, seed=3).play(12)
    found = slipstream.replay(path)
    assert found.is_sound, (found.divergence, found.violations)
    assert found.policies == [policy]
    assert found.num_decisions == len(lines_of(path)) - 1
    assert found.num_lost >= 1


def replaced(**changes) -> ScheduleConfig:
    return ScheduleConfig(**{**vars(CONFIG), **changes})


@pytest.mark.parametrize("seed", range(12))
def test_a_changed_command_is_found_at_its_line(log, seed):
    rng = random.Random(seed)
    lines = lines_of(log)
    index = rng.choice([i for i, line in enumerate(lines) if line["commands"]])
    command = rng.choice(lines[index]["commands"])
    match command["type"]:
        case "StartGroup":
            command["replica"] = 1 - command["replica"]
        case "TrainStep":
            command["ordinals"][0] += 1
        case "Skip":
            command["cause"] = "failed"
    found = slipstream.replay(write(log, lines))
    assert found.divergence is not None
    assert found.divergence.line == index + 1


def test_an_event_that_cannot_have_happened_is_told_in_words(log):
    lines = lines_of(log)
    index = next(i for i, line in enumerate(lines) if line["event"]["type"] == "StepDone")
    lines[index]["event"]["step"] = 7
    found = slipstream.replay(write(log, lines))
    assert found.divergence.line == index + 1
    assert found.divergence.event.startswith("StepDone(step=7")
    assert "not begun" in found.divergence.replayed
    assert any(f"line {index + 1}: step 7 was done" in violation for violation in found.violations)


def test_the_audit_finds_what_the_schedule_does_not_read(log):
    """Versions of tokens decide nothing here, and the bound is about them."""
    lines = lines_of(log)
    last_step = [i for i, line in enumerate(lines) if any(c["type"] == "TrainStep" for c in line["commands"])][-1]
    [command] = [c for c in lines[last_step]["commands"] if c["type"] == "TrainStep"]
    ordinal = command["ordinals"][0]
    for line in lines:
        if line["event"].get("ordinal") == ordinal and line["event"]["type"] == "GroupScored":
            line["event"]["min_version"] = 0
    found = slipstream.replay(write(log, lines))
    assert found.divergence is None
    assert found.violations == [
        f"line {last_step + 1}: group {ordinal}, trained in step 11, has tokens of version 0: bound 2"
    ]


def test_lost_and_repeated_lines_are_noticed(log):
    lines = lines_of(log)
    found = slipstream.replay(write(log, lines[:40] + lines[41:]))
    assert (
        found.violations[0]
        == f"line 41: has seq {lines[41]['seq']}, not {lines[40]['seq']}: lines are missing or repeated"
    )
    found = slipstream.replay(write(log, lines[:41] + lines[40:]))
    assert "line 42: has seq" in found.violations[0]


def test_a_torn_last_line_is_left_out(log):
    text = log.read_bytes()
    log.write_bytes(text[:-9])
    found = slipstream.replay(log)
    assert found.is_sound
    assert found.num_decisions == len(text.splitlines()) - 2


@pytest.mark.parametrize("seed", range(4))
def test_a_resumed_run_goes_on_in_the_replay(tmp_path, seed):
    path = tmp_path / "events.jsonl"
    writer = Writer(path, seed=seed)
    writer.play(5)
    writer.cut()
    writer.play(8)
    writer.cut()
    writer.play(12)
    found = slipstream.replay(tmp_path)
    assert found.is_sound, (found.divergence, found.violations)
    assert found.policies == ["oldest_first"] * 3
    assert (found.num_steps, found.num_trained) == (12, 24)


def cut(path: Path) -> None:
    """The first half of the lines, and a part of the next."""
    text = path.read_bytes()
    path.write_bytes(text[: len(text) // 2])


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("lose", [cut, zeroed, Path.unlink], ids=["cut", "zeroed", "deleted"])
def test_what_a_resume_found_missing_is_told_of(lose, tmp_path, capsys):
    """As a resume does: it keeps the whole lines up to the checkpoint, and counts on from there."""
    path = tmp_path / "events.jsonl"
    writer = Writer(path, seed=1)
    writer.play(5)
    writer.cut()
    lose(path)
    cut_jsonl(path, msgspec.Raw, lambda _: True)
    num_left = len(lines_of(path))
    writer.play(9)
    found = slipstream.replay(path)
    assert found.is_sound, (found.divergence, found.violations)
    assert not found.is_complete
    [missing] = found.missing
    before = f"the {writer_events(path)} events" if not num_left else "events"
    assert missing.startswith(f"line {num_left + 1}: {before} before it")
    assert main(["replay", str(path)]) == 1
    told = capsys.readouterr().out
    assert f"incomplete: line {num_left + 1}" in told
    assert "decides as it did" not in told
    assert f"nothing differs in the {found.num_decisions:,} decisions" in told


def writer_events(path: Path) -> int:
    return lines_of(path)[0]["seq"]


def test_nothing_is_said_of_what_follows_a_gap_until_the_next_resume(tmp_path):
    path = tmp_path / "events.jsonl"
    writer = Writer(path, seed=2)
    writer.play(5)
    writer.cut()
    writer.play(9)
    lines = lines_of(path)
    [_, resumed] = [i for i, line in enumerate(lines) if line["event"]["type"] == "ScheduleBegan"]
    found = slipstream.replay(write(path, lines[:20] + lines[30:]))
    assert found.divergence is None
    assert found.missing == ["line 21: lines before it are missing or repeated, so the state is unknown"]
    assert found.violations == ["line 21: has seq 30, not 20: lines are missing or repeated"]
    assert found.num_unchecked == resumed - 30
    assert found.num_decisions == 19 + len(lines) - resumed - 1


def test_a_log_that_ends_before_its_ledger_is_not_whole(tmp_path):
    path = tmp_path / "events.jsonl"
    Writer(path).play(6)
    ledger = [{"ordinal": n, "state": "trained", "step": n // 2} for n in range(12)]
    write(tmp_path / "ledger.jsonl", ledger)
    assert slipstream.replay(tmp_path).is_complete
    lines = lines_of(path)
    last = [i for i, line in enumerate(lines) if line["event"]["type"] == "StepDone"][3]
    found = slipstream.replay(write(path, lines[:last]).parent)
    assert found.is_sound
    assert found.missing == [f"line {last} is the last, 3 steps before the ledger's"]


def test_a_resume_from_another_state_is_a_divergence(tmp_path):
    path = tmp_path / "events.jsonl"
    writer = Writer(path)
    writer.play(5)
    writer.play(8)  # the tail behind the checkpoint was not cut off, and it has admitted more
    lines = lines_of(path)
    [_, resumed] = [i for i, line in enumerate(lines) if line["event"]["type"] == "ScheduleBegan"]
    lines[resumed]["event"]["snapshot"]["dropped_in_a_row"] += 1
    found = slipstream.replay(write(path, lines))
    assert found.divergence.line == resumed + 1
    assert "resumed" in found.divergence.event


def test_an_error_of_the_schedule_is_recorded_and_replayed(tmp_path):
    path = tmp_path / "events.jsonl"
    schedule = make_policy("oldest_first", replaced(max_dropped_in_a_row=0))
    recorder = EventRecorder(path, VirtualClock())
    recorder.record(schedule.began(), [])
    event = swapped(0, 0)
    recorder.record(event, schedule.apply(event))
    with pytest.raises(slipstream.core.errors.SlipstreamError) as raised:
        schedule.apply(scored(0, 0, has_signal=False))
    recorder.record(scored(0, 0, has_signal=False), [], error=raised.value.what)
    recorder.close()
    found = slipstream.replay(path)
    assert found.is_sound
    assert "no signal" in found.ended_with


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "empty"),
        ("nonsense\n", "line 1 is no event"),
        ('{"seq": 0, "time_s": 0.0, "event": {"type": "Stop"}, "commands": []}\n', "does not say what it began with"),
        ('{"seq": 0, "event": {"type": "Elephant"}, "commands": []}\n', "line 1 is no event"),
    ],
)
def test_what_is_no_log_is_refused_with_its_line(tmp_path, capsys, text, what):
    path = tmp_path / "events.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        slipstream.replay(path)
    assert main(["replay", str(path)]) == 2
    assert what in capsys.readouterr().err


def test_an_unknown_policy_and_a_missing_log_are_bad_input(log, tmp_path, capsys):
    lines = lines_of(log)
    lines[0]["event"]["policy"] = "clairvoyant"
    write(log, lines)
    assert main(["replay", str(log)]) == 2
    assert main(["replay", str(tmp_path / "nowhere")]) == 2
    assert "there are no events to replay" in capsys.readouterr().err
