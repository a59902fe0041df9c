"""The inputs of the fuzz: recipes, flags, data sets, checkpoints and runs to resume, each a small change of what works.

An input follows from its seed and index, and from the run that is changed, which no two machines time alike: the folder
that it was made in is the reproduction.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import hostile
import tomli_w
from pydantic import BaseModel

from slipstream.core.config import RunConfig

BASE: dict[str, Any] = {
    "steps": 1,
    "groups_per_step": 2,
    "completions_per_group": 2,
    "host": "inline",
    "deadline_s": 40.0,
    "model": {
        "family": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "max_positions": 64,
    },
    "prompts": {"dataset": "data.jsonl", "num_eval": 2, "max_prompt_tokens": 32},
    "generator": {"max_new_tokens": 4, "num_slots": 8},
    "rewards": {"terms": [{"function": "exact_match"}], "num_workers": 1},
    "loss": {"skip_no_signal": False},
    "eval": {"num_prompts": 2},
    "observe": {"tokens_every": 1},
}
ROWS = [{"prompt": f"word {i}", "answer": f"drow {i}"} for i in range(24)]


@dataclass(frozen=True)
class Input:
    """`arguments` of `slipstream`, in the folder it was made in; `did`: the change, in words."""

    kind: str
    arguments: tuple[str, ...]
    did: str


def write_base(folder: Path, **changes: Any) -> None:
    (folder / "recipe.toml").write_text(tomli_w.dumps(BASE | changes))
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def make_input(seed: int, index: int, shelf: Path, folder: Path) -> Input:
    """Input `index` of those of `seed`; `shelf` has a checkpoint in `model` and a run of two steps in `run`."""
    rng = Random(f"{seed}/{index}")
    folder.mkdir(parents=True)
    write_base(folder)
    return KINDS[kind_of(index)](rng, shelf, folder)


def kind_of(index: int) -> str:
    """The kinds take turns."""
    return list(KINDS)[index % len(KINDS)]


def fields(model: type[BaseModel], within: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every field of the configuration: its path, and its type."""
    for name, field in model.model_fields.items():
        if name == "trackers":  # services of others
            continue
        yield (*within, name), field.annotation
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, (*within, name))


def words_of(annotation: Any) -> list[Any]:
    """The words that a field of this type may be."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    is_either = get_origin(annotation) in (Union, UnionType)
    return [word for one in get_args(annotation) for word in words_of(one)] if is_either else []


FIELDS = list(fields(RunConfig))


def a_value(annotation: Any, rng: Random) -> Any:
    """One that may be right, or anything."""
    words = words_of(annotation)
    if words and rng.random() < 0.5:
        return rng.choice(words)
    if rng.random() < 0.4:
        return rng.choice([1, 2, 3, 5, 8, 0.5, 1.0, True, "model", "data.jsonl", "stage:sft", ["sft", "rl"]])
    return hostile.value(rng)


def dumped(tables: dict[str, Any]) -> bytes:
    return tomli_w.dumps(tables).encode("utf-8", "surrogatepass")


def a_recipe(rng: Random, shelf: Path, folder: Path) -> Input:
    """Fields set to what they should not be, or text that is hardly TOML, or no file."""
    path = folder / "recipe.toml"
    run = ("run", "recipe.toml", "--out", "out")
    kind = rng.random()
    if kind < 0.05:
        return Input("recipe", run, hostile.no_file(path, rng))
    if kind < 0.2:
        data, done = hostile.broken_bytes(path.read_bytes(), rng)
        path.write_bytes(data)
        return Input("recipe", run, done)
    tables = json.loads(json.dumps(BASE))
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if rng.random() < 0.25:
            done.append(hostile.mutate(tables, rng, null=False))
            continue
        where, annotation = rng.choice(FIELDS)
        table = tables
        for name in where[:-1]:
            table = table.setdefault(name, {}) if isinstance(table, dict) else {}
        if isinstance(table, dict):
            table[where[-1]] = a_value(annotation, rng)
            done.append(f"{'.'.join(where)} = {repr(table[where[-1]])[:80]}")
    if rng.random() < 0.1:
        shutil.copytree(shelf / "model", folder / "model")
    path.write_bytes(dumped(tables))
    return Input("recipe", run, "; ".join(done))


COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "run": (("recipe.toml", "--out", "out"), ("recipe.toml",), ("--resume", "run")),
    "eval": (("model", "--recipe", "recipe.toml"), ("run",)),
    "report": (("run",),),
    "export": (("run", "out"), ("model", "out", "--merged")),
    "replay": (("run",),),
    "simulate": (("run",),),
    "plan": (("model", "--gpus", "2", "--gpu", "h100"), ("recipe.toml",), ("llama-3.1-8b", "--gpus", "4")),
    "launch": (("recipe.toml", "--slurm", "jobs"), ("recipe.toml", "--kubernetes", "jobs", "--image", "x/y:z")),
    "recipes": (("--tasks",), ()),
}
OTHER_FLAGS = [
    "--out",
    "--resume",
    "--preset",
    "--recipe",
    "--num-prompts",
    "--num-samples",
    "--gpus",
    "--gpu",
    "--network",
    "--cluster",
    "--price",
    "--measured",
    "--json",
    "--seeds",
    "--slots",
    "--generators",
    "--reward-s",
    "--beside",
    "--events",
    "--slurm",
    "--kubernetes",
    "--time",
    "--partition",
    "--nnodes",
    "--node-rank",
    "--threads",
    "--help",
    "--steps",
    "--seed",
    "--max-staleness",
    "-h",
    "--",
    "-x",
    "--no-such-flag",
    "--stepz",
]


def flags(rng: Random, shelf: Path, folder: Path) -> Input:
    """A command line with flags that it lacks, twice, without a value, or with one of another kind."""
    for name in ("model", "run"):
        shutil.copytree(shelf / name, folder / name)
    command = rng.choice([*COMMANDS, "run", "run", "eval", "plan"])
    given = list(rng.choice(COMMANDS[command]))
    for _ in range(rng.choice([1, 1, 2, 3])):
        kind = rng.random()
        value = hostile.value(rng)
        said = value if isinstance(value, str) else repr(value)
        if kind < 0.5:
            where, annotation = rng.choice(FIELDS)
            said = str(a_value(annotation, rng)) if rng.random() < 0.5 else said
            flag = "--" + ".".join(where).replace("_", "-")
            given += rng.choice([[flag, said], [f"{flag}={said}"], [flag], [flag, said, flag, said]])
        elif kind < 0.75:
            given += rng.choice([[rng.choice(OTHER_FLAGS), said], [rng.choice(OTHER_FLAGS)]])
        elif kind < 0.9:
            given.insert(rng.randrange(len(given) + 1), said)
        elif given:
            del given[rng.randrange(len(given))]
    if rng.random() < 0.03:
        command = str(rng.choice(hostile.TEXTS))
    words = tuple(word.encode("utf-8", "surrogatepass")[:20_000].decode("utf-8", "surrogateescape") for word in given)
    return Input("flags", (command, *words), " ".join(map(repr, words))[:300])


def a_data_set(rng: Random, shelf: Path, folder: Path) -> Input:
    """Lines that are no rows, rows that are no prompts, prompts that are no text, and files that are none."""
    if rng.random() < 0.02:
        with (folder / "data.jsonl").open("ab") as file:
            file.write(b'{"prompt": "' + b"x" * (64 << 20) + b'", "answer": "a"}\n')
        did = "a line of 64 MB"
    else:
        did = hostile.break_lines(folder / "data.jsonl", rng)
    return Input("data set", ("run", "recipe.toml", "--out", "out"), did)


CONFIG = {
    "model_type": ["gpt2", "mamba", "llama", "auto", "../x"],
    "architectures": [[], None, ["X"], "LlamaForCausalLM"],
    "vocab_size": [-1, 0, 1, 2**31, "100"],
    "hidden_size": [0, -16, 17, 2**40, "16"],
    "intermediate_size": [0, -1, 2**40],
    "num_hidden_layers": [0, -1, 2, 10**9, "1", True],
    "num_attention_heads": [0, 3, -2, 10**6],
    "num_key_value_heads": [0, 3, None, -2],
    "head_dim": [0, 1, 7, -8, 2**31, "8"],
    "max_position_embeddings": [0, -1, 1, 10**9, 2**63, "64"],
    "rope_theta": [0, -1.0, "x", float("nan"), 1e300],
    "rope_scaling": [{}, [], "linear", {"rope_type": "x"}, {"rope_type": "linear", "factor": 0}, {"type": 3}],
    "rope_parameters": [{}, [], {"rope_type": "yarn"}, {"rope_theta": "x"}, {"rope_type": None}],
    "sliding_window": [0, -1, "x", 1, 2**63],
    "eos_token_id": [-1, 10**9, [], ["a"], None, [None], 1.5, list(range(1000))],
    "bos_token_id": [-1, "x", 10**9],
    "rms_norm_eps": [0, -1, "x", float("nan")],
    "hidden_act": ["x", None, 3, "gelu"],
    "tie_word_embeddings": ["yes", None, 1],
    "torch_dtype": ["float16", "int7", 3],
    "dtype": ["float16", "int7", 3],
    "auto_map": [{"AutoConfig": "evil.Evil", "AutoTokenizer": "evil.Evil"}],
    "quantization_config": [{}, {"quant_method": "gptq"}, []],
    "layer_types": [[], ["x"], "full_attention"],
}
TEMPLATES = [
    "{% for i in range(1000000000) %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
    "{{ 'x' * 10000000000 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('no') }}",
    "{{ messages[7].content }}",
    "{% if %}",
    "{{ 1 / 0 }}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
    "{% set x = namespace(a=[1]) %}{% for i in range(60) %}{% set x.a = x.a + x.a %}{% endfor %}",
    "{% include 'x' %}",
    "",
    "{{ messages }}",
    "{" * 10_000,
    "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
    "{{ '%1000000000d' | format(1) }}",
    "\ud800",
    ["x"],
    {"default": 3},
    [{"name": "default", "template": "{{ messages[0].content }}"}, {"name": "x"}],
]
TOKENIZER = {
    "tokenizer_class": ["X", None, 3, "GPT2Tokenizer", "BertTokenizer", "LlamaTokenizerFast", "../evil"],
    "chat_template": TEMPLATES,
    "eos_token": [None, 3, "nothing", {"content": 3}, ["a"], {"__type": "AddedToken", "content": "e"}],
    "pad_token": [None, 3, "nothing", [], ""],
    "model_max_length": [0, -1, 1, 10**30, "x", float("inf")],
    "added_tokens_decoder": [{"-1": {"content": "x"}}, {"x": 3}, [], {"9999999999": {"content": "y"}}],
    "auto_map": [{"AutoTokenizer": ["evil.Evil", None]}],
    "extra_special_tokens": [["a"], {"x": 3}, 3],
    "clean_up_tokenization_spaces": ["x", None],
}
GENERATION = {
    "eos_token_id": CONFIG["eos_token_id"],
    "temperature": [-1, "x", 0, float("nan")],
    "max_length": [-1, 10**12, "x"],
    "pad_token_id": [-1, "x", 10**9],
    "transformers_version": [3, "x"],
}


def break_model(model: Path, rng: Random) -> str:
    """Change a file of a Hugging Face folder."""
    kind = rng.random()
    if kind < 0.3:
        return hostile.break_json(model / "config.json", rng, wanted=CONFIG)
    if kind < 0.5:
        return hostile.break_json(model / "tokenizer_config.json", rng, wanted=TOKENIZER)
    if kind < 0.65:
        return hostile.break_json(model / "tokenizer.json", rng)
    if kind < 0.75:
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
        return hostile.break_json(model / "generation_config.json", rng, wanted=GENERATION)
    if kind < 0.8:
        index = {"metadata": {}, "weight_map": rng.choice([{}, [], {"x": "../x"}, {"x": "model.safetensors"}])}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        did = hostile.break_json(model / "model.safetensors.index.json", rng)
        if rng.random() < 0.5:
            (model / "model.safetensors").unlink()
        return did
    if kind < 0.85:
        (model / "model.safetensors").rename(model / "pytorch_model.bin")
        return "weights called pytorch_model.bin"
    return hostile.break_safetensors(model / "model.safetensors", rng)


def a_checkpoint(rng: Random, shelf: Path, folder: Path) -> Input:
    """A changed Hugging Face folder: to train, in a chat perhaps, to evaluate, or to compare with."""
    model = folder / "model"
    shutil.copytree(shelf / "model", model)
    did = break_model(model, rng)
    is_chat = rng.random() < 0.5
    tables = json.loads(json.dumps(BASE))
    tables["model"] = {"path": "model"}
    if is_chat:
        tables["prompts"] |= {"chat": True}
        config = model / "tokenizer_config.json"
        if "chat_template" not in did and config.is_file() and not config.is_symlink():
            try:
                content = json.loads(config.read_text()[:100_000])
                content["chat_template"] = "{{ messages[-1].content }}"
                config.write_text(json.dumps(content))
            except (ValueError, TypeError, RecursionError):
                pass
    use = rng.random()
    if use < 0.15:
        tables["model"] = BASE["model"]
        tables["kl"] = {"coef": 0.1, "reference": "model"}
    (folder / "recipe.toml").write_bytes(dumped(tables))
    if 0.15 <= use < 0.4:
        return Input("checkpoint", ("eval", "model", "--recipe", "recipe.toml"), did)
    if 0.4 <= use < 0.45:
        return Input("checkpoint", ("plan", "model", "--gpus", "2", "--gpu", "h100"), did)
    return Input("checkpoint", ("run", "recipe.toml", "--out", "out"), did + (", in a chat" if is_chat else ""))


def a_run(rng: Random, shelf: Path, folder: Path) -> Input:
    """The folder of a run that was killed behind its first step, changed: to resume, and at times to read."""
    run = folder / "run"
    shutil.copytree(shelf / "run", run)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    first = [path for path in files if "step_1" in path.parts or path.parent == run]
    path = rng.choice(first if rng.random() < 0.85 else files)
    change: Callable[[Path, Random], str] = {
        ".json": hostile.break_json,
        ".jsonl": hostile.break_lines,
        ".safetensors": hostile.break_safetensors,
    }.get(path.suffix, break_text)
    did = f"{path.relative_to(run).parent}/{change(path, rng)}"
    reading = rng.random()
    commands = {"report": 0.1, "replay": 0.17, "simulate": 0.2, "eval": 0.25}
    command = next((name for name, below in commands.items() if reading < below), None)
    return Input("run", ("run", "--resume", "run") if command is None else (command, "run"), did)


def break_text(path: Path, rng: Random) -> str:
    if rng.random() < 0.2:
        return hostile.no_file(path, rng)
    data, did = hostile.broken_bytes(path.read_bytes(), rng)
    path.write_bytes(data)
    return f"{path.name} {did}"


KINDS: dict[str, Callable[[Random, Path, Path], Input]] = {
    "recipe": a_recipe,
    "flags": flags,
    "data set": a_data_set,
    "checkpoint": a_checkpoint,
    "run": a_run,
}
