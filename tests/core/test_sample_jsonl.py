"""Stretches of a long file of lines: whole ones, in order, from all over it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from slipstream.core.errors import SlipstreamError
from slipstream.core.jsonl import sample_jsonl


def write(path: Path, count: int) -> Path:
    path.write_text("".join(f'{{"n": {n}, "fill": "{"x" * (n % 50)}"}}\n' for n in range(count)))
    return path


def test_a_short_file_is_read_as_a_whole(tmp_path: Path) -> None:
    found = list(sample_jsonl(write(tmp_path / "a", 100), dict))
    assert [line["n"] for line in found] == list(range(100))
    assert list(sample_jsonl(tmp_path / "missing", dict)) == []


def test_of_a_long_one_there_are_stretches_from_its_start_to_its_end(tmp_path: Path) -> None:
    path = write(tmp_path / "a", 20_000)
    found = [line["n"] for line in sample_jsonl(path, dict, most_bytes=40_000, parts=10)]
    assert found == sorted(set(found))
    stretches = [i for i in range(1, len(found)) if found[i] != found[i - 1] + 1]
    assert len(stretches) == 9
    starts = [found[0], *(found[i] for i in stretches)]
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    assert starts[0] == 0
    assert found[-1] == 19_999
    assert max(gaps) - min(gaps) < 100  # evenly spaced, in bytes
    share = 40_000 / path.stat().st_size
    assert 0.9 * share < len(found) / 20_000 < 1.1 * share


def test_a_torn_end_is_left_out_and_damage_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a", 5_000)
    with path.open("a") as file:
        file.write('{"n": 5000, "fi')
    assert [line["n"] for line in sample_jsonl(path, dict, most_bytes=20_000, parts=4)][-1] == 4_999
    data = path.read_bytes()
    path.write_bytes(data[:100] + b"\xff" + data[101:])
    with pytest.raises(SlipstreamError, match="a is damaged"):
        list(sample_jsonl(path, dict, most_bytes=20_000, parts=4))
