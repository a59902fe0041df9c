"""Every policy loss learns, at staleness 0 and in flight at k = 2, with the settings of scripts/losses_learn.py.

The runs take twenty minutes together: `make test-slow`. What is not marked checks the table and its page.
"""

import os
import re
import runpy
from pathlib import Path

import pytest

from slipstream.algorithms.losses import LOSSES
from slipstream.core.recipes import resolve
from slipstream.trainer.loss_checks import check_loss

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "losses_learn.py"))
SETTINGS, PRESETS, SEEDS, LEAST_GAIN = (SCRIPT[name] for name in ("SETTINGS", "PRESETS", "SEEDS", "LEAST_GAIN"))
PAGE = (ROOT / "docs" / "losses_learn.md").read_text(encoding="utf-8")


def between_markers(name: str) -> list[str]:
    return PAGE.split(f"<!-- {name} -->\n")[1].split("<!-- end -->")[0].splitlines()


@pytest.fixture
def one_core():
    """Inline executors take turns; a second thread would only wait for the first. Workers of pytest-xdist each have
    another core, as far as there are as many."""
    cores = os.sched_getaffinity(0)
    place = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[place % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("loss", SETTINGS)
def test_sampled_accuracy_rises_over_the_warm_start(loss, preset, seed, tmp_path):
    row = SCRIPT["learn"](loss, preset, seed, tmp_path / "run")
    assert row.gain >= LEAST_GAIN, row
    assert (row.staleness > 0) == (preset == "continuous"), row


@pytest.mark.parametrize("loss", SETTINGS)
def test_the_settings_are_those_of_a_policy_loss(loss):
    config = resolve("quickstart", SCRIPT["overrides_of"](loss, "sync", 0))
    check_loss(config)
    assert config.loss.name == SETTINGS[loss].get("loss", {}).get("name", loss)


def test_every_policy_loss_has_settings():
    """But for `distill`, which learns from a teacher and not from the task's reward."""
    assert {name for name, loss in LOSSES.items() if loss.kind == "policy"} - {"distill"} <= SETTINGS.keys()


def test_the_page_has_these_settings():
    assert between_markers("settings") == SCRIPT["settings"]()


def test_the_page_has_a_result_for_every_loss_preset_and_seed():
    found = {}
    for line in between_markers("results")[2:]:
        loss, preset, *cells = (cell.strip(" `") for cell in line.split("|")[1:-1])
        found[loss, preset] = [tuple(map(float, re.findall(r"[\d.]+", cell))) for cell in cells[: len(SEEDS)]]
    assert found.keys() == {(loss, preset) for loss in SETTINGS for preset in PRESETS}
    assert all(after - before >= LEAST_GAIN for runs in found.values() for before, after in runs)
