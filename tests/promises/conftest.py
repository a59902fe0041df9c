"""One store of a finished run, an interrupted one and a model for all commands."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from workplace import copy_checkout, make_interrupted_run, make_model, make_run


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `RUN`, `CUT` and `MODEL`."""
    folder = tmp_path_factory.mktemp("store")
    make_model(folder / "MODEL")
    make_run(folder, "RUN")
    make_interrupted_run(folder, "CUT")
    return folder


@pytest.fixture
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the checkout; it is removed, as there are a hundred."""
    folder = tmp_path_factory.mktemp("checkout")
    copy_checkout(folder)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
