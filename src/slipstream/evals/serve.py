"""`slipstream serve`: a finished model behind an address in OpenAI's form, for evaluation harnesses and scripts.

Nothing here imports torch before the arguments have been looked at and the port is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from slipstream.core.errors import ConfigError, clip
from slipstream.core.plain import wrong_text
from slipstream.environments.chat import parsed_template
from slipstream.environments.tool_calls import check_format
from slipstream.evals.target import served_target
from slipstream.models.hub import Tell

if TYPE_CHECKING:
    from slipstream.evals.served import ServedModel, ServeLimits

DEFAULT_SLOTS = 16
DEFAULT_MAX_WAITING = 256
START_S = 30.0
CLOSE_S = 5.0
BACKLOG = 1_024
_WAIT_S = 60.0
_MAX_NAME_CHARS = 256
_MAX_SLOTS, _MAX_WAITING = 4_096, 65_536

MakeModel = Callable[[Callable[[Exception], None]], "ServedModel"]


class Serving:
    """A model that is served from now on, until `close`; also a context manager.

    `base_url` is the address for OpenAI's clients, with /v1 at its end. `template` is that of each message of a chat;
    None where the model's chat template is used.
    """

    def __init__(
        self, listener: socket.socket, make: MakeModel, limits: ServeLimits, template: str | None, *, name: str
    ) -> None:
        self.name, self.template = name, template
        host, port = listener.getsockname()[:2]
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        self._listener, self._make, self._limits = listener, make, limits
        self._loop: asyncio.AbstractEventLoop
        self._failure: Exception | None = None
        self._ended = threading.Event()
        started = Future[asyncio.Event]()
        self._thread = threading.Thread(target=self._run, args=(started,), name="serve-http", daemon=True)
        self._thread.start()
        self._stop = started.result(START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Return when somebody else has closed it; Ctrl-C comes through at once. Raises what has ended the engine."""
        while not self._ended.wait(_WAIT_S):
            pass
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Refuse what waits and end. Returns within CLOSE_S; a step of the engine that takes longer ends by itself."""
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_S)

    def _run(self, started: Future[asyncio.Event]) -> None:
        try:
            asyncio.run(self._serve(started))
        except Exception as error:  # noqa: BLE001 - told where somebody waits
            self._failure = error
            if not started.done():
                started.set_exception(error)
        finally:
            self._listener.close()
            self._ended.set()

    async def _serve(self, started: Future[asyncio.Event]) -> None:
        """Ends when: `close`, or the engine fails."""
        from slipstream.environments.gateway import GatewayLimits, GatewayServer, build_app
        from slipstream.evals.own_sites import OwnSitesOnly

        self._loop, stop = asyncio.get_running_loop(), asyncio.Event()

        def fail(error: Exception) -> None:
            self._failure = error
            stop.set()

        model = self._make(fail)
        most = 2 * self._limits.max_open
        limits = GatewayLimits(max_pending=most, max_connections=max(most, GatewayLimits.max_connections))
        app = build_app(model, limits=limits)
        if not model.asks_for_key:
            app.add_middleware(OwnSitesOnly)
        server = GatewayServer(app, self._listener, limits=limits)
        try:
            await server.start()
            started.set_result(stop)
            await stop.wait()
        finally:
            model.refuse_all()
            await server.stop()
            model.close()


def serve(
    model: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    api_key_env: str | None = None,
    slots: int = DEFAULT_SLOTS,
    max_len: int | None = None,
    max_waiting: int = DEFAULT_MAX_WAITING,
    name: str | None = None,
    template: str | None = None,
    tool_format: str = "auto",
    chat_template_kwargs: Mapping[str, bool | int | float | str] | None = None,
    tell: Tell | None = None,
) -> Serving:
    """Serve a model in OpenAI's form; returns when it answers.

    `model` is a run's directory, a Hugging Face checkpoint's, or a hub id. `port` 0 takes a free one. `api_key_env`
    names the environment variable with the key that clients must send; without one everybody who reaches the port may
    ask, so `host` must be loopback then. `slots` requests decode together and `max_waiting` more wait; the next one is
    refused with status 429. `max_len` bounds context and answer in tokens (default: what the model has room for, at
    most 2,048). Chats go by the model's chat template; `template`, such as "{content}", replaces it. A model without
    one has that of its run's prompts where it has one place, as "{content}>" for "{word}>", else "{content}".
    `chat_template_kwargs` are further variables of the model's template (default: those of its run). `tool_format` is
    as `environment.tool_format` in a recipe.

    ConfigError for bad input.
    """
    _check_numbers(port=(port, 0, 65_535), slots=(slots, 1, _MAX_SLOTS), max_waiting=(max_waiting, 0, _MAX_WAITING))
    if max_len is not None:
        _check_numbers(max_len=(max_len, 2, 2**31 - 1))
    key = _key_in(api_key_env)
    _check_texts(name=name, template=template, tool_format=tool_format)
    address = _resolved(host, port)
    if key is None and not ipaddress.ip_address(address[1][0].partition("%")[0]).is_loopback:
        what = "others than this machine's users are served only with an API key"
        allowed = "127.0.0.1, or the environment variable that holds a key: --api-key NAME"
        raise ConfigError(what, got=f"host = '{host}' without a key", allowed=allowed)
    target = served_target(model, tell=tell)
    listener = _listening(address, port)
    try:
        from slipstream.evals.served import loaded

        if chat_template_kwargs is not None:
            target = target._replace(variables=dict(chat_template_kwargs))
        if name is not None:
            target = target._replace(name=name)
        made = loaded(
            target,
            api_key=key,
            num_slots=slots,
            max_waiting=max_waiting,
            max_len=max_len,
            template=template,
            tool_format=tool_format,
        )
        return Serving(listener, *made, name=target.name)
    except BaseException:
        listener.close()
        raise


def _check_numbers(**given: tuple[int, int, int]) -> None:
    for field, (value, low, high) in given.items():
        if not low <= value <= high:
            raise ConfigError(f"'{field}' is out of range", got=value, allowed=f"{low}..{high}")


def _check_texts(*, name: str | None, template: str | None, tool_format: str) -> None:
    if name is not None and (not 0 < len(name) <= _MAX_NAME_CHARS or wrong_text(name) is not None):
        raise ConfigError("a model's name is a short text", got=clip(name), allowed=f"1..{_MAX_NAME_CHARS} characters")
    if template is not None:
        parsed_template(template)
    if tool_format != "auto":
        check_format(tool_format)


def _key_in(variable: str | None) -> str | None:
    """Return the key in an environment variable. ConfigError where there is none, or one that no header carries."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            "the API key is missing" if not key else "the API key has characters that no key has",
            got=f"environment variable {clip(variable)}",
            hint="the key itself is in that variable: it is no argument",
        )
    return key


_Address = tuple[socket.AddressFamily, tuple[Any, ...]]


def _resolved(host: str, port: int) -> _Address:
    """Return the family and the first address of `host`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        allowed = "an address or a name of this machine, such as 127.0.0.1 or 0.0.0.0"
        raise ConfigError("there is no such host", got=clip(host), allowed=allowed) from error
    return family, address


def _listening(address: _Address, port: int) -> socket.socket:
    """Return a socket that listens there: clients that come while the model is loaded wait."""
    family, at = address
    try:
        listener = socket.create_server(at[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL, errno.EINVAL):
            raise
        raise ConfigError(
            f"port {port} of {at[0]} cannot be listened at",
            got=error.strerror,
            allowed="an address of this machine, and a port that nobody listens at",
            hint="choose another one with --port; 0 takes one that is free",
        ) from error
    listener.setblocking(False)
    return listener
