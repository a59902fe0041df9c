"""Bytes from a hostile peer are a message or a typed refusal; nothing crashes, hangs or grows."""

from __future__ import annotations

import struct
import tracemalloc
from datetime import timedelta

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.controller.meeting import SPEC_KEY, parse_address, read_spec
from slipstream.core import frames, service_messages, types, wire
from slipstream.core.addresses import StoreAddresses
from slipstream.core.errors import ChannelError, ConfigError, SlipstreamError
from slipstream.core.keys import RunKeys
from slipstream.generator.vllm import protocol as vllm
from slipstream.jail import protocol as jail
from slipstream.rewards import protocol as rewards
from slipstream.weight_sync.delta import apply_changes, changes_of

MANY = settings(max_examples=100, deadline=None)

PROMPT = types.Prompt(
    prompt_id="p", text="q", tokens=np.arange(5, dtype=np.int32), task="t", columns={"a": [1, {"b": 2}]}
)
SEEDS = [
    wire.encode(service_messages.Admit(ordinal=3, replica=0, num_samples=2, prompt=PROMPT)),
    wire.encode(service_messages.CheckpointSaved(step=3, path="p")),
    wire.encode(types.Stop()),
]


@st.composite
def mutated(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """Draw a valid message with bytes changed, removed, inserted or repeated."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.integers(0, 3))
        if kind == 0 and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif kind == 1:
            del data[at : at + draw(st.integers(1, 8))]
        elif kind == 2:
            data[at:at] = draw(st.binary(min_size=1, max_size=8))
        else:
            data[at:at] = data[max(0, at - 8) : at]
    return bytes(data)


@MANY
@given(mutated(SEEDS) | st.binary(max_size=64))
def test_a_message_or_a_refusal(data: bytes) -> None:
    try:
        assert isinstance(wire.decode(data), types.Message)
    except ChannelError:
        return


@MANY
@given(
    mutated(
        [
            frames.pack_data(b"rollouts", 1, 1, 3, SEEDS[1]),
            frames.pack_data(b"rollouts", 1, 1, 3, *SEEDS),
            frames.pack_probe(b"rollouts", 1, 1, 3),
            frames.pack_reply(frames.Reply.TAKEN, 1, 3),
        ]
    )
)
def test_a_frame_or_a_refusal(data: bytes) -> None:
    for unpack in (frames.unpack, frames.unpack_reply):
        try:
            unpack(data)
        except ChannelError:
            continue


ANNOUNCED = [
    b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
    b"\xdf\xff\xff\xff\xff",  # a map
    b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xdb\xff\xff\xff\xff",  # text
    b"\xc9\xff\xff\xff\xff\x01",  # an extension
    b"\xc7\x12\x01" + struct.pack("<BBQQ", 8, 2, 1 << 40, 1 << 40),  # an array of 2^80 numbers
    b"\xc7\x0a\x01" + struct.pack("<BBQ", 8, 1, (1 << 64) - 1),
    b"\x91" * 100_000,  # deep
    b"\x81\xa4type\x91" + b"\x91" * 100_000,
]


@pytest.mark.parametrize("body", ANNOUNCED, ids=range(len(ANNOUNCED)))
def test_an_announced_length_is_not_allocated(body: bytes) -> None:
    inside = msgspec.msgpack.encode({"type": "CheckpointSaved", "step": 1})[:-1]
    tracemalloc.start()
    try:
        for data in (body, inside + body, SEEDS[0][:40] + body):
            with pytest.raises(ChannelError):
                wire.decode(data)
        for decode in (vllm.decode_to_client, vllm.decode_to_worker):
            with pytest.raises((msgspec.DecodeError, RecursionError)):
                decode(body)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@MANY
@given(mutated([vllm.encode(vllm.Tokens(deltas=[vllm.Delta(id=1, tokens=[1], logprobs=[0.5], push=0)]))]))
def test_a_frame_of_vllm_or_a_refusal(data: bytes) -> None:
    try:
        assert isinstance(vllm.decode_to_client(data), vllm.Frame)
    except (ValueError, RecursionError):
        return


RESULTS = [
    jail.frame(rewards.JobResult(job_id=7, parts=[1.0, None])),
    jail.frame(jail.WorkerReady(isolation=["files"])),
]


@MANY
@given(st.lists(mutated(RESULTS), max_size=3), st.integers(1, 40))
def test_a_worker_that_lies_is_bounded(chunks: list[bytes], size: int) -> None:
    data = b"".join(chunks)
    reader = jail.FrameReader(256)
    decoder = msgspec.msgpack.Decoder(rewards.FromWorker, strict=True)
    try:
        for start in range(0, len(data), size):
            for body in reader.feed(data[start : start + size]):
                assert len(body) <= 256
                decoder.decode(body)
            assert len(reader._buffer) <= 256 + 4 + size
    except (msgspec.MsgspecError, ValueError):
        return


class Junk:
    """A store with foreign content."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes:
        return b"1" if key.endswith("/b") and not key.endswith("/1") else self._content

    def add(self, key: str, amount: int, /) -> int:
        return 1

    def check(self, keys: list[str], /) -> bool:
        return True

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


VALID = msgspec.json.encode({"machine": "", "ports": {"b.in": ["tcp://127.0.0.1:5"]}})


@MANY
@given(mutated([VALID]) | st.binary(max_size=40) | st.just(b"[" * 100_000) | st.just(b'{"ports": 3}'))
def test_an_announcement_or_a_refusal(content: bytes) -> None:
    keys = RunKeys(b"k" * 32)
    for incarnation in (0, 1):
        try:
            found = StoreAddresses([], Junk(content), keys).find("b.in", incarnation)
            assert found.at.startswith("tcp:")
        except ChannelError:
            continue


def test_the_announcement_that_the_fuzz_starts_from_is_found() -> None:
    assert StoreAddresses([], Junk(VALID), None).find("b.in").at == "tcp://127.0.0.1:5"


@MANY
@given(
    mutated([RunKeys(b"k" * 32).seal('{"run_id": "x"}', SPEC_KEY).encode()]).filter(lambda d: b"run_id" not in d[-16:])
    | st.binary()
)
def test_a_specification_counts_with_its_seal_only(content: bytes) -> None:
    with pytest.raises(ConfigError):
        read_spec(Junk(content), RunKeys(b"k" * 32), timeout_s=1.0)  # type: ignore[arg-type]


@MANY
@given(st.text(max_size=30))
def test_an_address_or_none(text: str) -> None:
    found = parse_address(text)
    assert found is None or (found[0] and 0 <= found[1] < 1 << 16)


@MANY
@given(st.data())
def test_changes_are_applied_or_refused(data: st.DataObject) -> None:
    base = np.zeros(data.draw(st.integers(0, 41)), np.uint8)
    new = base.copy()
    if len(new):
        new[data.draw(st.integers(0, len(new) - 1))] = 1
    valid = changes_of(base, new)
    seeds = [b"" if valid is None else valid.tobytes()]
    changes = np.frombuffer(data.draw(mutated(seeds)), np.uint8)
    before = len(base)
    try:
        apply_changes(base, changes)
    except SlipstreamError:
        assert not base.any()
    assert len(base) == before
