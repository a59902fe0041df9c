"""Checkpoints that are either whole or not there: safetensors and JSON in one directory, the manifest last.

    step_<n>/  policy.safetensors     weights by parameter name
               optimizer.safetensors  AdamW's moments, flat
               critic*.safetensors    the same two of a critic, where there is one
               random.safetensors     torch's generators and numpy's key
               state.json             step, updates, python's generator, the caller's extra
               manifest.json          size and CRC-32 of each of them; written last

A directory is filled beside its final name, synced, and renamed; one without a fitting manifest is torn and is passed
over. Nothing is pickled.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.models.flat import FlatParameters
from slipstream.trainer.optim import FlatAdamW

FORMAT = 1
"""Of this module; `sharded_checkpoint.py` writes another."""
MANIFEST = "manifest.json"
PREFIX = "step_"
Trained = tuple[FlatParameters, FlatAdamW]
log = logging.getLogger(__name__)


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
    once the new one is on disk; then all but the `keep` newest beside it are deleted.
    """
    partial = new_partial(path)
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


def new_partial(path: Path) -> Path:
    """An empty directory beside `path`, in which that checkpoint is to be written; interrupted ones are removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in path.parent.glob(f".{PREFIX}*.partial"):
        shutil.rmtree(stale, ignore_errors=True)
    partial = partial_path(path)
    partial.mkdir()
    return partial


def partial_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def publish(partial: Path, path: Path, manifest: Mapping[str, Any], *, keep: int | None) -> None:
    """Make the directory `partial`, whose files are on disk, the checkpoint `path`; then delete all but `keep`."""
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    sync(partial / MANIFEST)
    sync(partial)
    if path.exists():
        replaced = path.with_name(f".{path.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
        partial.rename(path)
        shutil.rmtree(replaced)
    else:
        partial.rename(path)
    sync(path.parent)
    if keep is not None:
        prune_checkpoints(path.parent, keep=keep)


def load_checkpoint(
    path: Path, flat: FlatParameters, optimizer: FlatAdamW, *, critic: Trained | None = None
) -> Restored:
    """Restore policy, optimizer, `critic` and all random generators from `path`, bit for bit.

    CheckpointError, with nothing changed, when the checkpoint is torn or belongs to another model.
    """
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
    state = json.loads((path / "state.json").read_text())
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
    """Raise CheckpointError, saying which file is wrong, unless `path` is whole and of this module's format."""
    manifest = read_manifest(path)
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"checkpoint {path} has an unknown format", got=manifest["format"], allowed=FORMAT)
    for name in manifest["files"]:
        verify_file(path, name, manifest["files"][name])


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of checkpoint `path`: `format`, `step` and `files`. CheckpointError when it is torn."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        _ = manifest["format"], manifest["files"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"checkpoint {path} is torn: its manifest cannot be read", got=error) from error
    return manifest


def verify_file(path: Path, name: str, expected: Mapping[str, int]) -> None:
    """Raise CheckpointError unless file `name` of checkpoint `path` has the size and CRC-32 of its manifest."""
    file = path / name
    if not file.is_file():
        raise CheckpointError(f"checkpoint {path} is torn: {name} is missing")
    found = {"bytes": file.stat().st_size, "crc32": crc32(file)}
    if found != expected:
        raise CheckpointError(f"checkpoint {path} is torn: {name} is damaged", got=found, allowed=expected)


def load_newest_checkpoint(
    root: Path, flat: FlatParameters, optimizer: FlatAdamW, *, critic: Trained | None = None
) -> Restored | None:
    """Restore the newest whole checkpoint under `root`; None without any. Torn ones are logged and passed over."""
    for path in newest_first(root):
        try:
            return load_checkpoint(path, flat, optimizer, critic=critic)
        except SafetensorError as error:
            log.warning("passing over checkpoint %s: %s", path, error)
        except CheckpointError as error:
            if "another model" in error.what:
                raise
            log.warning("falling back to an older checkpoint: %s", error)
    return None


def prune_checkpoints(root: Path, *, keep: int) -> list[Path]:
    """Delete all but the `keep` newest whole checkpoints under `root` (and torn older ones); returns what went."""
    kept, removed = 0, []
    for path in newest_first(root):
        if kept < keep:
            kept += (path / MANIFEST).is_file()
        else:
            shutil.rmtree(path)
            removed.append(path)
    return removed


def newest_first(root: Path) -> list[Path]:
    """Every directory under `root` that is named like a checkpoint, whole or not."""
    if not root.is_dir():
        return []
    numbered = [
        (int(path.name.removeprefix(PREFIX)), path)
        for path in root.iterdir()
        if path.name.startswith(PREFIX) and path.name.removeprefix(PREFIX).isdigit()
    ]
    return [path for _, path in sorted(numbered, reverse=True)]


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
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def sync(path: Path) -> None:
    """Force a file's bytes, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
