"""Trackers: the pipes and processes with small fakes, then each real package, read back from what it wrote."""

import importlib.util
import io
import json
import os
import select
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import tracemalloc
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

import slipstream
from slipstream.core.errors import ConfigError
from slipstream.core.processes import open_pidfd
from slipstream.core.recipes import resolve
from slipstream.core.run_log import read_metrics
from slipstream.observe.health import Alarm
from slipstream.observe.metrics import MetricsWriter
from slipstream.observe.sinks import SINKS, AlarmLine, Begin, End, MetricsLine, serve
from slipstream.observe.trackers import MAX_BEHIND, Feed, Trackers, check_trackers, open_trackers, without_secrets

COPIES = "import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.read())"
COPIES_AND_TELLS = """
import sys
with open(sys.argv[1], "wb") as copy, open(sys.argv[1] + ".told", "wb", buffering=0) as told:
    for line in sys.stdin.buffer:
        told.write(b".")
        copy.write(line)
"""
READS_NOTHING = "import signal; signal.pause()"
CRASHES = "import sys; sys.stdin.readline(); sys.exit('ValueError: the server does not like you')"
FAILS_AT_THE_END = "import sys; sys.stdin.read(); print('not all was sent'); sys.exit(3)"
HAS_A_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
open(sys.argv[1], "w").write(str(child.pid))
sys.stdin.read()
child.wait()
"""


def a_line(step: int = 0, **values: float) -> dict[str, Any]:
    return {"step": step, "version": step + 1, "wall_s": 1.5, "loss": 0.25} | values


def an_alarm(event: str, step: int = 3) -> Alarm:
    return Alarm(step=step, name="ess_collapse", event=event, severity="warning", value=0.4, threshold=0.5, text="Few")


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, notes: list[str]) -> Iterator[Any]:
    """Trackers whose processes run these programs, each with a file of its own as its argument."""
    made: list[Trackers] = []

    def make(deadline_s: float = 30.0, **programs: str) -> Trackers:
        feeds = [
            Feed(name, [sys.executable, "-c", program, str(tmp_path / name)], tmp_path / "logs" / f"{name}.log")
            for name, program in programs.items()
        ]
        made.append(Trackers(feeds, note=notes.append, deadline_s=deadline_s))
        return made[-1]

    yield make
    for one in made:
        one.__exit__(None, None, None)


def read_lines(path: Path) -> list[Any]:
    return [
        msgspec.json.decode(line, type=Begin | MetricsLine | AlarmLine | End) for line in path.read_bytes().splitlines()
    ]


# Pipes and processes


def test_a_tracker_gets_every_line_every_alarm_and_the_summary_in_order(make, tmp_path, notes):
    told = make(copy=COPIES)
    told.metrics(a_line(0, none=None, word="text", whole=3))
    told.alarm(an_alarm("began"))
    told.metrics(a_line(1))
    told.end("done", {"steps": 2})
    first, alarm, second, end = read_lines(tmp_path / "copy")
    assert (first.step, first.values) == (0, {"version": 1.0, "wall_s": 1.5, "loss": 0.25, "whole": 3.0})
    assert abs(first.day_s - time.time()) < 60
    assert (alarm.name, alarm.has_begun, alarm.is_warning, alarm.step) == ("ess_collapse", True, True, 3)
    assert "Few" in alarm.text
    assert (second.step, end) == (1, End(status="done", summary={"steps": 2}))
    assert notes == []


def test_more_than_a_pipe_holds_arrives_whole_once_it_is_read(make, tmp_path, notes):
    """The reader begins only when it has been told to, after more was sent than any pipe takes."""
    go = tmp_path / "go"
    os.mkfifo(go)
    told = make(late=f"open({str(go)!r}).read(); {COPIES}")
    for step in range(MAX_BEHIND):
        told.metrics(a_line(step) | {f"metric_{i}": float(i) for i in range(50)})
    go.write_text("go")
    told.end("done", {})
    assert [line.step for line in read_lines(tmp_path / "late")[:-1]] == list(range(MAX_BEHIND))
    assert notes == []


def test_one_that_reads_nothing_never_blocks_is_dropped_once_and_takes_nothing_from_the_others(make, tmp_path, notes):
    os.mkfifo(tmp_path / "copy.told")
    told = make(hangs=READS_NOTHING, copy=COPIES_AND_TELLS)
    long = {f"metric_{i}": float(i) for i in range(100)}
    num_lines = MAX_BEHIND + 200  # a pipe takes 64 KiB at most, some 30 of them
    with (tmp_path / "copy.told").open("rb", buffering=0) as has_come:
        for step in range(num_lines):
            told.metrics(a_line(step, **long))
            assert has_come.read(1) == b".", "it ended"  # the pace of one that keeps up
        assert notes == [f"the tracker hangs is dropped, the run goes on without: it is {MAX_BEHIND} lines behind"]
        told.end("done", {})
    assert len(read_lines(tmp_path / "copy")) == num_lines + 1
    assert len(notes) == 1


def test_one_that_crashes_is_dropped_with_its_last_words(make, tmp_path, notes):
    told = make(crashes=CRASHES, copy=COPIES)
    told.metrics(a_line())
    told._feeds[0]._process.wait()
    told.metrics(a_line(1))
    told.metrics(a_line(2))
    assert notes == [
        "the tracker crashes is dropped, the run goes on without: it ended: ValueError: the server does not like you"
    ]
    told.end("done", {})
    assert len(read_lines(tmp_path / "copy")) == 4


def test_one_that_ends_without_a_word_is_not_told_with_those_of_an_earlier_attempt(make, tmp_path, notes):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "silent.log").write_text("an error of yesterday\n")
    told = make(silent="import os; os._exit(1)")
    told._feeds[0]._process.wait()
    told.metrics(a_line())
    assert notes == ["the tracker silent is dropped, the run goes on without: it ended: it said nothing"]


@pytest.mark.parametrize(
    ("program", "deadline_s", "said"),
    [
        (FAILS_AT_THE_END, 60.0, "it failed: not all was sent"),
        (READS_NOTHING, 0.2, "it did not come to an end in time"),
    ],
    ids=["fails", "hangs"],
)
def test_a_failure_at_the_end_and_an_end_that_does_not_come_are_told(make, notes, program, deadline_s, said):
    told = make(bad=program, deadline_s=deadline_s)
    told.metrics(a_line())
    told.end("done", {})
    assert notes == [f"the tracker bad is dropped, the run goes on without: {said}"]


def test_an_error_of_the_run_leaves_no_process_of_its_trackers(make, tmp_path):
    os.mkfifo(tmp_path / "parent")
    told = make(parent=HAS_A_CHILD)
    (feed,) = told._feeds
    child = open_pidfd(int((tmp_path / "parent").read_text()))
    with pytest.raises(KeyError), told:
        raise KeyError
    assert feed._process.returncode == -signal.SIGKILL
    assert select.select([child], [], [], 30.0)[0] == [child], "what it had started goes on"
    os.close(child)


def test_a_resume_holds_no_lines_but_those_that_it_sends(tmp_path, monkeypatch):
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in range(100):
        metrics.write(step=step, version=step, wall_s=0.0, metrics=dict.fromkeys(map(str, range(1000)), 0.5))
    metrics.close()
    begun: list[Begin] = []
    monkeypatch.setattr("slipstream.observe.trackers.Feed", lambda *_: types.SimpleNamespace(put=begun.append))
    monkeypatch.setattr("slipstream.observe.trackers._run_id", lambda _: "me")  # its file is read with room for more
    config = resolve("quickstart", {"trackers": {"names": ["tensorboard"]}})
    tracemalloc.start()
    open_trackers(config, tmp_path, first_step=99, note=print)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [line.step for line in begun[0].kept] == [99]
    assert most < 2_000_000, "bytes; the lines together are 6,000,000"


def test_metrics_go_to_the_sinks_as_they_are_in_the_file(tmp_path):
    got: list[dict] = []
    writer = MetricsWriter(tmp_path / "metrics.jsonl", sinks=[got.append])
    writer.write(step=0, version=1, wall_s=2.0, metrics={"a": {"b": 1.0}, "bad": float("nan")})
    writer.close()
    assert (
        got
        == read_metrics(tmp_path / "metrics.jsonl")
        == [{"step": 0, "version": 1, "wall_s": 2.0, "a/b": 1.0, "bad": None}]
    )


# What a tracker is told of the configuration


def test_secrets_are_not_told():
    shown = without_secrets(
        {
            "judge": {"base_url": "https://user:hunter2@example.org/v1", "api_key_env": "JUDGE_KEY"},
            "params": {"api_key": "hunter2", "hf_token": "hunter2", "nested": [{"PASSWORD": "hunter2"}]},
            "generator": {"max_new_tokens": 8, "stop": ["hunter"], "secret": ""},
        }
    )
    assert "hunter2" not in json.dumps(shown)
    assert shown["judge"] == {"base_url": "https://(not shown)@example.org/v1", "api_key_env": "JUDGE_KEY"}
    assert shown["generator"] == {"max_new_tokens": 8, "stop": ["hunter"], "secret": ""}


def test_a_missing_package_is_told_before_anything_starts(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    hidden = ("wandb", "trackio")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in hidden else found(name, *more))
    with pytest.raises(ConfigError, match=r"'trackio' needs the package 'trackio'") as error:
        check_trackers(resolve("quickstart", {"trackers": {"names": ["trackio"]}}).trackers)
    assert "slipstream-rl[trackers]" in str(error.value)
    with pytest.raises(ConfigError, match="not installed"):
        slipstream.run("quickstart", overrides={"trackers": {"names": ["wandb"]}}, out=tmp_path / "run", display=False)
    assert not (tmp_path / "run").exists()


def test_a_folder_of_a_trackers_files_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "trackio").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match="not installed"):
        check_trackers(resolve("quickstart", {"trackers": {"names": ["trackio"]}}).trackers)
    (tmp_path / "trackio" / "__init__.py").touch()
    importlib.invalidate_caches()
    check_trackers(resolve("quickstart", {"trackers": {"names": ["trackio"]}}).trackers)


def test_a_tracker_that_is_not_known_or_named_twice_is_refused():
    for names, match in ((["comet"], "comet"), (["wandb", "wandb"], "twice")):
        with pytest.raises(ConfigError, match=match):
            resolve("quickstart", {"trackers": {"names": names}})


# The far end


class Recorded:
    def __init__(self, begin: Begin) -> None:
        self.got: list[Any] = [begin]

    def metrics(self, line: MetricsLine) -> None:
        self.got.append(line)

    alarm = metrics

    def close(self, end: End | None) -> None:
        self.got.append(end)


def a_begin(**changes: Any) -> Begin:
    begin = Begin(
        run_id="abc", name="n", project="p", entity=None, group=None, tags=[], is_offline=True, folder="", config={},
        is_resumed=False, first_step=0, deadline_s=60.0,
    )  # fmt: skip
    return msgspec.structs.replace(begin, **changes)


@pytest.mark.parametrize(
    ("last", "end"), [(End(status="done", summary={}), End(status="done", summary={})), (None, None)]
)
def test_a_sink_is_closed_with_the_end_or_without_one_when_the_run_was_killed(last, end):
    line = MetricsLine(step=1, day_s=2.0, values={"loss": 0.5})
    lines = [a_begin(), line, *([last] if last else [])]
    raw = b"".join(msgspec.json.encode(one) + b"\n" for one in lines) + (b"" if last else b'{"type":"metr')
    sinks: list[Recorded] = []

    def made(begin: Begin) -> Recorded:
        sinks.append(Recorded(begin))
        return sinks[-1]

    try:
        serve(made, io.BytesIO(raw))
        assert 50 <= signal.alarm(0) <= 60, "whoever hangs now is ended by the system"
    finally:
        signal.alarm(0)
    assert sinks[0].got == [a_begin(), line, end]


# Each real package, over an interruption and a resume


def track(names: list[str], run_dir: Path) -> list[str]:
    """Two attempts of a run: steps 0 to 5 with an alarm, killed; then again from step 4 on, to the end."""
    notes: list[str] = []
    secrets = {"judge": {"base_url": "https://user:hunter2@example.org"}}
    options = {
        "names": names,
        "offline": True,
        "project": "of-tests",
        "tags": ["red"],
        "group": "both",
        "run_name": "me",
        "deadline_s": 200,  # a program beside takes its time from the tracker
    }
    config = resolve("quickstart", secrets | {"trackers": options})
    with open_trackers(config, run_dir, first_step=0, note=notes.append) as told:
        for step in range(6):
            told.metrics(a_line(step, reward=step / 10))
        told.alarm(an_alarm("began"))
        for feed in told._feeds:  # as the system does when the run is killed: no last word
            while feed._queue:
                feed._send()
            feed._pipe.close()
            assert feed._process.wait() == 0, (run_dir / "logs" / f"tracker-{feed.name}.log").read_text()
    with (run_dir / "metrics.jsonl").open("a") as file:  # what the resume has kept
        for line in (
            {"step": 3, "version": 4, "wall_s": 1.5},
            {"step": 4, "version": 4, "wall_s": 1.6, "eval_reward": 0.5},
        ):
            file.write(json.dumps(line) + "\n")
    with open_trackers(config, run_dir, first_step=4, note=notes.append) as told:
        for step in range(4, 8):
            told.metrics(a_line(step, reward=step / 100))
        told.alarm(an_alarm("ended", step=7))
        told.end("done", {"eval/after/accuracy": 0.75})
    return notes


def assert_nothing_is_secret(*folders: Path) -> None:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert track(["tensorboard"], tmp_path) == []
    found = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    rewards = [(event.step, round(event.value, 3)) for event in found.Scalars("run/reward")]
    assert rewards == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3), (4, 0.04), (5, 0.05), (6, 0.06), (7, 0.07)]
    assert [(event.step, event.value) for event in found.Scalars("run/eval_reward")] == [(4, 0.5)]
    assert [(event.step, event.value) for event in found.Scalars("alarm/ess_collapse")] == [(3, 1.0), (7, 0.0)]
    assert found.SummaryMetadata("run/reward").summary_description == (
        "mean reward of the completions of trained groups, before advantages; "
        "`scored_reward_mean` is of all completions"
    )
    assert b"Few" in found.Tensors("alarms/ess_collapse")[0].tensor_proto.string_val[0]
    config = found.Tensors("config")[-1].tensor_proto.string_val[0].decode()
    assert json.loads(config)["recipe"] == "quickstart"
    assert "0.75" in found.Tensors("summary")[0].tensor_proto.string_val[0].decode()
    assert_nothing_is_secret(tmp_path)


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a run's file: a LevelDB log (blocks of 32 KiB; checksum, length, kind) of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole = data[at + 7 : at + 7 + length] if kind in (1, 2) else whole + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            yield record


@pytest.mark.slow
def test_wandb_offline(tmp_path, monkeypatch):
    """No server and no key: what `wandb sync` would send lies in the run's folder, both attempts under one id."""
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert track(["wandb"], tmp_path) == []
    run_id = json.loads((tmp_path / "trackers.json").read_text())["run_id"]
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert [path.name for path in files] == [f"run-{run_id}.wandb"] * 2
    for path, steps, scale, exit_code in ((files[0], range(6), 10, 1), (files[1], range(4, 8), 100, 0)):
        records = list(wandb_records(path))
        (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        assert (run.run_id, run.display_name, run.project, run.run_group) == (run_id, "me", "of-tests", "both")
        assert list(run.tags) == ["red"]
        assert {item.key: item.value_json for item in run.config.update}["recipe"] == '"quickstart"'
        rows = [
            {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.WhichOneof("record_type") == "history"
        ]
        assert [(row["step"], row["reward"]) for row in rows if "reward" in row] == [(s, s / scale) for s in steps]
        assert [row["alarm/ess_collapse"] for row in rows if "alarm/ess_collapse" in row] == [float(exit_code)]
        metrics = [(r.metric.name or r.metric.glob_name, r.metric.step_metric) for r in records if r.HasField("metric")]
        assert ("*", "step") in metrics
        assert [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"] == [exit_code]
        assert [r.alert.title for r in records if r.WhichOneof("record_type") == "alert"] == [
            "ess_collapse"
        ] * exit_code
    summary = {
        u.key or u.nested_key[0]: u.value_json for r in records if r.HasField("summary") for u in r.summary.update
    }
    assert summary["eval/after/accuracy"] == "0.75"
    assert_nothing_is_secret(tmp_path)


def test_trackio(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/else")  # offline: nothing goes there
    assert track(["trackio"], tmp_path / "run") == []
    run_id = json.loads((tmp_path / "run" / "trackers.json").read_text())["run_id"]
    with sqlite3.connect(tmp_path / "trackio" / "of-tests.db") as database:
        columns = "run_id, run_name, step, CAST(metrics AS TEXT)"
        rows = database.execute(f"SELECT {columns} FROM metrics ORDER BY id").fetchall()
        alerts = database.execute("SELECT title, level FROM alerts ORDER BY id").fetchall()
        configs = database.execute("SELECT CAST(config AS TEXT) FROM configs").fetchall()
    assert len({row[0] for row in rows}) == 1
    assert {row[1] for row in rows} == {f"me-{run_id}"}
    rewards = [(row[2], json.loads(row[3])["reward"]) for row in rows if "reward" in row[3]]
    assert rewards == [*((step, step / 10) for step in range(6)), *((step, step / 100) for step in range(4, 8))]
    assert [title for title, _ in alerts] == ["ess_collapse", "run done"]
    assert json.loads(configs[0][0])["recipe"] == "quickstart"
    assert_nothing_is_secret(tmp_path)


def test_mlflow(tmp_path, monkeypatch):
    """Read from the files of its own store, not by its package."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # offline: nothing goes there
    assert track(["mlflow"], tmp_path) == []
    [meta] = [path for path in (tmp_path / "mlruns").glob("*/*/meta.yaml") if (path.parent / "metrics").is_dir()]
    run = meta.parent
    rows = [line.split() for line in (run / "metrics" / "reward").read_text().splitlines()]
    rewards = [(int(step), float(value)) for _, value, step in rows]
    assert rewards == [*((step, step / 10) for step in range(6)), *((step, step / 100) for step in range(4, 8))]
    alarms = (run / "metrics" / "alarm" / "ess_collapse").read_text().splitlines()
    assert [(float(line.split()[1]), int(line.split()[2])) for line in alarms] == [(1.0, 3), (0.0, 7)]
    assert "Few" in (run / "tags" / "alarm.ess_collapse").read_text()
    assert (run / "params" / "completions_per_group").read_text() == "8"
    assert (run / "tags" / "red").read_text() == "true"
    assert (run / "tags" / "group").read_text() == "both"
    assert yaml.safe_load(meta.read_text())["status"] == 3, "finished, by MLflow's numbers"
    [summary] = (tmp_path / "mlruns").rglob("summary.json")
    assert json.loads(summary.read_text()) == {"status": "done", "eval/after/accuracy": 0.75}
    assert_nothing_is_secret(tmp_path)


class MLflowCalls:
    """Stands for MLflow's client where the package is not installed, and records what it is asked."""

    def __init__(self, tracking_uri: str) -> None:
        self.calls: list[Any] = [tracking_uri]
        self.runs: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        answers = {
            "get_experiment_by_name": types.SimpleNamespace(experiment_id="7"),
            "search_runs": self.runs,
            "create_run": types.SimpleNamespace(info=types.SimpleNamespace(run_id="r")),
        }

        def call(*arguments: Any, **more: Any) -> Any:
            self.calls.append((name, *arguments, *more.values()))
            return answers.get(name)

        return call


@pytest.mark.parametrize(
    ("is_offline", "variable", "uri"),
    [(True, "http://x", "file:///run/mlruns"), (False, "http://x", "http://x"), (False, None, "file:///run/mlruns")],
)
def test_mlflow_is_called_as_its_package_asks(monkeypatch, is_offline, variable, uri):
    clients: list[MLflowCalls] = []
    runs: list[Any] = []

    def client(tracking_uri: str) -> MLflowCalls:
        clients.append(MLflowCalls(tracking_uri))
        clients[-1].runs = runs
        return clients[-1]

    for name, more in (
        ("mlflow", {}),
        ("mlflow.entities", {"Metric": lambda *point: point, "Param": lambda *leaf: leaf}),
        ("mlflow.tracking", {"MlflowClient": client}),
    ):
        fake = types.ModuleType(name)
        fake.__dict__.update(more)
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    if variable:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", variable)
    config = {"seed": 1, "loss": {"name": "grpo", "none": None}, "long": "x" * 7000}
    begin = a_begin(is_offline=is_offline, folder="/run", config=config, tags=["red"], group="both")
    sink = SINKS["mlflow"](begin)
    sink.metrics(
        MetricsLine(step=4, day_s=1.5, values={"loss": 0.5, "diff": 1.0, "diff/lag_0": 2.0, "logged/pass@1/": 3.0})
    )
    sink.alarm(AlarmLine(step=5, day_s=2.0, name="ess_collapse", has_begun=True, is_warning=True, text="Few"))
    sink.close(End(status="failed", summary={"steps": 3}))
    assert clients[0].calls == [
        uri,
        ("get_experiment_by_name", "p"),
        ("create_run", "7", "n", {"slipstream_run": "abc", "red": "true", "group": "both"}),
        ("log_batch", "r", [("seed", "1"), ("loss.name", "grpo"), ("long", "x" * 6000)]),
        ("log_dict", "r", config, "config.json"),
        (
            "log_batch",
            "r",
            [
                ("loss", 0.5, 1500, 4),
                ("diff", 1.0, 1500, 4),
                ("diff_lag_0", 2.0, 1500, 4),
                ("logged/pass_1", 3.0, 1500, 4),
            ],
        ),
        ("log_batch", "r", [("alarm/ess_collapse", 1.0, 2000, 5)]),
        ("set_tag", "r", "alarm.ess_collapse", "Few"),
        ("log_dict", "r", {"status": "failed", "steps": 3}, "summary.json"),
        ("set_terminated", "r", "FAILED"),
    ]
    runs.append(types.SimpleNamespace(info=types.SimpleNamespace(run_id="earlier")))
    resumed = SINKS["mlflow"](msgspec.structs.replace(begin, is_resumed=True))
    resumed.close(None)
    assert clients[1].calls[2:] == [
        ("search_runs", ["7"], "tags.slipstream_run = 'abc'"),
        ("update_run", "earlier", "RUNNING"),
        ("set_terminated", "earlier", "KILLED"),
    ]


@pytest.mark.parametrize(("is_offline", "mode"), [(True, "offline"), (False, None)])
def test_wandb_is_asked_to_go_on_and_for_no_mode_but_that_of_the_user(monkeypatch, is_offline, mode):
    asked: list[dict] = []

    class Run:
        def define_metric(self, name: str, step_metric: str | None = None) -> None: ...

    def init(**options: Any) -> Run:
        asked.append(options)
        return Run()

    fake = types.ModuleType("wandb")
    fake.__dict__.update(init=init, AlertLevel=None, Settings=lambda **settings: settings)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    SINKS["wandb"](a_begin(is_offline=is_offline, entity="team", folder="/run"))
    (options,) = asked
    assert (options["mode"], options["resume"], options["id"]) == (mode, "allow", "abc")
    assert (options["entity"], options["dir"], options["project"]) == ("team", "/run", "p")
    assert options["settings"] == {"console": "off", "disable_git": True, "save_code": False, "silent": True}


def test_trackio_is_called_as_its_package_asks(monkeypatch):
    """Where it is not installed: what the sink does to a make-believe one."""
    calls: list[Any] = []

    class Run:
        def log(self, metrics: dict, step: int | None = None) -> None:
            calls.append(("log", metrics, step))

        def alert(
            self, title: str, text: str | None = None, level: str = "warn", webhook_url: str | None = None
        ) -> None:
            calls.append(("alert", title, level))

        def finish(self) -> None:
            calls.append("finish")

    def init(project: str, name: str | None = None, *, group=None, config=None, resume="never", embed=True) -> Run:
        calls.append((project, name, group, config, resume, embed))
        return Run()

    fake = types.ModuleType("trackio")
    fake.__dict__.update(init=init, AlertLevel=types.SimpleNamespace(WARN="warn", INFO="info"))
    monkeypatch.setitem(sys.modules, "trackio", fake)
    sink = SINKS["trackio"](a_begin(is_resumed=True, config={"seed": 1}, tags=["red"], group="both"))
    sink.metrics(MetricsLine(step=4, day_s=0.0, values={"loss": 0.5}))
    alarm = AlarmLine(step=5, day_s=0.0, name="ess_collapse", has_begun=True, is_warning=False, text="Few")
    sink.alarm(alarm)
    sink.alarm(msgspec.structs.replace(alarm, has_begun=False, step=6))
    sink.close(None)
    assert calls == [
        ("p", "n-abc", "both", {"seed": 1, "tags": ["red"]}, "allow", False),
        ("log", {"loss": 0.5}, 4),
        ("log", {"alarm/ess_collapse": 1.0}, 5),
        ("alert", "ess_collapse", "info"),
        ("log", {"alarm/ess_collapse": 0.0}, 6),
        "finish",
    ]


def test_importing_the_near_end_imports_no_tracker_and_the_far_end_no_torch():
    heavy = ("wandb", "trackio", "mlflow", "tensorboard", "torch")
    code = "import sys, slipstream.observe.trackers, slipstream.observe.sinks; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert not set(heavy) & set(loaded)
