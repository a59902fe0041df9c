"""Batch -> minibatches -> microbatches, and greedy collation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.batching.balance import balanced_permutation as balanced_permutation
from slipstream.batching.prefix_tree import PrefixForest, Stretch
from slipstream.core.errors import ConfigError, ShapeError
from slipstream.core.packed import OPTIONAL_COLUMNS, AnyGroup, PackedMicrobatch, TrainSequence


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
    """A sequence, or several (a pair), that collation never splits.

    `parts` are the stretches of rows that it reads, each once, and the number of their rows: (name, rows), the shared
    ones in front of those behind them. Atoms with a part of the same name share its rows in a microbatch.
    """

    key: tuple[int, int]
    parts: tuple[tuple[Hashable, int], ...]

    @property
    def num_rows(self) -> int:
        """The rows that it reads where nothing is shared."""
        return sum(rows for _, rows in self.parts)


def first_fit(atoms: Sequence[Atom], capacity_tokens: int) -> list[list[int]]:
    """Indices of atoms per microbatch: longest first, what shares rows behind it, each where it first fits.

    Magistral's greedy collation, where capacity counts the rows that are really read: an atom goes to the microbatch
    that reads most of its rows already and has room for the rest, else to the first with room for all of it, else to a
    new one. Atoms come in the order of the tree that their parts make, the branch with the longest atom first, so that
    few microbatches read the same rows. Ties in length go by key, so the result does not depend on the order of the
    input. An atom longer than the capacity gets a microbatch of its own: atoms are never split. Identity: without
    shared parts, plain first-fit decreasing.
    """
    sizes = [(-atom.num_rows, atom.key) for atom in atoms]
    longest: dict[Hashable, tuple[int, tuple[int, int]]] = {}  # of the atoms with a part
    for atom, size in zip(atoms, sizes, strict=True):
        for name, _ in atom.parts:
            longest[name] = min(size, longest.get(name, size))
    order = [(*(longest[name] for name, _ in atom.parts), size) for atom, size in zip(atoms, sizes, strict=True)]
    bins: list[list[int]] = []
    room: list[int] = []
    holding: dict[Hashable, list[int]] = {}  # microbatches that read a part
    for index in sorted(range(len(atoms)), key=order.__getitem__):
        parts, num_rows = atoms[index].parts, -sizes[index][0]
        shared = Counter[int]()
        for name, rows in parts:
            for place in holding.get(name, ()):
                shared[place] += rows
        chosen = next((place for place, known in shared.most_common() if room[place] >= num_rows - known), None)
        if chosen is None:
            chosen = next((place for place, free in enumerate(room) if free >= num_rows), None)
        if chosen is None:
            chosen = len(bins)
            bins.append([])
            room.append(capacity_tokens)
        bins[chosen].append(index)
        room[chosen] -= num_rows - shared[chosen]
        for name, _ in parts:
            if chosen not in (places := holding.setdefault(name, [])):
                places.append(chosen)
    return bins


def collate(sequences: Sequence[TrainSequence], capacity_tokens: int, *, atom_size: int = 1) -> list[PackedMicrobatch]:
    """Pack sequences into microbatches of at most `capacity_tokens` rows; what begins alike is read once in each.

    Every `atom_size` sequences in the order given stay together, side by side in that order. Those in which a sequence
    has no token to train on are left out: they would add nothing to any loss. An episode with branches is a sequence of
    several contexts: all of them go where it goes. The contexts of one ordinal share the rows of the tokens that they
    begin with alike, those of two ordinals none. Sequences that replay the engine's experts share their prompt, and
    behind it the rows with the same experts.
    Identity: logprobs, losses and gradients are those of every context of every sequence read alone.
    """
    if len(sequences) % atom_size:
        raise ShapeError("sequences do not fill whole atoms", got=len(sequences), allowed=f"a multiple of {atom_size}")
    forest = PrefixForest()
    whole = [sequences[start : start + atom_size] for start in range(0, len(sequences), atom_size)]
    contexts = [[one.contexts for one in members] for members in whole]
    trained = [
        [Reading.of(one, parts, forest) for one, parts in zip(members, found, strict=True)]
        for members, found in zip(whole, contexts, strict=True)
        if all(found)
    ]
    atoms = [_atom(members) for members in trained]
    return [_pack([one for index in chosen for one in trained[index]]) for chosen in first_fit(atoms, capacity_tokens)]


@dataclass(frozen=True)
class Reading:
    """A sequence as the model reads it: its contexts that have targets, and the stretch with which each ends."""

    sequence: TrainSequence
    contexts: list[tuple[int, np.ndarray]]
    ends: list[Stretch]

    @classmethod
    def of(cls, sequence: TrainSequence, contexts: list[tuple[int, np.ndarray]], forest: PrefixForest) -> Reading:
        """Put the `contexts` of `sequence` into `forest`."""
        (ordinal, _), ends = sequence.key, []
        for start, targets in contexts:
            read = slice(start, int(targets[-1]))
            tokens, tree, routes, num_alike = sequence.tokens[read], (ordinal, b""), None, 0
            if sequence.routes is not None:  # siblings read their prompt once whatever its experts are
                routes, num_alike = sequence.routes[read], int(targets[0]) - start
                tree = (ordinal, tokens[:num_alike].tobytes())
            ends.append(forest.add(tree, tokens, routes, num_alike))
        return cls(sequence, contexts, ends)


def _atom(members: Sequence[Reading]) -> Atom:
    stretches = dict.fromkeys(stretch for one in members for end in one.ends for stretch in end.path)
    return Atom(members[0].sequence.key, tuple((stretch, len(stretch.tokens)) for stretch in stretches))


def _pack(readings: Sequence[Reading]) -> PackedMicrobatch:
    sequences = [one.sequence for one in readings]
    optional = _optional_of(sequences)
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    routes: list[np.ndarray] = []
    rows: list[np.ndarray] = []  # of each context, and so below
    target_index: list[np.ndarray] = []
    rows_of: dict[Stretch, np.ndarray] = {}
    num_rows = 0
    for one in readings:
        for (start, trained), end in zip(one.contexts, one.ends, strict=True):
            known = [rows_of[stretch] for stretch in end.path if stretch in rows_of]
            first, length = sum(map(len, known)), int(trained[-1]) - start  # the first token that has no row yet
            rows.append(np.concatenate([*known, np.arange(num_rows, num_rows + length - first, dtype=np.int64)]))
            begin = 0
            for stretch in end.path:
                rows_of.setdefault(stretch, rows[-1][begin : begin + len(stretch.tokens)])
                begin += len(stretch.tokens)
            tokens.append(one.sequence.tokens[start + first : start + length])
            if one.sequence.routes is not None:
                routes.append(one.sequence.routes[start + first : start + length])
            positions.append(np.arange(first, length, dtype=np.int64))
            target_index.append(rows[-1][trained - start - 1])
            num_rows += length - first
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

    Sizes are rows really read, so shared ones count once per microbatch. Nothing is really padded; it is the idle
    share of ranks that run one microbatch each. One microbatch gives 0.
    """
    sizes = [microbatch.num_tokens for microbatch in microbatches]
    return 1.0 - sum(sizes) / (len(sizes) * max(sizes)) if sizes else 0.0


def padded_layout_frac(microbatches: Sequence[PackedMicrobatch]) -> float:
    """Return the share of padding in the rectangular layout [contexts, longest] of the same microbatches.

    Packing saves it. Every context counts with its own copy of what it shares, as in that layout; sharing saves more.
    """
    slots = sum(len(microbatch.lengths) * max(microbatch.lengths) for microbatch in microbatches)
    return 1.0 - sum(sum(microbatch.lengths) for microbatch in microbatches) / slots if slots else 0.0
