"""Every instant of a crash, as a folder: what the disk may hold when a program is cut off between two operations.

While a `FragileDisk` watches a folder, each operation that changes what is on the disk is preceded by pictures of the
folder, one for each way a crash can go:

    killed     the program died, the system lives: all that was done is there, and a part of what was being written
    renamed    the power failed: names are as they were last, but of files only what was synced
    lost       the power failed: of files and of names only what was synced

Files that were created and never synced are empty in `renamed`, and not there in `lost`. A folder's names count as
synced when the folder was; a file's bytes when the file was. That is the worst that POSIX allows short of mixtures.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slipstream.core import jsonl
from slipstream.trainer import checkpoint_boxes

KINDS = ("killed", "renamed", "lost")
CHANGING = ("rename", "replace", "mkdir", "rmdir", "unlink", "remove", "truncate", "ftruncate")


class FragileDisk:
    """Watches `root`; its pictures are folders in `album`. Operations from number `fails_from` on raise `refused`."""

    def __init__(
        self, root: Path, album: Path | None = None, *, fails_from: int = 0, refused: OSError | None = None
    ) -> None:
        self.root, self.album = root.resolve(), album
        self.fails_from, self.refused = fails_from, refused
        self.count = 0
        self.names: list[str] = []
        self._bytes: dict[int, bytes] = {}  # inode -> what was synced of the file
        self._entries: dict[int, dict[str, tuple[int, bool]]] = {}  # inode of a folder -> name -> (inode, is a folder)
        self._held: list[int] = []  # descriptors, so that no inode is given out twice
        self._is_busy = False

    def open(self) -> None:
        """What is there now is on the disk."""
        for folder, _, files in os.walk(self.root):
            self._sync_folder(Path(folder))
            for file in files:
                self._sync_file(Path(folder, file))

    # What is on the disk for certain

    def _sync_file(self, path: Path) -> None:
        self._hold(path)
        self._bytes[path.stat().st_ino] = path.read_bytes()

    def _sync_folder(self, path: Path) -> None:
        self._hold(path)
        entries = {entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(path)}
        self._entries[path.stat().st_ino] = entries

    def _hold(self, path: Path) -> None:
        self._held.append(os.open(path, os.O_RDONLY))

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())

    def synced(self, path: Path) -> None:
        if path.is_relative_to(self.root):
            self._sync_folder(path) if path.is_dir() else self._sync_file(path)

    # Pictures

    def before(self, name: str, path: str | os.PathLike[str] | int, torn: Callable[[Path], None] | None = None) -> None:
        """An operation `name` on `path` is about to happen."""
        if self._is_busy or isinstance(path, int) or not Path(os.path.abspath(path)).is_relative_to(self.root):
            return
        self._is_busy = True
        try:
            self.count += 1
            self.names.append(f"{name} {Path(path).name}")
            if self.refused is not None and self.count >= self.fails_from:
                raise OSError(*self.refused.args)  # a new one, as the system does
            if self.album is not None:
                self._take(self.count, torn)
        finally:
            self._is_busy = False

    def _take(self, number: int, torn: Callable[[Path], None] | None) -> None:
        assert self.album is not None
        killed = self.album / f"{number:04}-killed"
        shutil.copytree(self.root, killed)
        if torn is not None:
            torn(killed)
        self._renamed(self.root, self.album / f"{number:04}-renamed")
        self._lost(self.root.stat().st_ino, self.album / f"{number:04}-lost")

    def _renamed(self, folder: Path, target: Path) -> None:
        target.mkdir()
        for entry in os.scandir(folder):
            if entry.is_dir():
                self._renamed(Path(entry.path), target / entry.name)
            else:
                (target / entry.name).write_bytes(self._bytes.get(entry.inode(), b""))

    def _lost(self, inode: int, target: Path) -> None:
        target.mkdir()
        for name, (child, is_folder) in self._entries.get(inode, {}).items():
            if is_folder:
                self._lost(child, target / name)
            else:
                (target / name).write_bytes(self._bytes.get(child, b""))

    def pictures(self) -> Iterator[tuple[str, str, Path]]:
        assert self.album is not None
        for number, name in enumerate(self.names, start=1):
            for kind in KINDS:
                yield f"{number}: {name}", kind, self.album / f"{number:04}-{kind}"


@contextmanager
def watching(disk: FragileDisk) -> Iterator[FragileDisk]:
    """Operations of this process on the disk's folder go by it first."""
    disk.open()
    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGING:
            real = getattr(os, name)

            def changing(path: Any, *args: Any, _name: str = name, _real: Any = real, **more: Any) -> Any:
                folder = more.get("dir_fd")
                where = path if folder is None else Path(os.readlink(f"/proc/self/fd/{folder}"), os.fspath(path))
                disk.before(_name, where)
                return _real(path, *args, **more)

            patch.setattr(os, name, changing)
        real_fsync, real_open, real_save = os.fsync, io.open, checkpoint_boxes.write_safetensors

        def fsync(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            disk.before("fsync", path)
            real_fsync(descriptor)
            disk.synced(path)

        def opening(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
            if set(mode) & set("wax"):
                disk.before("open", file)
            return real_open(file, mode, *args, **more)

        def save(path: Path, *args: Any, **more: Any) -> Any:
            def half(picture: Path) -> None:
                (picture / Path(path).relative_to(disk.root)).write_bytes(b"half of a file")

            disk.before("save", path, half)
            return real_save(path, *args, **more)

        real_append = jsonl.JsonlWriter._append

        def append(self: jsonl.JsonlWriter, data: bytes) -> None:
            def half(picture: Path) -> None:
                with real_open(picture / self._path.resolve().relative_to(disk.root), "ab") as out:
                    out.write(data[: len(data) // 2])

            with jsonl.disk_errors(self._path):
                disk.before("append", self._path, half)
            real_append(self, data)

        patch.setattr(os, "fsync", fsync)
        patch.setattr(io, "open", opening)
        patch.setattr(builtins, "open", opening)
        patch.setattr(checkpoint_boxes, "write_safetensors", save)
        patch.setattr(jsonl.JsonlWriter, "_append", append)
        try:
            yield disk
        finally:
            disk.close()
