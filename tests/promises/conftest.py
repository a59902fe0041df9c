"""A store for runs and models that commands are given, and a copy of the checkout for each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from workplace import copy_checkout


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for what `furnish` makes once for all commands."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the checkout; it is removed, as there are a hundred."""
    folder = tmp_path_factory.mktemp("checkout")
    copy_checkout(folder)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
