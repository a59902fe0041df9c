"""SentencePiece's tokenizers begin a text with a space, and strip it when they decode: texts behind other texts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from slipstream.core.config import RunConfig
from slipstream.core.sections import PromptsConfig
from slipstream.core.types import Prompt
from slipstream.generator.completions import decode_text
from slipstream.models.tokenizer import CharTokenizer, puts_space_first
from slipstream.prompts.rows import PromptRow
from slipstream.prompts.template import Encoder, ended
from slipstream.stages.preference_data import read_pairs

PIECES = ["H", "i", "▁", "Hi", "▁Hi", "▁▁", "▁▁▁", "y", "es", "e", "s", "yes", "▁yes"]
MERGES = [("H", "i"), ("▁", "Hi"), ("▁", "▁"), ("▁▁", "▁"), ("e", "s"), ("y", "es"), ("▁", "yes")]
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
VICUNA = (
    "{% for m in messages %}{{ m.role | upper + ': ' + m.content + (eos_token if m.role == 'assistant' else ' ') }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def vocabulary() -> dict[str, int]:
    specials = ["<unk>", "<s>", "</s>"]
    others = [chr(code) for code in range(33, 127) if chr(code) not in PIECES]
    return {
        one: at for at, one in enumerate([*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *others])
    }


def llama() -> PreTrainedTokenizerFast:
    return LlamaTokenizer(vocab=vocabulary(), merges=MERGES)  # type: ignore[no-any-return]


def legacy() -> PreTrainedTokenizerFast:
    """As the tokenizer.json of Llama-2, TinyLlama and Mistral: a space before every text, whatever it begins with."""
    made = Tokenizer(models.BPE(vocabulary(), MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def byte_level(*, adds_space: bool = False) -> PreTrainedTokenizerFast:
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ċ", "Ċ"), ("H", "i"), ("Ġ", "Hi"), ("Ċ", "Hi")]
    made = Tokenizer(models.BPE(alphabet | {a + b: 256 + at for at, (a, b) in enumerate(merges)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="!")


def plain(tokenizer: PreTrainedTokenizerFast | CharTokenizer, text: str) -> Prompt:
    return Prompt(prompt_id="p", text=text, tokens=np.array(tokenizer(text)["input_ids"], np.int32), task="t")


PIECED = pytest.mark.parametrize("tokenizer", [llama(), legacy()], ids=["llama", "legacy"])


@PIECED
@pytest.mark.parametrize("template", [ZEPHYR, LLAMA2, VICUNA], ids=["zephyr", "llama2", "vicuna"])
def test_an_answer_has_the_tokens_that_it_has_in_its_conversation(
    template: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = template
    messages = [{"role": "user", "content": "q"}]
    [prompt] = Encoder(PromptsConfig(dataset="d"), tokenizer).encode([PromptRow("q", "t", messages=messages)])
    [tokens] = ended(["Hi yes"], [prompt], tokenizer)
    text = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "Hi yes"}], tokenize=False)
    whole = tokenizer(text.rstrip("\n"), add_special_tokens=False)["input_ids"]
    assert [*prompt.tokens, *tokens] == whole


@PIECED
@pytest.mark.parametrize(
    ("before", "said"),
    [("Hi:", " yes"), ("Hi:", "yes"), ("Hi: ", "yes"), ("Hi:\n", "    Hi"), ("Hi:\n", "\nyes"), ("Hi:", "漢")],
)
def test_texts_behind_a_plain_prompt_are_encoded_and_decoded_as_they_are(
    before: str, said: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = plain(tokenizer, before)
    [tokens] = ended([said], [prompt], tokenizer)
    assert tokenizer.decode([*prompt.tokens, *tokens], skip_special_tokens=True) == before + said
    whole = tokenizer(before + said)["input_ids"]
    if whole[: len(prompt.tokens)] == prompt.tokens.tolist():  # not where a space is one token with what follows
        assert tokens.tolist() == [*whole[len(prompt.tokens) :], tokenizer.eos_token_id]
    assert decode_text(tokenizer, tokens, [tokenizer.eos_token_id], prompt=prompt) == said


@PIECED
def test_the_text_of_an_answer_in_a_chat_has_no_first_space(tokenizer: PreTrainedTokenizerFast) -> None:
    """Some templates write one there, which is none of the answer's."""
    asked = Prompt("p", "[INST] q [/INST]", np.array([1], np.int32), "t", messages=[{"role": "user", "content": "q"}])
    ids = np.array(tokenizer.convert_tokens_to_ids(["▁Hi", "▁yes", "</s>"]), np.int32)
    assert decode_text(tokenizer, ids, [tokenizer.eos_token_id], prompt=asked) == "Hi yes"


@pytest.mark.parametrize("tokenizer", [CharTokenizer(), byte_level()], ids=["characters", "bytes"])
def test_nothing_changes_for_other_tokenizers(tokenizer: PreTrainedTokenizerFast | CharTokenizer) -> None:
    assert not puts_space_first(tokenizer)
    rng = random.Random(0)
    texts = ["".join(rng.choices("Hi \n", k=rng.randrange(6))) for _ in range(200)]
    prompts = [plain(tokenizer, rng.choice(texts)) for _ in texts]
    eos = tokenizer.eos_token_id
    for text, tokens, prompt in zip(texts, ended(texts, prompts, tokenizer), prompts, strict=True):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokens.tolist() == [*ids, eos]
        assert decode_text(tokenizer, tokens, [eos], prompt=prompt) == tokenizer.decode(ids)


def test_where_a_line_break_joins_the_text_that_is_encoded_alone() -> None:
    tokenizer = byte_level(adds_space=True)
    assert puts_space_first(tokenizer)
    tokens = ended(["Hi", "i"], [plain(tokenizer, "a")] * 2, tokenizer)
    assert [tokenizer.convert_ids_to_tokens(one.tolist())[:-1] for one in tokens] == [["ĠHi"], ["i"]]


@PIECED
def test_each_completion_of_a_pair_goes_on_behind_its_own_prompt(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.chat_template = LLAMA2
    rows = [
        {"prompt": [{"role": "user", "content": "q"}], "chosen": "Hi", "rejected": "yes"},
        {"prompt": "Hi:", "chosen": "Hi", "rejected": " yes"},
    ]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables = {"prompts": {"dataset": "d", "max_prompt_tokens": 40}, "dpo": {"preferences": str(data), "held_out": 0.0}}
    found = read_pairs(RunConfig.model_validate(tables), tmp_path, tokenizer, max_positions=100)
    texts = [
        tokenizer.decode([*one.prompt_tokens, *tokens], skip_special_tokens=True)
        for one in found.train
        for tokens in one.candidates
    ]
    assert texts == ["[INST] q [/INST] Hi", "[INST] q [/INST] yes", "Hi:Hi", "Hi: yes"]
