"""Where a run went: gold win rate and drift of its checkpoints, on the held-out prompts of its evaluation."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from slipstream.core.recipes import resolve
from slipstream.core.types import Completion
from slipstream.evals.drift import measure_drift, sample_of
from slipstream.evals.sampling import sample_completions
from slipstream.evals.win_rate import gold_win_rate
from slipstream.models.build import build_policy
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import load_model
from slipstream.prompts import build_prompts
from slipstream.rewards.functions import word_overlap
from slipstream.rewards.protocol import RewardJob
from slipstream.stages.completions import reference_completions
from slipstream.trainer.checkpoint import Checkpoints
from slipstream.trainer.checkpoint_folder import checkpoint_path
from slipstream.trainer.optim import AdamW


def course(run: str, steps: list[int]) -> list[dict[str, float]]:
    """`win_rate` against the references and `kl` from the start in nats per completion, after each of `steps`.

    0 is where the run began; of the others there are checkpoints. All answer the same prompts with the same noise.
    """
    config = resolve(Path(run) / "config.toml")
    model, tokenizer = build_policy(config.model, seed=config.seed)
    assert config.model.path is not None, "a run begins with the policy of another one"
    reference = load_model(config.model.path)
    prompts = build_prompts(config, tokenizer).eval[: config.evaluation.num_prompts]
    theirs = [gold(completion) for completion in reference_completions(config.prompts.reference, prompts, tokenizer)]
    optimizer = AdamW(FlatParameters(model), config.trainer.optimizer, total_updates=1)
    found = []
    for step in steps:
        if step:
            with closing(Checkpoints()) as checkpoints:
                checkpoints.load(checkpoint_path(Path(run) / "checkpoints", step), {"policy": (model, optimizer)})
        completions = sample_completions(
            config,
            model,
            tokenizer,
            prompts,
            temperature=1.0,
            num_samples=config.evaluation.num_samples,
            num_slots=config.eval.num_slots,
        )
        ours = [gold(completion) for completion in completions]
        kl = measure_drift(reference, [sample_of(completion) for completion in completions]).kl
        assert kl is not None, "logprobs of what was sampled are known"
        wins = gold_win_rate(ours, [theirs[completion.ordinal] for completion in completions])
        found.append({"step": step, "win_rate": wins.win_rate.mean, "kl": kl.per_sequence.mean})
    return found


_overlap = word_overlap(column="key", characters=True)


def gold(completion: Completion) -> float:
    """The score of `tldr_mini`'s gold."""
    prompt = completion.prompt
    score = _overlap(RewardJob(0, prompt.text, completion.text, [], prompt.task, prompt.answer, prompt.columns))
    assert score is not None, "every post has a key"
    return score
