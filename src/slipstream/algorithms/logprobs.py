"""Log-probabilities of chosen tokens, and the entropy of the distributions they were chosen from.

Generator and trainer both get theirs here, so that a difference between them is a difference of weights or of
attention, never of the last softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.core.errors import ShapeError


class Decoder(Protocol):
    """A model as this module needs it: packed tokens to hidden states, hidden states to logits."""

    def __call__(self, tokens: Tensor, positions: Tensor, attention: Any) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def parameters(self) -> Iterator[Any]: ...


class _LogprobsAndEntropy(torch.autograd.Function):
    """One pass over the logits forward, one backward; keeps the probabilities, not the logits.

    d logp_t / d z_j = [j = y_t] - p_j,   d H / d z_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        scaled = logits.float()
        if temperature != 1.0:
            scaled = scaled / temperature
        largest = scaled.amax(dim=-1, keepdim=True)
        probs = (scaled - largest).exp_()
        total = probs.sum(dim=-1, keepdim=True)
        probs /= total
        log_normaliser = largest + total.log()
        logprobs = (scaled.gather(-1, targets.unsqueeze(-1)) - log_normaliser).squeeze(-1)
        entropy = log_normaliser.squeeze(-1) - torch.linalg.vecdot(probs, scaled)
        ctx.save_for_backward(probs, targets, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        logprobs_grad, entropy_grad = grads
        probs, targets, entropy = ctx.saved_tensors
        grad: Tensor | None = None
        if logprobs_grad is not None:
            scaled_grad = (logprobs_grad / ctx.temperature).unsqueeze(-1)
            grad = probs * -scaled_grad
            grad.scatter_add_(-1, targets.unsqueeze(-1), scaled_grad)
        if entropy_grad is not None:
            scaled_grad = (entropy_grad / ctx.temperature).unsqueeze(-1)
            from_entropy = torch.xlogy(probs, probs).addcmul_(probs, entropy.unsqueeze(-1)).mul_(-scaled_grad)
            grad = from_entropy if grad is None else grad.add_(from_entropy)
        return (None if grad is None else grad.to(ctx.dtype)), None, None


def token_logprobs_and_entropy(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and the entropy of its distribution, both float32 [N] and differentiable.

        logp_t = z_{y_t} - logsumexp(z),   H_t = -sum_j p_j log p_j,   z = logits / temperature

    `logits` [N, V] of any float type (computed in float32), `targets` int64 [N]. Nats. An entropy that is not used
    in a loss costs one pass forward and nothing backward.
    Identity: equals log_softmax and gather.
    """
    if logits.shape[:-1] != targets.shape:
        raise ShapeError(
            "one target is needed per row of logits", got=f"{tuple(logits.shape)} and {tuple(targets.shape)}"
        )
    result: tuple[Tensor, Tensor] = _LogprobsAndEntropy.apply(logits, targets, temperature)  # type: ignore[no-untyped-call]
    return result


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each target, float32 [N], in nats.

        logp_t = z_{y_t} - logsumexp(z),   z = logits / temperature

    `logits` [N, V], `targets` int64 [N]. N, section "Policy details": logits are divided by the temperature
    everywhere, so that the ratio to the behaviour policy is 1 at staleness 0.
    """
    return token_logprobs_and_entropy(logits, targets, temperature)[0]


def kept_token_logprobs(logits: Tensor, targets: Tensor, kept: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each target among the tokens it was drawn from, float32 [N], in nats and differentiable.

        logp_t = z_{y_t} - log sum_{j in S_t} exp(z_j),   z = logits / temperature

    `logits` [N, V] of any float type, `targets` int64 [N], `kept` int64 [N, K]: the set S_t of each row, which has its
    target, filled up with -1. DeepSeek-V3.2 (arXiv:2512.02556), "Keep Sampling Mask": where sampling was
    cut, all policies are compared over the sets it left, so that the ratio to the behaviour policy is 1 at staleness 0.
    Identity: equals `token_logprobs` where S_t is the whole vocabulary.
    """
    if not logits.shape[:1] == targets.shape == kept.shape[:1]:
        got = f"{tuple(logits.shape)}, {tuple(targets.shape)} and {tuple(kept.shape)}"
        raise ShapeError("one target and one kept set are needed per row of logits", got=got)
    chosen = torch.cat([targets.unsqueeze(1), kept.clamp(min=0)], dim=1)  # one gather: one gradient of [N, V]
    scaled = logits.gather(1, chosen).float()
    if temperature != 1.0:
        scaled = scaled / temperature
    return scaled[:, 0] - scaled[:, 1:].masked_fill(kept < 0, -torch.inf).logsumexp(dim=1)


@torch.no_grad()
def probe_logprobs(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    """float32 [T - 1]: the model's logprob of each token of one sequence given those before it, at temperature 1.

    `tokens` int32 [T]. Trainer and generator compare these after a weight swap: equal weights give equal numbers up to
    rounding, in any engine.
    """
    device = next(iter(model.parameters())).device
    sequence = torch.as_tensor(tokens, dtype=torch.int64, device=device)
    positions = torch.arange(len(sequence) - 1, device=device)
    hidden = model(sequence[:-1], positions, OneSequence())
    logprobs: np.ndarray = token_logprobs(model.logits(hidden), sequence[1:]).cpu().numpy()
    return logprobs


class OneSequence:
    """Causal attention over all rows: q [T, H, D], k and v [T, Hkv, D] -> [T, H, D]; experts as routers choose."""

    def __call__(self, _layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        is_grouped = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=is_grouped)
        return mixed.squeeze(0).transpose(0, 1)

    def route(self, _layer: int, chosen: Tensor) -> Tensor:
        return chosen
