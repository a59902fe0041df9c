"""The messages between processes that do one thing together: ranks of a group, hosts, the ends of weight sync.

Frozen structs, as those of `core/types.py`. No schedule and no algorithm looks at them.
"""

from __future__ import annotations

import numpy as np

from slipstream.core.types import Group, Message, RolloutHead

# Between the ranks of a trainer


class Arrived(Message):
    """A data-parallel rank has these rollouts; rank 0 may count on them from now on."""

    heads: tuple[RolloutHead, ...]


class Shares(Message):
    """The part of a step's groups that a data-parallel rank was dealt, for its tensor-parallel peers."""

    groups: tuple[Group, ...]


# Between the ranks that hold one copy of a model that scores


class ReadTogether(Message):
    """The rollouts sent before, so many since the last of these, are the batch that all ranks of the copy read now."""

    num_rollouts: int


class Readings(Message):
    """The numbers that a data-parallel rank has read, in the order of its microbatches."""

    arrays: tuple[np.ndarray, ...]


# Between the trainer and a critic with an executor of its own


class CriticStart(Message):
    """The policy that the critic starts from, which the warm start has made, lies in folder `path`."""

    path: str


class CriticSequence(Message):
    """A sequence of a step's batch: tokens int32 [T], `mask` bool [T] on targets, the offsets where contexts start."""

    ordinal: int
    sample: int
    tokens: np.ndarray
    mask: np.ndarray
    starts: tuple[int, ...]


class CriticSequences(Message):
    """The sequences of a data-parallel rank of the trainer, on their way to its rank 0."""

    sequences: tuple[CriticSequence, ...]


class ValuesWanted(Message):
    """The sequences sent before, so many since the last of these, are the batch of `step`: tell their values."""

    step: int
    num_sequences: int


class TargetNumbers(Message):
    """One number for each target of some sequences, sequence after sequence: values, or the returns of an update."""

    keys: np.ndarray  # int64 [S, 2]: ordinal, sample
    counts: np.ndarray  # int64 [S]: targets of each
    numbers: np.ndarray  # float32 [sum of counts]


class ValuesRead(Message):
    """The numbers sent before are the values of all of the batch of `step`, before its first update."""

    step: int


class CriticUpdate(Message):
    """The returns sent before are those of update `index` of `step`: train on their sequences."""

    step: int
    index: int


class CriticUpdated(Message):
    """The critic has made this update: gradient norm before clipping, and metrics of the loss.

    With a `failure` it changed nothing: a loss or gradient was not finite, for the reason that it gives.
    """

    step: int
    index: int
    metrics: np.ndarray  # uint8: the bytes of `encode_metrics`
    grad_norm: float = 0.0
    failure: str = ""


class CriticCheckpoint(Message):
    """Save critic and optimizer, as they are after the updates of all steps before `step`, as checkpoint `path`."""

    step: int
    path: str


class CriticSaved(Message):
    """The checkpoint of a `CriticCheckpoint` is whole and on disk."""

    step: int


# Between the ranks of a generator's replica


class Wake(Message):
    """Rank 0 calls the others, who sleep, to a step: all have staged a version."""


class EnvironmentsLost(Message):
    """Rank 0 tells the others, in step, that the environments' process restarted: episodes begin again."""


class Staged(Message):
    """A rank without work says which version it holds ready to commit, since the replica's step `after_round`."""

    rank: int
    version: int | None
    after_round: int


# Hosts -> controller


class Joined(Message):
    """The process of `executor` is there for the `incarnation`-th time and knows its peers."""

    executor: str
    incarnation: int


class Leaving(Message):
    """A scheduler has told the group of `executor`, which is on another machine, to end: it does so within a while."""

    executor: str


class Left(Message):
    """The process of `executor` has done what it was told to, and ends: its last word."""

    executor: str


# Controller -> hosts; no executor sees these


class PeerJoined(Message):
    """`executor` listens at new addresses, with a higher incarnation than before."""

    executor: str
    incarnation: int


class PeerLost(Message):
    """`executor` is shut out: of it and its earlier incarnations nothing is taken any more."""

    executor: str
    incarnation: int


class Peers(Message):
    """The changes of peers, in the order in which they came.

    `member`: for that process alone, by its number in the pipeline, because it is no news to others; -1: for all.
    """

    changes: tuple[PeerJoined | PeerLost, ...]
    member: int = -1


class Failed(Message):
    """The executor cannot go on: its `error`, for the user. Its log has the traceback.

    `may_follow`: it may be the consequence of another process's end, which is then to be told instead.
    """

    executor: str
    error: str
    may_follow: bool = False


# Weight sync, trainer <-> generators


class Holding(Message):
    """The layout of a rank's bytes of a version: parts of tensors (boxes), and where their elements lie.

    Tensors are those of the Hugging Face checkpoint; the scales of a quantised one's rows or columns are a tensor
    '<name>/scales'. Box n is of tensor `tensor[n]`: start[n] <= index < stop[n]. Its first element lies at byte
    `offset[n]`, and `strides[n]` bytes are between neighbours. D: the most dimensions of a tensor; those with fewer
    have further ones of size 1. N boxes do not overlap in the bytes.

    `base`: the digest of frozen weights that these bytes are beside, which both ends must have alike; '' without any.
    """

    num_bytes: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]  # torch's names: 'float32', 'int8'
    item_bytes: tuple[int, ...]
    tensor: np.ndarray  # int32 [N]
    start: np.ndarray  # int64 [N, D]
    stop: np.ndarray  # int64 [N, D]
    offset: np.ndarray  # int64 [N]
    strides: np.ndarray  # int64 [N, D]
    base: str = ""


class WeightsOffered(Message):
    """Version `version` lies complete in slot `slot` of every one of `segments`, one of each rank of the trainer.

    `checksums` cover the checksums of their blocks. `probe_logprobs` are the trainer's logprobs of the probe text under
    these weights; a generator that cannot reproduce them refuses the version. `replica`: for this one; -1: for all.
    """

    version: int
    slot: int
    segments: tuple[str, ...]
    checksums: tuple[int, ...]
    probe_tokens: np.ndarray  # int32 [Tprobe]
    probe_logprobs: np.ndarray  # float32 [Tprobe - 1]
    replica: int = -1


class WeightsReleased(Message):
    """Rank `rank` of replica `replica` will not read slot `slot` for `version` again."""

    replica: int
    version: int
    slot: int
    rank: int = 0


class WeightsWanted(Message):
    """Rank `rank` of the `world` of replica `replica` wants versions from now on: it is new, or has lost its link.

    `is_linked`: over a point-to-point link; else it reads the segments itself. What was offered last is offered to it
    again, once all ranks of a new replica have asked, or one has lost link `lost_epoch` (0: it is new), which others
    may still have. `host`: the machine it runs on. `in_host_memory`: nothing of that, but it cannot read the trainer's
    GPU memory, and waits for versions in host memory. `holds_slots`: it uses versions where they lie, instead of
    copying them one at a time.
    """

    replica: int
    rank: int
    world: int
    is_linked: bool
    host: str = ""
    in_host_memory: bool = False
    holds_slots: bool = False
    lost_epoch: int = 0


class WeightsLinked(Message):
    """The `sources` ranks of `parent` and the `world` of `replica` are to make link `epoch`, in place of others.

    `parent`: a replica that hands on what it gets; -1: the trainer. `is_renewed`: what was offered to `replica` before
    this is void, and its last version is offered again.
    """

    replica: int
    world: int
    sources: int
    epoch: int
    parent: int = -1
    is_renewed: bool = False


class LinkMember(Message):
    """A rank of a link, as it tells the others: the layout of its bytes, and where it runs."""

    holding: Holding
    host: str = ""
    device: str = ""
