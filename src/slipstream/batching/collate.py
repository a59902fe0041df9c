"""Batch -> minibatches -> microbatches, and greedy collation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.batching.balance import balanced_permutation as balanced_permutation
from slipstream.core.errors import ConfigError, ShapeError
from slipstream.core.packed import OPTIONAL_COLUMNS, AnyGroup, PackedMicrobatch, TrainSequence

_NO_ROWS = np.zeros(0, dtype=np.int64)


def split_minibatches(
    groups: Sequence[AnyGroup], num_minibatches: int, *, order: Sequence[int] | None = None
) -> list[list[AnyGroup]]:
    """Deal whole groups, in canonical order or that `order` of it, into parts whose sizes differ by at most one.

    Dealt like cards, so that each part has old and new groups alike. ConfigError if a part would be empty.
    """
    if num_minibatches > len(groups):
        got = f"minibatches = {num_minibatches} with {len(groups)} groups"
        hint = "lower trainer.minibatches or raise groups_per_step"
        raise ConfigError("a minibatch needs at least one group", got=got, allowed=f"1..{len(groups)}", hint=hint)
    canonical = sorted(groups, key=lambda group: group.ordinal)
    if order is not None:
        canonical = [canonical[index] for index in order]
    return [canonical[part::num_minibatches] for part in range(num_minibatches)]


@dataclass(frozen=True)
class Atom:
    """A sequence, or several of one prompt (a pair), that collation never splits.

    It reads `num_own` rows, and `num_prompt` that siblings may share. `prompt` is (ordinal, the prompt's tokens as
    bytes): equal tokens alone, in two groups, are not shared.
    """

    key: tuple[int, int]
    prompt: tuple[int, bytes]
    num_prompt: int
    num_own: int


def first_fit(atoms: Sequence[Atom], capacity_tokens: int) -> list[list[int]]:
    """Indices of atoms per microbatch: longest first, siblings behind their longest, each where it first fits.

    Magistral's greedy collation, where capacity counts the rows that are really read: an atom goes to the first
    microbatch that reads its prompt already and has room for the rest of it, else to the first with room for all of
    it, else to a new one. Siblings come one after another so that few microbatches read the same prompt. Ties in length
    go by key, so the result does not depend on the order of the input. An atom longer than the capacity gets a
    microbatch of its own: atoms are never split. Identity: without siblings, plain first-fit decreasing.
    """
    siblings: dict[tuple[int, bytes], list[int]] = {}
    for index in sorted(range(len(atoms)), key=lambda i: (-atoms[i].num_prompt - atoms[i].num_own, atoms[i].key)):
        siblings.setdefault(atoms[index].prompt, []).append(index)
    bins: list[list[int]] = []
    room: list[int] = []
    for members in siblings.values():
        reading: list[int] = []  # microbatches that hold this prompt
        for index in members:
            rows = atoms[index].num_own
            place = next((b for b in reading if room[b] >= rows), None)
            if place is None:
                rows += atoms[index].num_prompt
                place = next((b for b, free in enumerate(room) if free >= rows), None)
                if place is None:
                    place = len(bins)
                    bins.append([])
                    room.append(capacity_tokens)
                reading.append(place)
            bins[place].append(index)
            room[place] -= rows
    return bins


def collate(sequences: Sequence[TrainSequence], capacity_tokens: int, *, atom_size: int = 1) -> list[PackedMicrobatch]:
    """Pack sequences into microbatches of at most `capacity_tokens` rows, each with every prompt at most once.

    Every `atom_size` sequences in the order given stay together, side by side in that order. Those in which a sequence
    has no token to train on are left out: they would add nothing to any loss. An episode with branches is a sequence of
    several contexts: all of them go where it goes, and what one begins with as an earlier one does is read once.
    Identity: logprobs, losses and gradients are those of every context of every sequence read alone.
    """
    if len(sequences) % atom_size:
        raise ShapeError("sequences do not fill whole atoms", got=len(sequences), allowed=f"a multiple of {atom_size}")
    read = [Reading.of(sequence) for sequence in sequences]
    whole = [read[start : start + atom_size] for start in range(0, len(read), atom_size)]
    trained = [members for members in whole if all(one.contexts for one in members)]
    atoms = [_atom(members) for members in trained]
    return [_pack([one for index in chosen for one in trained[index]]) for chosen in first_fit(atoms, capacity_tokens)]


@dataclass(frozen=True)
class Reading:
    """A sequence as the model reads it: its contexts that have targets, and the rows that they need.

    `prompt` is (ordinal, the prompt's tokens as bytes), what siblings may share of the first context. `prefixes` say
    for each context how many first tokens it has in common with an earlier one of the sequence, and which: (index,
    number). `num_rows` are the rows of all of them where no sibling is.
    """

    sequence: TrainSequence
    contexts: list[tuple[int, np.ndarray]]
    prompt: tuple[int, bytes]
    num_prompt: int
    prefixes: list[tuple[int, int]]
    num_rows: int

    @classmethod
    def of(cls, sequence: TrainSequence) -> Reading:
        tokens, contexts = sequence.tokens, sequence.contexts
        if not contexts:
            return cls(sequence, [], (sequence.key[0], b""), 0, [], 0)
        (start, trained), *_ = contexts
        prompt, prefixes = tokens[start : trained[0]], [(0, 0)]
        read = [tokens[begin : targets[-1]] for begin, targets in contexts]
        for index in range(1, len(read)):
            shared = [_common(read[index], earlier) for earlier in read[:index]]
            prefixes.append((shared.index(max(shared)), max(shared)))
        num_rows = sum(map(len, read)) - sum(num_shared for _, num_shared in prefixes)
        return cls(sequence, contexts, (sequence.key[0], prompt.tobytes()), len(prompt), prefixes, num_rows)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of tokens up to the first in which they differ."""
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _atom(members: Sequence[Reading]) -> Atom:
    prompts = {one.prompt: one.num_prompt for one in members}
    num_rows = sum(prompts.values()) + sum(one.num_rows - one.num_prompt for one in members)
    shared, num_prompt = next(iter(prompts.items()))
    key = members[0].sequence.key
    if len(prompts) > 1:
        shared, num_prompt = (key[0], b""), 0  # nothing that a sibling could share as a whole
    return Atom(key=key, prompt=shared, num_prompt=num_prompt, num_own=num_rows - num_prompt)


def _pack(readings: Sequence[Reading]) -> PackedMicrobatch:
    sequences = [one.sequence for one in readings]
    optional = _optional_of(sequences)
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    routes: list[np.ndarray] = []
    rows: list[np.ndarray] = []  # of each context, and so below
    target_index: list[np.ndarray] = []
    prompt_rows: dict[tuple[int, bytes], np.ndarray] = {}
    num_rows = 0
    for one in readings:
        first_of_sequence = len(rows)
        for (start, trained), (twin, num_shared) in zip(one.contexts, one.prefixes, strict=True):
            if len(rows) > first_of_sequence:
                known = rows[first_of_sequence + twin][:num_shared]
            else:
                known = prompt_rows.get(one.prompt, _NO_ROWS)
            first, length = len(known), int(trained[-1]) - start  # the first token that has no row yet
            added = np.arange(num_rows, num_rows + length - first, dtype=np.int64)
            rows.append(np.concatenate([known, added]) if first else added)
            tokens.append(one.sequence.tokens[start + first : start + length])
            if one.sequence.routes is not None:
                routes.append(one.sequence.routes[start + first : start + length])
            positions.append(np.arange(first, length, dtype=np.int64))
            target_index.append(rows[-1][trained - start - 1])
            num_rows += len(added)
        prompt_rows.setdefault(one.prompt, rows[first_of_sequence][: one.num_prompt])
    targets = [np.concatenate([trained for _, trained in one.contexts]) for one in readings]

    def of_targets(name: str, dtype: type) -> np.ndarray:
        columns = [vars(sequence)[name][index] for sequence, index in zip(sequences, targets, strict=True)]
        return np.concatenate(columns).astype(dtype)

    return PackedMicrobatch(
        tokens=np.concatenate(tokens).astype(np.int64),
        positions=np.concatenate(positions),
        lengths=tuple(map(len, rows)),
        rows=np.concatenate(rows),
        target_index=np.concatenate(target_index),
        targets=of_targets("tokens", np.int64),
        behaviour_logprobs=of_targets("behaviour_logprobs", np.float32),
        advantages=of_targets("advantages", np.float32),
        versions=of_targets("versions", np.int64),
        segment_ids=np.repeat(np.arange(len(sequences), dtype=np.int64), list(map(len, targets))),
        keys=tuple(sequence.key for sequence in sequences),
        kept_tokens=_joined(sequences, "kept_tokens", np.int64),
        kept_counts=of_targets("kept_counts", np.int64) if "kept_counts" in optional else None,
        teacher_tokens=_joined(sequences, "teacher_tokens", np.int64),
        teacher_logprobs=_joined(sequences, "teacher_logprobs", np.float32),
        routes=np.concatenate(routes) if routes else None,
        **{name: of_targets(name, np.float32) for name in OPTIONAL_COLUMNS if name in optional},
    )


def _joined(sequences: Sequence[TrainSequence], name: str, dtype: type) -> np.ndarray | None:
    """Return the columns `name`, which each sequence has for its targets alone, one behind the other; None without."""
    columns = [column for sequence in sequences if (column := vars(sequence)[name]) is not None]
    return np.concatenate(columns).astype(dtype) if columns else None


def _optional_of(sequences: Sequence[TrainSequence]) -> tuple[str, ...]:
    """Return the names of the optional columns that the sequences carry: all of them the same ones."""
    names = (*OPTIONAL_COLUMNS, "kept_tokens", "kept_counts", "teacher_tokens", "teacher_logprobs", "routes")
    carried = {tuple(name for name in names if vars(sequence)[name] is not None) for sequence in sequences}
    if len(carried) > 1:
        raise ShapeError("sequences of a batch carry different columns", got=" and ".join(map(str, sorted(carried))))
    return carried.pop()


def padding_frac(microbatches: Sequence[PackedMicrobatch]) -> float:
    """Return the share of padding if all microbatches were filled up to the fullest (greedy packing keeps it small).

    Sizes are rows really read, so a shared prompt counts once per microbatch. Nothing is really padded; it is the idle
    share of ranks that run one microbatch each. One microbatch gives 0.
    """
    sizes = [microbatch.num_tokens for microbatch in microbatches]
    return 1.0 - sum(sizes) / (len(sizes) * max(sizes)) if sizes else 0.0


def padded_layout_frac(microbatches: Sequence[PackedMicrobatch]) -> float:
    """Return the share of padding in the rectangular layout [contexts, longest] of the same microbatches.

    Packing saves it. Every context counts with its own copy of the prompt, as in that layout; sharing saves more.
    """
    slots = sum(len(microbatch.lengths) * max(microbatch.lengths) for microbatch in microbatches)
    return 1.0 - sum(sum(microbatch.lengths) for microbatch in microbatches) / slots if slots else 0.0
