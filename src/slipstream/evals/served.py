"""A model behind the gateway: asks of many clients decode together in one engine.

    ask -> ids (thread "serve-text") -> engine (thread "serve-engine") -> reply (thread "serve-text")

The loop of the gateway waits for futures alone: both threads wake it when they are done.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.core.sections import GeneratorConfig
from slipstream.environments.asks import Ask, Refused, SamplingWishes, Tell, TurnReply
from slipstream.evals.chat_text import ChatText, ReadAsk
from slipstream.evals.decoding import DecodeJob, DecodeThread
from slipstream.evals.target import ServedTarget
from slipstream.generator.engine import Engine
from slipstream.generator.native import native_engine
from slipstream.generator.requests import Finished, Request
from slipstream.models.build import stop_token_ids
from slipstream.models.foreign_text import rehearse_tokenizer
from slipstream.models.hf import load_model
from slipstream.models.peft import tokenizer_folder
from slipstream.models.preflight import check_checkpoint, check_vocabulary
from slipstream.models.sizes import check_slots
from slipstream.models.tokenizer import has_tokenizer, load_tokenizer

SEEDED_STREAM, UNSEEDED_STREAM = 4, 5
"""Streams of sampling noise (`generator/noise.py`), of requests with a seed and without one."""
DEFAULT_MAX_TOKENS = 1_024
"""Tokens of a turn where the client names no number and the context has room for so many."""
DEFAULT_MAX_LEN = 2_048
"""Tokens of context and answer together, where nobody says how many and the model has room for so many."""
LEAST_TEMPERATURE = 1e-3
"""Sampling below this is greedy: the likeliest token has all of the mass, and logits over less may overflow."""
LEAST_TOP_P = 1e-6
"""A client's 0 keeps the likeliest token alone, as this does."""
ENGINE_END_S = 1.0
"""For the engine's thread to end its present step."""

Found = TypeVar("Found")


@dataclass(frozen=True)
class ServeLimits:
    """Bounds of a served model: `max_waiting` asks wait beside those that have a slot."""

    num_slots: int
    max_len: int
    max_waiting: int

    @property
    def max_open(self) -> int:
        return self.num_slots + self.max_waiting


class ServedModel:
    """The endpoint of a gateway (`environments/asks.py`) over an engine that nobody else drives.

    `api_key` None lets everybody ask. `on_failure` hears in the loop of an error that ends the engine.
    """

    def __init__(
        self,
        engine: Engine,
        text: ChatText,
        name: str,
        on_failure: Callable[[Exception], None],
        *,
        limits: ServeLimits,
        api_key: str | None,
        num_ids: int,
    ) -> None:
        self._text, self._name, self._limits, self._api_key = text, name, limits, api_key
        self._num_ids, self._tell = num_ids, on_failure
        self._loop = asyncio.get_running_loop()
        self._workers = ThreadPoolExecutor(1, thread_name_prefix="serve-text")
        self._decoder = DecodeThread(engine, on_failure=self._call(self._fail))
        self._waiting: set[asyncio.Future[Finished]] = set()
        self._num_open = 0
        self._over: Callable[[], Refused] | None = None

    @property
    def model(self) -> str:
        """The name that clients see."""
        return self._name

    @property
    def asks_for_key(self) -> bool:
        """Whether clients must send a key."""
        return self._api_key is not None

    def session_of(self, path_key: str | None, api_key: str | None) -> Hashable | None:
        """Return the one session, for the key in the header or in the address; None for a wrong one."""
        if self._api_key is None:
            return True
        given = api_key if path_key is None else path_key
        return secrets.compare_digest((given or "").encode(), self._api_key.encode()) or None

    async def ask(self, session: Hashable, ask: Ask, tell: Tell | None = None) -> TurnReply:  # noqa: ARG002
        """Return the turn. Raises Refused: bad messages or ids, wishes that cannot be met, no room, too many asks at
        once, the end.

        With tools nothing is told before the end, as a text may turn out to be a call.
        """
        if self._over is not None:
            raise self._over()
        if unmet := ask.wishes.unmet:
            raise Refused(f"not supported: {', '.join(unmet)}; the answer would not be the one that is asked for")
        if self._num_open >= self._limits.max_open:
            most = f"{self._limits.num_slots} are decoded and {self._limits.max_waiting} wait"
            raise Refused(f"too many requests at once: {most}", status=429, code="overloaded")
        self._num_open += 1
        try:
            asked = await self._in_text(partial(self._text.read, ask))
            finished = await self._decoded(asked, self._request(asked), None if ask.tools else tell)
            return await self._in_text(partial(self._text.reply, asked, finished))
        finally:
            self._num_open -= 1

    def refuse_all(self) -> None:
        """Refuse all that waits for the engine, and all that comes."""
        self._end("the server has ended", status=503, code="shutting_down")

    def close(self) -> None:
        """End the threads behind what they do."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._decoder.close(ENGINE_END_S)

    async def _in_text(self, work: Callable[[], Found]) -> Found:
        if self._over is not None:
            raise self._over()
        return await self._loop.run_in_executor(self._workers, work)

    async def _decoded(self, asked: ReadAsk, request: Request, tell: Tell | None) -> Finished:
        """Return what the engine has sampled. When the client has gone, its row is free for others."""
        ended: asyncio.Future[Finished] = self._loop.create_future()
        job = DecodeJob(request, on_end=self._call(partial(_settle, ended)), is_followed=tell is not None)
        if asked.ask.wishes.stop or tell is not None:
            told, end = None if tell is None else self._call(tell), partial(self._decoder.withdraw, job)
            job.on_tokens = _TextWatch(self._text, asked, self._workers, end, told).look
        self._waiting.add(ended)
        self._decoder.submit(job)
        try:
            return await ended
        finally:
            self._waiting.discard(ended)
            if ended.cancelled():
                self._decoder.withdraw(job)

    def _request(self, asked: ReadAsk) -> Request:
        """Return what the engine is asked. Raises Refused where the context leaves no room."""
        wishes, num_prompt = asked.ask.wishes, len(asked.tokens)
        room = self._limits.max_len - num_prompt
        if room < 1:
            raise Refused(
                f"{num_prompt:,} tokens of context leave no room for a turn: at most {self._limits.max_len:,} fit",
                code="context_length_exceeded",
            )
        is_seeded = wishes.seed is not None
        return Request(
            ordinal=wishes.seed if wishes.seed is not None else secrets.randbits(62),
            sample=0,
            stream=SEEDED_STREAM if is_seeded else UNSEEDED_STREAM,
            prompt_tokens=asked.tokens.copy(),
            max_new_tokens=min(room, max(1, wishes.max_tokens or DEFAULT_MAX_TOKENS)),
            **sampling_of(wishes, self._num_ids),
        )

    def _call(self, function: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return what calls `function` in the loop, from any thread; nothing when the loop has ended."""

        def call(value: Any) -> None:
            try:
                self._loop.call_soon_threadsafe(function, value)
            except RuntimeError:  # it is closed: nobody waits
                return

        return call

    def _fail(self, error: Exception) -> None:
        self._end(f"the engine failed ({type(error).__name__})", status=500, code="engine_failed")
        self._tell(error)

    def _end(self, why: str, *, status: int, code: str) -> None:
        self._over = self._over or partial(Refused, why, status=status, code=code)
        for ended in self._waiting:
            _settle(ended, self._over())


def loaded(
    target: ServedTarget,
    *,
    api_key: str | None,
    num_slots: int,
    max_waiting: int,
    max_len: int | None,
    template: str | None,
    tool_format: str,
) -> tuple[Callable[[Callable[[Exception], None]], ServedModel], ServeLimits, str | None]:
    """Load a checkpoint; return what makes its endpoint in the loop that is to serve it, and the template of messages.

    `serve` says what the arguments mean. ConfigError as `eval`.
    """
    shape = check_checkpoint(target.folder, "language")
    tokens = tokenizer_folder(target.folder)
    if has_tokenizer(tokens):
        rehearse_tokenizer(tokens)
    tokenizer = load_tokenizer(tokens)
    check_vocabulary(tokenizer, shape, target.folder)
    max_len = min(shape.max_positions, DEFAULT_MAX_LEN) if max_len is None else max_len
    if max_len > shape.max_positions:
        raise ConfigError(
            "the model has no room for such contexts", got=f"max_len = {max_len}", allowed=f"2..{shape.max_positions}"
        )
    check_slots(shape, "slots", num_slots, max_len, hint="lower slots or max_len")
    if template is None and not tokenizer.chat_template:
        template = target.template or "{content}"
    text = ChatText(
        tokenizer,
        template=template,
        tool_format=tool_format,
        stop_ids=stop_token_ids(tokenizer, GeneratorConfig(stop_token_ids=list(target.stop_ids)), shape),
        num_ids=shape.vocab_size,
        variables=target.variables,
    )
    engine = native_engine(
        load_model(target.folder),
        num_slots=num_slots,
        max_len=max_len,
        seed=0,
        stop_token_ids=text.stop_ids,
    )
    limits = ServeLimits(num_slots, max_len, max_waiting)
    make = partial(ServedModel, engine, text, target.name, limits=limits, api_key=api_key, num_ids=shape.vocab_size)
    return make, limits, template


class _TextWatch:
    """Tells a job's text as it grows, and ends the job at a stop text; in the thread of texts, one look at a time."""

    def __init__(
        self,
        text: ChatText,
        asked: ReadAsk,
        workers: ThreadPoolExecutor,
        end: Callable[[], None],
        tell: Callable[[str], None] | None,
    ) -> None:
        self._text, self._asked, self._workers, self._end, self._tell = text, asked, workers, end, tell
        self._told = ""
        self._num_seen = 0
        self._lock = threading.Lock()
        self._is_looking = False
        self._next: np.ndarray | None = None  # has come while a look was under way; the newest only

    def look(self, tokens: np.ndarray) -> None:
        """Begin to look, or note what to look at next. In the engine's thread."""
        with self._lock:
            if self._is_looking:
                self._next = tokens
                return
            self._is_looking = True
        self._begin(tokens)

    def _begin(self, tokens: np.ndarray) -> None:
        with contextlib.suppress(RuntimeError):  # shut down: the server ends
            self._workers.submit(self._look, tokens)

    def _look(self, tokens: np.ndarray) -> None:
        if self._tell is not None:
            text = self._text.lasting(self._asked, tokens)
            if len(text) > len(self._told) and text.startswith(self._told):
                self._tell(text[len(self._told) :])
                self._told = text
        if self._asked.ask.wishes.stop and self._text.has_stop(self._asked, tokens, self._num_seen):
            self._end()
        self._num_seen = len(tokens)
        with self._lock:
            newest, self._next = self._next, None
            self._is_looking = newest is not None
        if newest is not None:
            self._begin(newest)


def sampling_of(wishes: SamplingWishes, num_ids: int) -> dict[str, Any]:
    """Return how a client's turn is sampled, as fields of a `Request`: by default from the model itself."""
    temperature = 1.0 if wishes.temperature is None else wishes.temperature
    top_k = wishes.top_k or 0
    return {
        "temperature": 0.0 if temperature < LEAST_TEMPERATURE else temperature,
        "top_k": 0 if top_k >= num_ids else top_k,
        "top_p": 1.0 if wishes.top_p is None else max(LEAST_TOP_P, wishes.top_p),
        "min_p": wishes.min_p or 0.0,
    }


def _settle(ended: asyncio.Future[Finished], end: Finished | Exception) -> None:
    if ended.done():
        return
    if isinstance(end, Exception):
        ended.set_exception(end)
    else:
        ended.set_result(end)
