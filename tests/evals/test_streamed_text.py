"""The text that a stream tells before the end: always a beginning of the answer, whatever tokens are made of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.environments.asks import Ask, SamplingWishes
from slipstream.evals.chat_text import ChatText, ReadAsk
from slipstream.generator.requests import Finished, Request


def of_bytes() -> Any:
    """A tokenizer whose tokens are bytes, and some pairs of letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("b", "c"), ("\u0120", "a")]
    vocabulary = {one: place for place, one in enumerate([*alphabet, *(a + b for a, b in merges), "<eos>"])}
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", clean_up_tokenization_spaces=False)


TOKENIZER = of_bytes()
EOS = TOKENIZER.eos_token_id
CHAT_TEXT = ChatText(TOKENIZER, template="{content}", tool_format="auto", stop_ids=[EOS], num_ids=len(TOKENIZER))
TEXTS = st.text(st.sampled_from("abc \n\u00e9\u6f22\U0001f600\ufffd"), max_size=12)


def asked(stops: tuple[str, ...], *, is_chat: bool) -> ReadAsk:
    wishes = SamplingWishes(stop=stops)
    messages = [{"role": "user", "content": "x"}]
    return CHAT_TEXT.read(Ask(messages=messages, wishes=wishes) if is_chat else Ask(text="x", wishes=wishes))


def answer(of: ReadAsk, tokens: np.ndarray) -> str:
    finished = Finished(
        Request(0, 0, of.tokens, 99), tokens, np.zeros(len(tokens), dtype=np.float32), (), "stop", 0.0, 0.0
    )
    return str(CHAT_TEXT.reply(of, finished).message["content"])


@settings(max_examples=200, deadline=None)
@given(
    text=TEXTS,
    stops=st.lists(st.text(st.sampled_from("abc \u6f22"), min_size=1, max_size=4), max_size=3),
    is_chat=st.booleans(),
)
def test_what_is_told_is_a_beginning_of_the_answer(text: str, stops: list[str], is_chat: bool) -> None:
    of = asked(tuple(stops), is_chat=is_chat)
    tokens = np.asarray(TOKENIZER.encode(text), dtype=np.int32)
    whole = answer(of, np.append(tokens, EOS).astype(np.int32))
    for count in range(len(tokens) + 1):
        told = CHAT_TEXT.lasting(of, tokens[:count])
        assert whole.startswith(told)
    if not stops and "\ufffd" not in text:
        assert told == whole == text, "and all of it where nothing may follow"


@pytest.mark.parametrize(
    ("text", "stops", "told"),
    [
        ("ab\u6f22", (), "ab\u6f22"),
        ("a stop and", ("stop",), "a "),
        ("a sto", ("stop", "no"), "a "),
        ("a st", ("stop", "t!"), "a "),
        ("a n", ("stop", "no"), "a "),
        ("a x", ("stop", "no"), "a x"),
    ],
)
def test_a_text_that_may_become_a_stop_text_waits(text: str, stops: tuple[str, ...], told: str) -> None:
    assert CHAT_TEXT.lasting(asked(stops, is_chat=True), np.asarray(TOKENIZER.encode(text), dtype=np.int32)) == told


def test_a_stop_text_longer_than_the_text_costs_what_the_text_has() -> None:
    class Counted(str):
        num_cuts = 0

        def __getitem__(self, key: Any) -> str:
            self.num_cuts += 1
            return super().__getitem__(key)

    stop = Counted("abc" * 1000)
    of = SimpleNamespace(ask=SimpleNamespace(wishes=SimpleNamespace(stop=(stop,)), tools=[]), is_chat=True)
    assert CHAT_TEXT.lasting(of, np.asarray(TOKENIZER.encode("x abca"), dtype=np.int32)) == "x "  # type: ignore[arg-type]
    assert stop.num_cuts <= len("x abca")


def test_a_part_of_a_character_waits() -> None:
    tokens = np.asarray(TOKENIZER.encode("a\U0001f600b"), dtype=np.int32)
    of = asked((), is_chat=False)
    told = [CHAT_TEXT.lasting(of, tokens[:count]) for count in range(len(tokens) + 1)]
    assert told == ["", "a", "a", "a", "a", "a\U0001f600", "a\U0001f600b"]
