"""A small checkpoint, and a hundred things that may be wrong with it; each makes a folder that must be refused.

`MUTATIONS` are grouped by the file that they change. A mutation gets the folder; everything in there is its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mutation = Callable[[Path], None]

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}>"
NAN = float("nan")


def _edit(name: str, **changes: Any) -> Mutation:
    """Fields of a JSON file, by their names; `...` takes one away."""

    def mutate(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        content |= changes
        (folder / name).write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

    return mutate


def config(**changes: Any) -> Mutation:
    return _edit("config.json", **changes)


def tokenizer_config(**changes: Any) -> Mutation:
    return _edit("tokenizer_config.json", **changes)


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Mutation:
    """`change` alters the parsed tokenizer.json."""

    def mutate(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return mutate


def template(text: str) -> Mutation:
    return lambda folder: (folder / "chat_template.jinja").write_text(text) and None


def configured_template(value: Any) -> Mutation:
    """A template in tokenizer_config.json, which is read where there is no file of its own."""

    def mutate(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink()
        tokenizer_config(chat_template=value)(folder)

    return mutate


def content(name: str, data: bytes) -> Mutation:
    return lambda folder: (folder / name).write_bytes(data) and None


def replaced(name: str, by: Callable[[Path], object]) -> Mutation:
    """Another kind of file in the place of `name`."""

    def mutate(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        by(folder / name)

    return mutate


def huge(path: Path) -> None:
    """A sparse file of a terabyte."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def header(change: Callable[[dict[str, Any]], object]) -> Mutation:
    """`change` alters the header of the weights; their bytes stay."""

    def mutate(folder: Path) -> None:
        file = folder / "model.safetensors"
        stored = file.read_bytes()
        length = int.from_bytes(stored[:8], "little")
        tensors = json.loads(stored[8 : 8 + length])
        change(tensors)
        told = json.dumps(tensors).encode()
        file.write_bytes(len(told).to_bytes(8, "little") + told + stored[8 + length :])

    return mutate


def index(weight_map: Any) -> Mutation:
    def mutate(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return mutate


def twice(folder: Path) -> None:
    """The same tensors in two shards."""
    data = (folder / "model.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(data)
    index({"x": "a.safetensors", "y": "b.safetensors"})(folder)


def deep(opening: str, times: int = 100_000) -> bytes:
    return opening.encode() * times


def split_by(pattern: str) -> Mutation:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return tokenizer(lambda t: t.update(pre_tokenizer=split))


def doubling(tokens: dict[str, Any]) -> None:
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    tokens["normalizer"] = {"type": "Sequence", "normalizers": [replace] * 60}


NORM = "model.norm.weight"
FIRST = "model.embed_tokens.weight"

CONFIGS: dict[str, Mutation] = {
    f"{field} = {value!r}": config(**{field: value})
    for field, values in {
        "vocab_size": ("99", 99.5, None, [99], True, -1, 0, 10**9, 10**18, {}),
        "hidden_size": ("16", -16, 0, 10**18, None, 17),
        "intermediate_size": (0, 1e9, "x", 10**12),
        "num_hidden_layers": (0, -1, "1", 10**9, 10**18, None, 1.5, True),
        "num_attention_heads": (0, -2, 3, 10**9, []),
        "num_key_value_heads": (0, -1, 3, "2", 10**18),
        "head_dim": (0, -8, 7, "8", 10**18, [8]),
        "max_position_embeddings": (0, -1, "64", 10**9, 10**18, None, NAN),
        "rms_norm_eps": ("x", NAN, -1.0, None, 10**400),
        "rope_theta": ("x", 0, -1.0, NAN, 10**400),
        "rope_scaling": ("linear", 3, [], {"rope_type": 5}, {"rope_type": "llama3"}, {"rope_type": "dynamic"}),
        "rope_parameters": ({"rope_type": "llama3", "factor": 0}, {"rope_type": "yarn"}, {"rope_theta": "x"}),
        "sliding_window": (),
        "tie_word_embeddings": ("yes", None, 1),
        "eos_token_id": ("1", -5, 99, 10**18, 1.5, True, ["x"], [[1]], list(range(2000)), {}),
        "hidden_act": (None, 3, "mish", ["silu"], "x" * 10**6),
        "attention_bias": ("no", 1),
        "model_type": (None, [], "mamba", "x" * 10**6),
    }.items()
    for value in values
} | {
    "a window of text": config(model_type="mistral", sliding_window="8"),
    "a window of nothing": config(model_type="mistral", sliding_window=0),
    "a window below nothing": config(model_type="mistral", sliding_window=-1),
    "layers of qwen2": config(model_type="qwen2", num_hidden_layers=10**12),
    "labels without end": config(num_labels=10**10),
    "deep": content("config.json", deep('{"a":')),
    "deep lists": content("config.json", deep("[")),
    "integers of many digits": content("config.json", b'{"model_type": "llama", "vocab_size": ' + b"9" * 10**5 + b"}"),
    "no UTF-8": content("config.json", b"\xff\xfe{}"),
    "a list": content("config.json", b"[]"),
    "nothing": content("config.json", b""),
    "a device": replaced("config.json", zeros),
    "a pipe": replaced("config.json", os.mkfifo),
    "a folder": replaced("config.json", Path.mkdir),
    "a terabyte": replaced("config.json", huge),
    "generation is a device": replaced("generation_config.json", zeros),
    "generation is a pipe": replaced("generation_config.json", os.mkfifo),
    "generation is a list": content("generation_config.json", b"[]"),
    "generation is deep": content("generation_config.json", deep("[")),
    "generation ends outside": _edit("generation_config.json", eos_token_id=[1, 10**9]),
    "generation ends with text": _edit("generation_config.json", eos_token_id="<eos>"),
}  # fmt: skip

WEIGHTS: dict[str, Mutation] = {
    "a device": replaced("model.safetensors", zeros),
    "a pipe": replaced("model.safetensors", os.mkfifo),
    "a folder": replaced("model.safetensors", Path.mkdir),
    "a terabyte of zeros": replaced("model.safetensors", huge),
    "metadata of numbers": header(lambda t: t.update(__metadata__={"format": 3})),
    "metadata is a list": header(lambda t: t.update(__metadata__=[1])),
    "metadata is text": header(lambda t: t.update(__metadata__="pt")),
    "shape of text": header(lambda t: t[NORM].update(shape="16")),
    "shape below nothing": header(lambda t: t[NORM].update(shape=[-16])),
    "enormous shape": header(lambda t: t[NORM].update(shape=[10**18, 10**18])),
    "a million dimensions": header(lambda t: t[NORM].update(shape=[1] * 10**6)),
    "half the shape": header(lambda t: t[NORM].update(shape=[8])),
    "precision of nobody": header(lambda t: t[NORM].update(dtype="Q9")),
    "precision is a number": header(lambda t: t[NORM].update(dtype=32)),
    "integers": header(lambda t: t[NORM].update(dtype="I32")),
    "overlapping": header(lambda t: t[NORM].update(data_offsets=t[FIRST]["data_offsets"])),
    "a gap": header(lambda t: t[NORM].update(data_offsets=[n + 4 for n in t[NORM]["data_offsets"]])),
    "backwards": header(lambda t: t[NORM].update(data_offsets=t[NORM]["data_offsets"][::-1])),
    "offsets below nothing": header(lambda t: t[NORM].update(data_offsets=[-64, 0])),
    "offsets of text": header(lambda t: t[NORM].update(data_offsets=["0", "64"])),
    "three offsets": header(lambda t: t[NORM].update(data_offsets=[0, 64, 128])),
    "no offsets": header(lambda t: t[NORM].pop("data_offsets")),
    "an entry is a list": header(lambda t: t.update({NORM: []})),
    "no tensors": header(lambda t: t.clear()),
    "deep": content("model.safetensors", (10**5).to_bytes(8, "little") + deep("[")),
    "header longer than the file": content("model.safetensors", (2**62).to_bytes(8, "little") + b"{}"),
    "index outside": index({NORM: "../a.safetensors"}),
    "index to the root": index({NORM: "/etc/passwd"}),
    "index of a NUL": index({NORM: "a\0.safetensors"}),
    "index of a long name": index({NORM: "x" * 10**5 + ".safetensors"}),
    "index of numbers": index({NORM: 3}),
    "index of lists": index({NORM: ["a.safetensors"]}),
    "index is a list": index([]),
    "index without tensors": index({}),
    "tensors twice": twice,
}

TOKENIZERS: dict[str, Mutation] = {
    "a device": replaced("tokenizer.json", zeros),
    "a pipe": replaced("tokenizer.json", os.mkfifo),
    "a terabyte": replaced("tokenizer.json", huge),
    "its config is a device": replaced("tokenizer_config.json", zeros),
    "its config is a list": content("tokenizer_config.json", b"[]"),
    "its config is deep": content("tokenizer_config.json", deep("[")),
    "its template is a pipe": replaced("chat_template.jinja", os.mkfifo),
    "special tokens are a device": replaced("special_tokens_map.json", zeros),
    "deep": content("tokenizer.json", deep('{"a":')),
    "a list": content("tokenizer.json", b"[]"),
    "no model": tokenizer(lambda t: t.pop("model")),
    "model of nobody": tokenizer(lambda t: t["model"].update(type="Magic")),
    "ids below nothing": tokenizer(lambda t: t["model"]["vocab"].update({"z": -1})),
    "ids of text": tokenizer(lambda t: t["model"]["vocab"].update({"z": "7"})),
    "enormous ids": tokenizer(lambda t: t["model"]["vocab"].update({"z": 10**18})),
    "ids beyond the model": tokenizer(lambda t: t["model"]["vocab"].update({"z": 4_000_000_000})),
    "added ids below nothing": tokenizer(lambda t: t["added_tokens"][0].update(id=-1)),
    "added ids of text": tokenizer(lambda t: t["added_tokens"][0].update(id="0")),
    "added tokens are text": tokenizer(lambda t: t.update(added_tokens="x")),
    "pattern that is none": split_by("(((("),
    "pattern that backtracks": split_by(r"^(([a-z ])+.)+[A-Z]([a-z])+\d{40}$"),
    "normaliser that doubles": tokenizer(doubling),
    "class is a number": tokenizer_config(tokenizer_class=3),
    "class is a list": tokenizer_config(tokenizer_class=["x"]),
    "class is a model": tokenizer_config(tokenizer_class="AutoModelForCausalLM"),
    "class is a function": tokenizer_config(tokenizer_class="pipeline"),
    "a template is a number": configured_template({"default": 3}),
    "end is a list": tokenizer_config(eos_token=[1]),
    "end is a number": tokenizer_config(eos_token=3),
    "added decoder of text": tokenizer_config(added_tokens_decoder={"x": {"content": "y"}}),
    "added decoder is a list": tokenizer_config(added_tokens_decoder=[1]),
}

CHATS: dict[str, Mutation] = {
    "endless range": template("{% for i in range(10**12) %}x{% endfor %}"),
    "nested loops": template(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}x"
    ),
    "recursion": template("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"),
    "a bomb": template("{{ 'a' * 10**10 }}"),
    "a bomb of lists": template("{% set x = [0] * 10**10 %}{{ x }}"),
    "a bomb of powers": template("{{ 9 ** 9 ** 9 }}"),
    "doubling": template(
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}"
    ),
    "huge text": template("{% for i in range(99999) %}{{ 'a' * 10000 }}{% endfor %}"),
    "padding": template("{{ '%1000000000000d' % 1 }}"),
    "format": template("{{ '{:>99999999999}'.format(1) }}"),
    "filter": template("{{ 'x' | center(99999999999) }}"),
    "include": template("{% include 'tokenizer_config.json' %}"),
    "import": template("{% import 'os' as os %}{{ os.system('touch ran') }}"),
    "extends": template("{% extends '/etc/passwd' %}"),
    "escape by a class": template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "escape by a filter": template("{{ (messages | attr('__class__')).__base__.__subclasses__() }}"),
    "escape by globals": template("{{ raise_exception.__globals__['os'].system('touch ran') }}"),
    "escape by self": template("{{ self.__init__.__globals__.__builtins__.open('ran', 'w') }}"),
    "escape by format": template("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}{{ 1 / 0 }}"),
    "change of messages": template("{{ messages.append(1) }}"),
    "no template": template("{% for"),
    "deep template": template("{{ " + "(" * 10**5 + "1" + ")" * 10**5 + " }}"),
    "deep blocks": template("{% if 1 %}" * 2000 + "x" + "{% endif %}" * 2000),
    "division": template("{{ 1 // 0 }}"),
    "wrong types": template("{{ messages + 1 }}"),
    "no such key": template("{{ messages[99].content.x.y }}"),
    "all templates but the default": configured_template([{"name": "tools", "template": "x"}]),
    "template is a number": configured_template(7),
}

MUTATIONS: dict[str, dict[str, Mutation]] = {
    "config": CONFIGS,
    "weights": WEIGHTS,
    "tokenizer": TOKENIZERS,
    "chat": CHATS,
}
