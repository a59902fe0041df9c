"""Which sets are asked for, and with what; after a resume only those that no line of the metrics has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from slipstream.controller.evaluations import GREEDY, SAMPLED
from slipstream.controller.held_out import HeldOut
from slipstream.controller.pipeline import RunInput
from slipstream.controller.tally import Tally
from slipstream.core.recipes import resolve
from slipstream.core.service_messages import EvalScored, Evaluate, Export
from slipstream.core.stage_sections import EvalConfig
from slipstream.core.types import Prompt

SETS = [
    {"name": "first", "temperature": 0.3, "num_samples": 2},
    {"name": "second", "num_samples": 3},
    {"name": "third", "temperature": 1.0},
]
PROMPTS = {
    one["name"]: [Prompt(f"{one['name']}{i}", "p", np.zeros(1, dtype=np.int32), "dataset", None) for i in range(2)]
    for one in SETS
}


def held_out(
    run_dir: Path, step: int, *lines: dict[str, Any], publish_every: int = 1, **rules: Any
) -> tuple[HeldOut, list[Any]]:
    prompts = {"tasks": [], "dataset": "rows.jsonl"}
    config = resolve("quickstart", {"eval": {"sets": SETS, "every": 2, **rules}, "prompts": prompts}).model_copy(
        update={"publish_every": publish_every}
    )
    tally, sent = Tally(config, started_s=0.0), list[Any]()
    for line in lines:
        tally.recall(line)
    schedule: Any = SimpleNamespace(is_finished=False, steps_done=step, versions={0: step})
    observers: Any = SimpleNamespace(tally=tally, take=tally.take)
    work = RunInput(lambda _: PROMPTS["first"][0], tuple(PROMPTS["first"]), None, sets=PROMPTS)
    made = HeldOut(config, run_dir, work, schedule, observers, lambda _, one: sent.append(one))
    return made, sent


def asked(sent: list[Evaluate]) -> list[tuple[str, float, int]]:
    return [(one.prompts[0].prompt_id[:-1], one.temperature, len(one.prompts)) for one in sent]


FIRST, SECOND, THIRD = ("first", 0.3, 4), ("second", 0.0, 6), ("third", 1.0, 2)


def test_a_run_begins_with_all_sets_and_with_samples_of_the_first(tmp_path: Path) -> None:
    made, sent = held_out(tmp_path, 0)
    assert made.first() == (GREEDY, SAMPLED)
    made.evaluate((GREEDY, SAMPLED), 0)
    assert asked(sent) == [FIRST, ("first", 1.0, 2), SECOND, THIRD]
    assert {one.temperature for one in sent} == set(EvalConfig.model_validate({"sets": SETS}).temperatures)


def test_after_a_resume_only_what_was_cut_off_is_asked_for(tmp_path: Path) -> None:
    first = {"version": 2, "eval_reward": 0.5, "eval/first/reward": 0.5}
    third = {"version": 2, "eval/third/reward": 0.25}
    for lines, left in (
        ([], [FIRST, SECOND, THIRD]),
        ([first], [SECOND, THIRD]),
        ([first, third], [SECOND]),
        ([third], [FIRST, SECOND]),
    ):
        made, sent = held_out(tmp_path, 2, *lines)
        assert made.first() == (GREEDY,)
        made.evaluate((GREEDY,), 2)
        assert asked(sent) == left
    whole, _ = held_out(tmp_path, 2, first, third, {"version": 2, "eval/second/reward": 0.0})
    assert whole.first() == ()


def test_the_best_result_whose_export_was_cut_off_is_exported_by_a_resume(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "best.json").write_text('{"version": 1, "metric": "accuracy", "value": 0.4}')
    lines = [{"version": one, "eval_accuracy": value} for one, value in ((1, 0.4), (2, 0.6), (3, 0.3), (4, 0.5))]
    for step, exported in ((4, True), (3, False)):
        made, sent = held_out(tmp_path, step, *lines, keep_best=True, measure="exact_match")
        made.first()
        made.export_candidate(step)
        assert sent == [Export(path=str(tmp_path / f".best_{step}"))] * exported
        assert made.best.missed == [2, 4], "version 2 is gone for good, which the run says at its end"
    made, _ = held_out(tmp_path, 4, *lines, keep_best=True, measure="exact_match")
    made.export_candidate(4)
    (tmp_path / ".best_4").mkdir()
    made.best.exported(str(tmp_path / ".best_4"))
    assert (made.best.best.version, made.best.missed) == (4, [2])


def test_the_version_that_a_resume_publishes_may_be_the_best(tmp_path: Path) -> None:
    """Whatever multiple of `publish_every` it is: it is evaluated."""
    made, sent = held_out(tmp_path, 10, keep_best=True, publish_every=4)
    assert made.first() == (GREEDY,)
    made.export_candidate(10)
    [export] = sent
    assert isinstance(export, Export)


def test_at_the_end_what_is_known_is_not_asked_again(tmp_path: Path) -> None:
    made, sent = held_out(tmp_path, 4, {"version": 4, "eval_reward": 0.5}, {"version": 4, "eval/third/reward": 0.5})
    made.evaluate((GREEDY, SAMPLED), 4)
    assert asked(sent) == [("first", 1.0, 2), SECOND]


def test_rules_go_by_the_first_set_alone(tmp_path: Path) -> None:
    made, sent = held_out(tmp_path, 2, stop_at=0.75, metric="reward", keep_best=True)
    made.evaluate((GREEDY,), 2)
    for name, reward, cause in (("second", 1.0, None), ("third", 1.0, None), ("first", 0.8, "stop_at")):
        [one] = [one for one in sent if isinstance(one, Evaluate) and one.prompts[0].prompt_id.startswith(name)]
        for ordinal in range(len(one.prompts)):
            given = {"completion_text": "", "prompt_text": "", "answer": None, "num_tokens": 1, "version": 2}
            made.scored(EvalScored(eval_id=one.eval_id, ordinal=ordinal, reward=reward, **given))
        assert made.early_stopping.cause == cause
        assert made.best.missed == ([] if cause is None else [2])
