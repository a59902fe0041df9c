"""Completions across a resume: as far as they were, and from there as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from engine_kit import new_engine, random_model, random_prompt, requests, run
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from slipstream.core.clock import VirtualClock
from slipstream.core.recipes import resolve
from slipstream.core.saved import Saver, load_messages, prompt_crc32
from slipstream.core.types import Completion, EpisodeRecord, Prompt, Segment, VersionSpan
from slipstream.core.unfinished_messages import Partial, PartialEpisode
from slipstream.generator.completions import completion_of_episode, decode_text
from slipstream.generator.episodes import ended_before
from slipstream.generator.partials import Continued, partial_of, partial_of_finished
from slipstream.generator.requests import Request, Resume
from slipstream.models.tokenizer import char_tokenizer


def restored(**changes: object) -> Continued:
    return Continued(resolve("quickstart", changes), max_len=64, clock=VirtualClock(9.0))


def begun_after(num_steps: int, *, num_slots: int = 8) -> tuple[list[Request], dict[tuple[int, int], list[int]]]:
    """What an engine says has begun after `num_steps` steps, and what it makes of everything in the end."""
    engine = new_engine(random_model(), num_slots=num_slots, stop_token_ids=[])
    engine.submit(requests(3, 4, max_new_tokens=12))
    finished = [item for _ in range(num_steps) for item in engine.step()]
    begun = engine.begun()
    while not engine.is_idle:
        finished += engine.step()
    return begun, {(item.ordinal, item.sample): item.tokens.tolist() for item in finished}


def test_what_has_begun_is_told_and_goes_on_undisturbed() -> None:
    begun, disturbed = begun_after(5)
    alone = run(new_engine(random_model(), num_slots=8, stop_token_ids=[]), requests(3, 4, max_new_tokens=12))
    assert disturbed == {key: item.tokens.tolist() for key, item in alone.items()}
    assert len(begun) == 8, "four of the twelve wait for a row"
    for request in begun:
        assert request.resume is not None
        assert 0 < len(request.resume.tokens) < 12
        assert (
            request.resume.tokens.tolist() == disturbed[request.ordinal, request.sample][: len(request.resume.tokens)]
        )


def test_another_engine_goes_on_from_a_file_and_comes_to_the_same_tokens(tmp_path: Path) -> None:
    begun, whole = begun_after(5)
    saver = Saver()
    saver.save(tmp_path / "generator-0.safetensors", [partial_of(request) for request in begun], cut="one")
    saver.close()
    partials = {
        (p.ordinal, p.sample): p for p in load_messages(tmp_path / "generator-0.safetensors", Partial, cut="one")
    }
    back = restored()
    again = [
        back.resumed(partials[request.ordinal, request.sample], request)
        for request in requests(3, 4, max_new_tokens=12)
        if (request.ordinal, request.sample) in partials
    ]
    assert len(again) == 8
    finished = run(new_engine(random_model(), num_slots=8, stop_token_ids=[]), again)
    for key, item in finished.items():
        assert item.tokens.tolist() == whole[key]
        assert item.started_s == 9.0, "its time limit begins anew"
        assert back.take(*key) == (len(partials[key].segment.tokens), -1)
        assert back.take(*key) == (0, -1)


REQUEST = Request(ordinal=3, sample=1, prompt_tokens=random_prompt(6), max_new_tokens=8)


def partial(num_tokens: int = 4, versions: tuple[int, ...] = (2,)) -> Partial:
    resume = Resume(
        tokens=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.full(num_tokens, -1.0, dtype=np.float32),
        version_spans=tuple(VersionSpan(start=start, version=version) for start, version in enumerate(versions)),
        started_s=1.0,
    )
    return partial_of(REQUEST.resumed_with(resume))


BETWEEN = {"weight_update": "between_batches"}
AT_TURNS = BETWEEN | {"generator": {"weight_update_at": "turn"}}
SEGMENTS = BETWEEN | {"generator": {"segment_tokens": 4}}


@pytest.mark.parametrize(
    ("changes", "made", "version", "fits"),
    [
        ({}, partial(), 2, True),
        ({}, partial(versions=(1, 2)), 5, True),
        ({}, partial(versions=(1, 3)), 2, False),  # of weights that nobody has any more
        ({}, partial(8), 2, False),  # it was complete
        ({}, msgspec.structs.replace(partial(8), finish_reason="length"), 2, True),
        ({}, msgspec.structs.replace(partial(), prompt_crc32=5), 2, False),  # another prompt has this ordinal now
        ({}, partial(versions=()), 2, False),
        (BETWEEN, partial(), 2, True),
        (BETWEEN, partial(), 3, False),  # no completion spans versions
        (BETWEEN, msgspec.structs.replace(partial(8), finish_reason="stop"), 3, True),
        (SEGMENTS, partial(), 3, True),
        (AT_TURNS, partial(), 3, False),
        ({"generator": {"keep_sets": True, "top_k": 4}}, partial(), 2, True),  # the request keeps none
    ],
)
def test_which_completions_are_gone_on_with(changes, made, version, fits) -> None:
    assert restored(**changes).fits(made, REQUEST, version) is fits


def test_kept_sets_are_wanted_where_the_request_keeps_them() -> None:
    assert not restored().fits(partial(), replace(REQUEST, keep_sets=True, top_k=4), 2)


def test_a_disk_that_refuses_what_is_not_needed_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    saver = Saver()
    saver.save(tmp_path / "file" / "generator-0.safetensors", [partial()], cut="one")
    saver.close()
    assert "could not be written" in caplog.text


def sampled(*versions: int) -> Segment:
    return Segment(
        tokens=np.arange(4, dtype=np.int32),
        behaviour_logprobs=np.full(4, -1.0, dtype=np.float32),
        version_spans=tuple(VersionSpan(start=start, version=version) for start, version in enumerate(versions)),
    )


def episode(*segments: Segment, **fields: object) -> PartialEpisode:
    known = {"ordinal": 3, "sample": 1, "prompt_crc32": prompt_crc32(REQUEST.prompt_tokens), "state": "{}"}
    return PartialEpisode(segments=segments, record=EpisodeRecord(), **(known | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "made", "version", "fits"),
    [
        ({}, episode(sampled(1), sampled(2)), 2, True),
        ({}, episode(sampled(1), sampled(2, 3)), 2, False),  # of weights that nobody has any more
        ({}, episode(), 2, False),
        ({}, episode(sampled(1), prompt_crc32=5), 2, False),  # another prompt has this ordinal now
        ({}, episode(sampled(1), sample=2), 2, False),
        (BETWEEN, episode(sampled(2), sampled(2)), 2, True),
        (BETWEEN, episode(sampled(1), sampled(1)), 2, False),  # no episode spans versions
        (BETWEEN, episode(sampled(1), sampled(1), state=None), 2, True),  # it is over
        (AT_TURNS, episode(sampled(1), sampled(2)), 3, True),
        (AT_TURNS, episode(sampled(1), sampled(3)), 2, False),
    ],
)
def test_which_episodes_are_gone_on_with(changes, made, version, fits) -> None:
    assert restored(**changes).episode(REQUEST, [partial(), made], version) is (made if fits else None)


def test_completions_and_episodes_are_not_mistaken_for_each_other() -> None:
    to_decode, finished = restored().split([REQUEST], [episode(sampled(2))], 2)
    assert (to_decode, finished) == ([REQUEST], [])


def test_text_is_decoded_as_it_was_sampled() -> None:
    """Tokenizers that clean up, Llama's among them, would take spaces out of programs."""
    words = ["print(a,", "'", "'", ",", "b)", "and", "x", "."]
    backend = Tokenizer(models.WordLevel({word: at for at, word in enumerate(dict.fromkeys([*words, "?"]))}, "?"))
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    ids = np.array([backend.token_to_id(word) for word in words], np.int32)
    assert tokenizer.decode(ids.tolist()) != " ".join(words), "it cleans up"
    prompt = Prompt(prompt_id="p", text="12", tokens=REQUEST.prompt_tokens, task="t")
    assert decode_text(tokenizer, ids, [], prompt=prompt) == " ".join(words)


def test_an_episode_that_was_over_is_the_same_completion_again() -> None:
    """All of it: its branches, the prompt with what was said first, and its record."""
    row = Prompt(prompt_id="p", text="12", tokens=REQUEST.prompt_tokens, task="t")
    extended = msgspec.structs.replace(row, text="12+", tokens=np.append(row.tokens, 5).astype(np.int32))
    fork = Segment(tokens=np.arange(3, dtype=np.int32), begins=True)
    completion = Completion(
        ordinal=3,
        sample=1,
        prompt=extended,
        segments=(sampled(1), Segment(tokens=np.arange(2, dtype=np.int32)), sampled(1), fork, sampled(2)),
        text="",
        finish_reason="length",
        episode=EpisodeRecord(messages=[{"role": "assistant", "content": "a"}], reward=0.5, turn_rewards=[None, 0.5]),
    )
    saved = partial_of_finished(completion, row)
    assert isinstance(saved, PartialEpisode)
    assert restored().episode(REQUEST, [saved], 2) is saved
    ended = ended_before(REQUEST, row, saved)
    assert ended.record.num_restored == completion.num_tokens
    again = completion_of_episode(ended, tokenizer=char_tokenizer(), replica=0, finished_s=1.0)
    assert again.num_branches == 2
    assert again.prompt is extended
    assert again.finish_reason == "length"
    assert msgspec.structs.replace(again.episode, num_restored=0) == completion.episode
    for one, other in zip(again.segments, completion.segments, strict=True):
        assert (one.begins, one.version_spans) == (other.begins, other.version_spans)
        assert one.tokens.tolist() == other.tokens.tolist()
