"""Tasks: rows of any dataset of reasoning-gym, or of our own, deterministic in the seed.

Two properties of the library shape this file. Item i of seed s is item i-1 of seed s+1, so two seeds do not separate
training from held-out prompts: one long list is made, and split by text (`prompts/build.py`). And some datasets draw
from the global random state: it is seeded here, and given back as it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.core.errors import ConfigError, did_you_mean
from slipstream.core.sections import TaskConfig
from slipstream.core.task_library import create_dataset, reasoning_gym
from slipstream.prompts.rows import PromptRow, to_json_types
from slipstream.prompts.template import Template

_MAX_CHUNK = 4096  # some datasets build everything in their constructor, and some refuse sizes above 20 000


class Posts:
    """Summarisation in miniature, for the recipe `tldr_mini`: posts with marked points, and careless summaries.

        c*dh*sm    key: "ds"   answer: "dh"

    A post is a few letters, some of them marked; a perfect summary is the marked ones in order. The reference summary
    forgets some of them and mentions others (`forget`, `mention`: chances per letter), so that a policy that learned
    from references can become better than they are. Item i is a pure function of seed + i.
    """

    def __init__(
        self,
        *,
        seed: int,
        size: int,
        min_length: int = 6,
        max_length: int = 9,
        min_marked: int = 2,
        max_marked: int = 4,
        forget: float = 0.25,
        mention: float = 0.1,
    ) -> None:
        if not 1 <= min_marked <= max_marked <= min_length <= max_length <= len(string.ascii_lowercase):
            raise ValueError(
                f"1 <= min_marked {min_marked} <= max_marked {max_marked} <= min_length {min_length} "
                f"<= max_length {max_length} <= 26 does not hold"
            )
        self.seed, self.size = seed, size
        self.length, self.num_marked = (min_length, max_length), (min_marked, max_marked)
        self.forget, self.mention = forget, mention

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"post {self.seed + index}")
        letters = rng.sample(string.ascii_lowercase, rng.randint(*self.length))
        marked = set(rng.sample(letters, rng.randint(*self.num_marked)))
        key = [letter for letter in letters if letter in marked]
        told = [x for x in letters if rng.random() < (1 - self.forget if x in marked else self.mention)]
        return {
            "question": "".join(f"*{letter}" if letter in marked else letter for letter in letters),
            "answer": "".join(told or key[:1]),
            "metadata": {"key": "".join(key)},
        }


COMPOSITE = "composite"
"""A mixture of other tasks by reasoning-gym's own means, which is refused."""
OWN_TASKS: dict[str, Callable[..., Any]] = {"posts": Posts}
"""Beside reasoning-gym's, of the same form; rewards other than 'task' score them."""


def _datasets() -> Mapping[str, Any]:
    """Return reasoning-gym's register: a second of imports that runs without tasks do not need."""
    datasets: Mapping[str, Any] = reasoning_gym().factory.DATASETS
    return datasets


def task_names() -> list[str]:
    """Names of all reasoning-gym datasets but the one that is a mixture of others, and of our own."""
    return sorted({*_datasets(), *OWN_TASKS} - {COMPOSITE})


def check_task_names(tasks: Sequence[TaskConfig]) -> None:
    """Raise ConfigError for a task that there is not. Imports reasoning-gym only where its files leave that open."""
    if any(task.name == COMPOSITE for task in tasks):
        raise ConfigError(
            f"task '{COMPOSITE}' hides which tasks it has, and so which verifiers are unsafe",
            got=COMPOSITE,
            allowed="each of its tasks, as an entry of prompts.tasks",
            hint="the `weight` of an entry is its share of the prompts",
        )
    asked = {task.name for task in tasks} - OWN_TASKS.keys()
    if not asked or asked <= (known := _names_in_files()):
        return
    known |= OWN_TASKS.keys() if asked - _words_in_files() else set(task_names())
    unknown = next((task.name for task in tasks if task.name not in known), None)
    if unknown is not None:
        guess = did_you_mean(unknown, known)
        raise ConfigError(
            f"unknown task '{unknown}'" + (f"; {guess}" if guess else ""),
            got=unknown,
            allowed=f"one of {len(known)}",
            hint="`slipstream recipes --tasks` lists them",
        )


@cache
def _names_in_files() -> frozenset[str]:
    """Return the names under which reasoning-gym's files register datasets: importing them takes a second and more."""
    return frozenset(re.findall(r'^(?:DATASET_NAME = |@?register_dataset\()"(\w+)"', _library_text(), re.MULTILINE))


@cache
def _words_in_files() -> frozenset[str]:
    """Return all quoted words of its files: what is not among them is certainly no name of a dataset."""
    return frozenset(re.findall(r"""["'](\w+)["']""", _library_text()))


@cache
def _library_text() -> str:
    found = find_spec("reasoning_gym")
    if found is None or found.origin is None:
        return ""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path(found.origin).parent.rglob("*.py")))


def task_table(tasks: Sequence[TaskConfig]) -> dict[str, TaskConfig]:
    """Key of each task, as in `Prompt.task`: its name, or name#2, name#3 for further entries of the same name."""
    table: dict[str, TaskConfig] = {}
    for task in tasks:
        same = sum(other.name == task.name for other in table.values())
        table[task.name if not same else f"{task.name}#{same + 1}"] = task
    return table


class TaskSource:
    """An endless supply of candidate rows of one task; the i-th chunk depends on (task, seed, i) only."""

    def __init__(self, key: str, task: TaskConfig, *, template: Template, seed: int) -> None:
        self.key = key
        self._task = task
        self._template = template
        digest = hashlib.blake2b(f"{key}:{seed}".encode(), digest_size=4).digest()
        self._next_seed = int.from_bytes(digest, "little")

    def chunk(self, size: int) -> list[PromptRow]:
        """Up to min(size, 4096) further rows, with repetitions where the task repeats itself."""
        size = min(size, _MAX_CHUNK)
        with _seeded_globals(self._next_seed % 2**32):
            dataset = self._create(size)
            rows = [self._row(entry) for entry in _entries(dataset, size)]
        self._next_seed += size
        return rows

    def _create(self, size: int) -> Any:
        check_task_names([self._task])
        reserved = sorted({"seed", "size"} & self._task.params.keys())
        if reserved:
            what = f"task '{self._task.name}': {', '.join(reserved)} cannot be a parameter"
            hint = "use the run's seed, prompts.num_train and prompts.num_eval"
            raise ConfigError(what, got=self._task.params, hint=hint)
        create = OWN_TASKS.get(self._task.name) or partial(create_dataset, self._task.name)
        try:
            return create(seed=self._next_seed, size=size, **self._task.params)
        except (TypeError, ValueError, AssertionError) as error:
            known = _parameters(self._task.name)
            near = (did_you_mean(name, known) for name in self._task.params.keys() - known)
            raise ConfigError(
                f"task '{self._task.name}' does not accept its parameters: {error}",
                got=self._task.params,
                allowed=", ".join(known) or None,
                hint=next(filter(None, near), None),
            ) from error

    def _row(self, entry: dict[str, Any]) -> PromptRow:
        entry = to_json_types(entry, where=f"an entry of task '{self._task.name}'")
        columns = {**entry["metadata"], "question": entry["question"], "answer": entry["answer"], "entry": entry}
        return PromptRow(
            text=self._template.render(columns), task=self.key, answer=_answer_text(entry["answer"]), columns=columns
        )


def _parameters(task: str) -> dict[str, None]:
    """Names of what a reasoning-gym task can be told, in order; none of ours."""
    if task not in (known := _datasets()):
        return {}
    config = known[task][1]
    return {field.name: None for field in dataclasses.fields(config) if field.name not in ("seed", "size")}


def _answer_text(answer: Any) -> str | None:
    return answer if answer is None or isinstance(answer, str) else str(answer)


def _entries(dataset: Any, size: int) -> Iterator[dict[str, Any]]:
    for index in range(size):
        try:
            yield dataset[index]
        except IndexError:  # a dataset that ran out of distinct items ends early
            return


@contextmanager
def _seeded_globals(seed: int) -> Iterator[None]:
    """Seed the global random states of Python and numpy, and restore them."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
