"""What a run has come to: rates are of the RL phase, whatever came before it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from slipstream.controller.evaluations import GREEDY, SAMPLED, EvaluationDone
from slipstream.controller.ledger import Cut
from slipstream.controller.tally import Tally
from slipstream.core.clock import VirtualClock
from slipstream.core.held_out import GREEDY_PREFIX, SAMPLED_PREFIX, Measured, measured
from slipstream.core.recipes import resolve
from slipstream.core.run_log import Decision, Snapshot
from slipstream.core.service_messages import NUM_SHOWN, Counters, EvalScored
from slipstream.core.types import EpisodeRecord, StartGroup, StepDone, Stop
from slipstream.observe.metrics import LEAST_S, flatten
from slipstream.observe.samples import Sample, read_samples, write_samples
from slipstream.observe.summary import EpisodeCounts, JudgeCounts, read_summary, write_summary
from slipstream.observe.trackers import Trackers
from slipstream.observe.transcript import TranscriptPart
from slipstream.prompts import PromptReport
from slipstream.stages.rl import FromPython, _conclude, _tally


def begin(tally: Tally, at_s: float) -> None:
    """The first group is admitted."""
    assert isinstance(tally.clock, VirtualClock)
    tally.clock.advance(at_s - tally.clock.now_s())
    tally.take(Decision(0, at_s, Stop(), [StartGroup(ordinal=0, replica=0)]))


def test_sampled_tokens_a_second_are_those_since_rl_began_or_of_the_last_reports() -> None:
    clock = VirtualClock()
    tally = Tally(resolve("quickstart"), started_s=0.0, clock=clock)

    def report(now_s: float, tokens: float) -> None:
        clock.advance(now_s - clock.now_s())
        tally.take(Counters(executor="generator-0", values={"generated_tokens": tokens}))

    for now_s in range(60):  # the warm start: it samples nothing
        report(float(now_s), 0.0)
    begin(tally, 60.0)
    assert tally.generated_tokens_per_s is None, "one report says nothing of a rate"
    report(62.0, 1000.0)
    assert tally.generated_tokens_per_s == pytest.approx(500.0)
    begin(tally, 62.5)  # it has begun
    for step in range(1, 20):
        report(62.0 + step, 1000.0 + 300.0 * step)
    assert tally.generated_tokens_per_s == pytest.approx(300.0)  # of the last reports alone


def test_an_interrupt_leaves_the_cause_of_an_early_end() -> None:
    tally = Tally(resolve("quickstart"), started_s=0.0, clock=VirtualClock())
    for seq, stop in enumerate((Stop(because="patience"), Stop())):
        tally.take(Decision(seq, 0.0, stop, []))
    assert tally.stopped_because == "patience"


def answer(ordinal: int, reward: float, **parts: float | None) -> EvalScored:
    return EvalScored(
        eval_id=0,
        ordinal=ordinal,
        reward=reward,
        completion_text="c",
        prompt_text="p",
        answer="a",
        num_tokens=1,
        reward_parts=parts,
    )


def unevaluated(tally: Tally) -> tuple[float, ...]:
    return tuple(kind for kind in (GREEDY, SAMPLED) if not tally.knows(4, "", kind))


def test_an_evaluation_is_known_by_its_reward_whether_or_not_there_is_a_measure() -> None:
    """Without one, too, nothing is evaluated twice, and a resume knows it from the metrics."""
    scores = [answer(0, -0.25, brevity=-0.25), answer(1, -0.75, brevity=-0.75)]
    for measure, accuracy in ((None, None), ("brevity", 0.0)):
        found = measured(scores, measure)
        tally = Tally(resolve("quickstart"), started_s=0.0)
        assert unevaluated(tally) == (GREEDY, SAMPLED)
        tally.take(EvaluationDone(4, GREEDY, found, scores))
        assert unevaluated(tally) == (SAMPLED,)
        tally.take(EvaluationDone(4, SAMPLED, found, scores[:1]))
        evaluation = tally.evaluation(4)
        assert evaluation is not None
        assert (evaluation.reward, evaluation.accuracy, evaluation.sampled_accuracy) == (-0.5, accuracy, accuracy)
        assert evaluation.reward_parts == evaluation.sampled_reward_parts == {"brevity": -0.5}
        resumed = Tally(resolve("quickstart"), started_s=0.0)
        for prefix in (GREEDY_PREFIX, SAMPLED_PREFIX):
            resumed.recall({"step": 4, "version": 4, **flatten(found.metrics(prefix))})
        assert unevaluated(resumed) == ()
        assert resumed.evaluation(4) == evaluation


def test_of_the_answers_of_an_evaluation_those_that_are_shown_are_kept() -> None:
    """A run that evaluates thousands of long answers often has no memory for all of them."""
    tally = Tally(resolve("quickstart"), started_s=0.0)
    scores = [answer(ordinal, 0.0) for ordinal in reversed(range(3 * NUM_SHOWN))]
    tally.take(EvaluationDone(4, GREEDY, measured(scores, None), scores))
    assert [one.ordinal for one in tally.evaluations[4].scores] == list(range(NUM_SHOWN))


def test_answers_are_kept_of_the_first_version_and_the_newest() -> None:
    tally = Tally(resolve("quickstart"), started_s=0.0)
    for version in (0, 4, 12, 8):  # an evaluation may end behind a later one
        scores = [answer(0, 0.0)]
        tally.take(EvaluationDone(version, GREEDY, measured(scores, None), scores))
    assert {version: len(found.scores) for version, found in tally.evaluations.items()} == {0: 1, 4: 0, 12: 1, 8: 0}
    assert all(tally.knows(version, "", GREEDY) for version in (0, 4, 8, 12))


def test_an_older_run_s_evaluations_are_recalled() -> None:
    tally = Tally(resolve("quickstart"), started_s=0.0)
    tally.recall({"step": 4, "version": 4, "eval_accuracy": 0.5})
    assert unevaluated(tally) == (SAMPLED,)
    found = tally.evaluation(4)
    assert found is not None
    assert (found.accuracy, found.reward, found.reward_parts) == (0.5, None, {})


@pytest.mark.parametrize(("measure", "marks"), [("task", (False, True)), (None, (None, None))])
def test_samples_say_what_is_right_where_that_is_known(
    measure: str | None, marks: tuple[bool | None, bool | None], tmp_path: Path
) -> None:
    tally = Tally(resolve("quickstart", {"steps": 1, "eval": {"measure": measure}}), started_s=0.0)
    for version, task in ((0, 0.25), (1, 1.0)):
        answers = [answer(0, task - 2.0, task=task, brevity=-2.0)]
        tally.take(EvaluationDone(version, GREEDY, Measured(), answers))
    tally.steps_done = 1
    (sample,) = tally.write_samples(tmp_path)
    assert (sample.before_reward, sample.after_reward) == (-1.75, -1.0)
    assert (sample.before_is_right, sample.after_is_right) == marks


STEP = {
    "tokens_trained": 640.0,
    "tokens_read": 700.0,
    "tokens_unshared": 1000.0,
    "padding_frac": 0.0,
    "staleness_updates_max": 0.0,
    "staleness_tokens/lag_0": 640.0,
    "reward_mean": 0.5,
}


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_that_ended_before_its_first_step_has_no_rates(tmp_path: Path, *, begun: bool) -> None:
    """However many tokens were sampled meanwhile: there is no time to divide them by."""
    tally = Tally(resolve("quickstart"), started_s=0.0, clock=VirtualClock())
    if begun:
        begin(tally, 60.0)
    tally.take(Counters(executor="generator-0", values={"generated_tokens": 61336.0}))
    tally.ended_s = 61.0
    rates = tally.summary(tmp_path).throughput
    assert (rates.generated_tokens_per_s, rates.trained_tokens_per_s, rates.completions_per_s) == (None, None, None)


def test_the_summary_says_how_many_rows_sharing_saved(tmp_path: Path) -> None:
    """Over all steps; those of a version that did not count them are left out."""
    tally = Tally(resolve("quickstart"), started_s=0.0, clock=VirtualClock())
    begin(tally, 60.0)
    assert tally.summary(tmp_path).rows is None
    without = {name: value for name, value in STEP.items() if name != "tokens_unshared"}
    for step, metrics in enumerate([STEP, without, STEP]):
        tally.stepped(StepDone(step=step, version=step + 1, metrics=metrics))
    tally.ended_s = 63.0
    rows = tally.summary(tmp_path).rows
    assert rows is not None
    assert (rows.unshared, rows.read, rows.saved_frac) == (2000, 1400, pytest.approx(0.3))


@pytest.mark.parametrize(("step_s", "is_told"), [(0.0, False), (LEAST_S / 2, False), (2.0, True)])
def test_a_step_too_short_to_be_timed_has_no_rate(tmp_path: Path, step_s: float, *, is_told: bool) -> None:
    clock = VirtualClock()
    tally = Tally(resolve("quickstart"), started_s=0.0, clock=clock)
    begin(tally, 60.0)
    clock.advance(step_s)
    tally.take(Counters(executor="generator-0", values={"generated_tokens": 61336.0}))
    metrics = tally.stepped(StepDone(step=0, version=1, metrics=STEP))
    tally.ended_s = 63.0
    rates = tally.summary(tmp_path).throughput
    assert metrics.get("trained_tokens_per_s") == (320.0 if is_told else None)
    assert metrics.get("generated_tokens_per_s") == (30668.0 if is_told else None)
    assert rates.trained_tokens_per_s == (320.0 if is_told else None)


def test_a_summary_in_a_hurry_reads_no_more_than_it_may(tmp_path: Path) -> None:
    tally = Tally(resolve("quickstart"), started_s=0.0, clock=VirtualClock())
    line = msgspec.json.encode(Decision(0, 60.0, Stop(), [])) + b"\n"
    (tmp_path / "events.jsonl").write_bytes(line)
    begin(tally, 60.0)
    tally.ended_s = 61.0
    hurried = tally.summary(tmp_path, most_bytes=len(line) - 1)
    assert (hurried.accounting, hurried.balance, hurried.model_share) == ({}, None, None)
    assert tally.summary(tmp_path, most_bytes=len(line)).balance is not None
    write_summary(hurried, tmp_path / "summary.json")
    assert read_summary(tmp_path / "summary.json") == hurried


@pytest.mark.parametrize("is_followed", [True, False])
def test_an_attempt_that_is_followed_by_another_is_not_drawn(tmp_path: Path, *, is_followed: bool) -> None:
    tally = Tally(resolve("quickstart"), started_s=0.0, clock=VirtualClock())
    tally.status, tally.error, tally.ended_s = "failed", "trainer was lost", 1.0
    _conclude(tally, tmp_path, None, Trackers([], note=print, deadline_s=0.0), is_followed=is_followed)
    assert read_summary(tmp_path / "summary.json").error == "trainer was lost"
    assert (tmp_path / "timeline.json").exists() is not is_followed


def test_an_actor_critics_rates_are_left_out_alike() -> None:
    clock = VirtualClock()
    tally = Tally(resolve("stylistic_mini"), started_s=0.0, clock=clock)
    assert tally.config.has_critic
    begin(tally, 60.0)
    assert not {"elapsed/fps", "ppo/eps"} & set(tally.stepped(StepDone(step=0, version=1, metrics=STEP)))
    clock.advance(1.0)
    assert {"elapsed/fps", "ppo/eps"} <= set(tally.stepped(StepDone(step=1, version=2, metrics=STEP)))


ENVIRONMENT = {"environment": {"class_path": "guess", "max_turns": 2}}


def test_the_summary_has_the_counts_of_the_episodes_of_this_attempt(tmp_path: Path) -> None:
    """Two replicas, and an environments' process that was lost and came back counting from 0."""
    tally = Tally(resolve("quickstart", ENVIRONMENT), started_s=0.0, clock=VirtualClock())
    begun = {"episodes": 10.0, "turns": 24.0, "ended": 8.0, "turns_of_ended": 20.0, "open": 2.0, "environment_s": 1.5}
    ends = {"restarts": 3.0, "failed": 1.0, "cut": 2.0, "tool_calls": 7.0, "tool_errors": 4.0}
    of_agents = {"forks": 5.0, "refused": 1.0}
    tally.take(Counters(executor="environments", values=begun | ends | of_agents))
    tally.take(Counters(executor="environments", values={"time/step": 3.0}))
    tally.lost(["environments"])
    later = {"episodes": 2.0, "turns": 8.0, "ended": 2.0, "turns_of_ended": 8.0, "environment_s": 0.5, "forks": 2.0}
    tally.take(Counters(executor="environments", values=later))
    tally.take(Counters(executor="rewards", values={"failed": 99.0, "episodes": 99.0}))
    for replica, (hit, missed, evicted) in enumerate(((60.0, 20.0, 3.0), (15.0, 5.0, 0.0))):
        kept = {"parked_hit_tokens": hit, "parked_missed_tokens": missed, "evicted_sessions": evicted}
        tally.take(Counters(executor=f"generator-{replica}", values=kept))
    assert tally.summary(tmp_path).episodes == EpisodeCounts(
        episodes=12,
        turns=32,
        mean_turns=2.8,
        restarts=3,
        failed=1,
        cut=2,
        tool_calls=7,
        tool_errors=4,
        environment_s=2.0,
        parked_hit_frac=0.75,
        evicted_sessions=3,
        forks=7,
        refused=1,
    )


def test_without_an_environment_the_summary_has_no_episodes_and_without_any_no_means(tmp_path: Path) -> None:
    assert Tally(resolve("quickstart"), started_s=0.0).summary(tmp_path).episodes is None
    found = Tally(resolve("quickstart", ENVIRONMENT), started_s=0.0).summary(tmp_path).episodes
    assert found is not None
    assert (found.episodes, found.mean_turns, found.parked_hit_frac) == (0, None, None)


def test_samples_of_episodes_are_transcripts(tmp_path: Path) -> None:
    tally = Tally(resolve("quickstart", {"steps": 1, **ENVIRONMENT}), started_s=0.0)
    for version, words in ((0, "8"), (1, "12")):
        messages = [{"role": "assistant", "content": words}, {"role": "user", "content": "higher"}]
        record = EpisodeRecord(messages=messages, turn_rewards=[0.5], branches=[messages[::-1]], contexts=[1])
        answers = [msgspec.structs.replace(answer(0, 0.5), episode=record), answer(1, 0.0)]
        tally.take(EvaluationDone(version, GREEDY, Measured(), answers))
    tally.steps_done = 1
    first, second = tally.write_samples(tmp_path)
    fork = TranscriptPart("fork 1 of 1", "a context of its own, of 1 message", fork=1)
    for turns, words in ((first.before_turns, "8"), (first.after_turns, "12")):
        trunk = [TranscriptPart("assistant", words, 1, 0.5), TranscriptPart("user", "higher")]
        assert turns == [*trunk, fork, trunk[1], TranscriptPart("assistant", words, 2)]
    assert (second.before_turns, second.after_turns) == (None, None)
    assert read_samples(tmp_path / "samples.json") == [first, second]


@pytest.mark.parametrize(("steps_done", "has_after"), [(4, True), (2, False)])
def test_a_resume_keeps_the_last_answers_only_where_it_goes_on_with_the_last_version(
    tmp_path: Path, steps_done: int, has_after: bool
) -> None:
    sample = Sample(
        "1+1=", "2", "3", "2", before_reward=0.0, after_reward=1.0, before_is_right=False, after_is_right=True
    )
    write_samples([sample], tmp_path / "samples.json")
    report = PromptReport(
        num_train=1, num_eval=1, num_candidates=2, num_duplicates=0, num_too_long=0, overlap=0, max_tokens=4, longest=4
    )
    cut = Cut(
        Snapshot(next_ordinal=0, steps_done=steps_done, dropped=[], dropped_in_a_row=0, num_failed=0, readmit=[]), 0
    )
    _tally(resolve("quickstart", {"steps": 4}), tmp_path, FromPython(), Counter(), report, cut)
    [kept] = read_samples(tmp_path / "samples.json")
    assert kept == (sample if has_after else Sample("1+1=", "2", "3", None, before_reward=0.0, before_is_right=False))


def test_counts_of_judges_are_those_of_all_their_processes() -> None:
    """A process that was lost keeps what it has counted; a judge's name may have the separator of counters in it."""
    tally = Tally(resolve("quickstart"), started_s=0.0, clock=VirtualClock())
    names = ("scored", "cached", "failures", "requests", "retries", "input_tokens", "output_tokens", "seconds", "cost")

    def report(judge: str, start: int) -> dict[str, float]:
        return {f"judge/{judge}/{name}": start + i + 0.5 * (i > 6) for i, name in enumerate(names)}

    tally.take(Counters(executor="rewards", values=report("a/b", 10) | {"scored": 7.0}))
    tally.lost(["rewards"])
    tally.take(Counters(executor="rewards", values=report("a/b", 0) | report("c", 1)))
    assert tally.judges == {
        "a/b": JudgeCounts(10, 12, 14, 16, 18, 20, 22, 25.0, 27.0),
        "c": JudgeCounts(1, 2, 3, 4, 5, 6, 7, 8.5, 9.5),
    }
    assert tally.judges["a/b"].request_s == 25.0 / 16
