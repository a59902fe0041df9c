"""Rows of a dataset: JSONL or parquet files, folders of Hugging Face `datasets`, or a hub id."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from slipstream.core.errors import ConfigError
from slipstream.core.sections import PromptsConfig
from slipstream.models.hub import reached_for_dataset
from slipstream.prompts.rows import PromptRow, to_json_types
from slipstream.prompts.template import Template

MAX_LINE_BYTES = 16 * 2**20
"""Characters of a line of JSONL: a longer one would lie in memory several times, and in messages."""
MAX_ENTRIES = 10_000
"""Files of a folder that is searched for data; the library that does it follows every path, for minutes."""

_ROWS_AT_ONCE = 256
KINDS = (".jsonl", ".ndjson", ".parquet")  # suffixes of the files that are read
_OTHER_KINDS = (".json", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst", ".zip")  # no ends of a name on the hub
_ROLES = {"system", "developer", "user", "assistant", "tool"}


def read_rows(
    source: str, config: PromptsConfig, *, template: Template, needed: Mapping[str, str] | None = None
) -> Iterator[PromptRow]:
    """Rows of the dataset at `source`, in order. Task key: 'dataset'. ConfigError says which record is malformed.

    Or has not one of the columns `needed`, whose values say by what.
    """
    records = read_records(source, config.config_of(source), config.dataset_split, is_streamed=config.streaming)
    for where, record in records:
        row = row_of(record, config, template=template, where=where)
        if row is not None:
            _check_columns(record, row, config, needed or {}, where=where)
            yield row


def _check_columns(
    record: Mapping[str, Any], row: PromptRow, config: PromptsConfig, needed: Mapping[str, str], *, where: str
) -> None:
    """Raise ConfigError for a column that a row lacks and that is `needed`; 'answer' is that of `answer_column`."""
    for name, why in needed.items():
        own = config.answer_column if name == "answer" else name
        is_of_row = row.answer is not None if name == "answer" else name in row.columns  # a whole chat is split there
        if own not in record and not is_of_row:
            is_template = why.endswith(".template") and config.answer_column in record
            hint = f"write {why} = '{{answer}}'" if is_template else "a parameter with a default needs no column"
            what = f"{where} has no column '{own}', which {why} needs"
            raise ConfigError.unknown(what, own, sorted(record), hint=f"complete or drop the row; {hint}")


def check_source(source: str) -> None:
    """Raise ConfigError for a dataset that is no file of a known kind, no folder, and has not the form of a hub id."""
    path = Path(source).expanduser()
    if path.is_file() and path.suffix not in KINDS:
        raise ConfigError("unknown kind of dataset file", got=source, allowed=f"{', '.join(KINDS)} or a folder")
    is_file = path.suffix in (*KINDS, *_OTHER_KINDS) or (path.suffix and "/" not in source)
    is_local = path.is_absolute() or source.startswith((".", "~")) or is_file or source.count("/") > 1
    if not path.exists() and is_local:
        allowed = "an existing file or folder, or a hub id 'owner/name'"
        hint = f"relative paths are from {Path.cwd()}; `slipstream recipes` tells what a shipped recipe needs"
        raise ConfigError("dataset not found", got=source, allowed=allowed, hint=hint)


def check_first(source: str, config: PromptsConfig) -> None:
    """Raise ConfigError where the first record of a JSONL file is no prompt; of other kinds, nothing is read."""
    if Path(source).suffix in KINDS[:2]:
        next(read_rows(source, config, template=Template.of(config)), None)


def read_records(
    source: str, name: str | None, split: str, *, is_streamed: bool = False
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each record with where it stands, for errors: the line of a JSONL file, or its place in the data, from 1.

    With `is_streamed` no more of the data is in memory, or fetched, than what is read and a bit ahead.
    """
    check_source(source)
    path = Path(source).expanduser()
    if path.is_file() and path.suffix != ".parquet":
        for number, record in _jsonl(path):
            yield f"{source}, line {number}", record
        return
    if path.is_dir():
        records = _folder(path, name, split, is_streamed=is_streamed)
    elif path.is_file():
        records = _parquet(path, is_streamed=is_streamed)
    else:
        records = _of_hub(source, name, split, is_streamed=is_streamed)
    for number, record in enumerate(records, start=1):
        yield f"{source}, record {number}", record


def _of_hub(source: str, name: str | None, split: str, *, is_streamed: bool) -> Iterable[Mapping[str, Any]]:
    with reached_for_dataset(source):
        return _load(source, name, split, is_streamed=is_streamed)


def _parquet(path: Path, *, is_streamed: bool) -> Iterable[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        if is_streamed:
            batches = pyarrow.parquet.ParquetFile(path).iter_batches(_ROWS_AT_ONCE)
            return (record for batch in batches for record in batch.to_pylist())
        records: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"'{path}' cannot be read", got=" ".join(str(error).split())[:200], allowed="a parquet file"
        ) from error
    return records


def _jsonl(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with _opened(path) as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                length = len(line) + _rest_of_line(file)
                got = f"{length:,} bytes: {line[:60]!r} ..."
                hint = "is it one object a line? a JSON array in one line is not"
                raise ConfigError(f"{where} is too long", got=got, allowed=f"{MAX_LINE_BYTES:,} bytes", hint=hint)
            try:
                record = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{where} is not UTF-8", got=f"{line[max(0, error.start - 20) : error.end + 20]!r}", allowed="UTF-8"
                ) from error
            except (ValueError, RecursionError) as error:
                what = f"{where} is not JSON: {'nested too deep' if isinstance(error, RecursionError) else error}"
                allowed = 'one object a line, such as {"prompt": "...", "answer": "..."}'
                raise ConfigError(what, got=f"{line[:60]!r}", allowed=allowed) from error
            if not isinstance(record, dict):
                raise ConfigError(
                    f"{where} is not a JSON object", got=type(record).__name__, allowed="one object a line"
                )
            yield number, record


def _rest_of_line(file: BinaryIO) -> int:
    """The bytes from here to the end of the line, read in pieces."""
    length = 0
    while piece := file.readline(MAX_LINE_BYTES):
        length += len(piece)
        if piece.endswith(b"\n"):
            break
    return length


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read", got=error.strerror) from error


def _folder(path: Path, name: str | None, split: str, *, is_streamed: bool) -> Iterable[Mapping[str, Any]]:
    import datasets

    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        loaded = _loaded(str(path), datasets.load_from_disk)
        if isinstance(loaded, datasets.Dataset):
            return loaded  # type: ignore[no-any-return]
        return _split(loaded, split, source=str(path))
    found = 0
    for _, folders, files in os.walk(path):
        found += len(folders) + len(files)
        if found > MAX_ENTRIES:
            what = f"the folder '{path}' has too many files to be searched for data"
            hint = "name the folder of the dataset itself, or one file of it"
            raise ConfigError(what, got=f"more than {MAX_ENTRIES:,} files and folders", hint=hint)
    return _load(str(path), name, split, is_streamed=is_streamed)


def _load(source: str, name: str | None, split: str, *, is_streamed: bool) -> Iterable[Mapping[str, Any]]:
    import datasets

    loaded = _loaded(source, partial(datasets.load_dataset, name=name, streaming=is_streamed))
    return _split(loaded, split, source=source)


def _loaded(source: str, load: Callable[[str], Any]) -> Any:
    """Return `load(source)`, a function of `datasets`. ConfigError for whatever it cannot read."""
    import datasets

    try:
        return load(source)
    except (OSError, ValueError, RuntimeError, KeyError, datasets.exceptions.DatasetsError) as error:
        download = f"`hf download --repo-type dataset {source} --local-dir DIR`"
        hint = f"where there is a network, {download} makes a folder that can be named instead"
        if Path(source).exists():
            hint = "the library `datasets` does not read these files"
        if str(error).startswith(("BuilderConfig", "Config name")):  # there is none of that name, or there are several
            hint = "see prompts.dataset_config, sft.dataset_config, or dataset_config in eval.sets"
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(f"dataset '{source}' cannot be loaded", got=got, hint=hint) from error


def _split(loaded: Mapping[str, Any], split: str, *, source: str) -> Iterable[Mapping[str, Any]]:
    if split not in loaded:
        raise ConfigError.unknown(
            f"dataset '{source}' has no split '{split}'",
            split,
            loaded,
            hint="see prompts.dataset_split, sft.dataset_split, or split in eval.sets",
        )
    records: Iterable[Mapping[str, Any]] = loaded[split]
    return records


def row_of(record: Mapping[str, Any], config: PromptsConfig, *, template: Template, where: str) -> PromptRow | None:
    """The row of `record`, or None for one without the two periods that `between_periods` asks for."""
    if config.messages_column is not None and record.get(config.messages_column):
        record = split_chat(record, config, where=where)
    if config.prompt_column not in record:
        raise ConfigError.unknown(
            f"{where} has no column '{config.prompt_column}'",
            config.prompt_column,
            record,
            none="an object with columns",
            hint="see prompts.prompt_column",
        )
    if "question" in record and config.prompt_column != "question":
        raise ConfigError(
            f"{where} has a column 'question' beside '{config.prompt_column}', whose text templates call {{question}}",
            got=f"the columns {', '.join(record)}",
            allowed="no other column 'question'",
            hint='rename it, or set prompts.prompt_column = "question" if it is the prompt',
        )
    columns = to_json_types(dict(record), where=where)
    prompt = columns.pop(config.prompt_column)
    answer = columns.get(config.answer_column)  # rewards may ask for it under either name
    if isinstance(answer, float) and math.isnan(answer):  # what tables of pandas have where there is none
        answer = columns[config.answer_column] = None
    answer_text = answer if answer is None or isinstance(answer, str) else _text_of(answer)
    columns["answer"] = answer_text
    if isinstance(prompt, str):
        if config.between_periods:
            prompt = between_periods(prompt)
            if prompt is None:
                return None
        columns["question"] = prompt
        return PromptRow(
            text=template.render(columns, where=where), task="dataset", answer=answer_text, columns=columns
        )
    messages = _messages(prompt, where=where)
    if len(messages) > 1 and messages[0]["role"] == "system" and messages[0]["content"] == config.system:
        messages = messages[1:]  # the run gives it to every chat
    columns["question"] = messages[-1]["content"]
    return PromptRow(
        text=messages[-1]["content"], task="dataset", answer=answer_text, messages=messages, columns=columns
    )


def _text_of(answer: Any) -> str:
    """An answer that is no text: a number in decimals (0.00001, where JSON has 1e-05), `said_alone`, else as JSON."""
    if (said := said_alone(answer)) is not None:
        return said
    is_number = isinstance(answer, float) and math.isfinite(answer)
    return f"{Decimal(repr(answer)):f}" if is_number else json.dumps(answer, ensure_ascii=False)


def said_alone(answer: Any) -> str | None:
    """Return the text of a chat that is one message of the assistant, as TRL writes completions; None for all else."""
    match answer:
        case [{"role": "assistant", "content": str(text), **others}] if not others.get("tool_calls"):
            return text
    return None


def split_chat(record: Mapping[str, Any], config: PromptsConfig, *, where: str) -> dict[str, Any]:
    """A whole chat as prompt and answer: all messages but the last, and the text of that one, the assistant's."""
    messages = record[config.messages_column or ""]
    last = messages[-1] if isinstance(messages, list) and len(messages) > 1 else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise ConfigError(f"{where}: a chat to learn from ends with the assistant's answer", got=repr(last)[:80])
    others = {key: value for key, value in record.items() if key != config.messages_column}
    return {**others, config.prompt_column: messages[:-1], config.answer_column: last["content"]}


def between_periods(text: str) -> str | None:
    """`text` from behind its first period to its last one, its first space kept; None where nothing lies between.

    Whole sentences as queries: N, item 12, for the book corpus.
    """
    first, last = text.find("."), text.rfind(".")
    return text[first + 1 : last + 1] if last > first else None


def _messages(prompt: Any, *, where: str) -> list[dict[str, Any]]:
    if not isinstance(prompt, list) or not prompt:
        what = f"{where}: the prompt is neither text nor a chat"
        allowed = "a string, or a list of messages"
        raise ConfigError(what, got=type(prompt).__name__, allowed=allowed, hint="see prompts.prompt_column")
    for message in prompt:
        if not (
            isinstance(message, dict) and message.get("role") in _ROLES and isinstance(message.get("content"), str)
        ):
            allowed = f"{{'role': one of {sorted(_ROLES)}, 'content': text}}"
            raise ConfigError(f"{where}: a chat message is malformed", got=message, allowed=allowed)
    if prompt[-1]["role"] == "assistant":
        hint = "a prompt ends before the answer; put the reference into the answer column"
        raise ConfigError(f"{where}: the chat ends with the assistant's answer", hint=hint)
    return prompt
