"""Runs and measurements of experiments, kept under a name and a hash of all that they depend on.

What is there is not made again: an experiment that was interrupted goes on where it was, and one that changes makes
only what has changed. A run is `slipstream run` in a process of its own, as a user would call it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from slipstream.core.config import RunConfig
from slipstream.core.disk import replace_file
from slipstream.core.recipes import merge, resolve, save_config, stage_dir
from slipstream.observe.evaluation import EVALUATION_FILE
from slipstream.observe.hardware import cpu_model, describe
from slipstream.observe.summary import versions

DEFAULT_FOLDER = Path("runs") / "experiments"
RUN_DEADLINE_S = 3600.0
TAIL_LINES = 20


@dataclass(frozen=True)
class Spec:
    """One run: `recipe` (a name, or a path) with a preset and overrides. `name` tells it apart for people.

    What it begins with of another run, a checkpoint say, is named in `overrides` by its path.
    `cores`: how many of this machine's it gets; a run whose time matters gets all (None), alone.
    """

    name: str
    recipe: str | Path
    overrides: Mapping[str, Any] = field(default_factory=dict)
    preset: str | None = None
    cores: int | None = None

    def config(self) -> RunConfig:
        return self._resolved

    @cached_property  # asked for at every look at the run's folder
    def _resolved(self) -> RunConfig:
        return resolve(self.recipe, self.overrides, self.preset)

    def with_overrides(self, **tables: Any) -> Spec:
        return Spec(self.name, self.recipe, merge(self.overrides, tables), self.preset, self.cores)


class RunFailed(Exception):
    """A run of an experiment ended without a result."""


class Unavailable(Exception):
    """This machine lacks what an experiment needs, such as a GPU."""


@dataclass(frozen=True)
class Made:
    """What a run or a measurement took when it was made: `seconds` of `cores` out of `of_cores`, and on what."""

    what: Literal["run", "measurement"]
    seconds: float
    cores: int
    of_cores: int
    cpu: str
    commit: str | None


@dataclass(frozen=True)
class _Job:
    """A spec whose recipe has been read, and where its run is kept."""

    name: str
    config: RunConfig
    cores: int | None
    folder: Path

    def is_done(self) -> bool:
        return all(_is_done(stage, self.folder) for stage in self.config.stages)

    def is_kept(self) -> bool:
        """Whether it is done, and what it took is known: that is written last."""
        return beside(self.folder, "json").is_file() and self.is_done()


class Lab:
    """Where runs and measurements are kept. `say` hears one line for each that is made.

    `used` tells what those took that were asked for, whenever they were made.
    """

    def __init__(self, folder: Path, say: Callable[[str], Any] = str) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.say = say
        self.used: dict[Path, Made] = {}
        self.of_cores = num_cores()  # a thread that keeps to some sees no others

    # Runs

    def place(self, spec: Spec) -> Path:
        """The folder of `spec`'s run, there or not."""
        return self._job(spec).folder

    def is_done(self, spec: Spec) -> bool:
        """Whether every stage of `spec` left what it leaves when it is done."""
        return self._job(spec).is_done()

    def _job(self, spec: Spec) -> _Job:
        config = spec.config()
        return _Job(
            spec.name,
            config,
            spec.cores,
            self.folder / f"{slug(spec.name)}-{digest(config.model_dump_json(), spec.cores, *user_files(config))}",
        )

    def run(self, spec: Spec) -> Path:
        """The folder of a finished run of `spec`, made unless it is there. RunFailed with its last lines."""
        return self.run_all([spec])[0]

    def _make(self, job: _Job) -> None:
        """Make the run, unless another process has made it meanwhile."""
        lock = beside(job.folder, "lock")
        lock.touch()
        with locked(lock, lambda: self.say(f"{job.name}: another process makes it, waiting")):
            if not job.is_kept():
                self._make_anew(job)

    def _make_anew(self, job: _Job) -> None:
        folder = job.folder
        shutil.rmtree(folder, ignore_errors=True)
        self._forget_measurements(folder)
        recipe, log = beside(folder, "toml"), beside(folder, "log")
        save_config(job.config, recipe)
        command = [sys.executable, "-m", "slipstream.cli", "run", str(recipe), "--out", str(folder)]
        started_s = time.monotonic()
        with log.open("wb") as out:
            try:
                done = subprocess.run(
                    command, stdout=out, stderr=out, check=False, timeout=RUN_DEADLINE_S, env=_environment(job.cores)
                )
            except subprocess.TimeoutExpired:
                raise RunFailed(f"{job.name}: not done after {RUN_DEADLINE_S:.0f} s; see {log}") from None
        if done.returncode or not job.is_done():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
            raise RunFailed(f"{job.name}: exit code {done.returncode}; {log} ends with\n{tail}")
        made = self._made("run", time.monotonic() - started_s, job.cores)
        _write(beside(folder, "json"), asdict(made))
        self.say(f"{job.name}: {made.seconds:.0f} s")

    def run_all(self, specs: Sequence[Spec]) -> list[Path]:
        """The same of each: those with `cores` side by side, as many as fit; those that want all one by one, in order.

        What runs side by side shares no core. The first failure is raised when all that had begun are done.
        """
        jobs = [self._job(spec) for spec in specs]  # once: a recipe that is edited meanwhile is another run
        missing = list({job.folder: job for job in jobs if not job.is_kept()}.values())
        for index, job in enumerate(missing):
            if job.cores is None:
                self.say(f"[{index + 1}/{len(missing)}] {job.name}")
                self._make(job)
        shared = [job for job in missing if job.cores is not None]
        if shared:
            free = _free_cores(max(job.cores or 1 for job in shared))
            with ThreadPoolExecutor(free.qsize(), initializer=lambda: _keep_to(free.get_nowait())) as pool:
                for _ in pool.map(self._make, shared):
                    pass
        folders = [job.folder for job in jobs]
        self.used |= {folder: Made(**json.loads(beside(folder, "json").read_text())) for folder in folders}
        return folders

    # Measurements

    def measure(self, name: str, function: Callable[..., Any], **parameters: Any) -> Any:
        """`function(**parameters)`, which must be JSON; kept by name and parameters.

        `function` is not part of what it is kept by: give it a version as a parameter where it may change.
        """
        path = self._measurement(name, parameters)
        if path.is_file():
            record = json.loads(path.read_text())
        else:
            started_s = time.monotonic()
            found = function(**parameters)
            made = asdict(self._made("measurement", time.monotonic() - started_s, None))
            record = {"name": name, "parameters": parameters, "made": made, "found": found} | provenance()
            _write(path, record)
            self.say(f"{name}: {made['seconds']:.0f} s")
        self.used[path] = Made(**record["made"])
        return json.loads(json.dumps(record["found"]))

    def measured_s(self, name: str, **parameters: Any) -> float:
        """What `measure` took for it when it was made."""
        return float(json.loads(self._measurement(name, parameters).read_text())["made"]["seconds"])

    def _measurement(self, name: str, parameters: Mapping[str, Any]) -> Path:
        return self.folder / f"{slug(name)}-{digest(json.dumps(parameters, sort_keys=True))}.json"

    def _forget_measurements(self, folder: Path) -> None:
        """Remove what was measured of the run that was in `folder` before: their parameters name it."""
        named = json.dumps(str(folder))[1:-1]
        for path in self.folder.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):  # another run's turn has removed it
                if named in json.dumps(json.loads(path.read_text()).get("parameters")):
                    path.unlink()

    # What it cost

    def _made(self, what: Literal["run", "measurement"], seconds: float, cores: int | None) -> Made:
        return Made(what, seconds, cores or self.of_cores, self.of_cores, cpu_model(), versions().commit)

    def cost(self) -> str:
        """What all that was asked for took when it was made, as minutes of the whole machine; empty for nothing."""
        if not self.used:
            return ""
        made = list(self.used.values())
        counts = {what: sum(one.what == what for one in made) for what in ("run", "measurement")}
        parts = " and ".join(f"{count} {what}{'s' * (count > 1)}" for what, count in counts.items() if count)
        minutes = sum(one.seconds * one.cores / one.of_cores for one in made) / 60
        machines = ", ".join(sorted({f"{one.of_cores} cores of {one.cpu}" for one in made}))
        commits = ", ".join(sorted({f"`{one.commit[:7]}`" for one in made if one.commit}))
        return f"{parts}, {minutes:.0f} minutes on {machines}" + (f", commit {commits}" if commits else "")


def beside(folder: Path, ending: str) -> Path:
    """A file named like the folder of a run, dots in the run's name or not (`lr=0.5`)."""
    return folder.with_name(f"{folder.name}.{ending}")


@contextlib.contextmanager
def locked(path: Path, on_wait: Callable[[], Any] = str) -> Iterator[None]:
    """Hold the lock of a file or folder; `on_wait` is called before waiting, where another process holds it.

    The wait ends with what the other does under the lock, a run of at most RUN_DEADLINE_S, or with its process.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks, as run_lock.py says
    try:
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, record: Any) -> None:
    """All of it or nothing: what is there is believed."""
    replace_file(path, json.dumps(record).encode())


def _is_done(stage: str, folder: Path) -> bool:
    if stage == "rl":
        path = folder / "summary.json"
        return path.is_file() and json.loads(path.read_text())["status"] == "done"
    return (folder / EVALUATION_FILE if stage == "evaluate" else stage_dir(folder, stage) / "stage.json").is_file()


def summary(run: Path) -> dict[str, Any]:
    """A run's `summary.json`: of its RL, whatever stages it has besides."""
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def metrics(run: Path) -> list[dict[str, Any]]:
    """A run's `metrics.jsonl`, one dict per step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def keep_rows(folder: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """The rows as JSON lines in `folder`, `name` followed by a digest of what is in them; written unless there."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path = folder / f"{name}-{digest(text)}.jsonl"
    if not path.is_file():
        replace_file(path, text.encode())
    return path


def provenance() -> dict[str, Any]:
    """Where and by what something was measured."""
    return {"hardware": describe().lines(), "commit": versions().commit}


def num_cores() -> int:
    return len(_cores())


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _free_cores(each: int) -> queue.SimpleQueue[list[int]]:
    """This machine's cores in sets of `each`; all of them as one set where there are fewer."""
    cores, free = _cores(), queue.SimpleQueue[list[int]]()
    for index in range(max(1, len(cores) // each)):
        free.put(cores[index * each : (index + 1) * each])
    return free


def _keep_to(cores: list[int]) -> None:
    """This thread, and the processes that it starts, run on these cores: a run takes as many threads as it may use."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def user_files(config: RunConfig) -> list[str]:
    """What the files say of which `config` names functions: `experiments/x/reward.py:judged`."""
    named, tables = set(), [config.model_dump(mode="json")]
    while tables:
        table = tables.pop()
        values = list(table.values() if isinstance(table, dict) else table)
        tables += [value for value in values if isinstance(value, dict | list)]
        named |= {value.partition(":")[0] for value in values if isinstance(value, str) and ".py:" in value}
    return [Path(name).read_text(encoding="utf-8") for name in sorted(named) if Path(name).is_file()]


def digest(*parts: Any) -> str:
    return hashlib.sha256("\n".join(str(part) for part in parts).encode()).hexdigest()[:10]


def slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=]+", "_", name)


def _environment(cores: int | None) -> dict[str, str]:
    """Of a run that shares the machine: as many threads as it has cores."""
    return dict(os.environ) if cores is None else os.environ | {"OMP_NUM_THREADS": str(cores)}
