"""`samples.json`: a few held-out prompts with the policy's answers before and after training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from slipstream.core.disk import replace_file
from slipstream.core.files import load_json
from slipstream.observe.transcript import TranscriptPart


class Sample(msgspec.Struct, frozen=True):
    """One held-out prompt, answered greedily by version 0 and by the last version; None where it was not asked.

    `is_right` is what `eval.measure` says of an answer, None without one. `turns` are there with an environment.
    """

    prompt: str
    answer: str | None
    before: str | None
    after: str | None
    before_reward: float | None = None
    after_reward: float | None = None
    before_is_right: bool | None = None
    after_is_right: bool | None = None
    before_turns: list[TranscriptPart] | None = None
    after_turns: list[TranscriptPart] | None = None


def write_samples(samples: Sequence[Sample], path: Path) -> None:
    replace_file(path, msgspec.json.format(msgspec.json.encode(samples), indent=2) + b"\n")


def drop_after(path: Path) -> None:
    """Drop the answers of a last version from `path`: the run goes on behind it."""
    none = {"after": None, "after_reward": None, "after_is_right": None, "after_turns": None}
    if samples := read_samples(path):
        write_samples([msgspec.structs.replace(one, **none) for one in samples], path)


def read_samples(path: Path) -> list[Sample]:
    """The samples in `path`; empty for a missing file."""
    return load_json(path, list[Sample]) if path.exists() else []
