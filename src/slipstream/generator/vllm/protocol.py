"""Messages between the client (`engine.py`, `reader.py`) and the process of vLLM (`worker.py`): msgpack over ZeroMQ.

Both sides load this file, so it imports nothing but msgspec. The worker does so by path: Slipstream is not installed in
its environment, nor is vLLM in ours.

A *job* is one submission of a completion: its id is never used again, so late tokens of a job that was dropped are told
apart. A *push* is one set of weights, counted from 0. A worker starts with those of `Spec.pushes`. Every token carries
the push it was sampled under, and the client knows which policy version that is. Of a policy with adapters a push is
these alone.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_FRAME_BYTES = 1 << 28


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of everything on the socket."""


# To the worker


class SamplingJob(Frame):
    """Sample up to `max_tokens` tokens behind `prompt`; see `requests.Request` for the rest.

    Where pushes stay side by side it is sampled under `push`, else under the newest.
    """

    id: int
    push: int
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


class Submit(Frame):
    jobs: list[SamplingJob]


class Abort(Frame):
    """Drop these jobs; answered by `Aborted` once none of them will say anything more."""

    ids: list[int]


class Update(Frame):
    """Load the push at `path` between two decode steps; answered by `Updated`.

    `clear_cache` has live jobs compute their keys and values anew, under the new weights. Of several pushes side by
    side those in `beside` stay, and jobs go on under them.
    """

    push: int
    path: str
    clear_cache: bool
    beside: list[int] = []


class Probe(Frame):
    """Compute the logprobs of `tokens`, through the engine that serves; answered by `Probed`."""

    id: int
    tokens: list[int]


class Predict(Frame):
    """Tell the `count` likeliest tokens at each of `places`, indices of `tokens`, given those before it, and the
    logprobs of these and of the token that is there; answered by `Predicted`, in any order."""

    id: int
    tokens: list[int]
    places: list[int]
    count: int


class EndWorker(Frame):
    """End in good order."""


# To the client


class Started(Frame):
    """vLLM is loaded, with the pushes that it was started with."""


class Delta(Frame):
    """New tokens of a job, sampled under `push`, with their logprobs; `finish` is '', 'stop' or 'length'.

    `spans`, with the last delta, are vLLM's own account of the job: (push, first token, one past the last).
    `num_cached`, with the first, are the tokens of the prompt that vLLM found in its prefix cache, where it says so.
    """

    id: int
    tokens: list[int]
    logprobs: list[float]
    push: int
    finish: str = ""
    spans: list[tuple[int, int, int]] | None = None
    num_cached: int | None = None


class Tokens(Frame):
    deltas: list[Delta]


class Aborted(Frame):
    ids: list[int]


class Updated(Frame):
    """`pause_s`: how long no token was sampled."""

    push: int
    pause_s: float


class Probed(Frame):
    id: int
    logprobs: list[float]


class Predicted(Frame):
    """int32 and float32 [places, 1 + count], as bytes: the token that is there, then the likeliest, from the first."""

    id: int
    tokens: bytes
    logprobs: bytes


class WorkerFailed(Frame):
    """The worker ends: what it was doing, and the error."""

    what: str
    error: str


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON file that a worker is started with: where to connect, and vLLM's engine arguments.

    `folder` is removed by the worker when its parent is gone. `pushes` are there
    from the start: `has_adapters`, they are folders in PEFT's format, else a file (`slot_extension.py`) or none yet.
    `side_by_side`: an update replaces none.
    """

    address: str
    folder: str
    model: str
    push: int
    stop_token_ids: list[int]
    engine_args: dict[str, Any]
    pushes: dict[int, str] = {}
    has_adapters: bool = False
    side_by_side: bool = False


ToWorker = Submit | Abort | Update | Probe | Predict | EndWorker
ToClient = Started | Tokens | Aborted | Updated | Probed | Predicted | WorkerFailed

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
"""Both raise ValueError (msgspec.DecodeError, or one of bad UTF-8) or RecursionError for what is not such a frame."""
