"""Completions that stages compare: sampled from a policy, or given as references; and what of them is scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from slipstream.algorithms.responses import truncate_at_token
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.types import Completion, Prompt, Segment
from slipstream.evals.sampling import sample_completions
from slipstream.models.transformer import Transformer
from slipstream.prompts.template import Template

PREFERENCE_STREAM, NORMALISATION_STREAM = 2, 3  # of sampling noise, beside training's and evaluation's


def sampled(
    config: RunConfig,
    policy: Transformer,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    stream: int,
    num_samples: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> list[Completion]:
    """`num_samples` completions per prompt at `preferences.temperature`; `ordinal` counts the prompts."""
    return sample_completions(
        config,
        policy,
        tokenizer,
        prompts,
        temperature=config.preferences.temperature,
        num_samples=num_samples,
        num_slots=config.generator.num_slots,
        stream=stream,
        on_progress=on_progress,
    )


def reference_completions(
    config: RunConfig, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> list[Completion]:
    """The prompts' reference answers as completions that were given, with EOS; `ordinal` counts the prompts."""
    template = Template(config.prompts.reference, field="prompts.reference")
    texts = []
    for prompt in prompts:
        if prompt.answer is None and "answer" in template.columns:
            raise ConfigError("a prompt has no reference answer", got=prompt.text[:80], hint="see prompts.reference")
        texts.append(template.render({"answer": prompt.answer, **prompt.columns}))
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [
        Completion(
            ordinal=ordinal,
            sample=-1,
            prompt=prompt,
            segments=(Segment(tokens=np.asarray(tokens + ends, dtype=np.int32)),),
            text=text,
            finish_reason="stop",
        )
        for ordinal, (prompt, text, tokens) in enumerate(zip(prompts, texts, ids, strict=True))
    ]


def scored_tokens(tokens: np.ndarray, config: RunConfig) -> np.ndarray:
    """What reward models see of a completion's `tokens` int [T]: in training, and later in RL, up to where RL cuts."""
    return truncate_at_token(tokens, config.rewards.truncate_token, after=config.rewards.truncate_after)
