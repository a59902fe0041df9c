"""From logits to tokens and the behaviour logprobs of exactly the distribution they were drawn from.

Torch operations only, with shapes that depend on the plan and the batch alone and no look at a value from the host: the
same code runs on a CPU and inside a captured CUDA graph. What the host knows beforehand is in a `SamplingPlan`.
All operations are per row, so a row's bits depend on that row alone, whatever its neighbours ask for. On a GPU
`fused_sampling` draws by kernels where no row of a step is cut: a logprob then differs in its last bits from what it is
beside a row that is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.models.device import power_of_two

BLOCK = 128
"""Tokens of a block of the vocabulary."""
MIN_BLOCKS = 8
"""With fewer blocks than this, reading all of them at once takes less time than choosing one."""
MIN_SPLIT = 8
"""Blocks of fewer tokens are not worth searching for the likeliest ones."""


class SampledTokens(NamedTuple):
    """One token per row, and its logprob under the distribution it was drawn from.

    `kept` has the tokens it was drawn from, ascending and filled up with -1; None where nobody asked for them. It
    holds for rows that are drawn from at most K tokens, which is at least 1 for a row with `keep_sets`.
    """

    tokens: Tensor  # int64 [B]
    logprobs: Tensor  # float32 [B]
    kept: Tensor | None  # int32 [B, K]


@dataclass(frozen=True, eq=False)
class SamplingRows:
    """How each of B rows is sampled (`requests.Request` says what it means); all on the logits' device."""

    temperatures: Tensor  # float32 [B], 0: greedy
    top_k: Tensor  # int64 [B], 0: off
    top_p: Tensor  # float32 [B], 1: off
    min_p: Tensor  # float32 [B], 0: off


@dataclass(frozen=True)
class SamplingPlan:
    """The host's knowledge of the rows before a step: it decides which operations run, and no bit of any row.

    `num_candidates` is the largest top_k, rounded up to a power of 2; 0 where a row that is cut has none, so that the
    whole vocabulary has to be sorted. `num_kept` = K is the number of columns of `SampledTokens.kept`, 0: not reported.
    """

    has_greedy: bool = False
    all_greedy: bool = False
    has_temperature: bool = False  # some temperature is neither 0 nor 1
    truncates: bool = False  # some row is cut
    has_whole: bool = True  # some row is not greedy and not cut
    num_candidates: int = 0
    num_kept: int = 0

    @staticmethod
    def of(
        temperatures: np.ndarray,
        top_k: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        keep_sets: np.ndarray,
        is_open: np.ndarray | None = None,
    ) -> SamplingPlan:
        """The plan for rows with these settings (the arrays of `runner.RowStates`), [B] each.

        Rows where `is_open` bool [B] is False are somebody's padding: they get tokens and logprobs that mean nothing.
        Numbers of tokens are powers of 2, so that few plans serve many settings.
        """
        if is_open is not None:
            temperatures, top_k, top_p, min_p, keep_sets = (
                values[is_open] for values in (temperatures, top_k, top_p, min_p, keep_sets)
            )
        is_greedy = temperatures == 0.0
        is_cut = ~is_greedy & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
        bounds = top_k[is_cut]
        return SamplingPlan(
            has_greedy=bool(is_greedy.any()),
            all_greedy=bool(is_greedy.all()) and len(is_greedy) > 0,
            has_temperature=bool(np.any((temperatures != 1.0) & ~is_greedy)),
            truncates=bool(is_cut.any()),
            has_whole=bool(np.any(~is_greedy & ~is_cut)),
            num_candidates=power_of_two(int(bounds.max())) if len(bounds) and bounds.min() > 0 else 0,
            num_kept=power_of_two(int(top_k[keep_sets].max())) if keep_sets.any() else 0,
        )


def sample_tokens(logits: Tensor, rows: SamplingRows, uniforms: Tensor, plan: SamplingPlan) -> SampledTokens:
    """Draw one token per row by inverse CDF.

        mu = softmax(logits / temperature) cut to the row's set;   token = min { i : sum_{j <= i} mu_j >= u }

    `logits` float32 [B, V]; `uniforms` float64 [B] strictly inside (0, 1), from `noise`, so that a token of probability
    0 is never drawn. The logprob is that of mu. Temperature 0 means the argmax, reported with its logprob at
    temperature 1 over the whole vocabulary.

    The cuts come in the order top_k, top_p, min_p, each on what the one before has left. One order of the tokens
    decides all ties: likelier ones first, then those with the lower id. So at most top_k tokens are kept, and of equals
    at a boundary the ones with the lower ids. The likeliest token always stays, tokens of probability 0 never.

    Rows that are not cut are drawn in two steps, a block of the vocabulary and a token in it, because a running sum
    over all of it takes longer than everything else here. Running sums are float64: float32 would lose the tail.
    Logits that are not finite numbers (-inf excepted) give a logprob that is not finite.
    """
    scaled = logits
    is_greedy = rows.temperatures == 0.0 if plan.has_greedy else None
    if plan.has_temperature:  # dividing by 1 changes no bit, so a batch may skip it as a whole
        temperatures = rows.temperatures
        if is_greedy is not None:
            temperatures = torch.where(is_greedy, 1.0, temperatures)
        scaled = logits / temperatures.unsqueeze(1)
    if not plan.truncates:
        return SampledTokens(*_sample_whole(scaled, uniforms, is_greedy, plan), None)
    tokens, logprobs, kept = _sample_cut(scaled, rows, uniforms, plan)
    if plan.has_whole or is_greedy is not None:
        is_cut = (rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0)
        if is_greedy is not None:
            is_cut &= ~is_greedy
        whole_tokens, whole_logprobs = _sample_whole(scaled, uniforms, is_greedy, plan)
        tokens = torch.where(is_cut, tokens, whole_tokens)
        logprobs = torch.where(is_cut, logprobs, whole_logprobs)
        if kept is not None:
            kept = kept.masked_fill(~is_cut.unsqueeze(1), -1)
    return SampledTokens(tokens, logprobs, kept)


def _sample_whole(
    scaled: Tensor, uniforms: Tensor, is_greedy: Tensor | None, plan: SamplingPlan
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B] and logprobs float32 [B] of rows that are not cut."""
    if scaled.shape[1] < MIN_BLOCKS * BLOCK:
        logs = torch.log_softmax(scaled, dim=-1)
        tokens = _with_greedy(lambda: _inverse_cdf(logs.exp(), uniforms.unsqueeze(1)), scaled, is_greedy, plan)
        return tokens.squeeze(1), logs.gather(1, tokens).squeeze(1)
    probs = torch.softmax(scaled, dim=-1)
    cumulative = F.pad(_per_block(probs, torch.sum).cumsum(-1, dtype=torch.float64), (1, 0))  # of the blocks before
    tokens = _with_greedy(
        lambda: _two_step_inverse_cdf(probs, cumulative, uniforms.unsqueeze(1)), scaled, is_greedy, plan
    )
    logprobs = probs.gather(1, tokens).double().log() - cumulative[:, -1:].log()
    return tokens.squeeze(1), logprobs.squeeze(1).float()


def _with_greedy(draw: Callable[[], Tensor], scaled: Tensor, is_greedy: Tensor | None, plan: SamplingPlan) -> Tensor:
    """int64 [B, 1]: what is drawn, and the argmax in greedy rows."""
    if is_greedy is None:
        return draw()
    largest = _argmax(scaled)
    return largest if plan.all_greedy else torch.where(is_greedy.unsqueeze(1), largest, draw())


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [B, 1]: the first token whose running sum reaches u of the total, never one of weight 0."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, cumulative[:, -1:] * uniforms)
    return tokens.clamp_(max=weights.shape[1] - 1)  # NaN counts past the end; the logprob tells


def _two_step_inverse_cdf(probs: Tensor, cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [B, 1]: a block by its share of the total, then a token of it by what is left of u."""
    targets = cumulative[:, -1:] * uniforms
    after = torch.searchsorted(cumulative, targets).clamp_(1, cumulative.shape[1] - 1)
    before = after - 1
    below = cumulative.gather(1, before)
    share = (targets - below) / (cumulative.gather(1, after) - below)  # in (0, 1]
    ids = _ids_of_blocks(before)
    inside = probs.gather(1, ids.clamp(max=probs.shape[1] - 1))
    if probs.shape[1] % BLOCK:
        inside = inside.masked_fill(ids >= probs.shape[1], 0.0)
    return (before * BLOCK + _inverse_cdf(inside, share)).clamp_(max=probs.shape[1] - 1)


def _argmax(values: Tensor) -> Tensor:
    """int64 [B, 1]: the first largest of each row, or one that is not a number."""
    if values.shape[1] < MIN_BLOCKS * BLOCK:
        return values.argmax(dim=-1, keepdim=True)
    block = _per_block(values, torch.amax).argmax(dim=-1, keepdim=True)
    ids = _ids_of_blocks(block).clamp_(max=values.shape[1] - 1)
    return ids.gather(1, values.gather(1, ids).argmax(dim=-1, keepdim=True))


def _per_block(values: Tensor, reduce: Callable[..., Tensor], size: int = BLOCK) -> Tensor:
    """[B, V] -> [B, ceil(V / size)]: `reduce` over the tokens of each block; the last one may be shorter."""
    whole = values.shape[1] // size * size
    reduced = reduce(torch.unflatten(values[:, :whole], 1, (-1, size)), dim=-1)
    if whole == values.shape[1]:
        return reduced
    return torch.cat([reduced, reduce(values[:, whole:], dim=-1, keepdim=True)], dim=1)


def _ids_of_blocks(blocks: Tensor, size: int = BLOCK) -> Tensor:
    """int64 [B, n] -> [B, n * size]: the tokens of these blocks; those of a short last one go past the vocabulary."""
    return (blocks.unsqueeze(2) * size + torch.arange(size, device=blocks.device)).flatten(1)


def _sample_cut(
    scaled: Tensor, rows: SamplingRows, uniforms: Tensor, plan: SamplingPlan
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens int64 [B], logprobs float32 [B] and kept int32 [B, K] of rows that are cut.

    In the order of the tokens every cut keeps a first part of what it gets, so they come down to one number per row.
    """
    vocab_size = scaled.shape[1]
    values, ids = _likeliest(scaled, plan.num_candidates or vocab_size)
    # The largest logit of the whole row, not of the candidates: what is not a number spreads from it to all weights.
    weights = (values.double() - scaled.amax(dim=-1, keepdim=True).double()).exp()
    ranks = torch.arange(values.shape[1], device=values.device)
    top_k = rows.top_k.unsqueeze(1)
    weights = weights.masked_fill((ranks >= top_k) & (top_k > 0), 0.0)
    cumulative = weights.cumsum(-1)
    top_p = rows.top_p.unsqueeze(1).double()
    is_kept = (cumulative - weights < top_p * cumulative[:, -1:]) | (top_p >= 1.0)
    is_kept &= (weights > 0.0) & (weights >= rows.min_p.unsqueeze(1).double())
    is_kept |= ranks == 0
    num_kept = is_kept.sum(-1, keepdim=True)
    total = cumulative.gather(1, num_kept - 1)
    places = torch.searchsorted(cumulative, total * uniforms.unsqueeze(1)).clamp_(max=values.shape[1] - 1)
    logprobs = weights.gather(1, places).log() - total.log()
    tokens = ids.gather(1, places).clamp_(max=vocab_size - 1)
    kept = None
    if plan.num_kept:
        ids = torch.where(is_kept, ids, vocab_size)[:, : plan.num_kept]
        ids = F.pad(ids, (0, plan.num_kept - ids.shape[1]), value=vocab_size).sort(dim=-1).values
        kept = ids.masked_fill(ids == vocab_size, -1).to(torch.int32)
    return tokens.squeeze(1), logprobs.squeeze(1).float(), kept


def _likeliest(scaled: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Logits float32 and tokens int64 [B, min(num, V)]: the likeliest first, of equals the one with the lower id.

    The first `num` tokens lie in the first `num` blocks, ordered by their largest logit and then by place: each block
    before a token's own has a token before it.
    """
    num = min(num, scaled.shape[1])
    size = 1 << (math.isqrt(scaled.shape[1] // num).bit_length() - 1)  # about as many blocks as candidates in them
    if size < MIN_SPLIT:
        return _first(scaled, torch.arange(scaled.shape[1], device=scaled.device), num)
    maxima = _per_block(scaled, torch.amax, size)
    ids = _ids_of_blocks(_first(maxima, torch.arange(maxima.shape[1], device=scaled.device), num)[1], size)
    values = scaled.gather(1, ids.clamp(max=scaled.shape[1] - 1))
    if scaled.shape[1] % size:
        values = values.masked_fill(ids >= scaled.shape[1], -torch.inf)
    return _first(values, ids, num)


_LOW_WORD = 2**32 - 1


def _first(values: Tensor, ids: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The first `num` of values float32 [B, n] and ids int64 [B, n] or [n], by value descending, then by id ascending.

    Both go into one integer, the value's bits in the upper word such that integers compare as the floats do, so that
    no two are equal and the order is the same on every device. The ids of -inf may lie past the vocabulary.
    """
    bits = (values + 0.0).view(torch.int32)  # -0 and 0 are equals
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    keys = bits.long()
    keys <<= 32
    keys |= _LOW_WORD - ids
    if num == values.shape[1]:
        keys = keys.sort(dim=-1, descending=True).values
    else:
        keys = keys.topk(num, dim=-1).values
    bits = (keys >> 32).int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32), _LOW_WORD - (keys & _LOW_WORD)
