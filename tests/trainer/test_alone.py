"""Models that one process trains and samples by itself: where, in what precision, and what is left of it on the disk.

As on a GPU, but on the CPU: weights in float32 beside a copy in bfloat16 that passes compute with.
"""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_data import TINY, VOCAB_SIZE, run_config

import slipstream.evals.sampling as sampling
from slipstream.batching import collate as batching
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.stage_sections import DpoConfig, RewardModelConfig, WarmStartConfig
from slipstream.core.training_sections import OptimizerConfig
from slipstream.core.types import Prompt
from slipstream.models.build import build_policy
from slipstream.models.device import single_device
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import logical_tensors, save_model
from slipstream.models.initialise import new_model
from slipstream.models.scalar import new_scalar_model, save_scalar_model
from slipstream.models.scoring import score
from slipstream.models.sharded import Division, ShardedParameters, divide, divide_scalar
from slipstream.models.sizes import check_on_gpu
from slipstream.trainer.alone import Alone
from slipstream.trainer.dpo import dpo_updates, measure_preferences, preference_data, preference_loss
from slipstream.trainer.optim import AdamW
from slipstream.trainer.reward_model import Preference, reward_model_updates
from slipstream.trainer.supervised import measure_prediction, supervised_updates

WITH_COPY = Division(precision="bfloat16", copies=True)
READ = {"microbatch_tokens": 256, "batching": batching}
OPTIMIZER = OptimizerConfig(lr=1e-3)


def tokens(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(2, VOCAB_SIZE, int(rng.integers(3, 9))).astype(np.int32)


def pairs(count: int) -> list[Preference]:
    rng = np.random.default_rng(0)
    return [Preference(tokens(rng), (tokens(rng), tokens(rng))) for _ in range(count)]


def assert_main_weights(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """Float32, and not those of the copy, which are rounded."""
    found = load_file(path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert {one.dtype for one in found.values()} == {torch.float32}
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert any(not torch.equal(one, one.bfloat16().float()) for one in found.values())


def test_supervised_and_dpo_updates_beside_a_copy(tmp_path: Path) -> None:
    plain, copied = new_model(TINY, VOCAB_SIZE, 0), new_model(TINY, VOCAB_SIZE, 0)
    divide(copied, WITH_COPY)
    data, parameters = pairs(32), ShardedParameters(copied, WITH_COPY)
    settings, dpo = WarmStartConfig(steps=4, batch_size=8), DpoConfig(steps=4, batch_size=8, optimizer=OPTIMIZER)
    demonstrations = [one.samples[0] for one in data]
    losses = []
    for model, own in ((plain, FlatParameters(plain)), (copied, parameters)):
        optimizer = AdamW(own, OPTIMIZER, total_updates=4)
        done = list(supervised_updates(model, optimizer, demonstrations, config=settings, seed=0, **READ))
        predicted = measure_prediction(model, demonstrations, **READ)
        known = preference_data(
            data, model, loss=preference_loss(dpo), others=data, max_positions=model.config.max_positions, **READ
        )
        more = list(dpo_updates(model, known, config=dpo, seed=0, parameters=own, **READ))
        after = measure_preferences(model, known, config=dpo, **READ)
        losses.append([*(one.loss for one in done), predicted.loss, *(one.measure.loss for one in more), after.loss])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[1] != losses[0]
    save_model(copied, tmp_path / "model")
    parameters.reshard()
    assert_main_weights(tmp_path / "model", logical_tensors(copied))


def test_a_reward_model_beside_a_copy(tmp_path: Path) -> None:
    config = RewardModelConfig(normalise="none", steps=4, batch_size=8, optimizer=OPTIMIZER)
    losses, scores = [], []
    for is_copied in (False, True):
        model = new_scalar_model(new_model(TINY, VOCAB_SIZE, 0), head_init="reward", seed=0)
        own = ShardedParameters(divide_scalar(model, WITH_COPY), WITH_COPY) if is_copied else FlatParameters(model)
        losses.append(
            [u.loss for u in reward_model_updates(model, pairs(32), config=config, seed=0, parameters=own, **READ)]
        )
        scores.append(score(model, [one.samples[0] for one in pairs(32)], **READ))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    np.testing.assert_allclose(scores[1], scores[0], atol=0.02)
    assert (scores[1] != scores[0]).any()
    save_scalar_model(model, tmp_path / "model")
    own.reshard()
    head = {"score.weight": (model.gain.double() * model.head.weight.double()).float().detach()}
    assert_main_weights(tmp_path / "model", logical_tensors(model.backbone) | head)


def test_offloaded_moments_change_nothing() -> None:
    ends = []
    for offloads in (False, True):
        model = new_scalar_model(new_model(TINY, VOCAB_SIZE, 0), head_init="reward", seed=0)
        config = RewardModelConfig(normalise="none", steps=3, batch_size=8, optimizer=OPTIMIZER)
        list(reward_model_updates(model, pairs(16), config=config, seed=0, offloads=offloads, **READ))
        ends.append(FlatParameters(model).flat)
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("num_gpus", "device", "expected"),
    [
        (0, "cuda", "cpu"),
        (0, "cuda:1", "cpu"),
        (2, "cpu", "cpu"),
        (2, "cuda", "cuda:0"),
        (2, "cuda:1", "cuda:1"),
        (1, "cuda:1", "cuda:0"),
    ],
)
def test_the_device_of_one_process(num_gpus: int, device: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert str(single_device(device)) == expected


def on_gpus(**trainer: object) -> RunConfig:
    config = run_config()
    return config.model_copy(
        update={
            "trainer": config.trainer.model_copy(update={"device": "cuda", "precision": "bfloat16"} | trainer),
            "generator": config.generator.model_copy(update={"device": "cuda", "precision": "bfloat16"}),
        }
    )


def test_without_a_gpu_it_is_the_cpu_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the devices of a run's config are those of other machines."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    alone, config = Alone(on_gpus(offload_moments=True)), on_gpus()
    model, weights = alone.trained(new_model(TINY, VOCAB_SIZE, 0))
    assert alone.division.is_whole
    assert (alone.division.precision, weights["offloads"]) == ("float32", False)
    assert isinstance(weights["parameters"], FlatParameters)
    assert model.compute_copy is None
    assert {one.dtype for one in alone.read(new_model(TINY, VOCAB_SIZE, 0)).parameters()} == {torch.float32}
    read = new_model(TINY, VOCAB_SIZE, 0)
    before = [one.clone() for one in read.parameters()]
    assert all(map(torch.equal, sampling.to_sample(config, read).parameters(), before))
    assert sampling.kv_bytes_here(config, read) is None
    assert sampling.check_sampling(config, read.config).generator.device == "cpu"


def test_what_one_gpu_has_no_room_for() -> None:
    shape = new_model(TINY, VOCAB_SIZE, 0).config
    check_on_gpu(on_gpus(), shape, 10**9)
    with pytest.raises(ConfigError, match=r"(?s)x 18 bytes.*trainer.offload_moments = true"):
        check_on_gpu(on_gpus(), shape, 10**4)
    with pytest.raises(ConfigError, match="x 8 bytes"):
        check_on_gpu(on_gpus(offload_moments=True, precision="float32"), shape, 10**4)


def test_a_model_that_is_served_answers_as_before() -> None:
    """Its weights lie where the engine reads them, at the precision of versions; nobody else holds them."""
    config = run_config()
    answers = []
    for precision in (None, "float32"):
        model, tokenizer = build_policy(config.model, seed=1)
        if precision is not None:
            sampling.served_on(torch.device("cpu"), model, precision)
            gc.collect()
        prompts = [
            Prompt(prompt_id=str(index), text="", task="t", tokens=np.array([3 + index, 5, 4], dtype=np.int32))
            for index in range(6)
        ]
        found = sampling.sample_completions(
            config, model, tokenizer, prompts, temperature=1.0, num_samples=2, num_slots=8
        )
        answers.append([(one.ordinal, one.sample, one.tokens.tolist()) for one in found])
    assert answers[0] == answers[1]
    assert len({str(tokens) for *_, tokens in answers[0]}) > 3
