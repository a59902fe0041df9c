"""A scripted OpenAI-compatible endpoint on a local port, in the test's own event loop."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Received:
    """One request: its first line and headers (names in lower case), and its JSON."""

    line: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def text(self) -> str:
        return "\n".join(message["content"] for message in self.body["messages"])


Reply = bytes | Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


def chat(content: str | None) -> bytes:
    """A chat completion that says `content`."""
    return http(200, json.dumps({"id": "x", "choices": [{"index": 0, "message": {"content": content}}]}))


def http(status: int, body: str = "", *headers: str) -> bytes:
    payload = body.encode()
    lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(payload)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + payload


async def hang(_request: Received, _writer: asyncio.StreamWriter) -> None:
    """Never answers; ends when the client goes or the server is closed."""
    await asyncio.Event().wait()


@dataclass
class Endpoint:
    """Answers request i with `replies[i]`, the last one ever after."""

    replies: Sequence[Reply]
    url: str = ""
    received: list[Received] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            line, *rest = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (entry.partition(":") for entry in rest)}
            body = json.loads(await reader.readexactly(int(headers["content-length"])))
            request = Received(line, headers, body)
            reply = self.replies[min(len(self.received), len(self.replies) - 1)]
            self.received.append(request)
            if isinstance(reply, bytes):
                writer.write(reply)
                await writer.drain()
            else:
                await reply(request, writer)
        except (ConnectionError, asyncio.IncompleteReadError):  # the client gave up
            pass
        finally:
            self.num_open -= 1
            writer.close()


@asynccontextmanager
async def serving(*replies: Reply, tls: ssl.SSLContext | None = None) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(replies)
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(endpoint.answer(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    endpoint.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}/v1"
    try:
        yield endpoint
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
