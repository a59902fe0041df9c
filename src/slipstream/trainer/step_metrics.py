"""The metrics of a training step, over all its updates and all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import chain, zip_longest

import msgspec
import numpy as np
import torch

from slipstream.algorithms.reduce import Metrics, decode_metrics, encode_metrics, merge_metrics, metric_values
from slipstream.core.packed import PackedMicrobatch
from slipstream.core.rank_group import RankGroup
from slipstream.core.staleness import staleness_in_updates
from slipstream.core.types import Group, RolloutHead
from slipstream.trainer.measure import StepContext
from slipstream.trainer.metric_names import count_tokens, published_names
from slipstream.trainer.optim import AdamW
from slipstream.trainer.update import Made, PlannedUpdate


def training_metrics(made: Sequence[Made], optimizer: AdamW, step: StepContext) -> dict[str, float]:
    """Return the losses' metrics over all ranks' microbatches, means over the updates, and how they were packed."""
    config, ranks = step.config, step.ranks
    own: Metrics = reduce(merge_metrics, (one.metrics for one in made)) if made else {}
    of_all = reduce(merge_metrics, (decode_metrics(part) for part in ranks.gather(encode_metrics(own))))
    norms = [one.critic_grad_norm for one in made if one.critic_grad_norm is not None]
    staleness = max((_staleness_in_updates(one.update, step) for one in made), default=0)
    first_pass = [one.update.microbatches for one in made if one.update.index < config.trainer.minibatches]
    return {
        **metric_values(of_all),
        "loss": _mean([one.loss for one in made]),
        "grad_norm": _mean([one.grad_norm for one in made]),
        **({"critic_grad_norm": _mean(norms)} if config.has_critic else {}),
        "lr": made[-1].lr if made else optimizer.lr,
        "num_updates": float(len(made)),
        "staleness_updates_max": float(ranks.max(torch.tensor(staleness))),
        **_packing_metrics([microbatch for microbatches in first_pass for microbatch in microbatches], step),
        "rank_wait_frac": rank_wait_frac([[one.num_tokens for one in part] for part in first_pass], ranks),
    }


def _packing_metrics(microbatches: Sequence[PackedMicrobatch], step: StepContext) -> dict[str, float]:
    """Return how the first pass was packed, over all ranks."""
    batching = step.batching
    own = [
        sum(microbatch.num_targets for microbatch in microbatches),
        sum(microbatch.num_tokens for microbatch in microbatches),
        sum(sum(microbatch.lengths) for microbatch in microbatches),
        len(microbatches),
        len(microbatches) * batching.padding_frac(microbatches),
        len(microbatches) * batching.padded_layout_frac(microbatches),
    ]
    trained, read, unshared, count, padding, layout = step.ranks.sum(torch.tensor(own, dtype=torch.float64)).tolist()
    return {
        "tokens_trained": trained,
        "tokens_read": read,
        "tokens_unshared": unshared,
        "num_microbatches": count,
        "padding_frac": padding / max(count, 1.0),
        "padded_layout_frac": layout / max(count, 1.0),
    }


def rank_wait_frac(rows: Sequence[Sequence[int]], ranks: RankGroup) -> float:
    """Return the share of the ranks' time in which they wait for one another, if a row always takes as long.

    `rows` are those of this rank's microbatches, by update. Ranks meet in the n-th microbatch of an update, as layers
    are gathered there or gradients added up; one that has none left waits, too.
    """
    of_ranks = [
        msgspec.msgpack.decode(part, type=list[list[int]]) for part in ranks.gather(msgspec.msgpack.encode(rows))
    ]
    longest = sum(
        max(meeting) for update in zip(*of_ranks, strict=True) for meeting in zip_longest(*update, fillvalue=0)
    )
    return 1.0 - sum(map(sum, chain(*of_ranks))) / (ranks.world * longest) if longest else 0.0


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _staleness_in_updates(update: PlannedUpdate, step: StepContext) -> int:
    """Return how many updates lie between the oldest token of an update and the update itself."""
    staleness = np.concatenate([[0], *(step.number - microbatch.versions for microbatch in update.microbatches)])
    per_step = step.config.updates_per_step
    return int(staleness_in_updates(staleness, updates_per_step=per_step, update_in_step=update.index).max())


def episode_metrics(heads: Iterable[RolloutHead]) -> dict[str, float]:
    """Return what became of the episodes among `heads`, over all of them; nothing where there is none."""
    told = [(head, head.episode) for head in heads if head.episode is not None]
    if not told:
        return {}
    episodes = [episode for _, episode in told]
    num_tokens = sum(head.num_tokens for head, _ in told)
    return {
        "episode/turns_mean": _mean([one.turns for one in episodes]),
        "episode/turns_max": float(max(one.turns for one in episodes)),
        "episode/cut_frac": _mean([one.is_cut for one in episodes]),
        "episode/given_frac": 1.0 - sum(head.num_sampled for head, _ in told) / num_tokens if num_tokens else 0.0,
        "episode/forks": _mean([one.branches - 1 for one in episodes]),
        "episode/tool_calls_mean": _mean([one.tool_calls for one in episodes]),
        "episode/tool_errors_mean": _mean([one.tool_errors for one in episodes]),
        "episode/restarts_mean": _mean([one.restarts for one in episodes]),
        "episode/environment_s_mean": _mean([one.environment_s for one in episodes]),
        "episode/environment_s_max": max(one.environment_s for one in episodes),
    }


def published_metrics(
    metrics: dict[str, float], groups: Sequence[Group], eos_token_ids: Iterable[int], step: StepContext
) -> dict[str, float]:
    """Return the metrics of a run with a critic under the names that PPO's implementations publish."""
    config = step.config
    return published_names(
        metrics,
        value_coef=config.critic.coef,
        step=step.number,
        num_episodes=(step.number + 1) * config.completions_per_step,
        max_new_tokens=config.longest_completion,
        num_eos_tokens=int(step.ranks.sum(torch.tensor(count_tokens(groups, eos_token_ids)))),
    )
