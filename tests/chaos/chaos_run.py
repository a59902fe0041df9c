"""A user who wants the run to be done: starts it, resumes it at once when it has ended with a loss, and then looks.

run = ChaosRun(folder, flags)
run.until_done(adversary=...)       attempts, their exit codes and what they said are kept
run.leftovers()                     processes, shared memory and temporary files that outlived it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from adversary import Adversary, Growth
from chaos_config import RECIPE
from lineage_audit import lines
from process_tree import adopt_orphans, reap, roles

sys.path.append(str(Path(__file__).parents[1]))  # for the scripts of this folder; under pytest it is there
from accounted import check_runs
from processes import descendants, is_alive, state

MOST_OVERHEAD = 0.25
"""Share of its time that a whole quickstart's controller spends on handing on messages, at most: a sixth is usual."""
MAX_ATTEMPTS = 60
QUIET_S = 150.0
"""No run is silent for so long, in its files and on the terminal (a warm start records nothing): its own deadlines
(`--deadline-s`) are shorter. Longer is a hang, and a finding."""
LETTING_GO_S = 20.0  # what has lost its controller ends within so long
LOOK_S = 0.05
DONE, BAD_INPUT = 0, 2
COMMAND = (sys.executable, "-m", "slipstream.cli", "run")


@dataclass(frozen=True)
class Attempt:
    """One process that the user started; `code` as `subprocess` has it, negative for a signal."""

    is_resume: bool
    started_s: float
    ended_s: float
    code: int
    said: str


class Hang(AssertionError):
    """A run that does nothing any more."""


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder whose path is short, for sockets, and which reward workers, who are another user, may pass through."""
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@dataclass
class ChaosRun:
    """A run in `folder`/run, with temporary files and logs beside it. `folder` must be short: sockets lie in it."""

    folder: Path
    flags: Sequence[str]
    recipe: str = RECIPE
    attempts: list[Attempt] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None
    _steps: int = 0

    def __post_init__(self) -> None:
        adopt_orphans()
        self.run_dir, self.temporary = self.folder / "run", self.folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._before = set(descendants(os.getpid()))
        self._run_ids: set[str] = set()  # folders of sockets have the names of runs, and what they share is named so

    @property
    def controller(self) -> int | None:
        """The process of the present attempt."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def roles(self) -> dict[str, list[int]]:
        controller = self.controller
        return {} if controller is None else roles(controller)

    def until_done(self, adversary: Adversary | None = None, *, ending_at_s: float = float("inf")) -> None:
        """Start, and resume until it is done. The adversary is called off at `ending_at_s` on the monotonic clock.

        AssertionError when it hangs, when it fails unprovoked, when `MAX_ATTEMPTS` are not enough, when bad input is
        claimed, or when its seconds do not add up.
        """
        if adversary is not None:
            adversary.begin()
        try:
            while not self.is_done:
                assert len(self.attempts) < MAX_ATTEMPTS, f"not done after {MAX_ATTEMPTS} attempts{self.said()}"
                struck = 0 if adversary is None else len(adversary.strikes)
                attempt = self.attempt(adversary, ending_at_s=ending_at_s)
                is_provoked = adversary is not None and len(adversary.strikes) > struck
                assert attempt.code == DONE or is_provoked, f"it failed, and nobody had struck it{self.said()}"
        finally:
            self.kill()
            if adversary is not None:
                adversary.end()
        stopped_s = 0.0 if adversary is None else adversary.stopped_s
        check_runs(self.folder, stopped_s=stopped_s, most_overhead=MOST_OVERHEAD)

    @property
    def is_done(self) -> bool:
        return bool(self.attempts) and self.attempts[-1].code == DONE

    @property
    def is_begun(self) -> bool:
        """Whether the folder is a run's, which can be resumed."""
        return (self.run_dir / "config.toml").exists()

    def attempt(self, adversary: Adversary | None = None, *, ending_at_s: float = float("inf")) -> Attempt:
        """Start or resume once; returns when that process has ended."""
        with self.started() as process:
            self._wait(process, adversary, ending_at_s)
        last = self.attempts[-1]
        if last.code == BAD_INPUT and "already complete" in last.said:  # killed after its last word
            self.attempts[-1] = Attempt(last.is_resume, last.started_s, last.ended_s, DONE, last.said)
            if "its page is missing" in last.said:  # killed before that
                report = (sys.executable, "-m", "slipstream.cli", "report", str(self.run_dir))
                subprocess.run(report, check=True, timeout=QUIET_S, stdout=subprocess.DEVNULL)
        elif last.code == BAD_INPUT:
            raise AssertionError(f"the user's command was refused{self.said()}")
        return self.attempts[-1]

    @contextlib.contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """An attempt, as a user would begin it now. It is noted when the context ends, and killed if still there."""
        is_resume = self.is_begun
        arguments = (
            ["--resume", str(self.run_dir)] if is_resume else [self.recipe, "--out", str(self.run_dir), *self.flags]
        )
        path, started_s = self.folder / f"said_{len(self.attempts)}", time.monotonic()
        with path.open("wb") as said:
            process = self._process = subprocess.Popen(
                [*COMMAND, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TMPDIR": str(self.temporary), "COLUMNS": "200"},
                start_new_session=True,
            )
        is_over = threading.Event()
        watcher = threading.Thread(target=self._note_run_ids, args=(is_over,), daemon=True)
        watcher.start()
        try:
            yield process
        finally:
            self.kill()
            is_over.set()
            watcher.join()
            self.attempts.append(
                Attempt(is_resume, started_s, time.monotonic(), process.wait(), path.read_text(errors="replace"))
            )

    def _note_run_ids(self, is_over: threading.Event) -> None:
        """Looks every `LOOK_S` until the attempt is over."""
        while not is_over.wait(LOOK_S):
            self._run_ids |= {path.name for path in self.temporary.glob("slipstream-*")}

    def _wait(self, process: subprocess.Popen[bytes], adversary: Adversary | None, ending_at_s: float) -> None:
        """Waits for: its end. Ends when: that comes, or nothing is said for `QUIET_S`."""
        said = self.folder / f"said_{len(self.attempts)}"
        recorded = [self.run_dir / name for name in ("events.jsonl", "metrics.jsonl", "rollouts.jsonl")]
        files = [Growth(path) for path in (said, *recorded)]
        seen, heard_s = -1, time.monotonic()
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
            reap(set(descendants(os.getpid())) - self._before - {process.pid})
            if (now := sum(file.look() for file in files)) != seen:
                seen, heard_s = now, time.monotonic()
            if adversary is not None and time.monotonic() > ending_at_s:
                adversary.end()
                adversary = None
            if time.monotonic() > heard_s + QUIET_S:
                there = {role: [(pid, state(pid)) for pid in pids] for role, pids in self.roles().items()}
                raise Hang(f"nothing was recorded or said for {QUIET_S:g} s; processes: {there}{self.said()}")

    def kill(self) -> None:
        """The controller, if it is there."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def has_trained_all(self) -> bool:
        """Whether the metrics hold the last step."""
        if self._steps == 0 and self.is_begun:
            self._steps = next(
                int(line.partition("=")[2])
                for line in (self.run_dir / "config.toml").read_text().splitlines()
                if line.startswith("steps = ")
            )
        path = self.run_dir / "metrics.jsonl"
        return self._steps > 0 and path.exists() and f'"version":{self._steps},'.encode() in path.read_bytes()[-4096:]

    def leftovers(self) -> list[str]:
        """What is still there `LETTING_GO_S` after the run, one sentence each. What it finds running, it kills."""
        deadline_s = time.monotonic() + LETTING_GO_S
        while (left := self._living()) and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        found = [f"process {pid} outlived the run: {_words(pid)}" for pid in left]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        found += [f"shared memory is left: {name}" for name in sorted(shared_memory(self._run_ids))]
        files = [path.name for path in sorted(self.temporary.iterdir()) if not path.name.startswith("torchinductor")]
        found += [f"a temporary file is left: {name}" for name in files]
        return found

    def _living(self) -> list[int]:
        ours = set(descendants(os.getpid())) - self._before
        reap(ours)
        return sorted(pid for pid in ours if is_alive(pid))

    def said(self) -> str:
        """What the attempts said at last, and the processes."""
        told = [f"\n\nattempt {n} (code {a.code}):\n{a.said[-1500:]}" for n, a in enumerate(self.attempts)][-3:]
        logs = (self.run_dir / "logs").glob("*.log")
        return "".join(told) + "".join(f"\n\n{path.name}:\n{path.read_text(errors='replace')[-800:]}" for path in logs)


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")[:200]
    except (FileNotFoundError, ProcessLookupError):
        return "it has ended meanwhile"


def shared_memory(run_ids: set[str]) -> set[str]:
    """Names of what these runs keep in memory."""
    return {path.name for path in Path("/dev/shm").glob("slipstream.*") if path.name.split(".")[1] in run_ids}


# What happened after a fault


def all_events(run_dir: Path) -> list[dict]:
    """The events of all attempts, abandoned ones too, in the order of time."""
    seen: dict[tuple[float, int], dict] = {}
    for folder in (*run_dir.glob("attempt_*"), run_dir):
        for line in lines(folder / "events.jsonl"):
            seen[line["time_s"], line["seq"]] = line
    return [seen[key] for key in sorted(seen)]


def recovery_times(run_dir: Path, faults_s: Sequence[float], ended_s: float) -> list[float]:
    """Seconds from each fault until the whole loop is known to work again, whatever was hit.

    That is the end of the first step that was begun after the fault and trains on a group scored after it; behind the
    last such step, the end of the run, with model and summary.
    """
    scored_s: dict[int, float] = {}
    begun: dict[int, tuple[float, float]] = {}  # step -> when it was commanded, when the last of its groups was scored
    steps: list[tuple[float, float, float]] = []  # begun, last group scored, done
    for line in all_events(run_dir):
        event, now_s = line["event"], line["time_s"]
        if event["type"] == "GroupScored":
            scored_s[event["ordinal"]] = now_s
        elif event["type"] == "StepDone" and event["step"] in begun:
            steps.append((*begun[event["step"]], now_s))
        for command in line["commands"]:
            if command["type"] == "TrainStep":
                newest_s = max(scored_s.get(ordinal, 0.0) for ordinal in command["ordinals"])
                begun[command["step"]] = now_s, newest_s
    return [
        min((done for begun_s, newest_s, done in steps if min(begun_s, newest_s) > fault_s), default=ended_s) - fault_s
        for fault_s in faults_s
    ]


def weights(run_dir: Path) -> str:
    """Hash of the exported weights."""
    return hashlib.sha256((run_dir / "model" / "model.safetensors").read_bytes()).hexdigest()


def accuracy(run_dir: Path) -> float:
    """Held-out, greedy, of the last version."""
    return float(json.loads((run_dir / "summary.json").read_text())["eval"]["after"]["accuracy"])
