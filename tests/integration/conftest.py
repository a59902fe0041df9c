"""Runs small enough for every test run; the recipe is the quickstart's."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from accounted import check_accounting
from forked_text import FORKS
from processes import descendants
from tiny_tables import tiny_tables

import slipstream
from slipstream.controller.nursery import NURSERY


@pytest.fixture(autouse=True, scope="module")
def _one_import_for_all_runs() -> None:
    """Fork the processes of all runs that tests start by `slipstream.run` from one that has imported once.

    It stays as long as pytest, unless tests of another file end it.
    """
    NURSERY.begin()
    FORKS.begin()


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """What a test has started ends with it: a run that outlived a failed test would slow down all that follow."""
    before = set(descendants(os.getpid()))
    yield
    left = set(descendants(os.getpid())) - before
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes {left} outlived the test"


@pytest.fixture
def tiny() -> dict[str, Any]:
    return tiny_tables()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a finished run, warm-started far enough for some of its 50 held-out answers to be right.

    The workers of one session train it once, and each has its copy.
    """
    out = tmp_path_factory.mktemp("trained") / "run"
    if "PYTEST_XDIST_WORKER" not in os.environ:
        train(out)
        return out
    first = tmp_path_factory.getbasetemp().parent / "trained_first"
    with first.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not first.exists():
            train(out)
            Path(shutil.copytree(out, first.with_suffix(".copy"))).rename(first)  # whole, or not at all
            return out
    return Path(shutil.copytree(first, out))


def train(out: Path) -> None:
    overrides = {
        "steps": 2,
        "host": "inline",
        "groups_per_step": 4,
        "completions_per_group": 4,
        "model": {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2},
        "prompts": {
            "num_train": 300,
            "num_eval": 50,
            "tasks": [{"name": "spell_backward", "params": {"min_word_len": 3, "max_word_len": 3}}],
        },
        "generator": {"num_slots": 16},
        "warm_start": {
            "steps": 100,
            "batch_size": 16,
            "num_demonstrations": 300,
            "demonstrations": [{"template": "{answer}"}],
            "optimizer": {"lr": 3e-3},
        },
        "eval": {"every": 0, "num_prompts": 50, "num_slots": 16},
    }
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # one thread: two that spin on a busy machine take ten times as long
    try:
        slipstream.run("quickstart", overrides=overrides, out=out, display=False)
    finally:
        os.sched_setaffinity(0, cores)
    check_accounting(out)
