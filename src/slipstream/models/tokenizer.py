"""Tokenizers: one token per character for models trained from scratch, or whatever a checkpoint brings."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from slipstream.core.errors import ConfigError

PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")


def char_tokenizer(alphabet: str | None = None) -> PreTrainedTokenizerFast:
    """One token per character of `alphabet` (default: printable ASCII and newline), in its order, after the specials.

    Ids: <pad> 0, <eos> 1, <unk> 2 (any other character), characters from 3. Nothing is added around a text, and
    `decode(encode(text)) == text` for every text over the alphabet, also after `save_pretrained`.
    """
    alphabet = PRINTABLE if alphabet is None else alphabet
    if not alphabet or len(set(alphabet)) != len(alphabet):
        repeated = sorted({c for c in alphabet if alphabet.count(c) > 1})
        raise ConfigError(
            "an alphabet is a string of distinct characters",
            got=repeated or "an empty alphabet",
            hint="see model.alphabet",
        )
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def has_tokenizer(path: str | Path) -> bool:
    """Whether folder `path` has what `load_tokenizer` reads."""
    return any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in folder `path`, with its chat template if it has one."""
    if not has_tokenizer(path):
        raise ConfigError("no tokenizer found", got=str(path), allowed="a folder with tokenizer.json")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:  # what transformers raises for torn files
        told = " ".join(str(error).split())
        raise ConfigError(
            f"the tokenizer in '{path}' cannot be loaded",
            got=f"{type(error).__name__}: {told[:200]}",
            hint="`transformers.AutoTokenizer.from_pretrained` on that folder says more",
        ) from error
    return tokenizer
