"""No run writes a metric that nobody has explained: `conftest.py` has every run of the suite checked."""

from __future__ import annotations

import json
import os
from pathlib import Path

from slipstream.observe.catalogue import STAGES, described

OF_STAGE = {title.split("/")[0].strip("`"): set(group) for title, group in STAGES.items()}


def check_metric_names(folder: Path) -> None:
    """AssertionError for a name in the `metrics.jsonl` of a run or stage in `folder` that is not in the catalogue."""
    for path in (Path(root, "metrics.jsonl") for root, _, files in os.walk(folder) if "metrics.jsonl" in files):
        of_stage = OF_STAGE.get(path.parent.name)
        if of_stage is None and not (path.parent / "timeline").is_dir():
            continue  # made up
        names = {name for line in path.read_bytes().split(b"\n")[:-1] for name in json.loads(line)}
        unknown = names - of_stage if of_stage is not None else {name for name in names if described(name) is None}
        assert not unknown, f"{path} has metrics that observe/metrics.toml does not know: {sorted(unknown)}"
