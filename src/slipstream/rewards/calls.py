"""Calls of reward functions: the user's own with TRL's keywords, and the terms of a job one after the other.

Used on both sides of the sandbox: by workers, and for functions of the caller's in their process.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from contextvars import copy_context
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, SupportsFloat

from slipstream.core.plain import plural, shortened, shown
from slipstream.core.user_code import describe, member, module_of, place_of
from slipstream.rewards.logged import CURRENT, RewardLog
from slipstream.rewards.protocol import AnyJob, JobResult, Per, RewardGroupJob, RewardJob, Term
from slipstream.rewards.user_functions import GIVEN

Scores = Callable[[Sequence[RewardJob]], list[float | None]]
"""Jobs to score together, one or those of a group; a number or None for each."""

BRANCHES = "branches"
"""The keyword of the chats of an episode's forks."""
_MAX_SHOWN = 80  # characters of a value in an error


class _Loop(threading.local):
    """The event loop of a thread, which begins with its first call that is awaited."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()


_LOOP = _Loop()


@dataclass(frozen=True)
class Scoring:
    """A term as it is called."""

    name: str
    per: Per
    scores: Scores


def answer(terms: Sequence[Scoring], job: AnyJob, began: Callable[[int], None]) -> JobResult:
    """Score `job` by the terms of its kind; `began` hears which one is next, by its index in `terms`.

    Every MemoryError `is_exhausted` here: what earlier jobs have left is not known.
    """
    per: Per = "group" if isinstance(job, RewardGroupJob) else "completion"
    jobs = job.jobs if isinstance(job, RewardGroupJob) else [job]
    parts: list[float | None] = []
    log = RewardLog(len(jobs))
    CURRENT.set(log)
    for index, term in enumerate(terms):
        if term.per != per:
            continue
        began(index)
        try:
            parts += term.scores(jobs)
        except BaseException as error:  # noqa: BLE001 - whatever a verifier raises (SystemExit too) fails one job
            text, is_exhausted = f"{term.name}: {describe(error)}", isinstance(error, MemoryError)
            return JobResult(job_id=job.job_id, parts=[], error=text, is_exhausted=is_exhausted)
    return JobResult(job_id=job.job_id, parts=parts, logged=log.all())


def call_function(function: Callable[..., Any], jobs: Sequence[RewardJob]) -> list[float | None]:
    """Call the user's `function` with TRL's keywords for the completions of one prompt, and await it if it is async.

    fn(prompts=[p, ...], completions=[c, ...], completion_ids=[ids, ...], **{column: [value, ...]}) -> [float or None,
    ...]. For chats `p` is the list of messages and `c` is [{"role": "assistant", "content": text}]. A function with a
    parameter `branches` also gets the chats of each completion's forks, and one with `log_extra` or `log_metric` TRL's
    callables of these names, unless a column has that name. TypeError or ValueError for what is no list of so many
    numbers.
    """
    rewards = function(**_keywords(function, jobs))
    if inspect.isawaitable(rewards):  # on a loop that lasts: connections of a client belong to it
        rewards = _LOOP.runner.run(_awaited_alone(rewards), context=copy_context())
    return _checked(function, rewards, len(jobs))


def end_loop() -> None:
    """End the event loop of this thread, if `call_function` has begun one."""
    with suppress(SystemExit, KeyboardInterrupt):  # of a task that a function has left
        _LOOP.runner.close()


async def await_function(function: Callable[..., Any], jobs: Sequence[RewardJob]) -> list[float | None]:
    """The same for an `async def`, on the loop of the caller."""
    return _checked(function, await function(**_keywords(function, jobs)), len(jobs))


def is_async(function: Callable[..., Any]) -> bool:
    """Tell whether it is an `async def`, or an object whose `__call__` is."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _keywords(function: Callable[..., Any], jobs: Sequence[RewardJob]) -> dict[str, Any]:
    """Return what the function is called with; what it may change are copies, since others get the same jobs."""
    columns = [{"answer": job.answer, **deepcopy(job.columns)} for job in jobs]
    names = [name for name in columns[0] if name not in GIVEN]
    more: dict[str, Any] = {}
    if BRANCHES not in names and _takes(function, BRANCHES):
        more[BRANCHES] = [deepcopy(job.branches) for job in jobs]
    log = CURRENT.get(None) or RewardLog(len(jobs))
    for name, logs in (("log_extra", log.log_extra), ("log_metric", log.log_metric)):
        if name not in names and _takes(function, name, by_text=True):
            more[name] = logs
    return {
        "prompts": [deepcopy(job.prompt) for job in jobs],
        "completions": [deepcopy(_completion(job)) for job in jobs],
        "completion_ids": [list(job.completion_ids) for job in jobs],
        **{name: [row[name] for row in columns] for name in names},
        **more,
    }


def _checked(function: Callable[..., Any], rewards: Any, count: int) -> list[float | None]:
    try:
        return _numbers(rewards, count)
    except (TypeError, ValueError) as error:  # raised here, so it has no line of the function
        place = place_of(function)
        raise type(error)(str(error) if place is None else f"{error} ({place})") from error


def _takes(function: Callable[..., Any], name: str, *, by_text: bool = False) -> bool:
    """Tell whether `function` names a parameter so, or, with `by_text`, takes any keyword and has this one in its code,
    as in columns["log_extra"]; what only takes any keyword does not."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # it is not written in Python
        return False
    inner = inspect.unwrap(function)
    return name in parameters or (
        by_text
        and any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        and inspect.isfunction(inner)
        and name in inner.__code__.co_consts
    )


def _completion(job: RewardJob) -> str | list[dict[str, Any]]:
    """Return the text, or for a chat its messages: of an episode all of them, as in TRL."""
    if isinstance(job.prompt, str):
        return job.completion
    return [{"role": "assistant", "content": job.completion}] if job.messages is None else job.messages


def _numbers(rewards: Any, count: int) -> list[float | None]:
    """Return a function's result as numbers. Text is no number, also where it could be read as one."""
    wanted = f"a list with one number or None for each of {plural(count, 'completion')}"
    if isinstance(rewards, str | bytes | Mapping | Set) or not isinstance(rewards, Iterable):
        raise TypeError(f"it returned {_brief(rewards)}, not {wanted}")
    try:
        rewards = list(rewards)
    except TypeError as error:  # a tensor without dimensions
        raise TypeError(f"it returned {_brief(rewards)}, not {wanted}") from error
    if len(rewards) != count:
        raise ValueError(f"it returned {len(rewards)} rewards for {plural(count, 'completion')}")
    for reward in rewards:
        if reward is not None and (isinstance(reward, str | bytes) or not isinstance(reward, SupportsFloat)):
            raise TypeError(f"it returned {_brief(reward)} as a reward, not a number or None")
    return [None if reward is None else float(reward) for reward in rewards]


def _brief(value: Any) -> str:
    return f"{shortened(shown(value), _MAX_SHOWN)} ({type(value).__name__})"


async def _awaited_alone(awaitable: Any) -> Any:
    """Await it, and end the tasks that it leaves, which would go on in the calls behind it."""
    before = asyncio.all_tasks()
    try:
        return await awaitable
    finally:
        left = asyncio.all_tasks() - before
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def import_function(term: Term) -> Callable[..., Any]:
    """The function behind 'module:function' or 'file.py:function'. ConfigError where there is none."""
    location, _, name = term.function.rpartition(":")
    return member(module_of(location, term.source), location, name)
