"""Whole runs of episodes: which version sampled which token, and that its logprob is what that version gives."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from audit import audit, num_older
from turn_environments import Echo, Unpunctual

import slipstream
from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.core.run_log import read_metrics
from slipstream.core.types import Completion
from slipstream.generator import backends, outgoing
from slipstream.generator.engine import Engine
from slipstream.generator.native import NativeBackend
from slipstream.generator.stats import EngineStats
from slipstream.trainer.executor import Trainer

ROUNDING = 1e-4  # in nats, float32
SMALL_BOUND = 90  # tokens, of some two or three sessions


@dataclass
class Heard:
    """The engines of a run in this process, every version that was trained, and every completion of an episode."""

    engines: list[Engine] = field(default_factory=list)
    models: dict[int, Any] = field(default_factory=dict)
    completions: list[Completion] = field(default_factory=list)

    @property
    def stats(self) -> EngineStats:
        return self.engines[0].stats

    def of(self, purpose: str) -> list[Completion]:
        return [one for one in self.completions if one.purpose == purpose]

    def largest_gap(self) -> float:
        """Between a token's behaviour logprob and a pass of the version that sampled it, over all that came before."""
        largest = 0.0
        for one in self.completions:
            tokens = np.concatenate([one.prompt.tokens, one.tokens])
            of_version = {v: probe_logprobs(self.models[v], tokens) for v in set(versions_of(one))}
            place = len(one.prompt.tokens)
            for segment in one.segments:
                if segment.behaviour_logprobs is not None:
                    for n, version in enumerate(segment_versions(segment)):
                        gap = abs(float(of_version[version][place + n - 1]) - float(segment.behaviour_logprobs[n]))
                        largest = max(largest, gap)
                place += len(segment.tokens)
        return largest


def segment_versions(segment: Any) -> list[int]:
    starts = [*(span.start for span in segment.version_spans), len(segment.tokens)]
    return [
        span.version
        for span, start, end in zip(segment.version_spans, starts, starts[1:], strict=False)
        for _ in range(start, end)
    ]


def versions_of(completion: Completion) -> list[int]:
    """Of every sampled token, in order."""
    return [version for segment in completion.segments for version in segment_versions(segment)]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Heard:
    """With `request.param`, the runner: "slots" or "pages"."""
    found = Heard()

    class Noted(NativeBackend):
        def _new_engine(self, *args: Any, **options: Any) -> Any:
            engine = super()._new_engine(*args, **options)
            found.engines.append(engine)
            return engine

    def publishing(trainer: Trainer) -> None:
        found.models[trainer.version] = copy.deepcopy(trainer.policy.model)
        publish(trainer)

    def completion_of(*args: Any, **named: Any) -> Completion:
        made = make(*args, **named)
        found.completions.append(made)
        return made

    make, publish = outgoing.completion_of_episode, Trainer._publish
    monkeypatch.setattr(Trainer, "_publish", publishing)
    is_paged = getattr(request, "param", "slots") == "pages"
    monkeypatch.setattr(backends, "NativeBackend", functools.partial(Noted, is_paged=is_paged))
    monkeypatch.setattr(outgoing, "completion_of_episode", completion_of)
    return found


@pytest.fixture
def episodes(tiny: dict[str, Any]) -> dict[str, Any]:
    return tiny | {
        "host": "inline",
        "environment": {"max_turns": 4, "max_episode_tokens": 40},
        "warm_start": {"steps": 0},
        "loss": {"skip_no_signal": False},
        "trainer": {"minibatches": 1, "optimizer": {"lr": 0.01}},
        "steps": 6,
        "generator": {"num_slots": 8, "max_new_tokens": 12},
    }


def run(overrides: dict[str, Any], out: Any, environment: Any = Echo, **more: Any) -> slipstream.RunResult:
    result = slipstream.run("quickstart", overrides=overrides | more, environment=environment, out=out, display=False)
    assert result.status == "done"
    audit(result.out)
    return result


SYNCHRONOUS = {"max_staleness": 0, "weight_update": "between_batches"}


@pytest.mark.parametrize(
    ("heard", "parked"),
    [
        ("pages", SMALL_BOUND),
        pytest.param("slots", SMALL_BOUND, marks=pytest.mark.slow),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in itertools.product(("slots", "pages"), (None, 0))),
    ],
    indirect=["heard"],
)
def test_trainer_and_generator_agree_on_whole_episodes(heard, parked, episodes, tmp_path):
    """With keys parked between turns, made again for each, and given up now and then."""
    generator = episodes["generator"] | {"parked_tokens": parked}
    result = run(episodes | SYNCHRONOUS, tmp_path / "run", steps=3, generator=generator)
    lines = [line for line in read_metrics(result.out / "metrics.jsonl") if "reward_mean" in line]
    gaps = [line["logprob_diff_max/lag_0"] for line in lines]
    assert len(gaps) == 3
    assert max(gaps) < ROUNDING
    assert heard.largest_gap() < ROUNDING
    stats = heard.stats
    assert (stats.parked_hit_tokens > 0) == (parked != 0)
    assert (stats.parked_missed_tokens > 0) == (parked is not None)
    assert (stats.evicted_sessions > 0) == (parked == SMALL_BOUND)
    assert stats.mismatched_sessions == 0
    assert max(len(one.segments) for one in heard.of("train")) >= 5


@pytest.mark.parametrize("heard", [pytest.param("slots", marks=pytest.mark.slow), "pages"], indirect=True)
def test_keys_that_are_made_anew_at_a_swap_are_those_of_the_version(heard, episodes, tmp_path):
    """In flight, also between two turns: every token's logprob is that of its own version, whoever sampled before."""
    generator = episodes["generator"] | {"kv_on_update": "recompute"}
    run(episodes, tmp_path / "run", Unpunctual, weight_update="in_flight", max_staleness=2, generator=generator)
    trained = heard.of("train")
    assert any(len({*versions_of(one)}) > 1 for one in trained), "no swap fell into an episode"
    assert all(versions_of(one) == sorted(versions_of(one)) for one in trained)
    assert heard.largest_gap() < ROUNDING
    assert len(heard.models) > 3


@pytest.mark.slow
def test_keys_that_are_kept_over_a_swap(heard, episodes, tmp_path):
    generator = episodes["generator"] | {"kv_on_update": "keep"}
    run(episodes, tmp_path / "run", Unpunctual, weight_update="in_flight", max_staleness=2, generator=generator)
    trained = heard.of("train")
    assert any(len({*versions_of(one)}) > 1 for one in trained), "no swap fell into an episode"
    assert all(versions_of(one) == sorted(versions_of(one)) for one in trained)
    assert heard.largest_gap() > ROUNDING, "keys of old weights: another distribution than that of any one version"


@pytest.mark.slow
def test_between_batches_an_episode_has_one_version(heard, episodes, tmp_path):
    """A version waits until the episodes that have begun are over, however long their environments take."""
    result = run(episodes, tmp_path / "run", Unpunctual, weight_update="between_batches", max_staleness=1)
    trained = heard.of("train")
    assert all(len({*versions_of(one)}) == 1 for one in trained)
    assert len({versions_of(one)[0] for one in trained}) > 3
    assert result.summary["staleness"]["max"] == 1
    assert heard.largest_gap() < ROUNDING


@pytest.mark.slow
def test_at_turns_each_turn_has_one_version(heard, episodes, tmp_path):
    """Episodes may have several, where a version came while their environment worked, and less is decoded in drains."""
    overrides = {"weight_update": "between_batches", "max_staleness": 2}
    generator = episodes["generator"] | {"kv_on_update": "recompute"}
    drained: dict[str, float] = {}
    for at in ("episode", "turn"):
        heard.completions.clear()
        result = run(
            episodes, tmp_path / at, Unpunctual, generator=generator | {"weight_update_at": at}, steps=8, **overrides
        )
        states = result.summary["accounting"]["generator-0"]
        drained[at] = states["drain"] / (states["drain"] + states["decode"])
        trained = heard.of("train")
        of_turns = [{*segment_versions(one)} for each in trained for one in each.segments if one.is_sampled]
        assert all(len(versions) == 1 for versions in of_turns)
        several = [one for one in trained if len({*versions_of(one)}) > 1]
        assert bool(several) == (at == "turn")
        assert all(versions_of(one) == sorted(versions_of(one)) for one in trained)
        assert heard.largest_gap() < ROUNDING
        assert result.summary["staleness"]["max"] <= 2
    assert drained["turn"] < drained["episode"]


@pytest.mark.slow
def test_with_adapters_no_version_waits_for_episodes_and_each_keeps_its_own(heard, episodes, tmp_path):
    """Between batches: versions stay side by side, so that parked keys and rows of several are alive at once."""
    lora = {"model": {"lora": {"rank": 4}}, "weight_update": "between_batches", "max_staleness": 2}
    result = run(episodes | lora, tmp_path / "run", Unpunctual)
    trained = heard.of("train")
    assert all(len({*versions_of(one)}) == 1 for one in trained)
    assert result.summary["staleness"]["max"] == 2
    assert heard.largest_gap() < ROUNDING
    assert "drain" not in result.summary["accounting"]["generator-0"]
    assert num_older(result.out) > 0, "a swap fell into an episode"
    assert heard.engines[0].versions_in_use == set()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["between_batches", "in_flight"])
def test_an_evaluation_has_the_version_that_it_was_asked_for(mode, heard, episodes, tmp_path):
    """Beside training, whose version changes meanwhile."""
    evaluation = {"every": 1, "num_prompts": 12, "num_slots": 8}
    staleness = 2 if mode == "in_flight" else 1
    overrides = {"weight_update": mode, "max_staleness": staleness, "eval": evaluation}
    result = run(episodes, tmp_path / "run", Unpunctual, **overrides)
    of_evaluation: dict[int, set[int]] = defaultdict(set)
    num_turns: set[int] = set()
    for one in heard.of("eval"):
        of_evaluation[one.eval_id].update(versions_of(one))
        num_turns.add(sum(segment.is_sampled for segment in one.segments))
    assert all(len(versions) == 1 for versions in of_evaluation.values())
    asked = {
        line["version"]
        for line in read_metrics(result.out / "metrics.jsonl")
        if any(name.startswith("eval_") for name in line)
    }
    assert {min(versions) for versions in of_evaluation.values()} == asked
    assert {0, 6} < asked
    assert max(num_turns) > 1
