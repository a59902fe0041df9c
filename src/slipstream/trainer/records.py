"""The lines that the trainer writes of its rollouts: `rollouts.jsonl`, and `tokens.jsonl` for a sample of groups."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from torch import Tensor

from slipstream.core.observe_sections import ObserveConfig
from slipstream.core.packed import PackedMicrobatch
from slipstream.core.rank_group import RankGroup
from slipstream.core.run_log import RolloutLine
from slipstream.core.types import Group
from slipstream.models.tokenizer import Tokenizer, TokenTexts
from slipstream.observe.recorder import RolloutRecorder, rollout_line
from slipstream.observe.tokens import TOKENS_FILE, TokenLine, TokenRecorder, token_line
from slipstream.trainer.measure import Key

Line = TypeVar("Line", RolloutLine, TokenLine)


@dataclass
class TokenSample:
    """Policy logprobs and advantages of the groups whose ordinal is a multiple of `every`; of none if that is 0.

    `trained` maps a completion to both, float32 [T] over its sampled tokens, as they were at its first update.
    """

    every: int
    _taken: dict[Key, tuple[Tensor, np.ndarray]] = field(default_factory=dict)

    @property
    def trained(self) -> dict[Key, tuple[np.ndarray, np.ndarray]]:
        return {key: (one.cpu().numpy().copy(), advantages) for key, (one, advantages) in self._taken.items()}

    def wants(self, ordinal: int) -> bool:
        return self.every > 0 and ordinal % self.every == 0

    def take(self, microbatch: PackedMicrobatch, policy_logprobs: Tensor) -> None:
        """Note what is wanted of a microbatch; `policy_logprobs` are those of its targets [M]."""
        wanted = [
            (index, key) for index, key in enumerate(microbatch.keys) if self.wants(key[0]) and key not in self._taken
        ]
        if not wanted:
            return
        logprobs = policy_logprobs.detach().float()
        for index, key in wanted:
            own = slice(*np.searchsorted(microbatch.segment_ids, [index, index + 1]))
            self._taken[key] = (logprobs[own], microbatch.advantages[own].copy())


class Records:
    """Write the lines of all data-parallel ranks on rank 0, in the order in which one rank would. All ranks call it."""

    def __init__(
        self,
        config: ObserveConfig,
        run_dir: Path,
        tokenizer: Tokenizer,
        *,
        is_leader: bool,
        ranks: RankGroup,
    ) -> None:
        self._ranks, self._texts, self._ends = ranks, TokenTexts(tokenizer), ExitStack()
        self._rollouts: RolloutRecorder | None = None
        self._tokens: TokenRecorder | None = None
        if is_leader:
            self._rollouts = self._ends.enter_context(closing(RolloutRecorder(run_dir / "rollouts.jsonl")))
            every, max_bytes = config.tokens_every, config.tokens_mb * 1_000_000
            if every:
                recorder = TokenRecorder(run_dir / TOKENS_FILE, every=every, max_bytes=max_bytes)
                self._tokens = self._ends.enter_context(closing(recorder))

    def write(self, groups: Sequence[Group], *, step: int | None) -> None:
        """Write the rollouts of whole groups: `step` has trained on them, or (None) they were dropped."""
        lines = self._gathered([rollout_line(rollout) for group in groups for rollout in group.rollouts], RolloutLine)
        if self._rollouts is not None:
            self._rollouts.record(lines, step=step)

    def write_tokens(self, groups: Sequence[Group], sample: TokenSample, *, step: int) -> None:
        """Write the tokens of the groups that `sample` wants; a rollout that was emptied has none."""
        trained = sample.trained
        own = [
            token_line(one.completion, trained.get((one.ordinal, one.sample)), step=step, texts=self._texts)
            for group in groups
            if sample.wants(group.ordinal)
            for one in group.rollouts
            if one.completion.num_tokens
        ]
        lines = self._gathered(own, TokenLine)
        if self._tokens is not None:
            self._tokens.record(lines)

    def _gathered(self, lines: list[Line], kind: type[Line]) -> list[Line]:
        if self._ranks.world == 1:
            return lines
        parts = self._ranks.gather(msgspec.msgpack.encode(lines))
        return [line for part in parts for line in msgspec.msgpack.decode(part, type=list[kind])]  # type: ignore[valid-type]

    def sync(self) -> None:
        """Return once every line of rollouts is on the disk."""
        if self._rollouts is not None:
            self._rollouts.sync()

    def close(self) -> None:
        self._ends.close()
