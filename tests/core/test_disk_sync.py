"""File systems that sync files and no folders, as shared folders of VirtualBox and /proc."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from slipstream.core.disk import replace_file, sync
from slipstream.core.errors import DiskError

PROC = Path("/proc")


@pytest.mark.skipif(not (PROC / "version").exists(), reason="this system has no such files")
def test_a_folder_that_cannot_be_synced_is_left_to_the_system() -> None:
    sync(PROC)
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        sync(PROC / "version")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_files_are_replaced_where_folders_are_not_synced(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, refused = os.fsync, Path.is_dir

    def fsync_of_some(descriptor: int) -> None:
        if refused(Path(f"/dev/fd/{descriptor}")):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_of_some)
    replace_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    refused = Path.is_file
    with pytest.raises(DiskError, match="could not be written"):
        replace_file(tmp_path / "a", b"newer")
    assert (tmp_path / "a").read_bytes() == b"new"
