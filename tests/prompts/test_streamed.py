"""Prompts that are read while the run goes on: every one once a pass, the same again after a restart, few in memory."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from drawn import drawn
from hypothesis import strategies as st

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.recipes import resolve
from slipstream.core.types import Prompt
from slipstream.models.tokenizer import char_tokenizer
from slipstream.prompts import build_prompts, streamed
from slipstream.prompts.streamed import StreamedPrompts


def made(number: int) -> Prompt:
    return Prompt(prompt_id=str(number), text=str(number), tokens=np.zeros(1, dtype=np.int32), task="t")


class Source:
    """`count` prompts in batches of 3, and how many were read in all."""

    def __init__(self, count: int) -> None:
        self.count, self.num_read = count, 0

    def __call__(self) -> Iterator[list[Prompt]]:
        for start in range(0, self.count, 3):
            batch = [made(number) for number in range(start, min(start + 3, self.count))]
            self.num_read += len(batch)
            yield batch


@drawn(
    25,
    60,
    count=st.integers(1, 40),
    buffer=st.integers(1, 50),
    seed=st.integers(0, 5),
    asked=st.lists(st.integers(0, 130), min_size=1, max_size=12),
)
def test_a_pass_gives_each_once_in_whatever_order_ordinals_are_asked_for(
    count: int, buffer: int, seed: int, asked: list[int]
) -> None:
    whole = StreamedPrompts(Source(count), seed, buffer)
    order = [whole.prompt(ordinal).prompt_id for ordinal in range(140)]
    for number in range(140 // count):
        part = order[number * count : (number + 1) * count]
        assert sorted(map(int, part)) == list(range(count))
    fresh = StreamedPrompts(Source(count), seed, buffer)
    assert [fresh.prompt(ordinal).prompt_id for ordinal in asked] == [order[ordinal] for ordinal in asked]
    if buffer == 1:
        assert order[:count] == [str(number) for number in range(count)]


def test_order_is_drawn_by_the_seed_and_anew_in_each_pass() -> None:
    def order(seed: int) -> list[str]:
        stream = StreamedPrompts(Source(50), seed, 20)
        return [stream.prompt(ordinal).prompt_id for ordinal in range(100)]

    assert order(1) == order(1) != order(2)
    assert order(1)[:50] != order(1)[50:]


def test_no_more_is_read_than_is_needed_and_little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "KEPT", 10)
    source = Source(10**9)
    stream = StreamedPrompts(source, 0, 20)
    first = [stream.prompt(ordinal).prompt_id for ordinal in range(200)]
    assert source.num_read <= 20 + 200 + 2 * 3, "the buffer, what was given, and two batches ahead"
    assert len(stream._kept) == 10
    assert stream.prompt(5).prompt_id == first[5], "what is kept no longer is read again"
    assert stream.prompt(199).prompt_id == first[199]


def test_rows_that_do_not_come_are_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "READ_WITHIN_S", 0.1)
    release, source = threading.Event(), Source(2)

    def hangs() -> Iterator[list[Prompt]]:
        yield from source()
        release.wait(60)

    with pytest.raises(SlipstreamError, match=r"have not come[\s\S]*within 0.1 s"):
        StreamedPrompts(hangs, 0, 20)
    release.set()


def test_who_waits_for_rows_may_do_something_meanwhile() -> None:
    release, source = threading.Event(), Source(3)

    def stalls() -> Iterator[list[Prompt]]:
        yield from source()
        assert release.wait(120), "nothing was done"
        yield [made(3)]

    stream = StreamedPrompts(stalls, 0, 1)
    stream.while_waiting = release.set
    assert [stream.prompt(ordinal).prompt_id for ordinal in range(4)] == ["0", "1", "2", "3"]


def test_a_resume_reads_one_pass_at_most_and_a_part() -> None:
    source = Source(30)
    stream = StreamedPrompts(source, 0, 5)
    far = stream.prompt(10_000).prompt_id
    assert source.num_read <= 3 * 30, "not the 333 passes before it"
    assert far == StreamedPrompts(Source(30), 0, 5).prompt(10_000).prompt_id


def run_config(dataset: Path, **prompts: object) -> RunConfig:
    tables = {"dataset": str(dataset), "streaming": True, "shuffle_buffer": 16, "num_eval": 4, **prompts}
    return resolve({"prompts": tables, "eval": {"num_prompts": 4}, "model": {"max_positions": 256}})


def texts(count: int) -> list[str]:
    return [f"question {number}" for number in range(count)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
def test_a_data_set_is_split_by_hash_and_nothing_is_lost(kind: str, tmp_path: Path) -> None:
    rows = [{"prompt": text, "answer": "a"} for text in texts(300)]
    path = tmp_path / f"rows.{kind}" if kind != "folder" else tmp_path / "folder"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        file = path if kind == "parquet" else path / "train.parquet"
        file.parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=50)
    found = build_prompts(run_config(path), char_tokenizer())
    length = 300 - sum(prompt_is_held_out(text) for text in texts(300))
    given = Counter(found.train.prompt(ordinal).text for ordinal in range(2 * length))
    assert set(given.values()) == {2}
    assert given.keys() == {text for text in texts(300) if not prompt_is_held_out(text)}
    assert [prompt.text for prompt in found.eval] == [text for text in texts(300) if prompt_is_held_out(text)][:4]
    assert found.report.overlap == 0


def prompt_is_held_out(text: str) -> bool:
    """By the documented rule, with the hash function itself."""
    import hashlib

    digest = hashlib.blake2b(text.encode(), digest_size=8, key=(0).to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") / 2**64 < 1 / 16


def test_held_out_prompts_of_their_own_data_set_are_never_trained(tmp_path: Path) -> None:
    for name, some in (("train", texts(40)), ("eval", texts(4))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in some))
    config = run_config(tmp_path / "train.jsonl", eval_dataset=str(tmp_path / "eval.jsonl"))
    found = build_prompts(config, char_tokenizer())
    assert {found.train.prompt(ordinal).text for ordinal in range(72)} == set(texts(40)[4:])


def test_streams_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts(20)))
    with pytest.raises(ConfigError, match="cannot supply enough distinct held-out prompts"):
        build_prompts(run_config(path), char_tokenizer())
    data = {"prompts.dataset": str(path)}
    for wrong in (
        {"warm_start.steps": 3, **data},
        {"stages": ["sft", "rl"], **data},
        {"prompts.tasks": [{"name": "spell_backward"}]},
    ):
        with pytest.raises(ConfigError, match="a stream of prompts is for RL on a data set alone"):
            resolve({"prompts.streaming": True, **wrong})
    path.write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    with pytest.raises(ConfigError, match="line 2"):
        build_prompts(run_config(path), char_tokenizer())
