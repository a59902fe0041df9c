"""One whole step of actor-critic PPO, written from its equations in float64, against the trainer's.

The other side is transformers' model and plain loops over sequences: KL in the reward, whitening, GAE, both clips, one
Adam of TensorFlow's form over policy and value head together, linear decay. It imports nothing of ours that computes.
"""

import math

import msgspec
import numpy as np
import pytest
import torch
from training_data import TINY, hugging_face_twin, make_groups, run_config, tiny_policy

from slipstream.batching import collate as batching
from slipstream.models.hf import logical_tensors
from slipstream.models.initialise import new_model
from slipstream.trainer.critic import Critic
from slipstream.trainer.measure import Auxiliary
from slipstream.trainer.optim import AdamW
from slipstream.trainer.step import train_on_batch

TEMPERATURE, BETA, LAM, CLIP, COEF, EPS = 0.7, 0.3, 0.95, 0.2, 0.1, 1e-5
OPTIMIZER = {"lr": 3e-3, "eps": EPS, "adam": "tensorflow", "schedule": "linear", "max_grad_norm": math.inf}
TOTAL_UPDATES = 40


def states_of(twin, tokens):
    """float64 [T, hidden]: final states, behind the last norm."""
    return twin.model(torch.from_numpy(tokens.astype(np.int64))[None]).last_hidden_state[0]


def logprobs_of(twin, states, targets):
    return torch.log_softmax(twin.lm_head(states) / TEMPERATURE, -1).gather(1, targets[:, None]).squeeze(1)


def whitened(rows, *, shift_mean):
    every = torch.cat(rows)
    mean, scale = every.mean(), torch.rsqrt(every.var(correction=0) + 1e-8)
    return [(row - mean) * scale + (0.0 if shift_mean else mean) for row in rows]


def gae(rewards, values):
    advantages, carried, following = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        carried = rewards[t] + following - values[t] + LAM * carried
        advantages[t], following = carried, values[t]
    return advantages


class Sequences:
    """The sampled tokens of a batch, and what a twin says of them before any update."""

    def __init__(self, rollouts, twin, head, reference):
        self.tokens, self.at, self.targets, self.behaviour, self.values, self.rewards = [], [], [], [], [], []
        for rollout in rollouts:
            completion = rollout.completion
            prompt = completion.prompt.tokens
            tokens = np.concatenate([prompt, completion.tokens])
            at = torch.arange(len(prompt) - 1, len(tokens) - 1)
            targets = torch.from_numpy(completion.tokens.astype(np.int64))
            with torch.no_grad():
                behaviour = torch.from_numpy(completion.segments[0].behaviour_logprobs).double()
                kl = behaviour - logprobs_of(reference, states_of(reference, tokens)[at], targets)
                self.values.append(head(states_of(twin, tokens)[at]).squeeze(1))
            rewards = -BETA * kl
            rewards[-1] += rollout.reward
            for column, value in zip(
                (self.tokens, self.at, self.targets, self.behaviour, self.rewards),
                (tokens, at, targets, behaviour, rewards),
                strict=True,
            ):
                column.append(value)


def losses_by_hand(sequences, chosen, twin, head):
    """(policy loss, value loss, share clipped, share of values clipped) of one minibatch."""
    rewards = whitened([sequences.rewards[i] for i in chosen], shift_mean=False)
    raw = [gae(reward, sequences.values[i]) for reward, i in zip(rewards, chosen, strict=True)]
    returns = [advantage + sequences.values[i] for advantage, i in zip(raw, chosen, strict=True)]
    policy, value, is_clipped, is_value_clipped = [], [], [], []
    for advantage, target, i in zip(whitened(raw, shift_mean=True), returns, chosen, strict=True):
        states = states_of(twin, sequences.tokens[i])[sequences.at[i]]
        ratio = (logprobs_of(twin, states, sequences.targets[i]) - sequences.behaviour[i]).exp()
        plain, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)
        policy.append(torch.maximum(plain, clipped))
        is_clipped.append(clipped > plain)
        old, values = sequences.values[i], head(states).squeeze(1)
        near = torch.clamp(values, old - CLIP, old + CLIP)
        value.append(torch.maximum((values - target) ** 2, (near - target) ** 2))
        is_value_clipped.append((near - target) ** 2 > (values - target) ** 2)
    shares = [torch.cat(flags).double().mean().item() for flags in (is_clipped, is_value_clipped)]
    return torch.cat(policy).mean(), 0.5 * torch.cat(value).mean(), *shares


class TensorFlowAdam:
    """lr_t = lr sqrt(1 - b2^t) / (1 - b1^t),   p -= lr_t m / (sqrt(v) + eps); one for all parameters."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
        self.update = 0

    @torch.no_grad()
    def step(self, loss):
        lr = OPTIMIZER["lr"] * (1 - self.update / TOTAL_UPDATES)
        self.update += 1
        scaled = lr * math.sqrt(1 - 0.999**self.update) / (1 - 0.9**self.update)
        with torch.enable_grad():
            grads = torch.autograd.grad(loss, self.parameters)
        for parameter, grad, (first, second) in zip(self.parameters, grads, self.moments, strict=True):
            first.mul_(0.9).add_(0.1 * grad)
            second.mul_(0.999).add_(0.001 * grad**2)
            parameter -= scaled * first / (second.sqrt() + EPS)


def sampled_near(groups, model, seed=5):
    """The same groups, with behaviour logprobs near those of `model`: some ratios lie inside the clip, some outside."""
    rng = np.random.default_rng(seed)
    twin = hugging_face_twin(model)

    def moved(rollout):
        completion = rollout.completion
        prompt, (segment,) = completion.prompt.tokens, completion.segments
        at = torch.arange(len(prompt) - 1, len(prompt) + len(segment.tokens) - 1)
        with torch.no_grad():
            states = states_of(twin, np.concatenate([prompt, segment.tokens]))[at]
            logprobs = logprobs_of(twin, states, torch.from_numpy(segment.tokens.astype(np.int64))).numpy()
        noisy = (logprobs + rng.normal(0, 0.1, len(logprobs))).astype(np.float32)
        segment = msgspec.structs.replace(segment, behaviour_logprobs=noisy)
        return msgspec.structs.replace(rollout, completion=msgspec.structs.replace(completion, segments=(segment,)))

    return [msgspec.structs.replace(g, rollouts=tuple(map(moved, g.rollouts))) for g in groups]


@pytest.mark.parametrize("minibatches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_of_policy_and_value_head_equals_the_equations(minibatches):
    config = run_config(
        loss={"name": "ppo", "advantages": "gae", "whiten_advantages": "minibatch"},
        kl={"coef": BETA},
        generator={"max_new_tokens": 16, "temperature": TEMPERATURE},
        critic={"model": "head", "head_init": "reward", "coef": COEF, "whiten_rewards": True, "optimizer": OPTIMIZER},
        trainer={"minibatches": minibatches, "epochs": 4, "optimizer": OPTIMIZER, "microbatch_tokens": 60},
    )
    model, flat = tiny_policy()
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=TOTAL_UPDATES)
    reference = new_model(TINY, model.config.vocab_size, 7)
    critic = Critic(config, model)
    critic.optimizer = AdamW(critic.parameters, config.critic.optimizer, total_updates=TOTAL_UPDATES)
    groups = sampled_near(make_groups(6, 4, seed=3), model)

    twin = hugging_face_twin(model)
    head = torch.nn.Linear(TINY.hidden_size, 1).double()
    head.load_state_dict(critic.module.state_dict())
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sequences = Sequences(rollouts, twin, head, hugging_face_twin(reference))
    adam = TensorFlowAdam([*twin.parameters(), *head.parameters()])
    before = [parameter.detach().clone() for parameter in adam.parameters]
    found, num_tokens = [], []
    for _ in range(4):
        for part in range(minibatches):  # groups are dealt like cards
            chosen = [i for i, rollout in enumerate(rollouts) if rollout.completion.ordinal % minibatches == part]
            policy, value, *shares = losses_by_hand(sequences, chosen, twin, head)
            adam.step(policy + COEF * value)
            found.append((policy.item(), value.item(), *shares))
            num_tokens.append(sum(len(sequences.targets[i]) for i in chosen))
    by_hand = np.average(found, axis=0, weights=num_tokens)

    metrics = train_on_batch(
        model, optimizer, groups, config=config, step=0, batching=batching, auxiliary=Auxiliary(reference, critic)
    )
    assert by_hand[2] > 0.05, "the policy's clip binds somewhere"
    assert by_hand[3] > 0.02, "so does the values'"
    assert metrics["loss"] == pytest.approx(np.mean([policy for policy, *_ in found]), rel=2e-3, abs=2e-4)
    names = ["ppo/loss/value", "ppo/policy/clipfrac", "ppo/val/clipfrac"]
    assert [metrics[name] for name in names] == pytest.approx(by_hand[1:].tolist(), rel=5e-3)
    ours = logical_tensors(model)
    theirs = dict(twin.named_parameters())
    moved = dict(zip(theirs, before, strict=False))
    for name, parameter in theirs.items():
        expected, start = parameter.detach(), moved[name]
        largest = (expected - start).abs().max().item()
        assert largest > 1e-3
        torch.testing.assert_close(ours[name].double(), expected, rtol=0, atol=0.02 * largest, msg=name)
    for mine, expected, start in zip(critic.module.parameters(), head.parameters(), before[-2:], strict=True):
        largest = (expected - start).abs().max().item()
        assert largest > 1e-3
        torch.testing.assert_close(mine.detach().double(), expected.detach(), rtol=0, atol=0.01 * largest)
