"""The teacher beside the trainer: how far the policy is from it at each target, and how alike the two are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from slipstream.algorithms.distillation import coarse_logprobs, divergences, likeliest
from slipstream.algorithms.reduce import Metrics, masked_mean
from slipstream.core.config import RunConfig
from slipstream.core.errors import ShapeError
from slipstream.core.packed import PackedMicrobatch, TrainSequence
from slipstream.core.teacher_section import TeacherConfig
from slipstream.core.types import Rollout
from slipstream.models.packed import at_targets
from slipstream.models.tokenizer import Tokenizer, vocabulary_size
from slipstream.models.transformer import Transformer

COMPARED = ("teacher_divergences", "teacher_kl", "teacher_top_k_mass", "teacher_agreement")
"""The columns that `Teacher.compare` gives, in its order."""


@dataclass(frozen=True)
class Teacher:
    """The teacher as a trainer has it: its `model`, or None where rollouts bring what its own executor has read.

    Policy and teacher are compared over the first `num_tokens` ids, which stand for tokens: checkpoints of one family
    have embeddings of other lengths. `policy_temperature` is that of the policy's logprobs.
    """

    settings: TeacherConfig
    num_tokens: int
    policy_temperature: float
    model: Transformer | None = None

    @classmethod
    def of(cls, config: RunConfig, tokenizer: Tokenizer, model: Transformer | None) -> Teacher:
        return cls(config.teacher, vocabulary_size(tokenizer), config.logprob_temperature, model)

    @torch.no_grad()
    def said(self, microbatch: PackedMicrobatch, own: slice | np.ndarray = slice(None)) -> tuple[Tensor, ...]:
        """Return what the teacher has to say at each target: its states [M, hidden], or what rollouts have brought.

        Of the targets `own` of this rank, where several ranks read the microbatch together, as the teacher's model is.
        """
        if self.model is not None:
            return (at_targets(self.model, microbatch),)
        tokens, logprobs = microbatch.teacher_tokens, microbatch.teacher_logprobs
        assert tokens is not None, "a teacher of its own executor, and rollouts without its columns"
        assert logprobs is not None
        return torch.from_numpy(tokens[own]), torch.from_numpy(logprobs[own])

    def compare(self, logits: Tensor, *said: Tensor) -> tuple[Tensor, ...]:
        """Return COMPARED of each row, float32 [N]: the divergence, differentiable in `logits`; without gradient the
        reverse KL, the teacher's probability of the tokens compared one by one, and whether both like one token best.

        `logits` [N, V] are the policy's, `said` these rows of `said(microbatch)`.
        """
        policy_logits = self._scaled(logits, self.policy_temperature)
        tokens, teacher = self._distribution(*said)
        if tokens is None:
            policy, best = policy_logits.log_softmax(dim=-1), teacher.argmax(dim=-1)
            mass = torch.ones_like(teacher[:, 0])
        else:
            policy, mass = coarse_logprobs(policy_logits, tokens), -torch.expm1(teacher[:, -1])
            best = tokens.gather(-1, teacher[:, :-1].argmax(dim=-1, keepdim=True)).squeeze(-1)
        divergence = divergences(policy, teacher, self.settings.alpha)
        with torch.no_grad():
            kl = divergence if self.settings.alpha == 1.0 else divergences(policy, teacher, 1.0)
            agrees = (policy_logits.argmax(dim=-1) == best).float()
        return divergence, kl.detach(), mass, agrees

    def likeliest(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the teacher's `top_k` likeliest tokens at `states` [N, hidden], int64 [N, K] ascending, and their
        logprobs with that of all others behind them, float32 [N, K + 1]."""
        tokens, logprobs = self._distribution(states)
        assert tokens is not None, "an own executor has a top_k"
        return tokens, logprobs

    @torch.no_grad()
    def _distribution(self, *said: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the tokens that are compared one by one (None: all), and the teacher's logprobs."""
        if self.model is None:
            tokens, logprobs = said
            return tokens, logprobs
        temperature, top_k = self.settings.temperature, self.settings.top_k
        logits = self._scaled(self.model.logits(*said), self.policy_temperature if temperature is None else temperature)
        if top_k is None:
            return None, logits.log_softmax(dim=-1)
        tokens = likeliest(logits, top_k)
        return tokens, coarse_logprobs(logits, tokens)

    def _scaled(self, logits: Tensor, temperature: float) -> Tensor:
        logits = logits[:, : self.num_tokens].float()
        return logits if temperature == 1.0 else logits / temperature


def teacher_metrics(columns: dict[str, Tensor], mask: Tensor) -> Metrics:
    """Return the means of COMPARED but for the divergence, which is the loss's own."""
    return {name: masked_mean(columns[name], mask) for name in COMPARED[1:]}


def with_teacher(sequence: TrainSequence, rollout: Rollout, config: RunConfig) -> TrainSequence:
    """Return `sequence` of `rollout` with what its teacher's own executor has read, where the config has one.

    ShapeError where that is not one row for each sampled token.
    """
    if not config.has_own_teacher or not sequence.num_targets:
        return sequence
    tokens, logprobs, top_k = rollout.teacher_tokens, rollout.teacher_logprobs, config.teacher.top_k
    expected = ((sequence.num_targets, top_k), (sequence.num_targets, (top_k or 0) + 1))
    found = None if tokens is None or logprobs is None else (tokens.shape, logprobs.shape)
    if found != expected:
        raise ShapeError(
            "a rollout has to bring what the teacher says at each sampled token (teacher.executor = 'own')",
            got=f"{found} for (ordinal, sample) {sequence.key}",
            allowed=expected,
        )
    return replace(sequence, teacher_tokens=tokens, teacher_logprobs=logprobs)
