"""From configuration to prompts: collect, tell apart, split, encode, count."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.plain import shortened
from slipstream.core.sections import PromptsConfig, TaskConfig
from slipstream.core.stage_sections import WarmStartConfig
from slipstream.core.types import Prompt
from slipstream.models.tokenizer import check_alphabet
from slipstream.prompts.dataset import read_rows
from slipstream.prompts.rows import PromptRow, id_of, row_key, split_hash, without_system
from slipstream.prompts.stream import PromptStream
from slipstream.prompts.streamed import StreamedPrompts
from slipstream.prompts.tasks import TaskSource, task_table
from slipstream.prompts.template import PROMPT, Encoder, Template, ended

if TYPE_CHECKING:
    from slipstream.models.tokenizer import Tokenizer

_BATCH, _STREAMED = 1024, 64  # rows tokenised at once
MAX_DROPPED_FRAC = 0.05  # A larger share of the distinct prompts that is too long is worth a warning
_DRY_CANDIDATES = 2048  # a task whose candidates yield under 1 % new prompts over so many has run dry


@dataclass(frozen=True)
class PromptReport:
    """Counts of the candidates. `overlap` is recomputed from the finished splits and must be 0."""

    num_train: int
    num_eval: int
    num_candidates: int
    num_duplicates: int
    num_too_long: int
    overlap: int
    max_tokens: int  # of a prompt that is taken
    longest: int  # tokens of the longest one taken
    tasks: dict[str, int] = field(default_factory=dict)  # training prompts per task key
    num_held_out: int = 0  # rows of the training data that are not trained on, being in held-out data, too
    sets: dict[str, int] = field(default_factory=dict)  # prompts of each of `eval.sets`, in their order
    left_out: str = ""  # rows of a data set that fit and are not trained on, in words

    @property
    def warning(self) -> str | None:
        """A sentence where so many prompts were too long that the rest differs from the data; else None."""
        given = self.num_candidates - self.num_duplicates
        if self.num_too_long <= MAX_DROPPED_FRAC * given:
            return None
        return (
            f"WARNING: {self.num_too_long} of {given} prompts ({self.num_too_long / given:.0%}) have more than "
            f"{self.max_tokens} tokens and were dropped: raise prompts.max_prompt_tokens, lower "
            "generator.max_new_tokens where the model has no more room, or see prompts.too_long"
        )


@dataclass(frozen=True)
class PromptSet:
    """Training stream and held-out prompts, disjoint by normalised text; `tasks` maps `Prompt.task` to its task.

    `sets` are those of `eval.sets` by name, of which `eval` is the first.
    """

    train: PromptStream | StreamedPrompts
    eval: list[Prompt]
    report: PromptReport
    tasks: dict[str, TaskConfig]
    sets: dict[str, list[Prompt]] = field(default_factory=dict)

    @property
    def held_out(self) -> list[Prompt]:
        return [*self.eval, *chain.from_iterable(list(self.sets.values())[1:])]

    @property
    def all(self) -> list[Prompt]:
        return [*self.train.prompts, *self.held_out]


class _Collector:
    """Distinct prompts that fit, and counts of the rest."""

    def __init__(self, encoder: Encoder, needed: Mapping[str, str] | None = None) -> None:
        self.encoder, self.needed = encoder, needed
        self.seen: set[str] = set()
        self.held_out: set[str] = set()
        self.num_candidates = self.num_duplicates = self.num_too_long = self.num_held_out = 0
        self.num_unused = 0  # rows beyond num_train, where all are read
        self.has_more = False  # whether rows are left that were not looked at
        self.num_repeated = 0  # rows of held-out data that repeat another of it

    def __str__(self) -> str:
        held_out = f", {self.num_held_out} of them held out" * (self.num_held_out > 0)
        return f"{self.num_candidates} rows ({self.num_duplicates} repeated{held_out}, {self.num_too_long} too long)"

    def hold_out(self, prompts: Iterable[Prompt]) -> None:
        """Take none of these for training, in their own words or in those of the training data's template."""
        self.held_out = {held for prompt in prompts for held in _ids(prompt, self.encoder)}

    def holds_out(self, key: str, row: PromptRow) -> bool:
        """Tell whether a row of the training data is held out, with its system message or without."""
        if id_of(key) in self.held_out or row.messages is None:
            return id_of(key) in self.held_out
        return id_of(row_key(row.text, without_system(row.messages))) in self.held_out

    def take(self, rows: Iterable[PromptRow], limit: int) -> list[tuple[str, Prompt]]:
        """Up to `limit` (key, prompt) of the rows that are new and fit; over-long ones are never reconsidered."""
        fresh: list[tuple[str, PromptRow]] = []
        for candidate in rows:
            row = self.encoder.shortened(candidate)
            self.num_candidates += 1
            key = self.encoder.key(row)
            is_held_out = self.holds_out(key, row)
            if is_held_out or key in self.seen:
                self.num_duplicates += 1
                self.num_held_out += is_held_out
            else:
                self.seen.add(key)
                fresh.append((key, row))
        prompts = self.encoder.encode([row for _, row in fresh])
        kept = [(key, prompt) for (key, _), prompt in zip(fresh, prompts, strict=True) if self.encoder.fits(prompt)]
        self.num_too_long += len(fresh) - len(kept)
        return kept[:limit]


def build_prompts(
    config: RunConfig,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] | None = None,
    needed: Mapping[str, str] | None = None,
) -> PromptSet:
    """All prompts of a run, a pure function of (config.prompts, config.seed, tokenizer, tools).

    Chats are rendered with the schemas of `tools`, functions that the policy may call. A row of a dataset has the
    columns `needed`, and those of demonstrations.
    Held out are the `num_eval` prompts whose seeded hash of the normalised text is smallest: neither order nor seed of
    generation decides. Tasks supply exactly `num_train` + `num_eval` distinct prompts or raise ConfigError; a dataset
    supplies at most `num_train`.
    """
    settings = prompts_that_fit(config)
    collector = _Collector(Encoder(settings, tokenizer, tools), {**_demonstrated(config), **(needed or {})})
    tasks = task_table(settings.tasks)
    sets = {
        one.name: held_out_prompts(config.for_set(one.name), tokenizer, tools, one.num_prompts, needed)
        for one in config.eval.sets
    }
    collector.hold_out(chain.from_iterable(sets.values()))
    if settings.streaming:
        return _streamed(settings, collector, config.seed, sets)
    if tasks:
        train, held_out = _from_tasks(settings, tasks, collector, config.seed, splits=not sets)
    else:
        train, held_out = _from_dataset(settings, collector, config.seed, splits=not sets)
    collector.encoder.check([*train, *held_out])
    held_out = sets.get(config.eval.primary, held_out)
    per_task: dict[str, int] = {}
    for prompt in train:
        per_task[prompt.task] = per_task.get(prompt.task, 0) + 1
    report = PromptReport(
        num_train=len(train),
        num_eval=len(held_out),
        num_candidates=collector.num_candidates,
        num_duplicates=collector.num_duplicates,
        num_too_long=collector.num_too_long,
        overlap=_overlap(train, held_out, sets, collector.encoder),
        num_held_out=collector.num_held_out,
        max_tokens=settings.max_prompt_tokens or 0,
        longest=max(len(prompt.tokens) for prompt in chain(train, held_out, *sets.values())),
        tasks=per_task,
        sets={name: len(prompts) for name, prompts in sets.items()},
        left_out="" if tasks else _left_out(settings, collector),
    )
    assert report.overlap == 0, f"{report.overlap} held-out prompts are among the training prompts"
    return PromptSet(PromptStream(train, config.seed), held_out, report, tasks, sets)


def _left_out(config: PromptsConfig, collector: _Collector) -> str:
    """Return which rows of a data set are not trained on, though they fit and are not held out; "" for none."""
    told = []
    if (repeated := collector.num_duplicates - collector.num_held_out - collector.num_repeated) > 0:
        hint = "" if config.identity == "row" else ' (prompts.identity = "row" keeps those with other columns)'
        told.append(f"{repeated} rows repeat another{hint}")
    if collector.num_unused:
        told.append(f"{collector.num_unused} are beyond prompts.num_train")
    if collector.has_more:
        told.append("reading ended at prompts.num_train")
    return ", ".join(told)


def held_out_prompts(
    config: RunConfig,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] | None,
    num_prompts: int | None,
    needed: Mapping[str, str] | None = None,
) -> list[Prompt]:
    """Return the first `num_prompts` prompts of `prompts.eval_dataset`, None: all. No training prompt is read."""
    settings = prompts_that_fit(config)
    assert settings.eval_dataset is not None
    collector, template = _Collector(Encoder(settings, tokenizer, tools), needed), Template.of(settings)
    found = [prompt for _, prompt in _read(settings.eval_dataset, settings, template, collector, num_prompts)]
    wanted = settings.model_copy(update={"num_eval": num_prompts or 1})
    _check_num_eval(wanted, settings.eval_dataset, len(found), collector, asked="num_prompts")
    collector.encoder.check(found)
    return found


HELD_OUT_SHARE = 1 / 16


def _streamed(settings: PromptsConfig, collector: _Collector, seed: int, sets: dict[str, list[Prompt]]) -> PromptSet:
    """Return the prompts of a data set that is read as the run goes on.

    Held out are all whose seeded hash is in the lowest sixteenth, whatever else there is; the first `num_eval` of these
    are evaluated. With `eval_dataset` they are its first ones, with `sets` those, and nothing else is left out.
    """
    template, encoder, source = Template.of(settings), collector.encoder, settings.dataset
    assert source is not None
    limit = HELD_OUT_SHARE * 2**64 if settings.eval_dataset is None and not sets else 0

    def is_held_out(key: str) -> bool:
        return int.from_bytes(split_hash(key, seed), "little") < limit

    if sets:
        held_out = list(next(iter(sets.values())))
    else:
        held_out, data = list[Prompt](), settings.eval_dataset or source
        for rows in _batched(read_rows(data, settings, template=template, needed=collector.needed), _BATCH):
            found = collector.take(rows, len(rows))
            held_out += [prompt for key, prompt in found if settings.eval_dataset is not None or is_held_out(key)]
            if len(held_out) >= settings.num_eval:
                break
        _check_num_eval(settings, data, len(held_out), collector)
        held_out = held_out[: settings.num_eval]
        encoder.check(held_out)
    collector.held_out |= {prompt.prompt_id for prompt in held_out}

    def batches() -> Iterator[list[Prompt]]:
        for rows in _batched(read_rows(source, settings, template=template, needed=collector.needed), _STREAMED):
            shorter = [encoder.shortened(row) for row in rows]
            keys = [encoder.key(row) for row in shorter]
            keyed = zip(keys, shorter, strict=True)
            given = [row for key, row in keyed if not (is_held_out(key) or collector.holds_out(key, row))]
            fitting = [prompt for prompt in encoder.encode(given) if encoder.fits(prompt)]
            encoder.check(fitting)
            yield fitting

    train, most = StreamedPrompts(batches, seed, settings.shuffle_buffer), settings.max_prompt_tokens or 0
    counts = (collector.num_candidates, collector.num_duplicates, collector.num_too_long)
    overlap = _overlap(train.prompts, held_out, sets, encoder)
    numbers = {name: len(prompts) for name, prompts in sets.items()}
    report = PromptReport(len(train), len(held_out), *counts, overlap, most, most, sets=numbers)
    return PromptSet(train, held_out, report, {}, sets)


def prompts_that_fit(config: RunConfig) -> PromptsConfig:
    """[prompts] with a number in `max_prompt_tokens`: what the model has room for, where none was asked for."""
    if config.prompts.max_prompt_tokens is not None:
        return config.prompts
    from slipstream.models.build import max_positions  # torch

    return config.prompts.model_copy(update={"max_prompt_tokens": config.longest_prompt(max_positions(config))})


def count_overlap(
    train: Iterable[Prompt], held_out: Iterable[Prompt], encoder: Encoder | None = None, *, by_row: bool = False
) -> int:
    """Held-out prompts whose normalised text is also a training prompt's; computed from the prompts alone.

    With the training data's `encoder` also those whose row has such a text in its template's words. `by_row`: those of
    the same row, whatever other rows have that text.
    """
    if by_row:
        rows = {prompt.prompt_id for prompt in train}
        return sum(prompt.prompt_id in rows for prompt in held_out)
    seen = {one for prompt in train for one in _ids(prompt)}
    return sum(not seen.isdisjoint(_ids(prompt, encoder)) for prompt in held_out)


def _overlap(
    train: Iterable[Prompt], held_out: list[Prompt], sets: Mapping[str, list[Prompt]], encoder: Encoder
) -> int:
    if not sets:
        return count_overlap(train, held_out, by_row=encoder.tells_rows)
    return count_overlap(train, chain.from_iterable(sets.values()), encoder)


def _ids(prompt: Prompt, encoder: Encoder | None = None) -> set[str]:
    """Return the id of a prompt, and that of what another template, that of `encoder`, makes of its row.

    That makes something of a text, or of a chat of one message, whose row has the template's columns.
    """
    said = without_system(prompt.messages)
    is_text = said is None or (len(said) == 1 and id_of(row_key(prompt.text, said)) == prompt.prompt_id)
    ids = {id_of(row_key(prompt.text, None)) if said is None else prompt.prompt_id}
    if encoder is not None and is_text and (text := encoder.text_of(prompt.columns)) is not None:
        ids.add(id_of(row_key(text, None)))
    return ids


def _demonstrated(config: RunConfig) -> dict[str, str]:
    """Return the columns that the warm start's demonstrations name, each with the template that does."""
    kinds = config.warm_start.demonstrations if config.warm_start.steps else ()
    templates = [_of_demonstration(kind.template, i, config.prompts.prompt_column) for i, kind in enumerate(kinds)]
    return {name: one.field for one in templates for name in one.columns - {"question", PROMPT}}


def _of_demonstration(text: str, index: int, prompt_column: str) -> Template:
    return Template(text, field=f"warm_start.demonstrations[{index}].template", prompt_column=prompt_column)


def demonstrations(
    config: WarmStartConfig,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    *,
    seed: int,
    prompt_column: str = PROMPT,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(prompt tokens, completion tokens), int32 [Tp] and [T], of the first `num_demonstrations` of `prompts`.

    The kind of each is drawn by weight from a hash of (seed, prompt), so it does not depend on the others; every
    completion ends with the tokenizer's EOS.
    """
    if tokenizer.eos_token_id is None:
        what = "demonstrations end with an EOS token"
        hint = "set it in tokenizer_config.json, or warm_start.steps = 0"
        raise ConfigError(what, got="a tokenizer without one", allowed="a tokenizer with eos_token", hint=hint)
    chosen = prompts[: config.num_demonstrations]
    texts, places = _demonstrated_texts(config, chosen, seed, prompt_column)
    check_alphabet(tokenizer, zip(places, texts, strict=True))
    return list(zip((prompt.tokens for prompt in chosen), ended(texts, chosen, tokenizer), strict=True))


def check_demonstrations(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError for training prompts whose rows lack what the warm start's demonstrations take."""
    chosen = prompts[: config.warm_start.num_demonstrations]
    _demonstrated_texts(config.warm_start, chosen, config.seed, config.prompts.prompt_column)


def _demonstrated_texts(
    config: WarmStartConfig, prompts: Sequence[Prompt], seed: int, prompt_column: str
) -> tuple[list[str], list[str]]:
    """Return the completions of `demonstrations`, and what made each. ConfigError where a row lacks what it takes."""
    templates = [_of_demonstration(kind.template, i, prompt_column) for i, kind in enumerate(config.demonstrations)]
    if not templates:
        raise ConfigError("a warm start needs at least one kind of demonstration", hint="see warm_start.demonstrations")
    bounds = list(accumulate(kind.weight for kind in config.demonstrations))
    texts, places = [], []
    for prompt in prompts:
        digest = hashlib.blake2b(f"demonstration:{seed}:{prompt.prompt_id}".encode(), digest_size=7).digest()
        position = int.from_bytes(digest, "little") / 2**56 * bounds[-1]
        kind = min(bisect_right(bounds, position), len(bounds) - 1)
        where = f"the prompt {shortened(repr(prompt.text), 60)}"
        texts.append(templates[kind].render({"answer": prompt.answer, **prompt.columns}, where=where))
        places.append(f"{templates[kind].field} for {where}")
    return texts, places


def _from_tasks(
    config: PromptsConfig, tasks: Mapping[str, TaskConfig], collector: _Collector, seed: int, *, splits: bool
) -> tuple[list[Prompt], list[Prompt]]:
    """Return training and held-out prompts; without `splits` no held-out ones: they are of other data."""
    template = Template.of(config)
    weights = [task.weight for task in tasks.values()]
    num_train = _shares(config.num_train, weights)
    num_eval = _shares(config.num_eval if splits else 0, weights)
    train: list[Prompt] = []
    held_out: list[Prompt] = []
    for (key, task), of_train, of_eval in zip(tasks.items(), num_train, num_eval, strict=True):
        source = TaskSource(key, task, template=template, seed=seed)
        prompts = _collect(source, of_train + of_eval, collector)
        if len(prompts) < of_train + of_eval:
            raise ConfigError(
                f"task '{key}' cannot supply enough distinct prompts",
                got=f"{of_train} training + {of_eval} held-out prompts asked for",
                allowed=f"about {len(prompts)} with params = {task.params}"
                + (f" ({collector.num_too_long} were over max_prompt_tokens)" if collector.num_too_long else ""),
                hint="lower prompts.num_train or num_eval, or widen the task's parameters",
            )
        task_train, task_eval = _split_by_hash(prompts, of_eval, seed)
        train += task_train
        held_out += task_eval
    return train, held_out


def _collect(source: TaskSource, wanted: int, collector: _Collector) -> list[tuple[str, Prompt]]:
    """Ends when `wanted` prompts are there, or the last 2048 candidates gave under 1 % new ones."""
    prompts: list[tuple[str, Prompt]] = []
    recent_candidates = recent_new = 0
    while len(prompts) < wanted:
        rows = source.chunk(max(64, wanted - len(prompts)))
        fresh = collector.take(rows, wanted - len(prompts))
        prompts += fresh
        recent_candidates += max(1, len(rows))
        recent_new += len(fresh)
        if recent_candidates >= _DRY_CANDIDATES:
            if recent_new < recent_candidates / 100:
                break
            recent_candidates = recent_new = 0
    return prompts


def _split_by_hash(prompts: list[tuple[str, Prompt]], num_eval: int, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held out): held out are the `num_eval` smallest by `split_hash`; both keep their order."""
    order = sorted(range(len(prompts)), key=lambda i: (split_hash(prompts[i][0], seed), prompts[i][0]))
    held_out = set(order[:num_eval])
    return (
        [prompt for i, (_, prompt) in enumerate(prompts) if i not in held_out],
        [prompt for i, (_, prompt) in enumerate(prompts) if i in held_out],
    )


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """`total` split in proportion to `weights` by largest remainder; sums to `total`."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def _from_dataset(
    config: PromptsConfig, collector: _Collector, seed: int, *, splits: bool
) -> tuple[list[Prompt], list[Prompt]]:
    """Return training and held-out prompts; without `splits` no held-out ones: they are of other data."""
    template = Template.of(config)
    assert config.dataset is not None
    held_out: list[Prompt] = []
    if config.eval_dataset is not None or not splits:  # held out first: what training data shares with it leaves that
        if config.eval_dataset is not None:
            held_out = [p for _, p in _read(config.eval_dataset, config, template, collector, config.num_eval)]
            _check_num_eval(config, config.eval_dataset, len(held_out), collector)
            collector.held_out = {id_of(key) for key in collector.seen}
            collector.num_repeated, collector.has_more = collector.num_duplicates, False
        train = [p for _, p in _read(config.dataset, config, template, collector, config.num_train)]
        if not train:
            raise ConfigError(
                "there are no training prompts",
                got=f"{collector} of both datasets",
                allowed="prompts in prompts.dataset that fit and are not in prompts.eval_dataset or eval.sets",
                hint="name other data there, or leave it out: prompts.num_eval are then split off prompts.dataset"
                if collector.num_held_out
                else "see prompts.max_prompt_tokens",
            )
        return train, held_out
    prompts = _read(config.dataset, config, template, collector, None)
    _check_num_eval(config, config.dataset, len(prompts) - 1, collector)
    train, held_out = _split_by_hash(prompts, config.num_eval, seed)
    collector.num_unused = max(0, len(train) - config.num_train)
    return train[: config.num_train], held_out


def _read(
    source: str, config: PromptsConfig, template: Template, collector: _Collector, limit: int | None
) -> list[tuple[str, Prompt]]:
    """Return the prompts of a data set, at most `limit` of them."""
    prompts: list[tuple[str, Prompt]] = []
    batches = _batched(read_rows(source, config, template=template, needed=collector.needed), _BATCH)
    for rows in batches:
        prompts += collector.take(rows, len(rows))
        if limit is not None and len(prompts) >= limit:
            collector.has_more = len(prompts) > limit or next(batches, None) is not None
            break
    return prompts[:limit]


def _check_num_eval(
    config: PromptsConfig, source: str, available: int, collector: _Collector, *, asked: str = "num_eval"
) -> None:
    if not collector.num_candidates:
        got, allowed = "nothing to read in it", "one prompt a row, at least"
        if config.between_periods:
            got, allowed = "no prompt with two periods", f"{allowed}, with two periods (prompts.between_periods)"
        raise ConfigError(f"dataset '{source}' has no rows", got=got, allowed=allowed)
    if collector.num_too_long and collector.num_too_long + collector.num_duplicates == collector.num_candidates:
        what = f"all prompts of dataset '{source}' are over prompts.max_prompt_tokens"
        hint = "raise prompts.max_prompt_tokens, or see prompts.too_long"
        raise ConfigError(what, got=str(collector), allowed=f"at most {config.max_prompt_tokens} tokens", hint=hint)
    if available < config.num_eval:
        raise ConfigError(
            f"dataset '{source}' cannot supply enough distinct held-out prompts",
            got=f"{asked} = {config.num_eval}, of {collector}",
            allowed=f"at most {max(0, available)}",
            hint=_hint_for_held_out(config, available, collector) if asked == "num_eval" else None,
        )


def _hint_for_held_out(config: PromptsConfig, available: int, collector: _Collector) -> str:
    others = ", or give prompts.eval_dataset" * (config.eval_dataset is None)
    if config.identity == "text" and available + collector.num_duplicates >= config.num_eval:
        others += ', or tell rows of one text apart by their other columns: prompts.identity = "row"'
    return f"lower prompts.num_eval and eval.num_prompts{others}"


def _batched(rows: Iterator[PromptRow], size: int) -> Iterator[list[PromptRow]]:
    while batch := list(islice(rows, size)):
        yield batch
