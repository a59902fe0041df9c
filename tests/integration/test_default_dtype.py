"""A default dtype that the caller's torch was given would be that of weights and caches: it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.core.errors import ConfigError


@pytest.fixture
def bfloat16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: slipstream.run("quickstart", out=folder / "run", display=False, overrides={"host": "inline"}),
        lambda folder: slipstream.evaluate_model(folder, recipe="quickstart"),
        lambda folder: slipstream.export(folder, folder / "out"),
        lambda folder: slipstream.serve(folder),
    ],
)
def test_what_computes_here_refuses_another_default_dtype(
    call: Callable[[Path], Any], bfloat16: None, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"got: *torch.bfloat16"):
        call(tmp_path)
    assert list(tmp_path.iterdir()) == []
