"""Reward functions: a plain table of built-ins, and the user's own by import path.

A factory takes its parameters as keywords and returns a scorer, RewardJob -> float, or None to abstain. Everything here
runs inside a worker, except `combined_reward` and the checks of names.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import regex  # like `re`, with a deadline

from slipstream.core.errors import ConfigError, did_you_mean
from slipstream.core.plain import shortened, shown
from slipstream.core.task_library import create_dataset
from slipstream.core.user_code import FROM_PYTHON, text_of
from slipstream.rewards.calls import Scoring, call_function, import_function
from slipstream.rewards.code import Programs, Scorer, code_reward
from slipstream.rewards.protocol import Per, RewardJob, Task, Term
from slipstream.rewards.user_functions import check_function

if TYPE_CHECKING:  # half of the time in which a worker starts
    from slipstream.core.sections import RewardModelTerm, RewardTerm
    from slipstream.core.types import EpisodeRecord

# Verifiers that run the answer's text through Python's or sympy's evaluator (reasoning-gym 0.1, math-verify 0.9), or
# start it as a program.
UNSAFE_VERIFIERS: dict[str, str] = {
    "binary_matrix": "eval",
    "countdown": "sympy.parse_expr",
    "intermediate_integration": "sympy.parse_expr",
    "n_queens": "eval",
    "polynomial_multiplication": "sympy.parse_expr",
    "puzzle24": "sympy.parse_expr",
    "simple_integration": "sympy.parse_expr",
    "spiral_matrix": "eval",
    "string_insertion": "eval",
    "math": "sympy.parse_expr",  # the built-in function, through math_verify
    "code": "Python",
}

_TUPLE_FIELDS = {"arc_agi": ("input", "output"), "rearc": ("input", "output")}  # compared as tuples; JSON has lists


MAX_PATTERN, MAX_REPETITIONS = 10_000, 1_000_000
"""Characters of a pattern, and copies of its parts: compiling takes time and memory for each, and has no deadline."""
_PATTERN_SHARE = 0.5  # of a job's deadline, for one pattern: it fails its completion before the worker is killed for it


@dataclass(frozen=True)
class Pattern:
    """A pattern of the configuration, which meets text of a model: TimeoutError when it searches for too long."""

    compiled: regex.Pattern[str]
    timeout_s: float

    def is_in(self, text: str, *, as_whole: bool) -> bool:
        find = self.compiled.fullmatch if as_whole else self.compiled.search
        return find(text, timeout=self.timeout_s) is not None

    def last(self, text: str) -> str | None:
        """Return the first group of the last match, or all of the match where the pattern has no group."""
        match = None
        for match in self.compiled.finditer(text, timeout=self.timeout_s):  # noqa: B007 - the last one counts
            pass
        return None if match is None else match.group(1 if self.compiled.groups else 0)


def _extracted(text: str, pattern: Pattern | None) -> str | None:
    """The stripped text, or what `pattern` finds in it last."""
    found = text if pattern is None else pattern.last(text)
    return None if found is None else found.strip()


def pattern_of(pattern: str | None, function: str, timeout_s: float) -> Pattern | None:
    if pattern is None:
        return None
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN or _repetitions(pattern) > MAX_REPETITIONS:
        what = f"the pattern of reward '{function}' is too large to be compiled"
        allowed = f"up to {MAX_PATTERN:,} characters, whose counts {{n}} multiply to {MAX_REPETITIONS:,} at most"
        raise ConfigError(what, got=shown(pattern), allowed=allowed)
    try:
        compiled = regex.compile(pattern, regex.DOTALL)
    except (regex.error, RecursionError, OverflowError) as error:
        cause = "nested too deep" if isinstance(error, RecursionError) else error
        raise ConfigError(f"the pattern of reward '{function}' is malformed: {cause}", got=repr(pattern)) from error
    return Pattern(compiled, _PATTERN_SHARE * timeout_s)


def _repetitions(pattern: str) -> int:
    """Bound how often a pattern's parts are copied, as if its counted groups were all inside each other.

    Compiled, `(?:ab){500}` is 500 copies.
    """
    counts = {True: [1], False: [1]}
    for after, *bounds in regex.findall(r"(.)\{([0-9]*),?([0-9]*)\}", pattern, regex.DOTALL):
        counts[after == ")"].append(max(int(bound[:9] or 0) for bound in bounds))
    return max(counts[False]) * math.prod(max(1, count) for count in counts[True])


def task_reward(
    *, tasks: Mapping[str, Task], answer_pattern: str | None = None, binary: bool = False, timeout_s: float
) -> Scorer:
    """The verifier of the prompt's own reasoning-gym task, in [0, 1].

    `answer_pattern` extracts the answer (last match, first group; no match scores 0); `binary` gives 1 for a fully
    correct answer and 0 for everything else, without the task's partial credit.
    """
    pattern = pattern_of(answer_pattern, "task", timeout_s)
    if not tasks:
        raise ConfigError("reward 'task' needs reasoning-gym tasks", got="prompts from a dataset")
    datasets = {key: create_dataset(task.name, seed=0, size=1, **task.params) for key, task in tasks.items()}

    def score(job: RewardJob) -> float:
        answer = _extracted(job.completion, pattern)
        if answer is None:
            return 0.0
        entry = dict(job.columns["entry"])
        if fields := _TUPLE_FIELDS.get(tasks[job.task].name):
            metadata = entry["metadata"]
            entry["metadata"] = {**metadata, **{name: tuple(map(tuple, metadata[name])) for name in fields}}
        reward = float(datasets[job.task].score_answer(answer, entry))
        return float(reward >= 1 - 1e-6) if binary else reward

    return score


def exact_match(
    *,
    answer_pattern: str | None = None,
    reference_pattern: str | None = None,
    ignore: str = "",
    ignore_case: bool = False,
    timeout_s: float,
) -> Scorer:
    """1 when the extracted answer equals the extracted reference, surrounding whitespace apart; None without one.

    `ignore` lists characters that count in neither: "," for numbers like 1,000.
    """
    pattern = pattern_of(answer_pattern, "exact_match", timeout_s)
    of_reference = pattern_of(reference_pattern, "exact_match", timeout_s)
    dropped = str.maketrans("", "", ignore)

    def score(job: RewardJob) -> float | None:
        if job.answer is None:
            return None
        answer, expected = _extracted(job.completion, pattern), _extracted(job.answer, of_reference)
        if expected is None:
            return None
        if answer is not None:
            answer, expected = answer.translate(dropped).strip(), expected.translate(dropped).strip()
            if ignore_case:
                answer, expected = answer.casefold(), expected.casefold()
        return float(answer == expected)

    return score


def math_equivalence(*, strict: bool = True, reference_pattern: str | None = None, timeout_s: float) -> Scorer:
    """1 when math_verify finds the final answer equivalent to the reference, which may be LaTeX or a plain number.

    `reference_pattern` finds it in a longer text, as in `exact_match`; None for one without. ValueError for a reference
    in which math_verify finds nothing.
    """
    import logging

    from math_verify import parse, verify

    for library in ("math_verify", "latex2sympy2_extended"):  # they log every text that they cannot parse
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)
    of_reference = pattern_of(reference_pattern, "math", timeout_s)

    def score(job: RewardJob) -> float | None:
        if job.answer is None:
            return None
        text = _extracted(job.answer, of_reference)
        if text is None:
            return None
        is_marked = "\\boxed" in text or regex.search(r"(?<!\\)\$", text)  # not by a dollar of a price
        expected = parse(text if is_marked else f"${text}$", parsing_timeout=None)  # the worker's deadline is the clock
        if not expected:
            raise ValueError(f"math_verify cannot read the reference {shortened(text, 100)!r}")
        answer = parse(job.completion, parsing_timeout=None)
        return float(verify(expected, answer, strict=strict, timeout_seconds=None))

    return score


def regex_match(*, pattern: str, full: bool = False, timeout_s: float) -> Scorer:
    """1 when `pattern` is found in the completion (`full`: matches all of it). Dot matches newlines."""
    wanted = pattern_of(pattern, "regex", timeout_s)
    assert wanted is not None
    return lambda job: float(wanted.is_in(job.completion, as_whole=full))


def word_overlap(*, column: str = "answer", characters: bool = False) -> Scorer:
    """F1 of the completion's words and those of the row's `column`, each counted as often as it occurs (ROUGE-1).

        2 |C n K| / (|C| + |K|),   1 where both have the same words in whatever order

    `characters` compares characters other than spaces instead. None where the row has no such column.
    """

    def parts(text: str) -> Counter[str]:
        return Counter("".join(text.split()) if characters else text.split())

    def score(job: RewardJob) -> float | None:
        reference = job.answer if column == "answer" else job.columns.get(column)
        if reference is None:
            return None
        ours, theirs = parts(job.completion), parts(str(reference))
        total = ours.total() + theirs.total()
        return 2.0 * (ours & theirs).total() / total if total else 1.0

    return score


def length_shaping(
    *, target_tokens: int | None = None, max_tokens: int | None = None, buffer_tokens: int = 0
) -> Scorer:
    """Length in tokens, shaped.

    With target_tokens: -min(1, |T - target| / target). With max_tokens, the soft overlong punishment of DAPO
    (arXiv:2503.14476, equation 13): 0 up to max - buffer, falling linearly to -1 at max, -1 beyond.
    """
    if (target_tokens is None) == (max_tokens is None):
        what = "reward 'length' needs exactly one of its parameters"
        got = f"target_tokens = {target_tokens}, max_tokens = {max_tokens}"
        raise ConfigError(what, got=got, allowed="target_tokens, or max_tokens with buffer_tokens")
    if target_tokens is not None:
        if target_tokens <= 0:
            raise ConfigError("target_tokens must be positive", got=target_tokens)
        return lambda job: -min(1.0, abs(len(job.completion_ids) - target_tokens) / target_tokens)
    assert max_tokens is not None
    if not 0 <= buffer_tokens <= max_tokens:
        raise ConfigError("buffer_tokens must lie in 0..max_tokens", got=f"{buffer_tokens} of {max_tokens}")

    def score(job: RewardJob) -> float:
        over = len(job.completion_ids) - (max_tokens - buffer_tokens)
        if over <= 0:
            return 0.0
        return -1.0 if over >= buffer_tokens else -over / buffer_tokens

    return score


BUILTINS: dict[str, Callable[..., Scorer]] = {
    "task": task_reward,
    "exact_match": exact_match,
    "overlap": word_overlap,
    "math": math_equivalence,
    "regex": regex_match,
    "length": length_shaping,
    "code": code_reward,
}

_PROVIDED = {"tasks", "programs", "timeout_s"}  # parameters that the worker fills in, not the configuration


def check_term(term: Term) -> None:
    """ConfigError unless `term` names a built-in with parameters it takes, or has the form of an import path."""
    if ":" in term.function:
        if term.params:
            what = "parameters are for built-in rewards"
            raise ConfigError(what, got=f"{term.function} with {term.params}", hint="bind them in code")
        location = term.function.rpartition(":")[0]
        if location.endswith(".py") and not Path(location).expanduser().is_file():
            what = f"reward function '{term.function}': there is no such file"
            raise ConfigError(what, got=location, allowed="'module:function' or 'path/to/file.py:function'")
        check_function(term.function)
        return
    if term.per == "group" and term.function in BUILTINS:
        what = f"reward '{term.function}' scores each completion by itself"
        raise ConfigError(what, got="per = 'group'", allowed="per = 'completion'; 'group' is for functions of your own")
    if term.function not in BUILTINS:
        raise ConfigError(
            f"unknown reward function '{term.function}'",
            allowed=", ".join(BUILTINS) + ", 'module:function' or 'file.py:function'",
            hint=did_you_mean(term.function, BUILTINS),
        )
    parameters = inspect.signature(BUILTINS[term.function]).parameters
    allowed = parameters.keys() - _PROVIDED
    for name in term.params:
        if name not in allowed:
            raise ConfigError.unknown(f"reward '{term.function}' has no parameter '{name}'", name, sorted(allowed))
    required = {name for name in allowed if parameters[name].default is inspect.Parameter.empty}
    if missing := required - term.params.keys():
        what = f"reward '{term.function}' needs the parameter '{missing.pop()}'"
        raise ConfigError(what, allowed=", ".join(sorted(allowed)), hint="see params of rewards.terms")
    if term.function not in ("task", "math"):  # those import; the others check the values of their parameters
        try:
            BUILTINS[term.function](**term.params, **_provided(term, {}, None, 1.0))
        except TypeError as error:
            raise ConfigError(
                f"reward '{term.function}' does not take these parameters", got=f"{term.params}: {error}"
            ) from error


def _provided(term: Term, tasks: Mapping[str, Task], programs: Programs | None, timeout_s: float) -> dict[str, Any]:
    provided = {"tasks": tasks, "programs": programs, "timeout_s": timeout_s}
    parameters = inspect.signature(BUILTINS[term.function]).parameters
    return {name: value for name, value in provided.items() if name in parameters}


def build_scorer(
    term: Term, tasks: Mapping[str, Task], *, programs: Programs | None = None, timeout_s: float = 1.0
) -> Scorer:
    """The scorer of `term`, a built-in; imports only what it needs. ConfigError on wrong names or parameters.

    `programs` starts what 'code' runs, within the deadline `timeout_s` of a job.
    """
    check_term(term)
    return BUILTINS[term.function](**term.params, **_provided(term, tasks, programs, timeout_s))


def build_scoring(
    term: Term, tasks: Mapping[str, Task], *, programs: Programs | None = None, timeout_s: float = 1.0
) -> Scoring:
    """`term` as workers call it; imports only what it needs. ConfigError as `build_scorer`, or for no such function."""
    if ":" in term.function:
        scores = partial(call_function, import_function(term))
    else:
        scores = partial(_each, build_scorer(term, tasks, programs=programs, timeout_s=timeout_s))
    return Scoring(term.label, term.per, scores)


def _each(scorer: Scorer, jobs: Sequence[RewardJob]) -> list[float | None]:
    return [scorer(job) for job in jobs]


def make_term(function: str, params: Mapping[str, Any], per: Per = "completion") -> Term:
    """Return a checked term, with the text of its file where it names one. ConfigError on anything malformed.

    A function that was given from Python is not checked: the process that runs it has it.
    """
    term = Term(function, dict(params), per=per)
    if function.startswith(FROM_PYTHON):
        return term
    check_term(term)
    location = function.rpartition(":")[0]
    if not location.endswith(".py"):
        return term
    path = Path(location).expanduser().resolve()
    source = text_of(path)
    return msgspec.structs.replace(term, function=f"{path}:{function.rpartition(':')[2]}", source=source)


def combined_reward(
    terms: Sequence[RewardTerm | RewardModelTerm], parts: Sequence[float | None], *, violation_cap: float
) -> float:
    """The weighted sum of the terms that are no constraints, at most `violation_cap` where a constraint is violated.

    CGPO (arXiv:2409.20370). A constraint that abstains (None) is not violated. ValueError as in `weighted_sum`.
    """
    summed = [(term.weight, part) for term, part in zip(terms, parts, strict=True) if term.at_least is None]
    reward = weighted_sum([weight for weight, _ in summed], [part for _, part in summed])
    is_violated = any(
        term.at_least is not None and part is not None and not part >= term.at_least
        for term, part in zip(terms, parts, strict=True)
    )
    return min(reward, violation_cap) if is_violated else reward


class NoParts(ValueError):
    """There is nothing to sum."""


def why_no_reward(error: ValueError, episode: EpisodeRecord | None) -> str:
    """Return the failure of a completion whose reward has no sum; an episode's end says why nobody gave one."""
    if episode is None or not isinstance(error, NoParts):
        return str(error)
    end = "a limit cut the episode before it had a reward" if episode.is_cut else "the episode ended without a reward"
    return f"{error}: {end}"


def weighted_sum(weights: Sequence[float], parts: Sequence[float | None]) -> float:
    """sum_i weight_i part_i over the parts that are not None; ValueError when nothing finite comes out."""
    if len(parts) != len(weights):
        raise ValueError(f"{len(parts)} parts for {len(weights)} reward functions")
    scored = [(weight, part) for weight, part in zip(weights, parts, strict=True) if part is not None]
    if not scored:
        raise NoParts("every reward function abstained")
    try:
        total = math.fsum(weight * part for weight, part in scored)
    except (OverflowError, ValueError):  # beyond floats; inf - inf
        total = math.nan
    if not math.isfinite(total):
        raise ValueError(f"the reward is not finite: {[part for _, part in scored]}")
    return total
