"""Chat templates in a process of their own: the texts are transformers', and nothing stays behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_text import FORKS

from slipstream.core.errors import ConfigError
from slipstream.models import foreign_text
from slipstream.models.foreign_text import ChatRenderer, rehearse_tokenizer
from slipstream.models.tokenizer import char_tokenizer

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
TEMPLATES: dict[str, Any] = {
    "plain": PLAIN,
    "blocks": """
    {%- if messages[0].role == 'system' %}
        {{- '<|system|>' + messages[0].content | trim + eos_token }}
        {%- set rest = messages[1:] %}
    {%- else %}
        {%- set rest = messages %}
    {%- endif %}
    {% for m in rest %}
        {% if loop.index0 is odd %}{% continue %}{% endif %}
        {{ m['role'].upper() }}: {{ m | tojson(indent=1) }} {{ bos_token is defined }}
    {% endfor %}
    """,
    "macros": "{% macro say(m) %}{{ m.role }}={{ m.content }};{% endmacro %}"
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ say(m) }}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "not there": "{% for m in messages %}{{ m.content }}{{ m.tool_calls is defined }}{{ m.get('name') }}{% endfor %}",
    "several": {"default": PLAIN, "tool_use": "{{ tools }}"},
    "as a list": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}",
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b> & 'you' {{ 7 * 7 }} {% raw %}"}],
    [{"role": "system", "content": " Be brief. \n"}, {"role": "user", "content": "\u6f22\u5b57 \U0001f680 \x00\n\t"}],
    [
        {"role": "user", "content": "a", "name": None, "tool_calls": None},
        {"role": "assistant", "content": "b", "score": 1.5},
        {"role": "user", "content": ""},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
]


@pytest.fixture(autouse=True, scope="module")
def _started_as_users_start_them() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreign_text, "subprocess", subprocess)
        yield


@pytest.fixture
def forked(_started_as_users_start_them: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that have their libraries already, for tests of what is asked of one and when it ends."""
    monkeypatch.setattr(foreign_text, "subprocess", FORKS)
    FORKS.begin()


@pytest.fixture(scope="module")
def child(_started_as_users_start_them: None) -> Iterator[foreign_text._Child]:
    """One process for all templates: its libraries take two seconds."""
    child = foreign_text._Child("render")
    yield child
    child.close()


def children() -> set[str]:
    """All child processes. Those of tests before may end at any time, so compare with what there is now."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_are_those_of_transformers(
    name: str, child: foreign_text._Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    chats = [chat for chat in CHATS if name == "as a list" or isinstance(chat[0]["content"], str)]
    expected = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    monkeypatch.setattr(foreign_text, "CHATS_AT_ONCE", 2)
    renderer = ChatRenderer(tokenizer.chat_template, tokenizer.special_tokens_map, origin="here")
    renderer._child = child
    assert renderer.render(chats) == expected
    assert renderer.render([]) == []


def test_tools_and_the_end_of_a_text_are_passed_on(child: foreign_text._Child) -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = {"default": PLAIN, "tool_use": "{{ tools | tojson }}" + PLAIN}
    renderer = ChatRenderer(tokenizer.chat_template, tokenizer.special_tokens_map, origin="here")
    renderer._child = child
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for arguments in ({}, {"tools": tools}, {"add_generation_prompt": False}):
        options = {"add_generation_prompt": True, **arguments}
        expected = [tokenizer.apply_chat_template(chat, tokenize=False, **options) for chat in CHATS[:3]]
        assert renderer.render(CHATS[:3], **arguments) == expected
    assert '"parameters"' in renderer.render(CHATS[:1], tools=tools)[0]
    assert renderer.render(CHATS[:1])[0].endswith("<bot>")


def test_variables_of_the_template_are_passed_on_and_checked(child: foreign_text._Child) -> None:
    """Against transformers; what the template does not know, or is always given, would change nothing or clash."""
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (
        PLAIN + "{% if enable_thinking is defined and not enable_thinking %}<no/>{% endif %}{{ n }}"
    )
    for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True, "n": 3}):
        renderer = ChatRenderer(tokenizer.chat_template, {}, origin="here", variables=variables)
        renderer._child = child
        expected = tokenizer.apply_chat_template(CHATS[0], tokenize=False, add_generation_prompt=True, **variables)
        assert renderer.render([CHATS[0]]) == [expected]
    assert expected.endswith("3")
    for wrong in ("enable_thinkin", "messages", "tools", "add_generation_prompt", "bos_token"):
        with pytest.raises(ConfigError, match="the chat template has no such variable"):
            ChatRenderer(tokenizer.chat_template, {}, origin="here", variables={wrong: "x"})
    with pytest.raises(ConfigError, match="there is no chat template"):
        ChatRenderer(None, {}, origin="here", variables={"n": 1})


def test_signals_to_all_processes_of_a_run_do_not_end_it(child: foreign_text._Child) -> None:
    renderer = ChatRenderer(PLAIN, {}, origin="here")
    renderer._child = child
    texts = renderer.render(CHATS[:1])
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.kill(child._process.pid, number)
    assert renderer.render(CHATS[:1]) == texts


def test_the_process_ends_with_its_renderer_and_where_it_is_exhausted(forked: None) -> None:
    before = children()
    renderer = ChatRenderer(PLAIN, {}, origin="here")
    assert children() <= before, "it begins with the first chat"
    assert renderer.render([CHATS[0]]) == renderer.render([CHATS[0]])
    assert len(children() - before) == 1, "one for all chats"
    del renderer
    gc.collect()
    assert children() <= before
    renderer = ChatRenderer("{{ 'a' * 20000000 }}", {}, origin="here")
    with pytest.raises(ConfigError, match="a text of 20000000 characters"):
        renderer.render([CHATS[0]])
    assert children() <= before


REFUSALS = {
    "raise_exception('no system')": "no system",
    "messages[0].content + 1": "TypeError: ",
    "messages[9].content": "'list object' has no attribute 9|has no element 9",
    "none.x()": "has no attribute 'x'",
}


@pytest.mark.parametrize("code", REFUSALS)
def test_a_template_that_refuses_a_chat_takes_the_next_one(code: str, child: foreign_text._Child) -> None:
    template = "{% if messages[0].role == 'system' %}{{ " + code + " }}{% endif %}" + PLAIN
    renderer = ChatRenderer(template, {}, origin="here")
    renderer._child = child
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"'here' does not take these messages\n  got:     .*({REFUSALS[code]})"):
            renderer.render([CHATS[0], CHATS[1]])
        assert renderer.render([[{"role": "user", "content": "Hi"}]]) == ["<user>Hi<bot>"]
    assert renderer._child is child, "a process of its own for each would take seconds"


def test_one_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the parent here; `test_hostile_checkpoints.py` has those that the child's own limits end."""
    before = children()
    monkeypatch.setattr(foreign_text, "WALL_S", 0.1)
    with pytest.raises(ConfigError, match=r"has not ended after 0\.1 s"):
        ChatRenderer(PLAIN, {}, origin="here").render([CHATS[0]])
    assert children() <= before


def test_a_tokenizer_that_passed_is_not_tried_again(
    forked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    char_tokenizer("abc").save_pretrained(tmp_path / "one")
    rehearse_tokenizer(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    monkeypatch.setattr(foreign_text, "_Child", None)
    rehearse_tokenizer(tmp_path / "two")
    (tmp_path / "two" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TypeError):
        rehearse_tokenizer(tmp_path / "two")
