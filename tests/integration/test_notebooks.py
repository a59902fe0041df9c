"""The notebooks in notebooks run as they are, from the first cell to the last."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def test_notebooks_are_whole_and_have_run() -> None:
    assert len(NOTEBOOKS) == 4
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)], path.name
        outputs = [output for cell in code for output in cell.outputs]
        assert outputs
        assert not [output for output in outputs if output.output_type == "error"]
        assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|Users)/", path.read_text(encoding="utf-8")), path.name


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")  # those of Jupyter's own libraries are not ours
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    shown = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    NotebookClient(notebook, timeout=800, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    again = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert [bool(outputs) for outputs in again] == [bool(outputs) for outputs in shown]
