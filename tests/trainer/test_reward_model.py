import tracemalloc

import numpy as np
import pytest
import torch
import transformers
from covering import with_slow
from training_data import TINY, VOCAB_SIZE

from slipstream.algorithms.losses import LossInputs, loss_named
from slipstream.batching import collate as batching
from slipstream.core.errors import ConfigError, NonFiniteError, ShapeError
from slipstream.core.stage_sections import RewardModelConfig
from slipstream.core.training_sections import OptimizerConfig
from slipstream.models.attention import PackedAttention
from slipstream.models.initialise import new_model
from slipstream.models.packed import at_targets
from slipstream.models.scalar import new_scalar_model, save_scalar_model
from slipstream.models.scoring import score, scored_sequence
from slipstream.trainer.reward_model import (
    Preference,
    normalise,
    normalise_on_references,
    preference_accuracy,
    reward_model_updates,
    share_in_order,
)

PLAIN = RewardModelConfig(normalise="none")
READ = {"microbatch_tokens": 64, "batching": batching}
LIKED = 5  # completions with more of this token are preferred


def tiny(head_init="reward", seed=0):
    model = new_scalar_model(new_model(TINY, VOCAB_SIZE, seed), head_init=head_init, seed=seed)
    return model


def random_tokens(rng, low, high):
    return rng.integers(2, VOCAB_SIZE, int(rng.integers(low, high))).astype(np.int32)


def preferences(count, candidates=2, seed=0):
    """The planted one: of candidates with different counts of LIKED, the one with most is best."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        completions = []
        for liked in rng.permutation(candidates):
            tokens = random_tokens(rng, 6, 11)
            tokens[tokens == LIKED] = LIKED + 1
            tokens[rng.choice(len(tokens), 2 * liked if candidates == 2 else liked, replace=False)] = LIKED
            completions.append(tokens)
        best = int(np.argmax([(tokens == LIKED).sum() for tokens in completions]))
        made.append(Preference(random_tokens(rng, 3, 8), tuple(completions), best))
    return made


def samples(count, seed=7):
    rng = np.random.default_rng(seed)
    return [(random_tokens(rng, 3, 8), random_tokens(rng, 1, 11)) for _ in range(count)]


def updates(model, data, config, *, seed=0, microbatch_tokens=256, **more):
    return reward_model_updates(
        model, data, config=config, microbatch_tokens=microbatch_tokens, seed=seed, batching=batching, **more
    )


def changed(config, **changes):
    return config.model_copy(update=changes)


def alone(model, prompt, completion):
    """The values [T] of one sequence, read by itself; the last is its score."""
    tokens = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))
    return model(tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)]))


@pytest.mark.parametrize(("candidates", "steps"), with_slow([(2, 20)], [(2, 40), (4, 80)]))
def test_it_learns_a_planted_preference(candidates, steps):
    model = tiny()
    config = RewardModelConfig(
        candidates=candidates,
        steps=steps,
        batch_size=32,
        optimizer=OptimizerConfig(lr=1e-2, eps=1e-5, schedule="linear"),
    )
    held_out = preferences(100, candidates, seed=1)
    drawn = samples(64)
    wide = {"microbatch_tokens": 2048, "batching": batching}
    before = preference_accuracy(model, held_out, **wide)
    data = preferences(32 * steps, candidates)
    done = list(updates(model, data, config, samples=drawn, microbatch_tokens=2048))
    assert preference_accuracy(model, held_out, **wide) > max(0.9, before)
    assert done[-1].loss < 0.5 * np.log(candidates)
    assert done[-1].accuracy > 0.9
    assert done[-1].chosen_mean > done[-1].rejected_mean + 1
    scores = score(model, drawn, **READ).astype(np.float64)
    assert (scores.mean(), scores.std()) == (pytest.approx(0, abs=1e-5), pytest.approx(1, rel=1e-5))


@pytest.mark.parametrize("candidates", [2, 4])
def test_the_first_update_is_that_of_the_scores_read_alone(candidates):
    model = tiny()
    data = preferences(6, candidates)
    scores = torch.stack([alone(model, p.prompt_tokens, c)[-1] for p in data for c in p.candidates]).view(6, -1)
    best = np.array([p.best for p in data])
    torch.nn.functional.cross_entropy(scores, torch.from_numpy(best)).backward()
    grad_norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item()
    scores = scores.detach().numpy()
    assert len(set(best)) > 1
    chosen = scores[np.arange(6), best]
    losses = np.log(np.exp(scores).sum(axis=1)) - chosen
    if candidates == 2:
        rejected = scores[np.arange(6), 1 - best]
        np.testing.assert_allclose(losses, np.log1p(np.exp(rejected - chosen)), rtol=1e-5)
    config = changed(PLAIN, candidates=candidates, batch_size=6)
    (update,) = updates(model, data, config)
    assert update.loss == pytest.approx(losses.mean(), rel=1e-4)
    assert update.accuracy == np.mean(scores.argmax(axis=1) == best)
    assert update.chosen_mean == pytest.approx(chosen.mean(), rel=1e-3, abs=1e-6)
    assert update.rejected_mean == pytest.approx((scores.sum() - chosen.sum()) / (6 * (candidates - 1)), abs=1e-5)
    assert update.grad_norm == pytest.approx(grad_norm, rel=1e-4)
    assert (update.index, update.num_preferences) == (0, 6)


def test_pairs_are_choices_of_two():
    scores = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    common = {"policy_logprobs": None, "advantages": None, "mask": torch.ones(8, dtype=torch.bool)}
    inputs = LossInputs(
        **common, segment_ids=torch.arange(8), num_units=4, scores=scores, labels=torch.zeros(4, dtype=torch.int64)
    )
    pair, _ = loss_named("bradley_terry", {})(inputs)
    choice, _ = loss_named("choice", {"num_candidates": 2})(inputs)
    torch.testing.assert_close(pair, choice)


@pytest.mark.parametrize("candidates", [2, 4])
def test_microbatches_and_the_order_of_candidates_change_nothing(candidates):
    data = preferences(8, candidates)
    turned = [Preference(p.prompt_tokens, p.candidates[1:] + p.candidates[:1], (p.best - 1) % candidates) for p in data]
    config = changed(PLAIN, candidates=candidates, batch_size=8)
    results = []
    for given, microbatch_tokens in [(data, 1), (data, 70), (data, 10_000), (turned, 70)]:
        model = tiny()
        (update,) = updates(model, given, config, microbatch_tokens=microbatch_tokens)
        results.append([update.loss, update.grad_norm, update.accuracy, update.chosen_mean])
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-4)


class Watched:
    """The batching edge, keeping what it packed."""

    def __init__(self):
        self.microbatches = []

    def collate(self, sequences, capacity_tokens, *, atom_size=1):
        packed = batching.collate(sequences, capacity_tokens, atom_size=atom_size)
        self.microbatches += packed
        return packed


@pytest.mark.parametrize("candidates", [2, 4])
def test_preferences_stay_whole_within_the_capacity_and_read_their_prompt_once(candidates):
    data, watched = preferences(12, candidates), Watched()
    model = tiny()
    config = changed(PLAIN, candidates=candidates, batch_size=12)
    list(reward_model_updates(model, data, config=config, microbatch_tokens=150, seed=0, batching=watched))
    assert len(watched.microbatches) > 1
    for microbatch in watched.microbatches:
        ordinals = [ordinal for ordinal, _ in microbatch.keys]
        assert all(ordinals.count(ordinal) == candidates for ordinal in ordinals)
        assert microbatch.num_tokens <= 150
    beginnings = [
        {tuple(own[:length]) for own in p.candidates for length in range(1, len(own) + 1)} for p in data
    ]  # of candidates that begin alike each row is read once
    assert sum(m.num_tokens for m in watched.microbatches) == sum(
        len(p.prompt_tokens) + len(own) for p, own in zip(data, beginnings, strict=True)
    )


def test_one_epoch_uses_each_preference_once_and_anneals_to_zero():
    data, watched = preferences(22), Watched()
    model = tiny()
    config = changed(PLAIN, batch_size=8)
    done = list(reward_model_updates(model, data, config=config, microbatch_tokens=10_000, seed=0, batching=watched))
    assert [update.num_preferences for update in done] == [8, 8, 6]
    completions = sorted(tuple(c) for p in data for c in p.candidates)
    seen = []
    for microbatch in watched.microbatches:
        for segment in range(len(microbatch.keys)):
            seen.append(tuple(microbatch.targets[microbatch.segment_ids == segment][:-1]))
    assert sorted(seen) == completions
    # lr * (1 - start / num_train), as published, where batches divide the data
    assert [update.lr for update in updates(tiny(), data[:16], changed(config, batch_size=4))] == (
        pytest.approx([5e-5 * (1 - start / 16) for start in (0, 4, 8, 12)])
    )


def test_steps_and_epochs_set_the_number_of_updates():
    data = preferences(5)
    config = changed(PLAIN, batch_size=4)
    sizes = [u.num_preferences for u in updates(tiny(), data, changed(config, epochs=2))]
    assert sizes == [4, 1, 4, 1]
    assert len(list(updates(tiny(), data, changed(config, steps=3)))) == 3


def test_the_seed_decides_the_order_and_nothing_else_does():
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(weights))
        model = tiny()
        list(updates(model, preferences(9), changed(PLAIN, batch_size=2), seed=seed))
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_gain_is_trained_like_a_weight_and_a_shift_has_no_gradient():
    model = tiny()
    config = changed(PLAIN, batch_size=4, optimizer=OptimizerConfig(lr=1e-3, eps=1e-5))
    list(updates(model, preferences(16), config))
    assert model.gain.item() != 1.0
    # exactly 0 only in exact arithmetic: softmax does not see a shift, rounding leaves ~1e-8, far below Adam's eps
    assert abs(model.bias.item()) < 1e-5


@pytest.mark.parametrize("most_together", [4096, 5, 1])
def test_scores_are_those_of_each_sequence_alone_in_the_order_given(monkeypatch, most_together):
    monkeypatch.setattr("slipstream.models.scoring.MOST_TOGETHER", most_together)
    model = tiny()
    rng = np.random.default_rng(3)
    prompts = [random_tokens(rng, 3, 8) for _ in range(4)]
    drawn = [(prompts[int(rng.integers(4))], random_tokens(rng, 1, 11)) for _ in range(20)]
    drawn += [drawn[0], (prompts[0], np.array([], dtype=np.int32)), (prompts[0], np.array([], dtype=np.int32))]
    expected = [alone(model, *sample)[-1].item() for sample in drawn]
    for microbatch_tokens in (1, 40, 10_000):
        scores = score(model, drawn, microbatch_tokens=microbatch_tokens, batching=batching)
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert score(model, [], **READ).shape == (0,)


def test_values_are_those_of_the_states_before_each_token():
    model = tiny()
    drawn = samples(4) + [(samples(1)[0][0], samples(9)[8][1])]
    sequences = [scored_sequence((0, index), *sample) for index, sample in enumerate(drawn)]
    (microbatch,) = batching.collate(sequences, 1000)
    values = at_targets(model, microbatch)
    for segment, (_, index) in enumerate(microbatch.keys):
        prompt, completion = drawn[index]
        expected = alone(model, prompt, completion)[len(prompt) - 1 :]
        torch.testing.assert_close(values[microbatch.segment_ids == segment], expected, atol=1e-5, rtol=0)


def test_samples_of_one_prompt_read_it_once():
    model = tiny()
    prompt = np.arange(2, 12, dtype=np.int32)
    watched = Watched()
    score(model, [(prompt, np.array([token])) for token in range(2, 8)], microbatch_tokens=64, batching=watched)
    assert [microbatch.num_tokens for microbatch in watched.microbatches] == [10 + 6]


def test_scores_equal_transformers_on_a_padded_batch(tmp_path):
    """The last real token, EOS included, whatever the padding; a padding token of its own keeps EOS visible."""
    backbone = new_model(TINY, VOCAB_SIZE, 0, eos_token_id=1, pad_token_id=0)
    model = new_scalar_model(backbone, head_init="reward", seed=0)
    drawn = [(prompt, np.append(completion, 1).astype(np.int32)) for prompt, completion in samples(6)]
    normalise(model, drawn, **READ)
    save_scalar_model(model, tmp_path)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    width = max(len(prompt) + len(completion) for prompt, completion in drawn)
    ids = torch.tensor(
        [[*prompt, *completion, *[0] * (width - len(prompt) - len(completion))] for prompt, completion in drawn]
    )
    with torch.no_grad():
        expected = theirs(ids, attention_mask=(ids != 0).long()).logits[:, 0] + theirs.config.score_bias
    np.testing.assert_allclose(score(model, drawn, **READ), expected, atol=1e-4)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("target", [(0.0, 1.0), (2.0, 0.5)])
def test_normalising_sets_mean_and_deviation(unbiased, target):
    model = tiny()
    drawn = samples(30)
    raw = score(model, drawn, **READ).astype(np.float64)
    with torch.no_grad():
        model.gain.fill_(-3.0)  # whatever was set before is forgotten
        model.bias.fill_(9.0)
    normalise(model, drawn, target_mean=target[0], target_std=target[1], unbiased=unbiased, **READ)
    std = np.sqrt(np.square(raw - raw.mean()).sum() / (29 if unbiased else 30))
    gain = target[1] / std
    assert model.gain.item() == pytest.approx(gain)
    assert model.bias.item() == pytest.approx(target[0] - gain * raw.mean())
    scores = score(model, drawn, **READ).astype(np.float64)
    assert scores.mean() == pytest.approx(target[0], abs=1e-5)
    assert scores.std(ddof=int(unbiased)) == pytest.approx(target[1], rel=1e-5)


def test_normalising_happens_before_the_first_update_and_after_the_last():
    model = tiny()
    drawn, data = samples(20), preferences(8)
    config = RewardModelConfig(batch_size=4, normalise_unbiased=True, optimizer=OptimizerConfig(lr=1e-2))
    expected = tiny()
    normalise(expected, drawn, unbiased=True, **READ)
    started = updates(model, data, config, samples=drawn)
    first = next(started)
    order = np.random.default_rng(0).permutation(8)[:4]
    chosen = [alone(expected, data[i].prompt_tokens, data[i].candidates[data[i].best])[-1].item() for i in order]
    assert first.chosen_mean == pytest.approx(np.mean(chosen), abs=1e-4)
    assert len(list(started)) == 1
    scores = score(model, drawn, **READ).astype(np.float64)
    assert (scores.mean(), scores.std(ddof=1)) == (pytest.approx(0, abs=1e-5), pytest.approx(1, rel=1e-5))


def test_references_average_zero_and_differences_stay():
    model = tiny()
    references = samples(25)
    with torch.no_grad():
        model.gain.fill_(2.0)
        model.bias.fill_(3.0)
    before = score(model, references, **READ)
    assert normalise_on_references(model, references, **READ) == pytest.approx(before.mean(), rel=1e-5)
    after = score(model, references, **READ)
    assert after.mean() == pytest.approx(0, abs=1e-5)
    np.testing.assert_allclose(after - after[0], before - before[0], atol=1e-5)
    config = RewardModelConfig(batch_size=4, normalise="reference_bias")
    list(updates(model, preferences(8), config, samples=references))
    assert score(model, references, **READ).mean() == pytest.approx(0, abs=1e-5)
    assert model.gain.item() == pytest.approx(2.0, abs=1e-3)


def test_a_tie_is_wrong():
    model = tiny(head_init="zero")
    assert preference_accuracy(model, preferences(5), **READ) == 0.0


def test_what_cannot_be_normalised_is_refused():
    model = tiny(head_init="zero")
    with pytest.raises(ConfigError, match="score the same"):
        normalise(model, samples(4), **READ)
    with pytest.raises(ConfigError, match="at least 2"):
        normalise(model, samples(1), **READ)
    with pytest.raises(ConfigError, match="references"):
        normalise_on_references(model, [], **READ)
    with pytest.raises(ConfigError, match="nothing to normalise"):
        next(updates(model, preferences(2), RewardModelConfig()))
    with torch.no_grad():
        model.head.bias.fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        normalise(model, samples(4), **READ)
    with pytest.raises(NonFiniteError):
        normalise_on_references(model, samples(4), **READ)
    with pytest.raises(NonFiniteError, match="weights were not changed"):
        next(updates(model, preferences(2), PLAIN))


def test_preferences_that_do_not_fit_are_refused():
    model = tiny()
    [pair] = preferences(1)
    prompt, candidates = pair.prompt_tokens, pair.candidates
    nothing = np.array([], dtype=np.int32)
    for data, error, message in [
        ([], ConfigError, "needs preferences"),
        (preferences(1, 4), ConfigError, "another number of candidates"),
        ([pair, Preference(prompt, candidates, 2)], ConfigError, "preference 1 chooses"),
        ([Preference(prompt, candidates, -1)], ConfigError, "best = -1"),
        ([Preference(nothing, candidates, 0)], ShapeError, "empty prompt"),
        ([Preference(prompt, (nothing, candidates[0]), 0)], ShapeError, "empty prompt or candidate"),
    ]:
        with pytest.raises(error, match=message):
            next(updates(model, data, PLAIN))
    with pytest.raises(ConfigError, match="accuracy needs preferences"):
        preference_accuracy(model, [], **READ)
    with pytest.raises(ConfigError, match="another number"):
        preference_accuracy(model, [pair, *preferences(1, 4)], **READ)
    with pytest.raises(ShapeError, match="prompt"):
        score(model, [(nothing, prompt)], **READ)


# Ratings


def ratings(count, seed=0):
    """Completions rated by their share of LIKED, on a scale of its own."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        tokens = random_tokens(rng, 6, 11)
        tokens[rng.random(len(tokens)) < rng.random()] = LIKED
        rating = 3.0 + 2.0 * float((tokens == LIKED).mean())
        made.append(Preference(random_tokens(rng, 3, 8), (tokens,), rating=rating))
    return made


def rated_config(**changes):
    return RewardModelConfig(candidates=1, **changes)


@pytest.mark.parametrize("tie", [0.0, 0.5])
def test_pairs_in_order_are_counted_without_looking_at_each(tie):
    rng = np.random.default_rng(0)
    groups = [rng.integers(0, 6, size).astype(np.float64) for size in (3, 0, 7, 1, 4)]
    pairs = [
        (low, high)
        for index, group in enumerate(groups)
        for low in group
        for high in np.concatenate(groups[index + 1 :] or [[]])
    ]
    expected = np.mean([1.0 if high > low else tie * (high == low) for low, high in pairs])
    assert share_in_order(groups, tie=tie) == pytest.approx(expected)
    assert np.isnan(share_in_order([groups[0], groups[1]], tie=tie))
    many = [rng.normal(size=2000), rng.normal(size=2000) + 1.0]
    tracemalloc.start()
    share = share_in_order(many, tie=tie)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert share == pytest.approx(np.mean(many[0][:, None] < many[1]))
    assert most < 500_000, "bytes; the pairs alone are 4,000,000 numbers"


def test_it_learns_planted_ratings_and_ends_normalised():
    model = tiny()
    config = rated_config(steps=30, batch_size=32, optimizer=OptimizerConfig(lr=1e-2, eps=1e-5, schedule="linear"))
    held_out, drawn = ratings(100, seed=1), samples(64)
    done = list(updates(model, ratings(32 * 30), config, samples=drawn, microbatch_tokens=2048))
    assert done[-1].loss < 0.1 * done[0].loss
    assert preference_accuracy(model, held_out, **READ) > 0.9
    scores = score(model, drawn, **READ).astype(np.float64)
    assert (scores.mean(), scores.std()) == (pytest.approx(0, abs=1e-5), pytest.approx(1, rel=1e-5))
    found = score(model, [one.samples[0] for one in held_out], **READ)
    assert np.corrcoef(found, [one.rating for one in held_out])[0, 1] > 0.9


@pytest.mark.parametrize("capacity", [256, 30, 1])
def test_the_first_update_on_ratings_is_the_squared_error_of_scores_read_alone(capacity):
    model = tiny()
    data = ratings(6)
    scores = torch.stack([alone(model, one.prompt_tokens, one.candidates[0])[-1] for one in data])
    target = torch.tensor([one.rating for one in data])
    loss = ((scores - target) ** 2).mean()
    loss.backward()
    grad_norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item()
    config = rated_config(normalise="none", batch_size=6)
    (update,) = updates(model, data, config, microbatch_tokens=capacity)
    assert update.loss == pytest.approx(loss.item(), rel=1e-4)
    assert update.grad_norm == pytest.approx(grad_norm, rel=1e-3)
    pairs = [(i, j) for i in range(6) for j in range(6) if data[i].rating > data[j].rating]
    assert update.accuracy == pytest.approx(np.mean([(scores[i] > scores[j]).item() for i, j in pairs]))
    assert update.chosen_mean == pytest.approx(scores.mean().item(), rel=1e-4)
    assert np.isnan(update.rejected_mean)


def test_scores_start_at_the_scale_of_the_ratings():
    """N, item 20: mean and population deviation of all labels before training."""
    model = tiny()
    data, drawn = ratings(40), samples(64)
    config = rated_config(steps=1, optimizer=OptimizerConfig(lr=1e-12))
    steps = updates(model, data, config, samples=drawn)
    next(steps)
    labels = np.array([one.rating for one in data])
    scores = score(model, drawn, **READ).astype(np.float64)
    assert (scores.mean(), scores.std()) == (
        pytest.approx(labels.mean(), rel=1e-5),
        pytest.approx(labels.std(), rel=1e-4),
    )
    assert labels.mean() > 3


def test_ratings_that_do_not_fit_are_refused():
    model = tiny()
    plain = rated_config(normalise="none")
    (one,) = ratings(1)
    for wrong in (None, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="not labelled"):
            next(updates(model, [Preference(one.prompt_tokens, one.candidates, rating=wrong)], plain))
    (pair,) = preferences(1)
    with pytest.raises(ConfigError, match="another number of candidates"):
        next(updates(model, [pair], plain))
    with pytest.raises(ConfigError, match="not labelled"):
        next(updates(model, [Preference(pair.prompt_tokens, pair.candidates, rating=1.0)], PLAIN))
    with pytest.raises(ConfigError, match="all equal"):
        next(updates(model, [one, one], rated_config(), samples=samples(4)))
