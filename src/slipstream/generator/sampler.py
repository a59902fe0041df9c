"""From logits to tokens and the behaviour logprobs of exactly the distribution they were drawn from."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def sample_tokens(logits: Tensor, temperatures: np.ndarray, uniforms: np.ndarray) -> tuple[Tensor, Tensor]:
    """Draw one token per row: (tokens int64 [B], behaviour logprobs float32 [B]).

        mu = softmax(logits / temperature);   token = min { i : sum_{j <= i} mu_j >= u * sum_j mu_j }

    Inverse CDF with a float64 running sum (float32 would lose the tail of a large vocabulary). `u` lies strictly inside
    (0, 1), so a token of probability 0 is never drawn. The logprob is log_softmax(logits / temperature)[token] in
    float32. Temperature 0 means the argmax, reported with its logprob at temperature 1.

    `logits` float32 [B, V]; `temperatures` float32 [B]; `uniforms` float64 [B] from `noise.uniform`. All operations are
    per row, so a row's bits depend on that row alone.
    """
    is_greedy = temperatures == 0.0
    scales = np.where(is_greedy, np.float32(1.0), temperatures)
    if np.any(scales != 1.0):  # dividing by 1 changes no bit, so a batch may skip it as a whole
        scaled = logits / torch.from_numpy(scales.astype(np.float32)).unsqueeze(1)
    else:
        scaled = logits
    logprobs = torch.log_softmax(scaled, dim=-1)
    if is_greedy.all():
        tokens = logits.argmax(dim=-1, keepdim=True)
    else:
        cumulative = torch.cumsum(logprobs.exp(), dim=-1, dtype=torch.float64)
        targets = cumulative[:, -1:] * torch.from_numpy(uniforms).unsqueeze(1)
        tokens = torch.searchsorted(cumulative, targets)
        if is_greedy.any():
            tokens = torch.where(torch.from_numpy(is_greedy).unsqueeze(1), logits.argmax(dim=-1, keepdim=True), tokens)
    tokens = tokens.clamp_(
        max=logits.shape[-1] - 1
    )  # logits that are not numbers count past the end; the logprob tells
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)
