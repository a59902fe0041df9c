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
MANIFEST = "manifest.json"
PREFIX = "step_"
Trained = tuple[FlatParameters, FlatAdamW]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """What a loaded checkpoint says of itself: `step` steps are in its weights, which are policy version `step`."""

    path: Path
    step: int
    num_updates: int
    extra: dict[str, Any] = field(default_factory=dict)


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
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    tensors, python_state = _random_state()
    for names, (trained, adam) in _files((flat, optimizer), critic):
        save_file({name: view.detach() for name, view in trained.named_views().items()}, partial / names[0])
        save_file(adam.state_dict(), partial / names[1])
    save_file(tensors, partial / "random.safetensors")
    state = {"step": step, "num_updates": optimizer.num_updates, "random": python_state, "extra": dict(extra or {})}
    (partial / "state.json").write_text(json.dumps(state))
    files = {file.name: {"bytes": file.stat().st_size, "crc32": _crc32(file)} for file in sorted(partial.iterdir())}
    for name in files:
        _sync(partial / name)
    (partial / MANIFEST).write_text(json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1))
    _sync(partial / MANIFEST)
    _sync(partial)
    if path.exists():
        replaced = path.with_name(f".{path.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
        partial.rename(path)
        shutil.rmtree(replaced)
    else:
        partial.rename(path)
    _sync(path.parent)
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
    _set_random_state(load_file(path / "random.safetensors"), state["random"])
    return Restored(path=path, step=state["step"], num_updates=state["num_updates"], extra=state["extra"])


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
    """Raise CheckpointError, saying which file is wrong, unless `path` is whole."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest["files"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"checkpoint {path} is torn: its manifest cannot be read", got=error) from error
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"checkpoint {path} has an unknown format", got=manifest["format"], allowed=FORMAT)
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path} is torn: {name} is missing")
        found = {"bytes": file.stat().st_size, "crc32": _crc32(file)}
        if found != expected:
            raise CheckpointError(f"checkpoint {path} is torn: {name} is damaged", got=found, allowed=expected)


def load_newest_checkpoint(
    root: Path, flat: FlatParameters, optimizer: FlatAdamW, *, critic: Trained | None = None
) -> Restored | None:
    """Restore the newest whole checkpoint under `root`; None without any. Torn ones are logged and passed over."""
    for path in _newest_first(root):
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
    for path in _newest_first(root):
        if kept < keep:
            kept += (path / MANIFEST).is_file()
        else:
            shutil.rmtree(path)
            removed.append(path)
    return removed


def _newest_first(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    numbered = [
        (int(path.name.removeprefix(PREFIX)), path)
        for path in root.iterdir()
        if path.name.startswith(PREFIX) and path.name.removeprefix(PREFIX).isdigit()
    ]
    return [path for _, path in sorted(numbered, reverse=True)]


def _random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
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


def _set_random_state(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda_{index}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda_{index}"], index)
    kind, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, next_gauss = state["python"]
    random.setstate((version, tuple(internal), next_gauss))


def _crc32(file: Path) -> int:
    crc = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def _sync(path: Path) -> None:
    """Force a file's bytes, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
