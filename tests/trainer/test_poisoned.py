"""A poisoned completion costs its own tokens and nothing else, whatever the loss; the trainer outlives all of them."""

import math
from contextlib import closing

import msgspec
import numpy as np
import pytest
import torch
from test_executor_over_ranks import Offers, Port, Spans, demonstrations
from training_data import TINY, make_groups, make_rollout, run_config, scored_group, tiny_policy

from slipstream.batching import collate
from slipstream.batching.buffer import GroupBuffer
from slipstream.core.clock import WallClock
from slipstream.core.executor import Context
from slipstream.core.rank_group import RankGroup
from slipstream.core.run_log import read_rollouts
from slipstream.core.service_messages import Counters, Ready
from slipstream.core.types import Group, GroupScored, Skip, StepDone, Stop, TrainStep, VersionSpan
from slipstream.core.vetting import POISONED, Limits, vetted
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.tokenizer import CharTokenizer
from slipstream.observe.tokens import read_tokens
from slipstream.trainer.critic import Critic
from slipstream.trainer.executor import Trainer
from slipstream.trainer.measure import Auxiliary
from slipstream.trainer.optim import AdamW
from slipstream.trainer.scores import has_signal, selected
from slipstream.trainer.step import train_on_batch


def with_logprobs(rollout, value):
    segment = rollout.completion.segments[0]
    logprobs = segment.behaviour_logprobs.copy()
    logprobs[-1] = value
    return with_segment(rollout, behaviour_logprobs=logprobs)


def with_segment(rollout, **changes):
    segment = msgspec.structs.replace(rollout.completion.segments[0], **changes)
    completion = msgspec.structs.replace(rollout.completion, segments=(segment, *rollout.completion.segments[1:]))
    return msgspec.structs.replace(rollout, completion=completion)


def replaced(groups, place, change):
    ordinal, sample = place
    return [
        Group(
            ordinal=group.ordinal,
            rollouts=tuple(
                change(one) if (one.ordinal, one.sample) == (ordinal, sample) else one for one in group.rollouts
            ),
        )
        for group in groups
    ]


def trained(groups, config):
    model, flat = tiny_policy()
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=100)
    critic = Critic(config, model) if config.has_critic else None
    reference = tiny_policy(1)[0] if config.kl.coef else None
    metrics = train_on_batch(
        model, optimizer, groups, config=config, step=0, batching=collate, auxiliary=Auxiliary(reference, critic)
    )
    return flat.flat.clone(), metrics


LOSSES = {
    "aipo": {"loss": {"name": "aipo"}},
    "grpo": {"loss": {"name": "grpo", "advantages": "group_normalised"}},
    "leave_one_out": {"loss": {"name": "reinforce", "advantages": "leave_one_out"}},
    "gae": {"loss": {"name": "ppo", "advantages": "gae"}, "critic": {"model": "own"}},
    "kl_in_reward": {"loss": {"name": "grpo"}, "kl": {"coef": 0.1, "place": "reward", "estimator": "k1"}},
    "kl_in_loss": {"loss": {"name": "grpo"}, "kl": {"coef": 0.1, "place": "loss", "estimator": "k3"}},
    "whitened": {"loss": {"name": "grpo", "whiten_advantages": "batch"}},
    "minibatches": {"loss": {"name": "grpo"}, "trainer": {"minibatches": 2, "epochs": 2}},
}


# A masked completion has its KL in the baseline of the reward, one without tokens has none.
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "kl_in_reward"])
def test_a_poisoned_completion_counts_like_a_failed_one_whose_tokens_are_masked(name):
    """What masks truncated completions is written apart from what empties poisoned ones: both drop the same tokens."""
    changes = {"rewards": {"failure_reward": -1.0}, **LOSSES[name]}
    groups = make_groups(4, 3, seed=4)
    limits = Limits(failure_reward=-1.0)
    poisoned = replaced(groups, (2, 1), lambda one: vetted([with_logprobs(one, math.nan)], limits)[0])
    weights, metrics = trained(poisoned, run_config(**changes))

    def masked(one):
        completion = msgspec.structs.replace(one.completion, finish_reason="length")
        return msgspec.structs.replace(one, completion=completion, reward=-1.0, failure="timed out")

    changes["loss"] = {**changes["loss"], "truncated": "mask"}
    expected, _ = trained(replaced(groups, (2, 1), masked), run_config(**changes))
    assert torch.isfinite(weights).all()
    assert torch.equal(weights, expected)
    assert metrics["failed_frac"] == pytest.approx(1 / 12)


@pytest.mark.parametrize("name", LOSSES)
def test_what_the_poison_is_makes_no_difference(name):
    config = run_config(**LOSSES[name])
    groups = make_groups(4, 3, seed=5)
    limits = Limits(vocab_size=19)
    changes = [
        lambda one: with_logprobs(one, -math.inf),  # a ratio that every truncation would have made finite
        lambda one: with_segment(one, tokens=np.full_like(one.completion.segments[0].tokens, 10**6)),
        lambda one: msgspec.structs.replace(
            one, completion=msgspec.structs.replace(one.completion, segments=()), reward=math.nan
        ),
    ]
    found = [trained(replaced(groups, (0, 0), lambda one, c=c: vetted([c(one)], limits)[0]), config) for c in changes]
    for weights, metrics in found:
        assert torch.isfinite(weights).all()
        assert all(math.isfinite(value) for value in metrics.values())
        assert torch.equal(weights, found[0][0])


def test_a_poisoned_completion_is_in_no_pair():
    config = run_config(loss={"name": "online_dpo", "select": "best_and_worst"}, kl={"coef": 0.0})
    rng = np.random.default_rng(0)
    rollouts = [make_rollout(0, sample, rng, reward=reward) for sample, reward in enumerate((0.5, 2.0, 1.0))]
    limits = Limits(failure_reward=-9.0)  # it would be the worst

    def chosen(*poisoned):
        members = [
            vetted([with_logprobs(one, math.nan)], limits)[0] if one.sample in poisoned else one for one in rollouts
        ]
        return [
            head.sample for head in selected(scored_group(Group(ordinal=0, rollouts=tuple(members)), config), config)
        ]

    assert chosen() == [1, 0]
    assert chosen(0) == [1, 2]
    assert chosen(1) == [2, 0]
    assert chosen(0, 1) == []


@pytest.mark.parametrize("loss", [{"name": "grpo"}, {"name": "ppo", "advantages": "gae"}])
def test_a_group_that_failed_altogether_has_no_signal(loss):
    config = run_config(loss=loss)
    (group,) = make_groups(1, 3)
    failed = Group(
        ordinal=0,
        rollouts=tuple(msgspec.structs.replace(one, failure="x", reward=float(one.sample)) for one in group.rollouts),
    )
    assert not has_signal(scored_group(failed, config), config)


class Run:
    """A trainer beside its channels, driven by hand."""

    def __init__(self, run_dir, **changes):
        self.config = run_config(steps=9, warm_start={"steps": 2, "batch_size": 3}, **changes)
        self.commands, self.rollouts, self.events = Port(), Port(), Port()
        self.trainer = Trainer(
            config=self.config,
            new_buffer=lambda expects=None: GroupBuffer(self.config.samples_per_group, expects=expects),
            batching=collate,
        )
        channels = {"commands": self.commands, "rollouts": self.rollouts}, {"events": self.events}
        self.trainer.init(
            Context("trainer", run_dir, *channels, Spans(), WallClock(), publisher=Offers(), group=RankGroup.alone())
        )
        self.commands.put(demonstrations())
        while not self.of(Ready):
            self.trainer.step()

    def of(self, kind):
        return [event for event in self.events.messages if isinstance(event, kind)]

    def step(self):
        while self.trainer.step():
            pass


FROM_THE_FUTURE = (VersionSpan(start=0, version=1),)


def test_the_trainer_takes_poison_records_it_and_goes_on(tmp_path):
    run = Run(tmp_path)
    groups = make_groups(6, 3, seed=7)
    groups = replaced(groups, (0, 1), lambda one: with_logprobs(one, math.nan))
    groups = replaced(groups, (1, 0), lambda one: with_segment(one, version_spans=FROM_THE_FUTURE))
    groups = replaced(groups, (2, 2), lambda one: msgspec.structs.replace(one, reward=math.nan))
    for sample in range(3):
        groups = replaced(groups, (5, sample), lambda one: with_segment(one, tokens=one.completion.tokens + 100))
    for group in groups:
        for rollout in group.rollouts:
            run.rollouts.put(rollout)
    stray = groups[3].rollouts[0]
    for place in ({"ordinal": -1}, {"sample": 3}, {"sample": -2}):
        run.rollouts.put(msgspec.structs.replace(stray, completion=msgspec.structs.replace(stray.completion, **place)))
    run.step()
    scored = {event.ordinal: event for event in run.of(GroupScored)}
    assert {o: (e.num_failed, e.num_poisoned) for o, e in scored.items()} == {
        0: (1, 1), 1: (1, 1), 2: (1, 0), 3: (0, 0), 4: (0, 0), 5: (3, 3),
    }  # fmt: skip
    assert "behaviour logprob nan" in scored[0].failure
    assert "version 1 from the future, the newest is 0" in scored[1].failure
    assert not scored[5].has_signal
    assert run.of(Counters)[-1].values == {"refused_rollouts": 3.0}
    run.commands.put(Skip(ordinals=(5,)))
    run.commands.put(TrainStep(step=0, ordinals=(0, 1, 2, 3)))
    run.step()
    (done,) = run.of(StepDone)
    assert done.metrics["failed_frac"] == pytest.approx(3 / 12)
    sound = sum(len(s.tokens) for g in groups[:4] for r in g.rollouts for s in r.completion.segments)
    lost = groups[0].rollouts[1].completion.num_tokens + groups[1].rollouts[0].completion.num_tokens
    assert done.metrics["tokens_trained"] == sound - lost
    run.commands.put(Stop())
    run.step()
    run.trainer.close()
    lines = {(line.ordinal, line.sample): line for line in read_rollouts(tmp_path / "rollouts.jsonl")}
    assert len(lines) == 15
    assert lines[0, 1].failure.startswith(POISONED)
    assert (lines[0, 1].outcome, lines[0, 1].reward, lines[0, 1].num_tokens) == ("trained", 0.0, 0)
    assert "reward is nan" in lines[2, 2].failure
    assert lines[2, 2].num_tokens > 0
    assert {lines[5, sample].outcome for sample in range(3)} == {"failed"}
    tokens = {(line.ordinal, line.sample): line for line in read_tokens(tmp_path / "tokens.jsonl")}
    assert set(tokens) == {(0, 0), (0, 2)}, "what was emptied has none"


BESIDE = {
    "reference": lambda path: {"kl": {"coef": 0.1, "reference": path}},
    "critic": lambda path: {"loss": {"name": "ppo", "advantages": "gae"}, "critic": {"path": path}},
    "teacher": lambda path: {"loss": {"name": "distill"}, "teacher": {"path": path}},
}


@pytest.mark.parametrize("kind", BESIDE)
def test_an_id_that_a_model_beside_the_policy_lacks_is_poison(kind, tmp_path):
    """Checkpoints of one family have unlike numbers of rows for ids that are no tokens, and a policy may sample its."""
    tokenizer = CharTokenizer()
    for name, num_more in (("policy", 9), ("beside", 1)):
        save_model(new_model(TINY, len(tokenizer) + num_more, seed=0), tmp_path / name, tokenizer)
    run = Run(tmp_path, model={"path": str(tmp_path / "policy")}, **BESIDE[kind](str(tmp_path / "beside")))
    padding = len(tokenizer) + 8
    groups = make_groups(4, 3, seed=7)
    groups = replaced(
        groups, (1, 0), lambda one: with_segment(one, tokens=np.full_like(one.completion.tokens, padding))
    )
    for group in groups:
        for rollout in group.rollouts:
            run.rollouts.put(rollout)
    run.commands.put(TrainStep(step=0, ordinals=(0, 1, 2, 3)))
    with closing(run.trainer):
        run.step()
    assert [event.num_poisoned for event in run.of(GroupScored)] == [0, 1, 0, 0]
    assert f"token id {padding} at 0, where the vocabulary has {len(tokenizer) + 1}" in run.of(GroupScored)[1].failure
    assert math.isfinite(run.of(StepDone)[0].metrics["loss"])
