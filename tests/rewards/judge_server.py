"""A judge behind a real HTTP server in a thread, which counts for itself what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = str | dict[str, Any] | int | tuple[int, dict[str, str]] | None
"""What the judge says, or its message; or a status, perhaps with headers; None: the connection is closed."""


@dataclass
class JudgeServer:
    """Answers with `reply(question)`, in a thread for each request; 11 tokens in and 7 out each."""

    reply: Callable[[str], Answer]
    port: int = 0
    usage: Any = field(default_factory=lambda: {"prompt_tokens": 11, "completion_tokens": 7})
    questions: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    statuses: list[int] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0

    def __enter__(self) -> JudgeServer:
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer._answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        ThreadingHTTPServer.request_queue_size = 256
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        with self._lock:
            self.num_open += 1
            self.max_open = max(self.max_open, self.num_open)
            self.bodies.append(body)
            self.questions.append(body["messages"][-1]["content"])
            self.keys.add(request.headers.get("Authorization"))
        try:
            answer = self.reply(body["messages"][-1]["content"])
        finally:
            with self._lock:
                self.num_open -= 1
        if answer is None:
            return
        status, headers = (
            (200, {}) if isinstance(answer, str | dict) else answer if isinstance(answer, tuple) else (answer, {})
        )
        said = {
            "choices": [
                {"message": answer if isinstance(answer, dict) else {"content": answer}, "finish_reason": "stop"}
            ],
            "usage": self.usage,
        }
        payload = json.dumps(said if status == 200 else {"error": f"key {request.headers['Authorization']}"})
        self.statuses.append(status)
        try:
            request.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(payload))}.items():
                request.send_header(name, value)
            request.end_headers()
            request.wfile.write(payload.encode())
        except OSError:  # who asked has given up
            pass
