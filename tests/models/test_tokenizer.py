"""The character tokenizer loses nothing, before and after a trip to disk."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.core.errors import ConfigError
from slipstream.models.tokenizer import (
    PRINTABLE,
    SPECIAL_TOKENS,
    CharTokenizer,
    TokenTexts,
    char_tokenizer,
    load_tokenizer,
)

TOKENIZER = char_tokenizer()


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(folder)
    return load_tokenizer(folder)


@given(st.text(alphabet=PRINTABLE))
@settings(deadline=None)
def test_round_trip(reloaded, text):
    for tokenizer in (TOKENIZER, reloaded):
        tokens = tokenizer(text, add_special_tokens=True).input_ids
        if "<" not in text:  # the name of a special token in a text is that token, as in every tokenizer
            assert len(tokens) == len(text)
        assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize("text", ["", " ", "\n\n  x ", "it 's , don 't . ?", "a  b", "<pad", "\n"])
def test_round_trip_of_awkward_texts(reloaded, text):
    for tokenizer in (TOKENIZER, reloaded):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids():
    tokenizer = char_tokenizer("abc>")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.encode("cab>") == [5, 3, 4, 6]
    assert tokenizer.encode("z") == [2]
    assert len(tokenizer) == 7


def test_special_tokens_can_be_skipped():
    assert TOKENIZER.decode([*TOKENIZER.encode("ab"), 1, 0], skip_special_tokens=True) == "ab"


def test_characters_beyond_ascii(tmp_path):
    char_tokenizer("äß→漢 ").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("漢→ ä ß")) == "漢→ ä ß"


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_a_tokenizer_is_read_as_it_was_saved_whatever_model_is_beside_it(model_type, tmp_path):
    """AutoTokenizer makes another of what is beside a qwen2: characters that are no bytes vanish."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for tokenizer, text in ((byte_level(), "the thäe 漢\n"), (with_metaspace(), "a bad cab  a face")):
        tokenizer.chat_template = "{{ messages }}"
        tokenizer.add_special_tokens({"eos_token": "<end>", "pad_token": "<pad>"})
        tokenizer.save_pretrained(tmp_path)
        read = load_tokenizer(tmp_path)
        ids = tokenizer.encode(f"{text}<end>")
        assert read.encode(f"{text}<end>") == ids
        assert read.decode(ids) == tokenizer.decode(ids)
        assert (read.chat_template, read.eos_token, read.pad_token) == ("{{ messages }}", "<end>", "<pad>")


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_bad_alphabets(alphabet):
    with pytest.raises(ConfigError):
        char_tokenizer(alphabet)


def byte_level() -> PreTrainedTokenizerFast:
    """One token per byte, and a few of two bytes, one of them across two characters."""
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("t", "h"), ("Ã", "¤"), ("Ł", "æ")]  # "th", "ä", and the bytes 9d e6: the end of a character and a start
    vocabulary = alphabet | {left + right: 256 + index for index, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]


def with_metaspace() -> PreTrainedTokenizerFast:
    """As SentencePiece: a word's first token carries its space, which decoding strips at the start of a text."""
    pieces = ["<unk>", *"abcdefgh", "▁", "▁a", "▁bad", "▁cab"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(index)) for index, piece in enumerate(pieces)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (TOKENIZER, "a plain one\n"),
        (byte_level(), "the thäe 漢字 that 漢 \U0001f600!"),
        (byte_level(), "\u6f5d\u6f22\u5b57" * 30),
        (with_metaspace(), "a bad cab a face"),
    ],
)
def test_the_texts_of_tokens_join_to_the_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    tokens = tokenizer.encode(text)
    texts = TokenTexts(tokenizer)
    pieces = texts(tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces).strip() == text.strip()
    assert "\ufffd" not in "".join(pieces)
    assert max(map(len, pieces)) <= 5, "no token takes what others say"
    assert texts(tokens) == pieces


def test_texts_of_broken_bytes_end() -> None:
    tokenizer = byte_level()
    broken = tokenizer.encode("漢")[:1] * 100
    pieces = TokenTexts(tokenizer)(broken)
    assert len(pieces) == 100
    assert set("".join(pieces)) == {"\ufffd"}


def test_texts_spell_out_special_tokens() -> None:
    assert TokenTexts(TOKENIZER)([*TOKENIZER.encode("ab"), 1, 0]) == ["a", "b", "<eos>", "<pad>"]
    assert TokenTexts(char_tokenizer("xy"))([3, 4, 1, 2]) == ["x", "y", "<eos>", "<unk>"]


@pytest.mark.parametrize("alphabet", [None, "abc<eo>", "äß→漢 \n"], ids=["ascii", "letters of a special token", "wide"])
def test_the_tokenizer_of_characters_needs_no_transformers_and_does_the_same(alphabet: str | None, tmp_path: Path):
    light, full = CharTokenizer(alphabet), char_tokenizer(alphabet)
    rng = random.Random(0)
    pieces = [*(alphabet or PRINTABLE), *SPECIAL_TOKENS, "<", "<e", "eos>", "Ω", "\r\n", "e\u0301", "\U0001f600", " "]
    texts = ["", *("".join(rng.choices(pieces, k=rng.randrange(1, 30))) for _ in range(300))]
    assert light(texts, add_special_tokens=False) == {"input_ids": full(texts, add_special_tokens=False)["input_ids"]}
    for text in texts:
        ids = light.encode(text, add_special_tokens=False)
        assert ids == full.encode(text, add_special_tokens=False)
        assert light(text, add_special_tokens=False) == {"input_ids": ids}
        for skips in (False, True):
            assert light.decode(ids, skip_special_tokens=skips) == full.decode(ids, skip_special_tokens=skips)
    assert light.decode([3, len(light), 4, 10_000]) == full.decode([3, len(light), 4, 10_000])
    assert light.get_vocab() == full.get_vocab()
    assert len(light) == len(full)
    for name in ("pad_token_id", "eos_token_id", "unk_token_id", "special_tokens_map", "name_or_path", "chat_template"):
        assert getattr(light, name) == getattr(full, name), name
    light.save_pretrained(tmp_path / "light")
    full.save_pretrained(tmp_path / "full")
    files = sorted(path.name for path in (tmp_path / "full").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "light").iterdir())
    for name in files:
        assert (tmp_path / "light" / name).read_bytes() == (tmp_path / "full" / name).read_bytes()
