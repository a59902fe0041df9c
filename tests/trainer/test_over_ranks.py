"""A batch over several data-parallel ranks equals the same batch on one: sequences, advantages, metrics, updates."""

import functools
import math

import numpy as np
import pytest
import torch
from covering import with_slow
from drawn import drawn
from hypothesis import strategies as st
from rank_threads import on_ranks, results
from training_data import TINY, columns, make_groups, make_rollout, prepared, run_config, sharing_prompts, tiny_policy

from slipstream.batching import collate as batching
from slipstream.core.errors import NonFiniteError, StalenessError
from slipstream.core.ranks import data_parallel_rank
from slipstream.core.types import Group
from slipstream.models.initialise import new_model
from slipstream.trainer.critic import Critic
from slipstream.trainer.measure import Auxiliary
from slipstream.trainer.optim import AdamW
from slipstream.trainer.scores import dealt_by, head_of
from slipstream.trainer.step import train_on_batch

PACKING = {"num_microbatches", "tokens_read", "padding_frac", "padded_layout_frac", "rank_wait_frac", "train_s"}
"""Metrics that are others where other sequences meet in a microbatch."""


def dealt(groups, config, world):
    """[rank]: what each rank gets of `groups`; groups of which it gets nothing are not there."""
    by = dealt_by(config.loss)
    shares = []
    for rank in range(world):
        mine = [
            [one for one in group.rollouts if data_parallel_rank(one.ordinal, one.sample, world, by=by) == rank]
            for group in groups
        ]
        shares.append([Group(ordinal=members[0].ordinal, rollouts=tuple(members)) for members in mine if members])
    return shares


def heads_of(groups, config):
    return [head_of(rollout, config.rewards) for group in groups for rollout in group.rollouts]


def assert_same_metrics(found, expected, *, rel=1e-9, ignored=frozenset()):
    assert found.keys() == expected.keys()
    for name in expected.keys() - ignored:
        assert found[name] == pytest.approx(expected[name], rel=rel, abs=rel), name


# Batches

LOSSES = [
    {"name": "grpo"},
    {"name": "grpo", "several_rewards": "normalise_then_sum"},
    {"name": "aipo", "advantages": "leave_one_out"},
    {"name": "oapl", "advantages": "optimal", "optimal_beta": 0.5},
    {"name": "grpo", "select": "best_and_worst"},
    {"name": "best_of_n", "select": "best"},
    {"name": "online_dpo", "select": "best_and_worst", "skip_no_signal": False},
    {"name": "grpo", "advantages": "greedy_baseline"},
    {"name": "ppo", "advantages": "reward"},
    {"name": "grpo", "credit": "turn"},
    {"name": "ppo", "advantages": "gae"},
]


@st.composite
def batches(draw):
    """(config, groups, number of ranks): any loss, selection, truncation, penalty, whitening; some completions cut."""
    loss = dict(draw(st.sampled_from(LOSSES)))
    num_groups, per_group = draw(st.integers(1, 6)), draw(st.integers(2, 4))
    sums_parts = loss.get("several_rewards") == "normalise_then_sum"
    loss["truncated"] = draw(st.sampled_from(["keep", "mask"] + ["penalty"] * (not sums_parts)))
    loss["truncation_reward"] = -1.0
    loss["whiten_advantages"] = draw(st.sampled_from(["no", "batch", "minibatch"]))
    loss["whiten_unbiased"] = draw(st.booleans())
    kl = {"coef": draw(st.sampled_from([0.0, 0.3])), "estimator": draw(st.sampled_from(["k1", "k3"]))}
    if sums_parts or loss["name"] in ("online_dpo", "best_of_n"):
        kl |= {"place": "loss", "estimator": "k3"}
    critic = {"gamma": 0.9, "lam": 0.8, "whiten_rewards": draw(st.booleans()), "vtrace": draw(st.booleans())}
    config = run_config(
        loss=loss,
        kl=kl,
        critic=critic,
        groups_per_step=num_groups,
        completions_per_group=per_group,
        max_staleness=2,
        trainer={"minibatches": draw(st.integers(1, num_groups))},
        rewards={"terms": [{"function": "task", "weight": 2.0}, {"function": "length", "weight": 0.5}]},
        environment={"class_path": "guess", "max_turns": 2} if "credit" in loss else {},
    )
    # The schema asks for eight completions in a part; what a few do in one is the same.
    parts = draw(st.integers(1, 3))
    config = config.model_copy(update={"loss": config.loss.model_copy(update={"whiten_parts": parts})})
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    groups = [
        Group(
            ordinal=7 + 2 * place,
            rollouts=tuple(
                make_rollout(
                    7 + 2 * place,
                    sample,
                    rng,
                    version=int(rng.integers(2, 5)),
                    finish_reason="length" if rng.random() < 0.3 else "stop",
                    parts=(float(rng.integers(0, 2)), float(rng.normal())),
                    given=(has_turns := "credit" in loss and rng.random() < 0.7),
                    turn_rewards=[float(rng.normal())] * (1 + has_turns) if "credit" in loss else None,
                )
                for sample in range(config.samples_per_group)
            ),
        )
        for place in range(num_groups)
    ]
    return config, groups, draw(st.sampled_from([2, 3]))


def prepared_step_4(config, groups, **ranks):
    """The batch of step 4, with all columns that its config needs."""
    names = {"proximal_logprobs": 0.2}
    if config.kl.coef or config.loss.name == "online_dpo":
        names["reference_logprobs"] = 0.5
    if config.has_critic:
        names["values"] = 1.0
    return prepared(groups, config=config, step=4, measure=columns(**names), **ranks)


def minibatches_of(batch, config, ordinals):
    """Dealt in another order, as by `trainer.shuffle`."""
    groups = [Group(ordinal=ordinal, rollouts=()) for ordinal in ordinals]
    order = np.random.default_rng(5).permutation(len(groups)).tolist()
    parts = batching.split_minibatches(groups, config.trainer.minibatches, order=order)
    return [batch.of(part) for part in parts]


def by_key(sequences):
    return {sequence.key: sequence for sequence in sequences}


@drawn(8, 150, case=batches())
def test_a_batch_over_ranks_is_the_batch_of_one(case):
    config, groups, world = case
    ordinals = [group.ordinal for group in groups]
    one = prepared_step_4(config, groups)
    expected = [by_key(part) for part in minibatches_of(one, config, ordinals)]
    shares, heads = dealt(groups, config, world), heads_of(groups, config)

    def job(ranks):
        batch = prepared_step_4(config, shares[ranks.rank], heads=heads, ranks=ranks)
        return batch, [by_key(part) for part in minibatches_of(batch, config, ordinals)]

    by_rank = results(on_ranks(world, job))
    for batch, _ in by_rank:
        assert batch.keys == one.keys
        assert_same_metrics(batch.metrics, one.metrics)
    found = [{}, *({} for _ in expected)]
    for batch, parts in by_rank:
        for merged, own in zip(found, [batch.sequences, *parts], strict=True):
            assert not merged.keys() & own.keys()
            merged |= own
    for merged, whole in zip(found, [one.sequences, *expected], strict=True):
        assert merged.keys() == whole.keys()
        for key, sequence in whole.items():
            for name, value in vars(sequence).items():
                if isinstance(value, np.ndarray):
                    np.testing.assert_allclose(vars(merged[key])[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_step_takes_few_meetings_of_the_ranks():
    """Each costs a round trip between machines: none per sequence, microbatch or group."""
    loss = {"name": "ppo", "advantages": "gae", "whiten_advantages": "batch"}
    for num_groups in (4, 32):
        config = run_config(loss=loss, kl={"coef": 0.1}, critic={"whiten_rewards": True}, groups_per_step=num_groups)
        groups = make_groups(num_groups, version=4)
        shares, heads = dealt(groups, config, 2), heads_of(groups, config)

        def job(ranks, config=config, shares=shares, heads=heads):
            prepared_step_4(config, shares[ranks.rank], heads=heads, ranks=ranks)
            return ranks.num_meetings

        assert max(results(on_ranks(2, job))) <= 12


# Updates


class SummedAdamW(AdamW):
    """One whole model per rank, whose gradients are summed over ranks before anybody looks at them."""

    def over(self, ranks, readers=1):
        """As many `readers` of `ranks` have read the same."""
        self.ranks, self.readers, self.is_summed = ranks, readers, False
        return self

    def zero_grad(self):
        super().zero_grad()
        self.is_summed = False

    def finite_grad_norm(self):
        if not self.is_summed:
            self.parameters.grad.copy_(self.ranks.sum(self.parameters.grad) / self.readers)
            self.is_summed = True
        return super().finite_grad_norm()


@functools.cache
def reference():
    return new_model(TINY, 19, 7).requires_grad_(False)


def trained(config, by_step, ranks=None, heads=None):
    """(weights, the critic's, metrics of each step); `by_step[n]` and `heads[n]` are this rank's of step n."""
    model, flat = tiny_policy()
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=100)
    critic = Critic(config, model) if config.has_critic else None
    if ranks is not None:
        optimizer = SummedAdamW(flat, config.trainer.optimizer, total_updates=100).over(ranks)
        if critic is not None:
            critic.optimizer = SummedAdamW(critic.parameters, config.critic.optimizer, total_updates=100).over(ranks)
    metrics = []
    for step in range(len(by_step)):
        over = {} if ranks is None else {"heads": heads[step], "ranks": ranks}
        metrics.append(
            train_on_batch(
                model,
                optimizer,
                by_step[step],
                config=config,
                step=step,
                batching=batching,
                auxiliary=Auxiliary(reference(), critic),
                **over,
            )
        )
    return flat.flat, None if critic is None else critic.parameters.flat, metrics


RATES = {"lr": 1e-3}
UPDATES = {
    "grpo": {"loss": {"name": "grpo"}, "trainer": {"minibatches": 2, "epochs": 2, "shuffle": True}},
    "sequence_means": {"loss": {"name": "grpo", "reduction": "sequence", "truncated": "mask"}},
    "gspo": {"loss": {"name": "gspo"}},
    "entropy_and_kl": {
        "loss": {"name": "aipo", "entropy_coef": 0.1},
        "kl": {"coef": 0.1, "place": "loss", "estimator": "k3"},
    },
    "whitening": {
        "loss": {"name": "ppo", "advantages": "reward", "whiten_advantages": "minibatch"},
        "trainer": {"minibatches": 2},
    },
    "critic": {"loss": {"name": "ppo", "advantages": "gae", "whiten_advantages": "batch"}, "kl": {"coef": 0.1}},
    "critics_head": {"loss": {"name": "ppo", "advantages": "gae"}, "critic": {"model": "head"}},
    "pairs": {"loss": {"name": "online_dpo", "select": "best_and_worst", "skip_no_signal": False}},
    "baseline": {"loss": {"name": "reinforce", "advantages": "greedy_baseline"}},
    "proximal": {"loss": {"name": "decoupled_ppo"}, "trainer": {"epochs": 2}},
    "cutoff": {
        "loss": {"name": "m2po", "params": {"threshold": 0.5}},
        "trainer": {"minibatches": 2, "epochs": 2, "shuffle": True},
    },
    "regression": {"loss": {"name": "oapl", "advantages": "optimal", "params": {"beta": 0.1}}},
    "min_variance": {
        "loss": {"name": "aipo", "baseline": "min_variance", "truncated": "mask"},
        "trainer": {"ess_scaling": "sqrt"},
    },
    "effective": {"loss": {"name": "aipo"}, "trainer": {"minibatches": 2, "ess_scaling": "sqrt"}},
}


FEW = [("whitening", 2), ("critic", 2), ("pairs", 8), ("baseline", 2), ("cutoff", 8), ("min_variance", 2)]
"""Cases in every run of the tests; `test_executor_over_ranks.py` has GRPO."""


@pytest.mark.parametrize(
    ("case", "world"),
    with_slow(
        FEW,
        [
            (case, world)
            for case in UPDATES
            for world in (2, 8)
            if (case, world) not in FEW and (case, world) != ("min_variance", 8)
        ],
    ),
)
def test_updates_over_ranks_are_those_of_one(case, world):
    """Eight ranks have nothing to train on in some minibatches, or never."""
    sections = {name: dict(section) for name, section in UPDATES[case].items()}
    sections["trainer"] = {"optimizer": RATES, "microbatch_tokens": 40, **sections.get("trainer", {})}
    if sections["loss"].get("advantages") == "gae":
        sections["critic"] = {"optimizer": RATES, "head_init": "reward", **sections.get("critic", {})}
    config = run_config(**sections)
    by_step = [
        sharing_prompts(make_groups(num_samples=config.samples_per_group, seed=step, version=step, reward=None))
        for step in range(2 if (case, world) in FEW else 3)
    ]
    by_step[1] = [by_step[1][0], *make_groups(4, config.samples_per_group, version=1, finish_reason="length")[1:]]
    weights, values, metrics = trained(config, by_step)
    shares = [dealt(groups, config, world) for groups in by_step]
    heads = [heads_of(groups, config) for groups in by_step]

    def job(ranks):
        return trained(config, [share[ranks.rank] for share in shares], ranks, heads)

    start, _ = tiny_policy()
    started = torch.cat([parameter.detach().flatten() for parameter in start.parameters()])
    for found, found_values, found_metrics in results(on_ranks(world, job)):
        assert (found - weights).norm() < 1e-3 * (weights - started).norm()
        if values is not None:
            assert (found_values - values).norm() < 1e-3 * values.norm()
        for mine, expected in zip(found_metrics, metrics, strict=True):
            assert_same_metrics(mine, expected, rel=2e-3, ignored=PACKING)
            assert mine["tokens_trained"] == expected["tokens_trained"]
            assert mine["num_updates"] == expected["num_updates"]


def test_what_is_not_finite_on_one_rank_stops_all_of_them_before_weights_change():
    config = run_config(trainer={"optimizer": RATES})
    groups = make_groups()
    groups[0].rollouts[0].completion.segments[0].behaviour_logprobs[0] = math.nan
    shares, heads = dealt(groups, config, 3), heads_of(groups, config)

    def job(ranks):
        model, flat = tiny_policy()
        before = flat.flat.clone()
        optimizer = SummedAdamW(flat, config.trainer.optimizer, total_updates=9).over(ranks)
        with pytest.raises(NonFiniteError):
            train_on_batch(
                model,
                optimizer,
                shares[ranks.rank],
                config=config,
                step=0,
                batching=batching,
                heads=heads,
                ranks=ranks,
            )
        return torch.equal(flat.flat, before)

    assert results(on_ranks(3, job)) == [True, True, True]


@pytest.mark.parametrize("version", [1, 4])
def test_a_token_outside_the_bound_stops_all_ranks(version):
    config = run_config(max_staleness=1)
    rng = np.random.default_rng(0)
    rollouts = tuple(make_rollout(0, sample, rng, version=version if sample == 1 else 3) for sample in range(3))
    groups = [Group(ordinal=0, rollouts=rollouts)]
    shares, heads = dealt(groups, config, 3), heads_of(groups, config)

    def job(ranks):
        with pytest.raises(StalenessError, match=rf"staleness {'-1..0' if version == 4 else '0..2'} steps"):
            prepared(shares[ranks.rank], config=config, step=3, heads=heads, ranks=ranks)

    results(on_ranks(3, job))
