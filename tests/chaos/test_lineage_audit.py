"""The audit of the chaos tier finds what it looks for: a sound run, resumed once, and one lie after the other in it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lineage_audit import audit

P, G, S, K = 2, 2, 3, 1
DROPPED = 3  # its rewards were equal, so ordinals 0, 1, 2, 4, 5, 6 are trained
BATCHES = [[0, 1], [2, 4], [5, 6]]
CUT = 22  # lines of events that the checkpoint of step 1 knew: all up to its StepDone
CONFIG = f"""
steps = {S}
groups_per_step = {P}
completions_per_group = {G}
max_staleness = {K}
reorder_window = 1
[eval]
every = 0
"""

Files = dict[str, list[dict[str, Any]]]


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind} | fields


def sound_events() -> list[dict[str, Any]]:
    """A run by hand: two groups a step, a resume after step 1 that generates ordinals 5 and 6 again."""
    told: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []

    def tell(what: dict[str, Any], *commands: dict[str, Any]) -> None:
        told.append((what, list(commands)))

    def start(*ordinals: int) -> list[dict[str, Any]]:
        return [event("StartGroup", ordinal=ordinal, replica=0) for ordinal in ordinals]

    def group(ordinal: int, *commands: dict[str, Any], has_signal: bool = True) -> None:
        for sample in range(G):
            tell(event("CompletionFinished", ordinal=ordinal, sample=sample, replica=0, num_tokens=4))
        tell(event("GroupScored", ordinal=ordinal, has_signal=has_signal, num_failed=0), *commands)

    def train(step: int) -> dict[str, Any]:
        return event("TrainStep", step=step, ordinals=BATCHES[step])

    tell(event("Swapped", replica=0, version=0), *start(0, 1, 2, 3))
    group(0)
    group(1, train(0))
    group(2)
    tell(event("StepDone", step=0))
    tell(event("Swapped", replica=0, version=1), *start(4, 5))
    group(3, event("Skip", ordinals=[DROPPED]), *start(6), has_signal=False)
    group(4, train(1))
    tell(event("CompletionFinished", ordinal=5, sample=0, replica=0, num_tokens=4))
    tell(event("StepDone", step=1))
    assert len(told) == CUT - 2
    tell(event("CompletionFinished", ordinal=5, sample=1, replica=0, num_tokens=4))
    tell(event("Swapped", replica=0, version=2))
    # The resume: what was not trained is admitted again.
    tell(event("Swapped", replica=0, version=2), *start(5, 6))
    group(5)
    group(6, train(2))
    tell(event("StepDone", step=2))
    tell(event("Swapped", replica=0, version=3))
    return [
        {"seq": seq, "time_s": float(seq), "event": what, "commands": commands}
        for seq, (what, commands) in enumerate(told)
    ]


def rollout(ordinal: int, sample: int, step: int | None, version: int) -> dict[str, Any]:
    return {
        "ordinal": ordinal,
        "sample": sample,
        "step": step,
        "failure": None,
        "prompt_id": f"prompt {ordinal}",
        "num_tokens": 4,
        "versions": [[0, version]],
    }


def sound() -> Files:
    """What that run's files hold."""
    version_of = {0: 0, 1: 0, 2: 0, 4: 1, 5: 2, 6: 2}
    trained = [(step, ordinal) for step, batch in enumerate(BATCHES) for ordinal in batch]
    return {
        "events": sound_events(),
        "ledger": [
            *({"ordinal": ordinal, "state": "admitted"} for ordinal in range(7)),
            *({"ordinal": ordinal, "state": "trained", "step": step} for step, ordinal in trained),
            {"ordinal": DROPPED, "state": "skipped"},
        ],
        "metrics": [
            {"step": 0, "version": 0, "eval_accuracy": 0.1},
            *({"step": step, "version": step + 1, "reward_mean": 0.5} for step in range(S)),
            {"step": S, "version": S, "eval_accuracy": 0.9},
        ],
        "rollouts": [
            *(rollout(DROPPED, sample, None, 0) for sample in range(G)),
            *(rollout(o, sample, step, version_of[o]) for step, o in trained for sample in range(G)),
        ],
    }


def write(folder: Path, files: Files, prompts: dict[str, int] | None = None) -> Path:
    (folder / "config.toml").write_text(CONFIG)
    for name, told in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    attempt = folder / "attempt_1"
    attempt.mkdir()
    abandoned = [*files["events"][:CUT], {"seq": CUT, "time_s": 21.5, "event": event("Stop"), "commands": []}]
    (attempt / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in abandoned))
    (folder / "checkpoints" / f"step_{S}").mkdir(parents=True)
    (folder / "checkpoints" / f"step_{S}" / "manifest.json").write_text("{}")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    counts = {"admitted": 7, "trained": 6, "skipped": 1, "failed": 0, "pending": 0, "lost": 0, "repeated": 0}
    summary = {
        "status": "done",
        "steps": S,
        "policy_version": S,
        "prompts": counts | {"regenerated_tokens": 12} | (prompts or {}),
        "staleness": {"histogram": {"0": 40, "1": 8}},
        "accounting": {"trainer": {"forward_backward": 1.0, "receive": 0.5}},
        "wall_s": 1.5,
        "eval": {"after": {"accuracy": 0.9, "sampled_accuracy": 0.8}},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_sound_run_has_no_findings(tmp_path):
    found = audit(write(tmp_path, sound()))
    assert found.findings == []
    assert found.numbers["trained"] == 6
    assert found.numbers["attempts"] == 2
    assert found.numbers["histogram"] == {0: 40, 1: 8}


def _events(files: Files, kind: str, **fields: Any) -> list[dict[str, Any]]:
    return [
        line
        for line in files["events"]
        if line["event"]["type"] == kind and all(line["event"].get(k) == v for k, v in fields.items())
    ]


def _command(files: Files, kind: str, number: int) -> dict[str, Any]:
    return [c for line in files["events"] for c in line["commands"] if c["type"] == kind][number]


def _renumber(files: Files) -> None:
    for seq, line in enumerate(files["events"]):
        line["seq"] = seq


def an_ordinal_trained_twice(files: Files) -> None:
    _command(files, "TrainStep", 2)["ordinals"] = [5, 4]


def trained_twice_by_the_ledger(files: Files) -> None:
    files["ledger"].append({"ordinal": 5, "state": "trained", "step": 2})


def trained_and_skipped(files: Files) -> None:
    files["ledger"].append({"ordinal": 4, "state": "skipped"})


def an_ordinal_forgotten_on_readmission(files: Files) -> None:
    for line in files["events"]:
        line["commands"] = [c for c in line["commands"] if c.get("ordinal") != 6]
    files["events"] = [line for line in files["events"] if line["event"].get("ordinal") != 6]
    _renumber(files)


def a_step_missing_in_the_metrics(files: Files) -> None:
    del files["metrics"][2]


def a_step_twice_in_the_metrics(files: Files) -> None:
    files["metrics"].insert(3, files["metrics"][2])


def an_evaluation_twice(files: Files) -> None:
    files["metrics"].append(files["metrics"][-1])


def a_token_too_old(files: Files) -> None:
    files["rollouts"][-1]["versions"] = [[0, 0]]


def a_token_of_the_future(files: Files) -> None:
    files["rollouts"][-1]["versions"] = [[0, 2], [2, 3]]


def a_token_older_than_its_admission(files: Files) -> None:
    next(line for line in files["rollouts"] if line["ordinal"] == 4)["versions"] = [[0, 0]]


def a_sample_twice(files: Files) -> None:
    files["rollouts"].append(files["rollouts"][-1])


def a_sample_missing(files: Files) -> None:
    files["rollouts"].pop()


def a_dropped_sample_missing(files: Files) -> None:
    files["rollouts"].pop(0)


def another_prompt(files: Files) -> None:
    files["rollouts"][-1]["prompt_id"] = "prompt 0"


def a_group_scored_twice(files: Files) -> None:
    files["events"].insert(6, copy.deepcopy(_events(files, "GroupScored", ordinal=0)[0]))
    _renumber(files)


def a_completion_generated_again(files: Files) -> None:
    files["events"].insert(3, copy.deepcopy(_events(files, "CompletionFinished", ordinal=0, sample=0)[0]))
    _renumber(files)


def a_group_started_twice(files: Files) -> None:
    files["events"][1]["commands"].append(event("StartGroup", ordinal=2, replica=0))


def a_group_started_too_early(files: Files) -> None:
    files["events"][0]["commands"].append(event("StartGroup", ordinal=4, replica=0))


def a_step_with_signal_dropped(files: Files) -> None:
    _events(files, "GroupScored", ordinal=DROPPED)[0]["event"]["has_signal"] = True


def a_younger_group_first(files: Files) -> None:
    _command(files, "TrainStep", 1)["ordinals"] = [2, 5]


def an_ordinal_nobody_knows(files: Files) -> None:
    files["ledger"] = [line for line in files["ledger"] if line["ordinal"] != DROPPED]


def a_batch_before_its_scores(files: Files) -> None:
    files["events"].remove(_events(files, "GroupScored", ordinal=2)[0])
    _renumber(files)


def an_event_lost(files: Files) -> None:
    del files["events"][8]


LIES: dict[Callable[[Files], None], str] = {
    an_ordinal_trained_twice: "an ordinal is trained once",
    trained_twice_by_the_ledger: "one fate for each ordinal",
    trained_and_skipped: "one fate for each ordinal",
    an_ordinal_forgotten_on_readmission: "what was trained is what was owed",
    a_step_missing_in_the_metrics: "each step is in the metrics once",
    a_step_twice_in_the_metrics: "each step is in the metrics once",
    an_evaluation_twice: "a version is evaluated once",
    a_token_too_old: "step - version is in 0..k",
    a_token_of_the_future: "step - version is in 0..k",
    a_token_older_than_its_admission: "no token is older than the admission",
    a_sample_twice: "whole, each sample once",
    a_sample_missing: "whole, each sample once",
    a_dropped_sample_missing: "a dropped group is recorded",
    another_prompt: "an ordinal keeps its prompt",
    a_group_scored_twice: "a group is scored once",
    a_completion_generated_again: "what exists is not generated again",
    a_group_started_twice: "in flight is not started again",
    a_group_started_too_early: "the admission rule",
    a_step_with_signal_dropped: "only groups without signal are dropped",
    a_younger_group_first: "nothing is overtaken",
    an_ordinal_nobody_knows: "no ordinal is lost",
    a_batch_before_its_scores: "only scored groups are trained",
    an_event_lost: "the events are numbered",
}


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_each_lie_is_found(lie, tmp_path):
    files = sound()
    lie(files)
    findings = audit(write(tmp_path, files)).findings
    assert any(LIES[lie] in finding for finding in findings), findings


def test_a_summary_that_counts_wrongly_is_found(tmp_path):
    findings = audit(write(tmp_path, sound(), {"trained": 7})).findings
    assert any("counts prompts trained" in finding for finding in findings)


@pytest.mark.parametrize("left", ["model/x.tmp", "checkpoints/step_2/policy.safetensors"])
def test_half_written_files_are_found(left, tmp_path):
    path = write(tmp_path, sound()) / left
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    assert len(audit(tmp_path).findings) == 1
