"""A served model as OpenAI's own clients see it; transformers says what it should answer."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
import tomli_w
import torch
from openai import AsyncOpenAI, OpenAI
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

import slipstream
from slipstream import cli
from slipstream.core.errors import ConfigError, NonFiniteError
from slipstream.core.sections import ModelConfig
from slipstream.core.types import VersionSpan
from slipstream.evals import served as served_module
from slipstream.evals.serve import Serving
from slipstream.generator.requests import Finished, Request, Resume
from slipstream.models import sizes
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.tokenizer import char_tokenizer, load_tokenizer

GENEROUS_S = 60.0
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
LONG = 50_000
TEMPLATE = (
    "{% if tools %}{{ tools | map(attribute='function') | map(attribute='name') | join(' ') }}\n{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% for c in m.tool_calls %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
WORDS = ["one", "a second question", "3 + 4 = ?", "<eos> is plain text", "x" * 40, "\n", "last one"]


def make_checkpoint(
    folder: Path, *, template: str | None = TEMPLATE, scale: float = 0.35, ends: bool = True, **sizes: int
) -> Path:
    """Write a random model of characters that is sure of itself, whose tokenizer begins texts with BOS."""
    tokenizer = char_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    bos = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    tokenizer.chat_template = template
    if not ends:
        tokenizer.eos_token = None
    config = ModelConfig(**(SIZES | {"max_positions": 256} | sizes))
    model = new_model(config, len(tokenizer), 0, eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=scale, generator=generator)
    save_model(model, folder, tokenizer)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[Serving]:
    with slipstream.serve(folder, slots=16, tool_format="json_tags") as serving:
        ask(serving, "warm up", max_tokens=1)  # its threads are there before a test begins
        yield serving


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


class Oracle:
    """Transformers' own model and tokenizer of the checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def chat_ids(self, text: str) -> list[int]:
        """Return the ids of the template's text: a character is a token, also of what looks like a special one."""
        ids = self.tokenizer.get_vocab()
        return [ids[one] for one in f"u:{text}\na:"]

    def greedy(self, ids: Sequence[int], max_new_tokens: int) -> list[int]:
        given = torch.tensor([list(ids)])
        out = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
        )
        return list(map(int, out[0, len(ids) :]))

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], turn: Sequence[int]) -> list[float]:
        logits = self.model(torch.tensor([[*ids, *turn]])).logits[0].log_softmax(-1)
        return [float(logits[len(ids) + i - 1, token]) for i, token in enumerate(turn)]


def client_of(serving: Serving, key: str = "any") -> OpenAI:
    """Return a client that reads no certificates, which takes longer than most answers: it has none to verify."""
    plain = openai.DefaultHttpxClient(verify=False)
    return OpenAI(base_url=serving.base_url, api_key=key, max_retries=0, timeout=GENEROUS_S, http_client=plain)


def async_client_of(serving: Serving) -> AsyncOpenAI:
    plain = openai.DefaultAsyncHttpxClient(verify=False)
    return AsyncOpenAI(base_url=serving.base_url, api_key="any", max_retries=0, timeout=GENEROUS_S, http_client=plain)


def ask(serving: Serving, text: str, **more: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": text}]
    extra = {"return_token_ids": True} | more.pop("extra", {})
    with client_of(serving) as client:
        return client.chat.completions.create(model="any", messages=messages, extra_body=extra, **more)


def complete(serving: Serving, prompt: Any, **more: Any) -> Any:
    extra = {"return_token_ids": True} | more.pop("extra", {})
    with client_of(serving) as client:
        return client.completions.create(model="any", prompt=prompt, extra_body=extra, **more)


def at_once(serving: Serving, num: int, **more: Any) -> list[Any]:
    """Ask `num` chats at once, of few different texts."""

    async def whole() -> list[Any]:
        async with async_client_of(serving) as client:
            chats: list[list[Any]] = [[{"role": "user", "content": WORDS[i % len(WORDS)]}] for i in range(num)]
            asks = [client.chat.completions.create(model="any", messages=chat, **more) for chat in chats]
            return await asyncio.gather(*asks, return_exceptions=True)

    return asyncio.run(whole())


# What is answered


def test_greedy_chats_at_once_are_those_of_transformers(serving: Serving, oracle: Oracle) -> None:
    answers = at_once(serving, 14, temperature=0, max_tokens=12, extra_body={"return_token_ids": True})
    asked = [oracle.chat_ids(text) for text in WORDS]
    expected = [oracle.greedy(ids, 12) for ids in asked]
    for i, answer in enumerate(answers):
        ids = asked[i % len(WORDS)]
        assert answer.prompt_token_ids == ids
        assert answer.choices[0].token_ids == expected[i % len(WORDS)]
        assert answer.choices[0].message.content == oracle.text(answer.choices[0].token_ids)
        assert answer.usage.total_tokens == len(ids) + len(answer.choices[0].token_ids)


@pytest.mark.parametrize("text", ["", "once upon", "a tail of spaces   "])
def test_texts_begin_as_the_tokenizer_begins_them(serving: Serving, oracle: Oracle, text: str) -> None:
    answer = complete(serving, text, temperature=0, max_tokens=9)
    ids = oracle.tokenizer(text)["input_ids"]
    assert ids[0] == oracle.tokenizer.bos_token_id
    assert answer.prompt_token_ids == ids
    assert answer.choices[0].token_ids == oracle.greedy(ids, 9)
    assert answer.choices[0].text == oracle.text(answer.choices[0].token_ids)


def test_ids_are_taken_as_they_are(serving: Serving, oracle: Oracle) -> None:
    ids = [5, 1, 7, 0, 9]  # control tokens among them, and no BOS
    answer = complete(serving, ids, temperature=0, max_tokens=6)
    assert answer.prompt_token_ids == ids
    assert answer.choices[0].token_ids == oracle.greedy(ids, 6)
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        complete(serving, [5, 4_000])


def test_logprobs_are_those_of_a_plain_forward(serving: Serving, oracle: Oracle) -> None:
    answer = ask(serving, "how sure?", temperature=1, max_tokens=20, seed=4, logprobs=True)
    [choice] = answer.choices
    said = [one.logprob for one in choice.logprobs.content]
    assert len(said) == 20
    assert np.allclose(said, oracle.logprobs(answer.prompt_token_ids, choice.token_ids), atol=1e-4)
    assert said == choice.token_logprobs


def test_a_seed_fixes_an_answer_whatever_else_is_asked(serving: Serving) -> None:
    def sampled(**more: Any) -> list[int]:
        return list(ask(serving, "sample", max_tokens=8, **more).choices[0].token_ids)

    alone = sampled(seed=7)
    crowd = [one.choices[0].message.content for one in at_once(serving, 8, max_tokens=8, seed=7)]
    assert sampled(seed=7) == alone
    assert len({*crowd[:7]}) > 1, "the same noise behind other contexts"
    assert crowd[0] == crowd[7]
    assert sampled(seed=8) != alone
    assert sampled() != sampled()
    greedy = sampled(temperature=0)
    assert greedy == sampled(temperature=0, seed=3)
    assert greedy == sampled(temperature=1e-30) == sampled(top_p=0)
    assert greedy == sampled(extra={"top_k": 1}) == sampled(extra={"min_p": 1})
    assert sampled(seed=7, extra={"top_k": 2**62}) == alone


def test_lengths(serving: Serving) -> None:
    answer = ask(serving, "hi", temperature=0, max_tokens=5)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (5, "length")
    answer = ask(serving, "x" * 200, temperature=0, max_tokens=100_000, stop=["<no such text>"])
    assert answer.usage.total_tokens <= 256, "no more than the model has room for"
    with pytest.raises(openai.BadRequestError, match="leave no room") as refused:
        ask(serving, "x" * 300)
    assert refused.value.code == "context_length_exceeded"


def test_fields_that_would_change_the_answer_are_refused_by_name(serving: Serving) -> None:
    plain = ask(serving, "hi", temperature=0, max_tokens=5, frequency_penalty=0, extra={"repetition_penalty": 1.0})
    assert plain.usage.completion_tokens == 5
    for request in (ask, complete):
        with pytest.raises(openai.BadRequestError, match="not supported: presence_penalty, min_tokens; the answer"):
            request(serving, "hi", temperature=0, max_tokens=5, presence_penalty=0.5, extra={"min_tokens": 3})


def test_a_turn_ends_at_the_first_stop_text(serving: Serving) -> None:
    whole = ask(serving, "stop", seed=1, max_tokens=40)
    text = whole.choices[0].message.content
    first, second = text[20:22], text[10:12]
    cut = min(text.index(first), text.index(second))
    answer = ask(serving, "stop", seed=1, max_tokens=40, stop=[first, second, "never said"], logprobs=True)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == (text[:cut], "stop")
    assert choice.token_ids == whole.choices[0].token_ids[: cut + 2], "as far as the stop text"
    assert len(choice.logprobs.content) == cut + 2 == answer.usage.completion_tokens


# Tools


class ScriptedEngine:
    """Stands for an engine: it says what it is told to, once it is let to. `texts` are said in turn."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], stop: int) -> None:
        self._tokenizer, self._texts, self._stop = tokenizer, list(texts), stop
        self._requests: list[Request] = []
        self.may_answer = threading.Event()
        self.fails: Exception | None = None

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def submit(self, requests: Sequence[Request]) -> None:
        self._requests += requests

    def withdraw(self, is_unwanted: Callable[[Request], bool]) -> list[Request]:
        gone = [one for one in self._requests if is_unwanted(one)]
        self._requests = [one for one in self._requests if not is_unwanted(one)]
        return gone

    def begun(self) -> list[Request]:
        return []

    def step(self) -> list[Finished]:
        if self._requests:
            assert self.may_answer.wait(GENEROUS_S)
            if self.fails is not None:
                raise self.fails
        asked, self._requests = self._requests, []
        return [self._said(request) for request in asked]

    def _said(self, request: Request) -> Finished:
        text = self._texts.pop(0) if self._texts else "done"
        tokens = np.array([*self._tokenizer.encode(text, add_special_tokens=False), self._stop], dtype=np.int32)
        spans = (VersionSpan(start=0, version=0),)
        return Finished(request, tokens, np.zeros(len(tokens), dtype=np.float32), spans, "stop", 0.0, 0.0)


@pytest.fixture
def scripted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ScriptedEngine, dict[str, Any]]]:
    """Put a scripted engine in the place of the next one."""

    def put(*texts: str) -> ScriptedEngine:
        tokenizer = load_tokenizer(folder)
        engine = ScriptedEngine(tokenizer, texts, tokenizer.eos_token_id)
        monkeypatch.setattr(served_module, "native_engine", lambda *_, **__: engine)
        return engine

    return put


ADD: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def test_tools_there_and_back(folder: Path, scripted: Callable[..., ScriptedEngine]) -> None:
    engine = scripted(f"I add.{CALL}", "It is 3.", f"{CALL} and more")
    engine.may_answer.set()
    with slipstream.serve(folder, tool_format="json_tags") as serving, client_of(serving) as client:
        messages: list[Any] = [{"role": "user", "content": f"1 + 2? {CALL}"}]
        first = client.chat.completions.create(model="any", messages=messages, tools=ADD)
        [choice] = first.choices
        [call] = choice.message.tool_calls or []
        assert (choice.message.content, choice.finish_reason) == ("I add.", "tool_calls")
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
        answer = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        more: Any = {"return_token_ids": True}
        second = client.chat.completions.create(
            model="any", messages=[*messages, choice.message, answer], tools=ADD, extra_body=more
        )
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It is 3.", "stop")
        text = load_tokenizer(folder).decode(second.model_extra["prompt_token_ids"])
        sent = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        assert text == f"add\nu:1 + 2? {CALL}\na:I add.{sent}\nt:3\na:"
        third = client.chat.completions.create(model="any", messages=messages, tools=ADD, stop="</tool_call>")
        assert [one.function.name for one in third.choices[0].message.tool_calls or []] == ["add"]
        assert (third.choices[0].message.tool_calls or [])[0].id != call.id
        assert not third.choices[0].message.content, "what comes behind the stop text is not said"


def test_a_call_in_a_thought_that_the_template_opens_is_text(
    tmp_path: Path, scripted: Callable[..., ScriptedEngine]
) -> None:
    template = TEMPLATE.replace("a:{% endif %}", "a:<think>{{ '\n' }}{% endif %}")
    engine = scripted(f"Perhaps {CALL}.</think>Done.", f"Yes.</think>{CALL}")
    engine.may_answer.set()
    with slipstream.serve(make_checkpoint(tmp_path, template=template), tool_format="json_tags") as serving:
        said = [ask(serving, "1 + 2?", tools=ADD).choices[0] for _ in range(2)]
    assert [one.finish_reason for one in said] == ["stop", "tool_calls"]
    assert said[0].message.content == f"Perhaps {CALL}.</think>Done."


def test_a_model_whose_calls_nobody_knows_refuses_tools(folder: Path) -> None:
    with slipstream.serve(folder, tool_format="auto") as serving:
        ask(serving, "hi", max_tokens=2)
        with pytest.raises(openai.BadRequestError, match="how this model writes calls"):
            ask(serving, "hi", max_tokens=2, tools=[{"type": "function", "function": {"name": "add"}}])


def test_a_model_without_a_chat_template(tmp_path: Path, folder: Path) -> None:
    bare = make_checkpoint(tmp_path / "bare", template=None)
    bos = load_tokenizer(folder).bos_token_id
    with slipstream.serve(bare) as serving:
        assert ask(serving, "ab", max_tokens=1).prompt_token_ids[0] == bos
        assert load_tokenizer(bare).decode(ask(serving, "ab", max_tokens=1).prompt_token_ids[1:]) == "ab"
        assert serving.name == "bare"
    with slipstream.serve(bare, template="{role}: {content}\n", name="org/x") as serving, client_of(serving) as client:
        assert load_tokenizer(bare).decode(ask(serving, "ab", max_tokens=1).prompt_token_ids[1:]) == "user: ab\n"
        assert [one.id for one in client.models.list()] == ["org/x"]


def test_variables_of_the_chat_template_are_those_of_the_run_or_given(tmp_path: Path) -> None:
    thinking = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}"
    make_checkpoint(tmp_path / "run" / "model", template=thinking)
    tables = {"prompts": {"dataset": "x.jsonl", "chat_template_kwargs": {"enable_thinking": False}}}
    (tmp_path / "run" / "config.toml").write_text(tomli_w.dumps(tables))
    tokenizer = load_tokenizer(tmp_path / "run" / "model")
    for given, end in ((None, "a:<no>"), ({"enable_thinking": True}, "a:")):
        with slipstream.serve(tmp_path / "run", chat_template_kwargs=given) as serving:
            assert tokenizer.decode(ask(serving, "ab", max_tokens=1).prompt_token_ids) == f"u:ab\n{end}"
    for wrong in ({"thinking": True}, {"tools": "x"}):
        with pytest.raises(ConfigError, match="no such variable"):
            slipstream.serve(tmp_path / "run", chat_template_kwargs=wrong)
    for text in ("{", "[1]", '{"a": [1]}'):
        assert cli.main(["serve", str(tmp_path / "run"), "--chat-template-kwargs", text]) == 2


def test_the_template_is_that_of_the_run_unless_one_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a model with a chat template, which comes before it; and `{{` stays a brace."""
    for run, chats in (("bare", None), ("chats", TEMPLATE)):
        make_checkpoint(tmp_path / run / "model", template=chats)
    cases = (
        ("bare", "{a} {b}", "{content}", "ab"),
        ("bare", "{{{word}}}>", "{{{content}}}>", "{ab}>"),
        ("chats", "{word}>", None, "u:ab\na:"),
    )
    for run, of_run, used, text in cases:
        tables = {"prompts": {"dataset": "x.jsonl", "template": of_run}}
        (tmp_path / run / "config.toml").write_text(tomli_w.dumps(tables))
        tokenizer = load_tokenizer(tmp_path / run / "model")
        with slipstream.serve(tmp_path / run) as serving:
            assert serving.template == used
            ids = ask(serving, "ab", max_tokens=1).prompt_token_ids
            assert tokenizer.decode(ids[ids[0] == tokenizer.bos_token_id :]) == text
    monkeypatch.setattr(Serving, "wait", Serving.close)
    for run, said in (("bare", "chats by the template '{role}'"), ("chats", "chats by the model's chat template")):
        more = ["--template", "{role}{content}"] if run == "bare" else []
        assert cli.main(["serve", str(tmp_path / run), "--port", "0", *more]) == 0
        assert said.replace("{role}", "{role}{content}") in capsys.readouterr().out


# Streams


class GrowingEngine(ScriptedEngine):
    """Samples a text in pieces, each when it is let to go on."""

    def __init__(self, tokenizer: Any, pieces: Sequence[str], stop: int) -> None:
        super().__init__(tokenizer, [], stop)
        self._pieces = list(pieces)
        self._sampled: list[int] = []
        self.may_go_on = threading.Semaphore(1)

    def begun(self) -> list[Request]:
        tokens = np.array(self._sampled, dtype=np.int32)
        logprobs = np.zeros(len(tokens), dtype=np.float32)
        resume = Resume(tokens, logprobs, (VersionSpan(start=0, version=0),), 0.0)
        return [one.resumed_with(resume) for one in self._requests]

    def withdraw(self, is_unwanted: Callable[[Request], bool]) -> list[Request]:
        begun = [one for one in self.begun() if is_unwanted(one)]
        super().withdraw(is_unwanted)
        return begun

    def step(self) -> list[Finished]:
        if not self._requests:
            return []
        if not self._pieces:
            self._texts = [self._tokenizer.decode(self._sampled)]
            asked, self._requests = self._requests, []
            return [self._said(request) for request in asked]
        assert self.may_go_on.acquire(timeout=GENEROUS_S)
        self._sampled += self._tokenizer.encode(self._pieces.pop(0), add_special_tokens=False)
        return []


@pytest.fixture
def growing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GrowingEngine]:
    def put(*pieces: str) -> GrowingEngine:
        tokenizer = load_tokenizer(folder)
        engine = GrowingEngine(tokenizer, pieces, tokenizer.eos_token_id)
        monkeypatch.setattr(served_module, "native_engine", lambda *_, **__: engine)
        return engine

    return put


@pytest.mark.parametrize("stop", [None, "END"])
def test_text_is_told_before_more_is_sampled(
    folder: Path, growing: Callable[..., GrowingEngine], stop: str | None
) -> None:
    engine = growing("Hel", "lo, ", "you", "END and so on")
    with slipstream.serve(folder) as serving, client_of(serving) as client:
        more: Any = {"stream": True, "stream_options": {"include_usage": True}, "stop": stop}
        chunks: list[Any] = []
        texts: list[str] = []
        for chunk in client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "hi"}], max_tokens=99, **more
        ):
            chunks.append(chunk)
            for choice in chunk.choices:
                if choice.delta.content:
                    texts.append(choice.delta.content)
                    engine.may_go_on.release()  # else it would wait for ever
    assert texts[:3] == ["Hel", "lo, ", "you"]
    assert "".join(texts[3:]) == ("END and so on" if stop is None else "")
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == len("Hello, youEND") + (0 if stop else len(" and so on") + 1)


def test_what_is_sampled_during_a_look_is_looked_at_next() -> None:
    class Letters:
        def lasting(self, asked: Any, tokens: Any) -> str:
            return "".join(map(chr, tokens))

    asked: Any = SimpleNamespace(ask=SimpleNamespace(wishes=SimpleNamespace(stop=())))
    told: list[str] = []
    has_told = threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        if len(told) == 1:
            watch.look(np.array([97, 98]))
            watch.look(np.array([97, 98, 99]))
        else:
            has_told.set()

    with ThreadPoolExecutor(1) as workers:
        letters: Any = Letters()
        watch = served_module._TextWatch(letters, asked, workers, lambda: None, tell)
        watch.look(np.array([97]))
        assert has_told.wait(GENEROUS_S)
    assert told == ["a", "bc"]


def test_a_stream_says_what_a_whole_answer_says(serving: Serving) -> None:
    whole = ask(serving, "say", max_tokens=30, temperature=0)
    with client_of(serving) as client:
        chunks = list(
            client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": "say"}],
                max_tokens=30,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert said == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_with_tools_a_stream_is_told_at_its_end(folder: Path, growing: Callable[..., GrowingEngine]) -> None:
    engine = growing("I add.", CALL)
    engine.may_go_on.release()
    with slipstream.serve(folder, tool_format="json_tags") as serving, client_of(serving) as client:
        chunks = list(
            client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "hi"}], tools=ADD, stream=True
            )
        )
    choices = [chunk.choices[0] for chunk in chunks]
    assert [one.delta.content for one in choices if one.delta.content] == ["I add."]
    assert [one.delta.tool_calls[0].function.name for one in choices if one.delta.tool_calls] == ["add"]
    assert choices[-1].finish_reason == "tool_calls"


# Many clients, and those that leave


def test_64_clients_at_once(serving: Serving) -> None:
    answers = at_once(serving, 64, max_tokens=8, temperature=0)
    texts = [one.choices[0].message.content for one in answers]
    assert texts == [texts[i % len(WORDS)] for i in range(64)]
    assert len(set(texts)) == len(WORDS)


def test_overload(folder: Path, scripted: Callable[..., ScriptedEngine]) -> None:
    engine = scripted()
    with slipstream.serve(folder, slots=2, max_waiting=3) as serving:

        async def whole() -> list[Any]:
            async with async_client_of(serving) as client:
                waiting = {
                    asyncio.ensure_future(client.completions.create(model="any", prompt="x", max_tokens=3))
                    for _ in range(9)
                }
                done: set[Any] = set()
                while len(done) < 4:  # those that are refused
                    more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    done |= more
                engine.may_answer.set()
                return await asyncio.gather(*done, *waiting, return_exceptions=True)

        ends = asyncio.run(whole())
        refused = [end for end in ends if isinstance(end, openai.RateLimitError)]
        assert [one.code for one in refused] == ["overloaded"] * 4
        assert [end.choices[0].text for end in ends[4:]] == ["done"] * 5
        assert ask(serving, "again", max_tokens=3).choices[0].message.content == "done"


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engines that are made."""
    made: list[Any] = []
    make = served_module.native_engine

    def note(*arguments: Any, **more: Any) -> Any:
        made.append(make(*arguments, **more))
        return made[-1]

    monkeypatch.setattr(served_module, "native_engine", note)
    return made


def test_rows_are_free_again_early(tmp_path: Path, engines: list[Any]) -> None:
    """When a client has gone, and at a stop text: the next request has the only row long before the end of theirs."""
    folder = make_checkpoint(tmp_path / "long", scale=0.02, ends=False, max_positions=2 * LONG)  # says anything
    with slipstream.serve(folder, slots=1, max_len=2 * LONG) as serving:
        with client_of(serving) as client, pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).completions.create(
                model="any", prompt="x", max_tokens=LONG, seed=2, stop=["<no such text>"]
            )
        answer = complete(serving, "y", max_tokens=LONG, seed=3, stop=["e", "t"])
        assert answer.choices[0].finish_reason == "stop"
        assert not {"e", "t"} & {*answer.choices[0].text}
        [engine] = engines
        assert engine.stats.generated_tokens < LONG


def test_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_KEY", "a-secret")
    with slipstream.serve(folder, api_key_env="SERVE_KEY") as serving:
        for wrong in ("another", "a-secre", "a-secret2"):
            with client_of(serving, wrong) as client, pytest.raises(openai.AuthenticationError):
                client.models.list()
        with client_of(serving, "a-secret") as client:
            elsewhere = {"Host": "served.example", "Sec-Fetch-Site": "cross-site"}
            assert client.completions.create(model="any", prompt="x", max_tokens=2, extra_headers=elsewhere).choices
        in_address = serving.base_url.replace("/v1", "/s/a-secret/v1")
        with OpenAI(base_url=in_address, api_key="none", max_retries=0, timeout=GENEROUS_S) as client:
            assert client.models.list()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "[bad"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "[::1]:8000"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_a_web_site_cannot_ask_without_a_key(serving: Serving, headers: dict[str, str], status: int) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{serving.base_url}/completions", body, headers)
    if status == 200:
        with urllib.request.urlopen(request, timeout=GENEROUS_S) as answer:
            assert answer.status == status
    else:
        with pytest.raises(urllib.error.HTTPError, match=str(status)) as refused:
            urllib.request.urlopen(request, timeout=GENEROUS_S)
        assert json.loads(refused.value.read())["error"]["code"] == "forbidden"
        refused.value.close()


def test_what_waits_is_refused_when_the_server_ends(
    folder: Path, scripted: Callable[..., ScriptedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_module, "ENGINE_END_S", 0.1)  # this one does not end
    engine = scripted()
    serving = slipstream.serve(folder, slots=1)

    async def whole() -> list[Any]:
        async with async_client_of(serving) as client:
            asks = [client.completions.create(model="any", prompt="x", max_tokens=3) for _ in range(3)]
            waiting = [asyncio.ensure_future(one) for one in asks]
            await client.models.list()
            await asyncio.to_thread(serving.close)
            return await asyncio.gather(*waiting, return_exceptions=True)

    ends = asyncio.run(whole())
    engine.may_answer.set()
    assert all(isinstance(end, openai.InternalServerError | openai.APIConnectionError) for end in ends), ends
    serving.wait()  # it has ended
    with pytest.raises(openai.APIConnectionError):
        ask(serving, "still there?")
    serving.close()


def test_an_engine_that_fails_ends_the_server(folder: Path, scripted: Callable[..., ScriptedEngine]) -> None:
    engine = scripted()
    engine.fails = NonFiniteError("a logprob that is not finite")
    engine.may_answer.set()
    with slipstream.serve(folder) as serving:
        with pytest.raises(openai.InternalServerError, match="NonFiniteError"):
            complete(serving, "x", max_tokens=3)
        with pytest.raises(NonFiniteError, match="not finite"):
            serving.wait()


# The command


def test_the_command_serves_until_a_signal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: SimpleQueue[str] = SimpleQueue()
    main_thread = threading.get_ident()
    monkeypatch.setattr(cli, "_say", told.put)

    def client() -> Any:
        try:
            while not (line := told.get(timeout=GENEROUS_S)).startswith("serving tiny at http://127.0.0.1:"):
                pass
            with OpenAI(base_url=line.split()[3], api_key="any", max_retries=0, timeout=GENEROUS_S) as client:
                return client.completions.create(model="tiny", prompt="x", max_tokens=3)
        finally:
            signal.pthread_kill(main_thread, signal.SIGINT)  # to the one that waits

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client)
        assert cli.main(["serve", str(folder), "--port", "0", "--slots", "2", "--name", "tiny"]) == 130
        assert asked.result().usage.prompt_tokens == 2
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.slow
def test_the_command_until_ctrl_c(folder: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "slipstream", "serve", str(folder), "--port", "0", "--slots", "2", "--name", "tiny"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("serving tiny at http://127.0.0.1:"), line
            address = line.split()[3]
            with OpenAI(base_url=address, api_key="any", max_retries=0, timeout=GENEROUS_S) as client:
                answer = client.completions.create(model="tiny", prompt="x", max_tokens=3)
                assert answer.usage
                assert answer.usage.prompt_tokens == 2
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=GENEROUS_S)
            assert (process.returncode, errors) == (130, "interrupted\n")
        finally:
            process.kill()


def test_addresses_that_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY", " ")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 cannot be listened at"):
            slipstream.serve(folder, port=port)
    for wrong, said in (
        ({"host": "0.0.0.0"}, "only with an API key"),
        ({"host": "::"}, "only with an API key"),
        ({"host": "a..b"}, "no such host"),
        ({"port": 70_000}, "'port' is out of range"),
        ({"slots": 0}, "'slots' is out of range"),
        ({"max_waiting": -1}, "'max_waiting' is out of range"),
        ({"max_len": 257}, "no room for such contexts"),
        ({"api_key_env": "NOT_SET"}, "the API key is missing"),
        ({"api_key_env": "EMPTY"}, "the API key is missing"),
        ({"template": "{prompt}"}, "unknown place"),
        ({"tool_format": "xml"}, "unknown format"),
        ({"name": ""}, "a short text"),
    ):
        with pytest.raises(ConfigError, match=said):
            slipstream.serve(folder, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no checkpoint"):
        slipstream.serve(folder / "nowhere")


def test_slots_that_the_machine_has_no_memory_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "memory_bytes", lambda: 10**6)
    with pytest.raises(ConfigError, match="slots = 16 slots of 256 tokens") as refused:
        slipstream.serve(folder)
    assert "lower slots" in str(refused.value)
