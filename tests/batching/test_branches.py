"""Sequences of several contexts: each is read alone, every target once; those of one context are packed as ever."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields

import numpy as np

from slipstream.batching.collate import collate
from slipstream.core.packed import PackedMicrobatch, TrainSequence


def numbers(seed: int) -> Iterator[int]:
    """Yield the high bits of a linear congruential generator: the same for ever, on every machine."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 33


def plain_case(seed: int) -> tuple[list[TrainSequence], int, int]:
    """Return sequences of one context, shared prompts and given tokens among them, a capacity and an atom size."""
    draw = numbers(seed)
    atom_size, has_columns, has_sets = 1 + next(draw) % 2, next(draw) % 2, next(draw) % 2
    sequences = []
    for ordinal in range(1 + next(draw) % 6):
        prompt = [next(draw) % 50 for _ in range(1 + next(draw) % 9)]
        for sample in range(2 * (1 + next(draw) % 3)):
            own_prompt = [*prompt, 7] if next(draw) % 5 == 0 else prompt
            turns = [(bool(i % 2 == 0), 1 + next(draw) % 7) for i in range(1 + next(draw) % 4)]
            mask = [False] * len(own_prompt) + [sampled for sampled, count in turns for _ in range(count)]
            if next(draw) % 11 == 0:
                mask = [False] * len(mask)
            tokens = own_prompt + [next(draw) % 50 for _ in range(len(mask) - len(own_prompt))]
            column = np.array([next(draw) % 1000 / 8 for _ in mask], dtype=np.float32) * mask
            counts = np.array([1 + next(draw) % 3 for _ in mask], dtype=np.int32) * mask
            more = {"values": column + 1, "returns": column - 1} if has_columns else {}
            if has_sets:
                more |= {"kept_counts": counts, "kept_tokens": np.arange(counts.sum(), dtype=np.int32)}
            sequences.append(
                TrainSequence(
                    key=(ordinal, sample),
                    tokens=np.array(tokens, dtype=np.int32),
                    mask=np.array(mask),
                    behaviour_logprobs=-column,
                    advantages=column / 2,
                    versions=np.where(mask, ordinal, -1).astype(np.int32),
                    **more,
                )
            )
    return sequences, 1 + next(draw) % 80, atom_size


def digest(microbatches: list[PackedMicrobatch]) -> str:
    """Return a hash of every field of `microbatches`, with types and shapes."""
    found = hashlib.sha256()
    for microbatch in microbatches:
        for field in fields(microbatch):
            value = getattr(microbatch, field.name)
            is_array = isinstance(value, np.ndarray)
            found.update(f"{field.name} {(value.dtype.str, value.shape) if is_array else value}".encode())
            found.update(np.ascontiguousarray(value).tobytes() if is_array else b"")
    return found.hexdigest()


def test_sequences_of_one_context_are_packed_as_before_there_were_others() -> None:
    """The expected digest is that of the packing before branches, over the same cases."""
    found = hashlib.sha256()
    for seed in range(300):
        sequences, capacity, atom_size = plain_case(seed)
        found.update(digest(collate(sequences, capacity, atom_size=atom_size)).encode())
    assert found.hexdigest() == "9d2083494f26bc7bfb23e1ccd6d40bfde47f80eff43baeb5878d6ad71f248212"
