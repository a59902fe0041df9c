"""Agents for the tests of hosts, well-behaved and not. Each does what its row says, under "do"."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import numpy as np

if TYPE_CHECKING:  # for a second and more it is imported, by each worker and for all tests
    from openai import AsyncOpenAI, OpenAI

RELEASED = threading.Event()
"""Set by tests of this process at their end: agents that hang return."""
LEFT: list[tuple[str, str]] = []
"""Addresses and keys of episodes, as an agent finds them that keeps those of others."""
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def client_of(base_url: str, api_key: str) -> AsyncOpenAI:
    import httpx
    from openai import AsyncOpenAI

    http = httpx.AsyncClient(verify=False, trust_env=False, limits=httpx.Limits(max_connections=None))
    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=http)


def plain_client_of(base_url: str, api_key: str) -> OpenAI:
    import httpx
    from openai import OpenAI

    http = httpx.Client(verify=False, trust_env=False)
    return OpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=http)


async def ask(client: AsyncOpenAI, text: Any, **fields: Any) -> Any:
    said = [{"role": "user", "content": str(text)}]
    response = await client.chat.completions.create(model="policy", messages=said, **fields)  # type: ignore[call-overload]
    return response.choices[0].message


async def run_with_plain_client(row: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Ask once with a client as users make it, which takes what the environment says of proxies."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        return len((await ask(client, row["text"])).content)


POST = """
    import json, os, sys
    from http.client import HTTPConnection  # imported in a fraction of the time of OpenAI's

    def post(base_url, api_key, text):
        place, _, path = base_url.removeprefix("http://").partition("/")
        http = HTTPConnection(place)
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]})
        http.request("POST", f"/{path}/chat/completions", body, {"authorization": f"Bearer {api_key}"})
        said = json.loads(http.getresponse().read())
        http.close()
        return said["choices"][0]["message"]["content"]
"""
"""How agents that are files of their own begin, indented as what follows it."""


class LightClient:
    """What `ask` and `talk` use of an AsyncOpenAI, where it is not the client that is tested: without its imports."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._url, self._key = urlsplit(base_url), api_key
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, **fields: Any) -> Any:
        body = json.dumps(fields).encode()
        head = f"POST {self._url.path}/chat/completions HTTP/1.1\r\nHost: {self._url.netloc}\r\nConnection: close\r\n"
        head += f"Authorization: Bearer {self._key}\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        try:
            writer.write(head.encode() + body)
            told, _, said = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        assert told.startswith(b"HTTP/1.1 200"), told
        return json.loads(said, object_hook=lambda table: SimpleNamespace(**table))


async def run_light(row: dict[str, Any], base_url: str, api_key: str) -> Any:
    return await DEEDS[row["do"]](row, cast("AsyncOpenAI", LightClient(base_url, api_key)))


def run_plain_light(row: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Do it in a thread."""
    return asyncio.run(run_light(row, base_url, api_key))


async def run(row: dict[str, Any], base_url: str, api_key: str) -> Any:
    async with client_of(base_url, api_key) as client:
        return await DEEDS[row["do"]](row, client)


def run_plain(row: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Ask as many times as the row says, or do what it names, in a thread."""
    with plain_client_of(base_url, api_key) as client:
        if row["do"] != "talk":
            return PLAIN[row["do"]](row, client)
        messages: list[Any] = [{"role": "user", "content": row["text"]}]
        for _ in range(row["turns"]):
            turn = client.chat.completions.create(model="policy", messages=messages).choices[0].message
            messages += [{"role": "assistant", "content": turn.content}, {"role": "user", "content": "on"}]
        return float(len(messages[-2]["content"]))


def run_awaitable(row: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Return what is to be awaited, from a function that is not async."""
    return run(row, base_url, api_key)


async def talk(row: dict[str, Any], client: AsyncOpenAI) -> float:
    messages: list[Any] = [{"role": "user", "content": row["text"]}]
    for _ in range(row["turns"]):
        response = await client.chat.completions.create(model="policy", messages=messages)
        turn = response.choices[0].message
        messages += [{"role": "assistant", "content": turn.content}, {"role": "user", "content": "on"}]
    return float(len(messages[-2]["content"]))


async def give(row: dict[str, Any], client: AsyncOpenAI) -> Any:
    return REWARDS[row["what"]]()


async def parallel(row: dict[str, Any], client: AsyncOpenAI) -> float:
    """Ask all at once; the sum of the numbers in the answers."""
    told = await asyncio.gather(*(ask(client, number) for number in range(row["count"])))
    return float(sum(int(one.content) for one in told))


async def too_many(row: dict[str, Any], client: AsyncOpenAI) -> Any:
    """Ask for more than there are places; how many were refused, and by what."""
    from openai import APIError

    told = await asyncio.gather(*(ask(client, number) for number in range(row["count"])), return_exceptions=True)
    codes = {one.code for one in told if isinstance(one, APIError)}
    assert codes == {"too_many_pending"}, codes
    return sum(isinstance(one, APIError) for one in told)


async def call_a_tool(row: dict[str, Any], client: AsyncOpenAI) -> float:
    turn = await ask(client, "add", tools=[TOOL])
    [call] = turn.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}'), call
    return 1.0


async def note_a_refusal(row: dict[str, Any], client: AsyncOpenAI) -> float:
    from openai import BadRequestError

    refused = None
    try:
        await ask(client, "hi")
    except BadRequestError as error:
        refused = error.body
    told = {"message": row["sentence"], "type": "invalid_request_error", "param": None, "code": row["code"]}
    assert refused == told, refused
    return 1.0


async def fail(row: dict[str, Any], client: AsyncOpenAI) -> None:
    for _ in range(row.get("turns", 0)):
        await ask(client, "hi")
    raise ValueError(row["text"])


async def exits(row: dict[str, Any], client: AsyncOpenAI) -> None:
    sys.exit(3)


async def cancels_itself(row: dict[str, Any], client: AsyncOpenAI) -> None:
    raise asyncio.CancelledError


async def hang(row: dict[str, Any], client: AsyncOpenAI) -> None:
    """Hang behind some turns."""
    for number in range(row["turns"]):
        await ask(client, number)
    await asyncio.get_running_loop().create_future()


async def swallow(row: dict[str, Any], client: AsyncOpenAI) -> None:
    """Never end, whatever it is told."""
    for number in range(row["turns"]):
        await ask(client, number)
    while not RELEASED.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.02)


async def insist(row: dict[str, Any], client: AsyncOpenAI) -> None:
    """Ask for ever, whatever comes of it."""
    while True:
        with contextlib.suppress(Exception):
            await ask(client, "again")


async def block(row: dict[str, Any], client: AsyncOpenAI) -> None:
    RELEASED.wait(300.0)


async def die(row: dict[str, Any], client: AsyncOpenAI) -> None:
    for number in range(row["turns"]):
        await ask(client, number)
    os._exit(7)


async def leave_a_task(row: dict[str, Any], client: AsyncOpenAI) -> float:
    """Return while a request is open, and another one is sent when the episode is over."""

    async def later() -> None:
        async with client_of(str(client.base_url), client.api_key) as mine:
            for number in range(2):
                LEFT_ERRORS.append(await _error_of(ask(mine, number)))

    task = asyncio.get_running_loop().create_task(later())
    _KEPT.add(task)
    await ask(client, "first")
    await asyncio.sleep(0)
    return float(row["reward"])


_KEPT: set[Any] = set()
LEFT_ERRORS: list[str] = []


async def tell_what_was_left(row: dict[str, Any], client: AsyncOpenAI) -> float:
    """Wait for the end of what `leave_a_task` has left, and check what became of its requests."""
    await asyncio.wait(_KEPT)
    assert LEFT_ERRORS == ["400 episode_over", "401 invalid_api_key"], LEFT_ERRORS
    return 1.0


async def _error_of(request: Awaitable[Any]) -> str:
    from openai import APIError

    try:
        await request
    except APIError as error:
        return f"{getattr(error, 'status_code', None)} {error.code}"
    return "none"


async def show_keys(row: dict[str, Any], client: AsyncOpenAI) -> float:
    """Leave this episode's address and key to another one, and ask once."""
    LEFT.append((str(client.base_url), client.api_key))
    await ask(client, row["text"])
    return 0.0


async def steal(row: dict[str, Any], client: AsyncOpenAI) -> float:
    """Mix one's own address and key with those of another episode, which must give nothing."""
    import httpx

    base_url, key = LEFT[-1]
    own_url, own_key = str(client.base_url), client.api_key
    for url, api_key in [(base_url, own_key), (own_url, key), (own_url, "none"), (own_url, "é"), (base_url, "x")]:
        async with httpx.AsyncClient(verify=False, trust_env=False) as http:
            headers = {"authorization": f"Bearer {api_key}".encode()}
            page = await http.post(f"{url}chat/completions", headers=headers, json={"messages": []})
            assert page.status_code == 401, (url, api_key, page.text)
            root = url[: url.index("/s/")]
            page = await http.post(f"{root}/v1/chat/completions", headers=headers, json={"messages": []})
            assert page.status_code == 401, page.text
    return 1.0


async def send_too_much(row: dict[str, Any], client: AsyncOpenAI) -> float:
    """Send a body that is too large, and one that is so as a message to the pool; the next one is in order."""
    numbers = [0.5] * 500_000
    first = await _error_of(ask(client, "x" * (4 << 20)))
    assert first in ("413 body_too_large", "None None"), first  # the connection ends while the client still writes
    errors = ["413 body_too_large"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": numbers}}}
    errors.append(await _error_of(ask(client, "x", extra_body={"tools": [tool]})))  # which the client does not look at
    assert errors == ["413 body_too_large", "413 body_too_large"], errors
    return float((await ask(client, "fine")).content)


async def go_away(row: dict[str, Any], client: AsyncOpenAI) -> float:
    """Give up requests that the policy is busy with, then ask again for one that is answered."""
    loop = asyncio.get_running_loop()
    given_up = [loop.create_task(ask(client, f"given up {number}")) for number in range(row["count"])]
    told = _SIGNALS[loop] = asyncio.Event()
    await told.wait()
    for task in given_up:
        task.cancel()
    await asyncio.wait(given_up)
    error = await _error_of(ask(client, "again"))
    assert error == row["error"], error
    return 1.0


async def signal(row: dict[str, Any], client: AsyncOpenAI) -> None:
    """Let `go_away` go on."""
    _SIGNALS.pop(asyncio.get_running_loop()).set()


_SIGNALS: dict[asyncio.AbstractEventLoop, asyncio.Event] = {}


Deed = Callable[[dict[str, Any], "AsyncOpenAI"], Awaitable[Any]]
DEEDS: dict[str, Deed] = {
    one.__name__: one
    for one in (
        talk,
        give,
        parallel,
        too_many,
        call_a_tool,
        note_a_refusal,
        fail,
        exits,
        cancels_itself,
        hang,
        swallow,
        insist,
        block,
        die,
        leave_a_task,
        tell_what_was_left,
        show_keys,
        steal,
        send_too_much,
        go_away,
        signal,
    )
}
REWARDS: dict[str, Callable[[], Any]] = {
    "a number": lambda: 3,
    "none": lambda: None,
    "numpy": lambda: np.float32(0.5),
    "true": lambda: True,
    "text": lambda: "1.0",
    "nan": lambda: float("nan"),
    "a list": lambda: [1.0],
    "descriptors": lambda: len(os.listdir("/proc/self/fd")),
    "threads": lambda: sum(not thread.name.startswith("blocking") for thread in threading.enumerate()),
}


def _plain_hang(row: dict[str, Any], client: OpenAI) -> None:
    for number in range(row["turns"]):
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": str(number)}])
    RELEASED.wait(300.0)


def _plain_exit(row: dict[str, Any], client: OpenAI) -> None:
    sys.exit(3)


PLAIN: dict[str, Callable[[dict[str, Any], OpenAI], Any]] = {"hang": _plain_hang, "exits": _plain_exit}
