"""SIGTERM, SIGHUP and a second signal: what a run saves, how soon it ends, what it leaves, and who hears of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from audit import audit
from covering import with_slow
from processes import children, command_line, descendants, is_alive

import slipstream
from slipstream.controller.callbacks import Callbacks
from slipstream.controller.controller import Controller
from slipstream.controller.held_out import HeldOut
from slipstream.core.errors import ConfigError
from slipstream.core.interrupts import ECHO_S
from slipstream.core.recipes import config_toml, resolve
from slipstream.core.run_lock import LOCK_FILE, holding
from slipstream.core.run_log import read_rollouts
from slipstream.core.types import StepDone
from slipstream.launch import cluster_of
from slipstream.stages import chain, rl
from slipstream.stages.run_folder import folder_of

DEADLINE_S = 120.0
ENDLESS = 100_000  # steps


def start(tiny: dict[str, Any], folder: Path, *flags: str, **more: Any) -> subprocess.Popen[str]:
    """`slipstream run`, in `folder`/run, with its own process group."""
    recipe = folder / "tiny.toml"
    soon = {"steps": ENDLESS, "warm_start": {"steps": 0}, "eval": tiny["eval"] | {"num_prompts": 4}}
    recipe.write_text(config_toml(resolve("quickstart", tiny | soon | more)))
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "slipstream.cli", "run", str(recipe), "--out", str(folder / "run"), *flags],
            stdout=said,
            stderr=said,
            text=True,
            start_new_session=True,
        )


def wait_until(is_so: Callable[[], bool], what: str, process: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert process.poll() is None, (folder / "said").read_text()
        assert time.monotonic() < deadline, f"{what} within {DEADLINE_S:g} s\n{(folder / 'said').read_text()}"
        time.sleep(0.05)


def executors_of(process: subprocess.Popen[str]) -> dict[str, int]:
    found = {pid: command_line(pid) for pid in children(process.pid)}
    return {Path(words[-1]).stem: pid for pid, words in found.items() if "slipstream.controller.process" in words}


def has_trained(run: Path, steps: int) -> bool:
    path = run / "metrics.jsonl"
    return path.exists() and path.read_text().count('"reward_mean"') >= steps


def status(run: Path) -> str:
    return str(json.loads((run / "summary.json").read_text())["status"])


def end_of(process: subprocess.Popen[str], folder: Path) -> int:
    try:
        return process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the run does not end\n{(folder / 'said').read_text()}") from None


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)]
)
def test_a_run_that_is_told_to_end_saves_its_last_step_and_is_gone_on_with(
    number: signal.Signals, code: int, tiny: dict[str, Any], tmp_path: Path
) -> None:
    """All its processes get the signal, as from a service manager; only the controller minds it. Nothing fails."""
    run = tmp_path / "run"
    process = start(tiny, tmp_path, "--shutdown-grace-s", "100")
    wait_until(lambda: has_trained(run, 2), "two steps", process, tmp_path)
    with pytest.raises(ConfigError, match=f"another run is going on(.|\n)*process {process.pid} on"):
        slipstream.run("quickstart", resume=run, display=False)
    executors = executors_of(process)
    assert set(executors) == {"trainer", "rewards", "generator-0"}
    for pid in (process.pid, *descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError):  # one may have ended meanwhile
            os.kill(pid, number)
    assert end_of(process, tmp_path) == code
    assert not [line.failure for line in read_rollouts(run / "rollouts.jsonl") if line.failure is not None]
    said = (tmp_path / "said").read_text()
    told = re.findall(
        rf"{number.name}: (?:finishing step (\d+), then|writing) a checkpoint.*, within 100 s; once more", said
    )
    assert len(told) == 1, said
    assert f"go on with: slipstream run --resume {run}" in said.splitlines()
    assert "Traceback" not in said
    assert not [pid for pid in executors.values() if is_alive(pid)]
    assert status(run) == "interrupted"
    done = int(json.loads((run / "summary.json").read_text())["steps"])
    assert (run / "checkpoints" / f"step_{done}" / "manifest.json").is_file(), "nothing that was trained is lost"
    assert told[0] in ("", str(done)), "the step that it finished is the one that it named"

    config = (run / "config.toml").read_text().replace(f"steps = {ENDLESS}", f"steps = {done + 2}")
    (run / "config.toml").write_text(config.replace('host = "process"', 'host = "inline"'))
    result = slipstream.run("quickstart", resume=run, display=False)
    assert (result.status, result.summary["steps"]) == ("done", done + 2)
    assert result.summary["prompts"]["lost"] == result.summary["prompts"]["repeated"] == 0
    audit(run)


@pytest.mark.slow
def test_told_to_end_amid_the_start_up_a_run_leaves_no_process(tiny: dict[str, Any], tmp_path: Path) -> None:
    process = start(tiny, tmp_path)
    wait_until(lambda: len(executors_of(process)) == 3, "three executors", process, tmp_path)
    executors = executors_of(process)
    process.send_signal(signal.SIGTERM)
    assert end_of(process, tmp_path) == 143
    assert not [pid for pid in executors.values() if is_alive(pid)]
    assert status(tmp_path / "run") == "interrupted"
    assert slipstream.report(tmp_path / "run").is_file(), "there was no time for it"


@pytest.mark.slow
@pytest.mark.parametrize("by", ["the grace period", "a second signal"])
def test_a_step_that_does_not_end_is_not_waited_for_for_ever(by: str, tiny: dict[str, Any], tmp_path: Path) -> None:
    """A trainer that stands still neither ends its step nor saves a checkpoint."""
    run = tmp_path / "run"
    grace_s = "1" if by == "the grace period" else "1000"
    process = start(tiny, tmp_path, "--shutdown-grace-s", grace_s, "--deadline-s", "1000", "--lease-s", "1000")
    wait_until(lambda: has_trained(run, 1), "a step", process, tmp_path)
    executors = executors_of(process)
    os.kill(executors["trainer"], signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    if by == "a second signal":
        said = tmp_path / "said"
        wait_until(lambda: "once more to stop now" in said.read_text(), "the note", process, tmp_path)
        time.sleep(ECHO_S)  # the same one sooner is taken for the first one's echo
        process.send_signal(signal.SIGTERM)
    assert end_of(process, tmp_path) == 143
    assert not [pid for pid in executors.values() if is_alive(pid)]
    assert "ended at once" in (tmp_path / "said").read_text()
    call = f"nothing is saved yet: begin it again with: slipstream run --resume {run}"
    assert call in (tmp_path / "said").read_text().splitlines()
    assert status(run) == "interrupted"
    assert slipstream.report(run).is_file(), "there was no time for it"


# In one process


def signalled(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, *, steps: int) -> None:
    """This process gets the signal once so many steps are done."""
    decide = Controller._decide

    def signalling(self: Controller, *events: Any) -> None:
        decide(self, *events)
        if isinstance(events[0], StepDone) and events[0].step + 1 == steps:
            signal.raise_signal(number)

    monkeypatch.setattr(Controller, "_decide", signalling)


@pytest.mark.slow
def test_from_python_the_run_is_saved_and_the_signal_goes_on_to_the_program(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline = tiny | {"host": "inline", "steps": 4, "warm_start": {"steps": 0}}
    heard: list[int] = []
    with monkeypatch.context() as patch:
        signalled(patch, signal.SIGTERM, steps=1)
        with pytest.raises(SystemExit) as left:
            slipstream.run("quickstart", overrides=inline, out=tmp_path / "run", display=False)
        assert left.value.code == 143
        assert status(tmp_path / "run") == "interrupted"
    with monkeypatch.context() as patch:
        signalled(patch, signal.SIGTERM, steps=2)
        before = signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))
        try:
            result = slipstream.run("quickstart", resume=tmp_path / "run", display=False)
            assert (result.status, heard) == ("interrupted", [signal.SIGTERM])
            assert signal.getsignal(signal.SIGTERM).__name__ == "<lambda>"
        finally:
            signal.signal(signal.SIGTERM, before)
    result = slipstream.run("quickstart", resume=tmp_path / "run", display=False)
    assert (result.status, result.summary["steps"]) == ("done", 4)
    audit(tmp_path / "run")


@pytest.mark.parametrize(
    "when", with_slow(["while a step is trained"], ["between two steps", "at the last evaluation"])
)
def test_ctrl_c_says_what_is_finished_and_how_to_go_on(
    when: str, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C is told of once; at the last evaluation that is left out, and a resume makes it."""
    inline = tiny | {"host": "inline", "steps": 3, "warm_start": {"steps": 0}, "eval": {"num_prompts": 4}}
    decide, evaluate = Controller._decide, HeldOut.evaluate

    def interrupting(self: Controller, *events: Any) -> None:
        decide(self, *events)
        now = "while a step is trained" if self.schedule.training else "between two steps"
        if self.interrupts.number is None and self.schedule.steps_done == 1 and when == now:
            signal.raise_signal(signal.SIGINT)

    def evaluating(self: HeldOut, *asked: Any) -> None:
        evaluate(self, *asked)
        if when == "at the last evaluation" and self._schedule.is_finished:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Controller, "_decide", interrupting)
        patch.setattr(HeldOut, "evaluate", evaluating)
        result = slipstream.run("quickstart", overrides=inline, out=tmp_path / "a run")
    assert result.status == "interrupted"
    lines = capsys.readouterr().out.splitlines()
    what, steps = {
        "between two steps": ("writing a checkpoint of step 1", 1),
        "while a step is trained": ("finishing step 2, then a checkpoint", 2),
        "at the last evaluation": ("writing a checkpoint of step 3", 3),
    }[when]
    assert [line for line in lines if "once more" in line] == [f"Ctrl-C: {what}; once more to stop now"]
    assert lines[-1] == f"go on with: slipstream run --resume '{tmp_path / 'a run'}'"
    assert result.summary["steps"] == steps
    resumed = slipstream.run(resume=tmp_path / "a run", display=False)
    assert (resumed.status, resumed.summary["steps"]) == ("done", 3)
    assert resumed.summary["eval"]["after"]["accuracy"] is not None


@pytest.mark.parametrize("amid", with_slow(["a callback"], ["the report"]))
def test_signals_after_the_run_is_saved_say_that_it_is(
    amid: str, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first, while a callback or the report is waited for, is told of; the second leaves nothing to go on with."""
    more = {"host": "inline", "steps": 1, "warm_start": {"steps": 0}, "eval": {"every": 0, "num_prompts": 4}}

    def interrupted(_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)

    of, name = {"a callback": (Callbacks, "finish"), "the report": (rl, "_draw")}[amid]
    monkeypatch.setattr(of, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        slipstream.run("quickstart", overrides=tiny | more, out=tmp_path / "run")
    said = capfd.readouterr()
    assert "Ctrl-C: the run is saved, and its report is being made; once more to stop now" in said.err
    assert "SIGINT: ended at once, all is saved" in said.out + said.err
    assert "go on with" not in said.out + said.err
    assert status(tmp_path / "run") == "done"
    assert slipstream.report(tmp_path / "run").is_file(), "it can be made later"


def test_what_goes_on_with_a_run_is_what_began_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = rl.FromPython(functions={"reward": lambda **_: []}, pipeline=lambda _: None)  # type: ignore[arg-type,return-value]
    assert given.resume_call(tmp_path) == f"slipstream.run(resume='{tmp_path}', ...) with the same reward and pipeline"
    cluster = cluster_of("127.0.0.1:0", tmp_path / "key", None, ())
    assert (
        rl.FromPython(cluster=cluster).resume_call(tmp_path).startswith("slipstream launch --group controller --resume")
    )
    monkeypatch.setenv("SLIPSTREAM_GO_ON", "jobs/a/submit.sh")  # as job files do
    assert rl.FromPython(cluster=cluster).resume_call(tmp_path) == "jobs/a/submit.sh"
    assert rl.FromPython().resume_call(tmp_path) == f"slipstream run --resume {tmp_path}"


@pytest.mark.slow
def test_a_run_that_is_interrupted_in_a_pause_says_so(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = json.loads((trained / "summary.json").read_text())
    (tmp_path / "summary.json").write_text(json.dumps(said | {"status": "failed"}))

    def lose(*_: Any) -> dict[str, Any]:
        raise slipstream.core.errors.ExecutorLost("the trainer ended", executor="trainer")

    monkeypatch.setattr(rl, "_attempt", lose)
    monkeypatch.setattr(rl, "sleep", lambda _: signal.raise_signal(signal.SIGTERM))
    given = rl.FromPython(display=False)
    with pytest.raises(KeyboardInterrupt), given.interrupts:
        rl.run_rl(resolve("quickstart"), tmp_path, given)
    assert status(tmp_path) == "interrupted"


def test_what_is_lost_while_the_run_ends_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: Any) -> dict[str, Any]:
        with given.interrupts.deferred(100):
            signal.raise_signal(signal.SIGTERM)
            raise slipstream.core.errors.ExecutorLost("the trainer ended", executor="trainer")

    monkeypatch.setattr(rl, "_attempt", lose)
    monkeypatch.setattr(rl, "sleep", lambda _: pytest.fail("it waits for another attempt"))
    given = rl.FromPython(display=False)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), given.interrupts:
        rl.run_rl(resolve("quickstart"), tmp_path, given)


# One writer


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("stages", [["rl"], ["sft", "rl"]])
def test_a_folder_takes_one_run_at_a_time_whether_it_is_new_or_goes_on(
    stages: list[str], tiny: dict[str, Any], trained: Path, tmp_path: Path
) -> None:
    overrides = tiny | {"stages": stages}
    out = tmp_path / "run"
    out.mkdir()
    with holding(out):  # a run that has only just begun
        before = files_of(tmp_path)
        with pytest.raises(ConfigError, match="another run is going on"):
            slipstream.run("quickstart", overrides=overrides, out=out, display=False)
        assert files_of(tmp_path) == before
    with holding(trained):
        before = files_of(trained)
        for call in ({"out": trained, "overrides": overrides}, {"resume": trained}):
            with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
                slipstream.run("quickstart", display=False, **call)
        assert slipstream.report(trained, out=tmp_path / "page.html").is_file(), "who reads may"
        assert files_of(trained) == before


def test_a_folder_that_was_used_between_the_look_and_the_lock_is_not_empty(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"

    def another_run(*_: Any, **__: Any) -> None:
        out.mkdir()
        (out / "config.toml").write_text("of another run")
        (out / "prompts.jsonl").write_text("of another run")

    monkeypatch.setattr(chain, "check_stages", another_run)
    tiny["rewards"] = {"terms": [{"function": "exact_match"}]}
    with pytest.raises(ConfigError, match="not empty"):
        slipstream.run("quickstart", overrides=tiny, out=out, prompts=["a", "b"], display=False)
    assert {path.name for path in out.iterdir()} == {"config.toml", "prompts.jsonl"}


def test_two_that_take_the_same_default_name_get_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    with folder_of(Path("a"), is_named=False) as folder:
        assert folder != Path("a")
        assert {path.name for path in folder.iterdir()} == {LOCK_FILE}
