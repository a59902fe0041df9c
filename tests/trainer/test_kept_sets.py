"""Kept sets in the trainer: every policy's logprobs are over the tokens that a token was drawn from."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from training_data import (
    VOCAB_SIZE,
    Recording,
    hugging_face_twin,
    make_groups,
    prepared,
    run_config,
    sharing_prompts,
    tiny_policy,
)

from slipstream.batching import collate as batching
from slipstream.core import wire
from slipstream.core.errors import ShapeError
from slipstream.core.types import Completion, Group, Rollout, Segment
from slipstream.models.initialise import new_model
from slipstream.models.turns import collated
from slipstream.trainer.batch import train_sequence, without_targets
from slipstream.trainer.measure import MAX_LOGITS, Auxiliary, measure, microbatch_logprobs
from slipstream.trainer.optim import AdamW
from slipstream.trainer.step import train_on_batch

TEMPERATURE = 0.8


def with_sets(segment: Segment, rng: np.random.Generator, max_size: int) -> Segment:
    """`segment` with a random set of at most `max_size` tokens around each token, if it was sampled."""
    if not segment.is_sampled:
        return segment
    sets = []
    for token in segment.tokens.tolist():
        others = rng.permutation([other for other in range(VOCAB_SIZE) if other != token])
        sets.append(np.sort([token, *others[: rng.integers(0, max_size)]]).astype(np.int32))
    counts = np.array([len(row) for row in sets], dtype=np.int32)
    return msgspec.structs.replace(segment, kept_tokens=np.concatenate(sets), kept_counts=counts)


def kept_groups(*, seed: int = 0, max_size: int = 6, **rollout: Any) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [
        with_completions(group, lambda one: with_segments(one, [with_sets(s, rng, max_size) for s in one.segments]))
        for group in sharing_prompts(make_groups(seed=seed, **rollout))
    ]


def with_completions(group: Group, change: Any) -> Group:
    def changed(rollout: Rollout) -> Rollout:
        return msgspec.structs.replace(rollout, completion=change(rollout.completion))

    return Group(ordinal=group.ordinal, rollouts=tuple(changed(rollout) for rollout in group.rollouts))


def with_segments(completion: Completion, segments: list[Segment]) -> Completion:
    return msgspec.structs.replace(completion, segments=tuple(segments))


def completions_of(groups: list[Group]) -> dict[tuple[int, int], Completion]:
    return {(r.completion.ordinal, r.completion.sample): r.completion for group in groups for r in group.rollouts}


def by_hand(twin: Any, completion: Completion) -> Tensor:
    """float64: logprob of every sampled token over its set, by transformers, one token at a time."""
    pieces = [completion.prompt.tokens, *(segment.tokens for segment in completion.segments)]
    ids = torch.from_numpy(np.concatenate(pieces).astype(np.int64))
    logits = twin(ids[None]).logits[0] / TEMPERATURE
    place, found = len(completion.prompt.tokens), []
    for segment in completion.segments:
        start = 0
        for offset in range(len(segment.tokens)):
            if segment.kept_tokens is not None and segment.kept_counts is not None:
                kept = segment.kept_tokens[start : start + segment.kept_counts[offset]].tolist()
                start += len(kept)
                assert int(ids[place]) in kept
                found.append(
                    logits[place - 1, ids[place]] - torch.stack([logits[place - 1, j] for j in kept]).exp().sum().log()
                )
            place += 1
    return torch.stack(found)


def test_completions_without_kept_sets_are_packed_apart() -> None:
    """A greedy baseline has none, in a group that has."""
    completions = completions_of(kept_groups(seed=5, given=False))
    with_sets = [train_sequence(one) for one in completions.values()]
    bare = replace(with_sets[0], key=(99, 0), kept_tokens=None, kept_counts=None)
    with pytest.raises(ShapeError, match="different columns"):
        batching.collate([*with_sets, bare], 10_000)
    packed = collated(batching, [*with_sets, bare], 10_000)
    assert [one.keys for one in packed][-1] == ((99, 0),)
    assert {key for one in packed for key in one.keys} == {*completions, (99, 0)}


@pytest.mark.parametrize("capacity", [30, 10_000])
@pytest.mark.parametrize("at_once", [1 << 26, 4 * VOCAB_SIZE])
def test_logprobs_and_gradients_equal_a_loop_over_tokens_in_float64(
    capacity: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing, shared prompts, given segments between sampled ones, and a head in chunks."""
    monkeypatch.setitem(MAX_LOGITS, "cpu", at_once)
    groups = kept_groups(seed=5, given=True)
    completions = completions_of(groups)
    model, _ = tiny_policy()
    twin = hugging_face_twin(model)
    sequences = [train_sequence(completion) for completion in completions.values()]
    for microbatch in batching.collate(sequences, capacity):
        logprobs, entropies = microbatch_logprobs(model, microbatch, temperature=TEMPERATURE)
        expected = torch.cat([by_hand(twin, completions[key]) for key in microbatch.keys])
        torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
        weights = torch.linspace(-1, 1, len(expected), dtype=torch.float64)
        torch.autograd.backward((weights * logprobs).sum())
        torch.autograd.backward((weights * expected).sum())
        bare = type(microbatch)(**(vars(microbatch) | {"kept_tokens": None, "kept_counts": None}))
        assert torch.equal(entropies, microbatch_logprobs(model, bare, temperature=TEMPERATURE)[1])
    theirs = dict(twin.named_parameters())["model.embed_tokens.weight"].grad
    assert model.embedding.weight.grad is not None
    torch.testing.assert_close(model.embedding.weight.grad.double(), theirs, atol=2e-5, rtol=1e-4)


def test_sets_of_the_whole_vocabulary_change_nothing() -> None:
    groups = kept_groups(max_size=VOCAB_SIZE + 1)
    everything = np.arange(VOCAB_SIZE, dtype=np.int32)

    def whole(completion: Completion) -> Completion:
        segments = [
            msgspec.structs.replace(
                segment,
                kept_tokens=np.tile(everything, len(segment.tokens)),
                kept_counts=np.full(len(segment.tokens), VOCAB_SIZE, dtype=np.int32),
            )
            for segment in completion.segments
        ]
        return with_segments(completion, segments)

    def bare(completion: Completion) -> Completion:
        cleared = {"kept_tokens": None, "kept_counts": None}
        return with_segments(completion, [msgspec.structs.replace(s, **cleared) for s in completion.segments])

    results = []
    for change in (whole, bare):
        model, _ = tiny_policy()
        sequences = [train_sequence(change(one)) for one in completions_of(groups).values()]
        (microbatch,) = batching.collate(sequences, 10_000)
        results.append(microbatch_logprobs(model, microbatch, temperature=TEMPERATURE)[0])
    torch.testing.assert_close(*results)


def test_ratios_are_one_at_staleness_0_and_all_policies_are_read_over_the_sets() -> None:
    """Behaviour logprobs are the policy's own, taken over the sets by hand; so are the other policies'."""
    config = run_config(
        loss={"name": "decoupled_ppo"},
        kl={"coef": 0.1},
        generator={"temperature": TEMPERATURE, "max_new_tokens": 16, "top_k": 6, "keep_sets": True},
    )
    groups = kept_groups(seed=2)
    model, flat = tiny_policy()
    reference = new_model(config.model, VOCAB_SIZE, 9)
    twins = hugging_face_twin(model), hugging_face_twin(reference)

    def sampled(completion: Completion) -> Completion:
        (segment,) = completion.segments
        own = by_hand(twins[0], completion).detach().float().numpy()
        return with_segments(completion, [msgspec.structs.replace(segment, behaviour_logprobs=own)])

    groups = [with_completions(group, sampled) for group in groups]
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=10)
    recording = Recording()
    metrics = train_on_batch(
        model, optimizer, groups, config=config, step=0, batching=recording, auxiliary=Auxiliary(reference=reference)
    )
    assert metrics["logprob_diff_max/lag_0"] < 1e-4
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    completions = completions_of(groups)
    (microbatch,) = recording.packed[-1]
    for twin, column in zip(twins, (microbatch.proximal_logprobs, microbatch.reference_logprobs), strict=True):
        expected = torch.cat([by_hand(twin, completions[key]) for key in microbatch.keys]).detach().numpy()
        assert column is not None
        np.testing.assert_allclose(column, expected, atol=1e-4)


def test_a_masked_completion_brings_no_sets() -> None:
    first, second, *_ = [train_sequence(completion) for completion in completions_of(kept_groups()).values()]
    masked = without_targets(first)
    assert masked.kept_tokens is not None
    assert len(masked.kept_tokens) == 0
    (microbatch,) = batching.collate([masked, second], 10_000)
    assert microbatch.keys == (second.key,)
    assert microbatch.kept_sets is not None
    assert len(microbatch.kept_sets) == second.num_targets
    model, _ = tiny_policy()
    read = partial(microbatch_logprobs, model, temperature=1.0)
    columns = measure(lambda one: read(one)[0], [masked, second], microbatch_tokens=1000, batching=batching)
    assert len(columns[first.key]) == 0


def test_sets_survive_the_wire() -> None:
    (rollout, *_) = kept_groups()[0].rollouts
    (segment,) = rollout.completion.segments
    arrived = wire.decode(wire.encode(rollout))
    assert isinstance(arrived, Rollout)
    (received,) = arrived.completion.segments
    for name in ("kept_tokens", "kept_counts"):
        ours, theirs = getattr(segment, name), getattr(received, name)
        assert theirs.dtype == np.int32
        assert np.array_equal(ours, theirs)


def test_sets_that_cannot_be_right_are_refused() -> None:
    completion = kept_groups(given=True)[0].rollouts[0].completion
    first, given, last = completion.segments
    assert first.kept_tokens is not None
    assert first.kept_counts is not None
    bare = msgspec.structs.replace(last, kept_tokens=None, kept_counts=None)
    with pytest.raises(ShapeError, match="others have none"):
        train_sequence(with_segments(completion, [first, given, bare]))
    short = msgspec.structs.replace(first, kept_counts=first.kept_counts[:-1])
    with pytest.raises(ShapeError, match="do not fit"):
        train_sequence(with_segments(completion, [short, given, last]))
    strange = first.kept_tokens.copy()
    strange[:] = VOCAB_SIZE
    with pytest.raises(ShapeError, match="not drawn from its set"):
        train_sequence(with_segments(completion, [msgspec.structs.replace(first, kept_tokens=strange), given, last]))
    with_and_without = [train_sequence(completion), train_sequence(make_groups(seed=8)[1].rollouts[0].completion)]
    with pytest.raises(ShapeError, match="different columns"):
        batching.collate(with_and_without, 10_000)


def test_a_batch_of_kept_sets_is_prepared_whole() -> None:
    groups = kept_groups(given=True)
    batch = prepared(groups, config=run_config(), step=0)
    for key, completion in completions_of(groups).items():
        sequence = batch.sequences[key]
        assert sequence.kept_counts is not None
        assert sequence.kept_tokens is not None
        assert np.array_equal(sequence.kept_counts > 0, sequence.mask)
        flat = [segment.kept_tokens for segment in completion.segments if segment.kept_tokens is not None]
        assert np.array_equal(sequence.kept_tokens, np.concatenate(flat))
