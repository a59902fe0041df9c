"""What is there is not made again, what changed is, and a page's section is replaced where it stands."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest

from experiments import lab as lab_module
from experiments.catalogue import EXPERIMENTS, HEADLINE
from experiments.lab import Lab, RunFailed, Spec
from experiments.section import PAGE, ROOT, Section, Verdict, markdown_table, render, spread, write

TINY = Spec("a run", "quickstart", {"steps": 1, "seed": 3})


def pretend(monkeypatch, *, status: str = "done", code: int = 0) -> list[list[str]]:
    """Runs that only leave a summary behind; their commands."""
    commands: list[list[str]] = []

    def run(command, *, stdout, env, **_):
        commands.append(command)
        stdout.write(b"the last words\n")
        folder = Path(command[-1])
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"status": status}))
        return type("Done", (), {"returncode": code})

    monkeypatch.setattr(lab_module.subprocess, "run", run)
    monkeypatch.setattr(lab_module, "versions", lambda: SimpleNamespace(commit="abcdef1234"))
    monkeypatch.setattr(lab_module, "cpu_model", lambda: "an abacus")
    return commands


def test_a_run_is_made_once(tmp_path, monkeypatch):
    commands = pretend(monkeypatch)
    first = Lab(tmp_path).run(TINY)
    assert Lab(tmp_path).run(TINY) == first
    assert len(commands) == 1
    assert commands[0][1:4] == ["-m", "slipstream.cli", "run"]
    assert "seed = 3" in Path(commands[0][4]).read_text()


def test_what_a_run_depends_on_makes_another(tmp_path, monkeypatch):
    commands = pretend(monkeypatch)
    others = [TINY.with_overrides(seed=4), Spec("a run", "quickstart", {"steps": 1, "seed": 3}, "sync")]
    others += [Spec("a run", "quickstart", {"steps": 1, "seed": 3}, cores=1)]
    places = {Lab(tmp_path).run(spec) for spec in (TINY, *others)}
    assert len(places) == len(commands) == 4


def test_a_reward_that_says_something_else_makes_another_run(tmp_path, monkeypatch):
    pretend(monkeypatch)
    reward = tmp_path / "reward.py"
    spec = TINY.with_overrides(rewards={"terms": [{"function": f"{reward}:judged"}]})
    places = []
    for text in ("1.0", "1.0", "0.5"):
        reward.write_text(f"def judged(completion):\n    return {text}\n")
        places.append(Lab(tmp_path).run(spec))
    assert places[0] == places[1] != places[2]


def test_a_run_that_was_cut_off_is_made_again(tmp_path, monkeypatch):
    lab = Lab(tmp_path)
    lab.place(TINY).mkdir()
    (lab.place(TINY) / "summary.json").write_text('{"status": "running"}')
    commands = pretend(monkeypatch)
    lab.run_all([TINY, TINY.with_overrides(seed=4)])
    assert len(commands) == 2
    assert lab.is_done(TINY)


@pytest.mark.parametrize(("status", "code"), [("failed", 1), ("done", 1), ("interrupted", 0)])
def test_a_run_that_fails_says_how_it_ended(tmp_path, monkeypatch, status, code):
    pretend(monkeypatch, status=status, code=code)
    with pytest.raises(RunFailed, match=r"a run: exit code \d; .*\n?.*the last words"):
        Lab(tmp_path).run(TINY)


def test_runs_that_share_the_machine_get_cores_of_their_own(tmp_path, monkeypatch):
    commands = pretend(monkeypatch)
    original, seen, together = lab_module.subprocess.run, [], Barrier(min(2, lab_module.num_cores()))

    def run(*args, env, **kwargs):
        together.wait(timeout=30)  # as many as fit are under way at once
        seen.append((env["OMP_NUM_THREADS"], frozenset(os.sched_getaffinity(0))))
        return original(*args, env=env, **kwargs)

    monkeypatch.setattr(lab_module.subprocess, "run", run)
    monkeypatch.setattr(lab_module, "_cores", lambda: sorted(os.sched_getaffinity(0))[:2])
    specs = [Spec(f"run {seed}", "quickstart", {"seed": seed}, cores=1) for seed in range(2)]
    assert Lab(tmp_path).run_all([*specs, specs[0]]) == [Lab(tmp_path).place(spec) for spec in (*specs, specs[0])]
    assert len(commands) == 2  # one that is asked for twice is made once
    assert [threads for threads, _ in seen] == ["1", "1"]
    assert {len(cores) for _, cores in seen} == {1}
    assert len({cores for _, cores in seen}) == together.parties
    assert len(os.sched_getaffinity(0)) >= together.parties  # ours are what they were


STAGES = ("sft", "preferences", "reward_model")
LEFT = dict.fromkeys([*(f"{stage}/stage.json" for stage in STAGES), "evaluation.json"], "{}")
LEFT["summary.json"] = '{"status": "done"}'


@pytest.mark.parametrize("missing", LEFT)
def test_a_run_is_done_when_all_its_stages_are(tmp_path, missing):
    """A run of several stages that was cut off between two of them is not; one without RL has no summary."""
    lab, spec = Lab(tmp_path), Spec("stages", "tldr_mini")
    for stage in STAGES:
        (lab.place(spec) / stage).mkdir(parents=True)
    for name in LEFT.keys() - {missing}:
        (lab.place(spec) / name).write_text(LEFT[name])
    assert not lab.is_done(spec)
    (lab.place(spec) / missing).write_text(LEFT[missing])
    assert lab.is_done(spec)


def test_a_measurement_is_made_once_for_its_parameters(tmp_path):
    calls = []

    def double(*, value: int) -> dict[str, int]:
        calls.append(value)
        return {"twice": 2 * value}

    for value in (1, 1, 2):
        assert Lab(tmp_path).measure("doubles", double, value=value) == {"twice": 2 * value}
    assert calls == [1, 2]
    assert Lab(tmp_path).measured_s("doubles", value=1) >= 0


def test_what_was_measured_of_a_run_goes_when_it_is_made_anew(tmp_path, monkeypatch):
    """By a path in its parameters, at any depth; another run's stays."""
    pretend(monkeypatch)
    lab = Lab(tmp_path)
    first, other = lab.run_all([TINY, TINY.with_overrides(seed=4)])

    def measured() -> list[int]:
        asked = [{"run": str(first)}, {"config": {"model": {"path": f"{first}/model"}}}, {"run": str(other)}]
        return [lab.measure("number", lambda **_: next(numbers), **parameters) for parameters in asked]

    numbers = iter(range(100))
    assert measured() == measured() == [0, 1, 2]
    shutil.rmtree(first)
    lab.run_all([TINY, TINY.with_overrides(seed=4)])
    assert measured() == [3, 4, 2]


def test_a_run_that_another_process_makes_is_waited_for_and_not_made_again(tmp_path, monkeypatch):
    commands, told = pretend(monkeypatch), []
    lab = Lab(tmp_path, say=told.append)
    folder, lock = lab.place(TINY), lab_module.fcntl.flock
    (there := tmp_path / "there").mkdir()

    def flock(descriptor: int, how: int) -> None:
        if how & fcntl.LOCK_NB:
            raise BlockingIOError
        Lab(there).run(TINY).rename(folder)  # the other one's end
        lab_module.beside(there / folder.name, "json").rename(lab_module.beside(folder, "json"))
        monkeypatch.setattr(lab_module.fcntl, "flock", lock)

    made = Lab(there).run(TINY)
    made_by_other = len(commands)
    monkeypatch.setattr(lab_module.fcntl, "flock", flock)
    assert lab.run(TINY) == folder
    assert made == there / folder.name
    assert len(commands) == made_by_other
    assert "a run: another process makes it, waiting" in told
    assert (folder / "summary.json").is_file()


def test_a_lock_is_one_processs_at_a_time(tmp_path):
    with lab_module.locked(tmp_path):
        other = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        tried = subprocess.run([sys.executable, "-c", other, tmp_path], capture_output=True, text=True, timeout=60)
        assert "BlockingIOError" in tried.stderr
    assert not subprocess.run([sys.executable, "-c", other, tmp_path], timeout=60).returncode


def test_what_it_cost_is_told_whenever_it_was_made(tmp_path, monkeypatch):
    """Seconds of the whole machine: a run that had one of four cores took a quarter of its own."""
    pretend(monkeypatch)
    monkeypatch.setattr(lab_module, "num_cores", lambda: 4)
    seconds = iter(range(0, 100_000, 240))  # each takes four minutes
    monkeypatch.setattr(lab_module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    specs = [TINY, TINY.with_overrides(seed=4), Spec("small", "quickstart", cores=1)]
    for lab in (Lab(tmp_path), Lab(tmp_path)):
        assert lab.cost() == ""
        lab.run_all(specs)
        lab.run(TINY)  # counts once
        lab.measure("one", lambda: 1)
        assert lab.cost() == "3 runs and 1 measurement, 13 minutes on 4 cores of an abacus, commit `abcdef1`"


def test_a_run_whose_cost_is_lost_is_made_again(tmp_path, monkeypatch):
    commands = pretend(monkeypatch)
    folder = Lab(tmp_path).run(TINY)
    folder.with_name(f"{folder.name}.json").unlink()
    Lab(tmp_path).run(TINY)
    assert len(commands) == 2


def test_names_with_dots_keep_their_files_apart(tmp_path, monkeypatch):
    pretend(monkeypatch)
    specs = [Spec("lr=0.5", "quickstart", {"seed": seed}) for seed in range(2)]
    Lab(tmp_path).run_all(specs)
    assert len(list(tmp_path.glob("*.toml"))) == len(list(tmp_path.glob("*.log"))) == 2


SECTION = Section(
    title="Does it?",
    question="Does it?",
    setup="Once.",
    tables={"What was seen": markdown_table(["run", "step, s"], [("sync", spread([1.0, 2.0]))])},
    figures={"One figure": "<svg/>"},
    verdicts=[Verdict("It does.", "A, Fig. 1", True, "1.5"), Verdict("It does not.", "L", False, "1.5")],
    cost="a minute",
)


def test_a_section_replaces_its_own_and_nothing_else(tmp_path):
    page = tmp_path / "results.md"
    page.write_text("# Results\n\n<!-- one -->\nstale\n<!-- end -->\n\n<!-- two -->\nkept\n<!-- end -->\n")
    for _ in range(2):
        write("one", SECTION, page=page, images=tmp_path / "images")
    text = page.read_text()
    assert text.startswith("# Results\n\n<!-- one -->\n## Does it?\n")
    assert text.endswith("<!-- end -->\n\n<!-- two -->\nkept\n<!-- end -->\n")
    assert "stale" not in text
    assert "| sync | 1.500 (0.500) |" in text
    assert "| It does not. | L | **no** | 1.5 |" in text
    assert (tmp_path / "images" / "one.svg").read_text() == "<svg/>"
    with pytest.raises(ValueError, match="0 places"):
        write("three", SECTION, page=page, images=tmp_path / "images")


def test_every_experiment_is_complete():
    """A module, a README that says what is expected and what it costs, a place on the page."""
    page = PAGE.read_text()
    for name in EXPERIMENTS:
        folder = ROOT / "experiments" / name
        assert (folder / "experiment.py").is_file(), name
        readme = (folder / "README.md").read_text()
        for heading in ("## Question", "## Setup", "## Expected", "## Command and cost"):
            assert heading in readme, (name, heading)
        assert f"python -m experiments {name}" in readme
        assert page.count(f"<!-- {name} -->\n") == 1, name
    assert set(HEADLINE) <= set(EXPERIMENTS)
    assert sum(EXPERIMENTS[name].minutes for name in HEADLINE) < 180


def test_a_section_without_figures_or_verdicts_is_plain():
    bare = Section("Title", "Why?", "So.", {}, {}, [], "nothing", notes=["A note."])
    assert render("bare", bare) == (
        "## Title\n\n**Question.** Why?\n\n**Setup.** So.\n\n- A note.\n\n`python -m experiments bare`; nothing\n"
    )
