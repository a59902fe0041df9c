"""Preferences read from files: those of the stage `preferences`, or data sets of pairs and of labelled completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slipstream.core.config import RunConfig, stage_of
from slipstream.core.errors import ConfigError
from slipstream.core.jsonl import read_jsonl
from slipstream.core.recipes import stage_dir
from slipstream.models.build import max_positions
from slipstream.models.tokenizer import Tokenizer, check_alphabet
from slipstream.prompts import prompts_that_fit
from slipstream.prompts.dataset import read_records, row_of
from slipstream.prompts.rows import PromptRow
from slipstream.prompts.template import Encoder, Template, ended
from slipstream.stages.completions import scored_tokens, split_by_prompt
from slipstream.stages.preferences import FILE, PreferenceLine
from slipstream.trainer.reward_model import Preference

PAIR, SINGLE = ("chosen", "rejected"), ("completion",)


def has_candidates(path: Path) -> bool:
    """True for a JSONL file whose first line is a `PreferenceLine`."""
    if not path.is_file() or path.suffix != ".jsonl":
        return False
    with path.open("rb") as file:
        first = file.readline()
    try:
        msgspec.json.decode(first, type=PreferenceLine)
    except msgspec.DecodeError:
        return False
    return True


def read_lines(path: Path, tokenizer: Tokenizer) -> tuple[list[Preference], list[Preference]]:
    """Return (training, held-out) preferences of a file in the form of the stage `preferences`, with its tokens."""
    train: list[Preference] = []
    held_out: list[Preference] = []
    for line in read_jsonl(path, PreferenceLine):
        (held_out if line.is_held_out else train).append(
            Preference(
                prompt_tokens=np.asarray(line.prompt_tokens, dtype=np.int32),
                candidates=tuple(np.asarray(candidate.tokens, dtype=np.int32) for candidate in line.candidates),
                best=line.best,
            )
        )
    if not train:
        raise ConfigError("there are no preferences to train on", got=f"{len(held_out)} held out, none left")
    largest = max(
        int(tokens.max(initial=0)) for one in [*train, *held_out] for tokens in (one.prompt_tokens, *one.candidates)
    )
    if largest >= len(tokenizer):
        what = f"the preferences in {path} are tokens of another tokenizer"
        raise ConfigError(what, got=f"token {largest}", allowed=f"below {len(tokenizer)}, those of model.path")
    return train, held_out


@dataclass(frozen=True)
class FoundPreferences:
    """Hold what a stage learns from and is measured on, and count the preferences that were left out, by reason."""

    train: list[Preference]
    held_out: list[Preference]
    num_equal: int
    num_too_long: int

    def __str__(self) -> str:
        return (
            f"{len(self.train)} to train on, {len(self.held_out)} held out, {self.num_equal} of equal completions "
            f"dropped, {self.num_too_long} too long"
        )


@dataclass(frozen=True)
class LabelledRecord:
    """A record of a data set: the columns of its prompt, and its completions, the best first, or one with a rating."""

    of_prompt: Mapping[str, Any]
    completions: tuple[str, ...]
    rating: float | None = None


def positions_from(config: RunConfig, *paths: str | None) -> int:
    """Return the tokens that the models of all `paths` read, before the stages that make them; None: `model.path`."""
    found = []
    for one in paths:
        path = (config.dpo.path if stage_of(one) == "dpo" else one) or config.model.path
        found.append(max_positions(config.model_copy(update={"model": config.model.model_copy(update={"path": path})})))
    return min(found)


def that_fit(preferences: Sequence[Preference], max_positions: int) -> list[Preference]:
    """Return the preferences of which every completion has at most `max_positions` tokens with its prompt."""
    return [one for one in preferences if len(one.prompt_tokens) + max(map(len, one.candidates)) <= max_positions]


# For the stage `dpo`


def dpo_positions(config: RunConfig) -> int:
    """Return the tokens that both models of the stage `dpo` read: that which it starts from, and its reference."""
    return positions_from(config, config.dpo.path, config.dpo.reference or config.dpo.path)


def read_pairs(config: RunConfig, run_dir: Path, tokenizer: Tokenizer, *, max_positions: int) -> FoundPreferences:
    """Return the preferences of `config.dpo`: pairs, or for KTO single completions with their labels as ratings.

    They are the stage's, those of a file like it, or those of a data set, of which `dpo.held_out` of the prompts are
    held out. KTO takes each pair for a desirable and an undesirable completion. Pairs of equal completions, and what
    is longer than `max_positions` or has too long a prompt, are left out. ConfigError where nothing is left, and for
    data that the loss cannot be trained on.
    """
    source, is_kto = config.dpo.preferences, config.dpo.loss == "kto"
    path = stage_dir(run_dir, "preferences") / FILE if source is None else Path(source).expanduser()
    parts: list[list[Preference]]
    num_too_long = 0
    if source is None or has_candidates(path):
        parts = [*read_lines(path, tokenizer)]
    else:
        found, num_too_long = read_dataset(source, partial(_labelled, is_kto=is_kto), config, tokenizer)
        share = config.dpo.held_out
        parts = [*split_by_prompt(found, lambda one: one.prompt_tokens, share=share, seed=config.seed)]
    every = sum(map(len, parts))
    parts = [that_fit(part, max_positions) for part in parts]
    num_fitting = sum(map(len, parts))
    parts = [[one for one in part if not _is_equal(one, source or path)] for part in parts]
    num_equal = num_fitting - sum(map(len, parts))
    if is_kto:
        parts = [[single for one in part for single in _singles(one)] for part in parts]
    train, held_out = parts
    told = FoundPreferences(train, held_out, num_equal, num_too_long + every - num_fitting)
    if not told.train:
        hint = "see dpo.held_out, prompts.max_prompt_tokens and rewards.truncate_token"
        raise ConfigError(f"'{source or path}' has no preferences to train on", got=str(told), hint=hint)
    if is_kto:
        _check_labelled(told.train)
    return told


def _is_equal(preference: Preference, source: str | Path) -> bool:
    """Tell whether a pair compares nothing. ConfigError for more than two completions."""
    if len(preference.candidates) > 2:
        what = f"the stage dpo learns from pairs, and '{source}' has other preferences"
        raise ConfigError(what, got=f"{len(preference.candidates)} candidates", allowed="2")
    return len(preference.candidates) == 2 and np.array_equal(*preference.candidates)


def _singles(preference: Preference) -> list[Preference]:
    """Return a pair as a desirable and an undesirable completion; a single one as it is."""
    if preference.rating is not None:
        return [preference]
    ranked = enumerate(preference.samples)
    return [Preference(prompt, (tokens,), rating=float(not rank)) for rank, (prompt, tokens) in ranked]


def _check_labelled(train: Sequence[Preference]) -> None:
    """Raise ConfigError unless there are completions of both labels, and of more prompts than one."""
    num_desirable = sum(one.rating == 1.0 for one in train)
    if num_desirable in (0, len(train)):
        what = "KTO learns from desirable and undesirable completions"
        raise ConfigError(what, got=f"{num_desirable} desirable of {len(train)}", allowed="some of both")
    if len({one.prompt_tokens.tobytes() for one in train}) == 1:
        what = "KTO compares with completions of other prompts"
        hint = "dpo.loss = 'sigmoid', 'ipo' and 'simpo' learn from pairs of one prompt"
        raise ConfigError(what, got="one prompt alone to train on", allowed="at least two prompts", hint=hint)


def read_dataset(
    source: str, labelled: Callable[[Mapping[str, Any], str], LabelledRecord], config: RunConfig, tokenizer: Tokenizer
) -> tuple[list[Preference], int]:
    """Return the preferences of a data set, and how many were left out because their prompts are too long.

    `labelled` takes a record and where it stands, and raises ConfigError for one that is no preference.
    """
    reading = prompts_that_fit(config).model_copy(
        update={"prompt_column": "prompt", "messages_column": None, "between_periods": False}
    )
    template = Template.of(config.prompts)
    encoder = Encoder(reading, tokenizer)
    rows: list[PromptRow] = []
    labels: list[LabelledRecord] = []
    for where, record in read_records(source, None, reading.dataset_split):
        label = labelled(record, where)
        row = row_of(label.of_prompt, reading, template=template, where=where)
        assert row is not None, "between_periods is off"
        rows.append(row)
        labels.append(label)
    texts = [text for label in labels for text in label.completions]
    check_alphabet(tokenizer, ((f"a completion of '{source}'", text) for text in texts))
    prompts = encoder.encode(rows)
    encoder.check(prompts)
    before = [prompt for prompt, label in zip(prompts, labels, strict=True) for _ in label.completions]
    tokens = iter(ended(texts, before, tokenizer))
    found = []
    for prompt, label in zip(prompts, labels, strict=True):
        candidates = tuple(scored_tokens(next(tokens), config.rewards) for _ in label.completions)
        if encoder.fits(prompt):
            found.append(Preference(prompt.tokens, candidates, rating=label.rating))
    return found, len(prompts) - len(found)


def _labelled(record: Mapping[str, Any], where: str, *, is_kto: bool) -> LabelledRecord:
    """Return what a record of the stage `dpo` says: a pair, or for KTO also a completion with its label."""
    is_single = is_kto and "completion" in record
    names = SINGLE if is_single else PAIR
    context, answers = _answers(record, names, where=where)
    if is_single and record.get("label") not in (0, 1):
        raise ConfigError(f"{where} has no label", got=repr(record.get("label"))[:80], allowed="label: true or false")
    others = {key: value for key, value in record.items() if key not in (*names, "label")}
    prompt = others | ({"prompt": context} if context else {})
    return LabelledRecord(prompt, answers, float(record["label"]) if is_single else None)


def _answers(record: Mapping[str, Any], names: Sequence[str], *, where: str) -> tuple[Any, tuple[str, ...]]:
    """Return the chat before the completions, where they are chats themselves (else None), and their texts.

    A chat's completion is its last message, the assistant's. Chats may hold the prompt themselves; a column `prompt`
    beside them is what they begin with, or the last question in them.
    """
    values: list[Any] = [record.get(name) for name in names]
    if not all(isinstance(value, str) for value in values) and not all(isinstance(value, list) for value in values):
        raise ConfigError(
            f"{where} is no preference",
            got=", ".join(record),
            allowed=f"texts or chats in {', '.join(names)}",
            hint="dpo.loss = 'kto' also takes prompt, completion, label" if names == PAIR else None,
        )
    if isinstance(values[0], str):
        context, texts = None, values
    else:
        chats = [_split(value, where=where) for value in values]
        context, texts = chats[0][0], [text for _, text in chats]
        if any(other != context for other, _ in chats):
            raise ConfigError(
                f"{where}: chosen and rejected go on from different chats", hint="only the last message differs"
            )
    prompt = record.get("prompt")
    if context and prompt is not None:
        said = context[: len(prompt)] if isinstance(prompt, list) else context[-1].get("content")
        if said != prompt:
            raise ConfigError(f"{where}: the prompt is not that of its chats", got=repr(prompt)[:80])
    if empty := [name for name, text in zip(names, texts, strict=True) if not text]:
        raise ConfigError(f"{where} has an empty completion", got=f"{empty[0]} = ''", hint="drop the record")
    return context, tuple(texts)


def _split(chat: Sequence[Any], *, where: str) -> tuple[list[Any], str]:
    """Return the messages before the last one, and the text of that one, the assistant's."""
    last = chat[-1] if chat else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise ConfigError(f"{where}: a chat to compare ends with the assistant's answer", got=repr(last)[:80])
    return list(chat[:-1]), last["content"]
