"""The far end of `observe/trackers.py`: `python -m slipstream.observe.sinks NAME` writes what it reads to one tracker.

consumes    lines on its standard input: `Begin`, then metrics and alarms, then `End`
waits for   lines; whatever the tracker's own package waits for
ends when   its input does: without `End`, the run was killed
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from slipstream.core.interrupts import leave_to_the_run
from slipstream.core.plain import flat
from slipstream.observe.catalogue import described

NICENESS = 10
"""Less than what decodes and trains: a tracker may be late."""
MAX_PARAMS, MAX_PARAM_CHARS = 100, 6000
"""Of one request to MLflow, and of one value."""


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """The first line for a tracker, about the run. `run_id` stays the same over resumes; `config` holds no secrets.

    `kept` are lines at `first_step` that a resume does not take back: evaluations of the policy that it goes on with.
    """

    run_id: str
    name: str
    project: str
    entity: str | None
    group: str | None
    tags: list[str]
    is_offline: bool
    folder: str
    config: dict[str, Any]
    is_resumed: bool
    first_step: int
    deadline_s: float
    kept: list[MetricsLine] = []


class MetricsLine(msgspec.Struct, frozen=True, kw_only=True, tag="metrics"):
    """Finite numbers of one line of metrics.jsonl, written at `day_s` (since 1970)."""

    step: int
    day_s: float
    values: dict[str, float]


class AlarmLine(msgspec.Struct, frozen=True, kw_only=True, tag="alarm"):
    """An alarm began, or ended."""

    step: int
    day_s: float
    name: str
    has_begun: bool
    is_warning: bool
    text: str

    @property
    def as_metrics(self) -> MetricsLine:
        values = {f"alarm/{self.name}": float(self.has_begun)}
        return MetricsLine(step=self.step, day_s=self.day_s, values=values)


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """The last line: the run's status and its summary, flat."""

    status: str
    summary: dict[str, Any]


TrackerLine = Begin | MetricsLine | AlarmLine | End


class Sink(Protocol):
    """One tracker, made from a `Begin`. After a resume it goes on in the run that it began."""

    def metrics(self, line: MetricsLine) -> None: ...

    def alarm(self, line: AlarmLine) -> None: ...

    def close(self, end: End | None) -> None:
        """Finish; return when everything is written or sent. `end` is None where the run was killed."""
        ...


class TensorBoard:
    """Event files in `RUN/tensorboard`. A resume hides the points from its first step on, and writes `kept` again."""

    def __init__(self, begin: Begin) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        def text_value(tag: str, text: str) -> Any:
            plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
            tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
            return Summary.Value(tag=tag, metadata=plugin, tensor=tensor)

        def scalar_value(name: str, value: float) -> Any:
            found = described(name)
            plugin = SummaryMetadata(summary_description="" if found is None else found[1].in_words)
            tag = name if "/" in name else f"run/{name}"
            return Summary.Value(tag=tag, simple_value=value, metadata=plugin)

        self._event, self._summary = Event, Summary
        self._text_value, self._scalar_value = text_value, scalar_value
        self._writer = EventFileWriter(str(Path(begin.folder) / "tensorboard"))
        if begin.is_resumed:
            self._writer.add_event(Event(step=begin.first_step, session_log=SessionLog(status=SessionLog.START)))
            for line in begin.kept:
                self.metrics(line)
        self._add_text("config", _as_code(begin.config), begin.first_step, None)

    def metrics(self, line: MetricsLine) -> None:
        """TensorBoard shows a name without a group by itself, so that gets one: `run/loss`."""
        self._add([self._scalar_value(name, value) for name, value in line.values.items()], line.step, line.day_s)

    def alarm(self, line: AlarmLine) -> None:
        self._add_text(f"alarms/{line.name}", line.text, line.step, line.day_s)
        self.metrics(line.as_metrics)

    def close(self, end: End | None) -> None:
        if end is not None:
            self._add_text("summary", _as_code({"status": end.status} | end.summary), 0, None)
        self._writer.close()

    def _add_text(self, tag: str, text: str, step: int, day_s: float | None) -> None:
        self._add([self._text_value(tag, text)], step, day_s)

    def _add(self, values: list[Any], step: int, day_s: float | None) -> None:
        wall_time = time.time() if day_s is None else day_s
        self._writer.add_event(self._event(wall_time=wall_time, step=step, summary=self._summary(value=values)))
        self._writer.flush()


def _as_code(value: Mapping[str, Any]) -> str:
    """Markdown that shows JSON as it is."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    return "\n".join(f"    {line}" for line in text.splitlines())


class WeightsAndBiases:
    """A run of wandb, its files in `RUN/wandb`. Of the machine it tells what wandb tells, but for git and the terminal.

    Points are drawn against our steps: wandb's own count only grows, and a resume may go back.
    """

    def __init__(self, begin: Begin) -> None:
        import wandb

        self._levels: Any = wandb.AlertLevel  # type: ignore[attr-defined]  # its stub leaves it out
        self._run = wandb.init(
            project=begin.project,
            entity=begin.entity,
            name=begin.name,
            id=begin.run_id,
            group=begin.group,
            tags=begin.tags,
            config=begin.config,
            dir=begin.folder,
            mode="offline" if begin.is_offline else None,  # else what WANDB_MODE says
            resume="allow",
            settings=wandb.Settings(console="off", disable_git=True, save_code=False, silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def metrics(self, line: MetricsLine) -> None:
        self._run.log({"step": line.step} | line.values)

    def alarm(self, line: AlarmLine) -> None:
        self.metrics(line.as_metrics)
        _alert(self._run, self._levels, line)

    def close(self, end: End | None) -> None:
        if end is not None:
            self._run.summary.update({"status": end.status} | end.summary)
        self._run.finish(exit_code=0 if end is not None and end.status != "failed" else 1)


class Trackio:
    """A run of trackio, in its database of this machine or wherever its own variables (TRACKIO_SPACE_ID ...) lead."""

    def __init__(self, begin: Begin) -> None:
        if begin.is_offline:
            for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(variable, None)
        import trackio

        self._levels = trackio.AlertLevel
        self._run = trackio.init(
            project=begin.project,
            name=f"{begin.name}-{begin.run_id}",  # it finds runs by their names
            group=begin.group,
            config=begin.config | {"tags": begin.tags},
            resume="allow" if begin.is_resumed else "never",
            embed=False,
        )

    def metrics(self, line: MetricsLine) -> None:
        self._run.log(line.values, step=line.step)

    def alarm(self, line: AlarmLine) -> None:
        self.metrics(line.as_metrics)
        _alert(self._run, self._levels, line)

    def close(self, end: End | None) -> None:
        if end is not None:  # it has no summaries
            self._run.alert(title=f"run {end.status}", level=self._levels.INFO)
        self._run.finish()


class MLflow:
    """A run of MLflow, in the experiment of the project's name: at MLFLOW_TRACKING_URI, or in files in `RUN/mlruns`.

    MLflow names runs itself: a tag has our id, by which a resume finds its run. Points are kept with our steps, those
    of steps that a resume takes back beside the new ones.
    """

    def __init__(self, begin: Begin) -> None:
        here = (Path(begin.folder) / "mlruns").as_uri()
        uri = here if begin.is_offline else os.environ.get("MLFLOW_TRACKING_URI") or here
        if uri == here:  # MLflow 3 writes to folders only where this is set
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._client, self._metric = MlflowClient(tracking_uri=uri), Metric
        experiment = self._client.get_experiment_by_name(begin.project)
        at = self._client.create_experiment(begin.project) if experiment is None else experiment.experiment_id
        found = self._client.search_runs([at], f"tags.slipstream_run = '{begin.run_id}'") if begin.is_resumed else []
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        tags = {"slipstream_run": begin.run_id, **dict.fromkeys(begin.tags, "true")}
        tags |= {} if begin.group is None else {"group": begin.group}
        self._run = self._client.create_run(at, run_name=begin.name, tags=tags).info.run_id
        given = {name: value for name, value in flat(begin.config).items() if value is not None}
        leaves = [Param(name, str(value)[:MAX_PARAM_CHARS]) for name, value in given.items()]
        for start in range(0, len(leaves), MAX_PARAMS):
            self._client.log_batch(self._run, params=leaves[start : start + MAX_PARAMS])
        self._client.log_dict(self._run, begin.config, "config.json")

    def metrics(self, line: MetricsLine) -> None:
        at_ms = int(1000 * line.day_s)
        points = [self._metric(_for_mlflow(name), value, at_ms, line.step) for name, value in line.values.items()]
        self._client.log_batch(self._run, metrics=points)

    def alarm(self, line: AlarmLine) -> None:
        self.metrics(line.as_metrics)
        if line.has_begun:
            self._client.set_tag(self._run, f"alarm.{line.name}", line.text)

    def close(self, end: End | None) -> None:
        if end is not None:
            self._client.log_dict(self._run, {"status": end.status} | end.summary, "summary.json")
        statuses = {"done": "FINISHED", "failed": "FAILED"}
        self._client.set_terminated(self._run, "KILLED" if end is None else statuses.get(end.status, "KILLED"))


def _for_mlflow(name: str) -> str:
    """Return a name that MLflow takes, and none that begins with another and a slash: its files have these names."""
    return re.sub(r"[^A-Za-z0-9_. /-]", "_", name.replace("/lag_", "_lag_")).replace("//", "/_").strip("/") or "_"


def _alert(run: Any, levels: Any, line: AlarmLine) -> None:
    if line.has_begun:
        run.alert(title=line.name, text=line.text, level=levels.WARN if line.is_warning else levels.INFO)


SINKS: dict[str, Callable[[Begin], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "mlflow": MLflow,
}


def serve(make: Callable[[Begin], Sink], lines: BinaryIO) -> None:
    """Give every whole line to the sink that `make` makes of the first one; close it when there are no more."""
    decoder = msgspec.json.Decoder(TrackerLine)
    begin = decoder.decode(lines.readline())
    assert isinstance(begin, Begin), "the first line says what begins"
    sink, end = make(begin), None
    for raw in lines:
        if not raw.endswith(b"\n"):
            break  # its writer was killed
        match decoder.decode(raw):
            case MetricsLine() as line:
                sink.metrics(line)
            case AlarmLine() as line:
                sink.alarm(line)
            case End() as line:
                end = line
    signal.alarm(math.ceil(begin.deadline_s))  # nobody may be left who would end a process that hangs
    sink.close(end)


if __name__ == "__main__":
    os.nice(NICENESS)
    leave_to_the_run()
    serve(SINKS[sys.argv[1]], sys.stdin.buffer)
