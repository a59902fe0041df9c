"""How stages end: Ctrl-C leaves no process and exit code 130, a killed run no child, and `--resume` finishes either."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from audit import audit
from covering import with_slow
from processes import descendants, is_alive

import slipstream
import slipstream.stages.sft as sft
from slipstream.core.errors import SlipstreamError
from slipstream.core.recipes import resolve
from slipstream.trainer import executor

START_DEADLINE_S = 400.0
END_DEADLINE_S = 20.0
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
ENDLESS = 100_000  # steps


def write_recipe(folder: Path, data: Path, **sections: dict[str, Any]) -> Path:
    """SFT and a reward model on files of their own, as a recipe's file."""
    rows = [{"prompt": f"{index}>", "completion": "ab", "chosen": "ab", "rejected": "b"} for index in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables: dict[str, Any] = {
        "recipe": "endings",
        "stages": ["sft", "reward_model"],
        "model": SMALL | {"path": "stage:sft"},
        "prompts": {"dataset": str(data), "num_eval": 4},
        "sft": {"dataset": str(data), "steps": 5, "batch_size": 8},
        "reward_model": {"preferences": str(data), "steps": 5, "batch_size": 8, "normalise": "none"},
        "eval": {"num_prompts": 4},
    }
    for name, changes in sections.items():
        tables[name] = tables[name] | changes
    path = folder / "endings.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


def start(recipe: Path, out: Path) -> subprocess.Popen[str]:
    """`slipstream run` as from a terminal: a process group of its own gets what Ctrl-C sends."""
    command = [sys.executable, "-m", "slipstream.cli", "run", str(recipe), "--out", str(out)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0, cwd=out.parent
    )


def await_file(path: Path, process: subprocess.Popen[str], *, num_lines: int = 3) -> None:
    """Until a stage has written so many lines: it is in the middle of its work."""
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= num_lines:
            return
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no {num_lines} lines in {path} within {START_DEADLINE_S} s")


def await_ends(pids: list[int]) -> None:
    deadline = time.monotonic() + END_DEADLINE_S
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_alive(pid)]


def shorten(run: Path) -> None:
    """What is left to do, made short, and in this process: the interrupted stage would take hours."""
    config = run / "config.toml"
    text = config.read_text()
    assert f"steps = {ENDLESS}" in text
    config.write_text(text.replace(f"steps = {ENDLESS}", "steps = 5").replace('host = "process"', 'host = "inline"'))


@pytest.mark.parametrize(("stage", "to"), with_slow([("sft", "group")], [("reward_model", "run")]))
def test_ctrl_c_ends_a_stage_with_130_and_resume_finishes(stage: str, to: str, tmp_path: Path) -> None:
    """A terminal signals the whole group, `kill` the run alone: the end is the same."""
    recipe = write_recipe(tmp_path, tmp_path / "rows.jsonl", **{stage: {"steps": ENDLESS}})
    run = tmp_path / "run"
    process = start(recipe, run)
    await_file(run / stage / "metrics.jsonl", process)
    children = descendants(process.pid)
    assert children, "a stage has a process of its own"
    (os.killpg if to == "group" else os.kill)(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=END_DEADLINE_S)
    assert process.returncode == 130
    assert f"interrupted in the stage {stage}, which begins again then" in output
    assert f"go on with: slipstream run --resume {run}" in output
    assert "Traceback" not in output
    await_ends(children)
    assert not (run / stage / "stage.json").exists()
    assert not (run / stage / "model").exists()

    shorten(run)
    sft_stamp = (run / "sft" / "stage.json").stat().st_mtime_ns if stage == "reward_model" else None
    assert slipstream.run("quickstart", resume=run, display=False).status == "done"
    for name in ("sft", "reward_model"):
        record = json.loads((run / name / "stage.json").read_text())
        assert record["steps"] == 5
        assert len((run / name / "metrics.jsonl").read_text().splitlines()) == 5, "nothing of the attempt is left"
    if sft_stamp is not None:
        assert (run / "sft" / "stage.json").stat().st_mtime_ns == sft_stamp


@pytest.mark.slow
def test_a_stage_that_does_not_end_by_itself_is_killed(tmp_path: Path) -> None:
    """A stopped process takes no notice of its closed standard input; Ctrl-C does not wait for it for ever."""
    recipe = write_recipe(tmp_path, tmp_path / "rows.jsonl", sft={"steps": ENDLESS})
    process = start(recipe, tmp_path / "run")
    await_file(tmp_path / "run" / "sft" / "metrics.jsonl", process)
    (child,) = descendants(process.pid)
    os.kill(child, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=END_DEADLINE_S)
    assert process.returncode == 130
    await_ends([child])


def interrupted(*_args: Any, **_kwargs: Any) -> None:
    raise KeyboardInterrupt


def test_a_stage_in_this_process_is_interrupted_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, tmp_path / "rows.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(sft, "supervised_updates", interrupted)
        result = slipstream.run(recipe, overrides={"host": "inline"}, out=tmp_path / "run")
    assert result.status == "interrupted"
    assert f"go on with: slipstream run --resume {tmp_path / 'run'}" in " ".join(capsys.readouterr().out.split())
    assert slipstream.run("quickstart", resume=tmp_path / "run", display=False).status == "done"


def test_what_a_resume_changes_is_saved_before_the_next_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of a stage reads config.toml; so does a further resume without the flag."""
    recipe, run = write_recipe(tmp_path, tmp_path / "rows.jsonl"), tmp_path / "run"
    monkeypatch.setattr(sft, "supervised_updates", interrupted)
    slipstream.run(recipe, overrides={"host": "inline"}, out=run, display=False)
    changed = {"trainer.microbatch_tokens": 64, "steps": 7}
    assert slipstream.run(resume=run, overrides=changed, display=False).status == "interrupted"
    saved = resolve(run / "config.toml")
    assert (saved.trainer.microbatch_tokens, saved.steps) == (64, 7)


@pytest.mark.slow
def test_nothing_outlives_a_killed_run(tmp_path: Path) -> None:
    """Neither the stage's process nor the sandboxed workers that score for it, its children."""
    hang = tmp_path / "hang.py"
    hang.write_text("import time\n\n\ndef hang(completions, **_):\n    time.sleep(600)\n")
    tables: dict[str, Any] = {
        "recipe": "endings",
        "stages": ["preferences"],
        "model": SMALL,
        "prompts": {"tasks": [{"name": "spell_backward"}], "num_train": 50, "num_eval": 4},
        "generator": {"num_slots": 8, "max_new_tokens": 4},
        "rewards": {"terms": [{"function": f"{hang}:hang"}], "timeout_s": 600.0},
        "preferences": {"num_prompts": 4, "samples_per_prompt": 2},
        "eval": {"num_prompts": 4},
    }
    recipe = tmp_path / "endings.toml"
    recipe.write_text(tomli_w.dumps(tables))
    process = start(recipe, tmp_path / "run")
    deadline = time.monotonic() + START_DEADLINE_S
    while len(descendants(process.pid)) < 3:  # the stage, the keeper of its workers, a worker
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = descendants(process.pid)
    process.kill()
    process.communicate(timeout=END_DEADLINE_S)
    await_ends(children)


@pytest.mark.slow
def test_a_stage_that_is_killed_is_named(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tmp_path / "rows.jsonl", sft={"steps": ENDLESS})
    process = start(recipe, tmp_path / "run")
    await_file(tmp_path / "run" / "sft" / "metrics.jsonl", process)
    (child,) = descendants(process.pid)
    os.kill(child, signal.SIGKILL)
    output, _ = process.communicate(timeout=END_DEADLINE_S)
    assert process.returncode == 1
    assert "the process of stage 'sft' ended" in output
    assert "SIGKILL" in output


# Resuming RL


def rl_of(tiny: dict[str, Any], **more: Any) -> dict[str, Any]:
    return tiny | {
        "stages": ["sft", "rl"],
        "host": "inline",
        "max_staleness": 0,
        "weight_update": "between_batches",
        "model": tiny["model"] | {"path": "stage:sft"},
        "warm_start": {"steps": 0},
        "sft": {"steps": 60, "batch_size": 32, "num_demonstrations": 300, "optimizer": {"lr": 3e-3}},
        "eval": tiny["eval"] | {"num_prompts": 8},
        **more,
    }


def dies_after(monkeypatch: pytest.MonkeyPatch, num_steps: int) -> Callable[[], None]:
    """As if the machine went down in RL: no checkpoint is written on the way out. Returns what undoes it."""
    train = executor.train_on_batch

    def failing(*args: Any, step: int, **kwargs: Any) -> dict[str, float]:
        if step == num_steps:
            raise MemoryError("the machine goes down")
        return train(*args, step=step, **kwargs)

    monkeypatch.setattr(executor, "train_on_batch", failing)
    return lambda: monkeypatch.setattr(executor, "train_on_batch", train)


@pytest.mark.slow
def test_without_a_checkpoint_rl_begins_anew_from_its_stages(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends where an undisturbed run does, bit for bit; what was recorded is kept, and sft is not repeated."""
    run = tmp_path / "run"
    undo = dies_after(monkeypatch, 3)
    with pytest.raises((SlipstreamError, MemoryError)):
        slipstream.run("quickstart", overrides=rl_of(tiny), out=run, display=False)
    undo()
    assert not list((run / "checkpoints").glob("step_*"))
    lost = (run / "metrics.jsonl").read_text()
    assert lost.count('"reward_mean"') == 3
    stamps = {path: path.stat().st_mtime_ns for path in (run / "sft").rglob("*")}

    result = slipstream.run("quickstart", resume=run)
    assert "there is no checkpoint: RL begins anew, attempt_1" in " ".join(capsys.readouterr().out.split())
    assert (result.status, result.summary["steps"]) == ("done", 5)
    assert {path: path.stat().st_mtime_ns for path in (run / "sft").rglob("*")} == stamps
    assert (run / "attempt_1" / "metrics.jsonl").read_text() == lost
    assert (run / "attempt_1" / "timeline").is_dir()

    whole = slipstream.run("quickstart", overrides=rl_of(tiny), out=tmp_path / "whole", display=False)
    ours, theirs = ((out / "model" / "model.safetensors").read_bytes() for out in (run, whole.out))
    assert ours == theirs
    assert audit(run)["fates"] == audit(whole.out)["fates"]


@pytest.mark.slow
def test_a_run_that_died_after_its_last_step_is_finished(tiny: dict[str, Any], tmp_path: Path) -> None:
    """All steps are in a checkpoint, but neither model nor summary is there: both are made, and nothing is trained."""
    run = tmp_path / "run"
    slipstream.run("quickstart", overrides=rl_of(tiny), out=run, display=False)
    weights = (run / "model" / "model.safetensors").read_bytes()
    accuracy = json.loads((run / "summary.json").read_text())["eval"]["after"]["accuracy"]
    for path in (run / "model").iterdir():
        path.unlink()
    (run / "summary.json").unlink()
    result = slipstream.run("quickstart", resume=run, display=False)
    assert (result.status, result.summary["steps"]) == ("done", 5)
    assert (run / "model" / "model.safetensors").read_bytes() == weights
    assert result.summary["eval"]["after"]["accuracy"] == accuracy
