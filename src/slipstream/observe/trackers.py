"""A run's metrics for other people's dashboards: TensorBoard, Weights & Biases, trackio, MLflow (`[trackers]`).

Each tracker is a process of its own (`observe/sinks.py`), fed through a pipe: what it imports, sends or waits for is in
nobody's way, and neither its crash nor its hanging does any harm. Writing to the pipe never blocks. What the pipe has
no room for waits in a queue of `MAX_BEHIND` lines; a tracker that falls further behind, or ends, is dropped with one
line, and the run goes on.

    consumes    lines of metrics.jsonl as they are written, alarms, at the end the summary
    waits for   nothing; at the end for the trackers to have sent all, at most `trackers.deadline_s`
    ends when   the run does
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from slipstream.core.config import RunConfig
from slipstream.core.disk import disk_errors, replacing
from slipstream.core.errors import ConfigError
from slipstream.core.files import load_json
from slipstream.core.jsonl import read_jsonl
from slipstream.core.observe_sections import TrackersConfig
from slipstream.core.run_log import Metrics
from slipstream.observe.health import Alarm, in_a_line
from slipstream.observe.sinks import AlarmLine, Begin, End, MetricsLine, TrackerLine

MAX_BEHIND = 1000
RUN_FILE = "trackers.json"
_TAIL_CHARS = 300
_SECRET = re.compile(r"(?i)(api_?key|secret|password|passwd|credential|auth|(access|api|hf|bearer)_?token)(?!_env)")
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def check_trackers(config: TrackersConfig) -> None:
    """Raise ConfigError for a tracker whose package is not installed."""
    for name in config.names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # without an origin it is a mere folder, such as that of its own files
            raise ConfigError(
                f"the tracker '{name}' needs the package '{name}', which is not installed",
                got=f"trackers.names = {config.names}",
                allowed="trackers whose packages are there",
                hint=f"pip install 'slipstream-rl[trackers]', or only {name}; or leave it out of trackers.names",
            )


def open_trackers(config: RunConfig, run_dir: Path, *, first_step: int, note: Callable[[str], None]) -> Trackers:
    """Start what `config.trackers` names. A resumed run goes on in the tracker's run that it began, at `first_step`."""
    chosen = config.trackers
    if not chosen.names:
        return Trackers([], note=note, deadline_s=0.0)
    is_resumed = (run_dir / RUN_FILE).exists()
    kept = read_jsonl(run_dir / "metrics.jsonl", dict[str, Any])
    begin = Begin(
        run_id=_run_id(run_dir),
        name=chosen.run_name or run_dir.resolve().name,
        project=chosen.project,
        entity=chosen.entity,
        group=chosen.group,
        tags=list(chosen.tags),
        is_offline=chosen.offline,
        folder=str(run_dir.resolve()),
        config=without_secrets(config.model_dump(mode="json")),
        is_resumed=is_resumed,
        first_step=first_step,
        deadline_s=chosen.deadline_s,
        kept=[_in_numbers(line) for line in kept if line["step"] == first_step],
    )
    feeds = []
    for name in chosen.names:
        log = run_dir / "logs" / f"tracker-{name}.log"
        feed = Feed(name, [sys.executable, "-P", "-m", "slipstream.observe.sinks", name], log)
        feed.put(begin)
        feeds.append(feed)
    return Trackers(feeds, note=note, deadline_s=chosen.deadline_s)


def _run_id(run_dir: Path) -> str:
    """The name under which trackers know this run, over all attempts."""
    path = run_dir / RUN_FILE
    with disk_errors(path):
        if not path.exists():
            with replacing(path) as temporary:
                temporary.write_bytes(msgspec.json.encode({"run_id": uuid.uuid4().hex[:8]}))
        return str(load_json(path, dict[str, str])["run_id"])


def _in_numbers(line: Metrics) -> MetricsLine:
    numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
    values = {name: float(value) for name, value in numbers.items() if name != "step"}
    return MetricsLine(step=line["step"], day_s=time.time(), values=values)


def without_secrets(value: Any, name: str = "") -> Any:
    """`value` (JSON types) with text in place of what its name says is secret, and of users and passwords in URLs."""
    if isinstance(value, Mapping):
        return {key: without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, name) for item in value]
    if isinstance(value, str):
        return "(not shown)" if value and _SECRET.search(name) else _USER_IN_URL.sub("(not shown)", value)
    return value


class Feed:
    """The near end of a tracker: its process, and what that has not taken yet."""

    def __init__(self, name: str, command: Sequence[str], log_path: Path) -> None:
        self.name = name
        self._log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the run, which tells its trackers
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                bufsize=0,
            )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)
        self._queue: deque[bytes] = deque()
        self._sent = 0  # bytes of the first of them
        self.why_lost = ""

    def put(self, line: TrackerLine) -> None:
        """Send what there is room for; never blocks. `why_lost` says why there is nobody to send to any more."""
        if self.why_lost:
            return
        if len(self._queue) >= MAX_BEHIND:
            self._lose(f"it is {MAX_BEHIND} lines behind")
            return
        self._queue.append(msgspec.json.encode(line) + b"\n")
        self._send()

    def _send(self) -> None:
        try:
            while self._queue:
                self._sent += self._pipe.write(memoryview(self._queue[0])[self._sent :]) or 0
                if self._sent < len(self._queue[0]):
                    return  # the pipe is full
                self._queue.popleft()
                self._sent = 0
        except OSError:
            self._lose(f"it ended: {self._last_words()}")

    def end(self, deadline_s: float) -> None:
        """Send the rest and wait until the tracker is through with it, until `deadline_s` of the monotonic clock."""
        while self._queue and not self.why_lost and time.monotonic() < deadline_s:
            select.select([], [self._pipe], [], max(0.0, deadline_s - time.monotonic()))
            self._send()
        if self.why_lost:
            return
        with contextlib.suppress(OSError):
            self._pipe.close()
        try:
            if self._process.wait(max(0.0, deadline_s - time.monotonic())) != 0:
                self.why_lost = f"it failed: {self._last_words()}"
        except subprocess.TimeoutExpired:
            self._lose("it did not come to an end in time")

    def kill(self) -> None:
        """End the tracker's process and all that it has started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with contextlib.suppress(OSError):
            self._pipe.close()

    def _lose(self, why: str) -> None:
        self.why_lost = why
        self._queue.clear()
        self.kill()

    def _last_words(self) -> str:
        with self._log_path.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][-_TAIL_CHARS:] if lines else "it said nothing"


class Trackers:
    """The trackers of a run, as one sink. A context manager: at its end none of their processes is left."""

    def __init__(self, feeds: Iterable[Feed], *, note: Callable[[str], None], deadline_s: float) -> None:
        self._feeds = list(feeds)
        self._note = note
        self._deadline_s = deadline_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for feed in self._feeds:
            feed.kill()

    def metrics(self, line: Metrics) -> None:
        """A line of metrics.jsonl. What is no number is left out."""
        self._put(_in_numbers(line))

    def alarm(self, alarm: Alarm) -> None:
        self._put(
            AlarmLine(
                step=alarm.step,
                day_s=time.time(),
                name=alarm.name,
                has_begun=alarm.event == "began",
                is_warning=alarm.severity == "warning",
                text=in_a_line(alarm),
            )
        )

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """The run is over: wait until all have sent what they have, at most `deadline_s` in all."""
        self._put(End(status=status, summary=dict(summary)))
        deadline_s = time.monotonic() + self._deadline_s
        for feed in self._feeds:
            feed.end(deadline_s)
        self._drop_lost()
        self._feeds.clear()

    def _put(self, line: TrackerLine) -> None:
        for feed in self._feeds:
            feed.put(line)
        self._drop_lost()

    def _drop_lost(self) -> None:
        for feed in self._feeds:
            if feed.why_lost:
                self._note(f"the tracker {feed.name} is dropped, the run goes on without: {feed.why_lost}")
        self._feeds = [feed for feed in self._feeds if not feed.why_lost]
