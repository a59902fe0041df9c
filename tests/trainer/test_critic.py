"""The critic in the training step: its losses and gradients against single sequences, in float64 where it matters."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from covering import covering, with_slow
from training_data import (
    TINY,
    Recording,
    hugging_face_twin,
    load_checkpoint,
    make_groups,
    run_config,
    save_checkpoint,
    sharing_prompts,
    tiny_policy,
)

from slipstream.algorithms.losses import LOSSES
from slipstream.algorithms.losses.spec import RATIO_EDGES, ratio_shares
from slipstream.algorithms.reduce import metric_values
from slipstream.batching import collate as batching
from slipstream.core.errors import CheckpointError, NonFiniteError
from slipstream.models.attention import PackedAttention
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.scalar import new_scalar_model, save_scalar_model
from slipstream.models.tokenizer import CharTokenizer
from slipstream.trainer.batch import train_sequence
from slipstream.trainer.critic import Critic
from slipstream.trainer.measure import Auxiliary
from slipstream.trainer.metric_names import SAME, published_names
from slipstream.trainer.optim import AdamW
from slipstream.trainer.step import train_on_batch
from slipstream.trainer.teacher import Teacher

UNCLIPPED = {"lr": 1e-3, "max_grad_norm": 1e9}
POLICY_LOSSES = sorted(name for name, loss in LOSSES.items() if loss.kind == "policy")
EACH_KIND = ["aipo", "best_of_n", "distill", "gspo", "m2po", "oapl", "online_ipo"]
"""Of tokens, sequences and pairs; with a teacher, a cutoff, chosen samples and regressed ones."""
OF_MOST_SUMS = ["distill", "m2po", "online_dpo", "proximal_rloo"]
"""One of each unit, and those that measure more before the update."""


def actor_critic(*, seed=0, **changes):
    """Policy, its optimizer and the auxiliary models of a config with a critic."""
    sections = {
        "loss": {"name": "ppo", "advantages": "gae"},
        "trainer": {"optimizer": UNCLIPPED},
        **changes,
    }
    critic = {"optimizer": UNCLIPPED, "head_init": "reward", **sections.pop("critic", {})}
    config = run_config(critic=critic, **sections)
    model, flat = tiny_policy(seed)
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=100)
    reference = new_model(TINY, model.config.vocab_size, 7)
    critic = Critic(config, model) if config.has_critic else None
    teacher = Teacher.of(config, CharTokenizer("abc"), new_model(TINY, model.config.vocab_size, 8))
    return (
        config,
        model,
        flat,
        optimizer,
        Auxiliary(reference, critic, teacher=teacher if config.teacher.path else None),
    )


def step(config, model, optimizer, auxiliary, groups, *, number=0, edge=batching):
    return train_on_batch(model, optimizer, groups, config=config, step=number, batching=edge, auxiliary=auxiliary)


def final_states(model, tokens):
    tokens = torch.from_numpy(tokens.astype(np.int64))
    return model(tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)]))


def gae_loop(rewards, values, *, gamma, lam):
    advantages, following, carried = np.zeros(len(values)), 0.0, 0.0
    for t in reversed(range(len(values))):
        delta = rewards[t] + gamma * following - values[t]
        carried = delta + gamma * lam * carried
        following = values[t]
        advantages[t] = carried
    return advantages, advantages + values


@pytest.mark.parametrize("kind", ["own", "head"])
@pytest.mark.parametrize("capacity", [10_000, 30])
def test_losses_and_gradients_equal_single_sequences(kind, capacity):
    """PPO's and the value loss, sequence by sequence: a head's gradient reaches the trunk, an own critic's does not."""
    groups = sharing_prompts(make_groups(seed=2, given=True))
    config, model, _, optimizer, auxiliary = actor_critic(
        critic={"model": kind, "gamma": 0.9, "lam": 0.8, "coef": 0.7},
        trainer={"optimizer": UNCLIPPED, "microbatch_tokens": capacity},
    )
    critic = auxiliary.critic
    policy_twin, critic_twin = copy.deepcopy(model), copy.deepcopy(critic.module)
    num_tokens = 0
    policy_loss = value_loss = torch.zeros((), dtype=torch.float64)
    for group in groups:
        for rollout in group.rollouts:
            sequence = train_sequence(rollout.completion)
            rows = torch.from_numpy(np.flatnonzero(sequence.mask) - 1)
            targets = torch.from_numpy(sequence.tokens[sequence.mask].astype(np.int64))
            states = final_states(policy_twin, sequence.tokens)[rows]
            if kind == "head":
                values = critic_twin(states).squeeze(-1).double()
            else:
                values = final_states(critic_twin, sequence.tokens)[rows].double()
            logprobs = torch.log_softmax(policy_twin.logits(states), -1).gather(1, targets[:, None]).squeeze(1).double()
            rewards = [*np.zeros(len(targets) - 1), rollout.reward]
            advantages, returns = gae_loop(rewards, values.detach().numpy(), gamma=0.9, lam=0.8)
            ratios = (logprobs - torch.from_numpy(sequence.behaviour_logprobs[sequence.mask]).double()).exp()
            advantages = torch.from_numpy(advantages)
            surrogate = torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
            policy_loss = policy_loss - surrogate.sum()
            value_loss = value_loss + 0.5 * (values - torch.from_numpy(returns)).square().sum()
            num_tokens += len(targets)
    policy_loss, value_loss = policy_loss / num_tokens, value_loss / num_tokens
    (policy_loss + 0.7 * value_loss).backward()

    metrics = step(config, model, optimizer, auxiliary, groups)
    assert metrics["loss"] == pytest.approx(policy_loss.item(), rel=1e-4, abs=1e-6)
    assert metrics["value_loss"] == pytest.approx(value_loss.item(), rel=1e-4)
    for ours, twin in ((model, policy_twin), (critic.module, critic_twin)):
        for (name, mine), theirs in zip(ours.named_parameters(), twin.parameters(), strict=True):
            scale = theirs.grad.abs().max().item()
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4 * scale + 1e-7, msg=name)
    norms = [
        torch.cat([p.grad.flatten() for p in twin.parameters()]).norm().item() for twin in (policy_twin, critic_twin)
    ]
    assert metrics["grad_norm"] == pytest.approx(norms[0], rel=1e-3)
    assert metrics["critic_grad_norm"] == pytest.approx(norms[1], rel=1e-3)


def test_values_move_at_most_by_the_clip_before_their_gradient_ends():
    groups = make_groups()
    moved = []
    for clip in (1e-6, math.inf):
        config, model, _, optimizer, auxiliary = actor_critic(
            critic={"clip": clip, "optimizer": {"lr": 1e-2}}, trainer={"epochs": 4, "optimizer": UNCLIPPED}
        )
        metrics = step(config, model, optimizer, auxiliary, groups)
        moved.append((metrics["value_clipped_frac"], metrics["value_loss"]))
    assert moved[0][0] > 0.2
    assert moved[1][0] == 0.0
    assert moved[1][1] < moved[0][1]


def test_an_own_critic_leaves_the_policy_alone_and_a_zero_head_at_first():
    groups = make_groups()
    weights = []
    for changes in ({"model": "own", "head_init": "zero"}, {"model": "head", "head_init": "zero"}):
        config, model, flat, optimizer, auxiliary = actor_critic(critic=changes)
        step(config, model, optimizer, auxiliary, groups)
        weights.append(flat.flat)
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-7)


def test_where_a_critic_starts(tmp_path):
    policy, _ = tiny_policy()
    saved = new_scalar_model(new_model(TINY, policy.config.vocab_size, 3), head_init="reward", seed=5)
    save_scalar_model(saved, tmp_path / "reward_model")
    save_model(new_model(TINY, policy.config.vocab_size, 4), tmp_path / "policy")

    def critic_of(**critic):
        return Critic(run_config(loss={"name": "ppo", "advantages": "gae"}, critic=critic, seed=1), policy)

    fresh = critic_of()
    assert not fresh.is_head
    assert not fresh.module.head.weight.any()
    torch.testing.assert_close(fresh.module.backbone.embedding.weight, policy.embedding.weight, rtol=0, atol=0)
    assert fresh.module.backbone.embedding.weight.data_ptr() != policy.embedding.weight.data_ptr()
    from_reward_model = critic_of(path=str(tmp_path / "reward_model"))
    torch.testing.assert_close(from_reward_model.module.head.weight, saved.head.weight, rtol=0, atol=0)
    from_policy = critic_of(path=str(tmp_path / "policy"), head_init="reward")
    assert from_policy.module.head.weight.std().item() == pytest.approx(17**-0.5, rel=0.6)
    head = critic_of(model="head", head_init="reward")
    assert head.parameters.flat.numel() == 16 + 1
    again = critic_of(model="head", head_init="reward")
    assert torch.equal(head.parameters.flat, again.parameters.flat)


@pytest.mark.parametrize("kind", ["own", "head"])
def test_a_nan_in_the_critic_changes_no_weight_of_either(kind):
    config, model, flat, optimizer, auxiliary = actor_critic(critic={"model": kind})
    with torch.no_grad():
        auxiliary.critic.parameters.flat[-1] = math.nan
    before = flat.flat.clone(), auxiliary.critic.parameters.flat.clone()
    with pytest.raises(NonFiniteError):
        step(config, model, optimizer, auxiliary, make_groups())
    assert torch.equal(before[0], flat.flat)
    torch.testing.assert_close(before[1], auxiliary.critic.parameters.flat, rtol=0, atol=0, equal_nan=True)
    assert optimizer.num_updates == auxiliary.critic.optimizer.num_updates == 0


@pytest.mark.parametrize("kind", ["own", "head"])
def test_resumed_with_a_critic_equals_uninterrupted_bit_for_bit(kind, tmp_path):
    def fresh(seed):
        return actor_critic(
            seed=seed,
            critic={"model": kind, "optimizer": {"lr": 1e-3, "schedule": "linear"}},
            trainer={"epochs": 2, "minibatches": 2, "shuffle": True, "optimizer": UNCLIPPED},
        )

    config, model, flat, optimizer, auxiliary = fresh(0)
    step(config, model, optimizer, auxiliary, make_groups())
    critic = auxiliary.critic
    save_checkpoint(tmp_path / "step_1", (model, optimizer), step=1, critic=(critic.module, critic.optimizer))
    _, other_model, other_flat, other_optimizer, other = fresh(1)
    other_critic = other.critic.module, other.critic.optimizer
    load_checkpoint(tmp_path / "step_1", (other_model, other_optimizer), critic=other_critic)
    for number in range(1, 3):
        groups = make_groups(seed=number, version=number)
        ours = step(config, model, optimizer, auxiliary, groups, number=number)
        theirs = step(config, other_model, other_optimizer, other, groups, number=number)
        assert {k: v for k, v in ours.items() if k != "train_s"} == {k: v for k, v in theirs.items() if k != "train_s"}
    assert torch.equal(flat.flat, other_flat.flat)
    assert torch.equal(critic.parameters.flat, other.critic.parameters.flat)


def test_a_checkpoint_without_the_critic_is_refused(tmp_path):
    _, model, _, optimizer, auxiliary = actor_critic()
    save_checkpoint(tmp_path / "step_1", (model, optimizer), step=1)
    critic = auxiliary.critic
    with pytest.raises(CheckpointError, match="another model"):
        load_checkpoint(tmp_path / "step_1", (model, optimizer), critic=(critic.module, critic.optimizer))


# Every policy loss


def settings_of(name):
    return {"name": name} | ({"select": "best_and_worst"} if LOSSES[name].atom == "pair" else {})


def teacher_of(name):
    return {"path": "teacher"} if "teacher_divergences" in LOSSES[name].requires else {}


@pytest.mark.parametrize(
    ("name", "capacity"),
    with_slow(
        [(name, 40) for name in EACH_KIND],
        [(name, 40) for name in POLICY_LOSSES if name not in EACH_KIND] + [(name, 1) for name in POLICY_LOSSES],
    ),
)
def test_a_step_does_not_depend_on_its_microbatches(name, capacity):
    groups = sharing_prompts(make_groups(5, 4, seed=4, given=True))
    found = []
    for num_tokens in (10_000, capacity):
        config, model, _, optimizer, auxiliary = actor_critic(
            loss=settings_of(name),
            teacher=teacher_of(name),
            trainer={"optimizer": UNCLIPPED, "microbatch_tokens": num_tokens},
        )
        metrics = step(config, model, optimizer, auxiliary, groups)
        found.append((metrics, optimizer.parameters.grad.clone()))
    (whole, gradient), (metrics, grad) = found
    assert whole["num_microbatches"] == 1
    assert gradient.abs().max() > 0
    assert metrics["num_microbatches"] > 1
    torch.testing.assert_close(grad, gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())
    assert metrics.keys() == whole.keys()
    for metric, value in whole.items():
        if metric not in ("train_s", "num_microbatches", "padding_frac", "padded_layout_frac", "tokens_read"):
            assert metrics[metric] == pytest.approx(value, rel=1e-3, abs=1e-5), metric


@pytest.mark.parametrize(("estimator", "reduction"), covering(["k2", "k3"], ["token", "sequence", "constant"]))
def test_kl_in_the_loss_against_float64(reduction, estimator):
    """What the penalty adds to the gradient, by the loss's own reduction, against transformers' model in float64."""
    groups = make_groups(seed=6)
    grads = []
    for coef in (0.0, 0.5):
        config, model, _, optimizer, auxiliary = actor_critic(
            loss={"name": "grpo", "reduction": reduction, "advantages": "group_mean"},
            kl={"coef": coef, "place": "loss", "estimator": estimator},
            generator={"max_new_tokens": 16, "temperature": 0.8},
        )
        twin, frozen = hugging_face_twin(model), hugging_face_twin(auxiliary.reference)
        metrics = step(config, model, optimizer, auxiliary, groups)
        grads.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert metrics["kl_coef"] == 0.5
    sums, counts = [], []
    for group in groups:
        for rollout in group.rollouts:
            sequence = train_sequence(rollout.completion)
            ids = torch.from_numpy(sequence.tokens.astype(np.int64))
            at = torch.from_numpy(sequence.mask[1:])

            def logprobs(of, ids=ids, at=at):
                every = torch.log_softmax(of(ids[None]).logits[0, :-1] / 0.8, -1).gather(1, ids[1:, None]).squeeze(1)
                return every[at]

            log_ratio = logprobs(frozen).detach() - logprobs(twin)
            kl = log_ratio.square() / 2 if estimator == "k2" else log_ratio.exp() - 1 - log_ratio
            sums.append(kl.sum())
            counts.append(len(kl))
    total = {
        "token": sum(sums) / sum(counts),
        "sequence": sum(s / n for s, n in zip(sums, counts, strict=True)) / len(sums),
        "constant": sum(sums) / (16 * len(sums)),
    }[reduction]
    (0.5 * total).backward()
    expected = twin.model.embed_tokens.weight.grad
    added = (grads[1]["embedding.weight"] - grads[0]["embedding.weight"]).double()
    torch.testing.assert_close(added, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


# Minibatches


def test_groups_are_dealt_anew_in_every_epoch_by_seed_and_step():
    groups = make_groups(8)

    def dealt(*, seed=0, shuffle=True, number=0, epochs=1):
        trainer = {"minibatches": 4, "epochs": epochs, "shuffle": shuffle}
        config, model, _, optimizer, auxiliary = actor_critic(loss={"name": "grpo"}, trainer=trainer)
        config, recording = config.model_copy(update={"seed": seed}), Recording()
        step(config, model, optimizer, auxiliary, make_groups(8, version=number), number=number, edge=recording)
        return [sorted({key[0] for microbatch in packed for key in microbatch.keys}) for packed in recording.packed]

    first = dealt(epochs=3)
    epochs = [first[start : start + 4] for start in (0, 4, 8)]
    for epoch in epochs:
        assert sorted(ordinal for part in epoch for ordinal in part) == [group.ordinal for group in groups]
    assert epochs[0] != epochs[1] != epochs[2]
    assert dealt(epochs=2) == first[:8]
    assert dealt(seed=1) != first[:4]
    assert dealt(number=1) != first[:4]
    assert dealt(shuffle=False, epochs=2) == [[0, 4], [1, 5], [2, 6], [3, 7]]


# Published names


@torch.no_grad()
def published_by_hand(model, auxiliary, groups, *, kl_coef):
    """Means and variances over all sampled tokens before any update, sequence by sequence."""
    columns = []
    for rollout in [rollout for group in groups for rollout in group.rollouts]:
        sequence = train_sequence(rollout.completion)
        at, targets = np.flatnonzero(sequence.mask) - 1, sequence.tokens[sequence.mask]
        behaviour, places = sequence.behaviour_logprobs[sequence.mask], np.arange(len(targets))
        policy, reference = (
            torch.log_softmax(one.logits(final_states(one, sequence.tokens)[at]).double(), -1).numpy()
            for one in (model, auxiliary.reference)
        )
        rewards = -kl_coef * (behaviour - reference[places, targets])
        rewards[-1] += rollout.reward
        values = final_states(auxiliary.critic.module, sequence.tokens)[at].double().numpy()
        advantages, returns = gae_loop(rewards, values, gamma=1.0, lam=0.95)
        ratios = np.exp(policy[places, targets] - behaviour)
        columns.append([values, advantages, returns, ratios, -(np.exp(policy) * policy).sum(-1)])
    values, advantages, returns, ratios, entropies = np.concatenate(columns, axis=1)
    return {
        "ppo/val/mean": values.mean(),
        "ppo/val/var": values.var(),
        "ppo/val/advantage": advantages.mean(),
        "ppo/val/advantage_var": advantages.var(),
        "ppo/val/ratio": ratios.mean(),
        "ppo/val/ratio_var": ratios.var(),
        "ppo/returns/mean": returns.mean(),
        "ppo/returns/var": returns.var(),
        "ppo/policy/entropy": entropies.mean(),
    }


def test_published_names_of_a_step_with_a_critic():
    groups = make_groups()
    config, model, _, optimizer, auxiliary = actor_critic(
        kl={"coef": 0.2}, critic={"coef": 0.1}, trainer={"optimizer": UNCLIPPED | {"lr": 2e-3}}
    )
    expected = published_by_hand(model, auxiliary, groups, kl_coef=0.2)
    metrics = step(config, model, optimizer, auxiliary, groups)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert metrics["ppo/lr"] == 2e-3
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert metrics["objective/score"] == pytest.approx(np.mean([rollout.reward for rollout in rollouts]))
    assert metrics["objective/kl_coef"] == 0.2
    assert metrics["objective/non_score_reward"] == pytest.approx(-0.2 * metrics["objective/kl"])
    assert metrics["objective/score_total"] == pytest.approx(
        metrics["objective/score"] + metrics["objective/non_score_reward"]
    )
    surprisal = [-rollout.completion.segments[0].behaviour_logprobs.sum() for rollout in rollouts]
    assert metrics["objective/entropy"] == pytest.approx(np.mean(surprisal), rel=1e-5)
    assert metrics["ppo/loss/total"] == pytest.approx(metrics["ppo/loss/policy"] + 0.1 * metrics["ppo/loss/value"])
    assert metrics["ppo/val/vpred"] == pytest.approx(metrics["ppo/val/mean"], abs=1e-5)  # nothing has moved yet
    assert metrics["ppo/val/var_explained"] == pytest.approx(
        1 - metrics["ppo/val/error"] / metrics["ppo/returns/var"], rel=1e-6
    )
    assert metrics["ppo/policy/approxkl"] == metrics["kl_k2"]
    assert metrics["ppo/episode"] == 12
    assert metrics["elapsed/updates"] == 1
    assert metrics["elapsed/steps/serial"] == 16
    assert metrics["elapsed/steps/total"] == 12 * 16
    assert all(name in metrics for names in SAME.values() for name in names)
    unmeasured = {name: value for name, value in metrics.items() if "ratio" not in name}  # by a loss of one's own
    found = published_names(unmeasured, value_coef=0.1, step=0, num_episodes=12, max_new_tokens=16, num_eos_tokens=0)
    assert found["ppo/loss/total"] == metrics["ppo/loss/total"]
    assert not [name for name in found if "ratio" in name]
    assert all(math.isfinite(value) for value in metrics.values())


def test_end_tokens_are_counted_wherever_they_are():
    groups = make_groups()
    tokens = np.concatenate([rollout.completion.tokens for group in groups for rollout in group.rollouts])
    config, model, _, optimizer, auxiliary = actor_critic()
    for ids in ((), (3,), (3, 7)):
        model.config = replace(model.config, eos_token_ids=ids)
        metrics = step(config, model, optimizer, auxiliary, groups)
        assert metrics["ppo/val/num_eos_tokens"] == np.isin(tokens, ids).sum()
    assert metrics["ppo/val/num_eos_tokens"] > 1


@pytest.mark.parametrize("capacity", [10_000, 30])
def test_the_histogram_of_ratios_counts_every_token_in_its_bin(capacity):
    groups = make_groups(8, seed=3)
    config, model, _, optimizer, auxiliary = actor_critic(
        trainer={"optimizer": UNCLIPPED, "microbatch_tokens": capacity}
    )
    ratios = []
    for group in groups:
        for rollout in group.rollouts:
            sequence = train_sequence(rollout.completion)
            states = final_states(model, sequence.tokens)[torch.from_numpy(np.flatnonzero(sequence.mask) - 1)]
            targets = torch.from_numpy(sequence.tokens[sequence.mask].astype(np.int64))
            logprobs = torch.log_softmax(model.logits(states), -1).gather(1, targets[:, None]).squeeze(1)
            ratios.append(np.exp(logprobs.detach().numpy() - sequence.behaviour_logprobs[sequence.mask]))
    metrics = step(config, model, optimizer, auxiliary, groups)
    counted, _ = np.histogram(np.concatenate(ratios), bins=[*RATIO_EDGES, np.inf])
    assert np.count_nonzero(counted) > 4
    for prefix in ("ratio_share/", "ppo/val/ratio_hist/"):
        found = [metrics[f"{prefix}{edge:g}"] for edge in RATIO_EDGES]
        np.testing.assert_allclose(found, counted / counted.sum(), atol=1e-9)


def test_ratios_beyond_all_edges_and_on_them_are_counted_and_masked_ones_are_not():
    shares = metric_values(
        ratio_shares(
            torch.tensor([1.0, 1.02, math.inf, 0.0, 4.0, 4.0]), torch.tensor([True, True, True, True, True, False])
        )
    )
    found = {name.removeprefix("ratio_share/"): share for name, share in shares.items() if share}
    assert found == pytest.approx({"0.98": 0.2, "1.02": 0.2, "4": 0.4, "0": 0.2})


def test_without_a_critic_the_names_are_ours_alone():
    config, model, _, optimizer, auxiliary = actor_critic(loss={"name": "grpo"})
    metrics = step(config, model, optimizer, auxiliary, make_groups())
    assert not any(name.startswith(("ppo/", "objective/", "elapsed/")) for name in metrics)


def test_published_names_of_a_step_that_trained_nothing():
    config, model, _, optimizer, auxiliary = actor_critic(
        loss={"name": "ppo", "advantages": "gae", "truncated": "mask"}, kl={"coef": 0.2, "target": 6.0}
    )
    metrics = step(config, model, optimizer, auxiliary, make_groups(finish_reason="length"))
    assert metrics["num_updates"] == 0
    assert "ppo/loss/value" not in metrics
    assert metrics["objective/kl"] == metrics["kl_reference_sum"]  # the penalty is measured on what was sampled
    counts = {"step": 0, "num_episodes": 4, "max_new_tokens": 5, "num_eos_tokens": 0}
    assert published_names({"score_mean": 1.0}, value_coef=0.1, **counts)["objective/score_total"] == 1.0


@pytest.mark.parametrize("name", with_slow(OF_MOST_SUMS, sorted({*POLICY_LOSSES} - {*OF_MOST_SUMS})))
def test_the_same_step_of_every_loss_gives_the_same_bits(name):
    """Two threads, shared prompts, everything measured: no order of additions may be left open."""
    groups = sharing_prompts(make_groups(num_groups=24, num_samples=8))
    is_token = LOSSES[name].unit == "token"
    is_pair = LOSSES[name].atom == "pair"
    num_threads = torch.get_num_threads()
    weights = []
    try:
        torch.set_num_threads(2)
        for _ in range(2):
            config, model, flat, optimizer, auxiliary = actor_critic(
                loss=settings_of(name) | ({"advantages": "gae"} if is_token else {}),
                teacher=teacher_of(name),
                kl={"coef": 0.1} | ({"place": "loss", "estimator": "k3"} if is_pair or name == "best_of_n" else {}),
                critic={"model": "head"},
            )
            step(config, model, optimizer, auxiliary, groups)
            weights.append(flat.flat)
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(weights[0], weights[1])
