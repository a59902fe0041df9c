"""Completions of a checkpoint outside a run, by the engine and the noise of the run itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from slipstream.core.config import RunConfig
from slipstream.core.types import Completion, Prompt
from slipstream.generator.completions import EVAL_STREAM, completion_of, request_of
from slipstream.generator.native import native_engine
from slipstream.models.build import stop_token_ids
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.transformer import Transformer


def sample_completions(
    config: RunConfig,
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    num_samples: int = 1,
    num_slots: int,
    stream: int = EVAL_STREAM,
    on_progress: Callable[[int], None] | None = None,
) -> list[Completion]:
    """`num_samples` completions per prompt, sorted by (prompt, sample), `ordinal` counting `prompts`; 0 is greedy.

    Their noise is keyed by (seed, `stream`, prompt, sample): what else is sampled changes none of them. `on_progress`
    hears how many are finished.
    """
    generator = config.generator
    longest = config.prompts.max_prompt_tokens or max((len(prompt.tokens) for prompt in prompts), default=1)
    max_len = min(model.config.max_positions, longest + generator.max_new_tokens)
    stop_ids = stop_token_ids(tokenizer, generator)
    engine = native_engine(
        model,
        num_slots=num_slots,
        max_len=max_len,
        seed=config.seed,
        stop_token_ids=stop_ids,
        prefill_tokens=generator.prefilled,
        prefill_chunk=generator.prefill_chunk,
    )
    engine.submit(
        [
            request_of(
                generator,
                prompt,
                ordinal=ordinal,
                sample=sample,
                max_len=max_len,
                temperature=temperature,
                stream=stream,
                is_whole=True,
            )
            for ordinal, prompt in enumerate(prompts)
            for sample in range(num_samples)
        ]
    )
    complete = partial(completion_of, tokenizer=tokenizer, stop_ids=stop_ids, rewards=config.rewards)
    completions: list[Completion] = []
    while not engine.is_idle:
        finished = engine.step()
        completions += [complete(item, prompts[item.ordinal]) for item in finished]
        if finished and on_progress is not None:
            on_progress(len(completions))
    return sorted(completions, key=lambda completion: (completion.ordinal, completion.sample))
