"""Whole runs whose processes are killed or stopped: started again alone, nothing lost, nothing trained twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from audit import audit
from processes import is_alive
from test_endings import ENDS_WITHIN_S, await_steps, executors_of, run_with, start
from trace_audit import audit_trace

from slipstream.core.run_log import read_rollouts
from slipstream.core.types import ReplicaLost, StepDone, Swapped
from slipstream.observe.timeline import Instant, read_timeline, timeline_path


def finished(process: subprocess.Popen[str], out: Path, *, steps: int) -> dict[str, Any]:
    """The summary of a run that has gone through all its steps, each prompt once."""
    output, _ = process.communicate(timeout=ENDS_WITHIN_S)
    assert process.returncode == 0, output
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    check_whole(summary, out, steps=steps)
    return summary | {"output": output}


def check_whole(summary: dict[str, Any], out: Path, *, steps: int) -> None:
    """AssertionError unless the run has gone through all its steps, each prompt once."""
    assert (summary["status"], summary["steps"]) == ("done", steps)
    prompts = summary["prompts"]
    assert (prompts["lost"], prompts["repeated"], prompts["pending"]) == (0, 0, 0)
    audit(out)
    audit_trace(out, is_whole=not summary["restarts"])


def send(executor: str, number: signal.Signals) -> int:
    """Send a signal to a child of a run in this process, and return its pid."""
    pid = executors_of(os.getpid())[executor]
    os.kill(pid, number)
    return pid


def instants(out: Path) -> list[Instant]:
    """Return those of the controller."""
    return [one for one in read_timeline(timeline_path(out, "controller")) if isinstance(one, Instant)]


def pid_of(executor: str, process: subprocess.Popen[str], *, besides: int = 0) -> int:
    """Of a child that may be about to start; another than `besides`."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    while (pid := executors_of(process.pid).get(executor, besides)) == besides:
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < deadline, f"there is no '{executor}'"
        time.sleep(0.02)
    return pid


def test_generator_and_rewards_are_killed_and_the_run_goes_on(tiny, tmp_path, monkeypatch, capsys):
    executors: dict[str, int] = {}

    def killing(event: Any) -> None:
        if isinstance(event, StepDone) and event.step == 0:
            executors.update(executors_of(os.getpid()))
            for victim in ("generator-0", "rewards"):
                os.kill(executors[victim], signal.SIGKILL)

    summary = run_with(killing, monkeypatch, tiny | {"steps": 8}, tmp_path / "run", display=True)
    check_whole(summary, tmp_path / "run", steps=8)
    output = capsys.readouterr().out
    assert summary["restarts"] == {"generator-0": 1, "rewards": 1}
    assert summary["accounting"]["controller"]["replace"] > 0, "what the system takes for that is not the loop's"
    for victim in ("generator-0", "rewards"):
        assert f"{victim} was lost: killed by SIGKILL" in output
        assert f"{victim} has joined (incarnation 2)" in output
        told = [one.name for one in instants(tmp_path / "run") if one.args.get("executor") == victim]
        assert told == ["lost", "started again", "joined"]  # its own file need not know of one second's life
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    assert not any(is_alive(pid) for pid in executors.values())


@pytest.mark.slow
def test_groups_are_scored_as_wholes_also_when_who_scores_is_killed(tiny, tmp_path, monkeypatch):
    """Completions come again to a process that knows of none; each group's ranks are those of its own four texts.

    No group of the fifth step can be begun before the first step is trained, and none of the last before the fifth: so
    three processes score, however fast the run is.
    """
    source = (
        "def ranks(completions, **_):\n    return [float(sorted(completions).index(text)) for text in completions]\n"
    )
    (tmp_path / "mine.py").write_text(source)
    terms = [{"function": f"{tmp_path / 'mine.py'}:ranks", "per": "group"}]
    tables = tiny | {"steps": 12, "rewards": {"terms": terms, "timeout_s": 60.0}, "max_staleness": 2}
    tables |= {"loss": {"skip_no_signal": False}, "warm_start": {"steps": 0}}

    def killing(event: Any) -> None:
        if isinstance(event, StepDone) and event.step in (0, 4):
            send("rewards", signal.SIGKILL)

    out = tmp_path / "run"
    summary = run_with(killing, monkeypatch, tables, out)
    check_whole(summary, out, steps=12)
    assert summary["restarts"] == {"rewards": 2}
    assert [one.args["incarnation"] for one in instants(out) if one.name == "joined"] == [2, 3]
    assert summary["prompts"]["failed_completions"] == 0
    groups: dict[int, list[Any]] = {}
    for line in read_rollouts(out / "rollouts.jsonl"):
        groups.setdefault(line.ordinal, []).append(line)
    assert len(groups) >= 48
    for group in groups.values():
        texts = sorted(line.completion for line in group)
        assert [line.reward for line in group] == [float(texts.index(line.completion)) for line in group]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["generator-0", "rewards"])
def test_one_that_is_stopped_for_longer_than_a_lease_is_killed_and_replaced(victim, tiny, tmp_path, monkeypatch):
    stopped: list[int] = []

    def stopping(event: Any) -> None:
        if isinstance(event, StepDone) and event.step == 0:
            stopped.append(send(victim, signal.SIGSTOP))

    out = tmp_path / "run"
    summary = run_with(stopping, monkeypatch, tiny | {"steps": 12, "lease_s": 4.0}, out)
    check_whole(summary, out, steps=12)
    assert summary["restarts"] == {victim: 1}
    (lost,) = [one for one in instants(out) if one.name == "lost"]
    assert lost.args["executor"] == victim
    assert lost.args["why"].startswith("silent for ")
    assert not is_alive(*stopped)


@pytest.mark.slow
def test_a_second_of_standstill_of_any_process_is_nothing(tiny, tmp_path):
    process = start(tiny, tmp_path / "run", steps=30)
    await_steps(tmp_path / "run", 1, process)
    for pid in (*executors_of(process.pid).values(), process.pid):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)  # what is tested
        os.kill(pid, signal.SIGCONT)
    assert finished(process, tmp_path / "run", steps=30)["restarts"] == {}


@pytest.mark.slow
def test_a_controller_that_stood_still_for_longer_than_a_lease_accuses_nobody(tiny, tmp_path):
    process = start(tiny, tmp_path / "run", steps=12, lease_s=6.0)
    await_steps(tmp_path / "run", 1, process)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(8.0)  # what is tested
    os.kill(process.pid, signal.SIGCONT)
    assert finished(process, tmp_path / "run", steps=12)["restarts"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["generator-0", "rewards"])
def test_killed_before_it_is_ready_and_again_right_after(victim, tiny, tmp_path):
    """Before the first version, and while the first evaluation is under way."""
    out = tmp_path / "run"
    process = start(tiny, out, steps=4, eval=tiny["eval"] | {"num_prompts": 24})
    first = pid_of(victim, process)
    os.kill(first, signal.SIGKILL)
    os.kill(pid_of(victim, process, besides=first), signal.SIGKILL)
    assert finished(process, out, steps=4)["restarts"] == {victim: 2}


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["generator-0", "rewards"])
def test_killed_in_the_last_evaluation_it_is_asked_again(victim, tiny, tmp_path):
    out = tmp_path / "run"
    process = start(tiny, out, steps=3, eval=tiny["eval"] | {"num_prompts": 24})
    await_steps(out, 3, process)
    os.kill(pid_of(victim, process), signal.SIGKILL)
    summary = finished(process, out, steps=3)
    assert summary["eval"]["after"]["accuracy"] is not None
    assert summary["eval"]["after"]["sampled_accuracy"] is not None


@pytest.mark.slow
def test_replicas_that_die_one_after_the_other_are_replaced(tiny, tmp_path, monkeypatch):
    """The second is killed when the first one's successor samples; the run ends a step after both have one."""
    out, news = tmp_path / "run", list[str]()

    def killing(event: Any) -> None:
        if isinstance(event, StepDone) and event.step == 0:
            send("generator-0", signal.SIGKILL)
        if isinstance(event, ReplicaLost):
            news.append(f"{event.replica} is lost")
        if isinstance(event, Swapped) and news and news[-1] == f"{event.replica} is lost":
            news.append(f"{event.replica} is back")
            if event.replica == 0:
                send("generator-1", signal.SIGKILL)

    def ending(_: Any) -> str | None:
        return "stop" if news[-1:] == ["1 is back"] else None

    tables = tiny | {"steps": 10_000, "generator": {"num_slots": 16, "replicas": 2}}
    summary = run_with(killing, monkeypatch, tables, out, callbacks={"on_step": ending})
    assert (summary["status"], summary["stopped_because"]) == ("done", "callback")
    assert news == ["0 is lost", "0 is back", "1 is lost", "1 is back"]
    assert summary["restarts"] == {"generator-0": 1, "generator-1": 1}
    assert (summary["prompts"]["lost"], summary["prompts"]["repeated"]) == (0, 0)
    audit(out)
    audit_trace(out, is_whole=False)


@pytest.mark.slow
@pytest.mark.parametrize("division", ["tensor_parallel", "pipeline_parallel"])
def test_a_rank_of_a_generator_takes_the_other_along(division, tiny, tmp_path):
    out = tmp_path / "run"
    process = start(tiny, out, steps=8, generator={"num_slots": 16, division: 2})
    await_steps(out, 1, process)
    os.kill(pid_of("generator-0@1", process), signal.SIGKILL)
    summary = finished(process, out, steps=8)
    assert summary["restarts"] == {"generator-0": 1}
    assert "generator-0@1 was lost: killed by SIGKILL" in summary["output"], "and not what that did to the other rank"


@pytest.mark.slow
def test_one_loss_too_many_ends_the_run_and_leaves_nothing(tiny, tmp_path):
    process = start(tiny, tmp_path / "run", steps=10_000, max_restarts=0)
    await_steps(tmp_path / "run", 1, process)
    executors = executors_of(process.pid)
    os.kill(executors["rewards"], signal.SIGKILL)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "'rewards' was lost 1 time" in output
    assert "max_restarts = 0" in output
    assert not any(is_alive(pid) for pid in executors.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "ranks"),
    [
        ("trainer@1", {"trainer": {"minibatches": 2, "ranks": 2}}),
        ("reference@1", {"kl": {"coef": 0.1, "executor": "own", "ranks": 2, "tensor_parallel": 2}}),
        (
            "critic@1",
            {"loss": {"name": "ppo", "advantages": "gae"}, "critic": {"executor": "own", "ranks": 2}},
        ),
    ],
)
def test_the_rank_that_was_killed_is_named_and_not_the_survivor(victim, ranks, tiny, tmp_path):
    """The other rank sits in a collective; the run ends at once, not when that gives up."""
    process = start(tiny, tmp_path / "run", steps=10_000, max_restarts=0, deadline_s=600.0, **ranks)
    await_steps(tmp_path / "run", 1, process)
    executors = executors_of(process.pid)
    os.kill(executors[victim], signal.SIGKILL)
    killed_s = time.monotonic()
    output, _ = process.communicate(timeout=300)
    assert time.monotonic() - killed_s < 200, "deadline_s is 600"
    assert f"the process of '{victim}' ended" in output
    assert "SIGKILL" in output
    assert not any(is_alive(pid) for pid in executors.values())
