"""An update with NaN or inf is refused before it changes a weight, on all ranks alike, and says where it came from."""

import json
import math

import msgspec
import numpy as np
import pytest
import torch
from rank_threads import on_ranks, results
from test_over_ranks import SummedAdamW, dealt, heads_of
from test_poisoned import Run, replaced, with_logprobs
from training_data import VOCAB_SIZE, make_groups, run_config, tiny_policy

from slipstream.batching import collate
from slipstream.core.errors import NonFiniteError
from slipstream.core.stage_sections import WarmStartConfig
from slipstream.core.training_sections import OptimizerConfig
from slipstream.core.types import StepDone, TrainStep
from slipstream.trainer import inbox
from slipstream.trainer.critic import Critic
from slipstream.trainer.measure import Auxiliary
from slipstream.trainer.optim import AdamW
from slipstream.trainer.step import train_on_batch
from slipstream.trainer.supervised import supervised_updates
from slipstream.trainer.update import Updater


class Remembering(AdamW):
    """Keeps what weights and moments were after every update."""

    def remember(self, flat):
        self.flat, self.after = flat, [self.now(flat)]
        return self

    def now(self, flat):
        moments = [torch.cat([view.flatten() for view in views.values()]) for views in self.named_moments().values()]
        return [flat.flat.clone(), *moments]

    def step(self, **scaled):
        norm = super().step(**scaled)
        self.after.append(self.now(self.flat))
        return norm


def refused(groups, config, *, spoil=lambda model, critic: None):
    """The error, what weights and moments were after each update made, and what they are now."""
    model, flat = tiny_policy()
    optimizer = Remembering(flat, config.trainer.optimizer, total_updates=100).remember(flat)
    critic = Critic(config, model) if config.has_critic else None
    reference = tiny_policy(1)[0] if config.kl.coef else None
    spoil(model, critic)
    optimizer.after = [optimizer.now(flat)]
    values = None if critic is None else critic.parameters.flat.clone()
    with pytest.raises(NonFiniteError) as caught:
        train_on_batch(
            model, optimizer, groups, config=config, step=7, batching=collate, auxiliary=Auxiliary(reference, critic)
        )
    if critic is not None:
        torch.testing.assert_close(critic.parameters.flat, values, rtol=0, atol=0, equal_nan=True)
    return caught.value, optimizer.after, optimizer.now(flat)


def assert_unchanged(after, now):
    for before, found in zip(after[-1], now, strict=True):
        torch.testing.assert_close(found, before, rtol=0, atol=0, equal_nan=True)


PATHS = {
    "adamw": {},
    "tensorflow": {"trainer": {"optimizer": {"adam": "tensorflow"}}},
    "decay": {"trainer": {"optimizer": {"weight_decay": 0.1}}},
    "critic": {"loss": {"name": "ppo", "advantages": "gae"}, "critic": {"model": "own"}},
    "critic head": {"loss": {"name": "ppo", "advantages": "gae"}, "critic": {"model": "head"}},
    "kl in the loss": {"kl": {"coef": 0.1, "place": "loss", "estimator": "k3"}},
    "kl in the reward": {"kl": {"coef": 0.1, "place": "reward", "estimator": "k1"}},
    "small microbatches": {"trainer": {"microbatch_tokens": 16}},
}


@pytest.mark.parametrize("name", PATHS)
def test_a_bad_rollout_is_named_and_changes_nothing(name):
    config = run_config(max_staleness=9, **PATHS[name])
    groups = replaced(make_groups(version=7), (2, 1), lambda one: with_logprobs(one, math.nan))
    error, after, now = refused(groups, config)
    assert len(after) == 1
    assert_unchanged(after, now)
    assert error.what.startswith("step 7, epoch 0, minibatch 0:")
    assert "2/1" in str(error)
    terms = {finding["term"]: finding["rollouts"] for finding in error.report["findings"]}
    assert terms["behaviour logprob"] == [[2, 1]]
    assert len(error.report["rollouts"]) == 12


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_later_update_that_is_refused_leaves_what_the_one_before_it_made(at, monkeypatch):
    """Two minibatches, two epochs: the rollout is sound until update `at` of the four reads it."""
    config = run_config(max_staleness=9, trainer={"minibatches": 2, "epochs": 2})
    calls = []
    make = Updater.make

    def spoiled(self, update):
        if len(calls) == at:
            update.microbatches[0].behaviour_logprobs[-1] = math.nan
        calls.append(1)
        return make(self, update)

    monkeypatch.setattr(Updater, "make", spoiled)
    error, after, now = refused(make_groups(version=7), config)
    assert len(after) == 1 + at
    assert not torch.equal(after[0][0], after[-1][0])
    assert_unchanged(after, now)
    assert error.what.startswith(f"step 7, epoch {at // 2}, minibatch {at % 2}:")
    assert error.report["update"] == at
    assert len(error.report["rollouts"]) == 6


def test_weights_that_are_not_finite_are_found_in_the_policys_logprobs():
    def spoil(model, critic):
        with torch.no_grad():
            model.final_norm.weight[0] = math.inf

    error, after, now = refused(make_groups(version=7), run_config(max_staleness=9), spoil=spoil)
    assert_unchanged(after, now)
    assert [finding["term"] for finding in error.report["findings"]] == ["policy logprob", "entropy"]


def test_a_critic_that_is_not_finite_is_told_from_the_policy():
    config = run_config(max_staleness=9, **PATHS["critic"])

    def spoil(model, critic):
        with torch.no_grad():
            critic.parameters.flat[-1] = math.nan

    error, after, now = refused(make_groups(version=7), config, spoil=spoil)
    assert_unchanged(after, now)
    assert error.report["findings"]


def test_a_gradient_that_overflows_names_its_parameters():
    """The loss is finite: only the backward pass is not, in one layer."""
    config = run_config(max_staleness=9)

    def spoil(model, critic):
        model.layers[1].down.weight.register_hook(lambda grad: torch.full_like(grad, math.inf))

    error, after, now = refused(make_groups(version=7), config, spoil=spoil)
    assert len(after) == 1
    assert_unchanged(after, now)
    assert error.report["parameters"] == ["layers.1.down.weight"]
    assert "not finite in layers.1.down.weight" in str(error)
    assert "one of 12 rollouts" in str(error)


def test_a_norm_that_overflows_without_any_bad_number_says_so():
    _, flat = tiny_policy()
    optimizer = AdamW(flat, OptimizerConfig(), total_updates=1)
    optimizer.zero_grad()
    optimizer.parameters.grad.fill_(1e30)
    before = flat.flat.clone()
    with pytest.raises(NonFiniteError, match="their squares overflow"):
        optimizer.step()
    assert torch.equal(flat.flat, before)


@pytest.mark.parametrize("term", ["loss", "gradient"])
def test_all_ranks_refuse_with_the_same_words(term):
    config = run_config(max_staleness=9)
    groups = make_groups(version=7)
    if term == "loss":
        groups = replaced(groups, (2, 1), lambda one: with_logprobs(one, math.nan))
    shares, heads = dealt(groups, config, 3), heads_of(groups, config)

    def job(ranks):
        model, flat = tiny_policy()
        optimizer = SummedAdamW(flat, config.trainer.optimizer, total_updates=9).over(ranks)
        if term == "gradient" and ranks.rank == 1:
            model.layers[0].qkv.weight.register_hook(lambda grad: torch.full_like(grad, math.nan))
        before = flat.flat.clone()
        with pytest.raises(NonFiniteError) as caught:
            train_on_batch(
                model,
                optimizer,
                shares[ranks.rank],
                config=config,
                step=7,
                batching=collate,
                heads=heads,
                ranks=ranks,
            )
        return str(caught.value), caught.value.report["rollouts"], torch.equal(flat.flat, before)

    found = results(on_ranks(3, job))
    assert found[0] == found[1] == found[2]
    assert found[0][2]
    assert len(found[0][1]) == 12
    if term == "loss":
        assert "behaviour logprob of 2/1" in found[0][0]


def test_a_demonstration_that_breaks_the_warm_start_is_named():
    model, flat = tiny_policy()
    with torch.no_grad():
        model.embedding.weight[5] = math.inf
    optimizer = AdamW(flat, OptimizerConfig(), total_updates=3)
    before = flat.flat.clone()
    demonstrations = [(np.array([1, 2], np.int32), np.array([3, 5, 4], np.int32))] * 4
    updates = supervised_updates(
        model,
        optimizer,
        demonstrations,
        config=WarmStartConfig(steps=3, batch_size=2, num_demonstrations=4),
        microbatch_tokens=64,
        seed=0,
        batching=collate,
    )
    with pytest.raises(NonFiniteError, match=r"on demonstrations \d, \d") as caught:
        next(updates)
    assert len(caught.value.report["demonstrations"]) == 2
    assert torch.equal(flat.flat, before)


def test_the_trainer_leaves_a_report_and_tells_nobody_of_the_step(tmp_path, monkeypatch):
    """As it would be if vetting were blind: the rollout arrives, and the step refuses it."""
    monkeypatch.setattr(inbox, "vetted", lambda rollout, limits, newest_version: rollout)
    run = Run(tmp_path)
    groups = replaced(make_groups(4), (1, 2), lambda one: with_logprobs(one, math.nan))
    for group in groups:
        for rollout in group.rollouts:
            run.rollouts.put(rollout)
    run.step()
    before = run.trainer.policy.parameters.flat.clone()
    num_offered = len(run.trainer.publisher.offered)
    run.commands.put(TrainStep(step=0, ordinals=(0, 1, 2, 3)))
    with pytest.raises(NonFiniteError, match=r"refused_step_0\.json"):
        run.step()
    assert torch.equal(run.trainer.policy.parameters.flat, before)
    assert not run.of(StepDone)
    assert (run.trainer.version, len(run.trainer.publisher.offered)) == (0, num_offered)
    report = json.loads((tmp_path / "refused_step_0.json").read_text())
    assert report["step"] == 0
    assert {"term": "behaviour logprob", "rollouts": [[1, 2]]} in report["findings"]
    assert len(report["heads"]) == 12
    (suspect,) = report["suspects"]
    assert (suspect["ordinal"], suspect["sample"]) == (1, 2)
    assert suspect["segments"][0]["behaviour_logprobs"][-1] is None
    assert all(0 <= token < VOCAB_SIZE for token in suspect["segments"][0]["tokens"])
    assert msgspec.json.decode((tmp_path / "refused_step_0.json").read_bytes())
    run.trainer.close()
