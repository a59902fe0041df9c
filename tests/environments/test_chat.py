"""Conversations by exact ids: what is appended is what transformers makes of the whole chat, no token is forged."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st
from templates import (
    CHARACTERS,
    DEEPSEEK,
    FAMILIES,
    GEMMA2,
    HARMONY_FAMILY,
    QWEN3_FAMILY,
    TOOLS,
    ZEPHYR,
    Family,
    tokenizer_of,
)

from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.core.sections import PromptsConfig
from slipstream.core.types import Prompt
from slipstream.environments import chat as chat_module
from slipstream.environments import rehearsal
from slipstream.environments.build import build_chat, missing_end
from slipstream.environments.chat import PlainChat, TemplateChat
from slipstream.environments.chat_proof import prove
from slipstream.environments.forms import MAX_CHARACTERS, checked
from slipstream.environments.protocol import MAX_MESSAGES
from slipstream.models import foreign_text
from slipstream.models.foreign_text import ChatRenderer
from slipstream.models.tokenizer import CharTokenizer
from slipstream.prompts.rows import PromptRow
from slipstream.prompts.template import Encoder


@pytest.fixture(scope="module")
def child() -> Iterator[foreign_text._Child]:
    """One process for all templates: its libraries take two seconds."""
    child = foreign_text._Child("render")
    yield child
    child.close()


def made(family: Family, child: foreign_text._Child | None = None, **kwargs: Any) -> TemplateChat:
    tokenizer = tokenizer_of(family)
    renderer = ChatRenderer(tokenizer.chat_template, tokenizer.special_tokens_map, origin="here")
    renderer._child = child
    return TemplateChat(tokenizer, renderer, TOOLS if family.tools else None, **kwargs)


@pytest.fixture(scope="module")
def chats(child: foreign_text._Child) -> dict[str, TemplateChat]:
    return {name: made(family, child) for name, family in FAMILIES.items()}


def oracle(family: Family, messages: list[dict[str, Any]], *, tokenize: bool = True) -> Any:
    return tokenizer_of(family).apply_chat_template(
        messages,
        tools=TOOLS if family.tools else None,
        tokenize=tokenize,
        add_generation_prompt=True,
        return_dict=False,
    )


def added_ids(family: Family) -> set[int]:
    tokenizer = tokenizer_of(family)
    return {tokenizer.convert_tokens_to_ids(token) for token in (*family.special, *family.plain)} | (
        {0, 1} if family.kind == "characters" else set()
    )


def encoded(family: Family, text: str) -> list[int]:
    return tokenizer_of(family).encode(text, add_special_tokens=False)


def row(ids: list[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)


ORDINARY = st.text(alphabet="abc the AN12'\".,:{}/\\\n\t \u00e9\u6f22\U0001f600", max_size=24)
PRINTED = st.text(alphabet="abc the AN12'\".,:{}/\\\n ", max_size=24)
WORDS = st.from_regex(r"[A-Za-z]([a-z .,:\n]{0,20}[a-z.])?", fullmatch=True)


def messages_of(family: Family, contents: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Return observations: one message of a user or system, or one to three of a tool."""
    ids = st.from_regex(r"[A-Za-z0-9]{9}", fullmatch=True)
    tool = st.fixed_dictionaries(
        {"role": st.just("tool"), "content": contents, "tool_call_id": ids, "name": st.sampled_from(["search", "f.g"])}
    )
    kinds = {role: contents.map(lambda text, r=role: [{"role": r, "content": text}]) for role in ("user", "system")}
    kinds["tool"] = st.lists(tool, min_size=1, max_size=3)
    return st.one_of([kinds[role] for role in family.roles])


@pytest.mark.parametrize("name", FAMILIES)
@drawn(6, 60, data=st.data())
def test_turns_and_observations_are_the_ids_of_the_whole_chat(
    chats: dict[str, TemplateChat], name: str, data: st.DataObject
) -> None:
    family, chat = FAMILIES[name], chats[name]
    contents = PRINTED if family.kind == "characters" else ORDINARY
    history: list[dict[str, Any]] = [{"role": "user", "content": data.draw(contents, "question")}]
    stopped = cut = oracle(family, history)
    for _ in range(data.draw(st.integers(1, 4), "turns")):
        text = data.draw(WORDS, "sampled")
        said = data.draw(messages_of(family, contents), "said")
        sampled = encoded(family, family.lead + text)
        if family.kind == "pieces":  # no space in front of a text that follows a token
            sampled = encoded(family, f"[INST]{family.lead}{text}")[1:]
        end = [] if family.end is None else encoded(family, family.end)
        stopped = stopped + sampled + end + chat.observation(row(sampled + end), said).tolist()
        given_behind_cut = chat.observation(row(sampled), said)
        assert given_behind_cut.dtype == np.int32
        cut = cut + sampled + given_behind_cut.tolist()
        history += [{"role": "assistant", "content": text}, *said]
    assert stopped == oracle(family, history)
    assert cut == oracle(family, history)


def test_prompts_are_chats_where_there_is_a_template_and_there_alone(chats: dict[str, TemplateChat]) -> None:
    """As a rehearsal asks before a run begins (`test_bad_environments.py`)."""
    text = Prompt(prompt_id="0", text="q", tokens=row([1]), task="")
    chat = Prompt(prompt_id="1", text="q", tokens=row([1]), task="", messages=[{"role": "user", "content": "q"}])
    template, plain = chats["qwen2.5"], PlainChat(CharTokenizer())
    rehearsal._check_kind(template, [chat, chat])
    rehearsal._check_kind(plain, [text, text])
    with pytest.raises(
        ConfigError, match=r"tools are told to the policy by its chat template(.|\n)*plain text 'q'"
    ) as told:
        rehearsal._check_kind(template, [chat, text])
    assert "prompts.chat = true" in str(told.value)
    with pytest.raises(ConfigError, match=r"written as plain text, and a prompt is a chat"):
        rehearsal._check_kind(plain, [text, chat])


def test_turns_have_the_variables_of_the_recipe(tmp_path: Path) -> None:
    """A date, as Llama's templates take it. Qwen3's way not to think is refused: its mark is gone in later turns."""
    tokenizer = tokenizer_of(FAMILIES["qwen2.5"])
    chatml = str(tokenizer.chat_template)

    def chat_with(**variables: bool | str) -> TemplateChat:
        prompts = {"dataset": "x.jsonl", "chat": True, "chat_template_kwargs": variables}
        made = build_chat(resolve({"prompts": prompts, "model.path": qwen2_in(tmp_path)}), tokenizer, None)
        assert isinstance(made, TemplateChat)
        return made

    tokenizer.chat_template = "Today is {{ date_string }}.\n" + chatml
    messages = [{"role": "user", "content": "hi"}]
    theirs = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, date_string="Friday")
    assert chat_with(date_string="Friday").render([messages]) == [theirs]
    assert theirs.startswith("Today is Friday.")
    tokenizer.chat_template = chatml + (
        "{% if add_generation_prompt and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    )
    with pytest.raises(ConfigError, match="does not extend its own text"):
        chat_with(enable_thinking=False)
    chat_with(enable_thinking=True)


def qwen2_in(folder: Path, *, ends: Sequence[int] | None = None) -> str:
    """Return `folder` with the config.json of a model, and its `ends` where instruction-tuned models have them."""
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 2000}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return str(folder)


def test_a_turn_ends_at_each_end_of_the_model(tmp_path: Path) -> None:
    """Llama's models end a call of a tool with another token than an answer, and only their files say so."""
    family = dataclasses.replace(FAMILIES["llama3.1"], special=(*FAMILIES["llama3.1"].special, "<|eom_id|>"))
    tokenizer = tokenizer_of(family)
    text_end, call_end, turn_end = (encoded(family, f"<|{name}|>")[0] for name in ("end_of_text", "eom_id", "eot_id"))
    tables = {"prompts": {"dataset": "x.jsonl", "chat": True}, "model.path": qwen2_in(tmp_path, ends=[call_end])}
    tables |= {"environment": {"class": "guess", "tool_format": "llama3"}}
    chat = build_chat(resolve(tables, {"generator.stop_token_ids": [text_end]}), tokenizer, TOOLS)
    called = encoded(family, '{"name": "search", "parameters": {"query": "q"}}')
    message = chat.message(row([*called, call_end]))
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["search"]
    assert message["content"] == ""
    said = [{"role": "tool", "content": "found", "name": "search"}]
    behind = chat.observation(row([*called, turn_end]), said).tolist()
    assert chat.observation(row([*called, call_end]), said).tolist() == behind
    plain = build_chat(
        resolve(tables, {"generator.stop_token_ids": [text_end], "prompts.chat": False}), tokenizer, None
    )
    assert plain.stop_ids == (*sorted((text_end, turn_end)), call_end), "its own end of a cut turn is as before"
    fixed = build_chat(resolve(tables, {"generator.stop_at_eos": False, "prompts.chat": False}), tokenizer, None)
    assert fixed.stop_ids == ()


def test_a_template_whose_end_of_a_turn_ends_no_completion_is_told_of(tmp_path: Path) -> None:
    """Base models have the template of the tuned ones, and another EOS."""
    tuned = FAMILIES["qwen2.5"]
    base = dataclasses.replace(tuned, end="<|endoftext|>")
    [turn_end] = encoded(base, "<|im_end|>")
    tables = {"prompts": {"dataset": "x.jsonl", "chat": True}}

    def told(family: Family, ends: Sequence[int] | None = None, **fields: Any) -> str | None:
        changes = {"model.path": qwen2_in(tmp_path, ends=ends)} | {f"generator.{key}": fields[key] for key in fields}
        return missing_end(resolve(tables, changes), tokenizer_of(family))

    line = told(base, stop_token_ids=[5])
    assert f"<|im_end|>, completions do not; generator.stop_token_ids = [5, {turn_end}]" in str(line)
    assert told(base, stop_token_ids=[turn_end]) is None
    assert told(base, [0, turn_end]) is None
    assert told(base, stop_at_eos=False) is None
    assert told(tuned) is None
    silent = dataclasses.replace(base, template="{{ messages[0].content }}")
    assert told(silent) is None, "it does not write what an assistant says"


@pytest.mark.parametrize("opens", [True, False])
def test_calls_in_a_thought_that_the_header_opens_are_text(opens: bool, tmp_path: Path) -> None:
    family, header = FAMILIES["qwen2.5"], "<|im_start|>assistant\\n"
    assert header in family.template
    opening = dataclasses.replace(family, template=family.template.replace(header, f"{header}<think>\\n"))
    tokenizer = tokenizer_of(opening if opens else family)
    prompts = {"dataset": "x.jsonl", "chat": True}
    environment = {"class": "guess", "tool_format": "hermes"}
    config = resolve({"prompts": prompts, "model.path": qwen2_in(tmp_path), "environment": environment})
    chat = build_chat(config, tokenizer, TOOLS)
    call = '<tool_call>{"name": "search", "arguments": {"query": "q"}}</tool_call>'

    def called(text: str) -> int:
        return len(chat.message(row(tokenizer.encode(text, add_special_tokens=False))).get("tool_calls", ()))

    assert called(f"Perhaps {call}") == (0 if opens else 1)
    assert called(f"Perhaps {call}.</think>{call}") == (1 if opens else 2)


def lookalikes(family: Family) -> st.SearchStrategy[str]:
    """Return texts made of control tokens, their halves, and ordinary pieces."""
    tokens = [*family.special, *family.plain] or ["<eos>", "<pad>"]
    halves = [half for token in tokens for half in (token[: len(token) // 2], token[len(token) // 2 :])]
    return st.lists(st.sampled_from([*tokens, *tokens, *halves, "a", " the", "\n", '"', "\\"]), max_size=8).map("".join)


@pytest.mark.parametrize("name", FAMILIES)
@drawn(15, 100, data=st.data())
def test_what_an_environment_says_never_becomes_a_control_token(
    chats: dict[str, TemplateChat], name: str, data: st.DataObject
) -> None:
    """And nothing of it is lost: decoded, the ids are the template's text."""
    family, chat = FAMILIES[name], chats[name]
    said = data.draw(messages_of(family, lookalikes(family)), "said")
    harmless = [message | {"content": message["content"] and "x"} for message in said]
    ids = chat.observation(row([]), said).tolist()
    forbidden = added_ids(family)
    expected = [token for token in chat.observation(row([]), harmless).tolist() if token in forbidden]
    assert [token for token in ids if token in forbidden] == expected
    before = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Answer"}]
    text = oracle(family, [*before, *said], tokenize=False)
    text = text[text.index("Answer") + len("Answer") :]
    if family.rstrip:  # such tokens swallow the whitespace behind them
        assert re.sub(r"\s", "", chat.decode(ids)) == re.sub(r"\s", "", text)
    elif family.kind == "pieces":  # pieces by themselves may begin with a space
        assert chat.decode(ids).replace(" ", "") == text.replace(" ", "")
    else:
        assert chat.decode(ids) == text


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_proven(chats: dict[str, TemplateChat], name: str) -> None:
    family = FAMILIES[name]
    roles = tuple(role for role in family.roles if role != "system")
    prove(chats[name], roles)
    if family.roles in (("user",), ("user", "tool")) and family.tools == ("tool" in family.roles):
        prove(chats[name])  # its default


@pytest.mark.parametrize("name", FAMILIES)
def test_messages_before_the_first_turn_are_the_whole_chat(chats: dict[str, TemplateChat], name: str) -> None:
    family, chat = FAMILIES[name], chats[name]
    if "tool" in family.roles or family.template == GEMMA2:  # which takes users and assistants in turn
        return
    before = [{"role": "user", "content": "A question qz00, qz01."}]
    prompt = Prompt(
        prompt_id="p", text=oracle(family, before, tokenize=False), tokens=row(oracle(family, before)), task="t",
        messages=before, columns={"a": 1},
    )  # fmt: skip
    assert chat.opening(prompt, []) is prompt
    for words in ("You see a door.", "\n Two \n\n", "You see another door."):
        more = [{"role": "user", "content": words}]
        opened = chat.opening(prompt, more)
        assert opened.tokens.tolist() == oracle(family, before + more)
        assert opened.tokens.dtype == np.int32
        assert opened.text == oracle(family, before + more, tokenize=False)
        assert opened.messages == before + more
        assert (opened.prompt_id, opened.columns) == ("p", {"a": 1})
    forged = chat.opening(prompt, [{"role": "user", "content": family.end or "<eos>"}]).tokens
    num_controls = sum(token in added_ids(family) for token in opened.tokens.tolist())
    assert sum(token in added_ids(family) for token in forged.tolist()) == num_controls


def test_an_opening_needs_a_chat(chats: dict[str, TemplateChat]) -> None:
    prompt = Prompt(prompt_id="p", text="q", tokens=row([1]), task="t")
    with pytest.raises(ConfigError, match="prompts that are chats"):
        chats["smollm2"].opening(prompt, [{"role": "user", "content": "x"}])


def test_thoughts_that_a_template_removes_are_refused(child: foreign_text._Child) -> None:
    chat = made(QWEN3_FAMILY, child)
    with pytest.raises(ConfigError, match="removes the thoughts of earlier turns") as refused:
        prove(chat)
    assert "<think>" in str(refused.value.allowed)
    assert "<think>" not in str(refused.value.got)
    prove(chat, ("tool",))  # thoughts stay until the next user's message


def test_thoughts_that_the_header_opens_are_refused(child: foreign_text._Child) -> None:
    family = Family(DEEPSEEK, ("<s>", "</s>", "<|User|>", "<|Assistant|>"), "</s>", bos="<s>")
    with pytest.raises(ConfigError, match="does not extend its own text"):
        prove(made(family, child))


THOUGHTFUL = [
    "<think>\nFirst 2, then 2.\n</think>\n\nIt is 4.",
    "<think>\n\n</think>\n\n4",
    "opened by the header\n</think>\n\n  4\n",
    "<think>no end",
    "4, and no thought",
    "a <think> b </think> c <think>\nd\n</think>\ne",
    "</think>",
    "\n\n<think>\n\n x \n\n</think>\n\n\n y \n\n",
]


@pytest.mark.parametrize("name", ["qwen3", "deepseek", "smollm2"])
def test_thoughts_of_earlier_turns_are_what_the_template_makes_of_them(child: foreign_text._Child, name: str) -> None:
    """Left out or kept, with their tags as tokens; each of them twice, as a form is kept."""
    deepseek = Family(DEEPSEEK, ("<s>", "</s>", "<|User|>", "<|Assistant|>", "<think>", "</think>"), "</s>", bos="<s>")
    family = {"qwen3": QWEN3_FAMILY, "deepseek": deepseek, "smollm2": FAMILIES["smollm2"]}[name]
    chat, num_kept = made(family, child), 0
    for said, other in itertools.product(THOUGHTFUL, ("", " more")):
        asked = {"role": "user", "content": "<think>mine</think>" if name == "smollm2" else "2 + 2?" + other}
        conversations = [[asked, {"role": "assistant", "content": said + other}, {"role": "user", "content": "So?"}]]
        conversations.append(
            [*conversations[0], {"role": "assistant", "content": said}, {"role": "user", "content": "?"}]
        )
        if family.tools:  # whose answers leave the thoughts in place
            call = {"type": "function", "id": "a", "function": {"name": "search", "arguments": {"query": "x"}}}
            for calls in ({}, {"tool_calls": [call]}):
                conversations.append([asked, {"role": "assistant", "content": said, **calls}])
                conversations[-1].append({"role": "tool", "content": "12", "tool_call_id": "a"})
        for messages in conversations:
            found = chat.context(Prompt(prompt_id="", text="", tokens=row([]), task=""), messages)
            assert found.tokens.tolist() == oracle(family, messages), messages
            assert found.text == oracle(family, messages, tokenize=False)
            num_kept += "First 2" in found.text
    assert (num_kept == 0) == (name == "deepseek")


def test_many_tags_of_thoughts_stay_text(child: foreign_text._Child) -> None:
    chat = made(QWEN3_FAMILY, child)
    said = "</think>" * 1000 + "4"
    messages = [
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "?"},
    ]
    found = chat.context(Prompt(prompt_id="", text="", tokens=row([]), task=""), messages)
    assert not set(found.tokens.tolist()) & {*tokenizer_of(QWEN3_FAMILY).convert_tokens_to_ids(["<think>", "</think>"])}
    assert said in found.text


STRIPPING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.strip('\n') + '\n<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


STRIPS = ["", ".lstrip('\n')", ".rstrip('\n')", ".strip('\n')", ".lstrip()", ".rstrip()", ".strip()"]
STRIPS += [".lstrip('\n').rstrip()", ".lstrip().rstrip('\n')"]


@pytest.mark.parametrize("around", STRIPS)
def test_ends_of_lines_that_a_template_strips_and_writes_itself(child: foreign_text._Child, around: str) -> None:
    """Beside a place its own are not taken for those of the content."""
    template = STRIPPING.replace(".strip('\n')", around)
    assert around in template
    family = dataclasses.replace(FAMILIES["smollm2"], template=template)
    chat = made(family, child)
    for said in ("x", "\nx", "x\n\n", " \n\n x \n \n", "\n\n\n\n\n\nx\n\n\n\n\n\n"):
        messages = [
            {"role": "user", "content": said},
            {"role": "assistant", "content": said},
            {"role": "user", "content": "?"},
        ]
        found = chat.context(Prompt(prompt_id="", text="", tokens=row([]), task=""), messages)
        assert found.text == oracle(family, messages, tokenize=False)


def test_texts_behind_a_text_keep_their_first_space() -> None:
    """Decoders of sentencepiece's tokenizers strip it; pieces joined are the text, and a character is in the first."""
    tokenizer = tokenizer_of(dataclasses.replace(FAMILIES["mistral in pieces"], kind="stripped pieces"))
    chat = PlainChat(tokenizer)
    words = [tokenizer.encode(f"a {word}", add_special_tokens=False) for word in ("the inner", "\u6f22 the")]
    anchor = tokenizer.encode("a", add_special_tokens=False)
    for ids, said in zip(words, (" the inner", " \u6f22 the"), strict=True):
        turn = row(ids[len(anchor) :])
        assert tokenizer.decode(turn) == said[1:], "the decoder strips"
        assert chat.plain_message(turn)["content"] == said
        assert "".join(chat.pieces(turn)) == said
        assert chat.message(turn)["content"] == said[1:]
    assert "\u6f22" in chat.pieces(turn)


def test_tools_that_move_behind_the_newest_question_are_refused(chats: dict[str, TemplateChat]) -> None:
    with pytest.raises(ConfigError, match="does not extend its own text") as refused:
        prove(chats["mistral with tools"])
    assert "AVAILABLE_TOOLS" in str(refused.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [(GEMMA2, "Conversation roles must alternate"), (ZEPHYR, "leaves out the content of a message of role tool")],
)
def test_templates_without_the_role_of_a_tool(template: str, message: str) -> None:
    known = next(family for family in FAMILIES.values() if family.template == template)
    family = Family(template, known.special, known.end, tools=True, bos=known.bos)
    with pytest.raises(ConfigError, match=message):
        prove(made(family))


def test_templates_that_change_contents_or_earlier_turns(child: foreign_text._Child) -> None:
    special = ("<|im_start|>", "<|im_end|>")
    shout = "{% for m in messages %}{{ '<|im_start|>' + (m.content | upper) + '<|im_end|>' }}{% endfor %}"
    with pytest.raises(ConfigError, match="leaves out the text of an assistant"):
        prove(made(Family(shout, special, "<|im_end|>"), child))
    replaced = shout.replace("m.content | upper", "m.content | replace('\"', '')")
    with pytest.raises(ConfigError, match="changes the content of a message of role user"):
        prove(made(Family(replaced, special, "<|im_end|>"), child))
    counted = "{{ messages | length }}" + shout.replace(" | upper", "")
    with pytest.raises(ConfigError, match="does not extend its own text"):
        prove(made(Family(counted, special, "<|im_end|>"), child))
    last = "{% for m in messages %}{{ '<|im_start|>' + m.content }}{% if m.role != 'assistant' %}{{ '<|im_end|>' }}"
    last += "{% elif loop.last %}{{ '<|im_end|>' }}{% else %}{{ '\n' }}{% endif %}{% endfor %}"
    last += "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    chat = made(Family(last, special, "<|im_end|>"), child)
    with pytest.raises(ConfigError, match="one behind the other"):  # the line feed merges with what stands before it
        prove(chat)


def test_a_template_that_answers_calls_only() -> None:
    chat = made(HARMONY_FAMILY)
    prove(chat)
    assert chat.calls_first
    said = [{"role": "tool", "name": "search", "tool_call_id": "1", "content": 'a "word"\n<|end|>'}]
    ids = chat.observation(row(encoded(HARMONY_FAMILY, "It calls<|call|>search{}<|end|>")), said)
    assert chat.decode(ids) == (
        "<|start|>functions.search to=assistant<|message|>" + json.dumps(said[0]["content"]) + "<|end|>"
        "<|start|>assistant<|message|>"
    )
    assert sum(token == chat.end for token in ids.tolist()) == 1


def test_sampling_must_stop_where_turns_end(child: foreign_text._Child) -> None:
    family = FAMILIES["smollm2"]
    text_end, turn_end = (encoded(family, token)[0] for token in ("<|endoftext|>", "<|im_end|>"))
    with pytest.raises(ConfigError, match="does not stop") as refused:
        prove(made(family, child, stop_ids=[text_end]))
    assert "<|im_end|>" in str(refused.value)
    chat = made(family, child, stop_ids=[text_end, turn_end])
    prove(chat)
    said = [{"role": "user", "content": "x"}]
    expected = chat.observation(row([65, turn_end]), said).tolist()
    assert chat.decode(expected) == "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert chat.observation(row([65, text_end]), said).tolist() == expected, "another stop token ends a turn as well"
    assert chat.observation(row([65]), said).tolist() == [turn_end, *expected]


def test_the_template_runs_once_for_a_pattern(child: foreign_text._Child) -> None:
    chat = made(FAMILIES["qwen2.5"], child)
    said = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two", "name": "f"}]
    first = chat.observation(row([]), said)
    chat._renderer = None  # type: ignore[assignment]
    other = [{"role": "tool", "content": "three <b>"}, {"role": "tool", "content": "2", "name": "other"}]
    second, again = (chat.observation(row([]), messages) for messages in (other, said))
    assert "three <b>" in chat.decode(second)
    assert again.tolist() == first.tolist()


def test_forms_are_bounded(child: foreign_text._Child, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = made(FAMILIES["smollm2"], child)
    monkeypatch.setattr(chat_module, "MAX_FORMS", 3)
    for number in range(1, 7):
        chat.observation(row([]), [{"role": "user", "content": "x"}] * number)
    assert len(chat._forms) == 3


def test_a_sampled_turn_as_a_message(chats: dict[str, TemplateChat]) -> None:
    family = FAMILIES["qwen2.5"]
    text = "<think>\nx\n</think>\n\n<tool_call>\n{}\n</tool_call>"
    for end in ("", "<|im_end|>"):
        turn = row(encoded(family, text + end))
        assert chats["qwen2.5"].message(turn) == {"role": "assistant", "content": text}
    turn = row(encoded(family, "a<|im_start|>b<|im_end|>"))
    assert chats["qwen2.5"].message(turn)["content"] == "ab"
    parsing = made(family, parse=lambda text: {"role": "assistant", "content": text.upper()})
    parsing.end = chats["qwen2.5"].end
    assert parsing.message(turn)["content"] == "A<|IM_START|>B"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("text", "mapping"),
        ({"role": "user"}, "role and a text"),
        ({"role": "user", "content": 3}, "role and a text"),
        ({"role": "assistant", "content": "I am the policy"}, "role and a text"),
        ({"role": ["user"], "content": ""}, "role and a text"),
        ({"role": "user", "content": "x", "tool_calls": []}, "unknown field"),
        ({"role": "tool", "content": "x", "name": 'f"}'}, "name is no plain name"),
        ({"role": "tool", "content": "x", "name": "f\n"}, "name is no plain name"),
        ({"role": "tool", "content": "x", "tool_call_id": "<|im_end|>"}, "tool_call_id is no plain name"),
        ({"role": "tool", "content": "x", "tool_call_id": "1" * 200}, "tool_call_id is no plain name"),
    ],
)
def test_messages_that_are_none(message: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        checked([message])


def test_numbers_of_messages_and_odd_characters() -> None:
    for messages in ([], [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)):
        with pytest.raises(ConfigError, match="too few or too many"):
            checked(messages)
    with pytest.raises(ConfigError, match="too long"):
        checked([{"role": "user", "content": "x" * (MAX_CHARACTERS // 2)}] * 3)
    said = [{"role": "user", "content": "a\ud800b\x00", "name": None}]
    assert checked(said) == [{"role": "user", "content": "a?b\x00"}]


def test_plain_chat_of_characters() -> None:
    tokenizer = CharTokenizer()
    chat = PlainChat(tokenizer, "[{role}: {content}]\n", stop_ids=[tokenizer.eos_token_id])
    ids = tokenizer.encode
    said = [{"role": "user", "content": "north"}, {"role": "tool", "content": "{role} <eos><pad>"}]
    text = "[user: north]\n[tool: {role} <eos><pad>]\n"
    given = chat.observation(row([*ids("go"), 1]), said)
    assert given.dtype == np.int32
    assert tokenizer.decode(given.tolist()) == text
    assert not {0, 1} & set(given.tolist()), "the first two ids are special"
    assert chat.observation(row(ids("go")), said).tolist() == [1, *given.tolist()], "a turn that was cut is closed"
    prompt = Prompt(prompt_id="p", text="q>", tokens=row(ids("q>")), task="t")
    opened = chat.opening(prompt, said)
    assert opened.text == "q>" + text
    assert opened.tokens.tolist() == [*ids("q>"), *given.tolist()]
    assert chat.opening(prompt, []) is prompt
    assert chat.message(row([*ids("go"), 1])) == {"role": "assistant", "content": "go"}


def test_an_alphabet_has_the_fixed_text_of_observations() -> None:
    for observation, alphabet in ((">{content}\n", "ab>\n"), ("<eos>{content}", "ab")):
        build_chat(resolve("guess_mini", {"environment.observation": observation}), CharTokenizer(alphabet), None)
    with pytest.raises(ConfigError, match=r"^environment.observation has a character"):
        build_chat(resolve("guess_mini", {"environment.observation": ">{content}"}), CharTokenizer("ab"), None)


@given(st.text(alphabet="<eospadunk>|\u00e9", max_size=12))
def test_plain_chat_never_gives_a_special_token(text: str) -> None:
    chat = PlainChat(CharTokenizer())
    ids = chat.observation(row([]), [{"role": "user", "content": text}]).tolist()
    assert CharTokenizer().decode(ids) == text.replace("\u00e9", "<unk>")
    assert len(ids) == len(text)


def test_plain_chat_by_a_tokenizer_of_pieces() -> None:
    family = FAMILIES["qwen2.5"]
    chat = PlainChat(tokenizer_of(family), "user: {content}\n")
    said = [{"role": "user", "content": "\nthe rest\n"}, {"role": "user", "content": "is 12"}]
    text = "user: \nthe rest\n\nuser: is 12\n"
    assert chat.observation(row([]), said).tolist() == encoded(family, text)
    forged = chat.observation(row([]), [{"role": "user", "content": "<|im_end|>"}]).tolist()
    assert not set(forged) & set(encoded(family, "".join(family.special)))
    assert tokenizer_of(family).decode(forged) == "user: <|im_end|>\n"


@pytest.mark.parametrize("template", ["{text}", "no place", "{content!r}", "{content", "{role}", "{}"])
def test_templates_of_messages_are_checked(template: str) -> None:
    with pytest.raises(ConfigError, match="template of messages"):
        PlainChat(CharTokenizer(), template)


def test_a_token_of_one_character_is_left_out() -> None:
    """Nothing else can be done with it; the text around it stays."""
    family = Family(CHARACTERS, ("<|end|>",), None, plain=("\u00a7",))
    chat = PlainChat(tokenizer_of(family), "\u00a7{content}")
    [control] = encoded(family, "\u00a7")
    ids = chat.observation(row([]), [{"role": "user", "content": "a\u00a7b<|end|>"}]).tolist()
    assert ids[0] == control
    assert tokenizer_of(family).decode(ids[1:]) == "ab<|end|>"


def test_a_chat_needs_a_template() -> None:
    with pytest.raises(ConfigError, match="tokenizer with a chat template"):
        TemplateChat(CharTokenizer(), ChatRenderer("", {}, origin=""))


def test_prompts_carry_the_schemas_of_tools() -> None:
    family = FAMILIES["qwen2.5"]
    row_ = PromptRow(text="How warm is it?", task="t")
    [prompt] = Encoder(PromptsConfig(chat=True), tokenizer_of(family), tools=TOOLS).encode([row_])
    assert prompt.tokens.tolist() == oracle(family, [{"role": "user", "content": "How warm is it?"}])
    assert '"Look something up."' in prompt.text
    [without] = Encoder(PromptsConfig(chat=True), tokenizer_of(family)).encode([row_])
    assert "Look something up" not in without.text
