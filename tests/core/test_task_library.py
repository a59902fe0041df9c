"""reasoning-gym is imported without matplotlib and, where that will do, in parts; what it makes stays the same."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from slipstream.core.task_library import reasoning_gym
library = reasoning_gym()
assert "matplotlib" not in sys.modules, "a second of imports"
later = [library.create_dataset(name, seed=3, size=1)[0] for name in ("game_of_life", "game_of_life_halting")]
import cellpylib  # the real one by now
assert cellpylib.init_random and "matplotlib" in sys.modules
print([(entry["question"], entry["answer"]) for entry in later])
"""
PLAIN = """
names = ("game_of_life", "game_of_life_halting")
for name in names:  # as `import cellpylib as cpl` has it where nothing is deferred
    game = sys.modules[f"reasoning_gym.algorithmic.{name}"]
    assert game.cpl is not cellpylib
    game.cpl = cellpylib
print([(e["question"], e["answer"]) for e in (library.create_dataset(n, seed=3, size=1)[0] for n in names)])
"""


def test_a_deferred_library_is_the_library_itself():
    """One process for both, and one import of the games, since what the libraries import takes seconds."""
    told = subprocess.check_output([sys.executable, "-c", SCRIPT + PLAIN], text=True)
    ours, plain = told.splitlines()
    assert ours == plain
    assert "game" in ours.lower()


PARTS = """
import sys
from slipstream.core import task_library
from slipstream.core.task_library import create_dataset
part = [create_dataset("chain_sum", seed=3, size=2)[index] for index in range(2)]
assert not {"sympy", "numpy", "reasoning_gym.algebra", "reasoning_gym.games"} & sys.modules.keys(), "a second"
import reasoning_gym  # as somebody else's code may
assert not hasattr(reasoning_gym, "__wrapped__") and "sympy" not in sys.modules, "asked of every module"
from reasoning_gym.arithmetic import ChainSumConfig, ChainSumDataset
whole = reasoning_gym.create_dataset("chain_sum", seed=3, size=2)
assert part == list(whole) == list(ChainSumDataset(ChainSumConfig(seed=3, size=2)))
assert type(whole) is ChainSumDataset and type(sys.modules["reasoning_gym.arithmetic"]) is type(sys)
assert len(reasoning_gym.factory.DATASETS) > 100 and reasoning_gym.__version__
assert task_library.reasoning_gym() is sys.modules["reasoning_gym"] is reasoning_gym, "one library for all"
assert {type(module) for name, module in sys.modules.items() if name.startswith("reasoning_gym")} == {type(sys)}
assert len(create_dataset("syllogism", seed=3, size=1)) == 1, "of a file with another name"
try:
    create_dataset("no_such", seed=3, size=1)
except ValueError as error:
    print(error)
"""


def test_a_part_of_the_library_is_the_librarys():
    told = subprocess.check_output([sys.executable, "-c", PARTS], text=True)
    assert told == "Dataset 'no_such' not registered\n"


EVERY = """
import json, random, sys
from slipstream.core import task_library
names = json.load(sys.stdin)
create = task_library.create_dataset if names else task_library.reasoning_gym().create_dataset
told = {}
for name in names or sorted(set(task_library.reasoning_gym().factory.DATASETS) - {"composite"}):
    random.seed(5)
    entry = create(name, seed=5, size=1)[0]
    told[name] = entry["question"], str(entry["answer"])
print("\\n" + json.dumps(told))  # some print as they go
"""


@pytest.mark.slow
def test_every_dataset_is_what_it_is_in_the_whole():
    """In a process that imports them one by one, the last first."""
    command, environment = [sys.executable, "-c", EVERY], os.environ | {"PYTHONHASHSEED": "0"}  # some go through sets

    def made(names: list[str]) -> dict[str, list[str]]:
        names_json = json.dumps(names)
        done = subprocess.run(command, input=names_json, env=environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    whole = made([])
    assert made(sorted(whole, reverse=True)) == whole


BEHIND = """
from slipstream.core import task_library
task_library.create_dataset("chain_sum", seed=3, size=1)
assert len(task_library.reasoning_gym().factory.DATASETS) > 100, "behind a part as well"
"""


def test_the_whole_library_comes_behind_a_part_of_it():
    subprocess.run([sys.executable, "-c", BEHIND], check=True)
