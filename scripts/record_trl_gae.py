"""Record what TRL's own PPO code makes of random inputs, for the tests in tests/algorithms.

    python3 -m venv /tmp/trl-ppo
    /tmp/trl-ppo/bin/pip install trl==0.11.4 transformers==4.46.3 datasets==3.1.0 accelerate==1.1.1 rich torch==2.13.0
    /tmp/trl-ppo/bin/python scripts/record_trl_gae.py > tests/data/trl_gae.json

TRL 0.11 is the last one whose PPO keeps these steps in functions of their own; today's TRL has no PPO.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from types import SimpleNamespace

import torch
from trl.core import masked_whiten
from trl.trainer.ppo_trainer import PPOTrainer
from trl.trainer.utils import AdaptiveKLController, truncate_response

GAMMA, LAM, KL_COEF, PAD, STOP = 0.97, 0.9, 0.15, 99, 3


def main() -> None:
    generator = torch.Generator().manual_seed(20)
    lengths = torch.tensor([9, 4, 1, 7, 6])
    shape = (len(lengths), int(lengths.max()))
    mask = (torch.arange(shape[1]) < lengths[:, None]).long()
    logprobs, reference = (-3 * torch.rand(shape, generator=generator) for _ in range(2))
    values, scores = torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)

    config = SimpleNamespace(gamma=GAMMA, lam=LAM, whiten_rewards=False, kl_penalty="kl")
    trainer = SimpleNamespace(config=config, kl_ctl=SimpleNamespace(value=KL_COEF))
    trainer._kl_penalty = lambda policy, ref: PPOTrainer._kl_penalty(trainer, policy, ref)
    rewards, _, kl = PPOTrainer.compute_rewards(trainer, scores, logprobs, reference, mask)
    _, whitened_advantages, returns = PPOTrainer.compute_advantages(trainer, values, rewards, mask)

    controller, coefs = AdaptiveKLController(0.15, 6.0, 10_000), []
    steps = [(1.0, 512), (6.3, 512), (30.0, 64), (6.0, 512), (5.5, 10_000)]
    for mean_kl, num_episodes in steps:
        controller.update(mean_kl, num_episodes)
        coefs.append(float(controller.value))

    responses = torch.randint(0, 6, shape, generator=generator)
    record = {
        "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
        "gamma": GAMMA,
        "lam": LAM,
        "kl_coef": KL_COEF,
        "lengths": lengths,
        "logprobs": logprobs,
        "reference_logprobs": reference,
        "values": values,
        "scores": scores,
        "kl": kl,
        "rewards": rewards,
        "returns": returns,
        "whitened_advantages": whitened_advantages,
        "whitened_rewards": masked_whiten(rewards, mask, shift_mean=False),
        "adaptive_kl_steps": steps,
        "adaptive_kl_coefs": coefs,
        "pad_token": PAD,
        "stop_token": STOP,
        "responses": responses,
        "truncated_responses": truncate_response(STOP, PAD, responses),
    }
    lists = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in record.items()}
    rows = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in lists.items()]
    sys.stdout.write("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
