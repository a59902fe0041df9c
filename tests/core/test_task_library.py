"""reasoning-gym is imported without matplotlib, and its games of life are what they are with it."""

import subprocess
import sys

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
