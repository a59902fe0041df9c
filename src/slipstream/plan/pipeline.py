"""A model in pipeline stages: the layers of each, the share of a step that they wait, and what they keep meanwhile.

Megatron-LM (arXiv:2104.04473), section 2.2. With 1F1B every stage alternates between a forward and a backward pass once
the pipeline is full. Interleaved, a stage has `chunks` parts of the model that do not follow each other: it waits less,
sends more often, and keeps more.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_STAGES = 16
"""Stages that are tried, at most."""


@dataclass(frozen=True)
class PlannedStage:
    """So many layers; the first stage has the embedding, too, and the last one the final norm and the head."""

    layers: int
    is_first: bool
    is_last: bool


def stage_ends(layers: int, stages: int, chunks: int = 1) -> tuple[PlannedStage, ...]:
    """Return the first and the last of `stages`, or the only one: those between have no more than the first.

    The model is cut into stages x chunks parts whose layers differ by at most one, longer ones first, and dealt to the
    stages like cards.
    """
    if stages == 1:
        return (PlannedStage(layers, is_first=True, is_last=True),)
    whole, rest = divmod(layers, stages * chunks)
    first, last = chunks * whole + -(-rest // stages), chunks * whole + rest // stages
    return PlannedStage(first, is_first=True, is_last=False), PlannedStage(last, is_first=False, is_last=True)


def middle_stages(layers: int, stages: int, chunks: int = 1) -> int:
    """Return the layers of all stages between the first and the last."""
    return layers - sum(stage.layers for stage in stage_ends(layers, stages, chunks))


def in_flight(stages: int, microbatches: int, chunks: int = 1, *, is_last: bool = False) -> float:
    """Return the microbatches whose activations a stage keeps at most, the first one unless `is_last`.

    P and 1 with 1F1B; interleaved 2 (P - 1) + (V - 1) P + 1 and (V - 1) P + 1 chunks, of which a microbatch has V
    (arXiv:2205.05198, section 4.2.3: 1 + (P - 1) / (P V) times as many as without).
    """
    if chunks == 1:
        return min(microbatches, 1 if is_last else stages)
    begun = (0 if is_last else 2 * (stages - 1)) + (chunks - 1) * stages + 1
    return min(chunks * microbatches, begun) / chunks
