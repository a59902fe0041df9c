"""OpenAI's forms: what becomes of any body, and what replies look like to OpenAI's own types."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from drawn import drawn
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from slipstream.environments.asks import MAX_TOOLS, Ask, Refused, SamplingWishes, TurnReply
from slipstream.environments.openai_api import (
    MAX_MESSAGES,
    chat_ask,
    completions_ask,
    response_form,
)
from slipstream.environments.openai_replies import (
    ResponseForm,
    Stamp,
    chat_chunks,
    chat_completion,
    chat_message,
    error_body,
    text_chunks,
    text_completion,
)
from slipstream.environments.tool_calls import parse

STAMP = Stamp("chatcmpl-1", 1_700_000_000, "policy")
EVERYTHING = ResponseForm(is_stream=True, has_usage=True, has_logprobs=True, has_token_ids=True)
CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2.5, None]}}}
SENT_CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2.5, null]}'}}
PLAIN = TurnReply(
    message={"role": "assistant", "content": "Hé."},
    finish_reason="stop",
    num_prompt_tokens=7,
    tokens=[5, 6, 9],
    logprobs=[-0.5, -1.25, float("-inf")],
    versions=[(0, 3), (2, 4)],
    pieces=["H", "é.", "<end>"],
    prompt_tokens=[1, 2, 3, 4, 5, 6, 7],
)
CALLING = msgspec.structs.replace(PLAIN, message={"role": "assistant", "content": "", "tool_calls": [CALL]})


def chat(*messages: dict[str, Any], **fields: Any) -> Ask:
    return chat_ask({"messages": list(messages) or [user("hi")], **fields})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_a_chat_as_clients_send_it() -> None:
    tool = {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True},
    }
    ask = chat_ask(
        {
            "model": "gpt-x",
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}],
                    "name": "al",
                },
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "annotations": [],
                    "audio": None,
                    "function_call": None,
                    "reasoning_content": "hm",
                    "tool_calls": [SENT_CALL],
                },
                {"role": "tool", "content": "2", "tool_call_id": "call_0"},
            ],
            "tools": [tool],
            "tool_choice": "auto",
            "max_tokens": 5,
            "max_completion_tokens": 6,
            "temperature": 1,
            "top_p": 0.5,
            "top_k": -1,
            "min_p": 0.1,
            "seed": 3,
            "stop": "END",
            "n": 1,
            "frequency_penalty": 0.5,
            "presence_penalty": None,
            "user": "u",
            "metadata": {"a": "b"},
            "store": False,
            "parallel_tool_calls": True,
            "service_tier": "auto",
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "logit_bias": {},
            "something_new": [1],
        }
    )
    assert ask == Ask(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1+1?", "name": "al"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "2", "tool_call_id": "call_0"},
        ],
        tools=[
            {
                "type": "function",
                "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
            }
        ],
        wishes=SamplingWishes(
            max_tokens=6,
            temperature=1.0,
            top_p=0.5,
            top_k=0,
            min_p=0.1,
            seed=3,
            stop=("END",),
            unmet=("frequency_penalty",),
        ),
    )


def test_texts_and_ids() -> None:
    assert completions_ask({"prompt": "1+1=", "stop": ["\n"]}) == Ask(text="1+1=", wishes=SamplingWishes(stop=("\n",)))
    assert completions_ask({"prompt": ["1+1="], "max_tokens": 2}) == Ask(
        text="1+1=", wishes=SamplingWishes(max_tokens=2)
    )
    assert completions_ask({"prompt": [3, 0, 9]}) == completions_ask({"prompt": [[3, 0, 9]]}) == Ask(tokens=[3, 0, 9])


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", ""),
        ("[1]", "[1]"),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": 1e999}', '{"a": 1e999}'),
        (f'{{"a": {2**64}}}', f'{{"a": {2**64}}}'),
        ('{"a": ' * 5_000, '{"a": ' * 5_000),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ("half \ud800", "half \ufffd"),
    ],
)
def test_arguments_are_a_dict_where_they_are_an_object_of_json(arguments: Any, read: Any) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    [message] = chat({"role": "assistant", "tool_calls": [call]}).messages or []
    assert message["tool_calls"][0]["function"]["arguments"] == read


def test_tools_are_not_shown_where_none_may_be_called() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert chat(tools=[tool], tool_choice="none").tools == []
    assert chat(tools=[tool], tool_choice=None).tools == [tool]


def test_fields_that_no_sampler_here_meets_are_told_unless_they_change_nothing() -> None:
    neutral = {
        "frequency_penalty": 0.0,
        "presence_penalty": None,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "ignore_eos": False,
        "stop_token_ids": [],
        "guided_choice": None,
        "guided_json": {},
        "parallel_tool_calls": False,
        "include_stop_str_in_output": True,
        "skip_special_tokens": True,
        "truncate_prompt_tokens": -1,
        "add_generation_prompt": True,
        "reasoning_effort": "medium",
    }
    assert chat(**neutral).wishes == completions_ask({"prompt": "a", **neutral}).wishes == SamplingWishes()
    changing = {
        "frequency_penalty": -0.5,
        "presence_penalty": 1,
        "repetition_penalty": 1.1,
        "min_tokens": 4,
        "ignore_eos": True,
        "stop_token_ids": [0],
        "guided_choice": ["a"],
        "guided_json": {"type": "object"},
        "guided_regex": "[0-9]",
        "structured_outputs": {"regex": "a"},
        "skip_special_tokens": False,
        "truncate_prompt_tokens": 8,
        "add_generation_prompt": False,
        "reasoning_effort": "high",
    }
    assert set(chat(**changing).wishes.unmet) == changing.keys()
    tool = {"type": "function", "function": {"name": "f"}}
    assert chat(tools=[tool], parallel_tool_calls=False).wishes.unmet == ("parallel_tool_calls",)
    assert chat(tools=[tool], parallel_tool_calls=True, stop="a").wishes.unmet == ()
    assert chat(stop="a", include_stop_str_in_output=True).wishes.unmet == ("include_stop_str_in_output",)
    assert set(completions_ask({"prompt": "a", **changing}).wishes.unmet) == changing.keys()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"n": 2}, "'n' is 1"),
        ({"tool_choice": "required"}, "no call is forced"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "no call is forced"),
        ({"response_format": {"type": "json_object"}}, "no grammar"),
        ({"logit_bias": {"5": -100}}, "'logit_bias'"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "'chat_template_kwargs' are those of the run"),
        ({"modalities": ["text", "audio"]}, "text alone"),
        ({"audio": {"voice": "x"}}, "'audio'"),
        ({"functions": []}, "use 'tools'"),
        ({"function_call": {"name": "f"}}, "use 'tools'"),
        ({"max_tokens": 0}, "'max_tokens' is an integer from 1 on, not 0"),
        ({"max_tokens": True}, "'max_tokens'"),
        ({"max_completion_tokens": 1.5}, "'max_completion_tokens'"),
        ({"temperature": 2.1}, "'temperature' is a number from 0 to 2, not 2.1"),
        ({"temperature": float("nan")}, "'temperature'"),
        ({"top_p": "1"}, "'top_p'"),
        ({"top_k": -2}, "'top_k'"),
        ({"min_p": 10**400}, "'min_p'"),
        ({"seed": 2**63}, "'seed'"),
        ({"stop": ["x"] * 17}, "at most 16"),
        ({"stop": ""}, "none of them empty"),
        ({"stop": ["x", "y" * 4097]}, "at most 4,096 characters"),
        ({"tools": [{"type": "function"}]}, "a tool is"),
        ({"tools": [{"type": "web_search"}]}, "a tool is"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "a JSON schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": float("inf")}}}]}, "too large"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * (MAX_TOOLS + 1)}, "at most 128"),
        ({"messages": []}, "1 to 4,096"),
        ({"messages": [user("")] * (MAX_MESSAGES + 1)}, "1 to 4,096"),
        ({"messages": ["hi"]}, "a message is"),
        ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "the role of a message"),
        ({"messages": [{"role": [], "content": "x"}]}, "the role of a message"),
        ({"messages": [user(None)]}, "role 'user' is a text"),
        ({"messages": [user(5)]}, "role 'user' is a text"),
        ({"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]}, "no 'image_url'"),
        ({"messages": [user([{"type": "text", "text": None}])]}, "a part of a content"),
        ({"messages": [user(["x"])]}, "a part of a content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "role 'assistant' is a text"),
        ({"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]}, "use 'tool_calls'"),
        ({"messages": [{"role": "assistant", "tool_calls": [SENT_CALL] * (MAX_TOOLS + 1)}]}, "at most 128 calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "id": "c"}]}]}, "a call is"),
        ({"messages": [{"role": "assistant", "tool_calls": [SENT_CALL | {"id": 5}]}]}, "the id of a call"),
        ({"messages": [{"role": "tool", "content": "2"}]}, "'tool_call_id'"),
        ({"messages": [{"role": "user", "content": "2", "name": "n" * 257}]}, "'name'"),
    ],
)
def test_refused_chats(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused, match=r"^[a-z']") as refused:
        chat_ask({"messages": [user("hi")], **fields})
    assert sentence in str(refused.value)
    assert (refused.value.status, len(str(refused.value)) < 400) == (400, True)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "'prompt' is a text"),
        ({"prompt": []}, "'prompt' is a text"),
        ({"prompt": ["a", "b"]}, "one prompt"),
        ({"prompt": [[1], [2]]}, "one prompt"),
        ({"prompt": [1, -1]}, "a token id"),
        ({"prompt": [1, True]}, "a token id"),
        ({"prompt": [1, None]}, "a token id"),
        ({"prompt": [1, 2**31]}, "a token id"),
        ({"prompt": "a", "echo": True}, "'echo'"),
        ({"prompt": "a", "suffix": "b"}, "'suffix'"),
        ({"prompt": "a", "best_of": 2}, "'best_of'"),
        ({"prompt": "a", "n": 2}, "'n' is 1"),
    ],
)
def test_refused_texts(body: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused) as refused:
        completions_ask(body)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    "body",
    [{"stream": 1}, {"stream_options": []}, {"stream_options": {"include_usage": "y"}}, {"logprobs": "yes"},
     {"logprobs": 21}, {"top_logprobs": -1}, {"return_token_ids": "true"}],
)  # fmt: skip
def test_refused_forms_of_responses(body: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        response_form(body)


def test_forms_of_responses() -> None:
    assert response_form({}) == response_form({"stream": None, "logprobs": False}) == ResponseForm()
    options = {"include_usage": True}
    assert (
        response_form({"stream": True, "stream_options": options, "logprobs": 0, "return_token_ids": True})
        == EVERYTHING
    )
    assert response_form({"logprobs": True, "top_logprobs": 5}) == ResponseForm(has_logprobs=True)


KEYS = st.sampled_from(
    [*"role content tool_calls id type function name arguments tool_call_id text".split()]  # noqa: SIM905
    + [*"messages tools parameters description prompt n stop stream stream_options include_usage".split()]  # noqa: SIM905
    + ["logprobs", "tool_choice", "temperature", "seed", "max_tokens", "response_format", "bad_words", "verbosity"]
)
WORDS = st.sampled_from(["user", "assistant", "tool", "system", "function", "text", "auto", "{}", '{"a": 1}', "\ud800"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=5)
JSONS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=5),
    max_leaves=20,
)
CALLS = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": LEAVES, "arguments": JSONS}), "id": LEAVES})
MESSAGES = st.dictionaries(KEYS, JSONS) | st.fixed_dictionaries(
    {"role": WORDS, "content": JSONS}, optional={"tool_calls": st.lists(CALLS), "tool_call_id": LEAVES, "name": LEAVES}
)
BODIES = st.dictionaries(KEYS | st.text(max_size=3), JSONS) | st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, max_size=4), "prompt": JSONS | st.lists(st.integers())},
    optional={"tools": JSONS, "stop": JSONS, "temperature": LEAVES, "max_tokens": LEAVES},
)


@drawn(15, 40, body=BODIES)
def test_any_body_gives_an_ask_that_can_be_sent_on_or_is_refused(body: dict[str, Any]) -> None:
    check_body(body)


def test_half_of_a_character_is_sent_on_or_refused() -> None:
    check_body({"messages": [{"role": "user", "content": "\ud800"}], "prompt": ["\udfff"], "stop": "\udfff"})


def check_body(body: dict[str, Any]) -> None:
    for read in (chat_ask, completions_ask, response_form):
        found: Any = None
        sentence = "read"
        try:
            found = read(body)
        except Refused as refused:
            sentence = str(refused)
        assert 0 < len(sentence.encode()) < 1_000
        if isinstance(found, Ask):
            msgspec.json.encode(found)
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Ask) == found
            assert sum(part is not None for part in (found.messages, found.tokens, found.text)) == 1


def test_deep_bodies_are_refused_or_ignored() -> None:
    deep: Any = []
    for _ in range(5_000):
        deep = [deep]
    for name in ("messages", "tools", "prompt", "stop", "temperature", "n", "tool_choice", "response_format"):
        for read in (chat_ask, completions_ask):
            with pytest.raises(Refused):
                read({"messages": [user(deep)], name: deep})


# Responses. The oracle is the client's own types, and they are strict where pydantic is told to be.


def test_the_response_to_a_chat() -> None:
    body = chat_completion(PLAIN, ResponseForm(), STAMP)
    assert body == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hé.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }
    ChatCompletion.model_validate(body, strict=True)


def test_the_response_with_all_that_can_be_asked_for() -> None:
    body = chat_completion(CALLING, EVERYTHING, STAMP)
    ChatCompletion.model_validate(body, strict=True)
    [choice] = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": None, "refusal": None, "tool_calls": [SENT_CALL]},
        "logprobs": {
            "content": [
                {"token": "H", "logprob": -0.5, "bytes": [72], "top_logprobs": []},
                {"token": "é.", "logprob": -1.25, "bytes": [0xC3, 0xA9, 46], "top_logprobs": []},
                {"token": "<end>", "logprob": -9999.0, "bytes": list(b"<end>"), "top_logprobs": []},
            ],
            "refusal": None,
        },
        "finish_reason": "tool_calls",
        "token_ids": [5, 6, 9],
        "token_logprobs": [-0.5, -1.25, -9999.0],
        "versions": [[0, 3], [2, 4]],
    }
    assert body["prompt_token_ids"] == [1, 2, 3, 4, 5, 6, 7]


def test_the_response_to_a_text() -> None:
    body = text_completion(PLAIN, EVERYTHING, STAMP)
    Completion.model_validate(body, strict=True)
    assert (body["object"], body["prompt_token_ids"]) == ("text_completion", [1, 2, 3, 4, 5, 6, 7])
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hé.",
            "logprobs": {
                "tokens": ["H", "é.", "<end>"],
                "token_logprobs": [-0.5, -1.25, -9999.0],
                "top_logprobs": [{"H": -0.5}, {"é.": -1.25}, {"<end>": -9999.0}],
                "text_offset": [0, 1, 3],
            },
            "finish_reason": "stop",
            "token_ids": [5, 6, 9],
            "token_logprobs": [-0.5, -1.25, -9999.0],
            "versions": [[0, 3], [2, 4]],
        }
    ]


def test_parts_of_characters_have_no_bytes_and_ids_without_texts_their_numbers() -> None:
    def tokens(pieces: list[str]) -> list[tuple[str, Any]]:
        body = chat_completion(msgspec.structs.replace(PLAIN, pieces=pieces), EVERYTHING, STAMP)
        ChatCompletion.model_validate(body, strict=True)
        return [(one["token"], one["bytes"]) for one in body["choices"][0]["logprobs"]["content"]]

    assert tokens(["a", "\ufffd", "b"])[1] == ("\ufffd", None)
    assert tokens([]) == [("token_id:5", None), ("token_id:6", None), ("token_id:9", None)]


@pytest.mark.parametrize(
    ("reason", "of_a_text", "of_a_call"),
    [("stop", "stop", "tool_calls"), ("length", "length", "length"), ("deadline", "length", "length")],
)
def test_finish_reasons(reason: Any, of_a_text: str, of_a_call: str) -> None:
    def of(reply: TurnReply) -> str:
        return chat_completion(reply, ResponseForm(), STAMP)["choices"][0]["finish_reason"]

    assert of(msgspec.structs.replace(PLAIN, finish_reason=reason)) == of_a_text
    assert of(msgspec.structs.replace(CALLING, finish_reason=reason)) == of_a_call
    text = text_completion(msgspec.structs.replace(CALLING, finish_reason=reason), ResponseForm(), STAMP)
    assert text["choices"][0]["finish_reason"] == of_a_text


def test_chunks_add_up_to_the_whole() -> None:
    for reply in (PLAIN, CALLING):
        chunks = [*chat_chunks(reply, EVERYTHING, STAMP)]
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk, strict=True)
        whole = chat_completion(reply, EVERYTHING, STAMP)
        choices = [chunk["choices"][0] for chunk in chunks[:-1]]
        message = whole["choices"][0]["message"]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(one["delta"].get("content") or "" for one in choices) == (message["content"] or "")
        calls = [call for one in choices for call in one["delta"].get("tool_calls", ())]
        assert calls == [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
        assert [one["logprobs"] for one in choices if one["logprobs"]] == [whole["choices"][0]["logprobs"]]
        assert [one["finish_reason"] for one in choices[:-1]] == [None] * (len(choices) - 1)
        for name in ("finish_reason", "token_ids", "token_logprobs", "versions"):
            assert choices[-1][name] == whole["choices"][0][name]
        assert chunks[-2]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
        assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_chunks_of_a_text() -> None:
    chunks = [*text_chunks(PLAIN, ResponseForm(is_stream=True), STAMP)]
    Completion.model_validate(chunks[-1], strict=True)  # the type has no null there, which OpenAI sends until the end
    assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
        ("Hé.", None),
        ("", "stop"),
    ]
    assert all("usage" not in chunk for chunk in chunks)


def test_a_malformed_call_reaches_the_client_as_a_call_that_it_cannot_make() -> None:
    turn = parse('<tool_call>{"name": "wipe", "arguments": [1]}</tool_call><tool_call>{"na</tool_call>', "hermes")
    sent = chat_message(turn.message)["tool_calls"]
    assert [call["function"]["name"] for call in sent] == ["wipe", "malformed"]
    for call, error in zip(sent, turn.errors, strict=True):
        assert call["function"]["arguments"] == error
        with pytest.raises(ValueError):
            json.loads(call["function"]["arguments"])
    returned = chat(user("x"), chat_message(turn.message)).messages[1]
    assert [call["function"]["arguments"] for call in returned["tool_calls"]] == turn.errors


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@drawn(
    25,
    100,
    content=TEXT,
    calls=st.lists(st.tuples(TEXT.filter(bool), st.dictionaries(TEXT, VALUES, max_size=3)), min_size=1, max_size=4),
)
def test_a_turn_comes_back_as_it_was_sampled(content: str, calls: list[tuple[str, Any]]) -> None:
    """What a client sends back unchanged is the message that the policy's text was parsed to: its context goes on."""
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    turn = parse(content + "".join(f"<tool_call>{call}</tool_call>" for call in written), "hermes").message
    sent = chat_completion(msgspec.structs.replace(PLAIN, message=turn), ResponseForm(), STAMP)["choices"][0]["message"]
    assert chat(user("x"), json.loads(json.dumps(sent))).messages == [user("x"), turn]


def test_errors() -> None:
    assert error_body("No.", 400, "invalid_request") == {
        "error": {"message": "No.", "type": "invalid_request_error", "param": None, "code": "invalid_request"}
    }
    assert error_body("No.", 504, "timeout")["error"]["type"] == "server_error"
