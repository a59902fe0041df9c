"""A tiny policy and rollouts for it, shared by the trainer's tests."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from slipstream.batching import collate as batching
from slipstream.core.config import RunConfig
from slipstream.core.packed import PackedMicrobatch
from slipstream.core.sections import ModelConfig, TaskConfig
from slipstream.core.types import Completion, EpisodeRecord, FinishReason, Group, Prompt, Rollout, Segment, VersionSpan
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import logical_tensors
from slipstream.models.initialise import new_model
from slipstream.models.transformer import Transformer
from slipstream.trainer.batch import PreparedBatch, prepare_batch, select_batch
from slipstream.trainer.checkpoint import Checkpoints, LoadedCheckpoint, Saved, Trained
from slipstream.trainer.scores import ScoredGroup, head_of, scored_groups

VOCAB_SIZE = 19
TINY = ModelConfig(
    family="llama",
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_positions=64,
    tie_embeddings=True,
)


def tiny_policy(seed: int = 0) -> tuple[Transformer, FlatParameters]:
    """A Llama of two layers whose logits are far from uniform."""
    model = new_model(TINY, VOCAB_SIZE, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(8.0)
    return model, FlatParameters(model)


def save_checkpoint(path: Path, policy: Trained, *, step: int, critic: Trained | None = None, **more: Any) -> None:
    """Save as a single CPU rank does."""
    with closing(Checkpoints()) as checkpoints:
        checkpoints.save(path, {"policy": policy} | ({"critic": critic} if critic else {}), step=step, **more)
        assert checkpoints.poll() == Saved(path, step)


def load_checkpoint(path: Path, policy: Trained, *, critic: Trained | None = None) -> LoadedCheckpoint:
    with closing(Checkpoints()) as checkpoints:
        return checkpoints.load(path, {"policy": policy} | ({"critic": critic} if critic else {}))


def scored_group(group: Group, config: RunConfig) -> ScoredGroup:
    """The heads of `group`, all of whose rollouts are here."""
    [scored] = scored_groups(head_of(rollout, config.rewards) for rollout in group.rollouts)
    return scored


def hugging_face_twin(model: Transformer) -> Any:
    """transformers' model with the same weights, in float64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    twin = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
        )
    )
    missing, unexpected = twin.load_state_dict(logical_tensors(model), strict=False)
    assert missing in ([], ["lm_head.weight"])
    assert not unexpected
    twin.tie_weights()
    return twin.double()


def run_config(**changes: Any) -> RunConfig:
    sections: dict[str, Any] = {
        "model": TINY,
        "prompts": {"tasks": [TaskConfig(name="chain_sum")], "max_prompt_tokens": 32},
        "generator": {"max_new_tokens": 16},
        "groups_per_step": 4,
        "completions_per_group": 3,
    }
    return RunConfig.model_validate({**sections, **changes})


def make_rollout(
    ordinal: int,
    sample: int,
    rng: np.random.Generator,
    *,
    version: int = 0,
    reward: float | None = None,
    finish_reason: FinishReason = "stop",
    given: bool = False,
    turn_rewards: list[float | None] | None = None,
    parts: tuple[float, ...] = (),
) -> Rollout:
    """A rollout of 3..5 prompt and 2..9 sampled tokens; `given` puts three given tokens between two sampled runs.

    With `turn_rewards` it is an episode. With `parts` the reward is their sum.
    """

    def tokens(count: int) -> np.ndarray:
        return rng.integers(0, VOCAB_SIZE, count).astype(np.int32)

    def sampled(count: int) -> Segment:
        return Segment(
            tokens=tokens(count),
            behaviour_logprobs=rng.uniform(-4, -0.5, count).astype(np.float32),
            version_spans=(VersionSpan(start=0, version=version),),
        )

    segments: tuple[Segment, ...] = (sampled(int(rng.integers(2, 10))),)
    if given:
        segments = (*segments, Segment(tokens=tokens(3)), sampled(2))
    completion = Completion(
        ordinal=ordinal,
        sample=sample,
        prompt=Prompt(prompt_id=str(ordinal), text="?", tokens=tokens(int(rng.integers(3, 6))), task="t"),
        segments=segments,
        text="",
        finish_reason=finish_reason,
        episode=None if turn_rewards is None else EpisodeRecord(turn_rewards=turn_rewards),
    )
    if parts:
        named = {f"part{index}": part for index, part in enumerate(parts)}
        return Rollout(completion=completion, reward=sum(parts), reward_parts=named)
    return Rollout(completion=completion, reward=float(rng.integers(0, 3)) if reward is None else reward)


def make_groups(num_groups: int = 4, num_samples: int = 3, *, seed: int = 0, **rollout: Any) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [
        Group(ordinal=o, rollouts=tuple(make_rollout(o, s, rng, **rollout) for s in range(num_samples)))
        for o in range(num_groups)
    ]


def sharing_prompts(groups: list[Group]) -> list[Group]:
    """The same groups with every completion behind the prompt of its group's first, as the generator delivers them."""
    return [
        Group(
            ordinal=group.ordinal,
            rollouts=tuple(
                msgspec.structs.replace(
                    rollout,
                    completion=msgspec.structs.replace(rollout.completion, prompt=group.rollouts[0].completion.prompt),
                )
                for rollout in group.rollouts
            ),
        )
        for group in groups
    ]


def columns(seed: int = 1, **spreads: float) -> Any:
    """A measure: columns drawn for the sequence's key alone, `spread` times normal around the behaviour logprobs."""

    def measure(sequences: Any) -> Any:
        measured: dict[str, Any] = {}
        for index, (name, spread) in enumerate(spreads.items()):
            measured[name] = {}
            for sequence in sequences:
                noise = np.random.default_rng((seed, index, *sequence.key)).normal(size=sequence.num_targets)
                anchor = 0.0 if name == "values" else sequence.behaviour_logprobs[sequence.mask]
                measured[name][sequence.key] = (anchor + spread * noise).astype(np.float32)
        return measured

    return measure


class Recording:
    """The batching edge, keeping the microbatches it packed, call by call."""

    def __init__(self) -> None:
        self.packed: list[list[PackedMicrobatch]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(batching, name)

    def collate(self, *args: Any, **kwargs: Any) -> list[PackedMicrobatch]:
        microbatches = batching.collate(*args, **kwargs)
        self.packed.append(microbatches)
        return microbatches


def prepared(
    groups: Any, *, config: RunConfig, step: int, measure: Any = None, kl_coef: float | None = None, **ranked: Any
) -> PreparedBatch:
    """Return the batch of `groups`, with what `measure` gives for its sequences; `ranked` are `heads` and `ranks`."""
    selection = select_batch(groups, config=config, step=step, **ranked)
    ranked.pop("heads", None)
    columns = {} if measure is None else measure(selection.to_measure)
    return prepare_batch(selection, columns, config=config, kl_coef=kl_coef, **ranked)
