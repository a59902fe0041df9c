"""Messages saved beside a checkpoint: rollouts and completions that were on their way, for a resume to continue.

    checkpoints/step_<n>.rollouts/<executor>.safetensors
        trainer, trainer@<r>   rollouts that waited for their step, each rank's own
        generator-<i>          the tokens that its slots had sampled of completions (`Partial`), and episodes that were
                               over and had no verdict yet (`PartialEpisode`)
        environments           open episodes whose environments can be restored (`PartialEpisode`)

This is an optimisation: groups that a checkpoint owes and that are not found here are sampled again from their
ordinals. So each process writes its file independently, whole or not at all, and no other process waits for it. A file
that is missing, damaged or of another cut is ignored. Arrays are the file's tensors; the rest is JSON in its header, in
which a number stands for each array. Nothing is pickled.
"""

from __future__ import annotations

import itertools
import logging
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from slipstream.core import wire
from slipstream.core.background import start_thread
from slipstream.core.channel_spec import MAX_MESSAGE_BYTES
from slipstream.core.disk import disk_errors, replace_file
from slipstream.core.errors import CheckpointError, DiskError
from slipstream.core.types import Message, Rollout
from slipstream.core.unfinished_messages import PartialEpisode, Unfinished

M = TypeVar("M", bound=Message)
SUFFIX = ".safetensors"
LAST_WRITE_S = 10.0
GROUP_BYTES = MAX_MESSAGE_BYTES // 2  # of a group's unfinished work in one message, beside its prompt
log = logging.getLogger(__name__)


class Saver:
    """Writes what is to be saved beside the thread that works; while it writes, the next is left out.

    What it writes is never needed, so a disk that refuses is logged here, and told by whoever needs it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def save(self, path: Path, messages: Sequence[Message], *, cut: str) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = start_thread(_write, args=(path, messages, cut), name="save-partials")

    def close(self) -> None:
        """Wait for what is being written, ten seconds at most: a daemon thread ends with its process."""
        if self._thread is not None:
            self._thread.join(LAST_WRITE_S)


def _write(path: Path, messages: Sequence[Message], cut: str) -> None:
    try:
        save_messages(path, messages, cut=cut)
    except DiskError as error:
        log.warning("%s", error)


def prompt_crc32(tokens: np.ndarray) -> int:
    """Return the number by which a prompt is known again."""
    return zlib.crc32(tokens.astype(np.int32).tobytes())


def rollouts_dir(checkpoint: Path) -> Path:
    """Return the folder for the messages that were on their way at `checkpoint`."""
    return checkpoint.with_name(f"{checkpoint.name}.rollouts")


def save_messages(path: Path, messages: Sequence[Message], *, cut: str) -> None:
    """Write `messages`, if any, to `path`, whole or not at all; `cut` is the cut that they belong to. DiskError."""
    if not messages:
        return
    arrays: list[np.ndarray] = []
    numbers: dict[int, int] = {}  # by identity: the rollouts of a group have one prompt

    def number_of(value: Any) -> int:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} cannot be saved")
        if id(value) not in numbers:
            numbers[id(value)] = len(arrays)
            arrays.append(value)
        return numbers[id(value)]

    text = msgspec.json.Encoder(enc_hook=number_of).encode(list(messages)).decode()
    tensors = {str(number): np.ascontiguousarray(array) for number, array in enumerate(arrays)}
    metadata = {"cut": cut, "messages": text, "crc32": str(_crc32(text, tensors.values()))}
    with disk_errors(path):
        for folder in (path.parent.parent, path.parent):  # not the run's folder: if that is gone, it stays so
            folder.mkdir(exist_ok=True)
    replace_file(path, save(tensors, metadata))


def load_messages(path: Path, kind: type[M], *, cut: str) -> list[M]:
    """Return the messages in `path`, all of `kind`. CheckpointError for a file that is damaged.

    One of another cut has none: an earlier attempt left it, perhaps a process that there is no longer.
    """
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata()
            arrays = [file.get_tensor(str(number)) for number in range(len(file.keys()))]
        if metadata["cut"] != cut:
            return []
        if metadata["crc32"] != str(_crc32(metadata["messages"], arrays)):
            raise ValueError("it is damaged")

        def array_of(wanted: type, value: Any) -> np.ndarray:
            if wanted is not np.ndarray or not isinstance(value, int) or not 0 <= value < len(arrays):
                raise ValueError(f"{value} stands for no array")
            found: np.ndarray = arrays[value]
            return found

        messages: list[M] = msgspec.json.Decoder(list[kind], dec_hook=array_of).decode(metadata["messages"])  # type: ignore[valid-type]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path.name} beside {path.parent.stem} cannot be used", got=error) from error
    return messages


def saved_rollouts(
    checkpoint: Path, *, cut: str, owed: Sequence[int], step: int, notes: list[str]
) -> Iterator[Rollout]:
    """Yield the rollouts that the trainer's ranks saved beside `checkpoint`, however many ranks there were.

    Only those of groups that the cut owes, and whose tokens are of versions up to `step`: later versions belong to an
    abandoned continuation of the run. A line about each unusable file is added to `notes`.
    """
    wanted = set(owed)
    for rollout in _saved(checkpoint, "trainer", Rollout, cut, notes):
        if rollout.ordinal in wanted and rollout.completion.max_version <= step:
            yield rollout


def saved_partials(
    checkpoint: Path, *, cut: str, owed: Sequence[int], step: int, notes: list[str]
) -> dict[int, tuple[Unfinished, ...]]:
    """Return the completions that generators and environments saved beside `checkpoint`, by ordinal.

    Else as `saved_rollouts`. What a generator saved of an episode is newer: there it is over.
    """
    wanted = set(owed)
    found: dict[int, dict[int, Unfinished]] = {}
    kinds: Any = Unfinished
    for partial in (
        *_saved(checkpoint, "environments", PartialEpisode, cut, notes),
        *_saved(checkpoint, "generator", kinds, cut, notes),
    ):
        if partial.ordinal in wanted and partial.versions and max(partial.versions) <= step:
            found.setdefault(partial.ordinal, {})[partial.sample] = partial
    fitting = {ordinal: those_that_fit(list(partials.values())) for ordinal, partials in found.items()}
    if num_left_out := sum(map(len, found.values())) - sum(map(len, fitting.values())):
        notes.append(f"{num_left_out} completions are sampled again: a message holds no more of their groups")
    return fitting


def those_that_fit(partials: Sequence[Unfinished]) -> tuple[Unfinished, ...]:
    """Return the first of a group's `partials` that one message holds: routes and kept sets can be hundreds of MB."""
    sizes = itertools.accumulate(len(wire.encode(partial)) for partial in partials)
    return tuple(partial for partial, size in zip(partials, sizes, strict=True) if size <= GROUP_BYTES)


def _saved(checkpoint: Path, node: str, kind: type[M], cut: str, notes: list[str]) -> Iterator[M]:
    for path in sorted(rollouts_dir(checkpoint).glob(f"{node}*{SUFFIX}")):
        try:
            messages = load_messages(path, kind, cut=cut)
        except CheckpointError as error:
            notes.append(f"{error.what} ({error.got}): its groups are sampled again")
        else:
            yield from messages


def _crc32(text: str, arrays: Any) -> int:
    crc = zlib.crc32(text.encode())
    for array in arrays:
        crc = zlib.crc32(repr((array.dtype, array.shape)).encode(), crc)
        crc = zlib.crc32(np.ascontiguousarray(array).tobytes(), crc)
    return crc
