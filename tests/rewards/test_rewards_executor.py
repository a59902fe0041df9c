"""The reward node: every completion becomes one rollout or one evaluation score, failures included."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from covering import with_slow
from heard import Heard
from ports import Port, start

from slipstream.core.clock import VirtualClock
from slipstream.core.sections import RewardModelTerm, RewardsConfig, RewardTerm, TaskConfig
from slipstream.core.service_messages import Counters, EvalScored, Noted, Ready
from slipstream.core.types import Completion, EpisodeRecord, Prompt, Rollout, Segment, Stop, VersionSpan
from slipstream.jail import sandbox
from slipstream.rewards.executor import Rewards
from slipstream.rewards.pool import ScoringPool

HERE = Path(__file__).parent


def completion(
    ordinal: int, text: str, *, purpose: Any = "train", answer: str = "right", sample: int = 0
) -> Completion:
    tokens = np.arange(3, dtype=np.int32)
    segment = Segment(
        tokens=tokens,
        behaviour_logprobs=np.zeros(3, np.float32),
        version_spans=(VersionSpan(start=0, version=0),),
    )
    prompt = Prompt(prompt_id=str(ordinal), text="q", tokens=tokens, task="dataset", answer=answer)
    return Completion(
        ordinal=ordinal, sample=sample, prompt=prompt, segments=(segment,), text=text, finish_reason="stop",
        purpose=purpose, eval_id=3 if purpose == "eval" else -1,
    )  # fmt: skip


def drive(executor: Rewards, is_over: Callable[[], bool] | None = None) -> None:
    """Step as a host does, until `is_over`, or the executor has finished."""
    end_s = time.monotonic() + 60
    while not (executor.is_finished if is_over is None else is_over()):
        assert time.monotonic() < end_s
        if not executor.step():
            due_s = executor.wait_s()
            select.select(executor.wait_fds(), [], [], 1.0 if due_s is None else min(due_s, 1.0))


def scores(ports: dict[str, Port]) -> list[EvalScored]:
    return [event for event in ports["events"].messages if isinstance(event, EvalScored)]


def test_each_completion_becomes_one_rollout(tmp_path: Path) -> None:
    config = RewardsConfig(
        terms=[
            RewardTerm(function="exact_match", weight=2.0),
            RewardTerm(function=f"{HERE / 'hostile_verifiers.py'}:attack", weight=0.5),
        ],
        timeout_s=1.0,
        memory_mb=512,
        failure_reward=-3.0,
        max_chars=1000,
    )
    executor, clock = Rewards(config, {}), VirtualClock()
    ports = start(executor, tmp_path, name="rewards", clock=clock)
    texts = ["ok", "ok" + " " * 5000, "nan", "ok"]
    for i, text in enumerate(texts):
        ports["completions"].put(completion(i, text, answer="ok"))
    ports["completions"].put(completion(9, "ok", purpose="eval", answer="no"))
    try:
        drive(executor, lambda: len(ports["rollouts"].messages) == 4 and scores(ports) != [])
        ports["completions"].put(completion(4, "loop", answer="ok"))
        executor.step()
        clock.advance(1.0)
        drive(executor, lambda: len(ports["rollouts"].messages) == 5)
        ports["commands"].put(Stop())
        drive(executor)
    finally:
        executor.close()
    rollouts = {m.completion.ordinal: m for m in ports["rollouts"].messages if isinstance(m, Rollout)}
    assert [rollouts[i].reward for i in range(5)] == [2.5, 2.5, -3.0, 2.5, -3.0]
    assert rollouts[0].reward_parts == {"exact_match": 1.0, "attack": 0.5 / 0.5}  # no path of the file
    assert "not finite" in (rollouts[2].failure or "")
    assert "timed out" in (rollouts[4].failure or "")
    assert rollouts[1].completion.text == texts[1]  # cut for the verifier only
    events = list(ports["events"].messages)
    assert isinstance(events[0], Ready)
    (scored,) = scores(ports)
    assert (scored.eval_id, scored.ordinal, scored.num_tokens) == (3, 9, 3)
    assert (scored.reward, scored.reward_parts) == (0.5, {"exact_match": 0.0, "attack": 1.0})  # as it is trained on
    last = [e for e in events if isinstance(e, Counters)][-1]
    assert last.values["scored"] == 5
    assert last.values["failed"] == 2
    assert last.values["restarts"] == 1


def test_an_evaluation_that_failed_says_so(tmp_path: Path) -> None:
    def function(completions: Any, **_: Any) -> list[float]:
        raise RuntimeError("no")

    config = RewardsConfig(terms=[RewardTerm(function="python:fails")], failure_reward=-2.0)
    executor = Rewards(config, {}, functions={"fails": function})
    ports = start(executor, tmp_path, name="rewards")
    ports["completions"].put(completion(0, "ok", purpose="eval"))
    try:
        drive(executor, lambda: any(isinstance(m, EvalScored) for m in ports["events"].messages))
    finally:
        executor.close()
    (scored,) = [m for m in ports["events"].messages if isinstance(m, EvalScored)]
    assert (scored.reward, scored.reward_parts) == (-2.0, {})
    assert (scored.failure or "").startswith("fails: RuntimeError: no")


def test_where_models_follow_they_score_evaluations_too(tmp_path: Path) -> None:
    """Else nobody would know the reward of a held-out answer, and the function's part would pass for it."""
    config = RewardsConfig(
        terms=[RewardTerm(function="exact_match", weight=0.0)], models=[RewardModelTerm(path=str(tmp_path))]
    )
    executor = Rewards(config, {})
    ports = start(executor, tmp_path, name="rewards")
    ports["completions"].put(completion(0, "right", purpose="eval"))
    try:
        drive(executor, lambda: bool(ports["rollouts"].messages))
        ports["commands"].put(Stop())
        drive(executor)
    finally:
        executor.close()
    (rollout,) = ports["rollouts"].messages
    assert isinstance(rollout, Rollout)
    assert (rollout.completion.purpose, rollout.reward_parts) == ("eval", {"exact_match": 1.0})
    events = list(ports["events"].messages)
    assert not any(isinstance(event, EvalScored) for event in events)
    last = [event for event in events if isinstance(event, Counters)][-1]
    assert (last.values["scored"], last.values["eval_scored"]) == (0, 1)


def test_a_callable_replaces_the_configured_terms(tmp_path: Path) -> None:
    functions = {"reward": lambda completions, **kw: [float(len(completions[0]))]}
    config = RewardsConfig(terms=[RewardTerm(function="python:reward")], num_threads=1)  # one by one: in their order
    executor = Rewards(config, {}, functions=functions)
    ports = start(executor, tmp_path, name="rewards")
    for i in range(20):
        ports["completions"].put(completion(i, "x" * i))
    while len(ports["rollouts"].messages) < 20:
        if not executor.step():
            select.select(executor.wait_fds(), [], [], executor.wait_s())
    ports["commands"].put(Stop())
    drive(executor)
    executor.close()
    assert [m.reward for m in ports["rollouts"].messages if isinstance(m, Rollout)] == [float(i) for i in range(20)]


@pytest.mark.parametrize("name", with_slow(["countdown"], ["spell_backward"]))
def test_tasks_are_ready_before_the_first_completion(tmp_path: Path, name: str) -> None:
    executor = Rewards(RewardsConfig(), {name: TaskConfig(name=name)})
    ports = start(executor, tmp_path, name="rewards")
    assert isinstance(ports["events"].get_nowait(), Ready)
    executor.close()


def test_an_idle_node_can_sleep_once_its_spare_worker_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker says while nothing is to be scored has to be read, or its descriptor wakes the node for ever."""
    monkeypatch.setattr(sandbox, "_SPARES_AFTER_S", 0.0)
    started: list[float] = []
    start_worker = ScoringPool._start
    monkeypatch.setattr(ScoringPool, "_start", lambda pool: (started.append(time.monotonic()), start_worker(pool)))
    executor = Rewards(RewardsConfig(terms=[RewardTerm(function="exact_match")]), {})
    start(executor, tmp_path, name="rewards")
    quiet_since, until = time.monotonic(), time.monotonic() + 30.0
    try:
        while time.monotonic() - quiet_since < 1.0:
            assert time.monotonic() < until, "a worker's descriptor stays readable"
            if select.select(executor.wait_fds(), [], [], 0.1)[0]:
                quiet_since = time.monotonic()
                executor.step()
        assert len(started) == 2
    finally:
        executor.close()


def test_while_a_worker_scores_the_process_is_not_idle(tmp_path: Path) -> None:
    may_end = threading.Event()

    def function(prompts: Any, completions: Any, **_: Any) -> list[float]:
        assert may_end.wait(30)
        return [1.0] * len(completions)

    heard = Heard()
    config = RewardsConfig(terms=[RewardTerm(function="python:reward")], timeout_s=60.0)
    executor = Rewards(config, {}, functions={"reward": function})
    ports = start(executor, tmp_path, name="rewards", spans=heard)
    try:
        assert heard.idle == "wait_completions"
        ports["completions"].put(completion(0, "ok"))
        executor.step()
        assert heard.idle == "score"
        may_end.set()
        while not ports["rollouts"].messages:
            select.select(executor.wait_fds(), [], [], 30)
            executor.step()
        assert heard.idle == "wait_completions"
    finally:
        may_end.set()
        executor.close()


def ranks(completions: list[str], **_: Any) -> list[float]:
    return [float(sorted(completions).index(text)) for text in completions]


def test_a_group_is_scored_when_it_is_whole_and_an_evaluation_at_once(tmp_path: Path) -> None:
    terms = [RewardTerm(function="python:ranks", per="group"), RewardTerm(function="python:length", weight=10.0)]
    functions = {"ranks": ranks, "length": lambda completions, **_: [float(len(text)) for text in completions]}
    executor = Rewards(RewardsConfig(terms=terms, num_threads=1), {}, functions=functions, group_size=2)
    ports = start(executor, tmp_path, name="rewards")
    for one in (
        completion(0, "b", sample=1),
        completion(1, "xx", sample=0),
        completion(7, "alone", purpose="eval"),
        completion(0, "a", sample=0),
        completion(0, "another copy", sample=1),
    ):
        ports["completions"].put(one)
    while len(ports["rollouts"].messages) < 2 or not any(isinstance(m, EvalScored) for m in ports["events"].messages):
        if not executor.step():
            select.select(executor.wait_fds(), [], [], executor.wait_s())
    assert not executor.is_finished
    ports["commands"].put(Stop())  # two are left without the rest of their groups, and hold nobody up
    drive(executor)
    executor.close()
    found = [m for m in ports["rollouts"].messages if isinstance(m, Rollout)]
    assert [(one.completion.text, one.reward) for one in found] == [("a", 10.0), ("b", 11.0)]
    assert found[1].reward_parts == {"ranks": 1.0, "length": 1.0}
    (scored,) = [m for m in ports["events"].messages if isinstance(m, EvalScored)]
    assert scored.reward_parts == {"ranks": 0.0, "length": 5.0}  # the first of one


def test_the_first_failure_of_a_kind_is_told_at_once(tmp_path: Path) -> None:
    """A person sees the exception while the group, let alone the step, is still being sampled."""

    def fails(completions: list[str], **_: Any) -> list[float]:
        if "b" in completions:
            raise ValueError(f"no {completions}")
        raise KeyError("k")

    config = RewardsConfig(terms=[RewardTerm(function="python:fails")], num_threads=1)
    executor = Rewards(config, {}, functions={"fails": fails})
    ports = start(executor, tmp_path, name="rewards")
    for i, text in enumerate("abbab"):
        ports["completions"].put(completion(i, text))
    while len(ports["rollouts"].messages) < 5:
        if not executor.step():
            select.select(executor.wait_fds(), [], [], executor.wait_s())
    executor.close()
    notes = [m.text for m in ports["events"].messages if isinstance(m, Noted)]
    place = f"test_rewards_executor.py, line {fails.__code__.co_firstlineno}"[:-3]
    assert len(notes) == 2
    assert "fails: KeyError: 'k'" in notes[0]
    assert "fails: ValueError: no ['b']" in notes[1]
    assert all(place in note for note in notes)


def test_an_episode_that_failed_is_told_as_the_environments(tmp_path: Path) -> None:
    executor = Rewards(RewardsConfig(terms=[RewardTerm(function="python:zero")]), {}, functions={"zero": len})
    ports = start(executor, tmp_path, name="rewards")
    record = EpisodeRecord(failure="environment: a name\n  got: 'x'")
    ports["completions"].put(msgspec.structs.replace(completion(0, "a"), episode=record))
    while not ports["rollouts"].messages:
        executor.step()
    executor.close()
    [note] = [m for m in ports["events"].messages if isinstance(m, Noted)]
    assert note.executor == "environment"
    assert note.text == "an episode failed, and counts with rewards.failure_reward: a name\n  got: 'x'"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (EpisodeRecord(is_cut=True), "a limit cut the episode before it had a reward"),
        (EpisodeRecord(), "the episode ended without a reward"),
    ],
)
def test_an_episode_without_a_reward_says_how_it_ended(tmp_path: Path, record: EpisodeRecord, reason: str) -> None:
    config = RewardsConfig(terms=[RewardTerm(function="python:silent")], failure_reward=-1.0)
    silent = {"silent": lambda completions, **_: [None] * len(completions)}
    executor = Rewards(config, {}, functions=silent, environment_weight=1.0)
    ports = start(executor, tmp_path, name="rewards")
    for ordinal, episode in enumerate([record, msgspec.structs.replace(record, reward=0.0)]):
        ports["completions"].put(msgspec.structs.replace(completion(ordinal, "a"), episode=episode))
    drive(executor, lambda: len(ports["rollouts"].messages) == 2)
    executor.close()
    without, rewarded = sorted(ports["rollouts"].messages, key=lambda rollout: rollout.completion.ordinal)
    assert (without.reward, without.failure) == (-1.0, f"every reward function abstained: {reason}")
    assert (rewarded.reward, rewarded.failure) == (0.0, None)
