"""The protocol that an environment implements, and the strict reading of what it returned.

An environment talks with the policy for one episode. Slipstream makes one object per episode and calls

    reset(**columns)    once, with the row's columns; returns what it says before the first turn
    step(message)       for every turn, with the policy's message; returns what it says next
    final_reward()      once, at the end of the episode, also when a limit cut it
    close()             once, last

and, of an environment whose episodes a resumed run may go on with, which has both methods,

    state()                     after `reset` and after every `step` that is not done; returns a value of JSON
    restore(state, **columns)   in place of `reset`, on a new object: it goes on from there

Messages are dicts as in OpenAI's and transformers' chat format: {"role": ..., "content": ...}. The policy's have the
role "assistant" and, where it calls tools, "tool_calls" (`tool_calls.py`). The environment's have "user", "tool" or
"system". Every method may be `async def`.

Environments run code of others on text of a model, so nothing that they return is believed: `as_messages`, `as_step`
and `as_reward` take exactly what is documented here, and raise EnvironmentFault for all else.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, SupportsFloat

import msgspec
import numpy as np

from slipstream.core.plain import shortened, shown

ChatMessage = dict[str, Any]

MAX_CHARS = 32_768
"""Most characters of one message, unless the caller says otherwise. The rest is cut off, with a mark."""
MAX_MARK_CHARS = 64
"""Most characters of the mark at the end of a text that was cut."""
MAX_COUNT = (1 << 31) - 1
"""Most tool calls of a turn, and most bytes of a state, that are counted."""
MAX_MESSAGES = 64
"""Most messages that an environment may say at once."""
MAX_NAME_CHARS = 256
MAX_PLAIN_NAME = 128
MAX_STATE_BYTES = 256 << 10
"""Most bytes of an environment's state, as JSON. Of a larger one nothing is kept, and its episode begins again."""
ROLES = ("user", "tool", "system")
IN_THREAD: ContextVar[Callable[[Callable[[], Any]], Awaitable[Any]] | None] = ContextVar("in_thread", default=None)
"""Calls a function in the thread of the episode whose async method runs here; None where it has none."""

_STEP_FIELDS = ("messages", "done", "reward")
_MESSAGE_FIELDS = ("role", "content", "name", "tool_call_id")


class EnvironmentFault(Exception):
    """An environment returned what the protocol does not allow; the message is a sentence about it."""


@dataclass(frozen=True)
class Step:
    """The environment's answer to a turn.

    `messages` are what it says next, a string being one message of the user's; `done` ends the episode; `reward` is for
    this turn, None where the turn has none.
    """

    messages: Sequence[ChatMessage] | str = ()
    done: bool = False
    reward: float | None = None


class Environment:
    """Base class of environments. Inheriting it is optional: any object with `reset` and `step` will do.

    The reward of an episode is the sum of its turns' rewards and of `final_reward`, or None if there was none at all.
    A subclass may have `state` and `restore`; this class has neither.
    """

    extends_prompt: bool = False
    """True if what `reset` says is the end of the prompt's last message, as in TRL, and no message of its own."""

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of its tools, which the chat template is given as `tools`. Read after `reset`."""
        return []

    def reset(self, **columns: Any) -> Any:  # noqa: ARG002 - for subclasses
        """Begin an episode of the row with these columns; return messages, a string or None."""
        return None

    def step(self, message: ChatMessage) -> Any:
        """Answer the policy's turn with a `Step`."""
        raise NotImplementedError

    def final_reward(self) -> Any:
        """Return a reward for the whole episode, or None."""
        return None

    def close(self) -> Any:
        """Free what the environment holds."""


def as_messages(value: Any, *, max_chars: int = MAX_CHARS) -> list[ChatMessage]:
    """Return what an environment said as new messages of exact types.

    None is no message, a string is one of the user's. A content of more than `max_chars` characters is cut, with a
    mark; halves of surrogate pairs become U+FFFD. EnvironmentFault for anything else than messages of `ROLES` with a
    text as content.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": cut(value, max_chars)}]
    if not isinstance(value, list | tuple):
        raise EnvironmentFault(f"messages are a list, a string or None, not {_brief(value)}")
    if len(value) > MAX_MESSAGES:
        raise EnvironmentFault(f"{len(value):,} messages at once, at most {MAX_MESSAGES} are allowed")
    return [_as_message(message, max_chars) for message in value]


def _as_message(value: Any, max_chars: int) -> ChatMessage:
    if not isinstance(value, Mapping):
        raise EnvironmentFault(f'a message is a dict {{"role": ..., "content": ...}}, not {_brief(value)}')
    _check_fields(value, _MESSAGE_FIELDS, "a message")
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise EnvironmentFault(f"the role of an environment's message is {' or '.join(ROLES)}, not {_brief(role)}")
    if not isinstance(content, str):
        raise EnvironmentFault(f"the content of a message is a string, not {_brief(content)}")
    message: ChatMessage = {"role": str(role), "content": cut(content, max_chars)}
    for field in ("name", "tool_call_id"):
        if field not in value:
            continue
        name = value[field]
        if not isinstance(name, str) or len(name) > MAX_NAME_CHARS:
            raise EnvironmentFault(
                f"'{field}' of a message is a string of at most {MAX_NAME_CHARS} characters, not {_brief(name)}"
            )
        message[field] = cut(name, MAX_NAME_CHARS)
    return named_plainly(message)


def named_plainly(message: ChatMessage) -> ChatMessage:
    """Return `message` with a name that vetting takes: that of a tool's message may be the model's own text."""
    if message["role"] == "tool" and message.get("name"):
        message["name"] = re.sub(r"[^A-Za-z0-9_.:/-]+", "_", message["name"])[:MAX_PLAIN_NAME]
    return message


def as_step(value: Any, *, max_chars: int = MAX_CHARS) -> Step:
    """Return an environment's answer to a turn with exact types; a dict with the fields of `Step` will do as well.

    EnvironmentFault for anything else, and for messages and rewards that `as_messages` and `as_reward` refuse.
    """
    if isinstance(value, Step):
        messages, done, reward = value.messages, value.done, value.reward
    elif isinstance(value, Mapping):
        _check_fields(value, _STEP_FIELDS, "a step")
        messages, done, reward = value.get("messages", ()), value.get("done", False), value.get("reward")
    else:
        raise EnvironmentFault(f"step returns a Step, or a dict with its fields, not {_brief(value)}")
    if not isinstance(done, bool | np.bool_):
        raise EnvironmentFault(f"'done' of a step is True or False, not {_brief(done)}")
    return Step(as_messages(messages, max_chars=max_chars), bool(done), as_reward(reward))


def as_reward(value: Any) -> float | None:
    """Return a reward as a finite float, or None. EnvironmentFault for text, True and False, NaN, inf and the rest."""
    if value is None:
        return None
    if isinstance(value, bool | np.bool_ | str | bytes) or not isinstance(value, SupportsFloat):
        raise EnvironmentFault(f"a reward is a number or None, not {_brief(value)}")
    try:
        number = float(value)
    except Exception as error:
        raise EnvironmentFault(f"a reward is a number or None, not {_brief(value)}: {error}") from error
    if not math.isfinite(number):
        raise EnvironmentFault(f"a reward is finite, not {number}")
    return number


def as_state(value: Any) -> str:
    """Return an environment's state as JSON. EnvironmentFault for a value that JSON would give back as another one.

    So `restore` gets what `state` returned: tuples, keys that are no strings, NaN and objects are refused.
    """
    try:
        body = msgspec.json.encode(value)
        is_same = len(body) > MAX_STATE_BYTES or bool(msgspec.json.decode(body) == value)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise EnvironmentFault(f"a state is a value of JSON: {type(error).__name__}: {_brief(error)}") from error
    if not is_same:
        raise EnvironmentFault(
            f"a state is a value of JSON, without tuples and keys that are no strings: {_brief(value)}"
        )
    return body.decode()


def as_restored(value: Any) -> None:
    """Take what `restore` returned. EnvironmentFault unless it is None: what was said before is known."""
    if value is not None:
        raise EnvironmentFault(f"restore returns nothing, and not {_brief(value)}")


def can_be_restored(environment: Any) -> bool:
    """Return whether an environment has both methods, `state` and `restore`."""
    can_restore = hasattr(environment, "restore") and callable(environment.restore)
    return can_restore and hasattr(environment, "state") and callable(environment.state)


def restoring(environment: Any, state: str, columns: Mapping[str, Any]) -> Callable[[], Any]:
    """Return the call of `restore` with a state of `as_state`, and with those of the row's columns that it takes."""
    restore = environment.restore
    try:
        first = next(iter(inspect.signature(restore).parameters), None)
    except (TypeError, ValueError):  # written in C
        first = None
    taken = taken_by(restore, {name: value for name, value in columns.items() if name != first})
    return partial(restore, msgspec.json.decode(state), **taken)


def episode_reward(turns: Iterable[float | None], final: float | None = None) -> float | None:
    """Return the sum of an episode's rewards, in whatever order; None if all are None. EnvironmentFault for inf."""
    rewards = [reward for reward in (*turns, final) if reward is not None]
    try:
        return math.fsum(rewards) if rewards else None
    except OverflowError as error:
        raise EnvironmentFault("the sum of an episode's rewards is not finite") from error


def cut(text: str, max_chars: int) -> str:
    """Return `text` as UTF-8 can write it: its first `max_chars` characters and a mark, where it has more."""
    kept = text if len(text) <= max_chars else f"{text[:max_chars]} ... [cut: {len(text):,} characters]"
    return kept if kept.isascii() else kept.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def with_opening(
    prompt: Sequence[ChatMessage], opening: Sequence[ChatMessage], *, extends_prompt: bool = False
) -> list[ChatMessage]:
    """Return the messages before the first turn: those of `prompt`, then what `reset` said.

    With `extends_prompt` the texts of `opening` are appended to the prompt's last message, without a space, as TRL
    does; a prompt without messages begins with them.
    """
    if not extends_prompt or not prompt or not opening:
        return [*prompt, *opening]
    text = "".join(message["content"] for message in opening)
    return [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']}{text}"}]


def tool_schemas(environment: Any) -> list[dict[str, Any]]:
    """Return the schemas of an environment's tools; none for a class that does not inherit and has none."""
    return list(environment.tool_schemas) if hasattr(environment, "tool_schemas") else []


def extends_prompt(environment: Any) -> bool:
    """Return whether what `reset` says belongs to the prompt's last message."""
    return isinstance(environment, Environment) and environment.extends_prompt


async def settled(value: Any) -> Any:
    """Return `value`, awaited where a method was `async def`."""
    return await value if inspect.isawaitable(value) else value


async def called(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Return the outcome of a user's function from within async code.

    One that is not async runs in the thread of its episode, where there is one: it must not hold up the loop of all.
    """
    call, in_thread = partial(function, *given, **named), IN_THREAD.get()
    if in_thread is None or inspect.iscoroutinefunction(function):
        return await settled(call())
    return await settled(await in_thread(call))


def taken_by(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a row's columns that `function` has parameters for: all, where it takes any keywords."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return dict(columns)
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(columns)
    names = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    return {name: value for name, value in columns.items() if name in names}


@dataclass(frozen=True)
class Played:
    """An episode that `play` has played: all messages, its reward, and whether the environment ended it."""

    messages: list[ChatMessage]
    reward: float | None
    num_turns: int
    is_done: bool


async def play(
    environment: Any,
    policy: Callable[[list[ChatMessage]], str | ChatMessage | Awaitable[str | ChatMessage]],
    prompt: Sequence[ChatMessage] | str = (),
    columns: Mapping[str, Any] | None = None,
    *,
    max_turns: int = 16,
) -> Played:
    """Play one episode with a Python function in the policy's place: to try an environment in a notebook or a test.

    `policy` gets all messages so far and returns its turn, as text or as a message. The environment is closed at the
    end. Ends when: the environment is done, after `max_turns`, or with the first error.
    """
    try:
        opening = as_messages(await settled(environment.reset(**taken_by(environment.reset, columns or {}))))
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages = with_opening(given, opening, extends_prompt=extends_prompt(environment))
        rewards: list[float | None] = []
        is_done = False
        while not is_done and len(rewards) < max_turns:
            turn = await settled(policy(list(messages)))
            message = {"role": "assistant", "content": turn} if isinstance(turn, str) else dict(turn)
            step = as_step(await settled(environment.step(message)))
            messages += [message, *step.messages]
            rewards.append(step.reward)
            is_done = step.done
        final = as_reward(await settled(environment.final_reward())) if hasattr(environment, "final_reward") else None
        return Played(messages, episode_reward(rewards, final), len(rewards), is_done)
    finally:
        if hasattr(environment, "close"):
            await settled(environment.close())


def _check_fields(value: Mapping[Any, Any], allowed: Sequence[str], what: str) -> None:
    unknown = next((field for field in value if field not in allowed), None)
    if unknown is not None:
        raise EnvironmentFault(f"{what} has the fields {', '.join(allowed)}, and no {_brief(unknown)}")


def _brief(value: Any) -> str:
    """Return `value` in a few words and characters, whatever its own `repr` does."""
    kind = type(value).__name__
    try:
        return f"{cut(shortened(shown(value), 80), 120)} ({kind})"
    except Exception:  # noqa: BLE001 - an object of the environment's
        return f"an object of type {kind}"
