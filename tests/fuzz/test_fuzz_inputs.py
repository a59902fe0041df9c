"""A thousand inputs end well: done, refused on one screen with nothing touched, or failed by name; none hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from covering import with_slow
from fuzz import HERE
from inputs import KINDS, make_input
from safetensors.numpy import save_file
from trial import children, files_of, judged

COUNT, NUM_PROCESSES = 1000, 2
RUN = ("run", "recipe.toml", "--out", "out")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_input_ends_badly(tmp_path: Path) -> None:
    """Seed 1; `make fuzz SEED=7` draws others."""
    parts = []
    for first in range(NUM_PROCESSES):
        arguments = ["--count", str(COUNT - first), "--first", str(first), "--every", str(NUM_PROCESSES)]
        command = [sys.executable, str(HERE / "fuzz.py"), "--seed", "1", *arguments, "--keep", str(tmp_path / "kept")]
        with (tmp_path / f"{first}.txt").open("w") as output:
            parts.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
    codes = [part.wait() for part in parts]
    told = "".join((tmp_path / f"{first}.txt").read_text() for first in range(NUM_PROCESSES))
    assert codes == [0] * NUM_PROCESSES, told


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """What is changed, without the run that makes it."""
    model, run = tmp_path / "shelf" / "model", tmp_path / "shelf" / "run"
    for folder in (model, run / "checkpoints" / "step_1"):
        folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "../run/checkpoints/step_1/manifest.json"):
        (model / name).write_text(json.dumps({"a": [1, {"b": "c"}], "d": 2.5}))
    for name in ("ledger.jsonl", "events.jsonl", "config.toml"):
        (run / name).write_text('{"a": 1}\n' * 3)
    import numpy as np

    save_file({"x": np.zeros(4, np.float32)}, model / "model.safetensors")
    return tmp_path / "shelf"


@pytest.mark.parametrize("num_compared", with_slow([40], [150]))
def test_inputs_follow_from_seed_and_index(shelf: Path, tmp_path: Path, num_compared: int) -> None:
    def made(seed: int, name: str, count: int) -> list[Any]:
        inputs = [make_input(seed, index, shelf, tmp_path / name / str(index)) for index in range(count)]
        return [(one, sorted(files_of(tmp_path / name / str(i)))) for i, one in enumerate(inputs)]

    first, again, other = (made(seed, name, num_compared) for seed, name in ((1, "first"), (1, "again"), (2, "other")))
    assert first == again
    assert first != other
    assert {one.kind for one, _ in first} == set(KINDS)


TRACEBACK = "Traceback (most recent call last):\n  File\nKeyError: 'x'\n"


@pytest.mark.parametrize(
    ("code", "told", "fault"),
    [
        (2, "error: no\n", None),
        (1, "error: failed\n", None),
        (1, TRACEBACK, "a traceback: KeyError: 'x'"),
        (2, "error: " + "x" * 80 * 24, "25 rows on the screen"),
        (2, "", "exit code 2 without a word"),
        (1, "Killed\n", "exit code 1 without the name of an error"),
        (0, "done\n", "no summary.json says 'done'"),
        (-9, "error: no\n", "exit code -9"),
    ],
)
def test_a_bad_end_is_told_from_a_good_one(tmp_path: Path, code: int, told: str, fault: str | None) -> None:
    faults = judged(code, told, tmp_path, RUN, files_of(tmp_path))
    assert faults == [] if fault is None else any(fault in one for one in faults), faults


def test_what_a_refusal_leaves_behind_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("{}")
    before = files_of(tmp_path)
    (tmp_path / "out").mkdir()
    assert judged(2, "error: no\n", tmp_path, RUN, before) == ["bad input, but changed: ['out']"]
    (tmp_path / "out" / "summary.json").write_text('{"status": "done"}')
    assert judged(0, "done\n", tmp_path, RUN, before) == []


def test_children_are_seen() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"x\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"x\n"  # it has become what it is
        assert children()[child.pid].split() == ["cat"]
        child.stdin.close()
    assert child.pid not in children()
