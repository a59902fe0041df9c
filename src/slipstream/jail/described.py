"""Errors of a user's code in one line, with the line of theirs that raised."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from slipstream.jail.protocol import MAX_ERROR_CHARS

_OURS = str(Path(__file__).parents[1])
_INSTALLED = {"site-packages", "dist-packages"}


def describe(error: BaseException) -> str:
    """Type, message and place of an error: the innermost line that is of no library, else the innermost of all."""
    frames = [
        (Path(frame.f_code.co_filename), line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(("<", _OURS))
    ]
    library = sysconfig.get_path("stdlib")
    own = [place for place in frames if not (_INSTALLED & {*place[0].parts} or str(place[0]).startswith(library))]
    text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
    if not frames:
        return text
    path, line = (own or frames)[-1]
    return f"{text} ({path.name}, line {line})"
