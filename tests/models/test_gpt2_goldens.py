"""Numbers published with "The N Implementation Details of RLHF with PPO", where GPT-2's weights or the data are here.

Nothing is downloaded: files are taken from SLIPSTREAM_GPT2 (a checkpoint's folder) and SLIPSTREAM_PPO_DEBUG (a folder
with queries.npy, responses.npy and rewards.npy of the dataset vwxyzjn/lm-human-preferences-debug), or from Hugging
Face's cache, and the tests are skipped without them.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import try_to_load_from_cache

from slipstream.algorithms.advantages import gae, whiten_parts
from slipstream.algorithms.kl import k2
from slipstream.algorithms.logprobs import token_logprobs
from slipstream.algorithms.losses import LossInputs, loss_named
from slipstream.batching import collate as batching
from slipstream.core.packed import TrainSequence
from slipstream.core.sections import ModelConfig
from slipstream.core.training_sections import OptimizerConfig
from slipstream.models.attention import PackedAttention
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import load_model
from slipstream.models.initialise import new_model
from slipstream.models.transformer import Transformer
from slipstream.trainer.measure import microbatch_logprobs
from slipstream.trainer.optim import AdamW

PADDING = 50259  # of the recorded queries
TOKENS = [23073, 11, 339, 561]  # "usually, he would"


def cached(repository: str, file: str, kind: str | None = None) -> Path | None:
    found = try_to_load_from_cache(repository, file, repo_type=kind)
    return Path(found).parent if isinstance(found, str) else None


def gpt2_folder() -> Path:
    named = os.environ.get("SLIPSTREAM_GPT2")
    found = Path(named) if named else cached("openai-community/gpt2", "config.json") or cached("gpt2", "config.json")
    if found is None or not (found / "model.safetensors").is_file():
        pytest.skip("GPT-2's weights are not here: set SLIPSTREAM_GPT2 to the folder of the checkpoint 'gpt2'")
    return found


def debug_folder() -> Path:
    named = os.environ.get("SLIPSTREAM_PPO_DEBUG")
    found = Path(named) if named else cached("vwxyzjn/lm-human-preferences-debug", "queries.npy", "dataset")
    if found is None or not (found / "rewards.npy").is_file():
        pytest.skip("the recorded batch is not here: set SLIPSTREAM_PPO_DEBUG to the folder with queries.npy")
    return found


@torch.no_grad()
def logits_of(model: Transformer, tokens: list[int]) -> torch.Tensor:
    hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), PackedAttention([len(tokens)]))
    return model.logits(hidden)


def test_f1_tokens() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gpt2_folder())
    assert tokenizer("usually, he would")["input_ids"] == TOKENS
    assert tokenizer("she thought about it")["input_ids"] == [7091, 1807, 546, 340]


def test_f2_logits() -> None:
    logits = logits_of(load_model(gpt2_folder()), TOKENS)
    published = [
        [-35.2869, -34.2875, -38.1608, -41.5958, -41.0821, -35.3658],
        [-111.3040, -110.9447, -112.9062, None, None, -109.1734],
        [-111.5152, -109.6108, -114.9024, None, None, -112.1248],
        [-122.6978, -121.8447, -128.2742, None, None, -125.7078],
    ]
    for row, expected in zip(logits[:, [0, 1, 2, -3, -2, -1]].tolist(), published, strict=True):
        for got, value in zip(row, expected, strict=True):
            assert value is None or got == pytest.approx(value, abs=2e-3)


def test_f3_logprobs() -> None:
    logits = logits_of(load_model(gpt2_folder()), TOKENS[:-1])
    logprobs = token_logprobs(logits, torch.tensor(TOKENS[1:]))
    assert logprobs.tolist() == pytest.approx([-3.3213, -4.9980, -3.8690], abs=2e-4)


def after_one_update(
    model: Transformer,
    queries: np.ndarray,
    responses: np.ndarray,
    rewards: np.ndarray,
    *,
    adam: str,
    lr: float = 1e-5,
    eps: float = 1e-5,
) -> dict[str, float]:
    """Ratios and clipping of PPO's second epoch on one recorded batch: values 0, GAE(1, 0.95), both whitenings."""
    count, length = responses.shape
    one_part = torch.zeros(rewards.size, dtype=torch.int64)
    whitened = whiten_parts(torch.from_numpy(rewards).float().flatten(), one_part, shift_mean=False)
    segment_ids = torch.arange(count).repeat_interleave(length)
    advantages, _ = gae(whitened, torch.zeros(count * length), segment_ids)
    columns = whiten_parts(advantages, one_part).view(count, length).numpy()
    sequences = []
    for index in range(count):
        prompt = queries[index][queries[index] != PADDING]
        tokens = np.concatenate([prompt, responses[index]]).astype(np.int32)
        given = np.zeros(len(prompt), dtype=np.float32)
        sequences.append(
            TrainSequence(
                key=(index, 0),
                tokens=tokens,
                mask=np.arange(len(tokens)) >= len(prompt),
                behaviour_logprobs=np.zeros(len(tokens), dtype=np.float32),
                advantages=np.concatenate([given, columns[index]]),
                versions=np.zeros(len(tokens), dtype=np.int32),
            )
        )
    (microbatch,) = batching.collate(sequences, 1 << 20)
    config = OptimizerConfig.model_validate({"lr": lr, "eps": eps, "adam": adam, "max_grad_norm": 1e9})
    optimizer = AdamW(FlatParameters(model), config, total_updates=10)
    behaviour: torch.Tensor | None = None
    metrics: dict[str, float] = {}
    for _ in range(2):
        optimizer.zero_grad()
        logprobs, _ = microbatch_logprobs(model, microbatch, temperature=1.0)
        behaviour = logprobs.detach() if behaviour is None else behaviour
        loss, parts = loss_named("ppo", {})(
            LossInputs(
                policy_logprobs=logprobs,
                behaviour_logprobs=behaviour,
                advantages=torch.from_numpy(microbatch.advantages),
                mask=torch.ones(len(logprobs), dtype=torch.bool),
                segment_ids=torch.from_numpy(microbatch.segment_ids),
                num_units=len(logprobs),
            )
        )
        loss.backward()
        ratio = (logprobs.detach() - behaviour).exp()
        metrics = {
            "approxkl": float(k2(behaviour, logprobs.detach()).mean()),
            "clipfrac": parts["clipped_frac"].value(),
            "ratio_mean": float(ratio.mean()),
            "ratio_var": float(ratio.var(unbiased=False)),
            "ratio_max": float(ratio.max()),
            "ratio_min": float(ratio.min()),
        }
        optimizer.step()
    return metrics


@pytest.mark.parametrize(
    ("adam", "published"),
    [
        (
            "torch",
            {
                "approxkl": 0.0023672835,
                "clipfrac": 0.0201822910,
                "ratio_mean": 1.0105520487,
                "ratio_var": 0.0053742756,
                "ratio_max": 1.8121057749,
                "ratio_min": 0.4011387825,
            },
        ),
        (
            "tensorflow",
            {
                "approxkl": 0.0003749983,
                "clipfrac": 0.0052083335,
                "ratio_mean": 1.0044583082,
                "ratio_var": 0.0007942612,
                "ratio_max": 1.2502157688,
                "ratio_min": 0.7299948931,
            },
        ),
    ],
)
def test_f7_the_second_epoch_on_the_recorded_batch(adam: str, published: dict[str, float]) -> None:
    folder = debug_folder()
    model = load_model(gpt2_folder())
    queries, responses, rewards = (np.load(folder / f"{name}.npy")[:64] for name in ("queries", "responses", "rewards"))
    assert after_one_update(model, queries, responses, rewards, adam=adam) == pytest.approx(published, rel=0.05)


def test_torch_adam_moves_further_in_its_first_step() -> None:
    """The published finding on a random model: it also keeps the computation above from rotting unseen."""
    rng = np.random.default_rng(0)
    queries = rng.integers(0, 50, (8, 6))
    queries[:, :2] = PADDING
    responses, rewards = rng.integers(0, 50, (8, 5)), rng.normal(size=(8, 5))
    found = {}
    for adam in ("torch", "tensorflow"):
        config = ModelConfig(family="gpt2", hidden_size=32, intermediate_size=64, num_layers=2, max_positions=32)
        found[adam] = after_one_update(
            new_model(config, 50, 0), queries, responses, rewards, adam=adam, lr=1e-3, eps=1e-3
        )
    assert found["torch"]["approxkl"] > 2 * found["tensorflow"]["approxkl"] > 0
    assert found["torch"]["ratio_max"] > found["tensorflow"]["ratio_max"] > 1
