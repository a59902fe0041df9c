"""Record what TRL's own code computes, so that the loss tests can compare without installing TRL.

    .venv-trl/bin/python scripts/record_trl_oracle.py          # `make bench` creates .venv-trl

Writes tests/data/trl_oracle.json: inputs drawn from a fixed seed in float64, TRL's loss, and its gradient with respect
to the logprobs (or scores). TRL's formulas live inside trainer methods; each is called unchanged on a stand-in object
that carries the attributes it reads and returns the drawn logprobs in place of a model's.
"""

from __future__ import annotations

import json
import platform
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, RLOOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer

SEED = 20240607
TARGET = Path(__file__).resolve().parents[1] / "tests" / "data" / "trl_oracle.json"
LENGTHS = (5, 1, 7, 3, 6, 2)  # tokens of each completion; the first half is preferred in the paired cases
MAX_TOKENS = 8


class SingleProcess:
    """The part of an accelerator that TRL's losses use, for one process."""

    num_processes = 1
    device = torch.device("cpu")
    sync_gradients = True

    def gather(self, values: Tensor) -> Tensor:
        return values

    def gather_for_metrics(self, values: Tensor) -> Tensor:
        return values

    def reduce(self, values: Tensor, reduction: str) -> Tensor:  # noqa: ARG002
        return values

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Stand(SimpleNamespace):
    """A trainer reduced to the attributes that one method reads."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(
            accelerator=SingleProcess(),
            model=SimpleNamespace(training=True),
            aux_loss_enabled=False,
            _metrics={"train": defaultdict(list)},
            **attributes,
        )


def padded(generator: torch.Generator, scale: float) -> Tensor:
    """Logprobs [S, MAX_TOKENS], at most 0."""
    return -scale * torch.rand((len(LENGTHS), MAX_TOKENS), generator=generator, dtype=torch.float64)


def draw() -> dict[str, Tensor]:
    """Logprobs of three policies; spread so that every clip binds somewhere and leaves something alone."""
    generator = torch.Generator().manual_seed(SEED)
    policy = padded(generator, 2.0)
    near = 0.6 * torch.randn(policy.shape, generator=generator, dtype=torch.float64)
    return {
        "policy": policy,
        "behaviour": (policy + near).clamp(max=0.0),
        "reference": padded(generator, 2.0),
        "advantages": torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64),
        "scores": torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64),
        "mask": (torch.arange(MAX_TOKENS) < torch.tensor(LENGTHS).unsqueeze(1)).long(),
    }


def group_relative(drawn: dict[str, Tensor], policy: Tensor, case: dict[str, Any]) -> Tensor:
    """GRPOTrainer._compute_loss."""
    trainer = Stand(
        loss_type=case["loss_type"],
        importance_sampling_level=case.get("level", "token"),
        epsilon_low=case["epsilon_low"],
        epsilon_high=case["epsilon_high"],
        beta=case.get("beta", 0.0),
        max_completion_length=MAX_TOKENS,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(
            delta=case.get("delta"),
            sapo_temperature_pos=case.get("tau_pos"),
            sapo_temperature_neg=case.get("tau_neg"),
            use_bias_correction_kl=False,
            steps_per_generation=1,
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, torch.zeros_like(policy), None),
    )
    inputs = token_ids(drawn) | {
        "advantages": drawn["advantages"],
        "old_per_token_logps": drawn["behaviour"],
        "ref_per_token_logps": drawn["reference"],
        "num_items_in_batch": drawn["mask"].sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def leave_one_out(drawn: dict[str, Tensor], policy: Tensor, case: dict[str, Any]) -> Tensor:
    """RLOOTrainer._compute_loss."""
    trainer = Stand(
        epsilon_low=case["epsilon"],
        epsilon_high=case["epsilon"],
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, torch.zeros_like(policy), None),
    )
    old = (drawn["behaviour"] * drawn["mask"]).sum(1)
    inputs = token_ids(drawn) | {"advantages": drawn["advantages"], "old_logps": old}
    return RLOOTrainer._compute_loss(trainer, None, inputs)


def token_ids(drawn: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the methods read besides logprobs: completions and their mask after a prompt of one token."""
    one = torch.ones((len(LENGTHS), 1), dtype=torch.int64)
    return {
        "prompt_ids": one,
        "prompt_mask": one,
        "completion_ids": drawn["mask"].clone(),
        "completion_mask": drawn["mask"],
    }


def outputs_of(logprobs: Tensor, mask: Tensor) -> SimpleNamespace:
    """What a model with TRL's fused head returns."""
    zeros = torch.zeros_like(logprobs)
    return SimpleNamespace(log_probs=logprobs * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def with_prompt(mask: Tensor) -> dict[str, Tensor]:
    """Completions behind a prompt of one token."""
    completions = torch.cat([torch.zeros((len(LENGTHS), 1), dtype=torch.int64), mask], dim=1)
    return {
        "input_ids": completions.clone(),
        "attention_mask": torch.ones_like(completions),
        "completion_mask": completions,
    }


def preference(drawn: dict[str, Tensor], policy: Tensor, case: dict[str, Any]) -> Tensor:
    """DPOTrainer._compute_loss; its batch is all preferred completions, then all rejected ones."""
    mask = drawn["mask"]
    trainer = Stand(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[case["loss_type"]],
        loss_weights=[1.0],
        beta=case["beta"],
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
    )
    chosen, rejected = (drawn["reference"] * mask).sum(1).chunk(2)
    inputs = with_prompt(mask) | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    return DPOTrainer._compute_loss(trainer, lambda **_: outputs_of(policy, mask), inputs, False)


def labelled(drawn: dict[str, Tensor], policy: Tensor, case: dict[str, Any]) -> Tensor:
    """KTOTrainer._compute_loss; the first half is desirable, and mismatched completions have gained `case["kl"]` each.

    The gain is that of the draw's scores around their mean, so that TRL's own mean of them counts.
    """
    mask, scores = drawn["mask"], drawn["scores"]
    before = (drawn["behaviour"] * mask).sum(1)
    after = before + scores - scores.mean() + case["kl"]
    trainer = Stand(
        loss_type="kto",
        calculate_KL=True,
        precompute_ref_logps=True,
        beta=case["beta"],
        desirable_weight=case["desirable_weight"],
        undesirable_weight=case["undesirable_weight"],
        _total_train_tokens=0,
        _tp_size=1,
        _compute_kl_logps=lambda *_: after,
    )
    labels = torch.arange(len(LENGTHS)) < len(LENGTHS) // 2
    reference = (drawn["reference"] * mask).sum(1)
    inputs = with_prompt(mask) | {"label": labels, "ref_logps": reference, "ref_KL_logps": before}
    return KTOTrainer._compute_loss(trainer, lambda **_: outputs_of(policy, mask), inputs, False)


def without_reference(drawn: dict[str, Tensor], policy: Tensor, case: dict[str, Any]) -> Tensor:
    """CPOTrainer.cpo_loss as SimPO, of mean logprobs."""
    means = (policy * drawn["mask"]).sum(1) / drawn["mask"].sum(1)
    trainer = Stand(loss_type="simpo", alpha=0.0, beta=case["beta"], simpo_gamma=case["gamma"], label_smoothing=0.0)
    losses, *_ = CPOTrainer.cpo_loss(trainer, *means.chunk(2))
    return losses.mean()


def online_preference(drawn: dict[str, Tensor], policy: Tensor, case: dict[str, Any]) -> Tensor:
    """OnlineDPOTrainer.training_step, told to prefer the first half; it runs backward itself, so ours is a copy's."""
    leaf = policy.detach().clone().requires_grad_()
    reference_model = SimpleNamespace()
    model = SimpleNamespace(train=lambda: None)
    pairs = len(LENGTHS) // 2
    ids = token_ids(drawn)
    trainer = Stand(
        beta=case["beta"],
        eos_token_ids=[1],
        ref_model=reference_model,
        reward_funcs=[None],
        stats=defaultdict(list),
        state=SimpleNamespace(global_step=0),
        processing_class=SimpleNamespace(batch_decode=lambda *_, **__: [""] * len(LENGTHS)),
        args=SimpleNamespace(
            use_vllm=False,
            missing_eos_penalty=None,
            loss_type=case["loss_type"],
            torch_empty_cache_steps=None,
            optim="adamw_torch",
            n_gpu=1,
            gradient_accumulation_steps=1,
        ),
        _generate=lambda *_: (*ids.values(), None),
        _forward=lambda which, *_: drawn["reference"] if which is reference_model else leaf,
        _calculate_rewards_from_functions=lambda **_: torch.tensor([1.0] * pairs + [0.0] * pairs),
    )
    loss = OnlineDPOTrainer.training_step(trainer, model, {"prompt": ["x"] * pairs})
    # The same gradient as an expression of the caller's logprobs.
    return loss + ((policy - policy.detach()) * leaf.grad).sum()


def reward(_drawn: dict[str, Tensor], scores: Tensor, _case: dict[str, Any]) -> Tensor:
    """RewardTrainer.compute_loss."""
    trainer = Stand(args=SimpleNamespace(center_rewards_coefficient=None), _total_train_tokens=0, _tp_size=1)
    inputs = {"attention_mask": torch.ones(len(scores))}
    model = lambda **_: SimpleNamespace(logits=scores.unsqueeze(-1))  # noqa: E731
    return RewardTrainer.compute_loss(trainer, model, inputs)


CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "dapo": (group_relative, "policy", {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28}),
    "dapo_delta": (
        group_relative,
        "policy",
        {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28, "delta": 1.5},
    ),
    "grpo": (group_relative, "policy", {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2}),
    "grpo_kl": (group_relative, "policy", {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.04}),
    "dr_grpo": (group_relative, "policy", {"loss_type": "dr_grpo", "epsilon_low": 0.2, "epsilon_high": 0.2}),
    "cispo": (group_relative, "policy", {"loss_type": "cispo", "epsilon_low": 0.2, "epsilon_high": 1.5}),
    # Temperatures that float32 holds: TRL makes a tensor of that type of them.
    "sapo": (
        group_relative,
        "policy",
        {"loss_type": "sapo", "epsilon_low": 0.2, "epsilon_high": 0.2, "tau_pos": 1.0, "tau_neg": 1.25},
    ),
    "gspo": (
        group_relative,
        "policy",
        {"loss_type": "grpo", "level": "sequence", "epsilon_low": 3e-2, "epsilon_high": 4e-2},
    ),
    "rloo": (leave_one_out, "policy", {"epsilon": 0.2}),
    "dpo": (preference, "policy", {"loss_type": "sigmoid", "beta": 0.1}),
    "dpo_ipo": (preference, "policy", {"loss_type": "ipo", "beta": 0.1}),
    "kto": (labelled, "policy", {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7, "kl": 0.5}),
    "kto_below_zero": (
        labelled,
        "policy",
        {"beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 1.0, "kl": -0.5},
    ),
    "simpo": (without_reference, "policy", {"beta": 2.0, "gamma": 0.6}),
    "online_dpo": (online_preference, "policy", {"loss_type": "sigmoid", "beta": 0.1}),
    "online_ipo": (online_preference, "policy", {"loss_type": "ipo", "beta": 0.1}),
    "reward": (reward, "scores", {}),
}


def record() -> dict[str, Any]:
    drawn = draw()
    cases = {}
    for name, (compute, wrt, settings) in CASES.items():
        leaf = drawn[wrt].clone().requires_grad_()
        loss = compute(drawn, leaf, settings)
        (grad,) = torch.autograd.grad(loss, leaf)
        cases[name] = {"settings": settings, "loss": loss.item(), "grad": grad.tolist()}
    return {
        "versions": {name: version(name) for name in ("trl", "torch", "transformers")}
        | {"python": platform.python_version()},
        "seed": SEED,
        "max_tokens": MAX_TOKENS,
        "inputs": {name: tensor.tolist() for name, tensor in drawn.items()},
        "cases": cases,
    }


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {TARGET}")
