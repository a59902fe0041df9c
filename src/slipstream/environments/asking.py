"""An agent's request for a turn: where it goes on in the transcript, whether a limit allows it, and the reply to it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.core.turn_messages import TurnSampled
from slipstream.core.types import Prompt
from slipstream.environments.answers import Asked
from slipstream.environments.asks import Ask, Refused, TurnReply, plain
from slipstream.environments.known_episode import EpisodeLimits, KnownEpisode
from slipstream.environments.protocol import ChatMessage
from slipstream.environments.transcript import Branch, Chats, find, find_ids, key_of, no_tokens


def admitted(episode: KnownEpisode, asked: Asked, limits: EpisodeLimits, chats: Chats, now_s: float) -> Branch:
    """Return the branch that is to be sampled next for a request: one that goes on, or a fork.

    Raises Refused, and changes nothing but `is_cut`, where a limit leaves it no room, or it cannot be rendered.
    """
    ask = plain(asked.ask)
    try:
        branch, given, history = _placed(episode, ask, chats, limits)
    except ConfigError as error:
        raise Refused(str(error), code="invalid_messages") from error
    if not len(branch.prompt.tokens):
        raise Refused("a prompt has at least one token", code="invalid_prompt")
    is_new = branch.number >= len(episode.branches)
    num_context = branch.num_tokens + len(given)
    num_new = len(given) + (len(branch.prompt.tokens) if is_new and branch.number > 0 else 0)
    num_behind = episode.num_behind + num_new
    room = limits.room(num_context, num_behind)
    wish = ask.wishes.max_tokens
    _check_limits(episode, limits, now_s, room=room, num_context=num_context, num_behind=num_behind)
    episode.is_cut = False  # an agent that was refused a turn goes on in another way
    if is_new:
        episode.branches.append(branch)
    elif branch.number == 0 and not branch.turn:
        episode.branches[0] = branch
    branch.given, branch.history = given, history
    branch.request, branch.is_sampling, branch.asks_text = asked.request, True, ask.messages is None
    branch.num_asked = room if wish is None else min(room, max(1, wish))
    branch.is_wished = branch.num_asked < room
    return branch


def _check_limits(
    episode: KnownEpisode, limits: EpisodeLimits, now_s: float, *, room: int, num_context: int, num_behind: int
) -> None:
    """Raise Refused, and call the episode cut, where one of its limits is reached."""
    reached = None
    if episode.num_begun >= limits.max_turns:
        reached = f"the episode is over: environment.max_turns = {limits.max_turns}", "max_turns"
    elif now_s - episode.started_s > limits.episode_limit_s:
        reached = f"the episode is over: environment.episode_limit_s = {limits.episode_limit_s:g}", "episode_limit"
    elif room < 1:
        reached = (
            f"{num_context:,} tokens of context leave no room for a turn: at most {limits.max_len:,} fit, and an "
            f"episode has environment.max_episode_tokens = {limits.max_episode_tokens:,} behind its prompt; with this "
            f"request {num_behind:,} of them are used, forks and requests that are open included",
            "context_length_exceeded",
        )
    if reached is not None:
        episode.is_cut = True
        raise Refused(reached[0], code=reached[1])


def _placed(
    episode: KnownEpisode, ask: Ask, chats: Chats, limits: EpisodeLimits
) -> tuple[Branch, np.ndarray, list[ChatMessage]]:
    """Return the branch of a request, the tokens given behind its last turn, and its messages so far."""
    if ask.messages is None:
        return _placed_by_ids(episode, ask, chats, limits)
    place = find(episode.branches, ask.messages, key_of(ask.tools))
    if place is None:
        _, chat = chats.of(ask.tools)
        prompt = chat.context(episode.row, ask.messages)
        return _new(episode, prompt, chats, ask), no_tokens(), ask.messages
    branch, chat, rest = place.branch, place.branch.chat, place.rest
    given = chat.observation(branch.turn_ids(place.turn), rest)
    if place.is_at_end:
        return branch, given, [*branch.history, *rest]
    tokens = np.concatenate([branch.ids(place.turn), given])
    history = [*branch.history[: branch.ends[place.turn - 1]], *rest]
    prompt = msgspec.structs.replace(branch.prompt, tokens=tokens, text=chat.text_of(tokens), messages=history)
    return _new(episode, prompt, chats, ask), no_tokens(), history


def _placed_by_ids(
    episode: KnownEpisode, ask: Ask, chats: Chats, limits: EpisodeLimits
) -> tuple[Branch, np.ndarray, list[ChatMessage]]:
    _, chat = chats.of([])
    tokens = chat.ids_of(ask.text or "") if ask.tokens is None else _checked_ids(ask.tokens, limits)
    branch = find_ids(episode.branches, tokens)
    if branch is not None:
        given = tokens[len(branch.ids()) :]
        return branch, given, [*branch.history, _read(chat.text_of(given))]
    text = chat.text_of(tokens if ask.text is None else tokens[len(chat.prefix) :])
    prompt = msgspec.structs.replace(episode.row, tokens=tokens, text=text, messages=None)
    return _new(episode, prompt, chats, ask), no_tokens(), [_read(text)]


def _read(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def _checked_ids(ids: list[int], limits: EpisodeLimits) -> np.ndarray:
    wrong = next((one for one in ids if not 0 <= one < limits.num_ids), None)
    if wrong is not None:
        raise Refused(f"the vocabulary has ids from 0 to {limits.num_ids - 1:,}, and no {wrong}", code="invalid_prompt")
    return np.asarray(ids, dtype=np.int32)


def _new(episode: KnownEpisode, prompt: Prompt, chats: Chats, ask: Ask) -> Branch:
    """Return a branch that begins with `prompt`: the first request's is branch 0."""
    tools, chat = chats.of(ask.tools)
    is_first = not episode.trunk.turn and not episode.trunk.is_sampling and len(episode.branches) == 1
    number = 0 if is_first else len(episode.branches)
    return Branch(number, prompt, chat, tools, by_ids=ask.messages is None)


def reply_to(episode: KnownEpisode, branch: Branch, turn: TurnSampled) -> TurnReply:
    """Return the reply to the request that `branch` was sampled for; the turn becomes a part of its history.

    Calls are named by the place of their turn in the episode, as clients may keep them by name. A turn that ends at its
    client's own `max_tokens` counts as whole in the episode.
    """
    segment = turn.segment
    assert segment is not None, "a turn was sampled"
    assert segment.behaviour_logprobs is not None, "a turn was sampled"
    said = branch.chat.plain_message(segment.tokens) if branch.asks_text else branch.chat.message(segment.tokens)
    calls: list[dict[str, Any]] = said.get("tool_calls", [])
    for call in calls:
        call["id"] = f"call_{episode.turn}_{call['id'].rpartition('_')[2]}"
    episode.num_tool_calls += len(calls)
    episode.num_tool_errors += sum("error" in call for call in calls)
    branch.said(said)
    if turn.finish_reason == "length" and branch.is_wished:
        episode.finish_reason = "stop"
    ids = branch.ids()
    return TurnReply(
        message=said,
        finish_reason=turn.finish_reason or "stop",
        num_prompt_tokens=len(ids) - len(segment.tokens),
        tokens=segment.tokens.tolist(),
        logprobs=segment.behaviour_logprobs.tolist(),
        versions=[(span.start, span.version) for span in segment.version_spans],
        pieces=branch.chat.pieces(segment.tokens),
        prompt_tokens=ids[: len(ids) - len(segment.tokens)].tolist(),
    )
