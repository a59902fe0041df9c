"""From a prompt to the request of an engine, and from what the engine finished to the completion that is passed on."""

from __future__ import annotations

import itertools

import numpy as np

from slipstream.algorithms.responses import truncate_at_token
from slipstream.core.sections import GeneratorConfig, RewardsConfig
from slipstream.core.types import Completion, Prompt, Segment
from slipstream.generator.episodes import EndedEpisode
from slipstream.generator.requests import Finished, Request, segment_of
from slipstream.models.tokenizer import Tokenizer, puts_space_first

TRAIN_STREAM, EVAL_STREAM = 0, 1
"""Streams of noise: training and evaluations count their ordinals apart, so their noise is keyed apart."""


def request_of(
    generator: GeneratorConfig,
    prompt: Prompt,
    *,
    ordinal: int,
    sample: int = 0,
    max_len: int,
    temperature: float,
    stream: int = TRAIN_STREAM,
    is_whole: bool = False,
    is_again: bool = False,
) -> Request:
    """Return the request for one completion of `prompt` in a sequence of at most `max_len` tokens.

    `is_whole`, as in evaluations: the policy itself is sampled, never a part of it, and nothing limits the time. A
    greedy baseline of training is of the whole policy too.
    """
    is_cut = not is_whole and temperature > 0 and generator.truncates
    return Request(
        ordinal=ordinal,
        sample=sample,
        prompt_tokens=prompt.tokens,
        max_new_tokens=min(generator.max_new_tokens, max_len - len(prompt.tokens)),
        temperature=temperature,
        stream=stream,
        top_k=generator.top_k if is_cut else 0,
        top_p=generator.top_p if is_cut else 1.0,
        min_p=generator.min_p if is_cut else 0.0,
        keep_sets=is_cut and generator.keep_sets,
        time_limit_s=None if is_whole else generator.time_limit_s,
        is_again=is_again,
    )


def completion_of(
    item: Finished,
    prompt: Prompt,
    *,
    tokenizer: Tokenizer,
    stop_ids: list[int],
    rewards: RewardsConfig,
    replica: int = 0,
    eval_id: int = -1,
) -> Completion:
    """Return the completion with the text that is scored: up to `rewards.truncate_token`, where that is set."""
    scored = truncate_at_token(item.tokens, rewards.truncate_token, after=rewards.truncate_after)
    return Completion(
        ordinal=item.ordinal,
        sample=item.sample,
        prompt=prompt,
        segments=(segment_of(item),),
        text=decode_text(tokenizer, scored, stop_ids, prompt=prompt),
        finish_reason=item.finish_reason,
        replica=replica,
        purpose="train" if eval_id < 0 else "eval",
        eval_id=eval_id,
        started_s=item.started_s,
        finished_s=item.finished_s,
    )


def completion_of_episode(ended: EndedEpisode, *, tokenizer: Tokenizer, replica: int, finished_s: float) -> Completion:
    """Return the completion of an episode that is over; its text is that of its first branch, with what was given."""
    episode = ended.episode
    segments = tuple(episode.segments) or (Segment(tokens=np.zeros(0, dtype=np.int32)),)
    trunk = itertools.takewhile(lambda one: not one.begins, segments)
    text = _decoded(tokenizer, np.concatenate([one.tokens for one in trunk]).tolist(), episode.prompt)
    return Completion(
        ordinal=episode.request.ordinal,
        sample=episode.request.sample,
        prompt=episode.prompt,
        segments=segments,
        text=text,
        finish_reason=ended.finish_reason,
        replica=replica,
        purpose="train" if episode.eval_id < 0 else "eval",
        eval_id=episode.eval_id,
        started_s=finished_s if episode.started_s is None else episode.started_s,
        finished_s=finished_s,
        episode=ended.record,
    )


def decode_text(tokenizer: Tokenizer, tokens: np.ndarray, stop_ids: list[int], *, prompt: Prompt) -> str:
    """Return the text of a completion of `prompt`, without its stop token and other special tokens."""
    ids = tokens.tolist()
    if ids and ids[-1] in stop_ids:
        ids = ids[:-1]
    return _decoded(tokenizer, ids, prompt)


def _decoded(tokenizer: Tokenizer, ids: list[int], prompt: Prompt) -> str:
    """Return the text of tokens as it was sampled, but for special ones: the usual clean-up would change programs.

    Decoders of SentencePiece's tokenizers strip a space at the start of a text: of an answer in a chat, but not of what
    goes on behind a plain prompt.
    """
    goes_on = prompt.messages is None and puts_space_first(tokenizer)
    anchor = tokenizer.encode("a", add_special_tokens=False)[-1:] if goes_on else []
    text = _plain_text(tokenizer, [*anchor, *ids])
    return text[len(_plain_text(tokenizer, anchor)) :] if anchor else text


def _plain_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
