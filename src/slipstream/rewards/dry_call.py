"""A dry call: rewards score made-up completions of a run's own prompts before anything is loaded or sampled.

What fails here would fail on every completion, hours later on a large model. Calls are made where those of the run are,
with the same keywords, kinds of prompts and deadline.
"""

from __future__ import annotations

import math
import select
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from slipstream.core.clock import WallClock
from slipstream.core.errors import ConfigError
from slipstream.core.plain import shortened
from slipstream.core.sections import RewardsConfig, TaskConfig
from slipstream.core.types import Completion, Prompt, Segment
from slipstream.core.user_code import FROM_PYTHON
from slipstream.rewards.assembly import Assembly, ScoreEntry
from slipstream.rewards.given import Functions
from slipstream.rewards.judge import check_templates
from slipstream.rewards.protocol import Per
from slipstream.rewards.scorers import Scorers
from slipstream.rewards.user_functions import GIVEN, Definition, definition

_READING_ROWS = frozenset({"code", "overlap"})
"""Built-ins that read columns which the data may lack. The others have nothing to fail by that a check has not seen."""
PER: tuple[Per, ...] = ("completion", "group")
_NUM_TOKENS = 16
_PROMPT_CHARS = 60
_WAKE_EVERY_S = 1.0
_JUDGE_ATTEMPTS = 3


def dry_call(
    config: RewardsConfig,
    tasks: Mapping[str, TaskConfig],
    prompts: Sequence[Prompt],
    *,
    functions: Functions | None = None,
    group_size: int = 1,
    private: Sequence[str] = (),
) -> str | None:
    """Call the user's functions, and built-ins that read columns, on the first and the last of `prompts`.

    ConfigError for one that fails, is too slow, or returns anything but a finite number or None for each completion;
    and for one that asks for the answer where no prompt has any. Functions may abstain: where all do on all prompts,
    the sentence returned says so; of built-ins, which abstain for want of their column, that is an error. Nothing is
    called with `dry_call = false`. Judges are asked about the first prompt; that their templates name no column that
    is missing everywhere is looked at in any case.
    """
    check_templates(config, prompts)
    if config.dry_call and config.judges and prompts:
        _ask_judges(config, prompts[0])
    terms = [term for term in config.terms if ":" in term.function or term.function in _READING_ROWS]
    if not config.dry_call or not terms or not prompts:
        return None
    given = {FROM_PYTHON + name: function for name, function in (functions or {}).items()}
    one_by_one = {"num_workers": 1, "num_threads": 1, "max_awaited": 1}
    alone = config.model_copy(update={"terms": terms, "judges": [], **one_by_one})
    found = [definition(term.function, given) for term in terms]
    _check_answers(alone, found, prompts)
    scorers = Scorers(alone, tasks, functions or {}, private=private, num_spares=0)
    places = {name: one.place for name, one in zip(scorers.names, found, strict=True) if one is not None}
    try:
        two = [prompts[0], prompts[-1]]
        entries = [entry for per in PER for entry in _scored(scorers, two, per, group_size, places)]
    finally:
        scorers.close()
    has_all_terms = len(terms) == len(config.weighted)
    if not has_all_terms or any(part is not None for entry in entries for part in entry.parts):
        return None
    if all(term.function in _READING_ROWS for term in terms):
        raise ConfigError(
            f"reward {', '.join(map(repr, scorers.names))} abstains: the column that it reads is not in the data",
            got=f"prompts with the columns {_columns(prompts[0])}",
            allowed="'tests' for code; answer, or params.column, for overlap",
            hint="a completion for which every reward abstains counts as failed",
        )
    named = ", ".join(f"{name} ({places[name]})" if name in places else name for name in scorers.names)
    return (
        f"in a dry call of the rewards {named} returned None for every completion, of {len(entries)}: None means that "
        "a reward does not apply, and a completion for which every reward abstains counts as failed"
    )


def _ask_judges(config: RewardsConfig, prompt: Prompt) -> None:
    """Ask each judge about one made-up completion, with few attempts; ConfigError for one that gives no score."""
    judges = [judge.model_copy(update={"on_failure": "fail"}) for judge in config.judges]
    scorers = Scorers(config.model_copy(update={"terms": [], "judges": judges}), {}, {}, max_attempts=_JUDGE_ATTEMPTS)
    try:
        entries = list(_answered(scorers, Assembly(scorers.where), [_made_up(prompt, 0, 0)]))
    finally:
        scorers.close()
    for failure in (entry.failure for entry in entries if entry.failure is not None):
        raise ConfigError(
            "a judge gives no score in a dry call, before the run",
            got=failure,
            allowed="an endpoint that answers, with a score in every reply",
            hint="check base_url, model, the key in api_key_env, prompt and pattern; rewards.dry_call = false asks "
            "nothing before the run",
        )


def _check_answers(config: RewardsConfig, definitions: Sequence[Definition | None], prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError for a function with the parameter `answer`, and no default of it, where no prompt has one."""
    if any(prompt.answer is not None for prompt in prompts):
        return
    for term, found in zip(config.terms, definitions, strict=True):
        if found is not None and "answer" in found.required:
            raise ConfigError(
                f"reward '{term.function}' takes answer ({found.place}), and no row has one",
                got=f"{len(prompts)} prompts with {_columns(prompts[0]) or 'no columns'}",
                allowed="rows with the column that prompts.answer_column names",
                hint="name that column, or give the parameter a default: answer=None",
            )


def _scored(
    scorers: Scorers, prompts: Sequence[Prompt], per: Per, group_size: int, places: Mapping[str, str]
) -> list[ScoreEntry]:
    """Score completions of each of `prompts` in one call by the terms of this kind; ConfigError as `dry_call`.

    Consumes: answers. Unblocked by: a worker or a deadline. Ends when: all calls have answered, or one has failed.
    """
    size = group_size if per == "group" else 1
    names = [name for name, where in zip(scorers.names, scorers.where, strict=True) if where[1] == per]
    assembly = Assembly([where for where in scorers.where if where[1] == per], size)
    made_up = [
        _made_up(prompt, i, sample) for i, prompt in enumerate(prompts if names else ()) for sample in range(size)
    ]
    entries: list[ScoreEntry] = []
    for entry in _answered(scorers, assembly, made_up):
        _check(entry, names, places)
        entries.append(entry)
    return entries


def _answered(scorers: Scorers, assembly: Assembly, completions: Sequence[Completion]) -> Iterator[ScoreEntry]:
    """Yield the completions as their last call answers."""
    for completion in completions:
        for call in assembly.add(completion):
            scorers.submit(call)
    clock = WallClock()
    while assembly.num_called:
        deadline_s = scorers.next_deadline_s()
        wait_s = _WAKE_EVERY_S if deadline_s is None else min(_WAKE_EVERY_S, max(0.0, deadline_s - clock.now_s()))
        select.select(scorers.fds(), [], [], wait_s)
        for scored in scorers.poll():
            yield from assembly.answer(scored.job_id, scored.parts, scored.failure)


def _made_up(prompt: Prompt, ordinal: int, sample: int) -> Completion:
    """A completion as a policy might write it: the reference for the first prompt, something else for all others."""
    is_reference = prompt.answer is not None and not ordinal and not sample
    text = str(prompt.answer) if is_reference else f"I think the answer is {40 + ordinal + sample}."
    tokens = np.resize(prompt.tokens, _NUM_TOKENS).astype(np.int32)
    return Completion(
        ordinal=ordinal,
        sample=sample,
        prompt=prompt,
        segments=(Segment(tokens=tokens),),
        text=text,
        finish_reason="stop",
    )


def _check(entry: ScoreEntry, names: Sequence[str], places: Mapping[str, str]) -> None:
    """Raise ConfigError for a call that failed, and for a part that is no finite number."""
    wrong = next((i for i, part in enumerate(entry.parts) if part is not None and not math.isfinite(part)), None)
    if entry.failure is None and wrong is None:
        return
    failure = entry.failure
    if failure is None:
        name = names[wrong or 0]
        place = f" ({places[name]})" if name in places else ""
        failure = f"{name}: it returned {entry.parts[wrong or 0]} as a reward{place}"
    prompt = entry.completion.prompt
    advice = (
        "raise rewards.timeout_s, or load what the function needs when its file is imported"
        if "timed out after" in failure
        else "models write anything, and a reward must survive it"
    )
    raise ConfigError(
        "a reward fails in a dry call, before the run",
        got=f"{failure}; the prompt was {shortened(repr(prompt.text), _PROMPT_CHARS)}",
        allowed="for any text, a list with one finite number or None for each completion",
        hint=f"{advice}; keywords are {', '.join(GIVEN)} and the columns {_columns(prompt)}; "
        "rewards.dry_call = false for functions that are not to be called in vain",
    )


def _columns(prompt: Prompt) -> str:
    lacking = {"answer"} if prompt.answer is None else set()
    return ", ".join(sorted({"answer", *prompt.columns} - lacking - set(GIVEN)))
