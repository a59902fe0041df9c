"""The wire form: every message type round-trips bit for bit; nothing malformed gets through."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import numpy as np
import pytest
from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from slipstream.core import peer_messages, service_messages, types, wire
from slipstream.core.errors import ChannelError

arrays = st.sampled_from([np.int32, np.float32, np.float64, np.int64, np.uint8, np.bool_]).flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)


def strategy_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Return a strategy of a field's values, built from its annotation alone."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(strategy_of(args[0]), max_size=2).map(tuple)
    if origin is list:
        return st.lists(strategy_of(args[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(text, strategy_of(args[1]), max_size=2)
    if args:  # X | None
        return st.one_of([strategy_of(arg) for arg in args])
    simple = {
        Any: json_values,
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: text,
        np.ndarray: arrays,
        type(None): st.none(),
    }
    if annotation in simple:
        return simple[annotation]
    return message_strategy(annotation)


def message_strategy(kind: type[types.Message]) -> st.SearchStrategy[types.Message]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field: strategy_of(hints[field]) for field in kind.__struct_fields__})


def same(left: Any, right: Any) -> bool:
    if isinstance(left, types.Message):
        return type(left) is type(right) and all(
            same(getattr(left, f), getattr(right, f)) for f in left.__struct_fields__
        )
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, tuple | list):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@pytest.mark.parametrize("kind", wire.MESSAGES, ids=lambda kind: kind.__name__)
@drawn(4, 60, data=st.data())
def test_every_message_round_trips(kind: type[types.Message], data: st.DataObject) -> None:
    message = data.draw(message_strategy(kind))
    assert same(message, wire.decode(wire.encode(message)))


def test_an_episode_with_branches_comes_back_as_it_was_and_older_segments_begin_none() -> None:
    tokens = np.arange(3, dtype=np.int32)
    turn = types.Segment(tokens=tokens, behaviour_logprobs=-np.ones(3, dtype=np.float32))
    completion = types.Completion(
        ordinal=1,
        sample=2,
        prompt=types.Prompt(prompt_id="p", text="t", tokens=tokens, task="x"),
        segments=(turn, types.Segment(tokens=tokens + 3, begins=True), turn),
        text="",
        finish_reason="stop",
        episode=types.EpisodeRecord(),
    )
    decoded = wire.decode(wire.encode(types.Rollout(completion=completion, reward=0.5)))
    assert isinstance(decoded, types.Rollout)
    assert same(decoded.completion, completion)
    assert [segment.begins for segment in decoded.completion.segments] == [False, True, False]
    assert decoded.completion.num_branches == 2


def test_decoded_arrays_are_writable_and_own_their_memory() -> None:
    prompt = types.Prompt(prompt_id="p", text="t", tokens=np.arange(3, dtype=np.int32), task="x")
    decoded = wire.decode(wire.encode(prompt))
    assert isinstance(decoded, types.Prompt)
    decoded.tokens[0] = 7
    assert decoded.tokens.flags.owndata
    assert decoded.tokens.flags.aligned


def test_all_core_messages_are_known() -> None:
    assert {service_messages.Admit, types.Completion, peer_messages.WeightsReleased, types.Stop} <= set(wire.MESSAGES)
    assert types.Message not in wire.MESSAGES


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_garbage_is_a_channel_error(data: bytes) -> None:
    with pytest.raises(ChannelError):
        wire.decode(data)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_message_decodes_or_is_a_channel_error(data: st.DataObject) -> None:
    prompt = types.Prompt(prompt_id="p", text="t", tokens=np.arange(5, dtype=np.int32), task="x", columns={"a": [1]})
    good = bytearray(wire.encode(service_messages.Admit(ordinal=3, replica=0, prompt=prompt, num_samples=2)))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    try:
        decoded = wire.decode(bytes(good[:cut]))
    except ChannelError:
        return
    assert isinstance(decoded, types.Message)


@pytest.mark.parametrize(
    "blob",
    [
        msgspec.msgpack.encode({"type": "Nobody"}),
        msgspec.msgpack.encode({"type": "Stop"}) + b"\x00",
        msgspec.msgpack.encode({"type": "Checkpoint", "step": "1", "path": "p"}),
        msgspec.msgpack.encode({"type": "Checkpoint", "step": 1}),
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"type": "Export", "path": msgspec.msgpack.Ext(9, b"x")}),
        msgspec.msgpack.encode({"type": "Export", "path": msgspec.msgpack.Ext(1, b"\x04\x01" + b"\xff" * 8)}),
    ],
)
def test_only_messages_are_encoded(blob: bytes) -> None:
    with pytest.raises(ChannelError):
        wire.decode(blob)


def test_a_type_outside_the_union_is_refused() -> None:
    with pytest.raises(ChannelError):
        wire.decode(wire.encode(types.Stop()), (service_messages.Export, service_messages.Checkpoint))


@pytest.mark.parametrize("value", [object(), np.array(["text"]), np.array([object()]), 2**70])
def test_values_without_a_wire_form_are_refused(value: object) -> None:
    with pytest.raises(ChannelError, match="Prompt"):
        wire.encode(types.Prompt(prompt_id="p", text="t", tokens=np.arange(3), task="x", columns={"x": value}))
    with pytest.raises(ChannelError):
        wire.encode("not a message")  # type: ignore[arg-type]


def test_unknown_type_name_lists_what_is_known() -> None:
    assert wire.message_types(["Admit", "Stop"]) == (service_messages.Admit, types.Stop)
    with pytest.raises(ChannelError, match="did you mean 'Admit'"):
        wire.message_types(["Admitt"])


def test_decoders_are_made_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another would read what msgspec knows of a struct while half of it is there, and crash."""
    make = msgspec.msgpack.Decoder

    def made(*args: Any, **hooks: Any) -> Any:
        assert wire._MAKING.locked()
        return make(*args, **hooks)

    monkeypatch.setattr(msgspec.msgpack, "Decoder", made)
    wire.decoder_of.cache_clear()
    assert wire.decode(wire.encode(types.Stop())) == types.Stop()
    assert not wire._MAKING.locked()
