"""Names of what a run leaves outside its folder while it lasts: in /dev/shm and the temporary folder."""

from __future__ import annotations

import re

from slipstream.core.errors import WeightSyncError


def file_prefix(run_id: str) -> str:
    """What the names of a run's files outside its folder begin with; what begins so is removed when the run ends."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", run_id):
        raise WeightSyncError("a run id names files", got=repr(run_id), allowed="1..100 letters, digits, '_' and '-'")
    return f"slipstream.{run_id}."
