"""Nothing in the package decodes what runs code when it is decoded: no pickles, and no collectives of objects."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import slipstream

SOURCE = Path(slipstream.__file__).parent
MODULES = (
    "pickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "multiprocessing",  # its queues, pipes and managers pickle
    "runpy",
    "shelve",
    "torch.distributed.checkpoint",  # its ranks send each other pickled plans
    "torch.distributed.rpc",
    "torch.multiprocessing",
    "xmlrpc",
)
CALLS = (
    "torch.load",
    "np.load",
    "numpy.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "pandas.read_pickle",
    "eval",
    "exec",
)
METHODS = (
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "broadcast_object_list",
    "send_object_list",
    "recv_object_list",
    "recv_pyobj",
    "send_pyobj",
    "init_rpc",
)
TEXTS = ("c10d", "--standalone")
"""torchrun's own rendezvous, which unpickles what is in a store that anybody may write to."""
ALLOWED = {
    ("core/lifeline.py", "runpy"): "a module of ours, named on the command line by `lifeline.command`",
    ("core/user_code.py", "exec"): "the user's own functions and classes, from the run's configuration",
    ("rewards/jailed.py", "exec"): "a completion's program, in a process that may do nothing",
}


_WORDS = [set(re.findall(r"\w+", name)) for name in (*MODULES, *CALLS, *METHODS, *TEXTS)]


def may_have_some(source: str) -> bool:
    """Whether all words of one of the names are in the text: what has none need not be parsed, which takes seconds."""
    words = set(re.findall(r"\w+", source))
    return any(of_one <= words for of_one in _WORDS)


def found_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from filter(None, (_banned_module(alias.name) for alias in node.names))
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from filter(None, dict.fromkeys(_banned_module(name) for name in names))
            yield from (name for name in names if name in CALLS)
            yield from (alias.name for alias in node.names if alias.name in METHODS)
        elif isinstance(node, ast.Attribute) and node.attr in METHODS:
            yield node.attr
        elif isinstance(node, ast.Call) and _last_name(node.func) in _LAST_NAMES:
            if (name := ast.unparse(node.func)) in CALLS:
                yield name
        elif isinstance(node, ast.Constant) and node.value in TEXTS:
            yield str(node.value)


_LAST_NAMES = {name.rpartition(".")[2] for name in CALLS}


def _last_name(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def _banned_module(name: str) -> str | None:
    return next((banned for banned in MODULES if name == banned or name.startswith(f"{banned}.")), None)


def test_nothing_in_the_package_unpickles() -> None:
    found = {
        (str(path.relative_to(SOURCE)), what)
        for path in sorted(SOURCE.rglob("*.py"))
        if may_have_some(text := path.read_text())
        for what in found_in(text)
    }
    assert found == set(ALLOWED), (
        "what is read from outside must be JSON, msgpack or safetensors; or say why it is safe"
    )


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle as p", "pickle"),
        ("def f():\n    from pickle import loads", "pickle"),
        ("from torch.distributed import checkpoint", "torch.distributed.checkpoint"),
        ("from torch.distributed.checkpoint.state_dict_saver import save", "torch.distributed.checkpoint"),
        ("import multiprocessing.connection", "multiprocessing"),
        ("import torch\ntorch.load('x', weights_only=True)", "torch.load"),
        ("from torch import load", "torch.load"),
        ("import torch.distributed as d\nd.all_gather_object([], 1)", "all_gather_object"),
        ("from torch.distributed import broadcast_object_list as b", "broadcast_object_list"),
        ("socket.recv_pyobj()", "recv_pyobj"),
        ("import yaml\nyaml.load(text)", "yaml.load"),
        ("eval('1')", "eval"),
        ("command = ['--rdzv-backend', 'c10d']", "c10d"),
    ],
)
def test_what_would_unpickle_is_found(source: str, what: str) -> None:
    assert list(found_in(source)) == [what]
    assert may_have_some(source)


def test_what_only_sounds_like_it_is_not() -> None:
    assert not list(found_in("import json\njson.loads('')\nmodel.eval()\n'pickle'\nimport torch.distributed as dist"))
