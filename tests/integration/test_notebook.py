"""A notebook: the reward is a lambda of a cell, and the executors are processes."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

DEFINE = """
import slipstream

reward = lambda completions, **_: [text.count("a") / 4 for text in completions]
prompts = [{"prompt": f"{i}:"} for i in range(40)]
config = {
    "steps": 2,
    "groups_per_step": 2,
    "completions_per_group": 4,
    "model": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1},
    "generator": {"num_slots": 8, "max_new_tokens": 4},
    "eval": {"num_slots": 8},
}
result = slipstream.run(config, reward=reward, prompts=prompts, out="run")
"""
CHECK = """
assert result.summary["status"] == "done", result.summary
assert result.summary["steps"] == 2
result.status
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("default")  # those of Jupyter's own libraries are not ours
def test_a_run_from_a_notebook_cell(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in (DEFINE, CHECK)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    [output] = notebook.cells[1].outputs
    assert output["data"]["text/plain"] == "'done'"
    assert (tmp_path / "run" / "model" / "config.json").is_file()
