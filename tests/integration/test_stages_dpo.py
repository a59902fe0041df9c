"""The stage `dpo` in chains: on sampled preferences and on data of one's own, evaluated, resumed, refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit import lines
from covering import with_slow
from transformers import AutoModelForCausalLM

import slipstream
import slipstream.stages.dpo as dpo
from slipstream.core.errors import ConfigError
from slipstream.core.sections import ModelConfig
from slipstream.evals.target import served_target
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.scalar import new_scalar_model, save_scalar_model
from slipstream.models.tokenizer import CharTokenizer, char_tokenizer
from slipstream.stages.named import resolve
from slipstream.stages.preference_data import read_pairs

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}a:"
SCALED_DOWN: dict[str, Any] = {
    "host": "inline",
    "model": SMALL,
    "prompts": {"num_train": 200, "num_eval": 30},
    "generator": {"num_slots": 16},
    "sft": {"steps": 150, "batch_size": 32, "num_demonstrations": 200, "optimizer": {"lr": 5e-3}},
    "preferences": {"num_prompts": 60, "held_out": 0.3},
    "dpo": {"batch_size": 32, "epochs": 3, "optimizer": {"lr": 1e-3}},
    "eval": {"num_prompts": 20, "num_slots": 8},
    "evaluation": {"num_prompts": 30},
}


def table(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, slipstream.Result]:
    out = tmp_path_factory.mktemp("dpo_mini") / "run"
    return out, slipstream.run("dpo_mini", overrides=SCALED_DOWN, out=out, display=False)


def test_what_the_chain_leaves(chain: tuple[Path, slipstream.Result]) -> None:
    out, result = chain
    record = table(out / "dpo" / "stage.json")
    lines_of_pairs = lines(out / "preferences" / "preferences.jsonl")
    assert record["num_preferences"] + record["num_held_out"] == len(lines_of_pairs)
    assert record["num_held_out"] == sum(line["is_held_out"] for line in lines_of_pairs) > 0
    assert len(lines(out / "dpo" / "metrics.jsonl")) == record["steps"] == 3 * math.ceil(record["num_preferences"] / 32)
    before, after = (record["held_out"][moment] for moment in ("before", "after"))
    assert (before["accuracy"], before["margin"]) == (0.5, 0.0)
    assert before["loss"] == pytest.approx(math.log(2))
    assert after["margin"] != 0.0
    assert record["train_accuracy"] > 0.6
    assert record["last_loss"] < record["first_loss"] - 0.01
    AutoModelForCausalLM.from_pretrained(out / "dpo" / "model")
    assert served_target(out).folder == out / "dpo" / "model"
    evaluation = table(out / "evaluation.json")
    assert (result.status, result.summary["evaluation"]) == ("done", evaluation)
    assert evaluation["checkpoints"]["after"] == str(out / "dpo" / "model")
    assert evaluation["before"]["drift"]["kl"]["per_sequence"]["mean"] == pytest.approx(0.0, abs=1e-4)
    assert abs(evaluation["after"]["drift"]["kl"]["per_sequence"]["mean"]) > 1e-3


def test_its_margin_is_that_of_transformers(chain: tuple[Path, slipstream.Result]) -> None:
    """The checkpoints of both ends, the held-out pairs of the file: beta times the difference of log-ratios."""
    out, _ = chain
    policy, reference = (AutoModelForCausalLM.from_pretrained(out / s / "model").double() for s in ("dpo", "sft"))

    def likelihood(model: Any, prompt: list[int], completion: list[int]) -> float:
        tokens = torch.tensor(prompt + completion)
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        of_targets = logprobs[torch.arange(len(tokens) - 1), tokens[1:]]
        return float(of_targets[len(prompt) - 1 :].sum())

    margins = []
    for line in lines(out / "preferences" / "preferences.jsonl"):
        if line["is_held_out"]:
            gains = [
                likelihood(policy, line["prompt_tokens"], one["tokens"])
                - likelihood(reference, line["prompt_tokens"], one["tokens"])
                for one in line["candidates"]
            ]
            margins.append(0.1 * (gains[line["best"]] - gains[1 - line["best"]]))
    after = table(out / "dpo" / "stage.json")["held_out"]["after"]
    assert after["margin"] == pytest.approx(np.mean(margins), rel=1e-3)
    assert after["accuracy"] == pytest.approx(np.mean(np.array(margins) > 0))
    assert after["loss"] == pytest.approx(np.mean(np.log1p(np.exp(-np.array(margins)))), rel=1e-3)


@pytest.mark.slow
def test_an_interrupted_stage_begins_again_and_a_finished_one_is_left(
    chain: tuple[Path, slipstream.Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after two updates, resumed: the weights of the run that was left alone, bit for bit."""
    real = dpo.dpo_updates

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        for update in real(*args, **kwargs):
            yield update
            if update.index == 1:
                raise KeyboardInterrupt

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(dpo, "dpo_updates", interrupted)
        result = slipstream.run("dpo_mini", overrides=SCALED_DOWN, out=out, display=False)
    assert result.status == "interrupted"
    assert not (out / "dpo" / "stage.json").exists()
    stamps = {path: path.stat().st_mtime_ns for path in (out / "sft").rglob("*")}
    assert slipstream.run("quickstart", resume=out, display=False).status == "done"
    weights = [run / "dpo" / "model" / "model.safetensors" for run in (out, chain[0])]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert {path: path.stat().st_mtime_ns for path in (out / "sft").rglob("*")} == stamps
    assert len(lines(out / "dpo" / "metrics.jsonl")) == table(out / "dpo" / "stage.json")["steps"]


@pytest.mark.parametrize("loss", with_slow(["kto"], ["ipo", "simpo"]))
def test_other_losses_and_rl_behind_them(loss: str, chain: tuple[Path, slipstream.Result], tmp_path: Path) -> None:
    """From the checkpoint and the preferences of the chain; 'stage:dpo' is where RL starts from."""
    tables = {
        "stages": ["dpo", "rl"],
        "steps": 1,
        "groups_per_step": 4,
        "completions_per_group": 4,
        "rewards": {"terms": [{"function": "overlap", "params": {"column": "key", "characters": True}}]},
        "kl": {"coef": 0.1, "reference": "stage:dpo"},
        "model": SMALL | {"path": "stage:dpo"},
        "dpo": SCALED_DOWN["dpo"]
        | {
            "loss": loss,
            "path": str(chain[0] / "sft" / "model"),
            "preferences": str(chain[0] / "preferences" / "preferences.jsonl"),
        },
    }
    overrides = {name: value for name, value in SCALED_DOWN.items() if name not in ("sft", "preferences")} | tables
    if loss != "kto":
        overrides |= {"stages": ["dpo"]}
    result = slipstream.run("dpo_mini", overrides=overrides, out=tmp_path / "run", display=False)
    assert result.status == "done"
    record = table(tmp_path / "run" / "dpo" / "stage.json")
    num_pairs = len(lines(chain[0] / "preferences" / "preferences.jsonl"))
    assert record["num_preferences"] + record["num_held_out"] == (2 if loss == "kto" else 1) * num_pairs
    assert record["last_loss"] < record["first_loss"]
    assert record["train_accuracy"] > 0.55
    if loss == "kto":
        metrics = lines(tmp_path / "run" / "metrics.jsonl")
        first = next(line for line in metrics if "kl_reference_sum" in line)
        assert first["kl_reference_sum"] == pytest.approx(0.0, abs=1e-3)
    else:  # nothing but this stage: its record is the summary's
        summary = table(tmp_path / "run" / "summary.json")
        assert (summary["status"], summary["stages"]) == ("done", {"dpo": record})
        assert f"{record['held_out']['after']['loss']:.3f}" in (tmp_path / "run" / "report.html").read_text()
        slipstream.report(tmp_path / "run", out=tmp_path / "page.html")
    assert "Preferences: accuracy" in (tmp_path / "run" / "report.html").read_text()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy of 64 positions whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = char_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    config = ModelConfig(**SMALL, max_positions=64)
    model = new_model(config, len(tokenizer), 0, eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    save_model(model, folder, tokenizer)
    return folder


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


PLAIN = {"prompt": "q", "chosen": "yes", "rejected": "no"}
FORMS = [
    PLAIN | {"prompt": [user("q")]},
    {"prompt": [user("q")], "chosen": [answer("yes")], "rejected": [answer("no")]},
    {"prompt": [user("q")], "chosen": [user("q"), answer("yes")], "rejected": [user("q"), answer("no")]},
    {"prompt": "q", "chosen": [user("q"), answer("yes")], "rejected": [user("q"), answer("no")]},
    {"chosen": [user("q"), answer("yes")], "rejected": [user("q"), answer("no")]},
]


def tables_of(policy: Path, data: Path, rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "stages": ["dpo"],
        "host": "inline",
        "model": {"path": str(policy)},
        "prompts": {"dataset": str(data), "max_prompt_tokens": 30, "template": "{question}>"},
        "dpo": {"preferences": str(data), "batch_size": 8, "held_out": 0.0} | changes.pop("dpo", {}),
        **changes,
    }


def found_in(tables: dict[str, Any], tmp_path: Path) -> Any:
    return read_pairs(resolve(tables), tmp_path, char_tokenizer_of_chats(), max_positions=64)


def char_tokenizer_of_chats() -> Any:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.mark.slow
def test_texts_and_chats_are_the_same_tokens(policy: Path, tmp_path: Path) -> None:
    tokenizer = char_tokenizer_of_chats()

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    ends = [tokenizer.eos_token_id]
    for row, prompt in [(PLAIN, "q>"), *((form, "u:q\na:") for form in FORMS)]:
        (pair,) = found_in(tables_of(policy, tmp_path / "rows.jsonl", [row]), tmp_path).train
        assert pair.prompt_tokens.tolist() == ids(prompt)
        assert [one.tolist() for one in pair.candidates] == [ids("yes") + ends, ids("no") + ends]
        assert pair.best == 0


def test_an_end_that_the_text_has_is_not_doubled(policy: Path, tmp_path: Path) -> None:
    tokenizer = char_tokenizer_of_chats()
    row = PLAIN | {"chosen": f"yes{tokenizer.eos_token}"}
    (pair,) = found_in(tables_of(policy, tmp_path / "rows.jsonl", [row]), tmp_path).train
    assert [one.tolist().count(tokenizer.eos_token_id) for one in pair.candidates] == [1, 1]


def test_labels_pairs_and_what_is_left_out(policy: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "completion": "good", "label": True},
        {"prompt": "b", "completion": [answer("bad")], "label": False},
        PLAIN,
        PLAIN | {"rejected": "yes"},  # nothing to compare
        PLAIN | {"prompt": "p" * 40},  # too long a prompt
        PLAIN | {"chosen": "y" * 70},  # too long for the model
    ]
    found = found_in(tables_of(policy, tmp_path / "rows.jsonl", rows, dpo={"loss": "kto"}), tmp_path)
    assert [one.rating for one in found.train] == [1.0, 0.0, 1.0, 0.0]
    assert (found.num_equal, found.num_too_long) == (1, 2)
    assert str(found) == "4 to train on, 0 held out, 1 of equal completions dropped, 2 too long"
    cut = tables_of(policy, tmp_path / "rows.jsonl", [PLAIN | {"chosen": "ye.s"}])
    cut["rewards"] = {"truncate_token": char_tokenizer().convert_tokens_to_ids(".")}
    (pair,) = found_in(cut, tmp_path).train
    assert len(pair.candidates[0]) == 3


def test_prompts_are_held_out_whole(policy: Path, tmp_path: Path) -> None:
    rows = [PLAIN | {"prompt": f"q{index // 3}", "rejected": f"no{index}"} for index in range(60)]
    found = found_in(tables_of(policy, tmp_path / "rows.jsonl", rows, dpo={"held_out": 0.25}), tmp_path)
    assert (len(found.train), len(found.held_out)) == (45, 15)
    sides = [{one.prompt_tokens.tobytes() for one in part} for part in (found.train, found.held_out)]
    assert not sides[0] & sides[1]


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ({"prompt": "q", "chosen": "a"}, {}, "line 2 is no preference"),
        ({"question": "q", "chosen": "a", "rejected": "b"}, {}, "line 2 has no column 'prompt'"),
        (PLAIN | {"chosen": [answer("a")]}, {}, "line 2 is no preference"),
        (PLAIN | {"rejected": ""}, {}, "line 2 has an empty completion"),
        ({"chosen": [user("q"), answer("a")], "rejected": [user("p"), answer("b")]}, {}, "from different chats"),
        (
            PLAIN | {"chosen": [user("p"), answer("a")], "rejected": [user("p"), answer("b")]},
            {},
            "not that of its chats",
        ),
        ({"chosen": [user("q")], "rejected": [user("q")]}, {}, "ends with the assistant's answer"),
        ({"prompt": "q", "completion": "a", "label": "good"}, {"loss": "kto"}, "line 2 has no label"),
    ],
)
def test_rows_that_are_no_preferences(
    row: dict[str, Any], changes: dict[str, Any], message: str, policy: Path, tmp_path: Path
) -> None:
    """Before anything is left or loaded."""
    tables = tables_of(policy, tmp_path / "rows.jsonl", [PLAIN, row], dpo=changes)
    with pytest.raises(ConfigError, match=message):
        slipstream.run(tables, out=tmp_path / "run", display=False)
    assert not (tmp_path / "run" / "dpo").exists()


@pytest.mark.parametrize("name", ["prompt", "chosen", "rejected"])
def test_a_character_that_a_fresh_model_lacks(name: str, policy: Path, tmp_path: Path) -> None:
    tables = tables_of(policy, tmp_path / "rows.jsonl", [PLAIN, PLAIN | {name: "caf\u00e9"}])
    with pytest.raises(ConfigError, match="not in the alphabet of the fresh model"):
        read_pairs(resolve(tables), tmp_path, CharTokenizer(), max_positions=64)


@pytest.mark.parametrize(("loss", "positions"), [("sigmoid", 40), ("kto", 40), ("kto", 128)])
def test_a_reference_that_reads_fewer_tokens_than_the_policy_or_more(
    loss: str, positions: int, policy: Path, tmp_path: Path
) -> None:
    """Nothing is read behind the positions of either: of a pair, and with KTO of a prompt with another's completion."""
    reference = tmp_path / "reference"
    save_model(new_model(ModelConfig(**SMALL, max_positions=positions), 101, 1), reference, char_tokenizer())
    rows = [PLAIN | {"prompt": "p" * 28}, PLAIN | {"chosen": "y" * 50}, PLAIN | {"chosen": "y" * 34}]
    changes = {"loss": loss, "reference": str(reference), "steps": 1}
    short = {"generator": {"max_new_tokens": 8}}  # of RL, whose completions any reference has to read
    tables = tables_of(policy, tmp_path / "rows.jsonl", rows, dpo=changes) | short
    slipstream.run(tables, out=tmp_path / "run", display=False)
    record = table(tmp_path / "run" / "dpo" / "stage.json")
    num_fitting = 2 if positions == 40 else 3
    assert record["num_too_long"] == 3 - num_fitting
    assert record["num_preferences"] == num_fitting * (2 if loss == "kto" else 1)

    tables = tables_of(policy, tmp_path / "rows.jsonl", rows[1:2], dpo={"reference": str(reference)}) | short
    if positions == 40:
        with pytest.raises(ConfigError, match="1 too long"):
            slipstream.run(tables, out=tmp_path / "none", display=False)
        assert not (tmp_path / "none" / "dpo").exists(), "before the stage began"


@pytest.mark.parametrize(("gold", "proxy", "num_compared", "bound"), [(40, 40, 3, {}), (160, 40, 4, {"at_least": 0.0})])
def test_a_reference_answer_that_a_model_cannot_read_counts_nowhere(
    policy: Path, tmp_path: Path, gold: int, proxy: int, num_compared: int, bound: dict[str, float]
) -> None:
    for name, positions in (("gold", gold), ("judge", proxy)):
        config = ModelConfig(**SMALL, max_positions=positions)
        judge = new_scalar_model(new_model(config, 101, 1), head_init="reward", seed=1)
        save_scalar_model(judge, tmp_path / name, char_tokenizer())
    rows = [PLAIN | {"prompt": f"q{index}"} for index in range(4)]
    questions = [{"prompt": f"{index}", "answer": "yes" + "!" * (50 * (index == 2))} for index in range(6)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    tables = tables_of(policy, tmp_path / "rows.jsonl", rows, dpo={"steps": 1})
    tables |= {
        "stages": ["dpo", "evaluate"],
        "prompts": {
            "dataset": str(tmp_path / "held_out.jsonl"),
            "num_eval": 4,
            "max_prompt_tokens": 8,
            "template": "{question}>",
        },
        "generator": {"max_new_tokens": 8, "num_slots": 8},
        "eval": {"num_prompts": 4, "num_slots": 8},
        "evaluation": {"num_prompts": 4},
        "gold": {"models": [{"path": str(tmp_path / "gold"), "name": "gold"}]},
        "rewards": {
            "terms": [{"function": "exact_match"}],
            "models": [{"path": str(tmp_path / "judge"), "name": "judge", **bound}],
        },
    }
    found = slipstream.run(tables, out=tmp_path / "run", display=False).summary["evaluation"]
    assert [found[name]["num_failed"] for name in ("references", "before", "after")] == [1, 0, 0]
    assert found["after"]["gold"]["win_rate"]["count"] == num_compared
    assert math.isfinite(found["references"]["reward_models"]["judge"])


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([PLAIN | {"rejected": "yes"}], {}, "1 of equal completions dropped"),
        ([PLAIN | {"prompt": "p" * 40}], {}, "1 too long"),
        ([PLAIN], {"held_out": 1.0}, "no preferences to train on"),
        ([{"prompt": p, "completion": "a", "label": True} for p in "abc"], {"loss": "kto"}, "3 desirable of 3"),
        ([PLAIN, PLAIN | {"chosen": "c"}], {"loss": "kto"}, "one prompt alone"),
    ],
)
def test_data_that_leaves_nothing_to_learn(
    rows: list[dict[str, Any]], changes: dict[str, Any], message: str, policy: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        slipstream.run(
            tables_of(policy, tmp_path / "rows.jsonl", rows, dpo=changes), out=tmp_path / "run", display=False
        )
    assert not (tmp_path / "run" / "dpo").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ["sft", "dpo"]}, "the stage dpo needs preferences"),
        ({"stages": ["rl", "dpo"]}, "stages have one order"),
        ({"reward_model": {"candidates": 4}}, "learns from pairs"),
        ({"model": {"path": "stage:dpo"}}, r"dpo\.path is model\.path where it is not given"),
        ({"model": {"path": "stage:dpo"}, "dpo": {"path": "stage:sft"}}, r"preferences\.path is model\.path"),
        ({"dpo": {"path": "stage:reward_model"}}, r"no stage makes what dpo\.path needs"),
        ({"model": {"path": None}}, "would start from a fresh model"),
        ({"dpo": {"loss": "orpo"}}, r"'dpo\.loss'"),
        ({"dpo": {"loss": "simpo", "reference": "stage:sft"}}, "no reference"),
        ({"dpo": {"path": "nowhere/at/all"}}, r"dpo\.path"),
        ({"dpo": {"preferences": "nowhere.jsonl"}}, "dataset not found"),
    ],
)
def test_chains_that_cannot_work(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        slipstream.run("dpo_mini", overrides=changes, out=tmp_path / "run", display=False)
    assert not (tmp_path / "run").exists()
