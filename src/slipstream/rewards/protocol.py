"""Messages between the pool and a worker: length-prefixed msgpack frames, decoded strictly on both sides."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

MAX_RESULT_BYTES = 64 * 1024  # a larger frame from a worker is an attack or a bug: the worker is killed

Per = Literal["completion", "group"]

_LENGTH = struct.Struct("<I")


class Term(msgspec.Struct, frozen=True):
    """One reward function: a key of BUILTINS or an import path, and its keyword parameters.

    `source` is the text of the file in 'file.py:function', which the worker's user may not be able to read. `per` says
    whether it scores jobs or whole `RewardGroupJob`s; `name` is its part's, for errors.
    """

    function: str
    params: dict[str, Any] = {}
    source: str | None = None
    per: Per = "completion"
    name: str = ""

    @property
    def label(self) -> str:
        return self.name or self.function


class Task(msgspec.Struct, frozen=True):
    """The reasoning-gym dataset behind a task key."""

    name: str
    params: dict[str, Any]


class WorkerSetup(msgspec.Struct, frozen=True):
    """First frame to a worker: what to score with, and its limits."""

    terms: list[Term]
    tasks: dict[str, Task]
    memory_bytes: int
    timeout_s: float
    allow_network: bool = False
    environment: list[str] = []  # names of variables that the worker gets besides its own


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """The worker has imported what its terms need; `isolation` names the barriers that hold."""

    isolation: list[str]


class SetupFailed(msgspec.Struct, frozen=True, tag=True):
    """The terms cannot be built: the user's import path or parameters are wrong."""

    error: str


class RewardJob(msgspec.Struct, frozen=True, tag=True):
    """One completion to score. `prompt` is text, or the chat's messages."""

    job_id: int
    prompt: str | list[dict[str, Any]]
    completion: str
    completion_ids: list[int]
    task: str
    answer: str | None
    columns: dict[str, Any]


class RewardGroupJob(msgspec.Struct, frozen=True, tag=True):
    """The completions of one prompt, which terms with per = 'group' score together."""

    job_id: int
    jobs: list[RewardJob]


class Began(msgspec.Struct, frozen=True, tag=True):
    """The worker's job has reached its term of this index: where there are several, who is slow would not be known."""

    term: int


class TriedNetwork(msgspec.Struct, frozen=True, tag=True):
    """The worker's job has tried to reach a network that there is not."""


class JobResult(msgspec.Struct, frozen=True, tag=True):
    """One number per term of the job's kind (None: the function abstained), or the `error` of the first that failed.

    For a `RewardGroupJob` each term has one number per completion: first all of the first term's.
    """

    job_id: int
    parts: list[float | None]
    error: str | None = None


AnyJob = RewardJob | RewardGroupJob
FromWorker = WorkerReady | SetupFailed | Began | TriedNetwork | JobResult

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct | list[AnyJob]) -> bytes:
    """`message` as 4 bytes of length (little endian) and msgpack."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Bytes in, whole frame bodies out; never holds more than one frame of `max_bytes` and one read."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Bodies completed by `data`, which is taken whole only when the iterator is used up.

        ValueError, after the bodies before it, when a frame announces more than `max_bytes`.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._max_bytes:
                raise ValueError(f"a frame of {length} bytes, at most {self._max_bytes} allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body
