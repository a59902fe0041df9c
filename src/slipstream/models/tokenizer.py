"""Tokenizers: one token per character for models trained from scratch, or whatever a checkpoint brings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.core.errors import ConfigError, clip
from slipstream.models.hf_fields import read_object

if TYPE_CHECKING:  # two seconds of import time, only where a tokenizer is read or written
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
BROKEN = "\ufffd"  # what a decoder says for bytes that are no character


class Tokenizer(Protocol):
    """The part of transformers' `PreTrainedTokenizerBase` that a run uses."""

    eos_token_id: Any
    pad_token_id: Any
    chat_template: Any
    name_or_path: Any

    @property
    def special_tokens_map(self) -> Any: ...
    def __len__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __call__(self, text: str | list[str], *, add_special_tokens: bool) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(
        self, token_ids: list[int], skip_special_tokens: bool = ..., *, clean_up_tokenization_spaces: bool = ...
    ) -> Any: ...
    def get_vocab(self) -> dict[str, int]: ...
    def save_pretrained(self, save_directory: Path) -> Any: ...


class CharTokenizer:
    """One token per character of `alphabet`, for models trained from scratch: `char_tokenizer` without transformers.

    Identity: it encodes and decodes as `char_tokenizer` does, and saves what that saves.
    """

    pad_token_id, eos_token_id, unk_token_id = range(len(SPECIAL_TOKENS))
    chat_template = None
    name_or_path = ""

    def __init__(self, alphabet: str | None = None) -> None:
        self._alphabet = alphabet
        self._ids = _vocabulary(alphabet)
        self._tokens = list(self._ids)
        self.alphabet = "".join(self._tokens[len(SPECIAL_TOKENS) :])

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Return the names and texts of the special tokens."""
        return {f"{token[1:-1]}_token": token for token in SPECIAL_TOKENS}

    def __len__(self) -> int:
        return len(self._ids)

    def __call__(self, text: str | list[str], *, add_special_tokens: bool = True) -> dict[str, Any]:
        """Return the tokens of a text, or a list with those of each text, as `input_ids`."""
        if isinstance(text, str):
            return {"input_ids": self.encode(text, add_special_tokens=add_special_tokens)}
        return {"input_ids": [self.encode(one, add_special_tokens=add_special_tokens) for one in text]}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002 - there are none
        """Return the tokens of `text`. None are added; a special token that is spelled out is itself."""
        return [self._ids.get(piece, self.unk_token_id) for piece in _pieces(text)]

    def unknown(self, text: str) -> list[str]:
        """Return the characters of `text` that the alphabet does not have, each once, in their order."""
        return [piece for piece in dict.fromkeys(_pieces(text)) if piece not in self._ids]

    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool = False,
        *,
        clean_up_tokenization_spaces: bool = False,  # noqa: ARG002 - there is nothing to clean
    ) -> str:
        """Return the text of tokens; those that the vocabulary does not have add nothing to it."""
        least = len(SPECIAL_TOKENS) if skip_special_tokens else 0
        return "".join([self._tokens[token] for token in token_ids if least <= token < len(self._tokens)])

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id."""
        return dict(self._ids)

    def save_pretrained(self, save_directory: Path) -> None:
        """Write the files of the tokenizer for transformers, whose import would take two seconds."""
        from tokenizers import AddedToken, processors

        backend = _backend(self._alphabet)
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
        backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
        save_directory.mkdir(parents=True, exist_ok=True)
        backend.save(str(save_directory / "tokenizer.json"))
        described = self.special_tokens_map | {
            "backend": "tokenizers",
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(1e30),
            "padding_side": "left",
            "tokenizer_class": "TokenizersBackend",
        }
        text = json.dumps(described, indent=2, sort_keys=True) + "\n"
        (save_directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _backend(alphabet: str | None) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(_vocabulary(alphabet), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _pieces(text: str) -> Iterable[str]:
    return text if "<" not in text else re.findall("|".join((*SPECIAL_TOKENS, r"[\s\S]")), text)


def check_alphabet(tokenizer: Tokenizer, texts: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError where `texts`, each behind its place, have a character that a fresh model's alphabet lacks.

    It would become <unk> silently. Other tokenizers are not looked at.
    """
    if not isinstance(tokenizer, CharTokenizer):
        return
    found = [(where, text, unknown) for where, text in texts if (unknown := tokenizer.unknown(text))]
    if not found:
        return
    where, text, (first, *_) = found[0]
    position, lacking = text.index(first), "".join(dict.fromkeys(one for *_, unknown in found for one in unknown))
    raise ConfigError(
        f"{where} has a character that is not in the alphabet of the fresh model",
        got=f"{first!r} (U+{ord(first):04X}) in {text[max(0, position - 30) : position + 30]!r}"
        + (f"; {len(found)} texts have such characters, in all {lacking!r}" if len(found) > 1 else ""),
        allowed=f"the alphabet, {tokenizer.alphabet!r}",
        hint=f"change the text, or model.alphabet = {json.dumps(tokenizer.alphabet + lacking, ensure_ascii=False)}",
    )


def _vocabulary(alphabet: str | None) -> dict[str, int]:
    """Return token -> id: the special tokens, then the characters of `alphabet` (default: printable ASCII, newline)."""
    alphabet = PRINTABLE if alphabet is None else alphabet
    if not alphabet or len(set(alphabet)) != len(alphabet):
        repeated = sorted({c for c in alphabet if alphabet.count(c) > 1})
        raise ConfigError(
            "an alphabet is a string of distinct characters",
            got=repeated or "an empty alphabet",
            hint="see model.alphabet",
        )
    return {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}


def char_tokenizer(alphabet: str | None = None) -> PreTrainedTokenizerFast:
    """One token per character of `alphabet` (default: printable ASCII and newline), in its order, after the specials.

    Ids: <pad> 0, <eos> 1, <unk> 2 (any other character), characters from 3. Nothing is added around a text, and
    `decode(encode(text)) == text` for every text over the alphabet, also after `save_pretrained`.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=_backend(alphabet),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the number of ids that stand for tokens: embeddings may have more rows."""
    return 1 + max(tokenizer.get_vocab().values())


def has_tokenizer(path: str | Path) -> bool:
    """Whether folder `path` has what `load_tokenizer` reads."""
    return any((Path(path) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in folder `path`, with its chat template if it has one. No code in that folder is run.

    A foreign one may take any time and memory, or end the process: `foreign_text.rehearse_tokenizer` says beforehand.
    """
    if not has_tokenizer(path):
        raise ConfigError("no tokenizer found", got=str(path), allowed="a folder with tokenizer.json")
    try:
        return read_tokenizer(Path(path))
    except Exception as error:  # a library's opinion of files that may hold anything
        raise ConfigError(
            f"the tokenizer in '{path}' cannot be loaded",
            got=clip(f"{type(error).__name__}: {error}"),
            hint="`transformers.AutoTokenizer.from_pretrained` on that folder says more",
        ) from error


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """`load_tokenizer` with the errors of the libraries, whatever they are."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase, TokenizersBackend

    described = path / "tokenizer_config.json"
    named = read_object(described).get("tokenizer_class") if described.exists() else None
    if named == "TokenizersBackend" and (path / "tokenizer.json").exists():
        # tokenizer.json as it is: AutoTokenizer makes a byte-level Qwen2Tokenizer of any that is beside a qwen2.
        tokenizer = TokenizersBackend.from_pretrained(str(path), local_files_only=True)
    else:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):  # tokenizer_class may name any class of the library
        raise TypeError(f"tokenizer_class makes a {type(tokenizer).__name__}")
    template = tokenizer.chat_template  # saved as it was read, and nobody looks at it before it is used
    templates = template.values() if isinstance(template, dict) else () if template is None else (template,)
    if not all(isinstance(one, str) for one in templates):
        raise TypeError(f"chat_template is no text, and no table of texts: {clip(template, 60)}")
    return tokenizer


@lru_cache(maxsize=8)
def puts_space_first(tokenizer: Tokenizer) -> bool:
    """Tell whether a text that is encoded alone begins with a space of its own, as with SentencePiece's tokenizers.

    They have another token for `a` behind a line break. Most strip that space when they decode.
    """
    line_break, alone, behind = tokenizer(["\n", "a", "\na"], add_special_tokens=False)["input_ids"]
    start, rest = behind[: len(line_break)], behind[len(line_break) :]
    return bool(start == line_break and rest not in ([], alone))


class TokenTexts:
    """The text that each token of a completion adds; special tokens are spelled out.

    A character that is made of several tokens goes to the first of them. Each token is decoded once and remembered.
    Identity: joined, the texts are the text of all tokens.
    """

    LONGEST = 8  # tokens that make one character, at most, before its bytes are taken for broken

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Behind another token, since some decoders strip the space at the start of a text.
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor_text = self._decode(self._anchor)
        self._known: dict[int, str] = {}

    def __call__(self, tokens: Sequence[int]) -> list[str]:
        texts = [self._text(token) for token in tokens]
        start = 0
        while start < len(texts):
            end = start + 1
            if BROKEN in texts[start]:  # bytes of a character
                joined = texts[start]
                while joined.endswith(BROKEN) and end < len(texts) and end - start < self.LONGEST:
                    end += 1
                    joined = self._behind_anchor(tokens[start:end])
                texts[start:end] = [joined] + [""] * (end - start - 1)
            start = end
        return texts

    def _text(self, token: int) -> str:
        text = self._known.get(token)
        if text is None:
            text = self._known[token] = self._behind_anchor([token])
        return text

    def _behind_anchor(self, tokens: Sequence[int]) -> str:
        return self._decode([*self._anchor, *tokens])[len(self._anchor_text) :]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
