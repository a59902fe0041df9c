"""The folders of checkpoints: each is whole or not there, its manifest is written last.

    step_<n>/   manifest.json   size and CRC-32 of every other file (`trainer/checkpoint.py` says which there are)

A folder is filled beside its final name, synced, and renamed; one without a fitting manifest is torn and is passed
over.

    .step_<n>.partial    is being written                             -> deleted by the next save
    .step_<n>.replaced   gives way to a newer step_<n>                -> is step_<n> again, where that is not there
    .step_<n>.gone       is being deleted                             -> deleted by the next save
    .step_<n>.damaged    was passed over by a resume (`settle`)       -> deleted when step <n> or a later one is saved
    step_<n>.rollouts/   what a resume need not sample again (`core/saved.py`)  -> goes with step_<n>
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from slipstream.core.disk import remove_tree, sync
from slipstream.core.errors import CheckpointError, clip
from slipstream.core.files import open_regular, read_json

FORMATS = (FIRST_FORMAT, FORMAT) = (1, 2)
"""Formats that are read, the last one of which is written. One CPU rank wrote the first (`first_format.py`)."""
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 * 1024**2
PREFIX = "step_"


class FileEntry(msgspec.Struct, frozen=True):
    """A file of a checkpoint as its manifest has it."""

    bytes: int
    crc32: int


class Manifest(msgspec.Struct, frozen=True):
    """The format and step of a checkpoint, and its other files by name."""

    format: int
    step: int
    files: dict[str, FileEntry]


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"{PREFIX}{step}"


def new_partial(path: Path) -> Path:
    """Make an empty directory beside `path`, to write that checkpoint in; delete the rests of interrupted saves."""
    path.parent.mkdir(exist_ok=True)  # not the run's folder: if that is gone, it stays so
    sync(path.parent.parent)
    recover(path.parent)
    for kind in ("partial", "gone"):
        for stale in path.parent.glob(f".{PREFIX}*.{kind}"):
            shutil.rmtree(stale, ignore_errors=True)
    partial = partial_path(path)
    partial.mkdir()
    return partial


def partial_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def publish(partial: Path, path: Path, manifest: Mapping[str, Any], *, keep: int | None) -> None:
    """Make the directory `partial`, whose files are on disk, the checkpoint `path`; then delete all but `keep`.

    Between the two renames of a replacement there is no `path`: `recover` finds the old one then.
    """
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    sync(partial / MANIFEST)
    sync(partial)
    replaced = _replaced_path(path)
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    partial.rename(path)
    sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    for damaged in path.parent.glob(f".{PREFIX}*.damaged"):
        if _number(damaged.name.removeprefix(".").removesuffix(".damaged")) <= _number(path.name):
            shutil.rmtree(damaged, ignore_errors=True)
    if keep is not None:
        prune_checkpoints(path.parent, keep=keep)


def _replaced_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def recover(root: Path) -> None:
    """Undo replacements under `root` that were interrupted between their two renames."""
    for replaced in root.glob(f".{PREFIX}*.replaced"):
        path = root / replaced.name.removeprefix(".").removesuffix(".replaced")
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(path)
            sync(root)


Found = tuple[Path | None, list[CheckpointError]]
"""The newest whole checkpoint, and why newer ones are not it."""


def newest_whole(root: Path) -> Found:
    """Find the newest checkpoint under `root` all of whose files are as they were written; every byte of it is read."""
    recover(root)
    damages = []
    for path in newest_first(root):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            damages.append(error)
        else:
            return path, damages
    return None, damages


def settle(root: Path, found: Found | None = None) -> Found:
    """Return `newest_whole`, after renaming newer ones to `.step_<n>.damaged`: they are no part of what follows.

    They are kept for inspection until the run has saved that step again. Under their own names, the deletion of old
    checkpoints would count them, and keep them instead of whole ones. `found` is a result of `newest_whole`, if known.
    """
    newest, damages = newest_whole(root) if found is None else found
    for path in newest_first(root):
        if newest is not None and path == newest:
            break
        target = path.with_name(f".{path.name}.damaged")
        shutil.rmtree(target, ignore_errors=True)
        path.rename(target)
        sync(root)
    return newest, damages


def verify_checkpoint(path: Path) -> None:
    """Raise CheckpointError, saying which file is wrong, unless the checkpoint `path` is whole."""
    for name, entry in read_manifest(path).files.items():
        verify_file(path, name, entry)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of checkpoint `path`. CheckpointError when it is torn, or names what is not beside it."""
    try:
        manifest = msgspec.convert(read_json(path / MANIFEST, MAX_MANIFEST_BYTES), Manifest)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} is torn: its manifest cannot be read", got=clip(error)) from error
    for name in manifest.files:
        is_plain = name.isprintable() and len(name) <= 255 and name not in ("", "..") and name == Path(name).name
        if not is_plain or (path / name).is_symlink():
            what = f"the manifest of checkpoint {path} names what is not its own"
            raise CheckpointError(what, got=clip(name), allowed="files beside it")
    return manifest


def verify_file(path: Path, name: str, expected: FileEntry) -> None:
    """Raise CheckpointError unless file `name` of checkpoint `path` has the size and CRC-32 of its manifest."""
    file = path / name
    if not file.is_file():
        raise CheckpointError(f"checkpoint {path} is torn: {name} is missing")
    size = file.stat().st_size
    found = FileEntry(size, crc32(file) if size == expected.bytes else 0)  # one of another size may be endless
    if found != expected:
        raise CheckpointError(f"checkpoint {path} is torn: {name} is damaged", got=found, allowed=expected)


def prune_checkpoints(root: Path, *, keep: int) -> None:
    """Delete all but the `keep` newest whole checkpoints under `root`, and torn older ones.

    Here a checkpoint counts as whole if its files have the sizes of its manifest: nothing is read again at every save.
    """
    kept = 0
    for path in newest_first(root):
        if kept < keep:
            kept += _looks_whole(path)
        else:
            remove_tree(path)
    left = [path.name for path in newest_first(root)]
    for path in root.glob(f"{PREFIX}*.rollouts"):
        step = path.name.removesuffix(".rollouts")  # `core.saved.rollouts_dir`
        if step not in left and _number(step) < _number(left[0]):  # a newer one's checkpoint is being written
            remove_tree(path)


def _number(name: str) -> int:
    """Return the step in 'step_12'; -1 for other names."""
    number = name.removeprefix(PREFIX)
    return int(number) if name.startswith(PREFIX) and number.isdigit() else -1


def _looks_whole(path: Path) -> bool:
    try:
        files = read_manifest(path).files
        return all((path / name).stat().st_size == entry.bytes for name, entry in files.items())
    except (CheckpointError, OSError):
        return False


def newest_first(root: Path) -> list[Path]:
    """Return every directory under `root` that is named like a checkpoint, whole or not."""
    if not root.is_dir():
        return []
    numbered = [(_number(path.name), path) for path in root.iterdir()]
    return [path for number, path in sorted(numbered, reverse=True) if number >= 0]


def crc32(file: Path) -> int:
    """Return the CRC-32 of a file's content."""
    crc = 0
    with open_regular(file) as stream:
        while block := stream.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc
