"""vLLM as a `requests.GenerationEngine`: requests go to a process of its own, tokens stream back.

The client knows all that was ever sampled, token by token with its version. So the process is expendable: a new one is
started with the present weights, and what was in flight goes on from its last token.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
import numpy as np

from slipstream.core.clock import Clock, WallClock
from slipstream.core.errors import ChannelError, ChannelTimeout, ConfigError, ExecutorDied, WeightSyncError
from slipstream.core.types import FinishReason
from slipstream.generator.noise import noise_key
from slipstream.generator.requests import Finished, KvOnUpdate, Request, Session, check_request, in_order
from slipstream.generator.version_table import VersionTable
from slipstream.generator.vllm import protocol
from slipstream.generator.vllm.contexts import TurnContexts
from slipstream.generator.vllm.folder import WeightFolder
from slipstream.generator.vllm.live import LiveCompletion
from slipstream.generator.vllm.process import Launch, WorkerProcess
from slipstream.generator.vllm.waiting import WaitingRequests

FrameT = TypeVar("FrameT", bound=protocol.Frame)
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Deadlines:
    """Seconds: for vLLM to start, for an answer to an update or a probe, and between tokens while any are due."""

    start_s: float
    answer_s: float
    silence_s: float


class HeldPushes:
    """The pushes that vLLM holds, by version (`version_table.HeldVersions`); `newest` is the last one."""

    def __init__(self) -> None:
        self.newest = 0
        self.of: dict[int, int] = {}

    @property
    def versions(self) -> Collection[int]:
        return self.of.keys()

    def hold(self, version: int, others: Collection[int]) -> None:
        """Hold the newest push as `version`, and `others` of those held so far; forget the rest."""
        self.of = {one: self.of[one] for one in others} | {version: self.newest}


class VLLMEngine:
    """Completions by a vLLM process that is started with the base in `folder`, and given the pushes written there.

    With `is_empty` it has no weights before the first push, and nothing is sampled. With `spec.side_by_side` versions
    of adapters stay beside newer ones (`version_table.py`); no more than vLLM has room for, which the caller sees to.

    `rooms` are the completions in vLLM at once, by stream: whatever waits, waits here, so that a pause of admission is
    one. `spec` is completed with address and weights. A process that dies or falls silent is replaced, `max_restarts`
    times in all; after that the error goes to the caller, as does every failure of a first start.

    Within `step` nothing waits. `push` and `probe` wait for vLLM, each at most its deadline.
    """

    def __init__(
        self,
        folder: WeightFolder,
        launch: Launch,
        spec: protocol.Spec,
        *,
        rooms: Mapping[int, int],
        max_len: int,
        seed: int,
        kv_on_update: KvOnUpdate,
        deadlines: Deadlines,
        max_restarts: int,
        probe_tolerance: float,
        vocab_size: int,
        is_empty: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.version = 0
        self.max_len = max_len
        self.num_restarts = 0
        self.num_re_prefilled = 0
        self._vocab_size, self._folder, self._launch, self._spec = vocab_size, folder, launch, spec
        self._rooms, self._seed, self._kv_on_update = rooms, seed, kv_on_update
        self._deadlines, self._max_restarts, self._tolerance = deadlines, max_restarts, probe_tolerance
        self._clock = clock if clock is not None else WallClock()
        self._waiting = WaitingRequests(rooms)
        self._contexts = TurnContexts()
        self._live: dict[int, LiveCompletion] = {}
        self._finished: list[Finished] = []
        self._num_ids = 0
        self._push = 0
        self._versions = {0: 0}  # of every push that was accepted
        self._held = HeldPushes()
        self._table = VersionTable(self._held if spec.side_by_side else None, self._begun_versions, 0)
        self._probed: tuple[np.ndarray, np.ndarray] | None = None
        self._paths = {} if is_empty else {0: folder.write(0)}  # of the pushes that a process is started with
        self._has_served = False
        self._lost: ExecutorDied | ChannelTimeout | None = None  # what ended the process that was not replaced
        self._worker = self._start()

    # The engine

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_begun(self) -> int:
        return len(self._live) + self._waiting.num_begun

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def only_evaluates(self) -> bool:
        """Whether nothing that is live is of the training stream."""
        return all(live.request.stream for live in self._live.values())

    @property
    def is_idle(self) -> bool:
        return not self._live and not self.num_waiting and not self._finished

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue `requests` in this order; resumed ones go before everything that has not started."""
        for request in requests:
            check_request(request, max_len=self.max_len)
        for request in requests:
            self._contexts.begin(request)
            self._table.bound_to(request)
        self._waiting.add(requests)
        self._fill()

    def pause_admission(self, is_paused: bool, *, holds_turns: bool = False) -> None:
        """While paused nothing new starts; what has begun goes on, further turns of episodes not with `holds_turns`."""
        self._waiting.is_paused, self._waiting.holds_turns = is_paused, holds_turns
        self._fill()

    def step(self) -> list[Finished]:
        """Take what vLLM has said since, end what is out of time, send what has room. Waits for nothing."""
        try:
            self._receive()
            if self._is_due and self._clock.now_s() >= self._silent_s:
                raise self._worker.timeout("a token" if self._is_ready else "vLLM to start", self._patience_s)
        except (ExecutorDied, ChannelTimeout) as error:
            self._replace(error)
        self._end_late()
        self._fill()
        finished, self._finished = self._finished, []
        return finished

    def set_version(self, version: int, *, kv_on_update: KvOnUpdate = "keep", max_kv_age: int = 0) -> None:  # noqa: ARG002
        """The last push is `version`. What happens to the cache was decided with it, by the engine's own setting."""
        if kv_on_update not in ("keep", self._kv_on_update):
            raise ConfigError(
                "vLLM was asked for another treatment of its cache when it was started",
                got=f"kv_on_update = '{kv_on_update}'",
                allowed=f"'{self._kv_on_update}'",
            )
        self.version = version
        self._versions[self._push] = version
        self._held.newest = self._push
        self._table.take(version)
        self._fill()  # what was there before the first version

    def begun(self) -> list[Request]:
        """Every completion that has tokens, as `submit` could resume it elsewhere; here it goes on undisturbed."""
        lives = (live.request.resumed_with(live.resume) for live in self._live.values() if live.tokens)
        return in_order([*lives, *self._waiting.begun])

    def export_live(self) -> list[Request]:
        """Take every live completion out, resumable by `submit` here or elsewhere; by ordinal and sample."""
        try:
            self._take_out()
        except (ExecutorDied, ChannelTimeout) as error:
            self._replace(error)
        lives, self._live = list(self._live.values()), {}
        return in_order(live.request.resumed_with(live.resume) for live in lives)

    # Turns

    @property
    def session_counts(self) -> dict[str, int]:
        return self._contexts.counts

    @property
    def versions_in_use(self) -> set[int]:
        """The versions that completions, waiting requests and open episodes go on with, where they stay."""
        return self._table.in_use

    def let_go_on(self, session: Session) -> None:
        """An episode has begun: its other branches wait for no pause, which may wait for the episode's end."""
        self._waiting.let_go_on(session)
        self._fill()

    def release(self, session: Session) -> None:
        """The episode has ended. vLLM's prefix cache evicts by itself what is used no more; a turn that is not
        finished goes on."""
        self._contexts.release(session)
        self._table.release(session)
        self._waiting.stop_parking(session)
        for live in self._live.values():
            if live.request.session == session:
                live.request = replace(live.request, parks=False)

    # Weights

    def push(self) -> None:
        """Give vLLM the weights that the folder writes now, between two of its steps.

        Raises WeightSyncError when they cannot be written, and what ended a process that is not to be replaced.

        Tokens sampled under them are held back until `set_version` says what they are called. Another push instead
        takes the last one back: what it sampled is dropped and sampled again. Side by side nothing is sampled under
        them before.
        """
        self.wait_ready()
        is_side_by_side = self._spec.side_by_side
        is_taken_back = self._push not in self._versions and not is_side_by_side
        if is_taken_back:
            self._take_out(refused=self._push)
        # Written while vLLM decodes: it stands still for the loading alone.
        path = self._folder.write(self._push + 1)
        self._push += 1
        beside = [self._held.of[version] for version in self._table.in_use | {self.version}] if is_side_by_side else []
        self._paths = {push: self._paths[push] for push in beside} | {self._push: path}
        clear_cache = self._kv_on_update == "recompute" and not is_side_by_side
        if clear_cache:
            self.num_re_prefilled += sum(live.num_known for live in self._live.values())
        try:
            update = protocol.Update(push=self._push, path=str(path), clear_cache=clear_cache, beside=beside)
            self._worker.send(update)
            updated = self._wait_for(protocol.Updated, f"weights to be loaded (push {self._push})")
            if updated.push != self._push:
                raise ChannelError("vLLM answered for other weights", got=updated.push, allowed=self._push)
            _LOG.info("push %d: vLLM sampled nothing for %.3f s", updated.push, updated.pause_s)
            if is_taken_back:
                self._resubmit()
        except (ExecutorDied, ChannelTimeout) as error:
            self._replace(error)
            self.wait_ready()
        self._folder.keep_only(self._paths.values())

    def probe(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: logprobs of `tokens` int32 [T] as the vLLM that serves computes them, without its cache."""
        self.wait_ready()
        try:
            logprobs = self._probe(tokens)
        except (ExecutorDied, ChannelTimeout) as error:
            self._replace(error)
            self.wait_ready()
            logprobs = self._probe(tokens)
        self._probed = tokens, logprobs
        return logprobs

    # Around it

    def wait_ready(self) -> None:
        """Until vLLM serves. Raises ChannelTimeout after the start's deadline, ExecutorDied when it does not start.

        Once a process has ended that is not to be replaced, every call raises what ended it.
        """
        if self._lost is not None:
            raise self._lost
        while not self._is_ready:
            try:
                self._worker.wait_for(protocol.Started, "vLLM to start", self._deadlines.start_s)
                self._started()
            except (ExecutorDied, ChannelTimeout) as error:
                self._replace(error)

    @property
    def pid(self) -> int:
        return self._worker.pid

    def has_work(self) -> bool:
        """Whether `step` would do anything now."""
        return bool(self._finished) or self._worker.has_news() or self.wait_s() == 0.0

    def wait_fds(self) -> list[int]:
        return self._worker.wait_fds()

    def wait_s(self) -> float | None:
        """Seconds until a deadline passes; None without one."""
        ends = [self._silent_s] if self._is_due else []
        ends += [end_s for live in self._live.values() if (end_s := live.end_s) is not None]
        return max(0.0, min(ends) - self._clock.now_s()) if ends else None

    def close(self) -> None:
        self._worker.close(is_orderly=self._is_ready)
        self._folder.close()

    # Within

    def _fill(self) -> None:
        """Send waiting requests to vLLM where their stream has room."""
        if not self._is_ready or not self._paths:
            return
        jobs = []
        for stream, room in self._rooms.items():
            num_taken = sum(live.request.stream == stream for live in self._live.values())
            for request in self._waiting.take(stream, room - num_taken):
                version = self._table.bound_to(request)
                version = self.version if version is None else version
                jobs.append(self._job(LiveCompletion.of(request, self._clock.now_s(), version)))
        self._submit(jobs)

    def _begun_versions(self) -> set[int]:
        held = self._waiting.resumed_versions.intersection(self._held.versions)
        return held | {live.version for live in self._live.values()}

    def _job(self, live: LiveCompletion) -> protocol.SamplingJob:
        """Register `live` under a new id; its next token is drawn with noise of its own, whatever came before.

        In a later turn too: the seed is of the branch, and of the first token's place in the whole episode.
        """
        request, live.first = live.request, len(live.tokens)
        if live.tokens or request.is_again:
            self.num_re_prefilled += live.num_known
        key = noise_key(self._seed, *request.noise_coordinates)
        self._num_ids += 1
        self._live[self._num_ids] = live
        return protocol.SamplingJob(
            id=self._num_ids,
            push=self._held.of.get(live.version, self._push),
            prompt=[*request.prompt_tokens.tolist(), *live.tokens],
            max_tokens=request.max_new_tokens - live.first,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            seed=noise_key(key, request.num_before + live.first, 0, 0) >> 1,
        )

    def _submit(self, jobs: list[protocol.SamplingJob]) -> None:
        if jobs:
            if len(self._live) == len(jobs):
                self._heard_s = self._clock.now_s()  # nothing was due before
            self._worker.send(protocol.Submit(jobs=jobs))

    def _resubmit(self) -> None:
        lives, self._live = list(self._live.values()), {}
        self._submit([self._job(live) for live in lives])

    def _take_out(self, refused: int | None = None) -> None:
        """Have vLLM drop every live job; what it has said of them until then counts, but for the `refused` push."""
        ids = list(self._live)
        if self._is_ready and ids:
            self._worker.send(protocol.Abort(ids=ids))
            while self._wait_for(protocol.Aborted, "completions to be taken out").ids != ids:
                pass  # the answer to an earlier one, of completions that were out of time
            self._receive(refused)

    def _receive(self, refused: int | None = None) -> None:
        """Take every frame that is there. Raises ExecutorDied behind the last one of a process that has ended."""
        while (frame := self._worker.receive()) is not None:
            self._heard_s = self._clock.now_s()
            match frame:
                case protocol.Tokens(deltas=deltas):
                    for delta in deltas:
                        if delta.push != refused:
                            self._take(delta)
                case protocol.Started() if not self._is_ready:
                    self._started()
                case protocol.Aborted():
                    pass
                case _:
                    raise ChannelError(f"{self._worker.name} said what nobody asked for", got=type(frame).__name__)

    def _take(self, delta: protocol.Delta) -> None:
        live = self._live.get(delta.id)
        if live is None:  # of a job that was dropped
            return
        pushes = [delta.push, *(push for push, _, _ in delta.spans or [])]
        num_tokens = len(live.tokens) + len(delta.tokens)
        is_valid = (
            len(delta.tokens) == len(delta.logprobs)
            and num_tokens <= live.request.max_new_tokens
            and all(0 <= token < self._vocab_size for token in delta.tokens)
            and all(push in self._versions for push in pushes)
            and all(0 <= start <= end <= num_tokens - live.first for _, start, end in delta.spans or [])
            and delta.finish in ("", "stop", "length")
            and not (delta.finish and num_tokens == 0)
            and (delta.num_cached is None or 0 <= delta.num_cached <= len(live.request.prompt_tokens) + live.first)
        )
        if not is_valid:
            raise ChannelError(f"tokens from {self._worker.name} make no sense", got=msgspec.to_builtins(delta))
        if delta.num_cached is not None and live.request.num_before and not live.first:
            num_again = self._contexts.found(live.request, delta.num_cached)
            self.num_re_prefilled += 0 if live.request.is_again else num_again
        live.tokens += delta.tokens
        live.logprobs += delta.logprobs
        live.versions += [self._versions[delta.push]] * len(delta.tokens)
        for push, start, end in delta.spans or []:
            live.versions[live.first + start : live.first + end] = [self._versions[push]] * (end - start)
        if delta.finish:
            del self._live[delta.id]
            self._finish(live, "stop" if delta.finish == "stop" else "length")

    def _finish(self, live: LiveCompletion, reason: FinishReason) -> None:
        known = live.resume
        self._contexts.finished(live.request, len(live.tokens))
        self._finished.append(
            Finished(
                request=live.request,
                tokens=known.tokens,
                logprobs=known.logprobs,
                version_spans=known.version_spans,
                finish_reason=reason,
                started_s=live.started_s,
                finished_s=self._clock.now_s(),
            )
        )

    def _end_late(self) -> None:
        now_s = self._clock.now_s()
        late = [i for i, live in self._live.items() if (end_s := live.end_s) is not None and end_s <= now_s]
        if late and self._is_ready:
            self._worker.send(protocol.Abort(ids=late))
        for i in late:
            self._finish(self._live.pop(i), "deadline")

    # The process

    def _start(self) -> WorkerProcess:
        self._is_ready = False
        self._heard_s = self._clock.now_s()
        paths = {push: str(path) for push, path in self._paths.items()}
        spec = msgspec.structs.replace(
            self._spec,
            model=str(self._folder.base),
            pushes=paths,
            push=self._push,
            folder=str(self._folder.path),
        )
        return WorkerProcess(self._launch, name="the vLLM process", spec=spec)

    def _started(self) -> None:
        """The process serves; one that replaces another must agree with it on the last probe before it goes on."""
        self._is_ready = self._has_served = True
        if self._probed is not None and self._push in self._versions:
            tokens, expected = self._probed
            error = float(np.abs(self._probe(tokens) - expected).max(initial=0.0))
            if not error <= self._tolerance:
                raise WeightSyncError(
                    "a restarted vLLM computes other logprobs than the one before",
                    got=f"largest difference {error:.3g} nats",
                    allowed=f"{self._tolerance:.3g} nats",
                )
        self._resubmit()
        self._fill()

    def _replace(self, error: ExecutorDied | ChannelTimeout) -> None:
        """Start another process for one that died or is stuck; its `error` is raised when there were too many."""
        refused = None if self._push in self._versions else self._push
        with contextlib.suppress(ExecutorDied, ChannelError):  # an answer may come late, when nobody waits for it
            self._receive(refused)  # the last it said
        self._worker.close(is_orderly=False)
        if not self._has_served or self.num_restarts >= self._max_restarts:
            self._lost = error
            raise error
        _LOG.warning("vLLM is started again with version %d: %s", self.version, error)
        self.num_restarts += 1
        self._worker = self._start()

    @property
    def _is_due(self) -> bool:
        """Whether vLLM owes us anything."""
        return bool(self._live) or not self._is_ready

    @property
    def _patience_s(self) -> float:
        return self._deadlines.silence_s if self._is_ready else self._deadlines.start_s

    @property
    def _silent_s(self) -> float:
        """When its silence will have lasted too long."""
        return self._heard_s + self._patience_s

    def _probe(self, tokens: np.ndarray) -> np.ndarray:
        self._num_ids += 1
        self._worker.send(protocol.Probe(id=self._num_ids, tokens=tokens.tolist()))
        probed = self._wait_for(protocol.Probed, "the logprobs of the probe text")
        if probed.id != self._num_ids:
            raise ChannelError("vLLM answered another probe", got=probed.id, allowed=self._num_ids)
        return np.array(probed.logprobs, dtype=np.float32)

    def _wait_for(self, kind: type[FrameT], what: str) -> FrameT:
        frame = self._worker.wait_for(kind, what, self._deadlines.answer_s)
        self._heard_s = self._clock.now_s()
        return frame
