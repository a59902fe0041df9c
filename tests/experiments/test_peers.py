"""The workload has the tail it claims, files become the right numbers, rules the right verdicts; TRL is never left out
in silence."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace

import pytest

from benchmarks import trl_call
from benchmarks.reward import exact
from experiments.lab import Lab, RunFailed
from experiments.peers import experiment, reading, runs, workload
from experiments.peers.contenders import CONTENDERS, GROUPS_PER_STEP, K
from experiments.peers.reading import Seen
from experiments.peers.runs import Found, Scale
from experiments.peers.verdicts import NOT_THERE, SLOWER, UNBOUNDED, verdicts
from experiments.section import ROOT, Section, render

# The workload


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return [workload.read(path) for path in workload.write(folder)]


def test_answers_count_down_from_the_number_of_their_prompt(data):
    for row in (*data[0], *data[1]):
        number = int(re.fullmatch(r"[a-z]{3}(\d\d)>", row["prompt"])[1])
        assert [int(text) for text in row["answer"].split(" ")] == list(range(number, 0, -1))
        assert [int(text) for text in row["upward"].split(" ")] == list(range(1, number + 1))
        assert workload.num_tokens(row["answer"]) == workload.num_tokens(row["upward"]) == 3 * number


def test_prompts_are_distinct_and_held_out_ones_apart(data):
    train, held_out = ({row["prompt"] for row in rows} for rows in data)
    assert (len(train), len(held_out)) == (workload.NUM_TRAIN, workload.NUM_HELD_OUT)
    assert not train & held_out


def test_numbers_are_lognormal_with_the_tail_that_is_claimed(data):
    """Shares at both cuts and at quantiles, within four standard errors of the distribution's own."""
    numbers = [len(row["answer"].split(" ")) for row in data[0]]
    assert (min(numbers), max(numbers)) == (workload.SMALLEST, workload.LARGEST)
    for edge in (2, 3, 5, 10, 30, 59):
        expected = NormalDist(math.log(3), 1).cdf(math.log(edge + 0.5))
        share = sum(number <= edge for number in numbers) / len(numbers)
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / len(numbers)), edge


def test_what_is_written_is_named_after_what_is_in_it(tmp_path):
    first, second = workload.write(tmp_path), workload.write(tmp_path)
    assert first == second
    assert len(list(tmp_path.iterdir())) == 2


def test_the_recipe_has_room_for_the_longest(data):
    config = runs.checkpoint(Path("train"), Path("held"), {}).config()
    longest = max(workload.num_tokens(row["answer"]) for rows in data for row in rows)
    assert longest <= config.generator.max_new_tokens
    assert max(len(row["prompt"]) for rows in data for row in rows) <= config.prompts.max_prompt_tokens
    assert {*"".join(row["prompt"] + row["answer"] for row in data[0])} <= {*config.model.alphabet}


def test_the_reward_is_for_the_answer_and_nothing_else():
    assert exact(["2 1", " 2 1 ", "2 1 0", "1 2", ""], answer=["2 1"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


# Contenders


def differences(one, other, prefix=""):
    for name in one.keys() | other.keys():
        here, there = one.get(name), other.get(name)
        if isinstance(here, dict) and isinstance(there, dict):
            yield from differences(here, there, f"{prefix}{name}.")
        elif here != there:
            yield f"{prefix}{name}"


def test_contenders_differ_in_their_dials_alone():
    start = runs.checkpoint(Path("train"), Path("held"), {})
    ours = runs.contest("ours", CONTENDERS["ours"], 0, start, Path("model"), 80).config()
    assert (ours.max_staleness, ours.groups_per_step, ours.schedule.policy) == (K, GROUPS_PER_STEP, "oldest_first")
    found = {
        name: set(
            differences(
                runs.contest(name, contender, 0, start, Path("model"), 80).config().model_dump(), ours.model_dump()
            )
        )
        for name, contender in CONTENDERS.items()
        if contender.trl is None
    }
    assert found == {
        "sync": {"max_staleness", "weight_update"},
        "ours": set(),
        "ours_k8": {"max_staleness"},
        "ours_rloo": {"loss.name", "loss.params.eps_low", "loss.params.eps_high", "loss.advantages"},
        "drain": {"weight_update"},
        "re_prefill": {"generator.kv_on_update"},
        "one_step": {"max_staleness", "weight_update", "schedule.policy"},
        "drop_stale": {"schedule.policy"},
        "areal": {"schedule.policy"},
        "sample_budget": {"schedule.policy", "schedule.staleness_threshold"},
        "finish_order": {"schedule.policy", "schedule.queue_groups"},
    }


# Reading


def test_trailing_means():
    assert reading.trailing_means([1, 2, 3, 6], 3) == [None, None, 2, 11 / 3]


def test_pace_leaves_out_both_ends():
    """Steps of two seconds between a slow start and a quick end; short runs have no ends to leave out."""
    ended_s = [10, 20, 30, 40, 50, 60, 62, 64, 66, 67, 68, 69, 70, 71]
    assert reading.pace(ended_s, 8) == 3 * 8 / (66 - 60)
    assert reading.pace([10, 12, 16], 8) == 2 * 8 / 6


def test_length_bias_and_the_longest():
    lengths = dict(enumerate([10, 20, 30, 40, 50]))
    assert reading.length_bias(lengths, {0, 1, 2, 3, 4}) == 0
    assert reading.length_bias(lengths, {0, 1}) == -0.5
    many = {ordinal: 100 - ordinal % 50 for ordinal in range(80)}  # ordinals 0, 50, 1, 51 are the longest 5 %
    assert reading.share_of_longest(many, set(range(80))) == 1
    assert reading.share_of_longest(many, {0, 1, 51, 49}) == 0.75
    assert reading.share_of_longest({0: 3, 1: 3}, {0}) == 1


def test_age_by_length():
    found = [(6, 1), (7, 2), (12, 4), (97, 5), (500, 6)]
    assert reading.age_by_length(found) == (1, 3, None, None, None, 5.5)


def seen(**values) -> Seen:
    """A run of ten steps of a second, that has learned after the eighth."""
    defaults = {
        "ended_s": tuple(float(second) for second in range(1, 11)),
        "rewards": (0.1, 0.2, 0.5, 0.9, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0),
        "completions_per_s": 100.0,
        "accuracy": 0.95,
        "before": 0.5,
        "trainer_idle": 0.1,
        "age": (0.0,) * 6,
    }
    return Seen(**(defaults | values))


def test_when_it_has_learned():
    assert (seen().reached, seen().reached_s) == (8, 8.0)
    never = seen(rewards=(0.9, 0.9, 0.9, 0.9, 0.8, 0.9, 0.9, 0.9, 0.9, 0.8))
    assert (never.reached, never.reached_s) == (None, None)


ANSWERS = ["3 2 1", "2 1", "12 11 10 9 8 7 6 5 4 3 2 1", "4 3 2 1"]  # 6, 4, 27, 8 tokens


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """Two steps of a group each; group 2 was dropped for its age, 3 is left."""
    (tmp_path / "config.toml").write_text(
        'groups_per_step = 1\ncompletions_per_group = 2\n[[prompts.tasks]]\nname = "spell_backward"\n'
        "[trainer]\nminibatches = 1\n"
    )
    lines = [{"step": 0, "reward": 0.25, "tokens_trained": 12}, {"step": 0, "eval_accuracy": 0.5}]
    lines += [{"step": 1, "reward": 0.75, "tokens_trained": 8}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    fates = [(ordinal, "admitted", -1) for ordinal in range(4)]
    fates += [(0, "trained", 0), (2, "skipped", -1), (1, "trained", 1)]
    (tmp_path / "ledger.jsonl").write_text(
        "".join(json.dumps({"ordinal": o, "state": state, "step": step}) + "\n" for o, state, step in fates)
    )
    wasted = dict.fromkeys(("no_signal", "failed", "regenerated"), 0) | {"stale": 56, "left": 4, "re_prefilled": 40}
    told = {
        "status": "done",
        "balance": {"wasted_tokens": wasted},
        "eval": {"before": {"sampled_accuracy": 0.125}, "after": {"sampled_accuracy": 0.875}},
        "staleness": {"mean": 0.5, "max": 3},
    }
    (tmp_path / "summary.json").write_text(json.dumps(told))
    waits = ({"trainer": {"wait_straggler": 0.5}}, {"trainer": {}})
    steps = [SimpleNamespace(end_s=end_s, states=own) for end_s, own in zip((7.0, 9.0), waits, strict=True)]
    accounting = SimpleNamespace(loop=(5.0, 9.0), steps=steps, idle={"trainer": 0.25})
    monkeypatch.setattr(reading, "read_accounting", lambda run: accounting)
    rollouts = [(0, 0, 0, [(0, 0)]), (0, 1, 0, [(0, 0), (2, 1)]), (1, 0, 1, [(0, 0)]), (1, 1, 1, [(0, 1)])]
    rollouts += [(2, 0, None, [(0, 0)]), (2, 1, None, [(0, 0)])]
    made = [
        SimpleNamespace(
            ordinal=ordinal,
            sample=sample,
            step=step,
            versions=versions,
            answer=ANSWERS[ordinal],
            num_tokens=len(ANSWERS[ordinal]) + 1,
        )
        for ordinal, sample, step, versions in rollouts
    ]
    monkeypatch.setattr(reading, "read_rollouts", lambda path: iter(made))
    return tmp_path


def test_a_run_becomes_numbers(finished):
    found = reading.read_run(finished, lambda ordinal: len(ANSWERS[ordinal]) + 1)
    assert found == Seen(
        ended_s=(2.0, 4.0),
        rewards=(0.25, 0.75),
        completions_per_s=1.0,
        accuracy=0.875,
        before=0.125,
        trainer_idle=0.25,
        discarded=56 / 80,
        left=4 / 80,
        reread=40 / 80,
        staleness_mean=0.5,
        staleness_max=3,
        length_bias=5 / 11.25 - 1,
        longest_trained=0.0,
        discarded_length=27 / 5 - 1,
        age=(0.25, None, None, None, None, None),
        straggler=0.125,
    )


def test_tokens_are_old_by_the_version_they_were_sampled_under():
    """Of step 9: 3 tokens of version 6, 2 of version 7; of step 8: 5 of version 0; none of a dropped group."""
    rollouts = [(9, 5, [(0, 6), (3, 7)]), (8, 5, [(0, 0)]), (None, 100, [(0, 0)])]
    lines = [SimpleNamespace(step=step, num_tokens=tokens, versions=spans) for step, tokens, spans in rollouts]
    assert [reading.share_older(lines, k) for k in (1, 2, 3, 8)] == [1.0, 0.8, 0.5, 0.0]
    assert reading.share_older([], 2) == 0.0


def test_another_order_of_prompts_is_noticed(finished):
    with pytest.raises(ValueError, match=r"group 0 of .* not the prompt of that ordinal"):
        reading.read_run(finished, lambda ordinal: len(ANSWERS[ordinal - 1]) + 1)


def test_what_trl_says_becomes_numbers():
    measured = {"ended_s": [3.0, 5.0, 7.0], "rewards": [0.1, 0.2, 0.3], "completions_per_step": 8, "accuracy": 0.5}
    found = reading.read_trl(measured)
    assert (found.completions_per_s, found.accuracy, found.trainer_idle) == (4.0, 0.5, None)
    assert (found.discarded, found.staleness_max, found.length_bias, found.longest_trained) == (0, 0, 0, 1)


# Verdicts


def three(**values) -> list[Seen]:
    """Three seeds that differ a little in all that is measured in seconds."""
    base = seen(**values)
    return [
        replace(
            base,
            completions_per_s=base.completions_per_s * scale,
            ended_s=tuple(second * scale for second in base.ended_s),
        )
        for scale in (0.98, 1.0, 1.02)
    ]


def everyone(**others) -> Found:
    found = {name: three() for name in CONTENDERS}
    found |= {
        "trl_grpo": three(ended_s=tuple(3.0 * second for second in range(1, 11))),
        "ours": three(staleness_max=K),
        "drop_stale": three(
            completions_per_s=150.0, discarded=0.3, length_bias=-0.1, longest_trained=0.4, discarded_length=0.5
        ),
        "sync": three(completions_per_s=50.0),
        "ours_k8": three(completions_per_s=140.0),
        "drain": three(completions_per_s=99.0),
        "re_prefill": three(completions_per_s=120.0),
        "areal": three(staleness_max=K + 1),
        "sample_budget": three(staleness_max=K),
    }
    return Found(found | others, "1.16.0")


def told(found: Found) -> dict[str, bool | None]:
    return {verdict.claim: verdict.holds for verdict in verdicts(found)}


def test_every_rule_says_yes_no_or_neither():
    found = told(everyone())
    assert found == {
        "Slipstream learns sooner than TRL, GRPO": True,
        "Slipstream learns sooner than TRL, RLOO": None,
        f"Slipstream trains no token staler than k = {K}, discards nothing, and leaves no length out": True,
        SLOWER["sync"][0]: True,
        SLOWER["one_step"][0]: None,
        SLOWER["drain"][0]: None,
        SLOWER["re_prefill"][0]: False,
        "A hard bound costs pace where tails are heavy: dropping stale groups has a higher pace": True,
        "Dropping stale groups discards work, long answers first": True,
        "Room for the tail recovers this pace: k = 8 has a higher pace than k = 2": True,
        UNBOUNDED["areal"][0]: True,
        UNBOUNDED["sample_budget"][0]: False,
        UNBOUNDED["finish_order"][0]: False,
        "None of the policies learns less than synchronous in as many steps (accuracy, margin 0.02)": True,
    }


def test_how_much_sooner_is_told():
    first = verdicts(everyone())[0]
    assert first.found == "reward 0.9 after 8.0 (0.2) s, TRL, GRPO after 24.0 (0.5) s: 3.0 times"


@pytest.mark.parametrize(
    "broken", [{"staleness_max": K + 1}, {"discarded": 0.01}, {"length_bias": 0.01}, {"longest_trained": 0.9}]
)
def test_one_broken_promise_in_one_run_is_a_no(broken):
    ours = three(staleness_max=K)
    ours[1] = replace(ours[1], **broken)
    assert (
        told(everyone(ours=ours))[
            f"Slipstream trains no token staler than k = {K}, discards nothing, and leaves no length out"
        ]
        is False
    )


@pytest.mark.parametrize(("longer", "found"), [(None, "50 (0) %"), (-0.5, "17 (50) %")])
def test_dropping_must_cost_the_long_in_every_run(longer, found):
    runs_of = three(discarded=0.3, discarded_length=0.5)
    runs_of[2] = replace(runs_of[2], discarded_length=longer)
    verdict = next(one for one in verdicts(everyone(drop_stale=runs_of)) if one.claim.startswith("Dropping"))
    assert verdict.holds is False
    assert verdict.found == f"discarded 30.0 (0.0) % of the tokens, {found} longer than the trained answers"
    nothing = three(discarded=0.0)
    verdict = next(one for one in verdicts(everyone(drop_stale=nothing)) if one.claim.startswith("Dropping"))
    assert (verdict.holds, verdict.found) == (False, "discarded 0.0 (0.0) % of the tokens")


def test_runs_that_never_learn():
    """Theirs count with all they took, which can only help them, and is no end; of ours nothing can be said."""
    never = (0.1,) * 10
    trl = three(rewards=never, ended_s=tuple(3.0 * second for second in range(1, 11)))
    first = verdicts(everyone(trl_grpo=trl))[0]
    assert first.holds is True
    assert first.found.endswith("after at least 30.0 (0.6) s (3 of 3 never got there): 3.8 times")
    short = three(ended_s=tuple(0.1 * second for second in range(1, 11)))
    assert verdicts(everyone(trl_grpo=short))[0].holds is False
    short[0] = replace(short[0], rewards=never)
    assert verdicts(everyone(trl_grpo=short))[0].holds is None
    ours = three()
    ours[0] = replace(ours[0], rewards=never)
    assert verdicts(everyone(ours=ours))[0].holds is None


def test_nothing_is_as_good_as_what_learned_nothing():
    sync = three(completions_per_s=50.0)
    assert verdicts(everyone(sync=[*sync[:2], replace(sync[2], before=0.91)]))[-1].holds is None


def test_a_policy_that_learns_less_is_named():
    last = verdicts(everyone(finish_order=[seen(accuracy=value) for value in (0.70, 0.71, 0.72)]))[-1]
    assert last.holds is False
    assert last.found == "synchronous 0.950 (0.000); the least: finish order, queue of k P, 0.710 (0.010)"


@pytest.mark.parametrize(("accuracies", "holds"), [((0.90, 0.95, 0.99), True), ((0.84, 0.93, 0.96), None)])
def test_noise_is_no_difference(accuracies, holds):
    found = everyone(areal=[seen(accuracy=value, staleness_max=K + 1) for value in accuracies])
    assert verdicts(found)[-1].holds is holds


# What is said without TRL


def without_trl() -> Found:
    return Found({name: runs_of for name, runs_of in everyone().seen.items() if not CONTENDERS[name].trl}, None)


def said(found: Found, monkeypatch) -> str:
    monkeypatch.setattr(experiment, "find", lambda lab, scale: found)
    section = experiment.section(None)
    assert isinstance(section, Section)
    return render("peers", section)


def test_trl_is_never_left_out_in_silence(monkeypatch, undrawn):
    text = said(without_trl(), monkeypatch)
    assert text.count(NOT_THERE) == 4  # the setup, two verdicts, a note
    assert "| TRL, GRPO | TRL |" not in text
    assert NOT_THERE not in said(everyone(), monkeypatch)


def test_the_tables_have_everybody(monkeypatch, undrawn):
    text = said(everyone(), monkeypatch)
    for contender in CONTENDERS.values():
        assert f"| {contender.title} | {contender.whose} | " in text
    assert "| TRL, GRPO | TRL | 100 (2) | 24.0 (0.5) | 8 (0) | 0.950 (0.000) | 10 (0) |" in text
    assert "| drop stale groups | 30.0 (0.0) | 0.0 (0.0) | 0.0 (0.0) | 0.00 (0.00) | 0 | -10.0 (0.0) | 40 (0) |" in text


def test_seeds_that_never_learned_are_counted():
    assert experiment._reached([1.0, None, 2.0], 1) == "1.5 (0.5), 2 of 3"
    assert experiment._reached([None, None], 1) == "never"


def test_the_figure_is_the_same_for_the_same_numbers():
    found = everyone().seen
    figure = experiment.figure(found)
    assert experiment.figure(found) == figure
    assert figure.startswith("<?xml")


def test_the_curve_is_of_whole_windows_and_of_short_runs_at_all():
    runs_of = [seen(), seen(ended_s=tuple(range(11, 21)))]
    assert experiment._curve(runs_of) == (
        [10.0, 15.0],
        [[pytest.approx(0.52)] * 2, [pytest.approx(0.94)] * 2],
    )
    short = [seen(rewards=(0.25, 0.5), ended_s=(1.0, 3.0))]
    assert experiment._curve(short) == ([3.0], [[0.375]])
    assert experiment.figure({"ours": short}).startswith("<?xml")


# How runs are made


class Recorded(Lab):
    """Makes nothing, and tells what it was asked for."""

    def __init__(self, folder):
        self.lines: list[str] = []
        super().__init__(folder, say=self.lines.append)
        self.asked: list[str] = []

    def run(self, spec):
        self.asked.append(spec.name)
        return self.place(spec)

    def measure(self, name, function, **parameters):
        self.asked.append(name)
        return {"ended_s": [1.0, 2.0], "rewards": [0.0, 0.0], "completions_per_step": 128, "accuracy": 0.5}


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "read_run", lambda run, length_of: seen(accuracy=float(length_of(0))))
    return Recorded(tmp_path)


def test_seeds_are_outside_and_everybody_has_a_turn_at_the_start(lab, monkeypatch):
    monkeypatch.setattr(runs, "trl_version", lambda python: "1.16.0")
    found = runs.find(lab, Scale(names=("trl_grpo", "sync", "ours"), seeds=(0, 1, 2), steps=2))
    first, *rest = lab.asked
    assert first == "peers checkpoint"
    assert [name.removeprefix("peers ") for name in rest] == [
        *("trl_grpo 0", "sync 0", "ours 0"),
        *("sync 1", "ours 1", "trl_grpo 1"),
        *("ours 2", "trl_grpo 2", "sync 2"),
    ]
    assert {name: len(own) for name, own in found.seen.items()} == {"trl_grpo": 3, "sync": 3, "ours": 3}
    assert list(found.seen) == ["trl_grpo", "sync", "ours"]
    assert found.seen["sync"] == found.seen["ours"]  # a seed has the same prompts for all


def test_without_trl_the_rest_is_run_and_it_is_said(lab, monkeypatch):
    monkeypatch.setattr(runs, "trl_version", lambda python: None)
    found = runs.find(lab, Scale(names=("trl_grpo", "ours"), seeds=(0,), steps=2))
    assert (list(found.seen), found.trl) == (["ours"], None)
    assert lab.lines == ["peers trl_grpo 0: left out, TRL is not installed"]


def test_trl_is_called_with_flags_it_has(tmp_path, monkeypatch):
    start = runs.checkpoint(Path("train"), Path("held"), {})
    config = runs.contest("trl_grpo", CONTENDERS["trl_grpo"], 1, start, Path("model"), 80).config()
    options = {}

    def call(python, **given):
        options.update(given)
        return {"curve": {"ended_s": [1.0], "rewards": [0.5]}}

    monkeypatch.setattr(runs, "call_trl", call)
    monkeypatch.setattr(
        "slipstream.evals.evaluate.evaluate_model", lambda path, recipe: SimpleNamespace(sampled_accuracy=0.75)
    )
    found = runs.measure_trl(trainer="rloo", config=config.model_dump(mode="json", exclude_none=True), version="1.16.0")
    assert (found["ended_s"], found["accuracy"], found["completions_per_step"]) == ([1.0], 0.75, 128)
    assert (options["completions"], options["completions_per_prompt"], options["seed"]) == (128, 8, 1)
    assert (options["trainer"], options["reward"], options["lr"]) == ("rloo", "exact", 1e-4)
    assert options["steps"] + options["warm_up"] == 80
    source = (ROOT / "benchmarks" / "trl_baseline.py").read_text(encoding="utf-8")
    flags = {name.replace("-", "_") for name in re.findall(r'add_argument\("--([a-z-]+)"', source)}
    assert options.keys() <= flags


# TRL's environment


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(trl_call, "HERE", tmp_path)
    return tmp_path / "trl_baseline.py"


def test_a_call_passes_options_and_returns_what_was_measured(script):
    script.write_text(
        "import json, pathlib, sys\n"
        "out = sys.argv[sys.argv.index('--out') + 1]\n"
        "pathlib.Path(out).write_text(json.dumps(sys.argv[3:]))\n"
    )
    measured = trl_call.call_trl(Path(sys.executable), max_new_tokens=16, model=Path("somewhere"))
    assert measured == ["--max-new-tokens", "16", "--model", "somewhere"]


def test_a_call_that_fails_says_why(script):
    script.write_text("raise SystemExit('no such model')\n")
    with pytest.raises(trl_call.TrlFailed, match="TRL ended with 1:\nno such model"):
        trl_call.call_trl(Path(sys.executable))


def test_a_call_that_hangs_ends(script, monkeypatch):
    script.write_text("import signal\nsignal.pause()\n")
    monkeypatch.setattr(trl_call, "DEADLINE_S", 0.2)
    with pytest.raises(trl_call.TrlFailed, match="not done after 0 s"):
        trl_call.call_trl(Path(sys.executable))


def test_a_trl_that_fails_is_a_run_that_fails(lab, monkeypatch):
    """So that the experiments after this one are made all the same."""

    def fail(*_, **__):
        raise trl_call.TrlFailed("no memory")

    monkeypatch.setattr(runs, "trl_version", lambda python: "1.16.0")
    monkeypatch.setattr(lab, "measure", fail)
    with pytest.raises(RunFailed, match="peers trl_grpo 0: no memory"):
        runs.find(lab, Scale(names=("trl_grpo",), seeds=(0,), steps=2))


def test_where_there_is_no_trl(tmp_path):
    assert trl_call.trl_version(tmp_path / "python") is None
    python = tmp_path / "env"  # an environment whose installation was cut off
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert trl_call.trl_version(python) is None
    python.write_text("#!/bin/sh\necho 1.16.0\n")
    assert trl_call.trl_version(python) == "1.16.0"


# The whole of it


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_contender_runs(tmp_path):
    """Three small steps of each; TRL where it is installed."""
    small = {"groups_per_step": 4, "completions_per_group": 4, "sft": {"steps": 20}, "eval": {"num_prompts": 8}}
    scale = Scale(seeds=(0,), steps=3, overrides=small)
    lab = Lab(tmp_path)
    section = experiment.section(lab, scale)
    assert "| oldest first | Slipstream" in render("peers", section, lab.cost())
    found = runs.find(lab, scale)
    assert found.seen.keys() == {name for name in CONTENDERS if found.trl or CONTENDERS[name].trl is None}
    for one in (own[0] for own in found.seen.values()):
        assert len(one.ended_s) == len(one.rewards) == 3
    assert found.seen["ours"][0].length_bias == 0
