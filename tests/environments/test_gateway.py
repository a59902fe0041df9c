"""The gateway as OpenAI's own clients and hostile ones see it, in front of an endpoint that is told what to do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable
from typing import Any

import msgspec
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from slipstream.environments import gateway
from slipstream.environments.asks import Ask, Refused, SamplingWishes, Tell, TurnReply
from slipstream.environments.gateway import GatewayLimits, GatewayServer, build_app, listen_on_loopback
from slipstream.environments.tool_calls import parse

GENEROUS_S = 30.0
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
HI: list[Any] = [{"role": "user", "content": "hi"}]


def reply_of(text: str, **fields: Any) -> TurnReply:
    """Return a turn of one id for each word."""
    pieces = [word + " " for word in text.split()]
    return TurnReply(
        message=parse(text, "hermes").message,
        finish_reason=fields.pop("finish_reason", "stop"),
        num_prompt_tokens=4,
        tokens=list(range(len(pieces))),
        logprobs=[-0.5] * len(pieces),
        versions=[(0, 7)],
        pieces=pieces,
        prompt_tokens=[1, 2, 3, 4],
        **fields,
    )


class Scripted:
    """An endpoint of two sessions that answers what it is told, and counts what goes on in it."""

    model = "org/policy"

    def __init__(self, answer: Callable[[Ask], Awaitable[TurnReply]] | None = None) -> None:
        self.asked: list[tuple[Hashable, Ask]] = []
        self.cancelled: list[Hashable] = []
        self.news = asyncio.Condition()
        self._answer = answer
        self.tells: list[str] = []

    def session_of(self, path_key: str | None, api_key: str | None) -> Hashable | None:
        key = path_key or api_key
        return key if key in ("key-a", "key-b") else None

    async def ask(self, session: Hashable, ask: Ask, tell: Tell | None = None) -> TurnReply:
        await self._tell(lambda: self.asked.append((session, ask)))
        try:
            for told in self.tells if tell is not None else ():
                tell(told)
            return await self._answer(ask) if self._answer else reply_of("Hello there.")
        except asyncio.CancelledError:
            await self._tell(lambda: self.cancelled.append(session))
            raise

    async def _tell(self, change: Callable[[], None]) -> None:
        async with self.news:
            change()
            self.news.notify_all()

    async def until(self, is_there: Callable[[], bool]) -> None:
        async with asyncio.timeout(GENEROUS_S), self.news:
            await self.news.wait_for(is_there)


async def forever(ask: Ask) -> TurnReply:
    return await asyncio.get_running_loop().create_future()


@contextlib.asynccontextmanager
async def serving(endpoint: Scripted, **limits: Any) -> AsyncIterator[GatewayServer]:
    bounds = GatewayLimits(**{"request_limit_s": GENEROUS_S, **limits})
    server = GatewayServer(build_app(endpoint, limits=bounds), listen_on_loopback(), limits=bounds)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def client_of(server: GatewayServer, key: str = "key-a", *, max_retries: int = 0, path: str = "/v1") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.base_url + path, api_key=key, max_retries=max_retries, timeout=GENEROUS_S)


Scenario = Callable[[Scripted, GatewayServer, AsyncOpenAI], Coroutine[Any, Any, None]]


def play(scenario: Scenario, answer: Callable[[Ask], Awaitable[TurnReply]] | None = None, **limits: Any) -> Scripted:
    """Play a scenario with a server and a client in one loop; return the endpoint."""

    async def whole() -> Scripted:
        endpoint = Scripted(answer)
        async with serving(endpoint, **limits) as server, client_of(server) as client:
            await scenario(endpoint, server, client)
        return endpoint

    return asyncio.run(whole())


def saying(text: str, **fields: Any) -> Callable[[Ask], Awaitable[TurnReply]]:
    async def answer(ask: Ask) -> TurnReply:
        return reply_of(text, **fields)

    return answer


# OpenAI's clients


def test_a_chat() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        completion = await client.chat.completions.create(model="any", messages=HI, max_completion_tokens=9)
        [choice] = completion.choices
        assert (choice.message.content, choice.message.role, choice.finish_reason) == (
            "Hello there.",
            "assistant",
            "stop",
        )
        assert (completion.model, completion.object, choice.logprobs) == ("org/policy", "chat.completion", None)
        assert completion.usage
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (4, 2)
        assert completion.id.startswith("chatcmpl-")

    endpoint = play(scenario)
    assert endpoint.asked == [("key-a", Ask(messages=HI, wishes=SamplingWishes(max_tokens=9)))]


def test_tool_calls_there_and_back() -> None:
    """The client's own objects go back as they came, so the policy's turn is the message that it was."""
    first = 'I add.<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2.50, "c": "é"}}</tool_call>'

    async def answer(ask: Ask) -> TurnReply:
        return reply_of(first if len(ask.messages or ()) == 1 else "It is 3.")

    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        messages = list(HI)
        turn = (await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)).choices[0]
        assert turn.finish_reason == "tool_calls"
        assert turn.message.tool_calls
        [call] = turn.message.tool_calls
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2.5, "c": "é"}
        messages += [turn.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        assert (await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)).choices[
            0
        ].message.content == "It is 3."
        dumped = [*HI, turn.message.model_dump(), messages[-1]]
        await client.chat.completions.create(model="m", messages=dumped, tools=TOOLS)

    endpoint = play(scenario, answer)
    turn = parse(first, "hermes").message
    assert [ask.tools for _, ask in endpoint.asked] == [TOOLS] * 3
    assert endpoint.asked[1][1].messages == [*HI, turn, {"role": "tool", "content": "3", "tool_call_id": "call_0"}]
    assert endpoint.asked[2][1] == endpoint.asked[1][1]


def test_a_malformed_call() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        turn = (await client.chat.completions.create(model="m", messages=HI, tools=TOOLS)).choices[0]
        assert turn.message.tool_calls
        [call] = turn.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "malformed"
        assert "malformed JSON" in call.function.arguments

    play(scenario, saying('<tool_call>{"name": "add", </tool_call>'))


def test_a_streamed_chat() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(
            model="m", messages=HI, tools=TOOLS, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        chunks = [chunk async for chunk in stream]
        choices = [chunk.choices[0] for chunk in chunks[:-1]]
        assert "".join(one.delta.content or "" for one in choices) == "I\u2028add."
        [calls] = [one.delta.tool_calls for one in choices if one.delta.tool_calls]
        assert calls[0].function
        assert (calls[0].index, calls[0].function.name, calls[0].function.arguments) == (0, "add", "{}")
        assert [one.finish_reason for one in choices] == [None, None, None, "tool_calls"]
        assert chunks[-1].usage
        assert chunks[-1].usage.total_tokens == 4 + len(chunks[1].choices[0].logprobs.content)  # type: ignore[union-attr,arg-type]
        assert len({chunk.id for chunk in chunks}) == 1

    play(scenario, saying('I\u2028add.<tool_call>{"name": "add", "arguments": {}}</tool_call>'))


def test_the_clients_own_assembly_of_a_stream() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        async with client.chat.completions.stream(model="m", messages=HI, tools=TOOLS) as stream:
            async for _ in stream:
                pass
            completion = await stream.get_final_completion()
        [choice] = completion.choices
        assert (choice.message.content, choice.finish_reason) == ("I add.", "tool_calls")
        assert choice.message.tool_calls
        assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'

    play(scenario, saying('I add.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'))


def test_streamed_and_whole_texts() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        stream = await client.completions.create(model="m", prompt="1+1=", stream=True)
        chunks = [chunk async for chunk in stream]
        assert ("".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason) == (
            " 2",
            "length",
        )
        whole = await client.completions.create(model="m", prompt="1+1=", logprobs=1)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (" 2", "length")
        assert whole.choices[0].logprobs
        assert whole.choices[0].logprobs.token_logprobs == [-0.5]

    endpoint = play(scenario, saying(" 2", finish_reason="deadline"))
    assert [ask for _, ask in endpoint.asked] == [Ask(text="1+1=")] * 2


@pytest.mark.parametrize("page", ["chat", "text"])
def test_what_is_told_comes_before_the_turn_is_over(page: str) -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        endpoint.tells = ["Hel", "lo th"]
        usage: Any = {"stream_options": {"include_usage": True}}
        more: Any = usage | {"stream": True, "extra_body": {"return_token_ids": True}}
        asked = (
            client.chat.completions.create(model="m", messages=HI, **more)
            if page == "chat"
            else client.completions.create(model="m", prompt="x", **more)
        )
        chunks: list[Any] = []
        texts: list[str] = []
        async for chunk in await asked:
            chunks.append(chunk)
            texts += [(one.delta.content if page == "chat" else one.text) or "" for one in chunk.choices]
            if "".join(texts) == "Hello th" and not over.is_set():
                over.set()
        assert [text for text in texts if text] == ["Hel", "lo th", "ere."]
        assert [one.finish_reason for chunk in chunks for one in chunk.choices if one.finish_reason] == ["stop"]
        assert chunks[-2].choices[0].token_ids == [0, 1]
        assert chunks[-1].usage.completion_tokens == 2
        assert len({chunk.id for chunk in chunks}) == 1
        if page == "chat":
            assert [one.delta.role for chunk in chunks for one in chunk.choices][:2] == ["assistant", None]

    over = asyncio.Event()

    async def answer(ask: Ask) -> TurnReply:
        await over.wait()
        return reply_of("Hello there.")

    play(scenario, answer)


def test_nothing_is_told_where_logprobs_or_the_whole_turn_are_asked_for() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        endpoint.tells = ["never"]
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True, logprobs=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello there."
        whole = await client.chat.completions.create(model="m", messages=HI)
        assert whole.choices[0].message.content == "Hello there."

    play(scenario)


def test_an_error_behind_the_first_text_is_an_event_and_one_before_it_a_status() -> None:
    async def refuse(ask: Ask) -> TurnReply:
        await asyncio.sleep(0)
        raise Refused("the server has ended", status=503, code="shutting_down")

    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.APIStatusError) as early:
            await client.chat.completions.create(model="m", messages=HI, stream=True)
        assert early.value.status_code == 503
        endpoint.tells = ["Hel"]
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
        texts = [(await anext(aiter(stream))).choices[0].delta.content for _ in range(2)]
        assert texts == ["", "Hel"]
        with pytest.raises(openai.APIError, match="the server has ended"):
            await anext(aiter(stream))

    play(scenario, refuse, max_pending=1)


@pytest.mark.parametrize("how", ["leaves", "is late"])
def test_a_stream_whose_client_leaves_or_whose_time_is_over_ends_its_ask(how: str) -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        endpoint.tells = ["Hel"]
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
        assert [(await anext(aiter(stream))).choices[0].delta.content for _ in range(2)] == ["", "Hel"]
        if how == "leaves":
            await stream.close()
        else:
            with pytest.raises(openai.APIConnectionError):
                await anext(aiter(stream))
        await endpoint.until(lambda: endpoint.cancelled == ["key-a"])
        endpoint._answer = None
        async with client_of(server, max_retries=5) as again:
            assert (await again.completions.create(model="m", prompt="x")).choices, "its place is free"

    play(scenario, forever, max_pending=1, **({} if how == "leaves" else {"request_limit_s": 1.0}))


def test_ids_in_and_out() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        extra = {"return_token_ids": True}
        text: Any = await client.completions.create(model="m", prompt=[5, 6], extra_body=extra)
        chat: Any = await client.chat.completions.create(model="m", messages=HI, extra_body=extra)
        for completion in (text, chat):
            [choice] = completion.choices
            assert completion.prompt_token_ids == [1, 2, 3, 4]
            assert (choice.token_ids, choice.token_logprobs, choice.versions) == ([0, 1], [-0.5, -0.5], [[0, 7]])

    endpoint = play(scenario)
    assert endpoint.asked[0][1] == Ask(tokens=[5, 6])


def test_logprobs() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        completion = await client.chat.completions.create(model="m", messages=HI, logprobs=True, top_logprobs=2)
        assert completion.choices[0].logprobs
        tokens = completion.choices[0].logprobs.content or []
        assert [(one.token, one.logprob, one.bytes) for one in tokens] == [
            ("Hello ", -0.5, list(b"Hello ")),
            ("there. ", -0.5, list(b"there. ")),
        ]

    play(scenario)


def test_models() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        assert [model.id async for model in client.models.list()] == ["org/policy"]
        assert (await client.models.retrieve("org/policy")).id == "org/policy"
        with pytest.raises(openai.NotFoundError, match="no model of this name"):
            await client.models.retrieve("other")

    play(scenario)


def test_requests_of_one_session_run_beside_each_other() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        everyone = asyncio.Barrier(8)

        async def answer(ask: Ask) -> TurnReply:
            await everyone.wait()
            return reply_of((ask.messages or [])[0]["content"])

        endpoint._answer = answer
        asks = [
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"n{n}"}]) for n in range(8)
        ]
        completions = await asyncio.gather(*asks)
        assert [one.choices[0].message.content for one in completions] == [f"n{n}" for n in range(8)]

    play(scenario)


def test_the_client_that_blocks() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, _: AsyncOpenAI) -> None:
        def blocking() -> list[str | None]:
            with OpenAI(base_url=f"{server.base_url}/v1", api_key="key-b", max_retries=0) as client:
                said = [client.chat.completions.create(model="m", messages=HI).choices[0].message.content]
                stream = client.chat.completions.create(model="m", messages=HI, stream=True)
                said.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
                return said

        assert await asyncio.to_thread(blocking) == ["Hello there."] * 2

    assert [session for session, _ in play(scenario).asked] == ["key-b"] * 2


# Keys and refusals


def test_keys() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, _: AsyncOpenAI) -> None:
        async with client_of(server, "wrong") as client:
            with pytest.raises(openai.AuthenticationError, match="belongs to no session") as refused:
                await client.chat.completions.create(model="m", messages=HI)
            assert refused.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with client_of(server, "wrong", path="/s/key-x/v1") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="m", messages=HI)
        async with client_of(server, "unused", path="/s/key-b/v1") as client:
            await client.chat.completions.create(model="m", messages=HI)
            await client.completions.create(model="m", prompt="x")
            await client.models.list()
            await client.models.retrieve("org/policy")

    assert [session for session, _ in play(scenario).asked] == ["key-b"] * 2


def test_what_is_refused_is_said() -> None:
    async def answer(ask: Ask) -> TurnReply:
        raise Refused("this episode is over", status=409, code="over")

    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="'n' is 1"):
            await client.chat.completions.create(model="m", messages=HI, n=2)
        assert endpoint.asked == []
        async with client_of(server, max_retries=2) as trying:
            with pytest.raises(openai.ConflictError, match="this episode is over") as refused:
                await trying.chat.completions.create(model="m", messages=HI)
        assert refused.value.code == "over"

    assert len(play(scenario, answer).asked) == 1  # the client would ask again by itself, if it were not told


def test_a_failing_endpoint_is_not_shown(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    async def answer(ask: Ask) -> TurnReply:
        raise {"secret": ZeroDivisionError, "time": TimeoutError, "gone": asyncio.CancelledError}[ask.text or ""](
            "secret"
        )

    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        for prompt, sentence in (
            ("secret", "ZeroDivisionError"),
            ("time", "TimeoutError"),
            ("gone", "gave this request"),
        ):
            with pytest.raises(openai.InternalServerError, match=sentence) as failed:
                await client.completions.create(model="m", prompt=prompt)
            assert failed.value.status_code == 500
            assert "secret" not in failed.value.response.text

    play(scenario, answer)
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.name.startswith(("uvicorn", "asyncio"))]


def test_too_many_requests_wait() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        waiting = [asyncio.ensure_future(client.completions.create(model="m", prompt="x")) for _ in range(2)]
        await endpoint.until(lambda: len(endpoint.asked) == 2)
        with pytest.raises(openai.RateLimitError, match="2 requests of this session wait"):
            await client.completions.create(model="m", prompt="x")
        async with client_of(server, "key-b") as other:
            waiting.append(asyncio.ensure_future(other.completions.create(model="m", prompt="x")))
            await endpoint.until(lambda: len(endpoint.asked) == 3)
            for one in waiting:
                one.cancel()
            await endpoint.until(lambda: len(endpoint.cancelled) == 3)
            endpoint._answer = None
            async with client_of(server, max_retries=5) as again:  # until the gateway has seen the ends, too
                await again.completions.create(model="m", prompt="x")

    play(scenario, forever, max_pending=2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_gone_ends_its_ask(stream: bool) -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        asking = asyncio.ensure_future(client.chat.completions.create(model="m", messages=HI, stream=stream))
        await endpoint.until(lambda: len(endpoint.asked) == 1)
        asking.cancel()
        await endpoint.until(lambda: endpoint.cancelled == ["key-a"])

    play(scenario, forever)


def test_a_request_has_a_deadline() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, _: AsyncOpenAI) -> None:
        async with client_of(server, max_retries=2) as client:
            with pytest.raises(openai.InternalServerError, match=r"no answer within 0\.5 s") as late:
                await client.chat.completions.create(model="m", messages=HI)
        assert (late.value.status_code, late.value.code) == (504, "timeout")

    endpoint = play(scenario, forever, request_limit_s=0.5)
    assert (len(endpoint.asked), endpoint.cancelled) == (1, ["key-a"])


def test_a_body_that_is_too_large() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        await client.completions.create(model="m", prompt="x" * 60_000)
        with pytest.raises(openai.APIStatusError, match="more than 65,536 bytes") as refused:
            await client.completions.create(model="m", prompt="x" * 66_000)
        assert refused.value.status_code == 413

    assert len(play(scenario, max_body_bytes=65_536).asked) == 1


# Clients that are none


HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-a\r\n"


async def connect(server: GatewayServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(server.base_url.rpartition(":")[2]))


async def talk(server: GatewayServer, data: bytes) -> bytes:
    """Send bytes and return all that comes until the server closes the connection."""
    reader, writer = await connect(server)
    try:
        async with asyncio.timeout(GENEROUS_S):
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                await writer.drain()
            found = b""
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(65_536):
                    found += piece
            return found
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def post(body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{header}\r\n" for header in (f"Content-Length: {len(body)}", "Connection: close", *headers))
    return f"{HEAD}{lines}\r\n".encode() + body


def status_of(response: bytes) -> int:
    return int(response.split()[1])


def error_of(response: bytes) -> dict[str, Any]:
    return json.loads(response.partition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b"null", "invalid_json"),
        (b'{"prompt": "x"', "invalid_json"),
        (b'{"temperature": NaN, "prompt": "x"}', "invalid_json"),
        (b'{"seed": ' + b"9" * 5_000 + b"}", "invalid_json"),
        (b"[" * 10_000 + b"]" * 10_000, "invalid_json"),
        (b'{"prompt":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "invalid_json"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "invalid_json"),
        (b'{"prompt":' + b"[" * 500 + b"]" * 500 + b"}", "invalid_request"),
        (b'{"prompt": "\\ud800", "n": 2}', "invalid_request"),
    ],
)
def test_hostile_bodies(body: bytes, code: str) -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, _: AsyncOpenAI) -> None:
        response = await talk(server, post(body))
        assert (status_of(response), error_of(response)["code"]) == (400, code)
        assert await talk(server, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

    assert play(scenario).asked == []


def test_half_of_a_surrogate_pair_is_replaced() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, _: AsyncOpenAI) -> None:
        assert status_of(await talk(server, post(b'{"prompt": "cut \\ud83d"}'))) == 200

    assert play(scenario).asked == [("key-a", Ask(text="cut \ufffd"))]


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\x03 garbage\r\n\r\n",
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n",  # no Host
        HEAD.encode() + b"X: " + b"a" * 200_000,
        HEAD.encode() + b"".join(b"X%d: a\r\n" % number for number in range(20_000)),
        HEAD.encode() + b"Content-Length: -5\r\n\r\n",
        HEAD.encode() + b"Content-Length: 1e3\r\n\r\n",
        HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\n",
    ],
)
def test_garbage_ends_its_connection_alone(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        response = await talk(server, data)
        assert response == b"" or status_of(response) in (400, 401)
        assert (await client.completions.create(model="m", prompt="x")).choices

    assert len(play(scenario).asked) == 1
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


@pytest.mark.parametrize(
    "data",
    [
        f"{HEAD}Content-Length: 99999999999\r\n\r\n".encode(),
        f"{HEAD}Content-Length: {'9' * 19}\r\n\r\n".encode(),
        f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()
        + b"7000\r\n"
        + b"x" * 0x7000
        + b"\r\n7000\r\n"
        + b"x" * 0x7000,
    ],
)
def test_a_body_above_the_limit_is_not_waited_for(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these bodies ever ends: only who stops reading can answer."""
    monkeypatch.setattr(gateway, "DRAIN_LIMIT_S", 0.2)

    async def scenario(endpoint: Scripted, server: GatewayServer, _: AsyncOpenAI) -> None:
        response = await talk(server, data)
        assert (status_of(response), error_of(response)["code"]) == (413, "body_too_large")

    assert play(scenario, max_body_bytes=40_000).asked == []


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_client_that_sends_all_of_a_large_body_first_gets_the_answer(
    is_chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than sockets hold: with bytes left unread, the connection would be reset with the answer in it."""
    monkeypatch.setattr(gateway, "DRAIN_LIMIT_S", GENEROUS_S)
    size = 7_900_000
    head = "Transfer-Encoding: chunked\r\n\r\n" + f"{size:x}\r\n" if is_chunked else f"Content-Length: {size}\r\n\r\n"
    data = f"{HEAD}{head}".encode() + b"x" * size + (b"\r\n0\r\n\r\n" if is_chunked else b"")

    async def scenario(endpoint: Scripted, server: GatewayServer, _: AsyncOpenAI) -> None:
        reader, writer = await connect(server)
        async with asyncio.timeout(GENEROUS_S):
            writer.write(data)
            await writer.drain()
            writer.transport.set_write_buffer_limits(0)
            await writer.drain()  # all of it
            response = await reader.read()
        assert (status_of(response), error_of(response)["code"]) == (413, "body_too_large")
        writer.close()

    assert play(scenario, max_body_bytes=4_000_000).asked == []


def test_a_body_that_does_not_come_has_the_deadline_of_its_request() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, _: AsyncOpenAI) -> None:
        response = await talk(server, f"{HEAD}Content-Length: 100\r\n\r\n{{".encode())
        assert status_of(response) == 504

    assert play(scenario, request_limit_s=0.5).asked == []


def test_a_client_that_leaves_within_its_body_gives_its_place_back() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, _: AsyncOpenAI) -> None:
        reader, writer = await connect(server)
        writer.write(f"{HEAD}Expect: 100-continue\r\nContent-Length: 100\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 100")
        assert status_of(await talk(server, post(b'{"prompt": "x"}'))) == 429
        writer.close()
        async with client_of(server, max_retries=5) as client:
            assert (await client.completions.create(model="m", prompt="x")).choices

    assert len(play(scenario, max_pending=1).asked) == 1


@pytest.mark.parametrize("data", [b"", HEAD.encode(), b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nPOST /v1"])
def test_a_head_that_does_not_come_ends_its_connection(data: bytes) -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, _: AsyncOpenAI) -> None:
        response = await talk(server, data)
        assert response.count(b"HTTP/1.1") == data.count(b"/health")

    play(scenario, idle_limit_s=0.5)


def test_the_next_head_has_its_time_too() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, _: AsyncOpenAI) -> None:
        reader, writer = await connect(server)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await reader.readuntil(b'{"status":"ok"}')
        writer.write(b"POST /v1")
        async with asyncio.timeout(GENEROUS_S):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()

    play(scenario, idle_limit_s=0.5)


def test_a_turn_that_takes_longer_than_a_head_may_is_waited_for() -> None:
    async def answer(ask: Ask) -> TurnReply:
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(0.8, over.set)
        await over.wait()
        return reply_of("late")

    async def scenario(endpoint: Scripted, server: GatewayServer, _: AsyncOpenAI) -> None:
        first = post(b'{"prompt": "x"}').replace(b"Connection: close\r\n", b"")
        assert (await talk(server, first + post(b'{"prompt": "x"}'))).count(b'"late"') == 2

    play(scenario, answer, idle_limit_s=0.5)


def test_connections_are_bounded() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        waiting = asyncio.ensure_future(client.completions.create(model="m", prompt="x"))
        await endpoint.until(lambda: len(endpoint.asked) == 1)
        assert await talk(server, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") == b""
        waiting.cancel()

    play(scenario, forever, max_connections=1)


def test_requests_behind_each_other_are_answered_in_turn() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, _: AsyncOpenAI) -> None:
        body = b'{"prompt": "x"}'
        first = f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body
        response = await talk(server, first + first + post(body))
        assert response.count(b"HTTP/1.1 200") == 3

    assert len(play(scenario).asked) == 3


def test_other_addresses() -> None:
    async def scenario(endpoint: Scripted, server: GatewayServer, _: AsyncOpenAI) -> None:
        for request, status in (
            ("GET /health", 200),
            ("GET /", 404),
            ("GET /v1/completions", 405),
            ("DELETE /v1/models/x", 405),
            ("POST /v1/completions/", 404),
            ("GET /s/key-a/health", 404),
            ("GET /s/a/b/v1/models", 404),
            ("GET /v1/models/", 401),
            ("GET /s/key-a/v1/models/..%2f..", 404),
            ("GET /s/%00%ff/v1/models", 401),
        ):
            response = await talk(server, f"{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert status_of(response) == status, request
            assert status == 200 or set(error_of(response)) == {"message", "type", "param", "code"}

    play(scenario)


# The server


def test_stopping_answers_what_ends_and_cancels_what_does_not() -> None:
    """A client that waits, one that says nothing, one in the middle of a head: none keeps the server."""

    async def whole() -> None:
        loop = asyncio.get_running_loop()
        may_end = loop.create_future()

        async def answer(ask: Ask) -> TurnReply:
            await (may_end if ask.text == "ends" else loop.create_future())
            return reply_of("It ends.")

        endpoint = Scripted(answer)
        async with serving(endpoint) as server, client_of(server) as client:
            ending = asyncio.ensure_future(client.completions.create(model="m", prompt="ends"))
            lasting = asyncio.ensure_future(client.completions.create(model="m", prompt="lasts"))
            heads = [asyncio.ensure_future(talk(server, data)) for data in (b"", HEAD.encode())]
            first = post(b'{"prompt": "ends"}').replace(b"Connection: close\r\n", b"")
            two = asyncio.ensure_future(talk(server, first + post(b'{"prompt": "behind"}')))
            await endpoint.until(lambda: len(endpoint.asked) == 3)
            stopping = asyncio.ensure_future(server.stop())
            loop.call_soon(may_end.set_result, None)
            async with asyncio.timeout(GENEROUS_S):
                await stopping
                assert endpoint.cancelled == ["key-a"]
                assert (await ending).choices[0].text == "It ends."
                with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
                    await lasting
                assert await asyncio.gather(*heads) == [b"", b""]
                assert (await two).count(b"It ends.") == 1
            assert "behind" not in [ask.text for _, ask in endpoint.asked]
            with pytest.raises(openai.APIConnectionError):
                await client.models.list()

    asyncio.run(whole())


@pytest.mark.parametrize("turns", range(9))
def test_a_connection_that_is_being_accepted_when_the_server_stops_is_closed(turns: int) -> None:
    async def whole() -> None:
        async with serving(Scripted()) as server:
            with socket.create_connection(("127.0.0.1", int(server.base_url.rpartition(":")[2]))) as client:
                for _ in range(turns):
                    await asyncio.sleep(0)
                await server.stop()
                client.settimeout(GENEROUS_S)
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.to_thread(client.recv, 1) == b""

    asyncio.run(whole())


def test_a_client_that_does_not_read_its_response_does_not_keep_the_server() -> None:
    async def whole() -> None:
        endpoint = Scripted(saying("x" * (32 << 20)))
        async with serving(endpoint) as server:
            reader, writer = await connect(server)
            writer.write(post(b'{"prompt": "x"}'))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            async with asyncio.timeout(GENEROUS_S):
                await server.stop()
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(32 << 20)
            writer.close()

    asyncio.run(whole())


def test_an_ask_that_will_not_be_cancelled_does_not_keep_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "STOP_LIMIT_S", 0.4)
    monkeypatch.setattr(gateway, "CANCEL_LIMIT_S", 0.2)

    async def whole() -> None:
        may_end = asyncio.get_running_loop().create_future()

        async def answer(ask: Ask) -> TurnReply:
            while not may_end.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(may_end)
            return reply_of("at last")

        endpoint = Scripted(answer)
        async with serving(endpoint) as server, client_of(server) as client:
            asking = asyncio.ensure_future(client.completions.create(model="m", prompt="x"))
            await endpoint.until(lambda: len(endpoint.asked) == 1)
            async with asyncio.timeout(GENEROUS_S):
                await server.stop()
                with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
                    await asking
            may_end.set_result(None)

    asyncio.run(whole())


def test_signals_and_logs_stay_the_process_own() -> None:
    def state() -> tuple[Any, ...]:
        return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), [*logging.getLogger().handlers]

    async def whole() -> None:
        before = state()
        async with serving(Scripted()) as server, client_of(server) as client:
            await client.models.list()
            assert state() == before
        assert state() == before

    asyncio.run(whole())


def test_a_server_in_a_loop_of_another_thread() -> None:
    found: list[str | None] = []

    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        completion = await client.chat.completions.create(model="m", messages=HI)
        found.append(completion.choices[0].message.content)

    thread = threading.Thread(target=play, args=(scenario,))
    thread.start()
    thread.join(GENEROUS_S)
    assert found == ["Hello there."]


def test_nothing_common_imports_the_http_libraries() -> None:
    text = (
        "import sys, slipstream.cli, slipstream.environments, slipstream.environments.asks;"
        "print([n for n in ('starlette', 'uvicorn', 'h11') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_an_error_behind_the_deadline_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(ask: Ask) -> TurnReply:
        try:
            return await forever(ask)
        except asyncio.CancelledError:
            raise ZeroDivisionError from None

    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        with pytest.raises(openai.InternalServerError, match="no answer within"):
            await client.chat.completions.create(model="m", messages=HI)

    gc.collect()  # what tests before this one have left says what it has to say
    caplog.clear()
    play(scenario, answer, request_limit_s=0.5)
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("fields", ["", ', "stream": true'])
def test_any_text_of_a_turn_reaches_the_client(fields: str) -> None:
    text = "\ud800\x00\r\n\ndata: \u2028\x85"

    async def answer(ask: Ask) -> TurnReply:
        return msgspec.structs.replace(reply_of("x"), message={"role": "assistant", "content": text})

    async def scenario(endpoint: Scripted, server: GatewayServer, _: AsyncOpenAI) -> None:
        response = await talk(server, post(f'{{"prompt": "x"{fields}}}'.encode()))
        body = response.partition(b"\r\n\r\n")[2].partition(b"{")
        body = (body[1] + body[2]).splitlines()[0]
        assert json.loads(body)["choices"][0]["text"] == text

    play(scenario, answer)


def test_a_reply_that_json_cannot_write_is_an_error() -> None:
    async def answer(ask: Ask) -> TurnReply:
        return msgspec.structs.replace(reply_of("x"), logprobs=[float("nan")])

    async def scenario(endpoint: Scripted, server: GatewayServer, client: AsyncOpenAI) -> None:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="ValueError"):
                await client.chat.completions.create(model="m", messages=HI, logprobs=True, stream=stream)

    play(scenario, answer)
