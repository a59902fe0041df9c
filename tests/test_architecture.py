"""The architecture as a test: who may import whom, and what may not be in the library at all.

core < algorithms, jail, models, observe < nodes and edges < evals < controller < plan < stages
     < api, doctor, flags, jobs, launch < cli < __main__
"""

from __future__ import annotations

import ast
import gc
import graphlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "slipstream"
LOOP = ("prompts", "generator", "environments", "rewards", "batching", "trainer", "weight_sync")
LAYERS = (
    ("core",),
    ("algorithms", "jail", "models", "observe"),
    LOOP,
    ("evals",),
    ("controller",),
    ("plan",),
    ("stages",),
    ("api", "doctor", "flags", "jobs", "launch"),
    ("cli",),
    ("__main__",),
)
HEIGHT = {unit: height for height, layer in enumerate(LAYERS) for unit in layer}


@dataclass(frozen=True)
class Source:
    """A parsed file of the package; `unit` is its folder, or its name at the top."""

    path: Path
    tree: ast.Module

    @property
    def name(self) -> str:
        return str(self.path.relative_to(PACKAGE))

    @property
    def module(self) -> str:
        parts = self.path.relative_to(PACKAGE).with_suffix("").parts
        return ".".join(("slipstream", *(parts[:-1] if parts[-1] == "__init__" else parts)))

    @property
    def num_lines(self) -> int:
        return len(self.path.read_text(encoding="utf-8").splitlines())

    @property
    def unit(self) -> str:
        return self.path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def sources() -> list[Source]:
    gc.disable()  # it would look through a million nodes, again and again
    try:
        found = [Source(path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(PACKAGE.rglob("*.py"))]
        for source in found:
            nodes(source.tree)
    finally:
        gc.enable()
    return found


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """All of a file, gathered once."""
    return list(ast.walk(tree))


def imports(source: Source) -> Iterator[tuple[str, int]]:
    """Absolute names of imported modules with their lines, also inside functions; `from a import b` gives a and a.b."""
    parents = ["slipstream", *source.path.relative_to(PACKAGE).parts[:-1]]
    for node in nodes(source.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def imported_units(source: Source) -> Iterator[tuple[str, int]]:
    for module, line in imports(source):
        parts = module.split(".")
        if parts[0] == "slipstream" and len(parts) > 1 and parts[1] in HEIGHT:
            yield parts[1], line


def layer_violations(source: Source) -> list[str]:
    """What is wrong with the imports of one file, and what to do about it."""
    if source.unit == "__init__":  # re-exports the public names on first use
        return []
    found = []
    for unit, line in dict.fromkeys(imported_units(source)):
        where = f"{source.name}:{line}: {source.unit} imports {unit}"
        if unit == source.unit:
            continue
        if unit in LOOP and source.unit in LOOP:
            found.append(
                f"{where}. Nodes and edges never import each other: move what they share to core, or let "
                f"controller/build.py hand {source.unit} what it needs."
            )
        elif HEIGHT[unit] > HEIGHT[source.unit]:
            found.append(
                f"{where}, which lies above it. Move the shared part down to where both may see it, or pass it in "
                "from above as an argument."
            )
        elif HEIGHT[unit] == HEIGHT[source.unit]:
            found.append(f"{where}, its neighbour. Neighbours share through the layer below (core).")
    return found


def module_edges() -> dict[str, set[str]]:
    """The modules of the package that each of them imports, also inside functions, but not only for its types."""
    names = {source.module for source in sources()}
    edges: dict[str, set[str]] = {}
    for source in sources():
        typed = {
            line.lineno
            for node in nodes(source.tree)
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for line in node.body
        }
        found = {module for module, line in imports(source) if line not in typed}
        edges[source.module] = (found & names) - {source.module}
    return edges


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def calls_of(tree: ast.Module, name: str) -> list[int]:
    """Lines that call the builtin `name`."""
    return [
        node.lineno
        for node in nodes(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def test_every_folder_has_a_layer() -> None:
    units = {source.unit for source in sources()} - {"__init__", "__main__"}
    assert units <= HEIGHT.keys(), f"give {units - HEIGHT.keys()} a place in LAYERS, and in ARCHITECTURE.md"


def test_imports_point_downwards() -> None:
    violations = [violation for source in sources() for violation in layer_violations(source)]
    assert not violations, "\n" + "\n".join(violations)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """A CycleError names the circle: move what its modules share below both, or pass one to the other."""
    graphlib.TopologicalSorter(module_edges()).prepare()


MAX_LINES = 94_188
MAX_LINES_OF_SPINE = 1_610
MAX_LINES_OF_FUNCTION = 60
SPINE = (
    "core/types.py",
    "core/executor.py",
    "controller/schedule.py",
    "controller/controller.py",
    "generator/engine.py",
    "trainer/step.py",
)
MAX_LINES_OF_FOLDER = {
    "algorithms": 2_331,
    "batching": 445,
    "controller": 6_428,
    "core": 12_348,
    "environments": 8_260,
    "evals": 2_829,
    "generator": 10_063,
    "jail": 1_081,
    "jobs": 982,
    "models": 10_143,
    "observe": 10_195,
    "plan": 7_702,
    "prompts": 1_644,
    "rewards": 4_120,
    "stages": 3_014,
    "trainer": 6_630,
    "weight_sync": 3_738,
}
LONG_FUNCTIONS = dict.fromkeys(
    ("generator/paged_kernels.py", "generator/decode_kernels.py"), "a kernel is one function"
)


def test_the_package_keeps_to_its_budget_of_lines() -> None:
    """Raise a number here only together with the reason in the commit: lines are what the next reader pays."""
    lines = Counter[str]()
    for source in sources():
        lines[source.unit] += source.num_lines
    above = {unit: (lines[unit], most) for unit, most in MAX_LINES_OF_FOLDER.items() if lines[unit] > most}
    assert not above, f"(lines, allowed): {above}"
    assert lines.total() <= MAX_LINES


def test_the_spine_fits_four_screens() -> None:
    lines = {source.name: source.num_lines for source in sources() if source.name in SPINE}
    assert len(lines) == len(SPINE), "the spine moved: ARCHITECTURE.md names its files too"
    assert sum(lines.values()) <= MAX_LINES_OF_SPINE, lines


OPENINGS = {"What", "Of", "Who", "Whom", "Whoever", "Nobody", "Everybody"}


def test_docstrings_begin_with_a_verb_or_their_object() -> None:
    """Hold the openings that make a docstring a riddle without its name: `CONTRIBUTING.md`, English."""
    bad = [
        f"{source.name}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"
        for source in sources()
        for node in nodes(source.tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if (text := ast.get_docstring(node)) and text.split()[0].rstrip(",:") in OPENINGS
    ]
    assert not bad, "\n" + "\n".join(bad)


def test_a_class_name_has_one_meaning() -> None:
    names = Counter(node.name for source in sources() for node in nodes(source.tree) if isinstance(node, ast.ClassDef))
    assert not (twice := [name for name, count in names.items() if count > 1]), f"{twice}: each word one meaning"


def test_functions_fit_a_screen() -> None:
    long = [
        f"{source.name}:{function.lineno}: {function.name} has {length} lines"
        for source in sources()
        if source.name not in LONG_FUNCTIONS
        for function in functions(source.tree)
        if (length := (function.end_lineno or 0) - function.lineno + 1) > MAX_LINES_OF_FUNCTION
    ]
    assert not long, "\n" + "\n".join(long)


def test_nothing_is_pickled() -> None:
    bad = [
        f"{source.name}:{line}"
        for source in sources()
        for module, line in imports(source)
        if module.split(".")[0] in ("pickle", "cloudpickle", "dill", "shelve", "marshal")
    ]
    assert not bad, (
        f"{bad}: messages are msgspec structs (core/types.py), tensors safetensors: pickle runs what it reads"
    )


FORBIDDEN_ATTRIBUTES = {
    "torch.load": "it unpickles; safetensors",
    "torch.save": "it pickles; safetensors",
    "np.load": "it may unpickle; safetensors",
    "numpy.load": "it may unpickle; safetensors",
    "yaml.load": "it builds any object; yaml.safe_load",
    "yaml.full_load": "it builds any object; yaml.safe_load",
    "yaml.unsafe_load": "it builds any object; yaml.safe_load",
    "os.system": "a shell; subprocess with a list",
    "re.compile": "text of a model may meet it: `regex` with a timeout, or a place in PATTERNS_ON_BOUNDED_TEXT",
}
FORBIDDEN_NAMES = {
    "all_gather_object": "pickles of peers",
    "broadcast_object_list": "pickles of peers",
    "gather_object": "pickles of peers",
    "scatter_object_list": "pickles of peers",
    "send_object_list": "pickles of peers",
    "recv_object_list": "pickles of peers",
}
PATTERNS_ON_BOUNDED_TEXT = {
    "models/hub.py",  # linear ones, for names of the configuration, and commits that the hub tells
    "core/plain.py",  # linear ones, for paths and flags of the user
    "flags.py",  # for what is said of flags of the user
    "environments/forms.py",  # a linear one, for tags of thoughts
    "evals/judge.py",  # linear ones, see docs/rewards.md
    "observe/report/comparison.py",  # a linear one, for names of folders
    "observe/outlet.py",  # a linear one, for what a run itself has shown
    "observe/trackers.py",  # linear ones, for names and values of the configuration
}
RUNS_TEXT = {  # who may compile and run text, and why
    "core/user_code.py": "the user's own reward functions and environments",
    "rewards/jailed.py": "a model's program and its tests, in a jail",
}


def dotted_calls(source: Source) -> Iterator[tuple[str, ast.Call]]:
    for node in nodes(source.tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def untrusted_calls(source: Source) -> list[str]:
    """Calls that run what they read, with what to use instead."""
    found = []
    for name, call in dotted_calls(source):
        where = f"{source.name}:{call.lineno}: {name}"
        if name in FORBIDDEN_ATTRIBUTES and not (name == "re.compile" and source.name in PATTERNS_ON_BOUNDED_TEXT):
            found.append(f"{where}: {FORBIDDEN_ATTRIBUTES[name]}")
        if name.rpartition(".")[2] in FORBIDDEN_NAMES:
            found.append(f"{where}: {FORBIDDEN_NAMES[name.rpartition('.')[2]]}")
        if name == "exec" and source.name not in RUNS_TEXT:
            found.append(f"{where}: only {', '.join(RUNS_TEXT)}")
        for keyword in call.keywords:
            is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and not is_off:
                found.append(f"{where}({keyword.arg}=...)")
    return found


def test_nothing_runs_what_it_reads() -> None:
    found = [call for source in sources() for call in untrusted_calls(source)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.load('x', weights_only=False)",
        "dist.all_gather_object(a, b)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "np.fromfile(f); np.load(f, allow_pickle=True)",
        "exec(text)",
        "subprocess.run(command, shell=is_shell)",
    ],
)
def test_the_rules_about_untrusted_calls_bite(text: str) -> None:
    assert untrusted_calls(parsed("trainer", text))


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("eval", "the text may be a model's; parse it"),
        ("print", "use the rich console that the caller passes in, or record a metric"),
    ],
)
def test_calls_that_have_no_place_here(name: str, instead: str) -> None:
    bad = [f"{source.name}:{line}" for source in sources() for line in calls_of(source.tree, name)]
    assert not bad, f"{name}() at {bad}: {instead}"


def test_core_and_algorithms_know_no_framework_above_them() -> None:
    """Pure parts stay pure: no processes, sockets, files of models or displays in the maths and the schedule."""
    forbidden = {"transformers", "datasets", "rich", "zmq", "reasoning_gym"}
    schedule = {f"controller/{name}.py" for name in ("schedule", "policies", "waiting", "evaluations")}
    pure = [s for s in sources() if s.unit == "algorithms" or s.name in schedule | {"core/types.py", "core/run_log.py"}]
    bad = [
        f"{s.name}:{line} {module}" for s in pure for module, line in imports(s) if module.split(".")[0] in forbidden
    ]
    assert not bad, f"{bad}: pass in what is needed"


def parsed(unit: str, text: str) -> Source:
    return Source(PACKAGE / unit / "example.py", ast.parse(text))


@pytest.mark.parametrize(
    ("unit", "text", "lesson"),
    [
        ("core", "from slipstream.trainer.step import train", "lies above it"),
        ("trainer", "import slipstream.generator.engine", "Nodes and edges never import each other"),
        ("trainer", "from slipstream import generator", "Nodes and edges never import each other"),
        ("trainer", "def f():\n    from ..rewards import pool", "Nodes and edges never import each other"),
        ("observe", "from slipstream.models import hf", "its neighbour"),
        ("generator", "from slipstream import cli", "lies above it"),
    ],
)
def test_the_rules_bite(unit: str, text: str, lesson: str) -> None:
    [violation] = layer_violations(parsed(unit, text))
    assert lesson in violation


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        (
            "trainer",
            "from slipstream.observe.timeline import Timeline\nfrom slipstream.trainer import step\nimport torch",
        ),
        ("controller", "from slipstream.weight_sync import publisher"),
        ("algorithms", "from .losses import aipo"),
    ],
)
def test_what_is_allowed_passes(unit: str, text: str) -> None:
    assert layer_violations(parsed(unit, text)) == []


def test_the_files_that_begin_first_are_there(pytestconfig: pytest.Config) -> None:
    tests = Path(__file__).parent
    module = pytestconfig.pluginmanager.getplugin(str(tests / "conftest.py"))
    assert set(module.LONGEST.split()) <= {path.stem.removeprefix("test_") for path in tests.rglob("test_*.py")}
