"""Messages between the pool of rewards and its workers, in the frames of `jail/protocol.py`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from slipstream.jail.protocol import SetupFailed, TriedNetwork, WorkerReady
from slipstream.rewards.logged import Logged

MAX_RESULT_BYTES = 512 * 1024
"""What `log_extra` takes, in UTF-8, and scores. A larger frame is an attack or a bug: its worker is killed."""

Per = Literal["completion", "group"]


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


class RewardJob(msgspec.Struct, frozen=True, tag=True):
    """One completion to score. `prompt` is text, or the chat's messages.

    Of an episode `completion` is the last turn, and `messages` are all turns and what the environment said;
    `branches` are the chats of its forks, each from its beginning.
    """

    job_id: int
    prompt: str | list[dict[str, Any]]
    completion: str
    completion_ids: list[int]
    task: str
    answer: str | None
    columns: dict[str, Any]
    messages: list[dict[str, Any]] | None = None
    branches: list[list[dict[str, Any]]] = []


class RewardGroupJob(msgspec.Struct, frozen=True, tag=True):
    """The completions of one prompt, which terms with per = 'group' score together."""

    job_id: int
    jobs: list[RewardJob]


class Began(msgspec.Struct, frozen=True, tag=True):
    """The worker's job has reached its term of this index: where there are several, who is slow would not be known."""

    term: int


class JobResult(msgspec.Struct, frozen=True, tag=True):
    """One number per term of the job's kind (None: the function abstained), or the `error` of the first that failed.

    For a `RewardGroupJob` each term has one number per completion: first all of the first term's. `is_exhausted`: the
    worker's memory is used up by what earlier jobs have left there, so an `error` may be no fault of this one.
    """

    job_id: int
    parts: list[float | None]
    error: str | None = None
    logged: Logged = Logged()
    is_exhausted: bool = False


AnyJob = RewardJob | RewardGroupJob
FromWorker = WorkerReady | SetupFailed | Began | TriedNetwork | JobResult
