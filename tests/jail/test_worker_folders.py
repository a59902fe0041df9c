"""The folders in which a worker looks for modules."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec
import pytest

from slipstream.core.errors import ConfigError
from slipstream.jail.protocol import WorkerReady
from slipstream.jail.sandbox import JailedWorker, Permissions, WorkerKind


def test_a_working_folder_whose_path_is_not_utf8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a path is in no message to a worker. Nothing was started or left then."""
    working, temporary = tmp_path / os.fsdecode(b"caf\xe9"), tmp_path / "tmp"
    working.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(working)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    kind = WorkerKind("no_such_module", "reward", msgspec.msgpack.Decoder(WorkerReady), max_bytes=1 << 10)
    with pytest.raises(ConfigError, match="not UTF-8") as refused:
        JailedWorker(kind, WorkerReady(isolation=[]), Permissions())
    assert "caf\\udce9" in str(refused.value)
    assert list(temporary.iterdir()) == []
