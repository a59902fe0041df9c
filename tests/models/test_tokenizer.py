"""The character tokenizer loses nothing, before and after a trip to disk."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.errors import ConfigError
from slipstream.models.tokenizer import PRINTABLE, char_tokenizer, load_tokenizer

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


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_bad_alphabets(alphabet):
    with pytest.raises(ConfigError):
        char_tokenizer(alphabet)
