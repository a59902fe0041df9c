"""Why an update was refused: which term was not finite, on which rollouts, in which parameters; for a bug report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from slipstream.algorithms.losses import LossInputs
from slipstream.core.disk import replace_file
from slipstream.core.errors import NonFiniteError
from slipstream.core.jsonl import finite
from slipstream.core.packed import PackedMicrobatch
from slipstream.core.rank_group import RankGroup
from slipstream.core.types import Group, Rollout, RolloutHead
from slipstream.trainer.measure import Key
from slipstream.trainer.optim import MAX_NAMED, named


class Finding(msgspec.Struct, frozen=True):
    """Tokens of `rollouts`, (ordinal, sample) each, have a `term` that is NaN or inf."""

    term: str
    rollouts: list[Key]


def findings(microbatch: PackedMicrobatch, inputs: LossInputs, **more: Tensor) -> list[Finding]:
    """Every input of the loss, and each of `more` [T], that is not finite somewhere, with the rollouts it is so on.

    In the order in which one makes the other: what came with the rollouts, what was measured on them, what the policy
    says now. Where all of them are finite, the loss itself overflowed.
    """
    columns = {
        "behaviour logprob": inputs.behaviour_logprobs,
        "advantage": inputs.advantages,
        "reference logprob": inputs.reference_logprobs,
        "teacher divergence": inputs.teacher_divergences,
        "proximal logprob": inputs.proximal_logprobs,
        "policy logprob": inputs.policy_logprobs,
        **more,
    }
    found = []
    for term, column in columns.items():
        if column is None or not column.numel():
            continue
        bad = inputs.segment_ids[~torch.isfinite(column.detach())]
        if bad.numel():
            found.append(Finding(term, [microbatch.keys[index] for index in torch.unique(bad).tolist()]))
    return found or [Finding("loss of finite terms", [(int(o), int(s)) for o, s in microbatch.keys])]


def located(
    error: NonFiniteError,
    *,
    step: int,
    update: int,
    num_minibatches: int,
    lr: float,
    own: Iterable[Key],
    ranks: RankGroup,
) -> NonFiniteError:
    """`error` with its place: update `update` of `step`, and the rollouts of that update on all `ranks`.

    All ranks come here with an error of the same update; the one that each returns says the same.
    """
    epoch, minibatch = divmod(update, num_minibatches)
    mine = {"findings": error.report.get("findings", []), "rollouts": [list(key) for key in own]}
    parts = [msgspec.msgpack.decode(part) for part in ranks.gather(msgspec.msgpack.encode(mine))]
    by_term: dict[str, list[Any]] = {}
    for finding in (finding for part in parts for finding in part["findings"]):
        by_term.setdefault(finding["term"], []).extend(finding["rollouts"])
    if set(by_term) > {"loss of finite terms"}:
        by_term.pop("loss of finite terms", None)  # of another rank, whose own part is
    rollouts = sorted(key for part in parts for key in part["rollouts"])
    report = {
        **error.report,
        "step": step,
        "epoch": epoch,
        "minibatch": minibatch,
        "update": update,
        "lr": lr,
        "findings": [{"term": term, "rollouts": sorted(keys)} for term, keys in by_term.items()],
        "rollouts": rollouts,
    }
    suspects = [f"{term} of {named(map(_in_words, sorted(keys)))}" for term, keys in by_term.items()]
    where = "; ".join(suspects) or f"one of {len(rollouts)} rollouts: {named(map(_in_words, rollouts))}"
    return NonFiniteError(
        f"step {step}, epoch {epoch}, minibatch {minibatch}: {error.what}",
        got=f"{error.got}; {where} (ordinal/sample)",
        hint=error.hint,
        report=report,
    )


def _in_words(key: Sequence[int]) -> str:
    return f"{key[0]}/{key[1]}"


def write_report(error: NonFiniteError, groups: Sequence[Group], heads: Sequence[RolloutHead], path: Path) -> None:
    """All that is known of the refused update, as JSON: the error's report, the heads of the step's rollouts, and the
    tokens and logprobs of those that the report names, as far as they are among `groups`. NaN and inf are null.
    """
    wanted = {tuple(key) for finding in error.report.get("findings", []) for key in finding["rollouts"]}
    suspects = [
        rollout for group in groups for rollout in group.rollouts if (rollout.ordinal, rollout.sample) in wanted
    ]
    content = {
        "error": str(error),
        **error.report,
        "heads": [msgspec.to_builtins(head) for head in heads],
        "suspects": [_in_full(rollout) for rollout in suspects[:MAX_NAMED]],
    }
    replace_file(path, msgspec.json.format(msgspec.json.encode(finite(content)), indent=1))


def _in_full(rollout: Rollout) -> dict[str, Any]:
    completion = rollout.completion
    return {
        "ordinal": rollout.ordinal,
        "sample": rollout.sample,
        "reward": rollout.reward,
        "prompt_id": completion.prompt.prompt_id,
        "prompt_tokens": completion.prompt.tokens.tolist(),
        "segments": [
            {
                "tokens": segment.tokens.tolist(),
                "begins": segment.begins,
                "behaviour_logprobs": None
                if segment.behaviour_logprobs is None
                else segment.behaviour_logprobs.tolist(),
                "version_spans": [(span.start, span.version) for span in segment.version_spans],
            }
            for segment in completion.segments
        ],
    }
