"""The attempts of a run on one axis of time: what resumes set aside, and what goes on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from slipstream.core.jsonl import intact_lines
from slipstream.observe.timeline import ProcessStart, process_files

SAME_CLOCK_S = 10.0
"""Clocks whose zeros are nearer by the time of day are one clock: that was set a little; no reboot is so quick."""


@dataclass(frozen=True)
class Attempt:
    """`number` counts from 1. Times in files of `folder` get onto the newest attempt's clock by adding `shift_ns`.

    At `zero_ns` of the day (since 1970) its own clock stood at zero; None where nothing says so.
    """

    number: int
    folder: Path
    shift_ns: int = 0
    zero_ns: int | None = None


def attempt_folders(run_dir: Path) -> list[Path]:
    """Return the folders that resumes have set aside, the oldest first."""
    named = [(re.fullmatch(r"attempt_(\d+)", path.name), path) for path in run_dir.glob("attempt_*")]
    return [path for _, path in sorted((int(name[1]), path) for name, path in named if name)]


def read_attempts(run_dir: Path) -> list[Attempt]:
    """The attempts of a run in their order; the last one is the run's own folder.

    All are on one monotonic clock as long as the machine was not started anew. Then the time of day says how far apart
    two of them are, as exactly as it was set.
    """
    folders = [*attempt_folders(run_dir), run_dir]
    zeros_ns = [_zero_ns(folder) for folder in folders]
    newest_ns = zeros_ns[-1]
    attempts = []
    for number, (folder, zero_ns) in enumerate(zip(folders, zeros_ns, strict=True), start=1):
        shift_ns = 0 if zero_ns is None or newest_ns is None else zero_ns - newest_ns
        attempts.append(Attempt(number, folder, shift_ns if abs(shift_ns) >= SAME_CLOCK_S * 1e9 else 0, zero_ns))
    return attempts


def _zero_ns(folder: Path) -> int | None:
    """Return `zero_ns` of the first process that has one: the controller, where there is one."""
    for path in process_files(folder):
        for _, first in intact_lines(path, ProcessStart):
            return first.zero_ns or None
    return None
