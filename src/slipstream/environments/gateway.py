"""An HTTP gateway in OpenAI's form to an endpoint, and the server that holds it.

    POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /v1/models/NAME   GET /health

All but /health are there below /s/KEY too, for clients that can be given an address and no API key. A client is an
agent's code, which nobody vouches for: the bytes and the time of a request, the requests that wait and the connections
are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from slipstream.environments.asks import Ask, Endpoint, Refused, TurnReply, looked_at
from slipstream.environments.openai_api import CHAT, TEXT, Dialect, no_constant, response_form
from slipstream.environments.openai_replies import ResponseForm, Stamp, error_body, model_entry

CANCEL_LIMIT_S = 1.0
"""For this long a request waits for the end of what it has cancelled; its place stays taken until then."""
STOP_LIMIT_S = 2.0
_TURNS_OF_AN_ACCEPT = 8
"""More turns of the loop than asyncio needs from an accepted connection to `connection_made`: four."""
DRAIN_LIMIT_S = 1.0
"""For this long a body that is too large is read on, for nothing."""
NO_RETRY = {"x-should-retry": "false"}
"""Header that keeps OpenAI's clients from asking again by themselves: another turn is not the one that failed."""
RETRIED = (429, 503)


@dataclass(frozen=True)
class GatewayLimits:
    """Bounds of what clients may take. `max_pending` are requests of one session that wait for their turns.

    `request_limit_s` is for all of a request: its body, its turn, its answer. `idle_limit_s` is for a connection until
    the head of its first or next request is there.
    """

    max_body_bytes: int = 4 << 20
    max_pending: int = 64
    request_limit_s: float = 600.0
    max_connections: int = 4_096
    idle_limit_s: float = 75.0


def build_app(endpoint: Endpoint, *, limits: GatewayLimits | None = None) -> Starlette:
    """Return the gateway to `endpoint` as an ASGI application."""
    gateway = _Gateway(endpoint, limits or GatewayLimits())
    routes = [Route("/health", _health, methods=["GET"])]
    for prefix in ("", "/s/{key}"):
        routes += [
            Route(f"{prefix}/v1/chat/completions", gateway.chat, methods=["POST"]),
            Route(f"{prefix}/v1/completions", gateway.completions, methods=["POST"]),
            Route(f"{prefix}/v1/models", gateway.models, methods=["GET"]),
            Route(f"{prefix}/v1/models/{{name:path}}", gateway.model, methods=["GET"]),
        ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_such_page})
    app.router.redirect_slashes = False
    return app


class _Gateway:
    """The pages of a gateway, and how many requests of each session wait for their turns."""

    def __init__(self, endpoint: Endpoint, limits: GatewayLimits) -> None:
        self._endpoint, self._limits = endpoint, limits
        self._pending = Counter[Hashable]()

    async def chat(self, request: Request) -> Response:
        """Answer POST /v1/chat/completions."""
        return await self._guarded(self._turn(request, CHAT))

    async def completions(self, request: Request) -> Response:
        """Answer POST /v1/completions."""
        return await self._guarded(self._turn(request, TEXT))

    async def models(self, request: Request) -> Response:
        """Answer GET /v1/models."""
        return await self._guarded(self._models(request))

    async def model(self, request: Request) -> Response:
        """Answer GET /v1/models/NAME."""
        return await self._guarded(self._models(request, request.path_params["name"]))

    async def _guarded(self, answer: Awaitable[Response]) -> Response:
        """Return the answer, or why there is none, within the time of a request."""
        limit_s = self._limits.request_limit_s
        try:
            async with asyncio.timeout(limit_s) as deadline:
                return await answer
        except Refused as refused:
            return _error(refused.status, str(refused), refused.code)
        except ClientDisconnect:
            return Response(status_code=499)  # for nobody
        except Exception as error:  # noqa: BLE001 - an endpoint's; the client is told its kind alone
            if deadline.expired():
                return _error(504, f"there was no answer within {limit_s:g} s", "timeout")
            return _error(500, f"the endpoint failed ({type(error).__name__})", "internal_error")

    def _session(self, request: Request) -> Hashable:
        """Return whose request this is."""
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        api_key = key.strip() if kind.lower() == "bearer" else ""
        session = self._endpoint.session_of(request.path_params.get("key"), api_key or None)
        if session is None:
            raise Refused(
                "the API key, or the key in the address, belongs to no session here", status=401, code="invalid_api_key"
            )
        return session

    @contextlib.contextmanager
    def _place(self, session: Hashable) -> Iterator[None]:
        """Hold one of a session's places for requests."""
        if self._pending[session] >= self._limits.max_pending:
            raise Refused(
                f"{self._limits.max_pending} requests of this session wait already", status=429, code="too_many_pending"
            )
        self._pending[session] += 1
        try:
            yield
        finally:
            self._pending[session] -= 1
            if not self._pending[session]:
                del self._pending[session]

    async def _turn(self, request: Request, dialect: Dialect) -> Response:
        """Return the response with a turn. A stream begins with its first text, so errors before keep their status."""
        ends_s = asyncio.get_running_loop().time() + self._limits.request_limit_s
        session = self._session(request)
        with contextlib.ExitStack() as held:
            held.enter_context(self._place(session))
            body = _parsed(await _read(request, self._limits.max_body_bytes))
            ask, form = dialect.ask(body), response_form(body)
            stamp = Stamp(f"{dialect.prefix}-{uuid.uuid4().hex}", int(time.time()), self._endpoint.model)
            said = self._said(request, session, ask, tells=form.is_stream and not form.has_logprobs)
            if form.is_stream:
                events = _events(said, (dialect, form, stamp), held.pop_all())
                return _EventStream(await anext(events), events, ends_s)
            async with contextlib.aclosing(said):
                reply = await anext(said)
        assert isinstance(reply, TurnReply), "nothing was told before"
        return _json(dialect.whole(reply, form, stamp))

    async def _said(
        self, request: Request, session: Hashable, ask: Ask, *, tells: bool
    ) -> AsyncGenerator[str | TurnReply]:
        """Yield what the endpoint tells of the turn's text, then its reply; end its work when the client is gone.

        Unblocked by: the endpoint, or the client's end.
        """
        told = asyncio.Queue[str | None]()  # None: one of the two is done
        turn = asyncio.ensure_future(self._endpoint.ask(session, ask, told.put_nowait if tells else None))
        gone = asyncio.ensure_future(_gone(request))
        for task in (turn, gone):
            task.add_done_callback(lambda _: told.put_nowait(None))
        try:
            while (text := await told.get()) is not None:
                yield text
            if not turn.done():
                raise ClientDisconnect
            if turn.cancelled():
                raise Refused("the endpoint gave this request up", status=500, code="given_up")
            yield turn.result()
        finally:
            await _ended(turn, gone)

    async def _models(self, request: Request, name: str | None = None) -> Response:
        self._session(request)
        model = model_entry(self._endpoint.model)
        if name is None:
            return _json({"object": "list", "data": [model]})
        if name != self._endpoint.model:
            raise Refused("there is no model of this name", status=404, code="model_not_found")
        return _json(model)


Written = tuple[Dialect, ResponseForm, Stamp]
"""How a turn is written."""


async def _events(
    said: AsyncGenerator[str | TurnReply], written: Written, held: contextlib.ExitStack
) -> AsyncGenerator[str]:
    """Yield the server-sent events of a stream. An error behind the first is an event. `held` is let go at the end."""
    (dialect, form, stamp), num_told, last = written, 0, ""
    with held:
        async with contextlib.aclosing(said):
            try:
                async for one in said:
                    if isinstance(one, str):
                        yield _sent(dialect.piece(one, form, stamp, num_told))
                        num_told += len(one)
                    else:
                        last = _sent(dialect.chunks(one, form, stamp, num_told)) + "data: [DONE]\n\n"
            except Refused as refused:
                if not num_told:
                    raise
                last = _sent([error_body(str(refused), refused.status, refused.code)])
    yield last


def _sent(chunks: Iterable[Any]) -> str:
    return "".join(f"data: {_text(chunk)}\n\n" for chunk in chunks)


class _EventStream(StreamingResponse):
    """Server-sent events as they come, up to `ends_s` of the loop's time. They end by themselves without a client."""

    def __init__(self, first: str, rest: AsyncGenerator[str], ends_s: float) -> None:
        super().__init__(self._all(first, rest), headers={"content-type": "text/event-stream; charset=utf-8"})
        self._rest, self._ends_s = rest, ends_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the form of a page
        """Send all of it."""
        with contextlib.suppress(ClientDisconnect, TimeoutError):  # a stream that is cut ends with its connection
            async with asyncio.timeout_at(self._ends_s), contextlib.aclosing(self._rest):
                await self.stream_response(send)

    @staticmethod
    async def _all(first: str, rest: AsyncGenerator[str]) -> AsyncGenerator[str]:
        yield first
        async for one in rest:
            yield one


async def _read(request: Request, max_bytes: int) -> bytes:
    """Return the body. Refused for one above `max_bytes`, behind up to twice as many bytes of it, or DRAIN_LIMIT_S.

    A client that sends all of a body before it reads would lose the answer to a connection that ends with bytes unread.
    """
    told, stream, body = request.headers.get("content-length", "0"), request.stream(), bytearray()
    if len(told) <= 18 and int(told) <= max_bytes:
        async for piece in stream:
            body += piece
            if len(body) > max_bytes:
                break
        else:
            return bytes(body)
    if "expect" not in request.headers:  # else nothing is sent before it is asked for
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(DRAIN_LIMIT_S):
                num_read = len(body)
                async for piece in stream:
                    num_read += len(piece)
                    if num_read > 2 * max_bytes:
                        break
    raise Refused(f"the body has more than {max_bytes:,} bytes", status=413, code="body_too_large")


def _parsed(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body.decode(), parse_constant=no_constant)
    except RecursionError as error:
        raise Refused("the body is nested too deep", code="invalid_json") from error
    except ValueError as error:
        raise Refused("the body is no JSON", code="invalid_json") from error
    if not isinstance(value, dict):
        raise Refused("the body is a JSON object", code="invalid_json")
    return value


async def _gone(request: Request) -> None:
    """Wait until the client has closed its connection. The body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait for their ends, within CANCEL_LIMIT_S."""
    for task in tasks:
        task.cancel()
        task.add_done_callback(looked_at)
    await asyncio.wait(tasks, timeout=CANCEL_LIMIT_S)


def _text(value: Any) -> str:
    """Return `value` as JSON in ASCII: half of a surrogate pair does no harm, and no character ends a line of SSE."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_text(value), status, headers, media_type="application/json")


def _error(status: int, sentence: str, code: str) -> Response:
    """Return an error in OpenAI's form. The connection ends, since the rest of the body may still be on its way."""
    headers = {"connection": "close"} | ({} if status in RETRIED else NO_RETRY)
    return _json(error_body(sentence, status, code), status, headers)


async def _health(request: Request) -> Response:  # noqa: ARG001 - the form of a page
    return _json({"status": "ok"})


async def _no_such_page(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return _error(status, f"{request.method} is not answered at this address", "not_found")


class _GatewayConnection(H11Protocol):
    """A connection that is aborted if the head of its first or next request does not come within its time.

    uvicorn has such a limit between two requests alone, and none once the first byte of a head is there.
    """

    def __init__(self, *args: Any, limits: GatewayLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, or abort where there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            transport.abort()
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        """Read a piece; the wait is over if it completes a head."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Wait for the next head, which may be there already."""
        answered = self.cycle
        self._await_head()
        super().on_response_complete()
        if self.cycle is not answered:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait."""
        self._stop_waiting()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close now, or behind the response that is under way."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def _await_head(self) -> None:
        self._stop_waiting()
        self._idle = self.loop.call_later(self._limits.idle_limit_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


def listen_on_loopback() -> socket.socket:
    """Return a socket that listens on a free port of 127.0.0.1."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1_024)
    listener.setblocking(False)
    return listener


class GatewayServer:
    """Serves an application on a listening socket in the running loop, with uvicorn's HTTP.

    uvicorn's own server would take the process's signals and look at its state ten times a second.
    """

    def __init__(self, app: Starlette, listener: socket.socket, *, limits: GatewayLimits | None = None) -> None:
        self._listener, self._port = listener, int(listener.getsockname()[1])
        limits = limits or GatewayLimits()
        config = Config(
            app,
            http=_GatewayConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=max(1, int(limits.idle_limit_s)),
        )
        config.load()
        self._state = ServerState()
        self._connect = partial(_GatewayConnection, config, self._state, {}, limits=limits)
        self._server: asyncio.Server | None = None

    @property
    def base_url(self) -> str:
        """The address without a path: "http://127.0.0.1:PORT"."""
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Begin to answer. Connections that were made before are taken then."""
        self._server = await asyncio.get_running_loop().create_server(self._connect, sock=self._listener)

    async def stop(self) -> None:
        """Take no more requests, give those that run half of STOP_LIMIT_S, cancel the others, close all connections.

        Ends within STOP_LIMIT_S. The listening socket is closed. May be called twice.
        """
        server, self._server = self._server, None
        if server is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
        for _ in range(_TURNS_OF_AN_ACCEPT):  # asyncio's server would leave open what it has accepted and not begun
            for connection in [*self._state.connections]:
                connection.shutdown()  # at once where no request runs, else behind its response
            await asyncio.sleep(0)
        if server is not None:
            server.close()
        self._listener.close()
        for _ in range(2):
            if running := [*self._state.tasks]:
                await asyncio.wait(running, timeout=STOP_LIMIT_S / 2)
            for task in [*self._state.tasks]:
                task.cancel()
        for connection in [*self._state.connections]:
            connection.transport.abort()
        await asyncio.sleep(0)  # for the connections' last call
