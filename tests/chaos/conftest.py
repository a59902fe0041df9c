"""All of this folder that trains belongs to the chaos tier; `make test-chaos` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_run import scratch


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, and open to reward workers."""
    with scratch() as path:
        yield path
