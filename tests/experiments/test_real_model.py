"""The problems are what they say, nothing held out is trained, a tree's memory is its own, and rules give verdicts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.reward import last_number
from experiments.lab import Lab, RunFailed, Unavailable
from experiments.real_model import experiment, memory, runs, workload
from experiments.real_model.runs import CONTENDERS, CONTINUOUS, ONE_STEP, SYNC, TRL, Found, Scale, Seen
from experiments.section import render
from slipstream.core.recipes import resolve
from slipstream.models.tokenizer import char_tokenizer
from slipstream.prompts.build import build_prompts

# The workload


@pytest.fixture(scope="module")
def rows():
    return workload.rows()


def answer_of(prompt: str) -> tuple[str, tuple[int, ...], int]:
    """Kind, numbers and answer, from the words of a problem alone."""
    first, second = map(int, re.findall(r"\d+", prompt))
    words = {"more": "more", "away": "fewer", "together": "together", "in each": "packs"}
    kind = next(kind for word, kind in words.items() if word in prompt)
    return kind, (first, second), {"fewer": first - second, "packs": first * second}.get(kind, first + second)


def test_answers_are_right(rows):
    for row in (*rows[0], *rows[1]):
        kind, _, answer = answer_of(row["prompt"])
        assert (row["kind"], row["answer"]) == (kind, str(answer))
        assert answer > 0


def test_held_out_problems_have_numbers_that_training_never_has(rows):
    assert [len(some) for some in rows] == [workload.NUM_TRAIN, workload.NUM_HELD_OUT]
    train, held_out = ({answer_of(row["prompt"])[:2] for row in some} for some in rows)
    assert not train & held_out
    assert len({row["prompt"] for some in rows for row in some}) == sum(map(len, rows))
    for some in rows:
        assert {kind: sum(row["kind"] == kind for row in some) for kind in workload.KINDS} == dict.fromkeys(
            workload.KINDS, len(some) // 4
        )


def test_a_run_sees_no_problem_twice(rows):
    config = runs.contest(SYNC, 0, Scale(), *map(runs.Path, ("train", "held"))).config()
    assert config.steps * config.groups_per_step * (1 + config.max_staleness) < len(rows[0])


def test_the_last_number_decides():
    texts = ["7 + 5 = 12", "12", "= -12", "12 shells, not 13", "no number", "120", "12.", "The answer is 12, ok"]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    for completions in (texts, chats):
        assert last_number(completions, answer=["12"] * len(texts)) == [1, 1, 0, 0, 0, 0, 1, 1]


# Memory


HOLD = """
import pathlib, sys, time
held, ends_s = b"x" * 2**26, time.monotonic() + 60
while not pathlib.Path(sys.argv[1]).exists() and time.monotonic() < ends_s:
    time.sleep(0.05)
"""


def test_memory_is_that_of_all_processes(tmp_path, monkeypatch):
    """Two children of 64 MiB each, beside a parent that holds nothing, until a whole look has seen both."""
    seen, sizes, look, measured = tmp_path / "seen", dict[int, int](), memory.tree, memory.pss

    def tree(root):
        if sum(sizes.values()) > 2 * 2**26:
            seen.touch()
        sizes.clear()
        return look(root)

    def pss(pid):
        return sizes.setdefault(pid, measured(pid))

    monkeypatch.setattr(memory, "tree", tree)
    monkeypatch.setattr(memory, "pss", pss)
    (tmp_path / "hold.py").write_text(HOLD)
    start = f"subprocess.Popen([sys.executable, {str(tmp_path / 'hold.py')!r}, {str(seen)!r}])"
    found = memory.peak_pss(["-c", f"import subprocess, sys; [one.wait() for one in [{start} for _ in '12']]"])
    assert seen.exists()
    assert 2 * 2**26 < found < 3 * 2**26


def test_a_program_that_fails_or_stays_is_told():
    with pytest.raises(RunFailed, match=r"exit code 3: told"):
        memory.peak_pss(["-c", "import sys; print('told'); sys.exit(3)"])
    with pytest.raises(RunFailed, match=r"not done after 0.1 s"):
        memory.peak_pss(["-c", "import time; time.sleep(600)"], deadline_s=0.1)


def test_a_process_that_has_ended_holds_nothing():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert memory.pss(child.pid) == 0
    assert set(memory.tree(child.pid)) == {child.pid}


# Runs

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_contenders_differ_in_their_dials_alone(tmp_path):
    def table(title):
        return runs.contest(title, 1, Scale(), tmp_path / "train", tmp_path / "held").config().model_dump()

    ours = table(CONTINUOUS)
    assert (ours["max_staleness"], ours["weight_update"], ours["seed"], ours["steps"]) == (2, "in_flight", 1, 30)
    for title, dials in CONTENDERS.items():
        other = table(title)
        assert {name for name in ours if ours[name] != other[name]} == set(dials)
    assert table(TRL) == table(SYNC)


def test_without_the_model_it_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "MODEL", tmp_path / "nowhere")
    with pytest.raises(Unavailable, match=r"import_smollm2.py .*nowhere"):
        experiment.section(Lab(tmp_path))


def test_trl_reads_the_chats_that_our_prompts_are(tmp_path):
    """Against the prompts of our own pipeline."""
    rows = [{"prompt": "2 + 2?", "answer": "4", "kind": "more"}, {"prompt": "2 + 3?", "answer": "5", "kind": "more"}]
    source, to = tmp_path / "rows.jsonl", tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    workload.write_chats(source, "Be brief.", to)
    chats = [json.loads(line) for line in to.read_text().splitlines()]
    tokenizer = char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    own = {"num_train": 1, "num_eval": 1, "chat": True, "system": "Be brief.", "template": "{prompt}"}
    tables = {"prompts": {"dataset": str(source), "eval_dataset": None, **own}, "eval": {"num_prompts": 1}}
    prompts = build_prompts(resolve(runs.RECIPE, tables), tokenizer)
    by_text = {prompt.text: prompt.answer for prompt in (prompts.train.prompt(0), *prompts.eval)}
    assert by_text == {
        tokenizer.apply_chat_template(chat["prompt"], tokenize=False, add_generation_prompt=True): chat["answer"]
        for chat in chats
    }


# Verdicts


def seen(**values) -> Seen:
    """Ten steps of a second; the last five had the level on average after the eighth."""
    defaults = {
        "ended_s": tuple(float(second) for second in range(1, 11)),
        "rewards": (0.0, 0.1, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.6),
        "completions_per_s": 4.0,
        "mean_tokens": 8.5,
        "accuracy": 0.6,
        "greedy": 0.7,
        "peak_bytes": 3 * 10**9,
    }
    return Seen(**(defaults | values))


def three(**values) -> list[Seen]:
    base = seen(**values)
    return [
        replace(
            base,
            completions_per_s=base.completions_per_s * scale,
            ended_s=tuple(second * scale for second in base.ended_s),
            accuracy=base.accuracy * scale,
        )
        for scale in (0.99, 1.0, 1.01)
    ]


SHORT = tuple(0.5 * second for second in range(1, 11))


def found(trl="1.16.0", **others) -> Found:
    slow = three(ended_s=tuple(3.0 * second for second in range(1, 11)))
    all_of = {TRL: slow, SYNC: three(), ONE_STEP: three(accuracy=0.5), CONTINUOUS: three(completions_per_s=5.0)}
    all_of |= others
    if trl is None:
        del all_of[TRL]
    return Found((0.1, 0.05), all_of, trl)


def test_when_the_level_is_reached():
    assert experiment.reached_s(seen()) == 8.0
    assert experiment.reached_s(seen(rewards=(0.4,) * 10)) is None


def test_verdicts():
    told = {verdict.claim: verdict.holds for verdict in experiment.verdicts(found())}
    assert told == {
        "Slipstream learns sooner than TRL, GRPO": True,
        "Continuous, k = 2: as accurate as synchronous training after as many steps (margin 0.05)": True,
        "One step ahead: as accurate as synchronous training after as many steps (margin 0.05)": False,
        "Continuous, k = 2: faster than synchronous": True,
        "One step ahead: faster than synchronous": None,
    }


@pytest.mark.parametrize(
    ("others", "holds", "words"),
    [
        ({TRL: three(rewards=(0.1,) * 10)}, True, "TRL, GRPO after at least 10 (0) s (3 of 3 never got there): 1."),
        (
            {CONTINUOUS: three(rewards=(0.1,) * 10)},
            None,
            "reward 0.5 after at least 10 (0) s (3 of 3 never got there),",
        ),
        ({TRL: three(ended_s=SHORT)}, False, "TRL, GRPO after 4 (0) s: 0.5"),
        (
            {TRL: [seen(ended_s=SHORT, rewards=(0.1,) * 10), *three(ended_s=SHORT)[:2]]},
            None,
            "(1 of 3 never got there): 0",
        ),
    ],
)
def test_who_learns_sooner(others, holds, words):
    """A run of theirs that never gets there counts with all it took, and is no end; of ours, no ratio is told."""
    verdict = experiment.verdicts(found(**others))[0]
    assert verdict.holds is holds
    assert words in verdict.found
    assert ("times" in verdict.found) == (CONTINUOUS not in others)


def test_nothing_is_as_accurate_as_what_learned_nothing():
    known = found()
    assert [one.holds for one in experiment.verdicts(replace(known, before=(0.1, 0.56)))][1:3] == [None, None]


def test_without_trl_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "find", lambda lab, scale: found(trl=None))
    text = render("real_model", experiment.section(Lab(tmp_path)))
    assert text.count("TRL is not installed") == 3
    assert "| TRL, GRPO |" not in text


def test_the_section_has_a_row_for_each(tmp_path, monkeypatch):
    never = {SYNC: [*three()[:2], seen(rewards=(0.1,) * 10)]}
    monkeypatch.setattr(experiment, "find", lambda lab, scale: found(**never))
    section = experiment.section(Lab(tmp_path))
    rows = [line for line in section.tables["After training"].splitlines() if line.startswith(("| TRL", "| sync"))]
    assert "| 4.00 (0.04) | 34.0 (0.3) | 24 (0) |" in rows[0]
    assert "| 8 (0), 2 of 3 |" in rows[1]
    assert all("<svg" in figure for figure in section.figures.values())
