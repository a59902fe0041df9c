"""A file of lines is cut in blocks as it would be line by line."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from slipstream.core import jsonl
from slipstream.core.run_log import DecisionHead

LINE = b'{"seq":9,"time_s":1}'
DAMAGES = [b"", b"\n", b'{"seq":1,"time_s"', b"\x00" * 50 + b"\n", b'{"a": 1}\n', LINE + LINE + b"\n"]


@pytest.mark.parametrize("block_bytes", [60, 300, 1 << 20])
@pytest.mark.parametrize("seed", range(30))
def test_in_blocks_and_line_by_line_keep_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, block_bytes: int
) -> None:
    rng, path = random.Random(seed), tmp_path / "lines.jsonl"
    lines = [
        msgspec.json.encode({"seq": n, "time_s": rng.random(), "more": "x" * rng.randrange(90)}) + b"\n"
        for n in range(rng.randrange(40))
    ]
    lines.insert(rng.randint(0, len(lines)), rng.choice(DAMAGES))
    path.write_bytes(b"".join(lines)[: None if rng.random() < 0.7 else -5])
    wanted = {n for n in range(40) if rng.random() < 0.8}

    plain = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            head = msgspec.json.decode(line, type=DecisionHead)
        except msgspec.DecodeError:
            break
        plain += [line + b"\n"] if head.seq in wanted else []
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", block_bytes)
    assert jsonl.cut_jsonl(path, DecisionHead, lambda head: head.seq in wanted) == len(plain)
    assert path.read_bytes() == b"".join(plain)
