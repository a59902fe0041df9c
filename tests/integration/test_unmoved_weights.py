"""Versions that change no number that anybody sees are told of, although some of their bytes change."""

from __future__ import annotations

import numpy as np
import pytest
from covering import with_slow

import slipstream
from slipstream.core.run_log import read_metrics
from slipstream.trainer import executor


@pytest.mark.parametrize(("lr", "share"), with_slow([(1e-9, 1.0)], [(1e-3, 0.0)]))
def test_a_step_too_small_to_be_seen(tiny, tmp_path, monkeypatch, lr, share) -> None:
    """At 1e-9 bytes of weights change, and no logprob of the probe text by a thousandth, which is what is looked at."""
    exact = executor.probed
    monkeypatch.setattr(executor, "probed", lambda *of: np.round(exact(*of), 3))  # within its tolerance
    overrides = tiny | {"steps": 3, "host": "inline", "max_staleness": 0, "weight_update": "between_batches"}
    overrides |= {"warm_start": tiny["warm_start"] | {"steps": 20}}
    overrides["trainer"] = tiny.get("trainer", {}) | {"optimizer": {"lr": lr}}
    run = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    lines = read_metrics(run.out / "metrics.jsonl")
    found = [line["publish_same_frac"] for line in lines if "publish_same_frac" in line]
    assert len(found) == 3, "of version 0, which nothing had trained, and of two more"
    assert set(found[1:]) == {share}, found
