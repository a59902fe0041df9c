"""The wire form of messages: msgpack in which arrays are raw little-endian buffers.

Decoding builds only the given structs, checks every field, and executes no code that was sent. Malformed bytes are a
ChannelError.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from functools import cache
from threading import Lock
from typing import Any, TypeVar, Union

import msgspec
import numpy as np

from slipstream.core import peer_messages, service_messages, turn_messages, types, unfinished_messages
from slipstream.core.errors import ChannelError
from slipstream.core.types import Message

MessageT = TypeVar("MessageT", bound=Message)
MessageTypes = tuple[type[Message], ...]

MODULES = tuple(m.__name__ for m in (types, unfinished_messages, turn_messages, service_messages, peer_messages))
MESSAGES: MessageTypes = tuple(kind for kind in Message.__subclasses__() if kind.__module__ in MODULES)

_ARRAY_CODE = 1  # msgpack extension type of an array
_DTYPES = ("b1", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "u2", "u4", "u8")
_MAX_DIMS = 8
_CODES = {np.dtype(name): code for code, name in enumerate(_DTYPES)}  # of this machine's order, which is little-endian
_KINDS = tuple(map(np.dtype, _DTYPES))
_ARRAY_HEADERS = tuple(struct.Struct(f"<BB{num_dims}Q") for num_dims in range(_MAX_DIMS + 1))
"""By number of dimensions: index into _DTYPES, number of dimensions, the length of each."""


def encode(message: Message) -> bytes:
    """Return the bytes of one message. Identity: `decode(encode(m))` equals m, arrays bit for bit."""
    if not isinstance(message, Message):
        raise ChannelError(
            "only messages may cross a channel", got=type(message).__name__, allowed="core.types.Message"
        )
    try:
        return _ENCODER.encode(message)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ChannelError(
            f"a {type(message).__name__} cannot be encoded",
            got=error,
            allowed="JSON types in free-form fields; arrays of " + ", ".join(_DTYPES),
        ) from error


def decode(data: bytes | memoryview, messages: MessageTypes = MESSAGES) -> Message:
    """Return the message in `data`, one of `messages`; its arrays are new and writable. Raises ChannelError."""
    return decode_by(decoder_of(messages), data)


def decode_by(decoder: msgspec.msgpack.Decoder[Any], data: bytes | memoryview) -> Message:
    """Return what `decode` does, by a decoder of `decoder_of`: to find that again takes a hash of all its messages."""
    try:
        message: Message = decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise ChannelError("a malformed message arrived", got=error) from error
    return message


def decode_one(data: bytes | memoryview, kind: type[MessageT]) -> MessageT:
    """Return the message of type `kind` in `data`. Raises ChannelError."""
    message = decode(data, (kind,))
    assert isinstance(message, kind)
    return message


def message_types(names: Iterable[str]) -> MessageTypes:
    """Return the message classes of these names, also a pipeline's own ones; all of `MODULES` for no names."""
    known = {kind.__name__: kind for kind in (*Message.__subclasses__(), *MESSAGES)}
    found = []
    for name in names:
        if name not in known:
            raise ChannelError.unknown(f"unknown message type '{name}'", name, sorted(known))
        found.append(known[name])
    return tuple(found) or MESSAGES


def _encode_array(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} has no wire form")
    code = _CODES.get(value.dtype)
    if code is None or value.ndim > _MAX_DIMS:
        raise TypeError(f"array of dtype {value.dtype} and {value.ndim} dimensions has no wire form")
    header = _ARRAY_HEADERS[value.ndim].pack(code, value.ndim, *value.shape)
    return msgspec.msgpack.Ext(_ARRAY_CODE, header + value.tobytes())


def _decode_array(code: int, data: memoryview) -> np.ndarray:
    if code != _ARRAY_CODE or len(data) < 2:
        raise ValueError(f"unknown extension {code} of {len(data)} bytes")
    kind, num_dims = data[0], data[1]
    if kind >= len(_KINDS) or num_dims > _MAX_DIMS or len(data) < (start := _ARRAY_HEADERS[num_dims].size):
        raise ValueError("malformed array header")
    dtype = _KINDS[kind]
    shape = _ARRAY_HEADERS[num_dims].unpack_from(data)[2:]
    if math.prod(shape) * dtype.itemsize != len(data) - start:
        raise ValueError(f"array of shape {shape} and dtype {dtype} does not have {len(data) - start} bytes")
    array = np.frombuffer(data, dtype, -1, start).copy()  # aligned, writable, outlives the frame
    return array if num_dims == 1 else array.reshape(shape)


def _check_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray or not isinstance(value, np.ndarray):
        raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


_MAKING = Lock()
"""Held while a decoder is made: another thread would use what msgspec knows of half of a struct, and crash."""


@cache
def decoder_of(messages: MessageTypes) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of these messages, made once in this process."""
    with _MAKING:
        return msgspec.msgpack.Decoder(Union[messages], dec_hook=_check_array, ext_hook=_decode_array)  # noqa: UP007


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
