"""What a run does to the process that calls it, and takes from it: folders, standard output, torch's threads."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import slipstream
from slipstream.stages.run_folder import folder_of, new_run_dir


def test_a_notebook_may_have_a_tee_other_threads_and_another_folder_then(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=said.append, flush=lambda: None))
    monkeypatch.chdir(tmp_path)
    few = {"host": "inline", "steps": 1, "warm_start": {"steps": 1}, "eval": {"num_prompts": 4}}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        result = slipstream.run("quickstart", overrides=tiny | few, out="run")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert "step 1/1" in "".join(said)
    resumed = slipstream.run(resume="run", overrides={"steps": 2}, display=False)
    (tmp_path / "other").mkdir()
    os.chdir("other")
    assert result.out == resumed.out == tmp_path / "run"


def test_many_runs_may_begin_in_one_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    count, named, begun = 5, threading.Barrier(5), threading.Barrier(5)
    first = new_run_dir("quickstart", None)

    def begin(_: int) -> Path:
        named.wait(10)
        with folder_of(first, is_named=False) as folder:
            begun.wait(10)
            return folder

    with ThreadPoolExecutor(count) as threads:
        folders = list(threads.map(begin, range(count)))
    assert len(set(folders)) == count
    assert all(folder.name.startswith("quickstart-") for folder in folders)
