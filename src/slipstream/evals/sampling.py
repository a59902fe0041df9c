"""Completions of a checkpoint outside a run, by the engine and the noise of the run itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from slipstream.algorithms.responses import truncate_at_token
from slipstream.core.config import RunConfig
from slipstream.core.types import Completion, Prompt, Segment
from slipstream.generator.executor import EVAL_STREAM, decode_text
from slipstream.generator.native import native_engine
from slipstream.generator.requests import Request
from slipstream.models.build import stop_token_ids
from slipstream.models.transformer import Transformer


def sample_completions(
    config: RunConfig,
    model: Transformer,
    tokenizer: PreTrainedTokenizerBase,
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
        prefill_tokens=generator.prefill_tokens,
        prefill_chunk=generator.prefill_chunk,
    )
    engine.submit(
        [
            Request(
                ordinal=ordinal,
                sample=sample,
                prompt_tokens=prompt.tokens,
                max_new_tokens=min(generator.max_new_tokens, max_len - len(prompt.tokens)),
                temperature=temperature,
                stream=stream,
            )
            for ordinal, prompt in enumerate(prompts)
            for sample in range(num_samples)
        ]
    )
    end, after = config.rewards.truncate_token, config.rewards.truncate_after
    completions: list[Completion] = []
    while not engine.is_idle:
        finished = engine.step()
        for item in finished:
            segment = Segment(tokens=item.tokens, behaviour_logprobs=item.logprobs, version_spans=item.version_spans)
            completions.append(
                Completion(
                    ordinal=item.ordinal,
                    sample=item.sample,
                    prompt=prompts[item.ordinal],
                    segments=(segment,),
                    text=decode_text(tokenizer, truncate_at_token(item.tokens, end, after=after), stop_ids),
                    finish_reason=item.finish_reason,
                )
            )
        if finished and on_progress is not None:
            on_progress(len(completions))
    return sorted(completions, key=lambda completion: (completion.ordinal, completion.sample))
