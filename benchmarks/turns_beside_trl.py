"""The third part of `turns.py`: a model that always calls a tool, for Slipstream and TRL with `environment_factory`.

The model is a chain: each token has one follower, with all but certainty, so that both sides sample the same turns: a
few characters, one call of `look`, the end of the turn. Layers are there and cost what they cost, but add nothing to
the stream. No side can end an episode early; it ends after so many turns.
"""

from __future__ import annotations

import json
import os
import statistics
import string
import tempfile
from pathlib import Path
from typing import Any

import torch
from late_environment import MEAN_VARIABLE, Caller
from trl_call import TRL_PYTHON, call_trl

import slipstream
from slipstream.core.run_log import read_metrics
from slipstream.core.sections import ModelConfig
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.tokenizer import char_tokenizer
from slipstream.models.transformer import Transformer

START, END = "<|im_start|>", "<|im_end|>"
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
"""One token, so that a turn is short."""
TEXT = string.ascii_lowercase
"""The characters before the call, in order."""
WIDTH, CERTAIN = 128, 30.0
GROUPS, COMPLETIONS, TURNS, ROWS, WARM_UP = 4, 8, 4, 32, 2
TURN_TOKENS = len(TEXT) + 2
GIVEN_TOKENS = 80  # at most: the template around a result


def chat_template(python: Path = TRL_PYTHON) -> str:
    """Return the template of Qwen3 Instruct as TRL ships it: of one that it does not know it cannot read calls."""
    found = next(python.parent.parent.glob("lib/python*/site-packages/trl/chat_templates/qwen3_instruct_2507.jinja"))
    return found.read_text(encoding="utf-8")


def prepare(folder: Path) -> None:
    """Write the model with its tokenizer, and prompts, under `folder`."""
    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": [START]})
    tokenizer.add_tokens([CALL])
    tokenizer.chat_template = chat_template()
    heads = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "max_positions": 2048}
    config = ModelConfig(hidden_size=WIDTH, intermediate_size=3 * WIDTH, tie_embeddings=False, **heads)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = new_model(config, len(tokenizer), 0, eos_token_id=eos, pad_token_id=pad)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("\n", *TEXT, CALL, END)]
    make_chain(model, ids)
    save_model(model, folder / "model", tokenizer)
    rows = [{"prompt": [{"role": "user", "content": f"Look, {i}."}], "answer": ""} for i in range(1024)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@torch.no_grad()
def make_chain(model: Transformer, ids: list[int]) -> None:
    """Set the weights so that each of `ids` is followed by the next one; all else by the last."""
    rows = model.config.vocab_size
    embedding, head = model.embedding.weight, model.head.weight
    embedding.zero_()
    embedding[:, :rows] = torch.eye(rows)
    head.zero_()
    followers = torch.full((rows,), ids[-1])
    followers[torch.tensor(ids[:-1])] = torch.tensor(ids[1:])
    head[followers, torch.arange(rows)] = CERTAIN / WIDTH**0.5  # a norm makes a row of length sqrt(WIDTH)
    for layer in model.layers:
        layer.output.weight.zero_()
        layer.down.weight.zero_()


def measure_ours(mode: dict[str, Any], folder: Path, *, steps: int) -> tuple[float, float]:
    """Return seconds and tokens of a step, sampled and given ones, over the steady steps."""
    tail = int(mode["max_staleness"])
    recipe = {
        "recipe": "bench-turns-tools",
        "steps": WARM_UP + steps + tail,
        "groups_per_step": GROUPS,
        "completions_per_group": COMPLETIONS,
        **mode,
        "model": {"path": str(folder / "model")},
        "prompts": {"dataset": str(folder / "prompts.jsonl"), "num_eval": 8},
        "generator": {"max_new_tokens": TURN_TOKENS, "num_slots": ROWS},
        "rewards": {"terms": []},
        "environment": {"max_turns": TURNS, "max_episode_tokens": TURNS * (TURN_TOKENS + GIVEN_TOKENS)},
        "loss": {"name": "grpo", "skip_no_signal": False},
        "trainer": {"microbatch_tokens": 16384, "optimizer": {"lr": 1e-6}},
        "eval": {"num_prompts": 8, "every": 0},
    }
    out = Path(tempfile.mkdtemp(dir=folder, prefix="run-"))
    slipstream.run(recipe, environment_factory=Caller, out=out, display=False)
    lines = {line["step"]: line for line in read_metrics(out / "metrics.jsonl") if "step_s" in line}
    first, last = WARM_UP - 1, WARM_UP + steps - 1
    tokens = [lines[step]["completion_tokens_mean"] * GROUPS * COMPLETIONS for step in range(first + 1, last + 1)]
    return (lines[last]["wall_s"] - lines[first]["wall_s"]) / steps, statistics.fmean(tokens)


def measure_trl(folder: Path, *, steps: int) -> tuple[float, float]:
    """Return the same of TRL, in its own environment."""
    measured = call_trl(
        model=folder / "model",
        prompts=folder / "prompts.jsonl",
        environment="caller",
        turns=TURNS,
        reward="nothing",
        completions=GROUPS * COMPLETIONS,
        completions_per_prompt=COMPLETIONS,
        max_new_tokens=TURNS * (TURN_TOKENS + GIVEN_TOKENS),
        steps=steps,
        warm_up=WARM_UP,
    )["steps"]
    return (
        statistics.fmean(step["step_s"] for step in measured),
        statistics.fmean(step["tokens"] for step in measured),
    )


def compare(modes: dict[str, dict[str, Any]], mean_s: float, *, rounds: int, steps: int) -> None:
    """All sides in turn, and a table."""
    os.environ[MEAN_VARIABLE] = str(mean_s)
    sides = [*modes, "trl"]
    seen: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder)
        for turn in range(rounds):
            for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
                run = (
                    measure_trl(folder, steps=steps)
                    if side == "trl"
                    else measure_ours(modes[side], folder, steps=steps)
                )
                seen[side].append(run)
                print(
                    f"  round {turn + 1}: {side:<10} {run[0]:.2f} s a step, load {os.getloadavg()[0]:.1f}", flush=True
                )
    print(
        f"\nTools by environment_factory, {mean_s:g} s an answer: {GROUPS} x {COMPLETIONS} episodes of {TURNS} turns "
        f"of {TURN_TOKENS} tokens a step; medians of {rounds}"
    )
    print("| side | s a step | range | times as fast as TRL | tokens of an episode behind its prompt |")
    print("|---|---|---|---|---|")
    for side, runs in seen.items():
        times = [one[0] for one in runs]
        ratio = statistics.median(trl[0] / one[0] for one, trl in zip(runs, seen["trl"], strict=True))
        tokens = statistics.median(one[1] for one in runs) / (GROUPS * COMPLETIONS)
        print(
            f"| {side} | {statistics.median(times):.2f} | {min(times):.2f} .. {max(times):.2f} | {ratio:.2f} "
            f"| {tokens:.0f} |"
        )
