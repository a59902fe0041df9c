"""Cores and memory by a container's limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slipstream.core import machine


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("150000 100000", 2), ("5000 100000", 1), ("", 8)])
def test_a_quota_is_a_number_of_cores(quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(machine, "CGROUP_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert machine.num_cores() == cores


def test_the_lowest_limit_of_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = machine.memory_bytes()
    limits = [tmp_path / name for name in ("none", "max", "low", "high")]
    for path, text in zip(limits[1:], ("max", f"{total // 2}", f"{2 * total}"), strict=True):
        path.write_text(text)
    monkeypatch.setattr(machine, "CGROUP_LIMITS", limits)
    assert machine.memory_bytes() == total // 2
