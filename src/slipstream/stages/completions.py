"""The parts that several stages use: completions to compare, how they are cut and split, and the judge of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from slipstream.algorithms.responses import truncate_at_token
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.plain import shortened
from slipstream.core.sections import RewardsConfig
from slipstream.core.stage_sections import JudgeConfig
from slipstream.core.types import Completion, Prompt, Segment
from slipstream.core.user_code import defined, imported
from slipstream.evals.judge import EndpointJudge, Judge
from slipstream.evals.sampling import sample_completions
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.transformer import Transformer
from slipstream.prompts.template import Template, ended

Example = TypeVar("Example")

PREFERENCE_STREAM, NORMALISATION_STREAM = 2, 3  # of sampling noise, beside training's and evaluation's


def sampled(
    config: RunConfig,
    policy: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    stream: int,
    num_samples: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> list[Completion]:
    """Sample `num_samples` completions per prompt at `preferences.temperature`; `ordinal` counts the prompts."""
    return sample_completions(
        config,
        policy,
        tokenizer,
        prompts,
        temperature=config.preferences.temperature,
        num_samples=num_samples,
        num_slots=config.generator.rows,
        stream=stream,
        on_progress=on_progress,
    )


def reference_completions(reference: str, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[Completion]:
    """Return the prompts' reference answers, by the template `prompts.reference`, as completions with EOS.

    `ordinal` counts the prompts.
    """
    template = Template(reference, field="prompts.reference")
    texts = []
    for prompt in prompts:
        if prompt.answer is None and "answer" in template.columns:
            raise ConfigError("a prompt has no reference answer", got=prompt.text[:80], hint="see prompts.reference")
        where = f"the prompt {shortened(repr(prompt.text), 60)}"
        texts.append(template.render({"answer": prompt.answer, **prompt.columns}, where=where))
    return [
        Completion(
            ordinal=ordinal,
            sample=-1,
            prompt=prompt,
            segments=(Segment(tokens=tokens),),
            text=text,
            finish_reason="stop",
        )
        for ordinal, (prompt, text, tokens) in enumerate(
            zip(prompts, texts, ended(texts, prompts, tokenizer), strict=True)
        )
    ]


def scored_tokens(tokens: np.ndarray, rewards: RewardsConfig) -> np.ndarray:
    """Cut a completion's `tokens` int [T] where RL does, for reward models in training and in RL."""
    return truncate_at_token(tokens, rewards.truncate_token, after=rewards.truncate_after)


def split_by_prompt(
    examples: Sequence[Example], prompt_of: Callable[[Example], np.ndarray], *, share: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Split examples into training and held-out ones, in order: held out is about `share` of all prompts.

    `prompt_of` gives an example's prompt as int32 tokens [Tp]. Held out are the prompts whose seeded hash is smallest:
    neither the examples' order nor how many there are of a prompt decides, and no prompt is on both sides.
    """
    keys = [
        hashlib.blake2b(prompt_of(example).astype(np.int32).tobytes(), key=seed.to_bytes(8, "little")).digest()
        for example in examples
    ]
    distinct = sorted(set(keys))
    held_out = set(distinct[: round(share * len(distinct))])
    return (
        [example for key, example in zip(keys, examples, strict=True) if key not in held_out],
        [example for key, example in zip(keys, examples, strict=True) if key in held_out],
    )


def build_judge(config: JudgeConfig) -> Judge:
    """Return the function or the model behind an endpoint that judges. ConfigError unless exactly one is given."""
    if (config.function is None) == (config.base_url is None):
        got = f"function = {config.function!r}, base_url = {config.base_url!r}"
        raise ConfigError("a judge is a function or an endpoint", got=got, allowed="one of the two")
    if config.function is not None:
        defined(config.function, what="judge")
        return imported(config.function, what="judge", modules={})
    assert config.base_url is not None
    return EndpointJudge(
        base_url=config.base_url,
        model=config.model,
        api_key_env=config.api_key_env,
        criterion=config.criterion,
        deadline_s=config.deadline_s,
    )
