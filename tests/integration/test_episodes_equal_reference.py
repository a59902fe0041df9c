"""At staleness 0 a run of episodes of several turns equals a plain loop that talks to its environments, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_sync_equals_reference import assert_equal
from turn_environments import Echo, Unpunctual

import slipstream
from slipstream.batching import collate
from slipstream.controller.placement import num_cores
from slipstream.core.config import RunConfig
from slipstream.core.recipes import resolve
from slipstream.core.run_log import read_rollouts
from slipstream.core.types import Completion, EpisodeRecord, Group, Prompt, Rollout, Segment
from slipstream.generator.engine import Engine
from slipstream.generator.native import native_engine
from slipstream.generator.requests import Finished, Request
from slipstream.models.build import build_policy
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import save_model
from slipstream.prompts import build_prompts, demonstrations
from slipstream.trainer.optim import AdamW
from slipstream.trainer.step import train_on_batch
from slipstream.trainer.supervised import supervised_updates

SOURCE = Path(__file__).with_name("turn_environments.py")
MAX_TURNS, MAX_EPISODE_TOKENS = 3, 26
EPISODES: dict[str, Any] = {
    "max_staleness": 0,
    "weight_update": "between_batches",
    "environment": {
        "class_path": f"{SOURCE}:Unpunctual",
        "max_turns": MAX_TURNS,
        "max_episode_tokens": MAX_EPISODE_TOKENS,
        "num_workers": 1,
    },
    "rewards": {"terms": []},
}


def reference_run(config: RunConfig, out: Path) -> list[Group]:
    """Sample a turn, ask the environment, train, repeat: one thread of control. Returns the groups of the last step."""
    torch.set_num_threads(num_cores())
    model, tokenizer = build_policy(config.model, seed=config.seed)
    parameters = FlatParameters(model)
    prompts = build_prompts(config, tokenizer)
    pairs = demonstrations(config.warm_start, prompts.train.prompts, tokenizer, seed=config.seed)
    for _ in supervised_updates(
        model,
        AdamW(parameters, config.warm_start.optimizer, total_updates=config.warm_start.steps),
        pairs,
        config=config.warm_start,
        microbatch_tokens=config.trainer.microbatch_tokens,
        seed=config.seed,
        batching=collate,
    ):
        pass
    optimizer = AdamW(parameters, config.trainer.optimizer, total_updates=config.steps * config.updates_per_step)
    ordinal, groups = 0, []
    for step in range(config.steps):
        groups = []
        while len(groups) < config.groups_per_step:
            group = play_group(model, tokenizer, prompts.train.prompt(ordinal), ordinal, step, config)
            ordinal += 1
            rewards = [rollout.reward for rollout in group.rollouts]
            if max(rewards) > min(rewards):
                groups.append(group)
        train_on_batch(model, optimizer, groups, config=config, step=step, batching=collate)
    save_model(model, out, tokenizer)
    return groups


def play_group(model: Any, tokenizer: Any, prompt: Prompt, ordinal: int, step: int, config: RunConfig) -> Group:
    """One group in an engine of its own, one episode after the other: no turn of another one is decoded beside it."""
    engine = native_engine(
        model,
        num_slots=8,
        max_len=config.longest_sequence(config.model.max_positions),
        seed=config.seed,
        stop_token_ids=[tokenizer.eos_token_id],
        parked_tokens=None,
        version=step,
    )
    return Group(
        ordinal=ordinal,
        rollouts=tuple(
            play_episode(engine, tokenizer, prompt, ordinal, sample, config)
            for sample in range(config.completions_per_group)
        ),
    )


def play_episode(
    engine: Engine, tokenizer: Any, prompt: Prompt, ordinal: int, sample: int, config: RunConfig
) -> Rollout:
    """Ids are only appended: a turn is never decoded and encoded again."""
    environment = Echo()
    opening = environment.reset(**prompt.columns)
    start = list(prompt.tokens)
    if opening is not None:
        start += tokenizer.encode(opening, add_special_tokens=False)
    behind: list[int] = []
    segments: list[Segment] = []
    rewards: list[float | None] = []
    reason = ""
    while True:
        room = min(
            config.generator.max_new_tokens, MAX_EPISODE_TOKENS - len(behind), engine.max_len - len(start + behind)
        )
        if room < 1 or len(rewards) == MAX_TURNS:
            segments, reason = segments[:-1], "length"  # nobody has read what was said last
            break
        turn = sampled(engine, start + behind, ordinal, sample, room, num_before=len(behind))
        segments.append(Segment(tokens=turn.tokens, behaviour_logprobs=turn.logprobs, version_spans=turn.version_spans))
        has_stopped, reason = turn.finish_reason == "stop", turn.finish_reason
        text = tokenizer.decode(turn.tokens[: len(turn.tokens) - has_stopped].tolist(), skip_special_tokens=True)
        answer = environment.step({"role": "assistant", "content": text})
        rewards.append(answer["reward"])
        if answer["done"]:
            break
        given = ([] if has_stopped else [tokenizer.eos_token_id]) + tokenizer.encode(
            answer["messages"], add_special_tokens=False
        )
        segments.append(Segment(tokens=np.array(given, dtype=np.int32)))
        behind += [*turn.tokens.tolist(), *given]
    completion = Completion(
        ordinal=ordinal,
        sample=sample,
        prompt=Prompt(prompt_id=prompt.prompt_id, text=prompt.text, tokens=np.array(start, np.int32), task=prompt.task),
        segments=tuple(segments),
        text="",
        finish_reason=reason,  # type: ignore[arg-type]
        episode=EpisodeRecord(),
    )
    total = sum(reward for reward in rewards if reward is not None) + environment.final_reward()
    return Rollout(completion=completion, reward=total)


def sampled(engine: Engine, context: list[int], ordinal: int, sample: int, room: int, *, num_before: int) -> Finished:
    """The next turn of an episode, behind `context`; the keys of the turn before are parked."""
    request = Request(ordinal, sample, np.array(context, dtype=np.int32), room, num_before=num_before, parks=True)
    engine.submit([request])
    finished: list[Finished] = []
    while not finished:
        finished = engine.step()
    return finished[0]


def longer(tiny: dict[str, Any]) -> dict[str, Any]:
    """A few steps of the tiny run, with episodes."""
    warm_start = tiny["warm_start"] | {"steps": 10}
    return tiny | EPISODES | {"model": tiny["model"] | {"max_positions": 64}, "steps": 2, "warm_start": warm_start}


@pytest.mark.parametrize(
    "ways", [("inline", "agents"), pytest.param(("processes",), marks=pytest.mark.slow)], ids=" and ".join
)
def test_runs_of_all_kinds_and_a_plain_loop_give_the_same_weights(ways, tiny, tmp_path):
    """In whatever order environments answer, beside whatever a turn is decoded, and also with versions at turns."""
    overrides = longer(tiny)
    last = reference_run(resolve("quickstart", overrides), tmp_path / "reference")
    few = {"replicas": 2, "num_slots": 8, "sessions": 4}  # and 4 in reserve: not a batch's 16 on one replica
    two = overrides | {"generator": tiny["generator"] | few | {"weight_update_at": "turn"}}
    agent = {"class_path": None, "agent": f"{SOURCE}:sociable_agent", "dry_run": False}  # alone it would not begin
    runs: dict[str, dict[str, Any]] = {
        "inline": {"overrides": overrides | {"host": "inline"}, "environment": Unpunctual},
        "processes": {"overrides": two},
        "agents": {"overrides": two | {"environment": two["environment"] | agent}},
    }
    for way in ways:
        run = slipstream.run("quickstart", **runs[way], out=tmp_path / way, display=False)
        assert run.summary["staleness"]["max"] == 0
        told = {(line.ordinal, line.sample): line for line in read_rollouts(run.out / "rollouts.jsonl")}
        for rollout in (rollout for group in last for rollout in group.rollouts):
            line, ours = told[rollout.ordinal, rollout.sample], rollout.completion
            assert line.reward == pytest.approx(rollout.reward, abs=1e-12)
            assert line.num_tokens == ours.num_tokens
            assert line.finish_reason == ours.finish_reason
        assert_equal(run.out / "model", tmp_path / "reference")
        if way != "inline":
            assert {line.replica for line in told.values()} == {0, 1}  # 12 episodes of the first step began at once
        assert len({line.episode.turns for line in told.values()}) > 1, "some end early"
