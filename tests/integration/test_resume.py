"""A run that is cut off and resumed comes to what an undisturbed one comes to; what was under way is not done again."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from audit import audit
from test_endings import await_steps, executors_of, start
from tiny_tables import tiny_tables

import slipstream
from slipstream.controller.controller import Controller
from slipstream.controller.evaluations import GREEDY, SAMPLED
from slipstream.controller.ledger import Cut as SavedCut
from slipstream.core.errors import CheckpointError, ConfigError, DiskError, ExecutorDied, ExecutorLost, SlipstreamError
from slipstream.core.recipes import resolve
from slipstream.core.run_log import Snapshot, read_metrics
from slipstream.core.service_messages import CheckpointSaved
from slipstream.core.types import StepDone
from slipstream.generator.engine import Engine
from slipstream.generator.requests import Finished
from slipstream.observe.evaluation import EVALUATION_FILE
from slipstream.observe.samples import read_samples
from slipstream.rewards.pool import ScoredJob, ScoringPool
from slipstream.stages import rl
from slipstream.stages.resume import Resumed
from slipstream.stages.rl import FromPython, extension

STEPS = 6
SYNC = {"max_staleness": 0, "weight_update": "between_batches"}
AHEAD = {"max_staleness": 2, "weight_update": "in_flight"}


class Cut(Exception):
    """The end of the process, as far as the run can tell."""


@pytest.fixture
def small(tiny: dict[str, Any]) -> dict[str, Any]:
    return small_tables(tiny)


def small_tables(tiny: dict[str, Any]) -> dict[str, Any]:
    """Long enough for completions to be under way at every step, and no step waits for a group without signal."""
    return tiny | {
        "host": "inline",
        "steps": STEPS,
        "trainer": {"checkpoint_every": 2},
        "generator": {"num_slots": 24},
        "warm_start": {"steps": 5, "batch_size": 8, "num_demonstrations": 40},
        "loss": {"skip_no_signal": False},
        "eval": {"every": 0, "num_prompts": 4, "num_slots": 8},
        "observe": {"tokens_every": 2},
    }


def cut_off(
    monkeypatch: pytest.MonkeyPatch, tables: dict[str, Any], out: Path, is_time: Callable[[Controller, Any], bool]
) -> None:
    """Run until an event for which it `is_time`; then nothing more is done, or saved.

    Rewards are there as soon as they are asked for, so that what is under way by then hangs on no other process's pace.
    """
    decide, poll = Controller._decide, ScoringPool.poll

    def ending(self: Controller, *events: Any) -> None:
        for event in events:
            decide(self, event)
            if is_time(self, event):
                raise Cut

    def polling(self: ScoringPool) -> list[ScoredJob]:
        scored = poll(self)
        while self._waiting or any(slot.jobs for slot in self._slots):
            assert select.select(self.fds(), [], [], 60.0)[0], "no reward in a minute"
            scored += poll(self)
        return scored

    with monkeypatch.context() as patch:
        patch.setattr(Controller, "_decide", ending)
        patch.setattr(ScoringPool, "poll", polling)
        with pytest.raises(Cut):
            slipstream.run("quickstart", overrides=tables, out=out, display=False)


def after_step(step: int) -> Callable[[Controller, Any], bool]:
    return lambda _, event: isinstance(event, StepDone) and event.step == step


def trained(run: Path) -> list[tuple[Any, ...]]:
    """(step, ordinal, sample, text) in the order of training."""
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    fields = ("step", "ordinal", "sample", "completion")
    return [tuple(line[field] for field in fields) for line in lines if line["step"] is not None]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in lines if event["type"] == kind]


@pytest.fixture(scope="module")
def synchronous() -> dict[str, Any]:
    return small_tables(tiny_tables()) | SYNC | {"steps": 4, "loss": {}, "generator": {"num_slots": 16}}


@pytest.fixture(scope="module")
def whole(synchronous: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> slipstream.RunResult:
    """An undisturbed run: at staleness 0 neither checkpoints nor replicas change a bit of it."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return slipstream.run("quickstart", overrides=synchronous, out=out, display=False)


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_at_staleness_0_a_run_that_was_cut_off_equals_one_that_was_not(
    replicas, whole, synchronous, tmp_path, monkeypatch
):
    tables = synchronous | {"generator": {"num_slots": 16, "replicas": replicas}}
    cut_off(monkeypatch, tables, tmp_path / "run", after_step(2))
    resumed = slipstream.run("quickstart", resume=tmp_path / "run", display=False)
    ours, theirs = ((run.out / "model" / "model.safetensors").read_bytes() for run in (resumed, whole))
    assert ours == theirs
    assert trained(resumed.out) == trained(whole.out)
    shown, expected = (read_samples(run.out / "samples.json") for run in (resumed, whole))
    assert shown == expected
    assert all(sample.before is not None and sample.after is not None for sample in shown)
    assert audit(resumed.out)["fates"] == audit(whole.out)["fates"]
    assert resumed.summary["prompts"]["regenerated_tokens"] == 0, "nothing was under way at the checkpoint"
    assert resumed.summary["earlier_s"] > 0


@pytest.mark.slow
def test_at_staleness_0_what_a_signal_cut_off_is_sampled_again_to_the_same_bits(
    whole, synchronous, tmp_path, monkeypatch
):
    """It comes when completions of the third step are half done."""
    tables = synchronous | {"trainer": {"checkpoint_every": 50}}
    step = Engine.step
    told: list[list[int]] = []

    def signalling(self: Engine) -> list[Finished]:
        finished = step(self)
        begun = [len(one.resume.tokens) for one in self.begun() if one.resume is not None and self.version == 2]
        if not told and max(begun, default=0) == 6:
            told.append(begun)
            signal.raise_signal(signal.SIGINT)
        return finished

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", signalling)
        run = slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False).out
    assert (run / "checkpoints" / "step_2.rollouts" / "generator-0.safetensors").is_file()
    resumed = slipstream.run("quickstart", resume=run, display=False)
    ours, theirs = ((run.out / "model" / "model.safetensors").read_bytes() for run in (resumed, whole))
    assert ours == theirs
    assert trained(resumed.out) == trained(whole.out)
    assert resumed.summary["prompts"]["regenerated_tokens"] > sum(told[0])


@pytest.mark.slow
def test_a_reference_that_follows_the_policy_is_resumed_with_it(small, tmp_path):
    """The reference has moved twice at the checkpoint, and moves twice more behind it."""
    kl = {"coef": 0.5, "sync_every": 1, "mixup": 0.5}
    tables = small | SYNC | {"steps": 4, "kl": kl, "warm_start": small["warm_start"] | {"steps": 2}}
    whole = slipstream.run("quickstart", overrides=tables, out=tmp_path / "whole", display=False)
    cut = Path(shutil.copytree(whole.out, tmp_path / "cut"))
    for path in ("checkpoints/step_4", "model"):
        shutil.rmtree(cut / path)
    resumed = slipstream.run("quickstart", resume=cut, display=False)
    ours, theirs = ((run.out / "model" / "model.safetensors").read_bytes() for run in (resumed, whole))
    assert ours == theirs
    measured = [
        [line["kl_reference"] for line in read_metrics(run.out / "metrics.jsonl") if "kl_reference" in line]
        for run in (resumed, whole)
    ]
    assert measured[0] == measured[1]
    assert len(set(measured[0])) == 4


def test_what_was_under_way_is_gone_on_with_and_the_bound_holds(small, tmp_path, monkeypatch):
    """Rollouts that waited for their step and tokens of unfinished completions are not sampled again."""
    tables = small | AHEAD
    run = tmp_path / "run"
    cut_off(monkeypatch, tables, run, after_step(2))
    saved = run / "checkpoints" / "step_2.rollouts"
    assert sorted(path.name for path in saved.iterdir()) == ["generator-0.safetensors", "trainer.safetensors"]
    cut = json.loads((run / "checkpoints" / "step_2" / "state.json").read_text())["extra"]
    owed = cut["schedule"]["readmit"]
    assert len(owed) >= 2

    resumed = slipstream.run("quickstart", resume=run, display=False)
    assert sorted(Counter(ordinal for _, ordinal, sample, _ in trained(run) if sample == 0).items()) == [
        (ordinal, 1) for ordinal in range(STEPS * tables["groups_per_step"])
    ]
    audit(run)
    tokens = [json.loads(line) for line in (run / "tokens.jsonl").read_text().splitlines()]
    assert [(line["step"], line["ordinal"], line["sample"]) for line in tokens] == [
        (step, ordinal, sample) for step, ordinal, sample, _ in trained(run) if ordinal % 2 == 0
    ]
    later = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()][cut["num_events"] :]
    scored = [line["event"]["ordinal"] for line in later if line["event"]["type"] == "GroupScored"]
    admitted = {command["ordinal"] for line in later for command in line["commands"] if command["type"] == "StartGroup"}
    kept = set(owed) - admitted
    assert kept, "groups that waited for their step are scored again without being sampled again"
    assert scored[: len(kept)] == sorted(kept)
    assert sum(event["num_restored"] for event in events(run, "CompletionFinished")) > 0
    again = sum(
        line["event"]["num_tokens"] - line["event"]["num_restored"]
        for line in later
        if line["event"]["type"] == "CompletionFinished" and line["event"]["ordinal"] in owed
    )
    assert resumed.summary["prompts"]["regenerated_tokens"] == again


@pytest.mark.slow
@pytest.mark.parametrize("cut_at", [1, 2])
def test_a_resume_of_a_run_that_was_evaluated_to_the_end_evaluates_only_what_is_missing(
    cut_at, small, tmp_path, monkeypatch
):
    """Killed between the checkpoint of the last step, which has the first `cut_at` last accuracies, and the end."""
    run, checkpoint, handle = tmp_path / "run", Controller._checkpoint, Controller._handle
    steps = 2

    def unevaluated(self: Controller) -> int:
        return sum(not self.tally.knows(steps, "", kind) for kind in (GREEDY, SAMPLED))

    def counted(self: Controller, message: Any) -> None:
        before = unevaluated(self)
        handle(self, message)
        now = unevaluated(self)
        if now < before and now == 2 - cut_at:
            self.cut_at = None
            checkpoint(self)
            self._run_until(lambda: not self.num_unsaved, "the checkpoint")
            raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(Controller, "_handle", counted)
        with pytest.raises(Cut):
            slipstream.run("quickstart", overrides=small | AHEAD | {"steps": steps}, out=run, display=False)
    resumed = slipstream.run("quickstart", resume=run, display=False)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name in ("accuracy", "sampled_accuracy"):
        assert [line["version"] for line in lines if f"eval_{name}" in line] == [0, steps]
    assert None not in resumed.summary["eval"]["after"].values()
    shown = read_samples(run / "samples.json")
    assert len(shown) == 4
    assert all(sample.before is not None and sample.after is not None for sample in shown)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_more_and_with_fewer_ranks_and_replicas(small, tmp_path):
    """As after a GPU that failed: nothing that was scored or begun is sampled again, wherever it is needed now."""
    out = tmp_path / "run"
    process = start(small | AHEAD | {"host": "process", "steps": 100}, out)
    await_steps(out, 3, process)
    process.kill()
    process.communicate(timeout=60)
    for steps, many, microbatch_tokens in ((8, 2, 512), (10, 1, 1024)):
        layout = {"trainer.ranks": many, "generator.replicas": many, "trainer.microbatch_tokens": microbatch_tokens}
        summary = slipstream.run(resume=out, overrides=layout | {"steps": steps}, display=False).summary
        assert (summary["status"], summary["steps"]) == ("done", steps)
        assert {"trainer@1" in summary["accounting"], "generator-1" in summary["accounting"]} == {many == 2}
        assert summary["prompts"]["lost"] == summary["prompts"]["repeated"] == 0
        assert summary["prompts"]["trained"] == steps * small["groups_per_step"]
        assert summary["staleness"]["max"] <= AHEAD["max_staleness"]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["torn", "missing", "of another cut"])
def test_without_what_was_under_way_it_is_sampled_again(damage, small, tmp_path, monkeypatch):
    run = tmp_path / "run"
    cut_off(monkeypatch, small | AHEAD, run, after_step(2))
    for path in (run / "checkpoints" / "step_2.rollouts").iterdir():
        if damage == "missing":
            path.unlink()
        elif damage == "torn":
            path.write_bytes(path.read_bytes()[:-9])
        else:
            path.write_bytes(path.read_bytes().replace(b'"cut":"', b'"cut":"0')[:-1] + b"0")
    resumed = slipstream.run("quickstart", resume=run, display=False)
    audit(run)
    assert resumed.summary["prompts"]["trained"] == STEPS * small["groups_per_step"]
    assert resumed.summary["prompts"]["regenerated_tokens"] > 0
    assert all(event["num_restored"] == 0 for event in events(run, "CompletionFinished"))


@pytest.mark.slow
def test_a_lost_trainer_is_followed_by_another_attempt_from_the_last_checkpoint(small, tmp_path, monkeypatch, capsys):
    decide, losses = Controller._decide, [3, 3]

    def losing(self: Controller, *events: Any) -> None:
        decide(self, *events)
        if isinstance(events[0], StepDone) and losses and events[0].step == losses[0]:
            losses.pop(0)
            raise ExecutorLost("the process of 'trainer' ended", executor="trainer", got="killed by SIGKILL")

    monkeypatch.setattr(Controller, "_decide", losing)
    result = slipstream.run("quickstart", overrides=small | AHEAD, out=tmp_path / "run")
    assert capsys.readouterr().out.count("going on from step_2") == 2
    audit(tmp_path / "run")
    assert result.summary["prompts"]["trained"] == STEPS * small["groups_per_step"]
    assert sorted(path.name for path in result.out.glob("attempt_*")) == ["attempt_1", "attempt_2"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_trainer_comes_back_by_itself_with_what_waited_for_it(ranks, tiny, tmp_path):
    """In processes; with two ranks each has kept its share, and the second one is killed."""
    run = tmp_path / "run"
    tables = tiny | AHEAD | {"steps": 24, "loss": {"skip_no_signal": False}}
    tables["trainer"] = {"checkpoint_every": 2, "ranks": ranks}
    process = start(tables, run)
    await_steps(run, 5, process)
    os.kill(executors_of(process.pid)["trainer" if ranks == 1 else "trainer@1"], signal.SIGKILL)
    told, _ = process.communicate(timeout=180)
    assert process.returncode == 0, told
    assert "the run is started again (1 of 3)" in told
    assert "going on from step_" in told
    audit(run)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["prompts"]["trained"]) == ("done", 24 * tables["groups_per_step"])
    assert summary["restarts"] == {"trainer": 1}
    assert (run / "attempt_1" / "events.jsonl").is_file()


# More steps


@pytest.mark.slow
def test_an_extended_run_is_one_that_was_as_long_from_the_start(small, tmp_path, capsys):
    """At staleness 0 bit for bit; files, summary and log are those of one run, and nothing is trained again."""
    tables = small | SYNC | {"steps": 4, "eval": small["eval"] | {"every": 2}}
    whole = slipstream.run("quickstart", overrides=tables | {"steps": STEPS}, out=tmp_path / "whole", display=False)
    short = slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False)
    assert (short.status, short.summary["steps"]) == ("done", 4)
    before = trained(short.out)
    (short.out / EVALUATION_FILE).write_text("{}")  # as the stage evaluate leaves it
    capsys.readouterr()
    extended = slipstream.run(resume=short.out, overrides={"steps": STEPS, "trainer.checkpoint_every": 1})
    told = capsys.readouterr().out
    assert "steps: 6, which were 4" in told
    assert "learning rate" not in told
    assert (extended.status, extended.summary["steps"]) == ("done", STEPS)
    ours, theirs = ((run.out / "model" / "model.safetensors").read_bytes() for run in (extended, whole))
    assert ours == theirs
    assert trained(extended.out) == trained(whole.out)
    assert trained(extended.out)[: len(before)] == before
    assert audit(extended.out)["fates"] == audit(whole.out)["fates"]
    found, expected = (read_metrics(run.out / "metrics.jsonl") for run in (extended, whole))
    rewards = [[line["reward"] for line in lines if "reward" in line] for lines in (found, expected)]
    assert rewards[0] == rewards[1]
    accuracies = [
        {line["version"]: line["eval_accuracy"] for line in lines if "eval_accuracy" in line}
        for lines in (found, expected)
    ]
    assert accuracies[0] == accuracies[1]
    for key in ("prompts", "eval", "staleness", "padding_frac", "rows"):
        assert extended.summary[key] == whole.summary[key], key
    assert extended.summary["earlier_s"] > 0
    assert resolve(extended.out / "config.toml").trainer.checkpoint_every == 1
    assert not (extended.out / EVALUATION_FILE).exists(), "it is of another policy: the stage is to be done again"
    assert (extended.out / "attempt_1" / EVALUATION_FILE).is_file()
    again = slipstream.replay(extended.out)
    assert again.is_sound
    assert again.is_complete
    assert slipstream.report(extended.out).is_file()


def test_a_run_that_has_done_as_many_steps_is_not_told_that_it_has_gone_further():
    before = resolve("quickstart", {"steps": 9, "groups_per_step": 2})
    for steps, told in ((4, "has gone further"), (5, "has done that many steps, and has begun the next")):
        with pytest.raises(ConfigError, match=rf"{told}(.|\n)*steps = {steps}, after 5 steps(.|\n)*at least 7"):
            extension(before, before.model_copy(update={"steps": steps}), Snapshot(14, 5, [], 0, 0, []))


@pytest.mark.parametrize(("policy", "num_kept"), [("oldest_first", 0), ("drop_stale", 1)])
def test_what_is_too_old_for_its_place_is_sampled_again_where_places_keep_the_bound(policy, num_kept, tmp_path):
    tables = {"groups_per_step": 2, "max_staleness": 1, "schedule": {"policy": policy}}
    cut = SavedCut(Snapshot(101, 5, [], 0, 0, [100]), 0)
    resumed = Resumed(None, cut, tmp_path, partials={100: (SimpleNamespace(versions=[0]),)})
    assert len(rl._admissible(resolve("quickstart", tables), resumed)[100]) == num_kept


@pytest.mark.parametrize("policy", ["drop_stale", "areal"])
def test_a_policy_that_admits_beyond_the_end_leaves_what_it_does_not_train(policy):
    """A run of 5 steps that is done, and has begun groups of two more."""
    before = resolve("quickstart", {"steps": 5, "groups_per_step": 2, "schedule": {"policy": policy}})
    after = before.model_copy(update={"steps": 6})
    assert extension(before, after, Snapshot(14, 5, [], 0, 0, []))[0] == "steps: 6, which were 5"


@pytest.mark.slow
def test_ahead_of_the_trainer_an_extended_run_loses_nothing_and_says_what_its_schedules_do(small, tmp_path, capsys):
    tables = small | AHEAD | {"trainer": {"checkpoint_every": 2, "optimizer": {"lr": 1e-3, "schedule": "linear"}}}
    run = slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False).out
    before = trained(run)
    with pytest.raises(ConfigError, match=r"already complete(.|\n)*--steps 12 goes on") as caught:
        slipstream.run(resume=run, display=False)
    assert "slipstream report" not in str(caught.value)
    (run / "report.html").unlink()  # as a kill behind the summary leaves it
    with pytest.raises(ConfigError, match=r"already complete(.|\n)*page is missing: `slipstream report "):
        slipstream.run(resume=run, display=False)
    with pytest.raises(ConfigError, match=r"gone further than that(.|\n)*steps = 5(.|\n)*at least 6"):
        slipstream.run(resume=run, overrides={"steps": 5}, display=False)
    assert not list(run.glob("attempt_*")), "what is refused changes nothing"
    capsys.readouterr()
    extended = slipstream.run(resume=run, overrides={"steps": 8})
    told = " ".join(capsys.readouterr().out.split())
    assert "after step 6 the learning rate is 0.00025 now, where it was to be 0, and falls to 0 at step 8" in told
    assert extended.summary["prompts"]["trained"] == 8 * small["groups_per_step"]
    assert trained(run)[: len(before)] == before
    audit(run)
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "lr" in line]
    updates = resolve(run / "config.toml").updates_per_step
    for step, line in enumerate(lines):  # the rate of its last update
        planned = (6 if step < 6 else 8) * updates
        assert line["lr"] == pytest.approx(1e-3 * (1 - (updates * step + updates - 1) / planned)), step


@pytest.mark.slow
def test_the_policy_of_an_extended_run_is_evaluated_again(small, tmp_path):
    tables = small | SYNC | {"steps": 2, "stages": ["sft", "rl", "evaluate"], "evaluation": {"num_prompts": 4}}
    tables |= {"sft": {"steps": 3}, "warm_start": {"steps": 0}, "model": small["model"] | {"path": "stage:sft"}}
    run = slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False).out
    first = (run / EVALUATION_FILE).stat().st_ino
    again = slipstream.run(resume=run, display=False)
    assert again.summary["steps"] == 2
    assert (run / EVALUATION_FILE).stat().st_ino == first, "what is done is not done again"
    extended = slipstream.run(resume=run, overrides={"steps": 4}, display=False)
    assert (extended.status, extended.summary["steps"]) == ("done", 4)
    assert (run / "attempt_1" / EVALUATION_FILE).stat().st_ino == first
    assert extended.summary["evaluation"] == json.loads((run / EVALUATION_FILE).read_text())
    with pytest.raises(ConfigError, match="gone further than that"):
        slipstream.run(resume=run, overrides={"steps": 3}, display=False)


@pytest.mark.slow
def test_a_run_that_was_stopped_may_become_shorter_but_not_than_it_has_begun(small, tmp_path, monkeypatch):
    cut_off(monkeypatch, small | AHEAD | {"steps": 20}, tmp_path / "run", after_step(2))
    with pytest.raises(ConfigError, match=r"after 2 steps(.|\n)*at least [45]"):
        slipstream.run(resume=tmp_path / "run", overrides={"steps": 3}, display=False)
    result = slipstream.run(resume=tmp_path / "run", overrides={"steps": STEPS}, display=False)
    assert (result.status, result.summary["prompts"]["trained"]) == ("done", STEPS * small["groups_per_step"])
    audit(tmp_path / "run")


def test_a_resume_takes_nothing_that_would_make_another_run_of_it(trained, tmp_path):
    for given, named in (
        ({"overrides": {"seed": 9}}, "seed"),
        ({"preset": "sync"}, "preset"),
        ({"prompts": ["a", "b"]}, "prompts"),
        ({"out": tmp_path}, "out"),
    ):
        with pytest.raises(ConfigError, match=f"keeps its configuration\n  got: .*{named}"):
            slipstream.run(resume=trained, display=False, **given)
    with pytest.raises(ConfigError, match="a configuration is needed"):
        slipstream.run(display=False)


class Attempts:
    """Stands for attempts that end one after the other as they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: BaseException | str) -> None:
        self.ends, self.resumed, self.pauses = list(ends), [], []
        monkeypatch.setattr(rl, "_attempt", self.attempt)
        monkeypatch.setattr(
            rl, "prepare_resume", lambda run_dir, _: Resumed(run_dir / "step_2", None, run_dir, ["note"])
        )
        monkeypatch.setattr(rl, "sleep", self.pauses.append)

    def attempt(self, *given: Any) -> dict[str, Any]:
        resumed = given[4]
        self.resumed.append(None if resumed is None else resumed.checkpoint)
        end = self.ends.pop(0)
        if isinstance(end, BaseException):
            raise end
        return {"status": end}


def lost(executor: str) -> ExecutorLost:
    return ExecutorLost(f"the process of '{executor}' ended", executor=executor)


def test_each_lost_executor_has_a_budget_of_its_own_and_pauses_that_double(tmp_path, monkeypatch):
    attempts = Attempts(monkeypatch, lost("trainer"), lost("reference"), lost("trainer"), "done")
    config = resolve("quickstart", {"max_restarts": 2})
    assert rl.run_rl(config, tmp_path, FromPython(display=False)) == {"status": "done"}
    assert attempts.pauses == [0.5, 0.5, 1.0]
    assert attempts.resumed == [None, *[tmp_path / "step_2"] * 3]

    attempts = Attempts(monkeypatch, *[lost("trainer") for _ in range(3)])
    with pytest.raises(ExecutorLost, match="'trainer' ended"):
        rl.run_rl(config, tmp_path, FromPython(display=False))
    assert attempts.pauses == [0.5, 1.0]


def test_callbacks_of_a_lost_attempt_are_called_in_the_next_one_and_their_answer_holds(tmp_path, monkeypatch):
    heard: list[int] = []
    monkeypatch.setattr(rl, "prepare_resume", lambda run_dir, _: Resumed(None, None, run_dir))
    monkeypatch.setattr(rl, "sleep", lambda _: None)
    monkeypatch.setattr(rl, "_attempt", lambda *given: attempt(given[-1]))
    saved = (CheckpointSaved(step=step, path="p") for step in (2, 4))

    def attempt(callbacks: Any) -> dict[str, Any]:
        callbacks.take(next(saved))
        if not is_second.is_set():
            is_second.set()
            raise lost("trainer")
        callbacks.finish()
        return {"status": "done", "stops": callbacks.wants_stop}

    def hear(record: Any) -> str | None:
        assert is_second.wait(60)
        heard.append(record.step)
        return "stop" if record.step == 2 else None

    is_second = threading.Event()
    given = FromPython(display=False, hooks={"on_checkpoint": [hear]})
    assert rl.run_rl(resolve("quickstart"), tmp_path, given) == {"status": "done", "stops": True}
    assert heard == [2, 4]


def test_a_restart_does_not_begin_anew_where_all_checkpoints_are_damaged(tmp_path, monkeypatch):
    """As `--resume` does not."""
    (tmp_path / "checkpoints" / "step_2").mkdir(parents=True)  # without its manifest
    attempts = Attempts(monkeypatch, lost("trainer"), "done")
    with pytest.raises(CheckpointError, match=r"without .*checkpoints the run begins anew"):
        rl.run_rl(resolve("quickstart"), tmp_path, FromPython(display=False))
    assert attempts.resumed == [None]
    assert (tmp_path / "checkpoints" / "step_2").is_dir()


@pytest.mark.parametrize("error", [ExecutorDied("'trainer' failed"), SlipstreamError("no signal"), DiskError("full")])
def test_what_would_only_repeat_itself_is_not_tried_again(error, tmp_path, monkeypatch):
    attempts = Attempts(monkeypatch, error)
    with pytest.raises(type(error)):
        rl.run_rl(resolve("quickstart"), tmp_path, FromPython(display=False))
    assert attempts.pauses == []


def test_ctrl_c_ends_a_pause(tmp_path, monkeypatch):
    Attempts(monkeypatch, lost("trainer"))

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rl, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rl.run_rl(resolve("quickstart"), tmp_path, FromPython(display=False))
