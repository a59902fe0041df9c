"""Chat completions of a model behind an OpenAI-compatible address, and marks around text that nobody vouches for."""

from __future__ import annotations

import asyncio
import email.utils
import functools
import hashlib
import http.client
import io
import json
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from slipstream.core.errors import ConfigError

MAX_RESPONSE_BYTES = 4 << 20
MAX_BACKOFF_S = 30.0
_RETRIED = {408, 409, 425, 429}  # and 5xx: another attempt may succeed
_SHOWN_CHARS = 200


class ChatMessage(msgspec.Struct):
    """The text of an answer; None where it has none, as of a model that was still thinking at max_tokens."""

    content: str | None = None


class ChatChoice(msgspec.Struct):
    """One answer; `finish_reason` is 'length' where it was cut at max_tokens."""

    message: ChatMessage
    finish_reason: Any = None


class ChatCompletion(msgspec.Struct):
    """The part of an endpoint's answer that is read; nothing hangs on the form of its usage."""

    choices: list[ChatChoice]
    usage: Any = None

    def tokens(self, name: str) -> int:
        """The number in a field of the usage, 0 where the endpoint has not counted."""
        count = self.usage.get(name) if isinstance(self.usage, dict) else None
        return count if type(count) is int and count > 0 else 0


class AttemptFailed(Exception):
    """This attempt gave nothing, the next one may; `wait_s` is what the endpoint asks for."""

    def __init__(self, reason: str, *, wait_s: float = 0.0, is_timeout: bool = False) -> None:
        super().__init__(reason)
        self.wait_s, self.is_timeout = wait_s, is_timeout


class RequestRefused(Exception):
    """The endpoint refuses what it is asked (a wrong key, model or address): no other attempt would fare better."""


@dataclass(frozen=True)
class ChatEndpoint:
    """A model behind `<base_url>/chat/completions`.

    `api_key_env` names the environment variable with the key; None sends none. Neither redirects nor the environment's
    proxies are followed: the key goes to `base_url` only. ConfigError for an address that is no bare one, or a key that
    is missing.
    """

    base_url: str
    api_key_env: str | None = None

    def __post_init__(self) -> None:
        if not _is_plain_address(self.base_url):
            what = "a judge's base_url is the bare address of an API"
            hint = "a key belongs into the environment variable that api_key_env names"
            raise ConfigError(what, allowed="http://host:port/v1 or https://host/v1", hint=hint)
        self.api_key()

    async def chat(self, body: bytes, deadline_s: float) -> ChatCompletion:
        """Return the answer to a request, within `deadline_s` from looking up the host to the last byte.

        AttemptFailed where another attempt may succeed, RequestRefused where none can.
        """
        status, retry_after, raw = await self._post(body, deadline_s)
        said = f"status {status}: {raw.decode(errors='replace')}"
        if status in _RETRIED or status >= 500:
            raise AttemptFailed(said, wait_s=retry_after)
        if status != 200:
            raise RequestRefused(self.clip(said))
        try:
            answer = msgspec.json.decode(raw, type=ChatCompletion)
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors, and so is bad UTF-8
            raise AttemptFailed(f"an answer that is no chat completion ({error})") from error
        if not answer.choices:
            raise AttemptFailed("an answer without choices")
        return answer

    async def _post(self, body: bytes, deadline_s: float) -> tuple[int, float, bytes]:
        """Status, seconds the server asks to wait, and body of the response."""
        url = urlsplit(self.base_url)
        is_tls = url.scheme == "https"
        port = url.port or (443 if is_tls else 80)
        where = f"{url.hostname}:{port}"
        key = self.api_key()
        head = [
            f"POST {url.path.rstrip('/')}/chat/completions HTTP/1.1",
            f"Host: {url.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Accept-Encoding: identity",
            "Connection: close",  # so that the end of the response is the end of the stream
            *([f"Authorization: Bearer {key}"] if key else []),
        ]
        waiting_for = f"a connection to {where}"
        writer: asyncio.StreamWriter | None = None
        raw = bytearray()
        try:
            async with asyncio.timeout(deadline_s):
                reader, writer = await asyncio.open_connection(url.hostname, port, ssl=_tls() if is_tls else None)
                waiting_for = f"{where} to take the request"
                writer.write("\r\n".join([*head, "", ""]).encode() + body)
                await writer.drain()
                waiting_for = f"the answer of {where}"
                while chunk := await reader.read(1 << 16):
                    raw += chunk
                    waiting_for = f"the rest of the answer of {where} after {len(raw)} bytes"
                    if len(raw) > MAX_RESPONSE_BYTES:
                        raise AttemptFailed(f"an answer of more than {MAX_RESPONSE_BYTES} bytes")
        except TimeoutError as error:
            raise AttemptFailed(
                f"nothing within {deadline_s:g} s while waiting for {waiting_for}", is_timeout=True
            ) from error
        except ssl.SSLCertVerificationError as error:
            raise RequestRefused(f"{where} is not who it says it is: {error}") from error
        except OSError as error:
            raise AttemptFailed(f"{type(error).__name__} while waiting for {waiting_for}: {error}") from error
        finally:
            if writer is not None:
                writer.transport.abort()
        return _read_response(bytes(raw))

    def api_key(self) -> str | None:
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise ConfigError(
                "the judge's API key is missing" if not key else "the judge's API key has characters no key has",
                got=f"environment variable {self.api_key_env}",
                hint=f"export {self.api_key_env}=..., or leave api_key_env out where no key is needed",
            )
        return key

    def without_key(self, text: str) -> str:
        return text.replace(key, "***") if (key := self.api_key()) else text

    def clip(self, text: str) -> str:
        """`text` as far as an error shows it: short, without the key, and without what would move a cursor."""
        text = "".join(c if c.isprintable() else " " for c in self.without_key(text))
        return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # reading the system's certificates takes longer than a handshake


def _is_plain_address(base_url: str) -> bool:
    """Whether it is scheme, host, port and path alone, fit to be written into a request's first lines."""
    try:
        url = urlsplit(base_url)
        url.port  # noqa: B018 - raises unless it is a number
    except ValueError:
        return False
    is_bare = not url.query and not url.fragment and "@" not in url.netloc
    is_one_word = base_url.isascii() and base_url.isprintable() and " " not in base_url
    return url.scheme in ("http", "https") and bool(url.hostname) and is_bare and is_one_word


class _Received:
    """As much of a socket as `http.client` needs to parse a response that is all here."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._raw)


def _read_response(raw: bytes) -> tuple[int, float, bytes]:
    response = http.client.HTTPResponse(cast(Any, _Received(raw)), method="POST")
    try:
        response.begin()
        body = response.read()
    except (http.client.HTTPException, ValueError) as error:
        raise AttemptFailed(f"an answer that is no HTTP, or not all of it ({type(error).__name__})") from error
    return response.status, _seconds_of(response.headers.get("Retry-After", "")), body


def _seconds_of(retry_after: str) -> float:
    """The seconds that a number or a date asks to wait; 0 for anything else."""
    if retry_after.isascii() and retry_after.isdecimal() and len(retry_after) <= 6:
        return float(retry_after)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def marked(texts: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return a number that whoever wrote `texts` could not guess, and each text between marks with it."""
    mark = hashlib.blake2b(json.dumps(list(texts.values())).encode(), digest_size=6).hexdigest()
    return mark, {name: f"[{name} {mark}]\n{text}\n[end of {name} {mark}]" for name, text in texts.items()}
