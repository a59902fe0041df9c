"""Bad input, in a table: each line is an error of one screen with a hint, exit code 2, and nothing has happened.

Nothing: no process was started, no weights were read or made, no file was changed, left behind or added. The same text
comes from `slipstream.run`. What can only be found out later is not here.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing.process
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from collections import UserDict
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import tomli_w
import torch
from forked_text import FORKS

import slipstream
from slipstream import cli
from slipstream.controller.nursery import Nursery
from slipstream.controller.policies import schedule_for
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve, save_config
from slipstream.core.sections import ModelConfig
from slipstream.core.training_sections import OptimizerConfig
from slipstream.models.build import build_policy, build_tokenizer
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import save_model
from slipstream.models.transformer import Transformer
from slipstream.observe.summary import (
    Evaluations,
    Prompts,
    Staleness,
    Summary,
    Throughput,
    Versions,
    WeightSync,
    write_summary,
)
from slipstream.trainer.checkpoint import Checkpoints
from slipstream.trainer.checkpoint_folder import crc32
from slipstream.trainer.optim import AdamW

pytestmark = pytest.mark.usefixtures("no_import")

TRIES_TEXT = "slipstream.models.foreign_text"  # processes that a check may start
CALLS_REWARDS = "slipstream.rewards.worker"
IMPORTS = ("slipstream.controller.forking", "bare_nursery")
MAX_LINES, MAX_COLUMNS = 24, 480

MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
BASE: dict[str, Any] = {
    "steps": 2,
    "groups_per_step": 4,
    "completions_per_group": 4,
    "model": {**MODEL, "max_positions": 64},
    "prompts": {"dataset": "data.jsonl", "num_eval": 4, "max_prompt_tokens": 16},
    "generator": {"max_new_tokens": 8, "num_slots": 8},
    "rewards": {"terms": [{"function": "exact_match"}]},
    "eval": {"num_prompts": 4},
}
ROWS = [{"prompt": f"word {i}", "answer": f"drow {i}"} for i in range(40)]


class Started(BaseException):
    """Something began that bad input must not begin. No `except` in between may catch it."""


@dataclass(frozen=True)
class Case:
    """What is given, and words of the error, in their order.

    `tables` go over BASE into recipe.toml; `arguments` are those of `slipstream`; `prepare` makes further files.
    """

    name: str
    words: tuple[str, ...]
    tables: Mapping[str, Any] = field(default_factory=dict)
    arguments: str = "run recipe.toml"
    prepare: Callable[[Path], None] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def wrong(name: str, tables: Mapping[str, Any], *words: str, prepare: Callable[[Path], None] | None = None) -> Case:
    """A recipe that is wrong, or names what is wrong."""
    return Case(name, words, tables, prepare=prepare)


def refused(
    arguments: str, *words: str, prepare: Callable[[Path], None] | None = None, tables: Any = (), **environment: str
) -> Case:
    """A command that is wrong."""
    return Case(arguments, words, dict(tables), arguments, prepare, environment)


def over(base: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `tables` on top, table by table; None takes a key away."""
    merged = dict(base)
    for key, value in tables.items():
        below = merged.get(key)
        merged[key] = over(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return {key: value for key, value in merged.items() if value is not None}


def rows(*records: Any, to: str = "data.jsonl") -> Callable[[Path], None]:
    """A dataset of these; strings are lines as they are."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    return lambda folder: (folder / to).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8") and None


def text(name: str, content: str | bytes, mode: int = 0o644) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(mode)

    return write


def folder_named(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).mkdir(parents=True)


def both(*steps: Callable[[Path], None]) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        for step in steps:
            step(folder)

    return prepare


def change_json(name: str, **changes: Any) -> Callable[[Path], None]:
    """None takes a key away."""

    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(over(json.loads(path.read_text()), changes)))

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut(name: str, size: int) -> Callable[[Path], None]:
    """The file without what is behind its first `size` bytes; negative: without its last."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size]) and None


def header(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Another header of a safetensors file, the bytes behind it as they are."""

    def rewrite(folder: Path) -> None:
        content = (folder / name).read_bytes()
        length = int.from_bytes(content[:8], "little")
        tensors = json.loads(content[8 : 8 + length])
        change(tensors)
        told = json.dumps(tensors).encode()
        (folder / name).write_bytes(len(told).to_bytes(8, "little") + told + content[8 + length :])

    return rewrite


DATASET = {"prompts": {"dataset": "data.jsonl"}}
CHECKPOINT = {"model": {"path": "model"}}
TASKS = {"prompts": {"dataset": None, "num_train": 16, "template": "{word}>", "tasks": [{"name": "spell_backward"}]}}
NAN, INF = float("nan"), float("inf")

FILES = [
    refused("run", "a recipe is needed", "allowed", "quickstart", "hint"),
    refused("run quikstart", "unknown recipe 'quikstart'", "quickstart", "did you mean 'quickstart'"),
    refused("run nowhere.toml", "there is no recipe file 'nowhere.toml'", "hint"),
    refused("run ./recipes/quickstart", "there is no recipe file", "hint"),
    refused("run folder.toml", "'folder.toml'", "a folder", "a file", prepare=folder_named("folder.toml")),
    refused("run empty.toml", "exactly one source of prompts", prepare=text("empty.toml", "")),
    refused("run r.toml", "'r.toml' is not valid TOML", "line 2", prepare=text("r.toml", "steps = 3\nseed = = 4\n")),
    refused("run r.toml", "not valid TOML", "line 1", "hint", prepare=text("r.toml", "max_staleness 3\n")),
    refused("run r.toml", "not valid TOML", "overwrite", prepare=text("r.toml", "steps = 3\nsteps = 4\n")),
    refused("run r.toml", "cannot be read", "UTF-8", "hint", prepare=text("r.toml", "# caf\xe9\n".encode("latin-1"))),
    refused("run r.toml", "cannot be read", "UTF-8", "hint", prepare=text("r.toml", "steps = 3\n".encode("utf-16"))),
    refused("run r.toml", "cannot be read", "byte order mark", prepare=text("r.toml", b"\xef\xbb\xbfsteps = 3\n")),
    refused("run r.toml", "not valid TOML", prepare=text("r.toml", bytes(64))),
    refused("run loop.toml", "'loop.toml'", prepare=lambda folder: (folder / "loop.toml").symlink_to("loop.toml")),
]

FIELDS = [
    wrong("top", {"max_stalness": 0}, "unknown field 'max_stalness'", "did you mean 'max_staleness'?", "allowed"),
    wrong("section", {"generator": {"temprature": 1.0}}, "'temprature'", "did you mean 'temperature'?", "generator"),
    wrong("deep", {"trainer": {"optimizer": {"learning_rate": 1}}}, "'learning_rate'", "trainer.optimizer.lr"),
    wrong("elsewhere", {"temperature": 1.0}, "unknown field", "did you mean 'generator.temperature'?"),
    wrong("in a list", {"rewards": {"terms": [{"function": "math", "wieght": 1}]}}, "'wieght'", "'weight'"),
    wrong("a table", {"genrator": {"num_slots": 8}}, "unknown field 'genrator'", "did you mean 'generator'?"),
    wrong("a field of vllm", {"generator": {"vllm": {"pyton": "x"}}}, "'pyton'", "'python'", "generator.vllm"),
    wrong("two", {"steps": 0, "seed": -1}, "'seed'", "also wrong: steps"),
    wrong("table is a number", {"generator": 3}, "'generator'", "got:     3", "allowed: a table"),
    wrong("number is a table", {"steps": {"n": 3}}, "'steps'", "allowed: an integer"),
    wrong("a model's name", {"model": "Qwen/Qwen3-0.6B"}, "'model'", 'write model.path = "Qwen/', '{"model": {"path":'),
    wrong("a loss's name", {"loss": "gspo"}, "'loss'", "allowed: a table", 'write loss.name = "gspo"'),
    wrong("a reward's name", {"rewards": {"terms": ["math"]}}, "'rewards.terms.0'", 'write { function = "math" }'),
    wrong("number is text", {"steps": "ten"}, "'steps'", "'ten'", "allowed: an integer"),
    wrong("integer is a fraction", {"steps": 2.5}, "'steps'", "2.5", "allowed: an integer"),
    wrong("integer is a boolean", {"steps": True}, "'steps'", "True", "allowed: an integer"),
    wrong("float is a boolean", {"generator": {"temperature": True}}, "'generator.temperature'", "a number"),
    wrong("boolean is text", {"prompts": {"chat": "maybe"}}, "'prompts.chat'", "allowed: true or false"),
    wrong("text is a number", {"prompts": {"template": 3}}, "'prompts.template'", "allowed: a string"),
    wrong("list is text", {"stages": "rl"}, "'stages'", "'rl'", "allowed: a list"),
    wrong("list of tables is text", {"rewards": {"terms": "math"}}, "'rewards.terms'", "allowed: a list"),
    wrong("list of tables holds text", {"rewards": {"terms": ["math"]}}, "'rewards.terms.0'", "allowed: a table"),
    wrong("pair of one", {"trainer": {"optimizer": {"betas": [0.9]}}}, "'trainer.optimizer.betas.1'", "nothing"),
    wrong("pair of three", {"trainer": {"optimizer": {"betas": [0.9, 0.9, 0.9]}}}, "'trainer.optimizer.betas'", "2"),
    wrong("parameters are a list", {"loss": {"params": [1]}}, "'loss.params'", "allowed: a table"),
    wrong("required", {"rewards": {"terms": [{"weight": 1.0}]}}, "'rewards.terms.0.function'", "no default"),
    wrong("date", {"steps": "2026-01-01"}, "'steps'", "2026-01-01"),
]

RANGES = [
    wrong("zero steps", {"steps": 0}, "'steps'", "got:     0", "allowed: > 0", "Training steps"),
    wrong("negative", {"max_staleness": -1}, "'max_staleness'", "-1", "allowed: >= 0"),
    wrong("zero temperature", {"generator": {"temperature": 0.0}}, "'generator.temperature'", ">= 1e-06"),
    wrong("share above one", {"generator": {"top_p": 1.5}}, "'generator.top_p'", "1.5", "<= 1"),
    wrong("beta above one", {"trainer": {"optimizer": {"betas": [0.9, 2]}}}, "betas.1'", "< 1"),
    wrong("nan lr", {"trainer": {"optimizer": {"lr": NAN}}}, "'trainer.optimizer.lr'", "nan", "finite"),
    wrong("inf lr", {"trainer": {"optimizer": {"lr": INF}}}, "'trainer.optimizer.lr'", "inf", "finite"),
    wrong("nan weight", {"rewards": {"terms": [{"function": "math", "weight": NAN}]}}, "weight'", "finite"),
    wrong("inf deadline", {"deadline_s": INF}, "'deadline_s'", "finite"),
    wrong("nan clip", {"critic": {"clip": NAN}}, "'critic.clip'", "> 0"),
    wrong("inf failure reward", {"rewards": {"failure_reward": -INF}}, "failure_reward'", "finite"),
    wrong("huge seed", {"seed": 2**80}, "'seed'", "allowed: <= "),
    wrong("huge model", {"model": {"hidden_size": 2**20, "num_layers": 10**4}}, "memory", "GB", "model.hidden_size"),
    wrong("huge slots", {"generator": {"num_slots": 8 * 10**8}}, "memory", "GB", "generator.num_slots"),
    wrong("enum", {"weight_update": "inflight"}, "'weight_update'", "'in_flight'", "did you mean 'in_flight'?"),
    wrong("enum in a section", {"loss": {"advantages": "gea"}}, "'loss.advantages'", "did you mean 'gae'?"),
    wrong("enum in a list", {"stages": ["sfr", "rl"]}, "'stages.0'", "did you mean 'sft'?"),
    wrong("device", {"trainer": {"device": "gpu"}}, "'trainer.device'", "'cpu'", "'cuda'"),
    wrong("generator device", {"generator": {"device": "cuda:x"}}, "'generator.device'", "'cuda:N'"),
    wrong("other number", {"reward_model": {"candidates": 3}}, "'reward_model.candidates'", "1, 2 or 4"),
]

TWO_REWARD_MODELS = [{"path": "a", "name": "one"}, {"path": "b", "name": "one"}]
CONSTRAINT = [{"function": "exact_match", "at_least": 0.5}]
PUBLISHING = {"publish_every": 4, "max_staleness": 2}
VLLM = {"engine": "vllm"}
GOLD_FROM_STAGE = {"rewards": {"terms": [], "models": [{"path": "stage:reward_model"}]}}
PREFERENCES = {"stages": ["preferences", "reward_model", "rl"]}

CONFLICTS = [  # the schema's, in the order of core/config.py
    wrong("publish_every", PUBLISHING, "publish_every leaves", "publish_every = 4", "1..3", "raise max_staleness"),
    wrong("window", {"reorder_window": 10, "max_staleness": 2}, "reorder_window is too wide", "1..9", "hint"),
    wrong("positions", {"generator": {"max_new_tokens": 60}}, "do not fit the model", "max_positions = 64", "hint"),
    wrong("slots", {"generator": {"num_slots": 12}}, "bit-reproducible", "12", "multiples of 8"),
    wrong("segments", {"generator": {"segment_tokens": 4}}, "in_flight swaps need no cut", "hint"),
    wrong("minibatches", {"trainer": {"minibatches": 5}}, "at least one group", "minibatches = 5", "<="),
    wrong("eval", {"eval": {"num_prompts": 5}}, "more prompts than are held out", "eval.num_prompts = 5"),
    wrong("no column", {"prompts": {"too_long": "shorten"}}, "the column to shorten", "shorten_column = None"),
    wrong("two sources", {"prompts": {"tasks": [{"name": "x"}]}}, "exactly one source", "1 tasks", "[[prompts.tasks]]"),
    wrong("no source", {"prompts": {"dataset": None}}, "exactly one source", "0 tasks"),
    wrong("heads", {"model": {"hidden_size": 17}}, "head sizes do not divide", "hidden_size 17"),
    wrong("key heads", {"model": {"num_heads": 4, "num_kv_heads": 3}}, "head sizes do not divide", "kv heads 3"),
    wrong("ranks", {"trainer": {"ranks": 3, "tensor_parallel": 2}}, "those of one model", "trainer.ranks = 3"),
    wrong(
        "experts in stages",
        {"trainer": {"ranks": 4, "expert_parallel": 2, "pipeline_parallel": 2}},
        "a microbatch and all layers each",
        "trainer.expert_parallel = 2 with trainer.pipeline_parallel = 2",
    ),
    wrong(
        "experts by context",
        {"trainer": {"ranks": 4, "expert_parallel": 2, "context_parallel": 2}},
        "a microbatch and all layers each",
        "allowed: trainer.context_parallel = 1",
    ),
    wrong(
        "expert ranks",
        {"trainer": {"ranks": 6, "expert_parallel": 2, "tensor_parallel": 2}},
        "some of the data-parallel ranks",
        "3 data-parallel ranks",
        "allowed: 1, 3",
    ),
    wrong("inline ranks", {"host": "inline", "trainer": {"ranks": 2}}, "processes of their own", "host = 'process'"),
    wrong(
        "vllm stages",
        {"generator": {**VLLM, "pipeline_parallel": 2}},
        "vLLM divides models by itself",
        "generator.pipeline_parallel = 2 with",
        "pipeline_parallel_size = 2",
    ),
    wrong(
        "vllm ranks",
        {"generator": {**VLLM, "vllm": {"engine_args": {"tensor_parallel_size": 2}}}},
        "whatever the engine is",
        "generator.vllm.engine_args with tensor_parallel_size = 2",
        "without generator.vllm.engine_args.tensor_parallel_size",
        "hint: generator.tensor_parallel = 2",
    ),
    wrong(
        "rows of tasks",
        {"prompts": {"tasks": [{"name": "chain_sum"}], "dataset": None, "identity": "row"}},
        "told apart",
    ),
    wrong("bf16 on a CPU", {"trainer": {"precision": "bfloat16"}}, "in float32", "trainer.device = 'cuda'"),
    wrong("vllm cache", {"generator": {**VLLM, "kv_on_update": "recompute_if_older_than"}}, "all of its cache"),
    wrong("vllm parking", {"generator": {**VLLM, "parked_tokens": 64}}, "prefix cache", "kv_cache_gb"),
    wrong("vllm sets", {"generator": {**VLLM, "keep_sets": True, "top_k": 8}}, "vLLM does not report"),
    wrong("vllm precision", {"generator": {**VLLM, "precision": "int8"}}, "without scales", "'bfloat16'"),
    wrong("vllm seeds", {"generator": {**VLLM, "seeds": "per_replica"}}, "its own noise", "'shared'"),
    wrong("vllm cold", {"generator": {**VLLM, "temperature": 1e-4}}, "no lower temperature", "at least 0.01"),
    wrong(
        "vllm cold evaluation",
        {"generator": VLLM, "eval": {"sets": [{"name": "a"}, {"name": "b", "temperature": 0.005}]}},
        "no lower temperature",
        "or 0 (greedy)",
    ),
    wrong("vllm cuts", {"generator": {**VLLM, "top_p": 0.9, "min_p": 0.1}}, "min_p before top_p", "one of the two"),
    wrong("vllm device", {"generator": {**VLLM, "device": "cuda"}}, "native engine's", "leave it out"),
    wrong("vllm args", {"generator": {"vllm": {"engine_args": {"model": "x"}}}}, "set by Slipstream", "with model"),
    wrong("vllm nan", {"generator": {"vllm": {"engine_args": {"x": NAN}}}}, "engine_args"),
    wrong("cache on a CPU", {"generator": {"kv_cache_gb": 1.0}}, "nothing to bound", "'cuda'"),
    wrong("sets", {"generator": {"keep_sets": True}}, "a bound on their size", "top_k = 0", "1..512"),
    wrong("order", {"stages": ["rl", "sft"]}, "stages have one order", "['rl', 'sft']", "sft, preferences"),
    wrong("no stages", {"stages": []}, "stages have one order", "[]"),
    wrong("twice", {"stages": ["rl", "rl"]}, "stages have one order"),
    wrong("no such stage", {"stages": ["rl"], "model": {"path": "stage:sft"}}, "does not go through", "add 'sft'"),
    wrong("other stage", {"kl": {"reference": "stage:rl"}}, "no stage makes what kl.reference needs", "'stage:sft'"),
    wrong("gold of a stage", {"gold": {"terms": [], "models": [{"path": "stage:reward_model"}]}}, "a folder"),
    wrong("no preferences", {"stages": ["reward_model", "rl"]}, "needs preferences", "reward_model.preferences"),
    wrong("evaluate alone", {"stages": ["sft", "evaluate"]}, "measures what rl has changed"),
    wrong("evaluation", {"stages": ["rl", "evaluate"], "evaluation": {"num_prompts": 9}}, "more prompts than are held"),
    wrong("one candidate", {**PREFERENCES, "reward_model": {"candidates": 1}}, "rates none", "2 or 4"),
    wrong("no judge", {**PREFERENCES, "preferences": {"labels": "judge"}}, "needs a judge", "judge.base_url"),
    wrong(
        "four for a judge",
        {
            **PREFERENCES,
            "preferences": {"labels": "judge"},
            "judge": {"base_url": "http://x/v1"},
            "reward_model": {"candidates": 4},
        },
        "a judge compares two completions",
    ),
    wrong("labelled by itself", {**PREFERENCES, **GOLD_FROM_STAGE}, "labelled by the reward model", "gold.terms"),
    wrong("few samples", {**PREFERENCES, "preferences": {"samples_per_prompt": 1}}, "too few completions", "raise"),
    wrong("parts of nothing", {"loss": {"whiten_parts": 2}}, "nothing to whiten", "whiten_parts = 2"),
    wrong("small parts", {"loss": {"whiten_parts": 4, "whiten_advantages": "batch"}}, "too small to be whitened"),
    wrong("group of one", {"completions_per_group": 1}, "at least two completions", ">= 2", "'gae'"),
    wrong(
        "two normalisations",
        {"loss": {"several_rewards": "normalise_then_sum", "advantages": "group_mean"}},
        "normalised rewards are summed",
    ),
    wrong(
        "adjusted parts",
        {"loss": {"several_rewards": "normalise_then_sum"}, "kl": {"coef": 0.1}},
        "normalised rewards have no sum",
    ),
    wrong("k1 in the loss", {"kl": {"coef": 0.1, "place": "loss"}}, "zero on average", "k2 or k3"),
    wrong("target of nothing", {"kl": {"target": 6.0}}, "needs a start", "kl.coef = 0"),
    wrong("short horizon", {"kl": {"target": 6.0, "coef": 0.1, "horizon": 2.0}}, "whole KL coefficient", "above"),
    wrong("reward for truncation", {"loss": {"truncated": "subtract"}}, "is to lose by it", "< 0"),
    wrong("never ends", {"generator": {"stop_at_eos": False}, "loss": {"truncated": "mask"}}, "none can end", "'keep'"),
    wrong("kl ranks", {"kl": {"ranks": 2}}, "the trainer computes reference logprobs", "kl.executor = 'own'"),
    wrong("kl layers", {"kl": {"tensor_parallel": 2}}, "whole tensor-parallel groups", "kl.ranks = 1"),
    wrong("kl shards", {"kl": {"sharded": True}}, "the trainer computes reference logprobs", "kl.sharded = True"),
    wrong(
        "reference layers",
        {"kl": {"executor": "own", "ranks": 4, "tensor_parallel": 3}},
        "whole tensor-parallel groups",
        "kl.ranks = 4, kl.tensor_parallel = 3",
        "a multiple",
    ),
    wrong(
        "reward models' layers",
        {"rewards": {"model_ranks": 3, "model_tensor_parallel": 2}},
        "whole tensor-parallel groups",
        "rewards.model_ranks = 3, rewards.model_tensor_parallel = 2",
    ),
    wrong("teacher's shards", {"teacher": {"sharded": True}}, "reads the teacher as it trains", "teacher.sharded"),
    wrong(
        "teacher's layers",
        {"teacher": {"executor": "own", "top_k": 4, "ranks": 2, "tensor_parallel": 4}},
        "whole tensor-parallel groups",
        "teacher.tensor_parallel = 4",
    ),
    wrong(
        "divided teacher in vLLM",
        {"teacher": {"executor": "own", "top_k": 4, "engine": "vllm", "ranks": 2, "tensor_parallel": 2}},
        "the native teacher's",
        "teacher.tensor_parallel = 2",
        "tensor_parallel_size",
    ),
    wrong("one name", {"rewards": {"models": TWO_REWARD_MODELS}}, "names of their own", "'one'"),
]

LOSSES_AND_REWARDS = [
    wrong("constraints alone", {"rewards": {"terms": CONSTRAINT}}, "constraints alone are no reward", "rewards.terms"),
    wrong(
        "constraints as gold",
        PREFERENCES | {"gold": {"terms": CONSTRAINT}},
        "constraints alone are no reward",
        "gold.terms",
    ),
    wrong("loss", {"loss": {"name": "grop"}}, "unknown loss 'grop'", "allowed", "did you mean 'grpo'?"),
    wrong("no policy loss", {"loss": {"name": "value"}}, "'value' is not a loss of a policy", "allowed"),
    wrong("loss parameter", {"loss": {"params": {"max_ration": 2.0}}}, "no parameter 'max_ration'", "'max_ratio'"),
    wrong("loss parameter range", {"loss": {"params": {"max_ratio": -2.0}}}, "out of range", "-2", "> 0"),
    wrong("loss parameter nan", {"loss": {"params": {"max_ratio": NAN}}}, "out of range", "nan"),
    wrong("loss parameter text", {"loss": {"params": {"max_ratio": "big"}}}, "out of range", "big"),
    wrong("loss choice", {"loss": {"params": {"mode": "trucate"}}}, "knows no mode 'trucate'", "'truncate'"),
    wrong("select", {"loss": {"name": "best_of_n"}}, "looks at no advantage", "loss.select = 'best'"),
    wrong("decay rate of 1", {"trainer": {"optimizer": {"betas": (0.9, 1.0)}}}, "trainer.optimizer.betas", "< 1"),
    wrong("temperature", {"generator": {"temperature": 1e-9}}, "generator.temperature", "1e-06"),
    wrong("cut samples", {"generator": {"top_k": 8}}, "over the whole vocabulary", "keep_sets = true"),
    wrong(
        "baseline of pairs",
        {"loss": {"name": "online_dpo", "select": "best_and_worst", "advantages": "greedy_baseline"}},
        "no use for a baseline",
    ),
    wrong(
        "vtrace",
        {"loss": {"name": "reinforce", "advantages": "gae"}, "critic": {"vtrace": True}},
        "V-trace leaves the importance ratio",
    ),
    wrong(
        "kl without advantages",
        {"loss": {"name": "best_of_n", "select": "best"}, "kl": {"coef": 0.1}},
        "takes no advantages",
    ),
    wrong("reference for nothing", {"kl": {"executor": "own"}}, "what nobody takes", "kl.coef > 0"),
    wrong("reduction", {"loss": {"name": "gspo", "reduction": "constant"}}, "whole completions", "the default"),
    wrong("critic of sequences", {"loss": {"name": "gspo", "advantages": "gae"}}, "whole completions, a critic's"),
    wrong("reward", {"rewards": {"terms": [{"function": "exact_mach"}]}}, "unknown reward function", "'exact_match'"),
    wrong("no reward", {"rewards": {"terms": []}}, "at least one reward function", "rewards.terms"),
    wrong(
        "reward parameter",
        {"rewards": {"terms": [{"function": "regex", "params": {"patern": "x"}}]}},
        "no parameter 'patern'",
        "did you mean 'pattern'?",
    ),
    wrong("no parameter", {"rewards": {"terms": [{"function": "regex"}]}}, "needs the parameter 'pattern'"),
    wrong(
        "bad pattern",
        {"rewards": {"terms": [{"function": "regex", "params": {"pattern": "("}}]}},
        "pattern of reward",
        "malformed",
    ),
    wrong(
        "parameter type",
        {"rewards": {"terms": [{"function": "length", "params": {"target_tokens": "ten"}}]}},
        "target_tokens",
        "'ten'",
    ),
    wrong("length of nothing", {"rewards": {"terms": [{"function": "length"}]}}, "exactly one of its parameters"),
    wrong("task of a dataset", {"rewards": {"terms": [{"function": "task"}]}}, "needs reasoning-gym tasks"),
    wrong("no module", {"rewards": {"terms": [{"function": "nowhere:f"}]}}, "no module 'nowhere'", "got", "hint"),
    wrong("no file", {"rewards": {"terms": [{"function": "nowhere.py:f"}]}}, "no such file", "nowhere.py"),
    wrong(
        "no function",
        {"rewards": {"terms": [{"function": "mine.py:scoer"}]}},
        "has no function 'scoer'",
        "did you mean 'score'?",
        prepare=text("mine.py", "def score(completions, **columns):\n    return [0.0 for _ in completions]\n"),
    ),
    wrong(
        "not callable",
        {"rewards": {"terms": [{"function": "mine.py:score"}]}},
        "'score'",
        "function",
        prepare=text("mine.py", "score = 3\n"),
    ),
    wrong(
        "wrong signature",
        {"rewards": {"terms": [{"function": "mine.py:score"}]}},
        "'mine.py:score'",
        "score(a, b)",
        "prompts, completions, completion_ids",
        "**columns",
        prepare=text("mine.py", "def score(a, b):\n    return [0.0]\n"),
    ),
    wrong(
        "syntax error",
        {"rewards": {"terms": [{"function": "mine.py:score"}]}},
        "mine.py",
        "line 1",
        "allowed",
        "hint",
        prepare=text("mine.py", "def score(:\n"),
    ),
    wrong(
        "reward fails",
        {"rewards": {"terms": [{"function": "mine.py:score"}]}},
        "a reward fails in a dry call, before the run",
        "ZeroDivisionError: division by zero (mine.py, line 3)",
        "the prompt was 'word ",
        "one finite number or None for each completion",
        "rewards.dry_call = false",
        prepare=text(
            "mine.py", "def score(completions, **columns):\n    x = 0\n    return [1 / x for _ in completions]\n"
        ),
    ),
    wrong(
        "reward of no such column",
        {"rewards": {"terms": [{"function": "mine.py:score"}]}},
        "data.jsonl, line 1 has no column 'solution', which reward 'mine.py:score' (mine.py, line 1) needs",
        "answer, prompt",
        "a parameter with a default",
        prepare=text("mine.py", "def score(*, completions, solution, **columns):\n    return [0.0]\n"),
    ),
    wrong(
        "reward of no such module",
        {"rewards": {"terms": [{"function": "mine.py:score"}]}},
        "the reward functions cannot be set up",
        "got:",
        "No module named 'nowhere' (mine.py, line 1)",
        "allowed:",
        "hint:    is it installed",
        prepare=text("mine.py", "import nowhere\ndef score(completions, **columns):\n    return [0.0]\n"),
    ),
    wrong(
        "reward over the network",
        {"rewards": {"terms": [{"function": "mine.py:score"}]}},
        "a reward fails in a dry call, before the run",
        "rewards have no network: set network = true of the term, or rewards.allow_network = true",
        prepare=text(
            "mine.py",
            "import urllib.request\ndef score(completions, **columns):\n"
            "    return [float(urllib.request.urlopen('http://127.0.0.1:9').read())]\n",
        ),
    ),
    wrong(
        "gold fails",
        {**PREFERENCES, "gold": {"terms": [{"function": "mine.py:score"}]}},
        "a reward fails in a dry call, before the run",
        "KeyError: 'solution' (mine.py, line 2)",
        prepare=text("mine.py", "def score(completions, **columns):\n    return columns['solution']\n"),
    ),
    wrong(
        "reward from nowhere",
        {"rewards": {"terms": [{"function": "python:accuracy"}]}},
        "the reward 'accuracy' is a Python function",
        "slipstream.run(..., reward=...)",
    ),
    wrong(
        "network for what evaluates text",
        {"rewards": {"terms": [{"function": "math"}], "allow_network": True}},
        "'math' evaluates model text",
        "allow_network = true",
    ),
    wrong("variable", {"rewards": {"environment": ["A=B"]}}, "no environment variable has such a name", "'A=B'"),
    wrong(
        "built-in of groups",
        {"rewards": {"terms": [{"function": "exact_match", "per": "group"}]}},
        "'exact_match' scores each completion by itself",
    ),
    wrong(
        "group too large",
        {"completions_per_group": 5000, "rewards": {"terms": [{"function": "mine.py:score", "per": "group"}]}},
        "a worker's answer for a group is too large",
        "at most 4,096",
    ),
    wrong("parameters of ours", {"rewards": {"terms": [{"function": "a:b", "params": {"x": 1}}]}}, "are for built-in"),
    wrong(
        "no reward model", {"rewards": {"models": [{"path": "nowhere"}]}}, "no reward model", "nowhere", "config.json"
    ),
    wrong("headless", {"rewards": {"models": [{"path": "model"}]}}, "no scalar head", "score.weight"),
    wrong(
        "judge address",
        {**PREFERENCES, "preferences": {"labels": "judge"}, "judge": {"base_url": "localhost:8000"}},
        "bare address",
        "http://",
    ),
    wrong(
        "judge key",
        {
            **PREFERENCES,
            "preferences": {"labels": "judge"},
            "judge": {"base_url": "http://localhost:1/v1", "api_key_env": "NO_SUCH_KEY"},
        },
        "API key is missing",
        "NO_SUCH_KEY",
    ),
    wrong(
        "two judges",
        {
            **PREFERENCES,
            "preferences": {"labels": "judge"},
            "judge": {"base_url": "http://localhost:1/v1", "function": "a.py:b"},
        },
        "a judge is a function or an endpoint",
    ),
    wrong(
        "judge function",
        {**PREFERENCES, "preferences": {"labels": "judge"}, "judge": {"function": "nowhere:judge"}},
        "'nowhere'",
    ),
]

W = "model/model.safetensors"


def no_eos(folder: Path) -> None:
    """The tokenizer and the model without an end-of-sequence token."""
    path = folder / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "eos_token"}))
    for name in ("config.json", "generation_config.json"):
        change_json(f"model/{name}", eos_token_id=None)(folder)


def another_vocabulary(folder: Path) -> None:
    """A tokenizer with more tokens than the model has rows."""
    build_tokenizer(ModelConfig(alphabet="".join(map(chr, range(32, 600))))).save_pretrained(folder / "model")


def moved(folder: Path) -> None:
    shutil.copytree(folder / "model", folder / "other")
    build_tokenizer(ModelConfig(alphabet="zyx")).save_pretrained(folder / "other")


def sharded(folder: Path) -> None:
    (folder / W).rename(folder / "model" / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))


def resized(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"]["shape"] = [4, 4]


def renamed(tensors: dict[str, Any]) -> None:
    tensors["model.layers.7.extra"] = tensors.pop("model.norm.weight")


CHECKPOINTS = [
    wrong("no folder", {"model": {"path": "nowhere"}}, "'model.path' is no Hugging Face checkpoint", "nowhere", "hint"),
    wrong("no config", CHECKPOINT, "'model.path'", "config.json", prepare=remove("model/config.json")),
    wrong("hub id", {"model": {"path": "Qwen/Qwen3-0.6B"}}, "'model.path'", "a folder with config.json"),
    wrong("a file", {"model": {"path": "data.jsonl"}}, "'model.path'", "a folder with config.json"),
    wrong("config is no JSON", CHECKPOINT, "config.json' is not valid JSON", prepare=text("model/config.json", "{")),
    wrong("config is a list", CHECKPOINT, "config.json'", "object", prepare=text("model/config.json", "[]")),
    wrong(
        "config without sizes",
        CHECKPOINT,
        "config.json",
        "num_attention_heads",
        prepare=change_json("model/config.json", num_attention_heads="two"),
    ),
    wrong(
        "family",
        CHECKPOINT,
        "unsupported model family",
        "got:     mamba",
        "qwen3",
        prepare=change_json("model/config.json", model_type="mamba"),
    ),
    wrong(
        "quantised",
        CHECKPOINT,
        "quantized checkpoints are not supported",
        prepare=change_json("model/config.json", quantization_config={"bits": 4}),
    ),
    wrong(
        "rotary",
        CHECKPOINT,
        "rotary",
        "yarn",
        prepare=change_json(
            "model/config.json", rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
        ),
    ),
    wrong("activation", CHECKPOINT, "activation", "mish", prepare=change_json("model/config.json", hidden_act="mish")),
    wrong("no weights", CHECKPOINT, "no weights found", "model.safetensors", prepare=remove(W)),
    wrong(
        "pickled weights",
        CHECKPOINT,
        "no weights found",
        "hint",
        prepare=both(remove(W), text("model/pytorch_model.bin", b"x")),
    ),
    wrong("no shard", CHECKPOINT, "shards", "model-00002-of-00002.safetensors", prepare=sharded),
    wrong(
        "bad index",
        CHECKPOINT,
        "model.safetensors.index.json",
        "weight_map",
        prepare=both(remove(W), text("model/model.safetensors.index.json", "{}")),
    ),
    wrong("empty weights", CHECKPOINT, "not a whole safetensors file", prepare=text(W, b"")),
    wrong("torn header", CHECKPOINT, "not a whole safetensors file", prepare=cut(W, 60)),
    wrong("torn weights", CHECKPOINT, "not a whole safetensors file", "bytes", prepare=cut(W, -5)),
    wrong("no safetensors", CHECKPOINT, "not a whole safetensors file", prepare=text(W, b"PK" + bytes(600))),
    wrong("Git LFS pointer", CHECKPOINT, "Git LFS", prepare=text(W, "version https://git-lfs.github.com/spec/v1\n")),
    wrong("other shapes", CHECKPOINT, "does not fit its config.json", "model.norm.weight", prepare=header(W, resized)),
    wrong(
        "other names",
        CHECKPOINT,
        "does not fit its config.json",
        "unexpected model.layers.7.extra",
        "missing model.norm.weight",
        prepare=header(W, renamed),
    ),
    wrong(
        "other layers",
        CHECKPOINT,
        "does not fit its config.json",
        "more",
        prepare=change_json("model/config.json", num_hidden_layers=4),
    ),
    wrong(
        "no tokenizer",
        CHECKPOINT,
        "no tokenizer found",
        prepare=both(remove("model/tokenizer.json"), remove("model/tokenizer_config.json")),
    ),
    wrong("bad tokenizer", CHECKPOINT, "tokenizer", "cannot be loaded", prepare=text("model/tokenizer.json", "{")),
    wrong("vocabulary", CHECKPOINT, "more tokens than the model", "98", prepare=another_vocabulary),
    wrong("no end", CHECKPOINT, "no token ends a completion", "stop_token_ids", "hint", prepare=no_eos),
    wrong(
        "stop token", {"generator": {"stop_token_ids": [9999]}}, "stop tokens outside the vocabulary", "9999", "0..98"
    ),
    wrong("truncate token", {"rewards": {"truncate_token": 9999}}, "rewards.truncate_token", "9999", "0..98"),
    wrong("no chat template", {"prompts": {"chat": True}}, "a chat template", "without one", "prompts.chat = false"),
    wrong(
        "broken chat template",
        {**CHECKPOINT, "prompts": {"chat": True}},
        "chat template",
        "line 1",
        prepare=change_json("model/tokenizer_config.json", chat_template="{% for m in %}"),
    ),
    wrong(
        "chat template without systems",
        {**CHECKPOINT, "prompts": {"chat": True, "system": "Be brief."}},
        "chat template",
        "no system message",
        prepare=change_json("model/tokenizer_config.json", chat_template="{{ raise_exception('no system message') }}"),
    ),
    wrong("context", {**CHECKPOINT, "generator": {"max_new_tokens": 60}}, "do not fit the model", "64", "hint"),
    wrong("other tokenizer", {"kl": {"coef": 0.1, "reference": "other"}}, "different tokenizers", prepare=moved),
    wrong("no reference", {"kl": {"coef": 0.1, "reference": "nowhere"}}, "no reference policy", "config.json"),
    wrong(
        "torn reference",
        {**CHECKPOINT, "kl": {"coef": 0.1, "reference": "other"}},
        "not a whole safetensors file",
        prepare=both(
            lambda folder: shutil.copytree(folder / "model", folder / "other") and None,
            cut("other/model.safetensors", -9),
        ),
    ),
    wrong(
        "short reference",
        {**CHECKPOINT, "kl": {"coef": 0.1, "reference": "other"}},
        "does not read what the policy writes",
        "at most 8 tokens",
        prepare=both(
            lambda folder: shutil.copytree(folder / "model", folder / "other") and None,
            change_json("other/config.json", max_position_embeddings=8),
        ),
    ),
    wrong(
        "adapter as a critic",
        {**CHECKPOINT, "loss": {"advantages": "gae", "name": "ppo"}, "critic": {"path": "other"}},
        "a head of its own is no adapter",
        "FOLDER --merged",
        prepare=both(
            lambda folder: (folder / "other").mkdir(),
            text("other/adapter_config.json", "{}"),
        ),
    ),
    wrong("critic", {"loss": {"advantages": "gae", "name": "ppo"}, "critic": {"path": "nowhere"}}, "no critic"),
    wrong("alphabet", {"model": {"alphabet": "aab"}}, "distinct characters", "['a']"),
    wrong("sft checkpoint", {"stages": ["sft", "rl"], "sft": {"path": "nowhere"}}, "'sft.path'", "nowhere"),
]
if not torch.cuda.is_available():
    CHECKPOINTS += [
        wrong("no GPU to train on", {"trainer": {"device": "cuda"}}, "a GPU of its own", "0 GPUs", "'cpu'", "doctor"),
        wrong("no GPU to generate on", {"generator": {"device": "cuda:1"}}, "not there", "GPUs found: none", "doctor"),
        wrong("no GPU for SFT", {"stages": ["sft"], "trainer": {"device": "cuda"}}, "a GPU of its own", "0 GPUs"),
    ]
CHECKPOINTS += [
    wrong("no vllm", {"generator": VLLM}, "no environment with vLLM", ".venv-vllm/bin/python", "make vllm-env"),
    wrong("int8 heads", {"generator": {"tensor_parallel": 3}}, "cannot be divided", "3 ranks for 2 heads"),
    wrong(
        "reference's heads",
        {"kl": {"coef": 0.1, "executor": "own", "ranks": 3, "tensor_parallel": 3}},
        "cannot be divided",
        "3 ranks for 2 heads",
    ),
]


DATA = [
    wrong("no file", {"prompts": {"dataset": "nowhere.jsonl"}}, "dataset not found", "nowhere.jsonl", "hint"),
    wrong("other kind", {"prompts": {"dataset": "data.csv"}}, "unknown kind", ".jsonl", prepare=text("data.csv", "a")),
    wrong("empty", {}, "data.jsonl", "no rows", prepare=rows()),
    wrong("blank", {}, "data.jsonl", "no rows", prepare=text("data.jsonl", "\n\n\n")),
    wrong(
        "no JSON", {}, "data.jsonl, line 3 is not JSON", "line 1 column 2", prepare=rows(*ROWS[:2], "{not}", ROWS[3])
    ),
    wrong("an array", {}, "line 1 is not a JSON object", "list", prepare=rows([1, 2])),
    wrong("pretty-printed", {}, "line 1 is not JSON", "one object a line", prepare=text("data.jsonl", "[\n{}\n]")),
    wrong(
        "Latin-1", {}, "data.jsonl", "UTF-8", prepare=text("data.jsonl", '{"prompt": "caf\xe9"}\n'.encode("latin-1"))
    ),
    wrong("no column", {}, "line 3 has no column 'prompt'", "promt", prepare=rows(*ROWS[:2], {"promt": "x"})),
    wrong("column", {"prompts": {"prompt_column": "promt"}}, "no column 'promt'", "did you mean 'prompt'?"),
    wrong("no text", {}, "line 1: the prompt is neither text nor a chat", "int", prepare=rows({"prompt": 3})),
    wrong("empty chat", {}, "neither text nor a chat", prepare=rows({"prompt": []})),
    wrong(
        "bad role",
        {},
        "chat message is malformed",
        "assistant",
        prepare=rows({"prompt": [{"role": "me", "content": "x"}]}),
    ),
    wrong(
        "answered chat",
        {},
        "ends with the assistant's answer",
        prepare=rows({"prompt": [{"role": "assistant", "content": "x"}]}),
    ),
    wrong("one prompt", {}, "enough distinct", "at most 0", "num_eval", prepare=rows(*[ROWS[0]] * 40)),
    wrong("all held out", {"prompts": {"num_eval": 40}}, "enough distinct", "num_eval = 40", "at most 39"),
    wrong("none held out", {"prompts": {"num_eval": 0}}, "'prompts.num_eval'", "> 0"),
    wrong("all too long", {"prompts": {"max_prompt_tokens": 3}}, "max_prompt_tokens", "40", "hint"),
    wrong("training all held out", {"prompts": {"eval_dataset": "data.jsonl", "num_eval": 40}}, "no training prompts"),
    wrong(
        "no answers",
        {},
        "'exact_match'",
        "answer",
        "40",
        "prompts.answer_column",
        prepare=rows(*[{"prompt": r["prompt"]} for r in ROWS]),
    ),
    wrong(
        "one without answer",
        {},
        "'exact_match'",
        "1 of 40",
        "word 7",
        prepare=rows(*ROWS[:7], {"prompt": "word 7"}, *ROWS[8:]),
    ),
    wrong("answer column", {"prompts": {"answer_column": "anser"}}, "'exact_match'", "prompts.answer_column"),
    wrong("template", {"prompts": {"template": "{question"}}, "prompts.template is not a template", "'{question'"),
    wrong(
        "template column",
        {"prompts": {"template": "{word}>"}},
        "does not have",
        "line 1",
        "word",
        "answer, prompt, question",
    ),
    wrong("template format", {"prompts": {"template": "{question:>8}"}}, "not a plain column name"),
    wrong("system", {"prompts": {"system": "Be brief."}}, "needs a chat template", "chat = true"),
    wrong(
        "shorten",
        {"prompts": {"too_long": "shorten", "shorten_column": "pots", "max_prompt_tokens": 5}},
        "no column of the template",
        "pots",
    ),
    wrong(
        "no parquet",
        {"prompts": {"dataset": "data.parquet"}},
        "data.parquet",
        "cannot be read",
        prepare=text("data.parquet", "x"),
    ),
    wrong(
        "empty folder",
        {"prompts": {"dataset": "empty"}},
        "dataset 'empty' cannot be loaded",
        "hint",
        prepare=folder_named("empty"),
    ),
    wrong("eval dataset", {"prompts": {"eval_dataset": "nowhere.jsonl"}}, "dataset not found", "nowhere.jsonl"),
    wrong(
        "small eval dataset",
        {"prompts": {"eval_dataset": "few.jsonl"}},
        "'few.jsonl'",
        "at most 2",
        prepare=rows(*ROWS[:2], to="few.jsonl"),
    ),
    wrong(
        "a token that ends an episode",
        {"environment": {"class_path": "guess", "max_episode_tokens": 16}, "rewards": {"truncate_token": 1}},
        "would end an episode in its first turn",
        "generator.stop_token_ids",
    ),
    wrong(
        "eval dataset of tasks",
        {"prompts": {"dataset": None, "tasks": [{"name": "spell_backward"}], "eval_dataset": "data.jsonl"}},
        "held out from the same tasks",
        "eval.sets",
    ),
    wrong(
        "task",
        {"prompts": {"dataset": None, "tasks": [{"name": "spell_bakward"}]}},
        "unknown task",
        "did you mean 'spell_backward'?",
        "recipes --tasks",
    ),
    wrong(
        "task parameter",
        {"prompts": {"dataset": None, "tasks": [{"name": "spell_backward", "params": {"max_word": 3}}]}},
        "'spell_backward'",
        "max_word",
        "max_word_len",
    ),
    wrong(
        "task value",
        {"prompts": {"dataset": None, "tasks": [{"name": "spell_backward", "params": {"min_word_len": -3}}]}},
        "'spell_backward'",
        "min_word_len",
    ),
    wrong(
        "task value type",
        {"prompts": {"dataset": None, "tasks": [{"name": "spell_backward", "params": {"min_word_len": "x"}}]}},
        "'spell_backward'",
        "min_word_len",
    ),
    wrong(
        "seed of a task",
        {"prompts": {"dataset": None, "tasks": [{"name": "spell_backward", "params": {"seed": 3}}]}},
        "seed cannot be a parameter",
    ),
    wrong(
        "small task",
        {
            "prompts": {
                "dataset": None,
                "num_train": 10**6,
                "tasks": [{"name": "spell_backward", "params": {"max_word_len": 3}}],
            }
        },
        "distinct prompts",
        "1000000",
    ),
    wrong(
        "no demonstrations", {"warm_start": {"steps": 1, "demonstrations": []}}, "at least one kind of demonstration"
    ),
    wrong(
        "demonstration",
        {"warm_start": {"steps": 1, "demonstrations": [{"template": "{wrod}"}]}},
        "data.jsonl, line 1 has no column 'wrod'",
        "demonstrations[0].template = '{answer}'",
    ),
    wrong(
        "sft dataset",
        {"stages": ["sft", "rl"], "sft": {"dataset": "nowhere.jsonl"}},
        "dataset not found",
        "nowhere.jsonl",
    ),
    wrong(
        "sft rows",
        {"stages": ["sft", "rl"], "sft": {"dataset": "sft.jsonl"}},
        "sft.jsonl, line 1",
        "no completion to learn",
        prepare=rows(*ROWS, to="sft.jsonl"),
    ),
    wrong("prompts behind sft", {"stages": ["sft", "rl"]}, "line 1 is not JSON", prepare=text("data.jsonl", "x\n")),
    wrong(
        "preferences",
        {"stages": ["reward_model", "rl"], "reward_model": {"preferences": "nowhere.jsonl"}},
        "nowhere.jsonl",
    ),
    wrong(
        "preference rows",
        {"stages": ["reward_model", "rl"], "reward_model": {"preferences": "data.jsonl"}},
        "data.jsonl, line 1 is no preference",
        "chosen, rejected",
    ),
    wrong(
        "null parameter",
        {"prompts": {"dataset": None, "tasks": [{"name": "spell_backward", "params": {"seed": 1}}]}},
        "seed",
    ),
]


def used(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "notes.txt").write_text("mine")


def renamed(name: str, to: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).rename(folder / to) and None


def complete(folder: Path) -> None:
    shutil.copytree(folder / "model", folder / "run" / "model")
    summary = Summary(
        recipe="recipe",
        seed=0,
        status="done",
        steps=2,
        wall_s=1.0,
        policy_version=2,
        model_params=1,
        eval=Evaluations(),
        throughput=Throughput(0.0, 0.0, 0.0),
        staleness=Staleness(0, 0.0, 2, {}, 0),
        accounting={},
        prompts=Prompts(8, 8, 0, 0, 0, 0, 0, 0),
        weight_sync=WeightSync(0, 0, 0, None, None, None),
        padding_frac=0.0,
        versions=Versions("3.11", "2.13", "1", None),
    )
    write_summary(summary, folder / "run" / "summary.json")


def in_config(old: str, new: str) -> Callable[[Path], None]:
    """The run's saved configuration, changed by hand."""

    def change(folder: Path) -> None:
        path = folder / "run" / "config.toml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))

    return change


def endless(name: str) -> Callable[[Path], None]:
    return both(lambda folder: (folder / name).unlink(missing_ok=True), lambda f: (f / name).symlink_to("/dev/zero"))


def pipe(name: str) -> Callable[[Path], None]:
    return both(lambda folder: (folder / name).unlink(missing_ok=True), lambda folder: os.mkfifo(folder / name))


def admitted(folder: Path) -> None:
    """The checkpoint says that two groups were trained, and the ledger was zeroed."""
    state = folder / STEP / "state.json"
    told = json.loads(state.read_text())
    told["extra"]["schedule"] |= {"next_ordinal": 2, "steps_done": 1}
    state.write_text(json.dumps(told))
    manifest = json.loads((folder / STEP / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"bytes": state.stat().st_size, "crc32": crc32(state)}
    (folder / STEP / "manifest.json").write_text(json.dumps(manifest))
    (folder / "run" / "ledger.jsonl").write_bytes(bytes(500))


def without_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "run" / "checkpoints")


STEP = "run/checkpoints/step_1"
RUNS = [
    refused("run recipe.toml --out out", "not empty", "out", "--resume out", prepare=used),
    refused("run recipe.toml --out out(1)", "--resume 'out(1)'", prepare=both(used, renamed("out", "out(1)"))),
    refused("run recipe.toml --out data.jsonl", "is a file", "data.jsonl", "a new or empty directory"),
    refused("run recipe.toml --out data.jsonl/deeper", "data.jsonl/deeper", "cannot be made", "hint"),
    refused("run recipe.toml --out /proc/nothing", "/proc/nothing", "cannot be made"),
    refused("run recipe.toml --out /sys", "not empty"),
    refused("run recipe.toml --out " + "x" * 300, "'out' cannot be a path", "too long"),
    refused("run recipe.toml --preset sync --max-staleness 1", "contradict", "drop the preset"),
    refused("run recipe.toml --preset synch", "unknown preset 'synch'", "did you mean 'sync'?"),
    refused("run --resume nowhere", "no folder 'nowhere'", "allowed: the folder of a run"),
    refused("run --resume model", "'model' is no run"),
    refused("run --resume data.jsonl", "'data.jsonl' is no run"),
    refused("run --resume run", "the run is already complete", "2 of 2 steps", "hint", prepare=complete),
    refused("run --resume run --seed 5", "keeps its configuration", "got:     seed", "--resume alone, or with steps"),
    refused(
        "run --resume run(1)",
        "--model.path 'run(1)/model'; its page is missing: `slipstream report 'run(1)'`",
        prepare=both(complete, renamed("run", "run(1)")),
    ),
    refused("run --resume run --steps 1", "gone further than that", "at least 2", prepare=complete),
    refused("run --resume run --steps 4", "no checkpoint to go on from", prepare=both(complete, without_checkpoints)),
    refused("run recipe.toml --resume run", "keeps its configuration", "recipe"),
    refused("run --resume run --preset sync --out x", "keeps its configuration", "preset, out"),
    refused("run --resume run", "'run/config.toml' is not valid TOML", prepare=text("run/config.toml", "steps = ")),
    refused("run --resume run", "unknown field 'shell'", prepare=text("run/config.toml", "shell = 'rm -rf /'\n")),
    refused("run --resume run", "'steps'", "-2", prepare=in_config("steps = 2", "steps = -2")),
    refused("run --resume run", "cannot be read", "UTF-8", prepare=text("run/config.toml", b"\xff\xfe")),
    refused("run --resume run", "dataset not found", prepare=in_config("data.jsonl", "gone.jsonl")),
    refused(
        "run --resume run",
        "a reward fails in a dry call, before the run",
        "KeyError: 'solution' (mine.py, line 2)",
        prepare=both(
            in_config('"exact_match"', '"mine.py:score"'),
            text("mine.py", "def score(completions, **columns):\n    return columns['solution']\n"),
        ),
    ),
    refused("run --resume run", "belongs to another model", prepare=in_config("hidden_size = 16", "hidden_size = 32")),
    refused("run --resume run", "step_1", "torn", "rank_00000", prepare=cut(f"{STEP}/rank_00000.safetensors", -1)),
    refused("run --resume run", "step_1", "torn", "state.json", prepare=remove(f"{STEP}/state.json")),
    refused("run --resume run", "step_1", "torn", "manifest", prepare=text(f"{STEP}/manifest.json", "{")),
    refused("run --resume run", "step_1", "unknown format", prepare=change_json(f"{STEP}/manifest.json", format=99)),
    refused("run --resume run", "ledger.jsonl", prepare=remove("run/ledger.jsonl")),
    refused("run --resume run", "does not fit the checkpoint", "no fate for ordinals", prepare=admitted),
    refused("run --resume run", "step_1", "manifest", "a device", prepare=endless(f"{STEP}/manifest.json")),
    refused("run --resume run", "step_1", "manifest", "a pipe", prepare=pipe(f"{STEP}/manifest.json")),
    refused("run --resume run", "step_1", "manifest", prepare=text(f"{STEP}/manifest.json", "[" * 10**5)),
    refused("run --resume run", "step_1", "manifest", "bytes", prepare=text(f"{STEP}/manifest.json", bytes(17 << 20))),
    refused("run --resume run", "step_1", "not its own", "state.json", prepare=endless(f"{STEP}/state.json")),
    refused("run --resume run", "run/events.jsonl", "a device", prepare=endless("run/events.jsonl")),
    refused("run --resume run", "run/rollouts.jsonl", "a pipe", prepare=pipe("run/rollouts.jsonl")),
    refused("run --resume run", "run/ledger.jsonl", "a device", prepare=endless("run/ledger.jsonl")),
    refused("run --resume run", "'run' is no run", "config.toml", prepare=endless("run/config.toml")),
    refused("run --resume run", "'run' is no run", "config.toml", prepare=pipe("run/config.toml")),
    refused("run --resume run", "run/config.toml", "bytes", prepare=text("run/config.toml", bytes(17 << 20))),
    refused("run --resume run", "run/config.toml", "not valid TOML", prepare=text("run/config.toml", bytes(999))),
    refused("run --resume run", "summary.json", "hint", prepare=both(complete, text("run/summary.json", "x"))),
    refused("replay run", "run/events.jsonl", "a device", prepare=endless("run/events.jsonl")),
    refused("replay run", "the log is empty", "cut", prepare=text("run/events.jsonl", bytes(999))),
    refused("report run", "it has no metrics.jsonl", prepare=endless("run/metrics.jsonl")),
    refused("eval", "a model is needed", "allowed"),
    refused("eval nowhere", "no checkpoint in 'nowhere'", "nothing of that name"),
    refused("eval data.jsonl", "no checkpoint in 'data.jsonl'", "a file"),
    refused("eval run", "no checkpoint in 'run'", "without an exported model", "--resume"),
    refused("eval model", "does not say what to ask it", "--recipe"),
    refused("eval model --recipe nowhere.toml", "no recipe file"),
    refused("eval model --recipe recipe.toml --num-samples 0", "at least one sample", ">= 1"),
    refused("eval model --recipe recipe.toml --num-prompts 9", "so many prompts are not held out", "1..4"),
    refused("eval model --recipe recipe.toml --out nowhere/x", "cannot be written there", "an existing folder"),
    refused("eval model --recipe recipe.toml", "not a whole safetensors file", prepare=cut(W, -1)),
    refused("eval model --recipe recipe.toml", "more tokens than the model", prepare=another_vocabulary),
    refused("eval model --recipe recipe.toml", "dataset", prepare=remove("data.jsonl")),
    refused("report", "a run is needed", "folder of a run"),
    refused("report nowhere", "no folder 'nowhere'", "allowed: the folder of a run"),
    refused("report model", "'model' is no run"),
    refused("report run", "config.toml' is not valid TOML", prepare=text("run/config.toml", "=")),
    refused("report run", "summary", prepare=text("run/summary.json", "{}")),
    refused("report run", "metrics.jsonl is damaged", "line 1", prepare=text("run/metrics.jsonl", "x\n{}\n")),
    refused("watch", "the argument RUN is missing", "`slipstream watch --help`"),
    refused("watch data.jsonl", "'data.jsonl' is no folder of a run", "a file"),
    refused("watch run --port 70000", "no such port", "0..65535"),
    refused("watch run --port http", "port"),
    refused("serve", "a model is needed", "allowed"),
    refused("serve nowhere", "no checkpoint in 'nowhere'", "nothing of that name"),
    refused("serve run", "no checkpoint in 'run'", "without an exported model", "--resume"),
    refused("serve model --port 70000", "'port' is out of range", "0..65535"),
    refused("serve model --port http", "port"),
    refused("serve model --slots 0", "'slots' is out of range", "1.."),
    refused("serve model --slots 99999999", "'slots' is out of range"),
    refused("serve model --max-waiting -1", "'max_waiting' is out of range"),
    refused("serve model --max-len 1", "'max_len' is out of range"),
    refused("serve model --port 0 --max-len 65", "no room for such contexts", "2..64"),
    refused("serve model --host 0.0.0.0", "only with an API key", "--api-key NAME"),
    refused("serve model --host a..b", "no such host"),
    refused("serve model --port PORT", "cannot be listened at", "--port"),
    refused("serve model --api-key NOT_SET_HERE", "the API key is missing", "no argument"),
    refused("serve model --template {prompt}", "unknown place", "{content}"),
    refused("serve model --tool-format xml", "unknown format of tool calls 'xml'", "hermes"),
    refused("serve model --port 0", "not a whole safetensors file", prepare=cut(W, -1)),
    refused("serve model --port 0", "more tokens than the model", prepare=another_vocabulary),
]

HUGE = (10**5, 10**9, 10**12)


def huge(path: str, *words: str, values: tuple[float, ...] = HUGE) -> list[Case]:
    """`values` of the field at `path`, through a recipe."""
    cases = []
    for value in values:
        tables: dict[str, Any] = {path.split(".")[-1]: value}
        for section in reversed(path.split(".")[:-1]):
            tables = {section: tables}
        cases.append(wrong(f"{path} = {value:g}", tables, *words, "allowed"))
    return cases


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def pattern(text: str) -> dict[str, Any]:
    return {"rewards": {"terms": [{"function": "exact_match", "params": {"answer_pattern": text}}]}}


def of_row(**columns: Any) -> Callable[[Path], None]:
    """A dataset whose second row has `columns` besides."""
    return rows(ROWS[0], {**ROWS[1], **columns}, *ROWS[2:])


SURROGATE = "half of a surrogate pair"
ABSURD = [
    *huge("groups_per_step", "'groups_per_step'", "allowed: <= 65536"),
    *huge("completions_per_group", "'completions_per_group'"),
    *huge("warm_start.batch_size", "'warm_start.batch_size'"),
    *huge("trainer.epochs", "'trainer.epochs'"),
    *huge("rewards.num_workers", "'rewards.num_workers'"),
    *huge("steps", "'steps'", values=(10**9, 10**12)),
    *huge("model.max_positions", "table of positions", "positions x 8 numbers", "GB", values=(2 * 10**9,)),
    *huge("model.max_positions", "'model.max_positions'", values=(10**12,)),
    *huge("rewards.timeout_s", "'rewards.timeout_s'", values=(1e300, 1e-300)),
    *huge("deadline_s", "'deadline_s'", values=(1e300, 1e-300)),
    *huge("generator.replicas", "more processes than this machine", "processes", values=(60_000,)),
    *huge("rewards.num_workers", "more processes than this machine", "x 3 processes", values=(60_000,)),
    wrong(
        "many updates",
        {"trainer": {"epochs": 1000, "minibatches": 4}, "deadline_s": 1.0},
        "more updates than its deadline has time for",
        "trainer.epochs = 1000 x trainer.minibatches = 4",
        "= 4 s",
        "deadline_s = 1",
    ),
    wrong(
        "a step of rollouts",
        {"groups_per_step": 65536, "completions_per_group": 65536},
        "the rollouts of one step",
        "groups_per_step = 65536 x completions_per_group = 65536",
        "GB",
    ),
    wrong(
        "a microbatch",
        {
            "groups_per_step": 65536,
            "model": {"hidden_size": 1024, "intermediate_size": 4096},
            "trainer": {"microbatch_tokens": 2**31 - 1},
        },
        "a microbatch",
        "GB",
        "trainer.microbatch_tokens",
    ),
    wrong(
        "learned positions",
        {"model": {"family": "gpt2", "max_positions": 2**31 - 1}},
        "cannot be trained in this machine's memory",
        "parameters x 16 bytes",
        "model.max_positions",
    ),
    wrong("tasks", {**TASKS, "prompts": {**TASKS["prompts"], "num_train": 2**31 - 1}}, "the prompts", "x 1024 bytes"),
    refused("run recipe.toml --steps 1_000", "'--steps' is no integer", "got:     1_000", "digits 0-9"),
    refused("run recipe.toml --steps ١٢", "'--steps' is no integer", "digits 0-9"),
    refused("run recipe.toml --deadline-s 1_0.5", "--deadline-s", "is no number"),
    refused("run recipe.toml --steps " + "9" * 5000, "--steps", "5,000 characters"),
    refused("plan llama-3.1-8b --gpus 1_6", "'--gpus' is no integer", "got:     1_6"),
    refused("simulate run --seeds 1_0", "'--seeds' is no integer", "got:     1_0"),
    refused("eval model --num-samples 1_0", "'--num-samples' is no integer", "got:     1_0"),
    refused("launch --group trainer --nnodes 1_0", "'--nnodes' is no integer", "got:     1_0"),
    refused("eval model --recipe recipe.toml --num-samples 1000000000000", "the completions", "samples x", "GB"),
    refused("plan llama-3.1-8b --gpus 1000000000000", "--gpus is out of range", "1..65536"),
    refused("plan llama-3.1-8b --gpus 8 --groups-per-step 1000000000000", "--groups-per-step is out of range"),
    refused("plan llama-3.1-8b --gpus 8 --groups-per-step 65536 --completions-per-group 64", "more completions than"),
    refused("plan llama-3.1-8b --gpus 8 --max-staleness 1000000000", "--max-staleness is out of range"),
    refused("plan llama-3.1-8b --gpus 8 --rows 1000000000", "--rows is out of range"),
    refused("simulate run --seeds 1000000000", "a mean takes some simulations", "1..1000"),
    refused("run recipe.toml tldr_mini", "tldr_mini"),
    refused("launch quickstart --group trainer --controller h:1", "from the controller", "recipe with --group trainer"),
    refused("launch --group trainer --controller h:1 --steps 5", "from the controller", "steps with --group trainer"),
    refused("launch --group trainer --controller h:1 --out runs/a", "from the controller", "out with --group trainer"),
    wrong("nested groups", pattern("(" * 500 + "a" + ")" * 500), "pattern of reward", "nested too deep"),
    wrong("a long pattern", pattern("(a)" * 50_000), "too large to be compiled", "10,000 characters"),
    wrong("a copied pattern", pattern("(?:(?:a{1000}){1000}){1000}"), "too large to be compiled", "multiply to"),
    refused("run r.toml", "'r.toml' is not valid TOML", "too deep", prepare=text("r.toml", f"a = {nested(5000)}\n")),
    refused("run r.toml", "'r.toml' is not valid TOML", "digits", prepare=text("r.toml", f"steps = {'9' * 5000}\n")),
    refused("run r.toml", "'steps'", "allowed: <= ", prepare=text("r.toml", f"steps = {'9' * 4000}\n")),
    refused("run r.toml", "'r.toml' cannot be read", "bytes", prepare=text("r.toml", "#" * 5_000_000)),
    wrong("deep JSON", {}, "line 1 is not JSON", "too deep", prepare=rows(nested(100_000))),
    wrong("deep column", {}, "line 2 holds", "nested more than 64 deep", prepare=of_row(tag=json.loads(nested(80)))),
    wrong("long integer", {}, "line 1 is not JSON", "digits", prepare=rows('{"prompt": ' + "9" * 5000 + "}")),
    wrong("huge integer", {}, "line 2 holds", "more than 64 bits", prepare=of_row(tag=10**30)),
    wrong("broken prompt", {}, "line 2 holds", SURROGATE, prepare=of_row(prompt="a\ud800")),
    wrong("broken answer", {}, "line 2 holds", SURROGATE, prepare=of_row(answer="a\udc00b")),
    wrong("broken column", {}, "line 2 holds", SURROGATE, prepare=of_row(tag=["a\ud800"])),
    wrong("broken name of a column", {}, "line 2 holds", SURROGATE, prepare=of_row(**{"a\ud800": 1})),
    wrong(
        "long line",
        {},
        "data.jsonl, line 2 is too long",
        "40,000,0",
        "allowed: 16,777,216 bytes",
        prepare=rows(ROWS[0], json.dumps({"prompt": "x" * 40_000_000}), *ROWS[2:]),
    ),
    wrong("a path as a name", {"recipe": "../elsewhere"}, "'recipe'", "not a path"),
    wrong("a path of two lines", {"prompts": {"dataset": "a\nb.jsonl"}}, "'prompts.dataset'", "control character"),
    wrong("a long path", {"model": {"path": "x" * 5000}}, "'model.path'", "too long"),
    wrong("a long text", {"loss": {"name": "x" * 1_000_000}}, "unknown loss", "characters) ..."),
]

COMMANDS = [
    refused("rnu", "unknown command 'rnu'", "run, launch", "did you mean 'run'?"),
    refused("--steps 3", "unknown command '--steps'", "hint"),
    refused("run recipe.toml --max-stalness 0", "'--max-stalness'", "did you mean '--max-staleness'?"),
    refused("run recipe.toml --generator.temprature 0", "generator.temprature", "mean '--generator.temperature'?"),
    refused("run recipe.toml --num-generations 4", "flag '--num-generations'", "`--completions-per-group`"),
    refused("run recipe.toml --prompts.tasks x", "'--prompts.tasks'", "--out", "has no flag here", "recipe"),
    refused("simulate run --model.path x", "'--model.path'", "--beside", "has no flag here"),
    refused("plan --gpus-per-nod 3", "'--gpus-per-nod'", "--cluster", "did you mean '--gpus-per-node'?"),
    refused("run recipe.toml --steps", "the value of '--steps' is missing"),
    refused("run recipe.toml --steps many", "'--steps' is no integer", "got:     many", "digits"),
    refused("run recipe.toml --weight-update inflight", "--weight-update", "in_flight"),
    refused("run recipe.toml --steps 0", "'steps'", "> 0"),
    refused("run recipe.toml other.toml", "more arguments than the command takes", "other.toml"),
    refused("run recipe.toml steps=5", "more arguments", "steps=5", "`--steps 5`"),
    refused("run recipe.toml data.train_batch_size=8", "more arguments", "verl's", "`--groups-per-step`"),
    refused("run recipe.toml --loss.params.eps_low 0.1", "'loss.params' is a table: `--loss.params eps_low VALUE`"),
    refused(
        "run recipe.toml --loss.params {cap=3.0}",
        "'--loss.params' cannot be read",
        "{cap=3.0}",
        "`--loss.params cap VALUE`",
    ),
    refused("run recipe.toml --preset.x 1", "unknown flag '--preset.x'"),
    refused("run recipe.toml --foo 1", "unknown flag '--foo'", "--help lists them"),
    refused("run recipe.toml --trainer.optimizer.betas 0.9", "betas' is missing", "2 values"),
    refused("eval model --recipe recipe.toml --kl", "unknown flag '--kl'", "--kl.coef", "'kl' is a section"),
    Case(
        "a long word",
        ("unknown value of '--host'", "...", "process, inline"),
        arguments="run recipe.toml --host " + "x" * 9000,
    ),
    refused("recipes --task", "allowed: --tasks", "did you mean '--tasks'?"),
    refused("recipes all", "all"),
    refused("doctor --jsn", "did you mean '--json'?"),
]

KEY = "ab" * 32
LAUNCH = "launch recipe.toml --group controller"


LAUNCHING = [
    refused("launch recipe.toml", "launch does one thing", "--group NAME"),
    refused(LAUNCH, "needs a key", "--key-file", "SLIPSTREAM_RUN_KEY"),
    refused(f"{LAUNCH} --listen here", "not an address to listen at", "here", "HOST:PORT"),
    refused(f"{LAUNCH} --listen 127.0.0.1:99999 --key-file k", "not an address", "99999"),
    refused(f"{LAUNCH} --listen 0.0.0.0:0 --key-file k", "an address that the groups can reach", "0.0.0.0"),
    refused(f"{LAUNCH} --listen no.such.host.invalid:0 --key-file k", "no such host", "no.such.host.invalid"),
    refused(f"{LAUNCH} --listen 192.0.2.1:0 --key-file k", "cannot listen there", "192.0.2.1"),
    refused(f"{LAUNCH} --listen 127.0.0.1:PORT --key-file k", "cannot listen there", "in use", "free port"),
    refused(f"{LAUNCH} --key-file nowhere/k", "'nowhere/k' cannot be written", "No such file"),
    refused(f"{LAUNCH} --key-file k", "not a private file", "0644", "chmod 600", prepare=text("k", KEY)),
    refused(f"{LAUNCH} --key-file k", "malformed", "8 characters", "64 hex", prepare=text("k", "ab" * 4, 0o600)),
    refused(f"{LAUNCH} --key-file k", "malformed", prepare=text("k", "xy" * 32, 0o600)),
    refused(f"{LAUNCH} --key-file k", "'k'", prepare=folder_named("k")),
    refused(LAUNCH, "$SLIPSTREAM_RUN_KEY is malformed", "64 hex", SLIPSTREAM_RUN_KEY="secret"),
    refused(
        f"{LAUNCH} --key-file k --remote rewards", "no such group could join", "rewards", prepare=text("k", KEY, 0o600)
    ),
    refused(f"{LAUNCH} --key-file k --address-file nowhere/a", "nowhere", prepare=text("k", KEY, 0o600)),
    refused(f"{LAUNCH} --key-file k --steps 0", "'steps'", prepare=text("k", KEY, 0o600)),
    refused("launch --group trainer", "joins a controller", "--controller HOST:PORT"),
    refused("launch --group trainer --controller 127.0.0.1:1", "needs a key"),
    refused("launch --group trainer --controller 127.0.0.1:1 --key-file k", "'k' cannot be read"),
    refused("launch --group trainer --remote reference", "the controller is told", "--remote with --group trainer"),
    refused(
        "launch --group trainer --controller data.jsonl --key-file k",
        "not the address of a controller",
        prepare=text("k", KEY, 0o600),
    ),
    refused(
        "launch --group trainer --controller 127.0.0.1:1 --key-file k --address no.such.host.invalid",
        "no such host",
        prepare=text("k", KEY, 0o600),
    ),
    refused(
        "launch --group trainer --controller 127.0.0.1:1 --key-file k --nnodes 0",
        "--nnodes",
        prepare=text("k", KEY, 0o600),
    ),
    refused(
        "launch --group trainer --controller 127.0.0.1:1 --key-file k --nnodes 2",
        "meet at a rendezvous",
        prepare=text("k", KEY, 0o600),
    ),
    refused("launch recipe.toml --slurm model", "a folder of their own", "new or empty"),
    refused("launch recipe.toml --slurm jobs --partition two words", "words"),
    refused("launch recipe.toml --slurm jobs --gpus-per-node 0", "room for a rank", "at least 1"),
    refused("launch recipe.toml --kubernetes jobs", "an image is needed", "--image"),
    refused("launch recipe.toml --kubernetes Jobs_ --image x/y:z", "Kubernetes takes", "lower-case"),
    refused("launch recipe.toml --kubernetes jobs --image x/y:z --out out", "volume claim", "leave --out"),
]

ALL = {
    "files": FILES,
    "fields": FIELDS,
    "ranges": RANGES,
    "conflicts": CONFLICTS,
    "losses and rewards": LOSSES_AND_REWARDS,
    "checkpoints": CHECKPOINTS,
    "data": DATA,
    "runs": RUNS,
    "absurd": ABSURD,
    "commands": COMMANDS,
    "launching": LAUNCHING,
}
CASES = [pytest.param(case, id=f"{kind}: {case.name}") for kind, cases in ALL.items() for case in cases]
RECIPES = [p for p in CASES if p.values[0].arguments == "run recipe.toml"]


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in `model`, and a run of BASE in `run` that was killed behind its first step."""
    shelf = tmp_path_factory.mktemp("shelf")
    config = resolve(BASE)
    policy, tokenizer = build_policy(config.model, seed=0)
    save_model(policy, shelf / "model", tokenizer)
    optimizer = AdamW(FlatParameters(policy), OptimizerConfig(), total_updates=2)
    snapshot = msgspec.to_builtins(schedule_for(config).snapshot())
    extra = {"schedule": snapshot, "num_events": 0}
    (shelf / "run").mkdir()
    with closing(Checkpoints()) as checkpoints:
        checkpoints.save(shelf / "run" / "checkpoints" / "step_1", {"policy": (policy, optimizer)}, step=1, extra=extra)
    for name in ("ledger.jsonl", "events.jsonl", "metrics.jsonl", "rollouts.jsonl"):
        (shelf / "run" / name).touch()
    save_config(config, shelf / "run" / "config.toml")
    return shelf


def filled(folder: Path, shelf: Path) -> Path:
    """Return `folder` with a dataset, and what is on the shelf."""
    shutil.copytree(shelf, folder, dirs_exist_ok=True)
    rows(*ROWS)(folder)
    return folder


def work_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("SLIPSTREAM_RUN_KEY", raising=False)
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    return folder


@pytest.fixture
def place(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    return work_in(filled(tmp_path, shelf), monkeypatch)


@pytest.fixture(scope="module")
def common() -> list[Path]:
    """The folder of the cases that prepare nothing in it, while it is as it was: only a test that fails keeps it."""
    return []


@pytest.fixture
def place_of_case(case: Case, shelf: Path, common: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    is_shared = case.prepare is None and common
    return work_in(common.pop() if is_shared else filled(tmp_path, shelf), monkeypatch)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes, models with weights and the reading of weights raise Started."""
    FORKS.begin()  # as the checks of texts need it

    def refuse(what: str) -> Callable[..., NoReturn]:
        def started(*args: object, **kwargs: object) -> NoReturn:
            raise Started(what)

        return started

    for owner, name in (
        (multiprocessing.process.BaseProcess, "start"),
        (os, "fork"),
        (os, "posix_spawn"),
        (Nursery, "start"),
        (slipstream.models.safetensors_file, "safe_open"),
        (slipstream.trainer.checkpoint_boxes, "safe_open"),
        (slipstream.trainer.first_format, "load_file"),
    ):
        monkeypatch.setattr(owner, name, refuse(name))
    start = subprocess.Popen.__init__

    def start_a_check(self: Any, arguments: Any, *args: Any, **kwargs: Any) -> None:
        if not {TRIES_TEXT, CALLS_REWARDS, *IMPORTS} & set(arguments):  # gone when the check is done: `nothing_is_left`
            raise Started("a process")
        start(self, arguments, *args, **kwargs)

    build = Transformer.__init__

    def without_weights(self: Transformer, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if not all(parameter.is_meta for parameter in self.parameters()):
            raise Started("a model")

    monkeypatch.setattr(Transformer, "__init__", without_weights)
    monkeypatch.setattr(subprocess.Popen, "__init__", start_a_check)
    if (library := sys.modules.get("transformers.modeling_utils")) is not None:
        monkeypatch.setattr(library.PreTrainedModel, "__init__", refuse("a model of transformers"))


def prepared(case: Case, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "recipe.toml").write_text(tomli_w.dumps(over(BASE, case.tables)))
    if case.prepare is not None:
        case.prepare(place)
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)


def files_of(folder: Path) -> dict[str, str]:
    """A digest of everything in `folder`: contents, modes and times of change."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(root, name)
            about = os.lstat(path)
            content = Path(path).read_bytes() if os.path.isfile(path) else b""
            found[path] = f"{about.st_mode:o} {about.st_mtime_ns} {hashlib.sha256(content).hexdigest()}"
    return found


def outcome(argv: list[str]) -> int:
    try:
        return cli.main(argv)
    except SystemExit as left:
        return int(left.code or 0)


def check_screen(told: str) -> None:
    """One screen of a terminal, without a traceback."""
    assert "Traceback" not in told
    lines = told.splitlines()
    assert max(map(len, lines)) <= MAX_COLUMNS
    rows_on_screen = [row for line in lines for row in textwrap.wrap(line, 80) or [""]]
    assert len(rows_on_screen) <= MAX_LINES, told


def check_words(told: str, words: tuple[str, ...]) -> None:
    plain = " ".join(told.split())
    at = 0
    for word in words:
        found = plain.find(" ".join(word.split()), at)
        assert found >= 0, f"'{word}' is missing, or not in its place, in:\n{told}"
        at = found


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("case", CASES)
def test_bad_input(
    case: Case,
    place_of_case: Path,
    common: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = place_of_case
    prepared(case, place, monkeypatch)
    before = files_of(place)
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen(1)
        code = outcome(case.arguments.replace("PORT", str(occupied.getsockname()[1])).split())
    out, err = capsys.readouterr()
    assert code == 2, err
    assert not out
    check_screen(err)
    check_words(err, case.words)
    assert files_of(place) == before
    if case.prepare is None:
        common.append(place)


@pytest.mark.usefixtures("guarded", "own_nursery")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(*case.values, id=case.id, marks=[] if index % 10 == 0 else [pytest.mark.slow])
        for index, case in enumerate(RECIPES)
    ],
)
def test_python_says_the_same(
    case: Case, place_of_case: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = place_of_case
    prepared(case, place, monkeypatch)
    before = files_of(place)
    with pytest.raises(ConfigError) as caught:
        slipstream.run("recipe.toml")
    check_screen(str(caught.value))
    check_words(str(caught.value), case.words)
    out, err = capsys.readouterr()
    assert out == ""
    assert not [line for line in err.splitlines() if not re.fullmatch(r"starting .*|.+, \d+ s", line)], "but progress"
    assert files_of(place) == before


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    "tables",
    [
        {},
        CHECKPOINT,
        TASKS,
        {"stages": ["sft", "rl"]},
        {**CHECKPOINT, "prompts": {"chat": True, "max_prompt_tokens": 50}},
    ],
    ids=["fresh", "checkpoint", "tasks", "stages", "chat"],
)
def test_what_is_right_begins(tables: Mapping[str, Any], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors above are of what is wrong, not of what they have in common; and something does notice a beginning."""
    prepared(wrong("nothing", tables), place, monkeypatch)
    change_json("model/tokenizer_config.json", chat_template="{{ messages[-1].content }}")(place)
    with pytest.raises(Started):
        slipstream.run("recipe.toml", display=False)


@pytest.mark.usefixtures("guarded", "own_nursery")
def test_a_run_that_was_killed_goes_on(place: Path) -> None:
    with pytest.raises(Started):
        slipstream.run("ignored", resume="run", display=False)


class Columns(UserDict[str, list[str]]):
    """As a table of pandas: its length is that of its rows, and going through it gives the names of its columns."""

    def __init__(self) -> None:
        super().__init__({"prompt": ["a", "b"], "answer": ["c", "d"]})


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompts": ["one"]}, ("too few prompts", "at least 2")),
        ({"prompts": []}, ("too few prompts", "0")),
        ({"prompts": "data.jsonl"}, ("'prompts' is no list", "overrides={\"prompts.dataset\": 'data.jsonl'}")),
        ({"prompts": Path("data.jsonl")}, ("'prompts' is no list", "prompts.dataset")),
        ({"prompts": {"prompt": ["a", "b"], "answer": ["c", "d"]}}, ("'prompts' is no list", "dict", "a list of")),
        ({"prompts": (text for text in "ab")}, ("'prompts' is no list", "generator", "list(...)")),
        ({"prompts": Columns()}, ("'prompts' is no list", "Columns", "to_dict('records')")),
        ({"prompts": [1, 2]}, ("prompts[0] is no prompt", "int", "strings, of chats")),
        ({"prompts": ["a", [{"role": "user"}, "b"]]}, ("prompts[1] is no prompt", "list", "lists of messages")),
        ({"overrides": ["steps"]}, ("given as a table", "['steps']", '{"steps": 50')),
        ({"overrides": "steps=5"}, ("given as a table", "'steps=5'")),
        ({"prompts": [{"prompt": "a", "tag": object()}, "b"]}, ("prompts[0] holds a value that is not JSON", "object")),
        ({"prompts": [{"question": "a"}, {"question": "b"}]}, ("no column 'prompt'", "question")),
        ({"prompts": ["a", "b"]}, ("compares with an answer", "2 of 2")),
        ({"prompts": ["a", "b\ud800"]}, ("prompts[1] holds a value", "half of a surrogate pair")),
        ({"overrides": {"steps": 10**5000}}, ("'steps'", "4,300 digits")),
        ({"overrides": {"prompts": {"template": "\ud800"}}}, ("'prompts.template'", "half of a surrogate pair")),
        ({"overrides": {"prompts": {"template": "a\0"}}}, ("'prompts.template'", "a null character")),
        ({"overrides": {"max_stalness": 0}}, ("unknown field 'max_stalness'", "'max_staleness'")),
        ({"preset": "synch"}, ("unknown preset", "'sync'")),
    ],
)
def test_arguments_of_python(
    given: Mapping[str, Any], words: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(wrong("nothing", {}), place, monkeypatch)
    before = files_of(place)
    with pytest.raises(ConfigError) as caught:
        slipstream.run("recipe.toml", out="made/deep/run", **given)
    check_words(str(caught.value), words)
    assert files_of(place) == before


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: slipstream.run(3), "this is no recipe"),  # type: ignore[arg-type]
        (lambda: slipstream.run(["a"]), "['a']"),  # type: ignore[arg-type]
        (lambda: slipstream.resolve(None), "a name, a path, or tables"),  # type: ignore[arg-type]
        (lambda: slipstream.make_plan(Path("/nope"), gpus=4), "'/nope' is no model that is known"),
    ],
)
def test_what_python_takes_for_a_name(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    check_words(str(caught.value), (words,))


def test_a_folder_that_cannot_be_written_to(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount that is read-only; for root, modes forbid nothing."""
    (place / "locked").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", "locked"], capture_output=True, check=False)
    if mounted.returncode and os.geteuid():
        (place / "locked").chmod(0o500)
    elif mounted.returncode:
        pytest.skip("root without the right to mount: every folder can be written to")
    prepared(wrong("nothing", {}), place, monkeypatch)
    try:
        for out in ("locked", "locked/run"):
            with pytest.raises(ConfigError, match="cannot be made") as caught:
                slipstream.run("recipe.toml", out=out)
            check_words(str(caught.value), ("got", "allowed", "hint", "--out"))
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "locked"], check=True)


@pytest.mark.parametrize(
    ("arguments", "words", "is_light"),
    [
        pytest.param("run recipe.toml --max-stalness 0", ("--max-staleness",), True, marks=pytest.mark.slow),
        ("run recipe.toml --steps 0", ("'steps'", "> 0"), True),
        pytest.param(
            "run recipe.toml --prompts.dataset nowhere.jsonl",
            ("dataset not found", "nowhere.jsonl", "hint"),
            False,
            marks=pytest.mark.slow,  # `test_early_errors.py` has one as well
        ),
    ],
)
def test_the_executable(
    arguments: str, words: tuple[str, ...], is_light: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_light`: nothing that computes is imported. Models of transformers never are."""
    prepared(wrong("nothing", {}), place, monkeypatch)
    before = files_of(place)
    command = [sys.executable, "-X", "importtime", "-m", "slipstream.cli", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    told = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == 2
    assert not done.stdout
    check_screen("\n".join(told))
    check_words("\n".join(told), words)
    assert "transformers.modeling_utils" not in imported
    assert not (is_light and "torch" in imported)
    assert files_of(place) == before
