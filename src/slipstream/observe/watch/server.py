"""The server of the watch page: loopback only, standard library only, and nothing it is asked can change anything.

    GET /                page.html, watch.css and js/*.js, as they lie in `page/`
    GET /api/<name>      an answer of `answers.py`, JSON
    GET /api/live        server-sent events: the pulse, whenever something has changed

Every connection has a thread, and there are at most `MAX_CONNECTIONS`, of which `MAX_STREAMS` may be live ones. One
more thread reads the run's files: all clients share what it knows.

Whoever can reach the port may read the run: it listens on loopback, which other users of the machine reach, too. What
other sites make a browser ask is refused: by the name in `Host` (DNS rebinding) and by `Sec-Fetch-Site`. A link to the
page may be on any site: a browser shows the site nothing of what it leads to.
"""

from __future__ import annotations

import contextlib
import errno
import http.server
import logging
import socket
import socketserver
import threading
import time
import webbrowser
from importlib import resources
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

import msgspec

from slipstream.core.errors import ConfigError
from slipstream.core.own_sites import refusal
from slipstream.observe.watch.answers import ANSWERS, BadRequest, pulse
from slipstream.observe.watch.index import LiveVerdict, RunIndex

LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 96
MAX_STREAMS = 24
REQUEST_DEADLINE_S = 10.0  # for a request to arrive, an answer to be taken, and a connection to be asked again
POLL_EVERY_S = 1.0
SHUT_DOWN_S = 0.2
PATIENCE_S = 2.0
HEARTBEAT_S = 5.0  # a live client is told something at least so often, which is how one that left is noticed
TURN_S = 0.03  # of reading, while answers wait ...
BREATH_S = 0.002  # ... and between two of them

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",  # whatever the machine's table says: browsers insist
    ".svg": "image/svg+xml",
}

log = logging.getLogger(__name__)


def assets() -> dict[str, tuple[str, bytes]]:
    """Path -> (content type, bytes) of everything that the page is made of."""
    root = resources.files(__package__) / "page"
    files = {f"/{entry.name}": entry for entry in root.iterdir()}
    files |= {f"/js/{entry.name}": entry for entry in (root / "js").iterdir()}
    files["/"] = files.pop("/page.html")
    kinds = {path: TYPES.get(Path(entry.name).suffix) for path, entry in files.items()}
    return {path: (kind, files[path].read_bytes()) for path, kind in kinds.items() if kind is not None}


class Watch:
    """Serves the page of `run_dir` from now on, until `close`; also a context manager.

    `url` is where. ConfigError where `port` is taken; 0 takes any that is free.
    """

    def __init__(self, run_dir: str | Path, *, port: int = 0) -> None:
        folder = Path(run_dir).absolute()  # the program may go to another working folder
        self.index, self.verdict = RunIndex(folder), LiveVerdict(folder)
        self.lock = threading.Lock()  # of `index`
        self.changed = threading.Condition()
        self.num_changes = 0
        self.failure: str | None = None  # why files are not read any more
        self._stop = threading.Event()
        self._server = _bound(self, port)
        self.port: int = self._server.server_address[1]
        self.url = f"http://{LOOPBACK}:{self.port}/"
        self._threads = [
            threading.Thread(target=target, name=f"watch-{name}", daemon=True)
            for name, target in (("http", self._serve), ("files", self._follow), ("accounting", self._account))
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        return self._stop.is_set()

    def wait(self) -> None:
        """Return when somebody else has closed it; Ctrl-C comes through at once."""
        while not self._stop.wait(60.0):
            pass

    def close(self) -> None:
        """End all connections. Nothing is left of it on return, but perhaps for accounting that is under way."""
        self._stop.set()
        with self.changed:
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._server.hang_up()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _serve(self) -> None:
        """Consumes: connections. Waits for: one, `SHUT_DOWN_S` at a time. Ends when: `close`."""
        self._server.serve_forever(poll_interval=SHUT_DOWN_S)

    def _follow(self) -> None:
        """Keep up with the files. Whatever ended that would be seen by nobody: who looks at the page is told."""
        try:
            self._read()
        except Exception as error:
            log.exception("the run's files are not read any more")
            self.failure = f"{type(error).__name__}: {error}"
            self._tell()

    def _read(self) -> None:
        """Consumes: the run's files, a piece at a time. Waits for: `POLL_EVERY_S` without news. Ends when: `close`."""
        told_s, is_untold = 0.0, True
        while not self._stop.is_set():
            with self.lock:
                turn_s = time.monotonic() + TURN_S
                while (is_behind := self.index.advance()) and time.monotonic() < turn_s:
                    is_untold = True
            now_s, is_untold = time.monotonic(), is_untold or is_behind
            if is_untold and (not is_behind or now_s - told_s >= POLL_EVERY_S):
                told_s, is_untold = now_s, False
                self._tell()
            self._stop.wait(BREATH_S if is_behind else POLL_EVERY_S)

    def _account(self) -> None:
        """Consumes: the run's files as they are. Waits for: `POLL_EVERY_S`. Ends when: `close`."""
        while not self._stop.wait(POLL_EVERY_S):
            try:
                has_news = self.index.is_caught_up and self.verdict.update(self.index, now_s=time.monotonic())
            except Exception:
                log.exception("there is no verdict on this run")
                return
            if has_news:
                self._tell()

    def _tell(self) -> None:
        with self.changed:
            self.num_changes += 1
            self.changed.notify_all()


def watch(run_dir: str | Path, *, port: int = 0, open_browser: bool = False) -> Watch:
    """Serve the live page of the run in `run_dir`, which need not have begun; returns at once.

    `port` 0 takes a free one. ConfigError for a folder that is none, and for a port that is taken.
    """
    path = Path(run_dir)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"'{path}' is no folder of a run", got="a file", hint="give the folder that --out names")
    found = Watch(path, port=port)
    if open_browser:
        webbrowser.open(found.url)
    return found


def _bound(owner: Watch, port: int) -> _Server:
    try:
        return _Server(owner, port)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        what = f"port {port} cannot be listened at"
        hint = "choose another one with --port; 0 takes one that is free"
        raise ConfigError(what, got=error.strerror, allowed="a port that nobody listens at", hint=hint) from error
    except OverflowError as error:
        raise ConfigError("there is no such port", got=port, allowed="0..65535") from error


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """A thread per connection, and no more of them than there may be."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 32

    def __init__(self, owner: Watch, port: int) -> None:
        self.owner = owner
        self.assets = assets()
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self.streams = threading.BoundedSemaphore(MAX_STREAMS)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        super().__init__((LOOPBACK, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            request.settimeout(1.0)
            request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections[request] = threading.current_thread()
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                del self._connections[request]
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - a client that left is no error
        log.debug("a connection ended", exc_info=True)

    def hang_up(self) -> None:
        """End what is open, and wait for the threads."""
        with self._lock:
            open_now = dict(self._connections)
        for request, thread in open_now.items():
            with contextlib.suppress(OSError):  # it has gone by itself
                request.shutdown(socket.SHUT_RDWR)
            thread.join(REQUEST_DEADLINE_S)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_DEADLINE_S
    server_version = "Slipstream"
    sys_version = ""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        opened = [self.headers.get(f"Sec-Fetch-{name}") for name in ("Mode", "Dest")] == ["navigate", "document"]
        fetch_site = "none" if opened and url.path == "/" else self.headers.get("Sec-Fetch-Site", "none")
        why = refusal(self.headers.get("Host", ""), fetch_site)
        if why is not None:
            self._send(403, "text/plain; charset=utf-8", why.encode())
            return
        if (asset := self.server.assets.get(url.path)) is not None:
            self._send(200, *asset)
        elif url.path == "/api/live":
            self._stream()
        elif (answer := ANSWERS.get(url.path)) is not None:
            owner, query = self.server.owner, dict(parse_qsl(url.query)[:32])
            try:
                with owner.lock:
                    found = answer(owner.index, query)
                body = msgspec.json.encode(found)
            except BadRequest as error:
                self._send(400, "text/plain; charset=utf-8", str(error).encode())
                return
            except Exception as error:  # files of every kind are read: whoever asked is told, and so is the log
                log.exception("no answer to %s", self.path)
                self._send(500, "text/plain; charset=utf-8", f"{type(error).__name__}: {error}".encode())
                return
            self._send(200, "application/json", body)
        else:
            self._send(404, "text/plain; charset=utf-8", b"there is nothing here")

    do_HEAD = do_GET

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self._head(status, {"Content-Type": content_type, "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, more: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (HEADERS | more).items():
            self.send_header(name, value)
        self.end_headers()

    def _stream(self) -> None:
        """Consumes: changes. Waits for: one, at most `HEARTBEAT_S`. Ends when: the client leaves, or `Watch.close`."""
        if not self.server.streams.acquire(blocking=False):
            self._send(503, "text/plain; charset=utf-8", b"as many pages are live as may be")
            return
        try:
            self.close_connection = True
            self._head(200, {"Content-Type": "text/event-stream; charset=utf-8", "Connection": "close"})
            self._beat()
        finally:
            self.server.streams.release()

    def _beat(self) -> None:
        owner = self.server.owner
        while not owner.is_closed:
            told = owner.num_changes
            with owner.lock:
                verdict = {"verdict": owner.verdict.sentence, "verdict_steps": owner.verdict.steps}
                found = pulse(owner.index) | verdict | {"failure": owner.failure}
            self.wfile.write(b"data: " + msgspec.json.encode(found) + b"\n\n")
            with owner.changed:
                if owner.num_changes == told and not owner.is_closed:
                    owner.changed.wait(HEARTBEAT_S)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
