"""Text to tokens: prompt templates over a row's columns, chat templates, and the length limit."""

from __future__ import annotations

import re
import string
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError, did_you_mean
from slipstream.core.plain import shortened
from slipstream.core.sections import PromptsConfig
from slipstream.core.types import Prompt
from slipstream.models.foreign_text import ChatRenderer
from slipstream.models.tokenizer import check_alphabet, puts_space_first
from slipstream.prompts.rows import PromptRow, columns_key, id_of, row_key

if TYPE_CHECKING:
    from slipstream.models.tokenizer import Tokenizer


PROMPT = "prompt"
# A line break or a tab that TOML has not read, in single quotes; no command of LaTeX.
_SPELLED_OUT = r"\\[nt](?!abla|eq|ot\b|u\b|an\b|ext|heta|imes|o\b)"


def spelled_out(config: RunConfig) -> str | None:
    """Return a warning where templates have a backslash and a letter, which a model learns to write; else None."""
    kinds = {"warm_start": config.warm_start.demonstrations, "sft": config.sft.demonstrations}
    texts = [("prompts.template", config.prompts.template), ("environment.observation", config.environment.observation)]
    texts += [(f"{name}.demonstrations", one.template) for name, kind in kinds.items() for one in kind]
    fields = dict.fromkeys(name for name, text in texts if re.search(_SPELLED_OUT, text))
    if not fields:
        return None
    where = f"WARNING: \\n or \\t in {', '.join(fields)} is two characters, a backslash and a letter"
    return f'{where}; for a line break or a tab write double quotes in TOML: "..\\n"'


class Template:
    """`'{word}>'` over a row's columns: plain names only, `{{` and `}}` for braces.

    `prompt_column` is another name of `{question}`, where it is not `prompt`, which is one of any data.
    """

    def __init__(self, text: str, *, field: str, prompt_column: str = PROMPT) -> None:
        self.field, self._text, self._names = field, text, {PROMPT, prompt_column}
        try:
            pieces = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(f"{field} is not a template", got=repr(text), allowed="'{column}' and '{{'") from error
        for _, name, spec, conversion in pieces:
            if name is not None and (not name.isidentifier() or spec or conversion):
                what = f"{field} uses a placeholder that is not a plain column name"
                allowed = "'{column}'; literal braces are written '{{' and '}}'"
                raise ConfigError(what, got=f"{{{name}}}" if not (spec or conversion) else repr(text), allowed=allowed)
        is_own = prompt_column != PROMPT
        self._pieces = [
            (literal, "question" if is_own and name == prompt_column else name) for literal, name, _, _ in pieces
        ]

    @classmethod
    def of(cls, config: PromptsConfig) -> Template:
        """Return the one of prompts, in which a data set's prompt column may have its own name."""
        return cls(config.template, field="prompts.template", prompt_column=config.prompt_column)

    @property
    def literals(self) -> str:
        """Return the text around the placeholders."""
        return "".join(literal for literal, _ in self._pieces)

    @property
    def columns(self) -> set[str]:
        return {name for _, name in self._pieces if name is not None}

    def is_filled_by(self, columns: Mapping[str, Any]) -> bool:
        """Whether there is something in every column that `render` takes."""
        known = {name for name, value in columns.items() if value is not None}
        if PROMPT not in columns and "question" in known:
            known.add(PROMPT)
        return self.columns <= known

    def render(self, columns: Mapping[str, Any], *, where: str = "") -> str:
        """The text with every placeholder replaced by `str` of its column; ConfigError on an unknown or empty one.

        Where no column is called `prompt`, {prompt} is {question}.
        """
        parts = []
        for literal, name in self._pieces:
            parts.append(literal)
            if name is None:
                continue
            if name == PROMPT and name not in columns and "question" in columns:
                name = "question"
            if name not in columns:
                raise ConfigError.unknown(
                    f"{self.field} names a column that the row does not have" + (where and f": {where}"),
                    name,
                    sorted({*columns, *(self._names if "question" in columns else ())}),
                    got=name,
                    hint=self._over_these(columns),
                )
            if columns[name] is None:
                raise ConfigError(
                    f"{self.field} names a column in which the row has nothing" + (where and f": {where}"),
                    got=f"{name} = null",
                    allowed="a text or a number",
                    hint="complete or drop the row"
                    + (", or set warm_start.steps = 0" if self.field.startswith("warm_start") else ""),
                )
            parts.append(str(columns[name]))
        return "".join(parts)

    def _over_these(self, columns: Mapping[str, Any]) -> str | None:
        """Return what to write in place of a template for other data, such as that of a recipe's own tasks."""
        names = ("question", "prompt") if self.field == "prompts.template" else ("answer",)
        own = next((name for name in names if name in columns), None)
        if own is None:
            return None
        return f"write {self.field} = '{{{own}}}': {shortened(repr(self._text), 60)} is a template for other data"


class Encoder:
    """Rows to `Prompt`s with a tokenizer, many at a time.

    `tools` are the schemas of the functions that the policy may call; the chat template writes them into each chat.
    """

    def __init__(
        self, config: PromptsConfig, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self._config = config
        self._tools = tools
        self._tokenizer = tokenizer
        self._template = Template.of(config)
        self._renderer: ChatRenderer | None = None
        if tokenizer.chat_template or config.chat_template_kwargs:
            self._renderer = ChatRenderer(
                tokenizer.chat_template,
                tokenizer.special_tokens_map,
                origin=tokenizer.name_or_path,
                variables=config.chat_template_kwargs,
            )
        if config.system is not None and not config.chat:
            what = "prompts.system needs a chat template"
            hint = "set prompts.chat = true, or put the text into prompts.template"
            raise ConfigError(what, got="system with chat = false", allowed="chat = true", hint=hint)

    def messages(self, row: PromptRow) -> list[dict[str, Any]] | None:
        """The chat of `row`: its own, or its text as a user message under `chat`; the system message in front."""
        if row.messages is None and not self._config.chat:
            return None
        messages = row.messages if row.messages is not None else [{"role": "user", "content": row.text}]
        if self._config.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._config.system}, *messages]
        return messages

    @property
    def tells_rows(self) -> bool:
        """Whether prompts are told apart by all columns of their rows, not by their text alone."""
        return self._config.identity == "row"

    def key(self, row: PromptRow) -> str:
        """Return what rows share that count as one prompt."""
        key = row_key(row.text, row.messages)
        return columns_key(key, row.columns) if self.tells_rows else key

    def encode(self, rows: Sequence[PromptRow]) -> list[Prompt]:
        """One prompt per row, in order; tokens int32 [Tp]. Over-long prompts are the caller's to drop (`fits`)."""
        if not rows:
            return []
        chats = [self.messages(row) for row in rows]
        plain = [i for i, chat in enumerate(chats) if chat is None]
        rendered = [i for i, chat in enumerate(chats) if chat is not None]
        texts = [row.text for row in rows]
        if rendered:
            for i, text in zip(rendered, self._render_chats([c for c in chats if c is not None]), strict=True):
                texts[i] = text
        ids: dict[int, list[int]] = {}
        for indices, add_special in ((plain, True), (rendered, False)):  # a chat template writes its own BOS
            if indices:
                batch = self._tokenizer([texts[i] for i in indices], add_special_tokens=add_special)["input_ids"]
                ids.update(zip(indices, batch, strict=True))
        return [
            Prompt(
                prompt_id=id_of(self.key(row)),
                text=texts[i],
                tokens=np.asarray(ids[i], dtype=np.int32),
                task=row.task,
                answer=row.answer,
                messages=chats[i],
                columns=row.columns,
            )
            for i, row in enumerate(rows)
        ]

    def text_of(self, columns: Mapping[str, Any]) -> str | None:
        """Return what the template makes of a row's columns, shortened as such a row; None where it lacks some."""
        known = {name for name, value in columns.items() if value is not None}
        if not self._template.columns <= (known if PROMPT in columns else known | {PROMPT}):
            return None
        return self.shortened(PromptRow(text=self._template.render(columns), task="", columns=dict(columns))).text

    def shortened(self, row: PromptRow) -> PromptRow:
        """`row`, or what `prompts.too_long` makes of it where its prompt does not fit; chats stay as they are.

        `prompts.between_periods`: what is cut ends with its last period (N, item 12); without one the row stays.
        """
        if self._config.too_long == "drop" or row.messages is not None or self.fits(self.encode([row])[0]):
            return row
        if self._config.too_long == "cut":
            cut = self._longest(row.text, lambda text: replace(row, text=text))
            if not self._config.between_periods:
                return cut
            end = cut.text.rfind(".", row.text.find(str(row.columns.get("question", row.text)))) + 1
            return replace(cut, text=cut.text[:end]) if end else row
        return self._shorten(row)

    def _shorten(self, row: PromptRow) -> PromptRow:
        """Without the last lines of `shorten_column`, as few as it takes; then without its last characters."""
        column = self._config.shorten_column
        assert column is not None, "the schema asks for a column to shorten"
        if column not in row.columns or column not in self._template.columns:
            raise ConfigError(
                "prompts.shorten_column is no column of the template",
                got=column,
                allowed=", ".join(sorted(self._template.columns & row.columns.keys())),
                hint=did_you_mean(column, self._template.columns),
            )

        def with_text(text: str) -> PromptRow:
            return replace(row, text=self._template.render({**row.columns, column: text}))

        text = str(row.columns[column])
        while "\n" in text:
            text = text[: text.rindex("\n")]
            shorter = with_text(text)
            if self.fits(self.encode([shorter])[0]):
                return shorter
        return self._longest(text, with_text)

    def _longest(self, text: str, make: Callable[[str], PromptRow]) -> PromptRow:
        """`make` of the longest beginning of `text` whose prompt fits; of nothing, where none does."""
        num_cut = bisect_left(
            range(len(text)), True, key=lambda cut: self.fits(self.encode([make(text[: len(text) - cut])])[0])
        )
        return make(text[: len(text) - num_cut])

    def fits(self, prompt: Prompt) -> bool:
        return 0 < len(prompt.tokens) <= (self._config.max_prompt_tokens or len(prompt.tokens))

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raise ConfigError for a character that the alphabet of a fresh model does not have."""
        check_alphabet(self._tokenizer, [(self._template.field, self._template.literals)])
        check_alphabet(self._tokenizer, (("a prompt", prompt.text) for prompt in prompts))

    def _render_chats(self, chats: Sequence[list[dict[str, Any]]]) -> list[str]:
        if self._renderer is None:
            what = "chat prompts need a tokenizer with a chat template"
            hint = "use an instruction-tuned checkpoint, or prompts.chat = false"
            raise ConfigError(what, got="a tokenizer without one", hint=hint)
        return self._renderer.render(chats, tools=self._tools)


def ended(completions: Sequence[str], prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Return the tokens int32 [T] of texts behind `prompts`, each ended by the tokenizer's EOS, where it has one.

    Some data has it in its texts: these get no second one. SentencePiece's tokenizers put a space in front of a text;
    it is kept where `_is_spaced`.
    """
    ids = tokenizer(list(completions), add_special_tokens=False)["input_ids"] if completions else []
    if completions and puts_space_first(tokenizer):
        texts = ["\n", *(f"\n{text}" for text in completions)]
        first, *behind = tokenizer(texts, add_special_tokens=False)["input_ids"]
        for i, (prompt, both) in enumerate(zip(prompts, behind, strict=True)):
            if both[: len(first)] == first and not _is_spaced(prompt, tokenizer):
                ids[i] = both[len(first) :]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [np.asarray(one if one[-1:] == end else one + end, dtype=np.int32) for one in ids]


def _is_spaced(prompt: Prompt, tokenizer: Tokenizer) -> bool:
    """Tell whether chat templates write a space between `prompt` and an answer: `[/INST] yes`, `ASSISTANT: yes`.

    They write none behind a line break, such as that of `<|assistant|>`; a plain prompt is followed by nothing else.
    """
    return prompt.messages is not None and bool(tokenizer.decode(prompt.tokens[-1:].tolist()).strip())
