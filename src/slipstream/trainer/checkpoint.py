"""Checkpoints that are either whole or not there: safetensors and JSON in one directory, the manifest last.

    step_<n>/  policy.safetensors     weights by parameter name
               optimizer.safetensors  AdamW's moments, flat
               critic*.safetensors    the same two of a critic, where there is one
               random.safetensors     torch's generators and numpy's key
               state.json             step, updates, python's generator, the caller's extra
               manifest.json          size and CRC-32 of each of them; written last

A directory is filled beside its final name, synced, and renamed; one without a fitting manifest is torn and is passed
over. Nothing is pickled.

    .step_<n>.partial    is being written                             -> deleted by the next save
    .step_<n>.replaced   gives way to a newer step_<n>                -> is step_<n> again, where that is not there
    .step_<n>.gone       is being deleted                             -> deleted by the next save
    .step_<n>.damaged    was passed over by a resume (`settle`)       -> deleted when step <n> or a later one is saved
    step_<n>.rollouts/   what a resume need not sample again (`core/saved.py`)  -> goes with step_<n>
"""

from __future__ import annotations

import json
import random
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.core.disk import disk_errors, remove_tree, sync
from slipstream.core.errors import CheckpointError, clip
from slipstream.core.files import open_regular, read_json
from slipstream.models.flat import FlatParameters
from slipstream.models.safetensors_file import tensor_headers
from slipstream.trainer.optim import FlatAdamW

FORMAT = 1
"""Of this module; `sharded_checkpoint.py` writes another."""
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 * 1024**2
PREFIX = "step_"
Trained = tuple[FlatParameters, FlatAdamW]


class _File(msgspec.Struct, frozen=True):
    bytes: int
    crc32: int


class _Manifest(msgspec.Struct, frozen=True):
    format: int
    step: int
    files: dict[str, _File]


@dataclass(frozen=True)
class Restored:
    """What a loaded checkpoint says of itself: `step` steps are in its weights, which are policy version `step`.

    `num_updates` have been made of the policy, `updates` of everything trained, by name ("policy", "critic").
    """

    path: Path
    step: int
    num_updates: int
    extra: dict[str, Any] = field(default_factory=dict)
    updates: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole and on disk."""

    path: Path
    step: int


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"{PREFIX}{step}"


def save_checkpoint(
    path: Path,
    flat: FlatParameters,
    optimizer: FlatAdamW,
    *,
    step: int,
    keep: int | None = None,
    extra: Mapping[str, Any] | None = None,
    critic: Trained | None = None,
) -> None:
    """Write policy, optimizer and random state after `step` steps under `path`; it appears there whole or not at all.

    `critic` is what else is trained, `extra` (JSON) travels along. An existing checkpoint at `path` is replaced only
    once the new one is on disk; then all but the `keep` newest beside it are deleted. DiskError where the disk refuses:
    what was there before is still there, and nothing of the new one.
    """
    with writing(path) as partial:
        tensors, python_state = random_state()
        for names, (trained, adam) in _files((flat, optimizer), critic):
            save_file({name: view.detach() for name, view in trained.named_views().items()}, partial / names[0])
            save_file(adam.state_dict(), partial / names[1])
        save_file(tensors, partial / "random.safetensors")
        state = {"step": step, "num_updates": optimizer.num_updates, "random": python_state, "extra": dict(extra or {})}
        (partial / "state.json").write_text(json.dumps(state))
        files = {file.name: {"bytes": file.stat().st_size, "crc32": crc32(file)} for file in sorted(partial.iterdir())}
        for name in files:
            sync(partial / name)
        publish(partial, path, {"format": FORMAT, "step": step, "files": files}, keep=keep)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """`new_partial` of `path`, to be filled and published; removed if that fails, with a DiskError for what the disk
    refused."""
    partial = partial_path(path)
    try:
        with disk_errors(path):
            yield new_partial(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def new_partial(path: Path) -> Path:
    """An empty directory beside `path`, in which that checkpoint is to be written; rests of interrupted ones go."""
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
    """The newest checkpoint under `root` all of whose files are as they were written, and why newer ones are not it.

    Every byte of it is read. Those of one rank and of several are told apart by whoever loads them.
    """
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
    """`newest_whole`; newer ones are renamed to `.step_<n>.damaged`: nobody shall take them for part of what follows.

    They are kept until the run has saved that step again, for whoever wants to see what happened. Else the deletion of
    old checkpoints would count them, and keep them instead of whole ones. `found` is what `newest_whole` has just said,
    where it was asked: it reads every byte.
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


def load_checkpoint(
    path: Path, flat: FlatParameters, optimizer: FlatAdamW, *, critic: Trained | None = None
) -> Restored:
    """Restore policy, optimizer, `critic` and all random generators from `path`, bit for bit.

    CheckpointError, with nothing changed, when the checkpoint is torn or belongs to another model.
    """
    if (found := read_manifest(path)["format"]) != FORMAT:
        raise CheckpointError(f"checkpoint {path} has an unknown format", got=found, allowed=FORMAT)
    verify_checkpoint(path)
    stored = []
    for names, (trained, adam) in _files((flat, optimizer), critic):
        if not (path / names[0]).is_file():
            raise CheckpointError(f"checkpoint {path} belongs to another model", got=f"no {names[0]}")
        weights = load_file(path / names[0])
        _check_shapes(path, trained, weights)
        stored.append((trained, adam, weights, load_file(path / names[1])))
    for trained, adam, weights, moments in stored:
        adam.load_state_dict(moments)
        with torch.no_grad():
            for name, view in trained.named_views().items():
                view.copy_(weights[name])
    state = read_json(path / "state.json")
    set_random_state(load_file(path / "random.safetensors"), state["random"])
    updates = {name: adam.num_updates for name, (_, adam, _, _) in zip(("policy", "critic"), stored, strict=False)}
    return Restored(path, state["step"], state["num_updates"], state["extra"], updates)


def _files(policy: Trained, critic: Trained | None) -> list[tuple[tuple[str, str], Trained]]:
    """What is trained, with the files of its weights and of its optimizer."""
    parts = [(("policy.safetensors", "optimizer.safetensors"), policy)]
    if critic is not None:
        parts.append((("critic.safetensors", "critic_optimizer.safetensors"), critic))
    return parts


def _check_shapes(path: Path, flat: FlatParameters, weights: Mapping[str, Tensor]) -> None:
    shapes = {name: tuple(view.shape) for name, view in flat.named_views().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if shapes != found:
        differing = sorted(n for n in shapes.keys() | found.keys() if shapes.get(n) != found.get(n))
        raise CheckpointError(
            f"checkpoint {path} belongs to another model",
            got=", ".join(f"{name} {found.get(name)}" for name in differing[:4]),
            allowed=", ".join(f"{name} {shapes.get(name)}" for name in differing[:4]),
        )


def verify_checkpoint(path: Path) -> None:
    """Raise CheckpointError, saying which file is wrong, unless `path` is whole: of one rank or of several."""
    files = read_manifest(path)["files"]
    for name in files:
        verify_file(path, name, files[name])


def policy_shapes(path: Path) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the policy's parameters in the checkpoint `path`, from its header; None where ranks wrote it."""
    file = path / "policy.safetensors"
    if read_manifest(path)["format"] != FORMAT:
        return None
    return {name: tuple(entry.shape) for name, entry in tensor_headers(file).items()}


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of checkpoint `path`: `format`, `step` and `files`. CheckpointError when it is torn."""
    try:
        manifest: dict[str, Any] = read_json(path / MANIFEST, MAX_MANIFEST_BYTES)
        _, names = manifest["format"], list(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path} is torn: its manifest cannot be read", got=clip(error)) from error
    if foreign := [
        name
        for name in names
        if not name.isprintable()
        or len(name) > 255
        or name in ("", "..")
        or name != Path(name).name
        or (path / name).is_symlink()
    ]:
        raise CheckpointError(
            f"the manifest of checkpoint {path} names what is not its own",
            got=clip(foreign[0]),
            allowed="files beside it",
        )
    try:
        msgspec.convert(manifest, _Manifest)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"checkpoint {path} is torn: its manifest is no manifest", got=clip(error)) from error
    return manifest


def verify_file(path: Path, name: str, expected: Mapping[str, int]) -> None:
    """Raise CheckpointError unless file `name` of checkpoint `path` has the size and CRC-32 of its manifest."""
    file = path / name
    if not file.is_file():
        raise CheckpointError(f"checkpoint {path} is torn: {name} is missing")
    found = {"bytes": file.stat().st_size}
    if found["bytes"] == expected["bytes"]:  # one of another size may be endless
        found["crc32"] = crc32(file)
    if found != expected:
        raise CheckpointError(f"checkpoint {path} is torn: {name} is damaged", got=found, allowed=expected)


def prune_checkpoints(root: Path, *, keep: int) -> list[Path]:
    """Delete all but the `keep` newest whole checkpoints under `root` (and torn older ones); returns what went.

    Whole are here those whose files have the sizes of their manifests: nothing is read again after every save.
    """
    kept, removed = 0, []
    for path in newest_first(root):
        if kept < keep:
            kept += _looks_whole(path)
        else:
            remove_tree(path)
            removed.append(path)
    left = [path.name for path in newest_first(root)]
    for path in root.glob(f"{PREFIX}*.rollouts"):
        step = path.name.removesuffix(".rollouts")  # `core.saved.rollouts_dir`
        if step not in left and _number(step) < _number(left[0]):  # a newer one's checkpoint is being written
            remove_tree(path)
    return removed


def _number(name: str) -> int:
    """The step in 'step_12'; -1 for other names."""
    number = name.removeprefix(PREFIX)
    return int(number) if name.startswith(PREFIX) and number.isdigit() else -1


def _looks_whole(path: Path) -> bool:
    try:
        files = read_manifest(path)["files"]
        return all((path / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except (CheckpointError, OSError):
        return False


def newest_first(root: Path) -> list[Path]:
    """Every directory under `root` that is named like a checkpoint, whole or not."""
    if not root.is_dir():
        return []
    numbered = [(_number(path.name), path) for path in root.iterdir()]
    return [path for number, path in sorted(numbered, reverse=True) if number >= 0]


def random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Of torch's, numpy's and python's generators in this process: tensors, and the rest as JSON."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda_{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    kind, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    tensors["numpy"] = torch.from_numpy(np.asarray(key).astype(np.int64))
    version, internal, next_gauss = random.getstate()
    return tensors, {
        "numpy": [str(kind), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), next_gauss],
    }


def set_random_state(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Inverse of `random_state`."""
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda_{index}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda_{index}"], index)
    kind, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, next_gauss = state["python"]
    random.setstate((version, tuple(internal), next_gauss))


def crc32(file: Path) -> int:
    """Of a file's content."""
    crc = 0
    with open_regular(file) as stream:
        while block := stream.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc
