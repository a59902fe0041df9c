"""Evaluations of checkpoints that play episodes: those of the run, by path and from Python, and what may go wrong."""

from __future__ import annotations

import asyncio
import json
import zlib
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import slipstream
from slipstream import cli
from slipstream.controller.evaluations import PendingEvaluation, PendingEvaluations
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import save_config
from slipstream.core.sections import ModelConfig
from slipstream.core.service_messages import EvalScored
from slipstream.evals.evaluate import EvalResult, evaluate_model
from slipstream.models.build import build_policy
from slipstream.models.hf import save_model
from slipstream.observe.summary import read_summary
from slipstream.stages.named import check_named, resolve

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
NUM_PROMPTS = 12
SOURCE = '''
import asyncio
import json
import re
import time
import urllib.error
import urllib.request
import zlib


def crc(*parts):
    return zlib.crc32(repr(parts).encode())


class Echo:
    """Goes on for one to three turns; what it says and gives follows from all that was sampled."""

    def reset(self, answer, **columns):
        self.word, self.texts = answer, []
        return "~" + answer[0] if len(answer) % 2 else None

    def step(self, message):
        self.texts.append(message["content"])
        drawn = crc(self.word, *self.texts)
        time.sleep(drawn % 7 / 1000)  # answers come in another order than turns
        return {"messages": f"{drawn % 10}?", "done": drawn % 3 == 0, "reward": drawn % 4 / 3}


class One:
    def reset(self, **columns):
        pass

    def step(self, message):
        return {"messages": "", "done": True, "reward": 1.0}


class Quarter(One):
    def step(self, message):
        return {"messages": "", "done": True, "reward": 0.25}


class Endless(One):
    """Is never done."""

    def step(self, message):
        return {"messages": "?", "done": False, "reward": 1.0}


class Fragile(One):
    """Fails on some rows, whatever is tried; hangs on one. The first and the last row are sound."""

    def reset(self, answer, **columns):
        self.kind = answer
        if answer == "resets":
            raise RuntimeError("no \\x1b[31mboard")

    def step(self, message):
        if self.kind == "breaks":
            raise RuntimeError("lost my notes")
        if self.kind == "hangs":
            time.sleep(600)
        return super().step(message)


class Broken(One):
    def reset(self, **columns):
        raise RuntimeError("no board")


def vowels(prompts, completions, **columns):
    return [sum(text.count(letter) for letter in "aeiou") / 8 for text in completions]


def agent(row, base_url, api_key):
    """Asks for two turns, one after the other."""
    messages = [{"role": "user", "content": row["prompt"]}]
    for question in ("!", None):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        request = urllib.request.Request(
            base_url + "/chat/completions", data=body, headers={"Authorization": "Bearer " + api_key}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            messages.append(json.load(response)["choices"][0]["message"])
        if question is not None:
            messages.append({"role": "user", "content": question})
    return crc(*[message["content"] for message in messages]) % 5 / 4


def limited(row, base_url, api_key):
    """Gives the longest context that is taken, which the refusal of a longer one tells."""
    for text in (row["prompt"], "a" * 200):
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
        request = urllib.request.Request(
            base_url + "/chat/completions", data=body, headers={"Authorization": "Bearer " + api_key}
        )
        try:
            urllib.request.urlopen(request, timeout=60).read()
        except urllib.error.HTTPError as refused:
            return float(re.search(r"at most ([0-9]+) fit", refused.read().decode())[1])
'''


def crc(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `source.py`, and `model`: a policy that nobody has trained."""
    made = tmp_path_factory.mktemp("episodes")
    (made / "source.py").write_text(SOURCE)
    model, tokenizer = build_policy(ModelConfig(**SHAPE, max_positions=128), seed=3)
    save_model(model, made / "model", tokenizer)
    return made


def recipe(environment: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Tables for runs and evaluations: words to spell, turns of at most six letters."""
    return {
        "recipe": "episodes",
        "model": {**SHAPE, "max_positions": 128},
        "prompts": {
            "tasks": [{"name": "spell_backward", "params": {"min_word_len": 3, "max_word_len": 4}}],
            "template": "{word}>",
            "num_train": 64,
            "num_eval": NUM_PROMPTS,
        },
        "generator": {"num_slots": 8, "max_new_tokens": 6},
        "eval": {"num_prompts": NUM_PROMPTS, "num_slots": 4, "every": 0, "measure": "environment"},
        "environment": {"max_turns": 3, "max_episode_tokens": 30, **environment},
        "rewards": {"terms": []},
        **more,
    }


def of_rows(folder: Path, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return [prompts] and [eval] that hold out just these rows."""
    held_out = folder / f"{name}.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = folder / f"{name}_training.jsonl"
    training.write_text('{"prompt": "xyz>", "answer": "a"}\n')
    prompts = {"dataset": str(training), "eval_dataset": str(held_out), "num_eval": len(rows)}
    return {"prompts": prompts, "eval": {"num_prompts": len(rows), "num_slots": 4, "measure": "environment"}}


def finished_run(out: Path, **more: Any) -> tuple[Path, list[PendingEvaluation]]:
    """Return the folder of a run, and its evaluations with their answers, in order."""
    heard: list[PendingEvaluation] = []
    with pytest.MonkeyPatch.context() as patch:
        scored = PendingEvaluations.scored

        def noted(self: PendingEvaluations, message: Any) -> PendingEvaluation | None:
            if (done := scored(self, message)) is not None:
                heard.append(done)
            return done

        patch.setattr(PendingEvaluations, "scored", noted)
        environment = {"class_path": f"{out.parent / 'source.py'}:Echo"}
        terms = {"terms": [{"function": f"{out.parent / 'source.py'}:vowels", "weight": 0.5}], "dry_call": False}
        tables = recipe(environment, rewards=terms, host="inline", groups_per_step=4, completions_per_group=4)
        tables["model"] = {"path": str(out.parent / "model")}
        assert slipstream.run(tables, overrides=more, out=out, display=False).status == "done"
    return out, heard


def told(answers: Any) -> list[tuple[Any, ...]]:
    return [(one.reward, dict(one.reward_parts), one.failure) for one in answers]


Run = tuple[Path, list[PendingEvaluation]]


@pytest.fixture(scope="module")
def trained(folder: Path) -> Run:
    """A run of a step, and of the stage that evaluates what comes of it."""
    stages = {"stages": ["rl", "evaluate"], "evaluation": {"num_prompts": 4, "num_samples": 1}}
    return finished_run(folder / "run", steps=1, trainer={"optimizer": {"lr": 0.01}}, **stages)


@pytest.fixture(scope="module")
def evaluated(trained: Run) -> EvalResult:
    return evaluate_model(trained[0], num_samples=2)


def last(evaluations: list[PendingEvaluation], temperature: float) -> list[EvalScored]:
    """Return the answers of a run's last evaluation, by prompt."""
    answers = [one.answers for one in evaluations if one.temperature == temperature][-1]
    return [answers[ordinal] for ordinal in range(NUM_PROMPTS)]


def test_episodes_are_those_of_the_runs_last_evaluation(trained: Run, evaluated: EvalResult) -> None:
    """The greedy ones, and the first of the samples: the others are more of them."""
    run_dir, evaluations = trained
    greedy, sampled = last(evaluations, 0.0), last(evaluations, 1.0)
    assert told(evaluated.greedy_answers) == told(greedy)
    assert [one.text for one in evaluated.greedy_answers] == [one.completion_text for one in greedy]
    first = [one for one in evaluated.answers[NUM_PROMPTS:] if one.sample == 0]
    assert told(first) == told(sampled)
    assert len({one.reward for one in greedy + sampled}) > 6, "rewards that tell episodes apart"
    assert all(set(one.reward_parts) == {"environment", "vowels"} for one in greedy)
    of_run = read_summary(run_dir / "summary.json").eval.after
    assert (evaluated.reward, evaluated.accuracy) == (of_run.reward, of_run.accuracy)
    assert evaluated.reward_parts == of_run.reward_parts
    assert 0 < evaluated.sampled_accuracy < 1


def test_a_checkpoint_with_the_recipe_is_the_run(trained: Run, evaluated: EvalResult) -> None:
    """Fewer prompts, and other samples beside them, change no answer."""
    bare = evaluate_model(trained[0] / "model", recipe=trained[0] / "config.toml", num_prompts=4)
    assert bare.greedy_answers == evaluated.greedy_answers[:4]
    assert bare.answers[4:] == evaluated.answers[NUM_PROMPTS : NUM_PROMPTS + 8 : 2]


def test_the_transcript_explains_the_reward(evaluated: EvalResult) -> None:
    """The environment's words and gifts follow from the turns in the transcript: `Echo`, told again."""
    found = evaluated
    for answer in found.answers:
        texts: list[str] = []
        said, gifts = [], []
        for part in answer.episode.turns:
            if part.turn is None:
                said.append(part.text)
            else:
                texts.append(part.text)
                drawn = crc(answer.reference, *texts)
                assert part.reward == pytest.approx(drawn % 4 / 3)
                gifts.append(part.reward)
        drawn = [crc(answer.reference, *texts[: n + 1]) for n in range(len(texts))]
        assert said[-len(texts) :] == [f"{one % 10}?" for one in drawn]
        assert answer.episode.num_turns == len(texts) <= 3
        assert answer.reward_parts["environment"] == pytest.approx(sum(gifts))
        assert answer.episode.is_cut == (drawn[-1] % 3 != 0)
    turns = [answer.episode.num_turns for answer in found.greedy_answers]
    assert found.episodes.num_turns == pytest.approx(sum(turns) / NUM_PROMPTS)


@pytest.mark.slow
def test_the_command_shows_and_writes_episodes(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    assert cli.main(["eval", str(trained[0]), "--num-prompts", "5", "--num-samples", "2", "--out", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 15
    shown = capsys.readouterr().out
    for name in ("accuracy", "reward", "environment", "vowels", "turns", "cut by a limit", "with signal"):
        assert name in shown
    assert f"{sum(one['episode']['num_turns'] for one in lines[:5]) / 5:.3f}" in shown
    assert "assistant (" in shown
    assert "could not be scored" not in shown


@pytest.mark.slow
def test_two_environments_by_column(folder: Path) -> None:
    rows = [
        {"prompt": f"{letter}>", "answer": "a", "game": game} for letter, game in zip("abcdef", "xyyxyy", strict=True)
    ]
    choices = [
        {"name": name, "class_path": f"{folder / 'source.py'}:{of}"} for name, of in (("x", "One"), ("y", "Quarter"))
    ]
    tables = recipe({"choices": choices, "column": "game"}, **of_rows(folder, "games", rows))
    found = evaluate_model(folder / "model", recipe=tables, num_samples=2)
    games = {row["prompt"]: row["game"] for row in rows}
    for answer in found.answers:
        assert answer.episode.environment == games[answer.prompt]
        assert answer.reward == {"x": 1.0, "y": 0.25}[games[answer.prompt]]
    assert found.episodes.rewards == found.sampled_episodes.rewards == {"x": 1.0, "y": 0.25}
    assert found.reward == pytest.approx(0.5)
    assert found.accuracy == pytest.approx(1 / 3)
    rows[2]["game"] = "z"
    with pytest.raises(ConfigError, match="names no environment"):
        evaluate_model(folder / "model", recipe=tables | of_rows(folder, "odd", rows))


async def asking(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """The agent of `source.py`, in this process."""
    scope: dict[str, Any] = {}
    exec(SOURCE, scope)
    return await asyncio.to_thread(scope["agent"], row, base_url, api_key)


def test_an_agent_over_http(folder: Path) -> None:
    tables = recipe({"agent": f"{folder / 'source.py'}:agent"})
    asked: dict[str, Any] = {"num_prompts": 3, "num_samples": 2}
    found = evaluate_model(folder / "model", recipe=tables, **asked)
    for answer in found.answers:
        texts = [part.text for part in answer.episode.turns]
        assert answer.episode.num_turns == 2
        assert [part.turn for part in answer.episode.turns] == [1, None, 2]
        assert answer.reward == crc(answer.prompt, *texts) % 5 / 4
    assert len({answer.reward for answer in found.answers}) > 1
    from_python = evaluate_model(folder / "model", recipe=recipe({}), agent=asking, **asked)
    assert from_python.answers == found.answers


def test_contexts_are_as_long_as_in_the_run(folder: Path, tmp_path: Path) -> None:
    """The longest prompt and an episode's tokens, where nobody limits prompts: training prompts count, too."""
    rows = of_rows(tmp_path, "short", [{"prompt": f"{letter}>", "answer": "a"} for letter in "abcd"])
    Path(rows["prompts"]["dataset"]).write_text('{"prompt": "a word of many letters>", "answer": "a"}\n')
    tables = recipe({"agent": f"{folder / 'source.py'}:limited"}, host="inline", **rows)
    tables |= {"model": {"path": str(folder / "model")}, "loss": {"skip_no_signal": False}}
    few = {"steps": 1, "groups_per_step": 1, "completions_per_group": 2}
    run = slipstream.run(tables, overrides=few, out=tmp_path / "run", display=False)
    assert run.summary["eval"]["after"]["reward"] == len("a word of many letters>") + 30
    assert evaluate_model(run.out).reward == run.summary["eval"]["after"]["reward"]
    assert evaluate_model(folder / "model", recipe=tables).reward == len("a>") + 30, "what it is asked, alone"


PROGRAM = """
import json, os, sys, urllib.request

row = json.loads(sys.stdin.readline())
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": row["prompt"]}]}).encode()
key = "Bearer " + os.environ["OPENAI_API_KEY"]
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"Authorization": key})
urllib.request.urlopen(request, timeout=60).read()
print(json.dumps({"reward": 0.5}))
"""


def test_a_class_and_agents_side_by_side(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    rows = [
        {"prompt": f"{letter}>", "answer": "ab", "game": game}
        for letter, game in zip("abcdefg", "cafcafc", strict=True)
    ]
    choices = [
        {"name": "c", "class": f"{folder / 'source.py'}:Quarter"},
        {"name": "a", "agent": f"{folder / 'source.py'}:agent"},
        {"name": "f", "program": ["python", str(tmp_path / "program.py")]},
    ]
    tables = recipe({"choices": choices, "column": "game"}, **of_rows(folder, "mixed", rows))
    found = evaluate_model(folder / "model", recipe=tables, num_samples=2)
    games = {row["prompt"]: row["game"] for row in rows}
    for answer in found.answers:
        game, texts = games[answer.prompt], [part.text for part in answer.episode.turns]
        assert answer.episode.environment == game
        assert answer.episode.num_turns == {"c": 1, "a": 2, "f": 1}[game]
        assert answer.reward == {"c": 0.25, "f": 0.5}.get(game, crc(answer.prompt, *texts) % 5 / 4)
    assert {*found.episodes.rewards} == {"a", "c", "f"}


def test_several_agents_from_python(folder: Path) -> None:
    async def half(row: dict[str, Any], base_url: str, api_key: str) -> float:
        await asking(row, base_url, api_key)
        return 0.5

    found = evaluate_model(folder / "model", recipe=recipe({}), agent={"a": asking, "half": half}, num_prompts=6)
    assert {answer.episode.environment for answer in found.answers} == {"a", "half"}
    for answer in found.answers:
        texts = [part.text for part in answer.episode.turns]
        expected = {"a": crc(answer.prompt, *texts) % 5 / 4, "half": 0.5}
        assert answer.reward == expected[answer.episode.environment]


def test_an_environment_that_fails_is_counted_and_shown(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"a>": "sound", "b>": "breaks", "c>": "hangs", "d>": "resets", "e>": "sound"}
    rows = [{"prompt": prompt, "answer": kind} for prompt, kind in kinds.items()]
    environment = {"class_path": f"{folder / 'source.py'}:Fragile", "max_restarts": 1, "step_limit_s": 2.0}
    rewards = {"terms": [], "failure_reward": -1.0}
    tables = recipe(environment, **of_rows(folder, "fragile", rows), rewards=rewards)
    save_config(resolve(tables), tmp_path / "recipe.toml")
    out = tmp_path / "answers.jsonl"
    command = ["eval", str(folder / "model"), "--recipe", str(tmp_path / "recipe.toml"), "--out", str(out)]
    assert cli.main(command) == 0
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(one["prompt"] for one in answers) == sorted(2 * list(kinds)), "none is left out"
    for one in answers:
        kind = kinds[one["prompt"]]
        assert (one["reward"], one["is_correct"]) == ((1.0, True) if kind == "sound" else (-1.0, False))
        assert (one["failure"] is None) == (kind == "sound")
        if kind != "sound":
            assert {"breaks": "lost my notes", "hangs": "timed out after 2 s", "resets": "board"}[kind] in one[
                "failure"
            ]
            assert one["episode"]["num_restarts"] >= 1
            assert one["episode"]["num_turns"] == (kind != "resets")
    shown = capsys.readouterr().out
    assert "6 answers could not be scored" in shown
    for reason in ("2 x environment: RuntimeError: lost my notes", "2 x environment: timed out after 2 s"):
        assert reason in shown
    assert "board" in shown
    assert "\x1b[31m" not in shown, "an environment's words steer no terminal"
    assert f"{(2 - 3) / 5:.3f}" in shown, "failed ones count"


class Crowd:
    """Counts the episodes that are open, and is never done."""

    num_open = most = num_made = 0

    def reset(self, **columns: Any) -> None:
        Crowd.num_made += 1
        Crowd.num_open += 1
        Crowd.most = max(Crowd.most, Crowd.num_open)

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"messages": "?", "done": False, "reward": 1.0}

    def close(self) -> None:
        Crowd.num_open -= 1


def test_limits_of_episodes_and_of_their_number(folder: Path) -> None:
    tables = recipe({"dry_run": False}, generator={"num_slots": 8, "max_new_tokens": 6, "stop_at_eos": False})
    found = evaluate_model(folder / "model", recipe=tables, environment=Crowd, num_prompts=8, num_samples=3)
    assert {answer.episode.num_turns for answer in found.answers} == {3}
    assert {answer.num_tokens for answer in found.answers} == {3 * 6 + 2}, "nobody reads what is said last"
    assert all(answer.episode.is_cut and answer.finish_reason == "length" for answer in found.answers)
    assert found.episodes.cut_frac == 1
    assert Crowd.num_made == 4 * 8
    assert 4 < Crowd.most <= 2 * 4, "twice the slots"
    assert Crowd.num_open == 0
    short = tables | {"environment": {"max_turns": 8, "max_episode_tokens": 10, "dry_run": False}}
    found = evaluate_model(folder / "model", recipe=short, environment=Crowd, num_prompts=3)
    assert {(answer.episode.num_turns, answer.num_tokens) for answer in found.answers} == {(2, 10)}


def look(place: int) -> str:
    """Look at a place.

    Args:
        place: Which one.
    """
    return str(place)


def test_tools_and_rewards_from_python(folder: Path) -> None:
    def letters(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    found = evaluate_model(folder / "model", recipe=recipe({}), tools=[look], reward=letters, num_prompts=3)
    assert all(set(answer.reward_parts) == {"letters", "environment"} for answer in found.answers)
    assert all(answer.reward == len(answer.episode.turns[0].text) for answer in found.answers)
    assert found.episodes.num_tool_calls == 0
    with pytest.raises(ConfigError, match="tools give no reward"):
        evaluate_model(folder / "model", recipe=recipe({}), tools=[look])


def test_bad_input_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = recipe({"class_path": f"{folder / 'source.py'}:Broken"})
    with pytest.raises(ConfigError, match="no board"):
        evaluate_model(folder / "model", recipe=broken)
    missing = recipe({"class_path": f"{folder / 'source.py'}:Nowhere"})
    with pytest.raises(ConfigError, match="Nowhere"):
        evaluate_model(folder / "model", recipe=missing)
    with pytest.raises(ConfigError, match="one environment"):
        evaluate_model(folder / "model", recipe=recipe({}), environment=Crowd, agent=asking)
    path = tmp_path / "from_python.toml"
    save_config(slipstream.resolve(recipe({"class_path": "python:Crowd"})), path)
    assert cli.main(["eval", str(folder / "model"), "--recipe", str(path)]) == 2
    assert "which this process does not have" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="so many prompts are not held out"):
        evaluate_model(folder / "model", recipe=recipe({}), environment=Crowd, num_prompts=NUM_PROMPTS + 1)


def test_the_stage_evaluate_plays_episodes(trained: Run) -> None:
    """They are those that the run sampled before its first step and after its last."""
    run_dir, evaluations = trained
    stage: dict[str, Any] = json.loads((run_dir / "evaluation.json").read_text())
    sampled = [[one.answers[ordinal] for ordinal in range(4)] for one in evaluations if one.temperature == 1.0]
    assert len(sampled) == 2
    for moment, answers in zip(("before", "after"), sampled, strict=True):
        found = stage[moment]
        assert found["lengths"]["count"] == len(answers)
        assert 1 <= found["episodes"]["mean_turns"] <= 3
        assert found["episodes"]["num_failed"] == 0
        assert found["gold"]["mean_score"] == pytest.approx(fmean(one.reward for one in answers))
        parts = [one.reward_parts["environment"] for one in answers]
        assert found["episodes"]["mean_reward"] == pytest.approx(fmean(parts))
        assert "win_rate" not in found["gold"], "an episode has no reference"
    assert stage["before"]["drift"]["kl"]["per_token"] == pytest.approx(0, abs=1e-5)
    assert stage["after"]["drift"]["kl"]["per_token"] > 1e-4, "another policy than before"


def test_stages_that_play_no_episodes_are_refused(folder: Path) -> None:
    environment = {"class_path": f"{folder / 'source.py'}:Echo"}
    for more, words in (
        ({"stages": ["preferences", "rl"], "model": {"path": str(folder / "model")}}, "one turn"),
        (
            {
                "stages": ["rl", "evaluate"],
                "model": {"path": str(folder / "model")},
                "evaluation": {"num_prompts": 8},
                "judge": {"function": f"{folder / 'source.py'}:vowels"},
            },
            "judge",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            check_named(resolve(recipe(environment, **more)))
    with pytest.raises(ConfigError, match="process of its own"):
        slipstream.run(
            recipe({}, stages=["rl", "evaluate"], model={"path": str(folder / "model")}, evaluation={"num_prompts": 8}),
            environment=Crowd,
            out=folder / "refused",
            display=False,
        )
