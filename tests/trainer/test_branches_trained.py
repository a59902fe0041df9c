"""An episode with branches trains as a plain loop that reads each branch alone and counts the episode once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from covering import covering
from torch import Tensor
from training_data import (
    VOCAB_SIZE,
    Recording,
    hugging_face_twin,
    make_groups,
    prepared,
    run_config,
    sharing_prompts,
    tiny_policy,
)

from slipstream.batching import collate as batching
from slipstream.core.errors import NonFiniteError, ShapeError
from slipstream.core.types import Completion, Group, Segment, VersionSpan
from slipstream.models.attention import PackedAttention
from slipstream.models.packed import at_targets
from slipstream.trainer.batch import train_sequence, without_targets
from slipstream.trainer.measure import Auxiliary, with_columns
from slipstream.trainer.metric_names import count_tokens
from slipstream.trainer.optim import AdamW
from slipstream.trainer.reference_executor import reference_logprobs
from slipstream.trainer.refused import write_report
from slipstream.trainer.step import train_on_batch

Key = tuple[int, int]


def drawn(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, VOCAB_SIZE, count).astype(np.int32)


def sampled(rng: np.random.Generator, count: int, *, with_sets: bool = False) -> Segment:
    tokens = drawn(rng, count)
    sets: dict[str, Any] = {}
    if with_sets:
        sets = {"kept_tokens": np.stack([tokens, (tokens + 1) % VOCAB_SIZE], 1).flatten()}
        sets["kept_counts"] = np.full(count, 2, dtype=np.int32)
    return Segment(
        tokens=tokens,
        behaviour_logprobs=rng.uniform(-4, -0.5, count).astype(np.float32),
        version_spans=(VersionSpan(start=0, version=0),),
        **sets,
    )


def forked(completion: Completion, rng: np.random.Generator) -> Completion:
    """Add a fork from behind the first turn, a compaction, the same context asked again, and a branch not answered."""
    prompt, first = completion.prompt.tokens, completion.segments[0].tokens
    summary = drawn(rng, 5)
    more = (
        Segment(tokens=np.concatenate([prompt, first, drawn(rng, 2)]), begins=True),
        sampled(rng, 3),
        Segment(tokens=drawn(rng, 2)),
        sampled(rng, 2),
        Segment(tokens=summary, begins=True),
        sampled(rng, 4),
        Segment(tokens=summary, begins=True),
        sampled(rng, 1),
        Segment(tokens=drawn(rng, 3), begins=True),
    )
    return msgspec.structs.replace(completion, segments=(*completion.segments, *more))


def groups_with_branches(seed: int = 5) -> list[Group]:
    """Return four groups of three rollouts with shared prompts; in each group one or two of them have branches."""
    rng = np.random.default_rng(seed)
    changed = []
    for group in sharing_prompts(make_groups(seed=seed, given=True)):
        rollouts = [
            msgspec.structs.replace(one, completion=forked(one.completion, rng))
            if one.sample <= group.ordinal % 2
            else one
            for one in group.rollouts
        ]
        rewards = rng.permutation(3).astype(float)
        changed.append(
            Group(
                ordinal=group.ordinal,
                rollouts=tuple(
                    msgspec.structs.replace(one, reward=float(reward))
                    for one, reward in zip(rollouts, rewards, strict=True)
                ),
            )
        )
    return changed


def branches_of(completion: Completion) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (tokens, which of them were sampled) of each branch, written down without the code under test."""
    branches = [([*completion.prompt.tokens], [False] * len(completion.prompt.tokens))]
    for segment in completion.segments:
        if segment.begins:
            branches.append(([], []))
        branches[-1][0].extend(segment.tokens)
        branches[-1][1].extend([segment.behaviour_logprobs is not None] * len(segment.tokens))
    return [(np.array(tokens, dtype=np.int64), np.array(is_sampled)) for tokens, is_sampled in branches]


def read_alone(twin: Any, completion: Completion) -> Tensor:
    """Return transformers' logprobs of the sampled tokens in float64, every branch by itself, in the order of them."""
    found = []
    for tokens, is_sampled in branches_of(completion):
        ids = torch.from_numpy(tokens)
        of_next = torch.log_softmax(twin(ids[None]).logits[0, :-1], dim=-1).gather(1, ids[1:, None]).squeeze(1)
        found.append(of_next[torch.from_numpy(is_sampled[1:])])
    return torch.cat(found)


def behaviour_of(completion: Completion) -> Tensor:
    columns = [one.behaviour_logprobs for one in completion.segments if one.behaviour_logprobs is not None]
    return torch.from_numpy(np.concatenate(columns)).double()


def sequence_objective(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


LOSSES: dict[str, dict[str, Any]] = {
    "aipo": {"loss": {"name": "aipo", "params": {"max_ratio": 2.0}, "advantages": "group_mean"}},
    "aipo with a KL": {
        "loss": {"name": "aipo", "params": {"max_ratio": 2.0}, "advantages": "group_mean"},
        "kl": {"coef": 0.3, "place": "loss", "estimator": "k3"},
    },
    "aipo of sequences": {
        "loss": {
            "name": "aipo",
            "params": {"max_ratio": 2.0, "level": "geometric"},
            "advantages": "group_mean",
            "reduction": "sequence",
        },
    },
    "gspo": {"loss": {"name": "gspo", "params": {"eps_low": 0.5, "eps_high": 3.0}, "advantages": "group_mean"}},
    "proximal_rloo": {"loss": {"name": "proximal_rloo", "params": {"eps": 0.9}, "advantages": "group_mean"}},
    "online_dpo": {"loss": {"name": "online_dpo", "params": {"beta": 0.1}, "select": "best_and_worst"}},
}


def expected_loss(name: str, policy: dict[Key, Tensor], reference: dict[Key, Tensor], groups: list[Group]) -> Tensor:
    """Return the loss by its printed formula, one episode after the other."""
    rollouts = {(one.ordinal, one.sample): one for group in groups for one in group.rollouts}
    num_tokens = sum(len(column) for column in policy.values())
    total = torch.zeros((), dtype=torch.float64)
    if name == "online_dpo":
        for group in groups:
            best, worst = (pick(group.rollouts, key=lambda one: one.reward) for pick in (max, min))
            ratios = [
                (policy[one.ordinal, one.sample] - reference[one.ordinal, one.sample]).sum() for one in (best, worst)
            ]
            total = total - torch.nn.functional.logsigmoid(0.1 * (ratios[0] - ratios[1])) / len(groups)
        return total
    for key, rollout in rollouts.items():
        advantage = rollout.reward - np.mean([one.reward for one in groups[key[0]].rollouts])
        difference = policy[key] - behaviour_of(rollout.completion)
        if name in ("aipo", "aipo with a KL"):
            weights = difference.detach().exp().clamp(max=2.0)
            total = total - (weights * advantage * policy[key]).sum() / num_tokens
        elif name == "aipo of sequences":
            weight = difference.detach().mean().exp().clamp(max=2.0)
            total = total - weight * advantage * policy[key].mean() / len(rollouts)
        elif name == "gspo":
            total = total - sequence_objective(difference.mean().exp(), advantage, 0.5, 3.0) / len(rollouts)
        else:
            total = total - sequence_objective(difference.sum().exp(), advantage, 0.9, 0.9) / len(rollouts)
        if name == "aipo with a KL":
            log_ratio = reference[key] - policy[key]
            total = total + 0.3 * (log_ratio.exp() - 1 - log_ratio).sum() / num_tokens
    return total


@pytest.mark.parametrize(("name", "capacity"), covering(LOSSES, [10_000, 90, 1]))
def test_losses_and_gradients_equal_a_loop_over_branches_in_float64(name: str, capacity: int) -> None:
    groups = groups_with_branches()
    optimizer_settings = {"lr": 1e-12, "max_grad_norm": 1e9}
    config = run_config(**LOSSES[name], trainer={"microbatch_tokens": capacity, "optimizer": optimizer_settings})
    model, flat = tiny_policy()
    reference, _ = tiny_policy(7)
    twin, reference_twin = hugging_face_twin(model), hugging_face_twin(reference)
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=100)
    recording = Recording()
    metrics = train_on_batch(
        model, optimizer, groups, config=config, step=0, batching=recording, auxiliary=Auxiliary(reference)
    )
    completions = {(one.ordinal, one.sample): one.completion for group in groups for one in group.rollouts}
    policy = {key: read_alone(twin, completion) for key, completion in completions.items()}
    frozen = {}
    if name in ("aipo with a KL", "online_dpo"):
        with torch.no_grad():
            frozen = {key: read_alone(reference_twin, completion) for key, completion in completions.items()}
    loss = expected_loss(name, policy, frozen, groups)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=2e-5, abs=1e-6)
    loss.backward()
    theirs = dict(twin.named_parameters())
    norm = torch.sqrt(sum(one.grad.square().sum() for one in theirs.values())).item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for ours, named in (
        (model.embedding.weight, "model.embed_tokens.weight"),
        (model.layers[0].output.weight, "model.layers.0.self_attn.o_proj.weight"),
        (model.layers[1].attention_norm.weight, "model.layers.1.input_layernorm.weight"),
    ):
        torch.testing.assert_close(ours.grad.double(), theirs[named].grad, rtol=1e-3, atol=1e-5 * norm)
    trained = [microbatch for microbatch in recording.packed[-1] if microbatch.num_targets]
    chosen = sum(len(microbatch.keys) for microbatch in trained)
    assert chosen == (8 if name == "online_dpo" else 12), "an episode is one sequence, in one microbatch"
    if name != "online_dpo":
        num_sampled = sum(completion.num_sampled for completion in completions.values())
        assert metrics["tokens_trained"] == num_sampled
    assert any(len(microbatch.lengths) > len(microbatch.keys) for microbatch in trained)


def test_states_and_their_gradients_equal_those_of_every_branch_alone() -> None:
    """In float64 to the last digits, so that nothing of another branch is seen."""
    groups = groups_with_branches(seed=9)
    model = tiny_policy()[0].double()
    sequences = {(one.ordinal, one.sample): train_sequence(one.completion) for g in groups for one in g.rollouts}
    completions = {(one.ordinal, one.sample): one.completion for group in groups for one in group.rollouts}
    (microbatch,) = batching.collate(list(sequences.values()), 10_000)
    assert microbatch.num_tokens < sum(one.num_inputs for one in sequences.values()), "beginnings are shared"
    packed = at_targets(model, microbatch)
    alone = []
    for key in microbatch.keys:
        for tokens, is_sampled in branches_of(completions[key]):
            states = model(torch.from_numpy(tokens), torch.arange(len(tokens)), PackedAttention([len(tokens)]))
            alone.append(states[:-1][torch.from_numpy(is_sampled[1:])])
    single = torch.cat(alone)
    torch.testing.assert_close(packed, single, rtol=1e-10, atol=1e-12)
    weights = torch.from_numpy(np.random.default_rng(0).normal(size=tuple(single.shape)))
    parameters = list(model.parameters())
    ours = torch.autograd.grad((packed * weights).sum(), parameters, allow_unused=True)
    theirs = torch.autograd.grad((single * weights).sum(), parameters, allow_unused=True)
    for gradient, expected in zip(ours, theirs, strict=True):
        if expected is not None:
            torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-10)


def test_the_sequence_of_an_episode_by_hand() -> None:
    rng = np.random.default_rng(0)
    plain = groups_with_branches()[0].rollouts[2].completion
    turn, begun = sampled(rng, 2, with_sets=True), Segment(tokens=drawn(rng, 3), begins=True)
    completion = msgspec.structs.replace(plain, segments=(turn, begun, sampled(rng, 1, with_sets=True)))
    sequence = train_sequence(completion)
    num_prompt = len(plain.prompt.tokens)
    assert sequence.starts == (0, num_prompt + 2)
    assert sequence.mask.tolist() == [False] * num_prompt + [True, True, False, False, False, True]
    assert sequence.num_inputs == (num_prompt + 1) + 3
    assert sequence.prompt.tolist() == plain.prompt.tokens.tolist()
    assert train_sequence(plain).starts == (0,)
    assert without_targets(sequence).starts == sequence.starts
    assert without_targets(sequence).num_inputs == 0
    assert with_columns(sequence, values=np.ones(3)).starts == sequence.starts
    (microbatch,) = batching.collate([sequence], 100)
    assert microbatch.lengths == (num_prompt + 1, 3)
    assert microbatch.positions.tolist() == [*range(num_prompt + 1), 0, 1, 2]
    assert microbatch.target_index.tolist() == [num_prompt - 1, num_prompt, num_prompt + 3]
    assert microbatch.segment_ids.tolist() == [0, 0, 0]
    assert microbatch.kept_sets.tolist() == [[int(t), (int(t) + 1) % VOCAB_SIZE] for t in microbatch.targets]


@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_branch_without_a_context_is_no_sequence(is_sampled: bool) -> None:
    rng = np.random.default_rng(0)
    completion = groups_with_branches()[0].rollouts[2].completion
    bad = sampled(rng, 2) if is_sampled else Segment(tokens=drawn(rng, 0))
    segments = (*completion.segments, msgspec.structs.replace(bad, begins=True))
    with pytest.raises(ShapeError, match="a branch begins with given tokens"):
        train_sequence(msgspec.structs.replace(completion, segments=segments))


def test_the_reference_executor_reads_every_branch_alone() -> None:
    model, _ = tiny_policy()
    rollouts = [one for group in groups_with_branches() for one in group.rollouts]
    measured = reference_logprobs(model, rollouts, config=run_config(), batching=batching)
    twin = hugging_face_twin(model)
    for one in measured:
        expected = read_alone(twin, one.completion).detach().numpy()
        np.testing.assert_allclose(one.reference_logprobs, expected, atol=1e-5)


def test_an_episode_has_one_advantage_and_under_gae_one_chain_of_credit() -> None:
    """With gamma = lam = 1 and values of 0 every token's return is the episode's reward, whichever branch it is in."""
    groups = groups_with_branches()
    critic = {"lam": 1.0, "gamma": 1.0}
    config = run_config(loss={"name": "ppo", "advantages": "gae", "whiten_advantages": "no"}, critic=critic)

    def nothing(sequences: Any) -> Any:
        return {"values": {one.key: np.zeros(one.num_targets, dtype=np.float32) for one in sequences}}

    batch = prepared(groups, config=config, step=0, measure=nothing)
    for group in groups:
        for one in group.rollouts:
            sequence = batch.sequences[one.ordinal, one.sample]
            np.testing.assert_allclose(sequence.returns[sequence.mask], one.reward, atol=1e-6)
            assert sequence.num_targets == one.completion.num_sampled


def test_the_dump_of_a_refused_update_says_where_branches_begin(tmp_path: Path) -> None:
    groups = groups_with_branches()
    error = NonFiniteError("x", got="nan", report={"findings": [{"term": "loss", "rollouts": [[0, 0], [0, 1]]}]})
    write_report(error, groups, [], tmp_path / "refused.json")
    suspects = msgspec.json.decode((tmp_path / "refused.json").read_bytes())["suspects"]
    begun = [[index for index, one in enumerate(suspect["segments"]) if one["begins"]] for suspect in suspects]
    assert begun == [[3, 7, 9, 11], []]


def test_stop_tokens_in_the_context_of_a_branch_are_not_counted_again() -> None:
    (group, *_) = groups_with_branches()
    completion = group.rollouts[0].completion
    expected = sum(5 in (token,) for one in completion.segments if not one.begins for token in one.tokens.tolist())
    alone = Group(ordinal=0, rollouts=group.rollouts[:1])
    assert any(5 in one.tokens for one in completion.segments if one.begins)
    assert count_tokens([alone], [5]) == expected
