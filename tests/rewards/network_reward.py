"""A reward that asks a service, as a judge does, and one that gives up on it by itself."""

from __future__ import annotations

import asyncio
import os
import urllib.request
from typing import Any
from urllib.parse import urlsplit

CONNECTIONS: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
"""A client's pool."""


def judged(completions: list[str], **columns: Any) -> list[float]:
    url = columns["url"][0]
    with urllib.request.urlopen(url, timeout=30) as answer:
        return [float(answer.read()) for _ in completions]


async def judged_over_one_connection(completions: list[str], **columns: Any) -> list[float]:
    host, _, port = urlsplit(columns["url"][0]).netloc.partition(":")
    if not CONNECTIONS:
        CONNECTIONS.append(await asyncio.open_connection(host, int(port)))
    reader, writer = CONNECTIONS[0]
    writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    return [float(await reader.readexactly(4)) for _ in completions]


def keyed(completions: list[str], **columns: Any) -> list[float]:
    return [float(os.environ["JUDGE_KEY"]) for _ in completions]


def tries_for_ever(completions: list[str], **columns: Any) -> list[float]:
    while True:
        try:
            return judged(completions, **columns)
        except OSError:
            continue
