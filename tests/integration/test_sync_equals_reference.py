"""At staleness 0 a run equals a plain synchronous loop, bit for bit, whatever hosts its executors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reasoning_gym
import torch
from covering import with_slow

import slipstream
from slipstream.batching import collate
from slipstream.core.config import RunConfig
from slipstream.core.machine import num_cores
from slipstream.core.recipes import resolve
from slipstream.core.run_log import read_metrics
from slipstream.core.types import Completion, Group, Prompt, Rollout, Segment
from slipstream.generator.native import native_engine
from slipstream.generator.requests import Request
from slipstream.models.build import build_tokenizer
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import save_model
from slipstream.models.lora import shapes_of
from slipstream.models.peft import save_adapter
from slipstream.models.sharded import Division, build_sharded_policy
from slipstream.models.shards import base_digest
from slipstream.models.stored_base import store_base
from slipstream.prompts import build_prompts, demonstrations
from slipstream.trainer.measure import Auxiliary
from slipstream.trainer.optim import AdamW
from slipstream.trainer.step import train_on_batch
from slipstream.trainer.supervised import supervised_updates


def reference_run(config: RunConfig, out: Path) -> None:
    """Generate, score, train, repeat: one process, one thread of control, no schedule, no channels, no swaps."""
    torch.set_num_threads(num_cores())
    tokenizer = build_tokenizer(config.model)
    model = build_sharded_policy(config.model, Division(), seed=config.seed, tokenizer=tokenizer)
    if config.model.lora.base_precision != "float32":
        store_base(model, config.model.lora.base_precision)
    parameters = FlatParameters(model)
    prompts = build_prompts(config, tokenizer)
    pairs = demonstrations(config.warm_start, prompts.train.prompts, tokenizer, seed=config.seed)
    for _ in supervised_updates(
        model,
        AdamW(parameters, config.warm_start.optimizer, total_updates=config.warm_start.steps),
        pairs,
        config=config.warm_start,
        microbatch_tokens=config.trainer.microbatch_tokens,
        seed=config.seed,
        batching=collate,
    ):
        pass
    task = config.prompts.tasks[0]
    scorer = reasoning_gym.create_dataset(task.name, size=1, seed=0, **task.params)
    optimizer = AdamW(parameters, config.trainer.optimizer, total_updates=config.steps * config.updates_per_step)
    followed = copy.deepcopy(model).requires_grad_(False) if config.kl.sync_every else None
    ordinal = 0
    for step in range(config.steps):
        groups: list[Group] = []
        while len(groups) < config.groups_per_step:
            group = sample_group(model, tokenizer, prompts.train.prompt(ordinal), ordinal, step, config, scorer)
            ordinal += 1
            rewards = [rollout.reward for rollout in group.rollouts]
            if max(rewards) > min(rewards):
                groups.append(group)
        auxiliary = {} if followed is None else {"auxiliary": Auxiliary(followed)}
        train_on_batch(model, optimizer, groups, config=config, step=step, batching=collate, **auxiliary)
        if followed is not None and (step + 1) % config.kl.sync_every == 0:
            alpha = config.kl.mixup
            for theirs, ours in zip(model.parameters(), followed.parameters(), strict=True):
                ours.data = (1.0 - alpha) * ours.data + alpha * theirs.data
    if shapes_of(model):
        save_adapter(model, out, tokenizer, base=None, digest=base_digest(model))
    else:
        save_model(model, out, tokenizer)


def sample_group(
    model: Any, tokenizer: Any, prompt: Prompt, ordinal: int, step: int, config: RunConfig, scorer: Any
) -> Group:
    """One group alone in an engine of its own: nobody to share a batch with."""
    engine = native_engine(
        model,
        num_slots=8,
        max_len=min(config.model.max_positions, config.prompts.max_prompt_tokens + config.generator.max_new_tokens),
        seed=config.seed,
        stop_token_ids=[tokenizer.eos_token_id],
        version=step,
        records_routes=config.generator.routing_replay,
    )
    engine.submit(
        [
            Request(ordinal, sample, prompt.tokens, config.generator.max_new_tokens)
            for sample in range(config.completions_per_group)
        ]
    )
    finished = []
    while not engine.is_idle:
        finished += engine.step()
    rollouts = []
    for item in sorted(finished, key=lambda item: item.sample):
        tokens = item.tokens[:-1] if item.finish_reason == "stop" else item.tokens
        text = tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        completion = Completion(
            ordinal=ordinal,
            sample=item.sample,
            prompt=prompt,
            segments=(
                Segment(
                    tokens=item.tokens,
                    behaviour_logprobs=item.logprobs,
                    version_spans=item.version_spans,
                    routes=item.routes,
                ),
            ),
            text=text,
            finish_reason=item.finish_reason,
        )
        reward = float(scorer.score_answer(text.strip(), prompt.columns["entry"]))  # as a run reads an answer
        rollouts.append(Rollout(completion=completion, reward=reward))
    return Group(ordinal=ordinal, rollouts=tuple(rollouts))


def weights_of(model_dir: Path) -> dict[str, np.ndarray]:
    from safetensors.torch import load_file

    [file] = model_dir.glob("*model.safetensors")
    return {name: tensor.float().numpy() for name, tensor in load_file(file).items()}  # bfloat16 without loss


def assert_equal(ours: Path, theirs: Path) -> None:
    mine, other = weights_of(ours), weights_of(theirs)
    assert mine.keys() == other.keys()
    for name in mine:
        assert np.array_equal(mine[name], other[name]), f"{name} differs"


@pytest.fixture(scope="module")
def sync_tables() -> dict[str, Any]:
    return {"max_staleness": 0, "weight_update": "between_batches"}


def test_inline_two_replicas_in_processes_and_reference_give_the_same_weights(tiny, sync_tables, tmp_path):
    """Which replica samples a group, and beside whom, changes nothing: noise is keyed by the ordinal."""
    overrides = tiny | sync_tables | {"steps": 3, "warm_start": tiny["warm_start"] | {"steps": 10}}
    reference_run(resolve("quickstart", overrides), tmp_path / "reference")
    in_line = overrides | {"host": "inline"}
    inline = slipstream.run("quickstart", overrides=in_line, out=tmp_path / "inline", display=False)
    assert_equal(inline.out / "model", tmp_path / "reference")
    two = overrides | {"generator": tiny["generator"] | {"replicas": 2, "num_slots": 8}}
    process = slipstream.run("quickstart", overrides=two, out=tmp_path / "process", display=False)
    assert_equal(process.out / "model", tmp_path / "reference")
    assert process.summary["staleness"]["max"] == 0


@pytest.mark.parametrize(
    ("family", "is_replayed"), with_slow([("qwen3_moe", True)], [("qwen3_moe", False), ("mixtral", False)])
)
def test_a_mixture_of_experts_gives_the_weights_of_the_loop(family, is_replayed, tiny, sync_tables, tmp_path):
    """In which a group alone in its engine meets other tokens at its experts than in a crowd."""
    tables = tiny | sync_tables | {"steps": 2, "host": "inline", "warm_start": tiny["warm_start"] | {"steps": 10}}
    tables["model"] = tiny["model"] | {"family": family, "num_experts": 4}
    tables["generator"] = tiny["generator"] | {"routing_replay": is_replayed}
    reference_run(resolve("quickstart", tables), tmp_path / "reference")
    run = slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False)
    assert_equal(run.out / "model", tmp_path / "reference")
    lines = [line for line in read_metrics(run.out / "metrics.jsonl") if "loss" in line]
    assert all(1 <= line["expert_load_max"] <= 2 for line in lines)
    assert all(line["logprob_diff_max/lag_0"] < 1e-5 for line in lines)


@pytest.mark.slow
def test_a_reference_that_follows_the_policy_is_that_of_the_loop(tiny, sync_tables, tmp_path):
    tables = tiny | sync_tables | {"steps": 6, "host": "inline", "warm_start": tiny["warm_start"] | {"steps": 20}}
    tables["kl"] = {"coef": 0.5, "place": "loss", "estimator": "k3", "sync_every": 2, "mixup": 0.6}
    reference_run(resolve("quickstart", tables), tmp_path / "reference")
    run = slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False)
    assert_equal_to_rounding(run.out / "model", tmp_path / "reference")
    lines = [line for line in read_metrics(run.out / "metrics.jsonl") if "kl_reference" in line]
    assert [line["reference_version"] for line in lines] == [0, 0, 2, 2, 4, 4]
    stays = tables | {"kl": tables["kl"] | {"sync_every": None}}
    other = slipstream.run("quickstart", overrides=stays, out=tmp_path / "stays", display=False)
    with pytest.raises(AssertionError):
        assert_equal_to_rounding(other.out / "model", tmp_path / "reference")


def assert_equal_to_rounding(ours: Path, theirs: Path) -> None:
    """`mul_` and `add_` may be one rounding where the loop has two."""
    mine, other = weights_of(ours), weights_of(theirs)
    assert mine.keys() == other.keys()
    for name in mine:
        np.testing.assert_allclose(mine[name], other[name], rtol=0, atol=2e-6, err_msg=name)
