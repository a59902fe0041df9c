"""No run writes a metric that nobody has explained: `conftest.py` has every run of the suite checked."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.observe.catalogue import STAGES, described

OF_STAGE = {title.split("/")[0].strip("`"): set(group) for title, group in STAGES.items()}


def check_metric_names(folder: Path) -> None:
    """AssertionError for a name in the `metrics.jsonl` of a run or stage in `folder` that is not in the catalogue."""
    for path in folder.rglob("metrics.jsonl"):
        names = {name for line in path.read_bytes().split(b"\n")[:-1] for name in json.loads(line)}
        if path.parent.name in OF_STAGE:
            unknown = names - OF_STAGE[path.parent.name]
        elif (path.parent / "ledger.jsonl").exists():
            unknown = {name for name in names if described(name) is None}
        else:
            continue  # made up
        assert not unknown, f"{path} has metrics that observe/catalogue.py does not know: {sorted(unknown)}"
