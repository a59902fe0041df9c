"""The node of reward models: parts, sums, constraints, evaluation, failures, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from ports import start

from slipstream.batching import collate
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.core.sections import ModelConfig, RewardModelTerm, RewardsConfig, RewardTerm
from slipstream.core.service_messages import Counters, EvalScored, Ready
from slipstream.core.types import Completion, Prompt, Rollout, Segment, Stop, VersionSpan
from slipstream.models.initialise import new_model
from slipstream.models.scalar import ScalarModel, new_scalar_model, save_scalar_model
from slipstream.models.scoring import score
from slipstream.rewards.model_executor import ModelScorer, RewardModels

TINY = ModelConfig(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=2, max_positions=32)
PERIOD = 7


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, ScalarModel]]:
    """Two random reward models, saved."""
    made = {}
    for seed, name in enumerate(("help", "safety")):
        backbone = new_model(TINY, vocab_size=20, seed=seed, eos_token_id=0, pad_token_id=1)
        model = new_scalar_model(backbone, head_init="reward", seed=seed)
        path = tmp_path_factory.mktemp(name)
        save_scalar_model(model, path)
        made[name] = (path, model)
    return made


def completion(ordinal: int, *, purpose: Any = "train", length: int = 5) -> Completion:
    rng = np.random.default_rng(ordinal)
    tokens = rng.integers(2, 20, length).astype(np.int32)
    segment = Segment(
        tokens=tokens,
        behaviour_logprobs=np.zeros(length, np.float32),
        version_spans=(VersionSpan(start=0, version=4),),
    )
    prompt = Prompt(prompt_id=str(ordinal), text="q", tokens=rng.integers(2, 20, 4).astype(np.int32), task="dataset")
    return Completion(
        ordinal=ordinal, sample=0, prompt=prompt, segments=(segment,), text="", finish_reason="stop",
        purpose=purpose, eval_id=3 if purpose == "eval" else -1,
    )  # fmt: skip


def expected(model: ScalarModel, completions: list[Completion]) -> list[float]:
    """Each one alone."""
    samples = [(c.prompt.tokens, c.segments[0].tokens) for c in completions]
    return [float(score(model, [sample], microbatch_tokens=64, batching=collate)[0]) for sample in samples]


def scorer(config: RewardsConfig) -> ModelScorer:
    return ModelScorer(config, terms=config.terms, batching=collate, microbatch_tokens=64, max_tokens=32)


def test_parts_and_weighted_sum(models: dict[str, tuple[Path, ScalarModel]]) -> None:
    config = RewardsConfig(
        terms=[RewardTerm(function="length", weight=0.5, params={"target_tokens": 5})],
        models=[
            RewardModelTerm(path=str(models["help"][0]), name="help", weight=2.0),
            RewardModelTerm(path=str(models["safety"][0]), name="safety", weight=0.0),
        ],
    )
    completions = [completion(i, length=3 + i) for i in range(6)]
    rollouts = [Rollout(completion=c, reward=0.0, reward_parts={"length": -0.25}) for c in completions]
    scored = scorer(config).score(rollouts)
    helps, safeties = (expected(models[name][1], completions) for name in ("help", "safety"))
    for rollout, of_help, of_safety in zip(scored, helps, safeties, strict=True):
        assert list(rollout.reward_parts) == ["length", "help", "safety"]
        assert rollout.reward_parts["help"] == pytest.approx(of_help, abs=1e-5)
        assert rollout.reward_parts["safety"] == pytest.approx(of_safety, abs=1e-5)
        assert rollout.reward == pytest.approx(0.5 * -0.25 + 2.0 * of_help, abs=1e-5)


def test_a_violated_constraint_caps_the_reward(models: dict[str, tuple[Path, ScalarModel]]) -> None:
    completions = [completion(i) for i in range(8)]
    safeties = expected(models["safety"][1], completions)
    threshold = float(np.median(safeties))
    config = RewardsConfig(
        terms=[RewardTerm(function="exact_match", weight=10.0)],
        models=[RewardModelTerm(path=str(models["safety"][0]), name="safety", at_least=threshold)],
        violation_cap=-1.0,
    )
    rollouts = [Rollout(completion=c, reward=0.0, reward_parts={"exact_match": 1.0}) for c in completions]
    rewards = [rollout.reward for rollout in scorer(config).score(rollouts)]
    assert rewards == [10.0 if safety >= threshold else -1.0 for safety in safeties]


def test_failed_and_abstaining_rollouts(models: dict[str, tuple[Path, ScalarModel]]) -> None:
    """A failure stays one; a function that abstains leaves the sum to the model."""
    config = RewardsConfig(
        terms=[RewardTerm(function="exact_match")],
        models=[RewardModelTerm(path=str(models["help"][0]))],
        failure_reward=-3.0,
    )
    failed = Rollout(completion=completion(0), reward=-3.0, failure="timed out")
    abstained = Rollout(completion=completion(1), reward=0.0, reward_parts={"exact_match": None})
    not_finite = Rollout(completion=completion(2), reward=0.0, reward_parts={"exact_match": float("nan")})
    first, second, third = scorer(config).score([failed, abstained, not_finite])
    assert first == failed
    assert second.reward == pytest.approx(expected(models["help"][1], [completion(1)])[0], abs=1e-5)
    assert (third.reward, third.failure is None) == (-3.0, False)


def test_models_read_up_to_the_truncation_token(models: dict[str, tuple[Path, ScalarModel]]) -> None:
    config = RewardsConfig(
        terms=[], models=[RewardModelTerm(path=str(models["help"][0]))], truncate_token=PERIOD, truncate_after=2
    )
    whole = completion(0, length=6)
    tokens = np.array([PERIOD, 3, 4, PERIOD, 5, 6], dtype=np.int32)
    segment = msgspec.structs.replace(whole.segments[0], tokens=tokens)
    cut = msgspec.structs.replace(whole, segments=(msgspec.structs.replace(segment, tokens=tokens[:4]),))
    (rollout,) = scorer(config).score(
        [Rollout(completion=msgspec.structs.replace(whole, segments=(segment,)), reward=0.0)]
    )
    assert rollout.reward == pytest.approx(expected(models["help"][1], [cut])[0], abs=1e-5)
    assert rollout.completion.num_tokens == 6  # training covers all that was sampled


def test_of_an_episode_with_branches_models_read_the_trunk(
    models: dict[str, tuple[Path, ScalarModel]], tmp_path: Path
) -> None:
    """Also where another branch is longer than what they read."""
    trunk = completion(0)
    branch = Segment(tokens=np.full(40, 5, dtype=np.int32), begins=True)
    episode = msgspec.structs.replace(trunk, segments=(*trunk.segments, branch, *trunk.segments))
    term = RewardModelTerm(path=str(models["help"][0]))
    node = RewardModels(
        RewardsConfig(terms=[], models=[term]), terms=[], batching=collate, microbatch_tokens=64, max_tokens=32
    )
    ports = start(node, tmp_path, name="reward_models")
    ports["completions"].put(Rollout(completion=episode, reward=0.0))
    node.step()
    (scored,) = ports["scored"].messages
    assert isinstance(scored, Rollout)
    assert scored.failure is None
    assert scored.reward == pytest.approx(expected(models["help"][1], [trunk])[0], abs=1e-5)
    assert scored.completion.num_branches == 2


def test_a_model_that_reads_too_few_tokens_is_refused(models: dict[str, tuple[Path, ScalarModel]]) -> None:
    config = RewardsConfig(terms=[], models=[RewardModelTerm(path=str(models["help"][0]))])
    with pytest.raises(ConfigError, match="at most 32 tokens"):
        ModelScorer(config, terms=[], batching=collate, microbatch_tokens=64, max_tokens=33)


def test_what_is_longer_than_the_models_read_has_failed(models: dict[str, tuple[Path, ScalarModel]]) -> None:
    """A reference that somebody wrote, say; what counts is the text up to the token where it is cut."""
    term = RewardModelTerm(path=str(models["help"][0]))
    short, long, cut = completion(0), completion(1, length=29), completion(2, length=40)
    for tokens in (short.segments[0].tokens, long.segments[0].tokens):
        tokens[tokens == PERIOD] = PERIOD + 1
    cut.segments[0].tokens[4] = PERIOD
    found = scorer(RewardsConfig(terms=[], models=[term], failure_reward=-1.0, truncate_token=PERIOD)).score(
        [Rollout(completion=one, reward=0.0) for one in (short, long, cut)]
    )
    assert [rollout.failure for rollout in found] == [
        None, "33 tokens with its prompt, the reward models read 32", None,
    ]  # fmt: skip
    assert (found[1].reward, found[1].reward_parts) == (-1.0, {})
    assert found[0].reward == pytest.approx(expected(models["help"][1], [short])[0], abs=1e-5)


def test_an_episode_longer_than_a_turn_is_read_where_the_models_read_it(
    models: dict[str, tuple[Path, ScalarModel]], tmp_path: Path
) -> None:
    """`max_tokens` is what every run needs at least, not the most that the models take."""
    config = RewardsConfig(terms=[], models=[RewardModelTerm(path=str(models["help"][0]))])
    executor = RewardModels(config, terms=[], batching=collate, microbatch_tokens=64, max_tokens=8)
    ports = start(executor, tmp_path, name="reward_models")
    long = completion(3)
    [segment] = long.segments
    assert 8 < len(long.prompt.tokens) + len(segment.tokens) <= 32
    ports["completions"].put(long)
    ports["commands"].put(Stop())
    while not executor.is_finished:
        executor.step()
    [rollout] = [one for one in ports["scored"].messages if isinstance(one, Rollout)]
    assert rollout.failure is None
    assert rollout.reward == pytest.approx(expected(models["help"][1], [long])[0], abs=1e-5)


def test_names_tell_models_apart() -> None:
    with pytest.raises(ConfigError, match="names of their own"):
        resolve({"prompts": {"dataset": "x"}, "rewards": {"models": [{"path": "a"}, {"path": "b"}]}})


def test_the_executor_scores_training_and_evaluation(
    models: dict[str, tuple[Path, ScalarModel]], tmp_path: Path
) -> None:
    """Completions where no function scored; batches of at most `model_batch_size`; nothing is lost at the end."""
    config = RewardsConfig(terms=[], models=[RewardModelTerm(path=str(models["help"][0]))], model_batch_size=4)
    executor = RewardModels(config, terms=[], batching=collate, microbatch_tokens=64, max_tokens=16)
    ports = start(executor, tmp_path, name="reward_models")
    completions = [completion(i) for i in range(9)]
    for one in completions:
        ports["completions"].put(one)
    ports["completions"].put(completion(9, purpose="eval"))
    ports["commands"].put(Stop())
    while not executor.is_finished:
        executor.step()
    rollouts = [m for m in ports["scored"].messages if isinstance(m, Rollout)]
    assert [r.completion.ordinal for r in rollouts] == list(range(9))
    assert [r.reward for r in rollouts] == pytest.approx(expected(models["help"][1], completions), abs=1e-5)
    events = list(ports["events"].messages)
    assert isinstance(events[0], Ready)
    (scored,) = [e for e in events if isinstance(e, EvalScored)]
    assert (scored.eval_id, scored.ordinal, scored.version) == (3, 9, 4)
    assert scored.reward == pytest.approx(expected(models["help"][1], [completion(9)])[0], abs=1e-5)
    last = [e for e in events if isinstance(e, Counters)][-1]
    assert (last.values["scored"], last.values["eval_scored"], last.values["batches"]) == (9.0, 1.0, 3.0)


def test_held_out_answers_have_the_reward_that_is_trained_on(
    models: dict[str, tuple[Path, ScalarModel]], tmp_path: Path
) -> None:
    """The first term measures only: the models' scores are the reward, and all parts come with it."""
    terms = [RewardTerm(function="exact_match", weight=0.0)]
    config = RewardsConfig(terms=terms, models=[RewardModelTerm(path=str(models["help"][0]), name="help", weight=2.0)])
    executor = RewardModels(config, terms=terms, batching=collate, microbatch_tokens=64, max_tokens=16)
    ports = start(executor, tmp_path, name="reward_models")
    held_out = [completion(i, purpose="eval") for i in range(2)]
    ports["completions"].put(Rollout(completion=held_out[0], reward=0.0, reward_parts={"exact_match": 1.0}))
    ports["completions"].put(Rollout(completion=held_out[1], reward=-3.0, failure="timed out"))
    ports["commands"].put(Stop())
    while not executor.is_finished:
        executor.step()
    sound, failed = (event for event in ports["events"].messages if isinstance(event, EvalScored))
    (help_,) = expected(models["help"][1], held_out[:1])
    assert sound.reward == pytest.approx(2.0 * help_, abs=1e-5)
    assert sound.reward_parts == {"exact_match": 1.0, "help": pytest.approx(help_, abs=1e-5)}
    assert (failed.reward, failed.reward_parts, failed.failure) == (-3.0, {}, "timed out")
