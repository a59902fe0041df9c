"""The generator's executor and new versions: when it pauses, drains, cuts, commits and goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heard import Heard
from ports import Port
from scripted_generator import ScriptedGenerator

from slipstream.core import wire
from slipstream.core.clock import VirtualClock
from slipstream.core.config import RunConfig
from slipstream.core.executor import Context
from slipstream.core.saved import prompt_crc32
from slipstream.core.service_messages import Admit, CompletionsFinished, Counters, Evaluate, Waiting
from slipstream.core.turn_messages import Observation, TurnSampled
from slipstream.core.types import Completion, EpisodeRecord, Prompt, Segment, Swapped, VersionSpan
from slipstream.core.unfinished_messages import HandedOver, Partial
from slipstream.core.weights import Swap
from slipstream.generator.backend import Pin
from slipstream.generator.executor import Generator
from slipstream.generator.requests import GenerationEngine, KvOnUpdate, StateSpans

MAX_LEN = 24


class Subscriber:
    """Versions are pending, are lost, or vanish at commit when the test says so."""

    def __init__(self) -> None:
        self.pending_version: int | None = None
        self.is_staging = False
        self.vanishes = False

    def open(self, *args: Any, **kwargs: Any) -> None: ...

    def poll(self) -> bool:
        return False

    def commit(self) -> Swap | None:
        version, self.pending_version = self.pending_version, None
        return None if version is None or self.vanishes else Swap(version, 0.1, 0.01, 0.0)

    def wait_fds(self) -> list[int]:
        return []

    def close(self) -> None: ...


class Recorded(ScriptedGenerator):
    """Notes how versions are set and what is submitted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.swaps: list[tuple[int, str, int]] = []
        self.requests: list[Any] = []

    def submit(self, requests: Any) -> None:
        self.requests.extend(requests)
        super().submit(requests)

    def set_version(self, version: int, *, kv_on_update: KvOnUpdate = "keep", max_kv_age: int = 0) -> None:
        self.swaps.append((version, kv_on_update, max_kv_age))
        super().set_version(version)


class ScriptedBackend:
    """Completions of 6 tokens and more: sample s has 6 + 4 s; two slots."""

    weights: Any = None
    probes_prepared = False
    working_state: str | None = None
    max_len = MAX_LEN
    keeps_versions = False
    has_room_for_version = True

    def __init__(self) -> None:
        self.may_swap = True
        self.engine: Any = self.new_engine()

    def new_engine(self) -> GenerationEngine:
        clock = VirtualClock()
        return Recorded(lambda r: list(range(10, 16 + 4 * r.sample)), num_slots=2, max_len=MAX_LEN, clock=clock)

    def probe(self, tokens: np.ndarray) -> np.ndarray:
        return np.zeros(len(tokens) - 1, dtype=np.float32)

    def settle(self) -> None: ...

    def pin(self) -> Pin:
        return Pin(self.engine.version)

    def unpin(self, pin: Pin) -> None: ...

    def prepare_evaluations(self, spans: StateSpans) -> None:
        self.prepared_for = spans

    def evaluation_engine(self, pin: Pin, spans: StateSpans) -> GenerationEngine:
        assert spans is self.prepared_for
        self.evaluation = self.new_engine()
        return self.evaluation

    def has_work(self) -> bool:
        return bool(self.engine.has_work)

    def wait_fds(self) -> list[int]:
        return []

    def wait_s(self) -> float | None:
        return None

    def close(self) -> None: ...


class Node:
    """A generator with its ports."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        generator = {"max_new_tokens": 20, **settings.pop("generator", {})}
        sections = {"prompts": {"tasks": [{"name": "chain_sum"}]}, "completions_per_group": 4, "generator": generator}
        config = RunConfig.model_validate(sections | settings)
        self.backend, self.weights = ScriptedBackend(), Subscriber()
        self.commands, self.completions, self.events, self.turns = Port(), Port(), Port(), Port()
        self.spans = Heard()
        self.generator = Generator(config=config)
        self.generator._build_backend = lambda: self.backend  # type: ignore[method-assign]
        self.generator.init(
            Context(
                name="generator",
                run_dir=tmp_path,
                inputs={"commands": self.commands},
                outputs={"completions": self.completions, "events": self.events, "turns": self.turns},
                spans=self.spans,
                clock=VirtualClock(),
                subscriber=self.weights,
            )
        )

    @property
    def engine(self) -> Recorded:
        engine = self.backend.engine
        assert isinstance(engine, Recorded)
        return engine

    def admit(self, ordinal: int, num_samples: int, num_prompt: int = 3) -> None:
        self.commands.put(Admit(ordinal=ordinal, replica=0, prompt=prompt(num_prompt), num_samples=num_samples))

    def observe(self, turn: int, ordinal: int = 0, record: EpisodeRecord | None = None) -> None:
        """Let the environment answer an episode's turn with nothing."""
        asked = [message for message in self.turns.messages if isinstance(message, TurnSampled)]
        [opening] = [one.opening for one in asked if one.ordinal == ordinal and one.turn == 0]
        self.commands.put(
            Observation(
                ordinal=ordinal,
                sample=0,
                replica=0,
                turn=turn,
                tokens=np.zeros(0, dtype=np.int32),
                opening=opening,
                max_new_tokens=6,
                record=record,
            )
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.generator.step()

    def finished(self) -> dict[tuple[int, int], Completion]:
        return {(m.ordinal, m.sample): m for m in self.completions.messages if isinstance(m, Completion)}

    def swapped(self) -> list[int]:
        return [message.version for message in self.events.messages if isinstance(message, Swapped)]


def prompt(num_tokens: int) -> Prompt:
    return Prompt(prompt_id="p", text="x" * num_tokens, tokens=np.arange(num_tokens, dtype=np.int32), task="chain_sum")


@pytest.fixture
def num_threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@pytest.fixture
def at(tmp_path: Path, num_threads: int) -> Path:
    return tmp_path


BETWEEN: dict[str, Any] = {"weight_update": "between_batches", "max_staleness": 2}


def spans(completion: Completion) -> list[tuple[int, int]]:
    return [(span.start, span.version) for segment in completion.segments for span in segment.version_spans]


def test_in_flight_a_version_is_committed_at_once_with_the_policy_for_old_keys(at: Path) -> None:
    node = Node(at, weight_update="in_flight", generator={"kv_on_update": "recompute_if_older_than", "max_kv_age": 3})
    node.admit(0, 1)
    node.steps(2)
    node.weights.pending_version = 1
    node.steps(4)
    assert node.engine.swaps == [(1, "recompute_if_older_than", 3)]
    assert node.swapped() == [1]
    assert spans(node.finished()[0, 0]) == [(0, 0), (2, 1)]


def test_between_batches_nothing_starts_until_all_that_has_begun_is_done(at: Path) -> None:
    node = Node(at, **BETWEEN)
    node.admit(0, 3)
    node.steps(2)
    node.weights.pending_version = 1
    node.steps(8)  # sample 0 ends after 6 tokens, sample 1 after 10; sample 2 may not take the free slot
    assert sorted(node.finished()) == [(0, 0), (0, 1)]
    assert node.swapped() == []
    node.steps(1)
    assert node.swapped() == [1]
    node.steps(14)
    assert {key: spans(each) for key, each in node.finished().items()} == {
        (0, 0): [(0, 0)],
        (0, 1): [(0, 0)],
        (0, 2): [(0, 1)],
    }


def begun(sample: int, num_tokens: int, version: int = 0) -> Partial:
    """Return what a checkpoint has of a sample of group 0."""
    segment = Segment(
        tokens=np.arange(10, 10 + num_tokens, dtype=np.int32),
        behaviour_logprobs=np.full(num_tokens, -1.0, dtype=np.float32),
        version_spans=(VersionSpan(start=0, version=version),),
    )
    return Partial(ordinal=0, sample=sample, prompt_crc32=prompt_crc32(prompt(3).tokens), segment=segment)


def test_tokens_of_unfinished_completions_are_counted_where_they_were_sampled(at: Path) -> None:
    """One replica samples 6 tokens of sample 0 and 8 of sample 1, then leaves; another one the last 2 of sample 1."""
    settings: dict[str, Any] = {"weight_update": "in_flight", "max_staleness": 2}
    leaving, other = Node(at, **settings), Node(at, **settings)
    leaving.generator.replica = 3
    leaving.admit(0, 2)
    leaving.steps(8)
    leaving.generator.leave()
    [handed_over] = [one for one in leaving.events.messages if isinstance(one, HandedOver)]
    assert [one.handed_over_by for one in handed_over.partials if isinstance(one, Partial)] == [-1, 3]
    *_, counters = [one for one in leaving.events.messages if isinstance(one, Counters)]
    assert counters.values["generated_tokens"] == 6 + 8
    partials = handed_over.partials
    other.commands.put(Admit(ordinal=0, replica=0, prompt=prompt(3), num_samples=2, is_again=True, partials=partials))
    other.steps(1)
    assert other.generator.outgoing.generated_tokens == 0
    other.steps(4)
    assert other.generator.outgoing.generated_tokens == 2
    told = [m for m in other.events.messages if isinstance(m, CompletionsFinished)]
    found = [(one.num_tokens, one.num_restored, one.handed_over_by) for message in told for one in message.finished]
    assert found == [(6, 6, -1), (10, 8, 3)]


def test_a_replica_that_leaves_hands_over_what_a_message_holds(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of that group is sampled again; the groups behind it are handed over too."""
    node = Node(at, weight_update="in_flight", max_staleness=2)
    node.admit(0, 2)
    node.admit(1, 1)
    node.steps(8)  # sample 0 of group 0 has ended, and group 1 begun
    monkeypatch.setattr("slipstream.core.saved.GROUP_BYTES", len(wire.encode(begun(1, 8))) * 3 // 2)
    node.generator.leave()
    told = [one for one in node.events.messages if isinstance(one, HandedOver)]
    assert [(one.ordinal, [partial.sample for partial in one.partials]) for one in told] == [(0, [0]), (1, [0])]


def test_the_timeline_has_a_count_of_tokens_once_while_it_stays_the_same(at: Path) -> None:
    node = Node(at, weight_update="in_flight", max_staleness=2)
    clock = node.generator.context.clock
    assert isinstance(clock, VirtualClock)
    for count in (0, 0, 0, 7, 7, 7, 9):
        node.engine.num_re_prefilled = count
        clock.advance(1.0)
        node.steps(1)
    assert [values for _, values in node.spans.counters] == [{"re_prefilled_tokens": n} for n in (0, 7, 9)]
    assert sum(isinstance(message, Counters) for message in node.events.messages) == 7


@pytest.mark.parametrize("is_draining", [False, True], ids=["before the version", "while it drains"])
def test_between_batches_a_completion_that_was_begun_elsewhere_has_one_version(at: Path, is_draining: bool) -> None:
    """A restore brings more of them than there are rows: a version waits for those that wait, but for nothing new."""
    node = Node(at, **BETWEEN)
    if is_draining:
        node.admit(1, 1)
        node.steps(2)
        node.weights.pending_version = 1
        node.steps(1)
        assert node.generator.swaps.is_draining
    partials = tuple(begun(sample, 4) for sample in range(3))
    node.commands.put(Admit(ordinal=0, replica=0, prompt=prompt(3), num_samples=4, is_again=True, partials=partials))
    node.weights.pending_version = 1
    node.steps(15)
    found = {key: spans(each) for key, each in node.finished().items() if key[0] == 0}
    assert found == {(0, sample): [(0, 0)] for sample in range(3)}
    assert (node.swapped(), node.engine.swaps) == ([1], [(1, "keep", 0)])
    node.steps(20)
    assert spans(node.finished()[0, 3]) == [(0, 1)], "what had no token yet held nothing back"
    assert node.finished()[0, 1].tokens.tolist() == list(range(10, 20))


def test_with_versions_side_by_side_nothing_is_held_back_and_only_a_swap_without_room_waits(at: Path) -> None:
    node = Node(at, **BETWEEN)
    node.backend.keeps_versions = True
    node.admit(0, 3)
    node.steps(2)
    node.weights.pending_version = 1
    node.steps(1)
    assert node.swapped() == [1]
    assert node.engine.num_live == 2, "it came while they were decoded"
    node.backend.has_room_for_version, node.weights.pending_version = False, 2
    node.steps(5)
    assert node.swapped() == [1]
    assert sorted(node.finished()) == [(0, 0)]
    assert (node.engine.num_live, node.engine.num_waiting) == (2, 0), "sample 2 took the free slot"
    assert node.generator.spans.state is None
    node.backend.has_room_for_version = True
    node.steps(1)
    assert node.swapped() == [1, 2]


def test_stragglers_are_cut_after_so_many_steps_and_go_on_under_the_new_version(at: Path) -> None:
    node = Node(at, **BETWEEN, generator={"segment_tokens": 3})
    node.admit(0, 3)
    node.steps(2)
    for version, num_more in ((1, 3), (2, 3)):
        node.weights.pending_version = version
        node.steps(num_more)
        assert node.swapped() == list(range(1, version))  # three steps of draining, and then
        node.steps(1)
        assert node.swapped() == list(range(1, version + 1))
    node.steps(20)
    found = node.finished()
    assert sorted(found) == [(0, 0), (0, 1), (0, 2)]
    assert spans(found[0, 1]) == [(0, 0), (5, 1), (9, 2)]
    assert found[0, 1].tokens.tolist() == list(range(10, 20))
    assert [each.sample for each in node.engine.requests] == [0, 1, 2, 0, 1, 1]


@pytest.mark.parametrize("segment_tokens", [None, 2])
def test_a_version_that_is_gone_when_it_should_be_committed_changes_nothing(
    at: Path, segment_tokens: int | None
) -> None:
    node = Node(at, **BETWEEN, generator={"segment_tokens": segment_tokens})
    node.admit(0, 3)
    node.steps(2)
    node.weights.pending_version, node.weights.vanishes = 1, True
    node.steps(30)
    assert node.swapped() == []
    assert node.engine.swaps == []
    assert {key: spans(each) for key, each in node.finished().items()} == {(0, s): [(0, 0)] for s in range(3)}


def test_a_version_that_is_lost_while_others_drain_for_it_stops_nobody(at: Path) -> None:
    """A newer one takes its place and fails in transfer: nothing is pending any more, and nobody will say so."""
    node = Node(at, **BETWEEN)
    node.admit(0, 3)
    node.steps(2)
    node.weights.pending_version = 1
    node.steps(2)
    node.weights.pending_version = None
    node.steps(30)
    assert sorted(node.finished()) == [(0, 0), (0, 1), (0, 2)]
    assert node.generator.spans.state is None
    node.admit(1, 1)
    node.weights.pending_version = 2
    node.steps(20)
    assert node.swapped() == [2]
    assert spans(node.finished()[1, 0])[-1][1] in (0, 2)


def test_a_drain_gives_way_to_an_evaluation_that_keeps_the_old_version(at: Path) -> None:
    """A backend of one version only; what it drains counts anew afterwards."""
    node = Node(at, **BETWEEN, generator={"segment_tokens": 3})
    node.admit(0, 2)
    node.steps(2)
    node.weights.pending_version = 1
    node.steps(2)
    node.backend.may_swap = False
    node.steps(2)
    assert (node.swapped(), node.generator.spans.state) == ([], None)
    node.backend.may_swap = True
    node.steps(3)
    assert node.swapped() == []
    node.steps(1)
    assert node.swapped() == [1]


def test_cuts_and_limits_are_for_training_only(at: Path) -> None:
    cuts = {"top_k": 4, "top_p": 0.9, "min_p": 0.05, "keep_sets": True, "time_limit_s": 9.0}
    node = Node(at, generator=cuts)
    node.admit(0, 5)  # one more than a group: a greedy baseline
    node.commands.put(Evaluate(eval_id=1, prompts=(prompt(3),), temperature=0.6))
    node.steps(3)
    train, baseline = node.engine.requests[0], node.engine.requests[4]
    [evaluation] = node.backend.evaluation.requests  # type: ignore[attr-defined]

    def cut(request: Any) -> tuple[Any, ...]:
        return request.temperature, request.top_k, request.top_p, request.min_p, request.keep_sets, request.time_limit_s

    assert cut(train) == (1.0, 4, 0.9, 0.05, True, 9.0)
    assert cut(baseline) == (0.0, 0, 1.0, 0.0, False, 9.0)
    assert cut(evaluation) == (0.6, 0, 1.0, 0.0, False, None)
    assert (train.stream, baseline.stream, evaluation.stream) == (0, 0, 1)


def test_a_completion_has_no_more_tokens_than_there_is_room_for(at: Path) -> None:
    node = Node(at)
    node.admit(0, 1, num_prompt=MAX_LEN - 4)
    node.steps(5)
    [completion] = node.finished().values()
    assert (completion.num_tokens, completion.finish_reason) == (4, "length")
    assert completion.segments[0].version_spans == (VersionSpan(start=0, version=0),)
    [told] = [message for message in node.events.messages if isinstance(message, CompletionsFinished)]
    assert [(one.ordinal, one.num_tokens) for one in told.finished] == [(0, 4)]


def test_without_work_a_generator_says_what_it_waits_for(at: Path) -> None:
    node = Node(at, **BETWEEN)
    idle = node.spans
    node.steps(1)
    assert idle.idle == "wait_trainer", "before it has heard anything"
    node.commands.put(Waiting(reason="prompt"))
    node.steps(1)
    assert idle.idle == "wait_prompt"
    node.weights.is_staging = True
    node.steps(1)
    assert idle.idle == "stage", "its next version is on its way"
    node.weights.is_staging = False
    node.commands.put(Waiting(reason="nothing"))
    node.steps(1)
    assert idle.idle == "wait_nothing"
    node.backend.working_state = "decode"
    node.steps(1)
    assert idle.idle == "decode", "another process works for it"
    node.backend.working_state = None
    node.admit(0, 1)
    node.steps(2)
    node.weights.pending_version = 1
    node.steps(1)
    assert idle.idle == "drain"


def test_while_environments_think_a_generator_waits_for_them_also_in_a_drain(at: Path) -> None:
    node = Node(at, **BETWEEN, environment={"class_path": "guess"})
    observe = node.observe
    node.admit(0, 1)
    node.steps(1)
    assert node.spans.idle == "wait_environment", "it resets"
    observe(0)
    node.steps(3)
    node.weights.pending_version = 1
    node.steps(1)
    assert (node.spans.idle, node.engine.num_live) == ("drain", 1)
    node.steps(3)
    assert (node.spans.idle, node.engine.num_live) == ("wait_environment", 0)
    assert node.generator.spans.state == "drain", "its turns are still labelled so"
    node.weights.is_staging = True
    node.steps(1)
    assert node.spans.idle == "stage", "a still newer version is on its way"
    node.weights.is_staging = False
    node.admit(1, 1)
    node.steps(1)
    observe(0, ordinal=1)
    node.steps(1)
    assert node.engine.num_waiting == 1, "it may not begin in a drain"
    assert not node.generator.step(), "nor is there anything else to do"
    assert node.spans.idle == "wait_environment"
    observe(1)
    node.steps(1)
    assert (node.spans.idle, node.engine.num_live) == ("drain", 1)
    node.steps(6)
    assert (node.spans.idle, node.swapped()) == ("wait_environment", [])
    observe(2, record=EpisodeRecord(reward=1.0))
    node.steps(1)
    assert (node.swapped(), node.engine.num_live) == ([1], 1), "now the other one begins"


def test_at_turns_a_version_waits_for_the_turns_that_are_sampled_alone(at: Path) -> None:
    """Of two episodes one thinks and one samples when version 1 comes, both think when version 2 comes."""
    node = Node(at, **BETWEEN, environment={"class_path": "guess"}, generator={"weight_update_at": "turn"})
    for ordinal in (0, 1):
        node.admit(ordinal, 1)
        node.steps(1)
        node.observe(0, ordinal)
        node.steps(3)
    assert node.engine.num_live == 1, "turn 1 of episode 0 has ended, its environment thinks"
    node.weights.pending_version = 1
    node.steps(1)
    assert (node.spans.idle, node.swapped()) == ("drain", []), "turn 1 of episode 1 is sampled"
    node.observe(1)
    node.steps(1)
    assert (node.engine.num_live, node.engine.num_waiting, node.swapped()) == (1, 1, []), "turn 2 does not begin"
    node.steps(2)
    assert (node.engine.num_live, node.swapped()) == (1, [1]), "turn 2 of episode 0, under version 1"
    node.steps(5)
    assert (node.engine.num_live, node.generator.spans.state) == (0, None)
    node.weights.pending_version = 2
    node.steps(1)
    assert (node.spans.idle, node.swapped()) == ("wait_environment", [1, 2]), "no turn is sampled: nothing to wait for"
    for ordinal, turn in ((0, 2), (1, 1)):
        node.observe(turn, ordinal)
    node.steps(7)
    for ordinal, turn in ((0, 3), (1, 2)):
        node.observe(turn, ordinal, record=EpisodeRecord(reward=1.0))
    node.steps(1)
    assert {key: spans(each) for key, each in node.finished().items()} == {
        (0, 0): [(0, 0), (0, 1), (0, 2)],
        (1, 0): [(0, 0), (0, 2)],
    }


def test_a_group_that_was_lost_is_asked_for_again_as_such(at: Path) -> None:
    node = Node(at)
    node.commands.put(Admit(ordinal=4, replica=0, prompt=prompt(3), num_samples=2, is_again=True))
    node.admit(5, 1)
    node.steps(1)
    assert [request.is_again for request in node.engine.requests] == [True, True, False]
