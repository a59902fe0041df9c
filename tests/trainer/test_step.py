import msgspec
import numpy as np
import pytest
import torch
from heard import Heard
from training_data import (
    TINY,
    VOCAB_SIZE,
    hugging_face_twin,
    make_groups,
    make_rollout,
    prepared,
    run_config,
    scored_group,
    sharing_prompts,
    tiny_policy,
)

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.batching import collate as batching
from slipstream.core.errors import NonFiniteError, StalenessError
from slipstream.core.rank_group import RankGroup
from slipstream.core.spans import NoSpans
from slipstream.core.types import Group
from slipstream.models.experts import Router
from slipstream.models.flat import FlatParameters
from slipstream.models.initialise import new_model
from slipstream.models.packed import ROW_MULTIPLE
from slipstream.observe.waste import not_selected
from slipstream.trainer.measure import MAX_LOGITS, Auxiliary, StepContext, microbatch_logprobs
from slipstream.trainer.optim import AdamW
from slipstream.trainer.scores import rollout_advantages
from slipstream.trainer.step import train_on_batch
from slipstream.trainer.update import PlannedUpdate, Totals, Updater


def setup(config, seed=0):
    model, flat = tiny_policy(seed)
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=100)
    return model, flat, optimizer


def step_of(groups, step=0, **changes):
    config = run_config(**changes)
    model, flat, optimizer = setup(config)
    metrics = train_on_batch(model, optimizer, groups, config=config, step=step, batching=batching)
    return flat.flat, optimizer, metrics


def test_gradient_equals_a_plain_loop_over_sequences_in_float64():
    """Packing, target indices, given segments, AIPO and its normaliser against transformers, one sequence at a time."""
    groups = make_groups(seed=3, given=True)
    config = run_config(
        loss={"name": "aipo", "params": {"max_ratio": 2.0}, "advantages": "group_mean"},
        generator={"max_new_tokens": 16, "temperature": 0.8},
        trainer={"microbatch_tokens": 40},
    )
    model, _, optimizer = setup(config)
    twin = hugging_face_twin(model)
    batch = prepared(groups, config=config, step=0)
    train_on_batch(model, optimizer, groups, config=config, step=0, batching=batching)
    # The optimizer clips in place; undo it by comparing directions, and norms through the metric below.
    ours = optimizer.parameters.grad / optimizer.parameters.grad.norm()

    num_tokens = sum(len(s.tokens) for g in groups for r in g.rollouts for s in r.completion.segments if s.is_sampled)
    loss = torch.zeros((), dtype=torch.float64)
    for group in groups:
        mean = np.mean([rollout.reward for rollout in group.rollouts])
        for rollout in group.rollouts:
            completion = rollout.completion
            pieces = [completion.prompt.tokens, *(segment.tokens for segment in completion.segments)]
            ids = torch.from_numpy(np.concatenate(pieces).astype(np.int64))
            logprobs = torch.log_softmax(twin(ids[None]).logits[0] / 0.8, dim=-1)
            place = len(completion.prompt.tokens)
            for segment in completion.segments:
                for offset in range(len(segment.tokens)):
                    if segment.behaviour_logprobs is not None:
                        logprob = logprobs[place - 1, ids[place]]
                        ratio = (logprob.detach() - float(segment.behaviour_logprobs[offset])).exp().clamp(max=2.0)
                        loss = loss - ratio * (rollout.reward - mean) * logprob / num_tokens
                    place += 1
    loss.backward()
    expected = {name: parameter.grad for name, parameter in twin.named_parameters()}
    norm = torch.sqrt(sum(grad.square().sum() for grad in expected.values()))
    embedding = model.embedding.weight.grad.double()
    scale = embedding.norm() / expected["model.embed_tokens.weight"].norm()
    torch.testing.assert_close(embedding / scale, expected["model.embed_tokens.weight"], rtol=1e-3, atol=1e-6)
    assert ours.norm().item() == pytest.approx(1.0, rel=1e-4)
    clipped = min(1.0, 1.0 / norm.item())
    assert scale.item() == pytest.approx(clipped, rel=1e-3)
    assert batch.metrics["reward_mean"] == pytest.approx(np.mean([r.reward for g in groups for r in g.rollouts]))


@pytest.mark.parametrize("capacity", [10_000, 40])
def test_shared_prompts_equal_every_sequence_alone_in_float64(capacity):
    """Logprobs, and gradients through a weighted sum of them, against transformers, one sequence at a time."""
    groups = sharing_prompts(make_groups(num_samples=4, seed=5, given=True))
    config = run_config()
    model, _, optimizer = setup(config)
    twin = hugging_face_twin(model)
    batch = prepared(groups, config=config, step=0)
    microbatches = batching.collate(batch.of(groups), capacity)
    num_rows = sum(microbatch.num_tokens for microbatch in microbatches)
    assert num_rows < sum(sequence.num_inputs for sequence in batch.sequences.values())
    optimizer.zero_grad()
    for microbatch in microbatches:
        logprobs, _ = microbatch_logprobs(model, microbatch, temperature=0.8)
        expected = []
        for key in microbatch.keys:
            sequence = batch.sequences[key]
            ids = torch.from_numpy(sequence.tokens.astype(np.int64))
            of_next = torch.log_softmax(twin(ids[None]).logits[0, :-1] / 0.8, dim=-1)
            expected.append(of_next.gather(1, ids[1:, None]).squeeze(1)[torch.from_numpy(sequence.mask[1:])])
        alone = torch.cat(expected)
        torch.testing.assert_close(logprobs.double(), alone, atol=1e-5, rtol=1e-5)
        weights = torch.linspace(-1, 1, len(alone), dtype=torch.float64)
        (weights * logprobs).sum().backward()
        (weights * alone).sum().backward()
    theirs = dict(twin.named_parameters())
    largest = max(parameter.grad.abs().max() for parameter in theirs.values())
    ours = {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": model.final_norm.weight,
        "model.layers.0.mlp.down_proj.weight": model.layers[0].down.weight,
        "model.layers.0.self_attn.o_proj.weight": model.layers[0].output.weight,
        "model.layers.1.input_layernorm.weight": model.layers[1].attention_norm.weight,
    }
    pairs = [(parameter.grad, theirs[name].grad) for name, parameter in ours.items()]
    for index, layer in enumerate(model.layers):
        names = [f"model.layers.{index}.self_attn.{part}_proj.weight" for part in "qkv"]
        pairs.append((layer.qkv.weight.grad, torch.cat([theirs[name].grad for name in names])))
    for grad, reference in pairs:
        torch.testing.assert_close(grad.double(), reference, rtol=1e-3, atol=1e-5 * largest.item())


def test_the_same_step_gives_the_same_bits():
    """Gradients of shared rows are sums over siblings; with two threads no order of additions may be left open."""
    groups = sharing_prompts(make_groups(num_groups=32, num_samples=16))  # enough for parallel kernels
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        runs = [step_of(groups, generator={"max_new_tokens": 16}) for _ in range(3)]
    finally:
        torch.set_num_threads(num_threads)
    (weights, _, metrics), *repeats = runs
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    parts = [[one.prompt.tokens, *(segment.tokens for segment in one.segments)] for one in completions]
    texts = [(one.ordinal, *np.concatenate(part)) for one, part in zip(completions, parts, strict=True)]
    assert metrics["tokens_read"] == len({text[:length] for text in texts for length in range(2, len(text))})
    assert metrics["tokens_unshared"] == sum(len(text) - 2 for text in texts) > metrics["tokens_read"]
    for repeated, _, _ in repeats:
        assert torch.equal(weights, repeated)


def test_loss_and_gradient_norm_of_four_microbatches_equal_one():
    groups = make_groups(seed=1)
    one, _, whole = step_of(groups, trainer={"microbatch_tokens": 8192})
    four, _, parts = step_of(groups, trainer={"microbatch_tokens": 30})
    assert whole["num_microbatches"] == 1
    assert parts["num_microbatches"] >= 4
    assert whole["tokens_trained"] == parts["tokens_trained"]
    for name in ("loss", "grad_norm", "entropy", "kl_k3", "ratio", "ess", "clipped_frac", "logprob_diff_max/lag_0"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-6), name
    torch.testing.assert_close(one, four, rtol=1e-4, atol=2e-5)


def test_minibatches_and_epochs_make_one_update_each():
    groups = make_groups()
    _, optimizer, metrics = step_of(groups, trainer={"minibatches": 2, "epochs": 3})
    assert optimizer.num_updates == metrics["num_updates"] == 6
    assert metrics["staleness_updates_max"] == 5
    config = run_config()
    model, flat, alone = setup(config)
    for part in (groups[0::2], groups[1::2]):
        train_on_batch(model, alone, part, config=config, step=0, batching=batching)
    two, _, _ = step_of(groups, trainer={"minibatches": 2})
    assert torch.equal(two, flat.flat)


def test_difference_per_lag_is_rounding_where_behaviour_is_the_policy():
    config = run_config()
    model, _, optimizer = setup(config)
    rng = np.random.default_rng(0)
    rollouts = [make_rollout(0, sample, rng, version=version) for sample, version in enumerate([3, 3, 2])]
    for rollout in rollouts:
        completion = rollout.completion
        segment = completion.segments[0]
        tokens = np.concatenate([completion.prompt.tokens, segment.tokens])
        logprobs = probe_logprobs(model, tokens)[len(completion.prompt.tokens) - 1 :]
        if rollout is not rollouts[2]:
            segment.behaviour_logprobs[:] = logprobs
    difference = np.abs(logprobs - segment.behaviour_logprobs)
    group = Group(ordinal=0, rollouts=tuple(rollouts))
    metrics = train_on_batch(model, optimizer, [group], config=config, step=3, batching=batching)
    assert metrics["logprob_diff_max/lag_0"] < 1e-5
    assert metrics["logprob_diff_mean/lag_1"] == pytest.approx(difference.mean(), rel=1e-4)
    assert metrics["logprob_diff_max/lag_1"] == pytest.approx(difference.max(), rel=1e-4)
    num_tokens = sum(rollout.completion.num_tokens for rollout in rollouts)
    assert metrics["logprob_diff_mean"] == pytest.approx(difference.sum() / num_tokens, rel=1e-4)
    assert metrics["staleness_max"] == metrics["staleness_updates_max"] == 1
    assert metrics["staleness_tokens/lag_1"] == rollouts[2].completion.num_tokens


@pytest.mark.parametrize(("oldest", "in_updates"), [(0, 2 * 4 + 2), (1, 2 * 4 + 3)])
def test_staleness_is_that_of_the_oldest_tokens_when_they_are_trained_on_last(oldest, in_updates):
    """The first of two minibatches has the groups 0 and 2; in two epochs a step is four updates."""
    groups = make_groups(version=2)
    groups[oldest] = make_groups(version=0)[oldest]
    _, _, metrics = step_of(groups, step=2, max_staleness=2, trainer={"minibatches": 2, "epochs": 2})
    assert metrics["staleness_updates_max"] == in_updates
    counts = [sum(rollout.completion.num_tokens for rollout in group.rollouts) for group in groups]
    assert metrics["staleness_mean"] == pytest.approx(2 * counts[oldest] / sum(counts))


def test_tokens_outside_the_bound_raise():
    with pytest.raises(StalenessError):
        step_of(make_groups(version=0), step=3)
    with pytest.raises(StalenessError):
        step_of(make_groups(version=1), step=0)


@pytest.mark.parametrize("where", ["behaviour", "weights"])
def test_nan_stops_before_weights_change(where):
    groups = make_groups()
    config = run_config()
    model, flat, optimizer = setup(config)
    if where == "behaviour":
        groups[0].rollouts[0].completion.segments[0].behaviour_logprobs[0] = np.nan
    else:
        with torch.no_grad():
            model.final_norm.weight[0] = torch.nan
    before = flat.flat.clone()
    with pytest.raises(NonFiniteError):
        train_on_batch(model, optimizer, groups, config=config, step=0, batching=batching)
    torch.testing.assert_close(flat.flat, before, rtol=0, atol=0, equal_nan=True)
    assert optimizer.num_updates == 0


def test_truncated_completions_keep_mask_and_penalty():
    rng = np.random.default_rng(0)
    cut = make_rollout(0, 0, rng, reward=1.0, finish_reason="length")
    whole = make_rollout(0, 1, rng, reward=0.0)
    group = Group(ordinal=0, rollouts=(cut, whole))

    def shaped(**loss):
        config = run_config(loss={"advantages": "group_mean", **loss})
        batch = prepared([group], config=config, step=0)
        return (
            batch.sequences[0, 0],
            list(rollout_advantages([scored_group(group, config)], config).values()),
            batch.metrics,
        )

    kept, advantages, metrics = shaped(truncated="keep")
    assert kept.num_targets == cut.completion.num_tokens
    assert advantages == [0.5, -0.5]
    assert metrics["truncated_frac"] == 0.5
    masked, advantages, _ = shaped(truncated="mask")
    assert masked.num_targets == 0
    assert advantages == [0.5, -0.5]
    _, advantages, metrics = shaped(truncated="penalty", truncation_reward=-1.0)
    assert advantages == [-0.5, 0.5]
    assert metrics["reward_mean"] == 0.5
    _, advantages, _ = shaped(truncated="subtract", truncation_reward=-3.0)
    assert advantages == [-1.0, 1.0]


def test_a_masked_minibatch_has_its_place_in_the_schedule():
    groups = [*make_groups(1, finish_reason="length"), *make_groups(1, seed=1)]
    second = Group(ordinal=1, rollouts=tuple(_renamed(rollout, 1) for rollout in groups[1].rollouts))
    rates = {"lr": 1.0, "schedule": "linear", "schedule_by": "step"}
    config = run_config(
        steps=10, loss={"truncated": "mask"}, trainer={"minibatches": 2, "epochs": 2, "optimizer": rates}
    )
    model, flat, _ = setup(config)
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=40, updates_per_step=4)
    found = [
        train_on_batch(model, optimizer, [groups[0], second], config=config, step=step, batching=batching)
        for step in range(2)
    ]
    assert [metrics["num_updates"] for metrics in found] == [2, 2]
    assert [metrics["lr"] for metrics in found] == [1.0, 0.9]
    assert optimizer.num_updates == 4


def _renamed(rollout, ordinal):
    return msgspec.structs.replace(rollout, completion=msgspec.structs.replace(rollout.completion, ordinal=ordinal))


def test_a_batch_of_masked_completions_changes_nothing():
    groups = make_groups(finish_reason="length")
    config = run_config(loss={"truncated": "mask"})
    model, flat, optimizer = setup(config)
    before = flat.flat.clone()
    metrics = train_on_batch(model, optimizer, groups, config=config, step=0, batching=batching)
    assert metrics["num_updates"] == metrics["tokens_trained"] == 0
    assert torch.equal(flat.flat, before)


@pytest.mark.parametrize(
    ("loss", "is_trained"),
    [
        ({}, lambda place, is_cut: True),
        ({"select": "best_and_worst"}, lambda place, is_cut: place in (0, 2)),
        ({"truncated": "mask"}, lambda place, is_cut: not is_cut),
        ({"select": "best", "truncated": "mask"}, lambda place, is_cut: place == 0 and not is_cut),
        ({"name": "reinforce", "params": {}, "advantages": "greedy_baseline"}, lambda place, is_cut: place < 3),
    ],
    ids=["all", "selected", "masked", "both", "greedy baseline"],
)
def test_what_a_step_does_not_train_of_its_groups_is_wasted_once(loss, is_trained):
    """Whatever the number of passes and minibatches, with an environment's tokens between the sampled ones."""
    num_samples, rng = 4 if "advantages" in loss else 3, np.random.default_rng(2)
    rewards = {0: [5.0, 3.0, 1.0, 0.0], 1: [4.0, 2.0, 0.0, 1.0]}  # from best to worst, a baseline behind them
    cut = {(0, 1), (1, 0)}
    groups = [
        Group(
            ordinal=ordinal,
            rollouts=tuple(
                make_rollout(
                    ordinal,
                    sample,
                    rng,
                    reward=row[sample],
                    given=True,
                    finish_reason="length" if (ordinal, sample) in cut else "stop",
                )
                for sample in range(num_samples)
            ),
        )
        for ordinal, row in rewards.items()
    ]
    _, _, metrics = step_of(groups, loss=loss, trainer={"minibatches": 2, "epochs": 2}, groups_per_step=2)
    wasted = sum(
        len(segment.tokens)
        for group in groups
        for place, rollout in enumerate(group.rollouts)
        for segment in rollout.completion.segments
        if segment.is_sampled and not is_trained(place, (group.ordinal, place) in cut)
    )
    assert not_selected(metrics) == wasted
    assert (wasted > 0) == (loss != {})


def test_a_batch_of_tied_pairs_changes_nothing():
    groups = make_groups(reward=1.0)
    config = run_config(loss={"name": "online_dpo", "select": "best_and_worst", "skip_no_signal": False})
    model, flat, optimizer = setup(config)
    before = flat.flat.clone()
    reference, _ = tiny_policy()
    metrics = train_on_batch(
        model, optimizer, groups, config=config, step=0, batching=batching, auxiliary=Auxiliary(reference=reference)
    )
    assert metrics["num_updates"] == metrics["tokens_trained"] == 0
    assert torch.equal(flat.flat, before)


def test_entropy_bonus_raises_entropy():
    groups = make_groups()
    optimizer = {"lr": 1e-2}
    _, _, plain = step_of(groups, trainer={"optimizer": optimizer})
    entropies = []
    for coefficient in (0.0, 10.0):
        config = run_config(trainer={"optimizer": optimizer}, loss={"entropy_coef": coefficient})
        model, _, adamw = setup(config)
        for _ in range(2):
            metrics = train_on_batch(model, adamw, groups, config=config, step=0, batching=batching)
        entropies.append(metrics["entropy"])
    assert entropies[0] < entropies[1] <= np.log(VOCAB_SIZE)
    assert entropies[1] > plain["entropy"]


def test_a_large_head_in_chunks_equals_the_whole(monkeypatch):
    groups = make_groups(1)
    config = run_config()
    results = []
    for limit in (1 << 26, 4 * VOCAB_SIZE):
        monkeypatch.setitem(MAX_LOGITS, "cpu", limit)
        model, _, optimizer = setup(config)
        batch = prepared(groups, config=config, step=0)
        (microbatch,) = batching.collate(batch.of(groups), 10_000)
        optimizer.zero_grad()
        logprobs, entropies = microbatch_logprobs(model, microbatch, temperature=1.0)
        (logprobs.sum() + entropies.square().sum()).backward()
        results.append((logprobs.detach(), entropies.detach(), optimizer.parameters.grad.clone()))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, rtol=1e-4, atol=1e-4)


def test_reported_parts():
    rng = np.random.default_rng(0)
    first = make_rollout(0, 0, rng, reward=1.0)
    second = make_rollout(0, 1, rng, reward=0.0)
    first = msgspec.structs.replace(first, reward_parts={"task": 1.0, "length": None})
    second = msgspec.structs.replace(second, reward_parts={"task": 0.0, "length": -0.5}, failure="timeout")
    _, _, metrics = step_of([Group(ordinal=0, rollouts=(first, second))])
    assert metrics["reward_parts/task"] == 0.5
    assert metrics["reward_parts/length"] == -0.5
    assert metrics["failed_frac"] == 0.5
    assert metrics["reward_std"] == 0.5


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_the_load_of_experts_is_of_the_rows_of_sequences(num_microbatches):
    """Not of rows that fill a microbatch up, nor of empty microbatches, which are read while other ranks have more."""
    mixture = {"family": "qwen3_moe", "num_experts": 8, "expert_width": 8, "head_dim": 4}
    model = new_model(TINY.model_copy(update=mixture), VOCAB_SIZE, 0)
    seen = []
    for router in (module for module in model.modules() if isinstance(module, Router)):
        router.register_forward_hook(lambda _, __, probabilities: seen.append(probabilities.detach()))
    config, groups = run_config(), make_groups(num_groups=1)
    optimizer = AdamW(FlatParameters(model), config.trainer.optimizer, total_updates=9)
    [microbatch] = batching.collate(prepared(groups, config=config, step=0).of(groups), 10_000)
    assert microbatch.num_tokens % ROW_MULTIPLE
    updater = Updater(model, optimizer, Auxiliary(), StepContext(config, 0, batching, RankGroup.alone(), NoSpans()))
    made = updater.make(PlannedUpdate(0, [microbatch], Totals(microbatch.num_targets, 3, num_microbatches)))
    loads = []
    for probabilities in seen[: TINY.num_layers]:
        chosen = probabilities[: microbatch.num_tokens].numpy().argsort(1)[:, -2:]
        loads.append(np.bincount(chosen.flatten(), minlength=8))
    expected = max(load.max() / load.mean() for load in loads)
    assert made.metrics["expert_load_max"].value() == pytest.approx(expected)


def test_a_step_says_what_its_time_goes_to():
    config = run_config(
        loss={"name": "aipo", "params": {"max_ratio": 2.0}},
        kl={"coef": 0.1},
        trainer={"minibatches": 2, "epochs": 2, "microbatch_tokens": 40},
    )
    groups, heard = make_groups(seed=3, version=7), Heard()
    model, _, optimizer = setup(config)
    reference, _ = tiny_policy(1)
    metrics = train_on_batch(
        model,
        optimizer,
        groups,
        config=config,
        step=7,
        batching=batching,
        auxiliary=Auxiliary(reference),
        spans=heard,
    )
    assert all(args == {"step": 7} for _, args in heard.spans)
    assert [state for state, _ in heard.spans if state != "forward_backward"] == ["reference", *["optimizer"] * 4]
    assert heard.work == {"forward_backward": (2 * metrics["num_microbatches"], 2 * metrics["tokens_read"])}
    silent_model, _, silent_optimizer = setup(config)
    train_on_batch(
        silent_model, silent_optimizer, groups, config=config, step=7, batching=batching, auxiliary=Auxiliary(reference)
    )
    heard_weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    silent_weights = torch.cat([parameter.detach().flatten() for parameter in silent_model.parameters()])
    assert torch.equal(heard_weights, silent_weights), "saying so changes no bit"
