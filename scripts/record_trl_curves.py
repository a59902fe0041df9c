"""Record 20 training steps of TRL's trainers on fixed samples, for tests/trainer/test_trl_curves.py.

    .venv-trl/bin/python scripts/record_trl_curves.py          # `make bench` creates .venv-trl

TRL 1.12 is the last one with a PPO. It runs in the same environment, from a folder of its own:

    .venv-trl/bin/pip install --no-deps --target trl-1.12 trl==1.12.0
    PYTHONPATH=trl-1.12 .venv-trl/bin/python scripts/record_trl_curves.py ppo ppo_ends

Writes the named algorithms into tests/data/trl_curves.json (samples, settings, curves) and trl_curves.safetensors (the
models, a GPT-NeoX of two layers, before and after). Each trainer runs its own `train()`; replaced are its generation,
which returns the fixed completions, and its rewards, which are fixed, too. PPO's minibatches are dealt in a fixed
order, and the head of its value model has the parameters of ours: PPOTrainer takes any.

`ppo_ends` is one update on completions that end before the response length. Behind their end PPOTrainer has one more
step, with the score and a value of its own, which goes into advantages and value loss. Ours leaves that value out; here
the head is 0, and so are all values: what the policy learns is then the same.
"""

from __future__ import annotations

import copy
import json
import math
import platform
import sys
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import trl  # which imports a trainer where it is asked for: 1.12's RLOO needs packages that are not there
from datasets import Dataset
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

SEED, STEPS, NUM_COMPLETIONS, LONGEST = 20261127, 20, 16, 8
NUM_TOKENS, EOS, PAD = 17, 17, 18  # sampled tokens are below both
DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
CURVES, WEIGHTS = DATA / "trl_curves.json", DATA / "trl_curves.safetensors"
MODEL = {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "hidden_act": "gelu",
    "use_parallel_residual": True,
    "tie_word_embeddings": False,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
COMMON = {"learning_rate": 3e-3, "adam_epsilon": 1e-5, "lr_scheduler_type": "linear"}
SETTINGS: dict[str, dict[str, Any]] = {
    "rloo": COMMON
    | {"num_generations": 4, "num_iterations": 2, "beta": 0.1, "epsilon": 0.05, "weight_decay": 0.01}
    | {"max_grad_norm": 7.0},
    "online_dpo": COMMON | {"beta": 0.3, "weight_decay": 0.01, "max_grad_norm": 2.0},
    "ppo": COMMON
    | {"num_ppo_epochs": 2, "num_mini_batches": 2, "kl_coef": 0.1, "kl_estimator": "k1", "cliprange": 0.05}
    | {"cliprange_value": 0.05, "vf_coef": 0.3, "gamma": 0.97, "lam": 0.9, "whiten_rewards": True},
}
SETTINGS["ppo_ends"] = SETTINGS["ppo"] | {"num_ppo_epochs": 1, "num_mini_batches": 1, "whiten_rewards": False}


def samples() -> dict[str, Any]:
    """Draw what all algorithms train on; PPO, whose completions fill the response length, cuts at `ppo_lengths`."""
    rng = np.random.default_rng(SEED)
    return {
        "prompts": [[rng.integers(0, NUM_TOKENS, rng.integers(2, 6)).tolist() for _ in range(4)] for _ in range(STEPS)],
        "completions": rng.integers(0, NUM_TOKENS, (STEPS, NUM_COMPLETIONS, LONGEST)).tolist(),
        "lengths": rng.integers(1, LONGEST + 1, (STEPS, NUM_COMPLETIONS)).tolist(),
        "ppo_lengths": rng.integers(3, LONGEST + 1, STEPS).tolist(),
        "rewards": rng.normal(size=(STEPS, NUM_COMPLETIONS)).round(3).tolist(),
    }


class Head(nn.Module):
    """gain * (w . h + b) + bias, as slipstream.models.scalar."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(weight.shape[1], 1)
        self.gain, self.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))
        with torch.no_grad():
            self.head.weight.copy_(weight)
            self.head.bias.zero_()

    def forward(self, states: Tensor) -> Tensor:
        return self.gain * self.head(states) + self.bias


@torch.no_grad()
def models() -> dict[str, nn.Module]:
    """Make policy, reference (near the policy) and critic from the seed: no bias is 0, no norm is 1."""
    torch.manual_seed(SEED)
    config = GPTNeoXConfig(**MODEL, initializer_range=0.3)
    policy, critic = GPTNeoXForCausalLM(config), GPTNeoXForSequenceClassification(config_of_scores(config))
    for parameter in (*policy.parameters(), *critic.parameters()):
        parameter.add_(0.1 * torch.randn(parameter.shape))
    reference = copy.deepcopy(policy)
    for parameter in reference.parameters():
        parameter.add_(0.03 * torch.randn(parameter.shape))
    return {"policy": policy, "reference": reference, "critic": critic}


def config_of_scores(config: GPTNeoXConfig) -> GPTNeoXConfig:
    of_scores = copy.deepcopy(config)
    of_scores.num_labels = 1
    return of_scores


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"t{index}": index for index in range(NUM_TOKENS)} | {"<eos>": EOS, "<pad>": PAD}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")))
    made.eos_token, made.pad_token, made.padding_side = "<eos>", "<pad>", "left"
    return made


def norm_of(tensors: Any) -> float:
    return math.sqrt(sum(float(tensor.detach().double().square().sum()) for tensor in tensors))


class Samples:
    """The fixed samples, step by step, as the trainers' own methods would return them."""

    def __init__(self, drawn: dict[str, Any]) -> None:
        self.drawn, self.step = drawn, -1

    def next(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return prompts and completions of the next step, four completions behind each of four prompts."""
        self.step += 1
        lengths = self.drawn["lengths"][self.step]
        completions = [row[:n] for row, n in zip(self.drawn["completions"][self.step], lengths, strict=True)]
        return [self.drawn["prompts"][self.step][i // 4] for i in range(NUM_COMPLETIONS)], completions

    @property
    def rewards(self) -> list[float]:
        return self.drawn["rewards"][self.step]


def padded(rows: list[list[int]], *, left: bool) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    gaps = [[PAD] * (longest - len(row)) for row in rows]
    ids = torch.tensor([gap + row if left else row + gap for row, gap in zip(rows, gaps, strict=True)])
    return ids, (ids != PAD).long()


class Norms(TrainerCallback):
    """Keep the norm of all weights after each update."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.found.append(norm_of(model.parameters()))


def arguments(name: str, folder: str, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **SETTINGS[name],
        **more,
    }


def rloo(made: dict[str, Any], drawn: dict[str, Any], folder: str) -> tuple[dict[str, Any], dict[str, nn.Module]]:
    """RLOOTrainer.train(); `_generate` is replaced, and what `_get_per_token_logps_and_entropies` returns is kept."""
    fixed, kept, norms, losses = Samples(drawn), [], Norms(), []
    made["policy"].save_pretrained(folder)

    class Fixed(trl.RLOOTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            given, completions = fixed.next()
            return given, completions, [""] * len(prompts)

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            kept.append(found[0].detach())
            return found

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

    trainer = Fixed(
        model=folder,
        reward_funcs=lambda **_: fixed.rewards,
        args=trl.RLOOConfig(
            **arguments("rloo", folder, max_steps=2 * STEPS, per_device_train_batch_size=NUM_COMPLETIONS)
        ),
        train_dataset=Dataset.from_dict({"prompt": ["t0"] * 4 * STEPS}),
        processing_class=tokenizer(),
        callbacks=[norms],
    )
    trainer.ref_model.load_state_dict(made["reference"].state_dict())
    trainer.train()
    # Of each step: old logprobs, the reference's, and those of its two iterations.
    old, reference = kept[0::4], kept[1::4]
    logs = [row for row in trainer.state.log_history if "grad_norm" in row]
    pairs = lambda values: np.reshape(values, (STEPS, 2)).mean(1).tolist()  # noqa: E731
    curves = logprob_curves(old, reference, drawn) | {
        "loss": pairs(losses),
        "grad_norm": pairs([row["grad_norm"] for row in logs]),
        "clip_frac": pairs([row["clip_ratio/region_mean"] for row in logs]),
        "weight_norm": norms.found[1::2],
    }
    return curves, {"policy": trainer.model}


def online_dpo(made: dict[str, Any], drawn: dict[str, Any], folder: str) -> tuple[dict[str, Any], dict[str, nn.Module]]:
    """OnlineDPOTrainer.train(); `_generate` is replaced, and what `_forward` returns is kept."""
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    fixed, kept, norms, losses = Samples(drawn), [], Norms(), []
    halves = [*range(0, NUM_COMPLETIONS, 2), *range(1, NUM_COMPLETIONS, 2)]  # TRL: one of each pair, then the others
    back = np.argsort(halves)

    class Fixed(OnlineDPOTrainer):
        def _generate(self, *_: Any, **__: Any) -> Any:
            prompts, completions = fixed.next()
            rows = [[one[i] for i in halves] for one in (prompts, completions)]
            return *padded(rows[0], left=True), *padded(rows[1], left=False), None

        def _forward(self, *args: Any, **kwargs: Any) -> Tensor:
            found = super()._forward(*args, **kwargs)
            kept.append(found.detach()[back])
            return found

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    trainer = Fixed(
        model=copy.deepcopy(made["policy"]),
        ref_model=made["reference"],
        reward_funcs=lambda **_: [fixed.rewards[i] for i in halves],
        args=OnlineDPOConfig(
            **arguments("online_dpo", folder, max_steps=STEPS, per_device_train_batch_size=NUM_COMPLETIONS // 2)
        ),
        train_dataset=Dataset.from_dict({"prompt": ["t0"] * STEPS * (NUM_COMPLETIONS // 2)}),
        processing_class=tokenizer(),
        callbacks=[norms],
    )
    trainer.train()
    logs = [row for row in trainer.state.log_history if "grad_norm" in row]
    curves = logprob_curves(kept[0::2], kept[1::2], drawn) | {
        "loss": losses,
        "grad_norm": [row["grad_norm"] for row in logs],
        "weight_norm": norms.found,
        "reward_margin": [row["rewards/margins"] for row in logs],
        "preference_accuracy": [row["rewards/accuracies"] for row in logs],
    }
    return curves, {"policy": trainer.model}


def logprob_curves(policy: list[Tensor], reference: list[Tensor], drawn: dict[str, Any]) -> dict[str, Any]:
    """Return the logprobs of whole completions before each step [STEPS, 16], and their mean KL from the reference.

    OnlineDPOTrainer's own `objective/kl` also sums over padding, so both algorithms' KL are made of the logprobs here.
    """
    sums: list[list[Tensor]] = [[], []]
    for step, both in enumerate(zip(policy, reference, strict=True)):
        lengths = torch.tensor(drawn["lengths"][step])
        for column, logprobs in zip(sums, both, strict=True):
            mask = torch.arange(logprobs.shape[1]) < lengths[:, None]
            column.append((logprobs.double() * mask).sum(1))
    ours, theirs = (torch.stack(column) for column in sums)
    return {"logprobs": ours.tolist(), "kl": (ours - theirs).mean(1).tolist()}


def ppo(
    made: dict[str, Any], drawn: dict[str, Any], folder: str, *, ends: bool = False
) -> tuple[dict[str, Any], dict[str, nn.Module]]:
    """PPOTrainer.train(); `batch_generation` returns the fixed completions with the policy's logits of them.

    With `ends` it is `ppo_ends`.
    """
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    logs, step, steps = [], [-1], 1 if ends else STEPS
    curves: dict[str, list[Any]] = {name: [] for name in ("logprobs", "values", "weight_norm", "critic_weight_norm")}
    norms: dict[str, list[float]] = {"policy": [], "value_model": []}
    policy, critic, scores_of = copy.deepcopy(made["policy"]), made["critic"], nn.Linear(1, 1)
    critic.score = Head(critic.score.weight * (0.0 if ends else 1.0))
    own_reward = ppo_trainer.get_reward

    def batch_generation(model: nn.Module, queries: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        step[0] += 1
        tokens = torch.tensor(drawn["completions"][step[0]])
        if ends:
            tokens[torch.arange(LONGEST) >= torch.tensor(drawn["lengths"][step[0]])[:, None]] = PAD
        else:
            tokens = tokens[:, : drawn["ppo_lengths"][step[0]]]
        both = torch.cat([queries, tokens], dim=1)
        logits = ppo_trainer.forward(model, both, PAD).logits[:, queries.shape[1] - 1 : -1]
        logprobs = torch.log_softmax(logits.double(), -1).gather(2, tokens[:, :, None]).squeeze(2)
        curves["logprobs"].append((logprobs * (tokens != PAD)).sum(1).tolist())
        return both, logits

    def get_reward(model: nn.Module, tokens: Tensor, pad: int, context: int) -> Any:
        if model is scores_of:
            return None, torch.tensor(drawn["rewards"][step[0]]), None
        found = own_reward(model, tokens, pad, context)
        curves["values"].append(found[0][:, context - 1 : -1].double().sum((1, 2)).tolist())
        return found

    def keep_norms(*_: Any) -> None:
        for name, found in norms.items():
            found.append(norm_of(one.grad for one in getattr(trainer.model, name).parameters()))

    class Fixed(PPOTrainer):
        def log(self, found: dict[str, float], *_: Any) -> None:
            logs.append(found)
            curves["weight_norm"].append(norm_of(self.model.policy.parameters()))
            curves["critic_weight_norm"].append(norm_of(self.model.value_model.parameters()))

    prompts = [[of_step[i // 4] for i in range(NUM_COMPLETIONS)] for of_step in drawn["prompts"][:steps]]
    trainer = Fixed(
        args=PPOConfig(
            **arguments("ppo_ends" if ends else "ppo", folder),
            total_episodes=steps * NUM_COMPLETIONS,
            num_sample_generations=0,
            per_device_train_batch_size=NUM_COMPLETIONS,
            gradient_accumulation_steps=1,
            temperature=1.0,
            weight_decay=0.0,
        ),
        processing_class=tokenizer(),
        model=policy,
        ref_model=made["reference"],
        reward_model=scores_of,
        value_model=critic,
        train_dataset=Dataset.from_dict({"input_ids": [row for rows in prompts for row in rows]}),
    )
    trainer.dataloader = [{"input_ids": padded(rows, left=True)[0]} for rows in prompts]
    trainer.optimizer.optimizer.register_step_pre_hook(keep_norms)
    dealt = mock.patch("numpy.random.permutation", lambda count: np.r_[0:count:2, 1:count:2])  # like cards, as ours
    with dealt, mock.patch.multiple(ppo_trainer, batch_generation=batch_generation, get_reward=get_reward):
        trainer.train()
    names = {"loss": "loss/policy_avg", "value_loss": "loss/value_avg", "kl": "objective/kl"}
    names |= {"entropy": "policy/entropy_avg", "clip_frac": "policy/clipfrac_avg"}
    names |= {"value_clip_frac": "val/clipfrac_avg"}
    of_steps = {name: np.reshape(found, (steps, -1)).mean(1).tolist() for name, found in norms.items()}
    found = curves | {ours: [row[theirs] for row in logs] for ours, theirs in names.items()}
    found |= {"grad_norm": of_steps["policy"], "critic_grad_norm": of_steps["value_model"]}
    if ends:  # entropy counts padding, and all of the critic's the steps behind the ends
        return {name: found[name] for name in ("logprobs", "kl", "loss", "clip_frac", "grad_norm", "weight_norm")}, {}
    return found, {"policy": policy, "critic": critic}


TRAINERS = {"rloo": rloo, "online_dpo": online_dpo, "ppo": ppo, "ppo_ends": partial(ppo, ends=True)}


def main(names: list[str]) -> None:
    drawn, before = samples(), models()
    stored = json.loads(CURVES.read_text(encoding="utf-8")) if CURVES.exists() else {"algorithms": {}}
    tensors = load_file(WEIGHTS) if WEIGHTS.exists() else {}
    for which, one in before.items():
        tensors |= saved(one, f"before/{which}/")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            curves, after = TRAINERS[name](models(), drawn, folder)
        for which, one in after.items():
            tensors |= saved(one, f"{name}/{which}/")
        versions = {one: version(one) for one in ("trl", "torch", "transformers")}
        stored["algorithms"][name] = {"versions": versions, "settings": SETTINGS[name], "curves": curves}
    stored |= {"python": platform.python_version(), "seed": SEED, "config": MODEL, "samples": drawn}
    rounded = json.loads(json.dumps(stored), parse_float=lambda digits: float(f"{float(digits):.9g}"))
    CURVES.write_text(compact(rounded) + "\n", encoding="utf-8")
    save_file(tensors, WEIGHTS)
    print(f"wrote {', '.join(names)} to {CURVES.name} and {WEIGHTS.name}")


def saved(model: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Return the model's tensors by the names of its checkpoint, which are not all those of its modules."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {prefix + name: tensor for name, tensor in load_file(Path(folder) / "model.safetensors").items()}


def compact(value: Any, depth: int = 0) -> str:
    """Return JSON with a line for each entry of an object, and lists on one line."""
    if not isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    rows = [f"{' ' * (depth + 1)}{json.dumps(name)}: {compact(one, depth + 1)}" for name, one in value.items()]
    return "{\n" + ",\n".join(rows) + "\n" + " " * depth + "}"


if __name__ == "__main__":
    main(sys.argv[1:] or ["rloo", "online_dpo"])
