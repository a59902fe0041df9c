"""Logprobs and entropies of a microbatch under a model, in chunks that bound the logits held at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.algorithms.logprobs import kept_token_logprobs, token_logprobs_and_entropy
from slipstream.core.packed import PackedMicrobatch
from slipstream.models.packed import at_targets
from slipstream.models.transformer import Transformer

# Logits held at once, in elements (256 MiB of float32); larger heads run in chunks that are recomputed backward.
MAX_LOGITS = 1 << 26


def microbatch_logprobs(
    model: Transformer, microbatch: PackedMicrobatch, *, temperature: float, states: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the policy's logprobs of the microbatch's targets and its entropies there, float32 [M] each.

    `states` are the final ones at those targets, for a caller who has them. Logits are computed only where a target
    is predicted. Where the microbatch has kept sets, logprobs are those over the sets; entropies never are.
    """
    predicting = at_targets(model, microbatch) if states is None else states
    columns = [predicting, torch.from_numpy(microbatch.targets).to(predicting.device)]
    if (kept_sets := microbatch.kept_sets) is not None:
        columns.append(torch.from_numpy(kept_sets).to(predicting.device))

    def head(rows: Tensor, targets: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits = model.logits(rows)
        logprobs, entropies = token_logprobs_and_entropy(logits, targets, temperature)
        return logprobs if kept is None else kept_token_logprobs(logits, targets, kept, temperature), entropies

    rows_at_once = max(1, MAX_LOGITS // model.config.vocab_size)
    if microbatch.num_targets <= rows_at_once:
        return head(*columns)
    chunks = [
        checkpoint(head, *chunk, use_reentrant=False)
        for chunk in zip(*(torch.split(column, rows_at_once) for column in columns), strict=True)
    ]
    return torch.cat([chunk[0] for chunk in chunks]), torch.cat([chunk[1] for chunk in chunks])
